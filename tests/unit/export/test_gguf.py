from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from draftsmith.errors import UserError
from draftsmith.export.gguf import halved, interleaved, write_target_gguf
from draftsmith.export.gguf_tokenizer import REST, SPLITS, WORDS, tokenizer_keys
from draftsmith.export.gguf_values import open_gguf, read_keys
from draftsmith.target.template import load_template
from toy_tokenizer import save_byte_tokenizer

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VOCAB = 64


def save_target(folder: Path, **changes: Any) -> LlamaForCausalLM:
    save_byte_tokenizer(folder, VOCAB - 4)  # the embedding is padded past the tokenizer, as in real models
    torch.manual_seed(0)
    values = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, num_hidden_layers=2, max_position_embeddings=128, **{**values, **changes})
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


def written(folder: Path, dtype: Any = "float32") -> tuple[dict[str, Any], dict[str, Any]]:
    """Keys and tensors of the folder's GGUF file."""
    write_target_gguf(folder, folder / "target.gguf", dtype)
    reader = open_gguf(folder / "target.gguf")
    return {name: value.value for name, value in read_keys(reader).items()}, {t.name: t for t in reader.tensors}


def test_interleaved_rows_turned_in_pairs_give_the_products_of_halves_turned_against_each_other() -> None:
    torch.manual_seed(0)
    heads, width = 3, 8
    query, key = (torch.randn(heads * width, 5) for _ in range(2))
    angles = torch.rand(width // 2) * 6

    def halves(x: torch.Tensor) -> torch.Tensor:
        left, right = x.view(heads, 2, -1).unbind(1)
        turned = left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()
        return torch.cat(turned, -1)

    def pairs(x: torch.Tensor) -> torch.Tensor:
        left, right = x.view(heads, -1, 2).unbind(-1)
        turned = left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()
        return torch.stack(turned, -1).flatten(-2)

    seen = torch.randn(5)
    ours = (halves(query @ seen) * halves(key @ seen)).sum(-1)
    theirs = (pairs(interleaved(query, heads) @ seen) * pairs(interleaved(key, heads) @ seen)).sum(-1)
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert torch.equal(halved(interleaved(query, heads), heads), query)
    assert not torch.equal(interleaved(query, heads), query)


def test_a_target_is_written_with_its_sizes_tokenizer_and_every_tensor(tmp_path: Path) -> None:
    model = save_target(tmp_path)
    keys, tensors = written(tmp_path)
    assert keys["general.architecture"] == "llama"
    assert (keys["llama.block_count"], keys["llama.embedding_length"]) == (2, 32)
    assert (keys["llama.attention.head_count"], keys["llama.attention.head_count_kv"]) == (4, 2)
    assert keys["llama.rope.freq_base"] == 10000.0
    assert len(keys["tokenizer.ggml.tokens"]) == VOCAB
    assert keys["tokenizer.ggml.tokens"][-1] == "[UNUSED63]"
    assert keys["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    assert keys["tokenizer.ggml.token_type"][-1] == 5
    assert keys["tokenizer.ggml.pre"] == "gpt-2"
    assert (keys["tokenizer.ggml.bos_token_id"], keys["tokenizer.ggml.eos_token_id"]) == (1, 2)
    assert keys["tokenizer.ggml.add_bos_token"] is False
    assert "m.content" in keys["tokenizer.chat_template"]
    assert len(tensors) == len(model.state_dict())
    state = model.state_dict()
    for gguf_name, name in (("token_embd", "model.embed_tokens"), ("blk.1.ffn_down", "model.layers.1.mlp.down_proj")):
        stored = torch.from_numpy(tensors[f"{gguf_name}.weight"].data.copy())
        assert torch.equal(stored, state[f"{name}.weight"])
    query = torch.from_numpy(tensors["blk.0.attn_q.weight"].data.copy())
    assert torch.equal(query, interleaved(state["model.layers.0.self_attn.q_proj.weight"], 4))


def test_a_tied_head_is_not_written_and_vectors_stay_float32(tmp_path: Path) -> None:
    save_target(tmp_path, tie_word_embeddings=True)
    _, tensors = written(tmp_path, "bfloat16")
    assert "output.weight" not in tensors
    assert tensors["blk.0.attn_k.weight"].tensor_type.name == "BF16"
    assert list(tensors["blk.0.attn_k.weight"].shape) == [32, 16]  # GGUF counts the other way round
    assert tensors["blk.0.attn_norm.weight"].tensor_type.name == "F32"


# P38
def test_llama3_scaling_is_written_as_factors_of_the_frequencies(tmp_path: Path) -> None:
    model = save_target(tmp_path, rope_parameters=LLAMA3)
    keys, tensors = written(tmp_path)
    assert keys["llama.rope.freq_base"] == 500000.0
    factors = torch.from_numpy(tensors["rope_freqs.weight"].data.copy())
    base = 1.0 / 500000.0 ** (torch.arange(0, 8, 2) / 8)
    assert torch.allclose(base / factors, model.model.rotary_emb.inv_freq)
    assert factors.max() == 8


# P38
def test_a_rope_that_llamacpp_computes_in_its_own_way_is_refused(tmp_path: Path) -> None:
    save_target(tmp_path, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0})
    with pytest.raises(UserError, match="found 'yarn'"):
        written(tmp_path)


def test_another_architecture_is_refused_with_what_converts_it(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path, VOCAB)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB, num_hidden_layers=1, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"found \['Qwen2ForCausalLM'\]; .*convert_hf_to_gguf.py"):
        written(tmp_path)


@pytest.mark.parametrize(("digits", "name"), [(r"\p{N}{1,3}", "llama-bpe"), (r"\p{N}", "qwen2")])
def test_a_known_way_to_split_text_is_named(digits: str, name: str, tmp_path: Path) -> None:
    assert name in SPLITS.values()
    split = pre_tokenizers.Split(Regex(f"{WORDS}|{digits}|{REST}"), "isolated")
    steps = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    folder = save_byte_tokenizer(tmp_path, VOCAB, steps)
    keys = tokenizer_keys(load_template(folder, {}, trust_remote_code=False), VOCAB)
    assert keys["tokenizer.ggml.pre"].value == name


def test_an_unknown_way_to_split_text_is_refused(tmp_path: Path) -> None:
    folder = save_byte_tokenizer(tmp_path, VOCAB, pre_tokenizers.Metaspace())
    template = load_template(folder, {}, trust_remote_code=False)
    with pytest.raises(UserError, match=r"Metaspace.* has no name there; .*--gguf-tokenizer"):
        tokenizer_keys(template, VOCAB)


def test_the_tokenizer_can_be_copied_from_a_file_of_the_same_target(tmp_path: Path) -> None:
    save_target(tmp_path)
    write_target_gguf(tmp_path, tmp_path / "target.gguf", "float32")
    copied = tokenizer_keys(tmp_path / "target.gguf", VOCAB)
    assert copied == tokenizer_keys(load_template(str(tmp_path), {}, trust_remote_code=False), VOCAB)
    with pytest.raises(UserError, match="a tokenizer of 65 ids as the target has, found 64"):
        tokenizer_keys(tmp_path / "target.gguf", 65)


def test_a_file_that_is_no_gguf_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a GGUF file, found none"):
        open_gguf(tmp_path / "no.gguf")
    (tmp_path / "text.gguf").write_text("hello, this is not a model" * 10)
    with pytest.raises(UserError, match="expected a GGUF file, found something else"):
        open_gguf(tmp_path / "text.gguf")
