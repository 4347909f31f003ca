"""`draftsmith export check`, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.__main__ import main
from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.errors import UserError
from draftsmith.export.checking import _compared
from draftsmith.export.stage import build
from draftsmith.progress import Progress
from draftsmith.recipe import Engine, ExportSettings
from kimi_draft import LLAMA, MLA, PUBLISHED_LLAMA, PUBLISHED_MLA, draft_folder
from toy_export import Exported, toy_config, toy_draft, toy_head, toy_run, toy_target

ENGINES: list[Engine] = ["vllm", "speculators", "sglang"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three exports."""
    config = toy_config()
    head = toy_head(config)
    draft: Eagle3Draft = toy_draft(config, head)
    stage = toy_run(tmp_path / "run", draft, toy_target(config), head)
    build(stage, ExportSettings(engine=ENGINES), Progress(quiet=True))
    stage.work.rename(tmp_path / "run" / "export")
    return tmp_path / "run"


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_every_export_of_a_run_is_compared_with_the_trained_draft_again(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "check", str(run)]) == 0
    text = capsys.readouterr().out
    assert text.count(": fits\n") == 3
    assert text.count("passed   logits: off by") == 3
    assert "SGLang 0.5.23: reads" in text
    assert json.loads((run / "export" / "vllm" / "load_report.json").read_text())["reader"] == "vLLM 0.32"


def test_of_a_run_with_a_gguf_file_an_export_that_can_be_compared_is(
    run: Path,
) -> None:
    gguf = run / "export" / "llamacpp"
    gguf.mkdir()
    assert _compared([gguf, run / "export" / "vllm"], run / "export" / "sglang").ours == str(run / "export" / "vllm")
    with pytest.raises(UserError, match=r"--compare: expected a draft with a config.json .*, found .*llamacpp"):
        _compared([gguf], run / "export" / "vllm")


def test_a_spoilt_export_is_exit_code_2_with_the_reason(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(run / "export" / "vllm", norm_before_residual=True)
    assert main(["export", "check", str(run), "--engine", "vllm"]) == 2
    out, error = capsys.readouterr()
    assert "does NOT fit" in out
    assert error.count("\n") == 1
    assert "export/vllm: norm_before_residual: expected False, found True" in error


def test_a_folder_inside_a_run_knows_its_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "check", str(run / "export" / "sglang"), "--json"]) == 0
    [folder] = json.loads(capsys.readouterr().out)["folders"]
    assert folder["against_trainer"]["difference"] < 1e-6
    # P31: read by the other engine's rules, the same ids are other layers
    assert main(["export", "check", str(run / "export" / "sglang"), "--engine", "vllm"]) == 2
    assert "aux layers (outputs of): expected (1, 3, 4), found (0, 2, 3)" in capsys.readouterr().err


def test_anybodys_draft_is_explained_from_its_files_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Exported(tmp_path / "draft", "sglang").folder
    assert main(["export", "check", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "passed   shapes: the shapes that config.json asks for" in text
    assert "passed   vocabulary: 24 different ids of 64" in text
    assert "layers: outputs of layers [1, 3, 4] of a Llama or Qwen target" in text


# P27
def test_absolute_ids_and_wrong_shapes_are_seen_without_a_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = Exported(tmp_path / "draft", "vllm")
    tensors = load_file(exported.folder / "model.safetensors")
    tensors["d2t"] = exported.draft.target_ids(torch.arange(24))
    save_file(tensors, exported.folder / "model.safetensors")
    edit(exported.folder, intermediate_size=40)
    assert main(["export", "check", str(exported.folder)]) == 2
    text = capsys.readouterr().out
    assert "d2t holds absolute ids" in text
    assert "layers.0.mlp.up_proj.weight [48, 32] instead of [40, 32]" in text


def test_a_draft_of_others_is_walked_over_the_runs_held_out_rows(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Exported(tmp_path / "other", "vllm")
    assert main(["export", "check", str(other.folder), "--run", str(run), "--json"]) == 0
    [folder] = json.loads(capsys.readouterr().out)["folders"]
    assert folder["acceptance"]["traces"] == 4
    assert folder["acceptance"]["acceptance_length"] >= 1
    ids = [1, 2, 3]
    edit(other.folder, eagle_aux_hidden_state_layer_ids=ids, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    assert main(["export", "check", str(other.folder), "--run", str(run)]) == 0
    assert "warning  rows: expected the layers that the draft reads" in capsys.readouterr().out


def test_a_draft_that_the_engine_would_not_run_says_why(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Exported(tmp_path / "other", "vllm")
    edit(other.folder, num_hidden_layers=2)
    assert main(["export", "check", str(other.folder), "--run", str(run)]) == 2
    out, error = capsys.readouterr()
    assert "layers.1: no tensor of this layer is in the files" in out
    assert "cannot be computed here: num_hidden_layers: expected 1, found 2" in out
    assert error.count("\n") == 1


@pytest.mark.parametrize(("config", "published"), [(LLAMA, PUBLISHED_LLAMA), (MLA, PUBLISHED_MLA)])
def test_a_kimi_config_fits_the_published_draft_and_another_width_does_not(
    config: dict[str, object],
    published: dict[str, list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = {**config, "hidden_act": "silu"}
    reference = draft_folder(tmp_path / "published", config, published)
    ours = draft_folder(tmp_path / "ours", config)
    assert main(["export", "check", str(ours), "--compare", str(reference)]) == 0
    assert "names and shapes are the same" in capsys.readouterr().out
    edit(ours, intermediate_size=4096)
    assert main(["export", "check", str(ours), "--compare", str(reference)]) == 2
    assert "not the names and shapes of" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["export", "--help"], ["export", "check", "--help"]])
def test_both_commands_explain_themselves(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 0
    assert f"Usage: draftsmith {' '.join(command[:-1])}" in capsys.readouterr().out


def test_nothing_to_check_is_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "check", str(run), "--engine", "llamacpp"]) == 2
    assert "expected an export for llamacpp, found none" in capsys.readouterr().err
    assert main(["export", "check", str(tmp_path / "nowhere")]) == 2
    assert "config.json" in capsys.readouterr().err


def pickle_weights(folder: Path) -> None:
    """The same weights as torch saves them."""
    path = folder / "model.safetensors"
    torch.save(load_file(path), folder / "pytorch_model.bin")
    path.unlink()


def test_a_draft_of_pickled_weights_is_looked_at_like_any_other(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Exported(tmp_path / "other", "vllm")
    pickle_weights(other.folder)
    assert main(["export", "check", str(other.folder)]) == 0
    text = capsys.readouterr().out
    assert "passed   shapes: the shapes that config.json asks for" in text
    assert "passed   vocabulary: 24 different ids of 64" in text
    assert main(["export", "check", str(other.folder), "--run", str(run)]) == 0
    capsys.readouterr()
    edit(other.folder, intermediate_size=40)
    assert main(["export", "check", str(other.folder)]) == 2
    assert "layers.0.mlp.up_proj.weight [48, 32] instead of [40, 32]" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"no pickle", b"PK\x03\x04 no zip"])
def test_pickled_weights_that_cannot_be_read_are_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Exported(tmp_path / "other", "vllm").folder
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    assert main(["export", "check", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "pytorch_model.bin: expected tensors saved by torch" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_layer_ids_that_no_target_has_are_a_fault(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Exported(tmp_path / "other", engine).folder
    ids = [-9, -8, -7]
    edit(folder, eagle_aux_hidden_state_layer_ids=ids, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    assert main(["export", "check", str(folder)]) == 2
    assert "layers: expected ids of layers that a target has, found [-9, -8, -7]" in capsys.readouterr().err


def test_a_head_that_sglang_drops_does_not_fit(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Exported(tmp_path / "other", "sglang").folder
    edit(folder, tie_word_embeddings=True)
    assert main(["export", "check", str(folder)]) == 2
    assert (
        "lm_head.weight: tie_word_embeddings is true: SGLang serves the target's embedding" in capsys.readouterr().err
    )
    assert main(["export", "check", str(folder), "--engine", "vllm"]) == 0
    capsys.readouterr()
    assert main(["export", "check", str(folder), "--run", str(run)]) == 2
    assert "head: expected lm_head.weight [24, 32], found tie_word_embeddings is true" in capsys.readouterr().err
