"""Traces cut into stretches by what each id is to the draft."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models

from draftsmith.report.coloured import PROMPT_TAIL, RUN_HEAD, RUN_TAIL, show
from draftsmith.trace import Trace


def letters(ids: list[int]) -> str:
    return "".join(chr(index) for index in ids)


def trace(prompt: str, generated: str, **spans: tuple[int, int]) -> Trace:
    return Trace(
        trace_id="t",
        question_key="q",
        prompt_ids=[ord(letter) for letter in prompt],
        generated_ids=[ord(letter) for letter in generated],
        **spans,
    )


def test_prompt_and_first_generated_id_are_unsupervised_the_rest_is_by_span() -> None:
    shown = show(trace("ask", "oTHINKcANS", reasoning_span=(1, 6), answer_span=(7, 10)), letters)
    assert [(stretch.role, stretch.text) for stretch in shown.stretches] == [
        ("prompt", "ask"),
        ("first", "o"),
        ("reasoning", "THINK"),
        ("delimiter", "c"),
        ("answer", "ANS"),
    ]
    assert (shown.prompt_length, shown.generated_length, shown.supervised) == (3, 10, 9)


def test_reasoning_that_starts_with_the_first_id_keeps_that_id_unsupervised() -> None:
    shown = show(trace("a", "THINK", reasoning_span=(0, 5)), letters)
    assert [(s.role, s.text) for s in shown.stretches] == [("prompt", "a"), ("first", "T"), ("reasoning", "HINK")]


def test_a_reply_without_reasoning_is_all_answer() -> None:
    shown = show(trace("a", "YES", answer_span=(0, 3)), letters)
    assert [stretch.role for stretch in shown.stretches] == ["prompt", "first", "answer"]


def test_long_prompts_show_their_tail_and_long_spans_their_ends() -> None:
    long = RUN_HEAD + RUN_TAIL + 7
    shown = show(trace("p" * (PROMPT_TAIL + 5), "o" + "r" * long, reasoning_span=(1, 1 + long)), letters)
    assert [(stretch.role, len(stretch.text)) for stretch in shown.stretches if stretch.role != "left_out"] == [
        ("prompt", PROMPT_TAIL),
        ("first", 1),
        ("reasoning", RUN_HEAD),
        ("reasoning", RUN_TAIL),
    ]
    assert [s.text for s in shown.stretches if s.role == "left_out"] == ["5 ids before", "7 ids between"]


def test_a_character_cut_by_a_span_edge_is_whole_in_the_later_stretch() -> None:
    byte_ids = {symbol: index for index, symbol in enumerate(["a", "Ã", "©", "b"])}  # é is the bytes Ã ©
    tokenizer = Tokenizer(models.BPE(byte_ids, []))
    tokenizer.decoder = decoders.ByteLevel()
    cut = Trace(trace_id="t", question_key="q", prompt_ids=[0], generated_ids=[0, 1, 2, 3], answer_span=(2, 4))
    shown = show(cut, lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False))
    assert "".join(stretch.text for stretch in shown.stretches).replace("\ufffd", "") == "aaéb"
    assert shown.stretches[-1].text == "éb"


def test_without_a_tokenizer_the_text_columns_are_shown() -> None:
    shown = show(Trace(trace_id="t", question_key="q", messages="[]", reasoning="why", answer="so"), None)
    assert [(s.role, s.text) for s in shown.stretches] == [("prompt", "[]"), ("reasoning", "why"), ("answer", "so")]
