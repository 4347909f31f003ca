"""Do two captures of the same questions hold the same ids? For checking an engine, or a setting, against another.

    python benchmarks/parity.py RUN_A/traces RUN_B/traces --target smollm2

Greedy captures of one model in float32 (vLLM: `--dtype float32`; here: `--local MODEL --dtype float32`) should agree
but for near-ties. With `--target` (a model folder, a hub id or smollm2) the table gives, for each reply that differs,
the target's logits of the two ids that were taken at the first difference, and how far the lower one lies below the
best: 0 is a tie, anything well above rounding (0.001 for vLLM, 0.01 for llama.cpp) means that the two really compute
something else. In bfloat16 exact ties are common, so replies differ often and prove nothing.

The exit status is 0 if all replies are identical, else 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from draftsmith.data.compare import Comparison, Pair, compare_traces, first_logits
from draftsmith.errors import UserError

LOGITS = ("left logit", "right logit", "logit margin")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("left", type=Path, help="a traces folder")
    parser.add_argument("right", type=Path, help="another one of the same questions")
    parser.add_argument("--target", help="model folder, hub id or smollm2: gives the logit margin of each difference")
    options = parser.parse_args(arguments)
    try:
        comparison = compare_traces(options.left, options.right)
        different = [pair for pair in comparison.pairs if not pair.identical]
        logits = target_logits(options.target, different) if options.target else [None] * len(different)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    show(comparison, different, logits)
    return 0 if comparison.pairs and not different else 1


def target_logits(target: str, pairs: Sequence[Pair]) -> list[tuple[float, float, float] | None]:
    """`first_logits` in float32, on the CPU."""
    import torch

    from draftsmith.target.embedded import resolve_model
    from draftsmith.target.loading import load_model

    model = load_model(resolve_model(target), torch.float32, torch.device("cpu"))
    return first_logits(model, pairs)


def show(
    comparison: Comparison, different: Sequence[Pair], logits: Sequence[tuple[float, float, float] | None]
) -> None:
    same = len(comparison.pairs) - len(different)
    print(f"{same} of {len(comparison.pairs)} replies identical ({comparison.share_identical:.1%})")
    if comparison.only_left or comparison.only_right:
        print(f"only in the left folder: {len(comparison.only_left)}, only in the right: {len(comparison.only_right)}")
    if not different:
        return
    table = Table("trace", "prompt differs at", "reply differs at", "left id", "right id", *LOGITS)
    for pair, found in zip(different, logits, strict=True):
        at = pair.generated_at
        ids = [_id_at(trace.generated_ids, at) for trace in (pair.left, pair.right)]
        values = (*found[:2], found[2] - min(found[:2])) if found else (None, None, None)
        table.add_row(pair.left.trace_id, *(_shown(value) for value in (pair.prompt_at, at, *ids, *values)))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _id_at(ids: Sequence[int], at: int | None) -> int | None:
    return ids[at] if at is not None and at < len(ids) else None


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
