"""Hidden states by a forward pass of a transformers model over finished traces.

Traces of similar length share a pass, padded on the right (a causal model never sees it). What a batch of prompts
begins with in common is computed once: with worked examples in every prompt that is most of the work. Rows are only
ever cut out at a trace's own length, never padded or cut to fit (P30).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.target.kv import new_cache
from draftsmith.target.loading import text_config
from draftsmith.target.local import shared_prefix
from draftsmith.target.states import StateTap
from draftsmith.trace import Trace

SHARED_AT_LEAST = 32
"""Below this many common ids a pass of its own for them costs more than it saves."""


def batches(traces: Sequence[Trace], batch_tokens: int) -> Iterator[list[Trace]]:
    """Traces by length, longest first, grouped so that padded ids stay within `batch_tokens` (at least one each)."""
    group: list[Trace] = []
    longest = 0
    for trace in sorted(traces, key=_length, reverse=True):
        if group and longest * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        longest = longest if group else _length(trace)
        group.append(trace)
    if group:
        yield group


@torch.inference_mode()
def states(model: Any, layers: Sequence[int], batch: Sequence[Trace]) -> Iterator[tuple[Tensor, Tensor]]:
    """For each trace, of n ids: aux [n-1, 3H] and final [n-1, H] for tokens 0..n-2, in the model's type."""
    rows = [[*trace.prompt_ids, *trace.generated_ids][:-1] for trace in batch]
    device = model.device
    shared = shared_prefix(rows)
    shared = shared if shared >= SHARED_AT_LEAST else 0
    own = [row[shared:] for row in rows]
    width = max(map(len, own))
    ids = torch.zeros(len(own), width, dtype=torch.long)
    for index, row in enumerate(own):
        ids[index, : len(row)] = torch.tensor(row)
    with StateTap(model, layers) as tap:
        heads: list[Tensor] = []
        cache = None
        if shared:
            cache = new_cache(text_config(model))
            model(
                torch.tensor([rows[0][:shared]], device=device), past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            heads = [tap.aux()[0], tap.final()[0]]
            cache.expand(len(rows))
        model(ids.to(device), past_key_values=cache, use_cache=cache is not None, logits_to_keep=1)
        aux, final = tap.aux(), tap.final()
        for index, row in enumerate(own):
            parts = [aux[index, : len(row)], final[index, : len(row)]]
            if heads:
                parts = [torch.cat([head, part]) for head, part in zip(heads, parts, strict=True)]
            yield parts[0], parts[1]


def _length(trace: Trace) -> int:
    return len(trace.prompt_ids) + len(trace.generated_ids)
