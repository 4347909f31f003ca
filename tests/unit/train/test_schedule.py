from __future__ import annotations

from collections import Counter

import pytest

from draftsmith.train.schedule import (
    PADDED_TOKENS,
    PADDING_RATIO,
    TINY_ROWS,
    evaluation_steps,
    learning_rate,
    micro_batches,
    plan_steps,
)

LENGTHS = [3, 50, 7, 120, 31, 64, 9, 200, 18, 77]


def plan(**changes: int | None) -> list[list[int]]:
    values = {"batch_tokens": 100, "epochs": 3, "token_budget": None, "seed": 0, **changes}
    return plan_steps(LENGTHS, **values)  # type: ignore[arg-type]


def tokens(step: list[int]) -> int:
    return sum(LENGTHS[index] for index in step)


def test_every_trace_comes_once_per_epoch_and_only_the_last_step_may_be_small() -> None:
    steps = plan()
    assert Counter(index for step in steps for index in step) == dict.fromkeys(range(len(LENGTHS)), 3)
    assert all(tokens(step) >= 100 for step in steps[:-1])
    assert all(tokens(step[:-1]) < 100 for step in steps)


def test_the_order_is_a_function_of_the_seed_and_differs_between_epochs() -> None:
    assert plan() == plan()
    assert plan() != plan(seed=1)
    order = [index for step in plan() for index in step]
    assert order[:10] != order[10:20]


@pytest.mark.parametrize("budget", [1, 100, 500, 2000])
def test_a_token_budget_stops_at_the_first_step_at_or_past_it(budget: int) -> None:
    steps = plan(token_budget=budget, epochs=1)
    total = sum(tokens(step) for step in steps)
    last_trace = LENGTHS[steps[-1][-1]]
    assert total >= budget > total - last_trace


def test_a_larger_budget_begins_with_the_same_steps() -> None:
    short, long = plan(token_budget=500), plan(token_budget=2000)
    assert long[: len(short) - 1] == short[:-1]


def test_micro_batches_hold_every_trace_once_within_the_bounds_on_padding() -> None:
    supervised = [1, 4, 9, 900, 1000, 30, 2500, 2, 14, 600, 40, 9000]
    rows = [count + 300 for count in supervised]
    batches = micro_batches(range(len(supervised)), supervised, rows)
    assert sorted(index for batch in batches for index in batch) == list(range(len(supervised)))
    for batch in batches:
        lengths = [supervised[index] for index in batch]
        assert max(lengths) <= max(PADDING_RATIO * min(lengths), TINY_ROWS)
        assert len(batch) == 1 or len(batch) * max(rows[index] for index in batch) <= PADDED_TOKENS
    assert len(batches) < len(supervised)


def test_the_learning_rate_warms_up_peaks_and_falls_towards_zero() -> None:
    rates = [learning_rate(step, 100, 1e-3, 0.1) for step in range(1, 101)]
    assert rates[0] == pytest.approx(1e-4)
    assert max(rates) == rates[9] == rates[10] == 1e-3
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 1e-6


def test_a_single_step_without_warm_up_runs_at_the_peak() -> None:
    assert learning_rate(1, 1, 1e-3, 0.0) == 1e-3


@pytest.mark.parametrize(("steps", "evals", "expected"), [(8, 4, {2, 4, 6, 8}), (3, 8, {1, 2, 3}), (5, 1, {5})])
def test_evaluations_are_spread_evenly_and_include_the_last_step(steps: int, evals: int, expected: set[int]) -> None:
    assert evaluation_steps(steps, evals) == expected
