"""A question as a conversation with the target: where it speaks, and what stands before each of its turns.

The target answers at every place where the recorded conversation has an assistant turn after a user or tool turn, and
at the end. Later turns see the target's *own* earlier answers; recorded answers are dropped, with one exception: an
assistant turn recorded with tool calls stays in the history, because the recorded tool results answer that call and no
other. What of an earlier turn's reasoning is shown again is the template's decision (P22).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import filterfalse, takewhile
from typing import Any

from draftsmith.capture.rows import Question
from draftsmith.target.reply import Sampling
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
    """The recorded tool-calling turn that later turns see instead of the target's own reply."""


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
        elif calls:
            before.append(message)
    if before and before[-1]["role"] in ASKING_ROLES:
        turns.append(Turn(tuple(before), None))
    return turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One generation to ask the target for."""

    trace_id: str
    question: Question
    sample: int
    messages: Sequence[Message]
    prompt_ids: list[int]
    """As our template renders `messages`."""
    sampling: Sampling
    budget: int
    """Generated tokens the user allows; `sampling.max_tokens` is less where the context has less room (P14)."""


class Conversation:
    """One sample of one question: its history so far and the turn that comes next."""

    def __init__(self, question: Question, sample: int, preamble: Sequence[Message]) -> None:
        self.question, self.sample = question, sample
        leading = list(takewhile(_is_system, question.messages))
        self.turns = turns_of(question.messages[len(leading) :])
        self.turn = 0
        # Many templates take system turns only at the very start, so the question's come before worked examples.
        self.history = [*filter(_is_system, preamble), *leading, *filterfalse(_is_system, preamble)]

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
        """The target has spoken: its turn (or the recorded tool call) becomes history."""
        own: Message = {"role": "assistant", "content": trace.answer}
        if trace.reasoning:
            own["reasoning_content"] = trace.reasoning
        self.history = [*self.messages(), self.turns[self.turn].recorded or own]
        self.turn += 1


def _is_system(message: Message) -> bool:
    return message["role"] in SYSTEM_ROLES
