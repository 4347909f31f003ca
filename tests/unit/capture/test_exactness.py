from __future__ import annotations

from dataclasses import replace

import pytest

from draftsmith.capture.exactness import misspelled, problem, with_ids
from draftsmith.target.reply import Reply
from draftsmith.target.template import Template, load_template
from draftsmith.target.thinking import Delimiters, find_delimiters
from toy_chat import save_toy_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return load_template(save_toy_tokenizer(tmp_path_factory.mktemp("toy")), {"prompt_opens": True}, False)


@pytest.fixture(scope="module")
def delimiters(template: Template) -> Delimiters | None:
    return find_delimiters(template, "auto")


def ids_of(template: Template, delimiters: Delimiters | None, reply: Reply) -> Reply:
    return with_ids(reply, lambda: template.render(MESSAGES), template, delimiters)


def counts(template: Template, generated: str) -> dict[str, int]:
    return {
        "prompt_tokens": len(template.render(MESSAGES)),
        "completion_tokens": len(template.encode(generated)),
    }


def test_ids_from_the_engine_are_kept_and_nothing_is_rendered(template: Template) -> None:  # P06
    he, llo = template.token_id("he"), template.token_id("llo")
    reply = Reply(prompt_ids=[5], generated_ids=[he, llo], answer_text="hello")

    def never() -> list[int]:
        raise AssertionError

    assert with_ids(reply, never, template, None) is reply


@pytest.mark.parametrize(("more", "source"), [(0, "rendered_verified"), (1, "rendered")])
def test_rendered_ids_are_verified_by_both_counts_of_the_server(
    template: Template, delimiters: Delimiters | None, more: int, source: str
) -> None:
    usage = counts(template, "abc</think>Four<|end|>")
    usage["completion_tokens"] += more
    reply = ids_of(template, delimiters, Reply(reasoning_text="abc", answer_text="Four", usage=usage))
    assert template.decode(reply.generated_ids) == "abc</think>Four<|end|>"
    assert reply.ids_source == source


def test_a_prompt_of_another_length_is_not_verified(template: Template, delimiters: Delimiters | None) -> None:
    usage = counts(template, "abc</think>Four<|end|>")
    usage["prompt_tokens"] += 1
    reply = ids_of(template, delimiters, Reply(reasoning_text="abc", answer_text="Four", usage=usage))
    assert reply.ids_source == "rendered"


def test_tokens_of_the_servers_logprobs_verify_more_than_a_count(template: Template) -> None:  # P06
    usage = counts(template, "hello<|end|>")
    alike = Reply(answer_text="hello", spelled=[*"hello", "<|end|>"], usage=usage)
    assert ids_of(template, None, alike).ids_source == "rendered_verified"
    other = Reply(answer_text="hello", spelled=["he", "l", "l", "o", "", "<|end|>"], usage=usage)
    assert ids_of(template, None, other).ids_source == "rendered"


def test_a_mismatch_is_shown_at_its_first_differing_token(template: Template) -> None:
    ids = template.encode("hello<|end|>")
    assert misspelled(list("hello"), ids, template) == ""
    assert misspelled([*"hello", ""], ids, template) == ""  # llama.cpp writes a stop token as nothing
    assert misspelled(["h", "e", "llo"], ids, template) == f"at token 2 the server has 'llo', we have {ids[2]} 'l'"
    assert misspelled(["h"], ids, template) == f"at token 1 the server has nothing more, we have {ids[1]} 'e'"
    assert (
        misspelled([*"hello", "<|end|>", "x"], ids, template) == "at token 6 the server has 'x', we have nothing more"
    )


def test_a_part_of_a_character_is_not_held_against_its_token(make_template: object) -> None:
    bytes_template: Template = make_template()  # type: ignore[operator]
    ids = bytes_template.encode("é")
    assert len(ids) == 2
    assert misspelled(["\\xc3", "\\xa9"], ids, bytes_template) == ""


def test_what_is_not_exact_enough_says_where_the_tokens_part(template: Template) -> None:
    usage = counts(template, "hello<|end|>")
    reply = ids_of(template, None, Reply(answer_text="hello", spelled=["hello"], usage=usage))
    found = problem(reply, template, "verified", None, opened=False)
    assert found.startswith("ids not exact: the server gave no token ids")
    assert "at token 0 the server has 'hello'" in found
    assert problem(reply, template, "any", None, opened=False) == ""


def test_generated_ids_without_prompt_ids_are_verified_by_the_prompts_count(template: Template) -> None:
    ids = template.encode("hello<|end|>")
    for more, source in ((0, "rendered_verified"), (1, "rendered")):
        usage = {"prompt_tokens": len(template.render(MESSAGES)) + more}
        reply = ids_of(template, None, Reply(generated_ids=ids, usage=usage))
        assert (reply.generated_ids, reply.ids_source) == (ids, source)


def test_what_the_tokens_spell_is_taken_before_what_a_parser_made_of_it(
    template: Template, delimiters: Delimiters | None
) -> None:
    said = "a\n</think>\n\nFour<|end|>"  # parsers lose newlines beside the delimiter
    spelled = [template.decode([index]) for index in template.encode(said)]
    usage = counts(template, said)
    reply = Reply(reasoning_text="a", answer_text="Four", spelled=spelled, usage=usage)
    found = ids_of(template, delimiters, reply)
    assert (template.decode(found.generated_ids), found.ids_source) == (said, "rendered_verified")
    unread = ids_of(template, delimiters, replace(reply, reasoning_text=None))
    assert problem(unread, template, "verified", delimiters, opened=True) == ""
    raw = replace(reply, spelled=[f"_{token}" for token in spelled])  # pieces as the vocabulary writes them
    assert template.decode(ids_of(template, delimiters, raw).generated_ids) == "a</think>Four<|end|>"
