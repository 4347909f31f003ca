from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from draftsmith.trace import read_traces
from mock_engine import MockConfig, MockEngine

pytestmark = pytest.mark.slow
QUESTIONS = 400


def mounted(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 6 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted("-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder))
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def mock() -> Iterator[MockEngine]:
    with MockEngine(MockConfig(length=300, latency=0.05, jitter=0.5)) as engine:
        yield engine


@pytest.fixture
def capture(tmp_path: Path, small_disk: Path, mock: MockEngine) -> Callable[[], subprocess.Popen[str]]:
    """Starts the command line; what it says is in `log.txt`."""
    rows = [json.dumps({"prompt": f"Question {number}"}) for number in range(QUESTIONS)]
    (tmp_path / "questions.jsonl").write_text("\n".join(rows) + "\n")
    where = ["--run", str(small_disk / "run"), "--questions", str(tmp_path / "questions.jsonl"), "--server", mock.url]
    how = ["--tokenizer", mock.config.tokenizer, "--concurrency", "8", "--max-tokens", "400", "--no-probe"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "draftsmith", "capture", *where, *how]
        with open(tmp_path / "log.txt", "w") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, text=True, env=environment)

    return start


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], log: Path) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < until, log.read_text()
        time.sleep(0.05)


def test_a_disk_that_fills_up_pauses_the_run_until_there_is_room_and_nothing_is_lost(
    tmp_path: Path, small_disk: Path, mock: MockEngine, capture: Callable[[], subprocess.Popen[str]]
) -> None:
    filler, log = small_disk / "filler", tmp_path / "log.txt"
    filler.write_bytes(bytes(5_800_000))
    process = capture()
    wait_for(lambda: "paused: " in log.read_text(), process, log)
    time.sleep(1.5)
    asked = mock.stats()["requests"]
    time.sleep(1.5)
    assert mock.stats()["requests"] == asked < QUESTIONS
    filler.unlink()
    assert process.wait(120) == 0, log.read_text()
    said = log.read_text()
    journal = small_disk / "run" / "traces.partial" / "journal"
    assert (
        f"paused: {journal}: no space left on the disk (" in said and " needed for the rest, sealing included" in said
    )
    assert "going on" in said and "Traceback" not in said
    histories = mock.stats()["questions"]
    assert len(histories) == QUESTIONS and all(history == ["ok"] for history in histories.values())
    assert len(list(read_traces(small_disk / "run" / "traces"))) == QUESTIONS


def test_a_journal_that_is_read_only_is_named_and_goes_on_once_it_is_writable(
    tmp_path: Path, small_disk: Path, mock: MockEngine, capture: Callable[[], subprocess.Popen[str]]
) -> None:
    log, journal = tmp_path / "log.txt", small_disk / "run" / "traces.partial" / "journal"
    process = capture()
    wait_for(lambda: mock.stats()["replies"] > 50, process, log)
    process.kill()
    process.wait()
    mounted("--bind", str(journal), str(journal))
    mounted("-o", "remount,bind,ro", str(journal))
    process = capture()
    assert process.wait(120) == 2, log.read_text()
    said = log.read_text()
    assert f"{journal}: the journal cannot be written (it is read-only); make it writable" in said
    assert "Traceback" not in said
    subprocess.run(["umount", str(journal)], check=True)
    process = capture()
    assert process.wait(120) == 0, log.read_text()
    assert len(list(read_traces(small_disk / "run" / "traces"))) == QUESTIONS
    # Those in flight at the kill.
    assert sum(len(history) - 1 for history in mock.stats()["questions"].values()) <= 8
