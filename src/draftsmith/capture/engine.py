"""The capture stage: every question to the target, every reply into the journal, the journal into Parquet.

Two loops drive the same `Capture`: one keeps `concurrency` requests in flight at a server, one feeds the target in this
process. Each reply is journaled as it comes, so a kill at any moment costs only what is in flight. Traces are sealed in
input order, whatever order the replies came in.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from draftsmith import artifacts
from draftsmith.capture.conversation import Job, turns_of
from draftsmith.capture.jobs import Capture, Outcome
from draftsmith.capture.journal import JOURNAL, Journal, restore
from draftsmith.capture.questions import Question, read_questions
from draftsmith.capture.replies import Reading
from draftsmith.capture.sealing import (
    STATES,
    question_metadata,
    reason_class,
    seal,
    sealed_ids,
    sealed_parts,
    summary,
)
from draftsmith.errors import GateStop, Interrupted, UserError
from draftsmith.interrupts import stopping
from draftsmith.progress import Progress
from draftsmith.recipe import CaptureSettings
from draftsmith.target.reply import Sampling
from draftsmith.target.server import NotSentAgain, ServerInfo, ServerTarget
from draftsmith.target.template import Template, load_template
from draftsmith.target.thinking import find_delimiters
from draftsmith.target.wire import ChatFailed
from draftsmith.trace import TRAINABLE, read_metadata, read_traces, trace_id

TARGET = "target.json"
"""Beside the journal: what the traces' file metadata will say of the target, so that sealing needs it no more."""
KEPT = frozenset(STATES) - {"failed"}
"""States of finished traces that a capture of a further choice of questions takes over."""


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
                run = _run_local if settings.local else _run_server
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


def _run_server(attempt: Attempt) -> None:
    settings = attempt.settings
    if not settings.server:
        raise UserError("capture: expected a target, found none; give --server URL or --local MODEL")

    async def run() -> None:
        async with ServerTarget(
            settings.server,
            settings.model,
            api_key_env=settings.api_key_env,
            deadline=settings.deadline,
            retries=settings.retries,
        ) as target:
            info = await target.connect()
            attempt.progress.say(
                f"capture: {info.model} at {', '.join(info.urls)} ({f'{info.engine} {info.version}'.strip()}), "
                f"{settings.concurrency} requests at once, a request may take {settings.deadline:g} s"
            )
            reading = _reading(settings, _server_template(settings, info))
            identity = artifacts.fingerprint([info.model, info.root])
            _note_target(attempt, reading, info.model, identity, json.dumps(asdict(info)))
            with _capturing(attempt, reading, info.max_model_len) as capture:
                await _drive_server(capture, target, attempt.progress)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(run())


async def _drive_server(capture: Capture, target: ServerTarget, progress: Progress) -> None:
    """Keeps `concurrency` requests in flight until nothing is left. Every task is started and ended here."""

    def drain() -> None:
        progress.say(f"stopping: waiting for {len(capture.in_flight)} replies in flight; once more abandons them")
        target.drain()

    main, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert main is not None
    tasks: set[asyncio.Task[tuple[str, Outcome]]] = set()
    try:
        with stopping(drain, main.cancel, loop) as asked_to_stop:
            while True:
                while len(tasks) < capture.settings.concurrency and not asked_to_stop():
                    if (job := capture.next_job()) is None:
                        break
                    tasks.add(asyncio.create_task(_ask(target, job, capture.settings.template_options)))
                if not tasks:
                    break
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                _finish(capture, [task.result() for task in done])
    except asyncio.CancelledError:
        if not asked_to_stop():
            raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if asked_to_stop():
        raise _interrupted(capture)
    capture.end()


def _finish(capture: Capture, ended: list[tuple[str, Outcome]]) -> None:
    """Records all of them, before the gate's verdict on one of them stops the run."""
    verdict: GateStop | None = None
    for key, outcome in ended:
        try:
            capture.finish(key, outcome)
        except GateStop as stop:
            verdict = stop
    if verdict is not None:
        raise verdict


async def _ask(target: ServerTarget, job: Job, options: dict[str, Any]) -> tuple[str, Outcome]:
    try:
        return job.trace_id, await target.chat(job.messages, job.question.tools, job.sampling, options)
    except (ChatFailed, NotSentAgain) as failure:
        return job.trace_id, failure


def _run_local(attempt: Attempt) -> None:
    from draftsmith.target.local import load_local

    target = load_local(attempt.settings, attempt.progress)
    reading = _reading(attempt.settings, target.template)
    _note_target(attempt, reading, target.name, target.fingerprint, "")
    with _capturing(attempt, reading, target.max_length) as capture:

        def drain() -> None:
            attempt.progress.say(f"stopping: finishing {len(capture.in_flight)} replies; once more abandons them")

        def jobs() -> Iterator[tuple[str, list[int], Sampling] | None]:
            while (job := capture.next_job()) is not None or not capture.exhausted:
                yield (job.trace_id, job.prompt_ids, job.sampling) if job else None

        try:
            with stopping(drain) as asked_to_stop:
                for key, reply in target.generate(jobs(), asked_to_stop):
                    capture.finish(str(key), reply)
        except KeyboardInterrupt:
            if not asked_to_stop():
                raise
        if asked_to_stop():
            raise _interrupted(capture)
        capture.end()


def _interrupted(capture: Capture) -> Interrupted:
    return Interrupted(
        f"capture interrupted with {capture.meter.done:,} of {capture.meter.tracker.total:,} replies in "
        f"{capture.journal.path.parent}; run the same command to go on"
    )


@contextmanager
def _capturing(attempt: Attempt, reading: Reading, limit: int | None) -> Iterator[Capture]:
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


def _note_target(attempt: Attempt, reading: Reading, target: str, identity: str, server: str) -> None:
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


def _order(questions: list[Question], settings: CaptureSettings) -> list[str]:
    """The trace ids of all generations, in input order."""
    return [
        trace_id(question.key, turn, sample)
        for question in questions
        for sample in range(question.copies * settings.samples)
        for turn in range(len(turns_of(question.messages)))
    ]


def _reading(settings: CaptureSettings, template: Template) -> Reading:
    delimiters = find_delimiters(template, settings.thinking, settings.think_open, settings.think_close)
    return Reading(template=template, delimiters=delimiters, exact=settings.exact)


def _server_template(settings: CaptureSettings, info: ServerInfo) -> Template:
    """The user's tokenizer; else whatever the server loaded the model from, where that can be had here too."""
    name = settings.tokenizer or info.root
    try:
        return load_template(name, settings.template_options, settings.trust_remote_code)
    except UserError as error:
        if settings.tokenizer:
            raise
        raise UserError(f"{error}; give the target's tokenizer with --tokenizer DIR") from None


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


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # not made for Windows
        return asyncio.new_event_loop
    return uvloop.new_event_loop
