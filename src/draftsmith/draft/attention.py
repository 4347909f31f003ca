"""The two attentions of a draft: over the rows of a training unroll, and over a growing cache while decoding.

In a training-time test (TTT) at step k, row p sees the step-0 keys of rows <= p and, of steps 1..k, only its own: what
the draft would have in its cache had it drafted k tokens from row p. So the score matrix of step 0 gets k extra columns
(a diagonal each) instead of k more square blocks. Queries are taken in chunks, recomputed in the backward pass, once
the scores of a whole batch would pass `SCORES_AT_ONCE`: memory stays flat at 8K tokens and beyond.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

SCORES_AT_ONCE = 1 << 27


def ttt_attention(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, own: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attention of one TTT step.

    Args:
        queries: [B, A, G, D].
        keys: step-0 keys [B, K, T, D]; K divides A.
        values: step-0 values [B, K, T, D].
        visible: [B, G] int, how many step-0 rows each query sees (its own row number + 1).
        own: keys and values of steps 1..k, each [B, K, G, D], in step order.

    Returns:
        [B, A, G, D].
    """
    batch, heads, rows, _ = queries.shape
    chunk = max(1, SCORES_AT_ONCE // (batch * heads * (keys.shape[2] + len(own))))
    if chunk >= rows:
        return _attend(queries, keys, values, visible, own)
    parts = []
    for start in range(0, rows, chunk):
        here = slice(start, start + chunk)
        mine = [(k[:, :, here], v[:, :, here]) for k, v in own]
        parts.append(
            checkpoint(_attend, queries[:, :, here], keys, values, visible[:, here], mine, use_reentrant=False)
        )
    return torch.cat(parts, dim=2)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, own: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    batch, heads, rows, width = queries.shape
    kv_heads, columns = keys.shape[1], keys.shape[2]
    grouped = queries.reshape(batch, kv_heads, heads // kv_heads, rows, width) * width**-0.5  # [B, K, A/K, G, D]
    scores = grouped.flatten(2, 3) @ keys.transpose(-1, -2)  # [B, K, A/K * G, T]
    scores = scores.view(batch, kv_heads, heads // kv_heads, rows, columns)
    hidden = torch.arange(columns, device=keys.device) >= visible[:, None, None, :, None]  # [B, 1, 1, G, T]
    scores = scores.masked_fill(hidden, float("-inf"))
    if own:
        extra = torch.stack([(grouped * k[:, :, None]).sum(-1) for k, _ in own], dim=-1)  # [B, K, A/K, G, k]
        scores = torch.cat([scores, extra], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype)
    past = weights[..., :columns].flatten(2, 3) @ values  # [B, K, A/K * G, D]
    out: Tensor = past.view(batch, kv_heads, heads // kv_heads, rows, width)
    for step, (_, v) in enumerate(own):
        out = out + weights[..., columns + step, None] * v[:, :, None]
    return out.reshape(batch, heads, rows, width)


def cached_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of the newest rows over a cache that ends with them.

    Args:
        queries: [B, A, N, D], the newest N rows.
        keys: [B, K, T, D] with T >= N, the cache including those rows.
        values: [B, K, T, D].

    Returns:
        [B, A, N, D].
    """
    batch, heads, new, width = queries.shape
    kv_heads, total = keys.shape[1], keys.shape[2]
    # Query heads that share a key head are folded into the row axis: no copy of the cache, and fast CPU kernels.
    folded = queries.reshape(batch, kv_heads, heads // kv_heads * new, width)
    mask = None
    if new > 1:
        last = torch.arange(total - new, total, device=keys.device).repeat(heads // kv_heads)
        mask = torch.arange(total, device=keys.device) <= last[:, None]  # [A/K * N, T]
    out = functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    return out.reshape(batch, heads, new, width)
