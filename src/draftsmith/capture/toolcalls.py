"""The target's own tool calls, and whether a recorded conversation's tool results answer them.

A recorded result can be played back only to the call it answers. It fits when the target calls the same functions as
the recorded turn, in whatever order; arguments may differ, because another wording of a query is still answered by its
result. What a call means is for the server's parser to say; without one, the common form of Hermes and Qwen,
`<tool_call>{json}</tool_call>`, is read off the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.target.template import tool_arguments
from draftsmith.trace import Trace

Message = dict[str, Any]
TAGGED = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def own_message(trace: Trace) -> Message:
    """What the target said, as the turn that its template is shown later: text, reasoning apart, tool calls apart."""
    parsed = json.loads(trace.usage).get("message")
    if parsed is None:
        calls = _tagged_calls(trace.answer)
        parsed = {"content": TAGGED.sub("", trace.answer).strip(), "tool_calls": calls} if calls else {}
    message: Message = {"role": "assistant", "content": parsed.get("content", trace.answer)}
    if trace.reasoning:
        message["reasoning_content"] = trace.reasoning
    if parsed:
        message["tool_calls"] = [_as_recorded(call) for call in parsed["tool_calls"]]
    return message


def misfit(own: Message, recorded: Message | None) -> str:
    """Why the recorded conversation cannot go on after the target's own turn; empty if it can."""
    called, expected = names(own), names(recorded)
    if sorted(called) == sorted(expected):
        return ""
    if not expected:
        return f"the target called {_listed(called)}, and no result of that is recorded"
    said = f"called {_listed(called)}" if called else "called no tool"
    return f"the target {said} where the recorded results answer {_listed(expected)}"


def paired(own: Message, recorded: Message, results: Sequence[Message]) -> tuple[Message, list[Message]]:
    """The target's turn with an id for each call that the recorded one has an id for, and the results under those ids.

    Args:
        own: the target's turn, which fits `recorded`.
        recorded: the turn that the results answered.
        results: the messages that follow it; those of role `tool` at their head are results.
    """
    left = list(recorded["tool_calls"])
    calls, ids = [], {}
    for call in own["tool_calls"]:
        match = next(other for other in left if other["function"]["name"] == call["function"]["name"])
        left.remove(match)
        old = match.get("id")
        new = call.get("id") or old
        calls.append({"id": new, **call} if new else call)
        ids[old] = new
    renamed = [
        {**message, "tool_call_id": ids[message["tool_call_id"]]}
        if message["role"] == "tool" and message.get("tool_call_id") in ids
        else message
        for message in results
    ]
    return {**own, "tool_calls": calls}, renamed


def names(message: Mapping[str, Any] | None) -> list[str]:
    """The functions a turn calls, in order."""
    return [call["function"]["name"] for call in (message or {}).get("tool_calls", ())]


def _tagged_calls(text: str) -> list[dict[str, Any]]:
    """Calls in the tagged form; none where one of them is not a call after all."""
    calls = []
    for found in TAGGED.findall(text):
        try:
            function = json.loads(found)
        except ValueError:
            return []
        if not isinstance(function.get("name"), str):
            return []
        calls.append({"type": "function", "function": function})
    return calls


def _as_recorded(call: Mapping[str, Any]) -> dict[str, Any]:
    """A parsed call in the one form of `rows`: arguments as a mapping (P24), its id if the server gave one."""
    function = call.get("function") or {}
    arguments = tool_arguments(function.get("arguments") or {})
    made = {"type": "function", "function": {"name": str(function.get("name", "")), "arguments": arguments}}
    return {"id": call["id"], **made} if call.get("id") else made


def _listed(calls: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(calls))
