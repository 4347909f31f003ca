"""Contract 4: the teacher, computed from stored states, must reproduce what the target said; else name the suspect.

For greedy traces the argmax of `lm_head(final_norm(final))` must equal the captured ids but for near-ties. For sampled
traces the expected share is the mean of the largest probability at that temperature. Imported text was not written by
the target: its share is reported, not judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.hidden.target_head import TargetHead

ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the head makes of one trace's final states: argmax int64 [m], and the mean of the top probability."""

    argmax: Tensor
    expected: float


def teach(head: TargetHead, final: Tensor, temperature: float) -> Teacher:
    """The teacher's argmax for final states [m, H], and how often a draw at `temperature` would equal it."""
    argmaxes, tops = [], []
    for rows in torch.split(final, ROWS_AT_ONCE):
        logits = head.logits(rows).float()
        argmaxes.append(logits.argmax(-1))
        if temperature > 0:
            tops.append((logits / temperature).softmax(-1).amax(-1))
    return Teacher(torch.cat(argmaxes), float(torch.cat(tops).mean()) if tops else 1.0)


def suspects(head: TargetHead, aux: Tensor, final: Tensor, generated: Tensor) -> dict[str, float]:
    """Agreement under each known fault, for final [m, H], aux [m, 3H] of the same rows, and the captured ids [m]."""

    def share(states: Tensor, ids: Tensor, logits: Callable[[Tensor], Tensor] = head.logits) -> float:
        return float((logits(states).argmax(-1) == ids).float().mean())

    def unnormed(states: Tensor) -> Tensor:
        return torch.nn.functional.linear(states.to(head.lm_head.dtype), head.lm_head)

    last_aux = aux[:, -final.shape[1] :]
    return {
        "final norm: the states seem to be normed already": share(final, generated, unnormed),
        "layer: an earlier layer's output fits better than the last one's": share(last_aux, generated),
        "ids: rows are one token early": share(final[1:], generated[:-1]),
        "ids: rows are one token late": share(final[:-1], generated[1:]),
    }


def likeliest(found: float, by_fault: dict[str, float]) -> str:
    """The suspect that explains the ids clearly better than the states as they are, in words."""
    name, share = max(by_fault.items(), key=lambda item: item[1])
    if share > found + 0.1:
        return f"likeliest: {name} ({share:.1%} agree that way)"
    return "no known fault explains it: another target than the one captured from, other weights, or a coarser dtype"
