"""What an engine itself counts of its draft: drafts, draft tokens, accepted tokens, and accepted ones per position.

The counters run since the server started and count everybody's requests, so only the difference between two readings
means anything, and only while nobody else asks the server. Engines count what was accepted behind the end of a reply as
well, and their per-position counters are shares of all drafts: `measure.acceptance` converts. SGLang publishes no
counters, only a recent mean of its acceptance length. A reading costs one GET (two for SGLang).
"""

from __future__ import annotations

import json
import re
import urllib.error
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from draftsmith.errors import UserError
from draftsmith.measure.acceptance import conditional, engine_length
from draftsmith.recipe import without_credentials
from draftsmith.target.direct import ask
from draftsmith.target.endpoints import Endpoint, base_url
from draftsmith.target.metrics import queue_of

CountedEngine = Literal["vllm", "sglang", "llamacpp"]
PREFIXES: Mapping[str, CountedEngine] = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp"}
"""Of metric names, as in vLLM 0.32, SGLang 0.5.23 and llama.cpp of November 2026."""
GENERATED = ("vllm:generation_tokens_total", "sglang:generation_tokens_total", "llamacpp:tokens_predicted_total")
SAMPLE = re.compile(r"^(\w+):(\w+)(?:\{(.*)\})? ([0-9.eE+-]+|NaN)(?=\s|$)", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')
READ_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """One reading, or the difference of two."""

    engine: CountedEngine
    drafts: int = 0
    """Steps in which something was drafted for a request; 0 for SGLang, which does not tell."""
    draft_tokens: int = 0
    accepted: int = 0
    per_position: tuple[int, ...] = ()
    """Accepted tokens at each position of the chain."""
    generated: int | None = None
    """Tokens of all replies; None: the engine does not tell."""
    running: int | None = None
    """Requests at the time of the reading."""
    waiting: int | None = None
    mean_length: float | None = None
    """SGLang's own mean acceptance length, over its recent past."""

    @property
    def length(self) -> float | None:
        """Acceptance length as the engine counts it, bonus token included; None where nothing was drafted."""
        return engine_length(self.drafts, self.accepted) if self.drafts else self.mean_length

    @property
    def unconditional(self) -> list[float]:
        """Accepted at each position, of all drafts."""
        return [count / self.drafts for count in self.per_position] if self.drafts else []

    @property
    def conditional(self) -> list[float | None]:
        """Accepted at each position, of the drafts that were accepted up to it."""
        return conditional(self.unconditional) if self.per_position and self.drafts else []


def read_counters(url: str, headers: Mapping[str, str] | None = None) -> Counters:
    """Reads a server's `/metrics` (and SGLang's `/server_info`).

    Args:
        url: the server's base URL, with or without `/v1`.
        headers: sent along, for servers that ask for a key.

    Raises:
        UserError: it does not answer, or publishes no metrics of an engine that is known.
    """
    endpoint = Endpoint(base_url(url))
    found = counters_of(_get(endpoint.at("//metrics"), headers))
    if found is None:
        raise UserError(
            f"{endpoint.shown}: expected the metrics of vLLM, SGLang or llama.cpp at /metrics, found none; start the "
            "server with them (SGLang: --enable-metrics, llama.cpp: --metrics)"
        )
    if found.engine == "sglang" and found.mean_length is None:
        return Counters(
            engine="sglang",
            generated=found.generated,
            running=found.running,
            waiting=found.waiting,
            mean_length=_sglang_length(_get(endpoint.at("//server_info"), headers)),
        )
    return found


def counters_of(metrics: bytes) -> Counters | None:
    """The counters in Prometheus' text, summed over a server's ranks; None: of no engine that is known."""
    engine: CountedEngine | None = None
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    lengths: list[float] = []
    for prefix, name, labels, text in SAMPLE.findall(metrics.decode("utf-8", errors="replace")):
        if prefix not in PREFIXES or text == "NaN":
            continue
        engine = PREFIXES[prefix]
        value = float(text)
        if name == "spec_decode_num_accepted_tokens_per_pos_total":
            found = POSITION.search(labels)
            if found:
                positions[int(found[1])] = positions.get(int(found[1]), 0.0) + value
        elif name == "spec_accept_length":
            lengths.append(value)
        else:
            full = f"{prefix}:{name}"
            sums[full] = sums.get(full, 0.0) + value
    if engine is None:
        return None
    queue = queue_of(metrics, 0.0)
    told = [sums[name] for name in GENERATED if name in sums]
    lengths = [length for length in lengths if length > 0]  # 0 until something was drafted
    return Counters(
        engine=engine,
        drafts=int(sums.get(f"{engine}:spec_decode_num_drafts_total", 0)),
        draft_tokens=int(sums.get(f"{engine}:spec_decode_num_draft_tokens_total", 0)),
        accepted=int(sums.get(f"{engine}:spec_decode_num_accepted_tokens_total", 0)),
        per_position=tuple(int(positions[position]) for position in sorted(positions)),
        generated=int(told[0]) if told else None,
        running=queue.running if queue else None,
        waiting=queue.waiting if queue else None,
        mean_length=sum(lengths) / len(lengths) if lengths else None,
    )


def difference(after: Counters, before: Counters) -> Counters:
    """What was counted between two readings of one server; `running` and `waiting` are those of the later one.

    Raises:
        UserError: the server was started anew in between.
    """
    if after.drafts < before.drafts or (after.generated or 0) < (before.generated or 0):
        raise UserError("the server's counters went back, so it was started anew while it was measured; measure again")
    padded = before.per_position + (0,) * (len(after.per_position) - len(before.per_position))
    known = after.generated is not None and before.generated is not None
    return Counters(
        engine=after.engine,
        drafts=after.drafts - before.drafts,
        draft_tokens=after.draft_tokens - before.draft_tokens,
        accepted=after.accepted - before.accepted,
        per_position=tuple(now - then for now, then in zip(after.per_position, padded, strict=True)),
        generated=(after.generated or 0) - (before.generated or 0) if known else None,
        running=after.running,
        waiting=after.waiting,
        mean_length=after.mean_length,
    )


def total(parts: list[Counters]) -> Counters:
    """Differences added up; SGLang's mean is the mean of its means. At least one."""
    deepest = max(len(part.per_position) for part in parts)
    padded = [part.per_position + (0,) * (deepest - len(part.per_position)) for part in parts]
    lengths = [part.mean_length for part in parts if part.mean_length is not None]
    told = [part.generated for part in parts if part.generated is not None]
    return Counters(
        engine=parts[0].engine,
        drafts=sum(part.drafts for part in parts),
        draft_tokens=sum(part.draft_tokens for part in parts),
        accepted=sum(part.accepted for part in parts),
        per_position=tuple(map(sum, zip(*padded, strict=True))),
        generated=sum(told) if len(told) == len(parts) else None,
        running=parts[-1].running,
        waiting=parts[-1].waiting,
        mean_length=sum(lengths) / len(lengths) if lengths else None,
    )


def _sglang_length(info: bytes) -> float | None:
    """Of `/server_info`: the mean over its workers; None where it does not say."""
    try:
        states = json.loads(info).get("internal_states") or []
    except (ValueError, AttributeError):
        return None
    found = [float(state["avg_spec_accept_length"]) for state in states if state.get("avg_spec_accept_length")]
    return sum(found) / len(found) if found else None


def _get(url: str, headers: Mapping[str, str] | None) -> bytes:
    try:
        return ask(url, READ_SECONDS, headers)
    except urllib.error.HTTPError as error:
        if error.code in (404, 501):  # llama.cpp without --metrics says 501
            return b""
        raise UserError(f"{without_credentials(url)}: HTTP {error.code}, expected metrics") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{without_credentials(url)}: the server does not answer ({error})") from None
