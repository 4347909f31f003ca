"""The journal's one writer: a thread that writes whatever has queued in one go, and syncs it at least once a second.

What was put here is with the operating system within some milliseconds (that survives a kill of the process) and on the
disk within a second (that survives a power cut). A full disk ends nothing: what is queued stays in memory, the thread
tries again every second. Any other fault is kept for whoever asks; then nothing is written any more.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from draftsmith.artifacts import sync
from draftsmith.capture.segments import Log

SYNC_SECONDS = 1.0
GATHER_SECONDS = 0.002
"""How long the thread gathers: a wake-up per record would cost more than writing it."""
RETRY_SECONDS = 1.0
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class _Piece:
    """One record and where it goes."""

    log: Log
    offset: int
    data: bytes


class Writer:
    """Writes records where they were given their place. `put`, `flush` and `close` are for one thread."""

    def __init__(self, closed: Callable[[Log], object]) -> None:
        """`closed` is called, in the writer's thread, with each log that will get no more records."""
        self.closed = closed
        self.queue: SimpleQueue[_Piece | threading.Event | None] = SimpleQueue()
        self.fault: OSError | None = None
        """What ended the writing for good."""
        self.full: OSError | None = None
        """The disk is full now: nothing is written until there is room."""
        self.taken = self.written = 0
        """Bytes put here, and bytes that are with the operating system."""
        self.records_taken = self.records_written = 0
        """The same in records."""
        self.pieces: list[_Piece] = []
        """Not written yet."""
        self.unsynced: list[_Piece] = []
        self.asked: list[threading.Event] = []
        """Of those who wait until everything is on the disk."""
        self.synced = time.monotonic()
        self.log: Log | None = None
        self.file = -1
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self.thread.start()

    @property
    def backlog(self) -> int:
        """Bytes that are in memory only."""
        return self.taken - self.written

    @property
    def lost(self) -> int:
        """Records that were not written by the time of `close`."""
        return len(self.pieces)

    def put(self, log: Log, offset: int, data: bytes) -> None:
        """Queues one record; never waits."""
        self.taken += len(data)
        self.records_taken += 1
        self.queue.put(_Piece(log, offset, data))

    def flush(self) -> bool:
        """Waits until all that was put here is on the disk; False where the disk is full or failing."""
        done = threading.Event()
        self.queue.put(done)
        while not done.wait(0.02):
            if self.full or self.fault or not self.thread.is_alive():
                return False
        return True

    def close(self) -> None:
        """Writes what can be written, syncs, and ends the thread. Closing twice is fine."""
        self.closing.set()
        self.queue.put(None)
        self.thread.join()

    def _run(self) -> None:
        last = False
        while not last:
            last = self._gather()
            try:
                if self.fault is None:
                    self._write()
                    if last or self.asked or time.monotonic() - self.synced >= SYNC_SECONDS:
                        self._sync()
                    self.full = None
                    while self.asked:
                        self.asked.pop().set()
            except OSError as error:
                if error.errno in FULL:
                    self.full = error
                else:
                    self.fault = error
            if self.full and not last:
                self.closing.wait(RETRY_SECONDS)
        if self.file >= 0:
            os.close(self.file)

    def _gather(self) -> bool:
        """Takes what has queued, waiting for it unless something is due; whether it was the last."""
        due = max(0.0, self.synced + SYNC_SECONDS - time.monotonic()) if self.unsynced and not self.fault else None
        try:
            item = self.queue.get(not self.full, due)
            if isinstance(item, _Piece):
                self.pieces.append(item)
                time.sleep(GATHER_SECONDS)
                item = self.queue.get_nowait()
            while True:
                if item is None:
                    return True
                if isinstance(item, _Piece):
                    self.pieces.append(item)
                else:
                    self.asked.append(item)
                item = self.queue.get_nowait()
        except Empty:
            return False

    def _write(self) -> None:
        """Writes `pieces`; those written by the time of a fault are `unsynced`, the others stay."""
        while self.pieces:
            log = self.pieces[0].log
            if self.log is not log:
                self._open(log)
            count = next((n for n, piece in enumerate(self.pieces) if piece.log is not log), len(self.pieces))
            run = self.pieces[:count]
            data = b"".join([piece.data for piece in run])
            _write_all(self.file, data, run[0].offset)
            self.written += len(data)
            self.records_written += count
            self.unsynced += run
            del self.pieces[:count]

    def _open(self, log: Log) -> None:
        """Goes over to another log; the one before is complete on the disk then."""
        if self.log is not None:
            self._sync()
            os.close(self.file)
            self.closed(self.log)
            self.log, self.file = None, -1
        self.file = os.open(log.path, os.O_RDWR | os.O_CREAT, 0o644)
        self.log = log
        sync(log.path.parent)

    def _sync(self) -> None:
        """Makes what is written survive a power cut; after a fault it has to be written again."""
        if self.unsynced:
            try:
                os.fdatasync(self.file)
            except OSError:
                self.written -= sum(len(piece.data) for piece in self.unsynced)
                self.records_written -= len(self.unsynced)
                self.pieces[:0] = self.unsynced
                raise
            finally:
                self.unsynced = []
        self.synced = time.monotonic()


def _write_all(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
