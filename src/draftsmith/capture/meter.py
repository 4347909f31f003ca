"""What a running capture shows: counts, rates, latencies, lengths, cost and the time left, for every front end.

Counting a reply takes some microseconds and no more memory as the run goes on: percentiles and lengths are over the
latest replies. The facts are worked out at most four times a second. All of it happens in the loop's own thread; a
thread that draws sees only finished facts.

The time left is tokens left / tokens per second. Replies in flight hide part of both: the first to end are the short
ones, so neither their mean length nor the tokens that have come back so far are those of the whole. Little's law needs
no such mean: a reply costs (seconds that all requests together have been in flight, those still in flight included) /
(replies that have ended), and as many requests as are in flight pay for it at the same time. The tokens cancel. So: the
replies not asked yet x that cost / requests in flight, plus a long reply (p95) for the last one asked. Until twice as
many replies have ended as are in flight, the figure is rough and says so.
"""

from __future__ import annotations

import errno
import json
import math
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.progress import LIVE_HZ, Tracker
from draftsmith.trace import Trace

RECENT = 512
"""Latest replies that percentiles and lengths are over."""
REMEMBERED = 2048
"""Replies after which the older ones' cost counts half: a run changes its level, and servers their speed."""
RATE_SECONDS, RATE_SAMPLES = 2.0, 60
"""Rates are over the last two minutes."""
NOTE_SECONDS = 15.0
REASONS = 64
"""Classes of error kept apart at most."""
REASON_CHARACTERS = 200
OTHER = "other reasons"


class Meter:
    """Progress for people and for `status`. Counts go over the whole capture; everything else over this process."""

    def __init__(
        self,
        tracker: Tracker,
        note: Callable[[dict[str, Any]], None],
        before: Mapping[str, int],
        *,
        folder: Path | None = None,
        price_per_hour: float | None = None,
    ) -> None:
        """Starts from `before` (records per state). `folder` is where the disk may fill up."""
        self.tracker, self.note, self.folder, self.price_per_hour = tracker, note, folder, price_per_hour
        self.done = tracker.done
        self.states = Counter(before)
        self.reasons: Counter[str] = Counter()
        self.requests = self.replies = self.reasoned = self.tokens = self.prompt_tokens = 0
        self.latencies: deque[float] = deque(maxlen=RECENT)
        self.reasoning: deque[int] = deque(maxlen=RECENT)
        self.answer: deque[int] = deque(maxlen=RECENT)
        self.running = 1
        self.paused = ""
        """Why nothing is asked at the moment; empty while all is well."""
        self.load_facts: dict[str, Any] = {}
        self.started = self.at = self.all_asked = time.monotonic()
        self.due = 0.0
        self.noted = self.started
        self.spent = self.ended = 0.0
        self.samples: deque[tuple[float, int, int, int]] = deque([(self.started, 0, 0, 0)], maxlen=RATE_SAMPLES)

    def count(self, trace: Trace) -> None:
        """One more record. What failed took no tokens and says nothing about the time left."""
        self.done += 1
        self.states[trace.state] += 1
        if trace.error:
            self._count_reason(trace.error)
        if trace.state != "failed":
            self.replies += 1
            self.ended += 1
            self.tokens += len(trace.generated_ids)
            self.prompt_tokens += len(trace.prompt_ids)
            if trace.reasoning_span is not None:
                self.reasoned += 1
                self.reasoning.append(trace.reasoning_span[1] - trace.reasoning_span[0])
            if trace.answer_span is not None:
                self.answer.append(trace.answer_span[1] - trace.answer_span[0])
            seconds = json.loads(trace.timing).get("seconds")
            if seconds is not None:
                self.latencies.append(seconds)
        self._tick(self.running)

    def load(self, *, running: int, waiting: int, level: int, servers: Sequence[Mapping[str, Any]]) -> None:
        """What is under way; called some times a second.

        Args:
            running: requests in flight.
            waiting: requests that wait for their next try.
            level: requests in flight that are aimed at.
            servers: of each its `url` (as it may be shown), `in_flight`, `state` (ok, resting or down), and `queue`,
                the requests waiting in it as its metrics say, or None.
        """
        self.load_facts = {
            "running": running,
            "waiting": waiting,
            "level": level,
            "servers": [dict(server) for server in servers],
        }
        self._tick(running)

    def write_note(self) -> None:
        """Brings the view up to date and leaves the counts where `status` finds them."""
        now = time.monotonic()
        self._show(now)
        self.noted = now
        try:
            self.note({"done": self.done, "total": self.tracker.total, **self.states})
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # a full disk is the journal's to speak of
                raise

    def eta(self) -> float | None:
        """Seconds left, or None while unknown; how, says the module."""
        if not self.ended or not self.running:
            return None
        cost = self.spent / self.ended
        last = percentile(sorted(self.latencies), 0.95) if self.latencies else cost
        return self._not_asked() * cost / self.running + max(last - (self.at - self.all_asked), 0.0)

    def facts(self) -> dict[str, Any]:
        """The state's facts, JSON-able, as `view` draws them."""
        eta = self.eta()
        facts: dict[str, Any] = {
            **self._rates(),
            "states": dict(self.states),
            "reasons": [list(found) for found in self.reasons.most_common(3)],
            "with_reasoning": round(self.reasoned / self.replies, 4) if self.replies else None,
            "latency": percentiles(self.latencies),
            "reasoning": lengths(self.reasoning),
            "answer": lengths(self.answer),
            "eta_rough": self.ended < 2 * self.running,
            "paused": self.paused,
            "action": self.tracker.progress.latest.get("concurrency", {}).get("action"),
            **self.load_facts,
        }
        if self.folder is not None:
            facts["disk_free"] = shutil.disk_usage(self.folder).free
        if self.price_per_hour is not None:
            per_second, spent = self.price_per_hour / 3600, self.at - self.started
            facts["cost"] = round(per_second * spent, 4)
            facts["cost_expected"] = None if eta is None else round(per_second * (spent + eta), 4)
        return facts

    def _tick(self, running: int) -> None:
        now = time.monotonic()
        self.spent += self.running * (now - self.at)
        self.at, self.running = now, running
        if self.ended >= REMEMBERED:
            self.ended, self.spent = self.ended / 2, self.spent / 2
        if self._not_asked() > 0:
            self.all_asked = now
        if now >= self.due:
            self._show(now)
            if now - self.noted >= NOTE_SECONDS:
                self.write_note()

    def _not_asked(self) -> int:
        return max(self.tracker.total - self.done - self.running, 0)

    def _show(self, now: float) -> None:
        self.due = now + (1 / LIVE_HZ if self.tracker.live else 1.0)
        if now - self.samples[-1][0] >= RATE_SECONDS:
            self.samples.append((now, self.requests, self.tokens, self.prompt_tokens))
        self.tracker.update(self.done, eta_seconds=self.eta(), **self.facts())

    def _rates(self) -> dict[str, float | None]:
        """Per second; None until a reply has come."""
        if not self.replies:
            return {"req_s": None, "tok_s": None, "prompt_tok_s": None}
        at, *before = self.samples[0]
        seconds = max(self.at - at, 1e-6)
        now = (self.requests, self.tokens, self.prompt_tokens)
        names = ("req_s", "tok_s", "prompt_tok_s")
        return {name: round((b - a) / seconds, 3) for name, a, b in zip(names, before, now, strict=True)}

    def _count_reason(self, error: str) -> None:
        """By the class, which is what stands before the first colon."""
        reason = error.partition(": ")[0][:REASON_CHARACTERS]
        known = reason in self.reasons or len(self.reasons) < REASONS
        self.reasons[reason if known else OTHER] += 1


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below or at which `share` of `ordered` (ascending, not empty) lies: nearest rank."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50 and p95; None of nothing."""
    ordered = sorted(values)
    return {"p50": percentile(ordered, 0.5), "p95": percentile(ordered, 0.95)} if ordered else None


def lengths(counts: Sequence[int]) -> dict[str, Any] | None:
    """Percentiles of token counts, and how many lie in each half octave from `low` to `high`, both powers of two."""
    found = percentiles(counts)
    if found is None:
        return None
    buckets = Counter(int(2 * math.log2(count)) if count else 0 for count in counts)
    low, high = min(buckets) // 2, max(buckets) // 2 + 1
    return {
        **found,
        "low": 2**low,
        "high": 2**high,
        "counts": [buckets[bucket] for bucket in range(2 * low, 2 * high)],
    }
