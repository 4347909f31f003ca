from __future__ import annotations

import pytest

from draftsmith.measure.acceptance import (
    Cycle,
    acceptance,
    acceptance_rate,
    conditional,
    engine_length,
    is_degenerate,
    length_from_unconditional,
    unconditional,
    verdict,
)


def test_tokens_behind_the_end_are_not_counted_but_the_engine_counts_them() -> None:
    # P41: k = 5; 2 accepted (3 emitted), then 5 accepted with the end at the 3rd token (3 emitted).
    found = acceptance([Cycle(1, 5, 2, 3), Cycle(4, 5, 5, 3)], 5)
    assert found.length == 3.0
    assert found.engine_length == 4.5
    # Position 2: rejected in the first cycle, accepted (the end itself) in the second; beyond it nothing existed.
    assert found.per_position == (1.0, 1.0, 0.5, None, None)
    assert (found.cycles, found.emitted) == (2, 6)


def test_acceptance_per_position_is_conditional_on_what_came_before() -> None:
    cycles = [Cycle(1, 3, 0, 1), Cycle(2, 3, 1, 2), Cycle(4, 3, 3, 4), Cycle(8, 1, 1, 2), Cycle(10, 0, 0, 1)]
    found = acceptance(cycles, 3)
    assert found.length == 10 / 5
    assert found.per_position == (3 / 4, 1 / 2, 1.0)
    assert found.engine_length == 1 + 5 / 4  # a forward without a draft is no draft


def test_no_cycles_give_no_numbers() -> None:
    assert acceptance([], 2) == acceptance([], 2)
    assert acceptance([], 2).length is None
    assert acceptance([], 2).per_position == (None, None)
    assert acceptance([], 2).engine_length is None


def test_engine_counters_convert_to_length_rate_and_conditional_acceptance() -> None:
    # P41: length 2.5 at k = 3 and at k = 8; unconditional 0.70, 0.37, 0.21.
    assert acceptance_rate(2.5, 3) == pytest.approx(0.50)
    assert acceptance_rate(2.5, 8) == pytest.approx(0.1875)
    assert length_from_unconditional([0.70, 0.37, 0.21]) == pytest.approx(2.28)
    rates = conditional([0.70, 0.37, 0.21])
    assert rates == pytest.approx([0.70, 0.37 / 0.70, 0.21 / 0.37])
    assert unconditional(rates) == pytest.approx([0.70, 0.37, 0.21])
    assert conditional([0.5, 0.0, 0.0]) == [0.5, 0.0, None]
    assert unconditional([0.5, 0.0, None]) == [0.5, 0.0, 0.0]


def test_a_length_of_one_is_broken_and_never_a_call_for_more_data() -> None:
    # P40: 500 drafts x 3 with 0 accepted, then with 600 accepted.
    dead = verdict(engine_length(500, 0), [0.0, None, None], 0, 10)
    assert dead.startswith("the draft is not working")
    assert all(check in dead for check in ("EAGLE-3", "aux hidden states", "head", "d2t"))
    assert "data" not in dead and "train" not in dead.replace("trained ones", "")
    alive = verdict(engine_length(500, 600), [0.6, 0.55, 0.5], 0, 10)
    assert alive == "2.20 tokens per target forward, 60% of first proposals accepted"


def test_loops_are_degenerate_and_ordinary_repetition_is_not() -> None:
    # P42: one reply repeats one token 900 times.
    assert is_degenerate([11] * 900)
    assert is_degenerate([*range(100, 150), *([5, 6, 7] * 40)])
    assert is_degenerate([*range(60, 100), *(list(range(64)) * 6)])
    assert not is_degenerate(list(range(400)))
    assert not is_degenerate([7] * 12)  # short replies may well be one number
    assert not is_degenerate([*range(100, 300), *([5] * 40)])  # less than half
    assert not is_degenerate([*range(50), *range(50)])  # said twice is not a loop
    assert not is_degenerate([])


def test_a_measurement_of_loops_alone_is_no_estimate() -> None:
    # P42
    assert verdict(5.0, [1.0], 3, 3).startswith("not an acceptance estimate: 3 of 3")


def test_replies_without_a_step_are_not_called_loops() -> None:
    assert verdict(None, [None], 0, 5).startswith(
        "not an acceptance estimate: no step with a draft was counted in 5 replies (a reply of one token has none)"
    )
    mixed = verdict(None, [None], 2, 5)
    assert "2 of 5 replies are loops, and no step with a draft was counted in 3 other replies" in mixed
