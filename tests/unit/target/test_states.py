from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from draftsmith.errors import UserError
from draftsmith.target.states import StateTap, check_layers, find_parts

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


def small_models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [LlamaForCausalLM(LlamaConfig(**SMALL)).eval(), Qwen3ForCausalLM(Qwen3Config(**SMALL)).eval()]


@pytest.mark.parametrize("which", [0, 1], ids=["llama", "qwen3"])
def test_aux_states_are_the_outputs_of_the_named_layers_and_final_is_before_the_norm(which: int) -> None:
    model = small_models()[which]
    ids = torch.randint(0, 96, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), StateTap(model, (1, 2, 4)) as tap:
        found = model(ids, output_hidden_states=True)
        aux, final = tap.aux(), tap.final()
        expected = torch.cat([found.hidden_states[i + 1] for i in (1, 2, 4)], dim=-1)
        assert torch.equal(aux, expected)
        assert torch.equal(tap.parts.norm(final), found.hidden_states[-1])
        assert torch.equal(tap.parts.head(tap.parts.norm(final)), found.logits)
        assert not torch.equal(final, found.hidden_states[-1])


def test_a_tap_holds_only_the_latest_forward_and_leaves_no_hook_behind() -> None:
    model = small_models()[0]
    with torch.no_grad(), StateTap(model, (0, 1, 2)) as tap:
        model(torch.tensor([[1, 2, 3]]))
        model(torch.tensor([[4, 5]]))
        assert tap.aux().shape == (1, 2, 96)
        tap.clear()
        with pytest.raises(RuntimeError):
            tap.aux()
        with pytest.raises(RuntimeError):
            tap.final()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class AddOne(nn.Module):
    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, hidden: Tensor) -> Any:
        return (hidden + 1, None) if self.wrapped else hidden + 1


class Counting(nn.Module):
    """Every block adds 1 and the embedding gives 0, so the boundary before block k has value k."""

    def __init__(self, blocks: int, wrapped: bool) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([AddOne(wrapped) for _ in range(blocks)])
        self.model.norm = nn.LayerNorm(2)
        self.lm_head = nn.Linear(2, 3)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.zeros(*ids.shape, 2)
        for layer in self.model.layers:
            found = layer(hidden)
            hidden = found[0] if isinstance(found, tuple) else found
        logits: Tensor = self.lm_head(self.model.norm(hidden))
        return logits


@pytest.mark.parametrize("wrapped", [False, True], ids=["tensor", "tuple"])
def test_the_output_of_layer_i_is_the_boundary_after_it(wrapped: bool) -> None:
    # P31: boundaries 2, 18, 33 (an engine's "input of layer") are the outputs of layers 1, 17, 32.
    model = Counting(36, wrapped)
    with StateTap(model, (1, 17, 32)) as tap:
        model(torch.zeros(1, 4, dtype=torch.long))
        assert tap.aux()[0, 0].tolist() == [2, 2, 18, 18, 33, 33]
        assert tap.final()[0, 0].tolist() == [36, 36]


def test_layers_outside_the_model_twice_or_out_of_order_are_refused() -> None:
    # P31: with 5 layers the usual choice 1, n//2-1, n-4 names one layer three times.
    with pytest.raises(UserError, match="named twice"):
        StateTap(Counting(5, False), (1, 1, 1))
    with pytest.raises(UserError, match="from 0 to 4"):
        StateTap(Counting(5, False), (1, 2, 5))
    with pytest.raises(UserError, match="ascending"):
        check_layers((3, 1, 2), 5)
    assert check_layers((0, 2, 4), 5) == (0, 2, 4)


def test_a_model_of_unknown_shape_is_refused_with_what_was_tried() -> None:
    with pytest.raises(UserError, match=r"Sequential: expected .*model\.layers.*transformer\.h"):
        find_parts(nn.Sequential(nn.Linear(2, 2)))


def test_parts_of_a_nested_language_model_are_found() -> None:
    outer = nn.Module()
    outer.language_model = Counting(3, False)
    assert find_parts(outer).layers is outer.language_model.model.layers
