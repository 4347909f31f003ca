from __future__ import annotations

import errno
import heapq
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.capture import meter as module
from draftsmith.capture.meter import Meter, lengths, percentiles
from draftsmith.capture.view import CAPTURE
from draftsmith.progress import Progress
from draftsmith.trace import Trace

SERVER = {"url": "http://a:1", "in_flight": 3, "state": "ok", "queue": None}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What the meter takes for the time."""
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def notes() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def begin(clock: Clock, notes: list[dict[str, Any]], tmp_path: Path) -> Iterator[Any]:
    """Starts a meter over so many replies."""
    progress = Progress(quiet=True, events=tmp_path / "events.jsonl")
    open_ = []

    def start(total: int, done: int = 0, **options: Any) -> Meter:
        open_.append(progress.track("capture", total, "replies", done, CAPTURE))
        return Meter(open_[-1].__enter__(), notes.append, {"ok": done} if done else {}, **options)

    yield start
    for entered in open_:
        entered.__exit__(None, None, None)


def reply(tokens: int = 10, seconds: float = 1.0, **values: Any) -> Trace:
    return Trace(
        **{
            "trace_id": "t",
            "question_key": "q",
            "prompt_ids": range(7),
            "generated_ids": range(tokens),
            "timing": json.dumps({"seconds": seconds}),
            **values,
        }
    )


def load(meter: Meter, running: int, **values: Any) -> None:
    meter.load(**{"running": running, "waiting": 0, "level": running, "servers": [], **values})


def test_the_facts_are_those_of_the_replies(begin: Any, clock: Clock, tmp_path: Path) -> None:
    meter = begin(100, done=4, folder=tmp_path)
    load(meter, 3, waiting=1, level=8, servers=[SERVER])
    clock.now += 10
    for number in range(1, 5):
        meter.requests += 1
        meter.count(reply(10 * number, float(number), reasoning_span=(0, 8 * number), answer_span=(0, 2)))
    meter.count(reply(0, state="failed", error="HTTP 400: no", timing="{}"))
    meter.count(reply(5, state="rejected", error="ids not exact: 3"))
    facts = meter.facts()
    assert (facts["req_s"], facts["tok_s"], facts["prompt_tok_s"]) == (0.4, 10.5, 3.5)
    assert facts["states"] == {"ok": 8, "failed": 1, "rejected": 1}
    assert facts["reasons"] == [["HTTP 400", 1], ["ids not exact", 1]]
    assert facts["with_reasoning"] == 0.8
    assert facts["latency"] == {"p50": 2.0, "p95": 4.0}
    assert facts["reasoning"] == {"p50": 16, "p95": 32, "low": 8, "high": 64, "counts": [1, 0, 1, 1, 1, 0]}
    assert (facts["running"], facts["waiting"], facts["level"], facts["servers"]) == (3, 1, 8, [SERVER])
    assert facts["disk_free"] > 0
    assert json.loads(json.dumps(facts)) == facts


def test_nothing_is_made_up_before_the_first_reply(begin: Any) -> None:
    facts = begin(100).facts()
    assert [facts[name] for name in ("req_s", "tok_s", "latency", "reasoning", "with_reasoning")] == [None] * 5
    assert "running" not in facts and "cost" not in facts and "disk_free" not in facts


def test_the_cost_so_far_and_expected_follow_from_the_price(begin: Any, clock: Clock) -> None:
    meter = begin(11, price_per_hour=36.0)
    load(meter, 1)
    clock.now += 100
    meter.count(reply(seconds=100.0))
    facts = meter.facts()
    assert facts["cost"] == 1.0
    assert meter.eta() == 9 * 100 + 100
    assert facts["cost_expected"] == 11.0


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.2])
def test_the_time_left_is_right_however_much_lengths_differ(begin: Any, clock: Clock, spread: float) -> None:
    """Requests of log-normal duration up to a budget, 50 at once: what is said on the way, against when it ended."""
    draw = random.Random(5)
    total, level = 3000, 50
    meter = begin(total)
    seconds = [min(60 * draw.lognormvariate(0, spread), 600.0) for _ in range(total)]
    load(meter, level)
    ends = [(clock.now + taken, taken) for taken in seconds[:level]]
    heapq.heapify(ends)
    said = []
    for number in range(total):
        clock.now, taken = heapq.heappop(ends)
        meter.count(reply(seconds=round(taken, 3)))
        if number + level < total:
            taken = seconds[number + level]
            heapq.heappush(ends, (clock.now + taken, taken))
        load(meter, len(ends))
        said.append((clock.now, meter.eta(), meter.facts()["eta_rough"]))
    whole = clock.now - 1000.0
    for now, eta, _ in said[600::100]:
        assert abs(now + eta - clock.now) < 0.1 * whole
    assert said[0][2] and not said[600][2]


def test_the_time_left_follows_the_number_of_requests_in_flight(begin: Any, clock: Clock) -> None:
    meter = begin(1000)
    load(meter, 4)
    for _ in range(100):
        clock.now += 1
        meter.count(reply(seconds=4.0))
    load(meter, 4)
    assert meter.eta() == pytest.approx(896 * 4 / 4 + 4)
    load(meter, 8)
    assert meter.eta() == pytest.approx(892 * 4 / 8 + 4)
    load(meter, 0)
    assert meter.eta() is None


def test_the_last_replies_take_as_long_as_long_ones_do(begin: Any, clock: Clock) -> None:
    meter = begin(20)
    load(meter, 4)
    for _ in range(16):
        clock.now += 2.5
        meter.count(reply(seconds=10.0))
    load(meter, 4)
    before = meter.eta()
    clock.now += 4
    load(meter, 4)
    assert (before, meter.eta()) == (7.5, 3.5)  # the last was asked when the fifth from the end was counted
    clock.now += 60
    load(meter, 4)
    assert meter.eta() == 0


def test_without_a_word_about_the_load_the_replies_themselves_give_the_time_left(begin: Any, clock: Clock) -> None:
    meter = begin(10)
    for _ in range(4):
        clock.now += 3
        meter.count(reply(timing="{}"))
    assert meter.eta() == 5 * 3 + 3


def test_what_failed_says_nothing_about_the_time_left(begin: Any, clock: Clock) -> None:
    meter = begin(10)
    clock.now += 1
    meter.count(reply(0, state="failed", error="HTTP 503", timing="{}"))
    assert meter.eta() is None


def test_memory_stays_the_same_however_long_it_goes_on(begin: Any, clock: Clock) -> None:
    meter = begin(10**6)
    for number in range(5000):
        clock.now += 0.5
        meter.count(reply(1 + number % 50, error=f"made up {number}: x", state="rejected", answer_span=(0, 1)))
    assert (len(meter.latencies), len(meter.answer), len(meter.samples)) == (512, 512, 60)
    assert len(meter.reasons) == module.REASONS + 1
    assert meter.reasons[module.OTHER] == 5000 - module.REASONS
    assert meter.eta() == pytest.approx((10**6 - 5001) * 0.5 + 1)


def test_rates_are_over_the_last_two_minutes(begin: Any, clock: Clock) -> None:
    meter = begin(10**6)
    for second in range(600):
        clock.now += 1
        meter.requests += 1
        meter.count(reply(1000 if second < 300 else 10))
    assert meter.facts()["tok_s"] == pytest.approx(10)
    assert meter.facts()["req_s"] == pytest.approx(1)


def test_the_last_move_of_the_concurrency_is_shown(begin: Any) -> None:
    meter = begin(10)
    meter.tracker.progress.event("concurrency", level=64, action="raised from 48: +20 % tok/s")
    assert meter.facts()["action"] == "raised from 48: +20 % tok/s"


def test_counts_are_left_for_status_now_and_then_and_at_the_end(
    begin: Any, clock: Clock, notes: list[dict[str, Any]]
) -> None:
    meter = begin(100)
    for _ in range(31):
        clock.now += 1
        meter.count(reply())
    assert [note["done"] for note in notes] == [15, 30]
    meter.write_note()
    assert notes[-1] == {"done": 31, "total": 100, "ok": 31}


@pytest.mark.parametrize(("number", "raised"), [(errno.ENOSPC, False), (errno.EDQUOT, False), (errno.EIO, True)])
def test_a_full_disk_is_not_the_notes_to_stumble_over(begin: Any, number: int, raised: bool) -> None:
    def full(counts: dict[str, Any]) -> None:
        raise OSError(number, "no")

    meter = begin(100)
    meter.note = full
    if raised:
        with pytest.raises(OSError):
            meter.write_note()
    else:
        meter.write_note()


def test_lengths_are_counted_by_half_octaves_between_powers_of_two() -> None:
    assert lengths([]) is None
    assert lengths([0, 1]) == {"p50": 0, "p95": 1, "low": 1, "high": 2, "counts": [2, 0]}
    assert lengths([64, 90, 91, 127]) == {"p50": 90, "p95": 127, "low": 64, "high": 128, "counts": [2, 2]}
    assert percentiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p95": 3.0}
