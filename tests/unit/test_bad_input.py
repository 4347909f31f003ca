"""Unusable inputs through the real command line: exit code 2, one clear line, nothing lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftsmith import artifacts
from draftsmith.__main__ import main
from draftsmith.capture import writing
from draftsmith.target.template import load_template
from draftsmith.trace import read_traces
from fault_server import Fault, FaultServer
from tiny_target import save_tiny_target

Refused = Callable[..., str]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"), layers=2)


@pytest.fixture
def serve(target: Path) -> Iterator[Callable[..., FaultServer]]:
    running = []

    def start(**options: Any) -> FaultServer:
        template = load_template(str(target), {}, trust_remote_code=False)
        running.append(FaultServer(template=template, **options).__enter__())
        return running[-1]

    yield start
    for server in running:
        server.__exit__()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "questions.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    return tmp_path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must be refused; returns its one line."""

    def run(*arguments: str) -> str:
        assert main([*arguments, "--quiet"]) == 2
        error = capsys.readouterr().err
        assert error.endswith("\n")
        assert error[:-1].isprintable()
        return error

    return run


def local(model: Path | str, questions: str = "questions.jsonl") -> list[str]:
    small = ["--max-tokens", "4", "--dtype", "float32", "--device", "cpu"]
    return ["capture", "--run", "run", "--local", str(model), "--questions", questions, *small]


def served(url: str, tokenizer: Path, *more: str) -> list[str]:
    where = ["--server", url, "--tokenizer", str(tokenizer), "--api-key-env", "TOY_KEY"]
    return ["capture", "--run", "run", "--questions", "questions.jsonl", *where, *more]


DATASETS: dict[str, tuple[str, bytes | None, str]] = {
    "missing": ("missing.jsonl", None, "expected a file, a folder or a hub dataset name"),
    "unreadable": ("/proc/self/mem", None, "cannot be read: Input/output error"),
    "no Parquet": ("rows.parquet", b"xx", "expected a Parquet file"),
    "cut off": ("rows.jsonl", b'{"prompt": "a"}\n{"prom', "line 2: expected a JSON object"),
    "unknown schema": ("rows.jsonl", b'{"text": 1, "la\\u001bbel": 2}\n', r"found columns: text, la\x1bbel"),
    "empty": ("rows.jsonl", b"", "found an empty dataset"),
    "nobody asks": (
        "rows.jsonl",
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "s"}]}\n',
        "expected conversations in which somebody asks something",
    ),
    "an image": ("rows.jsonl", b'{"prompt": [{"type": "image_url"}]}\n', "part of type 'image_url'"),
    "one id twice": ("rows.jsonl", b'{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}\n', "another prompt"),  # P15
    "row options": ("rows.jsonl", b'{"prompt": "a", "chat_template_kwargs": {"tools": 1}}\n', "chat_template_kwargs"),
    "hub name": ("no/such-dataset", None, "the hub did not give a dataset of this name"),
}


@pytest.mark.parametrize(("name", "content", "message"), DATASETS.values(), ids=DATASETS.keys())
def test_a_dataset_that_cannot_be_asked(
    target: Path,
    refused: Refused,
    folder: Path,
    name: str,
    content: bytes | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if content is not None:
        (folder / name).write_bytes(content)
    else:  # without a hub its client tries again for 20 s
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    assert message in refused(*local(target, name))
    assert not list(folder.glob("run/traces*"))


def test_a_server_that_is_down(target: Path, refused: Refused) -> None:
    error = refused(*served("http://me:secret@127.0.0.1:1", target))
    assert "http://127.0.0.1:1: the server does not answer" in error and "secret" not in error


def test_a_password_in_the_url_beside_a_key(
    target: Path, serve: Callable[..., FaultServer], refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_KEY", "sesame")
    error = refused(*served(serve().url.replace("http://", "http://me:secret@"), target))
    assert "expected either a user in the URL or a key in TOY_KEY, found both" in error
    assert "secret" not in error and "sesame" not in error


SERVERS: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "wrong path": ({"prefix": "/elsewhere"}, [], "expected an OpenAI-compatible API, found none at"),
    "no key": ({"api_key": "sesame"}, [], "HTTP 401, expected an API key in the environment variable TOY_KEY"),
    "wrong model": ({"models": ("a", "b\x1b[2J")}, ["--model", "c"], r"the server offers a, b\x1b[2J; name one"),
}


@pytest.mark.parametrize(("options", "more", "message"), SERVERS.values(), ids=SERVERS.keys())
def test_a_server_that_is_not_what_was_meant(
    target: Path,
    serve: Callable[..., FaultServer],
    refused: Refused,
    folder: Path,
    options: dict[str, Any],
    more: list[str],
    message: str,
) -> None:
    assert message in refused(*served(serve(**options).url, target, *more))
    # Nothing was made, so the corrected command is not told that its settings changed.
    assert main([*served(serve().url, target, "--model", "toy"), "--quiet"]) == 0
    assert len(list(read_traces(folder / "run" / "traces"))) == 2


def test_what_a_server_says_in_its_refusal_cannot_drive_the_terminal(
    target: Path, serve: Callable[..., FaultServer], refused: Refused
) -> None:
    server = serve(models_status=200, fault=lambda text, nth: Fault(status=400, body=b'{"error": "\\u001b[2Jno"}'))
    assert "none of 2 replies can be trained on" in refused(*served(server.url, target, "--no-probe"))


MODELS: dict[str, tuple[str, str]] = {
    "no chat template": ("chat_template.jinja", "the tokenizer has no chat template"),
    "no weights": ("model.safetensors", "expected weights"),
    "no config": ("config.json", "expected a model folder with config.json"),
    "no tokenizer": ("tokenizer.json", "expected tokenizer files"),
}


@pytest.mark.parametrize(("file", "message"), MODELS.values(), ids=MODELS.keys())
def test_a_model_folder_that_lacks_something(
    target: Path, refused: Refused, folder: Path, file: str, message: str
) -> None:
    shutil.copytree(target, folder / "model")
    (folder / "model" / file).unlink()
    assert message in refused(*local("model"))


@pytest.mark.parametrize(("file", "kept"), [("model.safetensors", 1000), ("config.json", 1), ("tokenizer.json", 1)])
def test_a_model_folder_with_a_file_that_was_cut_off(
    target: Path, refused: Refused, folder: Path, file: str, kept: int
) -> None:
    shutil.copytree(target, folder / "model")
    os.truncate(folder / "model" / file, kept)
    assert "loaded" in refused(*local("model"))


def test_an_import_without_a_chat_template(target: Path, refused: Refused, folder: Path) -> None:
    shutil.copytree(target, folder / "model")
    (folder / "model" / "chat_template.jinja").unlink()
    arguments = ["import", "--run", "run", "--questions", "questions.jsonl", "--tokenizer"]
    assert "no chat template" in refused(*arguments, "model")
    assert "none of 2 rows holds an answer" in refused(*arguments, str(target))


def test_a_full_disk_holds_the_run_up_and_costs_no_reply(
    target: Path,
    serve: Callable[..., FaultServer],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # P33
    full = [OSError(errno.ENOSPC, "No space left on device")] * 30
    write = os.pwrite

    def pwrite(file: int, data: bytes, offset: int) -> int:
        if full:
            raise full.pop()
        return write(file, data, offset)

    monkeypatch.setattr(writing.os, "pwrite", pwrite)
    monkeypatch.setattr(writing, "RETRY_SECONDS", 0.05)
    server = serve()
    assert main(served(server.url, target, "--concurrency", "1")) == 0
    assert "journal: no space left on the disk (" in capsys.readouterr().err
    assert [server.questions()[question] for question in "ab"] == [1, 1]
    assert len(list(read_traces(folder / "run" / "traces"))) == 2


def test_a_read_only_disk(target: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(path: Path, value: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(artifacts, "write_json", read_only)
    assert "run/traces.partial/plan.json: cannot be written (Read-only file system)" in refused(*local(target))


def test_a_second_run_on_the_same_folder(target: Path, refused: Refused, folder: Path) -> None:
    (folder / "recipe.yaml").write_text(json.dumps({"run": "run", "capture": {"local": str(target)}}))
    with artifacts.locked(folder / "run"):
        assert "another draftsmith is working in this run folder" in refused(*local(target))
        assert "another draftsmith is working in this run folder" in refused("run", "recipe.yaml")
    assert [path.name for path in (folder / "run").iterdir()] == [".lock"]


def test_a_file_that_may_not_be_read(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "run/traces/manifest.json")

    monkeypatch.setattr(artifacts, "read_json", denied)
    Path("run/traces").mkdir(parents=True)
    Path("run/traces/manifest.json").touch()
    assert "run/traces/manifest.json: expected access to it, found Permission denied" in refused(
        "vocab", "--run", "run"
    )


def test_credentials_of_a_servers_url_are_in_no_file_of_the_run(
    target: Path, serve: Callable[..., FaultServer], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = serve(api_key="").url.replace("http://", "http://me:secret@")
    recipe = {"run": "run", "capture": {"server": [url], "tokenizer": str(target), "questions": "questions.jsonl"}}
    (folder / "recipe.yaml").write_text(json.dumps({**recipe, "vocab": {"size": 1}}))
    assert main(["run", "recipe.yaml", "--quiet"]) == 2  # the vocabulary's size is refused, after the capture
    assert main(["run", "recipe.yaml", "--dry-run"]) == 0
    assert (folder / "run" / "traces" / "manifest.json").exists()
    assert "secret" not in "".join(capsys.readouterr())
    for path in (folder / "run").rglob("*"):
        assert path.is_dir() or b"secret" not in path.read_bytes(), path
