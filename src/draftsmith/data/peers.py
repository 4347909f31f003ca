"""What a path holds, whoever wrote it, and its rows in batches: traces, ids with a loss mask, conversations, text.

- `traces`: Parquet (or Arrow) with `prompt_ids` and `generated_ids`: a traces folder, a run, an exported dataset.
- `masked`: `input_ids` and `loss_mask`, as speculators 0.9.0 and SpecForge 0.2.0 read and write them: JSONL, JSON,
  Parquet, or a folder written by `datasets.save_to_disk` (their prepared data; hidden states beside it are left alone).
- `conversations`: `conversations`, `messages` or prompt columns: SpecForge, ShareGPT, and what capture asks.
- `text`: SpecForge's preformatted `text`.

Parquet and Arrow stay columns; JSON is split at LF alone (P16), and a line that does not parse is handed on, not fatal.
A batch holds about PIECE ids, so memory does not depend on the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.artifacts import read_json
from draftsmith.capture.attempt import TARGET
from draftsmith.capture.journal import JOURNAL
from draftsmith.capture.rows import PROMPT_COLUMNS, TURN_COLUMNS
from draftsmith.capture.sealing import NO_LONGER_ASKED
from draftsmith.capture.segments import open_log
from draftsmith.capture.sources import JSONL
from draftsmith.data.ragged import INT32, Ragged, from_arrow, from_rows
from draftsmith.errors import UserError

Kind = Literal["traces", "masked", "conversations", "text"]
LOG = ".log"
SEGMENTS = (".parquet", LOG)
"""Of a journal."""
ENDINGS = (".parquet", ".arrow", *JSONL, ".json")
NOT_DATA = frozenset({"manifest.json", "plan.json", "progress.json", "dataset_info.json", "state.json"})
NOT_DATA_FOLDERS = frozenset({"hidden_states", NO_LONGER_ASKED})
PIECE = 1 << 18
"""Ids per batch, about: what fits in a core's cache."""
SEPARATORS = (b"\xe2\x80\xa8", b"\xe2\x80\xa9", b"\xc2\x85")
"""U+2028, U+2029 and U+0085 in UTF-8."""
ID_COLUMNS = ("id", "trace_id", "conv_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A recognised path."""

    path: Path
    kind: Kind
    files: tuple[Path, ...]
    metadata: dict[str, str]
    """What our own files say about themselves; empty for others'."""
    unfinished: bool = False
    """Whether this is the journal of a capture that is not finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row of a text format."""

    name: str
    """Its id, else its place."""
    place: str
    row: dict[str, Any] | None
    """None: it does not parse."""
    separators: bool
    """Whether it holds Unicode line separators unescaped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Masked:
    """A batch of rows of ids with their loss masks."""

    names: list[str]
    ids: Ragged
    masks: Ragged | None
    """None: the file has no masks. Rows may differ in length from `ids`."""
    broken: list[str]
    """Lines that do not parse; they are not among `names`, nor are those of `unusable`."""
    unusable: list[str]
    """Rows whose ids or mask are not lists of integers."""
    separators: list[str]
    """Rows that hold Unicode line separators unescaped."""


def open_source(path: Path) -> Source:
    """Recognises a file or folder.

    Raises:
        UserError: nothing there, nothing known in it, or several kinds of data.
    """
    files, unfinished = _files(path.expanduser())
    kinds = {file: _kind(file) for file in files}
    found = sorted(set(kinds.values()))
    if len(found) > 1:
        some = ", ".join(f"{next(file for file in files if kinds[file] == kind)} ({kind})" for kind in found)
        raise UserError(f"{path}: expected one kind of data, found {some}; give one of them")
    metadata = _metadata(files[0]) if found == ["traces"] else {}
    if unfinished and (noted := files[0].parents[1] / TARGET).exists():
        metadata = read_json(noted)
    return Source(path=path, kind=found[0], files=tuple(files), metadata=metadata, unfinished=unfinished)


def trace_batches(source: Source) -> Iterator[pa.RecordBatch]:
    """Batches of a `traces` source, all columns.

    Raises:
        UserError: a file is damaged.
    """
    for file in source.files:
        yield from _pieces(file, ("prompt_ids", "generated_ids"))


def masked_batches(source: Source) -> Iterator[Masked]:
    """Batches of a `masked` source.

    Raises:
        UserError: a file is damaged, or a column holds no ids.
    """
    for file in source.files:
        yield from _masked_rows(file) if file.suffix not in (".parquet", ".arrow") else _masked_columns(file)


def lines(source: Source) -> Iterator[Line]:
    """Rows of a `conversations` or `text` source.

    Raises:
        UserError: a file is damaged.
    """
    for file in source.files:
        if file.suffix not in (".parquet", ".arrow"):
            yield from json_lines(file)
            continue
        number = 0
        for batch in _record_batches(file):
            for row in batch.to_pylist():
                number += 1
                yield Line(name=_name(row, f"row {number}"), place=f"{file}: row {number}", row=row, separators=False)


def json_lines(path: Path) -> Iterator[Line]:
    """The rows of a JSONL file, or of a JSON array, in order.

    Raises:
        UserError: the file cannot be read, or is neither.
    """
    decoder = msgspec.json.Decoder()
    try:
        with open(path, "rb") as file:
            is_array = file.read(4096).lstrip()[:1] == b"["
            file.seek(0)
            texts = _array_rows(path, file.read()) if is_array else file  # iterating bytes splits at LF alone
            number = 0
            for number, text in enumerate(texts, start=1):
                if not text.strip():
                    continue
                place = f"{path}: line {number}"
                try:
                    row = decoder.decode(text)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    row = None
                separators = any(mark in text for mark in SEPARATORS)
                row = row if isinstance(row, dict) else None
                yield Line(name=_name(row or {}, f"line {number}"), place=place, row=row, separators=separators)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def ids_of(value: Any) -> npt.NDArray[np.int64] | None:
    """A list of integers or booleans (or a list of one such list) as an array; None for anything else."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if not isinstance(value, list) or not set(map(type, value)) <= {int, bool}:
        return None
    if value and (min(value) < INT32.min or max(value) > INT32.max):
        return None
    return np.array(value, np.int64)


def _files(path: Path) -> tuple[list[Path], bool]:
    """The data files of a path, in order, and whether they are an unfinished capture's."""
    if path.is_file():
        if path.suffix not in ENDINGS:
            raise UserError(f"{path}: expected a file ending in {', '.join(ENDINGS)}, found {path.suffix or 'none'}")
        return [path], False
    if not path.is_dir():
        raise UserError(f"{path}: expected a file or folder to inspect, found none")
    if parts := sorted((path / "traces").glob("*.parquet")):
        return parts, False
    journal = [file for file in (path / "traces.partial" / JOURNAL).glob("*.*") if file.suffix in SEGMENTS]
    if journal:
        return sorted(journal), True
    for ending in ENDINGS:
        files = [file for file in sorted(path.rglob(f"*{ending}")) if _is_data(file.relative_to(path))]
        if files:
            return files, False
    raise UserError(f"{path}: expected traces or a dataset ({', '.join(ENDINGS)}), found none in this folder")


def _is_data(file: Path) -> bool:
    hidden = any(part.startswith(".") or part in NOT_DATA_FOLDERS for part in file.parts)
    return not hidden and file.name not in NOT_DATA and not file.name.startswith("cache-")


def _kind(file: Path) -> Kind:
    """What kind of data a file holds, by its columns or its first whole row."""
    if file.suffix == LOG:
        return "traces"
    if file.suffix in (".parquet", ".arrow"):
        columns = set(_schema(file).names)
    else:
        columns = next((set(line.row) for line in json_lines(file) if line.row is not None), set())
    if {"prompt_ids", "generated_ids"} <= columns and file.suffix in (".parquet", ".arrow"):
        return "traces"
    if "input_ids" in columns:
        return "masked"
    if columns & {*TURN_COLUMNS, *PROMPT_COLUMNS}:
        return "conversations"
    if "text" in columns:
        return "text"
    raise UserError(
        f"{file}: expected prompt_ids and generated_ids, input_ids and loss_mask, conversations, messages or text; "
        f"found {', '.join(sorted(columns)) or 'no row that is a JSON object'}"
    )


def _schema(file: Path) -> pa.Schema:
    try:
        if file.suffix == ".parquet":
            return pq.read_schema(file)
        with pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
            return stream.schema
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file}: cannot be read as {file.suffix[1:]}: {error}") from None


def _metadata(file: Path) -> dict[str, str]:
    if file.suffix == LOG:
        return {}
    loaded: dict[str, str] = json.loads((_schema(file).metadata or {}).get(b"draftsmith", b"{}"))
    return loaded


def _record_batches(file: Path) -> Iterator[pa.RecordBatch]:
    try:
        if file.suffix == LOG:
            log = open_log(0, file).log
            for first, stop in pairwise(log.blocks()):
                yield from log.table(first, stop).to_batches()
            return
        if file.suffix == ".parquet":
            with pq.ParquetFile(file) as opened:
                yield from opened.iter_batches(batch_size=256)
            return
        with pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
            yield from stream
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file}: cannot be read as {file.suffix[1:]}: {error}") from None


def _pieces(file: Path, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """The record batches of a file, cut so that the lists of `columns` hold about PIECE ids each."""
    for batch in _record_batches(file):
        ids = np.zeros(batch.num_rows, np.int64)
        for name in columns:
            ids += _list_lengths(file, batch, name)
        numbers = np.cumsum(ids) // PIECE
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), batch.num_rows]
        for start, end in pairwise(cuts):
            if end > start:
                yield batch.slice(start, end - start)


def _list_lengths(file: Path, batch: pa.RecordBatch, name: str) -> npt.NDArray[np.int64]:
    kind = batch[name].type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise UserError(f"{file}: {name}: expected lists of integers, found {kind}")
    return np.asarray(batch[name].value_lengths().fill_null(0), dtype=np.int64)


def _masked_columns(file: Path) -> Iterator[Masked]:
    number = 0
    for batch in _pieces(file, ("input_ids",)):
        columns = set(batch.schema.names)
        ids = from_arrow(batch["input_ids"])
        masks = from_arrow(batch["loss_mask"]) if "loss_mask" in columns else None
        if ids is None or (masks is None and "loss_mask" in columns):
            raise UserError(f"{file}: input_ids and loss_mask: expected lists of integers, found another type")
        own = next((batch[name].to_pylist() for name in ID_COLUMNS if name in columns), [None] * batch.num_rows)
        names = [str(own[i]) if own[i] is not None else f"row {number + i + 1}" for i in range(batch.num_rows)]
        number += batch.num_rows
        yield Masked(names=names, ids=ids, masks=masks, broken=[], unusable=[], separators=[])


def _masked_rows(file: Path) -> Iterator[Masked]:
    pending = _Pending()
    for line in json_lines(file):
        row = line.row or {}
        ids, has_mask = ids_of(row.get("input_ids")), "loss_mask" in row
        mask = ids_of(row["loss_mask"]) if has_mask else np.empty(0, np.int64)
        if pending.held > PIECE or (pending.names and pending.masked != has_mask):
            yield pending.batch()
            pending = _Pending()
        if line.separators:
            pending.separators.append(line.name)
        if line.row is None:
            pending.broken.append(line.name)
        elif ids is None or mask is None:
            pending.unusable.append(line.name)
        else:
            pending.names.append(line.name)
            pending.ids.append(ids)
            pending.masks.append(mask)
            pending.masked, pending.held = has_mask, pending.held + len(ids)
    yield pending.batch()


@dataclass(slots=True)
class _Pending:
    """A batch in the making: all rows with masks, or all without."""

    names: list[str] = field(default_factory=list)
    ids: list[npt.NDArray[np.int64]] = field(default_factory=list)
    masks: list[npt.NDArray[np.int64]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)
    separators: list[str] = field(default_factory=list)
    masked: bool = True
    held: int = 0

    def batch(self) -> Masked:
        return Masked(
            names=self.names,
            ids=from_rows(self.ids),
            masks=from_rows(self.masks) if self.masked else None,
            broken=self.broken,
            unusable=self.unusable,
            separators=self.separators,
        )


def _array_rows(path: Path, data: bytes) -> list[bytes]:
    try:
        return [bytes(raw) for raw in msgspec.json.decode(data, type=list[msgspec.Raw])]
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: expected a JSON array of objects, found other text ({error})") from None


def _name(row: dict[str, Any], place: str) -> str:
    own = next((row[name] for name in ID_COLUMNS if row.get(name) is not None), None)
    return place if own is None else str(own)
