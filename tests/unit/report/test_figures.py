"""Charts: numbers in, the same numbers out, in the picture and in its table."""

from __future__ import annotations

from itertools import pairwise

from draftsmith.report.figures import (
    BINS,
    acceptance_curve_chart,
    arms_chart,
    histogram,
    length_chart,
    loss_chart,
    position_chart,
    thinned,
)
from draftsmith.report.findings import Curve, spread
from toy_run import evaluation


def test_a_histogram_counts_every_length_once_in_whole_number_bins() -> None:
    lengths = [3, 3, 4, 90, 1203, 8192]
    edges, counts = histogram(lengths)
    assert sum(counts) == len(lengths)
    assert len(counts) <= BINS + 1 and len(edges) == len(counts) + 1
    assert edges[0] <= 3 and edges[-1] > 8192
    assert len({end - start for start, end in pairwise(edges)}) == 1


def test_equal_lengths_make_one_bin() -> None:
    assert histogram([5, 5]) == ([5, 6], [2])
    assert histogram([0]) == ([0, 1], [1])


def test_a_length_chart_says_median_and_longest() -> None:
    chart = length_chart("answer", [10, 20, 4000])
    assert chart.says == "3 traces, median 20 ids, longest 4,000."
    assert sum(int(row[1]) for row in chart.rows) == 3
    assert chart.figure["data"][0]["meta"] == {"role": "answer"}


def test_a_long_curve_is_averaged_in_blocks_that_hold_every_step() -> None:
    blocks = thinned([{"step": step} for step in range(1001)], 300)
    assert len(blocks) <= 300
    assert [line["step"] for block in blocks for line in block] == list(range(1001))


def test_the_loss_chart_has_a_line_per_unrolled_step_and_skips_unknown_losses() -> None:
    steps = [{"step": 1, "loss": [4.0, 5.0]}, {"step": 2, "loss": [2.0, None]}]
    chart = loss_chart(Curve(steps=steps, evaluations=[]))
    assert chart is not None
    assert [list(line["y"]) for line in chart.figure["data"]] == [[4.0, 2.0], [5.0, None]]
    assert chart.rows[-1] == ["2", "2.000", "–"]


def test_charts_of_nothing_are_none() -> None:
    nothing = Curve(steps=[], evaluations=[])
    assert loss_chart(nothing) is None
    assert acceptance_curve_chart(nothing) is None
    assert position_chart({"overall": []}, "") is None


def test_the_acceptance_curve_leaves_out_spans_that_no_evaluation_has() -> None:
    first, second = evaluation(10, 1.2), evaluation(20, 1.5)
    for line in (first, second):
        line["reasoning"] = {"acceptance_length": None, "acceptance_per_position": [None] * 4}
    chart = acceptance_curve_chart(Curve(steps=[], evaluations=[first, second]))
    assert chart is not None
    assert [line["meta"]["role"] for line in chart.figure["data"]] == ["overall", "answer"]
    assert "best 1.50" in chart.says


def test_positions_that_were_never_reached_are_a_dash_and_no_bar() -> None:
    chart = position_chart({"overall": [0.5, None], "reasoning": [0.6], "answer": []}, "Measured.")
    assert chart is not None
    assert chart.rows == [["1", "50.0%", "60.0%"], ["2", "–", ""]]
    assert "Conditional" in chart.says and chart.says.endswith("Measured.")


def test_the_arms_chart_shows_only_what_some_arm_has() -> None:
    chart = arms_chart({"a": {"overall": 1.3, "reasoning": None}, "b": {"overall": 1.8, "reasoning": None}})
    assert chart.rows == [["a", "1.300"], ["b", "1.800"]]


def test_shown_traces_are_spread_over_the_run() -> None:
    assert spread([str(i) for i in range(101)], 5) == ["0", "25", "50", "75", "100"]
    assert spread(["a", "b"], 5) == ["a", "b"]
