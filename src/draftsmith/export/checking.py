"""`draftsmith export check`: what the engines would make of a run's exports, or of anybody's draft folder.

A run's exports are compared with the trained draft again, from the exported files alone. Another draft is explained
from its files (load report, shapes, vocabulary map, meaning of its layer ids), and with a run's target also looked at
beside that target's embedding and head, and walked over the run's held-out rows where it reads the layers they are of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from draftsmith.artifacts import read_json
from draftsmith.draft import layer_ids
from draftsmith.draft.checkpoint import load_draft
from draftsmith.draft.formats import as_vllm_reads, named_layers
from draftsmith.draft.loading import PICKLED, read_pickled, target_ids
from draftsmith.draft.unroll import Batch
from draftsmith.errors import UserError
from draftsmith.export import llamacpp
from draftsmith.export.check import CheckResult, check_batches, check_export
from draftsmith.export.compare import Comparison, compare_drafts
from draftsmith.export.engine_view import Finding, as_engine_runs, look
from draftsmith.export.engines import ENGINES, made_for
from draftsmith.export.launching import DRAFT_TOKENS
from draftsmith.export.load_report import LoadReport, load_report
from draftsmith.export.shapes import promised, stored_shapes
from draftsmith.hidden.store import HiddenStore
from draftsmith.hidden.target_head import TargetHead, load_target_head
from draftsmith.recipe import Engine
from draftsmith.train.metrics import BROKEN, chain_matches, summarise

DEEP = 1 << 20
"""A depth no target has: for what ids mean where the target is not known."""


@dataclass(frozen=True, slots=True)
class FolderCheck:
    """What was found about one draft folder."""

    folder: str
    load: LoadReport
    findings: tuple[Finding, ...]
    against_trainer: CheckResult | None = None
    acceptance: dict[str, Any] | None = None
    """On a few held-out traces of the run, exact for greedy chains."""

    @property
    def faults(self) -> tuple[str, ...]:
        """Why it does not fit."""
        result = self.against_trainer
        findings = result.findings if result else self.findings
        failed = [f"{one.name}: expected {one.expected}, {one.found}" for one in findings if one.outcome == "failed"]
        return (*failed, *(fault for fault in self.load.faults if not failed))

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        return {"passed": not self.faults, **asdict(self)}

    def text(self) -> str:
        """For a person."""
        findings = self.against_trainer.findings if self.against_trainer else self.findings
        lines = [f"{self.folder}: {'does NOT fit' if self.faults else 'fits'}"]
        lines += [f"  {finding.text()}" for finding in findings]
        if self.acceptance is not None:
            traces, length = self.acceptance["traces"], self.acceptance["acceptance_length"]
            lines.append(f"  acceptance length {length} with {DRAFT_TOKENS} draft tokens on {traces} held-out traces")
            if length is not None and length <= BROKEN:
                lines.append(
                    "  that is a broken draft, not one with too little data: draftsmith diagnose finds the link"
                )
        return "\n".join([*lines, self.load.text()])


@dataclass(frozen=True, slots=True)
class Checked:
    """The whole answer."""

    folders: tuple[FolderCheck, ...]
    comparison: Comparison | None = None

    @property
    def faults(self) -> tuple[str, ...]:
        """Why not all of it fits, each with its folder."""
        found = [f"{one.folder}: {fault}" for one in self.folders for fault in one.faults]
        if self.comparison and not self.comparison.fits:
            found.append(f"{self.comparison.ours}: not the names and shapes of {self.comparison.reference}")
        return tuple(found)

    @property
    def verdict(self) -> str:
        """The faults in a line."""
        more = f" (and {len(self.faults) - 1} more, listed above)" if self.faults[1:] else ""
        return f"{self.faults[0]}{more}"

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        comparison = self.comparison.to_json() if self.comparison else None
        folders = [folder.to_json() for folder in self.folders]
        return {"passed": not self.faults, "faults": list(self.faults), "folders": folders, "comparison": comparison}

    def text(self) -> str:
        """For a person."""
        parts = [folder.text() for folder in self.folders]
        return "\n".join([*parts, *([self.comparison.text()] if self.comparison else [])])


def check_path(path: Path, engine: Engine | None, run: Path | None, reference: Path | None) -> Checked:
    """Checks a run's exports, or one draft folder.

    Args:
        path: a run, or a draft folder.
        engine: whose rules are applied; None: each export's own, or the format the folder is in.
        run: whose target's head and held-out rows are used for a draft folder; a folder inside a run's export/ knows
            its run.
        reference: a draft folder to compare names, shapes, types and config keys with.

    Raises:
        UserError: nothing to check there, or files that cannot be read.
    """
    exports = path / "export"
    if exports.is_dir():
        run = path
        found = sorted(folder for folder in exports.iterdir() if folder.name in ENGINES)
        folders = [folder for folder in found if engine in (None, folder.name)]
        if not folders:
            raise UserError(f"{exports}: expected an export{f' for {engine}' if engine else ''}, found none")
    else:
        folders = [path]
        own = path.resolve().parent
        run = own.parent if run is None and own.name == "export" and (own.parent / "hidden").is_dir() else run
    ours = run is not None and any(folder.resolve().parent == (run / "export").resolve() for folder in folders)
    checks = [_folder(folder, engine or made_for(folder), run, ours) for folder in folders]
    return Checked(tuple(checks), _compared(folders, reference) if reference else None)


def _compared(folders: Sequence[Path], reference: Path) -> Comparison:
    """The first of the folders that has a config.json beside the reference."""
    ours = next((folder for folder in folders if (folder / "config.json").exists()), None)
    if ours is None:
        raise UserError(
            f"--compare: expected a draft with a config.json (vllm, speculators, sglang), found {folders[0]}; a GGUF "
            "file names everything otherwise"
        )
    return compare_drafts(ours, reference)


def _folder(folder: Path, engine: Engine, run: Path | None, ours: bool) -> FolderCheck:
    load = load_report(folder, engine)
    if load.stops:
        return FolderCheck(str(folder), load, ())
    if run is None:
        return FolderCheck(str(folder), load, _alone(folder, load.engine))
    store, head = HiddenStore(run / "hidden"), load_target_head(run / "hidden")
    if ours:
        trained = load_draft(run / "draft" / "best", head, torch.device("cpu"), torch.float32)
        result = check_export(folder, engine, trained, store.target, head, check_batches(run / "traces", store))
        return FolderCheck(str(folder), load, result.findings, result)
    view = look(folder, engine, store.target, head)
    findings = [*view.findings, *(Finding("runs", "failed", "a draft", reason) for reason in view.refusals)]
    if view.refusals:
        return FolderCheck(str(folder), load, tuple(findings))
    served = _acceptance(folder, engine, store, head, check_batches(run / "traces", store))
    if served is None:
        said = f"the run's hidden states are of layers {store.target['layers']}: not walked; diagnose does"
        findings.append(Finding("rows", "warning", "the layers that the draft reads", said))
    return FolderCheck(str(folder), load, tuple(findings), acceptance=served)


def _acceptance(
    folder: Path, engine: Engine, store: HiddenStore, head: TargetHead, batches: Sequence[Batch]
) -> dict[str, Any] | None:
    """What the draft, as the engine runs it, gives on held-out rows; None where they are of other layers."""
    served = as_engine_runs(folder, engine, store.target, head)
    if list(served.layers) != list(store.target["layers"]):
        return None
    matches = [chain_matches(served.draft, batch, DRAFT_TOKENS)[0].numpy() for batch in batches]
    found = summarise(matches, [(None, None)] * len(matches), DRAFT_TOKENS)
    kept = ("acceptance_length", "acceptance_per_position")
    return {"traces": len(matches), "draft_tokens": DRAFT_TOKENS, **{name: found[name] for name in kept}}


def _alone(folder: Path, engine: Engine) -> tuple[Finding, ...]:
    """What can be said without a target."""
    if engine == "llamacpp":
        files = llamacpp.read_files(folder)
        raw, d2t, found = files.raw, files.tensors.get("d2t"), []
        t2d = None
    else:
        raw = read_json(folder / "config.json")
        d2t, t2d = _maps(folder)
        found = [_shapes(raw, folder, engine)]
    flat = as_vllm_reads(raw)
    if d2t is not None:
        found.append(_map(d2t, t2d, flat.get("vocab_size"), str(folder)))
    return (*found, _layers(engine, raw))


def _shapes(raw: dict[str, Any], folder: Path, engine: Engine) -> Finding:
    """The tensors in the files beside those that the config asks for."""
    wanted = promised(raw, str(folder), engine)
    stored = {name.removeprefix("model.").replace("midlayer.", "layers.0."): one.shape
              for name, one in stored_shapes(folder).items()}  # fmt: skip
    wrong = [f"{name} {list(stored[name])} instead of {list(wanted[name].shape)}"
             for name in sorted(stored.keys() & wanted.keys()) if stored[name] != wanted[name].shape]  # fmt: skip
    if not stored:
        return Finding("shapes", "warning", "weights", "found none: only the config was looked at")
    expected = "the shapes that config.json asks for"
    return Finding(
        "shapes", "failed" if wrong else "passed", expected, f"found {', '.join(wrong)}" if wrong else expected
    )


def _maps(folder: Path) -> tuple[Tensor | None, Tensor | None]:
    """d2t and t2d, without reading another tensor."""
    found: dict[str, Tensor] = {}
    paths = sorted(folder.glob("*.safetensors"))
    if not paths and (folder / PICKLED).exists():
        found = {name.removeprefix("model."): tensor for name, tensor in read_pickled(folder / PICKLED).items()}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            found |= {name.removeprefix("model."): file.get_tensor(name) for name in file.keys()  # noqa: SIM118
                      if name.removeprefix("model.") in ("d2t", "t2d")}  # fmt: skip
    return found.get("d2t"), found.get("t2d")


def _map(d2t: Tensor, t2d: Tensor | None, vocab: Any, name: str) -> Finding:
    expected = f"{len(d2t)} different ids of {vocab}"
    try:
        target_ids(d2t, int(vocab or 0), name, t2d)
    except UserError as error:
        return Finding("vocabulary", "failed", expected, str(error).removeprefix(f"{name}: "))
    return Finding("vocabulary", "passed", expected, expected)


def _layers(engine: Engine, raw: dict[str, Any]) -> Finding:
    """What the layer ids mean to the engine, in words."""
    expected = "ids of layers that a target has"
    if engine == "sglang":
        ids = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        if not ids:
            words = "none named in eagle_config: SGLang's default, outputs of layers 1, n // 2 - 1, n - 4"
            return Finding("layers", "passed", "", words)
        plain = layer_ids.sglang_takes(ids, "llama", DEEP)
        other = layer_ids.sglang_takes(ids, "kimi_k2", DEEP)
        if not plain:
            return Finding("layers", "failed", expected, f"found {ids}: no target hands out such layers")
        words = f"outputs of layers {list(plain)} of a Llama or Qwen target"
        if other != plain:
            words = f"{words}, of layers {list(other)} of a DeepSeek or Kimi target"
        return Finding("layers", "passed", "", words)
    taken = ENGINES[engine].taken_layers(raw, {"num_layers": DEEP})
    if not taken:
        found = f"found {named_layers(as_vllm_reads(raw))}: no target hands out such layers"
        return Finding("layers", "failed", expected, found)
    if max(taken) > DEEP // 4:
        return Finding("layers", "passed", "", "none named: vLLM's default, outputs of layers 1, n // 2 - 1, n - 4")
    return Finding("layers", "passed", "", f"outputs of layers {list(taken)}")
