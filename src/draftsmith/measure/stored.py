"""What a run stored of the looked-at traces beside what its target makes of them now, and what it says with a draft.

Computed once for all links: the live target over the same ids tells its own words from others', and fresh states from
stale ones. Costs one forward pass of the target per held-out trace and one speculative decode per prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.hidden.agreement import teach
from draftsmith.measure.decode import Decoded, DraftProposer, Verifier, decode_speculative
from draftsmith.measure.scene import Alive, Scene
from draftsmith.measure.walks import Walk, Words
from draftsmith.target.reply import Sampling
from draftsmith.trace import Trace

OWN_WORDS = 0.9
"""A target says at least this share of greedy replies of its own again; of other text it says clearly less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What the run stored of the looked-at traces, next to what its target makes of the same ids now."""

    training: list[Words]
    held_out: list[Words]
    alive: list[Alive]
    """The held-out traces' own ids."""
    agreed_then: float
    """Share of generated ids that the stored teacher says."""
    agreed_now: float
    expected: float
    """Share it would say of its own words sampled at temperature 1: the mean of its largest probability."""
    zero_share: float
    """Stored rows (aux or final) that are zero or not finite."""
    moved: float
    """Median relative distance of stored aux rows from the live ones, damaged rows left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """Prompts answered by the reference decoder: replies with their live states, and the decoder's own walk."""

    alive: list[Alive]
    walk: Walk


def look_at_stored(scene: Scene) -> Stored:
    """Reads the stored states and computes the live ones over the same held-out ids."""
    layers = scene.store.target["layers"]
    alive = [Alive(t.trace_id, tuple(t.prompt_ids), tuple(t.generated_ids)) for t in scene.held_out]
    scene.look(alive, layers)
    training, held_out = ([scene.stored(t) for t in part] for part in (scene.training, scene.held_out))
    said = [(scene.states(t).argmax.long() == torch.tensor(list(t.generated_ids))).float() for t in scene.held_out]
    bad = [_damaged(scene, t) for t in (*scene.training, *scene.held_out)]
    distances = []
    for words, one in zip(held_out, alive, strict=True):
        now = one.words(layers).aux
        whole = ~dead_rows(words.aux)
        distances.append(((words.aux - now).norm(dim=-1) / now.norm(dim=-1).clamp(min=1e-6))[whole])
    return Stored(
        training=training,
        held_out=held_out,
        alive=alive,
        agreed_then=float(torch.cat(said).mean()),
        agreed_now=float(np.average([one.agreement for one in alive], weights=[len(one.reply) for one in alive])),
        expected=_expected(scene),
        zero_share=float(torch.cat(bad).float().mean()),
        moved=float(torch.cat(distances).median()),
    )


def speak(scene: Scene, prompts: Sequence[tuple[str, tuple[int, ...]]], draft: Eagle3Draft, layers: Sequence[int],
          limit: int | None = None) -> Spoken:  # fmt: skip
    """Answers prompts (key, ids) greedily with the draft at the target's side."""
    verifier, proposer = Verifier(scene.model, layers), DraftProposer(draft)
    replies, decoded = [], []
    for key, ids in prompts:
        room = min(scene.max_tokens, scene.context - len(ids))
        if limit is not None:
            room = min(room, max(2, limit - len(ids)))
        sampling = Sampling(max_tokens=max(2, room), temperature=0.0)
        found = decode_speculative(verifier, proposer, ids, sampling, scene.stop_ids, scene.draft_tokens)
        replies.append(Alive(key, ids, found.ids))
        decoded.append(found)
    verifier.close()
    return Spoken(alive=replies, walk=_decoded_walk([one.key for one in replies], decoded))


def _decoded_walk(keys: Sequence[str], decoded: Sequence[Decoded]) -> Walk:
    walks = [one.cycles for one in decoded]
    return Walk(
        tuple(keys),
        np.array([sum(cycle.emitted for cycle in one) for one in walks], np.int64),
        np.array([len(one) for one in walks], np.int64),
        np.array([sum(cycle.proposed > 0 for cycle in one) for one in walks], np.int64),
        np.array([sum(cycle.accepted > 0 for cycle in one) for one in walks], np.int64),
    )


def dead_rows(rows: Tensor) -> Tensor:
    """Rows [n] that are zero throughout or not finite; of joined aux states, in any of them."""
    return (rows.abs().sum(-1) == 0) | ~rows.isfinite().all(-1)


def _damaged(scene: Scene, trace: Trace) -> Tensor:
    states = scene.states(trace)
    return torch.cat([dead_rows(states.aux.float()), dead_rows(states.final.float())])


def _expected(scene: Scene) -> float:
    parts = [scene.states(trace).final.to(scene.head.norm.dtype) for trace in scene.held_out]
    found = [(teach(scene.head, part, 1.0).expected, len(part)) for part in parts]
    return float(np.average([share for share, _ in found], weights=[rows for _, rows in found]))
