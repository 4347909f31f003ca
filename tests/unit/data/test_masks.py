from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from draftsmith.data.masks import (
    START_UNKNOWN,
    end_fault,
    mask_fault,
    reply_start,
    start_fault,
    supervised_spans,
)
from draftsmith.target.template import Template, load_template
from draftsmith.target.thinking import find_delimiters
from toy_chat import save_toy_tokenizer

TURNS = "<|user|>hi<|end|><|assistant|>"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    folder: Path = tmp_path_factory.mktemp("toy")
    return load_template(save_toy_tokenizer(folder), {}, False)


def row(template: Template, *texts: str) -> tuple[npt.NDArray[np.int64], list[int]]:
    """Ids of the joined texts, and where each ends."""
    ids = [template.encode(text) for text in texts]
    return np.array([index for part in ids for index in part]), np.cumsum([len(part) for part in ids]).tolist()


def test_supervised_spans_are_the_runs_of_ones() -> None:
    assert supervised_spans(np.array([0, 1, 1, 0, 1])) == [(1, 3), (4, 5)]
    assert supervised_spans(np.array([1, 0])) == [(0, 1)]
    assert supervised_spans(np.array([0, 0])) == []


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([0, 0, 0], "all zero"),
        ([1, 1, 1], "all ones"),
        ([0, 1], "2 values for 3 ids"),
        ([0, 1, 2], "holds 2"),
        ([0, 1, 1], ""),
    ],
)
def test_a_mask_that_says_nothing_about_a_boundary_is_named(mask: list[int], message: str) -> None:
    # P18
    fault = mask_fault(np.array([5, 6, 7]), np.array(mask))
    assert message in fault and bool(message) == bool(fault)


@pytest.mark.parametrize(
    ("shift", "message"),
    [(0, ""), (1, "mask starts late: 1 ids"), (-1, "mask starts early: 1 ids"), (3, "mask starts late: 3 ids")],
)
def test_a_mask_that_is_off_is_told_by_the_templates_own_header(template: Template, shift: int, message: str) -> None:
    # P20: masks are moved by the trainer, never in the file
    start = reply_start(template, None)
    assert start is not None and template.decode(start.header) == "<|assistant|>"
    ids, (boundary, end) = row(template, TURNS, "four<|end|>")
    fault = start_fault(ids, (boundary + shift, end), start)
    assert fault.startswith(message) and bool(message) == bool(fault)


def test_a_mask_over_several_turns_or_the_whole_row_covers_a_prompt(template: Template) -> None:
    start = reply_start(template, None)
    assert start is not None
    ids, ends = row(template, TURNS, "four<|end|>", f"{TURNS}five<|end|>")
    assert "covers a prompt" in start_fault(ids, (ends[0], ends[2]), start)
    ids, ends = row(template, f"<|system|>be brief<|end|>{TURNS}", "four<|end|>")
    assert "covers a prompt" in start_fault(ids, (1, ends[1]), start)


@pytest.mark.parametrize(
    ("opens", "shift", "message"),
    [
        (False, 0, ""),
        (False, 1, "mask starts after a think delimiter"),
        (False, 2, "mask starts late: 2 ids"),
        (True, 0, "mask starts on a think delimiter"),
        (True, 1, ""),
        (True, 2, "mask starts late: 2 ids"),
    ],
)
def test_a_delimiter_belongs_to_the_prompt_where_the_template_opens_it_and_else_to_the_reply(
    template: Template, opens: bool, shift: int, message: str
) -> None:
    # P07
    opening = load_template(template.name, {"prompt_opens": opens}, False)
    start = reply_start(opening, find_delimiters(opening, "think"))
    assert start is not None and len(start.scaffold) == opens
    ids, ends = row(template, TURNS, "<think>two</think>four<|end|>")
    fault = start_fault(ids, (ends[0] + shift, ends[1]), start)
    assert fault.startswith(message) and bool(message) == bool(fault)


def test_an_empty_pair_that_the_template_writes_belongs_to_the_prompt(template: Template) -> None:
    # P23
    start = reply_start(template, find_delimiters(template, "think"))
    assert start is not None
    ids, ends = row(template, TURNS, "<think>\n</think>\n", "four<|end|>")
    assert start_fault(ids, (ends[1], ends[2]), start) == ""


def test_ids_of_another_template_say_nothing_about_the_start(template: Template) -> None:
    start = reply_start(template, None)
    assert start is not None
    ids, (boundary, end) = row(template, "Question: hi Answer: ", "four")
    assert start_fault(ids, (boundary, end), start).startswith(START_UNKNOWN)


def test_a_mask_without_the_stop_id_ends_early(template: Template) -> None:
    ids, (boundary, end) = row(template, TURNS, "four<|end|>")
    assert "ends early" in end_fault(ids, (boundary, end - 1), template.stop_ids)
    assert end_fault(ids, (boundary, end), template.stop_ids) == ""
