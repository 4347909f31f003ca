"""A traces folder as later stages find it: Parquet parts, what they say about themselves, and their counts.

Captured and imported folders are written here alike. The counts are read back from the files: what is on disk is what
is reported. Writing holds one part's traces in memory, counting one part's ids.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from draftsmith.artifacts import sync
from draftsmith.capture.journal import JOURNAL, Journal
from draftsmith.recipe import QuestionSettings
from draftsmith.target.template import Template
from draftsmith.target.thinking import Delimiters, delimiters_json
from draftsmith.trace import TRAINABLE, Trace, write_traces

PART_ROWS = 50_000
PART_IDS = 4_000_000
"""Traces and token ids per part at most (one trace may exceed it): that bounds the memory of writing."""
COLUMNS = ["question_key", "prompt_ids", "generated_ids", "state", "reasoning_span", "ids_source", "error"]
STATES = ("ok", "cut_in_reasoning", "cut_in_answer", "rejected", "failed")
TOP_REASONS = 10


def seal(journal: Journal, order: Sequence[str], metadata: dict[str, str]) -> list[Path]:
    """Writes the traces in `order` (trace ids) as parts beside the journal, then closes and removes the journal.

    Part files without a journal are therefore always complete: `sealed_parts` relies on it.

    Args:
        journal: holds a record for every id in `order`; others (of questions no longer asked) are left out.
        order: trace ids in input order.
        metadata: for the schema metadata of every part.
    """
    parts = write_parts(journal.path.parent, map(journal.read, order), metadata)
    journal.close()
    journal.path.unlink()
    return parts


def sealed_parts(folder: Path) -> list[Path]:
    """The part files of a folder whose journal was sealed; empty while it was not."""
    return [] if (folder / JOURNAL).exists() else sorted(folder.glob("part-*.parquet"))


def sealed_ids(parts: Sequence[Path]) -> list[str]:
    """The trace ids in `parts`, in order."""
    return [id for part in parts for id in pq.read_table(part, columns=["trace_id"])["trace_id"].to_pylist()]


def write_parts(folder: Path, traces: Iterable[Trace], metadata: dict[str, str]) -> list[Path]:
    """Writes `part-*.parquet` into `folder` in place of those there, safe against a power cut once it returns.

    Args:
        folder: where to.
        traces: in the order they are to have.
        metadata: for the schema metadata of every part.
    """
    for stale in folder.glob("part-*.parquet"):
        stale.unlink()
    parts = []
    for number, group in enumerate(_groups(traces)):
        parts.append(folder / f"part-{number:05}.parquet")
        write_traces(parts[-1], group, metadata)
        sync(parts[-1])
    sync(folder)
    return parts


def question_metadata(settings: QuestionSettings, template: Template, delimiters: Delimiters | None) -> dict[str, str]:
    """What a traces folder says about its questions, template and tokenizer, as text, for the files' metadata.

    `vocab_size` is the target's (rows of its embedding), `special_ids` are all that must stay in a draft vocabulary
    besides `stop_ids` and those in `delimiters`.
    """
    return {
        "tokenizer": template.name,
        "tokenizer_fingerprint": template.tokenizer_fingerprint,
        "template_fingerprint": template.fingerprint,
        "template_options": json.dumps(settings.template_options),
        "preamble": json.dumps([message.model_dump() for message in settings.preamble], ensure_ascii=False),
        "delimiters": delimiters_json(delimiters),
        "stop_ids": json.dumps(sorted(template.stop_ids)),
        "special_ids": json.dumps(sorted(template.special_ids())),
        "vocab_size": str(template.vocab_size),
        "held_out": str(settings.held_out),
    }


def summary(parts: Sequence[Path]) -> dict[str, Any]:
    """Counts over all traces of `parts`; tokens, reasoning and ids sources over the trainable ones only."""
    keys: set[str] = set()
    states: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for part in parts:
        table = pq.read_table(part, columns=COLUMNS)
        keys.update(table["question_key"].to_pylist())
        states.update(table["state"].to_pylist())
        reasons.update(reason_class(error) for error in table["error"].to_pylist() if error)
        good = table.filter(pc.is_in(table["state"], value_set=pc.cast(sorted(TRAINABLE), "string")))
        sources.update(good["ids_source"].to_pylist())
        tokens["with_reasoning"] += good.num_rows - good["reasoning_span"].null_count
        for name in ("prompt", "generated"):
            tokens[f"{name}_tokens"] += pc.sum(pc.list_value_length(good[f"{name}_ids"])).as_py() or 0
    return {
        "questions": len(keys),
        "traces": states.total(),
        **{state: states[state] for state in STATES},
        **{name: tokens[name] for name in ("with_reasoning", "prompt_tokens", "generated_tokens")},
        "ids_source": dict(sources),
        "reasons": dict(reasons.most_common(TOP_REASONS)),
    }


def reason_class(error: str) -> str:
    """What stands before the first colon of an error: its class, without the details of one row."""
    return error.partition(": ")[0]


def _groups(traces: Iterable[Trace]) -> Iterator[list[Trace]]:
    group: list[Trace] = []
    held = 0
    for trace in traces:
        size = len(trace.prompt_ids) + len(trace.generated_ids)
        if group and (len(group) == PART_ROWS or held + size > PART_IDS):
            yield group
            group, held = [], 0
        group.append(trace)
        held += size
    if group:
        yield group
