"""The export stage: `RUN/export/<engine>/` from `RUN/draft/best`, accepted only after its check.

Weights are rounded to `settings.dtype`; the embedding keeps the target's own dtype and bits, because vLLM shares it
with the target only when it is equal. An engine whose folder already has a passed check (an interrupted attempt) is not
written again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith import artifacts
from draftsmith.draft.checkpoint import load_draft
from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.draft.unroll import Batch
from draftsmith.errors import DraftsmithError
from draftsmith.export.check import EMBEDDING, ENGINES, CheckResult, check_export
from draftsmith.export.reading import refuse_inexpressible
from draftsmith.hidden.store import HiddenStore
from draftsmith.hidden.target_head import TargetHead, load_target_head
from draftsmith.progress import Progress
from draftsmith.recipe import Engine, ExportSettings
from draftsmith.train.dataset import collate, read_samples

CHECK_TRACES = 4
CHECK_LENGTH = 1024
"""Ids of a trace that the check runs over at most."""


def build(stage: artifacts.Stage, settings: ExportSettings, progress: Progress) -> dict[str, Any]:
    """Writes and checks one folder per engine.

    Returns:
        Per engine: bytes, largest relative difference of logits, warnings; and the rows compared.

    Raises:
        UserError: an engine cannot express the draft.
        DraftsmithError: a folder did not pass its check.
    """
    store = HiddenStore(stage.folder("hidden"))
    head = load_target_head(stage.folder("hidden"))
    draft = load_draft(stage.folder("draft") / "best", head, torch.device("cpu"), torch.float32)
    engines = list(dict.fromkeys(settings.engine))
    configs = {}
    for engine in engines:
        refuse_inexpressible(engine, draft.config, store.target)
        configs[engine] = ENGINES[engine].config_json(draft.config, store.target, settings.dtype)
    batches = check_batches(stage.folder("traces"), store)
    counts: dict[str, Any] = {"rows": sum(int(batch.count.sum()) for batch in batches), "engines": {}}
    with progress.track("export", len(engines), "engines") as tracker:
        for done, engine in enumerate(engines, 1):
            folder = stage.work / engine
            report = folder / "check.json"
            if not report.exists():
                write_export(folder, engine, configs[engine], draft, head, settings)
                line = ENGINES[engine].launch_line(store.target["name"], str(stage.folder("export") / engine))
                (folder / "README.md").write_text(_readme(engine, line, settings.embeddings), encoding="utf-8")
                result = check_export(folder, engine, draft, store.target, head, batches)
                _accept(result, folder, progress)
                artifacts.write_json(report, result.to_json())
            counts["engines"][engine] = _counts(folder, artifacts.read_json(report))
            tracker.update(done, difference=counts["engines"][engine]["difference"])
    return counts


def write_export(
    folder: Path,
    engine: Engine,
    config: Mapping[str, Any],
    draft: Eagle3Draft,
    head: TargetHead,
    settings: ExportSettings,
) -> None:
    """Writes config.json and model.safetensors into `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = getattr(ENGINES[engine], "LAYER_PREFIX", "layers.0.")
    tensors: dict[str, Tensor] = {}
    for name, parameter in draft.trained().items():
        rounded = parameter.detach().cpu().to(getattr(torch, settings.dtype)).contiguous()
        tensors[name.replace("layers.0.", prefix)] = rounded
    if settings.embeddings:
        tensors[EMBEDDING] = head.embed_tokens.detach().cpu().contiguous().clone()
    if draft.config.draft_vocab_size != draft.config.target_vocab_size:
        # For a whole vocabulary vLLM 0.32 has nowhere to put them and stops (models/llama_eagle3.py).
        tensors["d2t"], tensors["t2d"] = draft.d2t.cpu().clone(), draft.t2d.cpu().clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    artifacts.write_json(folder / "config.json", dict(config))


def check_batches(traces: Path, store: HiddenStore) -> list[Batch]:
    """A few held-out traces as float32 rows, one trace a batch."""
    samples = read_samples(traces, store, CHECK_LENGTH).held_out
    return [collate([sample], store, torch.float32) for sample in samples[:CHECK_TRACES]]


def _accept(result: CheckResult, folder: Path, progress: Progress) -> None:
    for finding in result.findings:
        if finding.outcome == "warning":
            progress.say(f"export {result.engine}: {finding.name}: {finding.found}")
    if not result.passed:
        failed = [finding for finding in result.findings if finding.outcome == "failed"]
        why = "; ".join(f"{finding.name}: expected {finding.expected}, {finding.found}" for finding in failed)
        progress.say(result.text())
        raise DraftsmithError(f"{folder}: the export does not compute what was trained ({why}); it is not published")


def _counts(folder: Path, report: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "difference": report["difference"],
        "masters_difference": report["masters_difference"],
        "masters_agreement": report["masters_agreement"],
        "warnings": [finding["name"] for finding in report["findings"] if finding["outcome"] == "warning"],
    }


def _readme(engine: Engine, line: str, embeddings: bool) -> str:
    holds = "holds the target's embedding, bit by bit" if embeddings else "holds no embedding: the target's is shared"
    more = "" if embeddings else " With pipeline parallelism vLLM cannot share it: export again with embeddings."
    return (
        f"# EAGLE-3 draft, {engine} format\n\n"
        f"Serve it with its target:\n\n```bash\n{line}\n```\n\n"
        f"`model.safetensors` {holds}.{more} `check.json` compares this folder with the trained draft.\n"
        "If the server reports an acceptance length of 1.00, the draft is not working (algorithm, aux states, head or "
        "vocabulary map); more training data will not change that.\n"
    )
