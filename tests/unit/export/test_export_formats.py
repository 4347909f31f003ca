from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.errors import UserError
from draftsmith.export import sglang, speculators, vllm
from draftsmith.export.launching import launch_line
from draftsmith.export.reading import refuse_inexpressible
from draftsmith.recipe import Engine, ExportSettings
from toy_export import DRAFTED, HIDDEN, VOCAB, Exported, failed, toy_config, toy_target

ENGINES: list[Engine] = ["vllm", "speculators", "sglang"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_export_passes_its_own_check(engine: Engine, dtype: Any, tmp_path: Path) -> None:
    result = Exported(tmp_path, engine, ExportSettings(dtype=dtype)).check()
    assert result.passed, result.text()
    assert result.difference is not None and result.difference < 1e-6
    assert result.masters_difference is not None
    assert (result.masters_difference < 1e-6) == (dtype == "float32")
    assert {finding.outcome for finding in result.findings} == {"passed"}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("changes", [{"draft_vocab_size": VOCAB}, {"num_key_value_heads": 4, "head_dim": 16}])
def test_a_whole_vocabulary_and_other_head_shapes_pass(engine: Engine, changes: dict[str, int], tmp_path: Path) -> None:
    exported = Exported(tmp_path, engine, **changes)
    assert exported.check().passed
    # vLLM has no place for a map of the whole vocabulary.
    assert ("d2t" in load_file(tmp_path / "model.safetensors")) == ("draft_vocab_size" not in changes)


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
def test_a_residual_after_the_norm_is_carried_over(engine: Engine, tmp_path: Path) -> None:
    exported = Exported(tmp_path, engine, norm_before_residual=True)
    assert exported.check().passed
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["norm_before_residual"] is True


def test_sglang_refuses_a_residual_after_the_norm() -> None:
    config = toy_config(norm_before_residual=True)
    with pytest.raises(UserError, match="norm_before_residual true, which SGLang does not know"):
        sglang.config_json(config, toy_target(config), "bfloat16")


# P31
def test_layer_ids_are_written_in_each_engines_meaning_at_both_places() -> None:
    config = toy_config()
    target = toy_target(config)
    for written, ids in (
        (vllm.config_json(config, target, "bfloat16"), [2, 4, 5]),
        (speculators.config_json(config, target, "bfloat16"), [2, 4, 5]),
        (sglang.config_json(config, target, "bfloat16"), [1, 3, 4]),
    ):
        assert written["eagle_aux_hidden_state_layer_ids"] == ids
        assert written["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}


def test_every_field_is_written_whatever_its_default_is() -> None:
    config = toy_config()
    target = toy_target(config)
    flat = vllm.config_json(config, target, "bfloat16")
    assert flat["norm_before_residual"] is False
    assert flat["tie_word_embeddings"] is False
    assert (flat["draft_vocab_size"], flat["vocab_size"]) == (DRAFTED, VOCAB)
    assert (flat["target_hidden_size"], flat["num_aux_hidden_states"]) == (HIDDEN, 3)
    assert (flat["bos_token_id"], flat["eos_token_id"]) == (1, 2)
    assert [flat[name] for name in ("norm_before_fc", "fc_norm", "norm_output", "attention_bias")] == [False] * 4
    nested = speculators.config_json(config, target, "bfloat16")
    verifier = {"name_or_path": "toy/target", "architectures": ["LlamaForCausalLM"]}
    assert nested["speculators_config"]["verifier"] == verifier
    assert nested["transformer_layer_config"]["rope_theta"] == 10000.0


# P40
def test_launch_lines_say_eagle3() -> None:
    vllm_words = shlex.split(launch_line("vllm", "toy/target", "runs/a b/export/vllm"))
    speculative = json.loads(vllm_words[vllm_words.index("--speculative-config") + 1])
    assert speculative["method"] == "eagle3"
    assert speculative["model"] == "runs/a b/export/vllm"
    sglang_words = shlex.split(launch_line("sglang", "toy/target", "runs/a/export/sglang"))
    assert sglang_words[sglang_words.index("--speculative-algorithm") + 1] == "EAGLE3"
    assert sglang_words[sglang_words.index("--speculative-num-steps") + 1] == "3"
    assert sglang_words[sglang_words.index("--speculative-num-draft-tokens") + 1] == "4"
    gguf_words = shlex.split(launch_line("llamacpp", "target.gguf", "runs/a/export/llamacpp"))
    assert gguf_words[gguf_words.index("--spec-type") + 1] == "draft-eagle3"
    assert "--no-spec-draft-backend-sampling" in gguf_words


@pytest.mark.parametrize(
    ("config", "target", "words"),
    [
        ({"hidden_act": "gelu"}, {}, "activation silu, found 'gelu'"),
        ({}, {"config": {"hidden_size": 48}}, "hidden size is 32, the target's 48"),
        ({}, {"layers": [0, 1, 2]}, r"trained on outputs of layers \[1, 3, 4\], the hidden states are of \[0, 1, 2\]"),
        ({"aux_layers": (1, 3)}, {}, "over 3 aux layers, found 2"),
    ],
)
def test_what_no_engine_can_be_told_is_refused(config: dict[str, Any], target: dict[str, Any], words: str) -> None:
    draft = toy_config(**config)
    with pytest.raises(UserError, match=words):
        refuse_inexpressible("vllm", draft, toy_target(draft, **target))


def test_embeddings_keep_the_targets_own_bits(tmp_path: Path) -> None:
    exported = Exported(tmp_path, "vllm", ExportSettings(dtype="float16"))
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["embed_tokens.weight"], exported.head.embed_tokens)
    assert stored["fc.weight"].dtype == torch.float16
    assert not failed(exported.check())


def test_sglang_gets_the_layer_name_that_every_release_reads(tmp_path: Path) -> None:
    Exported(tmp_path, "sglang")
    names = {name.split(".")[0] for name in load_file(tmp_path / "model.safetensors")}
    assert "midlayer" in names and "layers" not in names
