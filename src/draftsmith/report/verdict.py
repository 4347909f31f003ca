"""The result in one true sentence and a few large numbers.

The sentence says what was measured, also when the draft does not pay off, is broken or changes the output; it never
promises what other hardware, other prompts or a busy server would show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from draftsmith.measure.acceptance import BROKEN_LENGTH

EVEN = 0.03
"""Speed-ups within this of 1.0 are called no difference: paired rounds on one machine vary by about as much."""
FEW_QUESTIONS = 20
Mood = Literal["good", "even", "bad", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One large number: its name, its value, what it means."""

    name: str
    value: str
    means: str
    mood: Mood = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The first screen."""

    sentence: str
    mood: Mood
    facts: list[Fact]
    conditions: list[tuple[str, str]]
    """Under what this was measured: name, value."""
    cautions: list[str]


def verdict(result: dict[str, Any] | None, run: str) -> Verdict:
    """What `measure/result.json` amounts to; `run` is for the command that makes it where it is missing."""
    if result is None:
        return Verdict(
            sentence=f"Not measured yet: `draftsmith measure --run {run}` says whether this draft pays off.",
            mood="none",
            facts=[],
            conditions=[],
            cautions=[],
        )
    mood, sentence = _sentence(result)
    return Verdict(
        sentence=sentence,
        mood=mood,
        facts=_facts(result),
        conditions=conditions(result),
        cautions=_cautions(result),
    )


def conditions(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Under what a result was measured, as name and value."""
    rounds, cycles = result.get("rounds"), result.get("cycles")
    listed = [
        ("sampling", sampling_words(result["sampling"])),
        ("draft tokens", str(result["draft_tokens"])),
        ("questions", f"{result['questions']:,}"),
        ("prompts", result.get("prompts")),
        ("timed in", " on ".join(str(result[key]) for key in ("dtype", "device") if result.get(key))),
        ("paired rounds", str(len(rounds)) if rounds else None),
        ("target forwards", f"{cycles:,}" if cycles else None),
    ]
    return [(name, value) for name, value in listed if value]


def sampling_words(sampling: dict[str, Any]) -> str:
    """Sampling values as a person reads them."""
    if not sampling.get("temperature"):
        return "greedy"
    words = f"temperature {sampling['temperature']:g}"
    if sampling.get("top_p", 1.0) < 1.0:
        words += f", top-p {sampling['top_p']:g}"
    if sampling.get("top_k"):
        words += f", top-k {sampling['top_k']}"
    return words


def rate(value: float) -> str:
    """Tokens per second."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def pace(speedup: float) -> Mood:
    """Whether a speed-up is one."""
    if speedup >= 1 + EVEN:
        return "good"
    return "even" if speedup > 1 - EVEN else "bad"


def _sentence(result: dict[str, Any]) -> tuple[Mood, str]:
    length, speedup = result["acceptance_length"], result["speedup"]
    if result["lossless"] is False:
        return "bad", (
            "Do not serve this draft: greedy output with it differs from the target's own in float32, where it must "
            "be the same token for token. That is a fault to find, not a matter of training."
        )
    if length is None and result.get("degenerate") != result["questions"]:
        return "bad", (
            "No acceptance estimate: no step with a draft was counted (a reply of one token has none). Measure on "
            "questions with longer replies, or raise --max-tokens."
        )
    if length is None:
        return "bad", (
            "No acceptance estimate: every measured reply repeats itself. Measure on other questions, or check the "
            "target's prompt and sampling."
        )
    if length <= BROKEN_LENGTH:
        return "bad", (
            f"The draft is not working: at {length:.2f} tokens per target forward nearly nothing it proposes is "
            "accepted. Check the algorithm (EAGLE-3), the aux layers, the head and d2t; more data will not help."
        )
    with_draft, without = rate(result["tokens_per_second"]), rate(result["baseline_tokens_per_second"])
    mood = pace(speedup)
    if mood == "good":
        same = ", and its output stays the same" if result["lossless"] else ""
        return mood, (
            f"{speedup:.2f} times as fast: with the draft the target writes {with_draft} tokens per second instead "
            f"of {without}{same}."
        )
    if mood == "even":
        return mood, (
            f"No difference here: the draft gives {length:.2f} tokens per target forward, but drafting and checking "
            f"cost as much as that saves ({with_draft} tokens per second with it, {without} without)."
        )
    return mood, (
        f"It does not pay off here: {length:.2f} tokens per target forward do not cover the cost of drafting and "
        f"checking ({with_draft} tokens per second with the draft, {without} without)."
    )


def _facts(result: dict[str, Any]) -> list[Fact]:
    length, speedup, compared = result["acceptance_length"], result["speedup"], result.get("compared")
    replies = f", in {compared:,} replies" if compared else ""
    answers: dict[bool | None, tuple[str, Mood]] = {True: ("yes", "good"), False: ("no", "bad")}
    lossless, lossless_mood = answers.get(result["lossless"], ("not checked", "none"))
    return [
        Fact(
            name="Acceptance length",
            value="–" if length is None else f"{length:.2f}",
            means="tokens per target forward, bonus token included. "
            f"1.0: the draft does nothing; {result['draft_tokens'] + 1}: all it proposes is accepted",
            mood="bad" if length is None or length <= BROKEN_LENGTH else "none",
        ),
        Fact(
            name="Speed-up",
            value=f"{speedup:.2f}×",
            means="median over paired rounds on this machine, one request at a time",
            mood=pace(speedup),
        ),
        Fact(
            name="Tokens per second",
            value=rate(result["tokens_per_second"]),
            means=f"with the draft; {rate(result['baseline_tokens_per_second'])} without",
        ),
        Fact(
            name="Lossless",
            value=lossless,
            means=f"greedy output is the target's own, token for token, in float32{replies}",
            mood=lossless_mood,
        ),
    ]


def _cautions(result: dict[str, Any]) -> list[str]:
    cautions = []
    if result["questions"] < FEW_QUESTIONS:
        cautions.append(f"Only {result['questions']} questions were measured: take the second decimal as noise.")
    if result.get("degenerate"):
        cautions.append(
            f"{result['degenerate']:,} of {result['questions']:,} replies repeat themselves for most of their length: "
            "easy to draft, so they are left out of the acceptance length."
        )
    same = result.get("timed_identical_to_float32")
    if same is not None and same < 1:
        cautions.append(
            f"Speed was measured in {result['dtype']}, where rounding can choose other tokens: {same:.0%} of the timed "
            "replies equal the float32 ones that losslessness was proved on."
        )
    return cautions
