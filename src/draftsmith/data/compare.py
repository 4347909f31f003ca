"""Two traces folders of the same questions, id by id: where do two targets (or two engines) first say something else?

Greedy replies of one model in float32 are the same ids on every engine, up to ties: where two tokens have almost the
same logit, the order of additions decides, and everything after that token differs. So a difference is judged by how
far below the target's best logit the ids lie that were taken there; that costs one forward pass per trace that differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from draftsmith.trace import Trace, read_traces


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The same generation in both folders. Positions are None where nothing differs."""

    left: Trace
    right: Trace
    prompt_at: int | None
    """First position at which `prompt_ids` differ."""
    generated_at: int | None
    """First position at which `generated_ids` differ."""

    @property
    def identical(self) -> bool:
        """Same ids in prompt and reply."""
        return self.prompt_at is None and self.generated_at is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All pairs in the left folder's order, and the ids of traces that only one folder has."""

    pairs: tuple[Pair, ...]
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]

    @property
    def share_identical(self) -> float:
        """Share of pairs with the same ids; 0 where there is no pair."""
        return sum(pair.identical for pair in self.pairs) / len(self.pairs) if self.pairs else 0.0


def compare_traces(left: Path, right: Path) -> Comparison:
    """Pairs the trainable traces of two folders by trace id. Holds both folders in memory.

    Raises:
        UserError: a folder holds no traces.
    """
    lefts = {trace.trace_id: trace for trace in read_traces(left)}
    rights = {trace.trace_id: trace for trace in read_traces(right)}
    return Comparison(
        pairs=tuple(_pair(trace, rights[id]) for id, trace in lefts.items() if id in rights),
        only_left=tuple(id for id in lefts if id not in rights),
        only_right=tuple(id for id in rights if id not in lefts),
    )


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first position at which two id sequences differ; a sequence that ends earlier differs where it ends."""
    for position, (one, other) in enumerate(zip_longest(left, right)):
        if one != other:
            return position
    return None


def first_logits(model: Any, pairs: Sequence[Pair]) -> list[tuple[float, float, float] | None]:
    """What the target itself makes of the first id at which two replies part.

    Args:
        model: a transformers causal LM; in float32, as a difference of rounding is what is looked for.
        pairs: any; only those with equal prompts and a differing reply are computed.

    Returns:
        Per pair the logit of the left id, that of the right one, and the best of all; None where the pair is identical,
        the prompts differ, or one reply is the beginning of the other.
    """
    return [_logits(model, pair) for pair in pairs]


def logit_margins(model: Any, pairs: Sequence[Pair]) -> list[float | None]:
    """How clearly the target prefers one of two replies where they part: 0 is a tie.

    Returns:
        Per pair (as `first_logits`) the best logit minus the lower one of the two ids; where these are the best two,
        that is the top-2 margin.
    """
    return [None if found is None else found[2] - min(found[:2]) for found in first_logits(model, pairs)]


def _pair(left: Trace, right: Trace) -> Pair:
    return Pair(
        left=left,
        right=right,
        prompt_at=first_difference(left.prompt_ids, right.prompt_ids),
        generated_at=first_difference(left.generated_ids, right.generated_ids),
    )


def _logits(model: Any, pair: Pair) -> tuple[float, float, float] | None:
    import torch

    at = pair.generated_at
    replies = pair.left.generated_ids, pair.right.generated_ids
    if pair.prompt_at is not None or at is None or at >= min(map(len, replies)):
        return None
    ids = torch.tensor([[*pair.left.prompt_ids, *replies[0][:at]]], device=model.device)
    with torch.inference_mode():
        logits = model(ids, logits_to_keep=1).logits[0, -1].float()  # [V]
    left, right = (float(logits[reply[at]]) for reply in replies)
    return left, right, float(logits.max())
