"""Held-out acceptance by exact simulation of a greedy chain, from one unrolled pass per trace.

While a proposal equals the captured token, the draft's next step sees exactly what the unroll fed it, so whether step k
at row p hits is all a decoder would ever find out. Walking these hits as a decoder walks (accept the leading ones, emit
one more, go on from there) gives the acceptance length of greedy decoding without running the target.

Counted as everywhere: the first generated token comes from the prefill and is not counted; a cycle emits its accepted
tokens and the target's own next one, but never past the end of the reply. Acceptance at a position is conditional:
everything before it was accepted, and a token exists there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.draft.loss import proposals
from draftsmith.draft.unroll import Batch, shifted, unroll
from draftsmith.trace import Span

BROKEN = 1.05
"""An acceptance length at or below this says that something is broken, never that more data is needed (contract 8)."""


@dataclass(frozen=True, slots=True)
class Cycle:
    """One decoder cycle at supervised row `row`: it emits generated tokens `row` + 1 up to `row` + `emitted`."""

    row: int
    accepted: int
    emitted: int
    remaining: int
    """Tokens of the reply that were still to come."""


def simulate(matches: NDArray[np.bool_]) -> list[Cycle]:
    """Walks one trace as a greedy decoder would.

    Args:
        matches: bool [rows, k]; row r, step k: the draft's choice equals generated token r + 1 + k. Entries past the
            end of the reply (r + k >= rows) are ignored.

    Returns:
        The decoder's cycles, in order; their `emitted` sum to `rows`.
    """
    rows, draft_tokens = matches.shape
    cycles, row = [], 0
    while row < rows:
        remaining = rows - row
        chain = matches[row, : min(draft_tokens, remaining)]
        accepted = len(chain) if chain.all() else int(chain.argmin())
        emitted = min(accepted + 1, remaining)
        cycles.append(Cycle(row, accepted, emitted, remaining))
        row += emitted
    return cycles


def acceptance(cycles: Sequence[Cycle], draft_tokens: int) -> dict[str, Any]:
    """Acceptance length and conditional acceptance per position, None where nothing was counted."""
    emitted = sum(cycle.emitted for cycle in cycles)
    return {
        "acceptance_length": round(emitted / len(cycles), 4) if cycles else None,
        "acceptance_per_position": [_accepted_at(cycles, position) for position in range(draft_tokens)],
        "cycles": len(cycles),
        "emitted": emitted,
    }


def within(cycles: Iterable[Cycle], span: Span | None) -> list[Cycle]:
    """The cycles whose first token lies in a span of the generated ids."""
    start, end = span or (0, 0)
    return [cycle for cycle in cycles if start <= cycle.row + 1 < end]


@torch.no_grad()
def chain_matches(draft: Eagle3Draft, batch: Batch, draft_tokens: int) -> Tensor:
    """Whether the draft's greedy choice at each step is the captured token: bool [B, G, draft_tokens]."""
    columns = []
    for step, hidden in enumerate(unroll(draft, batch, draft_tokens)):
        columns.append((proposals(draft, hidden) == shifted(batch.labels, step)) & batch.valid(step))
    return torch.stack(columns, dim=-1)


def summarise(
    matches: Sequence[NDArray[np.bool_]],
    spans: Sequence[tuple[Span | None, Span | None]],
    draft_tokens: int,
) -> dict[str, Any]:
    """The held-out metric over traces: overall, and split by where a cycle starts.

    Args:
        matches: per trace, bool [rows, draft_tokens].
        spans: per trace, its reasoning and answer span.
        draft_tokens: chain length.
    """
    walks = [simulate(found) for found in matches]
    everything = [cycle for walk in walks for cycle in walk]
    reasoning = [c for walk, (span, _) in zip(walks, spans, strict=True) for c in within(walk, span)]
    answer = [c for walk, (_, span) in zip(walks, spans, strict=True) for c in within(walk, span)]
    return {
        **acceptance(everything, draft_tokens),
        "reasoning": acceptance(reasoning, draft_tokens),
        "answer": acceptance(answer, draft_tokens),
    }


def _accepted_at(cycles: Sequence[Cycle], position: int) -> float | None:
    reached = [cycle for cycle in cycles if position <= cycle.accepted and position < cycle.remaining]
    return round(sum(position < cycle.accepted for cycle in reached) / len(reached), 4) if reached else None
