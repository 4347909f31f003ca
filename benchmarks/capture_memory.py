"""Does the capture client's memory stay flat, however many replies have come?

    python benchmarks/capture_memory.py                      # 1,000 and 100,000 replies of 600 ids, some minutes
    python benchmarks/capture_memory.py --replies 20000 --ids 100 --json

Two whole capture stages, each in a fresh process, against a mock server, 64 requests at once: one of 1,000 replies and
one of many. The resident memory (RSS, mapped files included) is read 20 times a second. Two growths count: in the long
run from 1,000 replies to the last one, and from the short run's highest memory, sealing included, to the long run's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mock_capture import Clocked, MockEngine, capture
from rich.console import Console
from rich.table import Table

from draftsmith.progress import Tracker
from draftsmith.target.embedded import resolve_model
from mock_engine import MockConfig

FIRST = 1_000
WANTED_GROWTH = 0.10
PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


class Weighed(Clocked):
    """Notes the resident memory beside the number of replies, from a thread of its own."""

    def __init__(self, events: Path) -> None:
        super().__init__(events)
        self.samples: list[tuple[int, float]] = []
        self.over = threading.Event()

    @contextmanager
    def track(self, *arguments: Any, **settings: Any) -> Iterator[Tracker]:
        with super().track(*arguments, **settings) as tracker:
            self.tracker, self.thread = tracker, threading.Thread(target=self._weigh)
            self.thread.start()
            yield tracker

    def stop(self) -> None:
        """Ends the weighing."""
        self.over.set()
        self.thread.join()

    def _weigh(self) -> None:
        over = False
        while not over:
            over = self.over.wait(0.05)
            self.samples.append((self.tracker.done, resident_mib()))

    def at(self, replies: int) -> float:
        """MiB when so many replies had come."""
        return next(mib for done, mib in self.samples if done >= replies)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokenizer", default="smollm2", help="model folder, or smollm2 (embedded)")
    parser.add_argument("--ids", type=int, default=600, help="generated ids per reply")
    parser.add_argument("--replies", type=int, default=100_000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of a table")
    options = parser.parse_args(arguments)
    figures = measure(options)
    print(json.dumps(figures)) if options.json else show(figures)
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both captures."""
    tokenizer = resolve_model("smollm2") if options.tokenizer == "smollm2" else options.tokenizer
    runs = []
    with MockEngine(MockConfig(tokenizer=tokenizer, length=options.ids, thinking=True)) as target:
        for replies in (FIRST, options.replies):
            command = [sys.executable, __file__, "--run", target.url, tokenizer, str(replies), str(options.concurrency)]
            runs.append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))
    short, long = runs
    first, last = long["resident_mib"][str(FIRST)], long["resident_mib"][str(options.replies)]
    return {
        "replies": options.replies,
        "ids": options.ids,
        "runs": runs,
        "growth_to_last_reply": round(last / first - 1, 4),
        "growth_at_most": round(long["most_mib"] / short["most_mib"] - 1, 4),
    }


def run(url: str, tokenizer: str, replies: int, concurrency: int) -> dict[str, Any]:
    """One capture and its memory in MiB at some numbers of replies; in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        progress = Weighed(Path(folder) / "events.jsonl")
        target = MockEngine.elsewhere(url, tokenizer)
        try:
            capture(target, Path(folder) / "capture", replies, concurrency=concurrency, progress=progress)
        finally:
            progress.stop()
    marks = sorted({mark for mark in (FIRST, 10_000, 50_000) if mark < replies} | {replies})
    return {
        "replies": replies,
        "resident_mib": {mark: round(progress.at(mark), 1) for mark in marks},
        "most_mib": round(max(mib for _, mib in progress.samples), 1),
    }


def show(figures: dict[str, Any]) -> None:
    table = Table(title=f"Resident memory, replies of {figures['ids']:,} ids")
    for name in ("run of", "replies", "MiB"):
        table.add_column(name, justify="right")
    for each in figures["runs"]:
        for mark, mib in each["resident_mib"].items():
            table.add_row(f"{each['replies']:,}", f"{int(mark):,}", f"{mib:,.1f}")
        table.add_row(f"{each['replies']:,}", "at most, sealing too", f"{each['most_mib']:,.1f}")
    Console().print(table)
    print(
        f"growth in the long run from {FIRST:,} replies to the last: {figures['growth_to_last_reply']:.1%}; of the "
        f"highest memory from the short run to the long one: {figures['growth_at_most']:.1%} "
        f"(wanted: within {WANTED_GROWTH:.0%})"
    )


def resident_mib() -> float:
    """Of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE_MIB


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(run(*sys.argv[2:4], *map(int, sys.argv[4:]))))
    else:
        sys.exit(main())
