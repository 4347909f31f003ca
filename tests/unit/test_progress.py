from __future__ import annotations

import errno
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftsmith import progress as module
from draftsmith.errors import GateStop, UserError
from draftsmith.progress import Progress, clock, shown


def test_every_stage_leaves_its_start_and_end_in_the_event_log(tmp_path: Path) -> None:
    events = tmp_path / "run" / "events.jsonl"
    with Progress(quiet=True, events=events).track("extract", 10, "traces", done=2) as bar:
        bar.update(6, agreement=0.98)
    lines = [json.loads(line) for line in events.read_text().split("\n")[:-1]]
    assert [line["kind"] for line in lines] == ["stage_started", "stage_ended"]
    assert (lines[1]["done"], lines[1]["agreement"]) == (6, 0.98)


def test_how_far_a_stage_is_goes_to_the_event_log_now_and_then(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    with Progress(quiet=True, events=events).track("extract", 1000, "traces") as bar:
        for done in range(1000):
            bar.update(done)
        bar.logged -= module.EVENT_SECONDS
        bar.update(1000)
    assert [line["done"] for line in read(events) if line["kind"] == "progress"] == [1000]


def test_how_a_command_ended_is_in_the_event_log(tmp_path: Path) -> None:
    progress = Progress(quiet=True, events=tmp_path / "events.jsonl")
    with progress.command("vocab"):
        pass
    for error in (GateStop("cut off"), UserError("no file"), KeyboardInterrupt(), ZeroDivisionError()):
        with pytest.raises(type(error)), progress.command("train"):
            raise error
    ends = [line for line in read(progress.events) if line["kind"] == "command_ended"]
    assert [(line["command"], line["exit_code"], line["reason"]) for line in ends] == [
        ("vocab", 0, ""),
        ("train", 3, "cut off"),
        ("train", 2, "no file"),
        ("train", 130, "KeyboardInterrupt"),
        ("train", 1, "ZeroDivisionError"),
    ]


def test_what_is_said_is_in_the_event_log_too(tmp_path: Path) -> None:
    progress = Progress(quiet=True, events=tmp_path / "events.jsonl")
    progress.say("hello")
    assert [(line["kind"], line["text"]) for line in read(progress.events)] == [("said", "hello")]


def test_an_event_after_a_crash_does_not_touch_the_line_it_tore(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    events.write_text('{"kind": "progr')
    Progress(quiet=True, events=events).event("said", text="hello")
    assert events.read_text().startswith('{"kind": "progr\n{')
    assert json.loads(events.read_text().splitlines()[1])["text"] == "hello"


def test_a_full_disk_costs_events_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, line: bytes) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    progress = Progress(quiet=True, events=tmp_path / "events.jsonl")
    with monkeypatch.context() as patched:
        patched.setattr(module, "_append", full)
        progress.say("lost")
        progress.say("lost too")
    progress.say("there is room again")
    progress.say("and more")
    assert [line.get("lost") for line in read(progress.events)] == [2, None]


def test_a_log_that_cannot_be_written_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        Progress(quiet=True, events=tmp_path / "events.jsonl").event("said", text="x")


def read(events: Path | None) -> list[dict[str, Any]]:
    assert events is not None
    return [json.loads(line) for line in events.read_text().splitlines()]


def test_plain_lines_are_printed_where_there_is_no_terminal(monkeypatch: object) -> None:
    out = io.StringIO()
    progress = Progress(console=Console(file=out, width=200))
    with progress.track("capture", 10, "replies") as bar:
        bar.shown -= module.PLAIN_SECONDS + 1
        bar.update(5, eta_seconds=125.0, tok_s=1234.5)
    assert out.getvalue().strip() == "capture: 5/10 replies, 2:05 left, tok/s 1,234"


def test_a_terminal_shows_a_bar() -> None:
    out = io.StringIO()
    progress = Progress(console=Console(file=out, force_terminal=True, width=120))
    with progress.track("capture", 10, "replies") as bar:
        bar.update(10)
    assert "capture: 10/10 replies" in out.getvalue()


def test_a_terminal_that_cannot_move_its_cursor_gets_lines() -> None:
    out = io.StringIO()
    progress = Progress(console=Console(file=out, force_terminal=True, width=120, _environ={"TERM": "dumb"}))
    with progress.track("capture", 10, "replies") as bar:
        bar.shown -= module.PLAIN_SECONDS + 1
        bar.update(10)
    assert out.getvalue() == "capture: 10/10 replies\n"


def test_quiet_silences_the_terminal() -> None:
    out = io.StringIO()
    Progress(quiet=True, console=Console(file=out)).say("hello")
    assert out.getvalue() == ""


def test_untrusted_text_is_not_read_as_markup() -> None:
    out = io.StringIO()
    Progress(console=Console(file=out, width=200)).say("file [red]x[/red]")
    assert out.getvalue().strip() == "file [red]x[/red]"


def test_the_eta_counts_only_what_this_process_made() -> None:
    with Progress(quiet=True).track("x", 100, "items", done=90) as bar:
        assert bar.eta() is None
        bar.started -= 10
        bar.update(95)
        eta = bar.eta()
        assert eta is not None
        assert 9.9 < eta < 10.5


def test_numbers_are_written_for_people() -> None:
    assert (clock(42), clock(185), clock(3723)) == ("42 s", "3:05", "1:02:03")
    assert (shown(True), shown(False)) == ("yes", "no")
    assert (shown(1234567), shown(0.98765), shown(1234.5), shown("a")) == ("1,234,567", "0.988", "1,234", "a")


def test_control_characters_of_a_server_or_a_data_set_do_not_reach_the_terminal() -> None:
    out = io.StringIO()
    Progress(console=Console(file=out, width=200)).say("HTTP 500: \x1b[2Jbad\x9b1A\r\u202eevil\nsecond line")
    assert out.getvalue() == "HTTP 500: \\x1b[2Jbad\\x9b1A\\r\\u202eevil\nsecond line\n"
