"""Loss masks that others wrote: which ids each supervises, and whether it can be the boundary of a generation.

A mask is a boundary if it is 0 on everything the target read and 1 on everything it said, at the ids' own places. Some
trainers move the mask along with the targets themselves (speculators 0.9.0 `shift_batch`), so a mask that is moved in
the file already is off by one there. Where a reply really starts is read off the target's template: right after what it
writes to start one (and after a think delimiter that it opens itself).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from draftsmith.target.template import Template, TemplateRefusal
from draftsmith.target.thinking import Delimiters
from draftsmith.trace import Span

NEAR = 8
"""A reply's header is looked for this many ids around the place where the mask starts."""
START_UNKNOWN = "mask start not known"
AFTER_DELIMITER = "mask starts after a think delimiter"
ON_DELIMITER = "mask starts on a think delimiter"
MAY_BE_RIGHT = (START_UNKNOWN, AFTER_DELIMITER, ON_DELIMITER)
"""Classes that are no faults for sure: another template, or template options that open thinking or do not."""
Scaffold = Literal["text", "opening", "pair"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyStart:
    """How the template starts a reply."""

    header: tuple[int, ...]
    """The ids it writes last before any think delimiter."""
    scaffold: tuple[int, ...]
    """What it writes after that with the options at hand: an opening delimiter, an empty pair, or nothing."""
    kind_of: Callable[[Sequence[int]], Scaffold]
    """Whether ids are just an opening delimiter or a pair, as it may write with other options, or any other text."""


def reply_start(template: Template, delimiters: Delimiters | None) -> ReplyStart | None:
    """What the template writes between a user turn and the reply; None where that cannot be told apart."""
    turn = [{"role": "user", "content": "a"}]
    try:
        prompt, before = template.text(turn), template.transcript(turn)
    except TemplateRefusal:
        return None
    opening, closing = (delimiters.open_text, delimiters.close_text) if delimiters else ("", "")
    added = prompt[len(before) :] if prompt.startswith(before) else ""
    header = added.partition(opening)[0] if opening else added
    if not header.strip():
        return None

    def kind_of(ids: Sequence[int]) -> Scaffold:
        text = template.decode(ids)
        if not opening or opening not in text or text.replace(opening, "").replace(closing, "").strip():
            return "text"
        return "pair" if closing in text else "opening"

    ids = tuple(template.encode(header))
    return ReplyStart(header=ids, scaffold=tuple(template.encode(added))[len(ids) :], kind_of=kind_of)


def supervised_spans(mask: npt.NDArray[Any]) -> list[Span]:
    """The runs of ones, in order, as half-open spans."""
    edges = np.flatnonzero(np.diff(mask != 0, prepend=False, append=False))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def mask_fault(ids: npt.NDArray[Any], mask: npt.NDArray[Any]) -> str:
    """Why a mask says nothing about a boundary, as `class: detail`; empty if it may be one (P18)."""
    if len(ids) != len(mask):
        return f"mask of another length: {len(mask):,} values for {len(ids):,} ids"
    if ((mask != 0) & (mask != 1)).any():
        return f"mask not 0 or 1: holds {mask[(mask != 0) & (mask != 1)][0]}"
    if not mask.any():
        return "mask all zero: nothing is supervised"
    if mask.all():
        return "mask all ones: the prompt is supervised too"
    return ""


def start_fault(ids: npt.NDArray[Any], span: Span, start: ReplyStart) -> str:
    """Why `span` of `ids` is not one reply from its first id on, as `class: detail`; empty if it is."""
    begin, end = span
    gap = next((gap for gap in range(NEAR + 1) if _ends_at(ids, begin - gap, start.header)), None)
    fault = (
        f"{START_UNKNOWN}: no header of the template before it" if gap is None else _gap_fault(ids, begin, gap, start)
    )
    if fault and not fault.startswith(MAY_BE_RIGHT):
        return fault
    length = len(start.header)
    hits = np.flatnonzero(ids[begin : max(begin, end - length + 1)] == start.header[0]) + begin + length
    inside = next((int(at) for at in hits if _ends_at(ids, int(at), start.header)), None)
    if gap is None and inside is None:  # it may start within the header
        inside = next((at for at in range(begin + 1, begin + length) if _ends_at(ids, at, start.header)), None)
    if inside is None:
        return fault
    if gap is None and inside - begin <= NEAR:
        return f"mask starts early: {inside - begin} ids before the reply's first"
    return "mask covers a prompt: a further turn's header is supervised"


def end_fault(ids: npt.NDArray[Any], span: Span, stop_ids: Collection[int]) -> str:
    """Why `span` does not end where the reply does; empty if it does."""
    end = span[1]
    if end < len(ids) and int(ids[end]) in stop_ids and int(ids[end - 1]) not in stop_ids:
        return "mask ends early: the reply's stop id is not supervised"
    return ""


def _gap_fault(ids: npt.NDArray[Any], begin: int, gap: int, start: ReplyStart) -> str:
    """What is wrong with a mask that starts `gap` ids after the header."""
    skipped, own = ids[begin - gap : begin].tolist(), list(start.scaffold)
    if skipped == own:
        return ""
    if ids[begin - gap : begin - gap + len(own)].tolist() == own and gap < len(own):
        if gap == 0:
            return f"{ON_DELIMITER}: the template writes that itself"
        return f"mask starts early: {len(own) - gap} ids before the reply's first"
    if gap == 0:
        return ""
    kind = start.kind_of(skipped)
    if kind == "text":
        return f"mask starts late: {gap} ids after the reply's first"
    return "" if kind == "pair" else f"{AFTER_DELIMITER}: the template writes none there by itself"


def _ends_at(ids: npt.NDArray[Any], end: int, header: tuple[int, ...]) -> bool:
    return end >= len(header) and ids[end - len(header) : end].tolist() == list(header)
