"""The capture stage: every question to the target, every reply into the journal, the journal into Parquet.

Two loops drive the same `Capture`: one keeps requests in flight at servers, one feeds the target in this process. Each
reply is journaled as it comes, so a kill at any moment costs only what is in flight. Traces are sealed in input order,
whatever order the replies came in. Memory does not grow with the run but for some 100 bytes per question.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith import artifacts
from draftsmith.capture.attempt import TARGET, WARNED, Attempt
from draftsmith.capture.gathering import gather
from draftsmith.capture.inprocess import run_local
from draftsmith.capture.journal import JOURNAL, Journal, restore
from draftsmith.capture.planning import Plan
from draftsmith.capture.records import STATES
from draftsmith.capture.room import until_room
from draftsmith.capture.sealing import (
    SCRATCH,
    parts_no_longer_asked,
    reason_class,
    seal,
    sealed_ids,
    sealed_parts,
    summary,
    tidy,
)
from draftsmith.capture.segments import SegmentDamaged
from draftsmith.capture.serving import run_server
from draftsmith.capture.writing import FULL
from draftsmith.errors import UserError
from draftsmith.progress import Progress
from draftsmith.recipe import CaptureSettings
from draftsmith.trace import TRAINABLE, read_metadata

KEPT = frozenset(STATES) - {"failed"}
"""States of finished traces that a capture of a further choice of questions takes over."""


def build(stage: artifacts.Stage, settings: CaptureSettings, progress: Progress) -> dict[str, Any]:
    """Makes `traces/` from the questions, going on from the journal an interrupted attempt left.

    The target is not needed any more once every generation has its final record.

    Raises:
        UserError: unusable questions, target or settings, or not one trainable trace.
        GateStop: the first replies show that the rest would be worthless; what was captured is kept.
        Interrupted: SIGINT or SIGTERM; replies in flight were waited for, or abandoned at the second signal.
    """
    pa.set_memory_pool(pa.system_memory_pool())  # the default one keeps what sealing frees
    plan = Plan(settings)
    if not plan.generations:
        raise UserError(f"{settings.questions}: expected conversations in which somebody asks something, found none")
    if plan.unusable:
        progress.say(f"capture: {plan.unusable:,} of {len(plan):,} rows cannot be asked; each is recorded as failed")
    tidy(stage.work)
    parts = sealed_parts(stage.work)
    if not parts or not _seals(parts, plan):
        _keep_finished(stage, progress)
        with Journal(stage.work, plan.generations) as journal:
            _say_repairs(journal, progress)
            parts = _captured(Attempt(stage=stage, settings=settings, progress=progress, plan=plan, journal=journal))
    (stage.work / TARGET).unlink(missing_ok=True)
    removed = sum(pq.read_metadata(part).num_rows for part in parts_no_longer_asked(stage.work))
    warned = read_metadata(stage.work).get(WARNED)
    return {**summary(parts), "no_longer_asked": removed, **({WARNED: json.loads(warned)} if warned else {})}


def _captured(attempt: Attempt) -> list[Path]:
    """Asks for what is not there yet, then seals; what proves unreadable while sealing is asked again."""
    stage, settings, progress, journal = attempt.stage, attempt.settings, attempt.progress, attempt.journal
    while True:
        if (stage.work / TARGET).exists() and all(map(journal.final, attempt.plan.order())):
            progress.say(f"capture: all {attempt.plan.generations:,} replies are there, nothing is asked")
        else:
            run = run_local if settings.local else run_server
            run(attempt)
        if not any(journal.state(id) in TRAINABLE for id in attempt.plan.order()):
            raise UserError(_nothing_to_train_on(attempt))
        try:
            return seal(journal, attempt.plan.order(), artifacts.read_json(stage.work / TARGET) | _chosen(settings))
        except SegmentDamaged as damage:
            count = journal.forget(damage.segment, damage.rows)
            progress.say(f"capture: {damage} damaged; {count:,} questions are asked again")
        except OSError as error:
            if error.errno not in FULL:
                raise
            until_room(stage.work, journal.disk_bytes(), progress)


def _seals(parts: list[Path], plan: Plan) -> bool:
    """Whether the parts hold what is asked for, in its order."""
    rows = sum(pq.read_metadata(part).num_rows for part in parts)
    return rows == plan.generations and all(a == b for a, b in zip(sealed_ids(parts), plan.order(), strict=True))


def _keep_finished(stage: artifacts.Stage, progress: Progress) -> None:
    """Starts the journal with what an earlier choice of questions was answered, here or in the folder to be replaced.

    Questions keep their keys, so whatever is asked again is found there; failed traces are given another chance.
    """
    earlier = stage.work if sealed_parts(stage.work) else stage.replaces
    if (stage.work / JOURNAL).exists() or earlier is None:
        return
    artifacts.write_json(stage.work / TARGET, read_metadata(earlier))
    count = restore(stage.work, [*parts_no_longer_asked(earlier), *sorted(earlier.glob("*.parquet"))], KEPT)
    progress.say(f"capture: starting from {count:,} finished traces of {earlier}; only what is new to it is asked")


def _chosen(settings: CaptureSettings) -> dict[str, str]:
    """What the file metadata says of the settings alone: some may have changed since the target was asked."""
    sampling = {name: getattr(settings, name) for name in ("temperature", "top_p", "top_k", "seed", "samples")}
    return {
        "held_out": str(settings.held_out),
        "max_tokens": str(settings.max_tokens),
        "sampling": json.dumps(sampling),
    }


def _say_repairs(journal: Journal, progress: Progress) -> None:
    if journal.torn:
        progress.say(f"{journal.path}: the last record was cut off by a crash; it is asked again")
    if journal.damaged:
        progress.say(f"{journal.path}: {journal.damaged} damaged records; their questions are asked again")
    for path in journal.set_aside:
        progress.say(f"{path}: a damaged file, set aside; its questions are asked again")


def _nothing_to_train_on(attempt: Attempt) -> str:
    """The message; everything is marked for another try, because the next run must not find it all settled."""
    journal = attempt.journal
    reasons: Counter[str] = Counter()
    for table in gather(journal, journal.numbers_of(attempt.plan.order()), attempt.stage.work / SCRATCH):
        reasons.update(map(reason_class, table["error"].to_pylist()))
    journal.ask_all_again()
    reason, count = reasons.most_common(1)[0]
    return (
        f"capture: none of {attempt.plan.generations:,} replies can be trained on; {count:,} of them: "
        f"{reason or 'no reason given'}; they are kept in {attempt.stage.work}: correct this and run the same command "
        "again"
    )
