"""A byte-level BPE tokenizer of a few ids, as llama.cpp knows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|unk|>", "<|bos|>", "<|eos|>"]
TEMPLATE = "{% for m in messages %}{{ m.content }}<|eos|>{% endfor %}"


def save_byte_tokenizer(folder: Path, size: int, pre_tokenizer: Any = None) -> str:
    """`size` ids: three special ones, the first bytes of the byte-level alphabet, one merge; BOS is never added."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: size - len(SPECIAL) - 1]
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet, alphabet[0] + alphabet[1]])}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[(alphabet[0], alphabet[1])], unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<|unk|>", bos_token="<|bos|>", eos_token="<|eos|>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return str(folder)
