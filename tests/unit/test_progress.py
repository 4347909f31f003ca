from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from draftsmith import progress as module
from draftsmith.progress import Progress, clock, shown


def test_every_stage_leaves_its_start_and_end_in_the_event_log(tmp_path: Path) -> None:
    events = tmp_path / "run" / "events.jsonl"
    with Progress(quiet=True, events=events).track("extract", 10, "traces", done=2) as bar:
        bar.update(6, agreement=0.98)
    lines = [json.loads(line) for line in events.read_text().split("\n")[:-1]]
    assert [line["kind"] for line in lines] == ["stage_started", "stage_ended"]
    assert (lines[1]["done"], lines[1]["agreement"]) == (6, 0.98)


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
