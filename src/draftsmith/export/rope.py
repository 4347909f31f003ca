"""Rotary embedding of a draft: what is written, and which frequencies an engine computes from what it reads.

Three things must agree: the frequencies the draft was trained with, the fields in config.json (nested `rope_parameters`
for new readers, flat `rope_theta` / `rope_scaling` for old ones), and the engine's own formula. They are compared as
numbers, never as field names (P38). The engine formulas below are those of vLLM 0.32
(`model_executor/layers/rotary_embedding/`) and SGLang 0.5.23 (`srt/layers/rotary_embedding/`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftsmith.draft.eagle3 import DraftConfig
from draftsmith.draft.formats import layer_config, text_rope
from draftsmith.errors import UserError
from draftsmith.recipe import Engine

FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        *("attention_factor", "truncate"),
    ),
}
"""Rope types whose formula is the same in training and in every engine, and the values each reads."""

NEEDED = {"linear": ("factor",), "llama3": FIELDS["llama3"], "yarn": ("factor",)}
"""Of these values, those without which no frequency can be computed."""

POSITIONS = (0, 1, 4096, 65536)
FREQUENCY_TOLERANCE = 1e-5
"""Relative, of inverse frequencies."""
ANGLE_TOLERANCE = 2e-2
"""Absolute, of cos and sin: float32 rounding of a frequency near 1 is 4e-3 rad at position 65536."""


@dataclass(frozen=True, slots=True)
class Rope:
    """`inv_freq` [rotary_dim / 2] float32; cos and sin are multiplied by `scale`."""

    inv_freq: Tensor
    scale: float

    def difference(self, other: Rope) -> str | None:
        """None if both turn keys alike at all `POSITIONS`; otherwise what differs first, in words."""
        if self.inv_freq.shape != other.inv_freq.shape:
            return f"{2 * len(other.inv_freq)} rotated values per head instead of {2 * len(self.inv_freq)}"
        relative = ((self.inv_freq - other.inv_freq).abs() / self.inv_freq).max().item()
        if relative > FREQUENCY_TOLERANCE:
            return f"inverse frequencies off by up to {relative:.2g} (relative)"
        for position in POSITIONS:
            angle = (self.table(position) - other.table(position)).abs().max().item()
            if angle > ANGLE_TOLERANCE:
                return f"cos/sin at position {position} off by up to {angle:.2g}"
        return None

    def table(self, position: int) -> Tensor:
        """cos and sin at one position [rotary_dim] float64."""
        angles = self.inv_freq.double() * position
        return torch.cat([angles.cos(), angles.sin()]) * self.scale


def trained_rope(config: DraftConfig) -> Rope:
    """What the draft module itself uses."""
    rotary = LlamaRotaryEmbedding(config.llama())
    return Rope(rotary.inv_freq.float(), float(rotary.attention_scaling))


def written_rope(config: DraftConfig) -> dict[str, Any]:
    """The rope fields of a config.json, nested and flat; only values that the formula reads.

    Raises:
        UserError: a rope type that training and engines compute differently.
    """
    parameters = config.llama().rope_parameters
    kind = parameters["rope_type"]
    if kind not in FIELDS:
        raise UserError(
            f"the draft's rope type {kind!r}: expected one of {', '.join(FIELDS)}; engines compute others differently "
            "from training, so it cannot be exported"
        )
    names = ("rope_type", "rope_theta", *FIELDS[kind])
    kept = {name: parameters[name] for name in names if parameters.get(name) is not None}
    # transformers 5 takes a non-null `rope_scaling` for all of `rope_parameters`, so it must be complete.
    return {
        "rope_parameters": kept,
        "rope_theta": kept["rope_theta"],
        "rope_scaling": None if kind == "default" else dict(kept),
    }


def engine_rope(engine: Engine, raw: Mapping[str, Any]) -> Rope:
    """The frequencies an engine computes from a config.json.

    Raises:
        UserError: a rope type or value that the engine refuses.
    """
    if engine == "llamacpp":
        return _llamacpp_reading(raw)
    if engine == "speculators":
        raw = raw["transformer_layer_config"]  # the top level's rope fields are not read
        parameters, head_dim, positions = _speculators_reading(raw)
    else:
        llama = layer_config(raw)
        parameters, head_dim, positions = llama.rope_parameters, llama.head_dim, llama.max_position_embeddings
    kind = parameters.get("rope_type", "default")
    if kind not in FORMULAS:
        raise UserError(f"{engine}: expected a rope type of {', '.join(FORMULAS)}, found {kind!r}")
    values = {"original_max_position_embeddings": positions, **parameters, "engine": engine}
    for name in ("rope_theta", *NEEDED.get(kind, ())):
        if not isinstance(values.get(name), int | float):
            raise UserError(
                f"{engine}: expected {name} of a {kind} rope as a number, found {values.get(name)!r}; "
                "write it in config.json"
            )
    partial = parameters.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    width = int(head_dim * partial)
    base = 1.0 / parameters["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    return FORMULAS[kind](base, values)


def _speculators_reading(layer: Mapping[str, Any]) -> tuple[dict[str, Any], int, int]:
    """vLLM 0.32 sets the fields one after the other on a bare config (configs/speculators/base.py), where
    `rope_scaling` and `rope_parameters` are one attribute: whichever comes last wins."""
    config = PretrainedConfig()
    for key, value in json.loads(json.dumps(text_rope(layer))).items():
        if key != "model_type":
            setattr(config, key, value)
    config.standardize_rope_params()
    parameters: dict[str, Any] = config.rope_parameters or {"rope_theta": 10000.0}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return parameters, head_dim, getattr(config, "max_position_embeddings", 8192)


def _llamacpp_reading(raw: Mapping[str, Any]) -> Rope:
    """The llama.cpp inside xllamacpp 2026.10.11549: `rope.scaling` of type linear divides, `rope_freqs` divides each
    frequency (src/models/eagle3.cpp, ggml's `rope_cache_init`); what is missing is llama.cpp's default."""
    width = raw.get("rotary_dim") or raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    base = 1.0 / raw.get("rope_theta", 10000.0) ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    scaling = raw["gguf_rope_scaling"]
    kind = scaling.get("type", "linear")
    if kind not in ("none", "linear"):
        raise UserError(f"llamacpp: expected rope scaling of type none or linear, found {kind!r}")
    factors = torch.tensor(raw["rope_factors"]) if raw["rope_factors"] else torch.ones(len(base))
    return Rope(base / factors / (scaling.get("factor", 1.0) if kind == "linear" else 1.0), 1.0)


def _default(base: Tensor, values: Mapping[str, Any]) -> Rope:
    return Rope(base, 1.0)


def _linear(base: Tensor, values: Mapping[str, Any]) -> Rope:
    return Rope(base / values["factor"], 1.0)


def _llama3(base: Tensor, values: Mapping[str, Any]) -> Rope:
    low, high, original = (
        values[name] for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    wave = 2 * math.pi / base
    smooth = (original / wave - low) / (high - low) if high != low else torch.zeros_like(wave)
    middle = (1 - smooth) * base / values["factor"] + smooth * base
    scaled = torch.where(wave > original / low, base / values["factor"], middle)
    return Rope(torch.where(wave < original / high, base, scaled), 1.0)


def _yarn(base: Tensor, values: Mapping[str, Any]) -> Rope:
    width, theta, factor = 2 * len(base), values["rope_theta"], values["factor"]

    def bound(rotations: float) -> float:
        full = values["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return width * math.log(full) / (2 * math.log(theta))

    low, high = bound(values.get("beta_fast") or 32), bound(values.get("beta_slow") or 1)
    if values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if high == low else high
    ramp = ((torch.arange(len(base), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return Rope(base / factor * ramp + base * (1 - ramp), _yarn_scale(values, factor))


def _yarn_scale(values: Mapping[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    # SGLang 0.5.23 does not read `attention_factor` (srt/layers/rotary_embedding/factory.py); vLLM 0.32 does.
    given = values.get("attention_factor")
    if given is not None and values["engine"] != "sglang":
        return float(given)
    pair = values.get("mscale"), values.get("mscale_all_dim")
    # SGLang 0.5.23 (yarn.py) takes a pair with a zero in it too; vLLM 0.32 and transformers do not.
    if all(pair) or (values["engine"] == "sglang" and None not in pair):
        return mscale(values["mscale"]) / mscale(values["mscale_all_dim"])
    return mscale(1.0)


FORMULAS: dict[str, Callable[[Tensor, Mapping[str, Any]], Rope]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
