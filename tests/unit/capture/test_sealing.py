from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import datasets
import duckdb
import polars
import pyarrow.parquet as pq
import pytest

from draftsmith.capture import gathering, journal, sealing, segments
from draftsmith.capture.journal import JOURNAL, Journal
from draftsmith.capture.sealing import (
    NO_LONGER_ASKED,
    parts_no_longer_asked,
    seal,
    sealed_ids,
    sealed_parts,
    summary,
    tidy,
    write_parts,
)
from draftsmith.capture.segments import SegmentDamaged
from draftsmith.trace import Trace, read_metadata, read_traces, trace_id


def name_of(name: str) -> str:
    return trace_id(name, 0, 0)


def trace(name: str, **fields: Any) -> Trace:
    ids = {"prompt_ids": [1, 2], "generated_ids": [3, 4, 5]}
    return Trace(**{"trace_id": name_of(name), "question_key": f"key {name}", **ids, **fields})


def many(count: int) -> list[Trace]:
    rng = random.Random(0)
    return [
        trace(f"{number}", generated_ids=[rng.randrange(100_000) for _ in range(rng.randrange(2, 60))], answer="é" * 9)
        for number in range(count)
    ]


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments, blocks, chunks and parts of some traces each, and a cache of some blocks."""
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 8000)
    monkeypatch.setattr(journal, "ROOMY", math.inf)
    for module in (segments, gathering):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(gathering, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(gathering, "CACHE_BYTES", 4000)
    monkeypatch.setattr(gathering, "TOO_OFTEN", 2)
    monkeypatch.setattr(sealing, "PART_IDS", 1000)


def test_sealing_keeps_the_asked_order_and_removes_the_journal(tmp_path: Path) -> None:
    names = [f"{number:02}" for number in range(7)]
    (tmp_path / "part-00009.parquet").write_bytes(b"left by an attempt that was killed while sealing")
    with Journal(tmp_path) as journal:
        for name in reversed(names):
            journal.append(trace(name))
        assert sealed_parts(tmp_path) == []
        journal.sync()
        parts = seal(journal, map(name_of, names), {"target": "toy"})
    assert sealed_parts(tmp_path) == parts == list(tmp_path.iterdir())
    assert list(sealed_ids(parts)) == list(map(name_of, names)) == [row.trace_id for row in read_traces(tmp_path)]
    assert read_metadata(tmp_path) == {"target": "toy"}


@pytest.mark.parametrize("shuffle", ["nearly in order", "at random"])
def test_whatever_order_the_replies_came_in_every_trace_is_sealed_in_its_place(
    tmp_path: Path, small_files: None, shuffle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = many(300)
    came, rng = list(traces), random.Random(1)
    came.sort(key=lambda trace: int(traces.index(trace)) + rng.random() * (8 if shuffle == "nearly in order" else 9999))
    laid_out = []
    real = gathering._laid_out
    monkeypatch.setattr(gathering, "_laid_out", lambda *given: laid_out.append(given) or real(*given))
    with Journal(tmp_path) as journal:
        for trace in came:
            journal.append(trace)
        journal.sync()
        parts = seal(journal, [trace.trace_id for trace in traces], {})
    assert list(read_traces(tmp_path)) == traces
    assert len(parts) > 3
    assert bool(laid_out) == (shuffle == "at random")
    assert sorted(tmp_path.iterdir()) == parts


def test_traces_of_removed_questions_are_kept_apart_unless_they_only_wait_for_another_try(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for name in ("a", "gone", "b"):
            journal.append(trace(name))
        journal.append(trace("given up", state="failed"), retry=True)
        journal.sync()
        parts = seal(journal, [name_of("b"), name_of("a")], {"target": "toy"})
    assert list(sealed_ids(parts)) == [name_of("b"), name_of("a")]
    assert list(sealed_ids(parts_no_longer_asked(tmp_path))) == [name_of("gone")]
    assert [row.trace_id for row in read_traces(tmp_path)] == [name_of("b"), name_of("a")]
    assert read_metadata(tmp_path / NO_LONGER_ASKED) == {"target": "toy"}


@pytest.mark.parametrize("point", range(12))
def test_a_crash_at_any_point_of_sealing_costs_no_trace_and_no_finished_part(
    tmp_path: Path, small_files: None, monkeypatch: pytest.MonkeyPatch, point: int
) -> None:  # P34
    traces = many(60)
    with Journal(tmp_path) as journal:
        for trace in (*reversed(traces), Trace(trace_id=name_of("gone"), question_key="k")):
            journal.append(trace)
    calls = iter(range(1000))

    def crashing(owner: Any, name: str) -> Any:
        real = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            if next(calls) == point:
                raise KeyboardInterrupt
            return real(*given, **named)

        return call

    order = [trace.trace_id for trace in traces]
    crashed = False
    with monkeypatch.context() as patch:
        for owner, name in ((sealing.os, "replace"), (sealing, "sync"), (sealing, "tidy")):
            patch.setattr(owner, name, crashing(owner, name))
        try:
            with Journal(tmp_path) as journal:
                seal(journal, order, {})
        except KeyboardInterrupt:
            crashed = True
    there = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("part-*.parquet")}
    (tmp_path / "part-00099.parquet.tmp").write_bytes(b"half")  # as a kill would leave it
    tidy(tmp_path)
    assert not list(tmp_path.glob("*.tmp"))
    parts = sealed_parts(tmp_path)
    if not parts:
        assert crashed and (tmp_path / JOURNAL).exists()
        with Journal(tmp_path) as journal:
            parts = seal(journal, order, {})
    assert list(read_traces(tmp_path)) == traces
    assert list(sealed_ids(parts_no_longer_asked(tmp_path))) == [name_of("gone")]
    kept = [name for name in there if (tmp_path / name).stat().st_mtime_ns == there[name]]
    assert len(kept) == len(there)


def test_parts_of_another_choice_of_questions_are_sealed_anew(
    tmp_path: Path, small_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = many(60)
    with Journal(tmp_path) as journal:
        for trace in traces:
            journal.append(trace)
        journal.sync()
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "close", lambda self: exec("raise KeyboardInterrupt"))
            with pytest.raises(KeyboardInterrupt):
                seal(journal, [trace.trace_id for trace in traces], {})
        journal.writer.close()
    assert sealed_parts(tmp_path) == []
    with Journal(tmp_path) as journal:
        seal(journal, [trace.trace_id for trace in traces[::-2]], {})
    assert list(read_traces(tmp_path)) == traces[::-2]


@pytest.mark.parametrize("kind", ["log", "closed segment"])
def test_a_record_that_was_damaged_on_the_disk_is_named_and_nothing_is_sealed_in_its_place(
    tmp_path: Path, small_files: None, kind: str
) -> None:  # P34
    traces = many(60)
    with Journal(tmp_path) as journal:
        for trace in traces[: 60 if kind == "closed segment" else 5]:
            journal.append(trace)
    with Journal(tmp_path) as journal:
        journal.packer.shutdown()
        path = sorted((tmp_path / JOURNAL).iterdir())[0]
        raw = bytearray(path.read_bytes())
        raw[raw.index(b"key ") if kind == "log" else len(raw) // 4] ^= 1
        path.write_bytes(raw)
        order = [trace.trace_id for trace in traces if journal.final(trace.trace_id)]
        with pytest.raises(SegmentDamaged) as found:
            seal(journal, order, {})
        assert journal.forget(found.value.segment, found.value.rows) == len(found.value.rows)
    assert sealed_parts(tmp_path) == []


def test_what_is_sealed_reads_as_it_is_in_datasets_duckdb_and_polars(tmp_path: Path, small_files: None) -> None:
    traces = [*many(60), trace("spans", reasoning_span=(0, 1), answer_span=(1, 3))]
    with Journal(tmp_path) as journal:
        for one in traces:
            journal.append(one)
        journal.sync()
        seal(journal, [one.trace_id for one in traces], {"target": "toy"})
    files = f"{tmp_path}/*.parquet"
    ids = [one.trace_id for one in traces]
    loaded = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["trace_id"][:] == ids and loaded[-1]["answer_span"] == [1, 3]
    assert [row[0] for row in duckdb.sql(f"SELECT trace_id FROM '{files}'").fetchall()] == ids
    assert polars.read_parquet(files)["generated_ids"].to_list() == [list(one.generated_ids) for one in traces]


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
    good = summary(write_parts(tmp_path, traces[:2], {}))
    assert (good["prompt_tokens"], good["generated_tokens"]) == (4, 6)
