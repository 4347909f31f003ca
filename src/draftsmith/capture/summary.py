"""The counts of a sealed traces folder, read back from its Parquet files: what is on disk is what is reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from draftsmith.trace import TRAINABLE

COLUMNS = ["question_key", "prompt_ids", "generated_ids", "state", "reasoning_span", "ids_source", "error"]
STATES = ("ok", "cut_in_reasoning", "cut_in_answer", "rejected", "failed")
TOP_REASONS = 10


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
