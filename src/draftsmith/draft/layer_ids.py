"""Layer ids, translated: the only place that does arithmetic on them.

Inside draftsmith an aux layer is "output of layer i", 0-based (contract 3). vLLM's ids mean "input of layer i".
SGLang's mean one or the other, by the target's model class. An off-by-one costs acceptance without any error (P31), so
what an engine would read back is computed with the engine's own rule, never assumed. Engines hand the states over in
layer order whatever the order of the ids, so ids must rise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from draftsmith.errors import UserError

VLLM_INPUT_OF = 1
"""vLLM counts inputs: id i is taken before layer i, the last id is n (0.32, model_executor/models/interfaces.py,
`EagleModelMixin._maybe_add_hidden_state`; ids sorted and de-duplicated in `_set_aux_hidden_state_layers`)."""

SGLANG_OUTPUT_OF = frozenset(
    (
        *("llama", "llama4", "llama4_text", "mistral", "ministral3", "phi3", "internlm3", "qwen2", "qwen2_moe"),
        *("qwen2_5_vl", "qwen2_5_vl_text", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_text"),
        *("qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("gemma3", "gemma3_text", "gemma4", "gemma4_text", "glm4_moe", "apertus", "exaone_moe", "longcat_flash"),
        *("minimax_m2", "minimax_m3", "bailing_moe"),
    )
)
"""Targets to whose ids SGLang adds 1 (0.5.23, srt/models/llama.py and others, `set_eagle3_layers_to_capture`)."""

SGLANG_FIRST_ID_DECIDES = frozenset(
    ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm_moe_dsa", "glm4_moe_lite")
)
"""Targets to whose ids SGLang adds 1 only if the first id is 1 (0.5.23, srt/models/deepseek_v2.py, `kimi_k25.py`)."""

SGLANG_GPT_OSS = "gpt_oss"
"""SGLang adds 1 unless the last id is the number of layers (0.5.23, srt/models/gpt_oss.py); this class alone can also
capture the output of the last layer."""


def to_vllm(outputs: Sequence[int], num_layers: int | None = None) -> list[int]:
    """Outputs of layers -> vLLM's ids.

    Raises:
        UserError: ids not distinct and rising, or outside the target.
    """
    return [layer + VLLM_INPUT_OF for layer in checked(outputs, num_layers)]


def from_vllm(ids: Sequence[int], num_layers: int | None = None) -> tuple[int, ...]:
    """vLLM's ids -> outputs of layers.

    Raises:
        UserError: duplicates, the embedding (id 0), or an id outside the target.
    """
    return checked([layer - VLLM_INPUT_OF for layer in sorted(ids)], num_layers, f"vLLM layer ids {list(ids)}")


def vllm_takes(ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """What vLLM hands over for any ids at all, in layer order: outputs of layers, the embedding being -1."""
    return tuple(layer - VLLM_INPUT_OF for layer in sorted(set(ids)) if 0 <= layer <= num_layers)


def to_sglang(outputs: Sequence[int], model_type: str, num_layers: int) -> list[int]:
    """Outputs of layers -> the ids SGLang has to be given for a target of this model type.

    Raises:
        UserError: ids as in `to_vllm`, a model type whose rule is not known, or layers SGLang cannot capture there.
    """
    layers = list(checked(outputs, num_layers))
    # For first-id families both spellings are read alike when the first output is 1; older releases added 1 always.
    shifted = model_type in SGLANG_FIRST_ID_DECIDES and layers[0] != 1
    ids = [layer + 1 for layer in layers] if shifted else layers
    if from_sglang(ids, model_type, num_layers) != tuple(layers):
        raise UserError(
            f"SGLang cannot be told to take the outputs of layers {layers} of a {model_type} target "
            "(it adds 1 to ids that begin with 1); extract with other --layers, or export for vLLM"
        )
    return ids


def from_sglang(ids: Sequence[int], model_type: str, num_layers: int | None = None) -> tuple[int, ...]:
    """Ids as given to SGLang -> outputs of layers that it captures for a target of this model type.

    Raises:
        UserError: duplicates, the embedding, an unknown model type, or a layer SGLang never captures.
    """
    name = f"SGLang layer ids {list(ids)}"
    before = _sglang_inputs(ids, model_type, num_layers)
    if num_layers is not None and num_layers in before and model_type != SGLANG_GPT_OSS:
        raise UserError(f"{name}: SGLang never captures the output of the last layer of a {model_type} target")
    return checked([layer - 1 for layer in sorted(before)], num_layers, name)


def sglang_takes(ids: Sequence[int], model_type: str, num_layers: int) -> tuple[int, ...]:
    """What SGLang hands over for any ids at all, in layer order: outputs of layers, the embedding being -1.

    Raises:
        UserError: an unknown model type.
    """
    last = num_layers if model_type == SGLANG_GPT_OSS else num_layers - 1
    before = _sglang_inputs(ids, model_type, num_layers)
    return tuple(layer - 1 for layer in sorted(set(before)) if 0 <= layer <= last)


def _sglang_inputs(ids: Sequence[int], model_type: str, num_layers: int | None) -> list[int]:
    """`layers_to_capture`: the layers before which SGLang takes the state."""
    if model_type in SGLANG_OUTPUT_OF:
        plus_one = True
    elif model_type in SGLANG_FIRST_ID_DECIDES:
        plus_one = bool(ids) and ids[0] == 1
    elif model_type == SGLANG_GPT_OSS:
        plus_one = not ids or max(ids) != num_layers
    else:
        known = ", ".join(sorted({*SGLANG_OUTPUT_OF, *SGLANG_FIRST_ID_DECIDES, SGLANG_GPT_OSS}))
        raise UserError(
            f"SGLang: expected a target whose class hands out aux states ({known}), found model type {model_type!r}; "
            "export for vLLM instead"
        )
    return [layer + 1 for layer in ids] if plus_one else list(ids)


def to_llamacpp(outputs: Sequence[int], num_layers: int) -> list[int]:
    """Outputs of layers -> llama.cpp's `target_layers`: inputs of layers, as vLLM counts.

    Raises:
        UserError: ids as in `to_vllm`, or the output of the last layer, which no layer has as input.
    """
    ids = to_vllm(outputs, num_layers)
    from_llamacpp(ids, num_layers)
    return ids


def from_llamacpp(ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """llama.cpp's `target_layers` -> outputs of layers.

    They reach the draft in the order given (common/speculative.cpp, `common_speculative_impl_draft_eagle3`), so they
    must rise.

    Raises:
        UserError: not distinct and rising, the embedding (id 0), or an id that is no layer's input.
    """
    if num_layers in ids:
        raise UserError(
            f"llama.cpp layer ids {list(ids)}: the output of the last layer is nobody's input; extract others"
        )
    return checked([layer - VLLM_INPUT_OF for layer in ids], num_layers, f"llama.cpp layer ids {list(ids)}")


def checked(outputs: Sequence[int], num_layers: int | None = None, name: str = "aux layers") -> tuple[int, ...]:
    """Outputs of layers as a tuple, if they are distinct, rising and inside the target.

    Raises:
        UserError: they are not; `name` says where they come from.
    """
    layers = tuple(outputs)
    inside = bool(layers) and layers[0] >= 0 and (num_layers is None or layers[-1] < num_layers)
    if not inside or any(low >= high for low, high in pairwise(layers)):
        limit = "" if num_layers is None else f" below {num_layers}"
        raise UserError(f"{name}: expected distinct, rising outputs of layers from 0{limit}, found {list(layers)}")
    return layers
