"""The first link: are the replies the draft learned from those it will meet?

Its own words or others' text, as many different ones as it needs, in the mode, language and length that is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from draftsmith.measure.links import Link, Suspect, measured
from draftsmith.measure.scene import Scene
from draftsmith.measure.stored import OWN_WORDS, Spoken, Stored
from draftsmith.measure.walks import Walk, loss
from draftsmith.target.thinking import split

OVERFIT = 0.35
"""A held-out chain that loses this share of what training replies gain was not taught enough different ones."""


def data_link(scene: Scene, stored: Stored, learned: Walk, held_out: Walk, heard: Walk, asked: Spoken | None) -> Link:
    """The link `data`: walks over training and held-out replies, of the live decoder and over the questions asked."""
    found = []
    static = scene.metadata.get("source_kind") == "static"
    foreign = stored.agreed_now < min(OWN_WORDS, stored.expected - 0.05)
    if (static and foreign) or (_greedy(scene) and stored.agreed_now < OWN_WORDS and stored.agreed_then < OWN_WORDS):
        kind = "they were imported" if static else "though they count as captured"
        found.append(
            Suspect(
                name="static text",
                link="data",
                found=f"the target itself says only {stored.agreed_now:.0%} of the traces' ids ({kind}); of its own "
                f"words it would say {stored.expected:.0%} even sampled",
                change="capture the target's own replies (draftsmith capture) and train on those",
                before=heard.length,
                certain=True,
            )
        )
    gap = loss(learned, held_out)
    if gap.fell == "yes" and gap.loss > OVERFIT * (learned.length - 1):
        found.append(
            Suspect(
                name="too few traces",
                link="data",
                found=f"{learned.length:.2f} on replies it was trained on, {held_out.length:.2f} on others",
                change="capture more different questions; the draft knows its training replies by heart",
                before=held_out.length,
                after=learned.length,
                restored=1.0,
                certain=True,
            )
        )
    note = ""
    if asked is not None:
        fall = loss(heard, asked.walk)
        note = f"{asked.walk.length:.2f} on the questions asked"
        if fall.fell == "yes":
            found += _asked_suspects(scene, heard, asked)
        elif fall.fell == "cannot tell":
            note += f"; cannot tell whether that is less: {fall.questions} questions"
    return measured("data", learned, None, found, note)


def _asked_suspects(scene: Scene, heard: Walk, asked: Spoken) -> list[Suspect]:
    """In what the questions asked differ from those trained on, most telling first."""
    told = [(tuple(t.prompt_ids), tuple(t.generated_ids)) for t in (*scene.training, *scene.held_out)]
    now = [(one.prompt, one.reply) for one in asked.alive]
    thinking = [_thinking(scene, pairs) for pairs in (told, now)]
    lengths = [float(np.median([len(reply) for _, reply in pairs])) for pairs in (told, now)]
    scripts = [_foreign(scene, pairs) for pairs in (told, now)]
    base = Suspect(
        name="", link="data", found="", change="", before=asked.walk.length, after=heard.length, certain=True
    )
    found = []
    if abs(thinking[0] - thinking[1]) > 0.5:
        found.append(
            replace(
                base,
                name="thinking mode",
                found=f"{thinking[0]:.0%} of the traces think, {thinking[1]:.0%} of the replies asked for do",
                change="capture in the mode that is served (--template-options), or serve the mode that was trained",
                restored=1.0,
            )
        )
    if abs(scripts[0] - scripts[1]) > 0.2:
        found.append(
            replace(
                base,
                name="language",
                found=f"{scripts[0]:.0%} of the traces' characters are not ASCII, {scripts[1]:.0%} of those asked for",
                change="capture questions in the languages that are served",
                restored=0.9,
            )
        )
    if max(lengths) > 2 * min(lengths):
        found.append(
            replace(
                base,
                name="length",
                found=f"replies have a median of {lengths[0]:.0f} ids in the traces, {lengths[1]:.0f} when asked",
                change="capture questions and budgets as they are served",
                restored=0.8,
            )
        )
    found.append(
        replace(
            base,
            name="other questions",
            found=f"{heard.length:.2f} on held-out questions of the run, {asked.walk.length:.2f} on those asked",
            change="capture questions like those that are served",
            restored=0.6,
        )
    )
    return found


def _greedy(scene: Scene) -> bool:
    sampled = (json.loads(t.sampling).get("temperature", 0.0) for t in scene.held_out)
    return not any(sampled)


def _thinking(scene: Scene, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> float:
    if scene.delimiters is None or scene.template is None:
        return 0.0
    parts = [split(scene.delimiters, scene.template, prompt, reply, "stop") for prompt, reply in pairs]
    return float(np.mean([part.reasoning is not None for part in parts]))


def _foreign(scene: Scene, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> float:
    if scene.template is None:
        return 0.0
    text = "".join(scene.template.decode(reply) for _, reply in pairs)
    return sum(not character.isascii() for character in text) / max(1, len(text))
