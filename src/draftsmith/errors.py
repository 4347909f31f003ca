"""The ways a run can stop, each with its exit code.

Every message is one line: the thing (file, row, field, server, flag), what was expected, what was found, what to do.
Anything else that escapes is a fault of ours: exit code 1 and a traceback.
"""

from __future__ import annotations


class DraftsmithError(Exception):
    """Base of the expected stops; `exit_code` is what the process returns."""

    exit_code = 1
    details: tuple[str, ...] = ()
    """Lines that are shown below the message."""


class UserError(DraftsmithError):
    """A user's mistake or an unusable input: nothing was lost, nothing was overwritten."""

    exit_code = 2


class GateStop(DraftsmithError):
    """A quality gate stopped the run: what was captured is kept and the run can go on after a look."""

    exit_code = 3

    def __init__(self, message: str, details: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.details = details


class Interrupted(DraftsmithError):
    """SIGINT or SIGTERM: the run drained, its state is on disk, and the same command resumes it."""

    exit_code = 130
