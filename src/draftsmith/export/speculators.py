"""The speculators format: the layer's config under `transformer_layer_config`, the target named as verifier.

vLLM serves such a folder on its own (`vllm serve FOLDER`): target, method and number of tokens come from config.json.
Read by vLLM 0.32 (`transformers_utils/configs/speculators/`) and by the speculators library 0.9.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftsmith.draft import layer_ids
from draftsmith.draft.eagle3 import DraftConfig
from draftsmith.draft.formats import (
    NORM_BEFORE_RESIDUAL_WHEN_MISSING,
    TOP_LEVEL_ALONE,
    TOP_LEVEL_FIRST,
    as_vllm_reads,
    named_layers,
)
from draftsmith.export.launching import DRAFT_TOKENS
from draftsmith.export.reading import (
    DRAFT_FIELDS,
    LLAMA_FIELDS,
    REQUIRED,
    Reading,
    draft_fields,
    layer_fields,
    own_block,
)
from draftsmith.hidden.layers import default_layers

VERSION = "0.9.0"
"""The release of the format that is written."""

ARCHITECTURES = ("Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator")
"""vLLM 0.32 ignores the field and takes the first (configs/speculators/algos.py); the library writes one of the
others (speculators 0.9.0, models/eagle3/config.py)."""

FIELDS = {
    "speculators_model_type": REQUIRED,
    "speculators_config": REQUIRED,
    **DRAFT_FIELDS,
    "norm_before_residual": str(NORM_BEFORE_RESIDUAL_WHEN_MISSING["speculators"]),
    "eagle_aux_hidden_state_layer_ids": "2, n // 2, n - 3 of n target layers",
    **LLAMA_FIELDS,
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), REQUIRED),
    **dict.fromkeys(("hidden_act", "rms_norm_eps", "vocab_size"), REQUIRED),
    "architectures": "known from the layer type",
    "model_type": "llama",
    "max_position_embeddings": "8192",
    "mlp_bias": "False",
    **dict.fromkeys(("rope_theta", "rope_scaling", "partial_rotary_factor"), "in rope_parameters"),
    **{"layer_types": "full attention", "sliding_window": "none", "logit_scale": "1.0", "bias": "False"},
}
"""Read by vLLM 0.32: of the top level what `update_eagle3` copies (configs/speculators/algos.py), of
`transformer_layer_config` everything, on a config class without defaults of its own."""

LIBRARY_DEFAULTS = {"norm_before_residual": "False", "model_type": "qwen3", "draft_vocab_size": "32000"}
"""Where the library itself takes another default (speculators 0.9.0, models/eagle3/config.py)."""

LAYER_FIELDS = {
    "eagle_config": "aux states are used",
    "num_aux_hidden_states": "as many as eagle_config names layers, else 3",
}
"""Read too where `transformer_layer_config` has them; at the top level, where they are usually, they are not."""

LAYER_TYPES = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}
"""The layer types that vLLM 0.32 accepts in this format, with the class of each (`eagle3_arch_map`)."""


def config_json(config: DraftConfig, target: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config.json."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": DRAFT_TOKENS,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target["name"], "architectures": target["config"].get("architectures") or []},
        },
        **draft_fields(config, layer_ids.to_vllm(config.aux_layers, target["num_layers"])),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "torch_dtype": dtype,
        "transformer_layer_config": {"architectures": ["LlamaForCausalLM"], **layer_fields(config)},
        **own_block("speculators", config, target),
    }


def read_back(raw: Mapping[str, Any]) -> Reading:
    """What vLLM 0.32 takes from it (configs/speculators/algos.py `update_eagle3`, models/llama_eagle3.py)."""
    served = as_vllm_reads(raw)
    eagle = served.get("eagle_config") or {}
    kind = LAYER_TYPES.get(served.get("model_type", "llama"))
    known = raw.get("speculators_model_type") == "eagle3" and kind is not None
    return Reading(
        architectures=(kind,) if known and kind else tuple(raw.get("architectures") or ()),
        known_architectures=(kind or ARCHITECTURES[0],),
        norm_before_residual=bool(served.get("norm_before_residual", NORM_BEFORE_RESIDUAL_WHEN_MISSING["speculators"])),
        norm_before_fc=bool(eagle.get("norm_before_fc", served.get("norm_before_fc", False))),
        fc_norm=bool(served.get("fc_norm", False)),
        norm_output=bool(served.get("norm_output", False)),
        uses_aux_states=bool(eagle.get("use_aux_hidden_state", True)),
        reads_embedding=True,
    )


def taken_layers(raw: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[int, ...]:
    """Outputs of layers that reach fc, in that order; -1 is the embedding. Wrong ids give wrong layers."""
    ids, depth = named_layers(as_vllm_reads(raw)), target["num_layers"]
    return layer_ids.vllm_takes(ids, depth) if ids else default_layers(depth)


def read_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that vLLM looks at, each with the value it takes."""
    top = {name: raw[name] for name in ("speculators_model_type", "speculators_config") if name in raw}
    # vLLM writes the architecture itself, from the layer type: the file's say nothing, wherever they are.
    named = {"architectures": raw["architectures"]} if "architectures" in raw else {}
    return {**named, **as_vllm_reads(raw), **top}


def passed_over(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that vLLM does not look at where they are; another value elsewhere in the file is the one it takes."""
    taken, layer = read_fields(raw), raw["transformer_layer_config"]
    ignored = {}
    for name, value in raw.items():
        if name in (*TOP_LEVEL_ALONE, *TOP_LEVEL_FIRST, "architectures", "transformer_layer_config"):
            continue
        if name not in taken:
            ignored[name] = value
        elif taken[name] != value:
            ignored[f"{name} (top level)"] = value
    for name in TOP_LEVEL_ALONE:
        if name in layer and layer[name] != raw.get(name):
            ignored[f"{name} (in transformer_layer_config)"] = layer[name]
    for name in TOP_LEVEL_FIRST:
        if name in layer and layer[name] != taken[name]:
            ignored[f"{name} (in transformer_layer_config)"] = layer[name]
    return ignored
