from __future__ import annotations

import hashlib
import re

from draftsmith.capture.arithmetic import PROBLEMS, VERSION, rows
from draftsmith.capture.questions import read_questions
from draftsmith.recipe import QuestionSettings

DIGESTS = {1: "6bb0b8905dfda018b488af0abbb5133d0aabb51b189380c79147989d0b0da27a"}
"""Of all rows, by version. Rows that change need a new version, never a new digest for an old one."""


def test_the_same_questions_come_out_for_ever() -> None:
    text = "\n".join(f"{row['prompt']} {row['answer']}" for row in rows())
    assert hashlib.sha256(text.encode()).hexdigest() == DIGESTS[VERSION]


def test_there_are_many_distinct_and_varied_questions() -> None:
    prompts = [row["prompt"] for row in rows()]
    assert len(set(prompts)) == len(prompts) >= 1000
    assert len(set(PROBLEMS)) == len(PROBLEMS) >= 25
    shapes = {re.sub(r"\d+", "#", prompt) for prompt in prompts[: 4 * len(PROBLEMS)]}
    assert len(shapes) > 3.5 * len(PROBLEMS)


def test_answers_are_whole_numbers_within_reach_and_not_negative() -> None:
    assert all(0 <= int(row["answer"]) <= 1000 for row in rows())


def test_sentences_are_plain_and_end_in_a_question() -> None:
    for row in rows():
        assert row["prompt"].endswith("?")
        assert row["prompt"].isascii()
        assert "  " not in row["prompt"]
        assert not re.search(r"\b[01] [a-z]+s\b", row["prompt"])
        assert 8 <= len(row["prompt"].split()) <= 50


def test_some_answers_worked_out_by_hand() -> None:
    found = {row["prompt"]: row["answer"] for row in rows()}
    by_hand = {
        "Peter has 8 pigs and 9 cows. Each animal has 4 legs. How many legs are there?": "68",
        "Wendy is 7 years old. Zoe is 9 years older. How old will Zoe be in 4 years?": "20",
        "Ben has 18 stickers and gives half of them to cousins. Then Ben gets 12 new stickers. "
        "How many stickers does Ben have at the end?": "21",
    }
    assert by_hand.items() <= found.items()


def test_they_are_read_like_any_other_source() -> None:
    found = read_questions(QuestionSettings(questions="builtin:arithmetic", limit=40))
    assert len(found) == 40
    assert {question.source for question in found} == {"arithmetic"}
    assert [turn["role"] for turn in found[0].messages] == ["user", "assistant"]
