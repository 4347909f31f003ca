"""From logits to the distribution a token is drawn from, in the order engines apply: temperature, top-k, top-p."""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.target.reply import Sampling


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [..., V] -> probabilities [..., V] in float32; greedy puts all mass on the first maximum.

    Order and ties follow vLLM 0.32 (`v1/sample/ops/topk_topp_sampler.py`): top-k on logits, then the smallest set of
    most likely tokens whose mass reaches top_p.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        mass = ordered.softmax(-1)
        beyond = mass.cumsum(-1) - mass >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter_(-1, order, beyond), float("-inf"))
    return logits.softmax(-1)


def draw(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """One token id per row of probabilities [..., V], drawn with `generator` (same device)."""
    flat = probabilities.reshape(-1, probabilities.shape[-1])
    return torch.multinomial(flat, 1, generator=generator).reshape(probabilities.shape[:-1])
