"""A small real run on the counting target: captured, extracted, trained to several tokens per forward, exported."""

from __future__ import annotations

import json
import random
from pathlib import Path

from counting_target import question, thoughtful
from draftsmith.pipeline import run_stage
from draftsmith.progress import Progress
from draftsmith.recipe import (
    CaptureSettings,
    ExportSettings,
    ExtractSettings,
    ImportSettings,
    Settings,
    TrainSettings,
    VocabSettings,
)

QUESTIONS, VOCAB = 300, 48


def write_questions(path: Path, seed: int, count: int = QUESTIONS, options: dict[str, object] | None = None) -> Path:
    rng = random.Random(seed)
    rows = [{"messages": [{"role": "user", "content": question(rng)}]} for _ in range(count)]
    if options:
        rows = [{**row, "chat_template_kwargs": options} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_answers(path: Path, seed: int, pace: int) -> Path:
    """Questions with answers that the target would not give: counted at another pace."""
    rng = random.Random(seed)
    asked = [question(rng) for _ in range(QUESTIONS)]
    rows = [
        {"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": thoughtful(one, pace)[:-7]}]}
        for one in asked
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def captured(run: Path, target: Path, questions: Path) -> None:
    stage(run, "capture", CaptureSettings(local=str(target), questions=str(questions), max_tokens=80, held_out=0.2,
                                          dtype="float32"))  # fmt: skip


def imported(run: Path, target: Path, answers: Path) -> None:
    stage(run, "import", ImportSettings(questions=str(answers), tokenizer=str(target), held_out=0.2))


def learned(run: Path, target: Path, tokens: int = 60_000) -> None:
    """Everything behind the traces, up to the draft."""
    if not (run / "vocab").exists():
        stage(run, "vocab", VocabSettings(size=VOCAB))
    if not (run / "hidden").exists():
        stage(run, "extract", ExtractSettings(target=str(target), dtype="float32"))
    settings = TrainSettings(
        dtype="float32", token_budget=tokens, lr=4e-3, batch_tokens=512, ttt_steps=4, evals=4, draft_tokens=4,
        max_length=256,
    )  # fmt: skip
    stage(run, "train", settings)


def exported(run: Path) -> None:
    stage(run, "export", ExportSettings(engine=["vllm"], dtype="float32"))


def stage(run: Path, command: str, settings: Settings) -> None:
    run_stage(run, command, settings, Progress(quiet=True), force=True)
