"""What one run of the capture stage works with, and what it leaves for the next: shared by both targets' loops."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from draftsmith import artifacts
from draftsmith.capture.jobs import Capture
from draftsmith.capture.journal import Journal
from draftsmith.capture.planning import Plan
from draftsmith.capture.replies import Reading
from draftsmith.capture.room import foretell, settle, unwritten
from draftsmith.capture.sealing import question_metadata
from draftsmith.capture.view import CAPTURE
from draftsmith.errors import Interrupted, UserError
from draftsmith.progress import Progress
from draftsmith.recipe import CaptureSettings
from draftsmith.target.template import Template
from draftsmith.target.thinking import find_delimiters

WARNED = "gate"
"""In the file metadata: causes that the quality gate only warned of, with the number of replies, as JSON."""
THOUGHT = "probe_saw_reasoning"
"""In the file metadata once a probe did: the replies of a resumed run are held against it too."""
SELDOM = (50_000, 20, 100)
"""Thresholds of the garbage collector's generations, in new objects and in collections of the next younger one."""
TARGET = "target.json"
"""Beside the journal: what the traces' file metadata will say of the target, so that sealing needs it no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What one run of the stage works with."""

    stage: artifacts.Stage
    settings: CaptureSettings
    progress: Progress
    plan: Plan
    """All generations, in input order."""
    journal: Journal


@contextmanager
def capturing(attempt: Attempt, reading: Reading, limit: int | None) -> Iterator[Capture]:
    """A Capture with its progress bar; leaves the counts for `status` however it ends."""
    plan, journal, progress, settings = attempt.plan, attempt.journal, attempt.progress, attempt.settings
    before, left = plan.standing(journal)
    kept, total = before.total(), plan.generations
    if kept:
        progress.say(f"capture: going on from {kept:,} of {total:,} replies")
    foretell(journal.path, total - kept, settings.max_tokens, progress)
    with progress.track("capture", total, "replies", kept, CAPTURE) as tracker:
        note = attempt.stage.note_progress
        capture = Capture(settings, reading, plan, left, journal, tracker, note, before, limit)
        try:
            with _few_collections():
                yield capture
            settle(journal, capture.room)
        finally:
            capture.meter.write_note()
            _note_warnings(attempt, capture.gate.warned)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Keeps the garbage collector from what is loaded by now, and lets it look rarely at what is in flight.

    Going through all that is loaded would stop every request for 0.2 s, and through 1,000 requests in flight for 0.07 s
    each time that a few hundred have begun. Replies leave next to no cycles, so there is nothing to find.
    """
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def interrupted(capture: Capture) -> Interrupted:
    """The stop to raise once a signal ended the loop."""
    return Interrupted(
        f"capture interrupted with {capture.meter.done:,} of {capture.meter.tracker.total:,} replies in "
        f"{capture.journal.path.parent}; {unwritten(capture.journal)}"
    )


def note_target(attempt: Attempt, reading: Reading, target: str, identity: str, server: str) -> None:
    """Leaves what the file metadata will say of the target.

    Raises:
        UserError: the traces here came from another one: a draft can learn only one target at a time.
    """
    path = attempt.stage.work / TARGET
    found = {
        "source_kind": "capture",
        "target": target,
        "target_fingerprint": identity,
        "server": server,
        **question_metadata(attempt.settings, reading.template, reading.delimiters),
    }
    before = artifacts.read_json(path) if path.exists() else found
    compared = ("target", "template_fingerprint") if server else ("template_fingerprint",)  # a folder may have moved
    other = next((name for name in compared if before.get(name) != found[name]), None)
    if other is None:
        found |= {name: before[name] for name in (WARNED, THOUGHT) if name in before}
    elif any(map(attempt.journal.final, attempt.plan.order())):
        raise UserError(
            f"{path.parent}: expected the target it was begun with ({other} {before.get(other)}), found "
            f"{found[other]}; use another --run"
        )
    artifacts.write_json(path, found)


def note_thinking(attempt: Attempt, reading: Reading, seen: bool) -> Reading:
    """The reading with what this probe or an earlier one of the same run saw: that the target thinks."""
    path = attempt.stage.work / TARGET
    known = artifacts.read_json(path)
    if seen and THOUGHT not in known:
        artifacts.write_json(path, known | {THOUGHT: "true"})
    return replace(reading, thought=seen or THOUGHT in known)


def reading_of(settings: CaptureSettings, template: Template) -> Reading:
    """How this target's ids are read."""
    delimiters = find_delimiters(template, settings.thinking, settings.think_open, settings.think_close)
    template.readable(())  # builds the decoder's table now, not at the first reply, when a thousand others wait for it
    return Reading(template=template, delimiters=delimiters, exact=settings.exact)


def _note_warnings(attempt: Attempt, warned: Mapping[str, int]) -> None:
    """What the gate warned of stays with the traces."""
    path = attempt.stage.work / TARGET
    if warned:
        known = artifacts.read_json(path)
        counts = Counter(json.loads(known.get(WARNED, "{}"))) + Counter(warned)
        artifacts.write_json(path, known | {WARNED: json.dumps(counts)})
