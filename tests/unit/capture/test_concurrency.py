from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from draftsmith.capture.concurrency import BLIND, MOST, START, Concurrency, Move, Point, curve_line, next_level
from draftsmith.target.metrics import Queue


@dataclass
class Simulation:
    """Servers on a fake clock: all running requests share them, each making `rate(running)` tokens a second."""

    rate: Callable[[int], float]
    tokens: tuple[int, int] = (400, 600)
    slots: int = 1 << 30
    """So many run, more wait."""
    refuse_above: int = 1 << 30
    metrics: bool = False
    servers: int = 1
    questions: int = 1 << 60
    noise: float = 0.0
    """Share by which a reply may take longer or shorter than the others."""
    moves: list[tuple[float, Move]] = field(default_factory=list)
    now: float = 0.0
    done: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(0)
        self.auto = Concurrency(self.servers, 0.0)
        self.running: list[tuple[float, float, int]] = []
        self.waiting: list[tuple[float, int]] = []
        self.clock = self.look_at = self.poll_at = 0.0
        self.sent = self.refused = 0
        self.queue: Queue | None = None

    def run(self, until: float) -> Simulation:
        while self.now < until:
            self._send()
            rate = self.rate(len(self.running)) if self.running else 1.0
            ends = self.now + (self.running[0][0] - self.clock) / rate if self.running else until
            moment = min(ends, self.look_at, until)
            self.clock += rate * (moment - self.now)
            self.now = moment
            if moment == ends and self.running:
                self._end()
            if moment == self.look_at:
                self._look()
        return self

    def levels(self, since: float) -> list[int]:
        """The levels that were in force at `since` or later."""
        before = [move.level for at, move in self.moves if at <= since]
        return [*before[-1:], *(move.level for at, move in self.moves if at > since)]

    def _send(self) -> None:
        while len(self.running) + len(self.waiting) < self.auto.level and self.sent < self.questions:
            if len(self.running) >= self.refuse_above:
                self.refused += 1
                return
            self.sent += 1
            self._run(self.now, self.random.randint(*self.tokens))

    def _run(self, sent_at: float, tokens: int) -> None:
        if len(self.running) >= self.slots:
            self.waiting.append((sent_at, tokens))
            return
        work = tokens * self.random.uniform(1 - self.noise, 1 + self.noise)
        heapq.heappush(self.running, (self.clock + work, sent_at, tokens))

    def _end(self) -> None:
        _, sent_at, tokens = heapq.heappop(self.running)
        self.done += tokens
        self.auto.ended(self.now, self.now - sent_at, tokens)
        if self.waiting:
            self._run(*self.waiting.pop(0))

    def _look(self) -> None:
        self.look_at += 0.25
        if self.metrics and self.now >= self.poll_at:
            self.poll_at = self.now + 2.5
            self.queue = Queue(len(self.running), len(self.waiting), self.now)
        move = self.auto.look(self.now, len(self.running) + len(self.waiting), self.refused, self.queue, self.servers)
        if move is not None:
            self.moves.append((self.now, move))


def knee(at: int, tokens_a_second: float) -> Callable[[int], float]:
    return lambda running: tokens_a_second * min(1.0, at / running)


LENGTHS = [(500, 500), (400, 600), (100, 1000), (20, 4000)]


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("seconds", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("at", [48, 200])
def test_a_knee_is_found_within_a_minute_and_never_passed_by_far(
    at: int, seconds: float, tokens: tuple[int, int]
) -> None:
    simulation = Simulation(knee(at, sum(tokens) / 2 / seconds), tokens=tokens).run(240)
    assert all(0.75 * at <= level <= 1.25 * at for level in simulation.levels(60))
    assert simulation.done / 240 > 0.85 * at * sum(tokens) / 2 / seconds


@pytest.mark.parametrize("at", [48, 200])
def test_a_knee_is_found_through_noise(at: int) -> None:
    simulation = Simulation(knee(at, 500.0), noise=0.4).run(240)
    assert all(0.75 * at <= level <= 1.5 * at for level in simulation.levels(60))


@pytest.mark.parametrize("at", [1, 4, 17, 34, 63, 65, 1000])
def test_other_knees_are_found_too(at: int) -> None:
    simulation = Simulation(knee(at, 1000.0)).run(300)
    assert 0.75 * at <= simulation.auto.held <= 1.25 * at


def test_where_tokens_a_second_rise_ever_more_slowly_a_level_near_the_plateau_is_held() -> None:
    """As engines are that read their weights once for a whole batch: 1 / (a + b n) tokens a second for each of n."""
    simulation = Simulation(lambda running: 1 / (0.006 + 0.00003 * running)).run(300)
    held = simulation.auto.held
    most = 1 / 0.00003
    assert held / (0.006 + 0.00003 * held) > 0.6 * most
    assert held < 800  # 0.8 of what there is to have


@pytest.mark.parametrize("metrics", [True, False])
def test_requests_that_would_only_queue_are_not_sent(metrics: bool) -> None:
    simulation = Simulation(lambda running: 200.0, slots=48, metrics=metrics).run(240)
    assert all(36 <= level <= 60 for level in simulation.levels(60))
    assert ("queue" in {move.action for _, move in simulation.moves}) is metrics


def test_refusals_lower_the_level_at_once() -> None:
    simulation = Simulation(knee(500, 500.0), refuse_above=100).run(240)
    first = next(at for at, move in simulation.moves if move.action == "refused")
    assert first < 10
    assert all(70 <= level <= 125 for level in simulation.levels(60))


def test_one_burst_of_refusals_is_one_reason() -> None:
    auto = Concurrency(1, 0.0)
    for look in range(20):
        auto.look(look / 10, START, 5 * look if look >= 10 else 0, None, 1)
    assert auto.level == int(0.75 * START)


def test_long_replies_are_waited_for() -> None:
    simulation = Simulation(knee(48, 500 / 30), questions=5000).run(900)
    assert 36 <= simulation.auto.held <= 60
    assert max(simulation.levels(0)) <= 4 * 48


def test_servers_that_show_no_queue_are_filled_before_the_first_reply_is_there() -> None:
    simulation = Simulation(knee(4000, 1.0), metrics=True, servers=2).run(60)
    assert [move.action for _, move in simulation.moves] == ["fill", "fill"]
    assert simulation.auto.level == BLIND * 2
    assert Simulation(knee(4000, 1.0)).run(60).auto.level == START  # no metrics, so it waits for a reply


def test_each_server_keeps_its_share_of_the_level() -> None:
    simulation = Simulation(knee(200, 500.0), servers=4).run(60)
    held = simulation.auto.level
    simulation.servers, simulation.rate = 3, knee(150, 500.0)
    simulation.run(60.5)
    assert simulation.auto.level == round(held * 3 / 4)
    simulation.servers = 0  # none answers: the level is what they will get when they come back
    simulation.run(61)
    assert simulation.auto.level == round(held * 3 / 4)
    simulation.servers, simulation.rate = 4, knee(200, 500.0)
    simulation.run(180)
    assert 150 <= simulation.auto.held <= 250


def test_a_level_held_follows_a_server_that_changes() -> None:
    simulation = Simulation(knee(100, 500.0)).run(60)
    assert 75 <= simulation.auto.held <= 125
    simulation.rate = knee(200, 500.0)
    simulation.run(300)
    assert 150 <= simulation.auto.held <= 250
    simulation.rate = knee(60, 500.0)
    simulation.run(900)
    assert simulation.auto.held <= 75


def test_few_questions_move_nothing() -> None:
    assert Simulation(knee(48, 500.0), questions=20).run(60).moves == []


def test_a_run_near_its_end_does_not_mistake_idleness_for_a_plateau() -> None:
    simulation = Simulation(knee(48, 500.0), questions=3000).run(50)
    held = simulation.auto.held
    simulation.run(300)
    assert simulation.auto.held == held


@pytest.mark.parametrize(
    ("found", "level"),
    [
        ({32: 1.0}, 64),
        ({32: 1.0, 64: 2.0}, 128),
        ({32: 32.0, 64: 48.0, 128: 48.0}, 48),
        ({32: 32.0, 64: 48.0, 128: 48.0, 48: 48.0}, 48),
        ({32: 32.0, 64: 64.0, 128: 64.0}, 64),
        ({32: 10.0, 64: 10.0}, 16),
        ({1: 10.0, 2: 10.0}, 1),
        ({64: 64.0, 128: 128.0, 256: 90.0}, 128),
        ({2048: 1.0, MOST: 2.0}, MOST),
    ],
)
def test_the_line_below_the_plateau_tells_where_it_begins(found: dict[int, float], level: int) -> None:
    assert next_level(found) == level


def test_the_curve_is_told_by_one_figure_for_each_half_doubling() -> None:
    curve = {level: Point(level, 1000.0 * level, 1.0) for level in (32, 33, 48, 64)}
    assert curve_line(curve) == "33: 33,000 tok/s, 48: 48,000 tok/s, 64: 64,000 tok/s"
