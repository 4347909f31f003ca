"""GGUF files as llama.cpp reads them: typed keys, tensors streamed in, and a Llama target from its model folder.

llama.cpp turns neighbouring values of a head where transformers turns its two halves, so q and k rows are interleaved
on the way in (`interleaved`). Matrices keep the asked dtype and vectors stay float32, as in llama.cpp's own converter.

Costs one tensor in memory at a time, and the file's size on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaConfig

from draftsmith.artifacts import read_json
from draftsmith.errors import UserError
from draftsmith.export.gguf_tokenizer import tokenizer_keys
from draftsmith.export.gguf_values import Value, gguf_package
from draftsmith.target.template import load_template
from draftsmith.target.weights import tensor_files

GgufType = Literal["bfloat16", "float16", "float32"]
FILE_TYPES: dict[str, int] = {"float32": 0, "float16": 1, "bfloat16": 32}
"""`general.file_type` (llama.cpp's `llama_ftype`)."""

RAW_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int64": "I64"}
"""torch's names -> `GGMLQuantizationType`'s."""

TARGET_TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_TENSORS = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
"""Names of a Llama layer in transformers -> in GGUF, without `model.layers.N.` and `blk.N.`."""

ROPE_FACTORS = "rope_freqs.weight"
"""[head_dim / 2] float32 that llama.cpp divides the base frequencies by."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to be written; `load` is called when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], Tensor]


def write_gguf(path: Path, architecture: str, keys: Mapping[str, Value], entries: Iterable[Entry]) -> None:
    """Writes one file, replacing what is there.

    Raises:
        UserError: the package gguf is not installed.
    """
    gguf = gguf_package()
    import numpy

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        items = gguf.GGUFValueType[value.items] if value.items else None
        writer.add_key_value(key, value.value, gguf.GGUFValueType[value.kind], sub_type=items)
    entries = list(entries)
    for entry in entries:
        width = getattr(torch, entry.dtype).itemsize
        in_bytes = (*entry.shape[:-1], entry.shape[-1] * width)
        size = torch.Size(in_bytes).numel()
        raw = gguf.GGMLQuantizationType[RAW_TYPES[entry.dtype]]
        writer.add_tensor_info(entry.name, in_bytes, numpy.dtype(numpy.uint8), size, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in entries:
        tensor = entry.load().to(getattr(torch, entry.dtype)).contiguous()
        writer.write_tensor_data(tensor.view(torch.uint8).numpy())
    writer.close()


def write_target_gguf(model: Path, path: Path, dtype: GgufType, tokenizer: Path | None = None) -> None:
    """Writes a Llama target.

    Args:
        model: folder with config.json, safetensors and tokenizer.
        path: the file to write; an existing one is replaced.
        dtype: of the matrices.
        tokenizer: a GGUF file of the same target to take the tokenizer from; None: the folder's own.

    Raises:
        UserError: another architecture than Llama, a rope or tokenizer that GGUF cannot say, weights missing.
    """
    raw = read_json(model / "config.json")
    if "LlamaForCausalLM" not in (raw.get("architectures") or ()) or raw.get("attention_bias") or raw.get("mlp_bias"):
        raise UserError(
            f"{model}: expected a LlamaForCausalLM without biases, found {raw.get('architectures')}; write its GGUF "
            "with llama.cpp's convert_hf_to_gguf.py"
        )
    config = LlamaConfig(**{key: value for key, value in raw.items() if key not in ("architectures", "model_type")})
    rope, factors = rope_keys("llama", config, str(model))
    keys = {
        "general.name": Value(model.name, "STRING"),
        "general.file_type": Value(FILE_TYPES[dtype], "UINT32"),
        **layer_keys("llama", config, config.num_hidden_layers),
        **rope,
        **tokenizer_keys(tokenizer or load_template(str(model), {}, trust_remote_code=False), config.vocab_size),
    }
    write_gguf(path, "llama", keys, [*_target_entries(model, config, dtype), *rope_entries(factors)])


def layer_keys(architecture: str, config: LlamaConfig, layers: int) -> dict[str, Value]:
    """The sizes of a model of Llama layers."""
    sizes = {
        "block_count": layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    keys = {f"{architecture}.{name}": Value(value, "UINT32") for name, value in sizes.items()}
    return keys | {f"{architecture}.attention.layer_norm_rms_epsilon": Value(config.rms_norm_eps, "FLOAT32")}


def rope_keys(architecture: str, config: LlamaConfig, name: str) -> tuple[dict[str, Value], Tensor | None]:
    """The rope of a Llama layer, and the factors [head_dim / 2] its frequencies are divided by, where there are any.

    Raises:
        UserError: a rope type that llama.cpp computes differently from transformers.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = config.rope_parameters
    kind, theta = parameters["rope_type"], float(parameters["rope_theta"])
    partial = parameters.get("partial_rotary_factor") or 1.0
    keys = {f"{architecture}.rope.freq_base": Value(theta, "FLOAT32")}
    if kind not in ("default", "linear", "llama3") or partial != 1.0:
        raise UserError(
            f"{name}: expected a rope of type default, linear or llama3 over whole heads, found {kind!r} (partial "
            f"{partial}); llama.cpp computes others in its own way, so they are not written"
        )
    if kind == "default":
        return keys, None
    if kind == "linear":
        scaling = f"{architecture}.rope.scaling"
        return keys | {
            f"{scaling}.type": Value("linear", "STRING"),
            f"{scaling}.factor": Value(float(parameters["factor"]), "FLOAT32"),
        }, None
    width = config.head_dim
    base = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    return keys, base / LlamaRotaryEmbedding(config).inv_freq.float()


def rope_entries(factors: Tensor | None) -> list[Entry]:
    """The tensor that carries rope factors, where there are any."""
    return [] if factors is None else [Entry(ROPE_FACTORS, tuple(factors.shape), "float32", lambda: factors)]


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """q or k rows [heads * D, in], halves of a head beside each other -> llama.cpp's order, pairs beside each other."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def halved(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `interleaved`."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def _target_entries(model: Path, config: LlamaConfig, dtype: GgufType) -> list[Entry]:
    heads = {"attn_q.weight": config.num_attention_heads, "attn_k.weight": config.num_key_value_heads}
    entries = []
    for name, file in tensor_files(model).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        written = _target_name(name, model)
        with safe_open(file, framework="pt") as opened:
            shape = tuple(opened.get_slice(name).get_shape())
        load = _loader(file, name, heads.get(written.split(".", 2)[-1]))
        entries.append(Entry(written, shape, dtype if len(shape) > 1 else "float32", load))
    return entries


def _target_name(name: str, model: Path) -> str:
    if name in TARGET_TENSORS:
        return TARGET_TENSORS[name]
    layer, _, last = name.removeprefix("model.layers.").partition(".")
    if not name.startswith("model.layers.") or last not in LAYER_TENSORS:
        raise UserError(f"{model}: {name} is no tensor of a Llama; convert it with llama.cpp's convert_hf_to_gguf.py")
    return f"blk.{layer}.{LAYER_TENSORS[last]}"


def _loader(file: Path, name: str, heads: int | None) -> Callable[[], Tensor]:
    def load() -> Tensor:
        with safe_open(file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor if heads is None else interleaved(tensor, heads)

    return load
