from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.exceptions import DatasetNotFoundError

from draftsmith.capture.questions import questions_fingerprint, read_conversations, read_questions
from draftsmith.capture.rows import Question
from draftsmith.errors import UserError
from draftsmith.recipe import QuestionSettings

Row = dict[str, Any]
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Rows as a JSONL file."""

    def make(*rows: Any, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
        return path

    return make


def read(source: Path | str, **settings: Any) -> list[Question]:
    return read_questions(QuestionSettings(questions=str(source), **settings))


def prompts(questions: list[Question]) -> list[str]:
    return [question.messages[-1]["content"] for question in questions]


def test_all_schemas_of_the_same_question_give_the_same_key_and_turns(write: Write) -> None:
    rows = [
        {"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "Q"}]},
        {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}], "system": "S"},
        {"prompt": "Q", "system": "S"},
        {"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]},
        {"question": "Q", "system_prompt": "S"},
        {"instruction": "Q", "input": "", "system": "S"},
    ]
    (question,) = read(write(*rows))
    assert question.copies == len(rows)
    assert question.messages == ({"role": "system", "content": "S"}, {"role": "user", "content": "Q"})


def test_recorded_answers_of_every_schema_are_kept_as_turns(write: Write) -> None:
    answered = [
        {"conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": "A"}]},
        {"prompt": "2", "response": "A"},
        {"question": "3", "answer": "A"},
        {"instruction": "4", "input": "x", "output": "A"},
        {"prompt": [{"role": "user", "content": "5"}], "completion": [{"role": "assistant", "content": "A"}]},
    ]
    found = read(write(*answered))
    assert [question.messages[-1] for question in found] == [{"role": "assistant", "content": "A"}] * 5
    assert [question.messages[0]["content"] for question in found] == ["1", "2", "3", "4\n\nx", "5"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_recorded_reasoning_is_kept_under_one_name(write: Write, name: str) -> None:
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", name: "T"}]
    (question,) = read(write({"messages": turns}))
    assert question.messages[1] == {"role": "assistant", "content": "A", "reasoning_content": "T"}


def test_keys_follow_content_and_never_position(write: Write) -> None:
    # P15: a row put on top and a shuffle change no key
    a, b, new = ({"prompt": text} for text in "abn")
    before = {prompts([q])[0]: q.key for q in read(write(a, b))}
    after = {prompts([q])[0]: q.key for q in read(write(new, b, a))}
    assert before.items() <= after.items()
    assert len(set(after.values())) == 3


def test_duplicates_are_counted_and_kept_in_first_order(write: Write) -> None:
    # P15
    found = read(write({"prompt": "A"}, {"prompt": "A"}, {"prompt": "B"}))
    assert [(prompts([q])[0], q.copies) for q in found] == [("A", 2), ("B", 1)]


def test_one_prompt_with_two_recorded_answers_is_one_question_but_two_conversations(write: Write) -> None:
    path = write({"prompt": "Q", "response": "A"}, {"prompt": "Q", "response": "B"})
    (question,) = read(path)
    assert question.copies == 2
    rows = list(read_conversations(QuestionSettings(questions=str(path))))
    assert [row.messages[-1]["content"] for row in rows] == ["A", "B"]
    assert {row.key for row in rows} == {question.key}


def test_tools_and_system_text_make_another_question(write: Write) -> None:
    tool = {"type": "function", "function": {"name": "clock"}}
    keys = {
        q.key for q in read(write({"prompt": "Q"}, {"prompt": "Q", "system": "S"}, {"prompt": "Q", "tools": [tool]}))
    }
    assert len(keys) == 3


def test_two_prompts_under_one_id_are_an_error_at_load(write: Write) -> None:
    # P15
    path = write({"id": 7, "prompt": "A"}, {"id": 7, "prompt": "A"}, {"id": 7, "prompt": "B"})
    with pytest.raises(UserError, match=r"line 3: id '7' is also the id of another prompt \(.*line 1\)"):
        read(path)


def test_limit_counts_rows_before_duplicates_are_merged(write: Write) -> None:
    found = read(write({"prompt": "A"}, {"prompt": "A"}, {"prompt": "B"}), limit=2)
    assert [(prompts([q])[0], q.copies) for q in found] == [("A", 2)]


def test_unicode_line_separators_do_not_cut_a_row(write: Write) -> None:
    # P16
    text = "one\u2028two\u2029three\u0085four"
    (question,) = read(write({"prompt": text}))
    assert prompts([question]) == [text]


def test_windows_line_ends_and_blank_lines_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "A"}\r\n\r\n{"prompt": "B"}')
    assert prompts(read(path)) == ["A", "B"]


def tool_rows() -> list[Row]:
    """Two rows that differ in how the arguments are written: a mapping, and its JSON text (P24)."""
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]

    def row(arguments: Any) -> Row:
        call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": arguments}}
        return {
            "messages": [
                {"role": "user", "content": "Q"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "9"},
                {"role": "assistant", "content": "Nine"},
            ],
            "tools": tools,
        }

    return [row({"t": 1}), row('{"t": "1"}'), row('{"t": 1}')]


def test_tool_turns_are_kept_and_both_argument_forms_are_one(write: Write) -> None:
    # P24
    mapping, text = read(write(*tool_rows()))
    assert mapping.copies == 2
    for question, value in ((mapping, 1), (text, "1")):
        assert [turn["role"] for turn in question.messages] == ["user", "assistant", "tool", "assistant"]
        (call,) = question.messages[1]["tool_calls"]
        assert call == {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": {"t": value}}}
        assert question.messages[1]["content"] == ""
        assert question.messages[2]["tool_call_id"] == "c1"
        assert question.tools[0]["function"]["name"] == "clock"


def test_sharegpt_tool_turns_become_the_same_conversation(write: Write) -> None:
    # P24
    call = json.dumps({"name": "clock", "arguments": {"t": 1}})
    turns = [("human", "Q"), ("function_call", call), ("observation", "9"), ("gpt", "Nine")]
    tools = json.dumps([{"name": "clock"}])
    (question,) = read(write({"conversations": [{"from": f, "value": v} for f, v in turns], "tools": tools}))
    assert [turn["role"] for turn in question.messages] == ["user", "assistant", "tool", "assistant"]
    assert question.messages[1]["tool_calls"][0]["function"] == {"name": "clock", "arguments": {"t": 1}}
    assert question.tools == ({"name": "clock"},)


def test_parquet_rows_lose_the_nulls_that_arrow_fills_in(tmp_path: Path) -> None:
    # P24: one struct type for all rows means null fields in each
    calls = [[{"name": "f", "arguments": {"a": 1}}], [{"name": "f", "arguments": {"b": "x"}}]]
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "tool_calls": c}]}
        for q, c in zip("AB", calls, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = read(tmp_path / "rows.parquet")
    arguments = [q.messages[1]["tool_calls"][0]["function"]["arguments"] for q in found]
    assert arguments == [{"a": 1}, {"b": "x"}]
    assert "tool_calls" not in found[0].messages[0]


def test_sources_are_the_rows_own_or_the_datasets_name(write: Write) -> None:
    found = read(write({"prompt": "A", "source": "gsm8k"}, {"prompt": "B"}, name="mine.jsonl"))
    assert [q.source for q in found] == ["gsm8k", "mine"]


def test_json_arrays_json_lines_and_parquet_give_the_same_questions(tmp_path: Path, write: Write) -> None:
    rows = [{"prompt": "A"}, {"prompt": "B"}]
    (tmp_path / "array.json").write_text("\n" + json.dumps(rows, indent=1))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    sources = [write(*rows), write(*rows, name="lines.json"), tmp_path / "array.json", tmp_path / "rows.parquet"]
    assert [[q.key for q in read(source)] for source in sources] == [[q.key for q in read(sources[0])]] * 4


def test_a_folder_is_read_file_by_file_in_order(tmp_path: Path, write: Write) -> None:
    write({"prompt": "B"}, name="data/b.jsonl")
    write({"prompt": "A"}, name="data/a.jsonl")
    write({"prompt": "hidden"}, name="data/.cache/x.jsonl")
    assert prompts(read(tmp_path / "data")) == ["A", "B"]


def test_a_folder_with_splits_gives_the_one_asked_for(tmp_path: Path, write: Write) -> None:
    write({"prompt": "A"}, name="data/train-00000-of-00001.jsonl")
    write({"prompt": "B"}, name="data/test/part.jsonl")
    assert prompts(read(tmp_path / "data")) == ["A"]
    assert prompts(read(tmp_path / "data", split="test")) == ["B"]
    with pytest.raises(UserError, match="no file of split validation, found test, train"):
        read(tmp_path / "data", split="validation")


def test_a_dataset_saved_to_disk_is_read_by_split(tmp_path: Path) -> None:
    rows = {
        "train": datasets.Dataset.from_list([{"prompt": "A"}]),
        "test": datasets.Dataset.from_list([{"prompt": "B"}]),
    }
    datasets.DatasetDict(rows).save_to_disk(str(tmp_path / "both"))
    rows["train"].save_to_disk(str(tmp_path / "one"))
    assert prompts(read(tmp_path / "both", split="test")) == ["B"]
    assert prompts(read(tmp_path / "one")) == ["A"]
    with pytest.raises(UserError, match="no split dev, found train, test"):
        read(tmp_path / "both", split="dev")


def test_hub_names_carry_configuration_and_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def load(*args: Any, **kwargs: Any) -> datasets.Dataset:
        calls.append((args, kwargs))
        return datasets.Dataset.from_list([{"question": "A", "answer": "B"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    (question,) = read("owner/name:main@v1.0", split="test")
    assert calls == [(("owner/name", "main"), {"split": "test", "revision": "v1.0"})]
    assert question.source == "owner/name:main@v1.0"
    assert len(question.messages) == 2


@pytest.mark.parametrize(
    "fault",
    [
        ConnectionError("Couldn't reach 'owner/name' on the Hub\nlong trace"),
        DatasetNotFoundError("Dataset 'owner/name' doesn't exist on the Hub"),
        ValueError('Unknown split "train"'),
        RuntimeError("Dataset scripts are no longer supported"),
    ],
)
def test_hub_faults_are_one_clear_line(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    def load(*_: Any, **__: Any) -> datasets.Dataset:
        raise fault

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError) as stop:
        read("owner/name")
    assert str(fault).splitlines()[0] in str(stop.value)
    assert "\n" not in str(stop.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "expected at least one row, found an empty dataset"),
        ([{"text": "A", "label": 1}], "unknown schema: .* found columns: text, label"),
        ([{"prompt": "A"}, [1]], "line 2: expected a JSON object, found list"),
        ([{"prompt": " "}], "line 1: expected a prompt, found an empty one"),
        ([{"messages": []}], "line 1: expected at least one user turn"),
        ([{"messages": [{"role": "narrator", "content": "A"}]}], "turn 1: unknown role 'narrator'"),
        ([{"messages": ["A"]}], "turn 1: expected a turn with a role, found str"),
        ([{"messages": [{"role": "user", "content": 3}]}], "turn 1: expected text, found int"),
        ([{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}], "part of type 'image_url'"),
        ([{"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}], "tool call with a function name"),
        ([{"conversations": [{"from": "function_call", "value": "{"}]}], "tool call as JSON, found '{'"),
        (
            [{"prompt": "A", "chat_template_kwargs": {"tokenize": False}}],
            "column chat_template_kwargs: draftsmith sets tokenize itself",
        ),
        ([{"prompt": "A", "tools": "clock"}], "tools: expected a list of tool descriptions, found str"),
    ],
)
def test_unusable_rows_are_named_with_their_place(write: Write, rows: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(write(*rows))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("rows.jsonl", b'{"prompt": "A"}\n{"prompt"', "line 2: expected a JSON object"),
        ("rows.jsonl", b'{"prompt": "\xff"}\n', "line 1: expected a JSON object"),
        ("rows.json", b"[1, 2", "expected a JSON array"),
        ("rows.json", b"[1, 2]", "row 1: expected a JSON object, found int"),
        ("rows.parquet", b"PAR1", "expected a Parquet file"),
        ("rows.xlsx", b"", r"ending in .jsonl.*found \.xlsx"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


def test_missing_sources_are_named(tmp_path: Path) -> None:
    for source in (tmp_path / "rows.jsonl", "rows.jsonl", "a/b/c"):
        with pytest.raises(UserError, match="expected a file, a folder or a hub dataset name"):
            read(source)
        with pytest.raises(UserError, match="expected a file, a folder or a hub dataset name"):
            questions_fingerprint(QuestionSettings(questions=str(source)))
    with pytest.raises(UserError, match="found none in this folder"):
        read(tmp_path)
    with pytest.raises(UserError, match="known: builtin:arithmetic"):
        read("builtin:geometry")


def test_a_source_that_the_system_does_not_give_is_named() -> None:
    for source in ("/proc/self/mem", "/" + "x" * 300):
        with pytest.raises(UserError, match="cannot be read: "):
            questions_fingerprint(QuestionSettings(questions=source))


def test_fingerprints_follow_the_bytes_of_files_and_folders_and_the_names_of_others(write: Write) -> None:
    def of(source: Path | str, **settings: Any) -> str:
        return questions_fingerprint(QuestionSettings(questions=str(source), **settings))

    path = write({"prompt": "A"}, name="data/rows.jsonl")
    file, folder = of(path), of(path.parent)
    assert (of(path), of(path.parent)) == (file, folder)
    write({"prompt": "B"}, name="data/rows.jsonl")
    assert of(path) != file
    assert of(path.parent) != folder
    assert of("owner/name") == of("owner/name") != of("owner/name", split="test")
    assert of("owner/name@a") != of("owner/name@b")
    assert of("builtin:arithmetic") == of("builtin:arithmetic")


def test_fingerprints_need_nothing_heavy() -> None:
    code = (
        "import sys\nfrom draftsmith.capture.questions import questions_fingerprint\n"
        "from draftsmith.recipe import QuestionSettings\nquestions_fingerprint(QuestionSettings())\n"
        "print([m for m in ('torch', 'transformers', 'datasets', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# rows that cannot be asked among others


def test_a_minority_of_bad_rows_is_kept_among_the_others(write: Write) -> None:
    found = read(write({"prompt": "A"}, {"prompt": ""}, {"prompt": "B"}, {"prompt": ""}))
    assert [(question.copies, bool(question.problem)) for question in found] == [(1, False), (2, True), (1, False)]
    assert found[1].problem.endswith("line 2: expected a prompt, found an empty one; remove the row")


def test_a_source_of_mostly_bad_rows_is_refused_with_the_first_reason(write: Write) -> None:
    rows = [{"prompt": "A"}, {"prompt": ""}, {"text": "B"}]
    with pytest.raises(
        UserError, match=r"line 2: expected a prompt, found an empty one.*\(2 of 3 rows cannot be asked"
    ):
        read(write(*rows))


def test_twenty_bad_rows_at_the_start_are_enough(write: Write) -> None:
    bad = [{"text": str(number)} for number in range(20)]
    good = [{"prompt": str(number)} for number in range(1000)]
    with pytest.raises(UserError, match=r"line 1: unknown schema.*\(20 of 20 rows"):
        read(write(*bad, *good))
    assert len(read(write(good[0], *bad, *good[1:]))) == 1020
