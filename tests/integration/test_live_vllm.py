"""Capture from a real vLLM server, held against the same model in this process."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.artifacts import read_json
from draftsmith.data.compare import Comparison, compare_traces, logit_margins
from draftsmith.errors import UserError
from draftsmith.pipeline import run_stage
from draftsmith.progress import Progress
from draftsmith.recipe import CaptureSettings, load_recipe
from draftsmith.target.loading import load_model
from draftsmith.target.reply import Sampling
from draftsmith.target.server import ServerTarget
from draftsmith.target.template import Template, load_template
from draftsmith.target.wire import NEUTRAL, ChatFailed, chat_body
from draftsmith.trace import read_metadata, read_traces
from toy_chat import asking

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

ALL = frozenset({"ok", "cut_in_reasoning", "cut_in_answer", "rejected", "failed"})
RECIPE = Path(__file__).parents[2] / "recipes" / "smollm2.yaml"
QUESTIONS = 16
CONTEXT = 1024
"""`--max-model-len` of the server."""
NEAR_TIE = 1e-3
"""Logits closer than this may be ordered differently by another order of additions in float32."""


def capture(run: Path, **changes: Any) -> dict[str, Any]:
    """The recipe's capture with changes; returns the counts."""
    recipe = load_recipe(RECIPE).capture
    assert recipe is not None
    shared = {"local": None, "limit": QUESTIONS, "max_tokens": 96, "exact": "engine", "concurrency": 16}
    settings = CaptureSettings.model_validate(recipe.model_dump() | shared | changes)
    manifest, _ = run_stage(run, "capture", settings, Progress(quiet=True))
    counts: dict[str, Any] = manifest["counts"]
    return counts


def ask(folder: Path, *rows: str) -> dict[str, Any]:
    """Changes of `capture` that ask these questions as they are: no worked examples, and no thinking."""
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in rows))
    return {"questions": str(path), "preamble": [], "template_options": {"thinking": False}, "max_tokens": 8}


@pytest.fixture(scope="module")
def served(vllm_server: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("served-run")
    capture(run, server=[vllm_server])
    return run


@pytest.fixture(scope="module")
def local(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("local-run")
    capture(run, local=smollm2, dtype="float32", batch_size=QUESTIONS)
    return run


@pytest.fixture(scope="module")
def comparison(served: Path, local: Path) -> Comparison:
    return compare_traces(served / "traces", local / "traces")


@pytest.fixture(scope="module")
def template(smollm2: str) -> Template:
    return load_template(smollm2, {}, trust_remote_code=False)


def test_the_server_gives_the_ids_that_the_model_gives_here(comparison: Comparison, smollm2: str) -> None:
    assert (len(comparison.pairs), comparison.only_left, comparison.only_right) == (QUESTIONS, (), ())
    assert [pair.prompt_at for pair in comparison.pairs] == [None] * QUESTIONS
    different = [pair for pair in comparison.pairs if not pair.identical]
    if different:
        model = load_model(smollm2, torch.float32, torch.device("cpu"))
        for pair, margin in zip(different, logit_margins(model, different), strict=True):
            assert margin is not None and margin < NEAR_TIE, (pair.left.trace_id, pair.generated_at, margin)
    assert comparison.share_identical >= 0.9


def test_reasoning_and_answer_are_told_apart_alike(comparison: Comparison) -> None:
    identical = [pair for pair in comparison.pairs if pair.identical]
    for pair in identical:
        for name in ("state", "finish_reason", "reasoning_span", "answer_span", "reasoning", "answer"):
            assert getattr(pair.left, name) == getattr(pair.right, name)
    assert sum(pair.left.state == "ok" and pair.left.reasoning_span is not None for pair in identical) > QUESTIONS // 2


def test_every_id_is_the_engines_own(served: Path, template: Template) -> None:
    counts = read_json(served / "traces" / "manifest.json")["counts"]
    assert counts["ids_source"] == {"engine": QUESTIONS}
    for trace in read_traces(served / "traces", ALL):
        usage = json.loads(trace.usage)
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(trace.prompt_ids), len(trace.generated_ids))
        assert template.decode(trace.prompt_ids).endswith("<|im_start|>assistant\n<think>\n")
        assert (trace.generated_ids[-1] in template.stop_ids) == (trace.finish_reason == "stop")
    server = json.loads(read_metadata(served / "traces")["server"])
    assert (server["model"], server["engine"], server["max_model_len"]) == ("smollm2", "vllm", CONTEXT)
    assert server["version"]


def test_no_sampling_value_is_left_to_the_server(served: Path, vllm_server: str) -> None:  # P05
    trace = next(read_traces(served / "traces"))
    sampling = json.loads(trace.sampling)
    explicit = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0, "max_tokens": 96}
    assert {name: sampling[name] for name in explicit} == explicit
    said = Sampling(max_tokens=96)
    body = json.loads(chat_body("smollm2", json.loads(trace.messages), (), said, {}))
    assert post(vllm_server, body) == list(trace.generated_ids)
    without = {name: value for name, value in body.items() if name not in NEUTRAL}
    assert post(vllm_server, without) != list(trace.generated_ids)  # the trap is real


def test_a_wrong_model_name_lists_what_the_server_offers(vllm_server: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected the model smollm3, the server offers smollm2; name one with --model"):
        capture(tmp_path, server=[vllm_server], model="smollm3")


def test_a_prompt_over_the_context_fails_alone(vllm_server: str, tmp_path: Path) -> None:  # P14
    counts = capture(tmp_path, server=[vllm_server], **ask(tmp_path, "one two " * CONTEXT, "Say hello."))
    assert (counts["failed"], counts["reasons"]) == (1, {"prompt_too_long": 1})
    long, short = read_traces(tmp_path / "traces", ALL)
    assert long.error.startswith("prompt_too_long: ") and str(CONTEXT) in long.error
    assert short.state in ("ok", "cut_in_answer") and short.generated_ids


async def test_the_servers_own_refusal_of_a_long_prompt_is_understood(vllm_server: str) -> None:  # P14
    async with ServerTarget([vllm_server], None, api_key_env="NO_KEY", deadline=60, retries=0) as target:
        await target.connect()
        with pytest.raises(ChatFailed, match=r"^prompt_too_long: .*1024") as refusal:
            await target.chat(
                asking([{"role": "user", "content": "one two " * CONTEXT}], (), Sampling(max_tokens=8), {})
            )
    assert not refusal.value.passing


def test_a_budget_over_the_context_is_clipped_to_what_is_left(vllm_server: str, tmp_path: Path) -> None:  # P14
    changes = ask(tmp_path, "Tell the story of these animals: " + "a cat, a dog, " * 155 + "and a bird.") | {
        "max_tokens": 500
    }
    capture(tmp_path, server=[vllm_server], **changes)
    (trace,) = read_traces(tmp_path / "traces", ALL)
    sampling = json.loads(trace.sampling)
    assert (sampling["max_tokens"], sampling["clipped_from"]) == (CONTEXT - len(trace.prompt_ids), 500)
    assert trace.state in ("ok", "cut_in_answer")
    assert len(trace.generated_ids) <= sampling["max_tokens"]


def test_what_the_reasoning_parser_takes_for_an_answer_is_told_by_its_ids(
    vllm_server: str, tmp_path: Path, template: Template
) -> None:  # P03
    counts = capture(tmp_path, server=[vllm_server], limit=4, max_tokens=8)
    assert counts["cut_in_reasoning"] == 4
    for trace in read_traces(tmp_path / "traces", ALL):
        assert (trace.reasoning_span, trace.answer_span) == ((0, 8), None)
        assert trace.reasoning == template.decode(trace.generated_ids).strip() and trace.answer == ""
    body = json.loads(chat_body("smollm2", json.loads(trace.messages), (), Sampling(max_tokens=8), {}))
    message = reply_of(vllm_server, body)["message"]
    assert message["content"] and not message["reasoning"]  # the parser's own verdict is the wrong one


def test_a_template_option_takes_effect(vllm_server: str, tmp_path: Path, template: Template) -> None:  # P05
    capture(tmp_path, server=[vllm_server], **ask(tmp_path, "Say hello.", "What is 2 + 2?"))
    for trace in read_traces(tmp_path / "traces", ALL):
        assert template.decode(trace.prompt_ids).endswith("<|im_start|>assistant\n")
        assert not json.loads(trace.sampling)["prompt_opened_thinking"]
        assert trace.reasoning_span is None


def post(url: str, body: dict[str, Any]) -> list[int]:
    """The generated ids of one raw chat request."""
    ids: list[int] = reply_of(url, body)["token_ids"]
    return ids


def reply_of(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The choice that a raw chat request gives."""
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        choice: dict[str, Any] = json.load(response)["choices"][0]
    return choice
