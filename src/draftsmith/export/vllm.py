"""vLLM's flat format: one config.json of a Llama draft, used with `--speculative-config` and method eagle3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftsmith.draft import layer_ids
from draftsmith.draft.eagle3 import DraftConfig
from draftsmith.draft.formats import NORM_BEFORE_RESIDUAL_WHEN_MISSING, named_layers
from draftsmith.export.reading import DRAFT_FIELDS, LLAMA_FIELDS, Reading, draft_fields, layer_fields, own_block
from draftsmith.export.shapes import is_mla
from draftsmith.hidden.layers import default_layers

ARCHITECTURES = (
    *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM"),
    *("Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM"),
)
"""vLLM 0.32, model_executor/models/registry.py: all are llama_eagle3.Eagle3LlamaForCausalLM."""

MLA_ARCHITECTURES = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
"""The same for deepseek_eagle3.Eagle3DeepseekV2ForCausalLM, a draft with latent attention."""

VERSION = "0.32"
"""The release whose source the rules below are from."""

FIELDS = {
    **LLAMA_FIELDS,
    "mlp_bias": "False",
    **DRAFT_FIELDS,
    "norm_before_residual": str(NORM_BEFORE_RESIDUAL_WHEN_MISSING["vllm"]),
    "eagle_aux_hidden_state_layer_ids": "eagle_config's, else 2, n // 2, n - 3 of n target layers",
    "eagle_config": "aux states are used",
    "num_aux_hidden_states": "as many as eagle_config names layers, else 3",
    **dict.fromkeys(("rope_theta", "rope_scaling", "partial_rotary_factor"), "in rope_parameters"),
    **{"layer_types": "full attention", "sliding_window": "none", "logit_scale": "1.0", "bias": "False"},
    "quantization_config": "not quantised",
}
"""Read by models/llama_eagle3.py, models/llama.py, v1/worker/gpu_model_runner.py and config/speculative.py; defaults of
LlamaConfig where it has one. The draft's dtype is the target's, whatever its config says."""

LAYER_PREFIX = "layers.0."
"""vLLM 0.32, models/llama_eagle3.py `hf_to_vllm_mapper` takes this and `midlayer.` alike."""


def config_json(config: DraftConfig, target: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config.json."""
    return {
        "architectures": [ARCHITECTURES[0]],
        **layer_fields(config),
        **draft_fields(config, layer_ids.to_vllm(config.aux_layers, target["num_layers"])),
        "dtype": dtype,
        "torch_dtype": dtype,
        **own_block("vllm", config, target),
    }


def read_back(raw: Mapping[str, Any]) -> Reading:
    """What vLLM 0.32 takes from a flat config (models/llama_eagle3.py)."""
    eagle = raw.get("eagle_config") or {}
    return Reading(
        architectures=tuple(_eagle3(name) for name in raw.get("architectures") or ()),
        known_architectures=MLA_ARCHITECTURES if is_mla(raw) else ARCHITECTURES,
        norm_before_residual=bool(raw.get("norm_before_residual", NORM_BEFORE_RESIDUAL_WHEN_MISSING["vllm"])),
        norm_before_fc=bool(eagle.get("norm_before_fc", raw.get("norm_before_fc", False))),
        fc_norm=bool(raw.get("fc_norm", False)),
        norm_output=bool(raw.get("norm_output", False)),
        uses_aux_states=bool(eagle.get("use_aux_hidden_state", True)),
        reads_embedding=True,
    )


def taken_layers(raw: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[int, ...]:
    """Outputs of layers that reach fc, in that order; -1 is the embedding. Wrong ids give wrong layers."""
    ids, depth = named_layers(raw), target["num_layers"]
    return layer_ids.vllm_takes(ids, depth) if ids else default_layers(depth)


def _eagle3(architecture: str) -> str:
    """vLLM 0.32 puts the method before a name that lacks it (transformers_utils/configs/eagle.py)."""
    named = architecture.startswith("Eagle3") or architecture.endswith("Eagle3")
    return architecture if named else f"Eagle3{architecture}"
