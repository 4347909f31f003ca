"""`draftsmith payoff`: acceptance and step times of a run, put together, and written to `RUN/measure/payoff.json`.

Acceptance comes from the reference measurement, or is assumed (before a draft exists: what must it reach?). No engine
is started here and no model is loaded; with servers it asks a few prompts to time their steps.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from draftsmith.artifacts import MANIFEST, locked, read_json, room_on_disk, write_json
from draftsmith.errors import UserError
from draftsmith.measure.payoff import Payoff, StepTimes, payoff, whole_speedup
from draftsmith.measure.served import draft_fingerprint
from draftsmith.measure.steptimes import Level, Measured, draft_share, reference_steps, served_steps, typed_steps
from draftsmith.progress import EVENTS, Progress
from draftsmith.recipe import PayoffSettings

PAYOFF = "payoff.json"
OF_SERVERS = ("concurrency", "draft_share", "questions", "max_tokens", "rounds", "model")
"""Settings that mean something only where steps are timed on servers."""
BIGGER_SHARE = 1 / 32
"""A draft step on a bigger target: one layer of 32 (an 8B model's), its head reduced."""


def work_out(run: Path, settings: PayoffSettings, progress: Progress) -> dict[str, Any]:
    """Works out the payoff and writes `RUN/measure/payoff.json`.

    Returns:
        The result, as written.

    Raises:
        UserError: no acceptance and none assumed, no step times, or a server that is not usable.
    """
    result = _result(run)
    acceptance = settings.acceptance or _measured_acceptance(run, result)
    known = _known_steps(run, settings, result)
    with locked(run), room_on_disk(run):
        progress.events = run / EVENTS
        with progress.command("payoff"):
            share = _share(run) if settings.draft_share is None else settings.draft_share
            measured = known or served_steps(run, settings, share, progress)
        depths = {k for level in measured.levels for k in level.times.with_draft}
        ks = sorted({*range(1, settings.draft_tokens_up_to + 1), *depths})
        tokens = result["generated_tokens"] / result["questions"] if result else None
        table = payoff(acceptance, measured.times, ks, assumed=bool(settings.acceptance))
        found = {
            **table.to_json(),
            "acceptance_from": "assumed" if settings.acceptance else "the reference decoder",
            "steps_from": measured.source,
            "levels": [_level(level, table, tokens) for level in measured.levels],
            "bigger_target": bigger_target(acceptance, ks),
            "cautions": list(measured.cautions),
            "draft": draft_fingerprint(run),
            "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        (run / "measure").mkdir(exist_ok=True)
        write_json(run / "measure" / PAYOFF, found)
        return found


def bigger_target(acceptance: list[float], ks: list[int]) -> str:
    """What the same acceptance would gain where checking k+1 tokens costs no more than one, as at small batches on a
    GPU, whose time goes into reading the weights."""
    ideal = StepTimes(concurrency=1, target=1.0, with_draft={k: 1 + k * BIGGER_SHARE for k in ks})
    best = payoff(acceptance, [ideal], ks).best(1)
    return (
        f"On a bigger target (checking k+1 tokens costs no more than one, a draft step {BIGGER_SHARE:.0%} of a plain "
        f"one) the same acceptance would make one request {best.speedup:.2f} times as fast, with k = "
        f"{best.draft_tokens}."
    )


def payoff_table(found: dict[str, Any]) -> Table:
    """Speed-ups: a row per k, a column per concurrency."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    levels = sorted({cell["concurrency"] for cell in found["cells"]})
    table.add_column("draft tokens")
    for level in levels:
        table.add_column(f"{level} at a time", justify="right")
    for k in sorted({cell["draft_tokens"] for cell in found["cells"]}):
        cells = {cell["concurrency"]: cell for cell in found["cells"] if cell["draft_tokens"] == k}
        marks = ["*" if found["best"][str(level)] == k else " " for level in levels]
        table.add_row(
            str(k), *(f"{cells[level]['speedup']:.2f}x{mark}" for level, mark in zip(levels, marks, strict=True))
        )
    return table


def _known_steps(run: Path, settings: PayoffSettings, result: dict[str, Any] | None) -> Measured | None:
    """Those that need no server; None: they are to be measured on one."""
    served, typed = settings.server or settings.baseline_server, settings.target_ms or settings.verify_ms
    unused = [] if served else [name for name in OF_SERVERS if name in settings.model_fields_set]
    if unused:
        raise UserError(
            f"payoff: --{unused[0].replace('_', '-')} says how servers are timed: expected --baseline-server beside "
            "it, found none"
        )
    if served and (typed or settings.draft_ms):
        raise UserError("payoff: expected step times of servers or typed in (--target-ms, ...), found both; give one")
    if served:
        return None
    if typed or settings.draft_ms:
        return typed_steps(settings)
    if result is None:
        raise UserError(
            f"{run}: expected step times: --baseline-server (and --server), or --target-ms, --verify-ms and "
            "--draft-ms, or a measured run; found none"
        )
    return reference_steps(result)


def _level(level: Level, table: Payoff, tokens: float | None) -> dict[str, Any]:
    """What was timed, and its prediction for whole replies: of `tokens` each, where the run knows how long they are."""
    times = level.times
    depth = max(times.with_draft)
    cell = next(c for c in table.cells if (c.concurrency, c.draft_tokens) == (times.concurrency, depth))
    replies = level.replies and replace(level.replies, tokens=tokens or level.replies.tokens)
    whole = replies and whole_speedup(cell, times, replies, level.draft_prefill)
    return {
        "concurrency": times.concurrency,
        "target_seconds": times.target,
        "draft_tokens": depth,
        "step_seconds": times.step(depth),
        "spread": level.spread,
        "prefill_seconds": replies and replies.prefill,
        "tokens_per_reply": replies and replies.tokens,
        "speedup": cell.speedup,
        "whole_reply_speedup": whole,
    }


def _result(run: Path) -> dict[str, Any] | None:
    if not (run / "measure" / MANIFEST).exists():
        return None
    found: dict[str, Any] = read_json(run / "measure" / "result.json")
    return found


def _measured_acceptance(run: Path, result: dict[str, Any] | None) -> list[float]:
    rates = [rate for rate in (result or {}).get("acceptance_per_position", []) if rate is not None]
    if not rates:
        raise UserError(
            f"{run}: expected a measured run, or --acceptance (a share, repeated for later positions) to assume; found "
            "neither"
        )
    return rates


def _share(run: Path) -> float | None:
    target, draft = run / "hidden" / "target.json", run / "draft" / "best" / "config.json"
    if not (target.exists() and draft.exists()):
        return None
    return draft_share(read_json(target)["config"], read_json(draft))
