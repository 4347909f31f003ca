from __future__ import annotations

import pytest

from draftsmith.errors import UserError
from draftsmith.measure.payoff import (
    Replies,
    StepTimes,
    acceptance_length,
    break_even,
    composed,
    constant_acceptance,
    payoff,
    predict,
    whole_speedup,
)


def times(concurrency: int, target: float, **with_draft: float) -> StepTimes:
    return StepTimes(
        concurrency=concurrency, target=target, with_draft={int(k[1:]): seconds for k, seconds in with_draft.items()}
    )


def test_acceptance_length_counts_the_bonus_token() -> None:
    assert acceptance_length([0.5, 0.5], 0) == 1.0
    assert acceptance_length([0.5, 0.5], 2) == pytest.approx(1 + 0.5 + 0.25)
    assert acceptance_length([1.0], 4) == 5.0


def test_positions_that_were_not_measured_take_the_last_value_and_are_marked() -> None:
    assert acceptance_length([0.8, 0.5], 3) == pytest.approx(1 + 0.8 + 0.4 + 0.2)
    assert predict([0.8, 0.5], times(1, 1.0, k3=1.5), 3).extrapolated
    assert not predict([0.8, 0.5], times(1, 1.0, k3=1.5), 2).extrapolated


def test_speed_up_is_tokens_per_step_over_steps_in_plain_steps() -> None:
    parts = composed(8, target=0.020, verify={3: 0.022}, draft=0.002, overhead=0.001)
    cell = predict([0.6, 0.6, 0.6], parts, 3)
    assert parts.step(3) == pytest.approx(0.029)
    assert cell.acceptance_length == pytest.approx(1 + 0.6 + 0.36 + 0.216)
    assert cell.speedup == pytest.approx(2.176 * 0.020 / 0.029)
    assert cell.break_even_length == pytest.approx(1.45)


def test_a_draft_at_its_break_even_acceptance_neither_gains_nor_costs() -> None:
    engine = times(1, 1.0, k4=1.9)
    rate = constant_acceptance(break_even(engine, 4), 4)
    assert rate is not None
    assert predict([rate], engine, 4).speedup == pytest.approx(1.0)
    assert break_even(engine, 4, gain=1.5) == pytest.approx(1.5 * 1.9)


def test_a_step_dearer_than_all_it_can_give_has_no_break_even() -> None:
    assert constant_acceptance(3.2, 2) is None
    assert "no draft breaks even" in " ".join(payoff([0.9], [times(64, 1.0, k2=3.2)], [2]).words())


def test_steps_between_and_beyond_the_measured_ones_lie_on_a_line() -> None:
    engine = times(1, 1.0, k4=2.0)
    assert engine.step(2) == pytest.approx(1.5)
    assert engine.step(4) == 2.0
    assert engine.step(6) == pytest.approx(2.5)
    assert times(1, 1.0, k2=1.2, k4=2.0).step(3) == pytest.approx(1.6)


def test_the_best_k_is_where_one_more_draft_no_longer_pays() -> None:
    table = payoff([0.9, 0.5, 0.1], [times(1, 1.0, k4=1.8)], [1, 2, 3, 4])
    assert [round(cell.speedup, 3) for cell in table.cells] == [1.583, 1.679, 1.497, 1.333]
    assert table.best(1).draft_tokens == 2


def test_words_name_the_concurrency_above_which_it_does_not_pay() -> None:
    table = payoff([0.6], [times(1, 1.0, k3=1.2), times(4, 1.0, k3=1.6), times(16, 1.0, k3=2.6)], [3])
    assert table.pays_up_to() == 4
    said = " ".join(table.words())
    assert "It pays off: 1.81x at 1 request at a time with 3 draft tokens." in said
    assert "It will not pay off above 4 parallel requests: at 16 it is 0.84x." in said


def test_words_say_when_it_never_pays() -> None:
    said = payoff([0.3], [times(1, 1.0, k3=1.9)], [1, 2, 3]).words()
    assert said[0] == (
        "It will not pay off: at 1 request at a time the best choice, 1 draft token, makes serving 1.00 times as fast."
    )


def test_prefill_draws_a_speed_up_towards_one() -> None:
    engine = times(1, 0.02, k3=0.024)
    cell = predict([0.6], engine, 3)
    assert whole_speedup(cell, engine, Replies(prefill=0.0, tokens=101)) == pytest.approx(cell.speedup)
    assert whole_speedup(cell, engine, Replies(prefill=2.0, tokens=101)) == pytest.approx(
        4.0 / (2.0 + 100 / 2.176 * 0.024)
    )


def test_a_prompt_of_ones_own_weighs_more_the_more_share_the_steps() -> None:
    engine = times(10, 0.02, k3=0.024)
    whole = whole_speedup(predict([0.6], engine, 3), engine, Replies(prefill=0.2, tokens=101), draft_prefill=0.1)
    assert whole == pytest.approx((0.2 + 100 / 10 * 0.02) / (0.3 + 100 / 10 / 2.176 * 0.024))


@pytest.mark.parametrize("wrong", [[], [1.2], [-0.1]])
def test_acceptance_that_is_no_share_is_refused(wrong: list[float]) -> None:
    with pytest.raises(UserError, match="expected shares from 0 to 1"):
        acceptance_length(wrong, 2)
