"""A question as a conversation with the target: where it speaks, and what stands before each of its turns.

The target answers at every place where the recorded conversation has an assistant turn after a user or tool turn, and
at the end. Later turns see the target's *own* earlier answers, tool calls included; recorded answers are dropped.
Recorded tool results are played back where the target called the same functions as the recorded turn; elsewhere the
conversation ends there, for a stated reason. What of an earlier turn's reasoning is shown again is the template's
decision (P22).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import filterfalse, takewhile
from typing import Any

from draftsmith.capture.rows import Question
from draftsmith.capture.toolcalls import misfit, own_message, paired
from draftsmith.target.reply import Sampling
from draftsmith.target.template import Template, TemplateRefusal
from draftsmith.target.wire import ChatFailed
from draftsmith.trace import Trace, trace_id

Message = dict[str, Any]
SYSTEM_ROLES = frozenset({"system", "developer"})
ASKING_ROLES = frozenset({"user", "tool"})


@dataclass(frozen=True, slots=True)
class Turn:
    """One place where the target speaks."""

    before: tuple[Message, ...]
    """Recorded messages since the target spoke last."""
    recorded: Message | None
    """The recorded turn, if it called tools: what the results at the next turn's start answer."""


def turns_of(messages: Sequence[Message]) -> list[Turn]:
    """The turns of a recorded conversation, in order; empty if nobody ever asks anything."""
    turns: list[Turn] = []
    before: list[Message] = []
    for message in messages:
        if message["role"] != "assistant":
            before.append(message)
            continue
        calls = bool(message.get("tool_calls"))
        if before and before[-1]["role"] in ASKING_ROLES:
            turns.append(Turn(tuple(before), message if calls else None))
            before = []
        elif calls and not before and turns and (first := turns[-1].recorded):  # parallel calls, each as its own turn
            both = [*first["tool_calls"], *message["tool_calls"]]
            turns[-1] = replace(turns[-1], recorded={**first, "tool_calls": both})
        elif calls:
            before.append(message)
    if before and before[-1]["role"] in ASKING_ROLES:
        turns.append(Turn(tuple(before), None))
    return turns


def turn_count(question: Question) -> int:
    """How many records one sample of a question will have; a question that cannot be asked has one, which says so."""
    return 1 if question.problem else len(turns_of(question.messages))


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One generation to ask the target for. Our own rendering of its prompt takes longer than all else, so it waits."""

    trace_id: str
    question: Question
    sample: int
    messages: Sequence[Message]
    template: Template
    sampling: Sampling
    budget: int
    """Generated tokens the user allows; `sampling.max_tokens` is less where the context has less room (P14)."""
    rendered: list[int] | None = None

    def render(self) -> list[int]:
        """The prompt ids as our template renders `messages`; rendered at the first call.

        Raises:
            ChatFailed: the template cannot render this conversation; no further try helps.
        """
        if self.rendered is None:
            try:
                self.rendered = self.template.render(self.messages, self.question.tools)
            except TemplateRefusal as error:
                raise ChatFailed(f"template: {error}", passing=False) from None
        return self.rendered


class Conversation:
    """One sample of one question: its history so far and the turn that comes next."""

    def __init__(self, question: Question, sample: int, preamble: Sequence[Message]) -> None:
        self.question, self.sample = question, sample
        leading = list(takewhile(_is_system, question.messages))
        self.turns = [Turn((), None)] if question.problem else turns_of(question.messages[len(leading) :])
        self.turn = 0
        # Many templates take system turns only at the very start, so the question's come before worked examples.
        self.history = [*filter(_is_system, preamble), *leading, *filterfalse(_is_system, preamble)]
        self.asked = False
        """Whether a turn of it was asked for in this process."""
        self.ended = ""
        """Why no later turn can be asked, though the last one is a good record in itself."""

    @property
    def done(self) -> bool:
        """Whether the target has spoken its last turn."""
        return self.turn >= len(self.turns)

    @property
    def trace_id(self) -> str:
        """The id of the turn that comes next."""
        return trace_id(self.question.key, self.turn, self.sample)

    def messages(self) -> list[Message]:
        """What stands before the target's next turn."""
        return [*self.history, *self.turns[self.turn].before]

    def advance(self, trace: Trace) -> None:
        """The target has spoken: its turn becomes history, and recorded tool results follow it if they fit."""
        history, recorded = self.messages(), self.turns[self.turn].recorded
        self.turn += 1
        if self.done:
            return
        own = own_message(trace)
        self.ended = self.ended or misfit(own, recorded)
        if recorded and not self.ended:
            own, before = paired(own, recorded, self.turns[self.turn].before)
            self.turns[self.turn] = replace(self.turns[self.turn], before=tuple(before))
        self.history = [*history, own]


def _is_system(message: Message) -> bool:
    return message["role"] in SYSTEM_ROLES
