"""How each engine is told of a draft: its flags, and the whole line for a person to copy. Light: imports no torch."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from draftsmith.recipe import Engine

DRAFT_TOKENS = 3
"""Tokens proposed per step unless a run was measured with others: a start, to be tuned on the real load."""

GGUF_DRAFT, GGUF_TARGET = "draft.gguf", "target.gguf"
"""Files of a llama.cpp export."""


def draft_flags(engine: Engine, folder: str, tokens: int) -> list[str]:
    """The flags that make an engine use the draft in an exported folder.

    vLLM's method must be eagle3 and SGLang's algorithm EAGLE3, else aux states are never used and nothing is accepted
    (P40). llama.cpp drafts nothing without the type, silently; with backend sampling, its default, acceptance halves as
    soon as two requests run together.
    """
    if engine == "llamacpp":
        tail = ["--spec-type", "draft-eagle3", "--spec-draft-n-max", str(tokens), "--no-spec-draft-backend-sampling"]
        return ["--model-draft", str(Path(folder) / GGUF_DRAFT), *tail]
    if engine == "sglang":
        tail = ["--speculative-num-steps", str(tokens), "--speculative-eagle-topk", "1"]
        named = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", folder]
        return [*named, *tail, "--speculative-num-draft-tokens", str(tokens + 1)]
    method = {"method": "eagle3", "model": folder, "num_speculative_tokens": tokens}
    return ["--speculative-config", json.dumps(method)]


def states_flags(folder: str, layers: list[int]) -> list[str]:
    """The flags that make vLLM write the target's states of every request into `folder`, instead of drafting.

    `layers` are ids as vLLM counts them (vllm/transformers_utils/configs/extract_hidden_states.py).
    """
    extract = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
    }
    connector = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
    return ["--speculative-config", json.dumps(extract), "--kv-transfer-config", json.dumps(connector)]


def engine_words(engine: Engine, target: str) -> list[str]:
    """The start of the line on a machine where the engine is installed."""
    if engine == "llamacpp":
        return ["llama-server", "--model", target]
    if engine == "sglang":
        return ["python", "-m", "sglang.launch_server", "--model-path", target]
    return ["vllm", "serve", target]


def launch_line(engine: Engine, target: str, folder: str) -> str:
    """The line that serves a target with the draft in `folder`."""
    if engine == "speculators":  # target, method and number of tokens are in its config.json
        return shlex.join(["vllm", "serve", folder])
    return shlex.join([*engine_words(engine, target), *draft_flags(engine, folder, DRAFT_TOKENS)])
