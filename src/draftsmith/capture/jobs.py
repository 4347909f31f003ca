"""Which generation comes next, and what became of it: the state of a capture that both targets' loops drive.

Turns of one conversation follow each other; conversations run independently and are made lazily. Whatever has a final
record in the journal is not asked again. A conversation whose turn ended badly cannot go on: its later turns are
recorded as failed with it, so that every generation that was planned has exactly one record in the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from draftsmith.capture.conversation import Conversation, Job
from draftsmith.capture.gate import Gate
from draftsmith.capture.journal import Journal
from draftsmith.capture.meter import Meter
from draftsmith.capture.replies import Reading, failed_trace, trace_of
from draftsmith.capture.rows import Question
from draftsmith.errors import GateStop
from draftsmith.progress import Tracker
from draftsmith.recipe import CaptureSettings
from draftsmith.target.reply import Reply, Sampling
from draftsmith.target.server import NotSentAgain
from draftsmith.target.template import TemplateRefusal
from draftsmith.target.wire import ChatFailed
from draftsmith.trace import Trace

CONTINUES = frozenset({"ok", "cut_in_answer"})
"""States after which a conversation goes on."""
Outcome = Reply | ChatFailed | NotSentAgain


class Capture:
    """Which generation comes next, and what became of it. Not thread-safe: one loop drives it."""

    def __init__(
        self,
        settings: CaptureSettings,
        reading: Reading,
        questions: list[Question],
        journal: Journal,
        tracker: Tracker,
        note: Callable[[dict[str, Any]], None],
        before: Mapping[str, int],
        limit: int | None,
    ) -> None:
        self.settings, self.reading, self.journal, self.limit = settings, reading, journal, limit
        self.gate = Gate(settings.template_options, thinks=reading.delimiters is not None)
        self.fresh = len(journal) == 0
        self.new = self._conversations(questions)
        self.ready: deque[Conversation] = deque()
        self.in_flight: dict[str, tuple[Job, Conversation]] = {}
        self.meter = Meter(tracker, note, before)
        self.warned = False

    def next_job(self) -> Job | None:
        """The next generation to ask for; None when nothing is ready now (see `exhausted`)."""
        while conversation := self.ready.popleft() if self.ready else next(self.new, None):
            job = self._next_turn(conversation)
            if job is not None:
                self.in_flight[job.trace_id] = job, conversation
                return job
        return None

    @property
    def exhausted(self) -> bool:
        """After `next_job` gave None: nothing is in flight either, so nothing more can come."""
        return not self.in_flight and not self.ready

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
            self._compare_prompts(job, trace)
        self.meter.requests += 1
        self._record(conversation, trace, retry)
        if not conversation.done:
            self.ready.append(conversation)
        self._judged(lambda: self.gate.look(trace, passing_fault=retry))

    def end(self) -> None:
        """Everything was asked: the gate's last word on a run too small for its first.

        Raises:
            GateStop: as `finish`.
        """
        if self.fresh:
            self._judged(self.gate.end)

    def _conversations(self, questions: list[Question]) -> Iterator[Conversation]:
        preamble = [message.model_dump() for message in self.settings.preamble]
        for question in questions:
            for sample in range(question.copies * self.settings.samples):
                yield Conversation(question, sample, preamble)

    def _next_turn(self, conversation: Conversation) -> Job | None:
        """The conversation's next generation; None once all its turns have a record."""
        while not conversation.done:
            trace_id = conversation.trace_id
            if self.journal.final(trace_id):
                self._go_on(conversation, self.journal.read(trace_id))
                continue
            job, refusal = self._job(conversation)
            if not refusal:
                return job
            self._record(conversation, failed_trace(job, refusal, self.reading), retry=False)
        return None

    def _job(self, conversation: Conversation) -> tuple[Job, str]:
        """The job of the next turn, and why it cannot be asked ("" if it can)."""
        settings, messages, refusal = self.settings, conversation.messages(), ""
        prompt_ids: list[int] = []
        try:
            prompt_ids = self.reading.template.render(messages, conversation.question.tools)
        except TemplateRefusal as error:
            refusal = f"template: {error}"
        room = settings.max_tokens if self.limit is None else self.limit - len(prompt_ids)
        if room < 1:
            refusal = f"prompt_too_long: {len(prompt_ids)} ids, the target takes {self.limit} with the reply"
        sampling = Sampling(
            max_tokens=max(1, min(settings.max_tokens, room)),
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            seed=settings.seed + conversation.sample,
        )
        job = Job(
            trace_id=conversation.trace_id,
            question=conversation.question,
            sample=conversation.sample,
            messages=messages,
            prompt_ids=prompt_ids,
            sampling=sampling,
            budget=settings.max_tokens,
        )
        return job, refusal

    def _record(self, conversation: Conversation, trace: Trace, retry: bool) -> None:
        self.journal.append(trace, retry=retry)
        self.meter.count(trace)
        self._go_on(conversation, trace)

    def _go_on(self, conversation: Conversation, trace: Trace) -> None:
        """Moves a conversation past `trace`. After a bad end its later turns can never be asked: they failed with it.

        Those records are marked for retry, because they last only as long as the bad end itself does.
        """
        conversation.advance(trace)
        if trace.state in CONTINUES:
            return
        while not conversation.done:
            job, _ = self._job(conversation)
            reason = f"earlier turn {trace.state}: {trace.error or 'no answer to go on from'}"
            later = failed_trace(job, reason, self.reading)
            self.journal.append(later, retry=True)
            self.meter.count(later)
            conversation.advance(later)

    def _compare_prompts(self, job: Job, trace: Trace) -> None:
        """Says once if the target renders prompts differently: its own ids are kept, but somebody should know."""
        if self.warned or trace.prompt_ids == job.prompt_ids:
            return
        self.warned = True
        self.meter.tracker.progress.say(
            f"capture: the target's prompt of {len(trace.prompt_ids)} ids differs from the {len(job.prompt_ids)} that "
            f"{self.reading.template.name} renders; its own ids are kept, but check --tokenizer and --template-options"
        )

    def _judged(self, verdict: Callable[[], None]) -> None:
        try:
            verdict()
        except GateStop:
            for trace in self.gate.withdrawn:
                self.journal.append(trace, retry=True)
            raise
