"""What a run does right now, read from its event log by another process: `draftsmith watch`.

Reads only the end of the log, whatever its size, and needs nothing from the process that writes it. Whether that one is
still there says the run's lock. A line that is torn or damaged is passed over.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from draftsmith import artifacts
from draftsmith.capture.view import CAPTURE
from draftsmith.errors import UserError
from draftsmith.progress import BAR, EVENTS, LIVE_HZ, PLAIN_SECONDS, View, clock, harmless

VIEWS: Mapping[str, View] = {"capture": CAPTURE}
"""Of the stages that have a view of their own."""
TAIL_BYTES = 1 << 16
SILENT_SECONDS = 30.0
"""After so long without an event, a running stage's silence is spoken of."""
LEAVE_SECONDS = 5.0
"""How long nothing must run before `follow` leaves: the next stage of a recipe begins sooner."""
MESSAGES = 3
ENDS = {0: "done", 1: "fault", 2: "stopped", 3: "gate", 130: "interrupted"}
"""States by exit code. The others: running, dead (gone without having said how), none (nothing has run)."""
AGAIN = "the same command goes on from there"


def look(run: Path) -> dict[str, Any]:
    """How the run stands, JSON-able.

    Returns:
        `state` (see ENDS), `log` (the event log it was read from: of a run with arms the newest), `command`, `reason`
        (why it ended), `silent_seconds` (since the last event), `progress` (the running or last stage's state; its
        `stage`, `done`, `total`, `unit`, `seconds`, `eta_seconds` and facts, or None) and `messages` (the last ones).

    Raises:
        UserError: no such folder.
    """
    if not run.is_dir():
        raise UserError(f"{run}: expected a run folder, found none")
    found = _look(run)
    return _look(run) if found["state"] == "dead" else found  # it may have begun between the look at lock and log


def _look(run: Path) -> dict[str, Any]:
    nothing = {"state": "none", "log": None, "command": None, "reason": "", "silent_seconds": None, "progress": None}
    log = newest_log(run)
    if log is None:
        return {**nothing, "messages": []}
    busy = artifacts.busy(log.parent)  # before reading: what ends meanwhile then still reads as running, not as dead
    found: dict[str, Any] = {**nothing, "log": str(log), "messages": []}
    ended: Mapping[str, Any] | None = None
    events = last_events(log)
    for event in events:
        match event["kind"]:
            case "command_started":
                found |= {"command": event["command"], "progress": None, "messages": []}
                ended = None
            case "command_ended":
                found["command"] = event["command"]
                ended = event
            case "stage_started" | "progress" | "stage_ended":
                found["progress"] = {name: value for name, value in event.items() if name not in ("time", "kind")}
                ended = None
            case "said":
                found["messages"] = [*found["messages"], event["text"]][-MESSAGES:]
    if not events:
        return found
    found["silent_seconds"] = round(max(time.time() - events[-1]["time"], 0.0), 1)
    if ended is not None:
        return found | {"state": ENDS.get(ended["exit_code"], "fault"), "reason": ended["reason"]}
    return found | {"state": "running" if busy else "dead"}


def follow(run: Path, console: Console) -> None:
    """Shows the run until nothing has run in it for some seconds: drawn on a terminal, else a line now and then.

    Raises:
        UserError: no such folder.
    """
    try:
        if console.is_terminal and not console.is_dumb_terminal:
            _draw(run, console)
        else:
            _print_lines(run, console)
    except KeyboardInterrupt:  # how one leaves a view; what is watched does not notice
        return


def screen(found: Mapping[str, Any], width: int, height: int) -> RenderableType:
    """What `look` found, within `width` x `height` characters."""
    if height < 2 and found["progress"] is not None:
        return _work(found, width, height)
    return Group(_work(found, width, height - 1), _cut(verdict(found)))


def line(found: Mapping[str, Any]) -> str:
    """What `look` found, in one line."""
    state = found["progress"]
    parts = [_view(state).line(state)] if state is not None else []
    if found["state"] != "running" or state is None or found["silent_seconds"] >= SILENT_SECONDS:
        parts.append(verdict(found))
    return harmless("; ".join(parts)).replace("\n", " ")


def verdict(found: Mapping[str, Any]) -> str:
    """The run's state in words."""
    command, reason = found["command"] or "a stage", found["reason"]
    quiet = clock(found["silent_seconds"] or 0.0)
    match found["state"]:
        case "none":
            return "nothing has run here yet"
        case "running" if (found["silent_seconds"] or 0.0) >= SILENT_SECONDS:
            return f"{command} is running, and has said nothing for {quiet}"
        case "running":
            return f"{command} is running"
        case "done":
            return f"{command} is done"
        case "gate":
            return f"{command} was stopped by a gate: {reason}"
        case "interrupted":
            return f"{command} was interrupted; {AGAIN} ({reason})"
        case "dead":
            return f"{command} is gone without a word, last heard of {quiet} ago (killed?); {AGAIN}"
        case "stopped":
            return f"{command} stopped: {reason}"
        case _:
            return f"{command} ended by a fault of draftsmith's: {reason}"


def newest_log(run: Path) -> Path | None:
    """The event log written to last: the run's own, or that of one of its arms."""
    found = [path for path in (run / EVENTS, *run.glob(f"*/{EVENTS}")) if path.is_file()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def last_events(log: Path, size: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """The events in the last `size` bytes of a log (or in more, until there is one), without torn or damaged lines."""
    with open(log, "rb") as file:
        whole = file.seek(0, os.SEEK_END)
        while True:
            file.seek(max(whole - size, 0))
            lines = file.read(min(size, whole)).split(b"\n")
            if size < whole:
                del lines[0]  # begins somewhere in a line
            events = [event for line in lines[:-1] if (event := _event(line)) is not None]
            if events or size >= whole:
                return events
            size *= 4


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"time", "kind"} <= event.keys() else None


def _draw(run: Path, console: Console) -> None:
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for found in _states(run, 1 / LIVE_HZ):
            live.update(screen(found, console.width, console.height - 1), refresh=True)
    console.print(_work(found, console.width, console.height - 1))
    console.print(Text(harmless(verdict(found))), soft_wrap=True)


def _print_lines(run: Path, console: Console) -> None:
    said, at = "", 0.0
    for found in _states(run, 1.0):
        again = found["state"] == "running" and time.monotonic() - at >= PLAIN_SECONDS
        if again or found["state"] != said:
            console.print(Text(line(found)), soft_wrap=True)
            said, at = found["state"], time.monotonic()


def _states(run: Path, pause: float) -> Iterator[dict[str, Any]]:
    """`look` again and again, until nothing has run for a while."""
    ended: float | None = None
    while True:
        found = look(run)
        yield found
        ended = None if found["state"] == "running" else ended or time.monotonic()
        if ended is not None and time.monotonic() - ended >= LEAVE_SECONDS:
            return
        time.sleep(pause)


def _work(found: Mapping[str, Any], width: int, height: int) -> Group:
    """The stage's view and, as far as there is room, the last messages under it."""
    messages = [_cut(message) for message in found["messages"]][-max(height - 1, 0) :] if height > 1 else []
    if (state := found["progress"]) is None:
        return Group(*messages)
    return Group(_view(state).screen(state, width, height - len(messages)), *messages)


def _cut(text: str) -> Text:
    """One line, whatever is in it, cut where the terminal ends."""
    return Text(harmless(" ".join(text.splitlines())), no_wrap=True, overflow="ellipsis")


def _view(state: Mapping[str, Any]) -> View:
    return VIEWS.get(state["stage"], BAR)
