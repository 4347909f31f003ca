from __future__ import annotations

from collections.abc import Sequence

import pytest

from draftsmith.draft import layer_ids
from draftsmith.errors import UserError
from draftsmith.hidden.layers import default_layers

OUTPUTS = (1, 17, 32)


def boundaries(depth: int) -> list[int]:
    """A toy target of `depth` blocks that each add 1: value k lies before block k, value `depth` after the last."""
    return list(range(depth + 1))


def as_vllm_captures(ids: Sequence[int], values: list[int]) -> list[int]:
    """vLLM: the value before layer i, ids sorted and de-duplicated."""
    return [values[i] for i in sorted(set(ids))]


def as_sglang_llama_captures(ids: Sequence[int], values: list[int]) -> list[int]:
    """SGLang's Llama: ids + 1, the value before that layer."""
    return [values[i + 1] for i in range(len(values)) if i in ids]


# P31
def test_both_engines_capture_the_same_values_from_the_ids_written_for_them() -> None:
    values = boundaries(36)
    vllm, sglang = layer_ids.to_vllm(OUTPUTS, 36), layer_ids.to_sglang(OUTPUTS, "llama", 36)
    assert vllm == [2, 18, 33]
    assert sglang == [1, 17, 32]
    assert as_vllm_captures(vllm, values) == as_sglang_llama_captures(sglang, values) == [2, 18, 33]


# P31
def test_the_output_of_the_last_layer_is_the_number_of_layers_in_vllm() -> None:
    assert layer_ids.to_vllm((1, 17, 35), 36) == [2, 18, 36]
    assert as_vllm_captures([36], boundaries(36)) == [36]


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt_oss", "kimi_k2", "deepseek_v3"])
@pytest.mark.parametrize("outputs", [(1, 17, 32), (2, 17, 32), (1, 2, 3)])
def test_reading_back_what_was_written_gives_the_same_layers(model_type: str, outputs: tuple[int, ...]) -> None:
    assert layer_ids.from_vllm(layer_ids.to_vllm(outputs, 36), 36) == outputs
    assert layer_ids.from_sglang(layer_ids.to_sglang(outputs, model_type, 36), model_type, 36) == outputs


def test_sglang_adds_one_for_deepseek_targets_only_when_the_first_id_is_one() -> None:
    assert layer_ids.from_sglang([1, 29, 57], "kimi_k2", 61) == (1, 29, 57)
    assert layer_ids.from_sglang([2, 30, 58], "kimi_k2", 61) == (1, 29, 57)
    assert layer_ids.to_sglang((2, 29, 57), "kimi_k2", 61) == [3, 30, 58]


def test_layers_that_sglang_cannot_be_told_are_refused() -> None:
    with pytest.raises(UserError, match=r"cannot be told to take the outputs of layers \[0, 29, 57\]"):
        layer_ids.to_sglang((0, 29, 57), "kimi_k2", 61)


def test_only_gpt_oss_gives_sglang_the_output_of_the_last_layer() -> None:
    assert layer_ids.to_sglang((1, 10, 23), "gpt_oss", 24) == [1, 10, 23]
    with pytest.raises(UserError, match="never captures the output of the last layer of a llama target"):
        layer_ids.to_sglang((1, 10, 23), "llama", 24)


# P40
def test_a_target_whose_class_hands_out_no_aux_states_is_refused() -> None:
    with pytest.raises(UserError, match="found model type 'mamba'"):
        layer_ids.to_sglang(OUTPUTS, "mamba", 36)


# P31
@pytest.mark.parametrize("ids", [(1, 1, 3), (3, 1, 2), (-1, 1, 2), (1, 2, 36), ()])
def test_duplicates_and_layers_outside_the_target_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="distinct, rising outputs of layers"):
        layer_ids.to_vllm(ids, 36)


# P31
def test_a_model_of_five_layers_has_no_default_layers() -> None:
    with pytest.raises(UserError, match=r"found \[1, 1, 1\] for a target of 5 layers"):
        default_layers(5)
    assert default_layers(8) == (1, 3, 4)


def test_the_default_layers_are_vllms_own() -> None:
    for depth in (8, 24, 30, 36, 61):
        assert layer_ids.to_vllm(default_layers(depth), depth) == [2, depth // 2, depth - 3]


def test_vllm_id_zero_is_the_embedding_and_refused() -> None:
    with pytest.raises(UserError, match=r"vLLM layer ids \[0, 2, 3\]"):
        layer_ids.from_vllm([0, 2, 3], 8)
