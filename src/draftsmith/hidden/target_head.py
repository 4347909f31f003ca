"""What of the target a draft needs for ever: embedding, final norm and head, kept beside its hidden states.

`RUN/hidden/target.safetensors` and `target.json` make every later stage independent of the target's own folder. The
teacher is `lm_head(final_norm(final))` (contract 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith import artifacts
from draftsmith.errors import UserError
from draftsmith.target.weights import HeadWeights

WEIGHTS = "target.safetensors"
FACTS = "target.json"


@dataclass(frozen=True, slots=True)
class TargetHead:
    """embed_tokens [V, H], norm [H], lm_head [V, H] (the embedding itself where tied), eps of the RMS norm."""

    embed_tokens: Tensor
    norm: Tensor
    lm_head: Tensor
    eps: float

    def normed(self, final: Tensor) -> Tensor:
        """RMS norm of hidden states [..., H], computed in float32 as Llama does, in the norm weight's type."""
        wide = final.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.norm * wide.to(self.norm.dtype)

    def logits(self, final: Tensor, ids: Tensor | None = None) -> Tensor:
        """Teacher logits.

        Args:
            final: hidden states before the final norm [..., H].
            ids: int64 target ids to score; None scores all.

        Returns:
            [..., V] or [..., len(ids)], in the head's type.
        """
        head = self.lm_head if ids is None else self.lm_head[ids]
        return torch.nn.functional.linear(self.normed(final).to(head.dtype), head)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> TargetHead:
        """The same head elsewhere; a tied head stays one tensor."""
        embedding = self.embed_tokens.to(device, dtype)
        head = embedding if self.lm_head is self.embed_tokens else self.lm_head.to(device, dtype)
        return TargetHead(embedding, self.norm.to(device, dtype), head, self.eps)


def save_target_head(folder: Path, weights: HeadWeights, facts: dict[str, Any]) -> None:
    """Writes `target.safetensors` and `target.json` into a hidden folder."""
    tensors = {"embed_tokens": weights.embed_tokens, "norm": weights.norm}
    if weights.lm_head is not None:
        tensors["lm_head"] = weights.lm_head
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    artifacts.write_json(folder / FACTS, facts)


def load_target_head(folder: Path) -> TargetHead:
    """Reads the head of a hidden folder, on the CPU, in the target's own type.

    Raises:
        UserError: the folder lacks it.
    """
    facts = artifacts.read_json(folder / FACTS)
    if not (folder / WEIGHTS).exists():
        raise UserError(f"{folder / WEIGHTS}: expected the target's head, found none; run `draftsmith extract` again")
    tensors = load_file(folder / WEIGHTS)
    embedding = tensors["embed_tokens"]
    eps = float(facts["config"]["rms_norm_eps"])
    return TargetHead(embedding, tensors["norm"], tensors.get("lm_head", embedding), eps)
