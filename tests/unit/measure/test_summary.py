from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from draftsmith.artifacts import write_json
from draftsmith.measure.summary import comparison_table, result_table

RESULT: dict[str, Any] = {
    "questions": 16,
    "sampling": {"temperature": 0.0},
    "draft_tokens": 3,
    "acceptance_length": 2.257,
    "acceptance_length_reasoning": 2.25,
    "acceptance_length_answer": None,
    "acceptance_per_position": [0.6, 0.66, None],
    "lossless": True,
    "compared": 16,
    "degenerate": 0,
    "tokens_per_second": 43.51,
    "baseline_tokens_per_second": 26.7,
    "speedup": 1.62,
    "timed_identical_to_float32": 0.5,
    "dtype": "bfloat16",
    "device": "cpu",
    "rounds": [{}, {}, {}],
}


def shown(folder: Path, **changes: Any) -> str:
    write_json(folder / "result.json", {**RESULT, **changes})
    out = io.StringIO()
    Console(file=out, width=200).print(result_table(folder / "result.json"))
    return out.getvalue()


def test_replies_that_are_not_counted_are_said_beside_the_acceptance_length(tmp_path: Path) -> None:  # P42
    assert "2.26 (without 2 that only repeat themselves)" in shown(tmp_path, degenerate=2)
    assert "without" not in next(line for line in shown(tmp_path).splitlines() if line.startswith("acceptance length"))


def test_the_table_says_how_far_the_timed_replies_are_those_that_were_proved(tmp_path: Path) -> None:
    assert "50% equal the float32 ones" in shown(tmp_path)
    assert "timed replies" in shown(tmp_path, timed_identical_to_float32=None)


def test_what_was_not_reached_is_a_dash_and_no_estimate_is_no_number(tmp_path: Path) -> None:
    text = shown(tmp_path)
    assert "0.60 0.66 -" in text
    assert "2.25 / no estimate" in text


def test_a_lossy_run_is_loud(tmp_path: Path) -> None:
    assert "NO (16 greedy replies compared, float32)" in shown(tmp_path, lossless=False)


def test_arms_stand_side_by_side(tmp_path: Path) -> None:
    for arm, length in (("static", 1.59), ("captured", 1.75)):
        (tmp_path / arm).mkdir()
        write_json(tmp_path / arm / "result.json", {**RESULT, "acceptance_length": length})
    out = io.StringIO()
    files = {arm: tmp_path / arm / "result.json" for arm in ("static", "captured")}
    Console(file=out, width=200).print(comparison_table(files))
    line = next(line for line in out.getvalue().splitlines() if line.startswith("acceptance length"))
    assert line.split()[-2:] == ["1.59", "1.75"]
