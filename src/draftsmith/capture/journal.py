"""The capture journal: an append-only, crash-safe file of traces.

One JSON line per trace, `{"crc": ..., "entry": {"retry": ..., "trace": {...}}}`: what was appended survives a kill of
the process at once (one `write` per line) and a power cut after at most a second (`fsync` in groups). Opening repairs a
torn tail; a line damaged in the middle counts as never written, so its question is asked again. For one trace id the
last record wins. Lines end at LF and nowhere else: text may hold U+2028, U+2029 or U+0085. Memory: an index entry per
trace (about 200 bytes), never the ids.
"""

from __future__ import annotations

import os
import shutil
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

from draftsmith.artifacts import sync
from draftsmith.trace import Trace

JOURNAL = "journal.jsonl"
SYNC_SECONDS = 1.0


class _Entry(msgspec.Struct):
    retry: bool
    trace: Trace


class _Line(msgspec.Struct):
    crc: int
    entry: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Place:
    """Where a trace's last record lies, and how it ended."""

    offset: int
    length: int
    state: str
    retry: bool
    """The trace ended by a passing fault (or was withdrawn by a gate): ask again on the next run."""


class Journal:
    """The journal of one traces folder. One writer at a time: the run's lock is held by the caller.

    `damaged` counts the records that opening found unreadable, `torn` says whether the file's tail was cut off.
    """

    def __init__(self, folder: Path) -> None:
        """Opens or creates `folder/journal.jsonl`, repairs a torn tail, builds the index (one pass over the file)."""
        self.path = folder / JOURNAL
        self.index: dict[str, Place] = {}
        self.damaged = 0
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        self.end = self._load()
        self.torn = os.fstat(self.file).st_size > self.end
        os.ftruncate(self.file, self.end)
        self.unsynced = self.torn
        self.synced = time.monotonic()
        sync(folder)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.index)

    def final(self, trace_id: str) -> bool:
        """Whether the trace is there and needs no further request: ok, cut, rejected, or failed for good."""
        place = self.index.get(trace_id)
        return place is not None and not place.retry

    def append(self, trace: Trace, *, retry: bool = False) -> None:
        """Writes one trace; `retry` marks it as not final.

        Raises:
            OSError: the disk is full or failing. The journal then ends at its last whole record.
        """
        entry = msgspec.json.encode(_Entry(retry, trace))
        line = msgspec.json.encode(_Line(zlib.crc32(entry), msgspec.Raw(entry))) + b"\n"
        try:
            _write_all(self.file, line, self.end)
        except OSError:
            os.ftruncate(self.file, self.end)
            raise
        self.index[trace.trace_id] = Place(self.end, len(line), trace.state, retry)
        self.end += len(line)
        self.unsynced = True
        if time.monotonic() - self.synced >= SYNC_SECONDS:
            self.sync()

    def read(self, trace_id: str) -> Trace:
        """The last record of a trace.

        Raises:
            KeyError: the journal has none.
        """
        place = self.index[trace_id]
        return _decode(os.pread(self.file, place.length, place.offset)).trace

    def sync(self) -> None:
        """Makes everything appended so far survive a power cut."""
        if self.unsynced:
            os.fsync(self.file)
            self.unsynced = False
        self.synced = time.monotonic()

    def close(self) -> None:
        """Syncs and closes; the journal cannot be used afterwards. Closing twice is fine."""
        if self.file >= 0:
            self.sync()
            os.close(self.file)
            self.file = -1

    def _load(self) -> int:
        """Fills the index; returns the end of the last whole record."""
        end, bad, whole = 0, 0, 0
        with open(self.path, "rb") as file:
            for line in file:  # binary: splits at LF only
                try:
                    entry = _decode(line)
                except (msgspec.DecodeError, _Damaged):
                    end, bad = end + len(line), bad + 1
                    continue
                self.index[entry.trace.trace_id] = Place(end, len(line), entry.trace.state, entry.retry)
                end += len(line)
                self.damaged, bad, whole = self.damaged + bad, 0, end
        return whole


def restore(folder: Path, traces: Iterable[Trace]) -> int:
    """Makes `folder`'s journal out of finished traces, whole or not at all; returns their number.

    Raises:
        OSError: the disk is full or failing.
    """
    beside = folder / "journal.restored"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    with Journal(beside) as journal:
        for trace in traces:
            journal.append(trace)
        count = len(journal)
    os.replace(beside / JOURNAL, folder / JOURNAL)
    beside.rmdir()
    return count


class _Damaged(Exception):
    """A record whose checksum does not fit, or that has no end."""


def _decode(line: bytes) -> _Entry:
    if not line.endswith(b"\n"):
        raise _Damaged
    outer = msgspec.json.decode(line, type=_Line)
    entry = bytes(outer.entry)
    if zlib.crc32(entry) != outer.crc:
        raise _Damaged
    return msgspec.json.decode(entry, type=_Entry)


def _write_all(file: int, data: bytes, offset: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(file, data[written:], offset + written)
