"""What a measured run, or its arms side by side, look like on the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from draftsmith.artifacts import read_json
from draftsmith.measure.serving_view import SERVING, serving_words
from draftsmith.measure.summary import comparison_table, result_table, served_table


def print_results(arms: Mapping[str, Path], as_json: bool) -> None:
    """The reference measurements of runs, by the name of their arm."""
    files = {arm: folder / "measure" / "result.json" for arm, folder in arms.items()}
    if as_json:
        results = {arm: read_json(file) for arm, file in files.items()}
        print(json.dumps(results if len(arms) > 1 else next(iter(results.values()))))
    elif len(arms) > 1:
        Console().print(comparison_table(files))
    else:
        Console().print(result_table(next(iter(files.values()))))


def print_served(arms: Mapping[str, Path]) -> None:
    """What their own engines made of their drafts, where a recipe ended in serving."""
    for arm, folder in arms.items():
        file = folder / "measure" / SERVING
        if not file.exists():
            continue
        found = read_json(file)
        print(f"\nserved by {found['engine']}{f' ({arm})' if arm else ''}:")
        Console(highlight=False).print(served_table(found), markup=False)
        for line in serving_words(found):
            print(f"- {line}")
