from __future__ import annotations

from typing import Any

import pytest

from draftsmith.capture.conversation import Conversation, turns_of
from draftsmith.capture.rows import Question
from draftsmith.trace import Trace


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALL = [{"type": "function", "function": {"name": "add", "arguments": {}}}]


@pytest.mark.parametrize(
    ("messages", "turns"),
    [
        ([said("user", "a")], 1),
        ([said("user", "a"), said("assistant", "b")], 1),
        ([said("assistant", "hello"), said("user", "a")], 1),
        ([said("user", "a"), said("assistant", "b"), said("assistant", "c"), said("user", "d")], 2),
        ([said("system", "s"), said("user", "a"), said("assistant", "b"), said("user", "c")], 2),
        ([said("user", "a"), said("assistant", "", tool_calls=CALL), said("tool", "4"), said("assistant", "b")], 2),
        ([said("system", "s")], 0),
        ([said("assistant", "hello")], 0),
        ([], 0),
    ],
)
def test_the_target_speaks_wherever_somebody_asked(messages: list[dict[str, Any]], turns: int) -> None:
    assert len(turns_of(messages)) == turns


def test_a_recorded_greeting_is_dropped_and_a_second_tool_call_in_a_row_is_kept() -> None:
    first, second = turns_of(
        [
            said("assistant", "hello"),
            said("user", "a"),
            said("assistant", "", tool_calls=CALL),
            said("assistant", "", tool_calls=CALL),
            said("tool", "4"),
        ]
    )
    assert [message["role"] for message in first.before] == ["user"]
    assert first.recorded is not None
    assert [message["role"] for message in second.before] == ["assistant", "tool"]


def test_history_holds_the_targets_own_words_with_its_reasoning_apart() -> None:
    recorded = (said("user", "Q1"), said("assistant", "recorded"), said("user", "Q2"))
    conversation = Conversation(Question(key="k", source="s", messages=recorded), 0, [said("system", "p")])
    first = conversation.trace_id
    conversation.advance(Trace(trace_id=first, question_key="k", reasoning="T1", answer="A1"))
    assert conversation.messages() == [
        said("system", "p"),
        said("user", "Q1"),
        said("assistant", "A1", reasoning_content="T1"),
        said("user", "Q2"),
    ]
    assert conversation.trace_id != first and not conversation.done
    conversation.advance(Trace(trace_id=conversation.trace_id, question_key="k", answer="A2"))
    assert conversation.done
