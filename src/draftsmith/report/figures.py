"""The charts of the report, as plotly figures with one shared layout.

Colour is the page's business: a series only names its role (`meta.role`: overall, reasoning, answer, step) and the page
colours it from its style sheet, in light and in dark. Every chart comes with the table of its numbers, which is what a
screen reader gets and what is there when scripts are off.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from draftsmith.report.findings import Curve

FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"
POINTS = 300
"""Points of a curve at most; longer ones are averaged in blocks."""
BINS = 30
ROLES = {"overall": "Overall", "reasoning": "Reasoning", "answer": "Answer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart: what it shows in a sentence, its figure as JSON, its numbers as a table."""

    name: str
    """Element id, unique on the page."""
    title: str
    says: str
    figure: dict[str, Any]
    head: list[str]
    rows: list[list[str]]


def layout(x: str, y: str, **more: Any) -> dict[str, Any]:
    """The layout all charts share; `x`, `y` are axis titles."""
    axis = {"automargin": True, "fixedrange": True, "zeroline": False}
    return {
        "font": {"family": FONTS, "size": 13},
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "height": 300,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "x unified",
        "dragmode": False,
        "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.02, "xanchor": "left", "x": 0},
        "xaxis": {**axis, "title": {"text": x, "font": {"size": 12}}},
        "yaxis": {**axis, "title": {"text": y, "font": {"size": 12}}},
        **more,
    }


def length_chart(role: str, lengths: Sequence[int]) -> Chart:
    """Histogram of span lengths in ids.

    Args:
        role: `reasoning` or `answer`.
        lengths: at least one.
    """
    edges, counts = histogram(lengths)
    median = sorted(lengths)[len(lengths) // 2]
    width = edges[1] - edges[0]
    ranges = [f"{edge:,}" if width == 1 else f"{edge:,}-{edge + width - 1:,}" for edge in edges[:-1]]
    bars = go.Bar(
        x=[edge + (width - 1) / 2 for edge in edges[:-1]],
        y=counts,
        width=width,
        customdata=ranges,
        hovertemplate="%{customdata} ids: %{y:,} traces<extra></extra>",
        meta={"role": role},
        name=ROLES[role],
    )
    figure = go.Figure(bars, layout(f"ids in the {role}", "traces", hovermode="closest"))
    figure.update_xaxes(showgrid=False)
    return Chart(
        name=f"chart-length-{role}",
        title=f"{ROLES[role]} length",
        says=f"{len(lengths):,} traces, median {median:,} ids, longest {max(lengths):,}.",
        figure=figure_json(figure),
        head=["ids", "traces"],
        rows=[[label, f"{count:,}"] for label, count in zip(ranges, counts, strict=True)],
    )


def loss_chart(curve: Curve) -> Chart | None:
    """Training loss per TTT step over optimizer steps; None where training logged no step."""
    if not curve.steps:
        return None
    blocks = thinned(curve.steps, POINTS)
    unrolled = len(curve.steps[0]["loss"])
    figure = go.Figure(layout=layout("optimizer step", "loss (nats)"))
    for k in range(unrolled):
        figure.add_scatter(
            x=[block[-1]["step"] for block in blocks],
            y=[_mean([line["loss"][k] for line in block]) for block in blocks],
            mode="lines",
            name=f"step {k + 1}",
            opacity=1 - 0.6 * k / max(1, unrolled - 1),
            line={"width": 2},
            meta={"role": "step"},
            hovertemplate="%{y:.3f}",
        )
    first, last = curve.steps[0]["loss"][0], curve.steps[-1]["loss"][0]
    return Chart(
        name="chart-loss",
        title="Loss",
        says=f"One line per step of the unrolled draft; the first step went from {number(first)} to {number(last)} "
        f"in {len(curve.steps):,} optimizer steps.",
        figure=figure_json(figure),
        head=["optimizer step", *[f"step {k + 1}" for k in range(unrolled)]],
        rows=[
            [f"{block[-1]['step']:,}", *[number(_mean([line["loss"][k] for line in block])) for k in range(unrolled)]]
            for block in thinned(curve.steps, 20)
        ],
    )


def acceptance_curve_chart(curve: Curve) -> Chart | None:
    """Held-out acceptance length over optimizer steps, as training simulated it; None without an evaluation."""
    if not curve.evaluations:
        return None
    series = {role: [_evaluated(line, role, "acceptance_length") for line in curve.evaluations] for role in ROLES}
    series = {role: values for role, values in series.items() if any(value is not None for value in values)}
    steps = [line["step"] for line in curve.evaluations]
    figure = go.Figure(layout=layout("optimizer step", "tokens per forward"))
    for role, values in series.items():
        figure.add_scatter(
            x=steps,
            y=values,
            mode="lines+markers",
            name=ROLES[role],
            line={"width": 3 if role == "overall" else 2},
            meta={"role": role},
            hovertemplate="%{y:.2f}",
        )
    best = max(value for value in series["overall"] if value is not None)
    return Chart(
        name="chart-acceptance-curve",
        title="Held-out acceptance length while training",
        says=f"Greedy chain simulated on held-out traces; best {best:.2f}. 1.0 means that the draft does nothing.",
        figure=figure_json(figure),
        head=["optimizer step", *[ROLES[role].lower() for role in series]],
        rows=[[f"{step:,}", *[number(values[i]) for values in series.values()]] for i, step in enumerate(steps)],
    )


def position_chart(per_position: dict[str, Sequence[float | None]], source: str) -> Chart | None:
    """Conditional acceptance per draft position.

    Args:
        per_position: role (overall, reasoning, answer) -> acceptance of positions 1, 2, ..., each given that all
            before it were accepted. None: that position was never reached.
        source: where the numbers come from, for the sentence.
    """
    series = {role: values for role, values in per_position.items() if values}
    if not series:
        return None
    positions = range(1, 1 + max(len(values) for values in series.values()))
    figure = go.Figure(layout=layout("draft position", "accepted", barmode="group", bargap=0.28, bargroupgap=0.06))
    for role, values in series.items():
        figure.add_bar(
            x=list(positions)[: len(values)],
            y=list(values),
            name=ROLES[role],
            meta={"role": role},
            hovertemplate="%{y:.1%}",
        )
    figure.update_yaxes(range=[0, 1], tickformat=".0%")
    figure.update_xaxes(dtick=1, showgrid=False)
    return Chart(
        name="chart-positions",
        title="Acceptance per position",
        says="Conditional: of the drafts whose earlier tokens were all accepted, the share whose token at this "
        f"position was accepted too. {source}",
        figure=figure_json(figure),
        head=["position", *[ROLES[role].lower() for role in series]],
        rows=[
            [str(p), *[share(values[p - 1]) if p <= len(values) else "" for values in series.values()]]
            for p in positions
        ],
    )


def arms_chart(lengths: dict[str, dict[str, float | None]]) -> Chart:
    """Acceptance length per arm of a comparison; `lengths` is arm -> role -> acceptance length."""
    roles = [role for role in ROLES if any(values.get(role) is not None for values in lengths.values())]
    figure = go.Figure(layout=layout("", "tokens per forward", barmode="group", bargap=0.35, bargroupgap=0.06))
    for role in roles:
        figure.add_bar(
            x=list(lengths),
            y=[values.get(role) for values in lengths.values()],
            name=ROLES[role],
            meta={"role": role},
            hovertemplate="%{y:.2f}",
        )
    figure.update_xaxes(type="category", showgrid=False)
    return Chart(
        name="chart-arms",
        title="Acceptance length per arm",
        says="Mean tokens per target forward, bonus token included. 1.0 means that the draft does nothing.",
        figure=figure_json(figure),
        head=["arm", *[ROLES[role].lower() for role in roles]],
        rows=[[arm, *[number(values.get(role)) for role in roles]] for arm, values in lengths.items()],
    )


def histogram(lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """At most BINS + 1 whole-number bins of equal width: edges (one more than counts) and counts.

    Args:
        lengths: at least one, none negative.
    """
    width = math.ceil((max(lengths) - min(lengths) + 1) / BINS)
    first, last = min(lengths) // width, max(lengths) // width
    counts = [0] * (last - first + 1)
    for length in lengths:
        counts[length // width - first] += 1
    return [i * width for i in range(first, last + 2)], counts


def thinned(lines: Sequence[dict[str, Any]], most: int) -> list[list[dict[str, Any]]]:
    """Consecutive blocks of lines, at most `most` of them, every line in one."""
    size = math.ceil(len(lines) / most)
    return [list(lines[start : start + size]) for start in range(0, len(lines), size)]


def number(value: float | None) -> str:
    """A number with what precision it deserves; a dash where there is none."""
    return "–" if value is None else f"{value:.3f}"


def share(value: float | None) -> str:
    """A share in per cent; a dash where there is none."""
    return "–" if value is None else f"{value:.1%}"


def _evaluated(line: dict[str, Any], role: str, key: str) -> Any:
    part = line if role == "overall" else line.get(role)
    return part.get(key) if part else None


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def figure_json(figure: go.Figure) -> dict[str, Any]:
    """A figure as plain values."""
    plain: dict[str, Any] = json.loads(figure.to_json())
    plain["layout"].pop("template", None)  # 6 KB per chart of colours that the page sets itself
    return plain
