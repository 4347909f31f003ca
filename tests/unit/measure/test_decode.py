from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.draft.eagle3 import DraftConfig, Eagle3Draft
from draftsmith.measure.acceptance import Cycle
from draftsmith.measure.decode import DraftProposer, Proposal, Verifier, decode_plain, decode_speculative, judge
from draftsmith.target.reply import Sampling
from draftsmith.target.sampling import probabilities

HIDDEN, VOCAB, LAYERS = 32, 64, (0, 1, 2)
PROMPTS = ([5, 9, 1, 33], [7], [60, 61, 62, 2, 8, 13, 21])
NEVER: frozenset[int] = frozenset()


def tiny_target(vocab: int = VOCAB, spread: float = 0.5) -> Any:
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=spread,  # wide enough for replies that wander instead of looping
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False).double()  # no near-ties for rounding to decide


def tiny_draft(vocab_ids: Sequence[int] = range(1, 49), vocab: int = VOCAB) -> Eagle3Draft:
    torch.manual_seed(12)
    draft = Eagle3Draft(
        DraftConfig(
            target_vocab_size=vocab,
            draft_vocab_size=len(vocab_ids),
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            max_position_embeddings=256,
            aux_layers=LAYERS,
            target_layers=4,
            target_model_type="llama",
        )
    )
    ids = torch.tensor(list(vocab_ids))
    draft.set_vocab(ids - torch.arange(len(ids)), torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True))
    return draft.eval().requires_grad_(False)


class Knowing:
    """Proposes a known reply's tokens: a perfect draft, or one that is wrong at every `slip`-th token."""

    def __init__(self, reply: Sequence[int], slip: int = 0) -> None:
        self.reply, self.slip, self.asked = list(reply), slip, []

    def begin(self) -> None:
        self.known = 0

    def propose(
        self, ids: Sequence[int], aux: Tensor, count: int, sampling: Sampling, generator: torch.Generator
    ) -> Proposal:
        assert aux.shape == (len(ids), 3 * HIDDEN)
        self.known = 1 if self.known == 0 else self.known + len(ids)
        self.asked.append(count)
        drafted = self.reply[self.known : self.known + count]
        drafted += [0] * (count - len(drafted))
        if self.slip:
            at = range(self.known, self.known + count)
            drafted = [(t + 1) % VOCAB if i % self.slip == 0 else t for i, t in zip(at, drafted, strict=True)]
        return Proposal(drafted, None)


@pytest.fixture(scope="module")
def target() -> Any:
    torch.set_num_threads(1)
    return tiny_target()


@pytest.fixture
def verifier(target: Any) -> Iterator[Verifier]:
    made = Verifier(target, LAYERS)
    yield made
    made.close()


def greedy(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens)


def reference(target: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy decoding without any cache."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_plain_decoder_gives_what_a_decoder_without_a_cache_gives(target: Any, prompt: list[int]) -> None:
    found = decode_plain(Verifier(target), prompt, greedy(40), NEVER)
    assert list(found.ids) == reference(target, prompt, 40)
    assert found.finish_reason == "length" and found.cycles == ()


@pytest.mark.parametrize("draft_tokens", [1, 3, 5])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_output_with_an_untrained_draft_is_the_target_s_own(
    verifier: Verifier, prompt: list[int], draft_tokens: int
) -> None:
    plain = decode_plain(verifier, prompt, greedy(50), NEVER)
    found = decode_speculative(verifier, DraftProposer(tiny_draft()), prompt, greedy(50), NEVER, draft_tokens)
    assert found.ids == plain.ids
    assert 1 + sum(cycle.emitted for cycle in found.cycles) == 50
    assert sum(cycle.accepted for cycle in found.cycles) < 25


@pytest.mark.parametrize("draft_tokens", [1, 4, 7])
def test_a_perfect_draft_is_accepted_whole(verifier: Verifier, draft_tokens: int) -> None:
    plain = decode_plain(verifier, PROMPTS[0], greedy(60), NEVER)
    found = decode_speculative(verifier, Knowing(plain.ids), PROMPTS[0], greedy(60), NEVER, draft_tokens)
    assert found.ids == plain.ids
    assert all(cycle.accepted == cycle.proposed for cycle in found.cycles)
    assert len(found.cycles) == -(-59 // (draft_tokens + 1))


@pytest.mark.parametrize("slip", [2, 3, 5])
def test_partial_acceptance_leaves_both_caches_true(verifier: Verifier, slip: int) -> None:
    plain = decode_plain(verifier, PROMPTS[2], greedy(60), NEVER)
    found = decode_speculative(verifier, Knowing(plain.ids, slip), PROMPTS[2], greedy(60), NEVER, 4)
    assert found.ids == plain.ids
    starts = [cycle.start for cycle in found.cycles]
    assert starts == [1 + sum(c.emitted for c in found.cycles[:i]) for i in range(len(starts))]


@pytest.mark.parametrize("where", range(1, 9))
def test_a_stop_id_inside_a_draft_ends_the_reply_there(verifier: Verifier, where: int) -> None:
    # P41: drafts behind the end are judged by the target but never emitted.
    plain = decode_plain(verifier, PROMPTS[0], greedy(40), NEVER)
    stop = frozenset({plain.ids[where]})
    expected = decode_plain(verifier, PROMPTS[0], greedy(40), stop)
    found = decode_speculative(verifier, Knowing(plain.ids), PROMPTS[0], greedy(40), stop, 4)
    assert found.ids == expected.ids
    assert found.ids[-1] in stop and found.finish_reason == expected.finish_reason == "stop"
    assert 1 + sum(cycle.emitted for cycle in found.cycles) == len(found.ids)


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_max_tokens_ends_the_reply_where_plain_decoding_ends_it(verifier: Verifier, max_tokens: int) -> None:
    plain = decode_plain(verifier, PROMPTS[0], greedy(20), NEVER)
    perfect = Knowing(plain.ids)
    found = decode_speculative(verifier, perfect, PROMPTS[0], greedy(max_tokens), NEVER, 4)
    assert found.ids == plain.ids[:max_tokens]
    assert found.finish_reason == "length"
    assert all(count >= 1 for count in perfect.asked)
    untrained = DraftProposer(tiny_draft())
    assert decode_speculative(verifier, untrained, PROMPTS[0], greedy(max_tokens), NEVER, 4).ids == found.ids


def test_a_last_token_is_not_drafted(verifier: Verifier) -> None:
    plain = decode_plain(verifier, PROMPTS[0], greedy(7), NEVER)
    found = decode_speculative(verifier, Knowing(plain.ids), PROMPTS[0], greedy(7), NEVER, 4)
    assert found.cycles == (Cycle(1, 4, 4, 5), Cycle(6, 0, 0, 1))


class Remembering(DraftProposer):
    """Keeps what it was given and what it proposed."""

    def begin(self) -> None:
        super().begin()
        self.ids: list[int] = []
        self.aux: list[Tensor] = []
        self.proposals: list[tuple[int, list[int], Tensor]] = []

    def propose(
        self, ids: Sequence[int], aux: Tensor, count: int, sampling: Sampling, generator: torch.Generator
    ) -> Proposal:
        self.ids += ids
        self.aux.append(aux.clone())
        found = super().propose(ids, aux, count, sampling, generator)
        self.proposals.append((len(self.ids), found.ids, self._cache.keys.clone()))
        return found


def test_the_draft_reads_the_target_s_true_states_of_every_accepted_token() -> None:
    target = tiny_target()
    draft, prompt = Remembering(tiny_draft().double()), PROMPTS[2]
    found = decode_speculative(Verifier(target, LAYERS), draft, prompt, greedy(30), NEVER, 3)
    whole = [*prompt, *found.ids]
    with torch.no_grad():
        states = target(torch.tensor([whole]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[i + 1][0] for i in LAYERS], dim=-1)
    rows = len(draft.ids)
    assert draft.ids == whole[1 : rows + 1]
    torch.testing.assert_close(torch.cat(draft.aux), expected[:rows], rtol=1e-9, atol=1e-9)
    for known, proposal, keys in draft.proposals:  # each chain again, from scratch
        fresh = DraftProposer(draft.draft)
        again = fresh.propose(whole[1 : known + 1], expected[:known], len(proposal), greedy(9), torch.Generator())
        assert again.ids == proposal
        torch.testing.assert_close(fresh._cache.keys, keys, rtol=1e-9, atol=1e-9)


def chi_square_p(observed: Counter[Any], expected: dict[Any, float], draws: int) -> float:
    """P of a chi-square at least this large; outcomes expected fewer than 5 times are pooled."""
    rare = sum(share for share in expected.values() if share * draws < 5)
    rare_seen = sum(observed[key] for key, share in expected.items() if share * draws < 5)
    pairs = [(observed[key], share * draws) for key, share in expected.items() if share * draws >= 5]
    pairs += [(rare_seen, rare * draws)] if rare * draws >= 1 else []
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in pairs)
    freedom = torch.tensor((len(pairs) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


RULES = {
    "temperature": Sampling(max_tokens=3, temperature=1.0),
    "cool": Sampling(max_tokens=3, temperature=0.6),
    "top-k": Sampling(max_tokens=3, temperature=1.2, top_k=3),
    "top-p": Sampling(max_tokens=3, temperature=1.0, top_p=0.8),
}


@pytest.mark.parametrize("rule", RULES)
def test_sampled_replies_are_distributed_as_the_target_s(rule: str) -> None:
    torch.set_num_threads(1)
    vocab, prompt, draws, sampling = 6, [1, 4, 2], 1500, RULES[rule]
    target = tiny_target(vocab, spread=0.4)
    verifier = Verifier(target, LAYERS)
    proposer = DraftProposer(tiny_draft([0, 1, 3, 5], vocab))  # half of the mass can never be drafted
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for ids, share in exact.items():
            with torch.no_grad():
                row = probabilities(target(torch.tensor([[*prompt, *ids]])).logits[0, -1], sampling)
            longer.update({(*ids, token): share * float(p) for token, p in enumerate(row) if p > 0})
        exact = longer
    seen: Counter[tuple[int, ...]] = Counter()
    accepted = proposed = 0
    for seed in range(draws):
        one = Sampling(
            max_tokens=3, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seed=seed
        )
        reply = decode_speculative(verifier, proposer, prompt, one, NEVER, 2)
        seen[reply.ids] += 1
        accepted += sum(cycle.accepted for cycle in reply.cycles)
        proposed += sum(cycle.proposed for cycle in reply.cycles)
    assert set(seen) <= set(exact)  # nothing that top-k or top-p excludes
    assert 0.1 < accepted / proposed < 0.9  # both branches of the rule were taken
    assert chi_square_p(seen, exact, draws) > 0.001


def test_the_rejection_rule_gives_the_target_s_distribution_for_any_draft() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0], [0.0, 1.0, 2.0, 0.5]])
    sampling = Sampling(max_tokens=9, temperature=1.0)
    wanted = probabilities(logits, sampling)
    proposed = torch.tensor([0.1, 0.6, 0.0, 0.3])
    first: Counter[Any] = Counter()
    second: Counter[Any] = Counter()
    for _ in range(6000):
        drafted = int(torch.multinomial(proposed, 1, generator=generator))
        accepted, own = judge(logits, Proposal([drafted], proposed[None]), sampling, generator)
        first[drafted if accepted else own] += 1
        if accepted:
            second[own] += 1
    assert chi_square_p(first, dict(enumerate(wanted[0].tolist())), 6000) > 0.001
    assert chi_square_p(second, dict(enumerate(wanted[1].tolist())), second.total()) > 0.001


def test_the_chi_square_test_can_fail() -> None:
    skewed = Counter({0: 700, 1: 300})
    assert chi_square_p(skewed, {0: 0.5, 1: 0.5}, 1000) < 1e-6


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(4, 16, generator=generator)
    sampling = Sampling(max_tokens=9, temperature=0.7, top_k=5)
    same = probabilities(logits, sampling)[:3]
    for _ in range(200):
        drafted = torch.multinomial(same, 1, generator=generator)[:, 0].tolist()
        accepted, own = judge(logits, Proposal(drafted, same), sampling, generator)
        assert accepted == 3
        assert own in logits[3].topk(5).indices.tolist()


def test_sampled_replies_depend_on_the_seed_alone(verifier: Verifier) -> None:
    def reply(seed: int) -> tuple[int, ...]:
        sampling = Sampling(max_tokens=20, temperature=1.0, seed=seed)
        return decode_speculative(verifier, DraftProposer(tiny_draft()), PROMPTS[0], sampling, NEVER, 3).ids

    assert reply(4) == reply(4)
    assert len({reply(seed) for seed in range(6)}) > 1
