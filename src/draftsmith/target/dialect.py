"""How one kind of server is asked for a generation and for its exact ids: the endpoints, their bodies, their replies.

A dialect knows no transport: it is given a `post` that sends a body to a path of one server and returns a 200's bytes,
or raises what `wire.refusal` made of anything else. Which dialect a server speaks is for the probe to find out.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from draftsmith.target.reply import Reply, Sampling
from draftsmith.target.wire import chat_body, chat_reply

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

    name: str

    async def ask(self, post: Post, model: str, asked: Asked) -> Reply:
        """One generation.

        Raises:
            ChatFailed: refused for good.
            PassingFault: worth another try.
        """
        ...


class Chat:
    """`/chat/completions` with `return_token_ids`: vLLM, recent SGLang; others answer without ids."""

    name = "chat"

    async def ask(self, post: Post, model: str, asked: Asked) -> Reply:
        """One generation."""
        started = time.monotonic()
        body = chat_body(model, asked.messages, asked.tools, asked.sampling, asked.template_options)
        content = await post("/chat/completions", body)
        return chat_reply(content, {"seconds": round(time.monotonic() - started, 3)})
