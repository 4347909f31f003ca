"""The extract stage: every trainable trace through the target once, its aux and final states into the store.

Needs `3 * n + m` states of hidden size in bf16 per trace of n ids, m generated; the total is known and compared with
the free space before the first forward pass. Interrupted, it goes on with the traces that are in no whole shard.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith import artifacts
from draftsmith.errors import Interrupted, UserError
from draftsmith.hidden.agreement import likeliest, suspects, teach
from draftsmith.hidden.backends import transformers as backend
from draftsmith.hidden.layers import checked_layers, default_layers
from draftsmith.hidden.store import ShardWriter, States, estimate_bytes
from draftsmith.hidden.target_head import TargetHead, load_target_head, save_target_head
from draftsmith.interrupts import stopping
from draftsmith.progress import Progress
from draftsmith.recipe import ExtractSettings
from draftsmith.target.device import compute_dtype, pick_device
from draftsmith.target.embedded import resolve_model
from draftsmith.target.loading import load_model, text_config
from draftsmith.target.states import StateTap
from draftsmith.target.weights import read_head_weights
from draftsmith.trace import Trace, read_metadata, read_traces

JUDGED_TOKENS = 512
"""Generated ids to see before agreement is judged: few enough to stop in the first seconds."""
HEAD_TOLERANCE = 0.05
"""Largest relative difference between the model's own logits and those of our head; bf16 rounding stays below."""
STORED = (torch.bfloat16, torch.bfloat16, torch.int32)


def build(stage: artifacts.Stage, settings: ExtractSettings, progress: Progress) -> dict[str, Any]:
    """Extracts hidden states; see the module's docstring.

    Raises:
        UserError: no space, no fitting target, or states that do not reproduce the captured ids.
        Interrupted: SIGINT or SIGTERM; finished shards are kept.
    """
    folder = stage.folder("traces")
    traces = list(read_traces(folder))
    if not traces:
        raise UserError(f"{folder}: holds no trace to learn from; its manifest.json counts the reasons")
    name = resolve_model(settings.target or read_metadata(folder)["target"], progress)
    device = pick_device(settings.device)
    model = load_model(
        name, compute_dtype(settings.dtype, device), device, trust_remote_code=settings.trust_remote_code
    )
    layers = _layers(settings, text_config(model).num_hidden_layers)
    _save_head(stage.work, name, model, layers)
    head = load_target_head(stage.work).to(device)
    _check_head(model, head, traces[0])

    writer = ShardWriter(stage.work, settings.shard_mib << 20)
    done = writer.done()
    left = [trace for trace in traces if trace.trace_id not in done]
    _check_space(stage.work, left, text_config(model).hidden_size)
    judge = _Judge(head, read_metadata(folder), settings.min_agreement)
    finished = len(done)
    with progress.track("extract", len(traces), "traces", finished) as bar, stopping() as asked_to_stop:
        for batch in backend.batches(left, settings.batch_tokens):
            for trace, (aux, final) in zip(batch, backend.states(model, layers, batch), strict=True):
                final = final[len(trace.prompt_ids) - 1 :]
                argmax, agreement = judge.see(trace, aux, final)
                states = States(
                    *(part.to("cpu", kind) for part, kind in zip((aux, final, argmax), STORED, strict=True))
                )
                writer.add(trace.trace_id, states, len(trace.prompt_ids), agreement)
            finished += len(batch)
            bar.update(finished, agreement=judge.share())
            stage.note_progress({"traces": finished, "of": len(traces)})
            if asked_to_stop():
                writer.flush()
                raise Interrupted(
                    f"{stage.work}: interrupted with {finished} of {len(traces)} traces; run again to go on"
                )
    judge.verdict()
    rows = writer.finish()
    generated = sum(row["final_rows"] for row in rows)
    return {
        "traces": len(rows),
        "tokens": sum(row["aux_rows"] + 1 for row in rows),
        "generated_tokens": generated,
        "bytes": sum(path.stat().st_size for path in stage.work.glob("states-*.safetensors")),
        "layers": list(layers),
        "agreement": round(sum(row["agreement"] * row["final_rows"] for row in rows) / generated, 4),
    }


class _Judge:
    """Contract 4 while states are made: stops the run as soon as enough ids were seen to know."""

    def __init__(self, head: TargetHead, metadata: dict[str, str], least: float) -> None:
        self.head, self.least = head, least
        self.temperature = float(json.loads(metadata.get("sampling", "{}")).get("temperature", 0.0))
        """Of traces that name none of their own."""
        self.judged = metadata.get("source_kind") == "capture"
        self.agreed = self.expected = 0.0
        self.seen = 0
        self.worst: tuple[Tensor, Tensor, Tensor] | None = None
        self.passed = False

    def see(self, trace: Trace, aux: Tensor, final: Tensor) -> tuple[Tensor, float]:
        """Adds one trace; returns the teacher's argmax [m] and the share of its ids that equal the captured ones."""
        generated = torch.tensor(trace.generated_ids, device=final.device)
        temperature = json.loads(trace.sampling).get("temperature", self.temperature)
        teacher = teach(self.head, final.to(self.head.norm.dtype), temperature)
        agreement = float((teacher.argmax == generated).float().mean())
        self.agreed += agreement * len(generated)
        self.expected += teacher.expected * len(generated)
        self.seen += len(generated)
        if self.worst is None or len(generated) > len(self.worst[2]):
            self.worst = (aux[len(trace.prompt_ids) - 1 :], final, generated)
        if self.judged and not self.passed and self.seen >= JUDGED_TOKENS:
            self.verdict()
            self.passed = True
        return teacher.argmax, agreement

    def share(self) -> float:
        """Agreement so far."""
        return self.agreed / max(self.seen, 1)

    def verdict(self) -> None:
        """Raises UserError when the states do not reproduce the captured ids at the expected rate."""
        expected = self.expected / max(self.seen, 1)
        if not self.judged or self.worst is None or self.share() >= expected * self.least:
            return
        why = likeliest(self.share(), suspects(self.head, *self.worst))
        raise UserError(
            f"hidden states: the teacher's argmax reproduces {self.share():.1%} of {self.seen:,} captured ids, "
            f"expected "
            f"at least {expected * self.least:.1%}; {why}; check --target, or lower --min-agreement knowingly"
        )


def _layers(settings: ExtractSettings, count: int) -> tuple[int, int, int]:
    return checked_layers(settings.layers, count) if settings.layers else default_layers(count)


def _save_head(work: Path, name: str, model: Any, layers: Sequence[int]) -> None:
    config = text_config(model)
    if getattr(config, "rms_norm_eps", None) is None:
        raise UserError(
            f"{name}: expected a target with RMS norms (rms_norm_eps in its config), found {config.model_type}"
        )
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(name, local_files_only=True))
    facts = {
        "name": name,
        "fingerprint": artifacts.fingerprint_model(folder),
        "config": config.to_dict() | {"dtype": _own_dtype(folder)},
        "layers": list(layers),
        "num_layers": config.num_hidden_layers,
        "model_type": config.model_type,
        "tied": bool(config.tie_word_embeddings),
    }
    save_target_head(work, read_head_weights(folder, tied=facts["tied"]), facts)


def _own_dtype(folder: Path) -> str | None:
    """The type of the checkpoint itself; the loaded config says what it was loaded as, and engines serve the former."""
    raw = artifacts.read_json(folder / "config.json")
    found = [one.get(name) for one in (raw, raw.get("text_config") or {}) for name in ("dtype", "torch_dtype")]
    return next((value for value in found if value), None)


@torch.inference_mode()
def _check_head(model: Any, head: TargetHead, trace: Trace) -> None:
    """Our reading of norm and head must give the model's own logits; a norm of another kind would show here."""
    ids = torch.tensor([list(trace.prompt_ids)], device=model.device)
    with StateTap(model, ()) as tap:
        own = model(ids, logits_to_keep=1).logits[0, -1].float()
        ours = head.logits(tap.final()[0, -1].to(head.norm.dtype)).float()
    difference = float((own - ours).norm() / own.norm())
    if difference > HEAD_TOLERANCE:
        raise UserError(
            f"target head: lm_head(final_norm(final)) differs from the model's own logits by {difference:.1%}, "
            f"expected "
            f"at most {HEAD_TOLERANCE:.0%}; {model.config.model_type} scales or normalises in a way not known yet"
        )


def _check_space(work: Path, traces: Sequence[Trace], hidden: int) -> None:
    tokens = sum(len(trace.prompt_ids) + len(trace.generated_ids) - 1 for trace in traces)
    generated = sum(len(trace.generated_ids) for trace in traces)
    need, free = estimate_bytes(tokens, generated, hidden), shutil.disk_usage(work).free
    if need > free:
        fits = int(len(traces) * free / need * 0.9)
        raise UserError(
            f"{work}: hidden states of {len(traces):,} traces need {need / 1e9:,.1f} GB "
            f"({need // max(tokens, 1):,} bytes "
            f"per token), found {free / 1e9:,.1f} GB free; make room, or capture with --limit for about {fits:,} traces"
        )
