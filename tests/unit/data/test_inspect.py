from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest

from draftsmith.artifacts import write_json
from draftsmith.capture.journal import Journal
from draftsmith.data.inspect import Inspection, inspect
from draftsmith.errors import UserError
from draftsmith.progress import Progress
from draftsmith.recipe import InspectSettings
from draftsmith.target.template import Template, load_template
from draftsmith.target.thinking import delimiters_json, find_delimiters, split, text_of
from draftsmith.trace import Trace, write_traces
from toy_chat import save_toy_tokenizer

QUESTION = "<|user|>how many?<|end|><|assistant|>"
REPLY = "<think>two and two</think>four<|end|>"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return load_template(save_toy_tokenizer(tmp_path_factory.mktemp("toy")), {}, False)


def trace_of(template: Template, number: int, prompt: str = QUESTION, reply: str = REPLY, **changes: Any) -> Trace:
    prompt_ids = template.encode(prompt.replace("many", f"many {number}"))
    generated = template.encode(reply.replace("four", f"four {number}"))
    parts = split(find_delimiters(template, "think"), template, prompt_ids, generated, "stop")
    trace = Trace(
        trace_id=f"trace-{number}",
        question_key=f"question-{number}",
        prompt_ids=prompt_ids,
        generated_ids=generated,
        finish_reason="stop",
        state=parts.state,
        reasoning_span=parts.reasoning,
        answer_span=parts.answer,
        reasoning=text_of(template, generated, parts.reasoning),
        answer=text_of(template, generated, parts.answer),
    )
    return replace(trace, **changes)


def save(folder: Path, template: Template, traces: Sequence[Trace], **metadata: str) -> Path:
    folder.mkdir(parents=True)
    about = {
        "tokenizer": template.name,
        "tokenizer_fingerprint": template.tokenizer_fingerprint,
        "delimiters": delimiters_json(find_delimiters(template, "think")),
        "stop_ids": json.dumps(sorted(template.stop_ids)),
        "vocab_size": str(template.vocab_size),
    }
    for part, start in enumerate(range(0, len(traces), 7)):
        write_traces(folder / f"part-{part:05}.parquet", traces[start : start + 7], about | metadata)
    return folder


def look(path: Path, **settings: Any) -> Inspection:
    return inspect(path, InspectSettings(**settings), Progress(quiet=True))


def counts(inspection: Inspection) -> dict[str, int]:
    return {finding.check: finding.count for finding in inspection.findings}


def masked(template: Template, prompt: str = QUESTION, reply: str = REPLY, **row: Any) -> dict[str, Any]:
    before, after = template.encode(prompt), template.encode(reply)
    return {"input_ids": before + after, "loss_mask": [0] * len(before) + [1] * len(after), **row}


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def test_clean_traces_are_ready_to_train_on(toy: Template, tmp_path: Path) -> None:
    traces = [trace_of(toy, number) for number in range(20)]
    run = tmp_path / "run"
    save(run / "traces", toy, traces)
    for path in (run, run / "traces"):
        found = look(path)
        assert found.verdict == "ready to train on: 20 replies, nothing wrong found"
        assert (found.rows, found.trainable, found.findings) == (20, 20, [])
    assert found.shares["ids_source"] == {"engine": 20}
    assert found.lengths["reasoning"]["p50"] == len("two and two")
    assert found.lengths["generated"]["sum"] == sum(len(trace.generated_ids) for trace in traces)
    assert len(found.examples) == 3 and {trace.trace_id for trace in found.examples} <= {t.trace_id for t in traces}
    assert json.loads(json.dumps(found.as_json()))["verdict"] == found.verdict


def test_each_fault_of_traces_is_counted_with_the_rows_it_is_about(toy: Template, tmp_path: Path) -> None:
    good = [trace_of(toy, number) for number in range(10)]
    broken = [
        trace_of(toy, 21, reply="<think></think>two and two</think>four<|end|>"),  # P07
        trace_of(toy, 22, reply="<think>two and two<|end|>", state="ok"),
        trace_of(toy, 23, generated_ids=[9], reasoning_span=None, answer_span=None, reasoning="", answer=""),
        trace_of(toy, 24, prompt_ids=[]),
        trace_of(toy, 25, answer_span=(3, 999), answer=""),
        trace_of(toy, 26, generated_ids=[*toy.encode(REPLY.replace("four", "four 26")), 100_000]),
        trace_of(toy, 27, state="rejected", error="ids not exact: none"),
        trace_of(toy, 28, state="failed", error="http_500: broken"),
        trace_of(toy, 29, ids_source="rendered"),
        trace_of(toy, 0),
    ]
    folder = save(tmp_path / "traces", toy, good + broken, special_ids="[5]")
    found = counts(look(folder))
    assert found["empty_pair_first"] == found["unclosed"] == found["too_short"] == found["no_prompt"] == 1
    assert found["bad_span"] == found["beyond_vocabulary"] == found["rejected"] == found["failed"] == 1
    assert found["not_verified"] == found["doubled_id"] == 1
    named = {finding.check: finding.rows for finding in look(folder).findings}
    assert named["no_prompt"] == ["trace-24"]
    assert look(folder).shares["reason"] == {"ids not exact": 1, "http_500": 1}


def test_bos_twice_is_seen_by_the_special_ids_the_traces_name(toy: Template, tmp_path: Path) -> None:
    # P09
    traces = [replace(trace_of(toy, 0), prompt_ids=[5, 5, 9]), replace(trace_of(toy, 1), prompt_ids=[9, 9, 5])]
    folder = save(tmp_path / "traces", toy, traces, special_ids="[5]", tokenizer="", tokenizer_fingerprint="")
    found = {finding.check: finding.rows for finding in look(folder).findings}
    assert found["doubled_bos"] == ["trace-0"]


def test_the_worst_is_said_first_and_a_few_wrong_rows_leave_the_rest_usable(toy: Template, tmp_path: Path) -> None:
    traces = [trace_of(toy, number) for number in range(40)]
    few = save(tmp_path / "few", toy, [*traces, trace_of(toy, 50, prompt_ids=[])])
    assert look(few).verdict.startswith("usable without the rows that are wrong: 1 of 41: no prompt ids")
    many = save(tmp_path / "many", toy, [*traces[:4], *(trace_of(toy, n, prompt_ids=[]) for n in range(50, 60))])
    assert look(many).verdict.startswith("not fit to train on: 10 of 14: no prompt ids")


def test_replies_that_nearly_repeat_others_are_told_by_whether_the_prompt_is_the_same(
    toy: Template, tmp_path: Path
) -> None:
    long = "<think>" + "".join(chr(97 + (i * i + i // 7) % 26) for i in range(300)) + "</think>done<|end|>"
    traces = [trace_of(toy, 0, reply=long), trace_of(toy, 1, reply=long), trace_of(toy, 2)]
    again = replace(trace_of(toy, 0, reply=long), trace_id="again", sample=1)
    found = {finding.check: finding.rows for finding in look(save(tmp_path / "t", toy, [*traces, again])).findings}
    assert (found["alike_elsewhere"], found["alike_here"]) == (["trace-1"], ["again"])


def test_a_reply_that_loops_is_found(toy: Template, tmp_path: Path) -> None:
    # P42
    traces = [trace_of(toy, 0), trace_of(toy, 1, reply="<think>" + "so it is. " * 40 + "</think>four<|end|>")]
    assert counts(look(save(tmp_path / "t", toy, traces)))["loops"] == 1


def test_the_longest_replies_and_the_same_examples_for_the_same_seed(toy: Template, tmp_path: Path) -> None:
    traces = [trace_of(toy, n, reply=f"<think>{'abc' * (1 + n % 13)}</think>four<|end|>") for n in range(30)]
    folder = save(tmp_path / "t", toy, traces)
    found = look(folder, longest=2, examples=4, seed=3)
    assert [name for _, name in found.longest] == ["trace-12", "trace-25"]
    assert [t.trace_id for t in found.examples] == [t.trace_id for t in look(folder, examples=4, seed=3).examples]
    assert [t.trace_id for t in found.examples] != [t.trace_id for t in look(folder, examples=4, seed=4).examples]


def test_text_that_would_tokenise_to_other_ids_is_noted_and_text_columns_are_held_against_the_ids(
    toy: Template, tmp_path: Path
) -> None:
    # P06: the engine wrote he + llo, the text tokenises letter by letter
    odd = trace_of(toy, 0, reply="x")
    merged = [toy.tokenizer.convert_tokens_to_ids(token) for token in ("he", "llo")]
    odd = replace(odd, generated_ids=[*merged, 5], answer_span=(0, 3), answer="hello")
    lying = trace_of(toy, 1, answer="five")
    found = {f.check: (f.count, f.of) for f in look(save(tmp_path / "t", toy, [odd, lying, trace_of(toy, 2)])).findings}
    assert found["retokenised"] == (1, 3) and found["text_differs"] == (1, 3)


def test_another_tokenizer_than_the_traces_is_the_first_thing_said(
    toy: Template, make_tokenizer: Any, tmp_path: Path
) -> None:
    folder = save(tmp_path / "t", toy, [trace_of(toy, 0)])
    found = look(folder, tokenizer=str(make_tokenizer(name="other")))
    assert "another tokenizer" in found.verdict


def test_speculators_rows_are_held_against_the_template(toy: Template, tmp_path: Path) -> None:
    # P18, P20
    good = [masked(toy, QUESTION.replace("many", f"many {n}"), id=f"good-{n}") for n in range(3)]
    early, late = masked(toy, id="early"), masked(toy, id="late")
    boundary = early["loss_mask"].index(1)
    early["loss_mask"][boundary - 1] = 1
    delimiter = masked(toy, id="delimiter")
    late["loss_mask"][boundary : boundary + 2] = [0, 0]
    delimiter["loss_mask"][boundary] = 0
    zero = masked(toy, id="zero") | {"loss_mask": [0] * len(early["loss_mask"])}
    ones = masked(toy, id="ones") | {"loss_mask": [1] * len(early["loss_mask"])}
    short = masked(toy, id="short") | {"loss_mask": [1]}
    text = masked(toy, id="text") | {"loss_mask": "0001"}
    cut = masked(toy, reply=REPLY.removesuffix("<|end|>"), id="cut")
    path = jsonl(tmp_path / "rows.jsonl", *good, early, late, delimiter, zero, ones, short, text, cut)
    found = look(path, tokenizer=toy.name)
    named = {finding.check: finding.rows for finding in found.findings}
    expected = {
        "mask_early": ["early"],
        "mask_late": ["late"],
        "mask_after_delimiter": ["delimiter"],
        "mask_zero": ["zero"],
        "mask_ones": ["ones"],
        "mask_length": ["short"],
        "unusable_row": ["text"],
        "cut": ["cut"],
    }
    assert named == expected
    assert found.verdict.startswith("not fit to train on: 1 of 11") and found.rows == 11
    assert found.lengths["reasoning"]["replies"] == 7


def test_each_span_of_a_row_of_several_turns_is_a_reply_with_what_stands_before_it(
    toy: Template, tmp_path: Path
) -> None:
    first, second = masked(toy), masked(toy)
    row = {name: first[name] + second[name] for name in ("input_ids", "loss_mask")}
    found = look(jsonl(tmp_path / "rows.jsonl", row), tokenizer=toy.name)
    assert (found.rows, found.trainable, counts(found)) == (1, 2, {"several_spans": 1})
    assert found.lengths["prompt"]["max"] == len(first["input_ids"]) + first["loss_mask"].count(0)


def test_prepared_data_of_other_trainers_is_read_in_every_form(toy: Template, tmp_path: Path) -> None:
    rows = [masked(toy, QUESTION.replace("many", f"many {n}")) for n in range(5)]
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved" / "hidden_states").mkdir()
    (tmp_path / "array.json").write_text(json.dumps(rows))
    batched = [{name: [values] for name, values in row.items()} for row in rows]  # as tensors of shape [1, n] are saved
    for path in (
        tmp_path / "rows.parquet",
        tmp_path / "saved",
        tmp_path / "array.json",
        jsonl(tmp_path / "b.jsonl", *batched),
    ):
        found = look(path, tokenizer=toy.name)
        assert (found.kind, found.rows, found.findings) == ("masked", 5, [])


def test_ids_without_a_mask_say_nothing(toy: Template, tmp_path: Path) -> None:
    found = look(jsonl(tmp_path / "rows.jsonl", {"input_ids": [1, 2, 3]}))
    assert "without a loss_mask" in found.verdict


def test_without_a_tokenizer_the_most_common_last_id_tells_who_was_cut(toy: Template, tmp_path: Path) -> None:
    rows = [masked(toy) for _ in range(3)] + [masked(toy, reply="<think>two and")]
    found = look(jsonl(tmp_path / "rows.jsonl", *rows))
    assert counts(found)["cut"] == 1
    assert any("taken for the stop id" in note for note in found.notes)
    assert any("--tokenizer" in note for note in found.notes)


def test_conversations_are_text_only_and_their_lost_thinking_is_named(toy: Template, tmp_path: Path) -> None:
    # P06, P22
    def row(number: int, *answers: Any) -> dict[str, Any]:
        turns: list[Any] = []
        for answer in answers:
            turns += [{"role": "user", "content": f"how many {number}?"}]
            turns += [answer if isinstance(answer, dict) else {"role": "assistant", "content": answer}]
        return {"id": f"row-{number}", "conversations": turns}

    field = {"role": "assistant", "content": "four", "reasoning_content": "two and two"}
    rows = [
        row(0, "<think>two and two</think>four"),
        row(1, "four"),
        row(2, "<think></think>two and two</think>four"),  # P07
        row(3, "two and two</think>four"),
        row(4, "<think>two and two"),
        row(5, field | {"content": "<think>two and two</think>four"}),
        row(6, "four", field),
        row(7, ""),
        {"id": "row-8", "conversations": [{"role": "user", "content": "how many?"}]},
        {"id": "row-9", "conversations": [{"role": "alien", "content": "how many?"}]},
    ]
    found = look(jsonl(tmp_path / "rows.jsonl", *rows), tokenizer=toy.name, thinking="think")
    named = {finding.check: finding.rows for finding in found.findings}
    assert found.verdict.startswith("not fit to train on: 10 of 10: text only")
    assert named["without_reasoning"] == ["row-1", "row-2", "row-7"]
    assert named["empty_pair_first"] == ["row-2"] and named["unopened"] == ["row-3"]
    assert named["unclosed"] == ["row-4"] and named["reasoning_twice"] == ["row-5"]
    assert named["earlier_reasoning"] == ["row-6"] and named["empty_answer"] == ["row-7"]
    assert named["no_answer"] == ["row-8"] and named["unusable_row"] == ["row-9"]
    assert any("alien" in reason for reason in found.shares["reason"])


def test_tool_arguments_of_two_types_are_named(toy: Template, tmp_path: Path) -> None:
    # P24
    def row(arguments: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"messages": [{"role": "user", "content": "t?"}, answer]}

    found = look(jsonl(tmp_path / "rows.jsonl", row({"t": 1}), row({"t": 2}), row('{"t":"1"}')))
    assert {f.check: f.rows for f in found.findings}["argument_types"] == ["line 3"]


def test_separators_inside_texts_are_warned_of_and_rows_they_cut_are_counted(tmp_path: Path) -> None:
    # P16
    def row(name: str, text: str) -> dict[str, Any]:
        return {"id": name, "conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]}

    whole = jsonl(tmp_path / "whole.jsonl", row("a", "one\u2028two\u0085three"), row("b", "plain"))
    found = look(whole)
    assert found.rows == 2 and {f.check: f.rows for f in found.findings}["separators"] == ["a"]
    cut = tmp_path / "cut.jsonl"
    cut.write_text("\n".join(whole.read_text(encoding="utf-8").splitlines()), encoding="utf-8")
    found = look(cut)
    assert counts(found)["broken_line"] == 3 and found.rows == 4


def test_preformatted_text_whose_replies_nobody_would_find_is_named(toy: Template, tmp_path: Path) -> None:
    # P18: a marker that does not fit gives a mask of zeros
    rows = [{"id": "a", "text": QUESTION + REPLY}, {"id": "b", "text": "Q: how many? A: four"}]
    found = look(jsonl(tmp_path / "rows.jsonl", *rows), tokenizer=toy.name, thinking="think")
    assert found.kind == "text"
    assert {f.check: f.rows for f in found.findings}["mask_zero"] == ["b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nothing.jsonl", None, "expected a file or folder to inspect, found none"),
        ("a.txt", "hi", "expected a file ending in"),
        ("a.jsonl", '{"x": 1}\n', "found x"),
        ("a.jsonl", "not json\n", "no row that is a JSON object"),
        ("a.parquet", "not parquet", "cannot be read as parquet"),
    ],
)
def test_what_cannot_be_read_is_the_users_to_mend(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        look(path)


def test_a_folder_of_several_kinds_is_refused_by_name(toy: Template, tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", masked(toy))
    jsonl(tmp_path / "b.jsonl", {"messages": []})
    with pytest.raises(UserError, match="expected one kind of data, found .*a.jsonl|b.jsonl"):
        look(tmp_path)


def test_a_folder_without_data_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected traces or a dataset"):
        look(tmp_path)


def test_a_capture_that_is_running_is_looked_at_by_what_its_journal_holds(toy: Template, tmp_path: Path) -> None:
    work = tmp_path / "run" / "traces.partial"
    work.mkdir(parents=True)
    write_json(work / "target.json", {"tokenizer": toy.name, "delimiters": "null", "stop_ids": "[]"})
    with Journal(work) as journal:
        for number in range(40):
            journal.append(replace(trace_of(toy, number), trace_id=f"{number:024x}"))
        assert journal.sync()
        found = look(tmp_path / "run")
        half = journal.active.path.read_bytes()
    assert found.trainable == found.replies == 40
    assert any("not finished" in note for note in found.notes)
    assert not any("--tokenizer" in note for note in found.notes)
    (work / "journal" / "000000.log").write_bytes(half[: len(half) - 5])  # killed while it wrote
    assert look(tmp_path / "run").replies == 39


def test_a_capture_that_is_not_finished_is_looked_at_by_its_closed_segments(toy: Template, tmp_path: Path) -> None:
    again = [trace_of(toy, 0, state="failed", error="http_500: none"), trace_of(toy, 0), trace_of(toy, 1)]
    save(tmp_path / "run" / "traces.partial" / "journal", toy, again)
    found = look(tmp_path / "run")
    assert found.trainable == 2 and "doubled_id" not in counts(found)
    assert any("not finished" in note for note in found.notes)
