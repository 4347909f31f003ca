"""What a target gives back for one prompt, whoever ran it: the common record of `server` and `local`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from draftsmith.trace import IdsSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Explicit sampling values: none is ever left to a server's default."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One generation.

    `generated_ids` are as the target produced them, stop id included; empty where a server gave none. `reasoning_text`
    and `answer_text` are what the server's own parser made of them (None: the field was absent or null).
    """

    prompt_ids: Sequence[int] = ()
    generated_ids: Sequence[int] = ()
    finish_reason: Literal["stop", "length", "tool_calls", "abort", ""] = "stop"
    reasoning_text: str | None = None
    answer_text: str | None = None
    tool_calls: Sequence[dict[str, Any]] = ()
    spelled: Sequence[str] = ()
    """The generated tokens one by one as texts, where the server's logprobs gave those and nothing gave ids."""
    unread: Sequence[str] = ()
    """Fields of the message that nobody reads; looked for only where neither ids nor a reasoning field came."""
    ids_source: IdsSource = "engine"
    usage: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, Any] = field(default_factory=dict)
