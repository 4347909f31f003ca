"""The link from the trained draft to the files an engine loads: run as the engine reads them, then put right.

Every suspect (`export_ideas`) is walked over the same live replies. Costs one unroll of the draft over the replies per
suspect, and a pass of the target for layers not seen before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.errors import UserError
from draftsmith.export.engine_view import EngineDraft, View, built, look
from draftsmith.measure.export_ideas import ideas
from draftsmith.measure.links import Suspect
from draftsmith.measure.scene import EMBEDDING, Alive, Scene
from draftsmith.measure.walks import Loss, Walk, loss, walk
from draftsmith.recipe import Engine


@dataclass(frozen=True, slots=True)
class Exported:
    """The exported draft over the live replies. `served` is None where the engine would not run it."""

    view: View
    served: EngineDraft | None
    walk: Walk
    refusal: str


def open_export(scene: Scene, folder: Path, engine: Engine, replies: Sequence[Alive]) -> Exported:
    """Reads the folder as the engine does and walks it over the replies.

    Raises:
        UserError: files missing or unreadable.
    """
    view = look(folder, engine, scene.store.target, scene.head)
    try:
        served = _built(scene, view)
    except UserError as error:
        return Exported(view, None, _nothing(replies), str(error))
    return Exported(view, served, _walked(scene, served, replies), "")


def export_suspects(
    scene: Scene, export: Exported, trained: Eagle3Draft | None, replies: Sequence[Alive], best: Walk
) -> tuple[Loss, list[Suspect]]:
    """What explains the exported files' loss against `best`, the walk of the draft as it should be.

    For a draft by others `best` is the exported walk itself; the longest walk of any repair takes its place.
    """
    tried = []
    for idea in ideas(scene, export.view, trained, export.refusal):
        after = None
        if idea.repair is not None:
            try:
                after = _walked(scene, _built(scene, idea.repair(export.view)), replies)
            except UserError:
                continue
        tried.append((idea, after))
    if trained is None:
        known = [after for _, after in tried if after is not None]
        longest = max((one for one in known if loss(one, export.walk).fell == "yes"), key=_length, default=None)
        best = longest or best
    fall = loss(best, export.walk)
    found = []
    for idea, after in tried:
        gain = after.length - export.walk.length if after is not None else 0.0
        restored = gain / fall.loss if fall.loss > 1e-9 else 0.0
        if idea.alone and (restored < 0.1 or fall.fell == "no"):
            continue
        found.append(
            Suspect(
                name=idea.name,
                link="export",
                found=idea.found,
                change=idea.change,
                before=export.walk.length,
                after=None if after is None else after.length,
                restored=restored,
                certain=idea.differs,
            )
        )
    return fall, found


def _built(scene: Scene, view: View) -> EngineDraft:
    if view.refusals:
        raise UserError("; ".join(view.refusals))
    depth = scene.depth
    if not all(EMBEDDING <= layer < depth for layer in view.layers):
        raise UserError(f"layers {list(view.layers)} are not those of a target of {depth} layers")
    return built(view, scene.head)


def _walked(scene: Scene, served: EngineDraft, replies: Sequence[Alive]) -> Walk:
    scene.look(replies, served.layers)
    draft = served.draft.to(scene.device)
    return walk(draft, [one.words(served.layers) for one in replies], scene.draft_tokens, served.limit)


def _nothing(replies: Sequence[Alive]) -> Walk:
    """A walk in which nothing is ever drafted."""
    rows = np.array([len(one.reply) - 1 for one in replies], np.int64)
    return Walk(tuple(one.key for one in replies), rows, rows, rows, np.zeros_like(rows))


def _length(one: Walk) -> float:
    return one.length
