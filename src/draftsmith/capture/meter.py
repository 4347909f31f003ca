"""What a running capture shows: counts, rates and the time left, for people and for `status`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from draftsmith.progress import Tracker
from draftsmith.trace import Trace

NOTE_SECONDS = 5.0


class Meter:
    """Progress for people and for `status`. Counts go over the whole capture; rates, share and ETA over this process.

    The mean tokens per reply, times the replies left, over the tokens per second: that is the ETA, and the tokens in it
    cancel, so it is computed from replies. What failed took no tokens and says nothing about it.
    """

    def __init__(self, tracker: Tracker, note: Callable[[dict[str, Any]], None], before: Mapping[str, int]) -> None:
        self.tracker, self.note = tracker, note
        self.done = tracker.done
        self.states = Counter(before)
        self.requests = self.replies = self.reasoned = self.tokens = 0
        self.started = time.monotonic()
        self.noted = 0.0

    def count(self, trace: Trace) -> None:
        """One more record."""
        self.done += 1
        self.states[trace.state] += 1
        self.replies += trace.state != "failed"
        self.tokens += len(trace.generated_ids)
        self.reasoned += trace.reasoning_span is not None
        seconds = max(time.monotonic() - self.started, 1e-6)
        self.tracker.update(
            self.done,
            eta_seconds=seconds / self.replies * (self.tracker.total - self.done) if self.replies else None,
            req_s=self.requests / seconds,
            tok_s=self.tokens / seconds,
            errors=self.states["failed"] + self.states["rejected"],
            truncated=self.states["cut_in_reasoning"] + self.states["cut_in_answer"],
            with_reasoning=f"{self.reasoned / self.replies:.0%}" if self.replies else "-",
        )
        if time.monotonic() - self.noted > NOTE_SECONDS:
            self.write_note()

    def write_note(self) -> None:
        """Leaves the counts where `status` finds them."""
        self.noted = time.monotonic()
        self.note({"done": self.done, "total": self.tracker.total, **self.states})
