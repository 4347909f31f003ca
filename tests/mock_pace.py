"""How long requests take a mock engine that has only so much to give."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable


class Pace:
    """Requests share the server: each needs its seconds of work, and above the knee all of them run slower.

    A clock of work counts on by 1 a second while at most `knee` requests run, by knee / running above it; a request
    ends when the clock has counted on by its seconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.knee, self.slots = loop, 0, 0
        self.clock, self.seen = 0.0, loop.time()
        self.running: list[tuple[float, int, Callable[[], None]]] = []
        self.waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self.number = 0
        self.timer: asyncio.TimerHandle | None = None

    def add(self, seconds: float, then: Callable[[], None]) -> None:
        """Calls `then` when a request of so many seconds is done."""
        if self.slots and len(self.running) >= self.slots:
            self.waiting.append((seconds, then))
            return
        self._advance()
        self._run(seconds, then)
        self._wake()

    def _run(self, seconds: float, then: Callable[[], None]) -> None:
        self.number += 1
        heapq.heappush(self.running, (self.clock + seconds, self.number, then))

    def _rate(self) -> float:
        return self.knee / len(self.running) if self.knee and len(self.running) > self.knee else 1.0

    def _advance(self) -> None:
        now = self.loop.time()
        self.clock += (now - self.seen) * self._rate()
        self.seen = now

    def _wake(self) -> None:
        if self.timer:
            self.timer.cancel()
        self.timer = None
        if self.running:
            seconds = max(0.0, self.running[0][0] - self.clock) / self._rate()
            self.timer = self.loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        self._advance()
        done = []
        while self.running and self.running[0][0] <= self.clock + 1e-4:
            done.append(heapq.heappop(self.running)[2])
        while self.waiting and len(self.running) < (self.slots or 1 << 30):
            self._run(*self.waiting.popleft())
        self._wake()
        for then in done:
            then()
