"""A run that holds nothing but greedy traces, and servers that say what its target said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from draftsmith.trace import Trace, write_traces
from speaking_server import SpeakingServer
from toy_chat import save_toy_tokenizer

END, OPEN, CLOSE = 5, 6, 7


def make_captured_run(folder: Path) -> Path:
    """Six held-out questions, captured greedily; nothing else of a run is needed."""
    tokenizer = save_toy_tokenizer(folder / "tokenizer")
    encode = AutoTokenizer.from_pretrained(tokenizer).encode
    traces = []
    for number in range(6):
        prompt = encode(f"<|user|>What is {number} and {number}?<|end|><|assistant|>", add_special_tokens=False)
        traces.append(
            Trace(
                trace_id=f"t{number}",
                question_key=f"q{number}",
                prompt_ids=prompt,
                generated_ids=said(tuple(prompt)),
                sampling=json.dumps({"temperature": 0.0}),
            )
        )
    delimiters = {"family": "think", "open_ids": [[OPEN]], "close_ids": [[CLOSE]]}
    delimiters |= {"open_text": "<think>", "close_text": "</think>"}
    (folder / "run" / "traces").mkdir(parents=True)
    write_traces(
        folder / "run" / "traces" / "part-00000.parquet",
        traces,
        {
            "held_out": "1.0",
            "max_tokens": "64",
            "stop_ids": f"[{END}]",
            "tokenizer": tokenizer,
            "template_options": "{}",
            "preamble": "[]",
            "delimiters": json.dumps(delimiters),
        },
    )
    return folder / "run"


def said(prompt: tuple[int, ...]) -> list[int]:
    """A reply of 30 ids with reasoning of 15, another one to every prompt."""
    start = 20 + prompt[-4] % 7
    return [OPEN, *range(start, start + 15), CLOSE, *range(start + 30, start + 42), END]


def server(engine: str, run: Path, **values: Any) -> SpeakingServer:
    encode = AutoTokenizer.from_pretrained(run.parent / "tokenizer").encode
    tokenize = lambda text: list(encode(text, add_special_tokens=False))  # noqa: E731
    return SpeakingServer(engine, values.pop("say", said), tokenize, **values)
