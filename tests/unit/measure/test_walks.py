from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.measure.decode import DraftProposer, Verifier, decode_speculative
from draftsmith.measure.links import Link, Suspect, concluded, measured, ranked, skipped
from draftsmith.measure.training_link import _teacher_suspects, rounded_norms
from draftsmith.measure.walks import Loss, Walk, Words, loss, shared, walk, walk_of
from draftsmith.target.reply import Sampling
from draftsmith.target.states import StateTap
from toy_draft import tiny_draft
from toy_training import LAYERS, target


def a_walk(emitted: list[int], cycles: list[int], prefix: str = "q") -> Walk:
    keys = tuple(f"{prefix}{number}" for number in range(len(emitted)))
    cells = np.array(emitted)
    return Walk(keys, cells, np.array(cycles), cells, np.zeros_like(cells))


@pytest.fixture
def words() -> list[Words]:
    """Greedy replies of the toy target with their live states, and the decoder's cycles left to be found."""
    found = []
    for number in range(4):
        prompt = [1, *np.random.default_rng(number).integers(3, 64, 5).tolist()]
        with torch.no_grad():
            ids = target().generate(torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False)[0]
        with torch.no_grad(), StateTap(target(), LAYERS) as tap:
            target()(ids[None, :-1])
            found.append(Words(f"q{number}", tuple(ids.tolist()), len(prompt), tap.aux()[0]))
    return found


def test_a_walk_finds_what_the_reference_decoder_does(words: list[Words]) -> None:
    draft = tiny_draft().eval()
    draft.set_embedding(target().model.embed_tokens.weight.detach())
    verifier = Verifier(target(), LAYERS)
    found = walk(draft, words, 3)
    for index, one in enumerate(words):
        sampling = Sampling(max_tokens=12, temperature=0.0)
        decoded = decode_speculative(
            verifier, DraftProposer(draft), one.ids[: one.prompt_length], sampling, frozenset(), 3
        )
        assert decoded.ids == one.ids[one.prompt_length :]
        assert len(decoded.cycles) == found.cycles[index]
        assert sum(cycle.emitted for cycle in decoded.cycles) == found.emitted[index]
    verifier.close()


def test_nothing_is_drafted_where_a_chain_would_pass_the_drafts_positions(words: list[Words]) -> None:
    free, limited = (walk(tiny_draft().eval(), words, 3, limit) for limit in (None, 4))
    assert limited.length == 1.0
    assert free.emitted.sum() == limited.emitted.sum()


def test_a_fall_is_beyond_noise_when_every_question_has_it() -> None:
    before, after = a_walk([40] * 12, [10] * 12), a_walk([40] * 12, [14] * 12)
    assert loss(before, after).fell == "yes"
    assert loss(after, before).fell == "no"
    assert loss(before, before).fell == "no"


def test_a_fall_on_a_few_questions_cannot_be_told() -> None:
    found = loss(a_walk([40] * 3, [10] * 3), a_walk([40] * 3, [14] * 3))
    assert (found.fell, found.low, found.questions) == ("cannot tell", None, 3)


def test_a_fall_within_noise_cannot_be_told() -> None:
    cycles = [8, 30, 9, 31, 10, 28]
    mixed = [30, 9, 31, 12, 29, 9]
    assert loss(a_walk([40] * 6, cycles), a_walk([40] * 6, mixed)).fell in ("no", "cannot tell")
    assert loss(a_walk([40] * 6, [10] * 6), a_walk([40] * 6, [9, 10, 9, 9, 10, 25])).fell == "cannot tell"


def test_walks_are_compared_on_the_questions_they_share() -> None:
    one, other = shared([a_walk([4, 5, 6], [1, 1, 1]), a_walk([5, 6], [1, 1])])
    assert one.keys == other.keys == ("q0", "q1")
    assert one.emitted.tolist() == [4, 5]


def test_a_walk_counts_what_is_granted() -> None:
    found = walk_of(["q"], [np.ones((6, 3), bool)], 3)
    assert (found.length, found.accuracy) == (3.0, 1.0)


def suspect(name: str, **values: object) -> Suspect:
    return Suspect(name=name, link="export", found="seen", change=f"mend {name}", **values)  # type: ignore[arg-type]


def test_the_repair_that_gives_back_most_comes_first_and_certainty_breaks_ties() -> None:
    found = ranked([suspect("a", restored=0.4), suspect("b", restored=0.99), suspect("c", restored=1.0, certain=True)])
    assert [one.name for one in found] == ["c", "b", "a"]


def test_the_first_link_that_falls_is_named_with_its_suspect() -> None:
    fell = Loss(1.0, 0.8, 1.2, 12, "yes")
    links = [
        measured("live", a_walk([40] * 12, [10] * 12)),
        measured("export", a_walk([30] * 12, [10] * 12), fell, [suspect("rope", restored=1.0)]),
        measured("engine", a_walk([20] * 12, [10] * 12), fell),
    ]
    found = concluded(links, 4, 12, "vllm")
    assert (found.link, found.suspect, found.clean) == ("export", "rope", False)
    assert found.verdict == "acceptance falls at `export` (4.00 to 3.00): rope: seen"
    assert found.advice == ("mend rope",)


def test_a_fall_that_nothing_explains_is_said_to_be_unexplained() -> None:
    link = measured("export", a_walk([30] * 12, [10] * 12), Loss(1.0, 0.8, 1.2, 12, "yes"), [suspect("x")])
    found = concluded([link], 4, 12, "vllm")
    assert found.suspect is None
    assert "none of the suspects" in found.verdict


def test_too_few_questions_are_said_to_be_too_few_and_not_called_clean() -> None:
    link: Link = measured("export", a_walk([30] * 3, [10] * 3), Loss(1.0, None, None, 3, "cannot tell"))
    found = concluded([link, skipped("engine", "no server")], 4, 3, "vllm")
    assert found.verdict.startswith("cannot tell: 3 questions")
    assert (found.clean, found.link) == (False, None)


def test_clean_is_said_of_the_links_that_were_measured() -> None:
    live = measured("live", a_walk([20] * 12, [10] * 12))
    every = concluded([live], 4, 12, "vllm")
    assert every.verdict.startswith("clean: acceptance does not fall anywhere in the chain (2.00 tokens per target")
    found = concluded([live, skipped("export", "none"), skipped("engine", "no server")], 4, 12, "vllm")
    assert found.verdict == (
        "clean: acceptance does not fall in the links measured (2.00 tokens per target forward at `live`); not "
        "measured: `export`, `engine`; what is missing, training must bring"
    )
    assert found.clean


def test_a_chain_of_which_nothing_was_measured_is_not_clean() -> None:
    found = concluded([skipped("live", "unreadable"), skipped("engine", "no server")], 4, 0, "vllm")
    assert found.verdict.startswith("nothing was measured")
    assert (found.clean, found.link) == (False, None)


def test_no_question_with_a_step_is_no_acceptance_length_of_one() -> None:
    for one in (a_walk([], []), a_walk([0, 0], [0, 0])):
        link = measured("export", one, note="would not run")
        assert link.value is None and link.note == "no question had a step to measure; would not run"
        found = concluded([link], 4, 2, "vllm")
        assert "not working" not in found.verdict


def test_the_last_acceptance_length_is_never_a_share_of_states() -> None:
    states = Link(name="engine states", value=0.99, questions=1, noise=None, loss=None)
    found = concluded([measured("live", a_walk([20] * 12, [10] * 12)), states], 4, 12, "vllm")
    assert "2.00 tokens per target forward at `live`" in found.verdict


@pytest.mark.parametrize("damage", [0.0, float("nan")])
def test_stored_states_without_a_whole_row_say_nothing_of_norm_and_head(damage: float) -> None:
    states = SimpleNamespace(final=torch.full((3, 8), damage), argmax=torch.zeros(3))
    scene: Any = SimpleNamespace(held_out=["trace"], states=lambda _: states)
    assert _teacher_suspects(scene) == []


def test_norms_kept_in_bf16_are_seen_and_a_draft_all_in_bf16_tells_nothing() -> None:
    draft = tiny_draft()
    assert rounded_norms(draft) == []
    for name, weight in draft.trained().items():
        if "norm" in name:
            weight.data = weight.data.bfloat16().float()
    assert len(rounded_norms(draft)) == 4
    for weight in draft.trained().values():
        weight.data = weight.data.bfloat16().float()
    assert rounded_norms(draft) == []


# P40
def test_a_draft_that_does_nothing_is_never_called_clean() -> None:
    found = concluded([measured("export", a_walk([40] * 12, [40] * 12))], 4, 12, "vllm")
    assert found.verdict.startswith("the draft is not working")
    assert "more data will not" in found.verdict
    assert not found.clean
