"""The speculators format: the layer's config under `transformer_layer_config`, the target named as verifier.

vLLM serves such a folder on its own (`vllm serve FOLDER`): target, method and number of tokens come from config.json.
Read by vLLM 0.32 (`transformers_utils/configs/speculators/`) and by the speculators library 0.9.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftsmith.draft import layer_ids
from draftsmith.draft.eagle3 import DraftConfig
from draftsmith.draft.loading import NORM_BEFORE_RESIDUAL_WHEN_MISSING
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

LAYER_TYPE = "llama"
"""Of the two layer types vLLM 0.32 accepts in this format (`eagle3_arch_map`), ours."""


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
    """What vLLM 0.32 takes from it (configs/speculators/algos.py `update_eagle3`: only these top-level fields)."""
    layer = raw.get("transformer_layer_config") or {}
    known = raw.get("speculators_model_type") == "eagle3" and layer.get("model_type", "llama") == LAYER_TYPE
    return Reading(
        architectures=ARCHITECTURES[:1] if known else tuple(raw.get("architectures") or ()),
        known_architectures=ARCHITECTURES[:1],
        norm_before_residual=bool(raw.get("norm_before_residual", NORM_BEFORE_RESIDUAL_WHEN_MISSING["speculators"])),
        norm_before_fc=bool(raw.get("norm_before_fc", False)),
        fc_norm=bool(raw.get("fc_norm", False)),
        norm_output=bool(raw.get("norm_output", False)),
        uses_aux_states=True,
        reads_embedding=True,
    )


def taken_layers(raw: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[int, ...]:
    """Outputs of layers that reach fc, in that order; -1 is the embedding. Wrong ids give wrong layers."""
    ids, depth = raw.get("eagle_aux_hidden_state_layer_ids"), target["num_layers"]
    return layer_ids.vllm_takes(ids, depth) if ids else default_layers(depth)
