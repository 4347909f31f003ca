from __future__ import annotations

import json
from typing import Any

import pytest

from draftsmith.capture.conversation import Conversation, turn_count, turns_of
from draftsmith.capture.rows import Question
from draftsmith.trace import Trace, trace_id


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


def test_a_recorded_greeting_is_dropped_and_calls_in_a_row_are_parallel_calls_of_one_turn() -> None:
    first, second = turns_of(
        [
            said("assistant", "hello"),
            said("user", "a"),
            said("assistant", "", tool_calls=CALL),
            said("assistant", "", tool_calls=CALL),
            said("tool", "4"),
            said("tool", "5"),
        ]
    )
    assert [message["role"] for message in first.before] == ["user"]
    assert first.recorded is not None and first.recorded["tool_calls"] == [*CALL, *CALL]
    assert [message["role"] for message in second.before] == ["tool", "tool"]


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


# tools


def call(name: str, id: str | None = None, **arguments: Any) -> dict[str, Any]:
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": id, **made} if id else made


def calling(*calls: dict[str, Any], content: str = "") -> Trace:
    """A reply that a server's tool parser read calls off."""
    usage = json.dumps({"completion_tokens": 9, "message": {"content": content, "tool_calls": list(calls)}})
    return Trace(trace_id="t", question_key="k", answer="<as generated>", usage=usage)


def with_tools(*recorded: dict[str, Any], results: tuple[dict[str, Any], ...]) -> Conversation:
    messages = (said("user", "Q"), said("assistant", "", tool_calls=list(recorded)), *results)
    return Conversation(Question(key="k", source="s", messages=messages), 0, [])


def test_a_recorded_result_answers_the_targets_own_call_of_the_same_function() -> None:
    # P24: call ids are kept, arguments are a mapping whichever way they came
    recorded = call("clock", "c1", zone="UTC")
    conversation = with_tools(recorded, results=(said("tool", "9", tool_call_id="c1"),))
    own = {"id": "x7", "type": "function", "function": {"name": "clock", "arguments": '{"zone": 1}'}}
    conversation.advance(calling(own, content="Let me look."))
    assert conversation.ended == ""
    assert conversation.messages() == [
        said("user", "Q"),
        said("assistant", "Let me look.", tool_calls=[call("clock", "x7", zone=1)]),
        said("tool", "9", tool_call_id="x7"),
    ]


def test_parallel_results_follow_their_calls_in_the_targets_order() -> None:
    recorded = (call("a", "c1"), call("b", "c2"), call("a", "c3"))
    results = tuple(said("tool", f"of {id}", tool_call_id=id) for id in ("c1", "c2", "c3"))
    conversation = with_tools(*recorded, results=results)
    conversation.advance(calling(call("b", "x"), call("a", "y"), call("a")))
    _, own, *played = conversation.messages()
    assert [made["id"] for made in own["tool_calls"]] == ["x", "y", "c3"]  # a call without an id takes the recorded one
    assert [(message["content"], message["tool_call_id"]) for message in played] == [
        ("of c1", "y"),
        ("of c2", "x"),
        ("of c3", "c3"),
    ]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (calling(call("other")), "the target called other where the recorded results answer clock"),
        (calling(call("clock"), call("clock")), "the target called clock where the recorded results answer clock"),
        (Trace(trace_id="t", question_key="k", answer="Nine."), "the target called no tool where the recorded results"),
    ],
)
def test_a_result_that_fits_no_call_ends_the_conversation_with_a_reason(reply: Trace, reason: str) -> None:
    conversation = with_tools(call("clock", "c1"), results=(said("tool", "9", tool_call_id="c1"),))
    conversation.advance(reply)
    assert not conversation.done and conversation.ended.startswith(reason)


def test_a_call_where_none_is_recorded_ends_the_conversation_too() -> None:
    messages = (said("user", "Q1"), said("assistant", "A"), said("user", "Q2"))
    conversation = Conversation(Question(key="k", source="s", messages=messages), 0, [])
    conversation.advance(calling(call("clock")))
    assert conversation.ended == "the target called clock, and no result of that is recorded"


def test_calls_that_no_server_parsed_are_read_off_the_common_tags() -> None:
    conversation = with_tools(call("clock", "c1"), results=(said("tool", "9", tool_call_id="c1"),))
    text = 'Let me look.\n<tool_call>\n{"name": "clock", "arguments": {"zone": 1}}\n</tool_call>'
    conversation.advance(Trace(trace_id="t", question_key="k", answer=text, reasoning="hm"))
    assert conversation.messages()[1] == said(
        "assistant", "Let me look.", reasoning_content="hm", tool_calls=[call("clock", "c1", zone=1)]
    )
    other = with_tools(call("clock", "c1"), results=(said("tool", "9", tool_call_id="c1"),))
    other.advance(Trace(trace_id="t", question_key="k", answer="<tool_call>{not json}</tool_call>"))
    assert other.ended.startswith("the target called no tool")


def test_a_question_that_cannot_be_asked_has_one_record() -> None:
    question = Question(key="k", source="s", messages=(), problem="rows.jsonl: line 3: an image")
    assert turn_count(question) == 1
    conversation = Conversation(question, 0, [])
    assert not conversation.done and conversation.trace_id == trace_id("k", 0, 0)
    conversation.advance(Trace(trace_id="t", question_key="k", state="failed"))
    assert conversation.done
