"""The training-time test: a draft unrolled k steps over whole traces, with the true tokens as inputs.

One code path serves the loss and the held-out metric. With true tokens as inputs, step k of row p is exactly what the
draft computes while decoding as long as its earlier proposals were accepted, since an accepted proposal *is* the true
token; what it would do after a rejection never matters.

Rows are laid out per trace: all rows 0..n-3 get step-0 keys and values; queries, MLP and head run only on the
supervised rows (`trace.supervised_rows`), the last ones of each trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from draftsmith.draft.attention import ttt_attention
from draftsmith.draft.eagle3 import Eagle3Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Padded traces on one device. T: rows of the longest (n - 2); G: supervised rows of the longest (m - 1).

    Supervised row r of a trace with g prompt ids is row p = g - 1 + r; at step k it reads token p+1+k and its label is
    token p+2+k, which is `labels[r + k]`.
    """

    aux: Tensor
    """[B, T, 3H] aux states of tokens 0..n-3."""
    ids: Tensor
    """[B, T] int64, token p+1 in row p."""
    first: Tensor
    """[B] int64, the first supervised row (prompt length - 1)."""
    count: Tensor
    """[B] int64, supervised rows at step 0; at step k there are k fewer."""
    inputs: Tensor
    """[B, G] int64, token p+1 of supervised row r."""
    labels: Tensor
    """[B, G] int64, token p+2 of supervised row r, as captured."""
    final: Tensor
    """[B, G, H] target hidden before the final norm at token p+1: its head gives the distribution of token p+2."""
    argmax: Tensor
    """[B, G] int64, the target's own argmax for token p+2."""

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`; from pinned memory the copy runs beside the computation."""
        tensors = {part.name: getattr(self, part.name) for part in fields(self)}
        if device.type == "cuda":
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return Batch(**{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})

    def valid(self, step: int) -> Tensor:
        """Bool [B, G]: rows supervised at TTT step `step`; the mask moves with the targets."""
        rows = torch.arange(self.inputs.shape[1], device=self.inputs.device)
        return rows < (self.count - step)[:, None]


def shifted(values: Tensor, step: int) -> Tensor:
    """[B, G, ...] -> the same shape with row r holding `values[:, r + step]`; the tail repeats (it is never valid)."""
    if step == 0:
        return values
    rows = torch.arange(values.shape[1], device=values.device).add(step).clamp(max=values.shape[1] - 1)
    return values[:, rows]


def unroll(draft: Eagle3Draft, batch: Batch, steps: int) -> Iterator[Tensor]:
    """Yields the rows' output (before the final norm) [B, G, H] for TTT step 0, 1, ..., steps - 1."""
    length, rows = batch.ids.shape[1], batch.inputs.shape[1]
    device = batch.ids.device
    offsets = torch.arange(rows, device=device)
    row = (batch.first[:, None] + offsets).clamp(max=length - 1)  # [B, G], row number p, also its position
    fused = draft.fuse(batch.aux)  # [B, T, H]
    x, residual = draft.inputs(batch.ids, fused)
    positions = torch.arange(length, device=device).expand(len(row), -1)
    keys, values = draft.keys_values(x, positions)
    x, residual = _take(x, row), _take(residual, row)  # [B, G, 2H], [B, G, H]
    hidden = residual
    own: list[tuple[Tensor, Tensor]] = []
    for step in range(steps):
        here = row + step
        if step:
            x, residual = draft.inputs(shifted(batch.inputs, step), hidden)
            own.append(draft.keys_values(x, here))
        attended = ttt_attention(draft.queries(x, here), keys, values, row + 1, own)
        hidden = draft.finish(attended, residual)  # [B, G, H]
        yield hidden


def _take(values: Tensor, row: Tensor) -> Tensor:
    """values [B, T, W], row [B, G] -> [B, G, W]."""
    return values.gather(1, row[..., None].expand(-1, -1, values.shape[-1]))
