from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.export.check import compare
from draftsmith.export.rope import engine_rope, trained_rope, written_rope
from draftsmith.recipe import Engine, ExportSettings
from toy_export import Exported, failed, toy_draft

SMALL: dict[str, Any] = {"hidden_size": 8, "target_vocab_size": 16, "draft_vocab_size": 6, "intermediate_size": 12}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 32.0, "original_max_position_embeddings": 4096}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_layer(folder: Path, engine: Engine, drop: tuple[str, ...] = (), **changes: Any) -> None:
    """Changes fields of the layer's config, wherever the format keeps them."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    layer = raw["transformer_layer_config"] if engine == "speculators" else raw
    layer.update(changes)
    for name in drop:
        del layer[name]
    path.write_text(json.dumps(raw))


def replace(folder: Path, name: str, tensor: Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


# P37
def test_a_random_embedding_fails_where_the_engine_would_use_it(tmp_path: Path) -> None:
    exported = Exported(tmp_path, "vllm", **SMALL)
    replace(tmp_path, "embed_tokens.weight", torch.randn(16, 8).bfloat16())
    assert "which the engine would use as it is" in failed(exported.check())["embedding"]


# P37
def test_sglang_uses_the_targets_embedding_whatever_the_file_holds(tmp_path: Path) -> None:
    exported = Exported(tmp_path, "sglang", **SMALL)
    replace(tmp_path, "embed_tokens.weight", torch.randn(16, 8).bfloat16())
    result = exported.check()
    assert result.passed
    assert "always uses the target's" in result.text()


# P37
def test_no_embedding_passes_because_the_targets_is_shared(tmp_path: Path) -> None:
    result = Exported(tmp_path, "vllm", ExportSettings(embeddings=False), **SMALL).check()
    assert result.passed
    assert "not in the file: the engine shares the target's" in result.text()


# P37
def test_an_equal_embedding_passes_and_the_report_says_so(tmp_path: Path) -> None:
    result = Exported(tmp_path, "vllm", **SMALL).check()
    assert result.passed
    assert "equal to the target's bit by bit" in result.text()


# P37
def test_a_copy_in_another_dtype_warns_that_sharing_may_not_be_detected(tmp_path: Path) -> None:
    exported = Exported(tmp_path, "vllm", **SMALL)
    replace(tmp_path, "embed_tokens.weight", exported.head.embed_tokens.float())
    result = exported.check()
    assert result.passed
    [warning] = [finding for finding in result.findings if finding.outcome == "warning"]
    assert warning.name == "embedding"
    assert "sharing may not be detected" in warning.found


# P37
def test_a_missing_head_fails_with_a_reduced_vocabulary(tmp_path: Path) -> None:
    exported = Exported(tmp_path, "vllm", **SMALL)
    replace(tmp_path, "lm_head.weight", None)
    found = failed(exported.check())
    assert found.keys() == {"head"}
    assert "the target's first 6 rows are served under the draft's ids" in found["head"]


# P37
def test_a_missing_head_with_the_whole_vocabulary_means_the_targets_head_and_other_logits(tmp_path: Path) -> None:
    exported = Exported(tmp_path, "vllm", **{**SMALL, "draft_vocab_size": 16})
    replace(tmp_path, "lm_head.weight", None)
    result = exported.check()
    assert failed(result).keys() == {"logits"}
    with torch.no_grad():
        exported.draft.lm_head.weight.copy_(exported.head.lm_head)
    assert exported.check().passed


def test_one_changed_weight_shows_in_the_logits(tmp_path: Path) -> None:
    exported = Exported(tmp_path, "vllm")
    weight = load_file(tmp_path / "model.safetensors")["layers.0.self_attn.k_proj.weight"]
    replace(tmp_path, "layers.0.self_attn.k_proj.weight", weight.roll(1, dims=0))
    assert failed(exported.check()).keys() == {"logits"}


def test_weights_that_are_not_numbers_fail(tmp_path: Path) -> None:
    exported = Exported(tmp_path, "vllm")
    replace(tmp_path, "norm.weight", torch.full((32,), float("nan"), dtype=torch.bfloat16))
    assert failed(exported.check()).keys() == {"logits"}


def test_a_lost_norm_flag_is_named(tmp_path: Path) -> None:
    for engine in ("vllm", "speculators"):
        exported = Exported(tmp_path / engine, engine, norm_before_residual=engine == "vllm")
        path = tmp_path / engine / "config.json"
        raw = json.loads(path.read_text())
        del raw["norm_before_residual"]
        path.write_text(json.dumps(raw))
        found = failed(exported.check())
        assert found["norm_before_residual"] == f"found {engine == 'speculators'}"
        assert found["fields"] == f"missing norm_before_residual ({engine == 'speculators'})"


# P31
@pytest.mark.parametrize("engine", ["vllm", "speculators", "sglang"])
def test_layer_ids_off_by_one_are_named(engine: Engine, tmp_path: Path) -> None:
    exported = Exported(tmp_path, engine)
    raw = json.loads((tmp_path / "config.json").read_text())
    ids = [layer + 1 for layer in raw["eagle_aux_hidden_state_layer_ids"]]
    eagle = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    edit(tmp_path, eagle_aux_hidden_state_layer_ids=ids, eagle_config=eagle)
    assert failed(exported.check()) == {"aux layers (outputs of)": "found (2, 4, 5)"}


# P31
def test_duplicate_layer_ids_fail_because_one_state_would_be_missing(tmp_path: Path) -> None:
    exported = Exported(tmp_path, "vllm")
    edit(tmp_path, eagle_aux_hidden_state_layer_ids=[2, 2, 5])
    assert failed(exported.check())["aux states used"] == "found 2 (outputs of layers [1, 4])"


# P40
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_draft_that_would_ignore_the_aux_states_fails(engine: Engine, tmp_path: Path) -> None:
    exported = Exported(tmp_path, engine)
    raw = json.loads((tmp_path / "config.json").read_text())
    edit(tmp_path, eagle_config={**raw["eagle_config"], "use_aux_hidden_state": False})
    found = failed(exported.check())
    assert found == {"aux states used": "found use_aux_hidden_state false: the draft would ignore them"}


def test_an_architecture_the_engine_has_no_draft_for_fails(tmp_path: Path) -> None:
    exported = Exported(tmp_path, "sglang")
    edit(tmp_path, architectures=["Eagle3LlamaForCausalLM"])
    assert failed(exported.check()).keys() == {"architecture"}


# P27
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d2t: d2t + torch.arange(len(d2t)), "absolute ids"),
        (lambda d2t: torch.arange(len(d2t)), "an arange"),
        (lambda d2t: d2t + 1, "t2d names other ids"),
        (lambda d2t: None, "found no d2t"),
    ],
)
def test_a_vocabulary_map_that_is_not_the_trainers_fails(spoil: Any, words: str, tmp_path: Path) -> None:
    exported = Exported(tmp_path, "vllm")
    replace(tmp_path, "d2t", spoil(exported.draft.d2t))
    assert words in failed(exported.check())["vocabulary"]


# P29
def test_another_map_of_the_same_size_fails(tmp_path: Path) -> None:
    exported = Exported(tmp_path, "vllm")
    replace(tmp_path, "d2t", exported.draft.d2t - 1)
    replace(tmp_path, "t2d", exported.draft.t2d.roll(-1))
    assert failed(exported.check()) == {"draft ids": "24 head rows mean other ids"}


def test_a_map_beside_a_whole_vocabulary_fails_for_vllm_would_not_load_it(tmp_path: Path) -> None:
    exported = Exported(tmp_path, "vllm", draft_vocab_size=64)
    replace(tmp_path, "d2t", torch.zeros(64, dtype=torch.int64))
    assert failed(exported.check())["vocabulary"] == "found one"


# P38
@pytest.mark.parametrize("engine", ["vllm", "speculators", "sglang"])
@pytest.mark.parametrize("rope", [LLAMA3, YARN, LINEAR])
def test_scaled_rope_is_exported_with_the_frequencies_of_training(
    engine: Engine, rope: dict[str, Any], tmp_path: Path
) -> None:
    exported = Exported(tmp_path, engine, rope_parameters=rope)
    assert exported.check().passed


# P38
@pytest.mark.parametrize("engine", ["vllm", "speculators", "sglang"])
@pytest.mark.parametrize(
    ("style", "passes"),
    [
        ({"drop": ("rope_theta", "rope_scaling")}, True),  # nested, new style
        ({"drop": ("rope_parameters",)}, True),  # flat, old style
        ({"drop": ("rope_parameters",), "rope_scaling": None}, False),  # theta only
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "rope_scaling": None}, False),
        ({"drop": ("rope_parameters",), "rope_theta": 10000.0, "rope_scaling": None}, False),
        ({"partial_rotary_factor": 0.25}, False),
    ],
)
def test_only_configs_with_the_trained_frequencies_pass(
    engine: Engine, style: dict[str, Any], passes: bool, tmp_path: Path
) -> None:
    exported = Exported(tmp_path, engine, rope_parameters=LLAMA3)
    edit_layer(tmp_path, engine, **style)
    assert ("rope" not in failed(exported.check())) is passes


# P38
def test_values_that_training_ignored_are_not_exported(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 2]}
    exported = Exported(tmp_path, "vllm", rope_parameters=rope)
    assert written_rope(exported.config)["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert exported.check().passed


# P38
def test_a_rope_type_that_engines_compute_differently_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(UserError, match="rope type 'dynamic': expected one of default, linear, llama3, yarn"):
        Exported(tmp_path, "vllm", rope_parameters=rope)


# P38
def test_sglang_does_not_read_an_attention_factor_so_such_a_draft_is_refused(tmp_path: Path) -> None:
    rope = {**YARN, "attention_factor": 2.0}
    assert Exported(tmp_path / "vllm", "vllm", rope_parameters=rope).check().passed
    with pytest.raises(UserError, match="sglang: cannot be told the draft's rope .*: cos/sin at position 0 off by"):
        Exported(tmp_path / "sglang", "sglang", rope_parameters=rope)


@pytest.mark.parametrize("rope", [LLAMA3, YARN, LINEAR, {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}])
def test_the_engines_formulas_agree_with_transformers(rope: dict[str, Any], tmp_path: Path) -> None:
    exported = Exported(tmp_path, "vllm", rope_parameters=rope, head_dim=128, num_attention_heads=2)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert trained_rope(exported.config).difference(engine_rope("vllm", raw)) is None


def test_nothing_to_compare_on_is_a_clear_line(tmp_path: Path) -> None:
    exported = Exported(tmp_path, "vllm")
    draft = toy_draft(exported.config, exported.head)
    with pytest.raises(UserError, match="expected supervised rows to compare on, found none"):
        compare(draft, draft, [])
