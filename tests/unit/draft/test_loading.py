from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.draft.checkpoint import save_draft
from draftsmith.draft.loading import read_any_draft, target_ids
from draftsmith.errors import UserError
from draftsmith.recipe import Engine
from toy_export import DRAFTED, LAYERS, VOCAB, Exported, toy_config, toy_draft, toy_head, toy_ids


def edit_config(folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in drop}))


def edit_tensors(folder: Path, drop: tuple[str, ...] = (), **changes: Tensor) -> None:
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: value for name, value in tensors.items() if name not in drop}, path)


@pytest.mark.parametrize("engine", ["vllm", "speculators", "sglang"])
def test_every_export_format_is_read_back_as_the_draft_it_came_from(engine: Engine, tmp_path: Path) -> None:
    exported = Exported(tmp_path, engine)
    found = read_any_draft(tmp_path)
    assert found.format == engine
    assert found.config == exported.config
    state = exported.draft.state_dict()
    assert found.tensors.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found.tensors[name].float(), tensor.to(found.tensors[name].dtype).float()), name


def test_a_checkpoint_of_ours_is_read_with_its_own_config(tmp_path: Path) -> None:
    config = toy_config(norm_before_residual=True)
    save_draft(tmp_path, toy_draft(config, toy_head(config)))
    found = read_any_draft(tmp_path)
    assert (found.format, found.config) == ("draftsmith", config)
    assert "embed_tokens.weight" not in found.tensors


def test_a_missing_norm_before_residual_means_false_in_flat_and_true_in_speculators_format(tmp_path: Path) -> None:
    for engine, expected in (("vllm", False), ("speculators", True)):
        folder = tmp_path / engine
        Exported(folder, engine)
        edit_config(folder, drop=("norm_before_residual",))
        found = read_any_draft(folder)
        assert found.config.norm_before_residual is expected
        assert f"norm_before_residual is missing: {expected}" in found.notes[0]


def test_a_full_vocabulary_needs_no_map(tmp_path: Path) -> None:
    Exported(tmp_path, "vllm", draft_vocab_size=VOCAB)
    found = read_any_draft(tmp_path)
    assert found.tensors["d2t"].tolist() == [0] * VOCAB
    assert bool(found.tensors["t2d"].all())


def test_head_rows_come_in_order_of_their_ids(tmp_path: Path) -> None:
    exported = Exported(tmp_path, "vllm")
    order = torch.randperm(DRAFTED, generator=torch.Generator().manual_seed(0))
    stored = load_file(tmp_path / "model.safetensors")
    ids = toy_ids(exported.config)[order]
    edit_tensors(tmp_path, **{"d2t": ids - torch.arange(DRAFTED), "lm_head.weight": stored["lm_head.weight"][order]})
    found = read_any_draft(tmp_path)
    assert torch.equal(found.tensors["lm_head.weight"], stored["lm_head.weight"])
    assert found.tensors["d2t"].tolist() == exported.draft.d2t.tolist()
    assert "not in rising order" in found.notes[-1]


# P31
def test_flat_layer_ids_of_unknown_origin_mean_inputs_unless_they_are_the_default_outputs(tmp_path: Path) -> None:
    Exported(tmp_path, "vllm")
    ids = [1, 3, 4]  # the default outputs of a target of 8 layers
    eagle = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    edit_config(tmp_path, drop=("draftsmith",), eagle_aux_hidden_state_layer_ids=ids, eagle_config=eagle)
    assert read_any_draft(tmp_path, target_layers=LAYERS).config.aux_layers == (1, 3, 4)
    deeper = read_any_draft(tmp_path, target_layers=16)
    assert deeper.config.aux_layers == (0, 2, 3)
    assert "are read as vLLM reads them" in deeper.notes[-1]


def test_layer_ids_only_in_eagle_config_are_found(tmp_path: Path) -> None:
    exported = Exported(tmp_path, "vllm")
    edit_config(tmp_path, drop=("eagle_aux_hidden_state_layer_ids",))
    assert read_any_draft(tmp_path).config.aux_layers == exported.config.aux_layers


def test_a_draft_that_names_no_layers_takes_the_default_of_its_target(tmp_path: Path) -> None:
    Exported(tmp_path, "vllm")
    edit_config(tmp_path, drop=("eagle_aux_hidden_state_layer_ids", "eagle_config", "draftsmith"))
    assert read_any_draft(tmp_path, target_layers=LAYERS).config.aux_layers == (1, 3, 4)
    with pytest.raises(UserError, match="names no aux layers"):
        read_any_draft(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers 1, found 2"),
        ({"target_hidden_size": 48}, "target_hidden_size 32, found 48"),
        ({"norm_before_fc": True, "eagle_config": {}}, "norm_before_fc False, found True"),
        ({"fc_norm": True}, "fc_norm False, found True"),
        ({"attention_bias": True}, "attention_bias False, found True"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state True, found False"),
        ({"model_type": "kimi_k2"}, "model_type of the layer 'llama', found 'kimi_k2'"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
    ],
)
def test_what_our_draft_cannot_compute_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    Exported(tmp_path, "vllm")
    edit_config(tmp_path, **changes)
    with pytest.raises(UserError, match=named):
        read_any_draft(tmp_path)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ("midlayer.self_attn.q_a_proj.weight", "an MLA draft"),
        ("layers.1.mlp.up_proj.weight", "more than one layer"),
        ("layers.0.self_attn.q_norm.weight", "a Qwen3 layer"),
        ("fc_norm.0.weight", "normalises the aux states"),
        ("layers.0.self_attn.q_proj.bias", "biases"),
        ("something.weight", "is this an EAGLE-3 draft?"),
    ],
)
def test_unknown_tensors_are_named_never_dropped(tensor: str, words: str, tmp_path: Path) -> None:
    Exported(tmp_path, "vllm")
    edit_tensors(tmp_path, **{tensor: torch.zeros(2)})
    with pytest.raises(UserError, match=f"{tensor.removeprefix('midlayer.')}.*{words}"):
        read_any_draft(tmp_path)


def test_a_missing_tensor_and_a_wrong_shape_are_named(tmp_path: Path) -> None:
    Exported(tmp_path, "vllm")
    edit_tensors(tmp_path, **{"fc.weight": torch.zeros(32, 64)})
    with pytest.raises(UserError, match=r"expected fc.weight \[32, 96\] by its config, found \[32, 64\]"):
        read_any_draft(tmp_path)
    edit_tensors(tmp_path, drop=("fc.weight",))
    with pytest.raises(UserError, match=r"expected a tensor fc.weight \[32, 96\], found none"):
        read_any_draft(tmp_path)


# P37
def test_a_reduced_vocabulary_without_head_or_map_is_refused(tmp_path: Path) -> None:
    Exported(tmp_path, "vllm")
    edit_tensors(tmp_path, drop=("lm_head.weight",))
    with pytest.raises(UserError, match=r"expected lm_head.weight for a reduced vocabulary \(24 of 64 ids\)"):
        read_any_draft(tmp_path)
    edit_tensors(tmp_path, drop=("d2t",))
    with pytest.raises(UserError, match="expected a d2t for 24 of 64 ids"):
        read_any_draft(tmp_path)


def test_missing_or_broken_weights_are_a_clear_line(tmp_path: Path) -> None:
    Exported(tmp_path, "vllm")
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(UserError, match="expected safetensors, found something else"):
        read_any_draft(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"expected the draft's weights \(model.safetensors\), found no such file"):
        read_any_draft(tmp_path)


def test_weights_in_several_shards_or_in_a_bin_of_tensors_are_read(tmp_path: Path) -> None:
    exported = Exported(tmp_path, "vllm")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for part, some in (("a.safetensors", names[:5]), ("b.safetensors", names[5:])):
        save_file({name: tensors[name] for name in some}, tmp_path / part)
        weight_map.update(dict.fromkeys(some, part))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert read_any_draft(tmp_path).tensors.keys() == exported.draft.state_dict().keys()
    index.unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert read_any_draft(tmp_path).tensors.keys() == exported.draft.state_dict().keys()


# P27
def test_offsets_resolve_to_the_kept_ids() -> None:
    assert target_ids(torch.tensor([5, 8, 10]), 13, "draft").tolist() == [5, 9, 12]


# P27, P29
@pytest.mark.parametrize(
    ("d2t", "vocab", "kept", "words"),
    [
        ([5, 9, 12], 13, None, "holds absolute ids"),
        ([5, 9, 12], 64, [5, 9, 12], "holds absolute ids"),
        ([0, 1, 2], 13, None, "an arange"),
        ([5, 8, 10], 13, [3, 7, 9], "and t2d names other ids"),
        ([5, 4, 3], 13, None, "found ids from 5 to 5, 1 different"),
        ([-1, 0, 0], 13, None, "found ids from -1 to 2"),
        ([5, 8, 20], 13, None, "d2t"),
    ],
)
def test_a_map_that_cannot_be_right_is_refused_by_name(
    d2t: list[int], vocab: int, kept: list[int] | None, words: str
) -> None:
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[torch.tensor(kept or [], dtype=torch.int64)] = True
    with pytest.raises(UserError, match=words):
        target_ids(torch.tensor(d2t), vocab, "draft", t2d if kept is not None else None)


# P27
def test_a_large_map_of_absolute_ids_is_recognised_even_where_it_stays_in_range() -> None:
    ids = torch.arange(300) * 3
    with pytest.raises(UserError, match="absolute ids"):
        target_ids(ids, 2000, "draft")


# P27
def test_a_map_that_t2d_confirms_is_taken_as_it_is() -> None:
    ids = torch.arange(300) * 2  # every other id: offsets that look like an arange
    t2d = torch.zeros(600, dtype=torch.bool).index_fill_(0, ids, True)
    assert target_ids(ids - torch.arange(300), 600, "draft", t2d).tolist() == ids.tolist()
    with pytest.raises(UserError, match="an arange"):
        target_ids(ids - torch.arange(300), 600, "draft")


def test_the_top_level_of_a_speculators_config_counts_before_the_layers(tmp_path: Path) -> None:
    exported = Exported(tmp_path, "speculators", norm_before_residual=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    layer = {"norm_before_residual": False, "draft_vocab_size": 20, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    edit_config(tmp_path, transformer_layer_config={**raw["transformer_layer_config"], **layer})
    assert read_any_draft(tmp_path).config == exported.config


def test_pickled_weights_are_read_and_broken_ones_are_one_line(tmp_path: Path) -> None:
    exported = Exported(tmp_path, "vllm")
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert read_any_draft(tmp_path).config == exported.config
    torch.save({"epoch": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model.bin: expected nothing but named tensors"):
        read_any_draft(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(UserError, match=r"pytorch_model.bin: expected tensors saved by torch"):
        read_any_draft(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 3}, "hidden_size 32, num_attention_heads 3, head_dim 8; such a draft cannot be read"),
        ({"hidden_size": "wide"}, "hidden_size 'wide'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}, "rope_scaling": None}, "factor"),
    ],
)
def test_a_layer_that_transformers_refuses_is_one_line(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    Exported(tmp_path, "vllm")
    edit_config(tmp_path, **changes)
    with pytest.raises(UserError, match=words) as error:
        read_any_draft(tmp_path)
    assert "\n" not in str(error.value)
