from __future__ import annotations

from pathlib import Path

import duckdb
import polars
import pytest
from datasets import load_dataset

from draftsmith.errors import UserError
from draftsmith.trace import (
    Trace,
    held_out,
    read_metadata,
    read_traces,
    supervised_rows,
    trace_id,
    write_traces,
)


def make(number: int, **changes: object) -> Trace:
    values = {
        "trace_id": trace_id(f"q{number}", 0, 0),
        "question_key": f"q{number}",
        "prompt_ids": [1, 2, 3],
        "generated_ids": [4, 5, 6, 7],
        "reasoning_span": (0, 2),
        "answer_span": (3, 4),
        "reasoning": "line\u2028separated\u0085text",
    }
    return Trace(**{**values, **changes})  # type: ignore[arg-type]


def test_labels_at_step_0_are_generated_tokens_after_the_first() -> None:  # P20
    # 10 ids, the reply at positions 4 to 7; what follows it was not generated.
    labels = [row + 2 for row in supervised_rows(prompt_length=4, total_length=8)]
    assert labels == [5, 6, 7]


def test_the_mask_moves_with_the_targets_at_every_ttt_step() -> None:  # P20
    for step in range(4):
        rows = supervised_rows(4, 8, step)
        assert [row + 2 + step for row in rows] == [5, 6, 7][step:]
        assert rows.start == 3 or not len(rows)


def test_a_reply_of_one_token_supervises_nothing() -> None:
    assert list(supervised_rows(4, 5)) == []


def test_traces_come_back_as_written(tmp_path: Path) -> None:
    traces = [make(0), make(1, reasoning_span=None, answer_span=None, state="cut_in_reasoning")]
    write_traces(tmp_path / "part-00000.parquet", traces, {"held_out": "0.1"})
    assert list(read_traces(tmp_path)) == [
        make(0, prompt_ids=[1, 2, 3]),
        make(1, reasoning_span=None, answer_span=None, state="cut_in_reasoning"),
    ]
    assert read_metadata(tmp_path) == {"held_out": "0.1"}


def test_rejected_and_failed_rows_are_kept_but_not_read_for_training(tmp_path: Path) -> None:
    write_traces(tmp_path / "part-00000.parquet", [make(0), make(1, state="rejected"), make(2, state="failed")], {})
    assert len(list(read_traces(tmp_path))) == 1
    assert len(list(read_traces(tmp_path, frozenset({"rejected", "failed"})))) == 2


def test_traces_are_readable_by_datasets_duckdb_and_polars(tmp_path: Path) -> None:
    path = tmp_path / "part-00000.parquet"
    write_traces(path, [make(0), make(1)], {})
    dataset = load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path))
    assert dataset[1]["generated_ids"] == [4, 5, 6, 7]
    assert duckdb.sql(f"select sum(len(generated_ids)) from '{path}'").fetchall() == [(8,)]
    assert polars.read_parquet(path)["state"].to_list() == ["ok", "ok"]


def test_a_folder_without_traces_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected Parquet trace files"):
        list(read_traces(tmp_path))


def test_the_held_out_split_depends_on_the_key_alone_and_has_about_its_share() -> None:
    keys = [f"q{number}" for number in range(4000)]
    chosen = [key for key in keys if held_out(key, 0.1)]
    assert 320 < len(chosen) < 480
    assert chosen == [key for key in keys if held_out(key, 0.1)]
    assert not any(held_out(key, 0.0) for key in keys)


def test_trace_ids_differ_by_question_turn_and_sample() -> None:
    assert len({trace_id(q, t, s) for q in "ab" for t in range(3) for s in range(3)}) == 18
