"""The draft as an engine serves it: speed, times, acceptance and outputs beside the same target without it.

Both servers are asked the same prompts (as ids) with the same sampling, round by round in turn (draft, baseline,
baseline, draft, ...), at each concurrency asked for. Where only one server is up, its rounds are kept and paired with
the other's when that was measured, if both were asked the same; the result says that they were not interleaved. Writes
`RUN/measure/served.json` and the rounds behind it. Needs the run's traces, no weights and no GPU of its own; costs a
warm-up and 2 x rounds x prompts replies per concurrency. What is measured is written after each concurrency.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from draftsmith.artifacts import MANIFEST, locked, manifest, read_json, room_on_disk, write_json
from draftsmith.errors import UserError
from draftsmith.measure.acceptance import verdict
from draftsmith.measure.load import Load, Server, run_load
from draftsmith.measure.served_bench import Bench, set_up
from draftsmith.measure.served_checks import check, connect
from draftsmith.measure.served_result import compare, level
from draftsmith.measure.served_rounds import ROUNDS, Answer, Kept, Round, Side, depth, read_kept, round_of, write_kept
from draftsmith.progress import EVENTS, Progress
from draftsmith.recipe import MeasureSettings, ServedSettings
from draftsmith.target.thinking import split
from draftsmith.target.transport import Transport
from draftsmith.trace import Span

SERVED = "served.json"
EVEN = 0.03
"""Speed-ups within this of 1.0 are called no difference."""


def measure_served(run: Path, settings: MeasureSettings, served: ServedSettings, progress: Progress) -> dict[str, Any]:
    """Measures the servers and writes `RUN/measure/served.json`.

    Returns:
        The result, as written.

    Raises:
        UserError: no server, nothing to measure on, or a server that is not what it is taken for.
    """
    with locked(run), room_on_disk(run):
        progress.events = run / EVENTS
        with progress.command("measure"):
            return asyncio.run(_measure(run, settings, served, progress))


async def _measure(run: Path, settings: MeasureSettings, served: ServedSettings, progress: Progress) -> dict[str, Any]:
    urls = {"draft": served.server, "baseline": served.baseline_server}
    async with AsyncExitStack() as stack:
        servers: dict[str, Server] = {}
        contexts = []
        for side, url in urls.items():
            if url is None:
                continue
            # Connections of their own: between rounds a server closes idle ones, and a request on those would be lost.
            transport = await stack.enter_async_context(Transport(served.api_key_env, kept=False))
            servers[side], context = await connect(side, url, served.model, transport, served.api_key_env)
            contexts += [context] if context else []
        bench = set_up(run, settings, contexts)
        _refuse_starved(bench, served.concurrency)
        kept = read_kept(run / "measure", bench.plan, draft_fingerprint(run))
        if len(servers) == 1 and not kept.sides and (run / "measure" / ROUNDS).exists():
            progress.say(
                "measure: what was kept was asked otherwise (prompts, sampling or --max-tokens), so it is replaced"
            )
        for side, server in servers.items():
            cautions = await check(server, bench, progress.say)
            levels = _still_of(kept.sides.get(side), server, progress.say)
            kept.sides[side] = Side(
                server.endpoint.shown, server.engine, server.version, server.model, cautions, levels
            )
        result: dict[str, Any] = {}
        session = uuid.uuid4().hex[:8]
        replies = len(bench.prompts) * settings.rounds * len(servers) * len(served.concurrency)
        with progress.track("measure served", replies, "replies") as tracker:
            for concurrency in served.concurrency:
                rounds = await _rounds(
                    servers, bench, concurrency, settings.rounds, lambda: tracker.update(tracker.done + 1)
                )
                for side, loads in rounds.items():
                    found = [round_of(load, servers[side], session) for load in loads]
                    kept.sides[side].levels[concurrency] = found
                result = _result(kept, bench)
                write_kept(run / "measure", kept)
                write_json(run / "measure" / SERVED, result)
                _tell(next(one for one in result["levels"] if one["concurrency"] == concurrency), progress)
        progress.say(f"measure: {result['verdict']}")
        return result


async def _rounds(
    servers: dict[str, Server], bench: Bench, concurrency: int, count: int, tick: Callable[[], None]
) -> dict[str, list[Load]]:
    """`count` rounds on each server, in turn; the order turns round by round, so that drift hits both alike."""
    found: dict[str, list[Load]] = {side: [] for side in servers}
    for number in range(count):
        for side in list(servers) if number % 2 == 0 else list(servers)[::-1]:
            server = servers[side]
            found[side].append(
                await run_load(server, bench.prompts, bench.samplings, bench.stop_ids, concurrency, tick)
            )
    return found


def _result(kept: Kept, bench: Bench) -> dict[str, Any]:
    draft, baseline = kept.sides.get("draft"), kept.sides.get("baseline")
    levels: dict[int, tuple[Sequence[Round], Sequence[Round]]] = {}
    for concurrency in sorted({number for side in kept.sides.values() for number in side.levels}):
        levels[concurrency] = (_of(draft, concurrency), _of(baseline, concurrency))
    drafting = [one for rounds, _ in levels.values() for one in rounds]
    draft_tokens = depth(drafting)
    spans = _splitter(bench)
    rows = [level(number, *sides, draft_tokens, spans) for number, sides in levels.items()]
    greedy = bench.sampling["temperature"] == 0
    same = compare(levels if greedy else {}, bench.template.decode)
    return {
        "verdict": _verdict(rows, _two_engines(kept)),
        "engine": draft.engine if draft else None,
        "version": draft.version if draft else None,
        "same_engine": _two_engines(kept) is None if draft and baseline else None,
        "draft_tokens": draft_tokens or None,
        "levels": rows,
        **same,
        "questions": len(bench.prompts),
        "prompts": bench.source.source,
        "left_out": {
            "in_training": bench.source.trained,
            "no_room": len(bench.source.prompts) - len(bench.prompts),
        },
        "thinking": bench.delimiters is not None,
        "ends_at": "stop ids",
        "sampling": bench.sampling,
        "servers": {
            name: {"url": side.url, "engine": side.engine, "version": side.version, "model": side.model}
            for name, side in kept.sides.items()
        },
        "cautions": _cautions(kept, rows, same),
        "reference": _reference(bench.run, draft_tokens),
        "draft": kept.draft,
        "plan": kept.plan,
        "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _still_of(side: Side | None, server: Server, say: Callable[[str], object]) -> dict[int, list[Round]]:
    """A side's earlier rounds, unless they are of another server than the one that is connected now."""
    if side is None or not side.levels:
        return {}
    then, now = (side.engine, side.version, side.model), (server.engine, server.version, server.model)
    if then == now:
        return side.levels
    say(
        f"measure: {server.endpoint.shown}: expected the {server.side}'s earlier server ({_words(*then)}), found "
        f"another ({_words(*now)}); its earlier rounds are dropped, so measure every --concurrency again"
    )
    return {}


def _words(*names: str) -> str:
    return " ".join(filter(None, names))


def _two_engines(kept: Kept) -> tuple[str, str] | None:
    """The draft's engine and the baseline's, where they are not the same one in the same version."""
    draft, baseline = kept.sides.get("draft"), kept.sides.get("baseline")
    if draft is None or baseline is None or (draft.engine, draft.version) == (baseline.engine, baseline.version):
        return None
    return _words(draft.engine, draft.version), _words(baseline.engine, baseline.version)


def _of(side: Side | None, concurrency: int) -> list[Round]:
    return side.levels.get(concurrency, []) if side else []


def _splitter(bench: Bench) -> Callable[[Answer], tuple[Span | None, Span | None]]:
    prompts = {prompt.key: prompt.ids for prompt in bench.prompts}

    def spans(answer: Answer) -> tuple[Span | None, Span | None]:
        found = split(bench.delimiters, bench.template, prompts[answer.key], answer.ids, answer.finish_reason)
        return found.reasoning, found.answer

    return spans


def _verdict(rows: list[dict[str, Any]], engines: tuple[str, str] | None) -> str:
    """What the draft does, in a sentence for acceptance and one for speed. `engines`: where they are two."""
    drafted = [row for row in rows if row.get("replies")]  # counted of the draft's rounds only
    if not drafted:
        return "only the baseline is measured; measure --server with the draft to compare"
    first = drafted[0]
    said = verdict(first["acceptance_length"], first["acceptance_per_position"], first["degenerate"], first["replies"])
    pairs = [row for row in rows if row["speedup"] is not None]
    if not pairs:
        return f"{said}; no baseline yet: measure --baseline-server to know the speed-up"
    speeds = ", ".join(map(_speed, pairs))
    if engines:
        return (
            f"{said}; speed-up {speeds} at a time, but the two engines differ ({engines[0]} with the draft, "
            f"{engines[1]} without), so what the draft gains is not known; measure --baseline-server on {engines[0]}"
        )
    pays = [row["concurrency"] for row in pairs if row["speedup"] > 1 + EVEN]
    if len(pays) == len(pairs):
        words = "it pays off"
    elif pays:
        words = f"it pays off at {', '.join(map(str, pays))} only"
    elif all(abs(row["speedup"] - 1) <= EVEN for row in pairs):
        words = "it makes no difference on this server"
    else:
        words = "it does not pay off on this server"
    return f"{said}; speed-up {speeds} at a time: {words}"


def _speed(row: dict[str, Any]) -> str:
    """With its spread, where the rounds do not agree on which server is faster."""
    least, most = row["speedup_spread"] or (row["speedup"],) * 2
    spread = f" (rounds from {least:.2f} to {most:.2f})" if least < 1 < most else ""
    return f"{row['speedup']:.2f}x{spread} with {row['concurrency']}"


def _cautions(kept: Kept, rows: list[dict[str, Any]], same: dict[str, Any]) -> list[str]:
    found = [caution for side in kept.sides.values() for caution in side.cautions]
    engines = _two_engines(kept)
    if engines and any(row["speedup"] is not None for row in rows):
        found.append(
            f"expected the same engine on both servers, found {engines[0]} with the draft and {engines[1]} without: "
            f"every speed-up is also that of one engine over the other; measure --baseline-server on {engines[0]}"
        )
    for row in rows:
        number = row["concurrency"]
        if row["disturbed"]:
            found.append(
                f"at {number}: the servers generated {row['foreign_tokens']:,} tokens for others meanwhile, so speed "
                "and counters are not of this measurement alone; measure again on servers of your own"
            )
        if row["speedup"] is not None and not row["interleaved"]:
            found.append(f"at {number}: both sides were measured apart, so drift of the machine is in the speed-up")
        if row.get("degenerate"):
            counted = row["acceptance_from"] == "counters" and row["acceptance_length"] is not None
            where = (
                "they are in the acceptance, which only the engine's counters tell, and in the speed"
                if counted
                else "left out of the acceptance, not of the speed"
            )
            found.append(
                f"at {number}: {row['degenerate']} of {row['replies']} replies only repeat themselves: {where}"
            )
    if same["different"]:
        again = same["baseline_repeats_itself"]
        own = "" if again is None else f"; the baseline repeats {again:.0%} of its own replies"
        found.append(
            f"{same['different']} of {same['compared']} greedy replies differ between the servers{own} (in 16-bit "
            "types exact ties between logits fall either way; compare in float32)"
        )
    return found


def _reference(run: Path, draft_tokens: int) -> dict[str, Any] | None:
    """What the reference decoder measured with as many draft tokens, to hold beside; None where there is none."""
    if not (run / "measure" / MANIFEST).exists():
        return None
    result = read_json(run / "measure" / "result.json")
    if result["draft_tokens"] != draft_tokens:
        return None
    return {name: result[name] for name in ("acceptance_length", "acceptance_per_position", "speedup", "prompts")}


def draft_fingerprint(run: Path) -> str:
    """Of the run's draft; "" where it has none."""
    return str(manifest(run, "draft")["fingerprint"]) if (run / "draft" / MANIFEST).exists() else ""


def _refuse_starved(bench: Bench, levels: list[int]) -> None:
    most = max(levels)
    if most > len(bench.prompts):
        raise UserError(
            f"--concurrency {most}: expected at least as many questions, found {len(bench.prompts)}; raise --limit "
            "(or give more --questions), or measure fewer at a time"
        )


def _tell(row: dict[str, Any], progress: Progress) -> None:
    progress.event("measured served", **{name: value for name, value in row.items() if name != "rounds"})
    parts = [f"{row['concurrency']} at a time"]
    for name, words in (("tokens_per_second", "with the draft"), ("baseline_tokens_per_second", "without")):
        if row[name] is not None:
            parts.append(f"{row[name]:.1f} tok/s {words}")
    if row["speedup"] is not None:
        parts.append(f"{row['speedup']:.2f}x")
    if row["acceptance_length"] is not None:
        parts.append(f"acceptance length {row['acceptance_length']:.2f}")
    progress.say("measure: " + ", ".join(parts))
