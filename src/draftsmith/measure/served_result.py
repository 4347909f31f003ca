"""From rounds to `served.json`: speed, times and acceptance per concurrency, and whether outputs were the same.

Pure. A round's speed-up is the ratio of the two servers' output tokens per second in that round; medians over rounds
are reported, with the least and the largest where there are several. Acceptance is counted in the draft's steps where
the engine shows them, without replies that only repeat themselves and without what lies behind the end of a reply; the
engine's own counters, which know neither, stand beside it under their own names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from draftsmith.measure.acceptance import Acceptance, Cycle, acceptance, is_degenerate
from draftsmith.measure.counters import total
from draftsmith.measure.served_rounds import Answer, Round
from draftsmith.trace import Span

STEPS_AGREE = 0.02
"""Steps seen in the streams against drafts the engine counted: further apart, parts of the stream were merged."""
POSITIONS = ((0, 64), (64, 256), (256, 1024), (1024, None))
SHOWN_DIFFERENCES = 20
SHOWN_TEXT = 160
Spans = Callable[[Answer], tuple[Span | None, Span | None]]
"""Reasoning and answer of a reply."""


def level(
    concurrency: int, draft: Sequence[Round], baseline: Sequence[Round], draft_tokens: int, spans: Spans
) -> dict[str, Any]:
    """One concurrency; either side may be missing."""
    pairs = list(zip(draft, baseline, strict=False))
    speedups = [with_draft.tokens_per_second / without.tokens_per_second for with_draft, without in pairs]
    both = [*draft, *baseline]
    return {
        "concurrency": concurrency,
        "in_flight": _median([one.in_flight for one in draft or baseline], 2),
        "tokens_per_second": _median([one.tokens_per_second for one in draft], 2),
        "baseline_tokens_per_second": _median([one.tokens_per_second for one in baseline], 2),
        "speedup": _median(speedups, 4),
        "speedup_spread": [round(min(speedups), 4), round(max(speedups), 4)] if len(speedups) > 1 else None,
        "time_per_output_token": _times(_per_token(draft)),
        "baseline_time_per_output_token": _times(_per_token(baseline)),
        "time_to_first_token": _times(_first_tokens(draft)),
        "baseline_time_to_first_token": _times(_first_tokens(baseline)),
        **_accepted(draft, draft_tokens, spans),
        "interleaved": bool(pairs) and all(a.session == b.session for a, b in pairs),
        "disturbed": any(one.disturbed for one in both),
        "foreign_tokens": sum(one.foreign for one in both),
        "rounds": [_round(draft[i : i + 1], baseline[i : i + 1]) for i in range(max(len(draft), len(baseline)))],
    }


def compare(
    levels: dict[int, tuple[Sequence[Round], Sequence[Round]]], decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """Whether greedy replies of both servers are the same, reply by reply at the same concurrency and round.

    Returns:
        lossless, compared, differences (the first ones, with both texts from where they part), and how many of the
        baseline's replies equal its own at another time: what differs no more than that is the engine's own doing.
    """
    compared, found = 0, []
    for concurrency, (draft, baseline) in levels.items():
        for number, (with_draft, without) in enumerate(zip(draft, baseline, strict=False)):
            for ours, theirs in zip(with_draft.answers, without.answers, strict=True):
                compared += 1
                if ours.ids != theirs.ids:
                    where = {"concurrency": concurrency, "round": number, "key": ours.key}
                    found.append({**where, **_difference(ours.ids, theirs.ids, decode)})
    return {
        "lossless": not found if compared else None,
        "compared": compared,
        "different": len(found),
        "differences": found[:SHOWN_DIFFERENCES],
        "baseline_repeats_itself": _repeats([one for _, rounds in levels.values() for one in rounds]),
    }


def _accepted(rounds: Sequence[Round], draft_tokens: int, spans: Spans) -> dict[str, Any]:
    if not rounds:
        return {"acceptance_length": None, "acceptance_per_position": [], "drafts": 0}
    counted = total([one.counted for one in rounds])
    answers = [answer for one in rounds for answer in one.answers]
    kept = [answer for answer in answers if not is_degenerate(answer.ids)]
    shown = [None if answer.cycles is None else len(answer.cycles) for answer in answers]
    by_steps = steps_agree(shown, counted.drafts)
    overall, reasoning, answer, places = _by_steps(kept, draft_tokens, spans) if by_steps else (None, None, None, None)
    verified = _verified_length(kept)
    if overall:
        source, length, rates = "steps", overall.length, list(overall.per_position)
    elif verified is not None:
        source, length, rates = "replies", verified, counted.conditional
    elif kept:
        source, length, rates = "counters", counted.length, counted.conditional
    else:  # all that the counters hold is of loops
        source, length, rates = "counters", None, []
    return {
        "acceptance_length": _rounded(length),
        "acceptance_per_position": _rates(rates),
        "acceptance_from": source,
        "acceptance_length_reasoning": _rounded(reasoning.length) if reasoning else None,
        "acceptance_length_answer": _rounded(answer.length) if answer else None,
        "acceptance_by_place": places,
        "engine_acceptance_length": _rounded(counted.length),
        "acceptance_per_position_unconditional": _rates(counted.unconditional),
        "drafts": counted.drafts,
        "drafted": counted.draft_tokens,
        "accepted": counted.accepted,
        "degenerate": len(answers) - len(kept),
        "replies": len(answers),
    }


def _by_steps(
    kept: Sequence[Answer], draft_tokens: int, spans: Spans
) -> tuple[Acceptance, Acceptance, Acceptance, list[dict[str, Any]]]:
    """Acceptance overall, in the reasoning, in the answer, and by place in the reply (where a step's first id is)."""
    everything: list[Cycle] = []
    parts: tuple[list[Cycle], list[Cycle]] = ([], [])
    for one in kept:
        steps = one.cycles or ()
        everything += steps
        for span, part in zip(spans(one), parts, strict=True):
            first, behind = span or (0, 0)
            part += [step for step in steps if first <= step.start < behind]
    places = []
    for start, end in POSITIONS:
        here = [step for step in everything if start <= step.start and (end is None or step.start < end)]
        if here:
            length = acceptance(here, draft_tokens).length
            places.append({"from": start, "to": end, "acceptance_length": _rounded(length), "steps": len(here)})
    reasoning, answer = (acceptance(part, draft_tokens) for part in parts)
    return acceptance(everything, draft_tokens), reasoning, answer, places


def steps_agree(steps: Sequence[int | None], drafts: int) -> bool:
    """Whether the streams show the steps that the engine counted. A reply's last step may have drafted nothing.

    Args:
        steps: of each reply, as its stream shows them; None where it does not.
        drafts: as the engine counted them over the same replies.
    """
    known = [count for count in steps if count is not None]
    if not drafts or len(known) < len(steps):
        return False
    return abs(sum(known) - drafts) <= STEPS_AGREE * drafts + len(steps)


def _verified_length(answers: Sequence[Answer]) -> float | None:
    """SGLang: tokens behind the prompt's own over the target's forwards."""
    known = [answer for answer in answers if answer.verified]
    if not known:
        return None
    return sum(len(answer.ids) - 1 for answer in known) / sum(answer.verified or 0 for answer in known)


def _difference(
    found: Sequence[int], expected: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    pairs = zip(found, expected, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))
    return {
        "index": index,
        "found": found[index] if index < len(found) else None,
        "expected": expected[index] if index < len(expected) else None,
        "found_text": decode(found[index:])[:SHOWN_TEXT],
        "expected_text": decode(expected[index:])[:SHOWN_TEXT],
    }


def _repeats(rounds: Sequence[Round]) -> float | None:
    """Share of a server's replies that equal those of its first round; None with one round."""
    if len(rounds) < 2:
        return None
    first = {answer.key: answer.ids for answer in rounds[0].answers}
    later = [answer.ids == first[answer.key] for one in rounds[1:] for answer in one.answers]
    return round(sum(later) / len(later), 4)


def _round(draft: Sequence[Round], baseline: Sequence[Round]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for prefix, rounds in (("", draft), ("baseline_", baseline)):
        for one in rounds:
            found[f"{prefix}tokens"] = one.tokens
            found[f"{prefix}seconds"] = one.seconds
            found[f"{prefix}tokens_per_second"] = round(one.tokens_per_second, 2)
            found[f"{prefix}in_flight"] = one.in_flight
    if draft and baseline:
        found["speedup"] = round(draft[0].tokens_per_second / baseline[0].tokens_per_second, 4)
    return found


def _per_token(rounds: Sequence[Round]) -> list[float]:
    return [answer.per_token for one in rounds for answer in one.answers if answer.per_token is not None]


def _first_tokens(rounds: Sequence[Round]) -> list[float]:
    return [answer.first_token for one in rounds for answer in one.answers]


def _times(seconds: list[float]) -> dict[str, float] | None:
    """Median and 95th percentile, in seconds."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return {
        "median": round(median(ordered), 5),
        "p95": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 5),
    }


def _median(values: Sequence[float], digits: int) -> float | None:
    return round(median(values), digits) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _rates(values: Sequence[float | None]) -> list[float | None]:
    return [_rounded(value) for value in values]
