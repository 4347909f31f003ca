"""The report's section on served engines: speed-up and acceptance over the number of parallel requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from draftsmith.report.figures import ROLES, Chart, figure_json, layout, number

EVEN_LINE = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": {"width": 1, "dash": "dot"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSection:
    """What was measured on servers."""

    says: str
    cautions: list[str]
    charts: list[Chart]
    head: list[str]
    rows: list[list[str]]


def served(result: dict[str, Any] | None, draft: str) -> ServedSection | None:
    """The section of `measure/served.json`; None where there is none.

    Args:
        result: the file.
        draft: fingerprint of the run's draft as it is now.
    """
    if result is None:
        return None
    levels = result["levels"]
    cautions = list(result["cautions"])
    if result["draft"] != draft:
        cautions.insert(0, "The run's draft was made again since: this is about an earlier one.")
    engine = " ".join(filter(None, (result["engine"], result["version"]))) or "the baseline's engine"
    compared = f" {result['compared'] - result['different']:,} of {result['compared']:,} greedy replies were the same."
    return ServedSection(
        says=f"On {engine}, {result['questions']:,} questions ({result['prompts']}): {result['verdict']}."
        + (compared if result["compared"] else ""),
        cautions=cautions,
        charts=[
            chart
            for chart in (speedup_chart(levels, result.get("same_engine") is not False), length_chart(levels))
            if chart is not None
        ],
        head=[
            "at a time",
            "tokens/s with the draft",
            "without",
            "speed-up",
            "ms per token with",
            "without",
            "accepted",
        ],
        rows=[_row(level) for level in levels],
    )


def speedup_chart(levels: list[dict[str, Any]], same_engine: bool) -> Chart | None:
    """Speed-up over concurrency with its spread; None where no level has both sides."""
    known = [level for level in levels if level["speedup"] is not None]
    if not known:
        return None
    spreads = [level["speedup_spread"] or [level["speedup"]] * 2 for level in known]  # one round has none
    figure = go.Figure(layout=layout("requests at a time", "speed-up", shapes=[EVEN_LINE]))
    figure.add_scatter(
        x=[level["concurrency"] for level in known],
        y=[level["speedup"] for level in known],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [most - level["speedup"] for level, (_, most) in zip(known, spreads, strict=True)],
            "arrayminus": [level["speedup"] - least for level, (least, _) in zip(known, spreads, strict=True)],
        },
        mode="lines+markers",
        name="Speed-up",
        meta={"role": "overall"},
        hovertemplate="%{y:.2f}x",
    )
    figure.update_xaxes(type="category", showgrid=False)
    return Chart(
        name="chart-served-speedup",
        title="Served speed-up",
        says="Output tokens per second with the draft over those without it, median of the rounds with the least and "
        "the largest. "
        + (
            "Below 1.0 the draft costs more than it saves."
            if same_engine
            else "The two servers run different engines, so this is not what the draft gains."
        ),
        figure=figure_json(figure),
        head=["requests at a time", "speed-up", "least", "largest"],
        rows=[
            [str(level["concurrency"]), *map(number, (level["speedup"], *(level["speedup_spread"] or (None, None))))]
            for level in known
        ],
    )


def length_chart(levels: list[dict[str, Any]]) -> Chart | None:
    """Acceptance length over concurrency; None where no draft was measured."""
    keys = {role: "acceptance_length" + ("" if role == "overall" else f"_{role}") for role in ROLES}
    known = [level for level in levels if level["acceptance_length"] is not None]
    if not known:
        return None
    series = {role: [level.get(key) for level in known] for role, key in keys.items()}
    series = {role: values for role, values in series.items() if any(value is not None for value in values)}
    figure = go.Figure(layout=layout("requests at a time", "tokens per forward"))
    for role, values in series.items():
        figure.add_scatter(
            x=[level["concurrency"] for level in known],
            y=values,
            mode="lines+markers",
            name=ROLES[role],
            meta={"role": role},
            hovertemplate="%{y:.2f}",
        )
    figure.update_xaxes(type="category", showgrid=False)
    return Chart(
        name="chart-served-length",
        title="Served acceptance length",
        says="It should not change with the number of requests: where it falls, the engine drafts differently in "
        "batches.",
        figure=figure_json(figure),
        head=["requests at a time", *[ROLES[role].lower() for role in series]],
        rows=[
            [str(level["concurrency"]), *[number(values[i]) for values in series.values()]]
            for i, level in enumerate(known)
        ],
    )


def _row(level: dict[str, Any]) -> list[str]:
    speeds = (level["tokens_per_second"], level["baseline_tokens_per_second"])
    times = (level["time_per_output_token"], level["baseline_time_per_output_token"])
    return [
        str(level["concurrency"]),
        *("–" if speed is None else f"{speed:,.1f}" for speed in speeds),
        "–" if level["speedup"] is None else f"{level['speedup']:.2f}x",
        *("–" if time is None else f"{1000 * time['median']:,.1f}" for time in times),
        number(level["acceptance_length"]),
    ]
