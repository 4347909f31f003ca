"""The report's section on diagnosis: the verdict, the chain link by link, the suspects tried, what to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftsmith.measure.diagnosis_words import noise_words, value_words
from draftsmith.measure.links import NAMES

FALLS = {"yes": "the fault is here", "cannot tell": "cannot tell whether acceptance falls here", "no": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisSection:
    """Which link makes acceptance low."""

    says: str
    cautions: list[str]
    links: list[list[str]]
    """Name, value, noise, questions, and what was measured there."""
    fallen: list[bool]
    """By link: this is where acceptance falls."""
    suspects: list[list[str]]
    """Name, link, as it is, put right, evidence."""
    advice: list[str]


def diagnosis(result: dict[str, Any] | None, draft: str) -> DiagnosisSection | None:
    """The section of `measure/diagnosis.json`; None where there is none.

    Args:
        result: the file.
        draft: fingerprint of the run's draft as it is now.
    """
    if result is None:
        return None
    cautions = []
    if result["of"] is not None:
        cautions.append(f"This is about the draft in {result['of']}, not about the run's own.")
    elif result["draft"] != draft:
        cautions.append("The run's draft was made again since: this is about an earlier one.")
    suspects = [suspect for link in result["links"] for suspect in link["suspects"]]
    return DiagnosisSection(
        says=f"{result['verdict'].rstrip('.')}.",
        cautions=cautions,
        links=[
            [
                link["name"],
                value_words(link["name"], link["value"]),
                noise_words(link["noise"]),
                str(link["questions"] or "-"),
                "; ".join(filter(None, (FALLS[link["fell"]], NAMES[link["name"]], link["note"]))),
            ]
            for link in result["links"]
        ],
        fallen=[link["fell"] == "yes" for link in result["links"]],
        suspects=[
            [one["name"], one["link"], _length(one["before"]), _length(one["after"]), one["found"]] for one in suspects
        ],
        advice=list(result["advice"]),
    )


def _length(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
