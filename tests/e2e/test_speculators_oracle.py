"""An independent implementation as judge: the `speculators` library loads our speculators export and must compute the
same logits. Runs where that library is installed (its own environment: it pins other versions)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.draft.unroll import unroll
from draftsmith.export import speculators as speculators_format
from draftsmith.export.check import STEPS
from draftsmith.export.engine_view import as_engine_runs
from draftsmith.export.load_report import load_report
from draftsmith.export.stage import write_export
from draftsmith.recipe import ExportSettings
from toy_export import LAYERS, Exported, toy_batch, toy_config, toy_target

pytest.importorskip("speculators", reason="the speculators library is not installed")
pytestmark = pytest.mark.slow

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def oracle(folder: Path) -> Any:
    from speculators import SpeculatorModelConfig
    from speculators.models.eagle3.core import Eagle3DraftModel

    config = SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    return Eagle3DraftModel.from_pretrained(str(folder), config=config, dtype=torch.float32).eval()


def oracle_logits(model: Any, aux: Tensor, ids: Tensor) -> list[Tensor]:
    """Logits [T, draft_vocab] of each step, the true tokens as inputs."""
    seen: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0].detach()))
    model(aux, ids, torch.zeros_like(ids), ttt_steps=STEPS)
    hook.remove()
    return seen


@pytest.mark.parametrize(
    "changes",
    [{}, {"norm_before_residual": True}, {"rope_parameters": LLAMA3}, {"draft_vocab_size": 64}, {"head_dim": 16}],
    ids=["plain", "norm_before_residual", "llama3", "whole_vocabulary", "wide_heads"],
)
@torch.no_grad()
def test_the_speculators_library_computes_the_same_logits_from_our_export(changes: Any, tmp_path: Path) -> None:
    verifier = tmp_path / "verifier"
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, vocab_size=64, **shape)).save_pretrained(verifier)
    exported = Exported(tmp_path / "draft", "speculators", ExportSettings(dtype="float32"), **changes)
    target = toy_target(toy_config(**changes), name=str(verifier))
    config = speculators_format.config_json(exported.config, target, "float32")
    write_export(
        tmp_path / "draft", "speculators", config, exported.draft, exported.head, ExportSettings(dtype="float32")
    )
    model = oracle(tmp_path / "draft")
    batch = toy_batch(exported.config, prompt=20, generated=60)
    theirs = oracle_logits(model, batch.aux, batch.ids)
    first = int(batch.first)
    for step, hidden in enumerate(unroll(exported.draft, batch, STEPS)):
        valid = batch.valid(step)[0]
        ours = exported.draft.logits(hidden)[0][valid]
        difference = (theirs[step][first : first + int(valid.sum())] - ours).abs().max() / ours.abs().max()
        print(f"step {step}: largest relative difference {difference:.2g} over {len(ours)} rows")
        assert difference < 1e-5
    assert model.config.eagle_aux_hidden_state_layer_ids == [layer + 1 for layer in exported.config.aux_layers]


@pytest.mark.parametrize(
    "flags",
    [{}, {"norm_before_residual": True}, {"fc_norm": True}, {"norm_before_fc": True}, {"norm_output": True}],
    ids=["plain", "norm_before_residual", "fc_norm", "norm_before_fc", "norm_output"],
)
@torch.no_grad()
def test_a_draft_saved_by_the_library_runs_here_as_the_library_computes_it(
    flags: dict[str, bool], tmp_path: Path
) -> None:
    verifier, shape = tmp_path / "verifier", {"hidden_size": 32, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, vocab_size=64, **shape, **heads)).save_pretrained(verifier)
    exported = Exported(tmp_path / "draft", "speculators", ExportSettings(dtype="float32"))
    config = json.loads((exported.folder / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(verifier)
    (exported.folder / "config.json").write_text(json.dumps(config | flags))
    model = oracle(exported.folder)
    for name, parameter in model.named_parameters():
        if "embed" not in name and "verifier" not in name:
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "theirs")
    assert load_report(tmp_path / "theirs", "vllm").faults == ()
    served = as_engine_runs(tmp_path / "theirs", "vllm", exported.target, exported.head)
    assert [finding.text() for finding in served.findings if finding.outcome == "failed"] == []
    batch = toy_batch(exported.config, prompt=20, generated=60)
    theirs = oracle_logits(model, batch.aux, batch.ids)
    first = int(batch.first)
    for step, hidden in enumerate(unroll(served.draft, batch, STEPS)):
        valid = batch.valid(step)[0]
        ours = served.draft.logits(hidden)[0][valid]
        assert (theirs[step][first : first + int(valid.sum())] - ours).abs().max() / ours.abs().max() < 1e-4
