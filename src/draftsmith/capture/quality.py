"""What is wrong with one trace, by cause: the judgements that the quality gate counts.

A judgement reads the record alone and costs about 10 microseconds, the look for loops up to 80 more: that one is for a
sample of the replies. A cause says what to do about it; its kind says what exactly was seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from draftsmith.capture.exactness import NOT_EXACT, REASONING_LOST
from draftsmith.target.spelling import compact
from draftsmith.target.thinking import ENDED, Delimiters, thinking_wanted
from draftsmith.trace import TRAINABLE, Trace

LOOP_IDS, LOOP_TAIL, LOOP_RUN, LOOP_SHARE = 256, 1024, 6, 0.2
"""A reply of at least so many ids loops if, in its last ids, the runs of six repeat until less than this share differs.

A loop of up to 200 ids does. Long sums of one pattern stay above 0.7, and a multiplication table above 0.4."""
SCANNED = 4096
"""Characters of a text that are searched for delimiters: a doubled one comes early."""
SAME_IDS = 32
"""Shorter replies may well be the same for different questions."""
NEVER_ASKED = ("earlier turn", "unusable question", "no fitting tool result")
"""Beginnings of errors of records that no request was made for: they say nothing about the target."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why replies are bad."""

    limit: str
    """Field of GateLimits; "": a cause only where all replies are so."""
    words: str
    """After `12 of the last 512 replies`."""
    cure: str
    again: bool
    """Whether the replies are asked for again once it is mended; else they are what the target says, and stay."""


CAUSES: Mapping[str, Cause] = {
    "no reasoning": Cause(
        "without_reasoning",
        "lack reasoning although thinking was asked for",
        "look at the server's reasoning parser and template options",
        True,
    ),
    "lost reasoning": Cause(
        "",
        "lack the reasoning that the target began with",
        "the server may drop the think delimiters, or was restarted with other flags: look at its reasoning parser",
        True,
    ),
    "unasked reasoning": Cause(
        "without_reasoning",
        "hold reasoning although the template options switch it off",
        "the server ignores them: look at its version and at the options' names",
        True,
    ),
    "cut": Cause("cut", "are cut off", "raise --max-tokens, or ask for shorter replies", False),
    "cut by the server": Cause(
        "cut",
        "are cut off before they reach --max-tokens",
        "the server has a limit of its own: look at its context length and largest reply",
        True,
    ),
    "empty": Cause(
        "empty",
        "end without an answer",
        "look at the server's stop strings and parsers, and at the chat template",
        True,
    ),
    "loops": Cause(
        "loops",
        "repeat themselves until they end",
        "sample as the model's makers recommend (--temperature, --top-p); greedy decoding often loops",
        False,
    ),
    "delimiters": Cause(
        "delimiters",
        "have faulty think delimiters",
        "look at --thinking, and at whether the server's template is the tokenizer's",
        True,
    ),
    "duplicates": Cause(
        "duplicates",
        "are the same as the reply to another question",
        "look for a cache between here and the model, and at whether the questions reach it",
        True,
    ),
    "rejected": Cause("rejected", "are not usable", "correct this and run again", True),
    "failed": Cause("failed", "never came", "look at the server and at the questions", True),
}
DROPPED = f"{REASONING_LOST}: the server counts as many ids more than its text holds as the think delimiters have"
NOT_EXACT_CURE = "serve with an engine that returns token ids (vLLM >= 0.10.2), or accept less with --exact any"
DROPPED_CURE = "the server drops the think delimiters or their field: start it with the target's reasoning parser"
Fault = tuple[str, str]
"""A key of CAUSES, and the kind."""


@dataclass(frozen=True, slots=True)
class Mode:
    """What was asked for."""

    thinks: bool | None
    """None: the template options leave it open, and the prompt too."""
    opened: bool
    max_tokens: int


@lru_cache(maxsize=256)
def mode_of(sampling: str) -> Mode:
    """From a trace's `sampling`; nearly all traces of a run share a few."""
    asked = json.loads(sampling)
    opened, wanted = bool(asked["prompt_opened_thinking"]), thinking_wanted(asked["template_options"])
    return Mode(True if wanted is None and opened else wanted, opened, asked["max_tokens"])


def faults(trace: Trace, delimiters: Delimiters | None) -> Iterator[Fault]:
    """What is wrong with a trace, loops and duplicates aside."""
    if trace.state == "failed":
        yield "failed", trace.error.partition(": ")[0]
    elif delimiters and _dropped(trace, delimiters):
        yield "no reasoning", DROPPED
    elif trace.state == "rejected":
        lost = trace.error.startswith(REASONING_LOST)
        yield ("no reasoning", trace.error) if lost else ("rejected", trace.error.partition(": ")[0])
    else:
        yield from _faults_of_reply(trace, mode_of(trace.sampling), delimiters)


def loops(ids: Sequence[int]) -> bool:
    """Whether the reply's end repeats itself (P42: such replies make a draft look good and teach it nothing)."""
    if len(ids) < LOOP_IDS:
        return False
    tail = compact(ids[-LOOP_TAIL:])
    width, raw = tail.itemsize, tail.tobytes()
    runs = {raw[at : at + LOOP_RUN * width] for at in range(0, len(raw) - (LOOP_RUN - 1) * width, width)}
    return len(runs) < LOOP_SHARE * len(tail)


def likeness(trace: Trace) -> int | None:
    """A number that replies of the same ids share (length, first and last ids); None for a reply too short to tell."""
    ids = trace.generated_ids
    if len(ids) < SAME_IDS or trace.state not in TRAINABLE:
        return None
    return hash((len(ids), tuple(ids[:SAME_IDS]), tuple(ids[-SAME_IDS:])))


def cure_of(cause: str, kind: str) -> str:
    """What to do about a fault."""
    if kind.startswith(NOT_EXACT):
        return NOT_EXACT_CURE
    if kind.startswith(REASONING_LOST):
        return DROPPED_CURE
    return CAUSES[cause].cure


def _faults_of_reply(trace: Trace, mode: Mode, delimiters: Delimiters | None) -> Iterator[Fault]:
    cut, ended = trace.state, trace.finish_reason in ENDED
    if cut == "cut_in_reasoning" and ended and delimiters:
        yield "delimiters", f"never closed by {delimiters.close_text}"
    elif cut != "ok":
        short = _generated(trace) < 0.9 * mode.max_tokens  # counted from text it may be a little off
        yield ("cut by the server" if short else "cut"), f"in {cut.removeprefix('cut_in_')}"
    elif not trace.answer:
        yield "empty", "nothing after the reasoning" if trace.reasoning_span else "nothing at all"
    if delimiters is None:
        return
    if trace.reasoning_span is None:
        if mode.thinks and cut != "cut_in_reasoning":
            yield "no reasoning", "no delimiter among its ids" if not mode.opened else "closed at once"
        return
    if mode.thinks is False and delimiters.open_text not in trace.messages:
        # Worked examples and system texts that show thinking make a target think whatever the options say.
        yield "unasked reasoning", "thinks all the same"
    if delimiters.family != "gpt-oss":  # whose reasoning may be several messages
        if trace.reasoning_span[0] == 0 and not mode.opened:
            yield "delimiters", "closed though nothing opened it"
        elif delimiters.close_text in trace.answer[:SCANNED]:
            yield "delimiters", "closed twice"
        elif delimiters.open_text in trace.reasoning[:SCANNED] or delimiters.open_text in trace.answer[:SCANNED]:
            yield "delimiters", "opened twice"


def _dropped(trace: Trace, delimiters: Delimiters) -> bool:
    """Whether the text that ids were rendered from lacks both delimiters, as special tokens are left out of texts."""
    if trace.ids_source != "rendered" or trace.reasoning_span is not None or delimiters.family == "gpt-oss":
        return False
    missing = _generated(trace) - len(trace.generated_ids)
    return missing > 0 and missing == len(delimiters.open_ids[0]) + len(delimiters.close_ids[0])


def _generated(trace: Trace) -> int:
    """How many ids the server generated, as far as it says."""
    counted = json.loads(trace.usage).get("completion_tokens")
    return counted if isinstance(counted, int) else len(trace.generated_ids)
