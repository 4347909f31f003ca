"""What a draft does over known replies, question by question, and whether two such walks differ beyond noise.

A walk is a greedy decoder's cycles over replies whose ids and hidden states are known, found by one unrolled pass per
reply: exactly what the reference decoder would do there, since both accept the leading proposals that the target says
(`train.metrics`). So any change to a draft can be tried for the cost of one forward pass of the draft.

Noise is a bootstrap over questions, because tokens of one reply are not independent: paired where both walks are over
the same questions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.draft.unroll import Batch
from draftsmith.train import metrics

DRAWS = 1000
"""Bootstrap samples; the interval is their middle 95 %."""
FEW = 4
"""Fewer questions than this say nothing about noise."""
MATTERS = 0.05
"""A loss counts from this share of what the draft gained (acceptance length - 1) on: less is nobody's trouble."""

Fell = Literal["no", "yes", "cannot tell"]


@dataclass(frozen=True, slots=True)
class Words:
    """One reply and what the target computed over it. `aux` [n-1, 3H] is of tokens 0..n-2, for one set of layers."""

    key: str
    ids: tuple[int, ...]
    prompt_length: int
    aux: Tensor

    @property
    def supervised(self) -> int:
        """Tokens that a draft can propose: all generated but the first."""
        return len(self.ids) - self.prompt_length - 1


@dataclass(frozen=True, slots=True)
class Walk:
    """Per question: emitted tokens and cycles, first proposals judged and accepted; all int64 [N]."""

    keys: tuple[str, ...]
    emitted: NDArray[np.int64]
    cycles: NDArray[np.int64]
    judged: NDArray[np.int64]
    hits: NDArray[np.int64]
    per_position: tuple[float | None, ...] = ()
    """Conditional acceptance."""

    @property
    def length(self) -> float:
        """Acceptance length; 1.0 without cycles."""
        return float(self.emitted.sum() / max(1, self.cycles.sum())) or 1.0

    @property
    def accuracy(self) -> float:
        """Share of all positions, accepted chain or not, where the first proposal is the target's token."""
        return float(self.hits.sum() / max(1, self.judged.sum()))

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval of the length; None where too few questions say nothing."""
        if len(self.keys) < FEW:
            return None
        lengths = _lengths(self, _draws(len(self.keys)))
        low, high = np.quantile(lengths, (0.025, 0.975))
        return float(high - low) / 2


@dataclass(frozen=True, slots=True)
class Loss:
    """How much shorter the second walk's acceptance is. `low` and `high` bound it (95 %), None for a few questions."""

    loss: float
    low: float | None
    high: float | None
    questions: int
    fell: Fell


@torch.no_grad()
def walk(draft: Eagle3Draft, replies: Sequence[Words], draft_tokens: int, limit: int | None = None) -> Walk:
    """Walks a draft over replies.

    Args:
        draft: on the device of the replies' states.
        replies: their `aux` is what the draft's `fuse` reads.
        draft_tokens: chain length.
        limit: positions the draft was made for; nothing is drafted where a chain would pass it.
    """
    kept = [reply for reply in replies if reply.supervised > 0]
    matches = []
    for reply in kept:
        found = metrics.chain_matches(draft, batch_of(reply, draft.fc.weight.dtype), draft_tokens)[0].cpu().numpy()
        if limit is not None:
            found[max(0, limit - draft_tokens - reply.prompt_length + 1) :] = False
        matches.append(found)
    return walk_of([reply.key for reply in kept], matches, draft_tokens)


def walk_of(keys: Sequence[str], matches: Sequence[NDArray[np.bool_]], draft_tokens: int) -> Walk:
    """The walk over replies whose hits are known: bool [rows, draft_tokens] each, as `metrics.simulate` takes them."""
    walks = [metrics.simulate(found) for found in matches]
    return Walk(
        tuple(keys),
        np.array([sum(cycle.emitted for cycle in one) for one in walks], np.int64),
        np.array([len(one) for one in walks], np.int64),
        np.array([len(found) for found in matches], np.int64),
        np.array([found[:, 0].sum() for found in matches], np.int64),
        tuple(metrics.acceptance([c for one in walks for c in one], draft_tokens)["acceptance_per_position"]),
    )


def batch_of(reply: Words, dtype: torch.dtype) -> Batch:
    """One reply as the rows of a draft; without the teacher's states, which no walk reads."""
    tokens = torch.tensor([reply.ids], device=reply.aux.device)
    start, count = reply.prompt_length, reply.supervised
    labels = tokens[:, start + 1 :]
    return Batch(
        aux=reply.aux[None, : len(reply.ids) - 2].to(dtype),
        ids=tokens[:, 1:-1],
        first=torch.tensor([start - 1], device=tokens.device),
        count=torch.tensor([count], device=tokens.device),
        inputs=tokens[:, start:-1],
        labels=labels,
        final=torch.zeros(1, count, 0, device=tokens.device),
        argmax=labels,
    )


def loss(before: Walk, after: Walk) -> Loss:
    """How far the acceptance length falls from one walk to the next, paired where the questions are the same."""
    questions = min(len(before.keys), len(after.keys))
    fall = before.length - after.length
    matters = fall > MATTERS * max(before.length - 1, 0.02)
    if questions < FEW:
        return Loss(fall, None, None, questions, "cannot tell" if matters else "no")
    draws = _draws(len(before.keys))
    other = draws if before.keys == after.keys else _draws(len(after.keys), seed=1)
    low, high = np.quantile(_lengths(before, draws) - _lengths(after, other), (0.025, 0.975))
    fell: Fell = "no" if not matters else "yes" if low > 0 else "cannot tell"
    return Loss(fall, float(low), float(high), questions, fell)


def shared(walks: Iterable[Walk]) -> list[Walk]:
    """The walks cut down to the questions that all of them have, in the first one's order."""
    found = list(walks)
    keys = [key for key in found[0].keys if all(key in one.keys for one in found)]
    return [_chosen(one, keys) for one in found]


def _chosen(one: Walk, keys: Sequence[str]) -> Walk:
    place = {key: index for index, key in enumerate(one.keys)}
    rows = np.array([place[key] for key in keys], np.int64)
    parts = (one.emitted[rows], one.cycles[rows], one.judged[rows], one.hits[rows])
    return Walk(tuple(keys), *parts, one.per_position)


def _draws(questions: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, questions, (DRAWS, questions))


def _lengths(one: Walk, draws: NDArray[np.int64]) -> NDArray[np.float64]:
    lengths: NDArray[np.float64] = one.emitted[draws].sum(1) / np.maximum(1, one.cycles[draws].sum(1))
    return lengths
