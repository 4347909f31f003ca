"""Does a capture survive being killed at any moment, without losing, doubling or paying for a reply again?

    python benchmarks/capture_kills.py                              # 2,000 questions, 200 kills, about 7 minutes
    python benchmarks/capture_kills.py --questions 150 --kills 12

One capture by the command line against the mock engine, at a fault rate of 10 % with every fault it knows, is killed by
SIGKILL at random moments, 0.3 to 1.2 seconds after its first reply, so that so many kills fit into the run. Then the
traces are compared with the engine's own record. Passed if every question is there exactly once with what its last
request was answered or the true reason why not, ids as generated, no kill cost more replies than were in flight (or had
come in the last milliseconds), and the Parquet reads in datasets, DuckDB and polars.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kill_drill import drill


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--questions", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--fault-rate", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, nargs=2, default=(0.3, 1.2), help="least and most to a kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = drill(
            Path(folder),
            questions=options.questions,
            kills=options.kills,
            concurrency=options.concurrency,
            fault_rate=options.fault_rate,
            seed=options.seed,
            seconds=tuple(options.seconds),
        )
    if options.json:
        print(json.dumps(asdict(found)))
    else:
        states = ", ".join(f"{state} {count:,}" for state, count in found.states.items())
        print(f"{found.kills} kills over {found.questions:,} questions in {found.seconds:.0f} s: {states}")
        print(
            f"{found.requests:,} requests; paid twice {found.paid_twice}, by one kill {found.most_paid_twice} at most"
        )
        print("\n".join(found.faults[:20]) or "nothing lost, nothing doubled, every reason true")
    return 1 if found.faults or found.kills < options.kills else 0


if __name__ == "__main__":
    sys.exit(main())
