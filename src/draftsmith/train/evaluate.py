"""What a draft is worth on the held-out traces, while it trains and before its first step.

Runs under the same autocast as training. Costs one unroll of `draft_tokens` steps over the evaluated traces, without
gradients: per supervised token about a third of a training step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from draftsmith.data.vocab import Vocab
from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.hidden.store import HiddenStore
from draftsmith.hidden.target_head import TargetHead
from draftsmith.recipe import TrainSettings
from draftsmith.train import metrics
from draftsmith.train.dataset import Sample, Samples, collate
from draftsmith.train.schedule import micro_batches
from draftsmith.train.start import with_vocab


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Matrix products in `dtype`; nothing changes for float32."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def held_out_acceptance(
    draft: Eagle3Draft,
    held_out: Sequence[Sample],
    store: HiddenStore,
    settings: TrainSettings,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """The metric of `metrics.summarise` over at most `settings.eval_traces` of the held-out traces."""
    samples = held_out[: settings.eval_traces]
    groups = micro_batches(range(len(samples)), [s.supervised for s in samples], [s.rows for s in samples])
    matches, spans = [], []
    for group in groups:
        members = [samples[i] for i in group]
        with autocast(device, dtype):
            found = metrics.chain_matches(draft, collate(members, store, dtype).to(device), settings.draft_tokens)
        matches += [rows[: s.supervised] for rows, s in zip(found.cpu().numpy(), members, strict=True)]
        spans += [(s.reasoning_span, s.answer_span) for s in members]
    return {**metrics.summarise(matches, spans, settings.draft_tokens), "traces": len(samples)}


def look_before_step_1(
    draft: Eagle3Draft,
    head: TargetHead,
    vocab: Vocab,
    settings: TrainSettings,
    samples: Samples,
    store: HiddenStore,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Eagle3Draft, list[dict[str, Any]], list[str]]:
    """What a warm start is worth untrained: with its own vocabulary, and with the run's if that is wanted."""
    own = held_out_acceptance(draft.to(device), samples.held_out, store, settings, device, dtype)
    notes = [f"acceptance length before step 1: {own['acceptance_length']:.2f}"]
    if own["acceptance_length"] <= metrics.BROKEN:
        notes.append(
            "WARNING: this checkpoint predicts next to nothing here; before more is spent, check that it was made for "
            "this target and these aux layers, and that its d2t belongs to its head"
        )
    line = {"kind": "eval", "step": 0, "supervised_tokens": 0, **own}
    same = draft.t2d.cpu().nonzero().flatten().tolist() == vocab.ids.tolist()
    if settings.new_vocab and not same:
        draft, kept = with_vocab(draft.cpu(), head, vocab)
        rebuilt = held_out_acceptance(draft.to(device), samples.held_out, store, settings, device, dtype)
        notes.append(
            f"head rebuilt for this run's {len(vocab.ids):,} draft ids, {kept:,} rows kept; first-position acceptance "
            f"{_first(rebuilt)} (with the checkpoint's own vocabulary {_first(own)})"
        )
        line = {"kind": "eval", "step": 0, "supervised_tokens": 0, **rebuilt, "own_vocabulary": own}
    elif not same:
        notes.append("this run's vocab stage is not used: its coverage table speaks of other draft ids")
    return draft, [line], notes


def _first(found: dict[str, Any]) -> str:
    value = found["acceptance_per_position"][0]
    return "unknown" if value is None else f"{value:.3f}"
