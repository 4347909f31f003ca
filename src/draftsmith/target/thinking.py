"""Think delimiters per model family, and the split of a reply's ids into reasoning and answer.

The split reads ids alone: which field a server's parser put the text in plays no part. A delimiter that is one entry of
the vocabulary is found by its id. One that is several ids is found as the smallest run of ids whose decoded text holds
it (see `windows`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from draftsmith.errors import UserError
from draftsmith.recipe import Family
from draftsmith.target.template import Template, TemplateRefusal
from draftsmith.target.windows import Windows
from draftsmith.trace import Span

THINK = ("<think>", "</think>")
WRITTEN = re.compile(r"""\\?(["'])(?:\s|\\+n|</?think>)*</?think>(?:\s|\\+n|</?think>)*\\?\1""")
"""A string of a template's source that is nothing but tags and white space: it is written, or sought in replies."""
THINKING_OPTIONS = ("thinking", "enable_thinking")
"""Template options that switch thinking: Kimi's, and Qwen's, GLM's and DeepSeek's."""
KIMI_IDS = (163606, 163607)
"""`<think>` and `</think>` of Kimi-K2 and K2.5 (vocabulary 163840)."""
CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
"""Marks of the gpt-oss reply format: <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final..."""
ENDED = frozenset({"stop", "tool_calls"})
"""Finish reasons of a reply that the target itself ended. Any other (length, abort, a filter's) means it was cut."""
TAIL = 64
"""Ids at the prompt's end that are decoded to see which delimiter it ends in."""


@dataclass(frozen=True, slots=True)
class Delimiters:
    """How thinking starts and ends. `open_ids` and `close_ids` are alternatives: each is a sequence of ids."""

    family: str
    open_ids: tuple[tuple[int, ...], ...]
    close_ids: tuple[tuple[int, ...], ...]
    open_text: str = ""
    close_text: str = ""

    def all_ids(self) -> frozenset[int]:
        """Every id that can be part of a delimiter."""
        return frozenset(index for ids in self.open_ids + self.close_ids for index in ids)


@dataclass(frozen=True, slots=True)
class Split:
    """Where a reply thinks and where it answers; spans are half-open over `generated_ids`."""

    reasoning: Span | None
    answer: Span | None
    state: Literal["ok", "cut_in_reasoning", "cut_in_answer"]
    opened_by_prompt: bool


def find_delimiters(template: Template, family: Family, open_text: str = "", close_text: str = "") -> Delimiters | None:
    """The delimiters of `family` as ids of this tokenizer; None: the target does not think.

    `auto` takes gpt-oss channels where the vocabulary has them, and `<think>` where it has, or the template writes or
    seeks, one of the two tags; text that only mentions them does not count.

    Raises:
        UserError: the family does not fit the tokenizer, or `custom` lacks a delimiter.
    """
    if family != "custom" and (open_text or close_text):
        given = "--think-open" if open_text else "--think-close"
        raise UserError(f"{given}: expected --thinking custom beside it, found --thinking {family}; give that, or none")
    if family == "auto":
        family = _detected(template)
    if family == "none":
        return None
    if family == "gpt-oss":
        return _channel_delimiters(template)
    if family == "custom":
        if not open_text.strip() or not close_text.strip():
            raise UserError("--thinking custom: expected --think-open and --think-close, found an empty one; give both")
        return _text_delimiters(template, family, open_text.strip(), close_text.strip())
    found = _text_delimiters(template, family, *THINK)
    if family == "kimi" and (found.open_ids, found.close_ids) != (((KIMI_IDS[0],),), ((KIMI_IDS[1],),)):
        raise UserError(
            f"{template.name}: thinking kimi expects <think> and </think> as ids {KIMI_IDS[0]} and {KIMI_IDS[1]}, "
            f"found {found.open_ids[0]} and {found.close_ids[0]}; use --thinking think"
        )
    return found


def thinking_wanted(options: Mapping[str, Any]) -> bool | None:
    """What template options say about thinking; None: nothing."""
    return next((bool(options[name]) for name in THINKING_OPTIONS if name in options), None)


def delimiters_json(delimiters: Delimiters | None) -> str:
    """Delimiters as text for file metadata; `null` for none."""
    return json.dumps(asdict(delimiters) if delimiters else None, ensure_ascii=False)


def delimiters_from_json(text: str) -> Delimiters | None:
    """What `delimiters_json` wrote."""
    values = json.loads(text)
    if values is None:
        return None
    return Delimiters(
        family=values["family"],
        open_ids=tuple(map(tuple, values["open_ids"])),
        close_ids=tuple(map(tuple, values["close_ids"])),
        open_text=values["open_text"],
        close_text=values["close_text"],
    )


def opened_by_prompt(delimiters: Delimiters | None, template: Template, prompt_ids: Sequence[int]) -> bool:
    """Whether a reply to this prompt starts inside the reasoning because the template opened it."""
    if delimiters is None:
        return False
    if delimiters.family == "gpt-oss":
        return split(delimiters, template, prompt_ids, (), "").opened_by_prompt
    return _ends_in(template, prompt_ids, delimiters.open_ids, delimiters.open_text)


def split(
    delimiters: Delimiters | None,
    template: Template,
    prompt_ids: Sequence[int],
    generated_ids: Sequence[int],
    finish_reason: str,
    windows: Windows | None = None,
) -> Split:
    """Splits one reply; `windows` are its generated ids' (`Template.windows`), for whoever has them already.

    The first closing delimiter ends the reasoning, later ones are answer text. A reply that is inside its thinking and
    never closes it was cut there, whatever the server called it (P03). An empty pair at the prompt's end means thinking
    is off, and belongs to the prompt (P23). A reply that closes what nothing opened was thinking from its first id.
    Reasoning excludes delimiters and the stop id; the answer runs to the end, stop id included.
    """
    end = len(generated_ids)
    whole = Split(None, (0, end), _answer_state(finish_reason), False)
    if delimiters is None:
        return whole
    if delimiters.family == "gpt-oss":
        return _split_channels(template, prompt_ids, generated_ids, finish_reason)
    opened = opened_by_prompt(delimiters, template, prompt_ids)
    windows = windows or template.windows(generated_ids)
    find = _finder(windows, generated_ids)
    closing = find(delimiters.close_ids, delimiters.close_text, 0, end)
    opening = find(delimiters.open_ids, delimiters.open_text, 0, closing[1] if closing else end)
    leads = opening is not None and not windows.text(0, opening[0]).strip()
    start = 0
    if opening is not None and (leads or not opened) and not (closing and closing[0] < opening[0]):
        start = opening[1]
        closing = find(delimiters.close_ids, delimiters.close_text, start, end)
        named_only = closing is None and not leads and not _single(delimiters.open_ids)
        if named_only:  # the answer mentions the delimiter's text
            return whole
    elif not opened:
        off = _ends_in(template, prompt_ids, delimiters.close_ids, delimiters.close_text)
        if closing is None or off:
            return whole
    if closing is None:
        return Split((start, _without_stop(template, generated_ids)), None, "cut_in_reasoning", opened)
    reasoning = (start, closing[0])
    thought = _says_something(template, generated_ids, reasoning, windows)
    return Split(reasoning if thought else None, (closing[1], end), _answer_state(finish_reason), opened)


def text_of(template: Template, generated_ids: Sequence[int], span: Span | None, windows: Windows | None = None) -> str:
    """The text of a span for people: stop ids dropped, stripped; empty for no span. `windows` as in `split`."""
    if span is None:
        return ""
    start, stop = span
    if windows is None:
        return template.readable(generated_ids[start:stop])
    while stop > start and generated_ids[stop - 1] in template.stop_ids:
        stop -= 1
    ids = np.asarray(generated_ids[start:stop])
    if any((ids == index).any() for index in template.stop_ids):  # inside, which the joined text does not leave out
        return template.readable(generated_ids[start:stop])
    return windows.text(start, stop).strip()


def _detected(template: Template) -> Family:
    if all(template.token_id(mark) is not None for mark in (CHANNEL, MESSAGE)):
        return "gpt-oss"
    ids = tuple(template.token_id(mark) for mark in THINK)
    if ids == KIMI_IDS:
        return "kimi"
    return "think" if None not in ids or _writes_think(template) else "none"


def _writes_think(template: Template) -> bool:
    """Whether the template itself writes a think tag, or opens a reply in one under its thinking option either way."""
    source = template.template_text()
    if not any(tag in source for tag in THINK):
        return False
    switched = [{name: on} for name in THINKING_OPTIONS for on in (True, False)]
    return WRITTEN.search(source) is not None or any(_opens_in_think(template, options) for options in ({}, *switched))


def _opens_in_think(template: Template, options: dict[str, bool]) -> bool:
    asking = replace(template, options=template.options | options)
    try:
        return asking.text([{"role": "user", "content": "?"}]).rstrip().endswith(THINK)
    except TemplateRefusal:
        return False


def _text_delimiters(template: Template, family: str, open_text: str, close_text: str) -> Delimiters:
    return Delimiters(family, _ways(template, open_text), _ways(template, close_text), open_text, close_text)


def _ways(template: Template, text: str) -> tuple[tuple[int, ...], ...]:
    """The id sequences that spell `text` beside usual neighbours; just one where it is a vocabulary entry."""
    index = template.token_id(text)
    if index is not None and template.encode(text) == [index]:
        return ((index,),)
    ways = []
    for before in ("", "\n", " ", ".", "a"):
        for after in ("", "\n", "\n\n", " ", "A"):
            ids = template.encode(before + text + after)
            window = template.windows(ids).first(text, 0, len(ids))
            if window is not None:
                ways.append(tuple(ids[slice(*window)]))
    if not ways:
        raise UserError(f"{template.name}: the tokenizer cannot spell the think delimiter {text!r}; check it")
    return tuple(dict.fromkeys(ways))


def _channel_delimiters(template: Template) -> Delimiters:
    missing = [mark for mark in (CHANNEL, MESSAGE, START, END) if template.token_id(mark) is None]
    if missing:
        raise UserError(f"{template.name}: thinking gpt-oss expects the token {missing[0]}, not in this vocabulary")
    opening = f"{CHANNEL}analysis{MESSAGE}"
    final = f"{CHANNEL}final{MESSAGE}"
    closings = (f"{END}{START}assistant{final}", final, END)
    return Delimiters(
        "gpt-oss",
        (tuple(template.encode(opening)),),
        tuple(tuple(template.encode(text)) for text in closings),
        opening,
        closings[0],
    )


def _says_something(template: Template, generated_ids: Sequence[int], span: Span, windows: Windows) -> bool:
    """Whether a span has a text for people: mostly its first few ids tell, unless they end inside a character."""
    start, stop = span
    first = text_of(template, generated_ids, (start, min(start + TAIL, stop)), windows)
    return bool(first.strip("\ufffd").strip()) or text_of(template, generated_ids, span, windows) != ""


def _split_channels(
    template: Template, prompt_ids: Sequence[int], generated_ids: Sequence[int], finish_reason: str
) -> Split:
    """gpt-oss: analysis messages are the reasoning, the answer starts at the first message of another channel."""
    channel, message, start, end = (template.token_id(mark) for mark in (CHANNEL, MESSAGE, START, END))
    last_start = max((i for i, index in enumerate(prompt_ids) if index == start), default=len(prompt_ids))
    head = list(prompt_ids[last_start:])  # the reply's header as far as the prompt wrote it
    ids = head + list(generated_ids)
    ends = {start, end} | template.stop_ids
    thoughts: list[Span] = []
    answer_start: int | None = None
    opened = False
    position = 0
    while channel in ids[position:]:
        header = ids.index(channel, position)
        if message not in ids[header:]:
            break
        body = ids.index(message, header) + 1
        position = next((i for i in range(body, len(ids)) if ids[i] in ends), len(ids))
        if not template.decode(ids[header + 1 : body - 1]).strip().startswith("analysis"):
            answer_start = max(0, body - len(head))
            break
        opened = opened or body <= len(head)
        thoughts.append((max(0, body - len(head)), position - len(head)))
    reasoning = (thoughts[0][0], thoughts[-1][1]) if thoughts else None
    if answer_start is not None:
        return Split(reasoning, (answer_start, len(generated_ids)), _answer_state(finish_reason), opened)
    if channel in ids:
        return Split(reasoning, None, "cut_in_reasoning", opened)
    return Split(None, (0, len(generated_ids)), _answer_state(finish_reason), opened)


def _finder(
    windows: Windows, ids: Sequence[int]
) -> Callable[[tuple[tuple[int, ...], ...], str, int, int], Span | None]:
    """Finds the first delimiter in a range of ids, as a span over `ids`."""
    numbers = np.asarray(ids)

    def find(ways: tuple[tuple[int, ...], ...], text: str, start: int, stop: int) -> Span | None:
        if not _single(ways):
            return windows.first(text, start, stop)
        places = np.flatnonzero(numbers[start:stop] == ways[0][0])
        return (start + int(places[0]), start + int(places[0]) + 1) if len(places) else None

    return find


def _ends_in(template: Template, prompt_ids: Sequence[int], ways: tuple[tuple[int, ...], ...], text: str) -> bool:
    """Whether the prompt ends in a delimiter, whitespace aside."""
    tail = list(prompt_ids[-TAIL:])
    if not _single(ways):
        return template.decode(tail).rstrip().endswith(text)
    while tail and tail[-1] != ways[0][0] and not template.decode(tail[-1:]).strip():
        tail.pop()
    return bool(tail) and tail[-1] == ways[0][0]


def _single(ways: tuple[tuple[int, ...], ...]) -> bool:
    return len(ways) == 1 and len(ways[0]) == 1


def _without_stop(template: Template, generated_ids: Sequence[int]) -> int:
    """Where the text ends: before the stop id, if there is one."""
    end = len(generated_ids)
    return end - 1 if end and generated_ids[-1] in template.stop_ids else end


def _answer_state(finish_reason: str) -> Literal["ok", "cut_in_answer"]:
    return "ok" if finish_reason in ENDED else "cut_in_answer"
