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
from draftsmith.draft.eagle3 import DraftConfig, Eagle3Draft
from draftsmith.errors import DraftsmithError, UserError
from draftsmith.export import llamacpp
from draftsmith.export.check import CheckResult, check_batches, check_export
from draftsmith.export.engines import ENGINES
from draftsmith.export.gguf import write_target_gguf
from draftsmith.export.launching import GGUF_DRAFT, GGUF_TARGET, launch_line
from draftsmith.export.load_report import EMBEDDING, load_report
from draftsmith.export.reading import refuse_inexpressible
from draftsmith.export.rope import engine_rope, trained_rope
from draftsmith.hidden.store import HiddenStore
from draftsmith.hidden.target_head import TargetHead, load_target_head
from draftsmith.progress import Progress
from draftsmith.recipe import Engine, ExportSettings

LOAD_REPORT = "load_report.json"


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
        configs[engine] = engine_config(engine, draft.config, store.target, settings)
    batches = check_batches(stage.folder("traces"), store)
    counts: dict[str, Any] = {"rows": sum(int(batch.count.sum()) for batch in batches), "engines": {}}
    with progress.track("export", len(engines), "engines") as tracker:
        for done, engine in enumerate(engines, 1):
            folder = stage.work / engine
            report = folder / "check.json"
            if not report.exists():
                write_export(folder, engine, configs[engine], draft, head, settings)
                if engine == "llamacpp" and settings.target_gguf:
                    _write_target(folder / GGUF_TARGET, store.target, settings)
                line = _line(engine, store.target["name"], stage.folder("export") / engine, settings)
                (folder / "README.md").write_text(_readme(engine, line, settings.embeddings), encoding="utf-8")
                result = check_export(folder, engine, draft, store.target, head, batches)
                _accept(result, folder, progress)
                artifacts.write_json(folder / LOAD_REPORT, load_report(folder, engine).to_json())
                artifacts.write_json(report, result.to_json())
            counts["engines"][engine] = _counts(folder, artifacts.read_json(report))
            tracker.update(done, difference=counts["engines"][engine]["difference"])
    return counts


def engine_config(
    engine: Engine, config: DraftConfig, target: Mapping[str, Any], settings: ExportSettings
) -> dict[str, Any]:
    """The engine's config: a config.json, or the keys of a GGUF file.

    Raises:
        UserError: the engine cannot express the draft.
    """
    if engine == "llamacpp":
        return llamacpp.config_keys(config, target, settings)
    written: dict[str, Any] = ENGINES[engine].config_json(config, target, settings.dtype)
    other = trained_rope(config).difference(engine_rope(engine, written))
    if other:
        raise UserError(
            f"{engine}: cannot be told the draft's rope {config.rope_parameters}: {other}; export for another engine, "
            "or train a draft without what it does not read"
        )
    return written


def write_export(
    folder: Path,
    engine: Engine,
    config: Mapping[str, Any],
    draft: Eagle3Draft,
    head: TargetHead,
    settings: ExportSettings,
) -> None:
    """Writes what the engine loads into `folder`, which is made: config.json with model.safetensors, or a GGUF file."""
    folder.mkdir(parents=True, exist_ok=True)
    if engine == "llamacpp":
        llamacpp.write_file(folder / GGUF_DRAFT, config, draft, head, settings)
        return
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


def _write_target(path: Path, target: Mapping[str, Any], settings: ExportSettings) -> None:
    assert settings.target_gguf is not None
    model = Path(target["name"])
    if not model.is_dir():
        raise UserError(f"--target-gguf: expected the target's folder {model}, found none; write its GGUF elsewhere")
    write_target_gguf(
        model, path, settings.target_gguf, Path(settings.gguf_tokenizer) if settings.gguf_tokenizer else None
    )


def _line(engine: Engine, target: str, folder: Path, settings: ExportSettings) -> str:
    """The launch line; llama.cpp serves a file, not a model folder."""
    if engine == "llamacpp":
        target = str(folder / GGUF_TARGET) if settings.target_gguf else f"{Path(target).name}.gguf"
    return launch_line(engine, target, str(folder))


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
    shared = {
        "llamacpp": " Where the target's file is quantised, so is what is shared: export again with embeddings.",
        "vllm": " With pipeline parallelism vLLM cannot share it: export again with embeddings.",
        "speculators": " With pipeline parallelism vLLM cannot share it: export again with embeddings.",
    }
    more = "" if embeddings else shared.get(engine, "")
    weights = GGUF_DRAFT if engine == "llamacpp" else "model.safetensors"
    return (
        f"# EAGLE-3 draft, {engine} format\n\n"
        f"Serve it with its target:\n\n```bash\n{line}\n```\n\n"
        f"`{weights}` {holds}.{more} `check.json` compares this folder with the trained draft.\n"
        "If the server reports an acceptance length of 1.00, the draft is not working (algorithm, aux states, head or "
        "vocabulary map); more training data will not change that.\n"
    )
