"""Two real engines with the same target in float32 say the same, id by id; and what llama.cpp's capture is like."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.artifacts import read_json
from draftsmith.data.compare import compare_traces, logit_margins
from draftsmith.pipeline import run_stage
from draftsmith.progress import Progress
from draftsmith.recipe import CaptureSettings, load_recipe
from draftsmith.target.loading import load_model
from draftsmith.target.template import load_template
from draftsmith.target.thinking import find_delimiters, split
from draftsmith.trace import read_metadata, read_traces
from real_servers import llamacpp

pytestmark = pytest.mark.slow

ALL = frozenset({"ok", "cut_in_reasoning", "cut_in_answer", "rejected", "failed"})
RECIPE = Path(__file__).parents[2] / "recipes" / "smollm2.yaml"
QUESTIONS, CONTEXT = 16, 1024
NEAR_TIE = 1e-3
"""Logits closer than this may be ordered differently by another order of additions in float32."""


def capture(run: Path, url: str, tokenizer: str, **changes: Any) -> dict[str, Any]:
    """The recipe's capture with changes; returns the counts."""
    recipe = load_recipe(RECIPE).capture
    assert recipe is not None
    shared = {"local": None, "server": [url], "tokenizer": tokenizer, "limit": QUESTIONS, "max_tokens": 96}
    shared |= {"exact": "engine", "concurrency": 4}
    settings = CaptureSettings.model_validate(recipe.model_dump() | shared | changes)
    manifest, _ = run_stage(run, "capture", settings, Progress(quiet=True))
    counts: dict[str, Any] = manifest["counts"]
    return counts


@pytest.fixture(scope="module")
def by_llamacpp(smollm2_gguf: Path, smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run captured from llama.cpp, cache in float32 too."""
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("llama.cpp is not installed (extra llamacpp)")
    run = tmp_path_factory.mktemp("llamacpp-run")
    options = ("--model", str(smollm2_gguf), "--slots", "4", "--exact")
    with llamacpp(tmp_path_factory.mktemp("llamacpp-f32"), *options) as url:
        capture(run, url, smollm2)
    return run


def test_every_id_from_llamacpp_is_the_engines_own(by_llamacpp: Path, smollm2: str) -> None:
    template = load_template(smollm2, {}, trust_remote_code=False)
    delimiters = find_delimiters(template, "think")
    counts = read_json(by_llamacpp / "traces" / "manifest.json")["counts"]
    assert counts["ids_source"] == {"engine": QUESTIONS}
    assert counts["with_reasoning"] > QUESTIONS // 2
    for trace in read_traces(by_llamacpp / "traces", ALL):
        assert list(trace.prompt_ids) == template.render(json.loads(trace.messages))
        assert json.loads(trace.usage)["completion_tokens"] == len(trace.generated_ids)
        assert (trace.generated_ids[-1] in template.stop_ids) == (trace.finish_reason == "stop")
        parts = split(delimiters, template, trace.prompt_ids, trace.generated_ids, trace.finish_reason)
        assert (parts.reasoning, parts.answer) == (trace.reasoning_span, trace.answer_span)
    server = json.loads(read_metadata(by_llamacpp / "traces")["server"])
    assert (server["engine"], server["max_model_len"]) == ("llamacpp", CONTEXT)


@pytest.mark.vllm
def test_vllm_and_llamacpp_give_the_same_greedy_ids(
    by_llamacpp: Path, vllm_server: str, smollm2: str, tmp_path: Path
) -> None:
    capture(tmp_path, vllm_server, smollm2)
    comparison = compare_traces(tmp_path / "traces", by_llamacpp / "traces")
    assert (len(comparison.pairs), comparison.only_left, comparison.only_right) == (QUESTIONS, (), ())
    assert [pair.prompt_at for pair in comparison.pairs] == [None] * QUESTIONS
    different = [pair for pair in comparison.pairs if not pair.identical]
    if different:
        model = load_model(smollm2, torch.float32, torch.device("cpu"))
        for pair, margin in zip(different, logit_margins(model, different), strict=True):
            assert margin is not None and margin < NEAR_TIE, (pair.left.trace_id, pair.generated_at, margin)
    assert comparison.share_identical >= 0.9


@pytest.mark.parametrize("probe", [True, False])
def test_llamacpps_own_refusal_of_a_long_prompt_is_understood(
    llamacpp_server: str, smollm2: str, tmp_path: Path, probe: bool
) -> None:  # P14
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("one two " * CONTEXT, "Say hello.")))
    changes = {"questions": str(path), "preamble": [], "template_options": {"thinking": False}, "max_tokens": 8}
    counts = capture(tmp_path / "run", llamacpp_server, smollm2, **changes, probe=probe, exact="any")
    assert (counts["failed"], counts["reasons"]) == (1, {"prompt_too_long": 1})
    long, short = read_traces(tmp_path / "run" / "traces", ALL)
    assert str(CONTEXT) in long.error
    assert short.generated_ids and short.ids_source == ("engine" if probe else "rendered_verified")
