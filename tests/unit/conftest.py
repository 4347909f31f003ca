"""Small real tokenizers and stages for unit tests, built in code."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from draftsmith.artifacts import Plan, Stage
from draftsmith.target.template import Template, load_template

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
MakeTokenizer = Callable[..., Path]
MakeTemplate = Callable[..., Template]


@pytest.fixture
def make_tokenizer(tmp_path: Path) -> MakeTokenizer:
    """Writes a byte-level BPE tokenizer: 256 bytes, then `merges`, then marks; EOS is <|im_end|>."""

    def make(
        name: str = "tokenizer",
        *,
        template: str | None = CHATML,
        marks: Sequence[str] = (),
        merges: Sequence[tuple[str, str]] = (),
        adds_bos: bool = False,
        config: dict[str, Any] | None = None,
        generation: dict[str, Any] | None = None,
    ) -> Path:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {token: index for index, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
        tokenizer.add_tokens([AddedToken(mark, special=False) for mark in marks])
        if adds_bos:
            bos = ("<s>", tokenizer.token_to_id("<s>"))
            tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>")
        fast.chat_template = template
        folder = tmp_path / name
        fast.save_pretrained(folder)
        for file, values in (("config.json", config), ("generation_config.json", generation)):
            if values is not None:
                (folder / file).write_text(json.dumps(values))
        return folder

    return make


@pytest.fixture
def make_template(make_tokenizer: MakeTokenizer) -> MakeTemplate:
    """`make_tokenizer`, loaded with `options`."""

    def make(*, options: dict[str, Any] | None = None, **kwargs: Any) -> Template:
        return load_template(str(make_tokenizer(**kwargs)), options or {}, trust_remote_code=False)

    return make


@pytest.fixture
def make_stage(tmp_path: Path) -> Callable[[str], Stage]:
    """A stage of the run `tmp_path/run`, with its work folder made."""

    def make(name: str) -> Stage:
        work = tmp_path / "run" / f"{name}.partial"
        work.mkdir(parents=True)
        return Stage(tmp_path / "run", Plan(name, {}, {}), work)

    return make
