"""Incremental decoding with a draft: keys and values of the rows so far, and one step over new rows.

Row p reads the embedding of token p+1 and the hidden state of token p, at rope position p. Its hidden state is either
the target's (fused aux states: a *true* row) or, while a chain is drafted, the draft's own output of row p-1. A decoder
crops the chain's rows when the target has judged them and extends again with true ones, so the cache never keeps a row
that was computed from a guess. Appending costs what the new rows cost: buffers double when full, nothing is copied
per step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.draft.attention import cached_attention
from draftsmith.draft.eagle3 import Eagle3Draft


class DraftCache:
    """Keys and values [1, K, rows, D] of one sequence, in buffers with spare room.

    Args:
        draft: whose rows these are (shapes, device and dtype are taken from it).
        capacity: rows to make room for at first.
    """

    def __init__(self, draft: Eagle3Draft, capacity: int = 256) -> None:
        config, weight = draft.config, draft.layer.self_attn.k_proj.weight
        shape = (1, config.num_key_value_heads, capacity, config.head_dim)
        self.length = 0
        self._keys, self._values = weight.new_empty(shape), weight.new_empty(shape)

    @property
    def keys(self) -> Tensor:
        """[1, K, length, D]."""
        return self._keys[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        """[1, K, length, D]."""
        return self._values[:, :, : self.length]

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Adds rows, each tensor [1, K, N, D]."""
        end = self.length + keys.shape[2]
        if end > self._keys.shape[2]:
            self._keys, self._values = (_grown(old, self.length, 2 * end) for old in (self._keys, self._values))
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end

    def crop(self, length: int) -> None:
        """Forgets every row past `length`.

        Raises:
            ValueError: the cache holds fewer rows than that.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop to {length} rows, the draft cache holds {self.length}")
        self.length = length


def extend(draft: Eagle3Draft, cache: DraftCache, ids: Tensor, hidden: Tensor, start_position: int) -> Tensor:
    """Runs the draft over the N rows that follow the cached ones, and caches them.

    Args:
        draft: the draft.
        cache: holds rows 0..start_position-1; after the call N more.
        ids: int64 [1, N], token p+1 of each row p.
        hidden: [1, N, H], hidden state of token p: fused aux states, or the draft's own output of row p-1.
        start_position: number p of the first new row.

    Returns:
        The rows' output [1, N, H], before the draft's final norm: `draft.logits` of it predicts token p+2, and it is
        the hidden state of the next row while a chain is drafted.

    Raises:
        ValueError: the rows do not follow the cached ones.
    """
    if cache.length != start_position:
        raise ValueError(f"row {start_position} does not follow the {cache.length} rows of the draft cache")
    x, residual = draft.inputs(ids, hidden)
    positions = torch.arange(start_position, start_position + ids.shape[1], device=ids.device)[None]
    cache.append(*draft.keys_values(x, positions))
    attended = cached_attention(draft.queries(x, positions), cache.keys, cache.values)
    return draft.finish(attended, residual)


def _grown(old: Tensor, length: int, capacity: int) -> Tensor:
    new = old.new_empty((*old.shape[:2], capacity, old.shape[3]))
    new[:, :, :length] = old[:, :, :length]
    return new
