"""Traces and their hidden states as padded micro-batches on the device.

Owns which traces train, which are held out (by question, as everywhere) and which cannot be used, and the layout of a
`Batch`. Keeps only ids in memory; hidden states are read from the store when a batch is made, by one thread that works
one batch ahead of the optimizer. Padding is zeros and is never supervised.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.draft.loss import LabelRows, label_rows
from draftsmith.draft.unroll import Batch
from draftsmith.errors import UserError
from draftsmith.hidden.store import HiddenStore
from draftsmith.trace import Span, held_out, read_metadata, read_traces, supervised_rows
from draftsmith.train.schedule import micro_batches

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sample:
    """A trace as training sees it."""

    trace_id: str
    prompt_length: int
    ids: NDArray[np.int32]
    """Prompt and generated ids, cut at `max_length`."""
    reasoning_span: Span | None
    answer_span: Span | None

    @property
    def rows(self) -> int:
        """Rows of the draft: one per token but the last two."""
        return len(self.ids) - 2

    @property
    def supervised(self) -> int:
        """Supervised rows at TTT step 0."""
        return len(supervised_rows(self.prompt_length, len(self.ids)))


@dataclass(frozen=True, slots=True)
class Samples:
    """The traces of a run, split."""

    train: list[Sample] = field(default_factory=list)
    held_out: list[Sample] = field(default_factory=list)
    too_short: int = 0
    """Replies of a single token (or cut to it by `max_length`): the draft has nothing to learn from them."""
    cut: int = 0
    """Traces longer than `max_length`, used up to there."""


@dataclass(frozen=True, slots=True)
class Micro:
    """One forward and backward pass of an optimizer step."""

    batch: Batch
    rows: LabelRows
    divisors: tuple[int, ...]
    """Per TTT step, the labels that count in the whole optimizer step."""
    supervised: int
    """Supervised tokens of this micro-batch, counted or not."""
    last: bool
    """Whether the optimizer step is complete with it."""


def read_samples(traces: Path, store: HiddenStore, max_length: int) -> Samples:
    """Reads the traces that can train.

    Args:
        traces: the run's traces folder.
        store: hidden states of these traces.
        max_length: ids of a trace at most.

    Raises:
        UserError: hidden states are missing, or nothing is left to train on or to hold out.
    """
    share = float(read_metadata(traces)["held_out"])
    samples = Samples()
    too_short = cut = 0
    missing: list[str] = []
    stored = store.trace_ids
    questions: set[str] = set()
    for trace in read_traces(traces):
        if not trace.prompt_ids:
            raise UserError(
                f"{traces}: trace {trace.trace_id} has no prompt ids: all of it would be supervised; remove it"
            )
        ids = np.array([*trace.prompt_ids, *trace.generated_ids], dtype=np.int32)
        sample = Sample(
            trace.trace_id, len(trace.prompt_ids), ids[:max_length], trace.reasoning_span, trace.answer_span
        )
        questions.add(trace.question_key)
        if sample.supervised == 0:
            too_short += 1
            continue
        if sample.trace_id not in stored:
            missing.append(sample.trace_id)
            continue
        cut += len(ids) > max_length
        (samples.held_out if held_out(trace.question_key, share) else samples.train).append(sample)
    if missing:
        raise UserError(
            f"{traces}: {len(missing)} traces have no hidden states (first: {missing[0]}); run extract again"
        )
    for part, name in ((samples.train, "to train on"), (samples.held_out, "held out for evaluation")):
        if not part:
            raise UserError(
                f"{traces}: expected traces {name}, found none among {len(questions)} questions with a held_out share "
                f"of {share:g} ({too_short} replies too short); capture more questions or change capture's held_out"
            )
    return Samples(samples.train, sorted(samples.held_out, key=lambda s: s.trace_id), too_short, cut)


def collate(samples: Sequence[Sample], store: HiddenStore, dtype: torch.dtype) -> Batch:
    """One padded batch on the CPU; aux and final states in `dtype`."""
    states = [store.get(sample.trace_id) for sample in samples]
    batch, length = len(samples), max(sample.rows for sample in samples)
    width = max(sample.supervised for sample in samples)
    aux = torch.zeros(batch, length, states[0].aux.shape[1], dtype=dtype)
    final = torch.zeros(batch, width, states[0].final.shape[1], dtype=dtype)
    ids = torch.zeros(batch, length, dtype=torch.int64)
    inputs, labels, argmax = (torch.zeros(batch, width, dtype=torch.int64) for _ in range(3))
    for row, (sample, state) in enumerate(zip(samples, states, strict=True)):
        tokens = torch.from_numpy(sample.ids)
        start, count = sample.prompt_length, sample.supervised
        aux[row, : sample.rows] = state.aux[: sample.rows]
        ids[row, : sample.rows] = tokens[1:-1]
        inputs[row, :count] = tokens[start : start + count]
        labels[row, :count] = tokens[start + 1 : start + 1 + count]
        # The store's first row predicts the first generated token, which is nobody's label.
        final[row, :count] = state.final[1 : count + 1]
        argmax[row, :count] = state.argmax[1 : count + 1]
    return Batch(
        aux=aux,
        ids=ids,
        first=torch.tensor([sample.prompt_length - 1 for sample in samples]),
        count=torch.tensor([sample.supervised for sample in samples]),
        inputs=inputs,
        labels=labels,
        final=final,
        argmax=argmax,
    )


def counted_labels(samples: Sequence[Sample], store: HiddenStore, t2d: Tensor, steps: int) -> tuple[int, ...]:
    """Per TTT step, the labels of these traces that count (see `loss.label_rows`), from the teacher's argmax alone."""
    totals = [0] * steps
    for sample in samples:
        argmax = store.argmax(sample.trace_id)[1 : sample.supervised + 1].long()
        counted = t2d[argmax]
        for step in range(steps):
            totals[step] += int(counted[step:].sum())
    return tuple(totals)


def micro_steps(
    plan: Sequence[Sequence[int]],
    samples: Sequence[Sample],
    store: HiddenStore,
    t2d: Tensor,
    steps: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Micro]:
    """The micro-batches of a plan (`schedule.plan_steps`), loaded in order.

    Args:
        plan: per optimizer step, indices into `samples`.
        samples: the training traces.
        store: their hidden states.
        t2d: bool [target_vocab] on the CPU, the draft vocabulary.
        steps: TTT steps.
        dtype: of the states.
        device: where the batches go.
    """
    supervised, rows = [s.supervised for s in samples], [s.rows for s in samples]
    for step in plan:
        divisors = counted_labels([samples[i] for i in step], store, t2d, steps)
        groups = micro_batches(step, supervised, rows)
        for group in groups:
            batch = collate([samples[i] for i in group], store, dtype)
            labels = label_rows(batch, t2d, steps)
            yield Micro(
                batch.to(device),
                LabelRows(labels.flat.to(device), labels.per_step),
                divisors,
                sum(supervised[i] for i in group),
                last=group is groups[-1],
            )


def ahead(items: Iterator[T]) -> Generator[T, None, None]:
    """The same items, each made by a thread while the one before it is in use."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(next, items, None)
        while (item := future.result()) is not None:
            future = thread.submit(next, items, None)
            yield item
