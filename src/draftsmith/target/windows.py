"""Where a text stands in ids: as the smallest run of them whose decoded text holds it.

A text that is several ids can tokenise differently beside different neighbours (`>` may merge with a newline), so an id
that straddles the text's edge belongs to the run. Where ids are known to decode by joining their bytes, the run is read
off the joined bytes; else it takes about 2 log2(n) decodes, and no assumption about the tokenizer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Span = tuple[int, int]
"""Half-open, over the ids."""
STRIDE = 512
"""Ids that are decoded at once in search of a text."""
MARGIN = 64
"""Ids before a stride that are decoded with it, beside those that the text may reach back over."""


class Windows(Protocol):
    """Some ids, to be searched and read."""

    def first(self, text: str, start: int, stop: int) -> Span | None:
        """The first run in [start, stop) that holds the text, as small as can be; None: there is none."""

    def text(self, start: int, stop: int) -> str:
        """What the ids in [start, stop) decode to."""


@dataclass(frozen=True)
class Joined:
    """Ids that decode to the bytes between one end and the next; there is one end more than ids, the first is 0."""

    content: bytes
    ends: Sequence[int]

    def first(self, text: str, start: int, stop: int) -> Span | None:
        """As in `Windows`."""
        sought = text.encode()
        at = self.content.find(sought, self.ends[start], self.ends[stop])
        if at < 0:
            return None
        return bisect_right(self.ends, at) - 1, bisect_left(self.ends, at + len(sought))

    def text(self, start: int, stop: int) -> str:
        """As in `Windows`."""
        return self.content[self.ends[start] : self.ends[stop]].decode("utf-8", "replace")


@dataclass(frozen=True)
class Decoded:
    """Ids that decode in a way of their tokenizer's own."""

    ids: Sequence[int]
    decode: Callable[[Sequence[int]], str]

    def first(self, text: str, start: int, stop: int) -> Span | None:
        """As in `Windows`."""
        ids, decode, overlap = self.ids, self.decode, MARGIN + len(text.encode())
        for first in range(start, stop, STRIDE):
            end, start = min(first + STRIDE, stop), max(start, first - overlap)
            if text in decode(ids[start:end]):
                break
        else:
            return None
        lengths = range(start, end + 1)
        stop = lengths[bisect_left(lengths, True, key=lambda i: text in decode(ids[start:i]))]
        starts = range(start, stop)
        late = bisect_left(starts, True, key=lambda i: text not in decode(ids[i:stop]))
        return starts[late - 1], stop

    def text(self, start: int, stop: int) -> str:
        """As in `Windows`."""
        return self.decode(self.ids[start:stop])
