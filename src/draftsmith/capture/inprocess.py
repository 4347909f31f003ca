"""The capture loop over a target in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from draftsmith.capture.attempt import Attempt, capturing, interrupted, note_target, reading_of
from draftsmith.capture.jobs import Capture
from draftsmith.interrupts import stopping
from draftsmith.target.reply import Sampling
from draftsmith.target.wire import ChatFailed

PAUSE_SECONDS = 0.25


def run_local(attempt: Attempt) -> None:
    """Captures what is not there yet from `attempt.settings.local`.

    Raises:
        DraftsmithError: as `engine.build`.
    """
    from draftsmith.target.local import load_local

    target = load_local(attempt.settings, attempt.progress)
    reading = reading_of(attempt.settings, target.template)
    note_target(attempt, reading, target.name, target.fingerprint, "")
    with capturing(attempt, reading, target.max_length) as capture:

        def drain() -> None:
            attempt.progress.say(f"stopping: finishing {len(capture.in_flight)} replies; once more abandons them")

        try:
            with stopping(drain) as asked_to_stop:
                for key, reply in target.generate(_jobs(capture, asked_to_stop), asked_to_stop):
                    capture.finish(str(key), reply)
                    running, size = len(capture.in_flight), attempt.settings.batch_size
                    capture.meter.load(running=running, waiting=0, level=size, servers=[])
        except KeyboardInterrupt:
            if not asked_to_stop():
                raise
        if asked_to_stop():
            raise interrupted(capture)
        capture.end()


def _jobs(capture: Capture, asked_to_stop: Callable[[], bool]) -> Iterator[tuple[str, list[int], Sampling] | None]:
    """What the target takes in; None while nothing is ready but something runs."""
    while not asked_to_stop():
        job = capture.next_job()
        if job is not None:
            try:
                prompt_ids = job.render()
            except ChatFailed as failure:
                capture.finish(job.trace_id, failure)
            else:
                yield job.trace_id, prompt_ids, job.sampling
        elif capture.exhausted:
            return
        elif capture.in_flight:
            yield None
        else:
            time.sleep(PAUSE_SECONDS)
