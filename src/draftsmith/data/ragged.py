"""Lists of ids as one flat array with row boundaries, so that a whole batch is looked at in a few numpy passes.

Python lists of 8,192 ids cost a hundred times what the ids take; this costs 4 bytes an id. Arrow lists come in without
a copy where they have no gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.int32]
INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of ids: row r is `values[offsets[r]:offsets[r + 1]]`."""

    values: Ids
    offsets: Ints
    """int64 [rows + 1], from 0 to `len(values)`."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def starts(self) -> Ints:
        """Where each row starts in `values`."""
        return self.offsets[:-1]

    @property
    def ends(self) -> Ints:
        """Where each row ends in `values`."""
        return self.offsets[1:]

    @property
    def lengths(self) -> Ints:
        """Ids per row."""
        return np.diff(self.offsets)

    def row(self, number: int) -> Ids:
        """The ids of one row (a view)."""
        return self.values[self.offsets[number] : self.offsets[number + 1]]

    def rows_of(self, positions: Ints) -> Ints:
        """The row that each position of `values` lies in."""
        return np.searchsorted(self.offsets, positions, side="right") - 1

    def count(self, positions: Ints) -> Ints:
        """How many of `positions` lie in each row."""
        return np.bincount(self.rows_of(positions), minlength=len(self))

    def first(self, positions: Ints) -> Ints:
        """The first of the ascending `positions` in each row; len(values) where a row has none."""
        found = np.append(positions, len(self.values))[np.searchsorted(positions, self.starts)]
        return np.where(found < self.ends, found, len(self.values))

    def last(self, positions: Ints) -> Ints:
        """The last of the ascending `positions` in each row; -1 where a row has none."""
        found = np.append(positions, -1)[np.searchsorted(positions, self.ends) - 1]
        return np.where((found >= self.starts) & (found < self.ends), found, -1)

    def cut(self, starts: Ints, ends: Ints) -> Ragged:
        """New rows, each `values[start:end]`; a copy, unless they are the rows that are there already."""
        if np.array_equal(starts, self.starts) and np.array_equal(ends, self.ends):
            return self
        pieces = [self.values[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        return Ragged(np.concatenate(pieces) if pieces else self.values[:0], offsets_of(ends - starts))

    def find(self, sequence: Sequence[int]) -> Ints:
        """Ascending positions where `sequence` starts, each wholly inside one row."""
        length = len(sequence)
        if len(self.values) < length:
            return np.empty(0, np.int64)
        hits = np.flatnonzero(self.values[: len(self.values) - length + 1] == sequence[0])
        for step, index in enumerate(sequence[1:], start=1):
            hits = hits[self.values[hits + step] == index]
        return hits[self.rows_of(hits) == self.rows_of(hits + length - 1)] if length > 1 else hits


def offsets_of(lengths: Ints) -> Ints:
    """Row boundaries from row lengths."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def from_rows(rows: Sequence[npt.NDArray[Any]]) -> Ragged:
    """Rows given one by one."""
    values = np.concatenate(rows).astype(np.int32) if rows else np.empty(0, np.int32)
    return Ragged(values, offsets_of(np.array([len(row) for row in rows], np.int64)))


def from_arrow(column: pa.Array) -> Ragged | None:
    """An Arrow column of lists of integers (or lists of one list each, as batched tensors leave them); else None.

    A null row is an empty one.
    """
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return None
    lengths = np.asarray(column.value_lengths().fill_null(0), dtype=np.int64)
    offsets, flat = offsets_of(lengths), column.flatten()
    if pa.types.is_integer(flat.type) or pa.types.is_boolean(flat.type):
        values = np.asarray(flat.fill_null(-1) if flat.null_count else flat)
        outside = values.dtype.itemsize > 4 and len(values) and (values.min() < INT32.min or values.max() > INT32.max)
        return None if outside else Ragged(values.astype(np.int32, copy=False), offsets)
    inner = from_arrow(flat)
    return None if inner is None else Ragged(inner.values, inner.offsets[offsets])
