"""Does a draft pay off, where, and what must it reach: a cost model over step times and acceptance, no tensors.

One step of a speculating engine gives AL(k) tokens per request and takes k draft steps, one target forward over k+1
tokens and overhead; the plain engine gives one token in T_target. So, for B parallel requests and k draft tokens,

    speed-up(B, k) = AL(k) * T_target(B) / T_step(B, k),    T_step = k * T_draft(B) + T_verify(B, k+1) + overhead(B)

(Leviathan et al., arXiv:2211.17192, theorem 3.8, with measured times in place of a cost ratio). The draft breaks even
where AL(k) = T_step / T_target. What both engines do alike (prefill, the time a batch is not full) is left out, so that
the ratio is one of decoding; `Replies` puts it back in for a measurement that counts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftsmith.errors import UserError

WORTHWHILE = 1.05
"""Speed-ups below this are noise: not worth a second model in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds per engine step at `concurrency` parallel requests.

    `with_draft[k]` is a whole step with k draft tokens, where it was measured; other k follow by a straight line
    between the plain step (k = 0) and the measured ones, because drafting and verifying both grow with k.
    """

    concurrency: int
    target: float
    with_draft: Mapping[int, float]

    def step(self, k: int) -> float:
        """Seconds of one step with k draft tokens."""
        if k in self.with_draft:
            return self.with_draft[k]
        known = sorted({0: self.target, **self.with_draft}.items())
        below = max((item for item in known if item[0] < k), key=lambda item: item[0])
        above = min((item for item in known if item[0] > k), key=lambda item: item[0], default=None)
        if above is None:  # past the last one measured: the line through the last two goes on
            below, above = known[-2], known[-1]
        share = (k - below[0]) / (above[0] - below[0])
        return below[1] + share * (above[1] - below[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One cell of the table."""

    concurrency: int
    draft_tokens: int
    acceptance_length: float
    speedup: float
    break_even_length: float
    """Acceptance length at which the draft neither gains nor costs."""
    break_even_acceptance: float | None
    """The same as acceptance at every position alike; None: not even 1.0 breaks even."""
    extrapolated: bool
    """Positions beyond those measured take the last measured acceptance."""


def composed(concurrency: int, target: float, verify: Mapping[int, float], draft: float, overhead: float) -> StepTimes:
    """Step times from typed-in parts, in seconds.

    Args:
        concurrency: parallel requests.
        target: a forward over one token of each.
        verify: k -> a forward over k+1 tokens of each.
        draft: a draft step.
        overhead: per step, whatever k.
    """
    whole = {k: k * draft + seconds + overhead for k, seconds in verify.items()}
    return StepTimes(concurrency=concurrency, target=target, with_draft=whole)


def acceptance_length(acceptance: Sequence[float], k: int) -> float:
    """Tokens per step with k draft tokens, bonus included, from conditional acceptance per position.

    Positions past the last one given take its value.

    Raises:
        UserError: no position, or a value outside 0..1.
    """
    if not acceptance or not all(0 <= rate <= 1 for rate in acceptance):
        raise UserError(f"acceptance: expected shares from 0 to 1, one per position, found {list(acceptance)}")
    length, reached = 1.0, 1.0
    for position in range(k):
        reached *= acceptance[min(position, len(acceptance) - 1)]
        length += reached
    return length


def break_even(times: StepTimes, k: int, gain: float = 1.0) -> float:
    """The acceptance length that makes serving `gain` times as fast."""
    return gain * times.step(k) / times.target


def constant_acceptance(length: float, k: int) -> float | None:
    """The acceptance, the same at every position, that gives this acceptance length; None: none up to 1.0 does."""
    if length <= 1:
        return 0.0
    if length > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if acceptance_length([middle], k) < length else (low, middle)
    return high


def predict(acceptance: Sequence[float], times: StepTimes, k: int) -> Prediction:
    """The cell at `times.concurrency` and k."""
    length, even = acceptance_length(acceptance, k), break_even(times, k)
    return Prediction(
        concurrency=times.concurrency,
        draft_tokens=k,
        acceptance_length=length,
        speedup=length / even,
        break_even_length=even,
        break_even_acceptance=constant_acceptance(even, k),
        extrapolated=k > len(acceptance),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Payoff:
    """The whole table: every concurrency with every k, in rising order."""

    acceptance: tuple[float, ...]
    cells: tuple[Prediction, ...]
    assumed: bool = False
    """No draft was measured: `acceptance` is what somebody supposes."""

    def best(self, concurrency: int) -> Prediction:
        """The k that gains most there."""
        return max((cell for cell in self.cells if cell.concurrency == concurrency), key=lambda cell: cell.speedup)

    def concurrencies(self) -> list[int]:
        """Those of the table, rising."""
        return sorted({cell.concurrency for cell in self.cells})

    def pays_up_to(self) -> int | None:
        """The highest concurrency up to which all of the table gain more than noise; None: not even the least."""
        last = None
        for concurrency in self.concurrencies():
            if self.best(concurrency).speedup < WORTHWHILE:
                break
            last = concurrency
        return last

    def words(self) -> list[str]:
        """What the table says, in sentences."""
        least, most = self.concurrencies()[0], self.concurrencies()[-1]
        limit = self.pays_up_to()
        first = self.best(least)
        if limit is None:
            lines = [
                f"It will not pay off: at {_requests(least)} the best choice, {_drafts(first.draft_tokens)}, makes "
                f"serving {first.speedup:.2f} times as fast."
            ]
        else:
            lines = [f"It pays off: {first.speedup:.2f}x at {_requests(least)} with {_drafts(first.draft_tokens)}."]
            if limit < most:
                after = next(one for one in self.concurrencies() if one > limit)
                lines.append(
                    f"It will not pay off above {_requests(limit)}: at {after} it is {self.best(after).speedup:.2f}x."
                )
            elif most > least:
                last = self.best(most)
                lines.append(f"At {_requests(most)} it is {last.speedup:.2f}x with {_drafts(last.draft_tokens)}.")
        for concurrency in self.concurrencies():
            cell = self.best(concurrency)
            if cell.break_even_acceptance is None:
                lines.append(
                    f"At {_requests(concurrency)} no draft breaks even with {_drafts(cell.draft_tokens)}: a step "
                    f"takes {cell.break_even_length:.2f} plain steps and gives {cell.draft_tokens + 1} tokens at most."
                )
            else:
                lines.append(
                    f"At {_requests(concurrency)} a draft must reach acceptance length {cell.break_even_length:.2f} "
                    f"({cell.break_even_acceptance:.0%} accepted at every position) to break even with "
                    f"{_drafts(cell.draft_tokens)}; {'the assumed one' if self.assumed else 'this one'} has "
                    f"{cell.acceptance_length:.2f}."
                )
        if any(cell.extrapolated for cell in self.cells) and not self.assumed:
            lines.append(
                f"Beyond {_drafts(len(self.acceptance))} acceptance was not measured: the last value is taken."
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "acceptance_per_position": list(self.acceptance),
            "pays_up_to": self.pays_up_to(),
            "best": {str(one): self.best(one).draft_tokens for one in self.concurrencies()},
            "cells": [asdict(cell) for cell in self.cells],
            "words": self.words(),
        }


def payoff(
    acceptance: Sequence[float], times: Sequence[StepTimes], ks: Sequence[int], *, assumed: bool = False
) -> Payoff:
    """The table over all measured concurrencies and `ks`; `assumed`: whether acceptance is only supposed.

    Raises:
        UserError: as `acceptance_length`, or nothing to tabulate.
    """
    if not times or not ks:
        raise UserError("payoff: expected step times at one concurrency at least, and draft tokens of 1 or more")
    order = sorted(times, key=lambda one: one.concurrency)
    return Payoff(
        acceptance=tuple(acceptance),
        cells=tuple(predict(acceptance, one, k) for one in order for k in sorted(ks)),
        assumed=assumed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """What a measurement of whole replies holds besides decoding steps, per request."""

    prefill: float
    """Seconds until the first token of a request that is alone, without draft."""
    tokens: float
    """Generated tokens, the first one included."""


def whole_speedup(cell: Prediction, times: StepTimes, replies: Replies, draft_prefill: float = 0.0) -> float:
    """The ratio of output tokens per second over whole replies, prefill included.

    What of the engine's time a reply takes: its own prompt's, during which the others wait, and its share of the steps
    that all take together. (Where an engine reads prompts beside its steps at no cost, prefill weighs less than this.)

    Args:
        cell: the prediction for decoding alone.
        times: of its concurrency.
        replies: of the measurement.
        draft_prefill: seconds that the draft adds to the prefill.
    """
    later = (replies.tokens - 1) / times.concurrency
    plain = replies.prefill + later * times.target
    drafted = replies.prefill + draft_prefill + later / cell.acceptance_length * times.step(cell.draft_tokens)
    return plain / drafted


def _requests(count: int) -> str:
    return "1 request at a time" if count == 1 else f"{count} parallel requests"


def _drafts(count: int) -> str:
    return "1 draft token" if count == 1 else f"{count} draft tokens"
