"""How one kind of server is asked for a generation and for its exact ids: the endpoints, their bodies, their replies.

A dialect knows no transport: it is given a `post` that sends a body to a path of one server and returns a 200's bytes,
or raises what `wire.refusal` made of anything else. Which dialect a server speaks is for the probe to find out.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

from draftsmith.target.reply import Reply, Sampling
from draftsmith.target.wire import (
    ASK_IDS,
    ASK_LOGGED,
    ASK_LOGGED_IDS,
    ASK_TOKENS,
    chat_body,
    chat_reply,
    generate_body,
    generate_reply,
    llamacpp_reply,
    tokens_of,
)

Post = Callable[[str, bytes], Awaitable[bytes]]
"""Path under the API base (`/chat/completions`) or under the server's root (`//tokenize`), and JSON body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One generation to ask for."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    sampling: Sampling
    template_options: Mapping[str, Any]
    prompt_ids: Callable[[], Sequence[int]]
    """The ids our own template renders; rendering takes time, so only dialects that send ids call it."""


class Dialect(Protocol):
    """One way to ask."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    async def ask(self, post: Post, model: str, asked: Asked) -> Reply:
        """One generation.

        Raises:
            ChatFailed: refused for good.
            PassingFault: worth another try.
        """
        ...


@dataclass(frozen=True, slots=True)
class Chat:
    """`/chat/completions`, with the fields that ask for ids in one engine's way."""

    name: str = "chat"
    asks: Mapping[str, Any] = field(default_factory=lambda: ASK_IDS)
    every_token: int = -1

    async def ask(self, post: Post, model: str, asked: Asked) -> Reply:
        """One generation."""
        started = time.monotonic()
        content = await post("/chat/completions", _body(model, asked, self.asks, self.every_token))
        return chat_reply(content, _timing(started))


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """llama.cpp's `/chat/completions`: generated ids in the reply, prompt ids by its `/tokenize` of the prompt's text.

    The server tokenises with its special tokens added, but takes a BOS that the template printed off first, so both
    ways are tried and the one of the length that was evaluated is right; where neither is, there are no prompt ids.
    """

    name: str = "llamacpp"

    async def ask(self, post: Post, model: str, asked: Asked) -> Reply:
        """One generation."""
        started = time.monotonic()
        content = await post("/chat/completions", _body(model, asked, ASK_TOKENS, -1))
        reply, prompt, evaluated = llamacpp_reply(content, _timing(started))
        for add_special in (True, False) if prompt else ():
            text = {"content": prompt, "add_special": add_special, "parse_special": True}
            ids = tokens_of(await post("//tokenize", msgspec.json.encode(text)))
            if len(ids) == evaluated:
                return replace(reply, prompt_ids=ids)
        return reply


@dataclass(frozen=True, slots=True)
class Generate:
    """SGLang's `/generate`: our own rendering as ids in, ids out. Nothing is parsed, so nothing is lost."""

    name: str = "generate"

    async def ask(self, post: Post, model: str, asked: Asked) -> Reply:
        """One generation."""
        started = time.monotonic()
        prompt_ids = asked.prompt_ids()
        content = await post("//generate", generate_body(prompt_ids, asked.sampling))
        return generate_reply(content, prompt_ids, _timing(started))


LOGGED_IDS = Chat("chat, ids in logprobs", ASK_LOGGED_IDS)
LOGGED = Chat("chat, tokens in logprobs", ASK_LOGGED, 0)
PLAIN = Chat("chat without ids", {}, 0)


def _body(model: str, asked: Asked, asks: Mapping[str, Any], every_token: int) -> bytes:
    return chat_body(model, asked.messages, asked.tools, asked.sampling, asked.template_options, asks, every_token)


def _timing(started: float) -> dict[str, Any]:
    return {"seconds": round(time.monotonic() - started, 3)}
