"""What goes over the wire: bodies of requests, fields of replies (chat, SGLang's `/generate`), and what refusals mean.

Sampling values are always explicit (servers take what a request leaves open from the model's generation_config.json,
penalties included: P05), template options lie on the top level (`extra_body` is a notion of the Python SDK;
servers ignore it), and ids are asked for: `return_token_ids` on vLLM >= 0.10.2 (`prompt_token_ids` at the root,
`choices[].token_ids`) and recent SGLang (`choices[].prompt_token_ids`, `choices[].response_token_ids`), `return_tokens`
with `verbose` on llama.cpp (`__verbose`), `return_tokens_as_token_ids` in the logprobs of older vLLM. The reasoning is
read from `reasoning` (vLLM >= 0.11.1) and `reasoning_content` (vLLM before, SGLang, llama.cpp).
"""

from __future__ import annotations

import email.utils
import json
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np

from draftsmith.target.reply import Reply, Sampling

S = TypeVar("S")
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


ASK_IDS: Mapping[str, Any] = {"return_token_ids": True}
"""vLLM >= 0.10.2, recent SGLang; llama.cpp ignores it silently, TRT-LLM refuses every field it does not know."""
ASK_TOKENS: Mapping[str, Any] = {"return_tokens": True, "verbose": True}
"""llama.cpp: either alone gives nothing."""
ASK_LOGGED: Mapping[str, Any] = {"logprobs": True}
ASK_LOGGED_IDS: Mapping[str, Any] = {"logprobs": True, "return_tokens_as_token_ids": True}
"""vLLM since 0.5: the tokens of the logprobs read `token_id:17`."""
LOGGED_ID = "token_id:"
CHAT_FIELDS = frozenset(
    {
        "role",
        "content",
        "reasoning",
        "reasoning_content",
        "tool_calls",
        "function_call",
        "refusal",
        "annotations",
        "audio",
    }
)
"""What a message may hold that is read, or has nothing to do with reasoning."""


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""Any other number is no token's: a server that sends one is out of order."""
NOTHING = msgspec.Raw(b"null")


class ChatFailed(Exception):
    """A request that ended without a reply. `passing`: the same request may succeed later."""

    def __init__(self, reason: str, *, passing: bool) -> None:
        super().__init__(reason)
        self.reason, self.passing = reason, passing


class PassingFault(Exception):
    """A fault that another try may not meet.

    Attributes:
        retry_after: seconds the server asked for.
        status: HTTP status, 0 where there was none.
    """

    def __init__(self, reason: str, retry_after: float = 0.0, status: int = 0) -> None:
        super().__init__(reason)
        self.reason, self.retry_after, self.status = reason, retry_after, status

    @property
    def busy(self) -> bool:
        """The server asks for patience: nothing is wrong with the request."""
        return self.status == 429 or (self.status == 503 and self.retry_after > 0)


class Aborted(PassingFault):
    """A generation that was begun and broke off: the connection was cut, or the server gave it up."""


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Logged(msgspec.Struct):
    token: str


class _Logprobs(msgspec.Struct):
    content: list[_Logged] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: msgspec.Raw = NOTHING
    response_token_ids: msgspec.Raw = NOTHING
    """For the many ids of long replies there is a faster way than a list (`_ids_of`)."""
    prompt_token_ids: list[TokenId] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: list[TokenId] | None = None
    usage: dict[str, Any] | None = None


class _Verbose(msgspec.Struct):
    tokens: list[TokenId]
    prompt: str
    tokens_evaluated: int


class _Spoken(_Completion):
    """llama.cpp's completion."""

    verbose: _Verbose | None = msgspec.field(default=None, name="__verbose")


class _Tokens(msgspec.Struct):
    tokens: list[TokenId]


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None


class _Meta(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    finish_reason: _Finish | None = None
    cached_tokens: int | None = None


class _Generation(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[TokenId]
    text: str | None = None


def chat_body(
    model: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    sampling: Sampling,
    template_options: Mapping[str, Any],
    asks: Mapping[str, Any] = ASK_IDS,
    every_token: int = -1,
) -> bytes:
    """The JSON body of `POST /chat/completions`.

    Args:
        asks: fields that ask for ids in one engine's way.
        every_token: `top_k` that keeps every token: -1 to vLLM, SGLang (refuses 0) and llama.cpp, 0 to TRT-LLM.
    """
    body: dict[str, Any] = {
        **NEUTRAL,
        "model": model,
        "messages": [_on_the_wire(message) for message in messages],
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or every_token,
        "seed": sampling.seed,
        "stream": False,
        **asks,
    }
    if tools:
        body["tools"] = list(tools)
    if template_options:
        body["chat_template_kwargs"] = dict(template_options)
    return msgspec.json.encode(body)


def chat_reply(content: bytes, timing: dict[str, Any]) -> Reply:
    """A 200 body as a Reply; whatever cannot be one (cut off, HTML of a proxy, no choice) is a passing fault."""
    reply = _chat_reply(_decoded(content, _Completion, "chat completion"), timing)
    if reply.generated_ids or reply.reasoning_text is not None:
        return reply
    return replace(reply, unread=_unread(content))


def llamacpp_reply(content: bytes, timing: dict[str, Any]) -> tuple[Reply, str, int]:
    """As `chat_reply`, of llama.cpp: a Reply without prompt ids, the prompt's text ("": not given) and its length."""
    completion = _decoded(content, _Spoken, "chat completion")
    reply, seen = _chat_reply(completion, timing), completion.verbose
    if seen is None:
        return reply, "", 0
    return replace(reply, generated_ids=seen.tokens), seen.prompt, seen.tokens_evaluated


def generate_body(prompt_ids: Sequence[int], sampling: Sampling) -> bytes:
    """The JSON body of SGLang's `POST /generate`."""
    values = {
        **NEUTRAL,
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "sampling_seed": sampling.seed,
    }
    return msgspec.json.encode({"input_ids": list(prompt_ids), "sampling_params": values, "stream": False})


def generate_reply(content: bytes, prompt_ids: Sequence[int], timing: dict[str, Any]) -> Reply:
    """A 200 body of SGLang's `/generate` as a Reply.

    Raises:
        ChatFailed: the server used only a part of the prompt.
        PassingFault: as `chat_reply`.
    """
    generation = _decoded(content, _Generation, "generation")
    meta = generation.meta_info
    kind = meta.finish_reason.type if meta.finish_reason else ""
    if kind == "abort":
        raise Aborted("the server aborted the generation")
    if meta.prompt_tokens != len(prompt_ids):
        raise ChatFailed(
            f"prompt_truncated: sent {len(prompt_ids)} prompt ids, the server used {meta.prompt_tokens}", passing=False
        )
    matched = meta.finish_reason.matched if meta.finish_reason else None
    ids = generation.output_ids
    if isinstance(matched, int) and len(ids) == meta.completion_tokens - 1:  # versions that trim the stop id
        ids = [*ids, matched]
    return Reply(
        prompt_ids=prompt_ids,
        generated_ids=ids,
        finish_reason=FINISH.get(kind, ""),
        answer_text=generation.text,
        usage={
            "prompt_tokens": meta.prompt_tokens,
            "completion_tokens": meta.completion_tokens,
            "cached_tokens": meta.cached_tokens,
        },
        timing=timing,
    )


def tokens_of(content: bytes) -> list[int]:
    """The ids of a 200 body of `/tokenize` (vLLM, SGLang, llama.cpp)."""
    return _decoded(content, _Tokens, "list of tokens").tokens


def _decoded(content: bytes, kind: type[S], what: str) -> S:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PassingFault(f"the reply is not a {what} ({one_line(str(error))})") from None


def _unread(content: bytes) -> tuple[str, ...]:
    """Names of the message's fields that hold something and are none of the chat format's own."""
    message = msgspec.json.decode(content)["choices"][0]["message"]
    return tuple(
        name
        for name, value in message.items()
        if name not in CHAT_FIELDS and isinstance(value, str | list | dict) and value
    )


def _chat_reply(completion: _Completion, timing: dict[str, Any]) -> Reply:
    if not completion.choices:
        raise PassingFault("the reply holds no choice")
    choice = completion.choices[0]
    if choice.finish_reason == "abort":
        raise Aborted("the server aborted the generation")
    message = choice.message
    logged = [entry.token for entry in choice.logprobs.content or ()] if choice.logprobs else []
    ids = _ids_of(choice.token_ids) or _ids_of(choice.response_token_ids)
    if not ids and logged and all(token.startswith(LOGGED_ID) for token in logged):
        ids, logged = _ids_logged(logged), []
    return Reply(
        prompt_ids=completion.prompt_token_ids or choice.prompt_token_ids or (),
        generated_ids=ids or (),
        spelled=logged,
        finish_reason=FINISH.get(choice.finish_reason, ""),
        reasoning_text=message.reasoning if message.reasoning is not None else message.reasoning_content,
        answer_text=message.content,
        tool_calls=message.tool_calls or (),
        usage=completion.usage or {},
        timing=timing,
    )


def _ids_of(raw: msgspec.Raw) -> Sequence[int]:
    """The ids in a JSON array, as int32; empty for null. A list of objects takes twice the time, more to let go of it.

    Raises:
        PassingFault: it holds anything else.
    """
    if raw == NOTHING:
        return ()
    content = memoryview(raw)
    if content[0] == ord("["):
        text = b"".join((content[1:-1], b",-1"))
        try:
            numbers = np.fromstring(text, np.int64, sep=",")  # the -1 is reached if all before it is numbers
        except ValueError:
            numbers = np.empty(0, np.int64)
        ids = numbers[:-1]
        if len(ids) and numbers[-1] == -1 and text.count(b"-") == 1 and ids.min() >= 0 and ids.max() < 2**31:
            return array("i", ids.astype(np.int32).tobytes())
    return _decoded(bytes(raw), list[TokenId], "chat completion")  # none, or it says what is wrong


def _ids_logged(tokens: Sequence[str]) -> list[int]:
    try:
        return msgspec.convert([token.removeprefix(LOGGED_ID) for token in tokens], list[TokenId], strict=False)
    except msgspec.ValidationError as error:
        raise PassingFault(f"the reply is not a chat completion ({one_line(str(error))})") from None


def refusal(status: int, headers: Mapping[str, str], content: bytes) -> ChatFailed | PassingFault:
    """What a status other than 200 means: final, or worth another try."""
    reason = f"HTTP {status}: {explanation(content)}"
    if status in PASSING_STATUS or status >= 500:
        return PassingFault(reason, _retry_after(headers.get("Retry-After", "")), status)
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
