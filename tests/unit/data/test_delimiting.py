from __future__ import annotations

import numpy as np
import pytest

from draftsmith.data.delimiting import Structure, structure
from draftsmith.data.ragged import from_rows
from draftsmith.target.thinking import Delimiters

ONE = Delimiters("think", ((6,),), ((7,),), "<think>", "</think>")
MANY = Delimiters("think", ((44, 45, 46), (43, 45, 46)), ((47, 45, 46), (47, 45, 48)), "<think>", "</think>")
SPELLED = {6: [43, 45, 46], 7: [47, 45, 48]}


def looked(prompt: list[int], reply: list[int], finished: bool = True, delimiters: Delimiters = ONE) -> Structure:
    return structure(from_rows([np.array(prompt)]), from_rows([np.array(reply)]), np.array([finished]), delimiters)


def spelled(ids: list[int]) -> list[int]:
    """The same with delimiters that are several ids long."""
    return [piece for index in ids for piece in SPELLED.get(index, [index])]


def faults(found: Structure) -> set[str]:
    return {name for name, where in found.faults.items() if where.any()}


@pytest.mark.parametrize(
    ("prompt", "reply", "expected"),
    [
        ([1, 2], [6, 3, 3, 3, 7, 4, 9], set()),
        ([1, 6, 5], [3, 3, 3, 7, 4, 9], set()),
        ([1, 6, 7, 5], [4, 4, 9], set()),
        ([1, 2], [4, 4, 9], set()),
        ([1, 2], [6, 3, 3, 3, 9], {"unclosed"}),
        ([1, 6], [3, 3, 3, 9], {"unclosed"}),
        ([1, 2], [3, 3, 3, 7, 4, 9], {"unopened"}),
        ([1, 6], [6, 3, 3, 3, 7, 4, 9], {"opened_twice"}),
        ([1, 2], [6, 3, 6, 3, 3, 3, 7, 4, 9], {"opened_twice"}),
        ([1, 2], [6, 3, 3, 3, 7, 4, 7, 9], {"closed_twice"}),
        ([1, 2], [6, 5, 7, 4, 9], {"empty_pair"}),
        # P07: an empty pair, then the thinking, then a lone closing delimiter
        ([1, 2], [6, 7, 3, 3, 3, 7, 4, 9], {"empty_pair_first"}),
        ([1, 6, 7, 5], [3, 3, 3, 7, 4, 9], {"empty_pair_first"}),
    ],
)
def test_delimiters_that_do_not_pair_up_are_named(prompt: list[int], reply: list[int], expected: set[str]) -> None:
    assert faults(looked(prompt, reply)) == expected
    assert faults(looked(spelled(prompt), spelled(reply), delimiters=MANY)) == expected


def test_a_reply_that_was_cut_while_thinking_is_no_fault() -> None:
    found = looked([1, 6], [3, 3, 3], finished=False)
    assert faults(found) == set()
    assert found.reasoning.tolist() == [[0, 3]] and found.answer.tolist() == [[-1, -1]]


@pytest.mark.parametrize(
    ("prompt", "reply", "reasoning", "answer"),
    [
        ([1, 2], [6, 3, 3, 3, 3, 3, 7, 4, 9], [1, 6], [7, 9]),
        ([1, 6], [3, 3, 7, 4, 9], [0, 2], [3, 5]),
        ([1, 6, 7], [4, 4, 9], [-1, -1], [0, 3]),
        ([1, 2], [4, 4, 9], [-1, -1], [0, 3]),
        ([1, 2], [4, 4, 4, 4, 4, 4, 4, 6, 4, 9], [-1, -1], [0, 10]),
    ],
)
def test_spans_lie_between_the_delimiters(
    prompt: list[int], reply: list[int], reasoning: list[int], answer: list[int]
) -> None:
    found = looked(prompt, reply)
    assert (found.reasoning.tolist(), found.answer.tolist()) == ([reasoning], [answer])
    found = structure(
        from_rows([np.array([9]), np.array(prompt)]),
        from_rows([np.array([7, 6]), np.array(reply)]),
        np.array([True, True]),
        ONE,
    )
    assert (found.reasoning[1].tolist(), found.answer[1].tolist()) == (reasoning, answer)


def test_the_channels_of_gpt_oss_are_not_judged_by_pairs() -> None:
    channels = Delimiters("gpt-oss", ((6,),), ((7,),), "", "")
    assert looked([1], [6, 3, 7, 6, 3, 7], delimiters=channels).faults == {}
