from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from draftsmith.target.kv import GROUPED_ATTENTION, BufferedCache, new_cache

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


def windowed() -> MistralForCausalLM:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4)).eval()


@pytest.mark.parametrize("make", [llama, windowed])
@pytest.mark.parametrize("steps", [(10,), (3, 1, 1, 5), (1, 1, 1, 1, 6)])
@torch.no_grad()
def test_cached_steps_give_the_logits_of_one_pass(make: object, steps: tuple[int, ...]) -> None:
    model = make()  # type: ignore[operator]
    ids = torch.randint(0, 64, (2, 10), generator=torch.Generator().manual_seed(1))
    expected = model(ids, use_cache=False).logits
    model.set_attn_implementation(GROUPED_ATTENTION)
    cache = new_cache(model.config)
    found, at = [], 0
    for step in steps:
        found.append(model(ids[:, at : at + step], past_key_values=cache, use_cache=True).logits)
        at += step
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_cropped_cache_forgets_exactly_the_rows_past_its_length() -> None:
    model = llama()
    model.set_attn_implementation(GROUPED_ATTENTION)
    ids = torch.arange(12)[None]
    cache = new_cache(model.config)
    model(ids, past_key_values=cache, use_cache=True)
    cache.crop(7)
    assert cache.get_seq_length() == 7
    found = model(ids[:, 7:9], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(found, model(ids[:, :9], use_cache=False).logits[:, 7:], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_merged_caches_keep_each_rows_own_past() -> None:
    model = llama()
    model.set_attn_implementation(GROUPED_ATTENTION)
    short, long = torch.tensor([[5, 6, 7]]), torch.tensor([[8, 9, 10, 11, 12]])
    one, two = new_cache(model.config), new_cache(model.config)
    model(short, past_key_values=one, use_cache=True)
    model(long, past_key_values=two, use_cache=True)
    one.append_rows(two)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    found = model(
        torch.tensor([[1], [1]]),
        attention_mask=mask,
        position_ids=torch.tensor([[3], [5]]),
        past_key_values=one,
        use_cache=True,
    ).logits
    for row, ids in enumerate((short, long)):
        expected = model(torch.cat([ids, torch.tensor([[1]])], 1), use_cache=False).logits[0, -1]
        torch.testing.assert_close(found[row, -1], expected, rtol=1e-4, atol=1e-5)


def test_buffers_grow_without_losing_rows() -> None:
    cache = BufferedCache(1)
    rows = torch.randn(1, 2, 500, 4)
    for at in range(500):
        keys, values = cache.update(rows[:, :, at : at + 1], rows[:, :, at : at + 1], 0)
    assert torch.equal(keys, rows)
    assert torch.equal(values, rows)
