from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.target.template import Template, load_template
from draftsmith.target.thinking import (
    TAIL,
    Split,
    delimiters_from_json,
    delimiters_json,
    find_delimiters,
    opened_by_prompt,
    split,
    text_of,
)
from draftsmith.target.windows import STRIDE

THINK = ("<think>", "</think>")
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
STRADDLING = ((">", "Ċ"), (">Ċ", "Ċ"), (".", "<"))
"""Merges that let an id hold the end of a delimiter and what follows it, or what precedes it and its start."""


@pytest.fixture(params=["one id", "many ids", "straddling ids"])
def thinker(request: pytest.FixtureRequest, make_template: Any) -> Template:
    """The same delimiters as one id each, as several, and as several that merge with their neighbours."""
    ways: dict[str, dict[str, Any]] = {
        "one id": {"marks": THINK},
        "many ids": {},
        "straddling ids": {"merges": STRADDLING},
    }
    template: Template = make_template(**ways[request.param])
    return template


def told(template: Template, prompt: str, reply: str, finish: str = "stop") -> tuple[Split, str, str, list[int]]:
    """Split, reasoning text and answer text of a reply given as text; the stop id ends it unless it was cut."""
    ids = template.encode(reply + ("<|im_end|>" if finish == "stop" else ""))
    found = split(find_delimiters(template, "think"), template, template.encode(prompt), ids, finish)
    return found, text_of(template, ids, found.reasoning), text_of(template, ids, found.answer), ids


def test_a_reply_whose_opening_delimiter_is_in_the_prompt_is_split_at_the_closing_one(thinker: Template) -> None:
    # P07
    found, reasoning, answer, ids = told(thinker, "Q<think>\n", "two and two\n</think>\n\nFour")
    assert (reasoning, answer) == ("two and two", "Four")
    assert found.opened_by_prompt
    assert found.state == "ok"
    assert found.answer is not None
    assert found.answer[1] == len(ids)
    assert thinker.decode(thinker.encode("Q<think>\n") + ids).count("</think>") == 1


def test_a_reply_with_both_delimiters_is_split_without_them(thinker: Template) -> None:
    found, reasoning, answer, _ = told(thinker, "Q", "<think>\nSo.</think>\nFour")
    assert reasoning.startswith("So")
    assert "think" not in reasoning + answer
    assert answer == "Four"
    assert not found.opened_by_prompt


@pytest.mark.parametrize(("prompt", "reply"), [("Q<think>\n", "first add 3 and"), ("Q", "<think>\nfirst add 3 and")])
def test_a_reply_cut_inside_its_thinking_has_no_answer(thinker: Template, prompt: str, reply: str) -> None:
    # P03: the ids decide, whichever text field a server's parser chose
    found, reasoning, answer, ids = told(thinker, prompt, reply, finish="length")
    assert found.state == "cut_in_reasoning"
    assert found.answer is None
    assert (reasoning, answer) == ("first add 3 and", "")
    assert "</think>" not in thinker.decode(ids)


def test_a_reply_that_stops_of_itself_inside_its_thinking_is_cut_there_too(thinker: Template) -> None:
    found, reasoning, _, ids = told(thinker, "Q<think>\n", "hmm")
    assert found.state == "cut_in_reasoning"
    assert found.reasoning == (0, len(ids) - 1)
    assert reasoning == "hmm"


def test_a_reply_cut_after_its_thinking_is_cut_in_the_answer(thinker: Template) -> None:
    found, reasoning, answer, _ = told(thinker, "Q<think>\n", "sum\n</think>\n\nFo", finish="length")
    assert (found.state, reasoning, answer) == ("cut_in_answer", "sum", "Fo")


def test_an_empty_pair_in_the_prompt_belongs_to_the_prompt(thinker: Template) -> None:
    # P23
    found, reasoning, answer, ids = told(thinker, "Q<think>\n\n</think>\n\n", "Four")
    assert not found.opened_by_prompt
    assert found.reasoning is None
    assert found.answer == (0, len(ids))
    assert (reasoning, answer) == ("", "Four")


def test_delimiters_within_the_prompts_own_text_open_nothing(thinker: Template) -> None:
    found, _, answer, _ = told(thinker, "Think inside <think> and </think>. Q", "Four")
    assert (found.opened_by_prompt, found.reasoning, answer) == (False, None, "Four")


def test_later_closing_delimiters_are_answer_text(thinker: Template) -> None:
    _, reasoning, answer, _ = told(thinker, "Q<think>\n", "sum\n</think>\nUse </think> to close")
    assert (reasoning, answer) == ("sum", "Use </think> to close")


def test_an_opening_delimiter_repeated_by_the_reply_is_no_reasoning(thinker: Template) -> None:
    found, reasoning, answer, _ = told(thinker, "Q<think>\n", "<think>\nsum\n</think>\nFour")
    assert (reasoning, answer, found.opened_by_prompt) == ("sum", "Four", True)


def test_a_reply_that_closes_what_nothing_opened_was_thinking(thinker: Template) -> None:
    _, reasoning, answer, _ = told(thinker, "Q", "sum\n</think>\nFour")
    assert (reasoning, answer) == ("sum", "Four")


def test_with_thinking_off_a_lone_closing_delimiter_is_answer_text(thinker: Template) -> None:
    found, _, answer, _ = told(thinker, "Q<think>\n\n</think>\n\n", "type </think> here")
    assert (found.reasoning, answer) == (None, "type </think> here")


@pytest.mark.parametrize("reply", ["<think></think>Four", "<think>\n\n</think>\n\nFour"])
def test_an_empty_pair_written_by_the_reply_is_no_reasoning(thinker: Template, reply: str) -> None:
    found, _, answer, _ = told(thinker, "Q", reply)
    assert (found.reasoning, found.state, answer) == (None, "ok", "Four")


def test_words_before_the_thinking_are_in_neither_span(thinker: Template) -> None:
    _, reasoning, answer, _ = told(thinker, "Q", "Sure <think>sum\n</think>\nFour")
    assert (reasoning, answer) == ("sum", "Four")


def test_an_answer_that_only_names_a_spelled_out_delimiter_is_an_answer(make_template: Any) -> None:
    found, _, answer, _ = told(make_template(), "Q", "Write <think> first")
    assert (found.reasoning, found.state, answer) == (None, "ok", "Write <think> first")


def test_a_closing_delimiter_at_the_very_end_leaves_an_empty_answer(thinker: Template) -> None:
    found, reasoning, answer, ids = told(thinker, "Q<think>\n", "sum\n</think>", finish="length")
    assert found.answer == (len(ids), len(ids))
    assert (found.state, reasoning, answer) == ("cut_in_answer", "sum", "")


def test_no_reply_at_all_is_split_without_fault(thinker: Template) -> None:
    found, reasoning, answer, _ = told(thinker, "Q<think>\n", "", finish="length")
    assert (found.state, reasoning, answer) == ("cut_in_reasoning", "", "")


def test_spans_of_random_replies_hold_just_what_was_written_in_them(thinker: Template) -> None:
    chance = random.Random(5)
    alphabet = "ab .\n<>/éß字🙂think"
    for _ in range(200):
        parts = ["".join(chance.choice(alphabet) for _ in range(chance.randrange(1, 30))) for _ in range(2)]
        thought, said = (f"x{part}x" for part in parts)
        if any(mark in part for mark in THINK for part in (thought, said)):
            continue
        found, reasoning, answer, ids = told(thinker, "Q<think>\n", f"{thought}</think>{said}")
        assert (reasoning, answer) == (thought, said)
        assert found.reasoning is not None
        assert found.answer is not None
        assert 0 <= found.reasoning[0] < found.reasoning[1] < found.answer[0] <= found.answer[1] == len(ids)


def test_delimiters_are_found_wherever_they_stand_in_a_long_reply(thinker: Template) -> None:
    for length in [*range(STRIDE - 20, STRIDE + 3), 3 * STRIDE - 1]:
        thought = "".join(random.Random(length).choices("abc", k=length - 1)) + "."
        found, reasoning, answer, _ = told(thinker, "Q<think>\n", f"{thought}</think>\nFour, not 5</think>")
        assert reasoning.removesuffix(".") == thought.removesuffix(".")  # ".<" may be one id, the delimiter's
        assert answer == "Four, not 5</think>"
        assert found.state == "ok"


def test_thinking_that_starts_with_parts_of_a_blank_character_is_still_looked_at_whole(make_template: Any) -> None:
    template = make_template(marks=THINK)
    found, reasoning, _, _ = told(template, "Q", "<think>" + "\u3000" * TAIL + "</think>Four")
    assert (found.reasoning, reasoning) == (None, "")
    found, reasoning, _, _ = told(template, "Q", "<think>" + "\u3000" * TAIL + "So</think>Four")
    assert reasoning == "So"


def test_custom_delimiters_may_hold_characters_of_several_bytes(make_template: Any) -> None:
    template = make_template()
    delimiters = find_delimiters(template, "custom", "◁think▷", "◁/think▷")
    ids = template.encode("◁think▷字 und\n◁/think▷Vier<|im_end|>")
    found = split(delimiters, template, template.encode("Q"), ids, "stop")
    assert [text_of(template, ids, span) for span in (found.reasoning, found.answer)] == ["字 und", "Vier"]


def test_an_id_that_straddles_a_delimiters_edge_belongs_to_the_delimiter(make_template: Any) -> None:
    template = make_template(merges=STRADDLING)
    ids = template.encode("a\n</think>\n\nb")
    merged = template.token_id(">ĊĊ")
    found = split(find_delimiters(template, "think"), template, template.encode("<think>"), ids, "stop")
    assert merged in ids
    assert found.reasoning == (0, 2)
    assert found.answer == (ids.index(merged) + 1, len(ids))


def test_delimiters_of_several_ids_know_the_ways_they_are_spelled(make_template: Any) -> None:
    template = make_template(merges=STRADDLING)
    delimiters = find_delimiters(template, "think")
    assert delimiters is not None
    assert {template.decode(ids) for ids in delimiters.close_ids} >= {"</think>", "</think>\n", "</think>\n\n"}
    assert template.token_id(">ĊĊ") in delimiters.all_ids()


def test_auto_reads_the_family_off_vocabulary_or_template(make_template: Any) -> None:
    families = [
        find_delimiters(make_template(name=str(number), **kwargs), "auto")
        for number, kwargs in enumerate(({}, {"marks": THINK}, {"template": "{{ '</think>' }}"}, {"marks": HARMONY}))
    ]
    assert [found.family if found else None for found in families] == [None, "think", "think", "gpt-oss"]


TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"


@pytest.mark.parametrize(
    "writes",
    [
        "{{ '<|im_start|>assistant\n' }}{% if thinking is not defined or thinking %}{{ '<think>\n' }}{% endif %}",
        "{{ '<|im_start|>assistant\n<think>\n' }}",
        "<|im_start|>assistant\n<think>\n",
        "<|im_start|>assistant{% if enable_thinking %}<think>{% endif %}",
        '{{ "<|im_start|>assistant" }}{{ "\n</think>\n\n" }}',
        "{% if '</think>' in messages[0].content %}{{ raise_exception('no') }}{% endif %}",
    ],
)
def test_auto_knows_a_target_that_thinks_by_either_tag_that_its_template_writes(
    make_template: Any, writes: str
) -> None:
    found = find_delimiters(make_template(template=TURNS + writes), "auto")
    assert found is not None
    assert found.family == "think"


@pytest.mark.parametrize(
    "prose",
    [
        "{{ '<|im_start|>system\nNever write <think> or </think> in a reply.<|im_end|>\n' }}",
        "Put thoughts between <think> and </think>, \"as 'others' do\".<|im_start|>assistant\n",
        "{# opened by <think> elsewhere #}<|im_start|>assistant\n",
    ],
)
def test_a_template_that_only_mentions_the_tags_makes_no_thinking_target(make_template: Any, prose: str) -> None:
    assert find_delimiters(make_template(template=prose + TURNS), "auto") is None


def test_no_thinking_makes_the_whole_reply_the_answer(make_template: Any) -> None:
    template = make_template(marks=THINK)
    assert find_delimiters(template, "none") is None
    ids = template.encode("<think>a</think>b")
    assert split(None, template, [1], ids, "stop") == Split(None, (0, len(ids)), "ok", False)
    assert split(None, template, [1], ids, "length").state == "cut_in_answer"
    assert not opened_by_prompt(None, template, template.encode("<think>"))


def test_families_that_do_not_fit_the_tokenizer_are_refused(make_template: Any) -> None:
    template = make_template(marks=THINK)
    with pytest.raises(UserError, match="163606 and 163607"):
        find_delimiters(template, "kimi")
    with pytest.raises(UserError, match=r"expects the token <\|channel\|>"):
        find_delimiters(template, "gpt-oss")
    with pytest.raises(UserError, match="expected --think-open and --think-close"):
        find_delimiters(template, "custom", "<think>", " ")
    with pytest.raises(UserError, match="--think-close: expected --thinking custom beside it, found --thinking auto"):
        find_delimiters(template, "auto", "", "</think>")


@pytest.mark.parametrize("family", ["think", "none", "gpt-oss"])
def test_delimiters_survive_their_way_through_file_metadata(make_template: Any, family: Any) -> None:
    delimiters = find_delimiters(make_template(marks=HARMONY), family)
    assert delimiters_from_json(delimiters_json(delimiters)) == delimiters


ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("prompt", "reply", "state", "reasoning", "answer"),
    [
        ("", f"{ANALYSIS}sum<|end|>{FINAL}Four<|return|>", "ok", "sum", "Four<|return|>"),
        ("", f"{ANALYSIS}first add 3 and", "cut_in_reasoning", "first add 3 and", ""),
        ("", f"{ANALYSIS}sum<|end|><|start|>assist", "cut_in_reasoning", "sum", ""),
        ("", "<|channel|>analysis", "cut_in_reasoning", "", ""),
        ("", f"{FINAL.removeprefix('<|start|>assistant')}Four<|return|>", "ok", "", "Four<|return|>"),
        ("", "Four", "ok", "", "Four"),
        (ANALYSIS, f"sum<|end|>{FINAL}Four<|return|>", "ok", "sum", "Four<|return|>"),
        ("<|channel|>final<|message|>", "Four<|return|>", "ok", "", "Four<|return|>"),
        (
            "",
            f"{ANALYSIS}sum<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{{}}<|call|>",
            "ok",
            "sum",
            "{}<|call|>",
        ),
    ],
)
def test_gpt_oss_channels_are_reasoning_and_answer(
    make_template: Any, prompt: str, reply: str, state: str, reasoning: str, answer: str
) -> None:
    template = make_template(marks=HARMONY)
    delimiters = find_delimiters(template, "auto")
    prompt_ids = template.encode(f"<|start|>user<|message|>{ANALYSIS}<|end|><|start|>assistant{prompt}")
    ids = template.encode(reply)
    found = split(delimiters, template, prompt_ids, ids, "length" if state.startswith("cut") else "stop")
    assert found.state == state
    assert text_of(template, ids, found.reasoning) == reasoning
    assert text_of(template, ids, found.answer) == answer
    assert found.opened_by_prompt == opened_by_prompt(delimiters, template, prompt_ids) == (prompt == ANALYSIS)


@pytest.mark.slow
@pytest.mark.parametrize("before", ["So 3 + 4 = 7.", "So 3 + 4 = 7.\n", "(7)", "7 > 6 <"])
@pytest.mark.parametrize("after", ["Seven.", "\nSeven.", "\n\nSeven.", " Seven."])
def test_smollm2_replies_are_split_beside_any_neighbour(smollm2: Path, before: str, after: str) -> None:
    template = load_template(str(smollm2), {}, False)
    delimiters = find_delimiters(template, "think")
    assert delimiters is not None
    assert all(len(ids) > 1 for ids in delimiters.open_ids + delimiters.close_ids)
    for prompt, opening in (("Q<think>\n", ""), ("Q", "<think>\n")):
        ids = template.encode(f"{opening}{before}</think>{after}<|im_end|>")
        found = split(delimiters, template, template.encode(prompt), ids, "stop")
        assert text_of(template, ids, found.reasoning) == before.strip()
        assert text_of(template, ids, found.answer) == "Seven."
        assert found.opened_by_prompt == (opening == "")


@pytest.mark.parametrize("finish", ["length", "abort", "content_filter", ""])
def test_a_reply_that_the_target_did_not_end_itself_was_cut(thinker: Template, finish: str) -> None:
    found, _, answer, _ = told(thinker, "Q<think>\n", "sum\n</think>\n\nFo", finish=finish)
    assert (found.state, answer) == ("cut_in_answer", "Fo")
