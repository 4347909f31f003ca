"""Traces as a person reads them: stretches of text, each marked by what it is to the draft.

Text is cut at id boundaries by decoding growing prefixes, so spacing is what the whole reply has (decoded one by one,
stretches would lose a SentencePiece tokenizer's leading spaces); a character split over two of them goes to the later.
Long stretches show their two ends. Everything here is untrusted text: it is escaped by the page, never here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from draftsmith.trace import Span, Trace

Role = Literal["prompt", "first", "reasoning", "answer", "delimiter", "left_out"]
Decode = Callable[[Sequence[int]], str]
PROMPT_TAIL = 64
RUN_HEAD, RUN_TAIL = 320, 80


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of text with one role. `prompt` and `first` are unsupervised: the draft is never trained on them."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTrace:
    """A trace ready for the page."""

    trace_id: str
    question_key: str
    state: str
    finish_reason: str
    ids_source: str
    prompt_length: int
    generated_length: int
    supervised: int
    """Labels at TTT step 0: all generated ids but the first."""
    stretches: list[Stretch]


def show(trace: Trace, decode: Decode | None) -> ShownTrace:
    """The trace with its text cut into stretches; without a tokenizer (`decode` None) from its text columns."""
    return ShownTrace(
        trace_id=trace.trace_id,
        question_key=trace.question_key,
        state=trace.state,
        finish_reason=trace.finish_reason,
        ids_source=trace.ids_source,
        prompt_length=len(trace.prompt_ids),
        generated_length=len(trace.generated_ids),
        supervised=max(0, len(trace.generated_ids) - 1),
        stretches=_stretches_of_ids(trace, decode) if decode else _stretches_of_text(trace),
    )


def _stretches_of_ids(trace: Trace, decode: Decode) -> list[Stretch]:
    prompt, generated = list(trace.prompt_ids), list(trace.generated_ids)
    stretches: list[Stretch] = []
    if len(prompt) > PROMPT_TAIL:
        stretches.append(Stretch("left_out", f"{len(prompt) - PROMPT_TAIL:,} ids before"))
    ids = prompt[-PROMPT_TAIL:]
    pieces: list[tuple[Role, int, int]] = [("prompt", 0, len(ids))]
    for role, start, end in _roles(len(generated), trace.reasoning_span, trace.answer_span):
        pieces.append((role, len(ids) + start, len(ids) + end))
    ids = ids + generated
    for role, start, end in pieces:
        if end - start <= RUN_HEAD + RUN_TAIL:
            stretches.append(Stretch(role, _text_between(ids, start, end, decode)))
            continue
        stretches.append(Stretch(role, _text_between(ids, start, start + RUN_HEAD, decode)))
        stretches.append(Stretch("left_out", f"{end - start - RUN_HEAD - RUN_TAIL:,} ids between"))
        stretches.append(Stretch(role, _text_between(ids, end - RUN_TAIL, end, decode)))
    return [stretch for stretch in stretches if stretch.text]


def _roles(generated: int, reasoning: Span | None, answer: Span | None) -> list[tuple[Role, int, int]]:
    """[start, end) over the generated ids, each with its role: the first id alone, what no span holds is delimiter."""

    def role_at(index: int) -> Role:
        if index == 0:
            return "first"
        if reasoning is not None and reasoning[0] <= index < reasoning[1]:
            return "reasoning"
        if answer is not None and answer[0] <= index < answer[1]:
            return "answer"
        return "delimiter"

    edges = {0, 1, generated, *(reasoning or ()), *(answer or ())}
    bounds = sorted(edge for edge in edges if edge <= generated)
    return [(role_at(start), start, end) for start, end in pairwise(bounds)]


def _text_between(ids: list[int], start: int, end: int, decode: Decode) -> str:
    if start == 0:
        return decode(ids[:end])
    context = max(0, start - PROMPT_TAIL)
    before = decode(ids[context:start])
    # U+FFFD at the end stands for a character whose other bytes come later
    return decode(ids[context:end])[len(before.rstrip("\ufffd")) :]


def _stretches_of_text(trace: Trace) -> list[Stretch]:
    stretches: list[Stretch] = [
        Stretch("prompt", trace.messages),
        Stretch("reasoning", trace.reasoning),
        Stretch("answer", trace.answer),
    ]
    return [stretch for stretch in stretches if stretch.text]
