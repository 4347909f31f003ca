"""A served measurement that is done: how it is recognised, and what it says. Light, because finished runs only look."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

from draftsmith.artifacts import fingerprint, manifest, read_json
from draftsmith.recipe import MeasureSettings, ServingSettings

SERVING = "serving.json"
POINTS = 0.02
"""How far an engine's acceptance at a position may be from the reference decoder's."""


def serving_plan(run: Path, settings: ServingSettings, measure: MeasureSettings) -> str:
    """The same as long as neither the settings nor anything behind the measurement has changed."""
    behind = [str(manifest(run, stage)["fingerprint"]) for stage in ("draft", "export", "measure")]
    return fingerprint([settings.shaping(), measure.shaping(), *behind])


def finished(run: Path, settings: ServingSettings, measure: MeasureSettings) -> dict[str, Any] | None:
    """What was measured by this plan; None if it was not yet."""
    file = run / "measure" / SERVING
    found: dict[str, Any] | None = read_json(file) if file.exists() else None
    return found if found and found["plan"] == serving_plan(run, settings, measure) else None


def agreement_words(found: dict[str, Any]) -> list[str]:
    """Whether the engine does what the reference decoder and the trained draft do, in sentences."""
    lines = []
    same = found["acceptance"]
    if same["agrees"] is None:
        lines.append(f"{found['engine']} does not count what it accepts per position")
    else:
        pairs = zip_longest(same["served"], same["reference"], fillvalue=0.0)
        lines.append(
            f"{found['engine']} accepts at positions 1 to {len(same['served'])}, of all drafts: "
            + ", ".join(f"{one:.3f} (reference {two:.3f})" for one, two in pairs)
            + f"; {'within' if same['agrees'] else 'NOT within'} {POINTS:.0%} at every position"
        )
    if found["candidates"]:
        one = found["candidates"]
        lines.append(f"its draft candidates equal ours at {one['share']:.1%} of {one['positions']} positions")
    if found["compared"]:
        outputs = "equal the baseline's" if found["lossless"] else "do NOT all equal the baseline's"
        lines.append(f"outputs {outputs} ({found['compared'] - found['different']} of {found['compared']})")
    return lines


def serving_words(found: dict[str, Any]) -> list[str]:
    """What was found, in sentences."""
    predictions = [
        f"at {one['concurrency']}: {one['measured']:.2f}x measured, {one['predicted']:.2f}x predicted beforehand "
        f"({one['off']:+.0%})"
        for one in found["predictions"]
    ]
    return [*agreement_words(found), *predictions, *found["payoff"], found["bigger_target"]]
