from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.artifacts import Stage
from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.draft.loading import read_any_draft
from draftsmith.errors import DraftsmithError, UserError
from draftsmith.export import stage as export_stage
from draftsmith.export.stage import build
from draftsmith.progress import Progress
from draftsmith.recipe import ExportSettings
from toy_export import toy_config, toy_draft, toy_head, toy_run, toy_target

QUIET = Progress(quiet=True)


def run(folder: Path, **changes: object) -> tuple[Stage, Eagle3Draft]:
    config = toy_config(**changes)
    head = toy_head(config)
    draft = toy_draft(config, head)
    return toy_run(folder, draft, toy_target(config), head), draft


def test_each_engine_gets_a_folder_with_a_passed_check_and_its_launch_line(tmp_path: Path) -> None:
    stage, draft = run(tmp_path / "run")
    counts = build(stage, ExportSettings(engine=["vllm", "speculators", "sglang"]), QUIET)
    assert counts["engines"].keys() == {"vllm", "speculators", "sglang"}
    assert counts["rows"] == 4 * 9
    for engine, values in counts["engines"].items():
        folder = stage.work / engine
        assert values["difference"] < 1e-6
        assert values["warnings"] == []
        assert json.loads((folder / "check.json").read_text())["passed"] is True
        assert str(tmp_path / "run" / "export" / engine) in (folder / "README.md").read_text()
        assert read_any_draft(folder).config == draft.config


def test_the_embedding_is_left_out_when_asked_and_the_readme_says_who_has_it(tmp_path: Path) -> None:
    stage, _ = run(tmp_path / "run")
    build(stage, ExportSettings(embeddings=False), QUIET)
    assert "embed_tokens.weight" not in load_file(stage.work / "vllm" / "model.safetensors")
    assert "holds no embedding" in (stage.work / "vllm" / "README.md").read_text()


def test_an_engine_that_cannot_express_the_draft_stops_before_anything_is_written(tmp_path: Path) -> None:
    stage, _ = run(tmp_path / "run", norm_before_residual=True)
    with pytest.raises(UserError, match="SGLang does not know"):
        build(stage, ExportSettings(engine=["vllm", "sglang"]), QUIET)
    assert list(stage.work.iterdir()) == []


def test_a_failed_check_is_a_fault_of_ours_that_names_the_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, _ = run(tmp_path / "run")
    write = export_stage.write_export

    def spoilt(folder: Path, *args: object) -> None:
        write(folder, *args)  # type: ignore[arg-type]
        path = folder / "model.safetensors"
        tensors = load_file(path)
        save_file({**tensors, "fc.weight": tensors["fc.weight"].roll(32, dims=1)}, path)

    monkeypatch.setattr(export_stage, "write_export", spoilt)
    with pytest.raises(DraftsmithError, match="does not compute what was trained \\(logits") as caught:
        build(stage, ExportSettings(), QUIET)
    assert caught.value.exit_code == 1
    assert not (stage.work / "vllm" / "check.json").exists()


def test_an_interrupted_export_goes_on_with_the_engines_that_are_missing(tmp_path: Path) -> None:
    stage, _ = run(tmp_path / "run")
    build(stage, ExportSettings(engine=["vllm"]), QUIET)
    weights = stage.work / "vllm" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    counts = build(stage, ExportSettings(engine=["vllm", "sglang"]), QUIET)
    assert weights.stat().st_mtime_ns == before
    assert list(counts["engines"]) == ["vllm", "sglang"]


def test_a_float32_target_and_draft_export_without_any_difference(tmp_path: Path) -> None:
    config = toy_config()
    head = toy_head(config, torch.float32)
    stage = toy_run(tmp_path / "run", toy_draft(config, head), toy_target(config), head)
    counts = build(stage, ExportSettings(dtype="float32"), QUIET)
    assert counts["engines"]["vllm"]["masters_difference"] < 1e-6
    assert counts["engines"]["vllm"]["masters_agreement"] == 1.0
