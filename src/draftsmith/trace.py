"""The Trace: one generation by the target, and everything derived from where its prompt ends.

Token ids are the truth; text columns are for people. Supervised positions come from the boundary between `prompt_ids`
and `generated_ids`, never from text. One Parquet file family under `RUN/traces/` holds traces (zstd), readable as it is
by HF `datasets`, DuckDB and polars.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.errors import UserError

State = Literal["ok", "cut_in_reasoning", "cut_in_answer", "rejected", "failed"]
IdsSource = Literal["engine", "rendered_verified", "rendered"]
Span = tuple[int, int]
"""Half-open [start, end) over `generated_ids`."""

TRAINABLE: frozenset[str] = frozenset({"ok", "cut_in_reasoning", "cut_in_answer"})
"""States whose ids are what the target really said; `rejected` and `failed` rows are kept for the record only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One generation: prompt ids + generated ids + how it ended."""

    trace_id: str
    question_key: str
    sample: int = 0
    source: str = ""
    messages: str = "[]"
    """The conversation the prompt was rendered from, as a JSON list (text, so that Arrow needs one type)."""
    prompt_ids: Sequence[int] = ()
    generated_ids: Sequence[int] = ()
    """As the target produced them, final EOS included."""
    finish_reason: str = ""
    state: State = "ok"
    reasoning_span: Span | None = None
    """Ids of the thinking itself, delimiters outside. None: no reasoning."""
    answer_span: Span | None = None
    """Ids after the closing delimiter, final stop id included. None: the reply was cut in reasoning."""
    ids_source: IdsSource = "engine"
    reasoning: str = ""
    answer: str = ""
    sampling: str = "{}"
    """Explicit sampling values, template options and thinking mode, as JSON."""
    usage: str = "{}"
    timing: str = "{}"
    error: str = ""
    extra: dict[str, Any] = field(default_factory=dict, compare=False)
    """Never stored; room for a capture engine's own notes."""


SCHEMA = pa.schema(
    [
        ("trace_id", pa.string()),
        ("question_key", pa.string()),
        ("sample", pa.int32()),
        ("source", pa.string()),
        ("messages", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("generated_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("state", pa.string()),
        ("reasoning_span", pa.list_(pa.int32())),
        ("answer_span", pa.list_(pa.int32())),
        ("ids_source", pa.string()),
        ("reasoning", pa.string()),
        ("answer", pa.string()),
        ("sampling", pa.string()),
        ("usage", pa.string()),
        ("timing", pa.string()),
        ("error", pa.string()),
    ]
)


def trace_id(question_key: str, turn: int, sample: int) -> str:
    """A stable id: the same question, turn and sample always get the same one, wherever they stand in the input."""
    return hashlib.sha256(f"{question_key}/{turn}/{sample}".encode()).hexdigest()[:24]


def held_out(question_key: str, share: float) -> bool:
    """Whether a question belongs to the held-out split: by hash of its key, so every stage and every run agrees."""
    digest = hashlib.sha256(f"held-out/{question_key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < share


def supervised_rows(prompt_length: int, total_length: int, ttt_step: int = 0) -> range:
    """Rows p the draft is trained on at one TTT step.

    Row p reads the embedding of token p+1+k (k = `ttt_step`) and learns the target's distribution for token p+2+k. It
    is supervised only if token p+1 and token p+2+k were both generated, so the first generated token (which comes from
    the target itself) is never a label.

    Args:
        prompt_length: number of prompt ids, at least 1.
        total_length: prompt ids + generated ids.
        ttt_step: k >= 0.
    """
    return range(prompt_length - 1, max(prompt_length - 1, total_length - 2 - ttt_step))


def as_table(traces: Sequence[Trace]) -> pa.Table:
    """The traces as rows of SCHEMA."""
    columns = [pa.array([getattr(trace, field.name) for trace in traces], field.type) for field in SCHEMA]
    return pa.table(columns, schema=SCHEMA)


def from_row(row: dict[str, Any]) -> Trace:
    """A trace from a row of SCHEMA (as pyarrow's `to_pylist` gives it)."""
    values = {name: row[name] for name in SCHEMA.names}
    for name in ("reasoning_span", "answer_span"):
        values[name] = tuple(row[name]) if row[name] is not None else None
    return Trace(**values)


def write_traces(path: Path, traces: Sequence[Trace], metadata: dict[str, str]) -> None:
    """Writes one Parquet file (zstd) with `metadata` under the key `draftsmith` of the schema metadata."""
    table = as_table(traces).replace_schema_metadata({"draftsmith": json.dumps(metadata, sort_keys=True)})
    pq.write_table(table, path, compression="zstd")


def trace_files(folder: Path) -> list[Path]:
    """The Parquet files of a traces folder, in order.

    Raises:
        UserError: the folder is missing or holds no Parquet file.
    """
    files = sorted(folder.glob("*.parquet"))
    if not files:
        raise UserError(f"{folder}: expected Parquet trace files, found none; run `draftsmith capture` first")
    return files


def read_traces(folder: Path, states: frozenset[str] = TRAINABLE) -> Iterator[Trace]:
    """Traces of `folder` whose state is in `states`, in stored order, one record batch in memory at a time."""
    for path in trace_files(folder):
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=512):
                for row in batch.to_pylist():
                    if row["state"] in states:
                        yield from_row(row)


def read_metadata(folder: Path) -> dict[str, str]:
    """What capture wrote into the file metadata: target, tokenizer, template and server fingerprints, held_out."""
    raw = pq.read_schema(trace_files(folder)[0]).metadata or {}
    loaded: dict[str, str] = json.loads(raw.get(b"draftsmith", b"{}"))
    return loaded
