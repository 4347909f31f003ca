"""A look at training data before hours of GPU time go into it: how much there is, how exact, how long, what is wrong.

One pass over the files, a batch of ids at a time: 10,000 replies of 8,192 ids take seconds, memory is a few hundred
bytes a reply. Works on our traces and on what other tools write (`peers`). With the target's tokenizer it also sees
whether masks start where replies do, whether text and ids agree, and think delimiters in files that do not say theirs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from draftsmith.capture.sealing import reason_class
from draftsmith.data.checks import STOP_SHARE, Finding, Tally, verdict
from draftsmith.data.masks import (
    AFTER_DELIMITER,
    ON_DELIMITER,
    START_UNKNOWN,
    ReplyStart,
    end_fault,
    mask_fault,
    reply_start,
    start_fault,
    supervised_spans,
)
from draftsmith.data.peers import Masked, Source, masked_batches, open_source, trace_batches
from draftsmith.data.ragged import Bools, Ints, from_arrow
from draftsmith.data.replies import (
    Collected,
    Limits,
    Replies,
    keep_chosen,
    keep_longest,
    look,
    note_likeness,
    percentiles,
)
from draftsmith.data.texts import look_at_texts
from draftsmith.errors import UserError
from draftsmith.progress import Progress
from draftsmith.recipe import InspectSettings
from draftsmith.target.embedded import resolve_model
from draftsmith.target.template import Template, load_template
from draftsmith.target.thinking import Delimiters, delimiters_from_json, find_delimiters, text_of
from draftsmith.trace import TRAINABLE, Trace

COMPARED = 64
"""Replies whose text is compared with their ids."""
MASK_CHECKS = {
    "mask of another length": "mask_length",
    "mask not 0 or 1": "mask_value",
    "mask all zero": "mask_zero",
    "mask all ones": "mask_ones",
    "mask starts early": "mask_early",
    "mask starts late": "mask_late",
    "mask covers a prompt": "mask_prompt",
    "mask ends early": "mask_ends_early",
    START_UNKNOWN: "mask_start_unknown",
    AFTER_DELIMITER: "mask_after_delimiter",
    ON_DELIMITER: "mask_on_delimiter",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What was found. Lengths are in ids, for texts in characters."""

    path: str
    kind: str
    metadata: dict[str, str]
    rows: int
    replies: int
    trainable: int
    lengths: dict[str, dict[str, Any]]
    shares: dict[str, dict[str, int]]
    """`state`, `ids_source`, `finish_reason`, `reason` -> value -> replies."""
    findings: list[Finding]
    verdict: str
    notes: list[str]
    """What was not looked at, and why."""
    longest: list[tuple[int, str]]
    examples: list[Trace]
    template: Template | None
    """For showing the examples."""

    def as_json(self) -> dict[str, Any]:
        """JSON types; examples with their text columns, without their ids."""
        plain = {name: getattr(self, name) for name in ("path", "kind", "rows", "replies", "trainable", "lengths")}
        return {
            **plain,
            "shares": self.shares,
            "findings": [asdict(finding) for finding in self.findings],
            "verdict": self.verdict,
            "notes": self.notes,
            "longest": [{"length": length, "row": name} for length, name in self.longest],
            "examples": [_example(trace) for trace in self.examples],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is known about the target that the ids are of."""

    template: Template | None
    delimiters: Delimiters | None
    stop_ids: frozenset[int]
    start: ReplyStart | None
    limits: Limits
    notes: list[str]


def inspect(path: Path, settings: InspectSettings, progress: Progress) -> Inspection:
    """Looks at a traces folder, a run folder, or another tool's file or folder.

    Raises:
        UserError: nothing there that is known, or a file is damaged; the tokenizer cannot be loaded.
    """
    source = open_source(path)
    target = _target(source, settings, progress)
    tally, kept = Tally(), Collected()
    if source.kind in ("conversations", "text"):
        rows = look_at_texts(source, target.template, target.delimiters, target.start, tally, kept, settings)
    else:
        rows = _look_at_ids(source, target, tally, kept, settings)
    if not kept.trainable:
        tally.note("nothing", str(path))
    findings = tally.findings(rows)
    chosen = [trace for _, trace in kept.chosen]
    notes = list(target.notes)
    if source.unfinished:
        notes.append("the capture is not finished: this is what it has so far")
    return Inspection(
        path=str(path),
        kind=source.kind,
        metadata=source.metadata,
        rows=rows,
        replies=kept.replies,
        trainable=kept.trainable,
        lengths={name: found for name, parts in kept.lengths.items() if (found := percentiles(parts))},
        shares={name: dict(counts.most_common(10)) for name, counts in kept.counts.items() if counts},
        findings=findings,
        verdict=verdict(findings, kept.trainable, rows),
        notes=notes,
        longest=kept.longest,
        examples=chosen[: settings.examples],
        template=target.template,
    )


def _target(source: Source, settings: InspectSettings, progress: Progress) -> Target:
    """From --tokenizer, else from what our own files say, where the tokenizer they name is a folder here."""
    metadata, notes = source.metadata, []
    template: Template | None = None
    if settings.tokenizer is not None:
        template = load_template(resolve_model(settings.tokenizer, progress), {}, settings.trust_remote_code)
    elif Path(metadata.get("tokenizer", "")).is_dir() and metadata.get("tokenizer"):
        try:
            template = load_template(metadata["tokenizer"], {}, settings.trust_remote_code)
        except UserError as error:
            notes.append(f"the tokenizer the traces name was not loaded: {error}")
    if template is None and not notes:
        notes.append("no tokenizer: text was not compared with ids, nor masks with where replies start")
    if "delimiters" in metadata:
        delimiters = delimiters_from_json(metadata["delimiters"])
    elif template is not None:
        delimiters = find_delimiters(template, settings.thinking, settings.think_open, settings.think_close)
    else:
        delimiters = None
        notes.append("think delimiters are not known and were not looked at; give --tokenizer DIR")
    bos = template.tokenizer.bos_token_id if template else None
    special = json.loads(metadata.get("special_ids", "[]"))
    stops = template.stop_ids if template else frozenset(json.loads(metadata.get("stop_ids", "[]")))
    size = template.vocab_size if template else int(metadata.get("vocab_size", 0)) or None
    return Target(
        template=template,
        delimiters=delimiters,
        stop_ids=stops,
        start=reply_start(template, delimiters) if template else None,
        limits=Limits(
            delimiters=delimiters,
            bos_ids=frozenset(special if bos is None else [bos]),
            vocab_size=size,
        ),
        notes=notes,
    )


def _look_at_ids(source: Source, target: Target, tally: Tally, kept: Collected, settings: InspectSettings) -> int:
    """Reads all batches; returns the number of rows."""
    draw = np.random.default_rng(settings.seed)
    wanted = max(settings.examples, COMPARED if target.template else 0)
    rows = 0
    seen: list[Ints] = []
    batches = _of_traces(source, tally, kept) if source.kind == "traces" else _of_masks(source, target, tally, kept)
    for count, replies in batches:
        rows += count
        replies = look(replies, target.limits, tally, kept)
        keep_longest(replies, kept, settings.longest)
        keep_chosen(replies, kept, wanted, draw)
        if source.kind == "traces" and not source.unfinished:  # a journal keeps what a later try replaces
            seen.append(np.array([hash(name) for name in replies.names], np.int64))
    note_likeness(tally, kept)
    if kept.last_ids and not target.stop_ids:
        index, count = kept.last_ids.most_common(1)[0]
        if count >= STOP_SHARE * kept.replies:
            tally.add("cut", kept.replies - count)
            target.notes.append(f"{index}, the last id of {count:,} replies, is taken for the stop id")
    if seen:
        tally.add("doubled_id", sum(map(len, seen)) - len(np.unique(np.concatenate(seen))))
    own = source.metadata.get("tokenizer_fingerprint")
    if target.template and own and own != target.template.tokenizer_fingerprint:
        tally.add("other_tokenizer", rows)
    elif target.template:
        _compare_texts(target.template, [trace for _, trace in kept.chosen], tally)
    return rows


def _of_traces(source: Source, tally: Tally, kept: Collected) -> Iterator[tuple[int, Replies]]:
    for batch in trace_batches(source):
        columns = {name: batch[name] for name in batch.schema.names}
        states = columns["state"].to_pylist()
        names = columns["trace_id"].to_pylist()
        good = np.isin(np.array(states, dtype=object), list(TRAINABLE))
        prompts, generated = from_arrow(columns["prompt_ids"]), from_arrow(columns["generated_ids"])
        assert prompts is not None and generated is not None
        sources = columns["ids_source"].to_pylist()
        _count(kept, "state", states)
        _count(kept, "finish_reason", columns["finish_reason"].to_pylist(), good)
        _count(kept, "ids_source", sources, good)
        _count(kept, "reason", map(reason_class, filter(None, columns["error"].to_pylist())))
        for state in ("rejected", "failed", "cut_in_reasoning", "cut_in_answer"):
            tally.note_all(state, np.array([found == state for found in states]), names)
        tally.note_all("not_verified", good & np.array([found == "rendered" for found in sources]), names)
        yield (
            len(names),
            Replies(
                names=names,
                prompts=prompts,
                generated=generated,
                trainable=good,
                finished=np.array([state == "ok" for state in states]),
                reasoning=_span_column(columns["reasoning_span"]),
                answer=_span_column(columns["answer_span"]),
                rows=batch,
            ),
        )


def _of_masks(source: Source, target: Target, tally: Tally, kept: Collected) -> Iterator[tuple[int, Replies]]:
    for batch in masked_batches(source):
        for check, found in (
            ("broken_line", batch.broken),
            ("unusable_row", batch.unusable),
            ("separators", batch.separators),
        ):
            tally.add(check, len(found), found)
        spans = [span for row in range(len(batch.names)) for span in _spans_of(batch, row, target, tally)]
        rows, starts, ends = np.array(spans, np.int64).reshape(-1, 3).T
        base = batch.ids.starts[rows]
        prompts, generated = batch.ids.cut(base, base + starts), batch.ids.cut(base + starts, base + ends)
        last = generated.values[generated.ends - 1]
        finished = np.isin(last, list(target.stop_ids)) if target.stop_ids else np.ones(len(spans), np.bool_)
        names = [batch.names[row] for row in rows]
        tally.note_all("cut", ~finished, names)
        _count(kept, "ids_source", ["not stated"] * len(spans))
        kept.last_ids.update(last.tolist())
        yield (
            len(batch.names) + len(batch.broken) + len(batch.unusable),
            Replies(
                names=names,
                prompts=prompts,
                generated=generated,
                trainable=np.ones(len(spans), np.bool_),
                finished=finished,
                reasoning=None,
                answer=None,
            ),
        )


def _spans_of(batch: Masked, row: int, target: Target, tally: Tally) -> list[tuple[int, int, int]]:
    """(row, start, end) of the replies of one row; none if its mask is no boundary."""
    name, ids = batch.names[row], batch.ids.row(row)
    if batch.masks is None:
        tally.note("no_mask", name)
        return []
    mask = batch.masks.row(row)
    fault = mask_fault(ids, mask)
    if fault:
        tally.note(MASK_CHECKS[reason_class(fault)], name)
        return []
    spans = supervised_spans(mask)
    if len(spans) > 1:
        tally.note("several_spans", name)
    for span in spans:
        faults = [end_fault(ids, span, target.stop_ids)]
        if target.start is not None:
            faults.append(start_fault(ids, span, target.start))
        for fault in filter(None, faults):
            tally.note(MASK_CHECKS[reason_class(fault)], name)
    return [(row, *span) for span in spans]


def _compare_texts(template: Template, traces: list[Trace], tally: Tally) -> None:
    tally.of |= dict.fromkeys(("text_differs", "retokenised"), len(traces))
    for trace in traces:
        for text, span in ((trace.reasoning, trace.reasoning_span), (trace.answer, trace.answer_span)):
            if text and text != text_of(template, trace.generated_ids, span):
                tally.note("text_differs", trace.trace_id)
                break
        if template.encode(template.decode(trace.generated_ids)) != list(trace.generated_ids):
            tally.note("retokenised", trace.trace_id)


def _span_column(column: pa.Array) -> Ints:
    """int64 [rows, 2]; (-1, -1) for null."""
    spans = np.full((len(column), 2), -1, np.int64)
    there = np.asarray(column.is_valid())
    spans[there] = np.asarray(column.flatten()).reshape(-1, 2)
    return spans


def _count(kept: Collected, name: str, values: Any, where: Bools | None = None) -> None:
    chosen = values if where is None else (value for value, good in zip(values, where, strict=True) if good)
    kept.counts.setdefault(name, Counter()).update(value or "(none)" for value in chosen)


def _example(trace: Trace) -> dict[str, Any]:
    return {
        "trace_id": trace.trace_id,
        "state": trace.state,
        "prompt_ids": len(trace.prompt_ids),
        "generated_ids": len(trace.generated_ids),
        "reasoning": trace.reasoning,
        "answer": trace.answer,
    }
