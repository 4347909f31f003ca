"""SGLang's format: a flat Llama draft whose layer ids follow SGLang's own rules, `midlayer.` names.

SGLang drops tensors it does not know without a word, knows no `norm_before_residual`, and always uses the target's
embedding (0.5.23, srt/models/llama_eagle3.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from draftsmith.draft import layer_ids
from draftsmith.draft.eagle3 import DraftConfig
from draftsmith.draft.loading import NORM_BEFORE_RESIDUAL_WHEN_MISSING
from draftsmith.errors import UserError
from draftsmith.export.reading import DRAFT_TOKENS, Reading, draft_fields, layer_fields, own_block
from draftsmith.hidden.layers import default_layers

ARCHITECTURES = ("LlamaForCausalLMEagle3",)
"""SGLang 0.5.23, srt/models/llama_eagle3.py `EntryClass`."""

LAYER_PREFIX = "midlayer."
"""Read by every release; only recent ones (0.5.23: `legacy_name_map`) know `layers.0.` too."""


def config_json(config: DraftConfig, target: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config.json.

    Raises:
        UserError: the draft takes its residual after the norm, or SGLang cannot capture its aux layers.
    """
    if config.norm_before_residual:
        raise UserError(
            "sglang: the draft was trained with norm_before_residual true, which SGLang does not know (it would "
            "compute false); export for vllm or speculators, or train with norm_before_residual false"
        )
    ids = layer_ids.to_sglang(config.aux_layers, target["model_type"], target["num_layers"])
    return {
        "architectures": [ARCHITECTURES[0]],
        **layer_fields(config),
        **draft_fields(config, ids),
        "bias": False,
        "dtype": dtype,
        "torch_dtype": dtype,
        **own_block("sglang", config, target),
    }


def launch_line(target: str, folder: str) -> str:
    """The command that serves the target with the draft. The algorithm must be EAGLE3, not EAGLE (P40)."""
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {shlex.quote(folder)} --speculative-num-steps {DRAFT_TOKENS} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {DRAFT_TOKENS + 1}"
    )


def read_back(raw: Mapping[str, Any], target: Mapping[str, Any]) -> Reading:
    """What SGLang 0.5.23 takes from it (srt/models/llama_eagle3.py; layer ids from `eagle_config` alone,
    srt/model_executor/model_runner_components/spec_aux_hidden_state.py).

    Raises:
        UserError: layer ids that make no sense for this target.
    """
    eagle = raw.get("eagle_config") or {}
    ids, depth = eagle.get("eagle_aux_hidden_state_layer_ids"), target["num_layers"]
    return Reading(
        architectures=tuple(raw.get("architectures") or ()),
        known_architectures=ARCHITECTURES,
        norm_before_residual=NORM_BEFORE_RESIDUAL_WHEN_MISSING["sglang"],
        normalises_aux=bool(
            eagle.get("norm_before_fc", raw.get("norm_before_fc", False))
            or raw.get("fc_norm")
            or raw.get("use_aux_norm", False)
        ),
        normalises_output=bool(raw.get("norm_output", False)),
        uses_aux_states=bool(eagle.get("use_aux_hidden_state", True)),
        layers=layer_ids.from_sglang(ids, target["model_type"], depth) if ids else default_layers(depth),
        reads_embedding=False,
    )
