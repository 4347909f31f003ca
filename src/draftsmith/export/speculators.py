"""The speculators format: the layer's config under `transformer_layer_config`, the target named as verifier.

vLLM serves such a folder on its own (`vllm serve FOLDER`): target, method and number of tokens come from config.json.
Read by vLLM 0.32 (`transformers_utils/configs/speculators/`) and by the speculators library 0.9.0.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from draftsmith.draft import layer_ids
from draftsmith.draft.eagle3 import DraftConfig
from draftsmith.draft.loading import NORM_BEFORE_RESIDUAL_WHEN_MISSING
from draftsmith.export.reading import DRAFT_TOKENS, Reading, draft_fields, layer_fields, own_block
from draftsmith.hidden.layers import default_layers

VERSION = "0.9.0"
"""The release of the format that is written."""

ARCHITECTURES = ("Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator")
"""vLLM 0.32 ignores the field and takes the first (configs/speculators/algos.py); the library writes one of the
others (speculators 0.9.0, models/eagle3/config.py)."""

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


def launch_line(target: str, folder: str) -> str:
    """The command that serves target and draft. The target's name is in config.json."""
    return f"vllm serve {shlex.quote(folder)}"


def read_back(raw: Mapping[str, Any], target: Mapping[str, Any]) -> Reading:
    """What vLLM 0.32 takes from it (configs/speculators/algos.py `update_eagle3`: only these top-level fields).

    Raises:
        UserError: layer ids that make no sense for this target.
    """
    layer = raw.get("transformer_layer_config") or {}
    known = raw.get("speculators_model_type") == "eagle3" and layer.get("model_type", "llama") == LAYER_TYPE
    ids, depth = raw.get("eagle_aux_hidden_state_layer_ids"), target["num_layers"]
    return Reading(
        architectures=ARCHITECTURES[:1] if known else tuple(raw.get("architectures") or ()),
        known_architectures=ARCHITECTURES[:1],
        norm_before_residual=bool(raw.get("norm_before_residual", NORM_BEFORE_RESIDUAL_WHEN_MISSING["speculators"])),
        normalises_aux=bool(raw.get("norm_before_fc", False) or raw.get("fc_norm", False)),
        normalises_output=bool(raw.get("norm_output", False)),
        uses_aux_states=True,
        layers=layer_ids.from_vllm(ids, depth) if ids else default_layers(depth),
        reads_embedding=True,
    )
