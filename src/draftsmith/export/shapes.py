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
from draftsmith.draft.loading import SHAPES, flattened, layer_config
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
INPUT_NORM = "input_norm.weight"
"""Norm over the joined aux states (`norm_before_fc`)."""
FC_NORMS = tuple(f"fc_norm.{number}.weight" for number in range(AUX_STATES))
"""Norms over each aux state (`fc_norm`)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor without its values; `dtype` "" where nothing says it."""

    shape: tuple[int, ...]
    dtype: str = ""


def is_mla(flat: Mapping[str, Any]) -> bool:
    """Whether a flat config describes a draft with multi-head latent attention."""
    return flat.get("kv_lora_rank") is not None


def axes_of(flat: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Checkpoint name -> axes of every tensor that a draft of this kind may have, norms around fc left out."""
    if not is_mla(flat):
        return SHAPES
    plain = {key: axes for key, axes in SHAPES.items() if not key.startswith(ATTENTION)}
    return plain | {ATTENTION + key: axes for key, axes in MLA_ATTENTION.items()}


def promised(raw: Mapping[str, Any], name: str) -> dict[str, Shape]:
    """The tensors that a draft's config.json asks for, under checkpoint names; embedding and map included.

    Args:
        raw: the config.json, of any format.
        name: where it comes from, for messages.

    Raises:
        UserError: a size is missing.
    """
    flat = flattened(raw)
    sizes = _sizes(flat, name)
    dtype = str(flat.get("dtype") or flat.get("torch_dtype") or "")
    fixed = {"d2t": "int64", "t2d": "bool"}
    return {
        key: Shape(tuple(sizes[axis] for axis in axes), fixed.get(key, dtype)) for key, axes in axes_of(flat).items()
    }


def held(folder: Path) -> dict[str, Shape]:
    """The tensors in a folder's safetensors files, under checkpoint names, read from their headers; {} without files.

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
    found: dict[str, Shape] = {}
    for path in sorted(folder.glob("*.safetensors")):
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
        "aux": (flat.get("num_aux_hidden_states") or AUX_STATES) * (flat.get("target_hidden_size") or hidden),
        "mlp": _size(flat, "intermediate_size", name),
        "vocab": vocab,
        "draft_vocab": flat.get("draft_vocab_size") or vocab,
    }
    if not is_mla(flat):
        llama = layer_config(flat)
        return sizes | {"q": heads * llama.head_dim, "kv": llama.num_key_value_heads * llama.head_dim}
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
