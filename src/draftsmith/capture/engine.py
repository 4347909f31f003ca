"""The capture stage: every question to the target, every reply into the journal, the journal into Parquet.

Two loops drive the same `Capture`: one keeps `concurrency` requests in flight at a server, one feeds the target in this
process. Each reply is journaled as it comes, so a kill at any moment costs only what is in flight. Traces are sealed in
input order, whatever order the replies came in.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from draftsmith import artifacts
from draftsmith.capture.bookkeeping import Capture, Outcome
from draftsmith.capture.conversation import turns_of
from draftsmith.capture.journal import Journal, seal, sealed_parts
from draftsmith.capture.metadata import question_metadata
from draftsmith.capture.questions import Question, read_questions
from draftsmith.capture.record import Job, Reading
from draftsmith.capture.signals import Stop, on_signals
from draftsmith.capture.summary import reason_class, summary
from draftsmith.errors import Interrupted, UserError
from draftsmith.progress import Progress
from draftsmith.recipe import CaptureSettings
from draftsmith.target.reply import Sampling
from draftsmith.target.server import NotSentAgain, ServerInfo, ServerTarget
from draftsmith.target.template import Template, load_template
from draftsmith.target.thinking import find_delimiters
from draftsmith.target.wire import ChatFailed
from draftsmith.trace import TRAINABLE, trace_id


def build(stage: artifacts.Stage, settings: CaptureSettings, progress: Progress) -> dict[str, Any]:
    """Makes `traces/` from the questions, going on from the journal an interrupted attempt left.

    Raises:
        UserError: unusable questions, target or settings, or not one trainable trace.
        GateStop: the first replies show that the rest would be worthless; what was captured is kept.
        Interrupted: SIGINT or SIGTERM; replies in flight were waited for, or abandoned at the second signal.
    """
    parts = sealed_parts(stage.work)
    if not parts:
        questions = read_questions(settings)
        with Journal(stage.work) as journal:
            _say_repairs(journal, progress)
            run = _run_local if settings.local else _run_server
            order, metadata = run(stage, settings, progress, questions, journal)
            if not any(journal.index[id].state in TRAINABLE for id in order):
                raise UserError(_nothing_to_train_on(journal, order))
            parts = seal(journal, order, metadata)
    return summary(parts)


def _run_server(
    stage: artifacts.Stage,
    settings: CaptureSettings,
    progress: Progress,
    questions: list[Question],
    journal: Journal,
) -> tuple[list[str], dict[str, str]]:
    if not settings.server:
        raise UserError("capture: expected a target, found none; give --server URL or --local MODEL")

    async def run() -> tuple[list[str], dict[str, str]]:
        async with ServerTarget(
            settings.server,
            settings.model,
            api_key_env=settings.api_key_env,
            deadline=settings.deadline,
            retries=settings.retries,
        ) as target:
            info = await target.connect()
            progress.say(
                f"capture: {info.model} at {', '.join(info.urls)} ({f'{info.engine} {info.version}'.strip()}), "
                f"{settings.concurrency} requests at once, a request may take {settings.deadline:g} s"
            )
            template = _server_template(settings, info)
            reading = _reading(settings, template)
            with _capturing(stage, settings, progress, questions, journal, reading, info.max_model_len) as capture:
                await _drive_server(capture, target, progress)
            metadata = _metadata(settings, reading, info.model, artifacts.fingerprint([info.model, info.root]), info)
            return _order(questions, settings), metadata

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(run())


async def _drive_server(capture: Capture, target: ServerTarget, progress: Progress) -> None:
    """Keeps `concurrency` requests in flight until nothing is left. Every task is started and ended here."""

    def drain() -> None:
        progress.say(f"stopping: waiting for {len(capture.in_flight)} replies in flight; once more abandons them")
        target.drain()

    main, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert main is not None
    stop = Stop(drain, main.cancel)
    tasks: set[asyncio.Task[tuple[str, Outcome]]] = set()
    try:
        with on_signals(lambda number: loop.add_signal_handler(number, stop), loop.remove_signal_handler):
            while True:
                while len(tasks) < capture.settings.concurrency and not stop.requested():
                    if (job := capture.next_job()) is None:
                        break
                    tasks.add(asyncio.create_task(_ask(target, job, capture.settings.template_options)))
                if not tasks:
                    break
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    capture.finish(*task.result())
    except asyncio.CancelledError:
        if not stop.requested():
            raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    _ended(capture, stop)


async def _ask(target: ServerTarget, job: Job, options: dict[str, Any]) -> tuple[str, Outcome]:
    try:
        return job.trace_id, await target.chat(job.messages, job.question.tools, job.sampling, options)
    except (ChatFailed, NotSentAgain) as failure:
        return job.trace_id, failure


def _run_local(
    stage: artifacts.Stage,
    settings: CaptureSettings,
    progress: Progress,
    questions: list[Question],
    journal: Journal,
) -> tuple[list[str], dict[str, str]]:
    from draftsmith.target.local import load_local

    target = load_local(settings, progress)
    reading = _reading(settings, target.template)
    with _capturing(stage, settings, progress, questions, journal, reading, target.max_length) as capture:

        def drain() -> None:
            progress.say(f"stopping: finishing {len(capture.in_flight)} replies; once more abandons them")

        def abandon() -> None:
            raise KeyboardInterrupt

        def jobs() -> Iterator[tuple[str, list[int], Sampling] | None]:
            while (job := capture.next_job()) is not None or not capture.exhausted:
                yield (job.trace_id, job.prompt_ids, job.sampling) if job else None

        stop = Stop(drain, abandon)
        before = {}
        try:
            with on_signals(
                lambda number: before.update({number: signal.signal(number, stop)}),
                lambda number: signal.signal(number, before[number]),
            ):
                for key, reply in target.generate(jobs(), stop.requested):
                    capture.finish(str(key), reply)
        except KeyboardInterrupt:
            if not stop.requested():
                raise
        _ended(capture, stop)
    metadata = _metadata(settings, reading, target.name, target.fingerprint, None)
    return _order(questions, settings), metadata


def _ended(capture: Capture, stop: Stop) -> None:
    if stop.requested():
        meter = capture.meter
        raise Interrupted(
            f"capture interrupted with {meter.done:,} of {meter.tracker.total:,} replies in "
            f"{capture.journal.path.parent}; run the same command to go on"
        )
    capture.end()


@contextmanager
def _capturing(
    stage: artifacts.Stage,
    settings: CaptureSettings,
    progress: Progress,
    questions: list[Question],
    journal: Journal,
    reading: Reading,
    limit: int | None,
) -> Iterator[Capture]:
    """A Capture with its progress bar; leaves the counts for `status` however it ends."""
    order = _order(questions, settings)
    if not order:
        raise UserError(f"{settings.questions}: expected conversations in which somebody asks something, found none")
    kept = sum(journal.final(id) for id in order)
    if kept:
        progress.say(f"capture: going on from {kept:,} of {len(order):,} replies")
    with progress.track("capture", len(order), "replies", kept) as tracker:
        capture = Capture(settings, reading, questions, journal, tracker, stage.note_progress, limit)
        try:
            yield capture
        finally:
            capture.meter.write_note()


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


def _metadata(
    settings: CaptureSettings, reading: Reading, target: str, fingerprint: str, info: ServerInfo | None
) -> dict[str, str]:
    sampling = {name: getattr(settings, name) for name in ("temperature", "top_p", "top_k", "seed", "samples")}
    return {
        "source_kind": "capture",
        "target": target,
        "target_fingerprint": fingerprint,
        "server": json.dumps(asdict(info)) if info else "",
        "max_tokens": str(settings.max_tokens),
        "sampling": json.dumps(sampling),
        **question_metadata(settings, reading.template, reading.delimiters),
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
