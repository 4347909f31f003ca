"""What one run of the capture stage works with, and what it leaves for the next: shared by both targets' loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from draftsmith import artifacts
from draftsmith.capture.jobs import Capture
from draftsmith.capture.journal import Journal
from draftsmith.capture.replies import Reading
from draftsmith.capture.rows import Question
from draftsmith.capture.sealing import question_metadata
from draftsmith.errors import Interrupted, UserError
from draftsmith.progress import Progress
from draftsmith.recipe import CaptureSettings
from draftsmith.target.template import Template
from draftsmith.target.thinking import find_delimiters

TARGET = "target.json"
"""Beside the journal: what the traces' file metadata will say of the target, so that sealing needs it no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What one run of the stage works with."""

    stage: artifacts.Stage
    settings: CaptureSettings
    progress: Progress
    questions: list[Question]
    order: list[str]
    """The trace ids of all generations, in input order."""
    journal: Journal


@contextmanager
def capturing(attempt: Attempt, reading: Reading, limit: int | None) -> Iterator[Capture]:
    """A Capture with its progress bar; leaves the counts for `status` however it ends."""
    order, journal, progress = attempt.order, attempt.journal, attempt.progress
    before = Counter(journal.index[id].state for id in order if journal.final(id))
    kept = before.total()
    if kept:
        progress.say(f"capture: going on from {kept:,} of {len(order):,} replies")
    with progress.track("capture", len(order), "replies", kept) as tracker:
        note = attempt.stage.note_progress
        capture = Capture(attempt.settings, reading, attempt.questions, journal, tracker, note, before, limit)
        try:
            yield capture
        finally:
            capture.meter.write_note()


def interrupted(capture: Capture) -> Interrupted:
    """The stop to raise once a signal ended the loop."""
    return Interrupted(
        f"capture interrupted with {capture.meter.done:,} of {capture.meter.tracker.total:,} replies in "
        f"{capture.journal.path.parent}; run the same command to go on"
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
    begun = path.exists() and any(map(attempt.journal.final, attempt.order))
    before = artifacts.read_json(path) if begun else found
    compared = ("target", "template_fingerprint") if server else ("template_fingerprint",)  # a folder may have moved
    for name in compared:
        if before[name] != found[name]:
            raise UserError(
                f"{path.parent}: expected the target it was begun with ({name} {before[name]}), found "
                f"{found[name]}; use another --run"
            )
    artifacts.write_json(path, found)


def reading_of(settings: CaptureSettings, template: Template) -> Reading:
    """How this target's ids are read."""
    delimiters = find_delimiters(template, settings.thinking, settings.think_open, settings.think_close)
    return Reading(template=template, delimiters=delimiters, exact=settings.exact)
