"""How many requests to keep in flight: the least that gives (nearly) all the tokens a second the servers have.

A measurement holds one level until as many replies (a quarter while searching), sent under it, have come back. Its
throughput follows by Little's law: requests in flight x tokens / seconds these replies took; so a few long replies are
enough, and their lengths don't matter. The level doubles while that gains tokens a second. Once it does not, the last
level below the plateau tells where the plateau begins (`next_level`), and that level is held. From then on it is
compared with one a fifth higher or lower now and then, and follows if the tokens a second do. Refusals (429, 503) and
a queue in the servers' own metrics lower it at once. Pure: the caller's clock, no I/O; a reply costs a few additions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from draftsmith.target.metrics import Queue

START, BLIND = 32, 128
"""Per server: the first level, and the level up to which a server whose metrics show no queue is filled unmeasured."""
MOST = 4096
LEAST_REPLIES, LEAST_SECONDS, BLIND_SECONDS = 8, 1.0, 5.0
LATENCIES = 1.5
"""Median latencies that a measurement takes at least."""
FILLED = 0.9
"""Share of the level that must have been in flight: a run that has no more to ask tells nothing about the level."""
GAIN = 0.2
"""Of a relative rise of the level, the least share that must come back in tokens a second."""
PLATEAU = 0.9
QUEUED = 0.1
"""Share of the servers' requests that may wait there."""
CUT = 0.75
STEP, STEP_GAIN = 1.2, 0.5
"""A trial's step, and the share of it that must come back to go up (to go down: `GAIN` of it may be lost)."""
REST_SECONDS, REST_LIMIT = 5.0, 120.0
"""Between trials: at first, and at most once they have changed nothing."""

Trial = Literal["", "up", "down"]


@dataclass(frozen=True, slots=True)
class Point:
    """What one level gave."""

    level: float
    """Requests in flight on average."""
    tok_s: float
    latency_p50: float


@dataclass(frozen=True, slots=True)
class Move:
    """A change of the level, why, and what the last measurement showed (None: there was none)."""

    level: int
    action: str
    point: Point | None


@dataclass(slots=True)
class Window:
    """A measurement going on. Only replies to requests sent since its start count.

    It begins once the level is in force. What a lower level sent before it has ended then, and what a higher one sent
    at a stroke does not count: where requests queue, those waited for less long than all later ones will.
    """

    since: float
    seen: float
    begun: bool = False
    area: float = 0.0
    """Requests in flight, integrated over time."""
    tokens: int = 0
    latencies: list[float] = field(default_factory=list)
    queued: list[float] = field(default_factory=list)
    """Shares of the servers' requests that wait, once per look."""


class Concurrency:
    """The level, moved by what comes back. `ended` for every reply, `look` several times a second."""

    def __init__(self, servers: int, now: float, most: int = MOST) -> None:
        self.servers, self.most = max(1, servers), most
        self.level = min(START * self.servers, most)
        self.curve: dict[int, Point] = {}
        """What every level tried gave when it was last measured."""
        self.found: dict[int, float] | None = {}
        """Level -> tokens a second while searching; None: the level is found and held."""
        self.held = self.level
        self.base: Point | None = None
        """What the level held gives; trials are compared with it."""
        self.trial: Trial = ""
        self.next_trial: Trial = "up"
        self.rest, self.rests_until = REST_SECONDS, 0.0
        self.refused = 0
        self.window = Window(now, now)

    def ended(self, now: float, seconds: float, tokens: int) -> None:
        """A reply of `tokens` ids came after `seconds`."""
        if now - seconds >= self.window.since:
            self.window.tokens += tokens
            self.window.latencies.append(seconds)

    def look(self, now: float, running: int, refused: int, queue: Queue | None, servers: int) -> Move | None:
        """Moves the level if there is a reason to.

        Args:
            running: requests at the servers.
            refused: requests answered by 429 or 503, ever.
            queue: the servers' own, if they tell.
            servers: how many are up.
        """
        window = self.window
        window.area += running * (now - window.seen)
        window.seen = now
        if queue is not None and queue.at >= window.since:
            window.queued.append(queue.share)
        if servers and servers != self.servers:
            return self._for_servers(servers, now)
        if refused != self.refused:
            return self._refused(refused, now)
        if not window.begun:
            return self._begin(now, running)
        if not self._measured(now, running):
            return self._blindly(now)
        point = self._point(now)
        self.curve[self.level] = point
        if min(window.queued, default=0.0) > QUEUED:
            return self._queued(point, now)
        return self._search(point, now) if self.found is not None else self._hold(point, now)

    def _begin(self, now: float, running: int) -> Move | None:
        if FILLED * self.level <= running <= 1.05 * self.level + 1:
            self.window = Window(now, now, begun=True)
        return None

    def _measured(self, now: float, running: int) -> bool:
        window, passed = self.window, now - self.window.since
        replies = max(4 * LEAST_REPLIES, self.level) if self.found is None else max(LEAST_REPLIES, self.level // 4)
        if passed < LEAST_SECONDS or len(window.latencies) < replies:
            return False
        if passed < LATENCIES * statistics.median(window.latencies):  # only the quickest are there
            return False
        if window.area < FILLED * self.level * passed:  # too few questions left, or the servers refuse
            self.window = Window(now, now)
            return False
        return True

    def _point(self, now: float) -> Point:
        window = self.window
        level, latency = window.area / (now - window.since), statistics.median(window.latencies)
        return Point(level, level * window.tokens / sum(window.latencies), latency)

    def _search(self, point: Point, now: float) -> Move | None:
        assert self.found is not None
        self.found[self.level] = point.tok_s
        target = next_level(self.found, self.most)
        if target > self.level and target not in self.found:
            return self._to(target, "raise", point, now)
        if target not in self.found:
            return self._to(target, "lower", point, now)
        self.found, self.rests_until = None, now + self.rest
        self.base = point if target == self.level else None
        return self._to(target, "hold", point, now)

    def _hold(self, point: Point, now: float) -> Move | None:
        if self.base is None or not self.trial:
            self.held, self.base = self.level, point if self.base is None else _mean(self.base, point)
            if now < self.rests_until:
                return self._to(self.level, "", point, now)
            self.trial, self.next_trial = self.next_trial, "down" if self.next_trial == "up" else "up"
            return self._to(self._stepped(), f"try {self.trial}", point, now)
        ratio = point.level / self.base.level - 1.0
        least = ratio * (STEP_GAIN if self.trial == "up" else GAIN)
        worked = point.tok_s / self.base.tok_s - 1.0 > least
        if worked:  # go on the same way at once
            self.base, self.next_trial, self.rest, self.rests_until = point, self.trial, REST_SECONDS, now
            self.held, self.trial = self.level, ""
            return self._to(self.level, "", point, now)
        return self._back("back", point, now)

    def _stepped(self) -> int:
        if self.trial == "up":
            return min(self.most, max(self.level + 1, round(self.level * STEP)))
        return max(1, min(self.level - 1, round(self.level / STEP)))

    def _back(self, action: str, point: Point | None, now: float) -> Move | None:
        """Ends a trial: to the level before it."""
        self.trial, self.rest = "", min(REST_LIMIT, 1.5 * self.rest)
        self.rests_until = now + self.rest
        return self._to(self.held, action, point, now)

    def _queued(self, point: Point, now: float) -> Move | None:
        """The servers hold more than they work on: no more than that helps."""
        if self.trial == "up":
            return self._back("queue", point, now)
        share = max(0.5, 1.0 - min(self.window.queued))
        return self._cut(share, "queue", point, now)

    def _refused(self, refused: int, now: float) -> Move | None:
        fresh = now - self.window.since >= LEAST_SECONDS  # not the echo of the last cut
        self.refused = refused
        if not fresh:
            return None
        if self.trial == "up":
            return self._back("refused", None, now)
        return self._cut(CUT, "refused", None, now)

    def _cut(self, share: float, action: str, point: Point | None, now: float) -> Move | None:
        self.found, self.base, self.trial, self.next_trial = None, None, "", "up"
        self.rests_until = now + self.rest
        return self._to(max(1, int(self.level * share)), action, point, now)

    def _for_servers(self, servers: int, now: float) -> Move | None:
        """Each server keeps its share of the level; what was measured is of other servers."""
        level = min(self.most, max(1, round(self.level * servers / self.servers)))
        self.servers, self.base, self.trial, self.curve = servers, None, "", {}
        if self.found is not None:
            self.found = {}
        return self._to(level, "servers", None, now)

    def _blindly(self, now: float) -> Move | None:
        """Replies that take long: servers that show no queue may be filled before the first of them is there."""
        window = self.window
        limit = min(BLIND * self.servers, self.most)
        waiting = max(window.queued, default=1.0)
        if (
            self.found is None
            or now - window.since < BLIND_SECONDS
            or window.latencies
            or waiting > 0
            or self.level >= limit
        ):
            return None
        return self._to(min(limit, 2 * self.level), "fill", None, now)

    def _to(self, level: int, action: str, point: Point | None, now: float) -> Move | None:
        moved = level != self.level
        self.level, self.window = level, Window(now, now)
        return Move(level, action, point) if moved or action == "hold" else None


def next_level(found: Mapping[int, float], most: int = MOST) -> int:
    """The level to measure next, or one that is measured already: then it is the one to hold.

    Below the knee every request adds its own tokens a second; above it none does. So the line from nothing through the
    highest level below the plateau meets the plateau at the knee, or before it where the curve bends slowly: then the
    level measured there becomes the next line's.

    Args:
        found: level -> tokens a second.
        most: limit of the level.
    """
    levels = sorted(found)
    top = levels[-1]
    rising = len(levels) == 1 or _gain(found, levels[-2], top) >= GAIN
    if rising and top < most:
        return min(most, 2 * top)
    peak = max(levels, key=lambda level: found[level])
    below = [level for level in levels if level < peak and found[level] < PLATEAU * found[peak]]
    below = [level for level in below if _gain(found, level, peak) >= GAIN]
    if not below:
        return max(1, levels[0] // 2)
    knee = math.ceil(found[peak] / found[below[-1]] * below[-1])
    above = [level for level in levels if below[-1] < level <= max(peak, knee)]
    near = [level for level in above if abs(level - knee) <= 0.1 * knee]
    return near[0] if near else min(knee, peak)


def curve_line(curve: Mapping[int, Point]) -> str:
    """What the levels gave, for people: one figure for each half doubling."""
    shown = {round(2 * math.log2(level)): level for level in sorted(curve)}
    return ", ".join(f"{level}: {curve[level].tok_s:,.0f} tok/s" for level in shown.values())


def _gain(found: Mapping[int, float], lower: int, higher: int) -> float:
    """Relative rise of the tokens a second for a relative rise of the level: 1 below a knee, 0 above."""
    return math.log(found[higher] / found[lower]) / math.log(higher / lower)


def _mean(old: Point, new: Point) -> Point:
    """Of measurements of one level."""
    return Point((old.level + new.level) / 2, (old.tok_s + new.tok_s) / 2, (old.latency_p50 + new.latency_p50) / 2)
