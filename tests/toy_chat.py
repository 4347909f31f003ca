"""A toy tokenizer with a thinking chat template: one id per character, so that text and ids are easy to relate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftsmith.target.dialect import Asked
from draftsmith.target.reply import Sampling

MARKS = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<think>", "</think>"]
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n", "\u2028", "\u0085"]
MERGED = ["he", "llo", "hello"]
"""Entries that no text is encoded to: ids an engine may give and re-tokenising would not."""

TEMPLATE = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}{{- '<|system|>' + tools|tojson + '<|end|>' -}}{%- endif -%}
{%- for m in messages -%}
{{- '<|' + m.role + '|>' -}}
{%- if m.reasoning_content and loop.index0 > ns.last -%}
{{- '<think>' + m.reasoning_content + '</think>' -}}
{%- endif -%}
{{- m.content -}}
{%- for call in m.tool_calls or [] -%}{{- call.function.name + call.function.arguments|tojson -}}{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think></think>' -}}
{%- elif prompt_opens -%}{{- '<think>' -}}{%- endif -%}
{%- endif -%}
"""
"""Keeps reasoning only after the last user turn, as Qwen3 and Kimi do; `prompt_opens` ends the prompt in <think>."""


def save_toy_tokenizer(folder: Path, template: str = TEMPLATE) -> str:
    vocab = {token: index for index, token in enumerate(["<unk>", *MARKS, *CHARACTERS, *MERGED])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|end|>")
    fast.add_tokens(MARKS, special_tokens=True)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return str(folder)


def asking(messages: Any, tools: Any, sampling: Sampling, options: dict[str, Any]) -> Asked:
    """A generation to ask for, of which nobody needs our own rendering."""
    return Asked(
        messages=messages, tools=tools, sampling=sampling, template_options=options, prompt_ids=lambda: [1, 2, 3]
    )
