"""The whole chain on the real embedded model, from the command line: killed in every long stage, then let end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from draftsmith.recipes import recipe_path

QUESTIONS, MEASURED = 60, 8
HELD_OUT, MAX_TOKENS, DRAFT_TOKENS = 0.3, 64, 4
SETTINGS = (
    f"capture.limit={QUESTIONS}",
    f"capture.held_out={HELD_OUT}",
    f"capture.max_tokens={MAX_TOKENS}",
    "capture.batch_size=8",
    "capture.on_gate=warn",  # so few tokens cut most replies
    "extract.batch_tokens=1024",
    "extract.shard_mib=4",
    "train.epochs=3",
    "train.evals=2",
    "train.checkpoint_minutes=0.01",
    "export.engine=[llamacpp,vllm]",
    "export.dtype=float32",
    "export.target_gguf=float32",
    f"measure.limit={MEASURED}",
    f"measure.draft_tokens={DRAFT_TOKENS}",
    "measure.rounds=1",
    "measure.timing_questions=1",
    "serving.rounds=1",
)
KILLED = {
    "traces": "traces.partial/progress.json",
    "hidden": "hidden.partial/shards.jsonl",
    "draft": "draft.partial/last",
    "measure": "measure.partial/questions.jsonl",
}
"""Stage -> the file that shows it is in the middle of its work."""


@dataclass(frozen=True)
class KilledRun:
    """A finished run, the stages that were there although they had been killed, and what the last process said."""

    folder: Path
    there_too_early: tuple[str, ...]
    ended: subprocess.CompletedProcess[str]


def command(run: Path) -> list[str]:
    """The command line of the chain in `run`."""
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    return [sys.executable, "-m", "draftsmith", "run", str(recipe_path("smollm2")), "--run", str(run), *settings]


def kill_in_the_middle(run: Path, stage: str, number: signal.Signals) -> int:
    """Starts the run and sends the signal as soon as `stage` has work of its own on disk; returns the exit code."""
    process = subprocess.Popen(command(run), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while not (run / KILLED[stage]).exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (run / KILLED[stage]).exists(), f"{stage} was never seen in the middle of its work"
    process.send_signal(number)
    return process.wait(300)


def make_killed_run(run: Path) -> KilledRun:
    """Kills the chain in each stage of KILLED, and lets it end."""
    early = []
    for stage in KILLED:
        kill_in_the_middle(run, stage, signal.SIGKILL)
        early += [stage] * (run / stage).exists()
    return KilledRun(run, tuple(early), subprocess.run(command(run), capture_output=True, text=True, check=False))
