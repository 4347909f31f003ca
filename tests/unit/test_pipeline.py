"""The whole chain on a tiny random target, in this process: every stage real, nothing big."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith import pipeline
from draftsmith.__main__ import main
from draftsmith.progress import Progress
from draftsmith.recipe import Recipe, parse_recipe
from tiny_target import save_tiny_target


def values(folder: Path, **changes: Any) -> dict[str, Any]:
    """A recipe of the tiny target: 24 questions, replies of 24 characters."""
    questions = folder / "questions.jsonl"
    rows = [{"prompt": f"What is {n} plus {n * 7 % 10}?", "response": f"It is {n + n * 7 % 10}."} for n in range(24)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = str(save_tiny_target(folder / "target"))
    cpu = {"dtype": "float32", "device": "cpu"}
    return {
        "run": str(folder / "run"),
        "capture": {
            "on_gate": "warn",  # a random target never comes to an end
            "questions": str(questions),
            "local": model,
            "max_tokens": 24,
            "held_out": 0.25,
            "template_options": {"prompt_opens": False},
            "thinking": "none",
            "batch_size": 8,
            **cpu,
        },
        "vocab": {"size": 48},
        "extract": {"target": model, **cpu},
        "train": {"epochs": 1, "evals": 1, "batch_tokens": 128, "lr": 1e-3, **cpu},
        "export": {"engine": ["vllm", "speculators", "sglang"], "dtype": "float32"},
        "measure": {"limit": 3, "rounds": 1, "timing_questions": 1, **cpu},
        **changes,
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Recipe, Path]]:
    folder = tmp_path_factory.mktemp("chain")
    recipe = parse_recipe(values(folder), "test")
    pipeline.run_recipe(recipe, folder / "run", Progress(quiet=True))
    yield recipe, folder / "run"


def test_the_chain_ends_in_a_lossless_result_and_a_report(finished: tuple[Recipe, Path]) -> None:
    _, run = finished
    result = json.loads((run / "measure" / "result.json").read_text())
    promised = {"acceptance_length", "acceptance_per_position", "draft_tokens", "lossless", "tokens_per_second"}
    promised |= {"baseline_tokens_per_second", "speedup", "questions", "sampling"}
    assert promised <= result.keys()
    assert result["lossless"] is True
    assert result["draft_tokens"] == 4
    assert (run / "report" / "report.html").stat().st_size > 1_000_000
    for engine in ("vllm", "speculators", "sglang"):
        assert json.loads((run / "export" / engine / "check.json").read_text())["passed"] is True


def test_a_finished_run_is_done_throughout(finished: tuple[Recipe, Path]) -> None:
    _, run = finished
    assert {name: status.kind for name, status in pipeline.run_status(run).items()} == dict.fromkeys(
        ("traces", "vocab", "hidden", "draft", "export", "measure", "report"), "done"
    )


def test_running_again_skips_everything(finished: tuple[Recipe, Path], capsys: pytest.CaptureFixture[str]) -> None:
    recipe, run = finished
    before = {path: path.stat().st_mtime_ns for path in run.rglob("manifest.json")}
    pipeline.run_recipe(recipe, run, Progress())
    said = capsys.readouterr().err
    assert said.count("already done, skipped") == 8 - 1
    assert {path: path.stat().st_mtime_ns for path in run.rglob("manifest.json")} == before


def test_a_changed_setting_is_refused_with_what_it_invalidates(
    finished: tuple[Recipe, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run = finished
    changed = recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
    changed["vocab"] = {"size": 40}
    (tmp_path / "changed.yaml").write_text(yaml.safe_dump(changed))
    assert main(["run", str(tmp_path / "changed.yaml"), "--run", str(run), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert "size was 48, now 40; --force makes it again (and with it draft, export, measure)" in error
    # The refused recipe is now the run's recipe; status says what differs. Put the old one back for other tests.
    assert pipeline.run_status(run)["vocab"].kind == "stale"
    pipeline.run_recipe(recipe, run, Progress(quiet=True))


def test_status_names_the_input_that_changed(finished: tuple[Recipe, Path]) -> None:
    _, run = finished
    manifest = run / "vocab" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace(json.loads(text)["fingerprint"], "0123456789abcdef"))
    status = pipeline.run_status(run)
    manifest.write_text(text)
    assert status["draft"].kind == "stale"
    assert "now '0123456789abcdef'" in status["draft"].changes[0]
    assert status["export"].kind == "done"


def test_status_on_the_command_line(finished: tuple[Recipe, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, run = finished
    assert main(["status", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["traces"]["state"] == "done"
    assert found["traces"]["counts"]["traces"] == 24
    assert main(["status", str(run)]) == 0
    assert "done" in capsys.readouterr().out


def test_a_stage_alone_prints_its_manifest_as_json(
    finished: tuple[Recipe, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, run = finished
    assert main(["vocab", "--run", str(run), "--size", "48", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == {"size": 48}


def test_measure_prints_its_result_as_a_table_or_as_json(
    finished: tuple[Recipe, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, run = finished
    settings = ["--limit", "3", "--rounds", "1", "--timing-questions", "1", "--dtype", "float32", "--device", "cpu"]
    assert main(["measure", "--run", str(run), *settings, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((run / "measure" / "result.json").read_text())
    assert main(["measure", "--run", str(run), *settings]) == 0
    assert "acceptance length" in capsys.readouterr().out


def test_looking_at_a_finished_run_imports_no_torch(finished: tuple[Recipe, Path]) -> None:
    import subprocess

    recipe, run = finished
    path = run.parent / "again.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json", by_alias=True, exclude_none=True)))
    code = (
        "import sys; from draftsmith.__main__ import main; "
        f"code = main(['run', {str(path)!r}, '--run', {str(run)!r}]); "
        "sys.exit(code or ('torch' in sys.modules) * 99)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "acceptance length" in done.stdout


def test_arms_are_run_side_by_side_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = values(tmp_path)
    capture = base.pop("capture")
    questions = {key: capture[key] for key in ("questions", "held_out", "template_options", "thinking")}
    recipe = {
        **base,
        "arms": {
            "static": {"import": {**questions, "tokenizer": capture["local"]}},
            "captured": {"capture": capture},
        },
    }
    (tmp_path / "arms.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["run", str(tmp_path / "arms.yaml"), "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "static" in out
    assert "captured" in out
    assert (tmp_path / "run" / "report" / "report.html").exists()
    assert main(["run", str(tmp_path / "arms.yaml"), "--quiet", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"static", "captured"}


def test_every_stage_names_its_inputs_and_follows_the_corridor() -> None:
    made: set[str] = set()
    for kind in pipeline.KINDS:
        assert set(kind.reads) <= made
        made.add(kind.folder)
    assert pipeline.downstream("traces") == ("vocab", "hidden", "draft", "export", "measure")
    assert pipeline.downstream("draft") == ("export", "measure")
