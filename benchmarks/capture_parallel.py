"""Does one core of client keep 1,000 requests in flight, and does its event loop ever stall?

    python benchmarks/capture_parallel.py                    # 20,000 replies of 600 ids, about 45 s on 2 cores
    python benchmarks/capture_parallel.py --requests 10000 --json

A mock server answers every request after 2 s, so 1,000 requests at once make 500 a second at best. Both processes are
pinned, the client to one core and the server to another one. Measured is a whole capture stage: requests per second
from the first request to the last record (sealing comes after it), against the ideal. A ticker in the client's own
event loop is due every 5 ms: what it comes late is what every other connection had to wait.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
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

TICK_SECONDS = 0.005
WANTED_SHARE, WANTED_STALL_MS = 0.95, 50.0


class Ticking(Clocked):
    """Lets a ticker run in the event loop for as long as the capture asks."""

    def __init__(self, events: Path) -> None:
        super().__init__(events)
        self.late: list[float] = []
        self.seconds = self.busy = 0.0

    @contextmanager
    def track(self, *arguments: Any, **settings: Any) -> Iterator[Tracker]:
        with super().track(*arguments, **settings) as tracker:
            ticker = asyncio.get_running_loop().create_task(self._tick())
            try:
                yield tracker
            finally:
                ticker.cancel()
                self.seconds = time.monotonic() - self.wall
                self.busy = (time.process_time() - self.cpu) / self.seconds

    async def _tick(self) -> None:
        while True:
            due = time.monotonic() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self.late.append(max(0.0, time.monotonic() - due))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokenizer", default="smollm2", help="model folder, or smollm2 (embedded)")
    parser.add_argument("--ids", type=int, default=600, help="generated ids per reply")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=1000)
    parser.add_argument("--latency", type=float, default=2.0, help="seconds a request takes the server")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of a table")
    options = parser.parse_args(arguments)
    figures = measure(options)
    print(json.dumps(figures)) if options.json else show(figures)
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One capture, and what its loop and the server saw."""
    cores = sorted(os.sched_getaffinity(0))
    tokenizer = resolve_model("smollm2") if options.tokenizer == "smollm2" else options.tokenizer
    config = MockConfig(tokenizer=tokenizer, length=options.ids, latency=options.latency, thinking=True)
    with tempfile.TemporaryDirectory() as folder, MockEngine(config, cpus=set(cores[1:2])) as target:
        os.sched_setaffinity(0, cores[:1])
        progress = Ticking(Path(folder) / "events.jsonl")
        try:
            folder_of_run = Path(folder) / "capture"
            capture(target, folder_of_run, options.requests, concurrency=options.concurrency, progress=progress)
        finally:
            os.sched_setaffinity(0, cores)
        server = target.stats()
    late = sorted(progress.late)
    ideal = options.concurrency / options.latency
    return {
        "requests": options.requests,
        "ids": options.ids,
        "concurrency": options.concurrency,
        "latency_s": options.latency,
        "most_in_flight": server["most_in_flight"],
        "req_s": round(options.requests / progress.seconds, 1),
        "ideal_req_s": ideal,
        "share_of_ideal": round(options.requests / progress.seconds / ideal, 4),
        "stall_ms": {
            "p50": round(late[len(late) // 2] * 1000, 2),
            "p99": round(late[int(len(late) * 0.99)] * 1000, 2),
            "max": round(late[-1] * 1000, 2),
        },
        "client_cores_busy": round(progress.busy, 3),
        "server_cpu_s": round(server["cpu_seconds"], 2),
        "cores": len(cores),
    }


def show(figures: dict[str, Any]) -> None:
    table = Table(title=f"{figures['concurrency']:,} requests of {figures['latency_s']:g} s at once")
    for name in ("", "measured", "wanted"):
        table.add_column(name, justify="left" if not name else "right")
    stalls = figures["stall_ms"]
    table.add_row("requests per second", f"{figures['req_s']:,.1f}", f"of {figures['ideal_req_s']:,.0f}")
    table.add_row("share of the ideal", f"{figures['share_of_ideal']:.1%}", f">= {WANTED_SHARE:.0%}")
    table.add_row("event loop late, p50", f"{stalls['p50']:.1f} ms", "")
    table.add_row("event loop late, p99", f"{stalls['p99']:.1f} ms", f"< {WANTED_STALL_MS:g} ms")
    table.add_row("event loop late, at most", f"{stalls['max']:.1f} ms", "")
    table.add_row("client's core busy", f"{figures['client_cores_busy']:.0%}", "")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
