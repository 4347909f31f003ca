"""The journal's files: logs that grow, and closed logs turned into Parquet.

`journal/00007.log` holds records one after another. Once it is closed it becomes `00007.parquet` with the same rows in
the same order (written beside, synced, renamed; then the log is removed), so that a record's place, segment and number
in it, stays true. Both are read by blocks of about BLOCK_BYTES: that bounds the memory of everything here.
"""

from __future__ import annotations

import mmap
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.fs  # the first Parquet writer would load its 40 MB in mid-run
import pyarrow.parquet as pq

from draftsmith.artifacts import replacing
from draftsmith.capture.records import (
    HEAD_BYTES,
    MAGIC,
    RECORD_SCHEMA,
    Head,
    body_at,
    code_of,
    head_at,
    key_of,
    nobody,
    table_of,
)

BLOCK_BYTES = 2 << 20
DICTIONARY = ["source", "finish_reason", "state", "ids_source", "sampling", "error"]
"""Columns of few distinct values; trying a dictionary on the others costs more than all the rest of writing."""
PACKING = {"use_byte_stream_split": ["prompt_ids.list.element", "generated_ids.list.element"]}
"""Makes ids smaller in less time; not every reader knows it yet, so only what this module reads is written with it."""
WRITING = {
    "compression": "zstd",
    "use_dictionary": DICTIONARY,
    "write_statistics": False,
    "write_page_checksum": True,
}


class SegmentDamaged(Exception):
    """Rows of a closed segment cannot be read."""

    def __init__(self, path: Path, segment: int, rows: range) -> None:
        which = f"row {rows.start}" if len(rows) == 1 else f"rows {rows.start} to {rows.stop - 1}"
        super().__init__(f"{path}: {which}")
        self.path, self.segment, self.rows = path, segment, rows


@dataclass(frozen=True, slots=True)
class Key:
    """What opening a journal learns of a record."""

    key: bytes
    state: int
    retry: bool


@dataclass(slots=True)
class Log:
    """A log: where each of its records starts, and the end of the last one."""

    number: int
    path: Path
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    end: int = 0
    holes: set[int] = field(default_factory=set)
    """Rows that proved damaged: they read as records of nobody."""

    @property
    def rows(self) -> int:
        """Its number of records."""
        return len(self.offsets)

    def place(self, length: int) -> int:
        """Takes the place for a further record of `length` bytes; returns its offset."""
        offset = self.end
        self.offsets.append(offset)
        self.end += length
        return offset

    def blocks(self) -> array[int]:
        """Number of the first row of each block, and the number of rows as the end."""
        firsts, start = array("Q", [0] if self.offsets else []), 0
        for row, offset in enumerate(self.offsets):
            if offset - start >= BLOCK_BYTES:
                firsts.append(row)
                start = offset
        firsts.append(self.rows)
        return firsts

    def table(self, first: int, stop: int) -> pa.Table:
        """Rows [first, stop) as RECORD_SCHEMA.

        Raises:
            SegmentDamaged: a record is not as it was written.
        """
        heads, bodies = [], []
        for head, body in self.records(first, stop):
            heads.append(head)
            bodies.append(body)
        return table_of(heads, bodies)

    def records(self, first: int, stop: int) -> Iterator[tuple[Head, memoryview]]:
        """Heads and bodies of rows [first, stop).

        Raises:
            SegmentDamaged: as `table`.
        """
        start = self.offsets[first]
        end = self.offsets[stop] if stop < self.rows else self.end
        with open(self.path, "rb") as file:
            file.seek(start)
            data = memoryview(file.read(end - start))
        for row in range(first, stop):
            if row in self.holes:
                yield nobody()
                continue
            offset = self.offsets[row] - start
            head = head_at(data, offset)
            body = body_at(data, offset, head) if head else None
            if head is None or body is None:
                raise SegmentDamaged(self.path, self.number, range(row, row + 1))
            yield head, body


@dataclass(slots=True)
class Packed:
    """A closed segment: a Parquet file and the first row of each of its row groups, then the number of rows."""

    number: int
    path: Path
    firsts: array[int]

    @property
    def rows(self) -> int:
        """Its number of records."""
        return self.firsts[-1]

    def blocks(self) -> array[int]:
        """As `Log.blocks`: its row groups."""
        return self.firsts

    def table(self, first: int, stop: int) -> pa.Table:
        """Rows [first, stop), which lie in one block.

        Raises:
            SegmentDamaged: that block cannot be read.
        """
        block = bisect_right(self.firsts, first) - 1
        start, end = self.firsts[block], self.firsts[block + 1]
        try:
            with pq.ParquetFile(self.path, page_checksum_verification=True) as file:
                table = file.read_row_group(block, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise SegmentDamaged(self.path, self.number, range(start, end)) from error
        return table.slice(first - start, stop - first)


@dataclass(frozen=True, slots=True)
class Opened:
    """A log as opening found it."""

    log: Log
    keys: list[Key]
    damaged: int
    """Damaged stretches with a whole record after them."""


def open_log(number: int, path: Path) -> Opened:
    """Goes through a log, every checksum included; what is after its last whole record is left out of `log.end`.

    A log whose middle is damaged keeps its whole records, each where it lies.
    """
    log = Log(number, path)
    keys: list[Key] = []
    damaged = bad = offset = 0
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return Opened(log, keys, 0)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
            while offset < size:
                head = head_at(data, offset)
                if head is None:
                    bad += 1
                    offset = _next_head(mapped, data, offset + 1)
                    continue
                if body_at(data, offset, head) is None:
                    bad += 1
                    offset = _next_head(mapped, data, offset + HEAD_BYTES)
                    continue
                damaged, bad = damaged + bad, 0
                log.offsets.append(offset)
                keys.append(Key(head.key, head.state, head.retry))
                offset += HEAD_BYTES + head.length
                log.end = offset
    return Opened(log, keys, damaged)


def open_packed(number: int, path: Path) -> tuple[Packed, list[Key]]:
    """A closed segment and the keys of its rows; only their columns are read.

    Raises:
        SegmentDamaged: the file is cut off, or its keys cannot be read.
    """
    firsts = array("Q", [0])
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for group in range(file.num_row_groups):
                firsts.append(firsts[-1] + file.metadata.row_group(group).num_rows)
            table = file.read(["trace_id", "state", "retry"], use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise SegmentDamaged(path, number, range(0)) from error
    columns = (table[name].to_pylist() for name in ("trace_id", "state", "retry"))
    keys = [Key(key_of(id), code_of(state), retry) for id, state, retry in zip(*columns, strict=True)]
    return Packed(number, path, firsts), keys


def pack(log: Log) -> Packed:
    """Writes a closed log as Parquet, safe against a power cut once it returns; the log is left where it is.

    Raises:
        OSError: no room, or the disk is failing; nothing is left behind.
        SegmentDamaged: the log is not as it was written.
    """
    firsts = log.blocks()
    path = log.path.with_suffix(".parquet")
    with replacing(path) as beside, pq.ParquetWriter(beside, RECORD_SCHEMA, **WRITING, **PACKING) as writer:
        for first, stop in pairwise(firsts):
            writer.write_table(log.table(first, stop))
    return Packed(log.number, path, firsts)


def _next_head(mapped: mmap.mmap, data: memoryview, start: int) -> int:
    """Offset of the next head at or after `start`; the end where there is none."""
    while (found := mapped.find(MAGIC, start)) >= 0:
        if head_at(data, found) is not None:
            return found
        start = found + 1
    return len(data)
