"""Tiny random drafts and batches for tests of the draft side."""

from __future__ import annotations

from typing import Any

import torch

from draftsmith.draft.eagle3 import DraftConfig, Eagle3Draft
from draftsmith.draft.unroll import Batch

HIDDEN, VOCAB = 32, 64
KEPT = list(range(0, 48, 2))


def tiny_draft(seed: int = 0, **changes: Any) -> Eagle3Draft:
    """A random float32 draft over the even target ids below 48."""
    values: dict[str, Any] = {
        "target_vocab_size": VOCAB,
        "draft_vocab_size": len(KEPT),
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 256,
        "aux_layers": (0, 1, 2),
        "target_layers": 4,
        "target_model_type": "llama",
        **changes,
    }
    torch.manual_seed(seed)
    draft = Eagle3Draft(DraftConfig(**values))
    ids = torch.tensor(KEPT)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    draft.set_vocab(ids - torch.arange(len(ids)), t2d)
    with torch.no_grad():
        for parameter in draft.trained().values():
            parameter.add_(0.2 * torch.randn(parameter.shape))  # norms too: a test must see a norm left out
    return draft


def tiny_batch(lengths: list[tuple[int, int]], seed: int = 1, pad: int = 0) -> Batch:
    """Random traces of (prompt, generated) ids each, padded to the longest and `pad` rows more.

    A trace is the same whatever stands beside it.
    """
    rows = max(g + m for g, m in lengths) - 2 + pad
    width = max(m for _, m in lengths) - 1 + pad
    batch = len(lengths)
    aux, final = torch.zeros(batch, rows, 3 * HIDDEN), torch.zeros(batch, width, HIDDEN)
    ids = torch.zeros(batch, rows, dtype=torch.int64)
    inputs, labels, argmax = (torch.zeros(batch, width, dtype=torch.int64) for _ in range(3))
    for b, (g, m) in enumerate(lengths):
        generator = torch.Generator().manual_seed(seed + 1000 * g + m)
        tokens = torch.randint(0, VOCAB, (g + m,), generator=generator)
        aux[b, : g + m - 2] = torch.randn(g + m - 2, 3 * HIDDEN, generator=generator)
        final[b, : m - 1] = torch.randn(m - 1, HIDDEN, generator=generator)
        ids[b, : g + m - 2] = tokens[1:-1]
        inputs[b, : m - 1] = tokens[g:-1]
        labels[b, : m - 1] = tokens[g + 1 :]
        argmax[b, : m - 1] = torch.randint(0, VOCAB, (m - 1,), generator=generator)
    return Batch(
        aux=aux,
        ids=ids,
        first=torch.tensor([g - 1 for g, _ in lengths]),
        count=torch.tensor([m - 1 for _, m in lengths]),
        inputs=inputs,
        labels=labels,
        final=final,
        argmax=argmax,
    )
