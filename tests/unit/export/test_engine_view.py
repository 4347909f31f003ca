"""A faulty draft must run as the engine would run it: what is put right here hides the fault."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.draft.cache import DraftCache, extend
from draftsmith.draft.unroll import unroll
from draftsmith.errors import UserError
from draftsmith.export.engine_view import EngineDraft, as_engine_runs
from draftsmith.export.shapes import MLA_FIELDS
from draftsmith.recipe import Engine
from toy_export import Exported, toy_batch

ENGINES: list[Engine] = ["vllm", "speculators", "sglang", "llamacpp"]
IDS = "eagle_aux_hidden_state_layer_ids"


def served(exported: Exported, engine: Engine | None = None) -> EngineDraft:
    return as_engine_runs(exported.folder, engine or exported.engine, exported.target, exported.head)


def edit(exported: Exported, drop: tuple[str, ...] = (), **changes: Any) -> None:
    """Changes fields of config.json, in the layer's config where they are there."""
    path = exported.folder / "config.json"
    raw = json.loads(path.read_text())
    layer = raw.get("transformer_layer_config", raw)
    for name, value in changes.items():
        (layer if name in layer else raw)[name] = value
    for name in drop:
        raw.pop(name, None)
        layer.pop(name, None)
    path.write_text(json.dumps(raw))


def change_tensors(exported: Exported, drop: tuple[str, ...] = (), **changes: Tensor) -> None:
    path = exported.folder / "model.safetensors"
    tensors = load_file(path) | {name.replace("__", "."): tensor.contiguous() for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if name not in drop}, path)


def found(draft: EngineDraft) -> dict[str, str]:
    return {one.name: one.found for one in draft.findings if one.outcome == "failed"}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_good_export_runs_as_trained_without_the_trainers_draft(engine: Engine, tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", engine)
    one = served(exported)
    assert one.layers == exported.config.aux_layers
    assert found(one) == {}
    rows = torch.arange(exported.config.draft_vocab_size)
    assert torch.equal(one.draft.target_ids(rows), exported.draft.target_ids(rows))
    batch = toy_batch(exported.config)
    pairs = zip(unroll(one.draft, batch, 2), unroll(exported.draft, batch, 2), strict=True)
    for ours, trained in pairs:
        assert torch.allclose(one.draft.logits(ours), exported.draft.logits(trained), atol=0.2)  # bf16 weights


# P31
@pytest.mark.parametrize(("engine", "wrong"), [("vllm", (0, 2, 3)), ("speculators", (0, 2, 3)), ("sglang", (2, 4, 5))])
def test_ids_in_another_engines_meaning_give_other_layers_and_no_error(
    engine: Engine, wrong: tuple[int, ...], tmp_path: Path
) -> None:
    exported = Exported(tmp_path / "draft", engine)
    ids = (
        list(exported.config.aux_layers) if engine != "sglang" else [layer + 1 for layer in exported.config.aux_layers]
    )
    edit(exported, **{IDS: ids, "eagle_config": {IDS: ids}})
    assert served(exported).layers == wrong


# P31
def test_the_embedding_counts_as_layer_minus_one(tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", "vllm")
    edit(exported, **{IDS: [0, 2, 4]})
    assert served(exported).layers == (-1, 1, 3)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_without_ids_the_engines_default_layers_are_taken(engine: Engine, tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", engine, aux_layers=(0, 2, 5))
    edit(exported, drop=(IDS, "eagle_config"))
    assert served(exported).layers == (1, 3, 4)


@pytest.mark.parametrize(("engine", "taken"), [("vllm", False), ("speculators", True)])
def test_a_missing_residual_flag_becomes_the_engines_default(engine: Engine, taken: bool, tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", engine, norm_before_residual=not taken)
    edit(exported, drop=("norm_before_residual",))
    one = served(exported)
    assert one.draft.config.norm_before_residual is taken
    [fields] = [finding for finding in one.findings if finding.name == "fields"]
    assert fields.found == f"missing norm_before_residual ({taken})"


def test_sglang_ignores_the_residual_flag_and_the_finding_says_so(tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", "sglang")
    edit(exported, norm_before_residual=True)
    one = served(exported)
    assert one.draft.config.norm_before_residual is False
    assert "SGLang does not know: it computes False" in found(one)["norm_before_residual in the file"]


# P27
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_absolute_ids_are_added_to_the_row_like_offsets(engine: Engine, tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", engine)
    rows = torch.arange(exported.config.draft_vocab_size)
    absolute = exported.draft.target_ids(rows)
    change_tensors(exported, d2t=absolute)
    one = served(exported)
    assert torch.equal(one.draft.target_ids(rows), (absolute + rows).clamp(max=63))
    assert "absolute ids" in found(one)["vocabulary"]


# P37
def test_an_embedding_in_the_file_is_used_by_vllm_and_not_by_sglang(tmp_path: Path) -> None:
    for engine in ("vllm", "sglang"):
        exported = Exported(tmp_path / engine, engine)
        other = torch.randn_like(exported.head.embed_tokens.float()).bfloat16()
        change_tensors(exported, embed_tokens__weight=other)
        used = served(exported).draft.embed_tokens.weight
        assert torch.equal(used, (other if engine == "vllm" else exported.head.embed_tokens).float())


# P37
def test_without_a_head_vllm_serves_the_first_rows_of_the_targets(tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", "vllm")
    change_tensors(exported, drop=("lm_head.weight",))
    one = served(exported)
    assert torch.equal(one.draft.lm_head.weight, exported.head.lm_head[:24].float())
    assert "head" in found(one)


# P38
def test_a_lost_rope_scaling_gives_the_unscaled_frequencies(tmp_path: Path) -> None:
    exported = Exported(
        tmp_path / "draft", "vllm", rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    )
    right = served(exported).draft.rotary.inv_freq
    edit(exported, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, rope_scaling=None)
    assert torch.allclose(served(exported).draft.rotary.inv_freq, 4 * right)


# P38
@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_decoding_row_by_row_equals_the_unroll_also_where_only_half_a_head_turns(
    engine: Engine, tmp_path: Path
) -> None:
    exported = Exported(tmp_path / "draft", engine)
    if engine == "vllm":
        edit(exported, partial_rotary_factor=0.5)
    one = served(exported)
    assert len(one.draft.rotary.inv_freq) == (2 if engine == "vllm" else 4)
    batch = toy_batch(exported.config)
    [unrolled] = unroll(one.draft, batch, 1)
    cache, rows = DraftCache(one.draft), []
    fused = one.draft.fuse(batch.aux)
    for row in range(batch.ids.shape[1]):
        rows.append(extend(one.draft, cache, batch.ids[:, row : row + 1], fused[:, row : row + 1], row))
    decoded = torch.cat(rows, dim=1)[:, int(batch.first[0]) :]
    assert torch.allclose(decoded, unrolled, atol=1e-4)


def test_norms_around_fc_and_on_the_output_are_computed(tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", "vllm")
    plain = served(exported).draft
    edit(exported, fc_norm=True, norm_output=True)
    weights = {f"fc_norm__{number}__weight": torch.rand(32) + 0.5 for number in range(3)}
    change_tensors(exported, **weights)
    normed = served(exported).draft
    aux = torch.randn(1, 4, 96)
    parts = [part * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
             for part, weight in zip(aux.chunk(3, dim=-1), weights.values(), strict=True)]  # fmt: skip
    assert torch.allclose(normed.fuse(aux), plain.fc(torch.cat(parts, dim=-1)), atol=1e-5)
    attended, residual = torch.randn(1, 4, 4, 8), torch.randn(1, 4, 32)
    inside = plain.finish(attended, residual)
    assert torch.allclose(normed.finish(attended, residual), plain.norm(inside), atol=1e-5)
    assert torch.allclose(normed.logits(normed.finish(attended, residual)), plain.logits(inside), atol=1e-4)


def test_a_norm_that_the_files_lack_stays_at_one(tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", "vllm")
    change_tensors(exported, drop=("layers.0.hidden_norm.weight",))
    one = served(exported)
    assert torch.equal(one.draft.layer.hidden_norm.weight, torch.ones(32))
    assert "the norm's weight is one" in found(one)["norms missing"]


def test_sglang_drops_what_it_does_not_know_where_vllm_stops(tmp_path: Path) -> None:
    for engine in ("sglang", "vllm"):
        exported = Exported(tmp_path / engine, engine)
        change_tensors(exported, extra__weight=torch.zeros(3))
    with pytest.raises(UserError, match=r"found extra.weight: vLLM 0.32 knows no such tensor and stops"):
        served(exported)
    exported = Exported(tmp_path / "again", "sglang")
    change_tensors(exported, extra__weight=torch.zeros(3))
    [warning] = [one for one in served(exported).findings if one.outcome == "warning"]
    assert warning.found == "found extra.weight: SGLang knows no such tensor and says nothing"


@pytest.mark.parametrize(
    ("engine", "config", "tensors", "words"),
    [
        ("vllm", {"num_hidden_layers": 2}, {}, "num_hidden_layers: expected 1, found 2"),
        ("vllm", dict.fromkeys(MLA_FIELDS, 4), {}, "latent attention"),
        ("vllm", {"attention_bias": True}, {}, "attention_bias"),
        ("vllm", {"architectures": ["LlamaForSequenceClassification"]}, {}, "architecture: found"),
        ("sglang", {"architectures": ["LlamaForCausalLM"]}, {}, "architecture: found"),
        ("vllm", {"eagle_config": {"use_aux_hidden_state": False}}, {}, "would ignore them"),
        ("vllm", {IDS: [2, 2, 5]}, {}, r"found 2 \(outputs of layers \[1, 4\]\)"),
        ("vllm", {"intermediate_size": 40}, {}, r"gate_proj.weight \[40, 32\] by its config, found \[48, 32\]"),
        ("vllm", {"draft_vocab_size": 64}, {}, "vocabulary: found one"),
        ("vllm", {"draft_vocab_size": 20}, {}, "found a d2t of 24"),
        ("vllm", {"vocab_size": 65}, {}, "found draft_vocab_size 24, vocab_size 65"),
        ("vllm", {}, {"embed_tokens__weight": torch.zeros(64, 16)}, "embed_tokens.weight"),
    ],
)  # fmt: skip
def test_what_the_engine_would_not_run_is_refused_by_name(
    engine: Engine, config: dict[str, Any], tensors: dict[str, Tensor], words: str, tmp_path: Path
) -> None:
    exported = Exported(tmp_path / "draft", engine)
    edit(exported, **config)
    change_tensors(exported, **tensors)
    with pytest.raises(UserError, match=words):
        served(exported)


def test_a_layer_that_is_not_in_the_files_is_refused_with_what_would_be_served(tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", "vllm")
    change_tensors(exported, drop=("layers.0.mlp.up_proj.weight",))
    with pytest.raises(UserError, match=r"up_proj.weight: .* nobody notices: whatever lies in memory is served"):
        served(exported)


@pytest.mark.parametrize("engine", ["vllm", "speculators", "sglang"])
def test_a_config_of_nothing_but_what_the_engine_needs_runs_on_its_defaults(engine: Engine, tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", engine, num_key_value_heads=4, rms_norm_eps=1e-6)
    needed = ("num_key_value_heads", "head_dim", "rope_parameters", "rope_theta", "max_position_embeddings")
    edit(exported, drop=(*needed, "attention_bias", "mlp_bias", "norm_output", "fc_norm", "eagle_config"))
    one = served(exported)
    assert len(one.draft.rotary.inv_freq) == 4
    assert one.layers == (1, 3, 4)
    assert found(one) == {}


@pytest.mark.parametrize(("engine", "field"), [("speculators", "rms_norm_eps"), ("sglang", "draft_vocab_size")])
def test_a_config_at_which_the_engine_stops_is_refused(engine: Engine, field: str, tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", engine)
    edit(exported, drop=(field,))
    with pytest.raises(UserError, match=f"stops at a config without {field}"):
        served(exported)


def test_vllm_reads_a_speculators_folder_and_any_architecture_it_can_prefix(tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", "speculators")
    assert served(exported, "vllm").engine == "speculators"
    with pytest.raises(UserError, match="expected a config.json that sglang reads, found one in speculators format"):
        served(exported, "sglang")
    flat = Exported(tmp_path / "flat", "vllm")
    edit(flat, architectures=["LlamaForCausalLM"])
    assert found(served(flat)) == {}


@pytest.mark.parametrize(
    ("engine", "words"), [("vllm", "vLLM drafts nothing while any"), ("sglang", "SGLang does not start")]
)
def test_too_few_positions_are_named_with_what_the_engine_does(engine: Engine, words: str, tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", engine)
    exported.target["config"]["max_position_embeddings"] = 4096
    assert [one for one in served(exported).findings if one.name == "positions"] == []
    edit(exported, max_position_embeddings=512)
    one = served(exported)
    assert one.limit == 512
    [positions] = [finding for finding in one.findings if finding.name == "positions"]
    assert words in positions.found


def edit_layer(exported: Exported, **changes: Any) -> None:
    """Changes `transformer_layer_config` of a speculators folder."""
    path = exported.folder / "config.json"
    raw = json.loads(path.read_text())
    raw["transformer_layer_config"].update(changes)
    path.write_text(json.dumps(raw))


def test_a_speculators_top_level_decides_and_the_layers_eagle_config_is_read(tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", "speculators")
    edit_layer(exported, norm_before_residual=True, draft_vocab_size=20, **{IDS: [1, 2, 3]})
    one = served(exported)
    assert one.layers == exported.config.aux_layers
    assert one.draft.config.norm_before_residual is False
    assert found(one) == {}
    edit_layer(exported, eagle_config={"use_aux_hidden_state": False})
    with pytest.raises(UserError, match="would ignore them"):
        served(exported)
    edit_layer(exported, eagle_config={IDS: [1, 2, 3]}, **{IDS: None})
    edit(exported, drop=(IDS,))
    assert served(exported).layers == (0, 1, 2)


def test_a_speculators_draft_vocabulary_only_in_the_layer_is_not_read(tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", "speculators")
    edit(exported, drop=("draft_vocab_size",))
    edit_layer(exported, draft_vocab_size=24)
    with pytest.raises(UserError, match="vocabulary: found one"):
        served(exported)


def test_a_tied_head_is_the_targets_embedding_to_sglang(tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", "sglang")
    edit(exported, tie_word_embeddings=True)
    one = served(exported)
    assert torch.equal(one.draft.lm_head.weight, exported.head.embed_tokens[:24].float())
    assert "tie_word_embeddings is true" in found(one)["head"]


def test_an_embedding_as_head_is_right_only_for_a_tied_target_and_its_whole_vocabulary(tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", "sglang", draft_vocab_size=64)
    edit(exported, tie_word_embeddings=True)
    change_tensors(exported, drop=("lm_head.weight",))
    assert "head" in found(served(exported))
    exported.head = replace(exported.head, lm_head=exported.head.embed_tokens)
    assert found(served(exported)) == {}


@pytest.mark.parametrize(
    ("engine", "config", "words"),
    [
        ("vllm", {"mlp_bias": True}, r"cannot be computed here: mlp_bias \(biases\)"),
        ("vllm", {"num_hidden_layers": 2}, "cannot be computed here: num_hidden_layers"),
        ("speculators", {"model_type": "qwen3"}, r"cannot be computed here: model_type \(Qwen3 layer\)"),
    ],
)
def test_what_an_engine_reads_and_nobody_computes_here_is_said_so(
    engine: Engine, config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    exported = Exported(tmp_path / "draft", engine)
    edit(exported, **config)
    with pytest.raises(UserError, match=words):
        served(exported)


def test_sglangs_mlp_without_biases_is_computed_whatever_the_config_says(tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", "sglang")
    edit(exported, mlp_bias=True)
    assert found(served(exported)) == {}


@pytest.mark.parametrize(("flag", "name"), [("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.1.weight")])
def test_a_norm_around_fc_of_another_width_is_refused(flag: str, name: str, tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", "vllm")
    edit(exported, **{flag: True})
    change_tensors(exported, **{name.replace(".", "__"): torch.ones(1)})
    with pytest.raises(UserError, match=rf"expected {name} \[\d+\] by its config, found \[1\]"):
        served(exported)


@pytest.mark.parametrize("engine", ["vllm", "speculators", "sglang"])
def test_a_rope_without_theta_is_one_line(engine: Engine, tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", engine)
    edit(exported, ("rope_scaling",), rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": None})
    with pytest.raises(UserError, match="expected rope_theta of a default rope as a number, found None"):
        served(exported)


# P38
@pytest.mark.parametrize("engine", ["vllm", "speculators", "sglang"])
def test_a_multimodal_rope_is_the_default_one_for_text(engine: Engine, tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", engine)
    plain = served(exported)
    edit(exported, drop=("rope_parameters",), rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]})
    one = served(exported)
    assert one.rope.difference(plain.rope) is None
    assert found(one) == {}
