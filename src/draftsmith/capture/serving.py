"""The capture loop over servers: keeps requests in flight until nothing is left, and ends every task it started."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from draftsmith import artifacts
from draftsmith.capture.attempt import Attempt, capturing, interrupted, note_target, reading_of
from draftsmith.capture.conversation import Job
from draftsmith.capture.jobs import Capture, Outcome
from draftsmith.errors import GateStop, UserError
from draftsmith.interrupts import stopping
from draftsmith.progress import Progress
from draftsmith.recipe import CaptureSettings
from draftsmith.target.dialect import Asked
from draftsmith.target.server import NotSentAgain, ServerInfo, ServerTarget
from draftsmith.target.template import Template, load_template
from draftsmith.target.wire import ChatFailed


def run_server(attempt: Attempt) -> None:
    """Captures what is not there yet from `attempt.settings.server`.

    Raises:
        DraftsmithError: as `engine.build`.
    """
    settings = attempt.settings
    if not settings.server:
        raise UserError("capture: expected a target, found none; give --server URL or --local MODEL")

    async def run() -> None:
        async with ServerTarget(
            settings.server,
            settings.model,
            api_key_env=settings.api_key_env,
            deadline=settings.deadline or 1800.0,
            retries=settings.retries,
        ) as target:
            info = await target.connect()
            attempt.progress.say(
                f"capture: {info.model} at {', '.join(info.urls)} ({f'{info.engine} {info.version}'.strip()}), "
                f"{settings.concurrency} requests at once, a request may take {settings.deadline or 1800.0:g} s"
            )
            reading = reading_of(settings, _server_template(settings, info))
            identity = artifacts.fingerprint([info.model, info.root])
            note_target(attempt, reading, info.model, identity, json.dumps(asdict(info)))
            with capturing(attempt, reading, info.max_model_len) as capture:
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
    level = 128 if capture.settings.concurrency == "auto" else capture.settings.concurrency
    try:
        with stopping(drain, main.cancel, loop) as asked_to_stop:
            while True:
                while len(tasks) < level and not asked_to_stop():
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
        raise interrupted(capture)
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
        return job.trace_id, await target.chat(
            Asked(
                messages=job.messages,
                tools=job.question.tools,
                sampling=job.sampling,
                template_options=options,
                prompt_ids=lambda: job.prompt_ids,
            )
        )
    except (ChatFailed, NotSentAgain) as failure:
        return job.trace_id, failure


def _server_template(settings: CaptureSettings, info: ServerInfo) -> Template:
    """The user's tokenizer; else whatever the server loaded the model from, where that can be had here too."""
    name = settings.tokenizer or info.root
    try:
        return load_template(name, settings.template_options, settings.trust_remote_code)
    except UserError as error:
        if settings.tokenizer:
            raise
        raise UserError(f"{error}; give the target's tokenizer with --tokenizer DIR") from None


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # not made for Windows
        return asyncio.new_event_loop
    return uvloop.new_event_loop
