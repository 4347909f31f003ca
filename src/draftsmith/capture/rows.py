"""A row of a dataset as a Question: known schemas, one form of a turn, a key from content.

A key is a hash over what a target would be asked: every turn but the recorded assistant answers (recorded tool calls
count, recorded results are played back to them), the tools, and the row's own sampling values and template options
where it has any. A row that cannot be asked is a `BadRow`: it becomes a record with its reason, and the others go on.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftsmith.capture.sources import Row
from draftsmith.errors import UserError
from draftsmith.target.template import RESERVED_OPTIONS, tool_arguments

PROMPT_COLUMNS = ("prompt", "question", "instruction", "problem", "query")
ANSWER_COLUMNS = ("response", "answer", "output", "completion", "solution")
TURN_COLUMNS = ("conversations", "messages", "conversation")
OPTIONS_COLUMN = "chat_template_kwargs"
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_call": "function_call",
    "tool_call": "function_call",
}
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
SAMPLING_COLUMN = "sampling"
SAMPLING: Mapping[str, tuple[type[int] | type[float], str]] = {
    "temperature": (float, "a number from 0"),
    "top_p": (float, "a number above 0, at most 1"),
    "top_k": (int, "a whole number from 0 (0 keeps every token)"),
    "max_tokens": (int, "a whole number from 1"),
    "seed": (int, "a whole number from 0"),
}
"""Values a row may set for itself, in the column `sampling` or in columns of these names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A conversation to be answered."""

    key: str
    """Hash of content (turns that are asked, and tools), never of position."""
    source: str
    """The row's own `source`, or the dataset's name."""
    messages: tuple[dict[str, Any], ...]
    """The conversation as recorded, roles system/developer/user/assistant/tool; the preamble is not in it."""
    tools: tuple[dict[str, Any], ...] = ()
    copies: int = 1
    """How many times the same content occurs in the source: duplicates become samples."""
    user_id: str = ""
    """The row's own `id`, if it has one."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """The row's own values of SAMPLING."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """The row's own template options, laid over those of the run."""
    problem: str = ""
    """Why it cannot be asked; it has no messages then."""


class BadRow(UserError):
    """One row that cannot be asked. `question` is what is kept of it: its `problem`, under a key of the whole row."""

    question: Question


def asked(message: Mapping[str, Any]) -> bool:
    """Whether a recorded turn is part of what a target is asked: all but the assistant's answers."""
    return message["role"] != "assistant" or bool(message.get("tool_calls"))


def content_key(
    messages: tuple[dict[str, Any], ...], tools: tuple[dict[str, Any], ...], own: Mapping[str, Any] | None = None
) -> str:
    """24 hex digits over the asked turns (recorded reasoning aside), the tools, and the row's `own` values if any."""
    turns = [{k: v for k, v in turn.items() if k != "reasoning_content"} for turn in messages if asked(turn)]
    return _hash([turns, tools, own] if own else [turns, tools])


def question_of(place: str, row: Row, name: str) -> Question:
    """The question of one row of the source `name`.

    Raises:
        BadRow: an unknown schema or role, no user turn, an image, a sampling value or template option that is none;
            `place` names the row.
    """
    own_id, source = row.get("id"), row.get("source")
    source = source if isinstance(source, str) and source else name
    try:
        messages = tuple(_messages(place, row))
        if not any(message["role"] == "user" for message in messages):
            raise BadRow(f"{place}: expected at least one user turn, found none; remove the row")
        tools = tuple(_tools(place, row.get("tools")))
        sampling, options = _sampling(place, row), _options(place, row)
    except BadRow as bad:
        bad.question = Question(key=_hash(["unusable", row]), source=source, messages=(), problem=str(bad))
        raise
    own = {name: values for name, values in (("sampling", sampling), ("template_options", options)) if values}
    return Question(
        key=content_key(messages, tools, own),
        source=source,
        messages=messages,
        tools=tools,
        user_id="" if own_id is None else str(own_id),
        sampling=sampling,
        template_options=options,
    )


def _messages(place: str, row: Row) -> list[dict[str, Any]]:
    """The row's turns, whatever its schema."""
    system = row.get("system") or row.get("system_prompt")
    first = [{"role": "system", "content": _text(place, system)}] if system else []
    turns = next((row[name] for name in TURN_COLUMNS if isinstance(row.get(name), list)), None)
    if turns is not None:
        found = [_turn(f"{place}: turn {number}", turn) for number, turn in enumerate(turns, start=1)]
        return (first if not found or found[0]["role"] != "system" else []) + found
    prompt = next((row[name] for name in PROMPT_COLUMNS if row.get(name) is not None), None)
    if prompt is None:
        columns = ", ".join(row) or "none"
        raise BadRow(
            f"{place}: unknown schema: expected {' or '.join(TURN_COLUMNS[:2])} (lists of turns) or one of the columns "
            f"{', '.join(PROMPT_COLUMNS)}; found columns: {columns}"
        )
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise BadRow(f"{place}: expected a prompt, found an empty one; remove the row")
    asked_turns = _turns_or_text(place, prompt, "user")
    extra = row.get("input")
    if isinstance(extra, str) and extra.strip() and isinstance(prompt, str) and prompt is row.get("instruction"):
        asked_turns = [{"role": "user", "content": f"{prompt}\n\n{extra}"}]
    answer = next((row[name] for name in ANSWER_COLUMNS if row.get(name)), None)
    recorded = [] if answer is None else _turns_or_text(place, answer, "assistant")
    if recorded and isinstance(reasoning := row.get("reasoning_content"), str):
        recorded[-1].setdefault("reasoning_content", reasoning)
    return first + asked_turns + recorded


def _turns_or_text(place: str, value: Any, role: str) -> list[dict[str, Any]]:
    """A prompt or answer column holds text, or a list of turns."""
    if isinstance(value, list) and all(isinstance(turn, dict) and "role" in turn for turn in value):
        return [_turn(f"{place}: turn {number}", turn) for number, turn in enumerate(value, start=1)]
    return [{"role": role, "content": _text(place, value)}]


def _turn(place: str, turn: Any) -> dict[str, Any]:
    """One turn in the one form all later stages know: `role`, `content` as text, and what tools need."""
    if not isinstance(turn, dict):
        raise BadRow(f"{place}: expected a turn with a role, found {type(turn).__name__}")
    recorded = turn.get("role", turn.get("from"))
    role = ROLES.get(str(recorded).lower())
    if role is None:
        raise BadRow(f"{place}: unknown role {recorded!r}; known: {', '.join(sorted(ROLES))}")
    content = _text(place, turn.get("content", turn.get("value")))
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": [_recorded_call(place, content)]}
    message: dict[str, Any] = {"role": role, "content": content}
    reasoning = next((turn[name] for name in REASONING_FIELDS if isinstance(turn.get(name), str)), None)
    if reasoning and role == "assistant":
        message["reasoning_content"] = reasoning
    for name in ("name", "tool_call_id"):
        if turn.get(name) is not None:
            message[name] = turn[name]
    if turn.get("tool_calls"):
        message["tool_calls"] = [_call(place, call) for call in _loaded(turn["tool_calls"])]
    return message


def _text(place: str, content: Any) -> str:
    """Content as text: null is empty, text parts are joined by newlines as engines do."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRow(f"{place}: expected text, found {type(content).__name__}")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        text = part.get("text") if isinstance(part, dict) else part
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise BadRow(f"{place}: holds a part of type {kind!r}; draftsmith asks text only, remove such rows")
        texts.append(text)
    return "\n".join(texts)


def _call(place: str, call: Any) -> dict[str, Any]:
    """A tool call as chat servers write it, arguments as a mapping, its id kept (P24)."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow(f"{place}: expected a tool call with a function name, found {json.dumps(call, default=str)}")
    arguments = tool_arguments(function.get("arguments", {}))
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **made} if call.get("id") is not None else made


def _recorded_call(place: str, content: str) -> dict[str, Any]:
    """ShareGPT's own turn for a tool call: the call as JSON text."""
    try:
        return _call(place, json.loads(content))
    except ValueError:
        raise BadRow(f"{place}: expected a tool call as JSON, found {content[:60]!r}") from None


def _tools(place: str, value: Any) -> list[dict[str, Any]]:
    tools = _loaded(value) if value else []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f"{place}: tools: expected a list of tool descriptions, found {type(tools).__name__}")
    return tools


def _sampling(place: str, row: Row) -> dict[str, Any]:
    """The row's own sampling values, each of its one type, so that 0 and 0.0 are one question."""
    given = _loaded(row.get(SAMPLING_COLUMN) or {})
    if not isinstance(given, dict):
        raise BadRow(f"{place}: column {SAMPLING_COLUMN}: expected names and values, found {given!r}")
    unknown = sorted(given.keys() - SAMPLING.keys())
    if unknown:
        raise BadRow(f"{place}: column {SAMPLING_COLUMN}: unknown name {unknown[0]!r}; known: {', '.join(SAMPLING)}")
    given = {name: row[name] for name in SAMPLING if row.get(name) is not None} | given
    return {name: _number(place, name, value) for name, value in sorted(given.items()) if value is not None}


def _number(place: str, name: str, value: Any) -> int | float:
    kind, expected = SAMPLING[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    least = 1e-9 if name == "top_p" else 1 if name == "max_tokens" else 0
    if is_number and kind(value) == value >= least and (name != "top_p" or value <= 1):
        return kind(value)
    raise BadRow(f"{place}: {name}: expected {expected}, found {value!r}; correct the value or rename the column")


def _options(place: str, row: Row) -> dict[str, Any]:
    options = _loaded(row.get(OPTIONS_COLUMN) or {})
    if not isinstance(options, dict):
        raise BadRow(f"{place}: column {OPTIONS_COLUMN}: expected names and values, found {options!r}")
    reserved = sorted(RESERVED_OPTIONS & options.keys())
    if reserved:
        raise BadRow(f"{place}: column {OPTIONS_COLUMN}: draftsmith sets {reserved[0]} itself; remove it")
    return options


def _hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _loaded(value: Any) -> Any:
    """A value, or what its JSON text holds."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
