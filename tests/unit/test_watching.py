from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftsmith import artifacts, watching
from draftsmith.__main__ import main
from draftsmith.capture.view import CAPTURE, capture_line
from draftsmith.errors import GateStop, Interrupted, UserError
from draftsmith.progress import Progress, Tracker


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def progress(run: Path) -> Progress:
    return Progress(quiet=True, events=run / "events.jsonl")


@pytest.fixture
def work(run: Path, progress: Progress) -> Callable[..., None]:
    """Plays a command: runs `during` inside it, holding the run's lock, and ends with `error`."""

    def play(
        command: str, during: Callable[[Tracker], None] = lambda tracker: None, error: BaseException | None = None
    ) -> None:
        with artifacts.locked(run), progress.command(command):
            with progress.track(command, 10, "things", view=CAPTURE if command == "capture" else None) as tracker:
                tracker.update(4, loss=2.5)
                during(tracker)
            if error is not None:
                raise error

    return play


def as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `draftsmith watch RUN --json` prints."""
    assert main(["watch", str(run), "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found


def plain(run: Path) -> str:
    """What `draftsmith watch RUN` prints into a pipe."""
    out = io.StringIO()
    watching.follow(run, Console(file=out, width=500))
    return out.getvalue()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LEAVE_SECONDS", 0.0)


# the states


def test_a_running_stage_is_shown_with_its_facts(
    run: Path, work: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, Any] = {}
    work("train", lambda tracker: found.update(as_json(run, capsys)))
    assert (found["state"], found["command"], found["log"]) == ("running", "train", str(run / "events.jsonl"))
    assert found["progress"]["stage"] == "train"
    assert found["progress"]["done"] == 0  # as the log has it so far: nothing was due yet
    assert found["silent_seconds"] < 60


@pytest.mark.parametrize(
    ("error", "state", "words"),
    [
        (None, "done", "train is done"),
        (GateStop("no reasoning"), "gate", "train was stopped by a gate: no reasoning"),
        (Interrupted("half"), "interrupted", "train was interrupted; the same command goes on from there (half)"),
        (KeyboardInterrupt(), "interrupted", "goes on from there (KeyboardInterrupt)"),
        (UserError("no such file"), "stopped", "train stopped: no such file"),
        (ZeroDivisionError("oh"), "fault", "train ended by a fault of draftsmith's: oh"),
    ],
)
def test_the_way_it_ended_is_told(
    run: Path,
    work: Callable[..., None],
    error: BaseException | None,
    state: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    impatient: None,
) -> None:
    if error is None:
        work("train")
    else:
        with pytest.raises(type(error)):
            work("train", error=error)
    found = as_json(run, capsys)
    assert (found["state"], found["progress"]["done"], found["progress"]["loss"]) == (state, 4, 2.5)
    assert plain(run) == f"train: 4/10 things, 0 s left, loss 2.5; {watching.verdict(found)}\n"
    assert words in watching.verdict(found)


def test_a_killed_process_is_told_from_a_silent_one(
    run: Path, progress: Progress, capsys: pytest.CaptureFixture[str], impatient: None
) -> None:
    minutes_ago = time.time() - 130
    events = [("command_started", {"command": "capture"}), ("stage_started", standing("capture"))]
    lines = [json.dumps({"time": minutes_ago, "kind": kind, **fields}) for kind, fields in events]
    (run / "events.jsonl").write_text("\n".join(lines) + "\n")
    with artifacts.locked(run):
        alive = as_json(run, capsys)
        assert alive["state"] == "running"
        assert watching.verdict(alive) == "capture is running, and has said nothing for 2:10"
        assert "has said nothing for 2:10" in watching.line(alive)
    dead = as_json(run, capsys)
    assert dead["state"] == "dead"
    assert watching.verdict(dead).startswith("capture is gone without a word, last heard of 2:10 ago (killed?)")
    assert plain(run).count("\n") == 1


def test_where_nothing_runs_the_json_says_so(run: Path, capsys: pytest.CaptureFixture[str], impatient: None) -> None:
    assert as_json(run, capsys) == {
        "state": "none",
        "log": None,
        "command": None,
        "reason": "",
        "silent_seconds": None,
        "progress": None,
        "messages": [],
    }
    assert plain(run) == "nothing has run here yet\n"


def test_a_folder_that_is_not_there_is_a_users_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "no")]) == 2
    assert "expected a run folder, found none" in capsys.readouterr().err


def test_the_next_command_replaces_what_the_last_one_left(
    run: Path, work: Callable[..., None], progress: Progress, capsys: pytest.CaptureFixture[str]
) -> None:
    work("capture", lambda tracker: progress.say("first"))
    assert as_json(run, capsys)["messages"] == ["first"]
    with artifacts.locked(run), progress.command("train"):
        found = as_json(run, capsys)
    assert (found["state"], found["command"], found["progress"], found["messages"]) == ("running", "train", None, [])
    assert watching.line(found) == "train is running"


def test_the_newest_arm_of_a_run_is_watched(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for age, arm in enumerate(["captured", "static"]):
        Progress(quiet=True, events=run / arm / "events.jsonl").event("command_started", command=arm)
        os.utime(run / arm / "events.jsonl", (time.time() - age, time.time() - age))
    assert as_json(run, capsys)["command"] == "captured"


# the log


@pytest.mark.parametrize("tail", [b'{"time": 1, "kind": "progr', b"\xff\x00\n", b"[]\n", b'{"kind": 1}\n'])
def test_a_torn_or_damaged_line_is_passed_over(run: Path, work: Callable[..., None], tail: bytes) -> None:
    work("train")
    with open(run / "events.jsonl", "ab") as file:
        file.write(tail)
    assert watching.look(run)["state"] == "done"
    assert len(watching.last_events(run / "events.jsonl")) == 4


def test_of_a_large_log_only_the_end_is_read(run: Path, progress: Progress) -> None:
    for number in range(200):
        progress.event("said", text=f"{number} " + "x" * 100)
    log = run / "events.jsonl"
    assert [event["text"][:3] for event in watching.last_events(log, 1000)] == [f"{n}" for n in range(194, 200)]
    progress.event("measured", much="y" * 5000)
    assert watching.last_events(log, 1000)[-1]["kind"] == "measured"


def test_a_watcher_who_may_not_touch_the_lock_takes_the_run_for_alive(
    run: Path, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "no")

    progress.event("command_started", command="train")
    (run / ".lock").touch()
    monkeypatch.setattr(artifacts, "FileLock", refuse)
    assert watching.look(run)["state"] == "running"


# the screen


def drawn(found: dict[str, Any], width: int = 80, height: int = 23) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(watching.screen(found, width, height))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_the_view_of_a_capture_is_drawn_with_the_last_messages_under_it(
    run: Path, work: Callable[..., None], progress: Progress
) -> None:
    def during(tracker: Tracker) -> None:
        for number in range(5):
            progress.say(f"message {number}")
        tracker.update(7, states={"ok": 7})

    work("capture", during)
    lines = drawn(watching.look(run))
    assert lines[0].startswith("capture 7/10 things ━")
    assert lines[2] == "replies    ok 7, cut in reasoning 0, in answer 0, rejected 0, failed 0"
    assert lines[3:6] == ["message 2", "message 3", "message 4"]
    assert lines[6:] == ["capture is done"]


def test_hostile_text_in_the_log_cannot_touch_the_terminal(
    run: Path, work: Callable[..., None], progress: Progress, impatient: None
) -> None:
    evil = "\x1b[2J[red]x[/red]\u202e\ud800"
    with pytest.raises(GateStop):
        work("train", lambda tracker: progress.say(evil), GateStop(evil))
    shown = "\n".join(drawn(watching.look(run), 200))
    for text in (shown, plain(run)):
        assert "\\x1b[2J[red]x[/red]\\u202e\\ud800" in text
        assert not any(found in text for found in ("\x1b", "\r", "\u202e", "\ud800"))


@pytest.mark.parametrize(("width", "height"), [(40, 6), (20, 3), (10, 1)])
def test_a_small_terminal_is_not_overrun(run: Path, work: Callable[..., None], width: int, height: int) -> None:
    work("capture")
    lines = drawn(watching.look(run), width, height)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)


def test_a_pipe_gets_a_line_when_the_state_changes(
    run: Path, work: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter(
        [
            {"state": "running", "command": "capture", "progress": standing("capture"), "silent_seconds": 0.0},
            {"state": "running", "command": "capture", "progress": standing("capture", 3), "silent_seconds": 0.0},
            {"state": "done", "command": "capture", "progress": None, "silent_seconds": 0.0},
        ]
    )

    def looked(*_: object) -> Iterator[dict[str, Any]]:
        yield from ({"log": "", "reason": "", "messages": [], **state} for state in states)

    monkeypatch.setattr(watching, "_states", looked)
    first = capture_line(standing("capture"))
    assert plain(run).splitlines() == [first, "capture is done"]


def test_ctrl_c_leaves_the_view_and_is_no_failure(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watching, "look", interrupted)
    assert main(["watch", str(run)]) == 0


def test_looking_for_a_moment_does_not_keep_a_command_from_starting(run: Path) -> None:
    (run / ".lock").touch()
    assert not artifacts.busy(run)
    with artifacts.locked(run):
        assert artifacts.busy(run)
    assert not artifacts.busy(run)


def standing(stage: str, done: int = 0) -> dict[str, Any]:
    return {"stage": stage, "done": done, "total": 9, "unit": "replies", "seconds": 1.0, "eta_seconds": None}
