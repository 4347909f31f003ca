"""A capture in a process of its own, seen from another one and on a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mock_engine import MockConfig, MockEngine

PATIENCE = 60.0
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(scope="module")
def engine() -> Iterator[MockEngine]:
    """Two replies a second for each request in flight."""
    with MockEngine(MockConfig(length=(40, 400), latency=0.5)) as engine:
        yield engine


def capture_of(count: int, engine: MockEngine, tmp_path: Path) -> list[str]:
    """The command that captures so many questions into `tmp_path / "run"`, four at once: eight a second."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": f"What is {n} + {n}?"}) + "\n" for n in range(count)))
    arguments = ["capture", "--run", str(tmp_path / "run"), "--questions", str(questions), "--server", engine.url]
    arguments += ["--model", engine.config.model, "--tokenizer", engine.config.tokenizer, "--max-tokens", "1000"]
    arguments += ["--concurrency", "4", "--price-per-hour", "36", "--no-probe"]
    return [sys.executable, "-m", "draftsmith", *arguments]


def watched(run: Path) -> dict[str, Any]:
    """What another process sees."""
    seen = subprocess.run(
        [sys.executable, "-m", "draftsmith", "watch", str(run), "--json"], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(seen.stdout)
    return found


def wait_for(run: Path, ended: Callable[[], object], wanted: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The first state that is as wanted, while the capture runs."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and not ended():
        if run.is_dir() and wanted(found := watched(run)):
            return found
        time.sleep(0.1)
    raise AssertionError(f"not seen; last: {watched(run)}")


def capture_ended(capture: subprocess.Popen[bytes]) -> Callable[[], bool]:
    return lambda: capture.poll() is not None


def under_way(found: dict[str, Any]) -> bool:
    return found["state"] == "running" and bool(found["progress"]) and found["progress"]["done"] > 0


def test_a_capture_on_a_terminal_is_seen_from_another_process_until_it_is_done(
    engine: MockEngine, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with ThreadPoolExecutor(1) as pool:
        drawing = pool.submit(on_terminal, capture_of(60, engine, tmp_path))
        progress = wait_for(run, drawing.done, under_way)["progress"]
    assert (progress["stage"], progress["total"], progress["unit"]) == ("capture", 60, "replies")
    assert progress["eta_seconds"] > 0 and progress["tok_s"] > 0 and progress["cost"] > 0
    assert progress["latency"]["p50"] >= 0.5
    assert progress["level"] == 4 and 0 <= progress["running"] <= 4
    assert [server["url"] for server in progress["servers"]] == [engine.url]
    code, screen = drawing.result()
    assert code == 0, screen
    assert re.search(r"capture \d+/60 replies", screen)
    for row in ("rates", "load", "latency", "reasoning", "answer", "replies", "resources", "servers"):
        assert re.search(rf"^{row} ", screen, re.MULTILINE), row
    end = watched(run)
    assert (end["state"], end["progress"]["done"], end["progress"]["states"]) == ("done", 60, {"ok": 60})
    code, screen = on_terminal([sys.executable, "-m", "draftsmith", "watch", str(run)])
    assert code == 0, screen
    assert "capture 60/60 replies" in screen
    assert screen.rstrip().endswith("capture is done")


def test_a_capture_that_was_killed_and_one_that_was_interrupted_are_told_apart(
    engine: MockEngine, tmp_path: Path
) -> None:
    run, command = tmp_path / "run", capture_of(400, engine, tmp_path)
    for number, state in [(signal.SIGKILL, "dead"), (signal.SIGTERM, "interrupted")]:
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as capture:
            wait_for(run, capture_ended(capture), under_way)
            capture.send_signal(number)
            capture.wait(PATIENCE)
        assert watched(run)["state"] == state


def on_terminal(command: list[str], rows: int = 24, columns: int = 80) -> tuple[int, str]:
    """Runs a command on a terminal of its own; its exit code and all that was ever drawn, without escapes."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = os.environ | {"TERM": "xterm"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment) as process:
        os.close(its)
        drawn = b""
        while chunk := read(ours):
            drawn += chunk
    os.close(ours)
    return process.returncode, ESCAPES.sub("", drawn.decode()).replace("\r", "")


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that nobody holds the other end any more
        return b""
