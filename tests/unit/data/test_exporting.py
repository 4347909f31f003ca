from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from draftsmith.artifacts import Stage
from draftsmith.data import importing
from draftsmith.data.exporting import export_dataset, traces_folder
from draftsmith.data.inspect import inspect
from draftsmith.errors import UserError
from draftsmith.progress import Progress
from draftsmith.recipe import DatasetFormat, DatasetSettings, ImportSettings, InspectSettings
from draftsmith.target.template import Template, load_template
from draftsmith.target.thinking import delimiters_json, find_delimiters
from draftsmith.trace import Trace, held_out, read_traces, write_traces
from toy_chat import save_toy_tokenizer

SHARE = 0.3
COUNT = 24
QUESTION, THINK, ANSWER = "<|user|>{}?<|end|><|assistant|>", "<think>two and two</think>", "four {}\u2028|x<|end|>"
QUIET = Progress(quiet=True)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return load_template(save_toy_tokenizer(tmp_path_factory.mktemp("toy")), {}, False)


@pytest.fixture
def traces(toy: Template, tmp_path: Path) -> Path:
    """COUNT good traces with tool calls in their history, a rejected and a failed one."""
    rows = []
    for number in range(COUNT):
        call = {"type": "function", "function": {"name": "f", "arguments": {"t": number} if number % 2 else {"s": "a"}}}
        rows.append(
            Trace(
                trace_id=f"trace-{number}",
                question_key=f"question-{number}",
                source="toy",
                messages=json.dumps(
                    [
                        {"role": "user", "content": str(number)},
                        {"role": "assistant", "content": "", "tool_calls": [call]},
                    ]
                    if number % 3 == 0
                    else [{"role": "user", "content": str(number)}]
                ),
                prompt_ids=toy.encode(QUESTION.format(number)),
                generated_ids=toy.encode(THINK + ANSWER.format(number)),
                finish_reason="stop",
                reasoning_span=(1, 12),
                answer_span=(13, 13 + len(toy.encode(ANSWER.format(number)))),
                reasoning="two and two",
                answer=f"four {number}\u2028|x",
            )
        )
    rows.append(Trace(trace_id="rejected", question_key="r", state="rejected", error="ids not exact: none"))
    rows.append(Trace(trace_id="failed", question_key="f", state="failed", error="http_500: none"))
    folder = tmp_path / "run" / "traces"
    folder.mkdir(parents=True)
    about = {
        "target": "/home/somebody/models/Toy-1B",
        "server": "http://secret-host:8000",
        "tokenizer": toy.name,
        "tokenizer_fingerprint": toy.tokenizer_fingerprint,
        "delimiters": delimiters_json(find_delimiters(toy, "think")),
        "held_out": str(SHARE),
        "sampling": '{"temperature": 1.0}',
        "vocab_size": str(toy.vocab_size),
    }
    write_traces(folder / "part-00000.parquet", rows[:10], about)
    write_traces(folder / "part-00001.parquet", rows[10:], about)
    return folder


def export(traces: Path, out: Path, form: DatasetFormat, **settings: Any) -> dict[str, Any]:
    force = settings.pop("force", False)
    return export_dataset(traces, out, DatasetSettings(format=form, **settings), QUIET, force=force)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def split_keys() -> tuple[set[str], set[str]]:
    keys = {f"question-{number}" for number in range(COUNT)}
    test = {key for key in keys if held_out(key, SHARE)}
    return keys - test, test


def test_speculators_rows_mark_exactly_the_generated_ids(traces: Path, tmp_path: Path, toy: Template) -> None:
    # P18, P20: 1 on generated ids at their own places; the trainer moves it
    counts = export(traces, tmp_path / "out", "speculators")
    train, test = (rows_of(tmp_path / "out" / f"{split}.jsonl") for split in ("train", "test"))
    assert ({row["primary_id"] for row in train}, {row["primary_id"] for row in test}) == split_keys()
    assert (counts["train"], counts["test"], counts["left_out"]) == (len(train), len(test), 2)
    for row in train + test:
        generated = [index for index, value in zip(row["input_ids"], row["loss_mask"], strict=True) if value]
        assert toy.decode(generated).startswith(THINK)
        assert row["loss_mask"] == sorted(row["loss_mask"])
        assert row["text"] == toy.decode(row["input_ids"])
        assert set(row["metadata"]) == set(train[0]["metadata"])


def test_written_rows_are_never_cut_by_readers_that_split_at_other_separators(traces: Path, tmp_path: Path) -> None:
    # P16
    export(traces, tmp_path / "out", "specforge")
    for path in (tmp_path / "out").rglob("*.jsonl"):
        assert len(path.read_text(encoding="utf-8").splitlines()) == len(rows_of(path))


def test_specforge_gets_exact_ids_and_text_in_which_the_delimiters_stand(
    traces: Path, tmp_path: Path, toy: Template
) -> None:
    export(traces, tmp_path / "out", "specforge")
    ids, talks, texts = (rows_of(tmp_path / "out" / form / "train.jsonl") for form in ("ids", "conversations", "text"))
    for exact, talk, text in zip(ids, talks, texts, strict=True):
        assert exact["id"] == talk["id"] == text["id"]
        assert text["text"] == toy.decode(exact["input_ids"])
        assert talk["conversations"][-1]["role"] == "assistant"
        assert talk["conversations"][-1]["content"].startswith("<think>two and two</think>four")
        assert not talk["conversations"][-1]["content"].endswith("<|end|>")


def test_tool_calls_of_different_arguments_load_because_they_are_text(traces: Path, tmp_path: Path) -> None:
    # P24
    export(traces, tmp_path / "out", "specforge")
    loaded = datasets.load_dataset(
        "json", data_files=str(tmp_path / "out" / "conversations" / "*.jsonl"), cache_dir=str(tmp_path / "cache")
    )
    calls = [turn["tool_calls"] for row in loaded["train"] for turn in row["conversations"] if turn.get("tool_calls")]
    assert len(calls) == COUNT / 3 and {type(json.loads(call)) for call in calls} == {list}


def test_without_a_tokenizer_the_text_columns_stand_in_and_no_text_form_is_written(
    traces: Path, tmp_path: Path, toy: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftsmith.data.exporting._template", lambda *_: None)
    export(traces, tmp_path / "out", "specforge")
    assert not (tmp_path / "out" / "text").exists()
    talk = rows_of(tmp_path / "out" / "conversations" / "train.jsonl")[0]["conversations"]
    assert talk[-1]["content"].startswith("<think>\ntwo and two\n</think>\n\nfour ")


@pytest.mark.parametrize("form", ["hf", "speculators", "specforge"])
def test_load_dataset_finds_the_splits_by_the_card(form: DatasetFormat, traces: Path, tmp_path: Path) -> None:
    counts = export(traces, tmp_path / "out", form)
    loaded = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert {split: rows.num_rows for split, rows in loaded.items()} == {s: counts[s] for s in ("train", "test")}
    if form == "hf":
        assert set(loaded["test"]["question_key"]) == split_keys()[1]
        assert list(read_traces(tmp_path / "out" / "data"))  # and it still is a traces folder


@pytest.mark.parametrize("form", ["hf", "speculators", "specforge"])
def test_what_is_exported_is_clean_to_inspect_and_imports_as_the_same_ids(
    form: DatasetFormat, traces: Path, tmp_path: Path, toy: Template, make_stage: Callable[[str], Stage]
) -> None:
    export(traces, tmp_path / "out", form)
    data = tmp_path / "out" / {"hf": "data", "specforge": "ids"}.get(form, "")
    found = inspect(data, InspectSettings(tokenizer=toy.name, thinking="think"), QUIET)
    assert (found.findings, found.trainable) == ([], COUNT)
    expected = {trace.question_key: trace for trace in read_traces(traces)}
    got: dict[str, Trace] = {}
    for split in ("train", "test"):
        stage = make_stage(f"traces-{split}")
        settings = ImportSettings(
            questions=str(data), split=split, tokenizer=toy.name, thinking="think", held_out=SHARE
        )
        importing.build(stage, settings, QUIET)
        found_here = {trace.question_key: trace for trace in read_traces(stage.work)}
        assert {held_out(key, SHARE) for key in found_here} == {split == "test"}
        got |= found_here
    assert got.keys() == expected.keys()
    for key, trace in got.items():
        for name in ("prompt_ids", "generated_ids", "state", "reasoning_span", "answer_span", "finish_reason"):
            assert getattr(trace, name) == getattr(expected[key], name), name


def test_the_card_says_what_it_is_and_nothing_of_the_machine(traces: Path, tmp_path: Path, toy: Template) -> None:
    export(traces, tmp_path / "out", "hf")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "license: other" in text and "State it before you publish" in text
    assert "| target | Toy-1B |" in text and toy.tokenizer_fingerprint in text and "| state: ok | 24 |" in text
    for private in ("somebody", "secret-host", str(tmp_path), toy.name):
        assert private not in text


def test_a_dataset_that_is_there_is_replaced_only_when_asked_and_nothing_else_ever(
    traces: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    export(traces, out, "hf")
    with pytest.raises(UserError, match="--force replaces it"):
        export(traces, out, "speculators")
    assert (out / "data").is_dir()
    export(traces, out, "speculators", force=True)
    assert (out / "train.jsonl").exists() and not (out / "data").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out")) == ["out"]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "README.md").write_text("my own notes")
    with pytest.raises(UserError, match="not such a dataset"):
        export(traces, mine, "hf", force=True)
    assert (mine / "README.md").read_text() == "my own notes"
    with pytest.raises(UserError, match="--out: expected a folder that can be made, found .*Not a directory"):
        export(traces, mine / "README.md" / "out", "hf")


def test_traces_of_which_none_can_be_trained_on_make_no_dataset(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    write_traces(folder / "part.parquet", [Trace(trace_id="f", question_key="f", state="failed")], {})
    with pytest.raises(UserError, match="none of its 1 traces"):
        export(folder, tmp_path / "out", "hf")
    assert not list(tmp_path.glob("out*"))


def test_another_tokenizer_than_the_traces_is_refused(traces: Path, tmp_path: Path, make_tokenizer: Any) -> None:
    with pytest.raises(UserError, match="another tokenizer"):
        export(traces, tmp_path / "out", "speculators", tokenizer=str(make_tokenizer(name="other")))
    assert not list(tmp_path.glob("out*"))


def test_traces_come_from_a_run_or_a_folder_not_both() -> None:
    assert traces_folder(Path("r"), None) == Path("r/traces")
    for run, folder in ((Path("r"), Path("t")), (None, None)):
        with pytest.raises(UserError, match="expected --run or --traces"):
            traces_folder(run, folder)
