from __future__ import annotations

import asyncio
import gc
import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from draftsmith.artifacts import Plan, Stage
from draftsmith.capture import attempt, concurrency, engine, serving
from draftsmith.errors import GateStop, Interrupted
from draftsmith.progress import Progress
from draftsmith.recipe import CaptureSettings
from draftsmith.target import endpoints
from draftsmith.target import server as server_module
from draftsmith.target.probe import QUESTIONS
from draftsmith.target.reply import Reply, Sampling
from draftsmith.target.server import NotSentAgain
from mock_engine import MockConfig, MockEngine


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(endpoints, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(endpoints, "LOOK_LIMIT", 0.2)
    monkeypatch.setattr(server_module, "WATCH_SECONDS", 0.02)


class Run:
    """One capture of `count` questions in a folder of its own."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        (folder / "questions.jsonl").write_text("".join(json.dumps({"prompt": f"Q{n}?"}) + "\n" for n in range(count)))
        self.output = Console(record=True, width=1000, file=io.StringIO())

    def capture(self, *engines: MockEngine, **changes: Any) -> dict[str, Any]:
        work = self.folder / "run" / "traces.partial"
        work.mkdir(parents=True, exist_ok=True)
        values = {
            "server": [engine.url for engine in engines],
            "questions": str(self.folder / "questions.jsonl"),
            "tokenizer": engines[0].config.tokenizer,
            "max_tokens": 100,
            "probe": False,
        }
        settings = CaptureSettings(**values | changes)
        progress = Progress(console=self.output, events=self.folder / "events.jsonl")
        counts: dict[str, Any] = engine.build(
            Stage(self.folder / "run", Plan("traces", {}, {}), work, None), settings, progress
        )
        return counts

    def said(self) -> str:
        return self.output.export_text(clear=False)

    def events(self, kind: str) -> list[dict[str, Any]]:
        events = [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]
        return [event for event in events if event["kind"] == kind]


def when(condition: Callable[[], object], *then: Callable[[], object], pause: float = 0.3) -> threading.Thread:
    """Does `then`, one after the other, once the condition is true."""

    def wait() -> None:
        until = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < until, "the condition never came true"
            time.sleep(0.01)
        for act in then:
            act()
            time.sleep(pause)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def send(number: signal.Signals) -> Callable[[], object]:
    return lambda: os.kill(os.getpid(), number)


# faults and restarts

FAULTS: tuple[str, ...] = (
    "http_408",
    "http_429",
    "http_500",
    "http_502",
    "http_503",
    "http_504",
    "retry_after",
    "slow",
)
FAULTS += ("reset_before", "reset_in_body", "closed_before", "closed_in_body")
FAULTS += ("html", "truncated_json", "empty_body", "no_choice", "aborted", "wrong_type")


def test_no_question_is_lost_to_passing_faults(tmp_path: Path) -> None:  # P12
    faults = dict.fromkeys(FAULTS, 0.02)
    config = MockConfig(faults=faults, retry_after=0.05, slow_seconds=0.3, latency=0.01)
    with MockEngine(config) as engine:
        counts = Run(tmp_path, 120).capture(engine, concurrency=32, retries=8)
        asked = engine.stats()["questions"]
    assert counts["ok"] == 120
    assert {fate for fates in asked.values() for fate in fates} >= {"http_503", "reset_in_body", "html", "ok"}
    assert all(fates[-1] in ("ok", "slow", "wrong_type") for fates in asked.values())


def test_each_final_refusal_costs_one_request_and_its_question_only(tmp_path: Path) -> None:  # P12, P14
    with MockEngine(MockConfig(faults={"http_400": 0.1, "too_long": 0.1})) as engine:
        counts = Run(tmp_path, 100).capture(engine, concurrency=8)
        asked = engine.stats()["questions"]
    refused = [fates for fates in asked.values() if fates != ["ok"]]
    assert all(fates in (["http_400"], ["too_long"]) for fates in refused)
    assert counts["failed"] == len(refused) > 10
    assert counts["ok"] == 100 - len(refused)


def test_a_restart_in_mid_run_fails_no_question(tmp_path: Path) -> None:
    with MockEngine(MockConfig(latency=0.05)) as engine:
        run = Run(tmp_path, 200)

        def restart() -> None:
            engine.kill()
            time.sleep(1.0)
            engine.start()

        thread = when(lambda: engine.process and engine.stats()["replies"] > 40, restart)
        counts = run.capture(engine, concurrency=16, retries=1)
        thread.join()
    assert counts["ok"] == 200
    assert "no server is left" in run.said() and "answers again after" in run.said()


def test_one_of_two_servers_may_die_and_come_back(tmp_path: Path) -> None:
    with MockEngine(MockConfig(latency=0.05)) as one, MockEngine(MockConfig(latency=0.05)) as other:
        run = Run(tmp_path, 400)
        thread = when(lambda: one.stats()["replies"] > 40, one.kill, one.start, pause=0.5)
        counts = run.capture(one, other, concurrency=8, retries=1)
        thread.join()
        assert one.stats()["replies"] > 0  # of its second life
    assert counts["ok"] == 400
    assert "the others go on" in run.said()


@pytest.mark.parametrize(
    ("later", "why"),
    [
        ({}, ""),
        ({"ids": False}, "gives no token ids, unlike"),
        ({"max_model_len": 256}, "expected a context of 4,096 ids, found 256"),
    ],
)
def test_a_server_that_comes_up_late_is_probed_before_it_gets_a_question(
    tmp_path: Path, later: dict[str, Any], why: str
) -> None:
    config = MockConfig(latency=0.05, max_model_len=4096)
    with MockEngine(config) as one, MockEngine(config) as late:
        late.kill()
        late.config = replace(late.config, **later)
        run = Run(tmp_path, 240)
        thread = when(lambda: one.stats()["replies"] > 20, late.start)
        counts = run.capture(one, late, concurrency=8, probe=True)
        thread.join()
        asked = late.stats()["questions"]
    assert counts["ok"] == 240
    questions = {question: fates for question, fates in asked.items() if question not in QUESTIONS}
    assert bool(questions) == (not why)
    assert f"{late.url} answers, but stays left out: " in run.said() or not why
    assert run.said().count(why) == 1 or not why
    if "context" not in why:
        assert sum(len(fates) for question, fates in asked.items() if question in QUESTIONS) >= 2


def test_the_garbage_collector_looks_seldom_while_requests_are_in_flight_and_as_ever_after() -> None:
    before = gc.get_threshold()
    with pytest.raises(GateStop), attempt._few_collections():
        assert gc.get_threshold() == attempt.SELDOM
        assert gc.get_freeze_count() > 0
        raise GateStop("over")
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


# signals


def test_replies_that_do_not_come_in_time_are_abandoned_and_asked_again(tmp_path: Path) -> None:
    with MockEngine(MockConfig(faults={"hang": 1.0})) as engine:
        run = Run(tmp_path, 20)
        thread = when(lambda: engine.stats()["in_flight"] == 4, send(signal.SIGTERM))
        with pytest.raises(Interrupted, match="with 0 of 20 replies"):
            run.capture(engine, concurrency=4, drain_seconds=0.2)
        thread.join()
        assert "stopping: waiting for 4 replies in flight, 0 s at most" in run.said()
        assert "4 replies in flight are abandoned, not there after" in run.said()
        engine.change(faults={})
        assert run.capture(engine)["ok"] == 20
        assert sum(map(len, engine.stats()["questions"].values())) == 24


def test_a_second_signal_abandons_at_once(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with MockEngine(MockConfig(faults={"hang": 1.0})) as engine:
        run = Run(tmp_path, 20)
        thread = when(lambda: engine.stats()["in_flight"] == 4, send(signal.SIGINT), send(signal.SIGINT))
        with pytest.raises(Interrupted, match="with 0 of 20 replies"):
            run.capture(engine, concurrency=4, drain_seconds=600)
        thread.join()
    assert "4 replies in flight are abandoned, as told twice" in run.said()
    assert signal.getsignal(signal.SIGINT) == handler


def test_a_run_whose_servers_are_all_down_can_be_stopped(tmp_path: Path) -> None:
    with MockEngine(MockConfig(latency=0.05)) as engine:
        run = Run(tmp_path, 200)
        killed = when(lambda: engine.stats()["replies"] > 40, engine.kill)
        thread = when(lambda: "no server is left" in run.said(), send(signal.SIGTERM))
        with pytest.raises(Interrupted, match="of 200 replies"):
            run.capture(engine, concurrency=8)
        thread.join()
        killed.join()
        engine.start()
        assert run.capture(engine)["ok"] == 200


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_waits_for_its_server_can_be_stopped(tmp_path: Path, number: signal.Signals) -> None:
    with MockEngine(MockConfig(loading=600.0)) as engine:
        run = Run(tmp_path, 5)
        thread = when(lambda: "waiting 29:59 at most" in run.said(), send(number))
        with pytest.raises(Interrupted, match="before a question was sent"):
            run.capture(engine, wait="30m")
        thread.join()
    assert "found HTTP 503 (Loading model)" in run.said()


# the loop by itself


class Questions:
    """Plays a Capture of `count` questions."""

    def __init__(self, count: int, concurrency: int | str = 4) -> None:
        self.settings = SimpleNamespace(concurrency=concurrency, drain_seconds=1.0)
        self.left, self.in_flight, self.finished = list(range(count)), set[str](), list[str]()
        self.paused, self.looks, self.waiting = "", 0, 0
        self.meter = SimpleNamespace(
            load=self._load, done=0, tracker=SimpleNamespace(total=count), replies_per_second=0.0
        )
        self.journal = SimpleNamespace(path=Path("run/journal"), unwritten=0)
        self.on_finish: Callable[[str], None] = lambda key: None

    def next_job(self) -> Any:
        if self.paused or not self.left:
            return None
        key = f"q{self.left.pop()}"
        self.in_flight.add(key)
        question, template = SimpleNamespace(tools=()), SimpleNamespace(options={})
        return SimpleNamespace(
            trace_id=key,
            messages=[],
            question=question,
            sampling=Sampling(max_tokens=1),
            template=template,
            render=list,
        )

    def look_at_room(self) -> str:
        return self.paused

    @property
    def exhausted(self) -> bool:
        return not self.left and not self.in_flight

    def finish(self, key: str, outcome: Any) -> None:
        self.in_flight.remove(key)
        self.finished.append(key)
        self.on_finish(key)

    def end(self) -> None:
        self.finished.append("end")

    def _load(self, **_: Any) -> None:
        self.looks += 1
        if self.looks == 3:
            self.paused = ""


class Target:
    """Plays a ServerTarget that answers at once; `held` ones never."""

    def __init__(self, held: bool = False) -> None:
        self.held = held
        self.up, self.refused, self.waiting, self.queue = 1, 0, 0, None
        self.running = self.most = 0

    async def chat(self, asked: Any) -> Reply:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(600 if self.held else 0.001)
        finally:
            self.running -= 1
        return Reply(generated_ids=[1], timing={"seconds": 0.001})

    def loads(self) -> list[dict[str, Any]]:
        return []

    def drain(self) -> None:
        pass


def drive(questions: Questions, target: Target) -> serving.Drive:
    return serving.Drive(questions, target, Progress(quiet=True))


async def test_no_more_than_the_level_is_ever_in_flight() -> None:
    questions, target = Questions(500, 7), Target()
    await drive(questions, target).run()
    assert target.most == 7
    assert len(questions.finished) == 501 and questions.finished[-1] == "end"


async def test_a_reply_that_a_kill_would_lose_still_counts_against_the_level() -> None:
    questions, target = Questions(60, 7), Target()
    at_risk = []

    def come(key: str) -> None:
        questions.journal.unwritten += 1
        at_risk.append(target.running + questions.journal.unwritten)
        if questions.journal.unwritten == 7:
            asyncio.get_running_loop().call_later(0.01, written)

    def written() -> None:
        questions.journal.unwritten = 0

    questions.on_finish = come
    await drive(questions, target).run()
    assert max(at_risk) == 7
    assert len(questions.finished) == 61


async def test_a_pause_of_the_capture_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LOOK_SECONDS", 0.01)
    questions, target = Questions(20), Target()
    questions.paused = "the disk is full"
    await drive(questions, target).run()
    assert questions.looks >= 3
    assert len(questions.finished) == 21


async def test_whatever_ends_the_loop_ends_its_tasks() -> None:
    questions, target = Questions(20), Target()

    def fault(key: str) -> None:
        if len(questions.finished) == 5:
            target.held = True
        if len(questions.finished) == 8:
            raise ZeroDivisionError

    questions.on_finish = fault
    with pytest.raises(ZeroDivisionError):
        await drive(questions, target).run()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert target.running == 0


async def test_a_cancelled_loop_ends_its_tasks() -> None:
    questions, target = Questions(20), Target(held=True)
    task = asyncio.create_task(drive(questions, target).run())
    await asyncio.sleep(0.05)
    assert target.running == 4
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert target.running == 0


async def test_what_has_ended_is_recorded_before_a_verdict_ends_the_loop() -> None:
    questions = Questions(20, 20)
    loop = drive(questions, Target())

    def verdict(key: str) -> None:
        if len(questions.finished) == 1:
            questions.waiting = len(loop.ended)
            raise GateStop("enough")

    questions.on_finish = verdict
    with pytest.raises(GateStop, match="enough"):
        await loop.run()
    assert len(questions.finished) == 1 + questions.waiting > 1


async def test_what_has_ended_is_recorded_before_an_abandonment_ends_the_loop() -> None:
    questions = Questions(20, 20)
    loop = drive(questions, Target())
    questions.on_finish = lambda key: loop.abandon("enough")
    await loop.run()
    assert not loop.ended and questions.finished


async def test_requests_not_sent_any_more_are_handed_back() -> None:
    class Draining(Target):
        async def chat(self, asked: Any) -> Reply:
            raise NotSentAgain

    questions = Questions(3)
    await drive(questions, Draining()).run()
    assert len(questions.finished) == 4


# --concurrency auto


def test_auto_shows_what_it_tried_and_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"START": 2, "LEAST_SECONDS": 0.05, "LEAST_REPLIES": 4}.items():
        monkeypatch.setattr(concurrency, name, value)
    monkeypatch.setattr(serving, "LOOK_SECONDS", 0.02)
    with MockEngine(MockConfig(latency=0.05, knee=8)) as engine:
        run = Run(tmp_path, 400)
        assert run.capture(engine, concurrency="auto")["ok"] == 400
        most = engine.stats()["most_in_flight"]
    moves = run.events("concurrency")
    assert [(move["action"], move["level"]) for move in moves[:3]] == [("start", 2), ("raise", 4), ("raise", 8)]
    assert "hold" in {move["action"] for move in moves}
    assert max(move["level"] for move in moves) >= most
    assert all(move["tok_s"] > 0 and move["latency_p50"] > 0 for move in moves if move["action"] == "raise")
    assert "requests at once from here on; " in run.said()
    assert "capture: at most " in run.said()
