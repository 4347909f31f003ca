"""What a draft's config.json says, in any format it is published in.

Formats: vLLM's flat config, speculators (`speculators_config`), SGLang's. They differ in where a field counts and in
what a missing one means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig

from draftsmith.errors import UserError

Format = Literal["draftsmith", "vllm", "speculators", "sglang"]

OWN_BLOCK = "draftsmith"
"""Key in the config.json of our exports that records format and layers in our own words. Engines ignore it."""

NORM_BEFORE_RESIDUAL_WHEN_MISSING: dict[str, bool] = {"vllm": False, "sglang": False, "speculators": True}
"""vLLM 0.32: models/llama_eagle3.py reads False; transformers_utils/configs/speculators/algos.py `update_eagle3` fills
in True. SGLang 0.5.23 has no such field and computes False (srt/models/llama_eagle3.py)."""

TOP_LEVEL_ALONE = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
TOP_LEVEL_FIRST = ("target_hidden_size", "eagle_aux_hidden_state_layer_ids")
"""Fields of the speculators format that count at the top level whatever the layer's config says, and those for which
the layer's counts where the top level has none (vLLM 0.32, configs/speculators/algos.py `update_eagle3`)."""


def format_of(raw: Mapping[str, Any]) -> Format:
    """The format of a config.json that is not a checkpoint of ours; a flat one of unknown origin is vLLM's."""
    if "speculators_model_type" in raw or "speculators_config" in raw:
        return "speculators"
    return "sglang" if raw.get(OWN_BLOCK, {}).get("format") == "sglang" else "vllm"


def flattened(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The layer's config: the file itself, or for speculators what vLLM reads, and under it the rest of the top level,
    which the speculators library reads."""
    top = {key: value for key, value in raw.items() if key != "transformer_layer_config"}
    return {**top, **as_vllm_reads(raw)}


def as_vllm_reads(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The same with nothing that vLLM passes over: of a speculators top level, only what it copies into the layer's
    config (vLLM 0.32, configs/speculators/base.py and algos.py)."""
    if format_of(raw) != "speculators":
        return dict(raw)
    layer = raw.get("transformer_layer_config")
    config = dict(layer) if isinstance(layer, dict) else {}
    for name in TOP_LEVEL_ALONE:
        config.pop(name, None)
        if name in raw:
            config[name] = raw[name]
    for name in TOP_LEVEL_FIRST:
        if raw.get(name):
            config[name] = raw[name]
    return config


def layer_config(flat: Mapping[str, Any]) -> LlamaConfig:
    """A flat config as transformers' LlamaConfig reads it (nested or flat rope alike).

    Raises:
        UserError: sizes that LlamaConfig refuses; it wants whole heads also where the config names a head_dim.
    """
    named = text_rope(flat)
    known = {key: value for key, value in named.items() if key not in ("model_type", "architectures", OWN_BLOCK)}
    try:
        return LlamaConfig(**json.loads(json.dumps(known)))
    except (StrictDataclassError, ZeroDivisionError, KeyError) as error:
        names = ("hidden_size", "num_attention_heads", "head_dim")
        found = ", ".join(f"{name} {flat.get(name)!r}" for name in names)
        why = str(error.args[0]).splitlines()[-1].strip().rstrip(".")
        raise UserError(
            f"config.json: expected a Llama layer's config, found {found}; such a draft cannot be read here ({why})"
        ) from None


def text_rope(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The config with multimodal rope (mrope) named as what it is for text, whose three positions are one: the default
    rope. Engines rename it too (vLLM 0.32, transformers_utils/config.py `patch_legacy_rope_type`; SGLang 0.5.23,
    srt/models/llama_eagle3.py)."""
    config = dict(flat)
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if isinstance(rope, dict) and "mrope_section" in rope and rope.get("rope_type", rope.get("type")) == "mrope":
            kept = {key: value for key, value in rope.items() if key not in ("type", "mrope_section")}
            config[name] = {**kept, "rope_type": "default"}
    return config


def named_layers(flat: Mapping[str, Any]) -> list[int] | None:
    """The layer ids a config names: top level first, then `eagle_config` (vLLM 0.32, v1/worker/gpu_model_runner.py)."""
    ids = flat.get("eagle_aux_hidden_state_layer_ids")
    ids = ids or (flat.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return list(ids) if ids else None
