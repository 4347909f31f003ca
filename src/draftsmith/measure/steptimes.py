"""What one step of an engine takes, from where it can be had: served engines, the reference measurement, or typed in.

On a server, `concurrency` requests run at a time. A plain step is the time from one token of a reply to the next, as
long as the batch is full and no prompt is being read: how often that interrupts depends on how long replies are. A step
with draft is the same, times the tokens of a step as the engine counts them. Both hold however many drafts are
accepted, so a prediction needs no more than a few prompts, and not those it will be checked on. What reading a prompt
takes is timed with one request at a time.

Before there is a draft, a plain server can stand in: checking k+1 tokens of B requests costs about what one token of
B * (k+1) requests does (the same rows through every weight; attention reads less), and a draft step its share of the
target's weights. Both are estimates and are called so.
"""

from __future__ import annotations

import asyncio
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.measure.load import Load, Server, run_load
from draftsmith.measure.payoff import Replies, StepTimes, composed
from draftsmith.measure.prompts import Prompt
from draftsmith.measure.served_bench import Bench, set_up
from draftsmith.measure.served_checks import ENOUGH_PAIRS, connect, judged
from draftsmith.measure.served_rounds import depth, round_of
from draftsmith.measure.streaming import Streamed
from draftsmith.progress import Progress
from draftsmith.recipe import MeasureSettings, PayoffSettings
from draftsmith.target.transport import Transport

PER_REQUEST = 3
"""Prompts per parallel request of a round: the batch stays full for most of it."""
LEAST_PROMPTS = 6
"""Of a round, however few run at a time: one reply more or less must not decide."""
FEW_TOKENS = 16
"""Per request of a round: with fewer that came while no prompt was read, nothing can be said of steps alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """What was measured at one concurrency. Seconds; medians over the rounds."""

    times: StepTimes
    replies: Replies | None
    """Of the replies that were timed; None where nothing but steps is known."""
    draft_prefill: float
    """What the draft adds to the time until the first token."""
    spread: float
    """Largest over least step with draft (plain step where there is none), of the rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Step times and where they come from, in words."""

    source: str
    levels: tuple[Level, ...]
    cautions: tuple[str, ...] = ()
    """What a reader should know of the servers they come from."""

    @property
    def times(self) -> list[StepTimes]:
        """Of all levels."""
        return [level.times for level in self.levels]


def served_steps(run: Path, settings: PayoffSettings, share: float | None, progress: Progress) -> Measured:
    """Measures on the servers of `settings`.

    Args:
        run: whose prompts are asked.
        settings: servers and concurrencies.
        share: of a plain step, what a draft step takes; for a plain server without one that drafts.
        progress: for the bar.

    Raises:
        UserError: a server is not usable, or the draft's share is not known.
    """
    return asyncio.run(_served(run, settings, share, progress))


async def _served(run: Path, settings: PayoffSettings, share: float | None, progress: Progress) -> Measured:
    if settings.baseline_server is None:
        raise UserError("payoff: expected --baseline-server (plain steps are what a draft is held against), found none")
    if settings.server is None and share is None:
        raise UserError(
            "payoff: expected --server with a draft, or --draft-share (a draft step as a share of a plain one), found "
            "neither, and the run does not tell"
        )
    async with AsyncExitStack() as stack:
        servers: dict[str, Server] = {}
        contexts = []
        for side, url in (("baseline", settings.baseline_server), ("draft", settings.server)):
            if url is not None:
                transport = await stack.enter_async_context(Transport(settings.api_key_env, kept=False))
                servers[side], context = await connect(side, url, settings.model, transport, settings.api_key_env)
                contexts += [context] if context else []
        measure = MeasureSettings(limit=1 << 20, max_tokens=settings.max_tokens, questions=settings.questions)
        bench = set_up(run, measure, contexts)
        drafting = "draft" in servers
        wanted = sorted({1, *(settings.concurrency if drafting else _levels(settings))})  # 1: for the prompts' own time
        found, cautions = await _timed(servers, bench, wanted, settings.rounds, progress)
    prefill = {side: statistics.median(map(_first, loads)) for side, loads in found[1].items()}
    if drafting:
        server = servers["draft"]
        levels = tuple(_level(level, found[level], server, settings, prefill) for level in settings.concurrency)
        told = any(_depth(loads["draft"], server) for loads in found.values())
        taken = "" if told else f" (its steps taken for {settings.draft_tokens} draft tokens, which it does not tell)"
        source = f"measured on {server.engine} with and without the draft{taken}"
        return Measured(source=source, levels=levels, cautions=cautions)
    assert share is not None
    plain = {level: loads["baseline"] for level, loads in found.items()}
    return Measured(
        source=f"plain steps measured on {servers['baseline'].engine}; checking k+1 tokens taken as k+1 times the "
        f"requests, a draft step as {share:.1%} of a plain one (estimates)",
        levels=tuple(_estimated(level, plain, settings, share, prefill) for level in settings.concurrency),
        cautions=cautions,
    )


async def _timed(
    servers: Mapping[str, Server], bench: Bench, levels: Sequence[int], rounds: int, progress: Progress
) -> tuple[dict[int, dict[str, list[Load]]], tuple[str, ...]]:
    """The rounds per concurrency and side, and what a reader should know of them."""
    found: dict[int, dict[str, list[Load]]] = {}
    cautions: dict[str, None] = {}  # each once, in order
    replies = sum(len(_prompts(bench, level)) for level in levels) * rounds * len(servers)
    with progress.track("step times", replies, "replies") as tracker:
        for level in levels:
            prompts = _prompts(bench, level)
            found[level] = {side: [] for side in servers}
            for server in servers.values():
                cautions |= dict.fromkeys(
                    await _warm_up(server, bench, prompts[: max(PER_REQUEST * level, ENOUGH_PAIRS)], level)
                )
            for _ in range(rounds):
                for side, server in servers.items():
                    load = await run_load(server, prompts, bench.samplings, bench.stop_ids, level, lambda: None)
                    found[level][side].append(load)
                    tracker.update(tracker.done + len(prompts))
                    cautions |= dict.fromkeys(_cautions(load, server, level))
    return found, tuple(cautions)


def _cautions(load: Load, server: Server, level: int) -> list[str]:
    found = []
    if load.disturbed:
        found.append(f"{server.endpoint.shown}: generated tokens for others while steps were timed")
    if not _alone(load, level):
        found.append(
            f"at {level}: too few tokens came while no prompt was read, so the steps hold the share of prompts; raise "
            "--max-tokens"
        )
    return found


async def _warm_up(server: Server, bench: Bench, prompts: Sequence[Prompt], level: int) -> list[str]:
    """A round that is not timed: whether the server is what it is taken for, and runs as many as are asked."""
    waited = 0

    def look() -> None:  # whenever a reply has ended, so there is a place free
        nonlocal waited
        waited = max(waited, server.counters().waiting or 0)

    load = await run_load(server, prompts, bench.samplings, bench.stop_ids, level, look)
    cautions = judged(server, bench, load)
    if waited:
        cautions.append(
            f"{server.endpoint.shown}: asked {level} at a time, up to {waited} waited for a place, so its steps are of "
            "fewer requests; let it run more at once"
        )
    return cautions


def typed_steps(settings: PayoffSettings) -> Measured:
    """Step times from `--target-ms`, `--verify-ms` and `--draft-ms`, each `CONCURRENCY:MILLISECONDS`.

    Raises:
        UserError: not of that form, or a concurrency with only some of the three.
    """
    target, verify, draft = (
        _typed(flag, values)
        for flag, values in (
            ("--target-ms", settings.target_ms),
            ("--verify-ms", settings.verify_ms),
            ("--draft-ms", settings.draft_ms),
        )
    )
    if not target or not target.keys() == verify.keys() == draft.keys():
        raise UserError(
            f"payoff: expected --target-ms, --verify-ms and --draft-ms for the same concurrencies, found "
            f"{sorted(target)}, {sorted(verify)} and {sorted(draft)}"
        )
    levels = []
    for number in sorted(target):
        times = composed(number, target[number], {settings.draft_tokens: verify[number]}, draft[number], 0.0)
        levels.append(Level(times=times, replies=None, draft_prefill=0.0, spread=1.0))
    return Measured(source=f"typed in, for {settings.draft_tokens} draft tokens", levels=tuple(levels))


def reference_steps(result: Mapping[str, Any]) -> Measured:
    """Step times of the reference decoder, from `measure/result.json`: one request at a time, on this machine.

    Times are of whole replies, so every step holds a share of reading its prompt, with the draft and without.

    Raises:
        UserError: nothing that was timed had a step.
    """
    k, rounds = result["draft_tokens"], result["rounds"]
    if rounds and all("steps" in one for one in rounds):
        plain, step = _timed_steps(rounds)
    else:
        plain, step = _implied_steps(result)
    times = StepTimes(concurrency=1, target=plain, with_draft={k: step})
    speeds = [one["speedup"] for one in rounds] if rounds and "speedup" in rounds[0] else [1.0]
    level = Level(times=times, replies=None, draft_prefill=0.0, spread=max(speeds) / min(speeds))
    return Measured(source="measured with the reference decoder, one request at a time", levels=(level,))


def _timed_steps(rounds: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Seconds of a plain step and of one with draft: the timed replies' own, loops among them or not."""
    if not all(one["steps"] and one["baseline_steps"] for one in rounds):
        raise UserError(
            "payoff: expected timed replies of several tokens in the run's measurement, found none; measure with more "
            "--max-tokens, or on other questions"
        )
    plain = statistics.median(one["baseline_seconds"] / one["baseline_steps"] for one in rounds)
    return plain, statistics.median(one["seconds"] / one["steps"] for one in rounds)


def _implied_steps(result: Mapping[str, Any]) -> tuple[float, float]:
    """As `_timed_steps`, of a run measured before steps were kept: as if what was timed was accepted like the rest."""
    length = result["acceptance_length"]
    if length is None:
        raise UserError(
            "payoff: the run's measurement has no acceptance length (all replies are loops); measure on other questions"
        )
    return 1 / result["baseline_tokens_per_second"], length / result["tokens_per_second"]


def draft_share(target: Mapping[str, Any], draft: Mapping[str, Any]) -> float | None:
    """A draft step as a share of a plain one, by the weights each reads per token; None where the target is not dense.

    Args:
        target: the target's text config.
        draft: the draft's `DraftConfig.to_json()`.
    """
    if any("expert" in name and value for name, value in target.items()):
        return None
    hidden, layers = target["hidden_size"], target["num_hidden_layers"]
    heads = target["num_attention_heads"]
    width = target.get("head_dim") or hidden // heads
    kv = (target.get("num_key_value_heads") or heads) * width
    layer = hidden * (2 * heads * width + 2 * kv + 3 * target["intermediate_size"])
    whole = layers * layer + hidden * target["vocab_size"]
    q, own_kv = (draft[name] * draft["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    own = hidden * (2 * q + 4 * own_kv + q + 3 * draft["intermediate_size"] + draft["draft_vocab_size"])
    return float(own / whole)


def _levels(settings: PayoffSettings) -> list[int]:
    """Those that a plain server must be measured at to stand in for one that drafts."""
    return sorted({*settings.concurrency, *(level * (settings.draft_tokens + 1) for level in settings.concurrency)})


def _prompts(bench: Bench, level: int) -> list[Prompt]:
    """So many that the batch is full, the first ones again where there are fewer: none is taken from a cache."""
    count = max(PER_REQUEST * level, LEAST_PROMPTS)
    return [bench.prompts[index % len(bench.prompts)] for index in range(count)]


def _depth(loads: Sequence[Load], server: Server) -> int:
    """Draft tokens of a step; 0 where the server does not tell (SGLang)."""
    return depth([round_of(load, server, "") for load in loads])


def _level(
    level: int,
    loads: Mapping[str, Sequence[Load]],
    server: Server,
    settings: PayoffSettings,
    prefill: Mapping[str, float],
) -> Level:
    plain = [_plain_step(load, level) for load in loads["baseline"]]
    steps = [_draft_step(load, level, server.endpoint.shown) for load in loads["draft"]]
    k = _depth(loads["draft"], server) or settings.draft_tokens
    return Level(
        times=StepTimes(concurrency=level, target=statistics.median(plain), with_draft={k: statistics.median(steps)}),
        replies=Replies(prefill=prefill["baseline"], tokens=_length(loads["baseline"])),
        draft_prefill=prefill["draft"] - prefill["baseline"],
        spread=max(steps) / min(steps),
    )


def _estimated(
    level: int,
    plain: Mapping[int, Sequence[Load]],
    settings: PayoffSettings,
    share: float,
    prefill: Mapping[str, float],
) -> Level:
    steps = [_plain_step(load, level) for load in plain[level]]
    target = statistics.median(steps)
    k = settings.draft_tokens
    wide = level * (k + 1)
    verify = statistics.median(_plain_step(load, wide) for load in plain[wide])
    return Level(
        times=composed(level, target, {k: verify}, share * target, 0.0),
        replies=Replies(prefill=prefill["baseline"], tokens=_length(plain[level])),
        draft_prefill=0.0,
        spread=max(steps) / min(steps),
    )


def _plain_step(load: Load, level: int) -> float:
    gaps = _alone(load, level) or [gap for reply in load.replies for gap in _gaps(reply)]
    tokens = sum(gap.tokens for gap in gaps)
    if not tokens:
        raise UserError("payoff: expected replies of several tokens to time steps on, found none; raise --max-tokens")
    return sum(gap.end - gap.begin for gap in gaps) / tokens


def _draft_step(load: Load, level: int, shown: str) -> float:
    if not load.drafts:
        raise UserError(f"{shown}: drafted nothing in a round, so its steps cannot be timed")
    tokens = sum(gap.tokens for reply in load.replies for gap in _gaps(reply))
    return _plain_step(load, level) * tokens / load.drafts


@dataclass(frozen=True, slots=True)
class _Gap:
    """From one part of a reply to the next, on this process' clock, and the tokens that came with the next."""

    begin: float
    end: float
    tokens: int


def _gaps(reply: Streamed) -> list[_Gap]:
    return [_Gap(reply.sent + before.at, reply.sent + part.at, len(part.ids)) for before, part in pairwise(reply.parts)]


def _alone(load: Load, level: int) -> list[_Gap]:
    """The gaps in which the batch was full and no prompt waited or was read; none where they hold too few tokens."""
    reading = sorted((reply.sent, reply.sent + reply.first_token) for reply in load.replies)
    begins = [begin for begin, _ in reading]
    read_until = list(accumulate((end for _, end in reading), max))
    ends = (reply.sent + reply.seconds for reply in load.replies)
    emptying = min(end for end in ends if end > begins[-1])  # nothing is asked any more, so the batch gets smaller
    found = []
    for gap in (gap for reply in load.replies for gap in _gaps(reply)):
        asked = bisect_left(begins, gap.end)
        if read_until[asked - 1] <= gap.begin and gap.end <= emptying:
            found.append(gap)
    return found if sum(gap.tokens for gap in found) >= FEW_TOKENS * level else []


def _length(loads: Sequence[Load]) -> float:
    return statistics.mean(load.tokens / len(load.replies) for load in loads)


def _first(load: Load) -> float:
    """Seconds to the first token, one request at a time; not the first one's, for which an idle engine takes longer."""
    return statistics.mean(reply.first_token for reply in load.replies[1:])


def _typed(flag: str, values: Sequence[str]) -> dict[int, float]:
    found: dict[int, float] = {}
    for value in values:
        level, colon, milliseconds = value.rpartition(":")
        try:
            number, seconds = int(level) if colon else 1, float(milliseconds) / 1000
        except ValueError:
            raise UserError(f"{flag} {value}: expected CONCURRENCY:MILLISECONDS, e.g. 16:24.5") from None
        if number in found:
            raise UserError(f"{flag} {value}: expected one value per concurrency, found two for {number}; give one")
        found[number] = seconds
    if not all(0 < seconds < float("inf") for seconds in found.values()) or any(number < 1 for number in found):
        raise UserError(f"{flag}: expected a concurrency of 1 or more and milliseconds above 0, found {values}")
    return found
