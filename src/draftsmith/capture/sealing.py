"""A traces folder as later stages find it: Parquet parts, what they say about themselves, and their counts.

Captured and imported folders are written here alike. A part appears under its name whole or not at all. Parts without
a journal are complete; while the journal is there, parts that were sealed from just what it holds are taken over, so a
crash in sealing costs one part. The counts are read back from the files: what is on disk is what is reported. Sealing
a capture holds some blocks of records in memory (`gathering`), writing imported traces one part's, counting one part's
keys and, where not all rows count, one row group's ids.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from draftsmith.artifacts import fingerprint, read_json, replacing, sync, write_json
from draftsmith.capture.gathering import gather
from draftsmith.capture.journal import FORGOTTEN, JOURNAL, Journal, places_of
from draftsmith.capture.records import STATES
from draftsmith.capture.segments import WRITING
from draftsmith.recipe import QuestionSettings
from draftsmith.target.template import Template
from draftsmith.target.thinking import Delimiters, delimiters_json
from draftsmith.trace import SCHEMA, TRAINABLE, Trace, as_table

PART_ROWS = 50_000
PART_IDS = 4_000_000
"""Traces and token ids per part at most (one trace may exceed it)."""
COLUMNS = ["question_key", "state", "reasoning_span", "ids_source", "error"]
TOP_REASONS = 10
NO_LONGER_ASKED = "no-longer-asked"
"""Folder of the traces whose questions have left the source: kept, not trained on."""
SEALING, SEALED, SCRATCH = "sealing.json", f"{JOURNAL}.sealed", f"{JOURNAL}.scratch"


def seal(journal: Journal, order: Iterable[str], metadata: dict[str, str]) -> list[Path]:
    """Writes the traces in `order` (trace ids) as parts beside the journal, then closes and removes the journal.

    Traces that `order` does not name go to `no-longer-asked/`. May be called again after whatever stopped it.

    Args:
        journal: holds a record for every id in `order`, all of them written (`Journal.sync`).
        order: trace ids in input order.
        metadata: for the schema metadata of every part.

    Raises:
        SegmentDamaged: records that can no longer be read; the journal is as it was.
        OSError: no room, or the disk is failing; likewise.
    """
    folder = journal.path.parent
    numbers = journal.numbers_of(order)
    _seal_others(journal, numbers, metadata)
    parts = _sealed_before(journal, numbers, metadata)
    begun = sum(pq.read_metadata(part).num_rows for part in parts)
    tables = gather(journal, numbers[begun:], folder / SCRATCH)
    parts += _write(folder, tables, metadata, len(parts))
    journal.close()
    os.replace(journal.path, folder / SEALED)  # in one step: what is left of a journal would be taken for one
    sync(folder)
    tidy(folder)
    return parts


def tidy(folder: Path) -> None:
    """Removes the journal that sealing is done with, and what a crash left half written."""
    shutil.rmtree(folder / SEALED, ignore_errors=True)
    for leftover in (folder / SCRATCH, *folder.glob("part-*.tmp")):
        leftover.unlink(missing_ok=True)


def sealed_parts(folder: Path) -> list[Path]:
    """The part files of a folder whose journal was sealed; empty while it was not."""
    return [] if (folder / JOURNAL).exists() else sorted(folder.glob("part-*.parquet"))


def parts_no_longer_asked(folder: Path) -> list[Path]:
    """The part files of traces whose questions have left the source."""
    return sorted((folder / NO_LONGER_ASKED).glob("part-*.parquet"))


def sealed_ids(parts: Sequence[Path]) -> Iterator[str]:
    """The trace ids in `parts`, in order."""
    for part in parts:
        yield from pq.read_table(part, columns=["trace_id"])["trace_id"].to_pylist()


def write_parts(folder: Path, traces: Iterable[Trace], metadata: dict[str, str]) -> list[Path]:
    """Writes `part-*.parquet` into `folder` in place of those there, safe against a power cut once it returns.

    Args:
        folder: where to.
        traces: in the order they are to have.
        metadata: for the schema metadata of every part.
    """
    _remove_parts(folder)
    return _write(folder, map(as_table, _groups(traces)), metadata, 0)


def question_metadata(settings: QuestionSettings, template: Template, delimiters: Delimiters | None) -> dict[str, str]:
    """What a traces folder says about its questions, template and tokenizer, as text, for the files' metadata.

    `vocab_size` is the target's (rows of its embedding), `special_ids` are all that must stay in a draft vocabulary
    besides `stop_ids` and those in `delimiters`.
    """
    return {
        "tokenizer": template.name,
        "tokenizer_fingerprint": template.tokenizer_fingerprint,
        "template_fingerprint": template.fingerprint,
        "template_options": json.dumps(settings.template_options),
        "preamble": json.dumps([message.model_dump() for message in settings.preamble], ensure_ascii=False),
        "delimiters": delimiters_json(delimiters),
        "stop_ids": json.dumps(sorted(template.stop_ids)),
        "special_ids": json.dumps(sorted(template.special_ids())),
        "vocab_size": str(template.vocab_size),
        "held_out": str(settings.held_out),
    }


def summary(parts: Sequence[Path]) -> dict[str, Any]:
    """Counts over all traces of `parts`; tokens, reasoning and ids sources over the trainable ones only."""
    keys: list[pa.Array] = []
    states: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for part in parts:
        table = pq.read_table(part, columns=COLUMNS)
        keys.append(pc.unique(table["question_key"]))
        states.update(_counts(table["state"]))
        for error, count in _counts(table["error"]).items():
            if error:
                reasons[reason_class(error)] += count
        good = pc.is_in(table["state"], value_set=pa.array(sorted(TRAINABLE)))
        sources.update(_counts(table["ids_source"].filter(good)))
        tokens["with_reasoning"] += pc.sum(pc.and_(good, pc.is_valid(table["reasoning_span"]))).as_py() or 0
        for name in ("prompt", "generated"):
            tokens[f"{name}_tokens"] += sum(_ids_by_group(part, f"{name}_ids", good))
    return {
        "questions": pc.count_distinct(pa.chunked_array(keys, pa.string())).as_py(),
        "traces": states.total(),
        **{state: states[state] for state in STATES},
        **{name: tokens[name] for name in ("with_reasoning", "prompt_tokens", "generated_tokens")},
        "ids_source": dict(sources),
        "reasons": dict(reasons.most_common(TOP_REASONS)),
    }


def _ids_by_group(part: Path, name: str, good: pa.ChunkedArray) -> Iterator[int]:
    """How many ids the `good` rows of each row group hold in a column, where no good row holds none."""
    with pq.ParquetFile(part) as file:
        place = file.schema_arrow.names.index(name)
        start = 0
        for group in range(file.num_row_groups):
            found = file.metadata.row_group(group)
            mine = good.slice(start, found.num_rows)
            start += found.num_rows
            if pc.all(mine).as_py():
                yield found.column(place).num_values
            else:
                lengths = pc.list_value_length(file.read_row_group(group, columns=[name])[name])
                yield pc.sum(lengths.filter(mine)).as_py() or 0


def reason_class(error: str) -> str:
    """What stands before the first colon of an error: its class, without the details of one row."""
    return error.partition(": ")[0]


def _counts(column: pa.ChunkedArray) -> Counter[str]:
    return Counter({item["values"]: item["counts"] for item in pc.value_counts(column).to_pylist()})


def _seal_others(journal: Journal, asked: np.ndarray, metadata: dict[str, str]) -> None:
    """Parts of what has a final record but is not asked for any more."""
    folder = journal.path.parent / NO_LONGER_ASKED
    shutil.rmtree(folder, ignore_errors=True)
    numbers = journal.index.numbers()
    final = (numbers > 0) & (numbers & np.uint64(15) < FORGOTTEN)
    known = np.sort(asked)
    found = known[np.minimum(np.searchsorted(known, numbers), len(known) - 1)] == numbers
    left = numbers[final & ~found]
    if not len(left):
        return
    folder.mkdir()
    segments, rows = places_of(left)
    left = left[np.lexsort((rows, segments))]
    _write(folder, gather(journal, left, journal.path.parent / SCRATCH), metadata, 0)


def _sealed_before(journal: Journal, numbers: np.ndarray, metadata: dict[str, str]) -> list[Path]:
    """The parts that an attempt to seal just this left; parts of anything else are removed."""
    folder = journal.path.parent
    wanted = fingerprint([hashlib.sha256(numbers.tobytes()).hexdigest(), metadata])
    marker = journal.path / SEALING
    if not marker.exists() or read_json(marker) != wanted:
        _remove_parts(folder)
        write_json(marker, wanted)
    return sorted(folder.glob("part-*.parquet"))


def _remove_parts(folder: Path) -> None:
    for stale in folder.glob("part-*.parquet"):
        stale.unlink()


def _write(folder: Path, tables: Iterator[pa.Table], metadata: dict[str, str], number: int) -> list[Path]:
    """Parts out of tables, which are never cut: each part takes as many as its bounds allow, at least one."""
    schema = SCHEMA.with_metadata({"draftsmith": json.dumps(metadata, sort_keys=True)})
    parts: list[Path] = []
    table = next(tables, None)
    while table is not None:
        path = folder / f"part-{number + len(parts):05}.parquet"
        with replacing(path) as beside, pq.ParquetWriter(beside, schema, **WRITING) as writer:
            rows = ids = 0
            while table is not None and (not rows or _fits(table, rows, ids)):
                writer.write_table(table.select(SCHEMA.names))
                rows, ids = rows + table.num_rows, ids + _ids_in(table)
                table = next(tables, None)
        parts.append(path)
    return parts


def _fits(table: pa.Table, rows: int, ids: int) -> bool:
    return rows + table.num_rows <= PART_ROWS and ids + _ids_in(table) <= PART_IDS


def _ids_in(table: pa.Table) -> int:
    return sum(len(part.flatten()) for name in ("prompt_ids", "generated_ids") for part in table[name].chunks)


def _groups(traces: Iterable[Trace]) -> Iterator[list[Trace]]:
    group: list[Trace] = []
    held = 0
    for trace in traces:
        size = len(trace.prompt_ids) + len(trace.generated_ids)
        if group and (len(group) == PART_ROWS or held + size > PART_IDS):
            yield group
            group, held = [], 0
        group.append(trace)
        held += size
    if group:
        yield group
