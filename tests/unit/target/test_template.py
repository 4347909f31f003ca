from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.target.template import TemplateRefusal, load_template, tool_arguments

HI = [{"role": "user", "content": "hi"}]
WITH_BOS = "{{ '<s>' }}{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
SWITCH = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<think>\\n' if thinking | default(true) else '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)
LAST_THOUGHTS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '[' + m.role + ']' }}"
    "{% if m.role == 'assistant' and m.reasoning_content is defined and loop.index0 > ns.last %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ 'tools:' + (tools | map(attribute='function') | map(attribute='name') | join(',')) }}{% endif %}"
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% for c in m.tool_calls | default([]) %}"
    "{% for name, value in c.function.arguments.items() %}{{ name ~ '=' ~ value }}{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_bos_stands_once_whether_or_not_the_tokenizer_adds_one_of_its_own(make_template: Any, adds_bos: bool) -> None:
    # P09
    template = make_template(template=WITH_BOS, adds_bos=adds_bos)
    ids = template.render(HI)
    bos = template.token_id("<s>")
    assert ids[0] == bos
    assert ids.count(bos) == 1


def test_prompt_ends_in_the_start_of_a_reply_and_a_transcript_does_not(make_template: Any) -> None:
    template = make_template()
    assert template.text(HI) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.transcript(HI) == "<|im_start|>user\nhi<|im_end|>\n"
    assert template.decode(template.render(HI)) == template.text(HI)


def test_decoding_keeps_special_tokens_and_spacing(make_template: Any) -> None:
    template = make_template()
    text = "a , b . <|im_end|> don 't\u2028é"
    assert template.decode(template.encode(text)) == text


def test_options_reach_the_template_and_its_fingerprint_but_not_the_tokenizers(make_tokenizer: Any) -> None:
    folder = str(make_tokenizer(template=SWITCH))
    on, off = (load_template(folder, {"thinking": value}, False) for value in (True, False))
    assert on.text(HI).endswith("<think>\n")
    assert off.text(HI).endswith("<think>\n\n</think>\n\n")
    assert on.fingerprint != off.fingerprint
    assert on.tokenizer_fingerprint == off.tokenizer_fingerprint


def test_fingerprints_follow_content_and_not_the_folder(make_tokenizer: Any) -> None:
    first, copy = (load_template(str(make_tokenizer(name)), {}, False) for name in ("a", "b"))
    other_text = load_template(str(make_tokenizer("c", template=SWITCH)), {}, False)
    other_vocab = load_template(str(make_tokenizer("d", marks=["<think>"])), {}, False)
    assert first.fingerprint == copy.fingerprint
    assert first.fingerprint != other_text.fingerprint
    assert first.tokenizer_fingerprint == other_text.tokenizer_fingerprint != other_vocab.tokenizer_fingerprint


def test_earlier_thinking_is_shown_again_only_where_the_template_says_so(make_template: Any) -> None:
    # P22
    template = make_template(template=LAST_THOUGHTS)
    first = {"role": "assistant", "content": "A1", "reasoning_content": "T1"}
    assert template.text([*HI, first, *HI]) == "[user]hi[assistant]A1[user]hi[assistant]"
    assert template.text([*HI, first]) == "[user]hi[assistant]<think>T1</think>A1[assistant]"


@pytest.mark.parametrize("arguments", [{"t": 1}, '{"t": 1}'])
def test_tool_arguments_render_alike_as_mapping_and_as_json_text(make_template: Any, arguments: Any) -> None:
    # P24
    template = make_template(template=TOOLS)
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    turns = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "9"}]
    tools = [{"type": "function", "function": {"name": "clock"}}]
    assert template.text(turns, tools) == "tools:clock[user]hi[assistant]t=1[tool]9"


def test_arguments_that_are_no_mapping_stay_text() -> None:
    assert tool_arguments("not json") == "not json"
    assert tool_arguments("[1]") == "[1]"


def test_a_conversation_the_template_refuses_is_refused_with_its_reason(make_template: Any) -> None:
    template = make_template(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateRefusal, match=r"\[user\]: roles must alternate"):
        template.render(HI)


def test_stop_ids_are_the_tokenizers_eos_and_what_generation_config_lists(make_template: Any) -> None:
    template = make_template(generation={"eos_token_id": [7, 9]}, config={"eos_token_id": 11})
    assert template.stop_ids == {7, 9, template.token_id("<|im_end|>")}


def test_stop_ids_come_from_the_model_config_where_there_is_no_generation_config(make_template: Any) -> None:
    template = make_template(config={"eos_token_id": 11})
    assert template.stop_ids == {11, template.token_id("<|im_end|>")}


@pytest.mark.parametrize("config", [{"vocab_size": 512}, {"text_config": {"vocab_size": 512}}])
def test_vocabulary_size_is_that_of_the_targets_embedding(make_template: Any, config: dict[str, Any]) -> None:
    assert make_template(config=config).vocab_size == 512


def test_vocabulary_size_without_a_model_config_is_the_tokenizers(make_template: Any) -> None:
    assert make_template(marks=["<think>"]).vocab_size == 256 + 4 + 1


def test_special_ids_hold_marks_and_stop_ids_but_no_plain_text(make_template: Any) -> None:
    template = make_template(generation={"eos_token_id": 9})
    assert template.special_ids() == {256, 257, 258, 259, 9}


def test_an_option_that_draftsmith_sets_itself_is_refused(make_tokenizer: Any) -> None:
    with pytest.raises(UserError, match="template option tokenize"):
        load_template(str(make_tokenizer()), {"tokenize": True}, False)


def test_a_tokenizer_without_a_chat_template_is_one_clear_line(make_tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"no chat template; add chat_template\.jinja"):
        load_template(str(make_tokenizer(template=None)), {}, False)


def test_folders_without_a_tokenizer_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="found no such folder"):
        load_template(str(tmp_path / "missing"), {}, False)
    with pytest.raises(UserError, match="expected tokenizer files"):
        load_template(str(tmp_path), {}, False)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="found a file"):
        load_template(str(tmp_path / "tokenizer.json"), {}, False)
    with pytest.raises(UserError, match="no tokenizer could be loaded"):
        load_template(str(tmp_path), {}, False)


def test_a_broken_generation_config_beside_the_tokenizer_is_named(make_tokenizer: Any) -> None:
    folder = make_tokenizer()
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json: expected JSON"):
        load_template(str(folder), {}, False)


@pytest.mark.slow
def test_smollm2_prompt_ids_are_those_of_its_own_template(smollm2: str) -> None:
    template = load_template(str(smollm2), {"thinking": False}, False)
    expected = template.tokenizer.apply_chat_template(
        HI, tokenize=True, add_generation_prompt=True, return_dict=False, thinking=False
    )
    assert template.render(HI) == expected
    assert template.stop_ids == {2}
    assert template.vocab_size == json.loads((Path(smollm2) / "config.json").read_text())["vocab_size"]
