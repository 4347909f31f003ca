"""Speed with and without the draft, from paired runs: the same prompts, one after the other, in changing order.

A shared machine drifts by more than a draft gains, so the two are never timed apart: each prompt is decoded both ways
back to back, the order alternating by prompt and by round, and a round's speed-up is the ratio of its totals. Medians
over rounds are reported. Times are wall times of whole decodes at batch 1, prefill included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from draftsmith.measure.decode import Decoded, Proposer, Verifier, decode_plain, decode_speculative
from draftsmith.measure.prompts import Prompt
from draftsmith.target.reply import Sampling

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round's totals over its prompts."""

    tokens: int
    seconds: float
    baseline_tokens: int
    baseline_seconds: float
    steps: int
    """Target forwards of the draft decoder, those over prompts left out."""
    replies: tuple[tuple[int, ...], ...]
    """The draft decoder's replies, in prompt order."""

    @property
    def tokens_per_second(self) -> float:
        """With the draft."""
        return self.tokens / self.seconds

    @property
    def baseline_tokens_per_second(self) -> float:
        """Without."""
        return self.baseline_tokens / self.baseline_seconds

    @property
    def speedup(self) -> float:
        """Of this round."""
        return self.tokens_per_second / self.baseline_tokens_per_second

    def to_json(self) -> dict[str, Any]:
        """For the result. `steps` and `baseline_steps` are of the same replies as the seconds, whatever is counted of
        them elsewhere: a step's time is the one over the other."""
        return {
            "tokens": self.tokens,
            "seconds": round(self.seconds, 6),
            "baseline_tokens": self.baseline_tokens,
            "baseline_seconds": round(self.baseline_seconds, 6),
            "steps": self.steps,
            "baseline_steps": self.baseline_tokens - len(self.replies),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "baseline_tokens_per_second": round(self.baseline_tokens_per_second, 2),
            "speedup": round(self.speedup, 4),
        }


def timed_round(
    verifier: Verifier,
    proposer: Proposer,
    prompts: Sequence[Prompt],
    samplings: Sequence[Sampling],
    stop_ids: frozenset[int],
    draft_tokens: int,
    number: int,
    tick: Callable[[], None],
) -> Round:
    """One round over `prompts` (each with its own sampling); `number` sets the order, `tick` is called per prompt."""
    drafted: list[Decoded] = []
    plain: list[Decoded] = []
    for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):

        def with_draft(ids: tuple[int, ...] = prompt.ids, rule: Sampling = sampling) -> None:
            drafted.append(decode_speculative(verifier, proposer, ids, rule, stop_ids, draft_tokens))

        def without(ids: tuple[int, ...] = prompt.ids, rule: Sampling = sampling) -> None:
            plain.append(decode_plain(verifier, ids, rule, stop_ids))

        for decode in (with_draft, without) if (index + number) % 2 == 0 else (without, with_draft):
            decode()
        tick()
    return Round(
        tokens=sum(len(reply.ids) for reply in drafted),
        seconds=sum(reply.seconds for reply in drafted),
        baseline_tokens=sum(len(reply.ids) for reply in plain),
        baseline_seconds=sum(reply.seconds for reply in plain),
        steps=sum(len(reply.cycles) for reply in drafted),
        replies=tuple(reply.ids for reply in drafted),
    )


def warm_up(
    verifier: Verifier,
    proposer: Proposer,
    prompt: Prompt,
    sampling: Sampling,
    stop_ids: frozenset[int],
    draft_tokens: int,
) -> None:
    """A few untimed tokens both ways, so that no round pays for first calls."""
    short = replace(sampling, max_tokens=min(WARM_UP_TOKENS, sampling.max_tokens))
    decode_speculative(verifier, proposer, prompt.ids, short, stop_ids, draft_tokens)
    decode_plain(verifier, prompt.ids, short, stop_ids)


def speed(rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians over rounds; the speed-up is the median of the rounds' own ratios."""
    return {
        "tokens_per_second": round(median(one.tokens_per_second for one in rounds), 2),
        "baseline_tokens_per_second": round(median(one.baseline_tokens_per_second for one in rounds), 2),
        "speedup": round(median(one.speedup for one in rounds), 4),
    }
