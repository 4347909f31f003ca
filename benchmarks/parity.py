"""Do two captures of the same questions hold the same ids? For checking an engine, or a setting, against another.

    python benchmarks/parity.py RUN_A/traces RUN_B/traces --target smollm2

Greedy captures of one model in float32 (vLLM: `--dtype float32`; here: `--local MODEL --dtype float32`) should agree
but for near-ties. With `--target` (a model folder, a hub id or smollm2) the table says, for each reply that differs,
how far below the best logit the lower one of the two ids lies that were taken at the first difference: 0 is a tie,
anything well above rounding (about 0.001) means that the two really compute something else. In bfloat16 exact ties
are common, so replies differ often and prove nothing.

The exit status is 0 if all replies are identical, else 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from draftsmith.data.compare import Comparison, Pair, compare_traces, logit_margins
from draftsmith.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("left", type=Path, help="a traces folder")
    parser.add_argument("right", type=Path, help="another one of the same questions")
    parser.add_argument("--target", help="model folder, hub id or smollm2: gives the logit margin of each difference")
    options = parser.parse_args(arguments)
    try:
        comparison = compare_traces(options.left, options.right)
        different = [pair for pair in comparison.pairs if not pair.identical]
        margins = target_margins(options.target, different) if options.target else [None] * len(different)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    show(comparison, different, margins)
    return 0 if comparison.pairs and not different else 1


def target_margins(target: str, pairs: Sequence[Pair]) -> list[float | None]:
    """Margins in float32, on the CPU."""
    import torch

    from draftsmith.target.embedded import resolve_model
    from draftsmith.target.loading import load_model

    model = load_model(resolve_model(target), torch.float32, torch.device("cpu"))
    return logit_margins(model, pairs)


def show(comparison: Comparison, different: Sequence[Pair], margins: Sequence[float | None]) -> None:
    same = len(comparison.pairs) - len(different)
    print(f"{same} of {len(comparison.pairs)} replies identical ({comparison.share_identical:.1%})")
    if comparison.only_left or comparison.only_right:
        print(f"only in the left folder: {len(comparison.only_left)}, only in the right: {len(comparison.only_right)}")
    if not different:
        return
    table = Table("trace", "prompt differs at", "reply differs at", "left id", "right id", "logit margin")
    for pair, margin in zip(different, margins, strict=True):
        at = pair.generated_at
        ids = [_id_at(trace.generated_ids, at) for trace in (pair.left, pair.right)]
        table.add_row(pair.left.trace_id, *(_shown(value) for value in (pair.prompt_at, at, *ids, margin)))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _id_at(ids: Sequence[int], at: int | None) -> int | None:
    return ids[at] if at is not None and at < len(ids) else None


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
