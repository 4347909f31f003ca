from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.draft.checkpoint import WEIGHTS, load_draft, save_draft
from draftsmith.errors import UserError
from draftsmith.hidden.target_head import TargetHead
from toy_draft import HIDDEN, VOCAB, tiny_draft


def head(vocab: int = VOCAB) -> TargetHead:
    embedding = torch.randn(vocab, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    return TargetHead(embedding, torch.ones(HIDDEN), embedding, 1e-5)


def test_a_saved_draft_is_read_back_bit_for_bit_with_the_targets_embedding(tmp_path: Path) -> None:
    draft, target = tiny_draft(norm_before_residual=True), head()
    save_draft(tmp_path, draft)
    found = load_draft(tmp_path, target, torch.device("cpu"), torch.float32)
    assert found.config == draft.config
    for name, parameter in draft.trained().items():
        assert torch.equal(found.get_parameter(name), parameter), name
    assert torch.equal(found.d2t, draft.d2t) and torch.equal(found.t2d, draft.t2d)
    assert torch.equal(found.embed_tokens.weight, target.embed_tokens)


def test_the_file_holds_float32_masters_and_no_embedding(tmp_path: Path) -> None:
    save_draft(tmp_path, tiny_draft())
    tensors = load_file(tmp_path / WEIGHTS)
    assert set(tensors) == {
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
        *(f"layers.0.{norm}.weight" for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
        *(f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    }
    assert {tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")} == {torch.float32}


def test_parameters_come_in_the_dtype_asked_for(tmp_path: Path) -> None:
    save_draft(tmp_path, tiny_draft())
    found = load_draft(tmp_path, head(), torch.device("cpu"), torch.bfloat16)
    assert {parameter.dtype for parameter in found.parameters()} == {torch.bfloat16}
    assert found.d2t.dtype == torch.int64 and found.rotary.inv_freq.dtype == torch.float32


def test_a_folder_without_a_draft_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a draft checkpoint"):
        load_draft(tmp_path, head(), torch.device("cpu"), torch.float32)


def test_another_targets_embedding_is_refused(tmp_path: Path) -> None:
    save_draft(tmp_path, tiny_draft())
    with pytest.raises(UserError, match=r"expected shape \[64, 32\] by the draft's config, found \[70, 32\]"):
        load_draft(tmp_path, head(70), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, fault: str) -> None:
    save_draft(tmp_path, tiny_draft())
    tensors = load_file(tmp_path / WEIGHTS)
    if fault == "missing":
        del tensors["fc.weight"]
        message = r"missing \['fc.weight'\]"
    elif fault == "unknown":
        tensors["layers.1.mlp.up_proj.weight"] = torch.zeros(1)
        message = r"unknown \['layers.1.mlp.up_proj.weight'\]"
    else:
        tensors["norm.weight"] = torch.zeros(HIDDEN + 1)
        message = r"norm.weight: expected shape \[32\] by its config, found \[33\]"
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(UserError, match=message):
        load_draft(tmp_path, head(), torch.device("cpu"), torch.float32)
