"""The draft vocabulary: which target ids the draft can propose, and how much of what the target says they cover.

Ids are counted over supervised labels of the training split only (every generated id but the first, see
`trace.supervised_rows`). Special, stop and delimiter ids are always in. `d2t` holds offsets, `target = i + d2t[i]`, as
engines compute it; absolute ids there would point elsewhere without any error, so every map read from disk is checked.
One pass over the traces; memory is one counter per target id.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from draftsmith.artifacts import Stage, write_json
from draftsmith.errors import UserError
from draftsmith.progress import Progress
from draftsmith.recipe import VocabSettings
from draftsmith.target.thinking import delimiters_from_json
from draftsmith.trace import TRAINABLE, Trace, held_out, read_metadata, read_traces, trace_files

FILE = "vocab.safetensors"
COVERAGE = "coverage.json"
PARTS = ("reasoning", "answer")

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Vocab:
    """A draft vocabulary of n ids out of a target's m."""

    d2t: NDArray[np.int64]
    """[n] offsets: the target id of draft id i is `i + d2t[i]`."""
    t2d: NDArray[np.bool_]
    """[m] whether a target id is in the draft vocabulary."""
    ids: NDArray[np.int64]
    """[n] target ids, strictly increasing; the draft id is the index."""


def build(stage: Stage, settings: VocabSettings, progress: Progress) -> dict[str, Any]:
    """Counts, chooses, and writes `vocab.safetensors` (d2t, t2d) and `coverage.json` into `stage.work`.

    Raises:
        UserError: the size does not fit the target's vocabulary, or the training split is empty.
    """
    metadata = read_metadata(stage.folder("traces"))
    target_size = int(metadata["vocab_size"])
    check_size(settings.size, target_size)
    share = float(metadata["held_out"])
    counts = {
        split: {part: np.zeros(target_size, np.int64) for part in (*PARTS, "all")} for split in ("train", "held_out")
    }
    traces = 0
    with progress.track("vocab", count_traces(stage.folder("traces")), "traces") as tracker:
        for trace in read_traces(stage.folder("traces")):
            split = "held_out" if held_out(trace.question_key, share) else "train"
            if max(trace.generated_ids) >= target_size:
                raise UserError(
                    f"{stage.folder('traces')}: trace {trace.trace_id} holds id {max(trace.generated_ids)}, the "
                    f"tokenizer it was captured with ({metadata['tokenizer']}) has {target_size} ids; capture with the "
                    "target's own --tokenizer"
                )
            count_labels(trace, counts[split])
            traces += 1
            tracker.update(traces)
    seen = counts["train"]["all"]
    if not seen.any():
        raise UserError(
            f"{stage.folder('traces')}: no trace of the training split has labels to count ({traces} traces in all); "
            "capture more questions or lower held_out"
        )
    vocab = make_vocab(choose_ids(seen, settings.size, required_ids(metadata)), target_size)
    save_vocab(stage.work, vocab)
    coverage = {
        split: {part: _coverage(found, vocab) for part, found in parts.items()} for split, parts in counts.items()
    }
    write_json(stage.work / COVERAGE, {"size": len(vocab.ids), "target_size": target_size, **coverage})
    return {
        "size": len(vocab.ids),
        "target_size": target_size,
        "distinct_seen": int((seen > 0).sum()),
        "coverage_train": coverage["train"]["all"]["share"],
        "coverage_held_out": coverage["held_out"]["all"]["share"],
        "coverage_held_out_reasoning": coverage["held_out"]["reasoning"]["share"],
        "coverage_held_out_answer": coverage["held_out"]["answer"]["share"],
    }


def count_traces(folder: Path) -> int:
    """Traces in training states, read from the state column alone."""
    states = (state for path in trace_files(folder) for state in pq.read_table(path, columns=["state"])["state"])
    return sum(state.as_py() in TRAINABLE for state in states)


def check_size(size: int, target_size: int) -> None:
    """Refuses what cannot be a draft vocabulary (P27).

    Raises:
        UserError: size below 1 or above the target's.
    """
    if not 1 <= size <= target_size:
        raise UserError(
            f"vocab size {size}: expected 1 to {target_size}, the size of the target's vocabulary; "
            f"{target_size} itself keeps every id"
        )


def count_labels(trace: Trace, counts: dict[str, Counts]) -> None:
    """Adds a trace's labels (generated ids but the first) to `counts` of reasoning, answer and all, each [m]."""
    ids = np.asarray(trace.generated_ids, np.int64)
    np.add.at(counts["all"], ids[1:], 1)
    for part, span in (("reasoning", trace.reasoning_span), ("answer", trace.answer_span)):
        if span is not None:
            np.add.at(counts[part], ids[max(1, span[0]) : span[1]], 1)


def required_ids(metadata: dict[str, str]) -> frozenset[int]:
    """Special, stop and delimiter ids as capture noted them."""
    delimiters = delimiters_from_json(metadata["delimiters"])
    listed = json.loads(metadata["special_ids"]) + json.loads(metadata["stop_ids"])
    return frozenset(listed) | (delimiters.all_ids() if delimiters else frozenset())


def choose_ids(counts: Counts, size: int, required: Iterable[int]) -> NDArray[np.int64]:
    """The `size` ids to keep, sorted: all required ones, then the most frequent, then the lowest of those never seen.

    Args:
        counts: [m] how often each target id is a label.
        size: ids to keep, at most m.
        required: target ids that are kept whatever their count.

    Raises:
        UserError: the required ids alone are more than `size`.
    """
    rank = counts.astype(np.float64)
    kept = np.array(sorted(required), np.int64)
    if len(kept) > size:
        raise UserError(
            f"vocab size {size}: the tokenizer's {len(kept)} special, stop and think ids are always kept and do not "
            f"fit; choose a size of at least {len(kept)}"
        )
    rank[kept] = np.inf
    order = np.argsort(-rank, kind="stable")  # stable: among equals the lowest id comes first
    return np.sort(order[:size]).astype(np.int64)


def make_vocab(ids: NDArray[np.int64], target_size: int) -> Vocab:
    """The vocabulary of strictly increasing target `ids` [n]; all of them give the identity map (offsets zero)."""
    t2d = np.zeros(target_size, np.bool_)
    t2d[ids] = True
    return Vocab(d2t=ids - np.arange(len(ids), dtype=np.int64), t2d=t2d, ids=ids)


def save_vocab(folder: Path, vocab: Vocab) -> None:
    """Writes `vocab.safetensors` into `folder`."""
    from safetensors.numpy import save_file

    save_file({"d2t": vocab.d2t, "t2d": vocab.t2d}, folder / FILE)


def load_vocab(folder: Path) -> Vocab:
    """Reads and checks what `save_vocab` wrote.

    Raises:
        UserError: missing, unreadable, or not a map (see `check_vocab`).
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = folder / FILE
    if not path.exists():
        raise UserError(f"{path}: expected a draft vocabulary, found none; `draftsmith vocab` makes it")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path}: expected safetensors, found something else ({error})") from None
    missing = {"d2t", "t2d"} - tensors.keys()
    if missing:
        raise UserError(f"{path}: expected tensors d2t and t2d, found {', '.join(sorted(tensors)) or 'none'}")
    return check_vocab(tensors["d2t"], tensors["t2d"], str(path))


def check_vocab(d2t: NDArray[Any], t2d: NDArray[Any], name: str) -> Vocab:
    """A vocabulary from maps read from any draft.

    Args:
        d2t: [n] integer offsets.
        t2d: [m] bool (or 0/1) mask over the target's ids.
        name: where they come from, for messages.

    Raises:
        UserError: the offsets do not resolve to strictly increasing ids inside the target's vocabulary that `t2d`
            agrees with; absolute ids in place of offsets are named as the likely cause.
    """
    if d2t.ndim != 1 or t2d.ndim != 1 or not len(d2t) or not np.issubdtype(d2t.dtype, np.integer):
        raise UserError(
            f"{name}: expected d2t as a list of integers and t2d as a list, found {d2t.dtype} of shape "
            f"{list(d2t.shape)} and {t2d.dtype} of shape {list(t2d.shape)}"
        )
    offsets, mask = d2t.astype(np.int64), t2d.astype(np.bool_)
    ids = offsets + np.arange(len(offsets), dtype=np.int64)
    if ids.min() < 0 or ids.max() >= len(mask):
        found = f"d2t points to target id {ids.max() if ids.max() >= len(mask) else ids.min()} of {len(mask)}"
    elif len(ids) > 1 and np.diff(ids).min() <= 0:
        found = "the target ids of d2t do not increase"
    elif not np.array_equal(ids, np.flatnonzero(mask)):
        found = f"d2t resolves to {len(ids)} ids that differ from the {mask.sum()} ids marked in t2d"
    else:
        return Vocab(d2t=offsets, t2d=mask, ids=ids)
    absolute = np.array_equal(offsets, np.flatnonzero(mask))
    hint = "it holds absolute ids instead of offsets" if absolute else "absolute ids instead of offsets?"
    raise UserError(f"{name}: expected offsets (target = i + d2t[i]), but {found}; {hint}")


def _coverage(counts: Counts, vocab: Vocab) -> dict[str, Any]:
    """How many of the counted labels the draft can propose; share is None where nothing was counted."""
    total, covered = int(counts.sum()), int(counts[vocab.t2d].sum())
    return {"labels": total, "covered": covered, "share": covered / total if total else None}
