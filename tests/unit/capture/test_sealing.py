from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from draftsmith.capture import sealing
from draftsmith.capture.journal import Journal
from draftsmith.capture.sealing import seal, sealed_ids, sealed_parts, summary, write_parts
from draftsmith.trace import Trace, read_metadata, read_traces


def trace(name: str, **fields: object) -> Trace:
    return Trace(trace_id=name, question_key=f"key {name}", prompt_ids=[1, 2], generated_ids=[3, 4, 5], **fields)


def test_sealing_keeps_the_asked_order_and_removes_the_journal(tmp_path: Path) -> None:
    names = [f"{number:02}" for number in range(7)]
    (tmp_path / "part-00009.parquet").write_bytes(b"left by an attempt that was killed while sealing")
    with Journal(tmp_path) as journal:
        for name in (*reversed(names), "of a question that is no longer asked"):
            journal.append(trace(name))
        assert sealed_parts(tmp_path) == []
        parts = seal(journal, names, {"target": "toy"})
    assert sealed_parts(tmp_path) == parts == list(tmp_path.iterdir())
    assert sealed_ids(parts) == names == [row.trace_id for row in read_traces(tmp_path)]
    assert read_metadata(tmp_path) == {"target": "toy"}


def test_parts_are_bounded_by_rows_and_by_token_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = [trace(name) for name in "abcdefg"]
    monkeypatch.setattr(sealing, "PART_ROWS", 3)
    parts = write_parts(tmp_path, traces, {})
    assert [pq.read_metadata(part).num_rows for part in parts] == [3, 3, 1]
    monkeypatch.setattr(sealing, "PART_IDS", 10)
    parts = write_parts(tmp_path, traces[:3], {})  # 5 ids each
    assert [pq.read_metadata(part).num_rows for part in parts] == [2, 1]
    assert sealed_parts(tmp_path) == parts


def test_line_separators_survive_sealing(tmp_path: Path) -> None:  # P16
    text = "one\u2028two\u0085three\u2029four"
    write_parts(tmp_path, [trace("a", reasoning=text)], {})
    assert [row.reasoning for row in read_traces(tmp_path)] == [text]


def test_counts_of_tokens_reasoning_and_sources_go_over_what_can_be_trained_on(tmp_path: Path) -> None:
    traces = [
        trace("a", reasoning_span=(0, 1)),
        trace("b", state="cut_in_answer", ids_source="rendered_verified"),
        trace("c", state="rejected", error="too short: of b", reasoning_span=(0, 1)),
        trace("d", state="failed", error="HTTP 400: as told"),
        trace("e", state="failed", error="HTTP 400: otherwise"),
    ]
    assert summary(write_parts(tmp_path, traces, {})) == {
        "questions": 5,
        "traces": 5,
        "ok": 1,
        "cut_in_reasoning": 0,
        "cut_in_answer": 1,
        "rejected": 1,
        "failed": 2,
        "with_reasoning": 1,
        "prompt_tokens": 4,
        "generated_tokens": 6,
        "ids_source": {"engine": 1, "rendered_verified": 1},
        "reasons": {"HTTP 400": 2, "too short": 1},
    }
