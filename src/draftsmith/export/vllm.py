"""vLLM's flat format: one config.json of a Llama draft, used with `--speculative-config` and method eagle3."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from draftsmith.draft import layer_ids
from draftsmith.draft.eagle3 import DraftConfig
from draftsmith.draft.loading import NORM_BEFORE_RESIDUAL_WHEN_MISSING, named_layers
from draftsmith.export.reading import DRAFT_TOKENS, Reading, draft_fields, layer_fields, own_block
from draftsmith.hidden.layers import default_layers

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""vLLM 0.32, model_executor/models/registry.py: both are llama_eagle3.Eagle3LlamaForCausalLM."""

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


def launch_line(target: str, folder: str) -> str:
    """The command that serves the target with the draft. The method must be eagle3: with eagle the aux states are
    never used and nothing is accepted (P40)."""
    speculative = {"method": "eagle3", "model": folder, "num_speculative_tokens": DRAFT_TOKENS}
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(speculative))}"


def read_back(raw: Mapping[str, Any], target: Mapping[str, Any]) -> Reading:
    """What vLLM 0.32 takes from a flat config (models/llama_eagle3.py, v1/worker/gpu_model_runner.py).

    Raises:
        UserError: layer ids that make no sense for this target.
    """
    eagle = raw.get("eagle_config") or {}
    ids = named_layers(raw)
    depth = target["num_layers"]
    return Reading(
        architectures=tuple(raw.get("architectures") or ()),
        known_architectures=ARCHITECTURES,
        norm_before_residual=bool(raw.get("norm_before_residual", NORM_BEFORE_RESIDUAL_WHEN_MISSING["vllm"])),
        normalises_aux=bool(eagle.get("norm_before_fc", raw.get("norm_before_fc", False)) or raw.get("fc_norm", False)),
        normalises_output=bool(raw.get("norm_output", False)),
        uses_aux_states=bool(eagle.get("use_aux_hidden_state", True)),
        layers=layer_ids.from_vllm(ids, depth) if ids else default_layers(depth),
        reads_embedding=True,
    )
