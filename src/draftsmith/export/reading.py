"""What an engine makes of an exported folder, and what every export has in common.

Each engine module (`vllm`, `speculators`, `sglang`, `llamacpp`) writes a config and reads one back with the engine's
own rules: `read_back` gives a `Reading`, `taken_layers` what its layer ids mean for a target, `FIELDS` names every
field that this `VERSION` reads and what it takes where one is missing. The fields of the one Llama layer are the same
in every config.json and are written here, each of them explicitly: a default is a thing that changes between releases
(contract 7).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.artifacts import read_json
from draftsmith.draft.eagle3 import AUX_STATES, DraftConfig
from draftsmith.draft.formats import OWN_BLOCK
from draftsmith.draft.loading import read_tensors
from draftsmith.errors import UserError
from draftsmith.export.rope import written_rope
from draftsmith.recipe import Engine


@dataclass(frozen=True, slots=True)
class Reading:
    """An engine's own understanding of an exported config.json."""

    architectures: tuple[str, ...]
    known_architectures: tuple[str, ...]
    """Those the engine has an EAGLE-3 Llama draft for."""
    norm_before_residual: bool
    norm_before_fc: bool
    """One norm over the joined aux states."""
    fc_norm: bool
    """A norm over each aux state."""
    norm_output: bool
    """The draft's own state reaches its next step normed."""
    uses_aux_states: bool
    reads_embedding: bool
    """Whether an embedding in the file is used; if not, it is always the target's."""
    tied_head: bool = False
    """The embedding serves as head, whatever head the file has."""
    pairwise_rope: bool = False
    """Rope turns neighbouring values of a head, not its two halves."""


@dataclass(frozen=True, slots=True)
class Files:
    """What lies in an exported folder.

    `raw` is its config under the names of a Llama config; `tensors` are under checkpoint names, d2t as offsets.
    """

    raw: dict[str, Any]
    tensors: dict[str, Tensor]
    """Unknown ones included."""


REQUIRED = "required"
"""Default of a field without which the engine stops."""

LLAMA_FIELDS = {
    "architectures": REQUIRED,
    "model_type": REQUIRED,
    "hidden_size": "4096",
    "intermediate_size": "11008",
    "num_hidden_layers": "32",
    "num_attention_heads": "32",
    "num_key_value_heads": "num_attention_heads",
    "head_dim": "hidden_size / num_attention_heads",
    "hidden_act": "silu",
    "rms_norm_eps": "1e-06",
    "attention_bias": "False",
    "rope_parameters": "rope_theta and rope_scaling, else theta 10000 without scaling",
    "max_position_embeddings": "2048",
    "vocab_size": "32000",
}
"""Of a config.json whose class is transformers' LlamaConfig: what it reads, and its own default (transformers 5)."""

DRAFT_FIELDS = {
    "draft_vocab_size": "vocab_size",
    "target_hidden_size": "hidden_size",
    "norm_before_fc": "False",
    "fc_norm": "False",
    "norm_output": "False",
}
"""Of an EAGLE-3 draft, alike in vLLM and SGLang."""

RARE = frozenset(
    (
        *("rope_theta", "rope_scaling", "partial_rotary_factor", "layer_types", "sliding_window", "bias", "qkv_bias"),
        *("logit_scale", "quantization_config", "use_aux_norm", "num_aux_hidden_states", "dtype"),
        *("rope.scaling.type", "rope.scaling.factor"),
    )
)
"""Fields whose absence is worth no word: it means none, or others say it."""


def canonical(name: str, engine: Engine) -> str:
    """A stored tensor's name as a checkpoint name. SGLang looks for it with and without `model.` and knows some older
    names; vLLM, which puts the prefix there itself, knows no name that has it already."""
    plain = name.removeprefix("model.") if engine == "sglang" else name
    if engine == "sglang":
        # Names of older drafts: srt/models/llama_eagle3.py `legacy_name_map`.
        for number, old in enumerate(("aux_norm_low", "aux_norm_mid", "aux_norm_high")):
            plain = plain.replace(old, f"fc_norm.{number}")
    return plain.replace("midlayer.", "layers.0.")


def read_folder(folder: Path, engine: Engine) -> Files:
    """Reads config.json and weights.

    Raises:
        UserError: a file is missing or unreadable.
    """
    raw = read_json(folder / "config.json")
    return Files(raw, {canonical(name, engine): tensor for name, tensor in read_tensors(folder).items()})


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
