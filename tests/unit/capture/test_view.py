from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from draftsmith.capture.view import CAPTURE, capture_line, capture_screen, sparkline

NIGHT: dict[str, Any] = {
    "stage": "capture",
    "done": 3210,
    "total": 10_000,
    "unit": "replies",
    "seconds": 2412.0,
    "eta_seconds": 5025.0,
    "eta_rough": False,
    "req_s": 12.34,
    "tok_s": 23456.7,
    "prompt_tok_s": 4567.0,
    "running": 128,
    "waiting": 2,
    "level": 128,
    "action": "raised from 96",
    "servers": [
        {"url": "http://a:8000", "in_flight": 126, "state": "ok", "queue": 3},
        {"url": "http://b:8000", "in_flight": 2, "state": "down", "queue": None},
    ],
    "latency": {"p50": 41.234, "p95": 98.1},
    "reasoning": {
        "p50": 1234,
        "p95": 6021,
        "low": 64,
        "high": 8192,
        "counts": [1, 0, 3, 8, 15, 30, 44, 31, 4, 2, 1, 0],
    },
    "answer": {"p50": 210, "p95": 800, "low": 128, "high": 1024, "counts": [1, 2, 3, 8, 15, 30]},
    "with_reasoning": 0.9812,
    "states": {"ok": 3190, "cut_in_reasoning": 12, "cut_in_answer": 3, "rejected": 4, "failed": 1},
    "reasons": [["HTTP 400", 4], ["ids not exact", 1]],
    "disk_free": 123_456_000_000,
    "cost": 12.4,
    "cost_expected": 38.0,
    "paused": "",
}
BEGUN = {"stage": "capture", "done": 0, "total": 10, "unit": "replies", "seconds": 0.1, "eta_seconds": None}


def drawn(state: dict[str, Any], width: int = 80, height: int = 23) -> list[str]:
    """The screen as lines, as a terminal of that width gets it."""
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(capture_screen(state, width, height))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_a_capture_fits_a_terminal_of_80_by_24() -> None:
    assert drawn(NIGHT) == [
        "capture 3,210/10,000 replies ━━━━━━━━━━━━━━━━━━━━ 32%, 1:23:45 left, after 40:12",
        "rates      12.3 req/s, 4,567 tok/s in, 23,457 tok/s out",
        "load       128 running, 2 waiting, level 128; raised from 96",
        "latency    p50 41.2 s, p95 1:38",
        "reasoning  p50 1,234, p95 6,021 tokens     64 ▂▁▂▃▄▆█▆▂▂▂▁ 8k, in 98%",
        "answer     p50 210, p95 800 tokens         128 ▂▂▂▃▅█ 1k",
        "replies    ok 3,190, cut in reasoning 12, in answer 3, rejected 4, failed 1",
        "because    4 x HTTP 400",
        "           1 x ids not exact",
        "resources  123.5 GB left on disk, cost 12.40 so far, 38.00 expected",
        "servers    down        2 in flight  http://b:8000",
        "           ok        126 in flight, 3 in its queue  http://a:8000",
    ]


def test_a_capture_that_has_no_reply_yet_shows_what_it_knows() -> None:
    assert drawn(BEGUN) == [
        f"capture 0/10 replies {'━' * 45} 0%, after 0 s",
        "rates",
        "replies    ok 0, cut in reasoning 0, in answer 0, rejected 0, failed 0",
    ]
    assert capture_line(BEGUN) == "capture: 0/10 replies, truncated 0, errors 0"


def test_a_log_gets_everything_that_matters_in_one_line() -> None:
    assert capture_line(NIGHT) == (
        "capture: 3,210/10,000 replies, 1:23:45 left, 12.3 req/s, 4,567 tok/s in, 23,457 tok/s out, 128 running, "
        "truncated 15, errors 5 (4 x HTTP 400), with reasoning 98%, cost 12.40 so far, 38.00 expected"
    )


def test_a_rough_estimate_says_so() -> None:
    rough = NIGHT | {"eta_rough": True}
    assert "about 1:23:45 left" in drawn(rough)[0]
    assert "about 1:23:45 left" in capture_line(rough)


def test_a_pause_is_the_second_line() -> None:
    paused = NIGHT | {"paused": "the disk is full: 2.0 GB are needed in traces.partial"}
    assert drawn(paused)[1] == "paused: the disk is full: 2.0 GB are needed in traces.partial"
    assert "paused: the disk is full" in capture_line(paused)


def test_replies_that_never_think_are_noticed() -> None:
    assert "reasoning  in no reply" in drawn(NIGHT | {"reasoning": None, "with_reasoning": 0.0})


@pytest.mark.parametrize(("width", "height"), [(80, 23), (60, 11), (40, 8), (30, 5), (20, 3), (9, 1)])
def test_a_smaller_terminal_loses_the_least_important_rows(width: int, height: int) -> None:
    lines = drawn(NIGHT | {"paused": "why"}, width, height)
    assert len(lines) == min(height, 13)
    assert all(len(line) <= width for line in lines)
    assert lines[0].startswith("capture ")
    if height >= 3:
        assert lines[1] == "paused: why"
    if height == 5:
        assert [line.split()[0] for line in lines[2:]] == ["rates", "load", "replies"]


def test_of_many_servers_those_that_are_not_well_come_first() -> None:
    servers = [{"url": f"http://s{i}:1", "in_flight": i, "state": "ok", "queue": None} for i in range(40)]
    servers[30]["state"], servers[31]["state"] = "resting", "down"
    lines = drawn(NIGHT | {"servers": servers})
    assert len(lines) == 23
    assert [line.split()[-1] for line in lines[10:12]] == ["http://s30:1", "http://s31:1"]
    assert lines[-1] == "           and 28 more, 28 of them ok"


def test_text_of_servers_and_data_sets_cannot_touch_the_terminal() -> None:
    evil = "\x1b[2J[red]x[/red]\n\x9b1A\u202e\ud800"
    state = NIGHT | {"reasons": [[evil, 2]], "paused": evil, "action": evil}
    state["servers"] = [{"url": evil, "in_flight": 1, "state": evil, "queue": None}]
    lines = drawn(state, 200)
    for text in ("\n".join(lines), capture_line(state)):
        assert "\\x1b[2J[red]x[/red]" in text and "\\x9b1A\\u202e\\ud800" in text
        assert not any(found in text for found in ("\x1b", "\x9b", "\u202e", "\ud800"))
    assert len(lines) == 11 and "\n" not in capture_line(state)


def test_blocks_stand_for_counts() -> None:
    assert sparkline([0, 1, 7, 14]) == "▁▂▅█"
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([]) == ""


def test_the_view_of_a_capture_is_the_one_that_both_processes_use() -> None:
    assert (CAPTURE.line, CAPTURE.screen) == (capture_line, capture_screen)
