"""Checkpoints of a training: `best/` and `last/`, each a draft folder, written beside and renamed.

`last/` also holds what a resume needs: the optimizer's moments (safetensors) and `state.json`. Since the plan of steps
is a pure function of data and settings, the data position and every seed are just the number of the last step. A
checkpoint is complete or absent, also after a power cut; `curve.jsonl` is cut back to it on resume.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from draftsmith.artifacts import read_json, sync, write_json
from draftsmith.draft.checkpoint import WEIGHTS, load_weights, save_draft
from draftsmith.draft.eagle3 import Eagle3Draft

LAST, BEST, CURVE = "last", "best", "curve.jsonl"
METRICS = "metrics.json"
OPTIMIZER, STATE = "optimizer.safetensors", "state.json"


@dataclass(slots=True)
class State:
    """Where a training stands."""

    step: int = 0
    """Optimizer steps done."""
    supervised_tokens: int = 0
    empty_steps: int = 0
    """Steps in which no label counted; they changed nothing."""
    loss: float | None = None
    """Of the last step: weighted sum over TTT steps of their mean cross-entropy, in nats."""


def save_last(work: Path, draft: Eagle3Draft, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Replaces `work/last`."""

    def write(folder: Path) -> None:
        save_draft(folder, draft)
        save_file(_moments(draft, optimizer), folder / OPTIMIZER)
        write_json(folder / STATE, asdict(state))

    if (work / CURVE).exists():
        sync(work / CURVE)
    _publish(work / LAST, write)


def load_last(work: Path, draft: Eagle3Draft, optimizer: torch.optim.Optimizer) -> State:
    """Restores draft, optimizer and curve from `work/last`; a fresh state where there is none."""
    _recover(work / LAST)
    _recover(work / BEST)
    if not (work / LAST).exists():
        shutil.rmtree(work / BEST, ignore_errors=True)
        (work / CURVE).unlink(missing_ok=True)
        return State()
    load_weights(draft, load_file(work / LAST / WEIGHTS), str(work / LAST))
    moments = load_file(work / LAST / OPTIMIZER)
    for name, parameter in draft.trained().items():
        prefix = f"{name}/"
        found = {key.removeprefix(prefix): value for key, value in moments.items() if key.startswith(prefix)}
        if found:
            step = found.pop("step")
            optimizer.state[parameter] = {"step": step, **{k: v.to(parameter.device) for k, v in found.items()}}
    state = State(**read_json(work / LAST / STATE))
    _cut_curve(work / CURVE, state.step)
    return state


def save_best(work: Path, draft: Eagle3Draft, metrics: dict[str, Any]) -> None:
    """Replaces `work/best`; its metrics go with it."""

    def write(folder: Path) -> None:
        save_draft(folder, draft)
        write_json(folder / METRICS, metrics)

    _publish(work / BEST, write)


def best_metrics(work: Path) -> dict[str, Any] | None:
    """The metrics of `work/best`, if there is one."""
    found: dict[str, Any] | None = read_json(work / BEST / METRICS) if (work / BEST).exists() else None
    return found


def append_curve(work: Path, line: dict[str, Any]) -> None:
    """One line of the curve. Not synced: a resume makes the lines after the last checkpoint again."""
    with open(work / CURVE, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _moments(draft: Eagle3Draft, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": value.detach().cpu().contiguous()
        for name, parameter in draft.trained().items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _publish(final: Path, write: Callable[[Path], None]) -> None:
    """Builds a folder beside `final`, makes it durable, and puts it in its place."""
    new, old = final.with_name(f"{final.name}.new"), final.with_name(f"{final.name}.old")
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir()
    write(new)
    for path in new.iterdir():
        sync(path)
    sync(new)
    if final.exists():
        os.replace(final, old)
    os.replace(new, final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _recover(final: Path) -> None:
    """After a crash between the two renames of `_publish`, the older folder is the complete one."""
    new, old = final.with_name(f"{final.name}.new"), final.with_name(f"{final.name}.old")
    if old.exists() and not final.exists():
        os.replace(old, final)
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)


def _cut_curve(path: Path, step: int) -> None:
    """Drops what came after the checkpoint: it will be made again. A torn last line is one of those."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().split(b"\n"):
        if not line.endswith(b"}") or json.loads(line)["step"] > step:
            break
        kept.append(line)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(b"".join(line + b"\n" for line in kept))
    os.replace(temporary, path)
