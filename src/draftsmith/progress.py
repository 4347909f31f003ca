"""Progress for people and for programs: a live bar on a terminal, plain lines elsewhere, one event log (JSONL) for all.

Every front end reads `RUN/events.jsonl`; nothing that matters is only printed. Rates and ETA are over the work of this
process, so a resumed run does not count what an earlier one did.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PLAIN_SECONDS = 10.0
LIVE_HZ = 4.0
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""What moves a terminal's cursor, rewrites what it shows or reorders it."""


class Progress:
    """One per process. `quiet` silences the terminal, never the event log."""

    def __init__(self, *, quiet: bool = False, events: Path | None = None, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.quiet = quiet
        self.events = events

    def say(self, message: str) -> None:
        """Plain text for a person; what a server or a data set put into it is escaped."""
        if not self.quiet:
            self.console.print(escape(harmless(message)), soft_wrap=True)

    def event(self, kind: str, **fields: Any) -> None:
        """Appends one line to the event log."""
        if self.events is None:
            return
        self.events.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"time": round(time.time(), 3), "kind": kind, **fields}, ensure_ascii=True, default=str)
        with open(self.events, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    @contextmanager
    def track(self, stage: str, total: int, unit: str, done: int = 0) -> Iterator[Tracker]:
        """A bar for `stage`: `total` things of `unit`, `done` of them by an earlier attempt."""
        tracker = Tracker(self, stage, total, unit, done)
        try:
            yield tracker
        finally:
            tracker.close()


class Tracker:
    """The bar of one stage; `update` is cheap and may be called for every item."""

    def __init__(self, progress: Progress, stage: str, total: int, unit: str, done: int) -> None:
        self.progress, self.stage, self.total, self.unit = progress, stage, total, unit
        self.done = self.start_done = done
        self.started = self.shown = time.monotonic()
        self.facts: dict[str, Any] = {}
        self.eta_seconds: float | None = None
        terminal = progress.console.is_terminal and not progress.quiet
        self.live = (
            Live(self, console=progress.console, refresh_per_second=LIVE_HZ, transient=True) if terminal else None
        )
        if self.live:
            self.live.start()
        progress.event("stage_started", stage=stage, total=total, done=done, unit=unit)

    def update(self, done: int, eta_seconds: float | None = None, **facts: Any) -> None:
        """States how far the stage is. `facts` are shown as `name value`; `eta_seconds` overrides the item-rate ETA."""
        self.done, self.eta_seconds = done, eta_seconds
        self.facts.update(facts)
        now = time.monotonic()
        if now - self.shown >= (1.0 if self.live else PLAIN_SECONDS):
            self.shown = now
            self._log("progress")
            if not self.live:
                self.progress.say(self.line())

    def close(self) -> None:
        """Takes the bar down and logs the last state."""
        if self.live:
            self.live.stop()
        self._log("stage_ended")

    def eta(self) -> float | None:
        """Seconds left, or None while unknown."""
        if self.eta_seconds is not None:
            return self.eta_seconds
        made = self.done - self.start_done
        return (time.monotonic() - self.started) / made * (self.total - self.done) if made else None

    def line(self) -> str:
        """The state in one line."""
        eta = self.eta()
        left = f", {clock(eta)} left" if eta is not None and self.done < self.total else ""
        facts = "".join(f", {label(name)} {shown(value)}" for name, value in self.facts.items())
        return harmless(f"{self.stage}: {self.done:,}/{self.total:,} {self.unit}{left}{facts}")

    def __rich__(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        grid.add_row(ProgressBar(total=max(self.total, 1), completed=self.done, width=24), Text(self.line()))
        return grid

    def _log(self, kind: str) -> None:
        seconds = time.monotonic() - self.started
        self.progress.event(
            kind, stage=self.stage, done=self.done, total=self.total, seconds=round(seconds, 2), **self.facts
        )


def harmless(text: str) -> str:
    """Text as it may go to a terminal: control characters are spelled out, line breaks stay."""
    return CONTROL.sub(lambda found: found[0] if found[0] == "\n" else ascii(found[0])[1:-1], text)


def clock(seconds: float) -> str:
    """Seconds as 42 s, 3:05 or 1:02:03."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def label(name: str) -> str:
    """A fact's name as a person reads it: `tok_s` is a rate."""
    return f"{name[:-2]}/s" if name.endswith("_s") else name.replace("_", " ")


def shown(value: Any) -> str:
    """A number as a person reads it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
