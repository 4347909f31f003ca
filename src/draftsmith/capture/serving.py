"""The capture loop over servers: keeps requests in flight until nothing is left, and ends every task it started.

One task per request, one wait for all of them: a task that ends puts itself into a queue, so a reply costs the same
whether 10 or 1,000 are in flight. Replies are recorded in slices of a few milliseconds, so that a burst of them does
not keep others from being sent. A request counts against the level until its reply is with the operating system, so a
kill never costs more generations than that. A signal first drains, then abandons; what is abandoned is asked by the
next run.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict

from draftsmith import artifacts
from draftsmith.capture.attempt import Attempt, capturing, interrupted, note_target, note_thinking, reading_of
from draftsmith.capture.concurrency import MOST, Concurrency, Move, curve_line
from draftsmith.capture.conversation import Job
from draftsmith.capture.jobs import Capture, Outcome
from draftsmith.capture.probing import probed, server_template
from draftsmith.errors import GateStop, Interrupted, UserError
from draftsmith.interrupts import stopping
from draftsmith.progress import Progress, clock
from draftsmith.recipe import seconds_of
from draftsmith.target.dialect import Asked
from draftsmith.target.server import NotSentAgain, ServerTarget, deadline_for
from draftsmith.target.wire import ChatFailed

LOOK_SECONDS, WRITING_SECONDS = 0.25, 0.002
SLICE_SECONDS, SLICE_STARTS = 0.005, 32
SPARE_FILES = 128
"""Open files beside the connections."""

Ended = asyncio.Task[tuple[str, Outcome]]


def run_server(attempt: Attempt) -> None:
    """Captures what is not there yet from `attempt.settings.server`.

    Raises:
        DraftsmithError: as `engine.build`.
    """
    if not attempt.settings.server:
        raise UserError("capture: expected a target, found none; give --server URL or --local MODEL")
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_stoppable(attempt))


async def _stoppable(attempt: Attempt) -> None:
    """The whole capture under signals: before the first question they end it at once."""
    signals = Signals()
    with stopping(signals.first, signals.second, asyncio.get_running_loop()) as asked_to_stop:
        try:
            await _capture(attempt, signals)
        except asyncio.CancelledError:
            if not asked_to_stop():
                raise
            raise Interrupted("capture interrupted before a question was sent; run the same command again") from None


async def _capture(attempt: Attempt, signals: Signals) -> None:
    settings, progress = attempt.settings, attempt.progress
    deadline = settings.deadline or deadline_for(attempt.plan.max_tokens)
    async with ServerTarget(
        settings.server,
        settings.model,
        api_key_env=settings.api_key_env,
        deadline=deadline,
        retries=settings.retries,
    ) as target:
        info = await target.connect(seconds_of(settings.wait), progress.say)
        auto = settings.concurrency == "auto"
        progress.say(
            f"capture: {info.model} at {', '.join(info.urls)} ({f'{info.engine} {info.version}'.strip()}), "
            f"{'as many' if auto else settings.concurrency} requests at once{' as help' if auto else ''}, "
            f"a request may take {clock(deadline)} ({'--deadline' if settings.deadline else 'for --max-tokens'})"
        )
        reading = reading_of(settings, server_template(settings, info))
        identity = artifacts.fingerprint([info.model, info.root])
        note_target(attempt, reading, info.model, identity, json.dumps(asdict(info)))
        if settings.probe:
            verdict = await probed(attempt, target, info, reading.template, reading.delimiters)
            reading = note_thinking(attempt, reading, verdict.thinks)
        with capturing(attempt, reading, info.max_model_len) as capture:
            signals.drive = Drive(capture, target, progress)
            await signals.drive.run()


class Signals:
    """What signals do: end everything at once, or tell the loop, as soon as there is one."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.main = task
        self.drive: Drive | None = None

    def first(self) -> None:
        """Drains."""
        if self.drive is None:
            self.main.cancel()
        else:
            self.drive.drain()

    def second(self) -> None:
        """Abandons."""
        if self.drive is None:
            self.main.cancel()
        else:
            self.drive.abandon("as told twice")


class Drive:
    """Requests in flight: all their tasks are started and ended by `run`."""

    def __init__(self, capture: Capture, target: ServerTarget, progress: Progress) -> None:
        self.capture, self.target, self.progress = capture, target, progress
        self.tasks: set[Ended] = set()
        self.ended: deque[Ended] = deque()
        self.wake = asyncio.Event()
        self.due = True
        """It is time to look."""
        self.timer: asyncio.TimerHandle | None = None
        self.soon: asyncio.TimerHandle | None = None
        """Ends the wait for replies to be written."""
        self.alarm: asyncio.TimerHandle | None = None
        self.dry = False
        """There was room, and nothing to ask."""
        self.draining = self.abandoned = False
        concurrency = capture.settings.concurrency
        self.auto: Concurrency | None = None
        if concurrency == "auto":
            self.auto = Concurrency(target.up, time.monotonic(), min(MOST, _open_files(MOST)))
            self.level = self.auto.level
            self._tell(Move(self.level, "start", None))
        else:
            self.level = min(concurrency, _open_files(concurrency))
            if self.level < concurrency:
                progress.say(f"capture: this process may open {self.level} connections only (ulimit -n)")

    async def run(self) -> None:
        """Until nothing is left to ask, or a signal.

        Raises:
            GateStop: the gate's verdict; replies that had come are recorded before it.
            Interrupted: the signal's.
        """
        try:
            await self._loop()
        finally:
            for timer in filter(None, (self.timer, self.soon, self.alarm)):
                timer.cancel()
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
            if self.auto and self.auto.curve:
                self.progress.say(f"capture: at most {self.auto.level} requests at once; {curve_line(self.auto.curve)}")
        if self.draining:
            raise interrupted(self.capture)
        self.capture.end()

    def drain(self) -> None:
        """Sends nothing any more, and gives the replies in flight some time."""
        seconds = self.capture.settings.drain_seconds
        self.draining = True
        self.progress.say(
            f"stopping: waiting for {self.target.running} replies in flight, {clock(seconds)} at most; once more "
            "abandons them"
        )
        self.target.drain()
        self.alarm = asyncio.get_running_loop().call_later(seconds, self.abandon, f"not there after {clock(seconds)}")
        self.wake.set()

    def abandon(self, why: str) -> None:
        """Ends now, whatever is in flight."""
        if self.tasks and not self.abandoned:
            self.progress.say(f"stopping: {len(self.tasks)} replies in flight are abandoned, {why}")
        self.abandoned = True
        self.wake.set()

    async def _loop(self) -> None:
        while not self.abandoned:
            if self.due:
                self._look(time.monotonic())
                self.due, self.timer = False, asyncio.get_running_loop().call_later(LOOK_SECONDS, self._ring)
            self._finish(time.monotonic() + SLICE_SECONDS)
            started = self._start(time.monotonic() + SLICE_SECONDS)
            if started or self.ended:
                await asyncio.sleep(0)
            elif not self.tasks and (self.draining or (self.dry and self.capture.exhausted)):
                return
            else:
                self.wake.clear()
                if self.soon is None and self.capture.journal.unwritten and not self.capture.look_at_room():
                    self.soon = asyncio.get_running_loop().call_later(WRITING_SECONDS, self._written)
                await self.wake.wait()
        self._finish(math.inf)

    def _ring(self) -> None:
        self.due = True
        self.wake.set()

    def _written(self) -> None:
        self.soon = None
        self.wake.set()

    def _start(self, until: float) -> int:
        """Starts what there is room for, one at least; returns how many it started."""
        self.dry = False
        started = 0
        while started < SLICE_STARTS and not self.draining and self._at_risk < self.level:
            job = self.capture.next_job()
            if job is None:
                self.dry = True
                break
            task = asyncio.create_task(self._ask(job))
            self.tasks.add(task)
            task.add_done_callback(self._over)
            started += 1
            if time.monotonic() > until:
                break
        return started

    @property
    def _at_risk(self) -> int:
        """Generations that a kill would cost: in flight, or come and not written yet."""
        return len(self.tasks) + len(self.ended) + self.capture.journal.unwritten

    def _over(self, task: Ended) -> None:
        self.tasks.discard(task)
        self.ended.append(task)
        self.wake.set()

    def _finish(self, until: float) -> None:
        """Records what has ended; before the gate's verdict on one of them stops the run, all of them."""
        verdict: GateStop | None = None
        while self.ended and (verdict is not None or time.monotonic() < until):
            try:
                self.capture.finish(*self.ended.popleft().result())
            except GateStop as stop:
                verdict = stop
        if verdict is not None:
            raise verdict

    async def _ask(self, job: Job) -> tuple[str, Outcome]:
        try:
            reply = await self.target.chat(
                Asked(
                    messages=job.messages,
                    tools=job.question.tools,
                    sampling=job.sampling,
                    template_options=job.template.options,
                    prompt_ids=job.render,
                )
            )
        except (ChatFailed, NotSentAgain) as failure:
            return job.trace_id, failure
        if self.auto is not None:
            tokens = len(reply.generated_ids) or int(reply.usage.get("completion_tokens") or 1)
            self.auto.ended(time.monotonic(), max(float(reply.timing["seconds"]), 1e-3), tokens)
        return job.trace_id, reply

    def _look(self, now: float) -> None:
        """Several times a second: moves the level, and shows where the requests are."""
        target = self.target
        self.capture.look_at_room()
        if self.auto is not None:
            move = self.auto.look(now, target.running, target.refused, target.queue, target.up)
            if move is not None:
                self.level = move.level
                self._tell(move)
        self.capture.meter.load(
            running=target.running, waiting=target.waiting, level=self.level, servers=target.loads()
        )

    def _tell(self, move: Move) -> None:
        assert self.auto is not None
        self.progress.event(
            "concurrency",
            level=move.level,
            action=move.action,
            tok_s=round(move.point.tok_s, 1) if move.point else None,
            latency_p50=round(move.point.latency_p50, 3) if move.point else None,
        )
        if move.action == "hold":
            self.progress.say(f"capture: {move.level} requests at once from here on; {curve_line(self.auto.curve)}")


def _open_files(wanted: int) -> int:
    """How many connections of `wanted` this process may open, after asking the system for more."""
    try:
        import resource
    except ImportError:  # Windows counts handles otherwise
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - SPARE_FILES))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # not made for Windows
        return asyncio.new_event_loop
    return uvloop.new_event_loop
