from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.errors import UserError
from draftsmith.target.loading import load_model
from draftsmith.target.weights import read_head_weights
from tiny_target import save_tiny_target


def test_weights_are_those_of_the_model(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "m")
    model = load_model(str(folder), torch.float32, torch.device("cpu"))
    found = read_head_weights(folder, tied=False)
    assert torch.equal(found.embed_tokens, model.model.embed_tokens.weight)
    assert torch.equal(found.norm, model.model.norm.weight)
    assert found.lm_head is not None
    assert torch.equal(found.lm_head, model.lm_head.weight)


def test_a_tied_model_has_no_head_of_its_own(tmp_path: Path) -> None:
    assert read_head_weights(save_tiny_target(tmp_path / "m", tied=True), tied=True).lm_head is None


def test_a_nested_sharded_checkpoint_is_read_from_just_the_shards_that_matter(tmp_path: Path) -> None:
    prefix = "language_model."
    tensors = {"model.embed_tokens.weight": 1.0, "model.norm.weight": 2.0, "lm_head.weight": 3.0}
    weight_map = {f"{prefix}model.layers.0.mlp.weight": "absent.safetensors"}
    for number, (name, value) in enumerate(tensors.items()):
        weight_map[prefix + name] = f"model-{number}.safetensors"
        save_file({prefix + name: torch.full((4, 2), value)}, tmp_path / f"model-{number}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = read_head_weights(tmp_path, tied=False)
    assert found.lm_head is not None
    assert [float(t[0, 0]) for t in (found.embed_tokens, found.norm, found.lm_head)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model.norm.weight": torch.ones(2)}, "found no embed_tokens.weight; tried model.embed_tokens.weight"),
        ({"model.embed_tokens.weight": torch.ones(2, 2), "model.norm.weight": torch.ones(2)}, "found no lm_head"),
        (
            {
                "model.embed_tokens.weight": torch.ones(2, 2),
                "model.norm.weight": torch.ones(2),
                "lm_head.weight": torch.ones(2, 2, dtype=torch.int8),
            },
            "lm_head.weight is quantised",
        ),
        ({}, "expected safetensors weights"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    if tensors:
        save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        read_head_weights(tmp_path, tied=False)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("beside", "scheme"),
    [
        ("lm_head.weight_packed", "int4 or int8 packed, compressed-tensors"),
        ("lm_head.weight_scale_inv", "fp8 in blocks"),
        ("lm_head.weight_scale", "fp8 or int8, compressed-tensors"),
        ("lm_head.weight_global_scale", "nvfp4"),
        ("lm_head.weight_blocks", "mxfp4"),
        ("lm_head_blocks", "mxfp4"),
        ("lm_head.qweight", "GPTQ or AWQ"),
        ("model.embed_tokens.weight_scale", "fp8 or int8"),
        ("language_model.lm_head.weight_packed", "int4"),
        ("model.language_model.embed_tokens.weight_scale", "fp8"),
    ],
)
def test_a_quantised_head_or_embedding_is_refused_with_its_scheme_and_never_taken_for_a_tied_one(
    tmp_path: Path, beside: str, scheme: str, tied: bool
) -> None:
    names = ["model.embed_tokens.weight", "model.norm.weight", beside]
    # No shard exists: the index alone says it.
    index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"is quantised .{scheme}.*{beside} is there"):
        read_head_weights(tmp_path, tied=tied)


def test_the_head_of_a_multimodal_checkpoint_of_transformers_5_is_found(tmp_path: Path) -> None:
    names = ("model.language_model.embed_tokens.weight", "model.language_model.norm.weight", "lm_head.weight")
    save_file({name: torch.full((2, 2), float(n)) for n, name in enumerate(names)}, tmp_path / "model.safetensors")
    found = read_head_weights(tmp_path, tied=False)
    assert found.lm_head is not None
    assert [float(t[0, 0]) for t in (found.embed_tokens, found.norm, found.lm_head)] == [0.0, 1.0, 2.0]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    names = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    index = {"weight_map": dict.fromkeys(names, "model-9.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"model-9.safetensors: expected this shard"):
        read_head_weights(tmp_path, tied=False)
