"""SGLang's format: a flat Llama draft whose layer ids follow SGLang's own rules, `midlayer.` names.

SGLang drops tensors it does not know without a word, knows no `norm_before_residual`, and always uses the target's
embedding (0.5.23, srt/models/llama_eagle3.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftsmith.draft import layer_ids
from draftsmith.draft.eagle3 import DraftConfig
from draftsmith.draft.formats import NORM_BEFORE_RESIDUAL_WHEN_MISSING
from draftsmith.errors import UserError
from draftsmith.export.reading import (
    DRAFT_FIELDS,
    LLAMA_FIELDS,
    REQUIRED,
    Reading,
    draft_fields,
    layer_fields,
    own_block,
)
from draftsmith.export.shapes import is_mla
from draftsmith.hidden.layers import default_layers

ARCHITECTURES = ("LlamaForCausalLMEagle3",)
"""SGLang 0.5.23, srt/models/llama_eagle3.py `EntryClass`."""

MLA_ARCHITECTURES = ("Eagle3DeepseekV2ForCausalLM",)
"""The same for a draft with latent attention (srt/models/kimi_k25_eagle3.py)."""

VERSION = "0.5.23"
"""The release whose source the rules below are from."""

FIELDS = {
    **LLAMA_FIELDS,
    **DRAFT_FIELDS,
    "draft_vocab_size": REQUIRED,
    "eagle_config": "aux states are used, 2, n // 2, n - 3 of n target layers",
    "tie_word_embeddings": "False",
    "num_aux_hidden_states": "as many as eagle_config names layers, else 3",
    **dict.fromkeys(("rope_theta", "rope_scaling"), "in rope_parameters"),
    **{"partial_rotary_factor": "1", "bias": "False", "use_aux_norm": "False", "dtype": "float16"},
    "quantization_config": "not quantised",
}
"""Read by srt/models/llama_eagle3.py and llama.py; defaults of LlamaConfig where it has one. `draft_vocab_size` may be
null, which shares the target's head."""

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


def read_back(raw: Mapping[str, Any]) -> Reading:
    """What SGLang 0.5.23 takes from it (srt/models/llama_eagle3.py)."""
    eagle = raw.get("eagle_config") or {}
    return Reading(
        architectures=tuple(raw.get("architectures") or ()),
        known_architectures=MLA_ARCHITECTURES if is_mla(raw) else ARCHITECTURES,
        norm_before_residual=NORM_BEFORE_RESIDUAL_WHEN_MISSING["sglang"],
        norm_before_fc=bool(eagle.get("norm_before_fc", raw.get("norm_before_fc", False))),
        fc_norm=bool(raw.get("fc_norm") or raw.get("use_aux_norm", False)),
        norm_output=bool(raw.get("norm_output", False)),
        uses_aux_states=bool(eagle.get("use_aux_hidden_state", True)),
        reads_embedding=False,
        tied_head=bool(raw.get("tie_word_embeddings", False)),
    )


def taken_layers(raw: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[int, ...]:
    """Outputs of layers that reach fc, in that order; -1 is the embedding. Ids come from `eagle_config` alone
    (srt/model_executor/model_runner_components/spec_aux_hidden_state.py).

    Raises:
        UserError: a target whose class hands out no aux states.
    """
    ids, depth = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids"), target["num_layers"]
    return layer_ids.sglang_takes(ids, target["model_type"], depth) if ids else default_layers(depth)
