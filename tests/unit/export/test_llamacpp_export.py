"""The GGUF draft as llama.cpp would compute it. What acceptance cannot show must be caught here, in the files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.draft.layer_ids import from_llamacpp, to_llamacpp
from draftsmith.errors import UserError
from draftsmith.export import llamacpp
from draftsmith.export.check import CheckResult
from draftsmith.export.gguf_values import Value, open_gguf, read_keys
from draftsmith.export.launching import GGUF_DRAFT, GGUF_TARGET
from draftsmith.export.stage import build
from draftsmith.progress import Progress
from draftsmith.recipe import ExportSettings
from draftsmith.target.template import load_template
from toy_export import LAYERS, VOCAB, Exported, failed, toy_config, toy_draft, toy_head, toy_run, toy_target
from toy_tokenizer import save_byte_tokenizer

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def rewrite(exported: Exported, drop: tuple[str, ...] = (), **changes: Value) -> CheckResult:
    """Writes the file again with other keys (`__` for a dot) and checks it."""
    keys = llamacpp.config_keys(exported.config, exported.target, ExportSettings())
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    for name in drop:
        del keys[name]
    llamacpp.write_file(exported.folder / GGUF_DRAFT, keys, exported.draft, exported.head, ExportSettings())
    return exported.check()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True},
        {"rope_parameters": LINEAR},
        {"rope_parameters": LLAMA3},
        {"draft_vocab_size": VOCAB},
        {"head_dim": 16},
    ],
    ids=["plain", "norm_before_residual", "linear", "llama3", "whole_vocabulary", "wide_heads"],
)
def test_the_file_alone_computes_what_was_trained(changes: dict[str, Any], tmp_path: Path) -> None:
    result = Exported(tmp_path / "draft", "llamacpp", ExportSettings(dtype="float32"), **changes).check()
    assert result.passed, result.text()
    assert result.difference is not None and result.difference < 1e-5
    assert [finding for finding in result.findings if finding.outcome == "warning"] == []


def test_rows_of_q_and_k_in_the_order_of_other_engines_show_in_the_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = Exported(tmp_path / "draft", "llamacpp")
    monkeypatch.setattr(llamacpp, "interleaved", lambda rows, heads: rows)
    assert failed(rewrite(exported)).keys() == {"logits"}


# P31
def test_layers_off_by_one_are_named(tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", "llamacpp")
    ids = Value(list(exported.config.aux_layers), "ARRAY", "INT32")
    assert failed(rewrite(exported, eagle3__target_layers=ids)) == {"aux layers (outputs of)": "found (0, 2, 3)"}


# P31
def test_layer_ids_are_inputs_of_layers_in_the_order_of_the_draft() -> None:
    assert to_llamacpp((1, 3, 4), LAYERS) == [2, 4, 5]
    assert from_llamacpp([2, 4, 5], LAYERS) == (1, 3, 4)
    with pytest.raises(UserError, match="distinct, rising"):
        from_llamacpp([4, 2, 5], LAYERS)
    with pytest.raises(UserError, match="the output of the last layer is nobody's input"):
        to_llamacpp((1, 3, LAYERS - 1), LAYERS)


# P29
def test_offsets_where_llamacpp_wants_absolute_ids_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = Exported(tmp_path / "draft", "llamacpp")
    offsets = exported.draft.d2t.clone()
    monkeypatch.setattr(exported.draft, "target_ids", lambda ids: offsets[ids])
    llamacpp.write_file(
        tmp_path / "draft" / GGUF_DRAFT,
        llamacpp.config_keys(exported.config, exported.target, ExportSettings()),
        exported.draft,
        exported.head,
        ExportSettings(),
    )
    monkeypatch.undo()
    assert failed(exported.check()).keys() == {"draft ids"}


# P38
def test_a_lost_rope_factor_is_named(tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", "llamacpp", rope_parameters=LINEAR)
    scaling = ("eagle3.rope.scaling.type", "eagle3.rope.scaling.factor")
    assert "inverse frequencies off" in failed(rewrite(exported, drop=scaling))["rope"]


# P38
def test_a_rope_that_llamacpp_computes_in_its_own_way_is_refused(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    with pytest.raises(UserError, match="llamacpp: the draft: .*found 'yarn'"):
        Exported(tmp_path / "draft", "llamacpp", rope_parameters=yarn)


def test_a_lost_norm_flag_is_named(tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", "llamacpp", norm_before_residual=True)
    found = failed(rewrite(exported, drop=("eagle3.norm_before_residual",)))
    assert found == {"norm_before_residual": "found False", "fields": "missing norm_before_residual (False)"}


def test_a_norm_before_fc_is_named(tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", "llamacpp")
    found = failed(rewrite(exported, eagle3__norm_before_fc=Value(True, "BOOL")))
    assert found["extra norms"] == "found norm_before_fc"
    assert "found input_norm.weight: not in the file: llama.cpp stops" in found["tensors"]


# P37
@pytest.mark.parametrize(
    ("dtype", "noise", "outcome", "words"),
    [
        (torch.bfloat16, 1.0, "failed", "another one (off by"),
        (torch.bfloat16, 0.0, "passed", "equal to the target's bit by bit"),
        (torch.float32, 0.0, "warning", "sharing may not be detected"),
    ],
)
def test_the_embedding_in_the_file_is_judged(
    dtype: torch.dtype, noise: float, outcome: str, words: str, tmp_path: Path
) -> None:
    exported = Exported(tmp_path / "draft", "llamacpp")
    embedding = exported.head.embed_tokens
    other = replace(exported.head, embed_tokens=(embedding + noise * torch.randn_like(embedding)).to(dtype))
    keys = llamacpp.config_keys(exported.config, exported.target, ExportSettings())
    llamacpp.write_file(exported.folder / GGUF_DRAFT, keys, exported.draft, other, ExportSettings())
    [finding] = [finding for finding in exported.check().findings if finding.name == "embedding"]
    assert (finding.outcome, words in finding.found) == (outcome, True)


# P37
def test_a_file_without_a_head_fails_with_a_reduced_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = Exported(tmp_path / "draft", "llamacpp")
    rest = {name: tensor for name, tensor in exported.draft.trained().items() if name != "lm_head.weight"}
    with monkeypatch.context() as patch:
        patch.setattr(exported.draft, "trained", lambda: rest)
        keys = llamacpp.config_keys(exported.config, exported.target, ExportSettings())
        llamacpp.write_file(exported.folder / GGUF_DRAFT, keys, exported.draft, exported.head, ExportSettings())
    assert failed(exported.check()) == {"head": "found none: not in the file: the target's has other rows than d2t"}


# P37
def test_without_the_embedding_the_targets_is_shared(tmp_path: Path) -> None:
    result = Exported(tmp_path / "draft", "llamacpp", ExportSettings(embeddings=False)).check()
    assert result.passed
    assert "the engine shares the target's" in result.text()


def test_a_kind_of_target_that_was_never_tried_is_said(tmp_path: Path) -> None:
    result = Exported(tmp_path / "draft", "llamacpp", target_model_type="qwen3").check()
    assert result.passed
    [warning] = [finding for finding in result.findings if finding.outcome == "warning"]
    assert warning.found == "qwen3 targets were not tried with llama.cpp's EAGLE-3"


def test_the_file_carries_the_targets_tokenizer_and_where_it_comes_from(tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", "llamacpp")
    keys = {name: value.value for name, value in read_keys(open_gguf(tmp_path / "draft" / GGUF_DRAFT)).items()}
    template = load_template(exported.target["name"], {}, trust_remote_code=False)
    assert keys["tokenizer.ggml.tokens"] == template.tokenizer.convert_ids_to_tokens(list(range(VOCAB)))
    assert keys["draftsmith.aux_layers_output_of"] == "[1, 3, 4]"
    assert keys["draftsmith.target_fingerprint"] == exported.target["fingerprint"]


def test_the_stage_writes_draft_check_and_the_line_that_names_the_type(tmp_path: Path) -> None:
    config = toy_config()
    head = toy_head(config, torch.float32)
    target = toy_target(config, name=save_byte_tokenizer(tmp_path / "target", VOCAB))
    stage = toy_run(tmp_path / "run", toy_draft(config, head), target, head)
    counts = build(stage, ExportSettings(engine=["llamacpp"]), Progress(quiet=True))
    folder = stage.work / "llamacpp"
    assert counts["engines"]["llamacpp"]["difference"] < 1e-6
    assert json.loads((folder / "check.json").read_text())["passed"] is True
    readme = (folder / "README.md").read_text()
    for words in (
        "--model target.gguf",
        "--spec-type draft-eagle3",
        "--no-spec-draft-backend-sampling",
        "`draft.gguf`",
    ):
        assert words in readme
    assert not (folder / GGUF_TARGET).exists()


def test_a_target_that_is_not_here_cannot_be_written(tmp_path: Path) -> None:
    config = toy_config()
    head = toy_head(config)
    (tmp_path / "gguf").mkdir()
    exported = Exported(tmp_path / "gguf" / "draft", "llamacpp")
    stage = toy_run(tmp_path / "run", toy_draft(config, head), toy_target(config), head)
    tokenizer = str(exported.folder / GGUF_DRAFT)
    settings = ExportSettings(engine=["llamacpp"], target_gguf="float32", gguf_tokenizer=tokenizer)
    with pytest.raises(UserError, match="expected the target's folder toy/target, found none"):
        build(stage, settings, Progress(quiet=True))
