"""What a run folder tells: every number the report shows, read from the files the stages published.

A stage that is not there reads as None (or empty), never as zero. Traces are scanned once, in Arrow, without their ids;
only the few that are shown are read whole, so a run of 10,000 long traces costs seconds and little memory.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq

from draftsmith.artifacts import MANIFEST, read_json
from draftsmith.capture.sealing import reason_class
from draftsmith.errors import UserError
from draftsmith.trace import TRAINABLE, Trace, from_row, read_metadata, trace_files

STAGES = ("traces", "vocab", "hidden", "draft", "export", "measure")
SCANNED = ("trace_id", "state", "reasoning_span", "answer_span", "ids_source", "error")
SHOWN_TRACES = 5
SHOWN_REASONS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFindings:
    """Counts over all traces; lengths (in ids) over those that can be trained on; a few traces to look at."""

    states: Counter[str]
    reasons: list[tuple[str, int]]
    """Why traces were rejected or failed, most frequent first."""
    ids_sources: Counter[str]
    reasoning_lengths: list[int]
    answer_lengths: list[int]
    metadata: dict[str, str]
    shown: list[Trace]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What training logged: one dict per optimizer step, one per held-out evaluation."""

    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything known about a run."""

    run: Path
    manifests: dict[str, dict[str, Any]]
    """Of the stages that are there, in their order."""
    traces: TraceFindings | None
    coverage: dict[str, Any] | None
    curve: Curve | None
    best: dict[str, Any] | None
    """The best held-out evaluation of training."""
    checks: dict[str, dict[str, Any]]
    """Engine -> its parity check."""
    result: dict[str, Any] | None
    served: dict[str, Any] | None
    """What was measured on servers."""
    serving: dict[str, Any] | None
    """What the run's own engine made of its draft."""
    payoff: dict[str, Any] | None
    """What it would gain, worked out."""
    diagnosis: dict[str, Any] | None
    """Which link makes acceptance low."""


def read_findings(run: Path) -> Findings:
    """Reads a run folder.

    Raises:
        UserError: no stage of the run is there, or one of its files is unreadable.
    """
    manifests = {name: read_json(run / name / MANIFEST) for name in STAGES if (run / name / MANIFEST).exists()}
    if not manifests:
        raise UserError(f"{run}: expected a run folder with at least one finished stage, found none; nothing to report")
    curve = run / "draft" / "curve.jsonl"
    return Findings(
        run=run,
        manifests=manifests,
        traces=read_trace_findings(run / "traces") if "traces" in manifests else None,
        coverage=_json_if_there(run / "vocab" / "coverage.json"),
        curve=read_curve(curve) if curve.exists() else None,
        best=_json_if_there(run / "draft" / "metrics.json"),
        checks={path.parent.name: read_json(path) for path in sorted((run / "export").glob("*/check.json"))},
        result=_json_if_there(run / "measure" / "result.json"),
        served=_json_if_there(run / "measure" / "served.json"),
        serving=_json_if_there(run / "measure" / "serving.json"),
        payoff=_json_if_there(run / "measure" / "payoff.json"),
        diagnosis=_json_if_there(run / "measure" / "diagnosis.json"),
    )


def read_trace_findings(folder: Path) -> TraceFindings:
    """Scans a traces folder.

    Raises:
        UserError: the folder holds no trace files.
    """
    states: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    reasoning: list[int] = []
    answer: list[int] = []
    trainable: list[str] = []
    for path in trace_files(folder):
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096, columns=list(SCANNED)):
                for row in batch.to_pylist():
                    states[row["state"]] += 1
                    if row["state"] not in TRAINABLE:
                        reasons[reason_class(row["error"]) or "no reason recorded"] += 1
                        continue
                    sources[row["ids_source"]] += 1
                    trainable.append(row["trace_id"])
                    for span, lengths in ((row["reasoning_span"], reasoning), (row["answer_span"], answer)):
                        if span is not None:
                            lengths.append(span[1] - span[0])
    return TraceFindings(
        states=states,
        reasons=reasons.most_common(SHOWN_REASONS),
        ids_sources=sources,
        reasoning_lengths=reasoning,
        answer_lengths=answer,
        metadata=read_metadata(folder),
        shown=_read_chosen(folder, spread(trainable, SHOWN_TRACES)),
    )


def read_curve(path: Path) -> Curve:
    """Reads training's log: JSON lines of kind `step` and `eval`.

    Raises:
        UserError: a line is not JSON.
    """
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise UserError(f"{path}:{number}: expected a JSON line, found something else ({error})") from None
    return Curve(
        steps=[line for line in lines if line["kind"] == "step"],
        evaluations=[line for line in lines if line["kind"] == "eval"],
    )


def spread(items: list[str], count: int) -> list[str]:
    """At most `count` items, evenly spaced over the list, first and last included."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _read_chosen(folder: Path, trace_ids: list[str]) -> list[Trace]:
    dataset = ds.dataset([str(path) for path in trace_files(folder)], format="parquet")
    rows = dataset.to_table(filter=ds.field("trace_id").isin(trace_ids)).to_pylist()
    found = {row["trace_id"]: from_row(row) for row in rows}
    return [found[trace_id] for trace_id in trace_ids]


def _json_if_there(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    loaded: dict[str, Any] = read_json(path)
    return loaded
