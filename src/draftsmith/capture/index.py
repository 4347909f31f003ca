"""Where each trace's last record lies, for a million traces: an open hash table over plain arrays.

20 bytes a slot and at most two slots in three filled, so 30 to 60 bytes per trace, all of it taken at once when the
number of traces is known beforehand; a dict of small objects takes four times that and grows while the run goes on.
A look-up takes about half a microsecond.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator

import numpy as np

LEAST_SLOTS = 1024
_KEY = struct.Struct("<QI")


class Index:
    """From a trace's 12 key bytes to a number above 0; keys are never removed. Not thread-safe."""

    def __init__(self, expected: int = 0) -> None:
        self.count = 0
        self._make(max(LEAST_SLOTS, expected * 3 // 2))

    def __len__(self) -> int:
        """Keys, forgotten ones included."""
        return self.count

    def get(self, key: bytes) -> int:
        """The number of a key; 0 where there is none."""
        return self.values[self.slot(key)]

    def put(self, key: bytes, value: int) -> None:
        """Sets the number of a key."""
        slot = self.slot(key)
        if not self.values[slot]:
            if self.count * 3 >= len(self.values) * 2:
                self._grow()
                slot = self.slot(key)
            self.high[slot], self.low[slot] = _KEY.unpack(key)
            self.count += 1
        self.values[slot] = value

    def slot(self, key: bytes) -> int:
        """The slot that holds the key, or the empty one where it would go."""
        high, low = _KEY.unpack(key)
        highs, lows, values, mask = self.high, self.low, self.values, self.mask
        slot: int = high & mask
        while values[slot] and (highs[slot] != high or lows[slot] != low):
            slot = (slot + 1) & mask
        return slot

    def __iter__(self) -> Iterator[bytes]:
        """All keys, in no order."""
        for high, low, value in zip(self.high, self.low, self.values, strict=True):
            if value:
                yield _KEY.pack(high, low)

    def numbers(self) -> np.ndarray:
        """The numbers of all slots (uint64, 0: empty), as a view that may be written to."""
        return np.frombuffer(self.values, dtype=np.uint64)

    def _make(self, slots: int) -> None:
        size = 1 << (slots - 1).bit_length()
        self.mask = size - 1
        self.high, self.low, self.values = (
            array(kind, bytes(width * size)) for kind, width in (("Q", 8), ("I", 4), ("Q", 8))
        )

    def _grow(self) -> None:
        before = zip(self.high, self.low, self.values, strict=True)
        self._make(2 * len(self.values))
        self.count = 0
        for high, low, value in before:
            if value:
                self.put(_KEY.pack(high, low), value)
