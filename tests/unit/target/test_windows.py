"""Texts in ids: the quick way and the one without assumptions find the same run."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
from test_spelling import byte_level

from draftsmith.target.spelling import spelling
from draftsmith.target.windows import STRIDE, Decoded, Joined, Windows

PIECES = ["a", "<", "th", "ink>", ">", "</", "think", ">a", "\u5b57", "<th", "/", ""]


def both(ids: list[int]) -> tuple[Windows, Windows]:
    table = [piece.encode() for piece in PIECES]
    found = [table[index] for index in ids]
    return Joined(b"".join(found), [*accumulate(map(len, found), initial=0)]), Decoded(
        ids, lambda some: "".join(PIECES[index] for index in some)
    )


@pytest.mark.parametrize("text", ["</think>", "<think>", "a", "\u5b57<"])
def test_both_ways_find_the_same_run(text: str) -> None:
    draw = random.Random(text)
    found = 0
    for _ in range(600):
        ids = draw.choices(range(len(PIECES)), k=draw.randrange(0, 60))
        start, stop = sorted(draw.choices(range(len(ids) + 1), k=2)) if draw.random() < 0.5 else (0, len(ids))
        quick, plain = (windows.first(text, start, stop) for windows in both(ids))
        assert quick == plain
        assert both(ids)[0].text(start, stop) == both(ids)[1].text(start, stop)
        found += quick is not None
    assert found > 10


def test_a_text_across_strides_is_found_whole() -> None:
    for before in range(STRIDE - 3, STRIDE + 1):
        ids = [0] * before + [5, 6, 4] + [0] * STRIDE
        assert [windows.first("</think>", 0, len(ids)) for windows in both(ids)] == [(before, before + 3)] * 2


def test_ids_beyond_the_vocabulary_are_searched_as_the_tokenizer_decodes_them() -> None:
    spelt = spelling(byte_level())
    ids = [*spelt.encode("x<think>y"), 10_000_000]
    assert isinstance(spelt.search(ids), Decoded)
    at = spelt.search(ids).first("<think>", 0, len(ids))
    assert at == spelt.search(ids[:-1]).first("<think>", 0, len(ids) - 1) == (1, 2)


def test_nothing_stands_in_no_ids() -> None:
    assert spelling(byte_level()).search([]).first("a", 0, 0) is None
