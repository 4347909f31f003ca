"""The links before any export: data, the trained draft on stored states, chains of it, and the live target.

Order of evidence: what the target says to the stored ids now tells its own words from others'; what it computes over
them now tells fresh states from stale ones. Only then is a fall in acceptance given a name.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from draftsmith.artifacts import MANIFEST, fingerprint_model, read_json
from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.measure.data_link import data_link
from draftsmith.measure.links import Link, Suspect, measured
from draftsmith.measure.scene import Scene
from draftsmith.measure.stored import OWN_WORDS, Spoken, Stored
from draftsmith.measure.training_link import training_link
from draftsmith.measure.walks import Walk, loss, shared, walk

STALE = 0.1
"""Median relative distance of stored aux states from the live ones; bf16 storage and compute stay far below."""


def trained_links(scene: Scene, draft: Eagle3Draft, stored: Stored, spoken: Spoken, asked: Spoken | None) -> list[Link]:
    """The links `data`, `training`, `chain` and `live` of a draft of the run's own."""
    k = scene.draft_tokens
    learned = walk(draft, stored.training, k)
    held_out = walk(draft, stored.held_out, k)
    now = walk(draft, [one.words(draft.config.aux_layers) for one in stored.alive], k)
    heard = spoken.walk
    data = data_link(scene, stored, learned, held_out, heard, asked)
    training = training_link(scene, draft, stored, held_out, now)
    chain = _chain(scene, draft, held_out)
    explained = any(one.certain for one in data.suspects)
    live = _live(scene, stored, held_out, now, heard, explained)
    return [data, training, chain, live]


def _chain(scene: Scene, draft: Eagle3Draft, held_out: Walk) -> Link:
    found = []
    manifest = scene.run / "draft" / MANIFEST
    steps = read_json(manifest)["settings"]["ttt_steps"] if manifest.exists() else scene.draft_tokens
    rates = held_out.per_position
    if scene.draft_tokens > steps and rates[steps - 1] and (rates[steps] or 0.0) < 0.7 * (rates[steps - 1] or 0.0):
        kept = [rate or 0.0 for rate in rates[:steps]] + [rates[steps - 1] or 0.0] * (scene.draft_tokens - steps)
        after = 1 + float(np.cumprod(kept).sum())
        found.append(
            Suspect(
                name="k beyond training",
                link="chain",
                found=f"trained for {steps} steps, asked for {scene.draft_tokens}: acceptance at position {steps + 1} "
                f"is {rates[steps] or 0.0:.0%} after {rates[steps - 1]:.0%}",
                change=f"draft {steps} tokens, or train with --ttt-steps {scene.draft_tokens}",
                before=held_out.length,
                after=after,
                restored=1.0,
                certain=True,
            )
        )
    return measured("chain", held_out, None, found)


def _live(scene: Scene, stored: Stored, held_out: Walk, now: Walk, heard: Walk, explained: bool) -> Link:
    before, after = shared([held_out, heard])
    fall = loss(before, after)
    moved = stored.moved > STALE
    captured = scene.metadata.get("target_fingerprint", "")
    current = _fingerprint(scene)
    foreign = bool(captured and current and captured != current)
    unlike = stored.agreed_now < OWN_WORDS <= stored.agreed_then
    base = Suspect(name="", link="live", found="", change="", before=now.length, after=held_out.length, restored=1.0)
    found = []
    if moved or unlike:
        states = f"stored states are {stored.moved:.0%} away from those the target computes over the same ids now"
        wrong = replace(
            base,
            name="wrong target",
            found=f"{scene.target} says {stored.agreed_now:.0%} of the captured ids and is "
            + ("another model than the traces were captured from" if foreign else "no other by its files")
            + f"; {states}",
            change="measure and serve the target that the traces were captured from, or begin again with this one",
            certain=foreign or unlike,
        )
        stale = replace(
            base,
            name="stale hidden states",
            found=f"{states}, though it says {stored.agreed_now:.0%} of them itself",
            change="extract the hidden states again (draftsmith extract --force) and train again",
            certain=moved and not foreign and not unlike,
        )
        found = sorted((wrong, stale), key=lambda one: not one.certain)
    elif fall.fell == "yes" and not explained:
        found.append(
            Suspect(
                name="sampling",
                link="live",
                found=f"{now.length:.2f} on the captured replies, {heard.length:.2f} on greedy ones of now; captured "
                f"with {scene.metadata.get('sampling', '{}')}",
                change="capture and measure with the sampling that is served",
                before=heard.length,
                after=now.length,
                restored=1.0 if now.length > heard.length else 0.0,
            )
        )
    return measured("live", heard, replace(fall, fell="no") if explained else fall, found)


def _fingerprint(scene: Scene) -> str:
    """Of the target's folder; empty for a hub id, which is no folder here."""
    folder = Path(scene.target)
    return fingerprint_model(folder) if folder.is_dir() else ""
