"""What an engine reads, assumes, ignores and drops, from configs and headers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from draftsmith.errors import UserError
from draftsmith.export import llamacpp
from draftsmith.export.gguf_values import Value
from draftsmith.export.launching import GGUF_DRAFT
from draftsmith.export.load_report import LoadReport, load_report
from draftsmith.export.reading import LLAMA_FIELDS, REQUIRED
from draftsmith.recipe import Engine, ExportSettings
from kimi_draft import MLA, PUBLISHED_MLA, draft_folder
from toy_export import Exported

ENGINES: list[Engine] = ["vllm", "speculators", "sglang", "llamacpp"]


def without(folder: Path, *names: str) -> LoadReport:
    """The report of a folder whose config lacks these fields."""
    raw = json.loads((folder / "config.json").read_text())
    for part in (raw, raw.get("transformer_layer_config", {})):
        for name in names:
            part.pop(name, None)
    (folder / "config.json").write_text(json.dumps(raw))
    return load_report(folder, "speculators" if "transformer_layer_config" in raw else "vllm")


def uses(report: LoadReport) -> dict[str, str]:
    return {line.name: line.use for line in (*report.fields, *report.tensors)}


def test_the_defaults_of_a_flat_config_are_those_of_transformers() -> None:
    fresh = LlamaConfig()
    plain = {name: default for name, default in LLAMA_FIELDS.items() if default != REQUIRED}
    for name in ("num_key_value_heads", "head_dim", "rope_parameters"):
        del plain[name]
    assert plain == {name: str(getattr(fresh, name)) for name in plain}
    assert (fresh.num_key_value_heads, fresh.head_dim) == (fresh.num_attention_heads, 4096 // 32)
    assert fresh.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_export_leaves_no_field_to_the_engine_and_no_tensor_behind(engine: Engine, tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", engine)
    report = load_report(exported.folder, engine)
    assert report.faults == ()
    assert [line.name for line in report.fields if line.use in ("default", "stops")] == []
    assert {line.name for line in report.tensors if line.use != "read"} <= {"t2d", "embed_tokens.weight"}
    assert json.loads(json.dumps(report.to_json()))["engine"] == engine


@pytest.mark.parametrize(
    ("engine", "ignored"),
    [
        ("vllm", "attention_dropout, bos_token_id, dtype, eos_token_id, tie_word_embeddings"),
        ("sglang", "attention_dropout, bos_token_id, eagle_aux_hidden_state_layer_ids, eos_token_id, mlp_bias, "
                   "norm_before_residual"),
        ("speculators", "attention_dropout, bos_token_id, dtype, eagle_config, embed_requires_grad, eos_token_id, "
                        "num_aux_hidden_states, tie_word_embeddings"),
        ("llamacpp", "vocab_size"),
    ],
)  # fmt: skip
def test_fields_that_an_engine_ignores_are_listed(engine: Engine, ignored: str, tmp_path: Path) -> None:
    report = load_report(Exported(tmp_path / "draft", engine).folder, engine)
    names = [line.name for line in report.fields if line.use == "ignored" and not line.name.startswith("draftsmith")]
    assert ", ".join(names) == ignored
    assert f"  ignored  {ignored}" in report.text()


def test_a_missing_field_is_named_with_the_default_that_each_format_takes(tmp_path: Path) -> None:
    flat = Exported(tmp_path / "flat", "vllm").folder
    assert "default  norm_before_residual: missing: taken as False\n" in without(flat, "norm_before_residual").text()
    nested = Exported(tmp_path / "nested", "speculators").folder
    text = without(nested, "norm_before_residual", "model_type").text()
    assert "norm_before_residual: missing: taken as True; the speculators library takes False" in text
    assert "model_type: missing: taken as llama; the speculators library takes qwen3" in text


def test_a_field_without_which_the_engine_stops_is_a_fault(tmp_path: Path) -> None:
    folder = Exported(tmp_path / "draft", "speculators").folder
    assert without(folder, "rms_norm_eps").faults == ("rms_norm_eps is missing",)
    sglang = Exported(tmp_path / "sglang", "sglang").folder
    without(sglang, "draft_vocab_size")
    assert load_report(sglang, "sglang").faults == ("draft_vocab_size is missing",)


@pytest.mark.parametrize(
    ("engine", "name", "use"),
    [
        ("vllm", "extra.weight", "stops"),
        ("sglang", "extra.weight", "dropped"),
        ("vllm", "model.fc.weight", "stops"),  # the prefix is put there by vLLM itself
        ("vllm", "input_norm.weight", "skipped"),
        ("sglang", "input_norm.weight", "dropped"),
        ("vllm", "fc_norm.0.weight", "stops"),
        ("vllm", "layers.0.self_attn.rotary_emb.inv_freq", "skipped"),
    ],
)
def test_each_tensor_meets_its_fate(engine: Engine, name: str, use: str, tmp_path: Path) -> None:
    folder = Exported(tmp_path / "draft", engine).folder
    tensors = load_file(folder / "model.safetensors") | {name: torch.zeros(2)}
    save_file(tensors, folder / "model.safetensors")
    report = load_report(folder, engine)
    assert uses(report)[name] == use
    assert bool(report.faults) is (use == "stops")


@pytest.mark.parametrize(
    ("engine", "missing", "use", "words"),
    [
        ("vllm", "lm_head.weight", "unset", "the target's first 24 rows are served under the draft's ids"),
        ("sglang", "lm_head.weight", "unset", "whatever lies in memory is served"),
        ("vllm", "embed_tokens.weight", "shared", "the target's"),
        ("vllm", "layers.0.mlp.up_proj.weight", "unset", "whatever lies in memory is served"),
        ("vllm", "norm.weight", "made", "the norm's weight is one"),
    ],
)
def test_each_missing_tensor_is_named_with_what_is_served_instead(
    engine: Engine, missing: str, use: str, words: str, tmp_path: Path
) -> None:
    folder = Exported(tmp_path / "draft", engine).folder
    tensors = load_file(folder / "model.safetensors")
    del tensors[missing]
    save_file(tensors, folder / "model.safetensors")
    [line] = [line for line in load_report(folder, engine).tensors if line.name == missing]
    assert line.use == use
    assert words in line.note


def test_llamacpp_stops_at_a_missing_key_and_at_a_norm_it_was_promised(tmp_path: Path) -> None:
    exported = Exported(tmp_path / "draft", "llamacpp")
    keys: dict[str, Any] = llamacpp.config_keys(exported.config, exported.target, ExportSettings())
    keys["eagle3.norm_before_fc"] = Value(True, "BOOL")
    del keys["eagle3.target_layers"]
    llamacpp.write_file(exported.folder / GGUF_DRAFT, keys, exported.draft, exported.head, ExportSettings())
    assert load_report(exported.folder, "llamacpp").faults == (
        "target_layers is missing",
        "input_norm.weight: not in the file: llama.cpp stops",
    )


def test_a_latent_attention_draft_is_explained_by_its_header(tmp_path: Path) -> None:
    folder = draft_folder(tmp_path / "kimi", {**MLA, "hidden_act": "silu", "rms_norm_eps": 1e-5}, PUBLISHED_MLA)
    report = load_report(folder, "vllm")
    assert report.faults == ()
    assert {uses(report)[name] for name in PUBLISHED_MLA} == {"read"}
    assert {uses(report)[name] for name in ("kv_lora_rank", "q_lora_rank", "v_head_dim")} == {"read"}


def test_a_checkpoint_of_training_is_no_export(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"aux_layers": [1, 2, 3]}')
    with pytest.raises(UserError, match="found a checkpoint of train's; export it first"):
        load_report(tmp_path, "vllm")


def with_config(folder: Path, layer: dict[str, Any], **top: Any) -> None:
    """Changes fields of the layer's config and of the top level, which in a flat config is the same."""
    raw = json.loads((folder / "config.json").read_text())
    raw.update(top)
    raw.get("transformer_layer_config", raw).update(layer)
    (folder / "config.json").write_text(json.dumps(raw))


def test_a_speculators_top_level_counts_before_the_layer_and_the_layer_before_other_fields(tmp_path: Path) -> None:
    folder = Exported(tmp_path / "draft", "speculators").folder
    eagle = {"use_aux_hidden_state": False}
    layer = {"draft_vocab_size": 20, "norm_output": True, "eagle_config": eagle, "num_aux_hidden_states": 4}
    with_config(folder, layer, hidden_size=999, extra=1)
    report = load_report(folder, "speculators")
    values = {(line.name, line.use): line.value for line in report.fields}
    assert values[("draft_vocab_size", "read")] == "24"
    assert values[("draft_vocab_size (in transformer_layer_config)", "ignored")] == "20"
    assert values[("norm_output", "read")] == "False"
    assert values[("eagle_config", "read")] == str(eagle)
    assert values[("eagle_config (top level)", "ignored")].startswith("{'use_aux_hidden_state': True")
    assert values[("num_aux_hidden_states", "read")] == "4"
    assert values[("hidden_size", "read")] == "32"
    assert values[("hidden_size (top level)", "ignored")] == "999"
    assert values[("extra", "ignored")] == "1"


def test_a_speculators_draft_vocabulary_only_in_the_layer_is_the_whole_one(tmp_path: Path) -> None:
    folder = Exported(tmp_path / "draft", "speculators").folder
    without(folder, "draft_vocab_size")
    with_config(folder, {"draft_vocab_size": 24})
    lines = {line.name: line for line in load_report(folder, "speculators").fields}
    assert (lines["draft_vocab_size"].use, lines["draft_vocab_size"].default) == ("default", "vocab_size")
    assert lines["draft_vocab_size (in transformer_layer_config)"].use == "ignored"


@pytest.mark.parametrize(
    ("engine", "config", "name", "use"),
    [
        ("vllm", {"attention_bias": True}, "layers.0.self_attn.q_proj.bias", "read"),
        ("vllm", {"attention_bias": True}, "layers.0.self_attn.o_proj.bias", "read"),
        ("vllm", {}, "layers.0.self_attn.q_proj.bias", "stops"),
        ("vllm", {"mlp_bias": True}, "layers.0.mlp.down_proj.bias", "read"),
        ("vllm", {"num_hidden_layers": 2}, "layers.1.self_attn.q_proj.weight", "read"),
        ("vllm", {}, "layers.1.self_attn.q_proj.weight", "stops"),
        ("vllm", {"bias": True}, "fc.bias", "stops"),
        ("speculators", {"model_type": "qwen3"}, "layers.0.self_attn.q_norm.weight", "read"),
        ("speculators", {}, "layers.0.self_attn.q_norm.weight", "stops"),
        ("sglang", {"attention_bias": True}, "layers.0.self_attn.q_proj.bias", "dropped"),
        ("sglang", {"attention_bias": True}, "layers.0.self_attn.o_proj.bias", "read"),
        ("sglang", {"mlp_bias": True}, "layers.0.mlp.down_proj.bias", "dropped"),
        ("sglang", {"num_hidden_layers": 2}, "layers.1.mlp.up_proj.weight", "read"),
        ("sglang", {"bias": True}, "fc.bias", "read"),
        ("sglang", {"use_aux_norm": True}, "fc_norm.1.weight", "read"),
        ("sglang", {}, "fc_norm.1.weight", "dropped"),
    ],
)
def test_tensors_that_the_config_makes_room_for_are_read(
    engine: Engine, config: dict[str, Any], name: str, use: str, tmp_path: Path
) -> None:
    folder = Exported(tmp_path / "draft", engine).folder
    with_config(folder, config)
    stored = "aux_norm_mid.weight" if name == "fc_norm.1.weight" else name
    save_file(load_file(folder / "model.safetensors") | {stored: torch.zeros(2)}, folder / "model.safetensors")
    assert uses(load_report(folder, engine))[name] == use


@pytest.mark.parametrize(
    ("engine", "unused"), [("vllm", "layers.1.hidden_norm.weight"), ("sglang", "layers.1.input_layernorm.weight")]
)
def test_a_norm_that_later_layers_do_not_use_is_not_missed(engine: Engine, unused: str, tmp_path: Path) -> None:
    folder = Exported(tmp_path / "draft", engine).folder
    with_config(folder, {"num_hidden_layers": 2})
    assert uses(load_report(folder, engine))["layers.1"] == "unset"
    tensors = {
        name.replace("midlayer.", "layers.0."): one for name, one in load_file(folder / "model.safetensors").items()
    }
    later = {name.replace("layers.0.", "layers.1."): one.clone() for name, one in tensors.items()}
    save_file({name: one for name, one in (later | tensors).items() if name != unused}, folder / "model.safetensors")
    assert load_report(folder, engine).faults == ()


@pytest.mark.parametrize(("present", "use"), [(True, "dropped"), (False, "unset")])
def test_a_tied_head_is_dropped_by_sglang_and_not_by_vllm(present: bool, use: str, tmp_path: Path) -> None:
    folder = Exported(tmp_path / "draft", "sglang").folder
    with_config(folder, {"tie_word_embeddings": True})
    if not present:
        tensors = load_file(folder / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, folder / "model.safetensors")
    report = load_report(folder, "sglang")
    assert uses(report)["lm_head.weight"] == use
    assert "the target's embedding under the draft's ids" in report.faults[0]
    assert uses(load_report(folder, "vllm"))["lm_head.weight"] == ("read" if present else "unset")
