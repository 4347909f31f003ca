"""The capture loop over a target in this process."""

from __future__ import annotations

from collections.abc import Iterator

from draftsmith.capture.attempt import Attempt, capturing, interrupted, note_target, reading_of
from draftsmith.interrupts import stopping
from draftsmith.target.reply import Sampling


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
            raise interrupted(capture)
        capture.end()
