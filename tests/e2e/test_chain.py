"""The command line as a user runs it, on the real embedded model: killed in every long stage, resumed, run again."""

from __future__ import annotations

import json
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from draftsmith.trace import TRAINABLE, read_traces
from killed_run import QUESTIONS, KilledRun, command, kill_in_the_middle

pytestmark = pytest.mark.slow


def test_killed_in_every_stage_the_run_still_ends_complete(killed_run: KilledRun) -> None:
    assert killed_run.there_too_early == ()
    assert killed_run.ended.returncode == 0, killed_run.ended.stderr
    every = frozenset({*TRAINABLE, "rejected", "failed"})
    keys = Counter(trace.question_key for trace in read_traces(killed_run.folder / "traces", every))
    assert len(keys) == QUESTIONS
    assert set(keys.values()) == {1}
    result = json.loads((killed_run.folder / "measure" / "result.json").read_text())
    assert result["lossless"] is True
    assert result["acceptance_length"] >= 1
    for line in ("acceptance length", "lossless", "tokens/s with draft", "report.html"):
        assert line in killed_run.ended.stdout


def test_run_again_it_says_that_everything_is_done(killed_run: KilledRun) -> None:
    again = subprocess.run(command(killed_run.folder), capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("already done, skipped") == 8  # seven stages, and serving


def test_ctrl_c_drains_and_says_how_to_go_on(tmp_path: Path, smollm2: str) -> None:
    assert kill_in_the_middle(tmp_path / "run", "traces", signal.SIGINT) == 130
    assert (tmp_path / "run" / "traces.partial").is_dir()
