"""The report's part on the run's own engine: acceptance beside the reference's, predictions beside measurements."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import plotly.graph_objects as go

from draftsmith.measure.serving_view import agreement_words
from draftsmith.report.figures import Chart, figure_json, layout, share

OFF = 0.15
"""Predictions further from what was measured are no guide, and that is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPart:
    """What an engine made of the run's draft."""

    says: str
    cautions: list[str]
    chart: Chart | None
    head: list[str]
    rows: list[list[str]]
    """Predicted and measured speed-up, by requests at a time."""


def serving(result: dict[str, Any] | None, draft: str) -> ServingPart | None:
    """The part of `measure/serving.json`; None where there is none.

    Args:
        result: the file.
        draft: fingerprint of the run's draft as it is now.
    """
    if result is None:
        return None
    return ServingPart(
        says="; ".join(agreement_words(result)) + ".",
        cautions=_cautions(result, draft),
        chart=positions_chart(result["engine"], result["acceptance"]),
        head=["at a time", "predicted", "measured", "off"],
        rows=[
            [str(one["concurrency"]), f"{one['predicted']:.2f}x", f"{one['measured']:.2f}x", f"{one['off']:+.0%}"]
            for one in result["predictions"]
        ],
    )


def positions_chart(engine: str, acceptance: dict[str, Any]) -> Chart | None:
    """What was accepted at each position, of all drafts, beside the reference decoder; None where an engine does not
    count it."""
    if not acceptance["served"]:
        return None
    pairs = list(zip_longest(acceptance["served"], acceptance["reference"], fillvalue=0.0))
    positions = list(range(1, len(pairs) + 1))
    figure = go.Figure(layout=layout("draft position", "accepted", barmode="group", bargap=0.35, bargroupgap=0.06))
    for side, (name, opacity) in enumerate(((engine, 1.0), ("reference decoder", 0.4))):
        figure.add_bar(
            x=positions,
            y=[pair[side] for pair in pairs],
            name=name,
            opacity=opacity,
            meta={"role": "overall"},
            hovertemplate="%{y:.1%}",
        )
    figure.update_yaxes(range=[0, 1], tickformat=".0%")
    figure.update_xaxes(dtick=1, showgrid=False)
    return Chart(
        name="chart-serving-positions",
        title="Acceptance in the engine and in the reference",
        says="Shares of all drafts, as engines count, over the same questions.",
        figure=figure_json(figure),
        head=["position", engine, "reference decoder"],
        rows=[[str(position), *map(share, pair)] for position, pair in zip(positions, pairs, strict=True)],
    )


def _cautions(result: dict[str, Any], draft: str) -> list[str]:
    found = []
    if result["draft"] != draft:
        found.append("The run's draft was made again since: this is about an earlier one.")
    if result["acceptance"]["agrees"] is False:
        found.append("The engine does not accept what the reference decoder does: draftsmith diagnose finds out why.")
    if result["candidates"] and not result["candidates"]["agrees"]:
        found.append("The engine does not draft what the trained draft does.")
    off = [str(one["concurrency"]) for one in result["predictions"] if abs(one["off"]) > OFF]
    if off:
        found.append(f"At {', '.join(off)} at a time the prediction is more than {OFF:.0%} off.")
    return found
