"""Which generation comes next, and what became of it: the state of a capture that both targets' loops drive.

Turns of one conversation follow each other; conversations run independently and are made lazily. Whatever has a final
record in the journal is not asked again. A conversation whose turn ended badly cannot go on: its later turns are
recorded as failed with it, so that every generation that was planned has exactly one record in the end. What ended by a
passing fault is asked once more at the end of the run, and only then counts as failed.

Nothing here grows with the run, and no prompt is rendered that need not be: a rendering costs more than all the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import msgspec

from draftsmith.capture.conversation import Conversation, Job
from draftsmith.capture.gate import Gate
from draftsmith.capture.journal import Journal
from draftsmith.capture.meter import Meter
from draftsmith.capture.overrides import sampling_of, template_of, unheard
from draftsmith.capture.planning import CONTINUES, Plan, settled
from draftsmith.capture.replies import Reading, failed_trace, trace_of
from draftsmith.capture.room import Room
from draftsmith.progress import Tracker
from draftsmith.recipe import CaptureSettings
from draftsmith.target.findings import where_ids_part
from draftsmith.target.reply import Reply
from draftsmith.target.server import NotSentAgain
from draftsmith.target.wire import ChatFailed
from draftsmith.trace import Trace

RENDERED = 64
"""The first so many prompts are rendered here and compared with the target's own ids, and then every so many-th."""
TEMPLATE_BYTES, TURN_BYTES = 4096, 256
"""What a template may add to a conversation and to a turn, generously."""
Outcome = Reply | ChatFailed | NotSentAgain


class Capture:
    """Which generation comes next, and what became of it. Not thread-safe: one loop drives it."""

    def __init__(
        self,
        settings: CaptureSettings,
        reading: Reading,
        plan: Plan,
        left: bytearray,
        journal: Journal,
        tracker: Tracker,
        note: Callable[[dict[str, Any]], None],
        before: Mapping[str, int],
        limit: int | None,
    ) -> None:
        self.settings, self.reading, self.journal, self.limit = settings, reading, journal, limit
        self.gate = Gate(
            settings.gate,
            reading.delimiters,
            thought=reading.thought,
            warn=settings.on_gate == "warn",
            say=tracker.progress.say,
            event=tracker.progress.event,
        )
        self.plan, self.left = plan, left
        self.new = self._conversations()
        self.jobs = self.replies = 0
        self.postponed = False
        """A passing fault waits for the last round."""
        self.last_round = False
        self.room = Room(journal, tracker.progress, plan.generations)
        self.ready: deque[Conversation] = deque()
        self.in_flight: dict[str, tuple[Job, Conversation]] = {}
        self.meter = Meter(tracker, note, before, folder=journal.path.parent, price_per_hour=settings.price_per_hour)
        self.warned = False

    def look_at_room(self) -> str:
        """Why nothing may be asked now; empty while all is well.

        Raises:
            UserError: the journal cannot be written for good.
        """
        self.meter.paused = self.room.look()
        return self.meter.paused

    def next_job(self) -> Job | None:
        """The next generation to ask for; None when nothing is ready now (see `exhausted`).

        Raises:
            UserError: the journal cannot be written for good; the questions' source was changed meanwhile.
        """
        if self.look_at_room():
            return None
        while True:
            while conversation := self.ready.popleft() if self.ready else next(self.new, None):
                job = self._next_turn(conversation)
                if job is not None:
                    self.in_flight[job.trace_id] = job, conversation
                    return job
            if self.in_flight or self.last_round or not self.postponed:
                return None
            self._begin_last_round()

    @property
    def exhausted(self) -> bool:
        """After `next_job` gave None: nothing is in flight, postponed or held back either, so nothing more can come."""
        ended = self.last_round or not self.postponed
        return ended and not self.in_flight and not self.ready and not self.look_at_room()

    def finish(self, trace_id: str, outcome: Outcome) -> None:
        """Records what became of a job; one that the stopping run no longer sends leaves no record.

        Raises:
            GateStop: the gate's verdict; what it withdraws is asked again by the next run.
        """
        job, conversation = self.in_flight.pop(trace_id)
        if isinstance(outcome, NotSentAgain):
            return
        if isinstance(outcome, ChatFailed):
            trace, retry = failed_trace(job, outcome.reason, self.reading), outcome.passing
        else:
            trace, retry = trace_of(job, outcome, self.reading), False
            self.replies += 1
            if self.replies <= RENDERED or self.replies % RENDERED == 0:
                self._compare_prompts(job, trace)
        self.meter.requests += 1
        self._record(conversation, trace, retry)
        if not conversation.done:
            self.ready.append(conversation)
        if retry and self.last_round:  # these failed before: they say nothing about the run
            return
        with self._withdrawing():
            self.gate.look(trace, passing_fault=retry)

    def end(self) -> None:
        """Everything was asked: the gate's last word on a run too small for its first.

        Raises:
            GateStop: as `finish`.
        """
        asked = {seen.trace_id for seen in self.gate.window}
        earlier = (id for id in self.journal.ids() if id not in asked and self.journal.final(id))
        with self._withdrawing():
            self.gate.end(map(self.journal.read, islice(earlier, self.settings.gate.first)))

    def _conversations(self) -> Iterator[Conversation]:
        """Those with something left to ask, in order."""
        preamble = [message.model_dump() for message in self.settings.preamble]
        for row, question in self.plan.read(self.left):
            for sample, ids in zip(self.plan.samples_of(row), self.plan.conversations(row), strict=True):
                states = settled(self.journal, ids)
                if len(states) < len(ids):
                    yield Conversation(question, sample, preamble)

    def _begin_last_round(self) -> None:
        """Everything that is not settled once more: what a passing fault ended, and what came after it."""
        self.last_round = True
        before, self.left = self.plan.standing(self.journal)
        left = self.plan.generations - before.total()
        self.meter.tracker.progress.say(f"capture: asking once more for {left:,} replies that passing faults ended")
        self.new = self._conversations()

    def _next_turn(self, conversation: Conversation) -> Job | None:
        """The conversation's next generation; None once all its turns have a record.

        After a turn that is asked now the later ones are asked too: what was recorded of them had another history.
        """
        while not conversation.done:
            trace_id = conversation.trace_id
            if not conversation.asked and self.journal.final(trace_id):
                self._go_on(conversation, self.journal.read(trace_id), retry=False)
                continue
            conversation.asked = True
            job, refusal = self._job(conversation)
            if not refusal:
                return job
            self._record(conversation, failed_trace(job, refusal, self.reading), retry=False)
        return None

    def _job(self, conversation: Conversation) -> tuple[Job, str]:
        """The job of the next turn, and why it cannot be asked ("" if it can)."""
        question = conversation.question
        sampling = sampling_of(self.settings, question, conversation.sample)
        job = Job(
            trace_id=conversation.trace_id,
            question=question,
            sample=conversation.sample,
            messages=conversation.messages(),
            template=template_of(self.reading.template, question),
            sampling=sampling,
            budget=sampling.max_tokens,
        )
        if question.problem:
            job.rendered = []
            return job, f"unusable question: {question.problem}"
        try:
            refusal = unheard(job)
            self.jobs += 1
            if self.jobs > RENDERED and self._surely_fits(job):
                return job, refusal
            length = len(job.render())
        except ChatFailed as error:
            return job, error.reason
        room = sampling.max_tokens if self.limit is None else self.limit - length
        if room < 1:
            refusal = f"prompt_too_long: {length} ids, the target takes {self.limit} with the reply"
        elif room < sampling.max_tokens:
            job.sampling = replace(sampling, max_tokens=room)
        return job, refusal

    def _surely_fits(self, job: Job) -> bool:
        """Whether the target takes prompt and reply even if every byte of text is a token: none has more than that."""
        if self.limit is None:
            return True
        most = TEMPLATE_BYTES + sum(TURN_BYTES + len(msgspec.json.encode(turn)) for turn in job.messages)
        most += len(msgspec.json.encode(job.question.tools)) if job.question.tools else 0
        return most + job.sampling.max_tokens <= self.limit

    def _record(self, conversation: Conversation, trace: Trace, retry: bool) -> None:
        self._keep(trace, retry)
        self._go_on(conversation, trace, retry)

    def _keep(self, trace: Trace, retry: bool) -> None:
        """Into the journal; what will be asked once more is not counted yet."""
        self.journal.append(trace, retry=retry)
        if retry and not self.last_round:
            self.postponed = True
        else:
            self.meter.count(trace)

    def _go_on(self, conversation: Conversation, trace: Trace, retry: bool) -> None:
        """Moves a conversation past `trace`. After a bad end its later turns can never be asked: they failed with it.

        So do those whose recorded tool results do not fit the target's own call.
        """
        conversation.advance(trace)
        reason = f"earlier turn {trace.state}: {trace.error or 'no answer to go on from'}"
        if trace.state in CONTINUES:
            if not conversation.ended:
                return
            reason = f"no fitting tool result: {conversation.ended}"
        while not conversation.done:
            job, _ = self._job(conversation)
            later = failed_trace(job, reason, self.reading)
            if conversation.asked or not self.journal.final(later.trace_id):
                self._keep(later, retry)
            conversation.advance(later)

    def _compare_prompts(self, job: Job, trace: Trace) -> None:
        """Says once if the target renders prompts differently: its own ids are kept, but somebody should know."""
        if self.warned or trace.prompt_ids == job.render():
            return
        self.warned = True
        template = self.reading.template
        self.meter.tracker.progress.say(
            f"capture: the target's prompt of {len(trace.prompt_ids)} ids differs from the {len(job.render())} that "
            f"{template.name} renders, {where_ids_part(template, trace.prompt_ids, job.render())}; "
            "its own ids are kept, but check --tokenizer and --template-options"
        )

    @contextmanager
    def _withdrawing(self) -> Iterator[None]:
        """Whatever the gate withdraws is asked for again by the next run."""
        try:
            yield
        finally:
            for id in self.gate.withdrawn:
                self.journal.append(self.journal.read(id), retry=True)
            self.gate.withdrawn.clear()
