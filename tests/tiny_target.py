"""A tiny random Llama with the toy tokenizer, saved as a model folder: a target that any stage can load."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from toy_chat import save_toy_tokenizer


def save_tiny_target(folder: Path, *, layers: int = 8, seed: int = 0, tied: bool = False) -> Path:
    """Hidden 32, 4 heads over 2 key heads; float32; replies of a random model never end by themselves for long."""
    save_toy_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 5,  # padded past the tokenizer, as real models are
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
