"""Records of a journal as Arrow tables in any wanted order, with bounded memory.

Replies come in nearly in the order they were asked for, so the blocks of the journal that neighbours lie in are kept
for a while (CACHE_BYTES). Where the wanted order has little to do with the journal's (the questions were shuffled
between two runs), each block would be read many times over: then the blocks are first laid out uncompressed in one
scratch file, which the system maps into memory, and rows are picked from there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from draftsmith.capture.journal import Journal, places_of
from draftsmith.capture.records import RECORD_SCHEMA, Head, integers, table_of
from draftsmith.capture.segments import BLOCK_BYTES, Log, Packed

CACHE_BYTES = 24 << 20
CHUNK_BYTES = 4 << 20
"""Of one table that is handed out."""
TOO_OFTEN = 4
"""Times that blocks may be read on average before the scratch file is cheaper."""

Records = list[tuple[Head, memoryview]]
Shelf = Callable[[int], "pa.Table | Records"]
"""Where blocks are taken from, by number: those of a log as records, for each of its rows a table costs more."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some consecutive rows of a segment."""

    segment: Log | Packed
    first: int
    stop: int

    def load(self) -> pa.Table | Records:
        """Its rows.

        Raises:
            SegmentDamaged: they cannot be read.
        """
        if isinstance(self.segment, Log):
            return list(self.segment.records(self.first, self.stop))
        return self.segment.table(self.first, self.stop)


def gather(journal: Journal, numbers: np.ndarray, scratch: Path) -> Iterator[pa.Table]:
    """The records that `numbers` (index numbers, none 0) stand for, in that order, as tables of RECORD_SCHEMA.

    Args:
        journal: everything in it is written (`Journal.sync`).
        numbers: uint64, as `Journal.numbers_of` gives them.
        scratch: a file for the layout, if one is needed; removed afterwards.

    Raises:
        SegmentDamaged: rows that can no longer be read.
        OSError: no room for the scratch file.
    """
    journal.hold_still()
    blocks, block_of, row_of = _located(journal, numbers)
    chunks = _chunks(blocks, block_of)
    often = _reads(block_of, chunks, len(blocks)) > TOO_OFTEN * len(blocks)
    with _laid_out(blocks, scratch) if often else _cached(blocks) as shelf:
        for start, stop in chunks:
            yield _picked(shelf, block_of[start:stop], row_of[start:stop])


def _located(journal: Journal, numbers: np.ndarray) -> tuple[list[Block], np.ndarray, np.ndarray]:
    """All blocks, and for each record the number of its block and its row there."""
    segments, rows = places_of(numbers)
    blocks: list[Block] = []
    block_of, row_of = np.zeros(len(numbers), dtype=np.int64), np.zeros(len(numbers), dtype=np.int64)
    for number in np.unique(segments).tolist():
        segment = journal.segments[number]
        firsts = segment.blocks()
        mine = np.flatnonzero(segments == number)
        inside = np.searchsorted(np.asarray(firsts), rows[mine], side="right") - 1
        block_of[mine] = len(blocks) + inside
        row_of[mine] = rows[mine] - np.asarray(firsts)[inside]
        blocks += [Block(segment, first, stop) for first, stop in pairwise(firsts)]
    return blocks, block_of, row_of


def _chunks(blocks: list[Block], block_of: np.ndarray) -> list[tuple[int, int]]:
    """Consecutive records of about CHUNK_BYTES, a record counting for its share of its block."""
    if not len(block_of):
        return []
    shares = BLOCK_BYTES / np.array([block.stop - block.first for block in blocks])
    number = (np.cumsum(shares[block_of]) / CHUNK_BYTES).astype(np.int64)
    cuts = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(block_of)]
    return list(pairwise(cuts))


def _reads(block_of: np.ndarray, chunks: list[tuple[int, int]], blocks: int) -> int:
    """How often `_cached` would read a block; counted no further than is needed."""
    held: OrderedDict[int, None] = OrderedDict()
    reads = 0
    for start, stop in chunks:
        for block in np.unique(block_of[start:stop]).tolist():
            reads += block not in held
            held[block] = None
            held.move_to_end(block)
            if len(held) > CACHE_BYTES // BLOCK_BYTES:
                held.popitem(last=False)
        if reads > TOO_OFTEN * blocks:
            break
    return reads


def _picked(shelf: Shelf, block_of: np.ndarray, row_of: np.ndarray) -> pa.Table:
    """Records by block and row, in that order."""
    blocks = {block: shelf(block) for block in np.unique(block_of).tolist()}
    if all(isinstance(block, list) for block in blocks.values()):
        return _as_table([blocks[block][row] for block, row in zip(block_of.tolist(), row_of.tolist(), strict=True)])
    order = np.argsort(block_of, kind="stable")
    tables = [_rows(block, row_of[block_of == number]) for number, block in blocks.items()]
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables).take(integers(np.argsort(order)))


def _rows(block: pa.Table | Records, rows: np.ndarray) -> pa.Table:
    return _as_table([block[row] for row in rows]) if isinstance(block, list) else block.take(integers(rows))


def _as_table(records: Records) -> pa.Table:
    return table_of([head for head, _ in records], [body for _, body in records])


def _bytes(block: pa.Table | Records) -> int:
    return sum(len(body) for _, body in block) if isinstance(block, list) else int(block.nbytes)


@contextmanager
def _cached(blocks: list[Block]) -> Iterator[Shelf]:
    """Blocks as they lie in the journal, those used last kept."""
    held: OrderedDict[int, pa.Table | Records] = OrderedDict()
    sizes: dict[int, int] = {}

    def shelf(block: int) -> pa.Table | Records:
        if block not in held:
            while held and sum(sizes.values()) > CACHE_BYTES:
                del sizes[held.popitem(last=False)[0]]
            held[block] = blocks[block].load()
            sizes[block] = _bytes(held[block])
        held.move_to_end(block)
        return held[block]

    yield shelf


@contextmanager
def _laid_out(blocks: list[Block], scratch: Path) -> Iterator[Shelf]:
    """Blocks in a file that is mapped into memory: taking a row touches its own pages only."""
    try:
        with pa.ipc.new_file(scratch, RECORD_SCHEMA) as writer:
            for block in blocks:
                table = block.segment.table(block.first, block.stop)
                writer.write_batch(table.combine_chunks().to_batches()[0])
        with pa.memory_map(str(scratch)) as mapped:
            reader = pa.ipc.open_file(mapped)
            yield lambda block: pa.Table.from_batches([reader.get_batch(block)])
    finally:
        scratch.unlink(missing_ok=True)
