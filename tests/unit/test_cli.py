from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.__main__ import main
from draftsmith.recipes import recipe_path

CAPTURE = ["capture", "--run", "R", "--server", "http://b"]
STAGES = ("capture", "import", "vocab", "extract", "train", "export", "measure", "report")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--run", "R", "--lr", "-1"], "--lr: input should be greater than 0"),
        (["train", "--run", "R", "--lrr", "1"], "Did you mean --lr?"),
        (["vocab"], "--run"),
        (["vocab", "--run", "R"], "draftsmith capture --run"),
        (["extract", "--run", "R"], "draftsmith capture --run"),
        (["capture", "--run", "R"], "expected --server URL or --local MODEL"),
        (["capture", "--run", "R", "--local", "a", "--server", "http://b"], "found both"),
        (["capture", "--run", "R", "--local", "smollm2", "--questions", "no.jsonl"], "no.jsonl"),
        (["capture", "--run", "R", "--local", "smollm2", "--thinking", "kimmi"], "--thinking"),
        (["measure", "--run", "R", "--draft-tokens", "abc"], "--draft-tokens: input should be a valid integer"),
        (["export", "--run", "R", "--engine", "tensorrt"], "--engine"),
        (["run", "no.yaml"], "no.yaml: expected a recipe, found no such file"),
        (["status", "nowhere"], "nowhere: expected a run folder, found none"),
        (["watch", "nowhere"], "nowhere: expected a run folder, found none"),
        (["frobnicate"], "frobnicate"),
        (
            [*CAPTURE, "--concurrency", "many"],
            "--concurrency: input should be a valid integer, unable to parse string as an integer or 'auto', "
            "found 'many'",
        ),
        ([*CAPTURE, "--temperature", "inf"], "--temperature: input should be a finite number, found 'inf'"),
        ([*CAPTURE, "--deadline", "inf"], "--deadline: input should be a finite number, found 'inf'"),
        ([*CAPTURE, "--wait", "soon"], "--wait: expected a time such as 90s, 30m or 2h, found 'soon'"),
        (["probe", ""], "--server: expected a URL such as http://localhost:8000, found ''"),
        (["probe", "http://["], "--server: expected a URL such as http://localhost:8000, found 'http://['"),
        (["probe", "ftp://b"], "--server: expected a URL such as http://localhost:8000, found 'ftp://b'"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []  # nothing was made


def test_a_place_where_no_page_can_be_written_is_a_users_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2+2?"}\n')
    for place, found in ((tmp_path, "the folder"), (rows / "page.html", "Not a directory|File exists")):
        assert main(["inspect", str(rows), "--html", str(place), "--quiet"]) == 2
        assert re.search(f"^draftsmith: --html: expected .* found .*({found})", capsys.readouterr().err)


@pytest.mark.parametrize("command", [*STAGES, "inspect", "export-dataset", "run", "status", "watch", "demo"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert "Usage: draftsmith" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["watch", ".", "--json"]])
def test_help_and_watching_load_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    heavy = ("torch", "transformers", "datasets", "pyarrow", "aiohttp", "plotly")
    code = (
        f"import sys; from draftsmith.__main__ import main; main({arguments!r}); "
        f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_the_bars_of_libraries_stay_out_of_a_log() -> None:
    code = (
        "from draftsmith.__main__ import main; main(['--version']); "
        "from tqdm.auto import tqdm; print(list(tqdm(range(3))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("[0, 1, 2]", "")


@pytest.mark.parametrize("name", ["smollm2", "pivot", "kimi-k2.5", "qwen3-8b", "gpt-oss-20b"])
def test_a_shipped_recipe_resolves_without_reading_or_loading_anything(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", str(recipe_path(name)), "--dry-run"]) == 0
    shown = json.loads(capsys.readouterr().out)
    chains = [shown] if "stages" in shown else list(shown.values())
    for chain in chains:
        assert {"vocab", "extract", "train", "export", "measure", "report"} <= chain["stages"].keys()
        assert {"capture", "import"} & chain["stages"].keys()
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_shipped_recipe_lists_those_there_are() -> None:
    with pytest.raises(Exception, match="there are gpt-oss-20b, kimi-k2.5, pivot, qwen3-8b, smollm2"):
        recipe_path("llama")


def test_ctrl_c_is_exit_code_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from draftsmith import pipeline

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "run_status", interrupted)
    assert main(["status", "x"]) == 130
    assert "run the same command again" in capsys.readouterr().err
