"""One capture, killed again and again: is every question there exactly once, with what the engine really said?

The command line runs in forks of a process that has loaded the libraries already, and is killed by SIGKILL at random
moments after its first reply. The mock engine keeps a record of what it did to each request, which is what the traces
are compared with.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import duckdb
import polars

from draftsmith.__main__ import main
from draftsmith.capture import engine
from draftsmith.target.template import load_template
from draftsmith.trace import Trace, read_traces
from mock_engine import FAULTS, HTTP, MockConfig, MockEngine, reply_ids

BROKEN = ("reset_before", "reset_in_body", "closed_before", "closed_in_body")
GARBAGE = ("html", "truncated_json", "empty_body", "no_choice", "aborted", "lone_surrogate")
FAITHFUL = frozenset({"ok", "slow", "wrong_type", "no_ids", "usage_wrong", "content_null", "both_fields"})
"""What befell the request, and the reply is the engine's plain one all the same."""
ALL = frozenset({"ok", "cut_in_reasoning", "cut_in_answer", "rejected", "failed"})
REASONS = {
    **{name: (f"HTTP {code}",) for name, code in HTTP.items()},
    **dict.fromkeys(BROKEN, ("connection fault",)),
    **dict.fromkeys(GARBAGE, ("the reply", "the server aborted")),
    "hang": ("no reply within the deadline",),
    "too_long": ("prompt_too_long",),
}
"""How the error of a failed trace may begin, by what befell its last request."""
PATIENCE_SECONDS = 60.0
"""Seconds a process may take to its first reply."""


@dataclass
class Drill:
    """What came of it; `faults` says, a line each, what was not as it must be."""

    questions: int
    kills: int = 0
    states: Counter[str] = field(default_factory=Counter)
    paid_twice: int = 0
    most_paid_twice: int = 0
    """Replies that one kill cost."""
    requests: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


def drill(
    folder: Path,
    *,
    questions: int,
    kills: int,
    concurrency: int,
    fault_rate: float,
    seed: int,
    seconds: tuple[float, float],
) -> Drill:
    """Captures in `folder` with `kills` kills, `seconds` (least, most) after the first reply of each process."""
    draw, started = random.Random(seed), time.monotonic()
    config = MockConfig(
        length=(40, 120),
        thinking=True,
        latency=0.6,
        jitter=0.8,
        retry_after=0.3,
        slow_seconds=1.0,
        faults=dict.fromkeys(FAULTS, fault_rate / len(FAULTS)),
        seed=seed,
    )
    found = Drill(questions)
    with MockEngine(config) as mock:
        load_template(mock.config.tokenizer, {}, False)  # so that every fork has its libraries
        command = _command(mock, folder, questions, concurrency)
        snapshots: list[dict[str, int]] = []
        while found.kills < kills and _killed(mock, command, folder / "log.txt", draw.uniform(*seconds)):
            found.kills += 1
            snapshots.append({question: len(history) for question, history in mock.stats()["questions"].items()})
        _finish(command, folder / "log.txt")
        histories: dict[str, list[str]] = mock.stats()["questions"]
        _count_paid_twice(found, snapshots, histories)
        if found.most_paid_twice > concurrency:
            found.faults.append(f"one kill cost {found.most_paid_twice} replies, {concurrency} were in flight")
        _compare(found, list(read_traces(folder / "run" / "traces", ALL)), histories, mock.config)
    _read_elsewhere(found, folder / "run" / "traces", folder / "cache")
    found.requests = sum(map(len, histories.values()))
    found.seconds = time.monotonic() - started
    return found


def _command(mock: MockEngine, folder: Path, questions: int, concurrency: int) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        json.dumps({"prompt": f"Question {number}: how much is {number} and {7 * number}?"})
        for number in range(questions)
    ]
    (folder / "questions.jsonl").write_text("\n".join(rows) + "\n")
    where = ["--run", str(folder / "run"), "--questions", str(folder / "questions.jsonl"), "--server", mock.url]
    how = ["--tokenizer", mock.config.tokenizer, "--concurrency", str(concurrency), "--max-tokens", "400"]
    return ["capture", *where, *how, "--deadline", "4", "--retries", "2", "--no-probe"]


def _start(command: list[str], log: Path) -> int:
    """A process that runs the command line, forked off this one."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        code = main(command)
    finally:
        os._exit(code)


def _killed(mock: MockEngine, command: list[str], log: Path, seconds: float) -> bool:
    """Starts the capture and kills it so long after its first reply; False if it ended before that."""
    before, pid, began = mock.stats()["replies"], _start(command, log), time.monotonic()
    due = float("inf")
    while time.monotonic() < due:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
        if due == float("inf") and mock.stats()["replies"] > before:
            due = time.monotonic() + seconds
        assert due < float("inf") or time.monotonic() < began + PATIENCE_SECONDS, log.read_text()[-2000:]
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def _finish(command: list[str], log: Path) -> None:
    _, status = os.waitpid(_start(command, log), 0)
    assert os.waitstatus_to_exitcode(status) == 0, log.read_text()[-3000:]


def _count_paid_twice(found: Drill, snapshots: list[dict[str, int]], histories: dict[str, list[str]]) -> None:
    """A kill cost a reply where a question's last request before it was answered well, and another came after it."""
    before: dict[str, int] = {}
    for snapshot in snapshots:
        lost = [
            question
            for question, count in snapshot.items()
            if count > before.get(question, 0)
            and histories[question][count - 1] in FAITHFUL
            and len(histories[question]) > count
        ]
        found.paid_twice += len(lost)
        found.most_paid_twice = max(found.most_paid_twice, len(lost))
        before = snapshot


def _compare(found: Drill, traces: list[Trace], histories: dict[str, list[str]], config: MockConfig) -> None:
    """Every question once, each with what its last request was answered."""
    there = Counter(json.loads(trace.messages)[-1]["content"] for trace in traces)
    found.faults += [f"{question}: {there[question]} traces" for question in histories if there[question] != 1]
    if len(there) != found.questions:
        found.faults.append(f"{len(there)} questions of {found.questions}")
    for trace in traces:
        question = json.loads(trace.messages)[-1]["content"]
        last = histories[question][-1]
        found.states[trace.state] += 1
        if last in REASONS:
            right = trace.state == "failed" and trace.error.startswith(REASONS[last])
        elif last in FAITHFUL:
            right = trace.state == "ok" and list(trace.generated_ids) == reply_ids(question, config)
        else:
            right = trace.state != "failed" and (trace.state != "rejected" or bool(trace.error))
        if not right:
            found.faults.append(f"{question}: {trace.state} ({trace.error}) after {histories[question]}")


def _read_elsewhere(found: Drill, traces: Path, cache: Path) -> None:
    files = f"{traces}/*.parquet"
    counts = {
        "datasets": datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(cache)).num_rows,
        "duckdb": duckdb.sql(f"SELECT count(DISTINCT trace_id) FROM '{files}'").fetchall()[0][0],
        "polars": polars.read_parquet(files)["trace_id"].n_unique(),
    }
    found.faults += [f"{name} reads {count} traces" for name, count in counts.items() if count != found.questions]


assert engine.build  # imported for the forks' sake
