from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.artifacts import read_json, write_json
from draftsmith.progress import Progress
from draftsmith.report.findings import read_findings
from draftsmith.report.page import render_report
from draftsmith.report.serving import serving
from toy_run import make_run


def result(**changes: Any) -> dict[str, Any]:
    return {
        "engine": "llamacpp",
        "acceptance": {"served": [0.5, 0.25], "reference": [0.51, 0.25], "agrees": True},
        "candidates": {"share": 0.985, "positions": 400, "agrees": True},
        "lossless": True,
        "compared": 16,
        "different": 0,
        "predictions": [{"concurrency": n, "measured": 1.2, "predicted": p, "off": p / 1.2 - 1} for n, p in PREDICTED],
        "draft": "abc",
        **changes,
    }


PREDICTED = ((1, 1.26), (4, 1.14))


def test_acceptance_is_drawn_beside_the_reference_and_predictions_beside_what_was_measured() -> None:
    part = serving(result(), "abc")
    assert part is not None and part.chart is not None and part.cautions == []
    assert part.chart.rows == [["1", "50.0%", "51.0%"], ["2", "25.0%", "25.0%"]]
    assert part.rows == [["1", "1.26x", "1.20x", "+5%"], ["4", "1.14x", "1.20x", "-5%"]]
    assert "; its draft candidates equal ours at 98.5% of 400 positions; " in part.says


def test_every_disagreement_is_a_caution() -> None:
    part = serving(
        result(
            acceptance={"served": [0.2], "reference": [0.51, 0.25], "agrees": False},
            candidates={"share": 0.5, "positions": 400, "agrees": False},
            predictions=[{"concurrency": 4, "measured": 1.0, "predicted": 1.4, "off": 0.4}],
        ),
        "another",
    )
    assert part is not None and part.chart is not None
    assert part.chart.rows[1] == ["2", "0.0%", "25.0%"]
    assert part.cautions == [
        "The run's draft was made again since: this is about an earlier one.",
        "The engine does not accept what the reference decoder does: draftsmith diagnose finds out why.",
        "The engine does not draft what the trained draft does.",
        "At 4 at a time the prediction is more than 15% off.",
    ]


def test_an_engine_that_does_not_count_positions_has_no_chart() -> None:
    part = serving(
        result(engine="sglang", candidates=None, acceptance={"served": [], "reference": [0.5], "agrees": None}), "abc"
    )
    assert part is not None and part.chart is None and part.cautions == []


def test_the_report_shows_it_under_served(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", traces=4)
    _, without = render_report(read_findings(run), Progress(quiet=True))
    assert "In the run's own engine" not in without
    draft = read_json(run / "draft" / "manifest.json")["fingerprint"]
    write_json(run / "measure" / "serving.json", result(draft=draft))
    _, page = render_report(read_findings(run), Progress(quiet=True))
    assert 'id="chart-serving-positions"' in page and "within 2% at every position" in page
