"""A measurement as a table for the terminal, and several side by side."""

from __future__ import annotations

from collections.abc import Callable
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


def served_table(result: dict[str, Any]) -> Table:
    """A served measurement, one column per concurrency."""
    levels = result["levels"]
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("requests at a time")
    for level in levels:
        table.add_column(str(level["concurrency"]), justify="right")
    for name, cell in SERVED_ROWS.items():
        table.add_row(name, *map(cell, levels))
    for name in ("reasoning", "answer"):
        if any(level.get(f"acceptance_length_{name}") for level in levels):
            table.add_row(f"  in the {name}", *(_length(level.get(f"acceptance_length_{name}")) for level in levels))
    table.add_row("outputs the same", _same(result))
    return table


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


def _same(result: dict[str, Any]) -> str:
    if result["lossless"] is None:
        return "not compared"
    return "yes" if result["lossless"] else f"{result['different']} of {result['compared']} differ"


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _gain(level: dict[str, Any]) -> str:
    if level["speedup"] is None:
        return "-"
    spread = level["speedup_spread"]
    said = f"{spread[0]:.2f}-{spread[1]:.2f}" if spread else "one round"
    return f"{level['speedup']:.2f}x ({said})"


def _milliseconds(name: str) -> Callable[[dict[str, Any]], str]:
    """With the draft / without, medians."""

    def cell(level: dict[str, Any]) -> str:
        both = (level[name], level[f"baseline_{name}"])
        return " / ".join("-" if times is None else f"{1000 * times['median']:.0f}" for times in both)

    return cell


def _rates(level: dict[str, Any]) -> str:
    return " ".join("-" if rate is None else f"{rate:.2f}" for rate in level["acceptance_per_position"]) or "-"


SERVED_ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "tokens/s with draft": lambda level: _speed(level["tokens_per_second"]),
    "tokens/s without": lambda level: _speed(level["baseline_tokens_per_second"]),
    "speed-up (least-most)": _gain,
    "ms per token, with / without": _milliseconds("time_per_output_token"),
    "ms to first token": _milliseconds("time_to_first_token"),
    "acceptance length": lambda level: _length(level["acceptance_length"]),
    "  as the engine counts": lambda level: _length(level.get("engine_acceptance_length")),
    "acceptance per position": _rates,
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
