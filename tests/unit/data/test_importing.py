from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.artifacts import Stage
from draftsmith.capture import sealing
from draftsmith.capture.questions import read_questions
from draftsmith.data import importing
from draftsmith.errors import UserError
from draftsmith.progress import Progress
from draftsmith.recipe import ImportSettings
from draftsmith.target.template import load_template
from draftsmith.trace import TRAINABLE, Trace, held_out, read_metadata, read_traces, supervised_rows, trace_id

THINK = ("<think>", "</think>")
HEAD = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
BODY = "{{ m.content + '<|im_end|>\\n' }}"
START = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
WITH_THOUGHTS = (
    HEAD + "{% if m.reasoning_content is defined and loop.last %}{{ '<think>\\n' + m.reasoning_content + "
    "'\\n</think>\\n\\n' }}{% endif %}" + BODY + START
)
GENERATION_TAGS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{%- generation -%}"
    "{{ m.content + '<|im_end|>\\n' }}{%- endgeneration -%}{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}"
    + START
)
OPENED = HEAD + BODY + START.replace("assistant\\n'", "assistant\\n<think>\\n'")
TOOLS = (
    HEAD + "{% for c in m.tool_calls | default([]) %}{{ c.function.name ~ c.function.arguments.t }}{% endfor %}"
    "{% if m.role == 'tool' %}{{ m.tool_call_id ~ ':' }}{% endif %}" + BODY + START
)
ALPHA = {"conversations": [{"from": "human", "value": "alpha"}, {"from": "gpt", "value": "beta"}]}


class Importing:
    """Runs the import stage on rows and looks at what it wrote."""

    def __init__(self, stage: Stage, tokenizer: Path, tmp_path: Path) -> None:
        self.stage, self.tokenizer, self.rows = stage, tokenizer, tmp_path / "rows.jsonl"

    def run(self, *rows: Any, **settings: Any) -> dict[str, Any]:
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return importing.build(self.stage, self.settings(**settings), Progress(quiet=True))

    def settings(self, **settings: Any) -> ImportSettings:
        return ImportSettings(**{"questions": str(self.rows), "tokenizer": str(self.tokenizer), **settings})

    def traces(self, states: frozenset[str] = TRAINABLE | {"rejected", "failed"}) -> list[Trace]:
        return list(read_traces(self.stage.work, states))

    def texts(self, trace: Trace) -> tuple[str, str]:
        template = load_template(str(self.tokenizer), {}, False)
        return template.decode(trace.prompt_ids), template.decode(trace.generated_ids)


@pytest.fixture
def importer(make_tokenizer: Any, make_stage: Any, tmp_path: Path) -> Any:
    """`Importing` with a tokenizer made of the given arguments."""
    return lambda **kwargs: Importing(make_stage("traces"), make_tokenizer(**kwargs), tmp_path)


@pytest.mark.parametrize("template", [HEAD + BODY + START, GENERATION_TAGS], ids=["plain", "generation tags"])
def test_the_mask_covers_just_the_recorded_answer_with_and_without_generation_tags(
    importer: Any, template: str
) -> None:
    # P18
    stage = importer(template=template)
    counts = stage.run(ALPHA)
    (trace,) = stage.traces()
    assert stage.texts(trace) == ("<|im_start|>user\nalpha<|im_end|>\n<|im_start|>assistant\n", "beta<|im_end|>")
    rows = supervised_rows(len(trace.prompt_ids), len(trace.prompt_ids) + len(trace.generated_ids))
    assert len(rows) == len(trace.generated_ids) - 1
    assert (trace.state, trace.source, trace.ids_source) == ("ok", "static", "rendered")
    assert (counts["ok"], counts["generated_tokens"]) == (1, 5)


def test_an_answer_without_anything_to_learn_is_rejected_by_name(importer: Any) -> None:
    # P18: a mask of all zeros, and one of all ones
    stage = importer(template="{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match=r"none of 1 rows holds an answer .*too short"):
        stage.run({"prompt": "<|im_end|>", "response": "<|im_end|>"})


def test_rows_without_an_answer_are_rejected_and_counted(importer: Any) -> None:
    stage = importer()
    counts = stage.run({"prompt": "A"}, {"prompt": "B", "response": " "}, ALPHA)
    assert (counts["traces"], counts["ok"], counts["rejected"]) == (3, 1, 2)
    assert counts["reasons"] == {"no recorded answer": 2}
    assert [(t.state, t.error) for t in stage.traces()][:2] == [("rejected", "no recorded answer")] * 2


def test_a_row_that_cannot_be_asked_is_rejected_and_the_others_are_imported(importer: Any) -> None:
    stage = importer(template=HEAD + BODY + START)
    picture = {"prompt": [{"type": "image_url"}], "response": "a cat"}
    counts = stage.run(ALPHA, picture, {"prompt": "gamma", "response": "delta"})
    assert (counts["ok"], counts["rejected"]) == (2, 1)
    (bad,) = stage.traces(frozenset({"rejected"}))
    assert bad.error.startswith("unusable question: ") and "line 2: holds a part of type 'image_url'" in bad.error


def test_template_options_of_a_row_shape_its_own_prompt(importer: Any) -> None:
    opening = START.replace("assistant\\n'", "assistant\\n' + (mark or '')")
    stage = importer(template=HEAD + BODY + opening)
    stage.run(ALPHA, {"prompt": "gamma", "response": "delta", "chat_template_kwargs": {"mark": "!"}})
    plain, marked = stage.traces()
    assert stage.texts(plain)[0].endswith("assistant\n")
    assert stage.texts(marked)[0].endswith("assistant\n!")
    assert json.loads(marked.sampling)["template_options"] == {"mark": "!"}


def test_a_dataset_without_any_answer_is_refused(importer: Any) -> None:
    with pytest.raises(UserError, match=r"none of 2 rows holds an answer to learn from \(no recorded answer\)"):
        importer().run({"prompt": "A"}, {"prompt": "B"})


def test_each_recorded_turn_is_a_trace_and_none_trains_on_a_stripped_turn(importer: Any) -> None:
    # P22: the template shows thinking in the last turn only
    stage = importer(template=WITH_THOUGHTS, marks=THINK)
    answers = [{"role": "assistant", "content": f"A{i}", "reasoning_content": f"T{i}"} for i in (1, 2)]
    users = [{"role": "user", "content": f"Q{i}"} for i in (1, 2)]
    stage.run({"messages": [users[0], answers[0], users[1], answers[1]]})
    first, second = stage.traces()
    assert stage.texts(first)[1] == "<think>\nT1\n</think>\n\nA1<|im_end|>"
    prompt, generated = stage.texts(second)
    assert "A1" in prompt
    assert "T1" not in prompt
    assert generated == "<think>\nT2\n</think>\n\nA2<|im_end|>"
    assert [(t.reasoning, t.answer) for t in (first, second)] == [("T1", "A1"), ("T2", "A2")]
    assert [t.trace_id for t in (first, second)] == [trace_id(first.question_key, turn, 0) for turn in (0, 1)]


def test_a_prompt_that_opens_the_thinking_is_followed_by_the_recorded_text(importer: Any) -> None:
    # P07: the template writes a finished turn otherwise than it starts a reply
    stage = importer(template=OPENED, marks=THINK)
    turn = {"role": "assistant", "content": "Four", "reasoning_content": "two and two"}
    stage.run(
        {"messages": [{"role": "user", "content": "Q"}, turn]}, {"prompt": "R", "response": "<think>so</think>Five"}
    )
    first, second = stage.traces()
    assert stage.texts(first)[0].endswith("<|im_start|>assistant\n<think>\n")
    assert stage.texts(first)[1] == "two and two\n</think>\n\nFour<|im_end|>"
    assert stage.texts(second)[1] == "so</think>Five<|im_end|>"
    assert [(t.reasoning, t.answer, t.state) for t in (first, second)] == [
        ("two and two", "Four", "ok"),
        ("so", "Five", "ok"),
    ]
    assert json.loads(first.sampling)["prompt_opened_thinking"] is True


def test_a_plain_answer_after_a_prompt_that_opens_thinking_is_an_answer_and_not_cut(importer: Any) -> None:
    stage = importer(template=OPENED, marks=THINK)
    counts = stage.run(ALPHA)
    (trace,) = stage.traces()
    assert (counts["ok"], counts["cut_in_reasoning"], counts["with_reasoning"]) == (1, 0, 0)
    assert (trace.reasoning_span, trace.answer_span) == (None, (0, len(trace.generated_ids)))
    assert (trace.reasoning, trace.answer) == ("", "beta")


def test_prompt_ids_are_what_serving_sends_even_where_the_text_would_merge_across_the_boundary(importer: Any) -> None:
    stage = importer(template="{% for m in messages %}{{ m.content }}{% endfor %}", merges=[("a", "b")])
    stage.run({"prompt": "a", "response": "bc<|im_end|>"})
    (trace,) = stage.traces()
    template = load_template(str(stage.tokenizer), {}, False)
    assert list(trace.prompt_ids) == template.render([{"role": "user", "content": "a"}])
    assert template.decode(trace.generated_ids) == "bc<|im_end|>"


def test_a_template_that_ends_no_turn_gets_the_stop_id(importer: Any) -> None:
    stage = importer(template="{% for m in messages %}{{ m.content + '\\n' }}{% endfor %}")
    stage.run(ALPHA)
    assert stage.texts(stage.traces()[0])[1] == "beta<|im_end|>"


def test_the_preamble_and_the_rows_system_text_stand_before_every_question(importer: Any) -> None:
    stage = importer()
    example = [{"role": "user", "content": "E"}, {"role": "assistant", "content": "F"}]
    stage.run({"prompt": "Q", "response": "A", "system": "S"}, preamble=example)
    (trace,) = stage.traces()
    roles = [(turn["role"], turn["content"]) for turn in json.loads(trace.messages)]
    assert roles == [("system", "S"), ("user", "E"), ("assistant", "F"), ("user", "Q")]
    assert stage.texts(trace)[0].startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nE")


def test_tool_turns_reach_the_template_and_both_turns_are_traces(importer: Any) -> None:
    # P24
    stage = importer(template=TOOLS)
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"t": 1}'}}
    turns = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "9"},
        {"role": "assistant", "content": "Nine"},
    ]
    stage.run({"messages": turns})
    first, second = stage.traces()
    assert stage.texts(first)[1] == "clock1<|im_end|>"
    assert "clock1<|im_end|>\n<|im_start|>tool\nc1:9<|im_end|>" in stage.texts(second)[0]
    assert stage.texts(second)[1] == "Nine<|im_end|>"


def test_a_conversation_the_template_refuses_is_rejected_and_the_others_go_on(importer: Any) -> None:
    stage = importer(
        template="{% if messages[0].content == 'X' %}{{ raise_exception('no') }}{% endif %}" + HEAD + BODY + START
    )
    counts = stage.run({"prompt": "X", "response": "A"}, ALPHA)
    assert (counts["ok"], counts["rejected"]) == (1, 1)
    assert counts["reasons"] == {"template refused": 1}


def test_duplicates_are_samples_of_one_question_even_with_other_answers(importer: Any) -> None:
    # P15
    stage = importer()
    stage.run({"prompt": "Q", "response": "A"}, {"prompt": "Q", "response": "B"})
    first, second = stage.traces()
    assert first.question_key == second.question_key
    assert [(t.sample, t.answer) for t in (first, second)] == [(0, "A"), (1, "B")]
    assert first.trace_id != second.trace_id


def test_the_same_questions_are_held_out_as_when_they_are_captured(importer: Any) -> None:
    stage = importer()
    stage.run(*({"prompt": f"Q{i}", "response": "A"} for i in range(30)))
    asked = {question.key for question in read_questions(stage.settings()) if held_out(question.key, 0.5)}
    assert {t.question_key for t in stage.traces() if held_out(t.question_key, 0.5)} == asked


def test_many_traces_are_written_in_parts_and_a_second_attempt_writes_the_same(
    importer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "PART_ROWS", 4)
    stage = importer()
    rows = [{"prompt": f"Q{i}", "response": f"A{i}"} for i in range(9)]
    stage.run(*rows)
    names = sorted(path.name for path in stage.stage.work.glob("*.parquet"))
    before = stage.traces()
    stage.run(*rows)
    assert names == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    assert stage.traces() == before
    assert [t.answer for t in before] == [f"A{i}" for i in range(9)]


def test_file_metadata_says_what_the_later_stages_need(importer: Any) -> None:
    stage = importer(marks=THINK, config={"vocab_size": 300})
    stage.run(ALPHA, held_out=0.25, template_options={"thinking": True})
    metadata = read_metadata(stage.stage.work)
    assert all(isinstance(value, str) for value in metadata.values())
    assert (metadata["source_kind"], metadata["held_out"], metadata["vocab_size"]) == ("static", "0.25", "300")
    assert json.loads(metadata["stop_ids"]) == [259]
    assert json.loads(metadata["special_ids"]) == [256, 257, 258, 259]
    assert json.loads(metadata["template_options"]) == {"thinking": True}
    assert json.loads(metadata["delimiters"])["close_ids"] == [[261]]


def test_import_without_a_tokenizer_says_which_flag_is_missing(importer: Any) -> None:
    with pytest.raises(UserError, match="give --tokenizer DIR"):
        importer().run(ALPHA, tokenizer=None)


@pytest.mark.slow
def test_human_written_answers_become_traces_of_smollm2(smollm2: Path, make_stage: Any, tmp_path: Path) -> None:
    stage = Importing(make_stage("traces"), smollm2, tmp_path)
    answer = "There are 3 * 4 = 12 pens.\n#### 12"
    stage.run({"prompt": "Tom has 3 boxes with 4 pens each.", "response": answer}, template_options={"thinking": False})
    (trace,) = stage.traces()
    template = load_template(str(smollm2), {"thinking": False}, False)
    assert template.decode(trace.generated_ids) == f"{answer}<|im_end|>"
    assert (trace.answer, trace.state, trace.reasoning_span) == (answer, "ok", None)
