"""Everything a capture will ask for, in 18 bytes per row of the source: a million questions are never in memory.

One pass over the source validates every row and leaves its key, its number of turns and how many earlier rows had the
same content. From these follow all trace ids, their order and their number. The questions themselves are read again, a
row at a time, when they are asked. The n-th row of the same content (from 0) gets the samples n*S to n*S+S-1.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice, takewhile

import numpy as np

from draftsmith.capture.conversation import turn_count
from draftsmith.capture.journal import Journal
from draftsmith.capture.questions import apart, question_in, read_all
from draftsmith.capture.rows import Question
from draftsmith.capture.sources import read_rows, source_name
from draftsmith.errors import UserError
from draftsmith.recipe import CaptureSettings
from draftsmith.trace import trace_id

CONTINUES = frozenset({"ok", "cut_in_answer"})
"""States after which a conversation goes on."""


class Plan:
    """The rows of a source and the generations that they ask for. `unusable` rows are among them, one record each.

    `max_tokens` is the largest budget of any: the run's, or a question's own.
    """

    def __init__(self, settings: CaptureSettings) -> None:
        """Reads the source once.

        Raises:
            UserError: as `read_all`; it is empty; two prompts carry the same id (P15).
        """
        self.settings, self.samples = settings, settings.samples
        keys, self.turns, named = bytearray(), array("H"), array("Q")
        self.unusable = 0
        self.max_tokens = settings.max_tokens
        for _, question in read_all(settings):
            keys += bytes.fromhex(question.key)
            self.turns.append(turn_count(question))
            if question.user_id:
                named.extend((_digest(question.user_id), len(self.turns) - 1))
            self.unusable += question.problem != ""
            self.max_tokens = max(self.max_tokens, question.sampling.get("max_tokens", 0))
        if not self.turns:
            raise UserError(f"{settings.questions}: expected at least one row, found an empty dataset")
        self.keys = bytes(keys)
        if _clash(self.keys, named):
            deque(apart(read_all(settings)), maxlen=0)  # takes more memory, and knows the places
        self.earlier = _occurrences(self.keys)
        self.generations = self.samples * sum(self.turns)

    def __len__(self) -> int:
        """Rows."""
        return len(self.turns)

    def conversations(self, row: int) -> Iterator[list[str]]:
        """The trace ids of a row's conversations, a list per sample, in order of the turns."""
        key, turns = self._key(row), self.turns[row]
        for sample in self.samples_of(row):
            yield [trace_id(key, turn, sample) for turn in range(turns)]

    def samples_of(self, row: int) -> range:
        """The numbers of a row's samples."""
        first = int(self.earlier[row]) * self.samples
        return range(first, first + self.samples)

    def order(self) -> Iterator[str]:
        """The trace ids of all generations, in input order."""
        for row in range(len(self)):
            for ids in self.conversations(row):
                yield from ids

    def standing(self, journal: Journal) -> tuple[Counter[str], bytearray]:
        """What is settled: records per state, and for each row whether something is left to ask (1) or not (0)."""
        before: Counter[str] = Counter()
        left = bytearray(len(self))
        for row in range(len(self)):
            for ids in self.conversations(row):
                states = settled(journal, ids)
                before.update(states)
                left[row] |= len(states) < len(ids)
        return before, left

    def read(self, left: bytearray) -> Iterator[tuple[int, Question]]:
        """The questions of the rows marked in `left`, read from the source as they are wanted.

        Raises:
            UserError: the source is no longer what was planned.
        """
        settings, name = self.settings, source_name(self.settings.questions)
        row = -1
        for row, (place, raw) in enumerate(islice(read_rows(settings.questions, settings.split), len(self))):
            if not left[row]:
                continue
            question = question_in(place, raw, name)
            if question.key != self._key(row):
                raise UserError(f"{place}: changed while its questions were being asked; run the same command again")
            yield row, question
        if row + 1 < len(self):
            raise UserError(
                f"{settings.questions}: expected {len(self):,} rows as at the start, found {row + 1:,}; it changed "
                "while its questions were being asked, run the same command again"
            )

    def _key(self, row: int) -> str:
        return self.keys[12 * row : 12 * row + 12].hex()


def settled(journal: Journal, ids: list[str]) -> list[str]:
    """The states of a conversation's turns (trace ids, in order) up to the first that needs a request or a record."""
    return [journal.state(id) for id in takewhile(journal.final, ids)]


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def _halves(keys: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Keys of 12 bytes as numbers of 8 and of 4 bytes."""
    table = np.frombuffer(keys, dtype=[("high", ">u8"), ("low", ">u4")])
    return table["high"], table["low"]


def _occurrences(keys: bytes) -> np.ndarray:
    """For each row, how many earlier ones have its key (uint32)."""
    high, low = _halves(keys)
    order = np.lexsort((low, high))  # stable: rows of one key stay in their order
    high, low = high[order], low[order]
    place = np.arange(len(order))
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    found = np.empty(len(order), dtype=np.uint32)
    found[order] = place - np.maximum.accumulate(np.where(begins, place, 0))
    return found


def _clash(keys: bytes, named: array[int]) -> bool:
    """Whether two rows with other keys seem to have the same id (`named`: digest of an id, row, and so on)."""
    digests, rows = np.frombuffer(named, dtype=np.uint64).reshape(-1, 2).T
    high, low = _halves(keys)
    order = np.argsort(digests, kind="stable")
    digests, rows = digests[order], rows[order]
    same = digests[1:] == digests[:-1]
    other = (high[rows[1:]] != high[rows[:-1]]) | (low[rows[1:]] != low[rows[:-1]])
    return bool((same & other).any())
