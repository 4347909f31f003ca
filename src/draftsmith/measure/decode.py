"""A reference speculative decoder at batch 1, and the plain decoder it is compared with: one target code path for both.

A cycle: the proposer drafts up to k tokens; one target forward judges [last token + drafts]; the accepted ones and one
token of the target's own (the correction of the first rejected draft, or the bonus) are emitted; both caches are
cropped to what is true. Greedy decoding accepts a draft that is the target's argmax; sampled decoding follows the
rejection rule of Leviathan et al. (arXiv:2211.17192) and Chen et al. (arXiv:2302.01318), so outputs are distributed as
the target's own whatever the draft proposes. Nothing is emitted behind a stop id or past max_tokens.

Cost of a cycle: one target forward over k+1 tokens, one draft forward over the accepted rows (true aux states) and k-1
over single rows.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from draftsmith.draft.cache import DraftCache, extend
from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.measure.acceptance import Cycle
from draftsmith.target.kv import new_cache
from draftsmith.target.loading import text_config
from draftsmith.target.reply import Sampling
from draftsmith.target.sampling import draw, probabilities
from draftsmith.target.states import StateTap


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """One reply. Plain decoding has no cycles; a reply's first token, which prefill gives, belongs to none."""

    ids: tuple[int, ...]
    """Generated ids, stop id included."""
    finish_reason: Literal["stop", "length"]
    cycles: tuple[Cycle, ...]
    seconds: float
    """Wall time of the whole decode, prefill included."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens, as target ids."""

    ids: list[int]
    probabilities: Tensor | None
    """[len(ids), target vocabulary] float32: the distribution each was drawn from; None when greedy."""


class Proposer(Protocol):
    """Something that drafts. One reply at a time: `begin`, then `propose` once per cycle."""

    def begin(self) -> None:
        """A new reply starts."""

    def propose(
        self, ids: Sequence[int], aux: Tensor, count: int, sampling: Sampling, generator: torch.Generator
    ) -> Proposal:
        """Drafts `count` tokens.

        Args:
            ids: tokens that became true since the last call, shifted by one: token p+1 of each new row p.
            aux: [len(ids), 3H] aux states of token p of each new row.
            count: how many tokens to draft, at least 1.
            sampling: the rule to draw by.
            generator: randomness, on the target's device.
        """


class Verifier:
    """The target at batch 1: a cache that can be cropped, logits and (where asked for) aux states.

    Args:
        model: a transformers causal LM, as `target.loading.load_model` gives it.
        layers: aux layers, "output of layer i"; empty for plain decoding.
    """

    def __init__(self, model: Any, layers: Sequence[int] = ()) -> None:
        self.model = model
        self.device: torch.device = next(model.parameters()).device
        self._tap = StateTap(model, layers) if layers else None
        self._narrow = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.begin()

    def begin(self) -> None:
        """Forgets the last reply."""
        self._cache = new_cache(text_config(self.model))

    def forward(self, ids: Sequence[int], wanted: int) -> tuple[Tensor, Tensor | None]:
        """Runs the ids that follow the cached ones.

        Returns:
            Logits [wanted, V] of the last `wanted` positions, and aux states [len(ids), 3H] (None without layers).
        """
        inputs = torch.tensor([list(ids)], device=self.device)
        options = {"logits_to_keep": wanted} if self._narrow else {}
        output = self.model(inputs, past_key_values=self._cache, use_cache=True, **options)
        return output.logits[0, -wanted:], self._tap.aux()[0] if self._tap else None

    def crop(self, length: int) -> None:
        """Forgets every token past the first `length`."""
        self._cache.crop(length)

    def close(self) -> None:
        """Takes its hooks off the model."""
        if self._tap:
            self._tap.close()


class DraftProposer:
    """An EAGLE-3 draft as a proposer: a chain of `count` tokens, its true rows recomputed from the target's states."""

    def __init__(self, draft: Eagle3Draft) -> None:
        self.draft = draft
        self._target_ids = torch.arange(len(draft.d2t), device=draft.d2t.device) + draft.d2t
        self.begin()

    def begin(self) -> None:
        """A new reply starts."""
        self._cache = DraftCache(self.draft)
        self._true_rows = 0

    def propose(
        self, ids: Sequence[int], aux: Tensor, count: int, sampling: Sampling, generator: torch.Generator
    ) -> Proposal:
        """See `Proposer.propose`."""
        draft, cache = self.draft, self._cache
        cache.crop(self._true_rows)
        tokens = torch.tensor([list(ids)], device=aux.device)
        # The catch-up rows and the first proposal are one forward: the last true row predicts the first draft.
        output = extend(draft, cache, tokens, draft.fuse(aux[None].to(draft.fc.weight.dtype)), self._true_rows)
        self._true_rows += len(ids)
        chain: list[Tensor] = []
        distributions: list[Tensor] = []
        for step in range(count):
            last = output[:, -1:]
            logits = draft.logits(last)[0, 0]  # [draft vocabulary]
            if sampling.temperature == 0:
                drawn = logits.argmax()
            else:
                distributions.append(probabilities(logits, sampling))
                drawn = draw(distributions[-1], generator)
            chain.append(self._target_ids[drawn])
            if step + 1 < count:
                output = extend(draft, cache, chain[-1].reshape(1, 1), last, self._true_rows + step)
        found = torch.stack(chain).tolist()
        return Proposal(found, self._on_target(torch.stack(distributions)) if distributions else None)

    def _on_target(self, distributions: Tensor) -> Tensor:
        """[k, draft vocabulary] -> [k, target vocabulary]: nothing outside the draft vocabulary is ever proposed."""
        spread = distributions.new_zeros(len(distributions), len(self.draft.t2d))
        return spread.index_copy_(1, self._target_ids, distributions)


@torch.inference_mode()
def decode_plain(
    verifier: Verifier, prompt_ids: Sequence[int], sampling: Sampling, stop_ids: frozenset[int]
) -> Decoded:
    """The target alone, one token per forward: the baseline."""
    generator = torch.Generator(verifier.device).manual_seed(sampling.seed)
    started = time.perf_counter()
    verifier.begin()
    logits, _ = verifier.forward(prompt_ids, 1)
    ids = [_next(logits[-1], sampling, generator)]
    while len(ids) < sampling.max_tokens and ids[-1] not in stop_ids:
        logits, _ = verifier.forward(ids[-1:], 1)
        ids.append(_next(logits[-1], sampling, generator))
    return _decoded(ids, [], stop_ids, started)


@torch.inference_mode()
def decode_speculative(
    verifier: Verifier,
    proposer: Proposer,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    stop_ids: frozenset[int],
    draft_tokens: int,
) -> Decoded:
    """The target with a draft.

    Args:
        verifier: the target; it must give aux states (`layers`).
        proposer: the draft.
        prompt_ids: at least 1.
        sampling: greedy when temperature is 0.
        stop_ids: ids that end the reply (and belong to it).
        draft_tokens: tokens proposed per cycle; fewer where max_tokens leaves no room for all.
    """
    generator = torch.Generator(verifier.device).manual_seed(sampling.seed)
    started = time.perf_counter()
    verifier.begin()
    proposer.begin()
    logits, aux = verifier.forward(prompt_ids, 1)
    ids = [_next(logits[-1], sampling, generator)]
    fresh = [*prompt_ids[1:], ids[0]]  # token p+1 of every row p that is new to the proposer
    cycles: list[Cycle] = []
    while len(ids) < sampling.max_tokens and ids[-1] not in stop_ids:
        assert aux is not None
        known = len(prompt_ids) + len(ids) - 1  # tokens in the target's cache: all but the last
        room = min(draft_tokens, sampling.max_tokens - len(ids) - 1)
        proposal = proposer.propose(fresh, aux, room, sampling, generator) if room else Proposal([], None)
        logits, aux = verifier.forward([ids[-1], *proposal.ids], len(proposal.ids) + 1)
        accepted, own = judge(logits, proposal, sampling, generator)
        emitted = _until_stop([*proposal.ids[:accepted], own], stop_ids)
        cycles.append(Cycle(len(ids), len(proposal.ids), accepted, len(emitted)))
        ids += emitted
        assert aux is not None
        fresh, aux = emitted, aux[: len(emitted)]
        verifier.crop(known + len(emitted))
    return _decoded(ids, cycles, stop_ids, started)


def judge(logits: Tensor, proposal: Proposal, sampling: Sampling, generator: torch.Generator) -> tuple[int, int]:
    """How many drafts the target accepts, and the token of its own that follows them.

    Args:
        logits: target logits [k+1, V]; row i judges draft i, the last row gives the bonus token.
        proposal: k drafts.
        sampling: the rule; with temperature 0 a draft is accepted if it is the argmax.
        generator: randomness, on the logits' device.
    """
    drafted = proposal.ids
    if sampling.temperature == 0:
        best: list[int] = logits.argmax(-1).tolist()
        accepted = next((i for i, token in enumerate(drafted) if token != best[i]), len(drafted))
        return accepted, best[accepted]
    wanted = probabilities(logits, sampling)  # [k+1, V]
    if not drafted:
        return 0, int(draw(wanted[0], generator))
    proposed = proposal.probabilities
    assert proposed is not None
    coins = torch.rand(len(drafted), generator=generator, device=logits.device, dtype=torch.float64)
    rows = torch.arange(len(drafted), device=logits.device)
    tokens = torch.tensor(drafted, device=logits.device)
    # Accept with probability min(1, p/q); strict, so that a token the target excludes (p = 0) never passes.
    passed = (coins * proposed[rows, tokens].double() < wanted[rows, tokens].double()).tolist()
    accepted = next((i for i, good in enumerate(passed) if not good), len(drafted))
    if accepted == len(drafted):
        return accepted, int(draw(wanted[accepted], generator))
    left = (wanted[accepted] - proposed[accepted]).clamp(min=0)
    # p == q up to rounding leaves nothing over: then p itself is the right distribution.
    return accepted, int(draw(left / left.sum() if left.sum() > 0 else wanted[accepted], generator))


def _next(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    return int(draw(probabilities(logits, sampling), generator))


def _until_stop(ids: list[int], stop_ids: frozenset[int]) -> list[int]:
    end = next((i for i, token in enumerate(ids) if token in stop_ids), len(ids))
    return ids[: end + 1]


def _decoded(ids: list[int], cycles: list[Cycle], stop_ids: frozenset[int], started: float) -> Decoded:
    seconds = time.perf_counter() - started
    return Decoded(
        ids=tuple(ids),
        finish_reason="stop" if ids[-1] in stop_ids else "length",
        cycles=tuple(cycles),
        seconds=seconds,
    )
