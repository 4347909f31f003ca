"""The EAGLE-3 draft: one decoder layer over the target's fused hidden states (Li et al. 2025, arXiv:2503.01840).

Row p reads the embedding of token p+1 and the hidden state of token p (first the fused aux states of the target, then
the draft's own output), and predicts token p+2. The layer differs from a Llama layer in its attention input, which is
`[input_layernorm(embedding), hidden_norm(hidden)]`, twice as wide (vLLM 0.32: `models/llama_eagle3.py`).

Parameter names are the checkpoint names that vLLM and SGLang load. The layer is split into `inputs`, `keys_values`,
`queries` and `finish`, so that training computes keys and values for every row but queries only where there is a loss,
and decoding keeps its own cache. Embeddings are the target's, frozen; `d2t` holds offsets (target_id = i + d2t[i]).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftsmith.errors import UserError

AUX_STATES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """Everything that shapes a draft or its meaning. `aux_layers` are "output of layer i", 0-based (contract 3)."""

    target_vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    """As in transformers 5 (`rope_theta`, `rope_type`, scaling values)."""
    max_position_embeddings: int
    aux_layers: tuple[int, ...]
    target_layers: int
    target_model_type: str
    hidden_act: str = "silu"
    norm_before_residual: bool = False
    """Residual is taken after `hidden_norm` (vLLM: `norm_before_residual`; SGLang knows only False)."""
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def to_json(self) -> dict[str, Any]:
        """The config as JSON types, for checkpoints."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> DraftConfig:
        """The inverse of `to_json`."""
        return cls(**{**values, "aux_layers": tuple(values["aux_layers"])})

    def llama(self) -> LlamaConfig:
        """The Llama config whose MLP, norms and rotary embedding the layer is made of."""
        return LlamaConfig(
            vocab_size=self.target_vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            rope_parameters=dict(self.rope_parameters),
            max_position_embeddings=self.max_position_embeddings,
            hidden_act=self.hidden_act,
        )


class Eagle3Attention(nn.Module):
    """The projections of the layer's attention; q, k and v read 2 * hidden."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        width = 2 * config.hidden_size
        self.q_proj = nn.Linear(width, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)


class Eagle3Layer(nn.Module):
    """The parameters of the one decoder layer, under their checkpoint names."""

    def __init__(self, config: DraftConfig, llama: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Eagle3Attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(llama)


class Eagle3Draft(nn.Module):
    """The draft. Shapes below: B traces, T rows, H hidden, A heads, K key/value heads, D head width."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        llama = config.llama()
        self.config = config
        self.embed_tokens = nn.Embedding(config.target_vocab_size, config.hidden_size)
        self.embed_tokens.weight.requires_grad_(False)
        self.fc = nn.Linear(AUX_STATES * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config, llama)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.target_vocab_size, dtype=torch.bool))
        self.rotary = LlamaRotaryEmbedding(llama)

    @property
    def layer(self) -> Eagle3Layer:
        """The one decoder layer."""
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        return layer

    def set_vocab(self, d2t: Tensor, t2d: Tensor) -> None:
        """Sets the draft vocabulary.

        Args:
            d2t: int64 [draft_vocab], offsets.
            t2d: bool [target_vocab].

        Raises:
            UserError: the two do not describe the same ids of the target vocabulary.
        """
        ids = torch.arange(len(d2t)) + d2t.cpu()
        if d2t.shape != self.d2t.shape or t2d.shape != self.t2d.shape:
            raise UserError(
                f"draft vocabulary: expected d2t {list(self.d2t.shape)} and t2d {list(self.t2d.shape)}, "
                f"found {list(d2t.shape)} and {list(t2d.shape)}; it belongs to another draft or target"
            )
        if not torch.equal(ids, t2d.cpu().nonzero().flatten()):
            raise UserError(
                "draft vocabulary: d2t and t2d name different target ids; d2t must hold offsets "
                "(target_id = i + d2t[i]), are these absolute ids?"
            )
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)

    def set_embedding(self, embedding: Tensor) -> None:
        """Uses the target's embedding [target_vocab, H] itself, in its own dtype: no copy, never trained.

        Raises:
            UserError: it is another target's.
        """
        if embedding.shape != self.embed_tokens.weight.shape:
            raise UserError(
                f"target embedding: expected shape {list(self.embed_tokens.weight.shape)} by the draft's config, "
                f"found {list(embedding.shape)}; the draft belongs to another target"
            )
        self.embed_tokens.weight = nn.Parameter(embedding, requires_grad=False)

    def trained(self) -> dict[str, nn.Parameter]:
        """Name -> parameter of all that is trained: everything but the embedding."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft vocabulary ids -> target vocabulary ids, same shape."""
        return draft_ids + self.d2t[draft_ids]

    def fuse(self, aux: Tensor) -> Tensor:
        """Aux states [..., 3 * H] (in layer order) -> hidden [..., H]."""
        fused: Tensor = self.fc(aux)
        return fused

    def inputs(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Ids [B, T] (token p+1 in row p) and hidden [B, T, H] -> attention input [B, T, 2H], residual [B, T, H]."""
        layer = self.layer
        normed = layer.hidden_norm(hidden)
        embedded = layer.input_layernorm(self.embed_tokens(ids).to(hidden.dtype))
        return torch.cat([embedded, normed], dim=-1), normed if self.config.norm_before_residual else hidden

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Attention input [B, T, 2H] at positions [B, T] -> rotated keys and values, each [B, K, T, D]."""
        keys = self._heads(self.layer.self_attn.k_proj(x))
        return self.rotated(keys, positions), self._heads(self.layer.self_attn.v_proj(x))

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """Attention input [B, T, 2H] at positions [B, T] -> rotated queries [B, A, T, D]."""
        return self.rotated(self._heads(self.layer.self_attn.q_proj(x)), positions)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Attention output [B, A, T, D] and residual [B, T, H] -> the row's output [B, T, H], before the final norm."""
        layer = self.layer
        hidden = residual + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        output: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """The row's output [..., H] -> logits over the draft vocabulary [..., draft_vocab]."""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits

    def _heads(self, projected: Tensor) -> Tensor:
        batch, rows, _ = projected.shape
        return projected.view(batch, rows, -1, self.config.head_dim).transpose(1, 2)

    def rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Heads [B, A, T, D] turned by their positions [B, T]: the two halves of a head against each other."""
        cos, sin = self.rotary(heads, positions)
        rotated: Tensor = apply_rotary_pos_emb(heads, heads, cos, sin)[0]
        return rotated
