"""Room on the disk: what a capture will need, whether it can be had, and waiting for it when it runs out."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from draftsmith.capture.journal import Journal
from draftsmith.errors import Interrupted, UserError
from draftsmith.interrupts import stopping
from draftsmith.progress import Progress

TOKEN_BYTES = 5
"""What a token of a trace takes on the disk: its id and its text, compressed."""
LEAST_BYTES = 256
"""No record is smaller."""
COPIES = 2
"""Replies lie in the journal and, while it is sealed, in the finished files too."""
FIRST_REPLIES = 64
QUEUE_BYTES = 64 << 20
"""Of replies that wait for the disk; beyond it nothing new is asked."""
LOOK_SECONDS, SAY_SECONDS = 1.0, 60.0
GROWN_BYTES = 1 << 20
"""Room that must have been made before sealing is tried again."""


def foretell(folder: Path, left: int, max_tokens: int, progress: Progress) -> None:
    """Says what `left` replies can take on the disk at most.

    Raises:
        UserError: even the smallest replies would not fit.
    """
    free = shutil.disk_usage(folder).free
    most = left * (LEAST_BYTES + max_tokens * TOKEN_BYTES) * COPIES
    if left * LEAST_BYTES * COPIES > free:
        raise UserError(
            f"{folder}: {left:,} replies need {size(left * LEAST_BYTES * COPIES)} at the very least, {size(free)} are "
            "free; make room, or choose a --run on another disk"
        )
    progress.say(
        f"capture: {left:,} replies to get; they take {size(most)} in {folder} if all use their {max_tokens:,} tokens, "
        f"{size(free)} are free"
    )


class Room:
    """Whether the disk takes what comes, and what is said about it while it does not."""

    def __init__(self, journal: Journal, progress: Progress, total: int) -> None:
        self.journal, self.progress, self.total = journal, progress, total
        self.reason = ""
        self.looked = self.said = 0.0
        self.known, self.estimated = len(journal), False

    def look(self) -> str:
        """Why nothing new may be asked; empty while all is well. Cheap: it may be called for every request.

        Raises:
            UserError: the journal cannot be written for good.
        """
        writer = self.journal.writer
        if writer.fault:
            raise UserError(
                f"{self.journal.path}: cannot be written ({writer.fault.strerror}); make it writable and run the same "
                "command again, which asks only for what is not there yet"
            )
        if not self.estimated and len(self.journal) - self.known >= FIRST_REPLIES:
            self.estimated = True
            self.progress.say(
                f"capture: about {size(self.needed())} more are needed on the disk, as replies are so far"
            )
        now = time.monotonic()
        if not (writer.full and self.reason) or now - self.looked >= LOOK_SECONDS:
            self.looked = now
            self._change(self._full() if writer.full else self._slow(), now)
        return self.reason

    def needed(self) -> int:
        """Bytes that the rest of the capture takes, sealing included: as many per reply as those so far."""
        journal = self.journal
        there = journal.disk_bytes() + journal.writer.backlog
        per_reply = there / max(len(journal), 1)
        left = max(self.total - len(journal), 0)
        return int(journal.writer.backlog + left * per_reply + max(self.total, len(journal)) * per_reply)

    def _full(self) -> str:
        free = shutil.disk_usage(self.journal.path).free
        return (
            f"{self.journal.path}: no space left on the disk ({size(free)} free, about {size(self.needed())} needed "
            "for the rest, sealing included); nothing new is asked until there is room"
        )

    def _slow(self) -> str:
        backlog = self.journal.writer.backlog
        return f"{self.journal.path}: {size(backlog)} of replies wait for the disk" if backlog > QUEUE_BYTES else ""

    def _change(self, reason: str, now: float) -> None:
        if reason and (not self.reason or now - self.said >= SAY_SECONDS):
            self.said = now
            self.progress.say(f"capture: paused: {reason}")
        if self.reason and not reason:
            self.progress.say("capture: the disk takes replies again, going on")
        self.reason = reason


def settle(journal: Journal, room: Room) -> None:
    """Waits until everything is written, through a full disk.

    Raises:
        Interrupted: a signal ended the waiting.
        UserError: the journal cannot be written for good.
    """
    with stopping() as asked_to_stop:
        while not journal.sync():
            room.look()
            if asked_to_stop():
                raise Interrupted(f"capture interrupted while waiting for room; {unwritten(journal)}")
            time.sleep(LOOK_SECONDS)


def unwritten(journal: Journal) -> str:
    """Closes the journal and says what that loses."""
    journal.close()
    if not journal.lost:
        return "run the same command to go on"
    return (
        f"{journal.lost:,} replies could not be written ({journal.complaint()}) and are asked again; make room and run "
        "the same command to go on"
    )


def until_room(folder: Path, needed: int, progress: Progress) -> None:
    """Waits until somebody has made room on a disk that was too full for `needed` bytes.

    Raises:
        Interrupted: a signal ended the waiting.
    """
    before, said = shutil.disk_usage(folder).free, -SAY_SECONDS
    with stopping() as asked_to_stop:
        while (free := shutil.disk_usage(folder).free) < before + GROWN_BYTES:
            if time.monotonic() - said >= SAY_SECONDS:
                said = time.monotonic()
                progress.say(
                    f"capture: paused: {folder}: no space left on the disk ({size(free)} free, about {size(needed)} "
                    "needed to seal the rest); goes on when there is room"
                )
            if asked_to_stop():
                raise Interrupted("capture interrupted while waiting for room to seal; run the same command to go on")
            time.sleep(LOOK_SECONDS)


def size(count: int) -> str:
    """Bytes as a person reads them."""
    value, units = float(count), ["KiB", "MiB", "GiB", "TiB"]
    value /= 1024
    while value >= 1000 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.{0 if value >= 10 else 1}f} {units[0]}"
