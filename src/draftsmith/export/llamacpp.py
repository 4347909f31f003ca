"""llama.cpp's format: one GGUF file of the architecture `eagle3`, with the target's tokenizer in it.

Read from the source and tried on the llama.cpp inside xllamacpp 2026.10.11549: src/models/eagle3.cpp (keys, tensors,
graph), common/speculative.cpp (which rows reach the draft). It knows one layer, three aux layers, d2t of absolute ids,
and turns neighbouring values of a head. Keys that draftsmith adds under `draftsmith.` are read by nobody else.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.draft import layer_ids
from draftsmith.draft.eagle3 import DraftConfig, Eagle3Draft
from draftsmith.draft.formats import OWN_BLOCK
from draftsmith.errors import UserError
from draftsmith.export.gguf import (
    FILE_TYPES,
    LAYER_TENSORS,
    ROPE_FACTORS,
    Entry,
    interleaved,
    layer_keys,
    rope_entries,
    rope_keys,
    write_gguf,
)
from draftsmith.export.gguf_tokenizer import tokenizer_keys
from draftsmith.export.gguf_values import Value, open_gguf, read_keys
from draftsmith.export.launching import GGUF_DRAFT
from draftsmith.export.reading import REQUIRED, Files, Reading, own_block
from draftsmith.export.shapes import Shape
from draftsmith.hidden.target_head import TargetHead
from draftsmith.recipe import ExportSettings
from draftsmith.target.template import load_template

ARCHITECTURE = "eagle3"
TRIED_TARGETS = frozenset({"llama"})
"""Model types whose aux states llama.cpp was seen to hand out right; others have code for it, but were not tried."""

VERSION = "xllamacpp 2026.10.11549"
"""The build whose source the rules below are from."""

FIELDS = {
    "general.architecture": REQUIRED,
    **dict.fromkeys(("block_count", "context_length", "embedding_length", "feed_forward_length"), REQUIRED),
    "attention.head_count": REQUIRED,
    "attention.head_count_kv": "attention.head_count",
    "attention.key_length": "embedding_length / attention.head_count",
    "attention.value_length": "embedding_length / attention.head_count",
    "attention.layer_norm_rms_epsilon": REQUIRED,
    "rope.freq_base": "10000",
    "rope.dimension_count": "attention.key_length",
    "rope.scaling.type": "linear",
    "rope.scaling.factor": "1.0",
    "target_layers": REQUIRED,
    "target_hidden_size": REQUIRED,
    "norm_before_residual": "False",
    "norm_before_fc": "False",
    "tokenizer.ggml.tokens": REQUIRED,
}
"""Keys of the file without `eagle3.`, and what is taken where one is missing (src/models/eagle3.cpp, llama-model.cpp).
The number of target ids is the tokenizer's; `vocab_size` is not read."""

TENSORS = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    "layers.0.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    **{f"layers.0.{ours}": f"blk.0.{theirs}" for ours, theirs in LAYER_TENSORS.items()},
    "d2t": "d2t",
}
"""Checkpoint names -> GGUF's."""

KEY_NAMES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "rope.dimension_count": "rotary_dim",
    "target_layers": "target_layers",
    "target_hidden_size": "target_hidden_size",
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
}
"""Keys under `eagle3.` -> the names of a Llama config that they are checked under."""


def config_keys(config: DraftConfig, target: Mapping[str, Any], settings: ExportSettings) -> dict[str, Value]:
    """Every key of the file.

    Raises:
        UserError: a rope, tokenizer or layer that llama.cpp cannot be told of.
    """
    llama = config.llama()
    ids = layer_ids.to_llamacpp(config.aux_layers, target["num_layers"])
    own = {
        name: Value(str(value), "STRING") for name, value in own_block("llamacpp", config, target)[OWN_BLOCK].items()
    }
    source = Path(settings.gguf_tokenizer) if settings.gguf_tokenizer else None
    return {
        "general.name": Value(f"EAGLE-3 draft for {Path(target['name']).name}", "STRING"),
        "general.file_type": Value(FILE_TYPES[settings.dtype], "UINT32"),
        **layer_keys(ARCHITECTURE, llama, 1),
        **rope_keys(ARCHITECTURE, llama, "llamacpp: the draft")[0],
        f"{ARCHITECTURE}.target_layers": Value(ids, "ARRAY", "INT32"),
        f"{ARCHITECTURE}.target_hidden_size": Value(target["config"]["hidden_size"], "UINT32"),
        f"{ARCHITECTURE}.norm_before_residual": Value(config.norm_before_residual, "BOOL"),
        f"{ARCHITECTURE}.norm_before_fc": Value(False, "BOOL"),
        **tokenizer_keys(source or load_template(target["name"], {}, trust_remote_code=False), llama.vocab_size),
        **{f"{OWN_BLOCK}.{name}": value for name, value in own.items()},
    }


def write_file(
    path: Path, keys: Mapping[str, Value], draft: Eagle3Draft, head: TargetHead, settings: ExportSettings
) -> None:
    """Writes the draft's one file."""
    config = draft.config
    turned = {"attn_q.weight": config.num_attention_heads, "attn_k.weight": config.num_key_value_heads}
    tensors = {name: parameter.detach().cpu() for name, parameter in draft.trained().items()}
    if settings.embeddings:
        tensors["embed_tokens.weight"] = head.embed_tokens.detach().cpu()
    if config.draft_vocab_size != config.target_vocab_size:
        tensors["d2t"] = draft.target_ids(torch.arange(config.draft_vocab_size)).cpu()
    entries = []
    for name, tensor in tensors.items():
        written = TENSORS[name]
        heads = turned.get(written.removeprefix("blk.0."))
        rows = tensor if heads is None else interleaved(tensor, heads)
        entries.append(Entry(written, tuple(rows.shape), _dtype(name, rows, settings.dtype), partial(_itself, rows)))
    factors = rope_keys(ARCHITECTURE, config.llama(), "llamacpp: the draft")[1]
    write_gguf(path, ARCHITECTURE, keys, [*entries, *rope_entries(factors)])


def read_headers(folder: Path) -> tuple[dict[str, Any], dict[str, Shape]]:
    """Keys that llama.cpp asks for or we wrote, and shapes under checkpoint names where it knows them.

    Raises:
        UserError: no GGUF file.
    """
    reader = open_gguf(folder / GGUF_DRAFT)
    ours = {theirs: name for name, theirs in TENSORS.items()}
    values = {
        name: value.value
        for name, value in read_keys(reader).items()
        if name.startswith((f"{ARCHITECTURE}.", "general.architecture", "tokenizer.ggml.tokens"))
    }
    shapes = {
        ours.get(tensor.name, tensor.name): Shape(
            tuple(int(size) for size in reversed(tensor.shape)), tensor.tensor_type.name
        )
        for tensor in reader.tensors
        if tensor.name != ROPE_FACTORS
    }
    return values, shapes


def read_files(folder: Path) -> Files:
    """The file's keys under the names of a Llama config, and its tensors as they lie there under checkpoint names.

    Raises:
        UserError: no GGUF file.
    """
    path = folder / GGUF_DRAFT
    reader = open_gguf(path)
    keys = {name: value.value for name, value in read_keys(reader).items()}
    found = {tensor.name: _tensor(tensor) for tensor in reader.tensors}
    factors = found.pop(ROPE_FACTORS, None)
    ours = {theirs: name for name, theirs in TENSORS.items()}
    tensors = {ours.get(name, name): tensor for name, tensor in found.items()}
    raw: dict[str, Any] = {
        name: keys[f"{ARCHITECTURE}.{key}"] for key, name in KEY_NAMES.items() if f"{ARCHITECTURE}.{key}" in keys
    }
    raw["architectures"] = [keys.get("general.architecture")]
    raw["vocab_size"] = len(keys.get("tokenizer.ggml.tokens", ()))  # the tokenizer decides, not `vocab_size`
    raw["draft_vocab_size"] = len(tensors["d2t"]) if "d2t" in tensors else raw["vocab_size"]
    raw["gguf_rope_scaling"] = {
        name: keys[f"{ARCHITECTURE}.rope.scaling.{name}"]
        for name in ("type", "factor")
        if f"{ARCHITECTURE}.rope.scaling.{name}" in keys
    }
    raw["rope_factors"] = None if factors is None else factors.tolist()
    if "d2t" in tensors:
        # Absolute ids here; offsets everywhere else.
        tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))
    return Files(raw, tensors)


def read_back(raw: Mapping[str, Any]) -> Reading:
    """What llama.cpp takes from it."""
    return Reading(
        architectures=tuple(raw["architectures"]),
        known_architectures=(ARCHITECTURE,),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_before_fc=bool(raw.get("norm_before_fc", False)),
        fc_norm=False,
        norm_output=False,
        uses_aux_states=True,
        reads_embedding=True,
        pairwise_rope=True,
    )


def taken_layers(raw: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[int, ...]:
    """Outputs of layers in the order given, which is the order they reach fc; -1 is the embedding.

    Raises:
        UserError: an id beyond the target, at which llama.cpp aborts.
    """
    ids, depth = list(raw.get("target_layers") or ()), target["num_layers"]
    if any(layer > depth for layer in ids):
        raise UserError(f"llamacpp: expected target_layers up to {depth}, found {ids}: llama.cpp would abort")
    return tuple(layer - layer_ids.VLLM_INPUT_OF for layer in ids)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _dtype(name: str, tensor: Tensor, asked: str) -> str:
    """Vectors stay float32, ids int64, and the embedding keeps the target's own bits."""
    if name == "d2t":
        return "int64"
    if name == "embed_tokens.weight":
        return str(tensor.dtype).removeprefix("torch.")
    return asked if tensor.dim() > 1 else "float32"


def _tensor(stored: Any) -> Tensor:
    """A tensor of an open file, copied out of it."""
    shape = tuple(int(size) for size in reversed(stored.shape))
    if stored.tensor_type.name == "BF16":
        return torch.from_numpy(stored.data.copy()).view(torch.bfloat16).reshape(shape)
    return torch.from_numpy(stored.data.copy()).reshape(shape)
