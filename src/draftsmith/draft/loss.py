"""The training loss: soft cross-entropy against the target's own distribution, over every step of an unroll.

A label row is a generated token the target predicted inside the draft vocabulary (teacher argmax in it). The same label
is learnt once per TTT step k, from the row k tokens before it, so teacher probabilities are computed once per label and
used k times. Labels stand in the order of falling offset in their reply: those that exist at step k are then a prefix,
and all shapes are known without asking the device.

Full logits never exist at once: labels go through in chunks of at most `LOGITS_AT_ONCE` values, and each chunk leaves
its gradient behind at once (no logits are kept for the backward pass, nothing is computed twice). Costs one float32
copy of the head's gradient. Sums over rows; the caller's weights hold the divisor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.draft.unroll import Batch

LOGITS_AT_ONCE = 1 << 25

Teacher = Callable[[Tensor], Tensor]
"""Final hidden states [N, H] -> the target's logits over the draft vocabulary [N, draft_vocab], float32."""


@dataclass(frozen=True, slots=True)
class LabelRows:
    """The labels of a batch that count."""

    flat: Tensor
    """[N] int64 into the flattened [B, G] label rows, falling offset in the reply first."""
    per_step: tuple[int, ...]
    """Labels that exist at TTT step k (their row k tokens earlier is supervised): the first that many of `flat`."""


def label_rows(batch: Batch, t2d: Tensor, steps: int) -> LabelRows:
    """The labels of a batch on the CPU (no device ever waits for a shape).

    Args:
        batch: padded traces, on the CPU.
        t2d: bool [target_vocab], also on the CPU.
        steps: TTT steps.
    """
    counted = batch.valid(0) & t2d[batch.argmax]  # [B, G]
    flat = counted.flatten().nonzero().flatten()
    offset = flat % counted.shape[1]
    order = offset.argsort(descending=True, stable=True)
    return LabelRows(flat[order], tuple(int((offset >= step).sum()) for step in range(steps)))


def ttt_loss(
    draft: Eagle3Draft,
    teacher: Teacher,
    final: Tensor,
    rows: LabelRows,
    outputs: Sequence[Tensor],
    weights: Sequence[float],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Weighted sum over TTT steps of the soft cross-entropy of their counted rows.

    Args:
        draft: its head and final norm are applied here.
        teacher: gives the target's logits.
        final: [B, G, H], as in `Batch`.
        rows: the labels that count.
        outputs: per TTT step the rows' output [B, G, H] (`unroll`).
        weights: per TTT step, the factor of its sum: decay**k / divisor.
        dtype: of the matrix products with the head.

    Returns:
        The loss, a scalar (exactly 0, with zero gradients, when no row counts), and sums [2, steps] without gradient:
        unweighted cross-entropy, and rows where draft and teacher prefer the same id.
    """
    normed = [draft.norm(output) for output in outputs]
    loss, sums = _ChunkedLoss.apply(draft.lm_head.weight, teacher, final, rows, tuple(weights), dtype, *normed)  # type: ignore[no-untyped-call]
    return loss, sums


def proposals(draft: Eagle3Draft, hidden: Tensor) -> Tensor:
    """The rows' output [..., H] -> the draft's greedy choice as target ids [...], in bounded memory."""
    flat, size = hidden.flatten(0, -2), _chunk(draft.config.draft_vocab_size)
    best = torch.cat([draft.logits(flat[start : start + size]).argmax(-1) for start in range(0, len(flat), size)])
    return draft.target_ids(best).view(hidden.shape[:-1])


class _ChunkedLoss(torch.autograd.Function):
    """Forward computes the gradients too, chunk by chunk; backward hands them out."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        teacher: Teacher,
        final: Tensor,
        rows: LabelRows,
        weights: tuple[float, ...],
        dtype: torch.dtype,
        *outputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        head = weight.to(dtype)  # [V, H]
        flat_final = final.flatten(0, 1)
        sums = torch.zeros(2, len(outputs), device=weight.device)
        head_grad = torch.zeros_like(weight, dtype=torch.float32)
        grads = [torch.zeros_like(output) for output in outputs]
        with torch.autocast(weight.device.type, enabled=False):
            for start in range(0, len(rows.flat), size := _chunk(len(weight))):
                labels = rows.flat[start : start + size]  # [C]
                wanted = teacher(flat_final[labels]).softmax(-1)  # [C, V]
                best = wanted.argmax(-1)
                for step, output in enumerate(outputs):
                    count = min(len(labels), rows.per_step[step] - start)
                    if count <= 0:
                        break
                    at = labels[:count] - step  # the row that predicts the label at this step
                    x = output.flatten(0, 1)[at].to(dtype)  # [c, H]
                    logits = (x @ head.T).float()  # [c, V]
                    log_p = logits.log_softmax(-1)
                    sums[0, step] -= (wanted[:count] * log_p).sum()
                    sums[1, step] += (logits.argmax(-1) == best[:count]).sum()
                    slope = (log_p.exp_() - wanted[:count]).mul_(weights[step]).to(dtype)  # [c, V]
                    grads[step].flatten(0, 1)[at] = (slope @ head).to(output.dtype)
                    head_grad += slope.T @ x
        ctx.save_for_backward(head_grad, *grads)
        ctx.mark_non_differentiable(sums)
        return (sums[0] * torch.tensor(weights, device=sums.device)).sum(), sums

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        head_grad, *grads = ctx.saved_tensors
        return head_grad * upstream[0], None, None, None, None, None, *(grad * upstream[0] for grad in grads)


def _chunk(vocab: int) -> int:
    return max(1, LOGITS_AT_ONCE // vocab)
