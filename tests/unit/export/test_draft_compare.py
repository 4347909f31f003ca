"""Kimi-K2.5's published draft shapes, and any two draft folders side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.export import vllm
from draftsmith.export.compare import compare_drafts
from draftsmith.export.shapes import Shape, held, promised
from draftsmith.hidden.layers import default_layers
from draftsmith.recipe import TrainSettings
from draftsmith.train.start import draft_config
from kimi_draft import LLAMA, MLA, PUBLISHED_LLAMA, PUBLISHED_MLA, draft_folder


@pytest.mark.parametrize(("config", "published"), [(LLAMA, PUBLISHED_LLAMA), (MLA, PUBLISHED_MLA)])
def test_a_kimi_config_promises_the_published_names_and_shapes(
    tmp_path: Path, config: dict[str, Any], published: dict[str, list[int]]
) -> None:
    ours = draft_folder(tmp_path / "ours", config)
    reference = draft_folder(tmp_path / "reference", config, published)
    found = compare_drafts(ours, reference)
    assert found.fits
    assert found.differences == ()
    assert found.tensors == len(published)
    assert found.from_config == (str(ours),)


def test_a_draft_started_fresh_for_kimi_has_the_published_names_and_shapes(tmp_path: Path) -> None:
    layers, text = 61, {
        **{name: MLA[name] for name in ("hidden_size", "num_attention_heads", "kv_lora_rank", "intermediate_size")},
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0,
                            "original_max_position_embeddings": 4096},
        "max_position_embeddings": 262144,
    }  # fmt: skip
    target = {"name": "kimi", "fingerprint": "", "layers": list(default_layers(layers)), "num_layers": layers}
    target |= {"model_type": "kimi_k2", "config": text}
    config = draft_config(target, 163840, 32000, TrainSettings(intermediate=12288))
    ours = draft_folder(tmp_path / "ours", vllm.config_json(config, target, "bfloat16"))
    assert compare_drafts(ours, draft_folder(tmp_path / "reference", LLAMA, PUBLISHED_LLAMA)).fits


def test_a_wrong_head_count_a_lost_tensor_and_another_key_are_each_named(tmp_path: Path) -> None:
    wrong = {**PUBLISHED_LLAMA, "layers.0.self_attn.k_proj.weight": [1024, 14336]}
    del wrong["d2t"]
    ours = draft_folder(tmp_path / "ours", LLAMA | {"norm_before_residual": True}, wrong)
    found = compare_drafts(ours, draft_folder(tmp_path / "reference", LLAMA, PUBLISHED_LLAMA))
    assert not found.fits
    assert [(one.kind, one.name) for one in found.differences] == [
        ("tensor", "d2t"),
        ("shape", "layers.0.self_attn.k_proj.weight"),
        ("config", "norm_before_residual"),
    ]
    assert "[1024, 14336], the reference has [8192, 14336]" in found.text()


def test_headers_are_read_under_checkpoint_names(tmp_path: Path) -> None:
    folder = draft_folder(tmp_path / "draft", LLAMA, {"model.midlayer.hidden_norm.weight": [7168]})
    assert held(folder) == {"layers.0.hidden_norm.weight": Shape((7168,), "bfloat16")}


def test_a_config_without_a_size_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="kimi/config.json: expected kv_lora_rank|intermediate_size"):
        promised({**MLA, "intermediate_size": None}, "kimi")
