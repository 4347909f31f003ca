"""Training data that is text: conversations (SpecForge, ShareGPT, messages) and SpecForge's preformatted text.

Text cannot be exact, however clean it is: that is the first finding (P06). The others say what else would go wrong:
lost or doubled thinking, answers that are missing, rows that loaders cannot read. Lengths are in characters.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from draftsmith.capture.rows import TURN_COLUMNS, BadRow, question_of
from draftsmith.data.checks import Tally
from draftsmith.data.masks import ReplyStart
from draftsmith.data.peers import PIECE, Line, Source, lines
from draftsmith.data.ragged import Ragged, from_rows
from draftsmith.data.replies import Collected, keep_sketches, note_likeness
from draftsmith.recipe import InspectSettings
from draftsmith.target.template import Template
from draftsmith.target.thinking import THINK, Delimiters
from draftsmith.trace import Trace

Turn = dict[str, Any]
WIDTH = 32
"""Bytes that are compared as one shingle: about what 8 ids spell."""
LEAST_BYTES = 128
REASON = 100


class Texts:
    """Looks at rows of text one by one."""

    def __init__(
        self, source: Source, template: Template | None, delimiters: Delimiters | None, start: ReplyStart | None
    ) -> None:
        self.source, self.template, self.start = source, template, start
        self.thinks = delimiters is not None
        self.marks = (delimiters.open_text, delimiters.close_text) if delimiters else THINK
        self.header = template.decode(start.header) if template and start else ""
        self.rows = 0
        self.with_reasoning = 0
        self.without_reasoning: list[str] = []
        self.argument_types: dict[str, list[str]] = {}

    def turns(self, line: Line, tally: Tally, kept: Collected) -> list[Turn]:
        """The turns of one row; none if it is unusable."""
        assert line.row is not None
        if self.source.kind == "text":
            return self._preformatted(line, line.row.get("text"), tally)
        try:
            question = question_of(line.place, line.row, self.source.path.stem)
        except BadRow as error:
            tally.note("unusable_row", line.name)
            reason = str(error).removeprefix(f"{line.place}: ")
            kept.counts.setdefault("reason", Counter())[reason[:REASON]] += 1
            return []
        for kind in _argument_types(line.row):
            self.argument_types.setdefault(kind, []).append(line.name)
        return list(question.messages)

    def look(self, name: str, turns: Sequence[Turn], tally: Tally) -> tuple[str, str]:
        """Checks the answers of one row; returns reasoning and answer of the last."""
        found = [self._answer(name, turn, tally) for turn in turns if turn["role"] == "assistant"]
        if not found:
            tally.note("no_answer", name)
            return "", ""
        reasoning, answer = found[-1]
        if reasoning and any(not thought for thought, _ in found[:-1]):
            tally.note("earlier_reasoning", name)
        if reasoning:
            self.with_reasoning += 1
        else:
            self.without_reasoning.append(name)
        return reasoning, answer

    def finish(self, tally: Tally) -> None:
        """What can only be said when all rows are known."""
        tally.add("no_ids", self.rows)
        if self.thinks or self.with_reasoning:
            tally.add("without_reasoning", len(self.without_reasoning), self.without_reasoning)
        if len(self.argument_types) > 1:
            fewest = min(self.argument_types.values(), key=len)
            tally.add("argument_types", len(fewest), fewest)

    def _preformatted(self, line: Line, text: Any, tally: Tally) -> list[Turn]:
        if not isinstance(text, str):
            tally.note("unusable_row", line.name)
            return []
        bos = self.template.tokenizer.bos_token if self.template else None
        if bos and text.startswith(bos * 2):
            tally.note("doubled_bos", line.name)
        if not self.header:
            return [{"role": "assistant", "content": text}]
        before, found, reply = text.rpartition(self.header)
        if not found:  # SpecForge finds replies by this header, too
            tally.note("mask_zero", line.name)
            return [{"role": "user", "content": text}]
        return [{"role": "user", "content": before}, {"role": "assistant", "content": reply}]

    def _answer(self, name: str, turn: Turn, tally: Tally) -> tuple[str, str]:
        """Reasoning and answer of one turn, and what is wrong with its delimiters (P07)."""
        text, own = turn["content"], turn.get("reasoning_content") or ""
        opening, closing = self.marks
        opens, closes = text.count(opening), text.count(closing)
        before, closed, answer = text.partition(closing)
        tagged = before.partition(opening)[2] if opening in before else before
        unclosed = not closed and text.lstrip().startswith(opening)
        if unclosed:
            tally.note("unclosed", name)
        elif not closed:
            tagged, answer = "", text
        if own and tagged.strip():
            tally.note("reasoning_twice", name)
        if closes and not opens:
            tally.note("unopened", name)
        if before.count(opening) > 1:
            tally.note("opened_twice", name)
        if closes > 1:
            tally.note("closed_twice" if tagged.strip() else "empty_pair_first", name)
        elif closed and opens and not tagged.strip() and not own:
            tally.note("empty_pair", name)
        if not answer.strip() and not unclosed and not turn.get("tool_calls"):
            tally.note("empty_answer", name)
        return own or tagged.strip(), answer.strip()


def look_at_texts(
    source: Source,
    template: Template | None,
    delimiters: Delimiters | None,
    start: ReplyStart | None,
    tally: Tally,
    kept: Collected,
    settings: InspectSettings,
) -> int:
    """Reads all rows; returns their number.

    Raises:
        UserError: a file is damaged.
    """
    texts = Texts(source, template, delimiters, start)
    draw = np.random.default_rng(settings.seed)
    pending: list[tuple[str, bytes, bytes]] = []
    for line in lines(source):
        texts.rows += 1
        if line.separators:
            tally.note("separators", line.name)
        if line.row is None:
            tally.note("broken_line", line.name)
            continue
        turns = texts.turns(line, tally, kept)
        if not turns:
            continue
        reasoning, answer = texts.look(line.name, turns, tally)
        if not reasoning and not answer:
            continue
        history = json.dumps(turns[:-1], ensure_ascii=False)
        _keep(kept, line.name, history, reasoning, answer, settings, float(draw.random()))
        pending.append((line.name, history.encode(errors="replace"), (reasoning + answer).encode(errors="replace")))
        if sum(len(reply) for _, _, reply in pending) > PIECE:
            _sketch(pending, tally, kept)
            pending = []
    _sketch(pending, tally, kept)
    note_likeness(tally, kept)
    texts.finish(tally)
    return texts.rows


def _keep(
    kept: Collected, name: str, history: str, reasoning: str, answer: str, settings: InspectSettings, number: float
) -> None:
    kept.replies += 1
    kept.trainable += 1
    for part, text in (("prompt", history), ("reasoning", reasoning), ("answer", answer)):
        if text:
            kept.lengths.setdefault(part, []).append(np.array([len(text)]))
    length = len(reasoning) + len(answer)
    kept.longest = sorted([*kept.longest, (length, name)], key=lambda pair: -pair[0])[: settings.longest]
    if len(kept.chosen) < settings.examples or (kept.chosen and number < kept.chosen[-1][0]):
        trace = Trace(trace_id=name, question_key="", messages=history, reasoning=reasoning, answer=answer)
        kept.chosen = sorted([*kept.chosen, (number, trace)], key=lambda pair: pair[0])[: settings.examples]


def _sketch(pending: Sequence[tuple[str, bytes, bytes]], tally: Tally, kept: Collected) -> None:
    prompts, replies = (_bytes([row[part] for row in pending]) for part in (1, 2))
    keep_sketches([name for name, _, _ in pending], prompts, replies, tally, kept, width=WIDTH, least=LEAST_BYTES)


def _bytes(texts: Sequence[Any]) -> Ragged:
    return from_rows([np.frombuffer(text, np.uint8) for text in texts])


def _argument_types(row: Turn) -> set[str]:
    """Whether the row's tool calls hold arguments as text or as a mapping (P24)."""
    turns = next((row[name] for name in TURN_COLUMNS if isinstance(row.get(name), list)), None)
    calls = [call for turn in turns or [] if isinstance(turn, dict) for call in turn.get("tool_calls") or []]
    found = [call.get("function", call).get("arguments") for call in calls if isinstance(call, dict)]
    return {"text" if isinstance(value, str) else "mapping" for value in found if value is not None}
