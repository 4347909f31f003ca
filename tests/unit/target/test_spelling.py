"""However fast, texts and ids are those of the tokenizer itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from draftsmith.target.spelling import spelling
from draftsmith.target.template import Template, load_template
from toy_chat import save_toy_tokenizer

HARD = [
    "naïve 中文字 🙂👩‍👩‍👧",
    "  two  spaces ,  dots .",
    "\n\n\t \u3000\u2028\u0085",
    "<|im_end|><think>ok</think>",
    "12345 0x7f",
]


def byte_level(with_holes: bool = False) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("a", "b"), ("Ä", "±"), ("ä", "¸")]  # the last two: bytes of one character, or a part of one
    entries = [*alphabet, *(left + right for left, right in merges)]
    vocab = {token: index * (3 if with_holes else 1) for index, token in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True), AddedToken("<|two words|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("字🙂", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral: spaces are ▁, what the vocabulary lacks is spelled in byte entries."""
    entries = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnop.", "▁a"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(entries)},
            merges=[("▁", "a")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def metaspace() -> PreTrainedTokenizerFast:
    entries = ["<unk>", "</s>", *(f"▁{letter}" for letter in "abc"), *"abc.,"]
    tokenizer = Tokenizer(models.Unigram([(token, -1.0 - index) for index, token in enumerate(entries)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=True
    )


def as_transformers_decodes(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


@pytest.mark.parametrize("make", [byte_level, lambda: byte_level(with_holes=True), byte_fallback, metaspace])
def test_any_ids_and_any_text_come_out_as_from_transformers(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    tokenizer = make()
    fast, draw = spelling(tokenizer), random.Random(0)
    ids = [*sorted(tokenizer.get_vocab().values()), len(tokenizer) + 7]  # one beyond the vocabulary
    for _ in range(3000):  # runs of lone bytes too: half characters at both ends and in the middle
        drawn = draw.choices(ids, k=draw.randrange(9))
        assert fast.decode(drawn) == as_transformers_decodes(tokenizer, drawn)
    for text in HARD:
        assert fast.encode(text) == tokenizer.encode(text, add_special_tokens=False)


def test_a_real_vocabulary_comes_out_as_from_transformers(smollm2: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    fast, draw = spelling(tokenizer), random.Random(0)
    for count in [1] * 50 + [5] * 500 + [700] * 20:
        drawn = [draw.randrange(len(tokenizer)) for _ in range(count)]
        assert fast.decode(drawn) == as_transformers_decodes(tokenizer, drawn)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_silent_ids_have_no_text(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    tokenizer = make()
    stop, draw = tokenizer.eos_token_id, random.Random(1)
    silenced = spelling(tokenizer, frozenset({stop, 70}))
    for _ in range(500):
        drawn = draw.choices([stop, *range(60, 80)], k=draw.randrange(6))
        assert silenced.decode(drawn) == as_transformers_decodes(tokenizer, [i for i in drawn if i not in (stop, 70)])
    assert spelling(tokenizer).decode([stop, stop]) == tokenizer.eos_token * 2


def test_a_truncation_kept_in_the_tokenizers_file_cuts_no_prompt() -> None:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert spelling(tokenizer).encode("abcdefgh") == byte_level().encode("abcdefgh", add_special_tokens=False)


class Reversing(PreTrainedTokenizerFast):
    """Decodes in a way of its own."""

    def _decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._decode(token_ids[::-1], *args, **kwargs)


class Slow:
    """As a tiktoken tokenizer that comes with its model: no `tokenizers` object inside."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert not skip_special_tokens and not clean_up_tokenization_spaces
        return bytes(ids).decode("utf-8", "replace")


def test_tokenizers_with_code_of_their_own_are_asked_themselves() -> None:
    inner = byte_level()
    reversing = Reversing(tokenizer_object=inner.backend_tokenizer, eos_token="<|im_end|>")
    assert spelling(reversing).decode(inner.encode("abc")) == "cab"
    assert spelling(Slow(), frozenset({33})).decode(spelling(Slow()).encode("a!é")) == "aé"


def test_text_for_people_is_stripped_and_shows_no_stop_id(tmp_path: Path) -> None:
    template: Template = load_template(save_toy_tokenizer(tmp_path), {}, trust_remote_code=False)
    ids = template.encode(" \n<|end|>an <think>answer<|end|> ")
    assert template.readable(ids) == "an <think>answer"
    assert template.readable([]) == ""
