"""The page that sets the arms of a comparison side by side: same questions, same budget, one difference.

It compares only what was measured alike, and says so where it was not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.artifacts import MANIFEST, read_json
from draftsmith.report.figures import arms_chart, number
from draftsmith.report.page import PAGE, render, write_page
from draftsmith.report.verdict import Fact, Mood, rate, sampling_words
from draftsmith.trace import read_metadata

SAME = 0.02
"""Acceptance lengths closer than this are called equal."""
ALIKE = ("draft_tokens", "questions", "prompts", "temperature", "top_p", "top_k", "max_tokens")
"""Keys of a result, or of its sampling, that must agree for acceptance lengths to be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One arm: its measurement and what its draft was trained on; None or empty where a stage is missing."""

    name: str
    result: dict[str, Any] | None
    draft: dict[str, Any]
    """Counts of the draft's manifest."""
    source_kind: str


def compare_page(run: Path, arms: list[str]) -> Path:
    """Writes `RUN/report/report.html` for the arms in `RUN/<arm>`, and returns its path.

    Raises:
        UserError: a file of an arm is unreadable.
    """
    found = [_read_arm(run / arm, arm) for arm in arms]
    path = run / "report" / PAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_page(path, render_comparison(run.resolve().name, found))
    return path


def render_comparison(name: str, arms: list[Arm]) -> str:
    """The page as HTML."""
    measured = {arm.name: arm.result for arm in arms if arm.result is not None}
    lengths = {
        name: {
            "overall": result["acceptance_length"],
            "reasoning": result.get("acceptance_length_reasoning"),
            "answer": result.get("acceptance_length_answer"),
        }
        for name, result in measured.items()
    }
    drawn = arms_chart(lengths) if lengths else None
    sentence, mood = _sentence({name: values["overall"] for name, values in lengths.items()})
    return render(
        "compare.html.jinja",
        [drawn] if drawn else [],
        name=name,
        sentence=sentence,
        mood=mood,
        made_of=f"{len(arms)} drafts for one target, measured on held-out questions. Acceptance length is the mean "
        "number of tokens per target forward, bonus token included.",
        facts=[_fact(arm) for arm in arms],
        cautions=_cautions(arms),
        drawn=drawn,
        arms=[arm.name for arm in arms],
        rows=_rows(arms),
    )


def _read_arm(folder: Path, name: str) -> Arm:
    result, draft = folder / "measure" / "result.json", folder / "draft" / MANIFEST
    traces = folder / "traces"
    return Arm(
        name=name,
        result=read_json(result) if result.exists() else None,
        draft=read_json(draft)["counts"] if draft.exists() else {},
        source_kind=read_metadata(traces).get("source_kind", "") if (traces / MANIFEST).exists() else "",
    )


def _sentence(lengths: dict[str, float | None]) -> tuple[str, Mood]:
    ranked = sorted(((value, name) for name, value in lengths.items() if value is not None), reverse=True)
    if len(ranked) < 2:
        return "Nothing to compare yet: fewer than two arms have an acceptance length.", "none"
    (best, first), (next_best, second) = ranked[:2]
    if best - next_best < SAME:
        return f"No difference: {first} and {second} both reach {best:.2f} tokens per target forward.", "even"
    return f"{first} leads: {best:.2f} tokens per target forward against {next_best:.2f} for {second}.", "good"


def _fact(arm: Arm) -> Fact:
    length = arm.result["acceptance_length"] if arm.result else None
    if length is None:
        return Fact(name=arm.name, value="–", means="not measured" if arm.result is None else "no reply to count")
    return Fact(name=arm.name, value=f"{length:.2f}", means="tokens per target forward" + _trained_on(arm.source_kind))


def _trained_on(source_kind: str) -> str:
    words = {"static": "the dataset's own answers", "capture": "the target's own generations"}
    return f"; trained on {words[source_kind]}" if source_kind in words else ""


def _cautions(arms: list[Arm]) -> list[str]:
    results = [arm.result for arm in arms if arm.result is not None]
    cautions = [f"{arm.name} is not measured yet." for arm in arms if arm.result is None]
    for key in ALIKE:
        values = [result.get(key, result["sampling"].get(key)) for result in results]
        if any(value != values[0] for value in values):
            listed = ", ".join(str(value) for value in values)
            cautions.append(
                f"The arms were not measured alike ({key.replace('_', ' ')}: {listed}): do not compare them."
            )
    budgets = [arm.draft["supervised_tokens"] for arm in arms if "supervised_tokens" in arm.draft]
    if budgets and max(budgets) > 1.05 * min(budgets):
        cautions.append(
            f"The training budgets differ ({', '.join(f'{budget:,}' for budget in budgets)} supervised tokens): set "
            "train.token_budget to what the smaller arm has."
        )
    return cautions


def _rows(arms: list[Arm]) -> list[tuple[str, list[str]]]:
    results = [arm.result or {} for arm in arms]
    return [
        ("acceptance length", [number(result.get("acceptance_length")) for result in results]),
        ("in the reasoning", [number(result.get("acceptance_length_reasoning")) for result in results]),
        ("in the answer", [number(result.get("acceptance_length_answer")) for result in results]),
        ("speed-up", [f"{result['speedup']:.2f}×" if "speedup" in result else "–" for result in results]),
        ("tokens per second", [rate(r["tokens_per_second"]) if "tokens_per_second" in r else "–" for r in results]),
        (
            "without the draft",
            [rate(r["baseline_tokens_per_second"]) if "baseline_tokens_per_second" in r else "–" for r in results],
        ),
        ("lossless", [_yes_or_no(result.get("lossless")) for result in results]),
        ("questions", [f"{result['questions']:,}" if "questions" in result else "–" for result in results]),
        ("sampling", [sampling_words(result["sampling"]) if "sampling" in result else "–" for result in results]),
        (
            "supervised tokens",
            [f"{arm.draft['supervised_tokens']:,}" if "supervised_tokens" in arm.draft else "–" for arm in arms],
        ),
        ("traces", [{"static": "static text", "capture": "captured"}.get(arm.source_kind, "–") for arm in arms]),
    ]


def _yes_or_no(value: bool | None) -> str:
    return "–" if value is None else "yes" if value else "no"
