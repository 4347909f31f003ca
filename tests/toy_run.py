"""A run folder as the stages leave it, made in code: what the report reads, small and seeded."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from draftsmith.artifacts import write_json
from draftsmith.trace import Trace, trace_id, write_traces
from toy_chat import save_toy_tokenizer

PREAMBLE = "You solve grade-school maths problems. First think step by step, then give the final answer."
QUESTION = "Tom has {a} boxes with {b} pens each. He gives away {c} pens. How many pens are left?"
REASONING = "Tom has {a} * {b} = {ab} pens.\nHe gives away {c}, so {ab} - {c} = {left} pens are left."
ANSWER = "Tom has {left} pens left."


def make_run(run: Path, traces: int = 60) -> Path:
    """All stages of a run, measured with a speed-up of 1.21."""
    make_traces(run, traces)
    make_vocab(run)
    make_draft(run)
    make_export(run)
    make_measure(run)
    return run


def make_traces(run: Path, count: int = 60, source_kind: str = "capture", text: str = REASONING) -> None:
    """`count` traces of all states, the first id of each reply being the opening delimiter; `text` is the reasoning."""
    tokenizer = save_toy_tokenizer(run / "tokenizer")
    encode = AutoTokenizer.from_pretrained(tokenizer).encode
    rng = random.Random(0)
    traces = [_trace(number, rng, encode, text) for number in range(count)]
    folder = run / "traces"
    folder.mkdir(parents=True)
    write_traces(
        folder / "part-00000.parquet",
        traces,
        {"tokenizer": tokenizer, "target": "toy", "source_kind": source_kind, "held_out": "0.1", "vocab_size": "256"},
    )
    settings = {"local": "toy/Toy-Thinker-1B", "max_tokens": 160, "trust_remote_code": False}
    write_manifest(folder, settings, {"questions": count, "traces": count})


def _trace(number: int, rng: random.Random, encode: Any, text: str) -> Trace:
    numbers = {"a": rng.randint(2, 60), "b": rng.randint(2, 90), "c": rng.randint(1, 4)}
    numbers |= {"ab": numbers["a"] * numbers["b"], "left": numbers["a"] * numbers["b"] - numbers["c"]}
    prompt = f"<|system|>{PREAMBLE}<|end|><|user|>{QUESTION.format(**numbers)}<|end|><|assistant|>"
    reasoning = "\n".join([text.format(**numbers)] * rng.randint(1, 4))
    answer = ANSWER.format(**numbers)
    thought = [*encode("<think>"), *encode(reasoning)]
    generated = [*thought, *encode("</think>"), *encode(answer), *encode("<|end|>")]
    common: dict[str, Any] = {
        "trace_id": trace_id(f"question-{number}", 0, 0),
        "question_key": f"question-{number}",
        "source": "toy",
        "messages": json.dumps([{"role": "user", "content": QUESTION.format(**numbers)}]),
        "prompt_ids": encode(prompt),
    }
    if number % 20 == 7:
        return Trace(**common, state="failed", error=f"http_500: the server broke at request {number}")
    if number % 20 == 9:
        return Trace(**common, generated_ids=[1], state="rejected", error="too_short: 1 generated id")
    if number % 10 == 3:
        cut = thought[: len(thought) // 2]
        return Trace(
            **common,
            generated_ids=cut,
            finish_reason="length",
            state="cut_in_reasoning",
            reasoning_span=(1, len(cut)),
            reasoning=reasoning,
        )
    return Trace(
        **common,
        generated_ids=generated,
        finish_reason="stop",
        reasoning_span=(1, len(thought)),
        answer_span=(len(thought) + 1, len(generated)),
        reasoning=reasoning,
        answer=answer,
    )


def make_vocab(run: Path) -> None:
    """Coverage as `vocab` writes it."""

    def part(labels: int, covered: int) -> dict[str, Any]:
        return {"labels": labels, "covered": covered, "share": covered / labels}

    parts = {"reasoning": part(9000, 8950), "answer": part(3000, 2990), "all": part(12300, 12240)}
    (run / "vocab").mkdir(parents=True)
    write_json(run / "vocab" / "coverage.json", {"size": 4000, "target_size": 49152, "train": parts, "held_out": parts})
    write_manifest(run / "vocab", {"size": 4000}, {"size": 4000})


def make_draft(run: Path, steps: int = 240, supervised_tokens: int = 98_400) -> None:
    """A loss that falls and an acceptance that rises."""
    rng = random.Random(1)
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = [1.1 + 0.25 * k + 5.5 / (1 + step / 18) + rng.gauss(0, 0.06) for k in range(5)]
        lines.append(
            {
                "kind": "step",
                "step": step,
                "supervised_tokens": supervised_tokens * step // steps,
                "loss": loss,
                "accuracy": [0.5] * 5,
                "lr": 4e-4,
                "grad_norm": 0.3,
            }
        )
        if step % (steps // 8) == 0:
            lines.append(evaluation(step, 1.0 + 0.95 * (1 - 1 / (1 + step / 40))))
    (run / "draft").mkdir(parents=True)
    (run / "draft" / "curve.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(run / "draft" / "metrics.json", lines[-1])
    counts = {"steps": steps, "supervised_tokens": supervised_tokens, "parameters": 8_412_000}
    write_manifest(run / "draft", {"lr": 4e-4, "epochs": 3}, counts)


def evaluation(step: int, length: float) -> dict[str, Any]:
    """A held-out evaluation as training logs it."""
    rates = [min(0.99, share * (length - 1)) for share in (0.62, 0.55, 0.47, 0.4)]
    return {
        "kind": "eval",
        "step": step,
        "acceptance_length": length,
        "acceptance_per_position": rates,
        "reasoning": {"acceptance_length": length + 0.06, "acceptance_per_position": [r * 1.03 for r in rates]},
        "answer": {"acceptance_length": length - 0.15, "acceptance_per_position": [r * 0.9 for r in rates]},
    }


def make_export(run: Path) -> None:
    """A passed check of one engine."""
    findings = [
        {"name": "layer ids", "outcome": "passed", "expected": "outputs of layers 1, 14, 26", "found": "1, 14, 26"},
        {"name": "rope", "outcome": "passed", "expected": "cos and sin at 0, 1, 4096, 65536", "found": "equal"},
        {"name": "embedding", "outcome": "warning", "expected": "the target's dtype", "found": "float32"},
        {"name": "logits", "outcome": "passed", "expected": "at most 1e-04", "found": "3.1e-07"},
    ]
    check = {
        "passed": True,
        "engine": "vllm",
        "findings": findings,
        "rows": 96,
        "difference": 3.1e-7,
        "masters_difference": 4.2e-3,
        "masters_agreement": 0.99,
    }
    (run / "export" / "vllm").mkdir(parents=True)
    write_json(run / "export" / "vllm" / "check.json", check)
    write_manifest(run / "export", {"engine": ["vllm"]}, {"engines": 1})


def make_measure(run: Path, **changes: Any) -> None:
    """A measurement; `changes` replace keys of the result."""
    result = {
        "acceptance_length": 1.93,
        "acceptance_per_position": [0.55, 0.49, 0.42, None],
        "acceptance_length_reasoning": 1.99,
        "acceptance_per_position_reasoning": [0.57, 0.5, 0.43, None],
        "acceptance_length_answer": 1.78,
        "acceptance_per_position_answer": [0.5, 0.44, 0.37, None],
        "draft_tokens": 4,
        "lossless": True,
        "compared": 32,
        "tokens_per_second": 61.4,
        "baseline_tokens_per_second": 50.7,
        "speedup": 1.21,
        "questions": 32,
        "degenerate": 0,
        "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0},
        "prompts": "held-out questions of this run",
        "dtype": "bfloat16",
        "device": "cpu",
        "cycles": 1011,
        "emitted": 1951,
        "rounds": [{}, {}, {}],
        **changes,
    }
    (run / "measure").mkdir(parents=True)
    write_json(run / "measure" / "result.json", result)
    write_manifest(run / "measure", {"limit": 32}, {"questions": 32})


def write_manifest(folder: Path, settings: dict[str, Any], counts: dict[str, Any]) -> None:
    """A stage's manifest."""
    write_json(
        folder / "manifest.json",
        {
            "stage": folder.name,
            "settings": settings,
            "inputs": {},
            "counts": counts,
            "fingerprint": "0123456789abcdef",
            "made": "2026-01-02T03:04:05Z",
            "seconds": 83.2,
            "versions": {"draftsmith": "0.1.0", "python": "3.11"},
        },
    )
