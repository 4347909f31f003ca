"""A tiny trained draft with its target's head, hidden states and traces, made in code: what export and loading read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.artifacts import Plan, Stage
from draftsmith.draft.checkpoint import save_draft
from draftsmith.draft.eagle3 import DraftConfig, Eagle3Draft
from draftsmith.draft.unroll import Batch
from draftsmith.export.check import CheckResult, check_export
from draftsmith.export.stage import engine_config, write_export
from draftsmith.hidden.store import ShardWriter, States
from draftsmith.hidden.target_head import TargetHead, save_target_head
from draftsmith.recipe import Engine, ExportSettings
from draftsmith.target.weights import HeadWeights
from draftsmith.trace import Trace, write_traces
from toy_tokenizer import save_byte_tokenizer

VOCAB, HIDDEN, LAYERS, DRAFTED = 64, 32, 8, 24


def toy_config(**changes: Any) -> DraftConfig:
    """A draft of hidden 32 over 24 of 64 ids, for a Llama of 8 layers."""
    values: dict[str, Any] = {
        "target_vocab_size": VOCAB,
        "draft_vocab_size": DRAFTED,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 131072,
        "aux_layers": (1, 3, 4),
        "target_layers": LAYERS,
        "target_model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return DraftConfig(**{**values, **changes})


def toy_target(draft: DraftConfig, **changes: Any) -> dict[str, Any]:
    """target.json of that draft's target."""
    facts: dict[str, Any] = {
        "name": "toy/target",
        "fingerprint": "0123456789abcdef",
        "config": {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": draft.hidden_size,
            "vocab_size": draft.target_vocab_size,
            "rms_norm_eps": draft.rms_norm_eps,
        },
        "layers": list(draft.aux_layers),
        "num_layers": LAYERS,
        "model_type": draft.target_model_type,
        "tied": False,
    }
    return {**facts, **changes}


def toy_head(config: DraftConfig, dtype: torch.dtype = torch.bfloat16) -> TargetHead:
    """A random target's embedding, head and norm."""
    generator = torch.Generator().manual_seed(1)
    shape = (config.target_vocab_size, config.hidden_size)
    embedding, head = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return TargetHead(embedding, torch.ones(config.hidden_size, dtype=dtype), head, config.rms_norm_eps)


def toy_ids(config: DraftConfig) -> Tensor:
    """The draft vocabulary: every other id, or all of them."""
    step = 1 if config.draft_vocab_size == config.target_vocab_size else 2
    return torch.arange(config.draft_vocab_size) * step + (step - 1)


def toy_draft(config: DraftConfig, head: TargetHead) -> Eagle3Draft:
    """A random draft of float32 masters; its norms are not 1, so that a test sees a norm left out."""
    torch.manual_seed(0)
    draft = Eagle3Draft(config).eval()
    draft.set_embedding(head.embed_tokens)
    ids = toy_ids(config)
    t2d = torch.zeros(config.target_vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    draft.set_vocab(ids - torch.arange(len(ids)), t2d)
    with torch.no_grad():
        for parameter in draft.trained().values():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return draft


def toy_batch(config: DraftConfig, prompt: int = 5, generated: int = 9) -> Batch:
    """One random trace as rows."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, config.target_vocab_size, (prompt + generated,), generator=generator)
    return Batch(
        aux=torch.randn(1, prompt + generated - 2, 3 * config.hidden_size, generator=generator),
        ids=tokens[None, 1:-1],
        first=torch.tensor([prompt - 1]),
        count=torch.tensor([generated - 1]),
        inputs=tokens[None, prompt:-1],
        labels=tokens[None, prompt + 1 :],
        final=torch.randn(1, generated - 1, config.hidden_size, generator=generator),
        argmax=tokens[None, prompt + 1 :],
    )


class Exported:
    """A draft exported for one engine, to be spoilt and checked."""

    def __init__(self, folder: Path, engine: Engine, settings: ExportSettings | None = None, **changes: Any) -> None:
        self.folder, self.engine = folder, engine
        self.config = toy_config(**changes)
        tokenizer = {"name": save_byte_tokenizer(folder.parent / "target", VOCAB)} if engine == "llamacpp" else {}
        self.target = toy_target(self.config, **tokenizer)
        self.head = toy_head(self.config)
        self.draft = toy_draft(self.config, self.head)
        settings = settings or ExportSettings()
        config = engine_config(engine, self.config, self.target, settings)
        write_export(folder, engine, config, self.draft, self.head, settings)

    def check(self) -> CheckResult:
        """The check of the folder as it now is."""
        batches = [toy_batch(self.config)]
        return check_export(self.folder, self.engine, self.draft, self.target, self.head, batches)


def failed(result: CheckResult) -> dict[str, str]:
    """Name -> what was found, of the findings that failed."""
    return {finding.name: finding.found for finding in result.findings if finding.outcome == "failed"}


def toy_run(run: Path, draft: Eagle3Draft, target: dict[str, Any], head: TargetHead, questions: int = 12) -> Stage:
    """The stage `export` of a run whose traces, hidden states and draft are published; half the questions held out."""
    config = draft.config
    generator = torch.Generator().manual_seed(3)
    for name in ("traces", "hidden", "draft/best", "export.partial"):
        (run / name).mkdir(parents=True)
    writer, traces = ShardWriter(run / "hidden", 1 << 20), []
    for number in range(questions):
        ids = torch.randint(0, config.target_vocab_size, (16,), generator=generator).tolist()
        trace = Trace(
            trace_id=f"t{number:02}", question_key=f"question {number}", prompt_ids=ids[:6], generated_ids=ids[6:]
        )
        aux = torch.randn(15, 3 * config.hidden_size, generator=generator).bfloat16()
        final = torch.randn(10, config.hidden_size, generator=generator).bfloat16()
        writer.add(trace.trace_id, States(aux, final, torch.tensor(ids[6:], dtype=torch.int32)), 6, 1.0)
        traces.append(trace)
    writer.finish()
    write_traces(run / "traces" / "traces-00000.parquet", traces, {"held_out": "0.5", "target": target["name"]})
    save_target_head(run / "hidden", HeadWeights(head.embed_tokens, head.norm, head.lm_head), target)
    save_draft(run / "draft" / "best", draft)
    return Stage(run, Plan("export", {}, {}), run / "export.partial")
