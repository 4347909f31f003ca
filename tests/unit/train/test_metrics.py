from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from draftsmith.train.metrics import Cycle, acceptance, simulate, summarise, within


def matches(*rows: str) -> NDArray[np.bool_]:
    """One row of x (hit) and . (miss) per supervised row."""
    return np.array([[mark == "x" for mark in row] for row in rows])


def test_tokens_past_the_end_are_never_counted() -> None:
    # P41: k=5, two cycles: 2 accepted (3 emitted), then 5 accepted with the end at the 3rd token (3 emitted).
    cycles = simulate(matches("xx...", ".....", ".....", "xxxxx", ".....", "....."))
    assert [(cycle.row, cycle.emitted) for cycle in cycles] == [(0, 3), (3, 3)]
    found = acceptance(cycles, 5)
    assert found["acceptance_length"] == 3.0
    assert found["acceptance_per_position"] == [1.0, 1.0, 0.5, None, None]


def test_a_draft_that_never_hits_has_length_one() -> None:
    found = acceptance(simulate(np.zeros((7, 3), dtype=bool)), 3)
    assert found == {"acceptance_length": 1.0, "acceptance_per_position": [0.0, None, None], "cycles": 7, "emitted": 7}


def test_a_draft_that_always_hits_emits_its_chain_and_the_bonus() -> None:
    found = acceptance(simulate(np.ones((8, 3), dtype=bool)), 3)
    assert (found["acceptance_length"], found["cycles"], found["emitted"]) == (4.0, 2, 8)
    assert found["acceptance_per_position"] == [1.0, 1.0, 1.0]


def test_acceptance_per_position_is_conditional_on_the_positions_before() -> None:
    # Hits after a miss are worth nothing: the decoder never sees them.
    found = acceptance(simulate(matches("x.x", "...", ".xx", "xxx", "...", "...", "...")), 3)
    # Cycles at rows 0 (1 accepted), 2 (0) and 3 (3 accepted).
    assert found["acceptance_per_position"] == [round(2 / 3, 4), 0.5, 1.0]
    assert found["acceptance_length"] == round(7 / 3, 4)


@pytest.mark.parametrize("seed", range(20))
def test_the_walk_equals_a_decoder_that_proposes_and_verifies_token_by_token(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, k = int(random.integers(1, 30)), int(random.integers(1, 6))
    hits = random.random((rows, k)) < 0.6
    reply = list(range(rows + 1))
    generated = reply[:1]  # the prefill's token
    cycles = []
    while len(generated) < len(reply):
        row = len(generated) - 1
        proposal = [reply[row + 1 + i] if row + 1 + i <= rows and hits[row, i] else -1 for i in range(k)]
        rest = reply[len(generated) :]
        good = next((i for i, token in enumerate(proposal) if i >= len(rest) or token != rest[i]), k)
        new = (proposal[:good] + rest[good : good + 1])[: len(rest)]
        cycles.append((row, good, len(new)))
        generated += new
    assert generated == reply
    assert [(c.row, c.accepted, c.emitted) for c in simulate(hits)] == cycles


def test_cycles_are_split_by_the_span_of_their_first_token() -> None:
    # Generated tokens 0..8: reasoning 1..4, a delimiter at 4, answer 5..9. Row r predicts token r + 1.
    cycles = [Cycle(row, 0, 1, 8 - row) for row in range(8)]
    assert [cycle.row for cycle in within(cycles, (1, 4))] == [0, 1, 2]
    assert [cycle.row for cycle in within(cycles, (5, 9))] == [4, 5, 6, 7]
    assert within(cycles, None) == []


def test_the_summary_pools_cycles_over_traces_and_leaves_out_what_is_not_there() -> None:
    first, second = np.ones((4, 3), dtype=bool), np.zeros((4, 3), dtype=bool)
    found = summarise([first, second], [((0, 5), None), (None, None)], 3)
    assert found["acceptance_length"] == round(8 / 5, 4)
    assert found["reasoning"]["acceptance_length"] == 4.0
    assert found["answer"] == {
        "acceptance_length": None,
        "acceptance_per_position": [None, None, None],
        "cycles": 0,
        "emitted": 0,
    }
