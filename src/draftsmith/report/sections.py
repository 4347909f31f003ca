"""The report's sections as plain values: what each says in words, its charts and its table rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftsmith.report.figures import Chart, acceptance_curve_chart, length_chart, loss_chart, position_chart, share
from draftsmith.report.findings import Findings, TraceFindings

FUNNEL = (
    ("ok", "finished", "ok"),
    ("cut_in_answer", "cut in the answer", "cut"),
    ("cut_in_reasoning", "cut in reasoning", "cut"),
    ("rejected", "rejected", "lost"),
    ("failed", "failed", "lost"),
)
"""State, how it is called here, kind (colour)."""
IDS_WORDS = {
    "engine": "as the target produced them",
    "rendered_verified": "rendered and checked against the server's counts",
    "rendered": "rendered from text",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FunnelRow:
    """One state of the funnel; `percent` is the bar's width."""

    name: str
    kind: str
    count: int
    shown: str
    share: str
    percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Funnel:
    """From questions to traces."""

    says: str
    rows: list[FunnelRow]
    reasons: list[tuple[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What training did, in words and curves."""

    says: str
    charts: list[Chart]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceSection:
    """Acceptance per span and position."""

    says: str
    chart: Chart | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A sentence and a table."""

    says: str
    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportTable:
    """One engine's parity check."""

    engine: str
    says: str
    rows: list[dict[str, str]]
    """name, outcome (passed, warning, failed), expected, found"""


def made_of(findings: Findings) -> str:
    """What this run is about, in a sentence."""
    if findings.traces is None:
        return "This run folder holds no traces yet."
    metadata = findings.traces.metadata
    settings = findings.manifests["traces"]["settings"]
    named = settings.get("local") or settings.get("model") or metadata.get("target") or metadata.get("tokenizer")
    target = _last_part(named) if named else "an unnamed target"
    trainable = sum(findings.traces.ids_sources.values())
    kind = "answers taken from a dataset" if metadata.get("source_kind") == "static" else "its own generations"
    return f"An EAGLE-3 draft for {target}, trained on {trainable:,} traces of {kind}."


def funnel(findings: Findings) -> Funnel | None:
    """Questions to traces by state; None without traces."""
    traces = findings.traces
    if traces is None:
        return None
    total = sum(traces.states.values())
    questions = findings.manifests["traces"]["counts"].get("questions")
    asked = f"{questions:,} questions gave {total:,} traces" if questions is not None else f"{total:,} traces"
    sources = "; ".join(
        f"{'all' if count == sum(traces.ids_sources.values()) else f'{count:,}'} {IDS_WORDS[source]}"
        for source, count in traces.ids_sources.most_common()
    )
    rows = [
        FunnelRow(
            name=name,
            kind=kind,
            count=traces.states[state],
            shown=f"{traces.states[state]:,}",
            share=share(traces.states[state] / total) if total else "",
            percent=round(100 * traces.states[state] / total, 2) if total else 0.0,
        )
        for state, name, kind in FUNNEL
    ]
    return Funnel(says=f"{asked}." + (f" Token ids: {sources}." if sources else ""), rows=rows, reasons=traces.reasons)


def lengths(traces: TraceFindings | None) -> list[Chart]:
    """Length histograms of what there is."""
    if traces is None:
        return []
    found = (("reasoning", traces.reasoning_lengths), ("answer", traces.answer_lengths))
    return [length_chart(role, values) for role, values in found if values]


def vocabulary(findings: Findings) -> Table | None:
    """What the draft vocabulary covers; None where there is none."""
    coverage = findings.coverage
    if coverage is None:
        return None
    held_out = coverage["held_out"]["all"]["share"]
    bound = "" if held_out is None else f" On held-out questions the draft can name {share(held_out)} of the ids."
    return Table(
        says=f"{coverage['size']:,} of the target's {coverage['target_size']:,} ids.{bound} A token that the draft "
        "cannot name is never accepted.",
        head=["coverage", "training", "held out", "held-out ids"],
        rows=[
            [
                name,
                share(coverage["train"][part]["share"]),
                share(coverage["held_out"][part]["share"]),
                f"{coverage['held_out'][part]['labels']:,}",
            ]
            for part, name in (("reasoning", "reasoning"), ("answer", "answer"), ("all", "all, delimiters included"))
        ],
    )


def training(findings: Findings) -> Training | None:
    """None where no draft was trained."""
    if findings.curve is None:
        return None
    charts = [loss_chart(findings.curve), acceptance_curve_chart(findings.curve)]
    counts = findings.manifests["draft"]["counts"] if "draft" in findings.manifests else {}
    tokens = counts.get("supervised_tokens") or (findings.curve.steps or [{}])[-1].get("supervised_tokens")
    said = f"{len(findings.curve.steps):,} optimizer steps"
    if tokens:
        said += f" over {tokens:,} supervised tokens"
    if counts.get("parameters"):
        said += f"; {counts['parameters'] / 1e6:,.1f} M trained parameters"
    if findings.best is not None:
        said += f". Kept: the draft with held-out acceptance length {findings.best['acceptance_length']:.2f}"
        if "step" in findings.best:
            said += f", from step {findings.best['step']:,}"
    return Training(says=said + ".", charts=[chart for chart in charts if chart is not None])


def acceptance(findings: Findings) -> AcceptanceSection | None:
    """From the measurement, or from training's best held-out evaluation where there is none; None without both."""
    result, best = findings.result, findings.best
    if result is not None:
        per_position = {
            "overall": result["acceptance_per_position"],
            "reasoning": result.get("acceptance_per_position_reasoning") or [],
            "answer": result.get("acceptance_per_position_answer") or [],
        }
        spans = {role: result.get(f"acceptance_length_{role}") for role in ("reasoning", "answer")}
        source = "Measured with the reference decoder."
    elif best is not None:
        per_position = {
            "overall": best["acceptance_per_position"],
            **{role: (best.get(role) or {}).get("acceptance_per_position") or [] for role in ("reasoning", "answer")},
        }
        spans = {role: (best.get(role) or {}).get("acceptance_length") for role in ("reasoning", "answer")}
        source = "Simulated on held-out traces while training."
    else:
        return None
    parts = [f"{length:.2f} in the {role}" for role, length in spans.items() if length]
    says = f"Tokens per target forward: {', '.join(parts)}." if parts else source
    return AcceptanceSection(says=says, chart=position_chart(per_position, source))


def exports(checks: dict[str, dict[str, Any]]) -> list[ExportTable]:
    """The parity checks, engine by engine."""
    return [ExportTable(engine=engine, says=_logits(check), rows=check["findings"]) for engine, check in checks.items()]


def _logits(check: dict[str, Any]) -> str:
    if check["difference"] is None:
        return "The draft could not be built from the exported files."
    rounding = (
        "" if check["masters_difference"] is None else f", {check['masters_difference']:.1e} from its float32 weights"
    )
    return (
        f"Logits of {check['rows']:,} real rows differ from the trainer's by {check['difference']:.1e} of the largest "
        f"(equal weights){rounding}."
    )


def _last_part(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1]
