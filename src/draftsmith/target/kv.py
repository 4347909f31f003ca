"""A key/value cache and an attention for decoding with transformers models, made for small query counts.

transformers' DynamicCache copies the whole cache at every token, and its attention repeats keys per query head before
calling the kernel. `BufferedCache` writes into buffers that double when full; `GROUPED_ATTENTION` folds the query heads
that share a key head into the row axis, so that a decode step reads the cache once. Both keep the model's own code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from draftsmith.errors import UserError

GROUPED_ATTENTION = "draftsmith_grouped"
"""Pass as `attn_implementation` to `from_pretrained`; registered when this module is imported."""

SHORT_QUERY = 16


class BufferedLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values: views [B, K, length, D] of buffers with spare room."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Called by the first `update`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.length = 0
        self.key_buffer = key_states.new_empty((*key_states.shape[:2], 0, key_states.shape[3]))
        self.value_buffer = value_states.new_empty((*value_states.shape[:2], 0, value_states.shape[3]))
        self.is_initialized = True
        self._show()

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Appends [B, K, T, D] and returns everything so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        if end > self.key_buffer.shape[2]:
            self._resize(max(end + 64, end + self.length // 2))
        self.key_buffer[:, :, self.length : end] = key_states
        self.value_buffer[:, :, self.length : end] = value_states
        self.length = end
        self._show()
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Rows held."""
        return self.length if self.is_initialized else 0

    def crop_to(self, length: int) -> None:
        """Forgets everything past `length` rows; costs nothing."""
        self.length = length
        self._show()

    def take(self, rows: Tensor, start: int) -> None:
        """Keeps these batch rows, from column `start` on."""
        self._set(self.keys[rows, :, start:], self.values[rows, :, start:])

    def expand(self, batch: int) -> None:
        """Repeats the single batch row `batch` times."""
        self._set(self.keys.expand(batch, -1, -1, -1), self.values.expand(batch, -1, -1, -1))

    def append_rows(self, other: BufferedLayer) -> None:
        """Adds another cache's batch rows; the shorter one is padded on the left (masked there by the caller)."""
        length = max(self.length, other.length)
        pairs = ((self.keys, other.keys), (self.values, other.values))
        keys, values = (torch.cat([_left_padded(a, length), _left_padded(b, length)]) for a, b in pairs)
        self._set(keys, values)

    def _set(self, keys: Tensor, values: Tensor) -> None:
        self.length = keys.shape[2]
        self.key_buffer, self.value_buffer = keys, values
        self._resize(self.length + 64)
        self._show()

    def _resize(self, capacity: int) -> None:
        for name in ("key_buffer", "value_buffer"):
            old = getattr(self, name)
            new = old.new_empty((*old.shape[:2], capacity, old.shape[3]))
            new[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, new)

    def _show(self) -> None:
        self.keys = self.key_buffer[:, :, : self.length]
        self.values = self.value_buffer[:, :, : self.length]


class BufferedCache(Cache):  # type: ignore[misc]
    """A cache of BufferedLayers. Layers with a sliding window keep everything too; their masks hide what is old."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[BufferedLayer() for _ in range(layers)])

    def crop(self, length: int) -> None:
        """Forgets everything past `length` rows."""
        for layer in self.layers:
            layer.crop_to(length)

    def take(self, rows: Tensor, start: int = 0) -> None:
        """Keeps these batch rows, from column `start` on."""
        for layer in self.layers:
            layer.take(rows, start)

    def expand(self, batch: int) -> None:
        """Repeats the single batch row `batch` times."""
        for layer in self.layers:
            layer.expand(batch)

    def append_rows(self, other: BufferedCache) -> None:
        """Adds another cache's batch rows, left-padded to one length."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.append_rows(theirs)


def new_cache(config: Any) -> BufferedCache:
    """An empty cache for a model with this (text) config.

    Raises:
        UserError: the model has layers that keep something else than keys and values (linear attention).
    """
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    other = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    if other:
        raise UserError(
            f"{config.model_type}: in-process decoding needs attention layers only, found {', '.join(sorted(other))}; "
            "serve the model and capture with --server"
        )
    return BufferedCache(config.num_hidden_layers)


def _grouped(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [B, A, T, D], key and value [B, K, S, D], mask [B, 1, T, S] or None -> [B, T, A, D]."""
    batch, heads, rows, width = query.shape
    kv_heads = key.shape[1]
    if rows > SHORT_QUERY or heads == kv_heads:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return output
    group = heads // kv_heads
    folded = query.reshape(batch, kv_heads, group * rows, width)
    if attention_mask is None and rows > 1:
        total = key.shape[2]
        last = torch.arange(total - rows, total, device=query.device)
        attention_mask = (torch.arange(total, device=query.device) <= last[:, None])[None, None]
    if attention_mask is not None and rows > 1:
        attention_mask = attention_mask.repeat(1, 1, group, 1)
    attended = functional.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return attended.reshape(batch, heads, rows, value.shape[3]).transpose(1, 2).contiguous(), None


def _left_padded(values: Tensor, length: int) -> Tensor:
    return functional.pad(values, (0, 0, length - values.shape[2], 0))


AttentionInterface.register(GROUPED_ATTENTION, _grouped)
AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)
