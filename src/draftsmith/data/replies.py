"""Replies in batches, from traces or from somebody's ids with masks, and the checks that need nothing but ids.

What is found goes into a Tally; lengths, sketches and hashes are kept per reply (about 200 bytes each).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from draftsmith.capture.quality import LOOP_TAIL, loops
from draftsmith.data import likeness
from draftsmith.data.checks import Tally
from draftsmith.data.delimiting import structure
from draftsmith.data.ragged import Bools, Ints, Ragged
from draftsmith.target.thinking import Delimiters
from draftsmith.trace import Span, Trace, from_row

PERCENTILES = (5, 25, 50, 75, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """One batch. Spans are int64 [replies, 2] over a reply's own ids, (-1, -1) for none."""

    names: list[str]
    prompts: Ragged
    generated: Ragged
    trainable: Bools
    finished: Bools
    """Whether the target itself ended the reply."""
    reasoning: Ints | None
    """None: not recorded; read off the delimiters, where these are known."""
    answer: Ints | None
    rows: pa.RecordBatch | None = None
    """The rows these come from, where they are traces."""

    def trace(self, number: int) -> Trace:
        """One of them as a trace, for people to look at."""
        if self.rows is not None:
            return from_row(self.rows.slice(number, 1).to_pylist()[0])
        return Trace(
            trace_id=self.names[number],
            question_key="",
            prompt_ids=self.prompts.row(number).tolist(),
            generated_ids=self.generated.row(number).tolist(),
            reasoning_span=_span(self.reasoning, number),
            answer_span=_span(self.answer, number),
            ids_source="rendered",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is known about the ids."""

    delimiters: Delimiters | None
    bos_ids: frozenset[int]
    vocab_size: int | None


@dataclass(slots=True)
class Collected:
    """What stays of all batches."""

    replies: int = 0
    trainable: int = 0
    lengths: dict[str, list[Ints]] = field(default_factory=dict)
    sketches: list[npt.NDArray[np.uint32]] = field(default_factory=list)
    prompt_hashes: list[Ints] = field(default_factory=list)
    names: list[list[str]] = field(default_factory=list)
    """Of the replies that have a sketch."""
    longest: list[tuple[int, str]] = field(default_factory=list)
    chosen: list[tuple[float, Trace]] = field(default_factory=list)
    """Replies to look at, each with the number it was drawn by."""
    last_ids: Counter[int] = field(default_factory=Counter)
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    """Shares: name -> value -> replies."""


def look(replies: Replies, limits: Limits, tally: Tally, kept: Collected) -> Replies:
    """Checks one batch, keeps what the summary needs, and returns it with its spans."""
    names, prompts, generated, good = replies.names, replies.prompts, replies.generated, replies.trainable
    kept.replies += len(names)
    kept.trainable += int(good.sum())
    reasoning, answer = replies.reasoning, replies.answer
    if limits.delimiters is not None:
        found = structure(prompts, generated, replies.finished, limits.delimiters)
        for check, where in found.faults.items():
            tally.note_all(check, where & good, names)
        reasoning = found.reasoning if reasoning is None else reasoning
        answer = found.answer if answer is None else answer
        tally.note_all("without_reasoning", good & (reasoning[:, 0] < 0), names)
    if answer is None:
        answer = np.stack([np.zeros_like(generated.lengths), generated.lengths], axis=1)
    tally.note_all("no_prompt", good & (prompts.lengths == 0), names)
    tally.note_all("too_short", good & (generated.lengths < 2), names)
    tally.note_all("doubled_bos", good & _doubled_bos(prompts, limits.bos_ids), names)
    tally.note_all("beyond_vocabulary", good & _beyond(prompts, generated, limits.vocab_size), names)
    sizes = {"prompt": prompts.lengths, "generated": generated.lengths}
    for name, spans in (("reasoning", reasoning), ("answer", answer)):
        if spans is not None:
            there = good & (spans[:, 0] >= 0)
            sizes[name] = np.where(there, spans[:, 1] - spans[:, 0], -1)
            outside = there & ((spans[:, 1] > generated.lengths) | (spans[:, 1] < spans[:, 0]))
            tally.note_all("bad_span", outside, names)
    for name, lengths in sizes.items():
        kept.lengths.setdefault(name, []).append(lengths[good & (lengths >= 0)].astype(np.int32))
    keep_sketches(
        [name for name, fit in zip(names, good, strict=True) if fit],
        prompts.cut(prompts.starts[good], prompts.ends[good]),
        generated.cut(generated.starts[good], generated.ends[good]),
        tally,
        kept,
        width=likeness.SHINGLE,
        least=likeness.LEAST_IDS,
    )
    return replace(replies, reasoning=reasoning, answer=answer)


def keep_longest(replies: Replies, kept: Collected, count: int) -> None:
    """Keeps the `count` longest replies' names."""
    lengths = np.where(replies.trainable, replies.generated.lengths, 0)
    top = np.argsort(-lengths, kind="stable")[:count]
    found = [(int(lengths[i]), replies.names[i]) for i in top if lengths[i]]
    kept.longest = sorted([*kept.longest, *found], key=lambda pair: -pair[0])[:count]


def keep_chosen(replies: Replies, kept: Collected, count: int, draw: np.random.Generator) -> None:
    """Keeps `count` trainable replies, each as likely as any other, as traces."""
    numbers = np.where(replies.trainable, draw.random(len(replies.names)), 2.0)
    limit = kept.chosen[-1][0] if len(kept.chosen) == count else 1.0
    top = [i for i in np.argsort(numbers)[:count].tolist() if numbers[i] < limit]
    kept.chosen = sorted(
        [*kept.chosen, *((float(numbers[i]), replies.trace(i)) for i in top)], key=lambda pair: pair[0]
    )[:count]


def keep_sketches(
    names: list[str], prompts: Ragged, replies: Ragged, tally: Tally, kept: Collected, *, width: int, least: int
) -> None:
    """Notes replies that loop, and keeps what near copies are found by, for replies of at least `least` ids."""
    judged = np.flatnonzero(replies.lengths >= least)
    hashes, inside = likeness.shingles(replies.cut(replies.starts[judged], replies.ends[judged]), width)
    chosen = [names[i] for i in judged.tolist()]
    looping = [loops(replies.row(i)[-LOOP_TAIL:].tolist()) for i in judged.tolist()]
    tally.note_all("loops", np.array(looping, np.bool_), chosen)
    kept.sketches.append(likeness.sketches(hashes, inside))
    kept.prompt_hashes.append(likeness.row_hashes(prompts)[judged])
    kept.names.append(chosen)


def note_likeness(tally: Tally, kept: Collected) -> None:
    """Looks for near copies among all replies that were kept."""
    if not kept.sketches:
        return
    names = [name for part in kept.names for name in part]
    prompts = np.concatenate(kept.prompt_hashes)
    earlier = likeness.first_alike(np.concatenate(kept.sketches))
    same = prompts == prompts[earlier]
    tally.note_all("alike_here", (earlier >= 0) & same, names)
    tally.note_all("alike_elsewhere", (earlier >= 0) & ~same, names)


def percentiles(parts: list[Ints]) -> dict[str, Any]:
    """Length percentiles, maximum, mean and sum; empty for no lengths."""
    lengths = np.concatenate(parts) if parts else np.empty(0)
    if not len(lengths):
        return {}
    levels = np.percentile(lengths, PERCENTILES, method="nearest")
    return {
        **{f"p{level}": int(value) for level, value in zip(PERCENTILES, levels, strict=True)},
        "max": int(lengths.max()),
        "mean": round(float(lengths.mean()), 1),
        "sum": int(lengths.sum(dtype=np.int64)),
        "replies": len(lengths),
    }


def _span(spans: Ints | None, number: int) -> Span | None:
    return None if spans is None or spans[number, 0] < 0 else (int(spans[number, 0]), int(spans[number, 1]))


def _doubled_bos(prompts: Ragged, bos_ids: frozenset[int]) -> Bools:
    long = prompts.lengths >= 2
    first = np.zeros((len(prompts), 2), np.int64)
    first[long] = np.stack([prompts.values[prompts.starts[long] + step] for step in (0, 1)], axis=1)
    doubled: Bools = long & (first[:, 0] == first[:, 1]) & np.isin(first[:, 0], list(bos_ids))
    return doubled


def _beyond(prompts: Ragged, generated: Ragged, vocab_size: int | None) -> Bools:
    top = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    found = np.zeros(len(prompts), np.bool_)
    for rows in (prompts, generated):
        outside = np.flatnonzero((rows.values < 0) | (rows.values >= top))
        found[rows.rows_of(outside)] = True
    return found
