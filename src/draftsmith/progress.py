"""Progress for people and programs: a live view on a terminal, plain lines elsewhere, one event log (JSONL) for all.

Every front end reads `RUN/events.jsonl`; nothing that matters is only printed. A stage logs its state at most every two
seconds, so a day of it is some tens of megabytes. Rates and ETA are over the work of this process, so a resumed run
does not count what an earlier one did.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from draftsmith.errors import DraftsmithError

EVENTS = "events.jsonl"
PLAIN_SECONDS = 10.0
EVENT_SECONDS = 2.0
LIVE_HZ = 4.0
SAID_CHARACTERS = 2000
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What moves a terminal's cursor, rewrites what it shows, reorders it, or cannot be written to it."""
State = Mapping[str, Any]
"""How a stage stands, as its `progress` events say: stage, done, total, unit, seconds, eta_seconds and its facts."""
STANDING = frozenset({"time", "kind", "lost", "stage", "done", "total", "unit", "seconds", "eta_seconds"})
"""What is in an event besides facts."""


@dataclass(frozen=True, slots=True)
class View:
    """How a stage's state is drawn, in its own process and in one that watches it."""

    line: Callable[[State], str]
    screen: Callable[[State, int, int], RenderableType]
    """Of the state, within a width and a height in characters."""


class Progress:
    """One per process. `quiet` silences the terminal, never the event log."""

    def __init__(self, *, quiet: bool = False, events: Path | None = None, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.quiet = quiet
        self.events = events
        self.latest: dict[str, dict[str, Any]] = {}
        """Of each kind of event the last one's fields."""
        self.lost = 0

    def say(self, message: str) -> None:
        """Plain text for a person, printed and logged; what a server or a data set put into it is escaped."""
        self.event("said", text=message[:SAID_CHARACTERS])
        self.show(message)

    def show(self, message: str) -> None:
        """As `say`, for what the event log holds anyway."""
        if not self.quiet:
            self.console.print(escape(harmless(message)), soft_wrap=True)

    def event(self, kind: str, **fields: Any) -> None:
        """Appends one line to the event log. On a full disk it is counted as lost: the log must not end the run."""
        self.latest[kind] = fields
        if self.events is None:
            return
        values = {"time": round(time.time(), 3), "kind": kind, **fields}
        if self.lost:
            values["lost"] = self.lost
        line = json.dumps(values, ensure_ascii=True, default=str).encode() + b"\n"
        self.events.parent.mkdir(parents=True, exist_ok=True)
        try:
            _append(self.events, line)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.lost += 1
        else:
            self.lost = 0

    @contextmanager
    def command(self, name: str) -> Iterator[None]:
        """Logs that a command began and how it ended (exit code and reason), which is how `watch` knows."""
        self.event("command_started", command=name, pid=os.getpid())
        code, reason = 0, ""
        try:
            yield
        except BaseException as error:
            code = error.exit_code if isinstance(error, DraftsmithError) else 1
            code = 130 if isinstance(error, KeyboardInterrupt) else code
            reason = str(error) or type(error).__name__
            raise
        finally:
            self.event("command_ended", command=name, exit_code=code, reason=reason[:SAID_CHARACTERS])

    @contextmanager
    def track(self, stage: str, total: int, unit: str, done: int = 0, view: View | None = None) -> Iterator[Tracker]:
        """A bar (or another view) for `stage`: `total` things of `unit`, `done` of them by an earlier attempt."""
        tracker = Tracker(self, stage, total, unit, done, view or BAR)
        try:
            yield tracker
        finally:
            tracker.close()


class Tracker:
    """The progress of one stage; `update` is cheap and may be called for every item."""

    def __init__(self, progress: Progress, stage: str, total: int, unit: str, done: int, view: View) -> None:
        self.progress, self.stage, self.total, self.unit, self.view = progress, stage, total, unit, view
        self.done = self.start_done = done
        self.started = self.shown = self.logged = time.monotonic()
        self.facts: dict[str, Any] = {}
        self.eta_seconds: float | None = None
        console = progress.console
        terminal = console.is_terminal and not console.is_dumb_terminal and not progress.quiet
        self.live = Live(self, console=console, refresh_per_second=LIVE_HZ, transient=True) if terminal else None
        if self.live:
            self.live.start()
        progress.event("stage_started", **self.state())

    def update(self, done: int, eta_seconds: float | None = None, **facts: Any) -> None:
        """States how far the stage is. `facts` are shown as `name value`; `eta_seconds` overrides the item-rate ETA."""
        self.done, self.eta_seconds = done, eta_seconds
        self.facts.update(facts)
        now = time.monotonic()
        if now - self.logged >= EVENT_SECONDS:
            self.logged = now
            self.progress.event("progress", **self.state())
        if self.live is None and now - self.shown >= PLAIN_SECONDS:
            self.shown = now
            self.progress.show(self.line())

    def close(self) -> None:
        """Takes the view down and logs the last state."""
        if self.live:
            self.live.stop()
        self.progress.event("stage_ended", **self.state())

    def eta(self) -> float | None:
        """Seconds left, or None while unknown."""
        if self.eta_seconds is not None:
            return self.eta_seconds
        made = self.done - self.start_done
        return (time.monotonic() - self.started) / made * (self.total - self.done) if made else None

    def state(self) -> dict[str, Any]:
        """How the stage stands, as the event log gets it and views draw it."""
        eta = self.eta()
        return {
            "stage": self.stage,
            "done": self.done,
            "total": self.total,
            "unit": self.unit,
            "seconds": round(time.monotonic() - self.started, 2),
            "eta_seconds": None if eta is None else round(eta, 1),
            **self.facts,
        }

    def line(self) -> str:
        """The state in one line."""
        return self.view.line(self.state())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.view.screen(self.state(), options.max_width, options.size.height - 1)


def bar_line(state: State) -> str:
    """Any stage's state in one line: how far, the time left, the facts."""
    eta = state["eta_seconds"]
    left = f", {clock(eta)} left" if eta is not None and state["done"] < state["total"] else ""
    facts = "".join(f", {label(name)} {shown(value)}" for name, value in state.items() if name not in STANDING)
    return harmless(f"{state['stage']}: {state['done']:,}/{state['total']:,} {state['unit']}{left}{facts}")


def bar_screen(state: State, width: int, height: int) -> Table:
    """`bar_line` beside a bar."""
    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=max(state["total"], 1), completed=state["done"], width=min(24, max(width // 4, 4)))
    grid.add_row(bar, Text(bar_line(state)))
    return grid


BAR = View(bar_line, bar_screen)


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


def _append(path: Path, line: bytes) -> None:
    """In one write, after the end of whatever line a crash or a full disk left half written."""
    with open(path, "ab+", buffering=0) as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        written = file.write(line)
        if written < len(line):
            raise OSError(errno.ENOSPC, "no space left for the event", str(path))
