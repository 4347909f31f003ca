from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from draftsmith.capture.quality import faults, likeness, loops
from draftsmith.target.thinking import Delimiters
from draftsmith.trace import Trace

THINK = Delimiters("think", ((1,),), ((2,),), "<think>", "</think>")
SAMPLING = '{"max_tokens": 100, "template_options": {}, "prompt_opened_thinking": %s}'
OPENED, PLAIN = SAMPLING % "true", SAMPLING % "false"


def as_ids(text: str) -> list[int]:
    """Words, digits and marks as ids, about as a tokenizer splits them."""
    pieces = re.findall(r" ?[A-Za-z]+|\d|[^A-Za-z\d]", text)
    numbers = {piece: number for number, piece in enumerate(dict.fromkeys(pieces), start=10)}
    return [numbers[piece] for piece in pieces]


def long_sums() -> str:
    """Honest working: the same few phrases again and again, with new numbers each time."""
    lines, total = [], 0
    for day in range(1, 60):
        total += 3 * day
        lines.append(f"On day {day} she sells 3 * {day} = {3 * day} pens, so the total is {total} pens.")
    return "\n".join(lines)


def table() -> str:
    return "\n".join(f"| {n} | {m} | {n * m} |" for n in range(1, 13) for m in range(1, 13))


def verified_twice() -> str:
    """The same working in full, a second time, as careful models do."""
    return long_sums() + "\nWait, let me check all of it again.\n" + long_sums()


@pytest.mark.parametrize("text", [long_sums(), table(), verified_twice()], ids=["sums", "table", "verified"])
def test_honest_working_is_no_loop(text: str) -> None:
    ids = as_ids(text)
    assert len(ids) > 500
    assert not loops(ids)


@pytest.mark.parametrize("period", [1, 3, 17, 60, 150])
def test_a_reply_that_repeats_itself_to_its_end_is_a_loop(period: int) -> None:
    # P42: one token 900 times, and longer phrases
    draw = random.Random(period)
    phrase = [draw.randrange(10, 50_000) for _ in range(period)]
    start = [draw.randrange(10, 50_000) for _ in range(300)]
    assert loops([*start, *phrase * (1200 // period)])


def test_a_loop_that_counts_on_is_one_too() -> None:
    ids = [index for step in range(120) for index in (*range(100, 147), 1000 + step)]
    assert loops(ids)


def test_a_loop_that_the_target_left_again_and_a_short_reply_are_none() -> None:
    draw = random.Random(0)
    assert not loops([7] * 900 + [draw.randrange(10, 50_000) for _ in range(1024)])
    assert not loops([7] * 200)


def test_only_long_replies_of_the_same_ids_are_alike() -> None:
    def reply(*ids: int) -> Trace:
        return Trace(trace_id="t", question_key="q", generated_ids=ids)

    long = range(100, 180)
    assert likeness(reply(*long)) == likeness(reply(*long)) is not None
    assert likeness(reply(*long)) != likeness(reply(*long, 5))
    assert likeness(reply(1, 2, 3)) is None
    assert likeness(replace(reply(*long), state="rejected")) is None


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"reasoning_span": (0, 5)}, [("delimiters", "closed though nothing opened it")]),
        ({"reasoning_span": (0, 5), "sampling": OPENED}, []),
        ({"answer": "A</think>A"}, [("delimiters", "closed twice")]),
        ({"answer": "A<think>A"}, [("delimiters", "opened twice")]),
        ({"reasoning": "R<think>R"}, [("delimiters", "opened twice")]),
        ({"answer": ""}, [("empty", "nothing after the reasoning")]),
        ({"state": "cut_in_reasoning", "answer": ""}, [("delimiters", "never closed by </think>")]),
        (
            {"state": "cut_in_reasoning", "finish_reason": "length", "usage": '{"completion_tokens": 100}'},
            [("cut", "in reasoning")],
        ),
        (
            {"state": "cut_in_answer", "finish_reason": "length", "usage": '{"completion_tokens": 50}'},
            [("cut by the server", "in answer")],
        ),
        ({"reasoning_span": None, "sampling": OPENED}, [("no reasoning", "closed at once")]),
        ({"reasoning_span": None}, []),
        ({"state": "failed", "error": "HTTP 400: no"}, [("failed", "HTTP 400")]),
    ],
)
def test_what_is_wrong_with_a_trace_is_named(changes: dict[str, Any], found: list[tuple[str, str]]) -> None:
    trace = Trace(
        trace_id="t",
        question_key="q",
        generated_ids=[1, 5, 6, 2, 7, 3],
        finish_reason="stop",
        reasoning_span=(1, 3),
        reasoning="R",
        answer="A",
        sampling=PLAIN,
    )
    assert list(faults(replace(trace, **changes), THINK)) == found


def test_channels_may_hold_several_messages_of_reasoning() -> None:
    channels = Delimiters("gpt-oss", ((8, 9),), ((4,),), "<|channel|>analysis<|message|>", "<|end|>")
    several = Trace(
        trace_id="t",
        question_key="q",
        finish_reason="stop",
        reasoning_span=(0, 9),
        reasoning="one<|end|><|start|>assistant<|channel|>analysis<|message|>two",
        answer="A",
        sampling=PLAIN,
    )
    assert list(faults(several, channels)) == []
