"""Does `--concurrency auto` find the knee of a server, and how soon?

    python benchmarks/capture_concurrency.py                    # knees 48 and 200, about 6 minutes on 2 cores
    python benchmarks/capture_concurrency.py --knees 48 --seconds 75 --latency 2 --json

The server is the mock engine (a process of its own): up to its knee every request runs at full speed, above it they
share that speed, so that more requests in flight give no more tokens a second. Two captures as users run them
(`capture.engine.build`) take turns: one with `auto`, one with the best fixed level there is, the knee. Passed if the
level is within 25 % of the knee from some moment inside the first minute, trials aside, and never above twice the knee
after that minute. Throughput is over the whole capture, so the search itself costs a little.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mock_capture import Clocked, settings_for, write_questions
from rich.console import Console
from rich.table import Table

from draftsmith.artifacts import Plan, Stage
from draftsmith.capture import engine
from mock_engine import MockConfig, MockEngine

NEAR, MOST = 0.25, 2.0
SEARCH_SECONDS = 60.0
LENGTH = 300


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--knees", type=int, nargs="+", default=[48, 200])
    parser.add_argument("--latency", type=float, default=1.0, help="seconds a reply takes below the knee")
    parser.add_argument("--jitter", type=float, default=0.3, help="share by which it may be shorter or longer")
    parser.add_argument("--seconds", type=float, default=90.0, help="length of a capture at the knee")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    found = [measure(knee, options) for knee in options.knees]
    if options.json:
        print(json.dumps(found))
    else:
        show(found)
    return 0 if all(row["passed"] for row in found) else 1


def measure(knee: int, options: argparse.Namespace) -> dict[str, Any]:
    """Both captures against a server of this knee."""
    count = int(options.seconds * knee / options.latency)
    config = MockConfig(length=LENGTH, latency=options.latency, jitter=options.jitter, knee=knee)
    with MockEngine(config) as server, tempfile.TemporaryDirectory() as folder:
        levels, seconds = run(server, Path(folder) / "auto", count, "auto")
        _, fixed_seconds = run(server, Path(folder) / "fixed", count, knee)
    since = settled(levels, knee)
    later = [level for at, level, _ in levels if at > SEARCH_SECONDS] + [in_force(levels, SEARCH_SECONDS)]
    return {
        "knee": knee,
        "levels": levels,
        "settled_seconds": since,
        "most_later": max(later),
        "req_s": round(count / seconds, 1),
        "fixed_req_s": round(count / fixed_seconds, 1),
        "passed": since is not None and since <= SEARCH_SECONDS and max(later) <= MOST * knee,
    }


def run(
    server: MockEngine, folder: Path, count: int, concurrency: int | str
) -> tuple[list[tuple[float, int, str]], float]:
    """One capture. Returns (seconds, level, action) of every move, and its wall seconds."""
    shutil.rmtree(folder, ignore_errors=True)
    work = folder / "run" / "traces.partial"
    work.mkdir(parents=True)
    progress = Clocked(folder / "events.jsonl")
    settings = settings_for(server, write_questions(folder / "questions.jsonl", count), concurrency=1)
    settings = settings.model_copy(update={"concurrency": concurrency})
    counts = engine.build(Stage(folder / "run", Plan("traces", {}, {}), work), settings, progress)
    assert counts["ok"] == count, counts
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    moves = [event for event in events if event["kind"] == "concurrency"]
    ended = next(event for event in events if event["kind"] == "stage_ended")
    levels = [(round(move["time"] - moves[0]["time"], 1), move["level"], move["action"]) for move in moves]
    return levels, ended["seconds"]


def settled(levels: Sequence[tuple[float, int, str]], knee: int) -> float | None:
    """Seconds until the level was within 25 % of the knee for good, trials aside; None: never."""
    since: float | None = None
    for at, level, action in levels:
        if action.startswith("try"):
            continue
        near = abs(level - knee) <= NEAR * knee
        since = (at if since is None else since) if near else None
    return since


def in_force(levels: Sequence[tuple[float, int, str]], at: float) -> int:
    """The level at a moment."""
    return [level for since, level, _ in levels if since <= at][-1]


def show(found: Sequence[dict[str, Any]]) -> None:
    console = Console(width=160)
    table = Table(title="capture --concurrency auto")
    for name in ("knee", "within 25 % after", "most after 60 s", "req/s", "req/s at the knee", "share", ""):
        table.add_column(name, justify="right")
    for row in found:
        since = "never" if row["settled_seconds"] is None else f"{row['settled_seconds']:.0f} s"
        share = f"{row['req_s'] / row['fixed_req_s']:.0%}"
        figures = (row["knee"], since, row["most_later"], row["req_s"], row["fixed_req_s"], share)
        table.add_row(*map(str, figures), "passed" if row["passed"] else "FAILED")
    console.print(table)
    for row in found:
        curve = ", ".join(f"{at:.0f} s {level} ({action})" for at, level, action in row["levels"])
        console.print(f"level, knee {row['knee']}: {curve}", soft_wrap=True)


if __name__ == "__main__":
    raise SystemExit(main())
