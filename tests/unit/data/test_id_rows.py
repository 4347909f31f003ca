from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.artifacts import Stage
from draftsmith.data import importing
from draftsmith.errors import UserError
from draftsmith.progress import Progress
from draftsmith.recipe import ImportSettings
from draftsmith.target.template import Template, load_template
from draftsmith.trace import TRAINABLE, Trace, read_traces
from toy_chat import save_toy_tokenizer

QUESTION = "<|user|>how many?<|end|><|assistant|>"
REPLY = "<think>two and two</think>four<|end|>"
ALL = TRAINABLE | {"rejected", "failed"}
Import = Callable[..., list[Trace]]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return load_template(save_toy_tokenizer(tmp_path_factory.mktemp("toy")), {}, False)


@pytest.fixture
def imported(toy: Template, make_stage: Callable[[str], Stage], tmp_path: Path) -> Import:
    """The traces that rows become."""
    path = tmp_path / "rows.jsonl"

    def run(*rows: dict[str, Any], **settings: Any) -> list[Trace]:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        stage = make_stage("traces")
        values = {"questions": str(path), "tokenizer": toy.name, "thinking": "think", **settings}
        importing.build(stage, ImportSettings.model_validate(values), Progress(quiet=True))
        return list(read_traces(stage.work, ALL))

    return run


def masked(template: Template, *parts: tuple[str, int], **row: Any) -> dict[str, Any]:
    """A row of texts, each with its mask value."""
    pairs = [(index, value) for text, value in parts for index in template.encode(text)]
    return {"input_ids": [index for index, _ in pairs], "loss_mask": [value for _, value in pairs], **row}


def test_the_masks_boundary_parts_prompt_and_reply(toy: Template, imported: Import) -> None:
    (trace,) = imported(masked(toy, (QUESTION, 0), (REPLY, 1), id="a", source="theirs"))
    assert toy.decode(trace.prompt_ids) == QUESTION and toy.decode(trace.generated_ids) == REPLY
    assert (trace.state, trace.finish_reason, trace.ids_source, trace.source) == ("ok", "stop", "rendered", "theirs")
    assert (trace.reasoning, trace.answer) == ("two and two", "four")


def test_each_supervised_span_is_a_trace_with_everything_before_it_as_prompt(toy: Template, imported: Import) -> None:
    # P22
    row = masked(toy, (QUESTION, 0), (REPLY, 1), (QUESTION, 0), ("<think>one</think>one<|end|>", 1), primary_id="c")
    first, second = imported(row)
    assert toy.decode(first.prompt_ids) == QUESTION
    assert toy.decode(second.prompt_ids) == QUESTION + REPLY + QUESTION
    assert second.reasoning == "one"
    assert first.question_key == second.question_key == "c" and first.trace_id != second.trace_id


def test_ids_after_the_reply_belong_to_nobody_and_a_stop_id_there_says_that_it_ended(
    toy: Template, imported: Import
) -> None:
    (trace,) = imported(masked(toy, (QUESTION, 0), (REPLY.removesuffix("<|end|>"), 1), ("<|end|>", 0)))
    assert toy.decode(trace.generated_ids) == REPLY.removesuffix("<|end|>")
    assert (trace.state, trace.finish_reason) == ("ok", "stop")


def test_a_reply_without_an_end_was_cut(toy: Template, imported: Import) -> None:
    (trace,) = imported(masked(toy, (QUESTION, 0), ("<think>two and", 1)))
    assert (trace.state, trace.finish_reason) == ("cut_in_reasoning", "length")


def test_rows_whose_mask_is_no_boundary_are_rejected_each_with_its_reason(toy: Template, imported: Import) -> None:
    # P18, P20
    good = masked(toy, (QUESTION, 0), (REPLY, 1))
    late = masked(toy, (QUESTION + "<think>two", 0), (REPLY.removeprefix("<think>two"), 1))
    early = masked(toy, (QUESTION.removesuffix("<|assistant|>"), 0), (f"<|assistant|>{REPLY}", 1))
    traces = imported(
        good,
        masked(toy, (QUESTION + REPLY, 0)),
        masked(toy, (QUESTION + REPLY, 1)),
        good | {"loss_mask": [1]},
        late,
        early,
    )
    assert [trace.state for trace in traces] == ["ok", *["rejected"] * 5]
    words = ["all zero", "all ones", "another length", "starts late: 4", "starts early: 1"]
    for trace, word in zip(traces[1:], words, strict=True):
        assert word in trace.error


def test_rows_of_the_same_prompt_are_samples_of_one_question(toy: Template, imported: Import) -> None:
    # P15
    row = masked(toy, (QUESTION, 0), (REPLY, 1))
    one, other, third = imported(row, row, masked(toy, (QUESTION.replace("?", "!"), 0), (REPLY, 1)))
    assert (one.question_key, one.sample, other.sample) == (other.question_key, 0, 1)
    assert third.question_key != one.question_key and len({t.trace_id for t in (one, other, third)}) == 3


def test_a_row_that_holds_no_ids_among_rows_that_do_stops_the_import(toy: Template, imported: Import) -> None:
    good = masked(toy, (QUESTION, 0), (REPLY, 1))
    with pytest.raises(UserError, match="line 2: expected input_ids and loss_mask as lists of integers"):
        imported(good, {"input_ids": ["a"], "loss_mask": [1]})


def test_a_limit_counts_rows(toy: Template, imported: Import) -> None:
    row = masked(toy, (QUESTION, 0), (REPLY, 1))
    assert len(imported(row, row, row, limit=2)) == 2
