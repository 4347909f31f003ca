"""The report's section on payoff: what the draft would gain, by draft tokens and requests at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from draftsmith.report.figures import Chart, figure_json, layout, number
from draftsmith.report.served import EVEN_LINE


@dataclass(frozen=True, slots=True, kw_only=True)
class PayoffSection:
    """What was worked out."""

    says: list[str]
    cautions: list[str]
    chart: Chart


def payoff(result: dict[str, Any] | None, draft: str) -> PayoffSection | None:
    """The section of `measure/payoff.json`; None where there is none.

    Args:
        result: the file.
        draft: fingerprint of the run's draft as it is now.
    """
    if result is None:
        return None
    cautions = list(result["cautions"])
    if result["draft"] != draft and result["acceptance_from"] != "assumed":
        cautions.insert(0, "The run's draft was made again since: this is about an earlier one.")
    source = f"Acceptance: {result['acceptance_from']}. Steps: {result['steps_from']}."
    return PayoffSection(
        says=[" ".join(result["words"]), result["bigger_target"], source],
        cautions=cautions,
        chart=payoff_chart(result["cells"]),
    )


def payoff_chart(cells: list[dict[str, Any]]) -> Chart:
    """Speed-up over draft tokens, a line for each number of requests at a time."""
    levels = sorted({cell["concurrency"] for cell in cells})
    depths = sorted({cell["draft_tokens"] for cell in cells})
    speeds = {(cell["concurrency"], cell["draft_tokens"]): cell["speedup"] for cell in cells}
    figure = go.Figure(layout=layout("draft tokens", "speed-up", shapes=[EVEN_LINE]))
    for index, level in enumerate(levels):
        figure.add_scatter(
            x=depths,
            y=[speeds[level, depth] for depth in depths],
            mode="lines+markers",
            name=f"{level} at a time",
            opacity=1 - 0.6 * index / max(1, len(levels) - 1),
            line={"width": 2},
            meta={"role": "step"},
            hovertemplate="%{y:.2f}x",
        )
    figure.update_xaxes(dtick=1, showgrid=False)
    return Chart(
        name="chart-payoff",
        title="Predicted speed-up",
        says="From acceptance per position and step times, for decoding alone. Below 1.0 the draft costs more than it "
        "saves.",
        figure=figure_json(figure),
        head=["draft tokens", *(f"{level} at a time" for level in levels)],
        rows=[[str(depth), *(number(speeds[level, depth]) for level in levels)] for depth in depths],
    )
