"""What the capture benchmarks share: questions, a capture against the mock engine, and clocks that start with it."""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "tests"))

from draftsmith.artifacts import Plan, Stage  # noqa: E402
from draftsmith.capture import engine  # noqa: E402
from draftsmith.progress import Progress, Tracker  # noqa: E402
from draftsmith.recipe import CaptureSettings  # noqa: E402
from mock_engine import MockEngine  # noqa: E402

TEXT = """
a train leaves the station at noon and another one follows it two hours later on the same line how far from the town do
they meet if the first drives at sixty and the second at ninety kilometres an hour and neither ever stops
"""


class Clocked(Progress):
    """A silent progress that notes when the capture itself began: after tokenizer and questions were loaded."""

    def __init__(self, events: Path) -> None:
        super().__init__(quiet=True, events=events)
        self.cpu = self.wall = 0.0

    @contextmanager
    def track(self, *arguments: Any, **settings: Any) -> Iterator[Tracker]:
        with super().track(*arguments, **settings) as tracker:
            self.cpu, self.wall = time.process_time(), time.monotonic()
            yield tracker


def write_questions(path: Path, count: int) -> Path:
    """Questions of about 45 words, all different."""
    draw, words = random.Random(0), TEXT.split()
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            file.write(json.dumps({"prompt": f"Question {number}: {' '.join(draw.choices(words, k=40))}?"}) + "\n")
    return path


def settings_for(target: MockEngine, questions: Path, *, concurrency: int) -> CaptureSettings:
    """A plain capture with exact ids, nothing probed or judged."""
    return CaptureSettings(
        server=[target.url],
        questions=str(questions),
        tokenizer=target.config.tokenizer,
        max_tokens=16_384,
        concurrency=concurrency,
        exact="engine",
        probe=False,
        on_gate="warn",
    )


def capture(
    target: MockEngine, folder: Path, count: int, *, concurrency: int, progress: Clocked | None = None
) -> tuple[float, float]:
    """One whole capture stage in `folder`, whose content is lost.

    Returns:
        CPU seconds of this process (all threads) and wall seconds, from the first request to the sealed Parquet.
    """
    shutil.rmtree(folder, ignore_errors=True)
    work = folder / "run" / "traces.partial"
    work.mkdir(parents=True)
    settings = settings_for(target, write_questions(folder / "questions.jsonl", count), concurrency=concurrency)
    progress = progress or Clocked(folder / "events.jsonl")
    counts = engine.build(Stage(folder / "run", Plan("traces", {}, {}), work), settings, progress)
    cpu, wall = time.process_time() - progress.cpu, time.monotonic() - progress.wall
    assert counts["ok"] == count and counts["ids_source"] == {"engine": count}, counts
    return cpu, wall
