"""What acceptance numbers mean and how they are counted: pure functions, no tensors.

Acceptance length is the mean number of tokens per target forward, bonus token included: 1.0 means the draft does
nothing. Tokens after the end of a reply do not exist, so they are not counted. Acceptance at position i is conditional
here: given that every position before i was accepted. Engines count differently: their length counts what was accepted
behind an EOS, their per-position counters are unconditional. The conversions below are the only place that mixes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BROKEN_LENGTH = 1.05
"""At or below this a draft is broken, never undertrained (contract 8)."""
LOOP_PERIOD = 64
LOOP_REPEATS = 4
LOOP_TOKENS = 24
LOOP_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Cycle:
    """One target forward of a speculative decoder: what was proposed, judged and really emitted.

    `start` is the index, in the reply, of the first token the cycle emitted. Without an end in it, a cycle emits
    accepted + 1 tokens (the bonus, or the correction of the first rejected one); when the reply ends inside, fewer.
    """

    start: int
    proposed: int
    accepted: int
    emitted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Acceptance over a set of cycles."""

    length: float | None
    """Emitted tokens per cycle; None without cycles."""
    per_position: tuple[float | None, ...]
    """Conditional; None at a position that was never reached."""
    cycles: int
    emitted: int
    engine_length: float | None
    """1 + accepted / drafts, as engines' counters give it (tokens behind an EOS included)."""


def acceptance(cycles: Sequence[Cycle], draft_tokens: int) -> Acceptance:
    """Counts over cycles, of one reply or of many."""
    emitted = sum(cycle.emitted for cycle in cycles)
    drafts = [cycle for cycle in cycles if cycle.proposed]
    return Acceptance(
        length=emitted / len(cycles) if cycles else None,
        per_position=tuple(_conditional_at(cycles, position) for position in range(draft_tokens)),
        cycles=len(cycles),
        emitted=emitted,
        engine_length=engine_length(len(drafts), sum(cycle.accepted for cycle in drafts)) if drafts else None,
    )


def engine_length(drafts: int, accepted: int) -> float:
    """Acceptance length from an engine's counters of drafts (not draft tokens) and accepted tokens."""
    return 1 + accepted / drafts


def acceptance_rate(length: float, draft_tokens: int) -> float:
    """Accepted / drafted tokens, what some tools call acceptance rate: not comparable across `draft_tokens`."""
    return (length - 1) / draft_tokens


def conditional(unconditional: Sequence[float]) -> list[float | None]:
    """Accepted at i / drafts -> accepted at i / drafts that reached i. None where nothing reached i."""
    before = [1.0, *unconditional[:-1]]
    return [here / there if there else None for here, there in zip(unconditional, before, strict=True)]


def unconditional(conditional: Iterable[float | None]) -> list[float]:
    """The inverse of `conditional`."""
    shares, share = [], 1.0
    for rate in conditional:
        share *= rate or 0.0
        shares.append(share)
    return shares


def length_from_unconditional(unconditional: Iterable[float]) -> float:
    """Acceptance length from an engine's per-position counters divided by its drafts."""
    return 1 + sum(unconditional)


def is_degenerate(ids: Sequence[int]) -> bool:
    """Whether a reply is mostly one token or a short loop: easy to draft, so it would flatter any mean.

    True when a stretch of at least half the reply (and 24 tokens) repeats a pattern of at most 64 tokens 4 times or
    more. Costs 64 passes over the reply.
    """
    need = max(LOOP_TOKENS, LOOP_SHARE * len(ids))
    for period in range(1, min(LOOP_PERIOD, len(ids) // LOOP_REPEATS) + 1):
        run = longest = 0
        for here, before in zip(ids[period:], ids, strict=False):
            run = run + 1 if here == before else 0
            longest = max(longest, run)
        if longest + period >= max(need, LOOP_REPEATS * period):
            return True
    return False


def verdict(length: float | None, per_position: Sequence[float | None], degenerate: int, questions: int) -> str:
    """One line that says what an acceptance length means.

    Args:
        length: acceptance length over the replies that count, None where none does.
        per_position: conditional acceptance.
        degenerate: replies that are loops.
        questions: replies in all.
    """
    if length is None and degenerate < questions:
        loops = f"{degenerate} of {questions} replies are loops, and " if degenerate else ""
        rest = "other replies" if degenerate else "replies"
        return (
            f"not an acceptance estimate: {loops}no step with a draft was counted in {questions - degenerate} {rest} "
            "(a reply of one token has none); measure on questions with longer replies, or raise --max-tokens"
        )
    if length is None or degenerate == questions:
        return (
            f"not an acceptance estimate: {degenerate} of {questions} replies are loops and none is left to count; "
            "measure on other questions, or check the target's prompt and sampling"
        )
    if length <= BROKEN_LENGTH:
        return (
            f"the draft is not working (acceptance length {length:.2f}): check that the engine runs EAGLE-3 and not "
            "another algorithm, that the aux hidden states reach the draft (layers, order, fc), that the draft's head "
            "and final norm are the trained ones, and that d2t maps draft ids to target ids"
        )
    first = f"{per_position[0]:.0%} of first proposals accepted" if per_position and per_position[0] else ""
    return f"{length:.2f} tokens per target forward" + (f", {first}" if first else "")


def _conditional_at(cycles: Sequence[Cycle], position: int) -> float | None:
    # A proposal was judged if everything before it was accepted; one behind the reply's end never existed.
    reached = [c for c in cycles if position < min(c.proposed, c.accepted + 1, c.emitted)]
    return sum(position < c.accepted for c in reached) / len(reached) if reached else None
