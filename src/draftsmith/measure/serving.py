"""The served truth of a run in one go: start its engines, predict, measure, and hold everything beside the reference.

Two engines run side by side, one with the draft and one without. In this order: step times on a few prompts and the
payoff they predict; all of `measure`'s prompts once through both (outputs, acceptance by the engine's own counters,
beside what the reference decoder accepted on the same prompts); then the timed rounds. With llama.cpp, which shows what
it drafts, its candidates are compared with our own draft's, because acceptance alone does not prove an export. Writes
`RUN/measure/serving.json` beside `served.json` and `payoff.json`; done again only when something behind it has changed.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from draftsmith.artifacts import locked, read_json, write_json
from draftsmith.errors import UserError
from draftsmith.interrupts import abandon, stopping
from draftsmith.measure.acceptance import Cycle, acceptance, unconditional
from draftsmith.measure.paying import work_out
from draftsmith.measure.served import measure_served
from draftsmith.measure.serving_view import POINTS, SERVING, serving_plan
from draftsmith.measure.steptimes import PER_REQUEST
from draftsmith.progress import Progress
from draftsmith.recipe import MeasureSettings, PayoffSettings, ServedSettings, ServeSettings, ServingSettings
from draftsmith.serve.commands import Launch, launch_of, log_name
from draftsmith.serve.process import running

CANDIDATES = 0.95
"""Share of positions at which an engine must draft what our own draft does."""
CANDIDATE_PROMPTS = 4
START_SECONDS = 1800.0


def serve_and_measure(
    run: Path, settings: ServingSettings, measure: MeasureSettings, progress: Progress
) -> dict[str, Any]:
    """Measures the run's draft in its engine; returns `serving.json`, as written.

    Raises:
        UserError: nothing exported for that engine, more requests at a time than questions, or what `measure_served`
            and `work_out` refuse.
        DraftsmithError: an engine does not start.
    """
    plan = serving_plan(run, settings, measure)
    most, there = max(settings.concurrency), len(_rows(run))
    if most > there:
        raise UserError(
            f"serving.concurrency {most}: expected no more than the {there} questions that were measured (the batch "
            "would not be full); raise measure.limit, or serve fewer at a time"
        )
    with _engines(run, settings, measure.draft_tokens, most, progress) as (draft, baseline):
        servers = {"server": draft.url, "baseline_server": baseline.url, "concurrency": settings.concurrency}
        # Its numbers are a prediction: nothing of the measurement below is known yet.
        timing = {"rounds": settings.rounds, "questions": measure.questions, "draft_tokens": measure.draft_tokens}
        predicted = work_out(run, PayoffSettings(**servers, **timing), progress)
        everything = measure.model_copy(update={"rounds": 1})
        whole = measure_served(run, everything, ServedSettings(**servers | {"concurrency": [most]}), progress)
        served = whole
        limit = min(max(settings.limit, PER_REQUEST * most), there)
        once = settings.rounds == 1 and limit == there  # then that was a timed round already
        left = [level for level in settings.concurrency if not (once and level == most)]
        if left:
            timed = measure.model_copy(update={"rounds": settings.rounds, "limit": limit})
            served = measure_served(run, timed, ServedSettings(**servers | {"concurrency": left}), progress)
    found = {
        "plan": plan,
        "engine": draft.engine,
        "draft": served["draft"],
        "acceptance": _agreement(_rows(run), _at(whole, [most])[0], measure.draft_tokens),
        "lossless": whole["lossless"],
        "compared": whole["compared"],
        "different": whole["different"],
        "differences": whole["differences"],
        "predictions": _predictions(predicted, _at(served, settings.concurrency)),
        "candidates": _candidates(run, draft, measure, progress) if draft.engine == "llamacpp" else None,
        "levels": _at(served, settings.concurrency),
        "cautions": served["cautions"],
        "bigger_target": predicted["bigger_target"],
        "payoff": predicted["words"],
    }
    with locked(run):
        write_json(run / "measure" / SERVING, found)
    return found


@contextmanager
def _engines(
    run: Path, settings: ServingSettings, draft_tokens: int, most: int, progress: Progress
) -> Iterator[tuple[Launch, Launch]]:
    """The engine with the draft and without, on free ports, for as long as the block runs."""
    asked = ServeSettings(
        engine=settings.engine,
        draft_tokens=draft_tokens,
        parallel=most,
        context=settings.context,
        dtype=settings.dtype,
        python=settings.python,
    )
    draft, baseline = (
        launch_of(run, asked.model_copy(update={"baseline": alone, "port": _free_port()}), settings.extra)
        for alone in (False, True)
    )
    # A signal must end the engines too, so it is an exception here, wherever it comes.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}  # one engine at a time works, the other must not spin
    with (
        stopping(abandon),
        running(draft, run / log_name(draft), progress, START_SECONDS, environment=environment),
        running(baseline, run / log_name(baseline), progress, START_SECONDS, environment=environment),
    ):
        progress.say(f"serving: {settings.engine} with the draft at {draft.url}, without it at {baseline.url}")
        yield draft, baseline


def _at(served: dict[str, Any], concurrency: Sequence[int]) -> list[dict[str, Any]]:
    """The levels measured now; a result also keeps those of earlier measurements that asked the same."""
    return [level for level in served["levels"] if level["concurrency"] in concurrency]


def _agreement(rows: Sequence[dict[str, Any]], level: dict[str, Any], draft_tokens: int) -> dict[str, Any]:
    """The engine's counters beside the reference decoder's, both over every reply and as shares of all drafts.

    Without counters per position (SGLang) nothing is held against the reference.
    """
    served = level["acceptance_per_position_unconditional"]
    cycles = [Cycle(**cycle) for row in rows for cycle in row["cycles"]]
    reference = unconditional(acceptance(cycles, draft_tokens).per_position)
    # llama.cpp counts no position of which nothing was ever accepted.
    pairs = list(zip_longest(served, reference, fillvalue=0.0)) if served else []
    off = max((abs(one - two) for one, two in pairs), default=None)
    return {
        "served": [one for one, _ in pairs],
        "reference": [round(share, 4) for share in reference],
        "questions": len(rows),
        "agrees": None if off is None else off <= POINTS,
        "largest_difference": None if off is None else round(off, 4),
    }


def _predictions(predicted: dict[str, Any], levels: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was predicted for whole replies beside what was measured, per concurrency."""
    ahead = {level["concurrency"]: level["whole_reply_speedup"] for level in predicted["levels"]}
    return [
        {
            "concurrency": level["concurrency"],
            "predicted": round(ahead[level["concurrency"]], 4),
            "measured": level["speedup"],
            "off": round(ahead[level["concurrency"]] / level["speedup"] - 1, 4),
        }
        for level in levels
    ]


def _candidates(run: Path, draft: Launch, measure: MeasureSettings, progress: Progress) -> dict[str, Any] | None:
    """llama.cpp's candidates beside our draft's, over a few prompts, one at a time; None where it drafted nothing."""
    import torch

    from draftsmith.draft.checkpoint import load_draft
    from draftsmith.hidden.target_head import load_target_head
    from draftsmith.measure.candidates import Alike, alike, ask, by_reply, read_drafted, reference_chains
    from draftsmith.measure.decode import Verifier
    from draftsmith.serve.llamacpp import SHOWS_CANDIDATES
    from draftsmith.target.embedded import resolve_model
    from draftsmith.target.loading import load_model

    rows = [row for row in _rows(run) if row["cycles"]][:CANDIDATE_PROMPTS]
    prompts = _prompts(run, [row["key"] for row in rows], measure)
    log = run / "serve-llamacpp-candidates.log"
    extra = (*draft.extra, "--exact", "--log-level", str(SHOWS_CANDIDATES))
    one_slot = replace(draft, parallel=1, port=_free_port(), extra=extra)
    with stopping(abandon), running(one_slot, log, progress, START_SECONDS):
        replies = [ask(one_slot.url, ids, len(row["ids"])) for ids, row in zip(prompts, rows, strict=True)]
    with open(log, encoding="utf-8", errors="replace") as lines:
        drafted = by_reply(read_drafted(lines), replies)
    log.unlink()
    cpu = torch.device("cpu")
    ours = load_draft(run / "draft" / "best", load_target_head(run / "hidden"), cpu, torch.float32)
    model = load_model(resolve_model(read_json(run / "hidden" / "target.json")["name"], progress), torch.float32, cpu)
    verifier = Verifier(model, ours.config.aux_layers)
    total = Alike()
    for ids, reply, theirs in zip(prompts, replies, drafted, strict=True):
        if theirs:
            chains = reference_chains(verifier, ours, [*ids, *reply["tokens"]], theirs)
            total = sum(map(alike, (one.chain for one in theirs), chains), total)
    verifier.close()
    if not total.positions:
        return None
    return {"positions": total.positions, "share": round(total.share, 4), "agrees": total.share >= CANDIDATES}


def _prompts(run: Path, keys: Sequence[str], measure: MeasureSettings) -> list[list[int]]:
    from draftsmith.measure.served_bench import set_up

    found = {prompt.key: list(prompt.ids) for prompt in set_up(run, measure, ()).prompts}
    return [found[key] for key in keys]


def _rows(run: Path) -> list[dict[str, Any]]:
    lines = (run / "measure" / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
