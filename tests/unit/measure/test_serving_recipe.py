from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftsmith.artifacts import write_json
from draftsmith.errors import UserError
from draftsmith.measure.serving import _agreement, _at, _predictions, serve_and_measure
from draftsmith.measure.serving_view import finished, serving_plan, serving_words
from draftsmith.progress import Progress
from draftsmith.recipe import MeasureSettings, ServingSettings

MEASURE = MeasureSettings(draft_tokens=2)
SERVING = ServingSettings(concurrency=[1, 4])


def rows(*accepted: int) -> list[dict[str, Any]]:
    """One reply; a cycle of 2 drafts for each number of accepted ones."""
    cycles = [{"start": 3 * i, "proposed": 2, "accepted": n, "emitted": n + 1} for i, n in enumerate(accepted)]
    return [{"key": "q", "cycles": cycles}]


def level(*shares: float) -> dict[str, Any]:
    return {"concurrency": 4, "acceptance_per_position_unconditional": list(shares)}


def staged(run: Path, draft: str = "d1") -> Path:
    for stage in ("draft", "export", "measure"):
        (run / stage).mkdir(parents=True, exist_ok=True)
        write_json(run / stage / "manifest.json", {"fingerprint": draft if stage == "draft" else stage})
    return run


def found(**changes: Any) -> dict[str, Any]:
    return {
        "engine": "llamacpp",
        "acceptance": {"served": [0.5, 0.25], "reference": [0.51, 0.25], "agrees": True},
        "candidates": {"share": 0.985, "positions": 400, "agrees": True},
        "lossless": True,
        "compared": 16,
        "different": 0,
        "predictions": [{"concurrency": 4, "measured": 1.2, "predicted": 1.26, "off": 0.05}],
        "payoff": ["It pays off."],
        "bigger_target": "On a bigger target more.",
        **changes,
    }


def test_an_engine_agrees_where_every_position_is_within_two_points_of_the_reference() -> None:
    reference = rows(0, 1, 2, 0)  # of all drafts: 0.5, 0.25
    same = _agreement(reference, level(0.515, 0.235), 2)
    assert same["reference"] == [0.5, 0.25] and same["agrees"] and same["largest_difference"] == 0.015
    assert same["questions"] == 1
    assert not _agreement(reference, level(0.5, 0.28), 2)["agrees"]


def test_a_position_that_an_engine_does_not_count_was_never_accepted() -> None:
    same = _agreement(rows(0, 1, 0, 0), level(0.25), 2)
    assert same["served"] == [0.25, 0.0] and same["agrees"]
    assert not _agreement(rows(0, 1, 2, 0), level(0.5), 2)["agrees"]


def test_an_engine_without_counters_per_position_is_held_against_nothing() -> None:
    same = _agreement(rows(0, 1), level(), 2)
    assert same["agrees"] is None and same["largest_difference"] is None
    said = serving_words(found(engine="sglang", acceptance=same, candidates=None))
    assert said[0] == "sglang does not count what it accepts per position"


def test_predictions_stand_beside_what_was_measured_and_earlier_levels_do_not() -> None:
    predicted = {"levels": [{"concurrency": n, "whole_reply_speedup": 1.5} for n in (1, 4)]}
    served = {"levels": [{"concurrency": n, "speedup": s} for n, s in ((1, 1.5), (4, 1.2), (16, 0.9))]}
    assert _predictions(predicted, _at(served, [1, 4])) == [
        {"concurrency": 1, "predicted": 1.5, "measured": 1.5, "off": 0.0},
        {"concurrency": 4, "predicted": 1.5, "measured": 1.2, "off": 0.25},
    ]


def test_what_was_served_is_said_in_sentences() -> None:
    assert serving_words(found()) == [
        "llamacpp accepts at positions 1 to 2, of all drafts: 0.500 (reference 0.510), 0.250 (reference 0.250); within "
        "2% at every position",
        "its draft candidates equal ours at 98.5% of 400 positions",
        "outputs equal the baseline's (16 of 16)",
        "at 4: 1.20x measured, 1.26x predicted beforehand (+5%)",
        "It pays off.",
        "On a bigger target more.",
    ]


def test_what_does_not_agree_is_said_as_well() -> None:
    apart = {"served": [0.2, 0.1], "reference": [0.5, 0.25], "agrees": False}
    said = serving_words(found(acceptance=apart, lossless=False, different=3, candidates=None))
    assert "NOT within 2%" in said[0]
    assert said[1] == "outputs do NOT all equal the baseline's (13 of 16)"
    assert not any("baseline's" in line for line in serving_words(found(lossless=None, compared=0)))


def test_it_is_finished_until_settings_or_something_behind_it_change(tmp_path: Path) -> None:
    run = staged(tmp_path)
    assert finished(run, SERVING, MEASURE) is None
    write_json(run / "measure" / "serving.json", {"plan": serving_plan(run, SERVING, MEASURE)})
    assert finished(run, SERVING, MEASURE) is not None
    assert finished(run, SERVING.model_copy(update={"python": "/elsewhere/python"}), MEASURE) is not None
    assert finished(run, SERVING.model_copy(update={"rounds": 9}), MEASURE) is None
    assert finished(run, SERVING, MEASURE.model_copy(update={"draft_tokens": 3})) is None
    assert finished(staged(run, draft="d2"), SERVING, MEASURE) is None


def test_more_at_a_time_than_questions_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    run = staged(tmp_path)
    (run / "measure" / "questions.jsonl").write_text('{"key": "q"}\n' * 3)
    with pytest.raises(UserError, match=r"serving.concurrency 4: expected no more than the 3 questions"):
        serve_and_measure(run, SERVING, MEASURE, Progress(quiet=True))
