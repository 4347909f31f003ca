"""Names, shapes and types of a draft's tensors: as its config.json promises them, and as its files hold them.

Nothing here loads a weight: files are asked for their headers, so that a draft for a trillion-parameter target is
looked at in a second, and a folder without weights can still be compared by what its config says. Two layer kinds
exist in the field: a Llama layer, and the multi-head latent attention (MLA) of DeepSeek and Kimi
(vLLM 0.32: `models/llama_eagle3.py`, `models/deepseek_eagle3.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from draftsmith.artifacts import read_json
from draftsmith.draft.eagle3 import AUX_STATES
from draftsmith.draft.formats import as_vllm_reads, format_of, layer_config
from draftsmith.draft.loading import PICKLED, SHAPES, read_pickled
from draftsmith.errors import UserError

MLA_FIELDS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
MLA_ATTENTION: dict[str, tuple[str, ...]] = {
    "q_a_proj.weight": ("q_lora", "twice"),
    "q_a_layernorm.weight": ("q_lora",),
    "q_b_proj.weight": ("q", "q_lora"),
    "kv_a_proj_with_mqa.weight": ("kv_a", "twice"),
    "kv_a_layernorm.weight": ("kv_lora",),
    "kv_b_proj.weight": ("kv_b", "kv_lora"),
    "o_proj.weight": ("hidden", "v"),
}
ATTENTION = "layers.0.self_attn."
QKV_BIASES: dict[str, tuple[str, ...]] = {"q_proj.bias": ("q",), "k_proj.bias": ("kv",), "v_proj.bias": ("kv",)}
MLP_BIASES: dict[str, tuple[str, ...]] = {
    "gate_proj.bias": ("mlp",),
    "up_proj.bias": ("mlp",),
    "down_proj.bias": ("hidden",),
}
HEAD_NORMS: dict[str, tuple[str, ...]] = {"q_norm.weight": ("head",), "k_norm.weight": ("head",)}
"""Of a Qwen3 layer."""
INPUT_NORM = "input_norm.weight"
"""Norm over the joined aux states (`norm_before_fc`)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor without its values; `dtype` "" where nothing says it."""

    shape: tuple[int, ...]
    dtype: str = ""


def is_mla(flat: Mapping[str, Any]) -> bool:
    """Whether a flat config describes a draft with multi-head latent attention."""
    return flat.get("kv_lora_rank") is not None


def axes_of(flat: Mapping[str, Any], engine: str) -> dict[str, tuple[str, ...]]:
    """Checkpoint name -> axes of every tensor that an engine has a place for in a draft with this config, norms around
    fc left out (vLLM 0.32, models/llama_eagle3.py, llama.py, qwen3_eagle3.py, deepseek_eagle3.py; SGLang 0.5.23,
    srt/models/llama_eagle3.py, llama.py, kimi_k25_eagle3.py)."""
    axes = dict(SHAPES)
    if is_mla(flat):
        axes = {key: value for key, value in axes.items() if not key.startswith(ATTENTION)}
        axes |= {ATTENTION + key: value for key, value in MLA_ATTENTION.items()}
    elif engine != "llamacpp":
        axes |= _biases_and_head_norms(flat, engine)
    if engine == "llamacpp":
        return axes
    if engine == "sglang" and flat.get("bias"):
        axes["fc.bias"] = ("hidden",)
    first = {key: value for key, value in axes.items() if key.startswith("layers.0.")}
    for number in range(1, layer_count(flat)):
        # The embedding is joined to the hidden state before the first layer only.
        for key, value in first.items():
            axes[key.replace("layers.0.", f"layers.{number}.")] = tuple(
                "hidden" if axis == "twice" else axis for axis in value
            )
    return axes


def layer_count(flat: Mapping[str, Any]) -> int:
    """Layers that a config names; one where it names none."""
    count = flat.get("num_hidden_layers")
    return count if isinstance(count, int) else 1


def fc_norms(flat: Mapping[str, Any]) -> tuple[str, ...]:
    """Norms over each aux state (`fc_norm`)."""
    return tuple(f"fc_norm.{number}.weight" for number in range(aux_count(flat)))


def aux_count(flat: Mapping[str, Any]) -> int:
    """How many aux states an engine's fc reads."""
    named = (flat.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return int(flat.get("num_aux_hidden_states") or len(named or ()) or AUX_STATES)


def _biases_and_head_norms(flat: Mapping[str, Any], engine: str) -> dict[str, tuple[str, ...]]:
    """What a layer with plain attention has beyond the common weights."""
    attention: dict[str, tuple[str, ...]] = {}
    mlp: dict[str, tuple[str, ...]] = {}
    qwen3 = engine == "speculators" and flat.get("model_type") == "qwen3"
    if flat.get("attention_bias") and engine != "sglang":
        attention |= QKV_BIASES
    if (flat.get("attention_bias") or flat.get("bias")) and not qwen3:
        attention["o_proj.bias"] = ("hidden",)
    if flat.get("mlp_bias") and engine != "sglang" and not qwen3:
        mlp = MLP_BIASES
    if qwen3:
        attention |= HEAD_NORMS
    return {ATTENTION + key: value for key, value in attention.items()} | {
        f"layers.0.mlp.{key}": value for key, value in mlp.items()
    }


def promised(raw: Mapping[str, Any], name: str, engine: str | None = None) -> dict[str, Shape]:
    """The tensors that a draft's config.json asks for, under checkpoint names; embedding and map included.

    Args:
        raw: the config.json, of any format.
        name: where it comes from, for messages.
        engine: by whose rules; None: those of the engine whose format it is.

    Raises:
        UserError: a size is missing.
    """
    flat = as_vllm_reads(raw)
    sizes = _sizes(flat, name)
    dtype = str(flat.get("dtype") or flat.get("torch_dtype") or "")
    fixed = {"d2t": "int64", "t2d": "bool"}
    wanted = axes_of(flat, engine or format_of(raw))
    return {key: Shape(tuple(sizes[axis] for axis in axes), fixed.get(key, dtype)) for key, axes in wanted.items()}


def held(folder: Path) -> dict[str, Shape]:
    """The tensors in a folder's weight files, under checkpoint names, read from their headers; {} without files.

    Raises:
        UserError: a file that cannot be read.
    """
    return {
        name.removeprefix("model.").replace("midlayer.", "layers.0."): shape
        for name, shape in stored_shapes(folder).items()
    }


def stored_shapes(folder: Path) -> dict[str, Shape]:
    """The same under the names that the files have.

    Raises:
        UserError: a file that cannot be read.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths and (folder / PICKLED).exists():
        pickled = read_pickled(folder / PICKLED)
        return {key: Shape(tuple(one.shape), str(one.dtype).removeprefix("torch.")) for key, one in pickled.items()}
    found: dict[str, Shape] = {}
    for path in paths:
        try:
            with safe_open(path, framework="np") as file:
                for key in file.keys():  # noqa: SIM118  (no mapping)
                    part = file.get_slice(key)
                    found[key] = Shape(tuple(part.get_shape()), DTYPES.get(part.get_dtype(), part.get_dtype()))
        except SafetensorError as error:
            raise UserError(f"{path}: expected safetensors, found something else ({error})") from None
    return found


DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "I64": "int64", "I32": "int32",
          "BOOL": "bool", "U8": "uint8", "F8_E4M3": "float8_e4m3fn"}  # fmt: skip
"""How safetensors headers call what config.json calls by torch's names."""


def tensors_of(folder: Path) -> tuple[dict[str, Shape], bool]:
    """What a draft folder holds, or where it has no weights what its config promises; and whether they were read.

    Raises:
        UserError: no config.json, or a file that cannot be read.
    """
    found = held(folder)
    return (found, True) if found else (promised(read_json(folder / "config.json"), str(folder)), False)


def _sizes(flat: Mapping[str, Any], name: str) -> dict[str, int]:
    heads, hidden = _size(flat, "num_attention_heads", name), _size(flat, "hidden_size", name)
    vocab = _size(flat, "vocab_size", name)
    sizes = {
        "hidden": hidden,
        "twice": 2 * hidden,
        "aux": aux_count(flat) * (flat.get("target_hidden_size") or hidden),
        "mlp": _size(flat, "intermediate_size", name),
        "vocab": vocab,
        "draft_vocab": flat.get("draft_vocab_size") or vocab,
    }
    if not is_mla(flat):
        llama = layer_config(flat)
        kv = llama.num_key_value_heads * llama.head_dim
        return sizes | {"q": heads * llama.head_dim, "kv": kv, "head": llama.head_dim}
    q_lora, kv_lora, nope, rope, value = (_size(flat, field, name) for field in MLA_FIELDS)
    return sizes | {
        "q_lora": q_lora,
        "kv_lora": kv_lora,
        "q": heads * (nope + rope),
        "kv_a": kv_lora + rope,
        "kv_b": heads * (nope + value),
        "v": heads * value,
    }


def _size(flat: Mapping[str, Any], field: str, name: str) -> int:
    value = flat.get(field)
    if not isinstance(value, int):
        raise UserError(f"{name}/config.json: expected {field} as a whole number, found {value!r}")
    return value
