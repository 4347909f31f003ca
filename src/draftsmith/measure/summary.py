"""A measurement as a table for the terminal, and several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from draftsmith import artifacts


def result_table(file: Path) -> Table:
    """The result of one run; `file` is its `measure/result.json`."""
    return _table({"": artifacts.read_json(file)})


def comparison_table(files: dict[str, Path]) -> Table:
    """One column per arm."""
    return _table({arm: artifacts.read_json(file) for arm, file in files.items()})


def _table(results: dict[str, dict[str, Any]]) -> Table:
    table = Table(show_header=len(results) > 1, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for arm in results:
        table.add_column(arm, justify="left")
    rows = [_rows(result) for result in results.values()]
    for name in rows[0]:
        table.add_row(name, *(row[name] for row in rows))
    return table


def _rows(result: dict[str, Any]) -> dict[str, str]:
    timed = f"{result['dtype']}, {result['device']}, median of {len(result['rounds'])} paired rounds"
    lossless = f"{'yes' if result['lossless'] else 'NO'} ({result['compared']} greedy replies compared, float32)"
    return {
        "held-out questions": f"{result['questions']}",
        "sampling": _sampling(result["sampling"]),
        "draft tokens": f"{result['draft_tokens']}",
        "acceptance length": _length(result["acceptance_length"]) + _left_out(result["degenerate"]),
        "  in reasoning / answer": " / ".join(
            _length(result[f"acceptance_length_{part}"]) for part in ("reasoning", "answer")
        ),
        "acceptance per position": " ".join(
            "-" if share is None else f"{share:.2f}" for share in result["acceptance_per_position"]
        ),
        "lossless": lossless,
        "tokens/s with draft": f"{result['tokens_per_second']:.1f} ({timed})",
        "tokens/s without": f"{result['baseline_tokens_per_second']:.1f}",
        "speed-up": f"{result['speedup']:.2f}x",
        "timed replies": _timed(result["timed_identical_to_float32"]),
    }


def _length(value: float | None) -> str:
    return "no estimate" if value is None else f"{value:.2f}"


def _left_out(degenerate: int) -> str:
    """Replies that acceptance was not counted on, said beside it."""
    return f" (without {degenerate} that only repeat themselves)" if degenerate else ""


def _timed(identical: float | None) -> str:
    """The speed was measured in another type than losslessness: how far the replies are the same."""
    return "sampled" if identical is None else f"{identical:.0%} equal the float32 ones"


def _sampling(sampling: dict[str, Any]) -> str:
    if sampling["temperature"] == 0:
        return "greedy"
    return ", ".join(f"{name} {value}" for name, value in sampling.items())
