"""The OpenAI chat format on the wire: a request's body, a reply's fields, and what each refusal means.

Sampling values are always explicit (servers take what a request leaves open from the model's generation_config.json,
penalties included: P05), template options lie on the top level (`extra_body` is a notion of the Python SDK;
servers ignore it), and ids are asked for: `return_token_ids` on vLLM >= 0.10.2 (`prompt_token_ids` at the root,
`choices[].token_ids`) and recent SGLang (`choices[].prompt_token_ids`, `choices[].response_token_ids`). The reasoning
is read from `reasoning` (vLLM >= 0.11.1) and `reasoning_content` (vLLM before, SGLang, llama.cpp).
"""

from __future__ import annotations

import email.utils
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from draftsmith.target.reply import Reply, Sampling

PASSING_STATUS = frozenset({408, 409, 425, 429})
"""Worth another try, as is every 5xx; any other status is final."""
ABOUT_THE_SERVER = frozenset({401, 403, 404})
"""Says nothing about the question: sending it again is no use now, but the next run asks it again."""
FINISH: Mapping[str | None, Literal["stop", "length", "tool_calls"]] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
}
TOO_LONG = ("context length", "context size", "max_model_len", "maximum model length")
"""How vLLM, SGLang, llama.cpp and TRT-LLM word a 400 for a prompt that does not fit."""

NEUTRAL: Mapping[str, float] = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""What must not change the target's distribution: a draft learns the plain one, and `--local` samples from it."""


class ChatFailed(Exception):
    """A request that ended without a reply. `passing`: the same request may succeed later."""

    def __init__(self, reason: str, *, passing: bool) -> None:
        super().__init__(reason)
        self.reason, self.passing = reason, passing


class PassingFault(Exception):
    """A fault that another try may not meet. `retry_after`: seconds the server asked for."""

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.retry_after = reason, retry_after


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    response_token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None
    usage: dict[str, Any] | None = None


def chat_body(
    model: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    sampling: Sampling,
    template_options: Mapping[str, Any],
) -> bytes:
    """The JSON body of `POST /chat/completions`."""
    body: dict[str, Any] = {
        **NEUTRAL,
        "model": model,
        "messages": [_on_the_wire(message) for message in messages],
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,  # -1 is "every token" to vLLM, SGLang and llama.cpp; SGLang refuses 0
        "seed": sampling.seed,
        "stream": False,
        "return_token_ids": True,
    }
    if tools:
        body["tools"] = list(tools)
    if template_options:
        body["chat_template_kwargs"] = dict(template_options)
    return msgspec.json.encode(body)


def chat_reply(content: bytes, timing: dict[str, Any]) -> Reply:
    """A 200 body as a Reply; whatever cannot be one (cut off, HTML of a proxy, no choice) is a passing fault."""
    try:
        completion = msgspec.json.decode(content, type=_Completion)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PassingFault(f"the reply is not a chat completion ({one_line(str(error))})") from None
    if not completion.choices:
        raise PassingFault("the reply holds no choice")
    choice = completion.choices[0]
    if choice.finish_reason == "abort":
        raise PassingFault("the server aborted the generation")
    message = choice.message
    return Reply(
        prompt_ids=completion.prompt_token_ids or choice.prompt_token_ids or (),
        generated_ids=choice.token_ids or choice.response_token_ids or (),
        finish_reason=FINISH.get(choice.finish_reason, ""),
        reasoning_text=message.reasoning if message.reasoning is not None else message.reasoning_content,
        answer_text=message.content,
        tool_calls=message.tool_calls or (),
        usage=completion.usage or {},
        timing=timing,
    )


def refusal(status: int, headers: Mapping[str, str], content: bytes) -> ChatFailed | PassingFault:
    """What a status other than 200 means: final, or worth another try."""
    reason = f"HTTP {status}: {explanation(content)}"
    if status in PASSING_STATUS or status >= 500:
        return PassingFault(reason, _retry_after(headers.get("Retry-After", "")))
    if status == 400 and any(words in reason.lower() for words in TOO_LONG):
        return ChatFailed(f"prompt_too_long: {explanation(content)}", passing=False)
    return ChatFailed(reason, passing=status in ABOUT_THE_SERVER)


def explanation(content: bytes) -> str:
    """What an error body says, in one line: `error.message` (OpenAI), `message` (SGLang), `detail` (FastAPI), text."""
    text = content.decode("utf-8", "replace")
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = text
    for key in ("error", "message", "detail"):
        if isinstance(found, dict):
            found = found.get(key, found)
    return one_line(str(found)) or "no explanation"


def _retry_after(value: str) -> float:
    """Seconds of a Retry-After header, which is a number or an HTTP date; 0 where it is neither."""
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        moment: float = email.utils.parsedate_to_datetime(value).timestamp()
    except ValueError:
        return 0.0
    return max(0.0, moment - time.time())


def _on_the_wire(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as the chat API takes it: tool call arguments are JSON text there, dicts in templates."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def one_line(text: str) -> str:
    """Text without line breaks, 300 characters at most."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:297] + "..."
