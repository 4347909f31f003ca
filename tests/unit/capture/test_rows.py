from __future__ import annotations

from typing import Any

import pytest

from draftsmith.capture.rows import BadRow, Question, question_of


def ask(**row: Any) -> Question:
    return question_of("rows.jsonl: line 3", row, "rows")


def refused(**row: Any) -> BadRow:
    with pytest.raises(BadRow) as bad:
        ask(**row)
    return bad.value


IMAGE = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:..."}}]
SOUND = [{"type": "input_audio", "input_audio": {"data": "..."}}]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [{"role": "user", "content": IMAGE}]}, "turn 1: holds a part of type 'image_url'"),
        ({"prompt": SOUND}, "holds a part of type 'input_audio'"),
        ({"messages": [{"role": "system", "content": "S"}]}, "expected at least one user turn, found none"),
        ({"messages": [{"role": "narrator", "content": "A"}]}, "turn 1: unknown role 'narrator'"),
        ({"prompt": ""}, "expected a prompt, found an empty one"),
        ({"text": "A"}, "unknown schema"),
    ],
)
def test_a_row_that_cannot_be_asked_keeps_its_place_and_its_reason(row: dict[str, Any], reason: str) -> None:
    bad = refused(**row, source="mine")
    assert str(bad).startswith(f"rows.jsonl: line 3: {reason}")
    assert bad.question.problem == str(bad)
    assert (bad.question.source, bad.question.messages) == ("mine", ())


def test_what_is_kept_of_a_bad_row_is_known_by_its_content() -> None:
    first, again, other = (refused(text=text).question for text in ("A", "A", "B"))
    assert first.key == again.key != other.key
    assert len(first.key) == 24


def test_text_parts_are_joined_as_engines_join_them() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}, "three"]
    assert ask(messages=[{"role": "user", "content": parts}]).messages[0]["content"] == "one\ntwo\nthree"


# a row's own sampling values


def test_values_are_read_from_a_column_of_their_own_or_from_columns_of_their_names() -> None:
    wanted = {"temperature": 0.5, "top_k": 20, "max_tokens": 64, "seed": 7, "top_p": 0.9}
    assert ask(prompt="A", sampling=wanted).sampling == wanted
    assert ask(prompt="A", **wanted).sampling == wanted
    assert ask(prompt="A", sampling='{"seed": 1}', temperature=1).sampling == {"seed": 1, "temperature": 1.0}
    assert ask(prompt="A", sampling={"seed": None}, temperature=None).sampling == {}


def test_they_are_part_of_the_question_only_where_they_are_there() -> None:
    plain = ask(prompt="A").key
    assert ask(prompt="A", sampling={}, seed=None, chat_template_kwargs={}).key == plain
    hot, hotter = ask(prompt="A", temperature=1).key, ask(prompt="A", temperature=1.5).key
    assert len({plain, hot, hotter}) == 3
    assert ask(prompt="A", sampling={"temperature": 1.0}).key == hot
    assert ask(prompt="A", chat_template_kwargs={"enable_thinking": False}).key not in (plain, hot)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"sampling": {"temprature": 1}}, "column sampling: unknown name 'temprature'; known: temperature, top_p"),
        ({"sampling": "hot"}, "column sampling: expected names and values, found 'hot'"),
        ({"temperature": "hot"}, "temperature: expected a number from 0, found 'hot'"),
        ({"temperature": -0.1}, "temperature: expected a number from 0, found -0.1"),
        ({"temperature": float("nan")}, "temperature: expected a number from 0, found nan"),
        ({"temperature": True}, "temperature: expected a number from 0, found True"),
        ({"top_p": 0}, "top_p: expected a number above 0, at most 1, found 0"),
        ({"top_p": 1.5}, "top_p: expected a number above 0, at most 1, found 1.5"),
        ({"top_k": -1}, "top_k: expected a whole number from 0"),
        ({"max_tokens": 0}, "max_tokens: expected a whole number from 1, found 0"),
        ({"max_tokens": 10.5}, "max_tokens: expected a whole number from 1, found 10.5"),
        ({"seed": float("inf")}, "seed: expected a whole number from 0, found inf"),
    ],
)
def test_values_that_are_none_are_refused_by_name(columns: dict[str, Any], reason: str) -> None:
    assert f"rows.jsonl: line 3: {reason}" in str(refused(prompt="A", **columns))


def test_whole_numbers_that_parquet_made_floats_are_whole_numbers() -> None:
    found = ask(prompt="A", max_tokens=64.0).sampling
    assert found == {"max_tokens": 64} and isinstance(found["max_tokens"], int)


# a row's own template options


def test_template_options_of_a_row_are_its_own() -> None:
    assert ask(prompt="A", chat_template_kwargs={"enable_thinking": False}).template_options == {
        "enable_thinking": False
    }
    assert ask(prompt="A", chat_template_kwargs='{"thinking": true}').template_options == {"thinking": True}


@pytest.mark.parametrize(("options", "reason"), [({"tokenize": False}, "sets tokenize itself"), ([1], "found [1]")])
def test_options_that_are_not_a_rows_to_set_are_refused(options: Any, reason: str) -> None:
    assert reason in str(refused(prompt="A", chat_template_kwargs=options))
