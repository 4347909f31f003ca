"""A target shaped like Kimi-K2.5, from its folder to a fresh draft and its exports."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftsmith.artifacts import Stage
from draftsmith.errors import UserError
from draftsmith.export.rope import trained_rope
from draftsmith.export.stage import engine_config
from draftsmith.hidden import extract
from draftsmith.hidden.store import HiddenStore
from draftsmith.hidden.target_head import load_target_head
from draftsmith.progress import Progress
from draftsmith.recipe import Engine, ExportSettings, ExtractSettings, TrainSettings
from draftsmith.target.loading import load_model
from draftsmith.trace import Trace, write_traces
from draftsmith.train.start import draft_config
from nested_target import HIDDEN, LAYERS, save_nested_target


@torch.no_grad()
def save_traces(run: Path, target: Path) -> None:
    model = load_model(str(target), torch.float32, torch.device("cpu"), trust_remote_code=True)
    traces = []
    for number in range(3):
        ids = [7] * 12 + [10 + number]
        for _ in range(30):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        traces.append(
            Trace(trace_id=f"t{number}", question_key=f"q{number}", prompt_ids=ids[:13], generated_ids=ids[13:])
        )
    (run / "traces").mkdir(parents=True)
    metadata = {"target": str(target), "source_kind": "capture", "sampling": json.dumps({"temperature": 0.0})}
    write_traces(run / "traces" / "part-00000.parquet", traces, metadata)


def test_depth_width_rope_and_head_come_from_the_text_model(
    tmp_path: Path, make_stage: Callable[[str], Stage], progress: Progress
) -> None:
    target = save_nested_target(tmp_path / "m")
    stage = make_stage("hidden")
    save_traces(stage.run, target)
    settings = ExtractSettings(
        dtype="float32", device="cpu", batch_tokens=256, trust_remote_code=True, layers=[1, 2, 4]
    )
    counts = extract.build(stage, settings, progress)
    assert counts["agreement"] > 0.97  # batching may settle near-ties of a random model otherwise
    stage.work.rename(stage.run / "hidden")
    facts = HiddenStore(stage.run / "hidden").target
    assert (facts["num_layers"], facts["config"]["hidden_size"]) == (LAYERS, HIDDEN)
    assert facts["model_type"] == "deepseek_v3"
    head = load_target_head(stage.run / "hidden")
    assert head.lm_head.shape == head.embed_tokens.shape
    assert not torch.equal(head.lm_head, head.embed_tokens)

    config = draft_config(facts, len(head.embed_tokens), 16, TrainSettings())
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.rope_parameters["original_max_position_embeddings"] == 8
    # P38: the target multiplies its scores by this squared; the draft's cos and sin each carry it once.
    assert trained_rope(config).scale == pytest.approx(0.1 * math.log(64.0) + 1)
    engines: list[Engine] = ["vllm", "speculators", "sglang"]
    for engine in engines:
        engine_config(engine, config, facts, ExportSettings())  # refuses a rope that the engine computes otherwise
    with pytest.raises(UserError, match="found 'yarn'"):
        engine_config("llamacpp", config, facts, ExportSettings())
