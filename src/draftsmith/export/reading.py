"""What an engine makes of an exported folder, and what every export has in common.

Each engine module (`vllm`, `speculators`, `sglang`) writes a config.json and reads one back with the engine's own
rules; `Reading` is the result of the latter. The fields of the one Llama layer are the same everywhere and are written
here, each of them explicitly: a default is a thing that changes between releases (contract 7).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftsmith.draft.eagle3 import AUX_STATES, DraftConfig
from draftsmith.draft.loading import OWN_BLOCK
from draftsmith.errors import UserError
from draftsmith.export.rope import written_rope
from draftsmith.recipe import Engine

DRAFT_TOKENS = 3
"""Tokens proposed per step in the launch lines: a start, to be tuned on the real load."""


@dataclass(frozen=True, slots=True)
class Reading:
    """An engine's own understanding of an exported config.json."""

    architectures: tuple[str, ...]
    known_architectures: tuple[str, ...]
    """Those the engine has an EAGLE-3 Llama draft for."""
    norm_before_residual: bool
    normalises_aux: bool
    """Whether it would put a norm before fc (`norm_before_fc`, `fc_norm`)."""
    normalises_output: bool
    uses_aux_states: bool
    layers: tuple[int, ...]
    """Outputs of layers it takes, in the order they reach fc."""
    reads_embedding: bool
    """Whether an embedding in the file is used; if not, it is always the target's."""


def layer_fields(config: DraftConfig) -> dict[str, Any]:
    """Config fields of the draft's one layer, as every reader of a Llama config knows them."""
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        **written_rope(config),
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.target_vocab_size,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "tie_word_embeddings": False,
    }


def draft_fields(config: DraftConfig, layer_ids: list[int]) -> dict[str, Any]:
    """Config fields that make a Llama layer an EAGLE-3 draft; layer ids in the engine's meaning."""
    return {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size,
        "num_aux_hidden_states": AUX_STATES,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        # Some releases read the ids at the top level only, some in `eagle_config` only.
        "eagle_aux_hidden_state_layer_ids": list(layer_ids),
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(layer_ids)},
    }


def own_block(engine: Engine, config: DraftConfig, target: Mapping[str, Any]) -> dict[str, Any]:
    """Where the export comes from, in our own words; no engine reads it."""
    return {
        OWN_BLOCK: {
            "format": engine,
            "aux_layers_output_of": list(config.aux_layers),
            "target": target["name"],
            "target_fingerprint": target["fingerprint"],
            "target_layers": target["num_layers"],
            "target_model_type": target["model_type"],
        }
    }


def refuse_inexpressible(engine: Engine, config: DraftConfig, target: Mapping[str, Any]) -> None:
    """What no engine can be told about a draft.

    Raises:
        UserError: another activation than silu, or a draft that is not this target's.
    """
    if config.hidden_act != "silu":
        raise UserError(f"{engine}: expected a draft with the activation silu, found {config.hidden_act!r}")
    if len(config.aux_layers) != AUX_STATES:
        raise UserError(f"{engine}: expected a draft over {AUX_STATES} aux layers, found {len(config.aux_layers)}")
    width = target["config"]["hidden_size"]
    if width != config.hidden_size:
        raise UserError(
            f"{engine}: the draft's hidden size is {config.hidden_size}, the target's {width}; they must be equal"
        )
    if list(config.aux_layers) != list(target["layers"]):
        raise UserError(
            f"{engine}: the draft was trained on outputs of layers {list(config.aux_layers)}, the hidden states are of "
            f"{list(target['layers'])}; extract and train again"
        )
