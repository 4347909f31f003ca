"""The report of a run: one HTML file that is complete in itself, made from what the stages published.

It inlines plotly.js once (4.8 MB, the bulk of the file), loads nothing, and its content security policy forbids it to.
Everything from a run folder is untrusted text: templates escape it, figures go in as JSON with `<`, `>` and `&` written
as escapes. A stage that is missing says so in one line. Making it takes seconds.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from draftsmith import __version__
from draftsmith.artifacts import Stage
from draftsmith.errors import UserError
from draftsmith.progress import Progress, clock
from draftsmith.recipe import ReportSettings
from draftsmith.report.coloured import Decode, ShownTrace, show
from draftsmith.report.diagnosis import diagnosis
from draftsmith.report.figures import Chart
from draftsmith.report.findings import Findings, TraceFindings, read_findings
from draftsmith.report.payoff import payoff
from draftsmith.report.sections import acceptance, exports, funnel, lengths, made_of, training, vocabulary
from draftsmith.report.served import served
from draftsmith.report.serving import serving
from draftsmith.report.verdict import verdict
from draftsmith.target.template import load_template

PAGE = "report.html"


def build(stage: Stage, settings: ReportSettings, progress: Progress) -> dict[str, Any]:
    """Writes `report.html` from the run's published stages.

    Args:
        stage: where to write, and the run.
        settings: the report has none; the argument is what every stage's `build` takes.
        progress: told when the traces' tokenizer cannot be loaded.

    Returns:
        Counts for the manifest: bytes, charts, shown traces.

    Raises:
        UserError: nothing of the run is there, or one of its files is unreadable.
    """
    findings = read_findings(stage.run)
    charts, text = render_report(findings, progress)
    return {
        "bytes": write_page(stage.work / PAGE, text),
        "charts": charts,
        "traces": len(findings.traces.shown) if findings.traces else 0,
    }


def render_report(findings: Findings, progress: Progress) -> tuple[int, str]:
    """The number of charts, and the page."""
    length_charts = lengths(findings.traces)
    trained = training(findings)
    accepted = acceptance(findings)
    shown, says = _shown(findings, progress)
    draft = findings.manifests.get("draft", {}).get("fingerprint", "")
    on_servers = served(findings.served, draft)
    own_engine = serving(findings.serving, draft)
    paying = payoff(findings.payoff, draft)
    charts = [
        *length_charts,
        *(trained.charts if trained else ()),
        *([accepted.chart] if accepted and accepted.chart else ()),
        *(on_servers.charts if on_servers else ()),
        *([own_engine.chart] if own_engine and own_engine.chart else ()),
        *([paying.chart] if paying else ()),
    ]
    text = render(
        "report.html.jinja",
        charts,
        name=findings.run.resolve().name,
        run=str(findings.run),
        verdict=verdict(findings.result, str(findings.run)),
        made_of=made_of(findings),
        funnel=funnel(findings),
        lengths=length_charts,
        vocabulary=vocabulary(findings),
        training=trained,
        acceptance=accepted,
        served=on_servers,
        serving=own_engine,
        payoff=paying,
        diagnosis=diagnosis(findings.diagnosis, draft),
        traces=shown,
        traces_say=says,
        exports=exports(findings.checks),
        stages=[_stage(name, manifest) for name, manifest in findings.manifests.items()],
    )
    return len(charts), text


def render(template: str, charts: list[Chart], **values: Any) -> str:
    """A page of the report's look; `charts` are drawn where the template places them."""
    environment = Environment(
        loader=PackageLoader("draftsmith.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = _code
    return environment.get_template(template).render(
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        style=Markup(_asset("style.css")),
        script=Markup(_asset("charts.js")),
        plotly=Markup(get_plotlyjs()) if charts else "",
        figures=htmlsafe_json_dumps({chart.name: chart.figure for chart in charts}),
        charts=bool(charts),
        **values,
    )


def write_page(path: Path, text: str) -> int:
    """Writes a page whole or not at all; returns its size in bytes."""
    temporary = path.with_name(path.name + ".tmp")
    data = text.encode("utf-8", errors="replace")
    temporary.write_bytes(data)
    os.replace(temporary, path)
    return len(data)


def _shown(findings: Findings, progress: Progress) -> tuple[list[ShownTrace], str]:
    if findings.traces is None or not findings.traces.shown:
        return [], ""
    decode, problem = _decoder(findings, findings.traces)
    if problem:
        progress.say(f"report: {problem}; showing the traces' text instead of their ids")
    says = (
        f"{len(findings.traces.shown)} traces, evenly spaced over the run, decoded from their ids. The draft learns "
        "the coloured ids; the grey ones only give it context."
    )
    if problem:
        says = f"The text columns of {len(findings.traces.shown)} traces; ids are not shown, because {problem}."
    return [show(trace, decode) for trace in findings.traces.shown], says


def _decoder(findings: Findings, traces: TraceFindings) -> tuple[Decode | None, str]:
    """How ids become text, or why they cannot."""
    name = traces.metadata.get("tokenizer", "")
    if not name:
        return None, "the traces name no tokenizer"
    trust = bool(findings.manifests["traces"]["settings"].get("trust_remote_code"))
    try:
        return load_template(name, {}, trust).decode, ""
    except UserError as error:
        return None, f"their tokenizer cannot be loaded ({error})"


def _stage(name: str, manifest: dict[str, Any]) -> dict[str, str]:
    kept = {key: manifest[key] for key in ("settings", "inputs", "counts", "versions", "fingerprint")}
    return {
        "name": name,
        "made": manifest["made"],
        "took": clock(manifest["seconds"]),
        "manifest": json.dumps(kept, indent=2, ensure_ascii=False),
    }


def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _code(text: str) -> Markup:
    """Text with `backticked` parts as code."""
    parts = [escape(part) for part in text.split("`")]
    return Markup("").join(Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts))
