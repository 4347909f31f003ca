"""The command line as a user runs it, on the real embedded model: killed in every long stage, resumed, run again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from draftsmith.recipes import recipe_path
from draftsmith.trace import TRAINABLE, read_traces

pytestmark = pytest.mark.slow
QUESTIONS = 40
SETTINGS = (
    f"capture.limit={QUESTIONS}",
    "capture.held_out=0.2",
    "capture.max_tokens=48",
    "capture.batch_size=8",
    "capture.on_gate=warn",  # so few tokens cut most replies
    "extract.batch_tokens=1024",
    "extract.shard_mib=4",
    "train.epochs=2",
    "train.evals=2",
    "train.checkpoint_minutes=0.01",
    "measure.limit=4",
    "measure.rounds=1",
    "measure.timing_questions=2",
    "serving=null",
)
KILLED = {
    "traces": "traces.partial/progress.json",
    "hidden": "hidden.partial/shards.jsonl",
    "draft": "draft.partial/last",
    "measure": "measure.partial/questions.jsonl",
}
"""Stage -> the file that shows it is in the middle of its work."""


def command(run: Path) -> list[str]:
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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, smollm2: str) -> Path:
    folder = tmp_path_factory.mktemp("e2e") / "run"
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    return folder


def test_killed_in_every_stage_the_run_still_ends_complete(run: Path) -> None:
    for stage in KILLED:
        kill_in_the_middle(run, stage, signal.SIGKILL)
        assert not (run / stage).exists()
    done = subprocess.run(command(run), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    every = frozenset({*TRAINABLE, "rejected", "failed"})
    keys = Counter(trace.question_key for trace in read_traces(run / "traces", every))
    assert len(keys) == QUESTIONS
    assert set(keys.values()) == {1}
    result = json.loads((run / "measure" / "result.json").read_text())
    assert result["lossless"] is True
    assert result["acceptance_length"] >= 1
    for line in ("acceptance length", "lossless", "tokens/s with draft", "report.html"):
        assert line in done.stdout


def test_run_again_it_says_that_everything_is_done(run: Path) -> None:
    again = subprocess.run(command(run), capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("already done, skipped") == 7


def test_ctrl_c_drains_and_says_how_to_go_on(tmp_path: Path, smollm2: str) -> None:
    assert kill_in_the_middle(tmp_path / "run", "traces", signal.SIGINT) == 130
    assert (tmp_path / "run" / "traces.partial").is_dir()
