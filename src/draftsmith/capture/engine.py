"""The capture stage: every question to the target, every reply into the journal, the journal into Parquet.

Two loops drive the same `Capture`: one keeps `concurrency` requests in flight at a server, one feeds the target in this
process. Each reply is journaled as it comes, so a kill at any moment costs only what is in flight. Traces are sealed in
input order, whatever order the replies came in.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from draftsmith import artifacts
from draftsmith.capture.attempt import TARGET, Attempt
from draftsmith.capture.conversation import turns_of
from draftsmith.capture.inprocess import run_local
from draftsmith.capture.journal import JOURNAL, Journal, restore
from draftsmith.capture.questions import read_questions
from draftsmith.capture.rows import Question
from draftsmith.capture.sealing import (
    STATES,
    reason_class,
    seal,
    sealed_ids,
    sealed_parts,
    summary,
)
from draftsmith.capture.serving import run_server
from draftsmith.errors import UserError
from draftsmith.progress import Progress
from draftsmith.recipe import CaptureSettings
from draftsmith.trace import TRAINABLE, read_metadata, read_traces, trace_id

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
    questions = read_questions(settings)
    order = _order(questions, settings)
    if not order:
        raise UserError(f"{settings.questions}: expected conversations in which somebody asks something, found none")
    parts = sealed_parts(stage.work)
    if not parts or sealed_ids(parts) != order:
        _keep_finished(stage, progress)
        with Journal(stage.work) as journal:
            _say_repairs(journal, progress)
            if (stage.work / TARGET).exists() and all(map(journal.final, order)):
                progress.say(f"capture: all {len(order):,} replies are there, nothing is asked")
            else:
                run = run_local if settings.local else run_server
                run(
                    Attempt(
                        stage=stage,
                        settings=settings,
                        progress=progress,
                        questions=questions,
                        order=order,
                        journal=journal,
                    )
                )
            if not any(journal.index[id].state in TRAINABLE for id in order):
                raise UserError(_nothing_to_train_on(journal, order))
            parts = seal(journal, order, artifacts.read_json(stage.work / TARGET) | _chosen(settings))
    (stage.work / TARGET).unlink(missing_ok=True)
    return summary(parts)


def _keep_finished(stage: artifacts.Stage, progress: Progress) -> None:
    """Starts the journal with what an earlier choice of questions was answered, here or in the folder to be replaced.

    Questions keep their keys, so whatever is asked again is found there; failed traces are given another chance.
    """
    earlier = stage.work if sealed_parts(stage.work) else stage.replaces
    if (stage.work / JOURNAL).exists() or earlier is None:
        return
    artifacts.write_json(stage.work / TARGET, read_metadata(earlier))
    count = restore(stage.work, read_traces(earlier, KEPT))
    progress.say(f"capture: starting from {count:,} finished traces of {earlier}; only what is new to it is asked")


def _order(questions: list[Question], settings: CaptureSettings) -> list[str]:
    """The trace ids of all generations, in input order."""
    return [
        trace_id(question.key, turn, sample)
        for question in questions
        for sample in range(question.copies * settings.samples)
        for turn in range(len(turns_of(question.messages)))
    ]


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


def _nothing_to_train_on(journal: Journal, order: list[str]) -> str:
    """The message; everything is marked for another try, because the next run must not find it all settled."""
    reasons: Counter[str] = Counter()
    for id in order:
        trace = journal.read(id)
        reasons[reason_class(trace.error)] += 1
        journal.append(trace, retry=True)
    reason, count = reasons.most_common(1)[0]
    return (
        f"capture: none of {len(order):,} replies can be trained on; {count:,} of them: {reason or 'no reason given'}; "
        f"they are kept in {journal.path.parent}: correct this and run the same command again"
    )
