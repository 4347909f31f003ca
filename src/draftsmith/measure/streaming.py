"""One reply as it streams out of a server: exact ids in and out, when each part came, and the draft's steps behind it.

Each engine is asked by its own endpoint that takes prompt ids: vLLM's `/v1/completions`, llama.cpp's `/completion`,
SGLang's `/generate`. Every sampling value is explicit, a reply ends at the run's own stop ids, and no prompt is taken
from a cache that an earlier request filled. What is known of the steps differs: llama.cpp says with every token how
much was drafted and accepted so far (exact); vLLM sends what one step emitted as one part, so its parts are the steps
as long as nothing merges them; SGLang says how many steps there were. One `stream` is one POST.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec

from draftsmith.measure.acceptance import Cycle
from draftsmith.measure.counters import CountedEngine
from draftsmith.target.endpoints import Endpoint
from draftsmith.target.reply import Sampling
from draftsmith.target.server import deadline_for
from draftsmith.target.transport import Transport
from draftsmith.target.wire import NEUTRAL, PassingFault, explanation, generate_body, one_line

DATA, DONE = b"data: ", b"[DONE]"
LINE_BYTES = 32 << 20
"""Longest event: llama.cpp repeats the prompt's text in its last one, SGLang all ids so far in each."""


@dataclass(frozen=True, slots=True)
class Part:
    """Ids that came together."""

    at: float
    """Seconds since the request was sent."""
    ids: tuple[int, ...]
    drafted: int | None = None
    """Draft tokens of the reply so far, where the server says so."""
    accepted: int | None = None
    step: float | None = None
    """The same for parts of one step, where the server says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """One reply."""

    key: str
    ids: tuple[int, ...]
    """Stop id included."""
    finish_reason: str
    parts: tuple[Part, ...]
    sent: float
    """When it was asked for, on this process' clock (`time.perf_counter`)."""
    seconds: float
    verified: int | None = None
    """SGLang: the target's forwards after the prompt's own."""

    @property
    def first_token(self) -> float:
        """Seconds until the first id came."""
        return self.parts[0].at

    @property
    def per_token(self) -> float | None:
        """Seconds per id after those that came first; None where all came at once."""
        later = len(self.ids) - len(self.parts[0].ids)
        return (self.parts[-1].at - self.parts[0].at) / later if later else None


async def stream(
    transport: Transport,
    endpoint: Endpoint,
    engine: CountedEngine,
    model: str,
    key: str,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    stop_ids: frozenset[int],
) -> Streamed:
    """Asks for one reply and reads it to its end.

    Raises:
        PassingFault: the server refused, or what it sent in time is no whole reply.
    """
    path, body = REQUESTS[engine](model, prompt_ids, sampling, stop_ids)
    content = msgspec.json.encode(body)
    deadline = deadline_for(sampling.max_tokens)
    try:
        async with asyncio.timeout(deadline):
            read, sent, seconds = await _read(transport, endpoint.at(path), content, engine)
    except TimeoutError:
        raise PassingFault(f"no whole reply within {deadline:g} s") from None
    except aiohttp.ClientError as error:
        raise PassingFault(f"connection fault: {one_line(str(error) or type(error).__name__)}") from None
    return Streamed(
        key=key,
        ids=tuple(token for part in read.parts for token in part.ids),
        finish_reason=read.finish_reason,
        parts=tuple(read.parts),
        sent=sent,
        seconds=seconds,
        verified=read.verified,
    )


def cycles(reply: Streamed, engine: CountedEngine, draft_tokens: int) -> tuple[Cycle, ...] | None:
    """The draft's steps behind a reply; None where the engine does not show them.

    vLLM does not say whether the last token of a reply that ended inside a step was a draft or the target's own; the
    step counts as one that proposed only what is certain.
    """
    if engine == "llamacpp":
        return _counted_cycles(reply)
    if engine == "sglang":
        return None
    found, start = [], len(reply.parts[0].ids)
    for part in reply.parts[1:]:
        emitted, last = len(part.ids), part is reply.parts[-1]
        proposed = emitted - 1 if last and emitted <= draft_tokens else draft_tokens
        found.append(Cycle(start, proposed, emitted - 1, emitted))
        start += emitted
    return tuple(found)


def _counted_cycles(reply: Streamed) -> tuple[Cycle, ...] | None:
    """From running counts per token: parts with the same counts are one step. The first one is the prompt's own."""
    if any(part.step is None for part in reply.parts):
        return None
    found: list[Cycle] = []
    start, before = 0, reply.parts[0]
    for part in reply.parts:
        if found and (part.drafted, part.accepted, part.step) == (before.drafted, before.accepted, before.step):
            found[-1] = replace(found[-1], emitted=found[-1].emitted + len(part.ids))
        elif start:
            drafted, accepted = (
                (part.drafted or 0) - (before.drafted or 0),
                (part.accepted or 0) - (before.accepted or 0),
            )
            found.append(Cycle(start, drafted, accepted, len(part.ids)))
        start, before = start + len(part.ids), part
    return tuple(found)


async def _read(transport: Transport, url: str, content: bytes, engine: CountedEngine) -> tuple[_Reader, float, float]:
    """A whole reply, when it was asked for, and the seconds it took from then on."""
    read = READERS[engine]()
    started = time.perf_counter()
    async with transport.session.post(url, data=content, read_bufsize=LINE_BYTES) as response:
        if response.status != 200:
            reason = explanation(await response.read())
            raise PassingFault(f"HTTP {response.status}: {reason}", status=response.status)
        async for line in response.content:
            if line.startswith(DATA) and not line.startswith(DATA + DONE):
                try:
                    read.take(time.perf_counter() - started, line[len(DATA) :])
                except msgspec.DecodeError as error:
                    reason = one_line(str(error))
                    raise PassingFault(f"expected a stream of JSON, found something else ({reason})") from None
    if not read.parts or not read.finish_reason:
        raise PassingFault("the stream ended before the reply did")
    return read, started, time.perf_counter() - started


class _Reader:
    """What has come so far."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.finish_reason = ""
        self.verified: int | None = None

    def take(self, at: float, line: bytes) -> None:
        """One event of the stream."""
        raise NotImplementedError

    def add(self, at: float, ids: Sequence[int], *counts: Any) -> None:
        """Keeps what is not empty."""
        if ids:
            self.parts.append(Part(at, tuple(ids), *counts))


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


class _VllmReader(_Reader):
    def take(self, at: float, line: bytes) -> None:
        chunk = msgspec.json.decode(line, type=_Chunk)
        if chunk.error is not None:
            raise PassingFault(f"the server broke off: {explanation(line)}")
        for choice in chunk.choices:
            if choice.token_ids is None:
                raise PassingFault("expected token ids in the stream (vLLM >= 0.10.2), found none")
            self.add(at, choice.token_ids)
            self.finish_reason = choice.finish_reason or self.finish_reason


class _Timings(msgspec.Struct):
    predicted_ms: float
    draft_n: int = 0
    draft_n_accepted: int = 0


class _Token(msgspec.Struct):
    tokens: list[int] = []
    stop: bool = False
    stop_type: str = ""
    truncated: bool = False
    timings: _Timings | None = None
    error: Any = None


class _LlamaCppReader(_Reader):
    def take(self, at: float, line: bytes) -> None:
        token = msgspec.json.decode(line, type=_Token)
        if token.error is not None or token.truncated:
            raise PassingFault(f"the server broke off: {explanation(line)}")
        timings = token.timings
        counts = (timings.draft_n, timings.draft_n_accepted, timings.predicted_ms) if timings else ()
        self.add(at, token.tokens, *counts)
        if token.stop:
            self.finish_reason = "length" if token.stop_type == "limit" else "stop"


class _Finish(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    completion_tokens: int = 0
    finish_reason: _Finish | None = None
    spec_verify_ct: int | None = None


class _Generated(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: Any = None


class _SglangReader(_Reader):
    """Its stream repeats all ids so far, unless the server was started to send only the new ones."""

    def take(self, at: float, line: bytes) -> None:
        generated = msgspec.json.decode(line, type=_Generated)
        meta = generated.meta_info
        if generated.error is not None or (meta.finish_reason and meta.finish_reason.type == "abort"):
            raise PassingFault(f"the server broke off: {explanation(line)}")
        have = sum(len(part.ids) for part in self.parts)
        repeats = len(generated.output_ids) == meta.completion_tokens
        self.add(at, generated.output_ids[have:] if repeats else generated.output_ids)
        self.verified = meta.spec_verify_ct if meta.spec_verify_ct is not None else self.verified
        if meta.finish_reason:
            self.finish_reason = meta.finish_reason.type


Request = Callable[[str, Sequence[int], Sampling, frozenset[int]], tuple[str, dict[str, Any]]]


def _vllm(model: str, prompt_ids: Sequence[int], sampling: Sampling, stop_ids: frozenset[int]) -> tuple[str, Any]:
    body = {
        **NEUTRAL,
        "model": model,
        "prompt": list(prompt_ids),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "seed": sampling.seed,
        "stop_token_ids": sorted(stop_ids),
        "stream": True,
        "return_token_ids": True,
        "cache_salt": uuid.uuid4().hex,
    }
    return "/completions", body


def _llamacpp(model: str, prompt_ids: Sequence[int], sampling: Sampling, stop_ids: frozenset[int]) -> tuple[str, Any]:
    """llama.cpp ends at its model's own stop ids only."""
    body = {
        **{name: value for name, value in NEUTRAL.items() if name != "repetition_penalty"},
        "repeat_penalty": 1.0,
        "typical_p": 1.0,
        "xtc_probability": 0.0,
        "dry_multiplier": 0.0,
        "prompt": list(prompt_ids),
        "n_predict": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "stream": True,
        "return_tokens": True,
        "timings_per_token": True,
        "cache_prompt": False,
    }
    return "//completion", body


def _sglang(model: str, prompt_ids: Sequence[int], sampling: Sampling, stop_ids: frozenset[int]) -> tuple[str, Any]:
    body: dict[str, Any] = msgspec.json.decode(generate_body(prompt_ids, sampling))
    body["sampling_params"]["stop_token_ids"] = sorted(stop_ids)
    return "//generate", {**body, "stream": True, "extra_key": uuid.uuid4().hex}


REQUESTS: Mapping[CountedEngine, Request] = {"vllm": _vllm, "llamacpp": _llamacpp, "sglang": _sglang}
READERS: Mapping[CountedEngine, type[_Reader]] = {
    "vllm": _VllmReader,
    "llamacpp": _LlamaCppReader,
    "sglang": _SglangReader,
}
