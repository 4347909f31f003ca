"""The draft as engines compute it, with what they know beyond our own module."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.draft.eagle3 import AUX_STATES, DraftConfig, Eagle3Draft
from draftsmith.export.reading import Reading
from draftsmith.export.rope import Rope


class EngineModule(Eagle3Draft):
    """The draft with what engines know beyond ours: norms around fc, a normed output, and their ways of rope."""

    def __init__(self, config: DraftConfig, reading: Reading, rope: Rope) -> None:
        super().__init__(config)
        self.reading = reading
        self.rotary.inv_freq, self.rotary.attention_scaling = rope.inv_freq, rope.scale
        width, eps = config.hidden_size, config.rms_norm_eps
        if reading.norm_before_fc:
            self.input_norm = LlamaRMSNorm(AUX_STATES * width, eps=eps)
        if reading.fc_norm:
            self.fc_norm = nn.ModuleList([LlamaRMSNorm(width, eps=eps) for _ in range(AUX_STATES)])

    def fuse(self, aux: Tensor) -> Tensor:
        """Aux states [..., 3 * H] -> hidden [..., H]."""
        if self.reading.norm_before_fc:
            aux = self.input_norm(aux)
        if self.reading.fc_norm:
            parts = zip(self.fc_norm, aux.chunk(AUX_STATES, dim=-1), strict=True)
            aux = torch.cat([norm(part) for norm, part in parts], dim=-1)
        return super().fuse(aux)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The row's output [B, T, H]: before the final norm, or behind it where the engine feeds it back normed."""
        output = super().finish(attended, residual)
        if self.reading.norm_output:
            output = self.norm(output)
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """The row's output [..., H] -> logits [..., draft_vocab]."""
        if self.reading.norm_output:
            logits: Tensor = self.lm_head(hidden)
            return logits
        return super().logits(hidden)

    def rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Heads [B, A, T, D], of which the first 2 * len(inv_freq) values are turned by their positions [B, T]."""
        width = 2 * len(self.rotary.inv_freq)
        turned, rest = heads[..., :width], heads[..., width:]
        if not self.reading.pairwise_rope:
            return torch.cat([super().rotated(turned, positions), rest], dim=-1)
        # llama.cpp: GGML_ROPE_TYPE_NORMAL
        cos, sin = (part[:, None, :, : width // 2] for part in self.rotary(turned, positions))
        left, right = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack([left * cos - right * sin, right * cos + left * sin], dim=-1).flatten(-2)
        return torch.cat([pairs, rest], dim=-1)
