"""A run folder that training can start from: a tiny random Llama's own greedy replies and its hidden states."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.artifacts import Plan, Stage
from draftsmith.data.vocab import make_vocab, save_vocab
from draftsmith.hidden.store import ShardWriter, States
from draftsmith.hidden.target_head import save_target_head
from draftsmith.recipe import TrainSettings
from draftsmith.target.weights import HeadWeights
from draftsmith.trace import Trace, trace_id, write_traces

VOCAB, HIDDEN, LAYERS = 64, 32, (0, 1, 2)


@cache
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    model.model.norm.weight.data.mul_(4)  # a teacher that is sure of something
    return model


def make_training_run(run: Path, traces: int = 24, share: float = 0.25, kept: int = 48) -> Path:
    """Folders traces, vocab and hidden. Replies are 10 to 30 tokens, the first third is reasoning.

    The draft vocabulary holds the `kept` most frequent ids.
    """
    made = [_trace(number) for number in range(traces)]
    (run / "traces").mkdir(parents=True)
    write_traces(run / "traces" / "part-0.parquet", made, {"held_out": str(share)})
    counts = np.bincount([token for trace in made for token in trace.generated_ids], minlength=VOCAB)
    (run / "vocab").mkdir()
    save_vocab(run / "vocab", make_vocab(np.sort(np.argsort(-counts, kind="stable")[:kept]), VOCAB))
    _write_hidden(run / "hidden", made)
    return run


def train_stage(run: Path, folder: str = "draft.partial") -> Stage:
    (run / folder).mkdir(exist_ok=True)
    return Stage(run, Plan("draft", {}, {}), run / folder)


def train_settings(**changes: object) -> TrainSettings:
    values: dict[str, object] = {
        "epochs": 3,
        "lr": 3e-3,
        "batch_tokens": 100,
        "ttt_steps": 3,
        "evals": 2,
        "draft_tokens": 3,
        "intermediate": 48,
        "dtype": "float32",
        "device": "cpu",
        **changes,
    }
    return TrainSettings.model_validate(values)


def _trace(number: int) -> Trace:
    rng = np.random.default_rng(number)
    prompt = [1, *rng.integers(3, VOCAB, rng.integers(3, 9)).tolist()]
    length = int(rng.integers(10, 31))
    with torch.no_grad():
        reply = target().generate(
            torch.tensor([prompt]), max_new_tokens=length, min_new_tokens=length, do_sample=False, pad_token_id=0
        )
    generated = reply[0, len(prompt) :].tolist()
    third = length // 3
    return Trace(
        trace_id=trace_id(f"question {number}", 0, 0),
        question_key=f"question {number}",
        prompt_ids=prompt,
        generated_ids=generated,
        finish_reason="length",
        reasoning_span=(0, third),
        answer_span=(third + 1, length),
    )


def _write_hidden(folder: Path, traces: list[Trace]) -> None:
    folder.mkdir()
    model = target()
    writer = ShardWriter(folder, shard_bytes=1 << 20)
    for trace in traces:
        ids = torch.tensor([[*trace.prompt_ids, *trace.generated_ids]])
        last: list[torch.Tensor] = []
        hook = model.model.norm.register_forward_pre_hook(lambda _, inputs, last=last: last.append(inputs[0]))
        with torch.no_grad():
            out = model(ids, output_hidden_states=True)
        hook.remove()
        aux = torch.cat([out.hidden_states[layer + 1] for layer in LAYERS], dim=-1)[0, :-1]
        start = len(trace.prompt_ids) - 1
        writer.add(
            trace.trace_id,
            States(aux.bfloat16(), last[0][0, start:-1].bfloat16(), out.logits[0, start:-1].argmax(-1).to(torch.int32)),
            len(trace.prompt_ids),
            1.0,
        )
    writer.finish()
    weights = HeadWeights(
        embed_tokens=model.model.embed_tokens.weight.detach().clone(),
        norm=model.model.norm.weight.detach(),
        lm_head=None,
    )
    facts = {
        "name": "toy",
        "fingerprint": "0",
        "config": model.config.to_dict(),
        "layers": list(LAYERS),
        "num_layers": 4,
        "model_type": "llama",
        "tied": True,
    }
    save_target_head(folder, weights, facts)
