"""The capture journal: an append-only, crash-safe store of traces, so that no reply is ever paid for twice.

A folder of segments (see `segments`). A reply that was appended survives a kill of the process within some milliseconds
and a power cut within a second (see `writing`); appending never waits for the disk. Opening repairs a torn tail; a
record damaged in the middle counts as never written, so its question is asked again. For one trace id the last record
wins. Errors are records. Logs that passed SEGMENT_BYTES become Parquet in the background once the disk has less than
ROOMY times their size left: before, packing would cost CPU for room that nobody needs. Memory: an index entry of 30 to
60 bytes per trace (see `index`) and one block of records, never the run's ids. Opening reads the keys only of Parquet
segments, and every checksum of logs.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from draftsmith.artifacts import read_json, replacing, sync, write_json
from draftsmith.capture.index import Index
from draftsmith.capture.records import RECORD_SCHEMA, decode, encode, key_of, state_of
from draftsmith.capture.segments import PACKING, WRITING, Key, Log, Packed, SegmentDamaged, open_log, open_packed, pack
from draftsmith.capture.writing import FULL, Writer
from draftsmith.errors import UserError
from draftsmith.trace import Trace, from_row

JOURNAL = "journal"
AGAIN = "again.json"
"""In it: the place (segment and row) before which every record is to be asked again."""
SEGMENT_BYTES = 64 << 20
ROOMY = 8
"""Closed logs stay as they are while the disk has this many times their size left."""
FORGOTTEN = 7
"""The state code of a trace whose record turned out to be damaged."""
RETRY = 8
_SEGMENT, _ROW = 4, 28
"""In an index number: 3 bits of state, 1 of retry, 24 of segment, 32 of the row in it."""


class Journal:
    """The journal of one traces folder. One process at a time: the run's lock is held by the caller.

    `torn` says whether opening cut off a half-written record, `damaged` how many records it found unreadable, and
    `set_aside` which closed segments it could not open.
    """

    def __init__(self, folder: Path, expected: int = 0) -> None:
        """Opens or creates `folder/journal`; `expected` traces need no further memory for the index.

        Raises:
            UserError: the folder cannot be written.
        """
        self.path = folder / JOURNAL
        self.index = Index(expected)
        self.segments: dict[int, Log | Packed] = {}
        self.damaged, self.torn = 0, False
        self.set_aside: list[Path] = []
        self.moving = threading.Lock()
        """Held while a log gives way to its Parquet file."""
        self.open = True
        try:
            self.path.mkdir(exist_ok=True)
            sync(folder)
            if not os.access(self.path, os.W_OK):
                raise PermissionError(0, "it is read-only", str(self.path))
            self._load()
        except OSError as error:
            if error.errno in FULL:
                raise
            raise UserError(
                f"{error.filename or self.path}: the journal cannot be written ({error.strerror}); make it writable "
                "and run the same command again"
            ) from None
        self.writer = Writer(self._pack_later)
        self.packer = ThreadPoolExecutor(1, "pack")
        self.packing: list[Future[None]] = []
        self.closed: list[Log] = []
        """Not packed for want of need."""
        self._pack_closed_logs()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        """Traces it knows; those whose record proved damaged included."""
        return len(self.index)

    def final(self, trace_id: str) -> bool:
        """Whether the trace is there and needs no further request: ok, cut, rejected, or failed for good."""
        return 0 < self.index.get(key_of(trace_id)) & 15 < FORGOTTEN

    def state(self, trace_id: str) -> str:
        """How the trace's last record ended; empty where there is none."""
        code = self.index.get(key_of(trace_id)) & 7
        return state_of(code) if 0 < code < FORGOTTEN else ""

    def ids(self) -> Iterator[str]:
        """The ids of all traces it knows, in no order."""
        return (key.hex() for key in self.index)

    def append(self, trace: Trace, *, retry: bool = False) -> None:
        """Takes one trace, without waiting for the disk; `retry` marks it as not final."""
        key = key_of(trace.trace_id)
        data = encode(trace, key, retry=retry)
        log = self.active
        if log.rows and log.end + len(data) > SEGMENT_BYTES:
            log = self._begin_log()
        row, offset = log.rows, log.place(len(data))
        self.index.put(key, number_of(log.number, row, data[5], retry))
        self.writer.put(log, offset, data)

    def read(self, trace_id: str) -> Trace:
        """The last record of a trace.

        Raises:
            KeyError: the journal has none.
            UserError: it cannot be written down now, so it cannot be read.
        """
        number = self.index.get(key_of(trace_id))
        if not 0 < number & 7 < FORGOTTEN:
            raise KeyError(trace_id)
        segment, row = place_of(number)
        with self.moving:
            found = self.segments[segment]
            if isinstance(found, Packed):
                return from_row(found.table(row, row + 1).to_pylist()[0])
            if not self.writer.flush():
                raise UserError(f"{self.path}: {self.complaint()}")
            ((head, body),) = found.records(row, row + 1)
            return decode(head, body)

    def sync(self) -> bool:
        """Waits until all that was appended survives a power cut; False where the disk is full or failing."""
        return self.writer.flush()

    def hold_still(self) -> None:
        """From here to the next append no file is replaced by another: whoever reads many rows needs that."""
        self.packer.shutdown(cancel_futures=True)
        self.packer = ThreadPoolExecutor(1, "pack")

    def close(self) -> None:
        """Writes what can be written; the journal cannot be used afterwards. Closing twice is fine."""
        if self.open:
            self.open = False
            self.writer.close()
            self.packer.shutdown(cancel_futures=True)
        for future in self.packing:
            if not future.cancelled():
                future.result()
        self.packing.clear()

    @property
    def fault(self) -> OSError | None:
        """What ended the writing for good; a full disk does not."""
        return self.writer.fault

    @property
    def unwritten(self) -> int:
        """Replies that a kill of the process now would lose."""
        return self.writer.records_taken - self.writer.records_written

    @property
    def lost(self) -> int:
        """Replies that `close` could not write: they are asked again."""
        return self.writer.lost

    def complaint(self) -> str:
        """Why nothing is written now; empty while all is well."""
        error = self.writer.fault or self.writer.full
        return f"the disk takes no more ({error.strerror})" if error else ""

    def disk_bytes(self) -> int:
        """Bytes that its segments take now."""
        with self.moving:
            return sum(
                found.end if isinstance(found, Log) else found.path.stat().st_size for found in self.segments.values()
            )

    def numbers_of(self, trace_ids: Iterable[str]) -> np.ndarray:
        """The index numbers of traces (uint64, 0: unknown), for `place_of` and sealing."""
        get = self.index.get
        return np.fromiter((get(key_of(id)) for id in trace_ids), dtype=np.uint64)

    def forget(self, segment: int, rows: range) -> int:
        """Rows that cannot be read count as never written from now on; returns the number of traces that lost one."""
        numbers = self.index.numbers()
        segments, places = places_of(numbers)
        hit = (numbers > 0) & (segments == segment) & (places >= rows.start) & (places < rows.stop)
        numbers[hit] |= np.uint64(FORGOTTEN)
        if isinstance(found := self.segments[segment], Log):
            found.holes.update(rows)
        return int(hit.sum())

    def ask_all_again(self) -> None:
        """From the next opening on nothing that is there now is final."""
        write_json(self.path / AGAIN, [self.active.number, self.active.rows])

    def _load(self) -> None:
        """Opens all segments in order of their numbers, so that a trace's last record is the one the index keeps."""
        for leftover in self.path.glob("*.tmp"):
            leftover.unlink()
        numbers = sorted({int(path.stem) for path in self.path.iterdir() if path.suffix in (".log", ".parquet")})
        for number in numbers:
            keys = self._open_packed(number) or self._open_log(number)
            for row, key in enumerate(keys):
                self.index.put(key.key, number_of(number, row, key.state, key.retry))
        if (self.path / AGAIN).exists():
            segment, row = read_json(self.path / AGAIN)
            self._ask_again_before(segment, row)
        last = self.segments.get(numbers[-1]) if numbers else None
        self.active = last if isinstance(last, Log) else self._begin_log(numbers[-1] + 1 if numbers else 0)

    def _ask_again_before(self, segment: int, row: int) -> None:
        numbers = self.index.numbers()
        segments, rows = places_of(numbers)
        before = (segments < segment) | ((segments == segment) & (rows < row))
        numbers[(numbers > 0) & before] |= np.uint64(RETRY)

    def _open_packed(self, number: int) -> list[Key]:
        """Empty where there is no such file, or none that can be opened: what cannot is set aside."""
        path = self._path(number, ".parquet")
        if not path.exists():
            return []
        try:
            self.segments[number], keys = open_packed(number, path)
        except SegmentDamaged:
            self.set_aside.append(path.rename(path.with_suffix(".damaged")))
            return []
        self._path(number, ".log").unlink(missing_ok=True)  # killed just before that
        return keys

    def _open_log(self, number: int) -> list[Key]:
        path = self._path(number, ".log")
        if not path.exists():
            return []
        opened = open_log(number, path)
        self.segments[number] = opened.log
        self.damaged += opened.damaged
        if path.stat().st_size > opened.log.end:
            self.torn = True
            os.truncate(path, opened.log.end)
        return opened.keys

    def _path(self, number: int, suffix: str) -> Path:
        return self.path / f"{number:06}{suffix}"

    def _begin_log(self, number: int | None = None) -> Log:
        number = self.active.number + 1 if number is None else number
        self.active = Log(number, self._path(number, ".log"))
        self.segments[number] = self.active
        return self.active

    def _pack_closed_logs(self) -> None:
        """Those that an earlier process left, by a kill or for want of room."""
        for found in list(self.segments.values()):
            if isinstance(found, Log) and found is not self.active:
                self._pack_later(found)

    def _pack_later(self, log: Log) -> None:
        """In the writer's thread, which must not wait for `moving`: who holds it may wait for the writer."""
        self.closed.append(log)
        if shutil.disk_usage(self.path).free >= ROOMY * sum(log.end for log in self.closed):
            return
        self.packing = [future for future in self.packing if not future.done() or future.exception()]
        self.packing += [self.packer.submit(self._pack, log) for log in self.closed]
        self.closed.clear()

    def _pack(self, log: Log) -> None:
        """In the packer's thread. What cannot be packed stays a log, which reads as well.

        Of a full or failing disk the writer tells, of a damaged log sealing; the next opening tries to pack it again.
        """
        try:
            packed = pack(log)
        except (OSError, SegmentDamaged):
            return
        with self.moving:
            self.segments[log.number] = packed
            log.path.unlink()


def number_of(segment: int, row: int, state: int, retry: bool) -> int:
    """What the index keeps of a record."""
    return state | RETRY * retry | segment << _SEGMENT | row << _ROW


def place_of(number: int) -> tuple[int, int]:
    """Segment and row of an index number."""
    return number >> _SEGMENT & 0xFFFFFF, number >> _ROW


def places_of(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`place_of` for many."""
    return numbers >> np.uint64(_SEGMENT) & np.uint64(0xFFFFFF), numbers >> np.uint64(_ROW)


def restore(folder: Path, parts: Sequence[Path], states: frozenset[str]) -> int:
    """Makes `folder`'s journal out of the traces in sealed `parts` that ended in `states`, whole or not at all.

    Returns:
        Their number.

    Raises:
        OSError: the disk is full or failing.
    """
    beside = folder / f"{JOURNAL}.restored"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    count = 0
    wanted = pa.array(sorted(states))
    for number, part in enumerate(parts):
        with (
            replacing(beside / f"{number:06}.parquet") as path,
            pq.ParquetWriter(path, RECORD_SCHEMA, **WRITING, **PACKING) as writer,
            pq.ParquetFile(part) as file,
        ):
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, use_threads=False)
                table = table.filter(pc.is_in(table["state"], value_set=wanted)).replace_schema_metadata()
                if table.num_rows:
                    writer.write_table(table.append_column("retry", pa.array([False] * table.num_rows)))
                    count += table.num_rows
    os.replace(beside, folder / JOURNAL)
    sync(folder)
    return count
