"""A trace as the bytes of one journal record, and many records as one Arrow table, without an object per token id.

A record is key-first: 32 bytes of head (magic, retry flag, state, body length, checksum of the body, trace id, checksum
of the head), then the body: fixed numbers, field lengths, fields. So a log can be gone through without decoding bodies,
and after a damaged stretch the next record is found by its magic and the head's own checksum. Encoding a reply of 600
ids takes about 15 us, turning it into its row of a table about 5 us.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa

from draftsmith.target.spelling import compact
from draftsmith.trace import SCHEMA, Span, State, Trace

MAGIC = b"\x93DJ2"
STATES: tuple[State, ...] = ("ok", "cut_in_reasoning", "cut_in_answer", "rejected", "failed")
"""A record's state code is the place here, counted from 1."""
KEY_BYTES = 12
FIELDS = (
    "question_key",
    "source",
    "messages",
    "prompt_ids",
    "generated_ids",
    "finish_reason",
    "ids_source",
    "reasoning",
    "answer",
    "sampling",
    "usage",
    "timing",
    "error",
)
"""The body's fields, in order; before them lie numbers: the sample, both spans (-1: none), the fields' lengths."""
ID_FIELDS = frozenset({"prompt_ids", "generated_ids"})
RECORD_SCHEMA = SCHEMA.append(pa.field("retry", pa.bool_()))
"""Rows of closed segments: a trace, and whether its record only stands until the next run asks again."""

_HEAD = struct.Struct("<4sBBHII12s")
_CHECK = struct.Struct("<I")
_FIXED = struct.Struct(f"<5i{len(FIELDS)}I")
HEAD_BYTES = _HEAD.size + _CHECK.size
_NUMBERS = 5 + len(FIELDS)


@dataclass(frozen=True, slots=True)
class Head:
    """What a record says before its body."""

    key: bytes
    state: int
    retry: bool
    length: int
    """Bytes of the body."""
    checksum: int


def key_of(trace_id: str) -> bytes:
    """The 12 bytes a trace id (24 hex digits) stands for."""
    key = bytes.fromhex(trace_id)
    if len(key) != KEY_BYTES:
        raise ValueError(f"{trace_id!r}: expected a trace id of {2 * KEY_BYTES} hex digits")
    return key


def encode(trace: Trace, key: bytes, *, retry: bool) -> bytes:
    """The record of a trace."""
    fields = [
        trace.question_key.encode(),
        trace.source.encode(),
        trace.messages.encode(),
        _id_bytes(trace.prompt_ids),
        _id_bytes(trace.generated_ids),
        trace.finish_reason.encode(),
        trace.ids_source.encode(),
        trace.reasoning.encode(),
        trace.answer.encode(),
        trace.sampling.encode(),
        trace.usage.encode(),
        trace.timing.encode(),
        trace.error.encode(),
    ]
    spans = (*(trace.reasoning_span or (-1, -1)), *(trace.answer_span or (-1, -1)))
    body = [_FIXED.pack(trace.sample, *spans, *map(len, fields)), *fields]
    checksum = 0
    for part in body:
        checksum = zlib.crc32(part, checksum)
    state = STATES.index(trace.state) + 1
    head = _HEAD.pack(MAGIC, retry, state, 0, sum(map(len, body)), checksum, key)
    return b"".join((head, _CHECK.pack(zlib.crc32(head)), *body))


def head_at(data: memoryview, offset: int) -> Head | None:
    """The head of the record at `offset`, or None where no whole head of a record is."""
    raw = data[offset : offset + HEAD_BYTES]
    if len(raw) < HEAD_BYTES or raw[:4] != MAGIC or zlib.crc32(raw[: _HEAD.size]) != _CHECK.unpack_from(raw, 28)[0]:
        return None
    _, retry, state, _, length, checksum, key = _HEAD.unpack_from(raw)
    return Head(key, state, bool(retry), length, checksum)


def body_at(data: memoryview, offset: int, head: Head) -> memoryview | None:
    """The body of that record, or None where it is cut off or damaged."""
    body = data[offset + HEAD_BYTES : offset + HEAD_BYTES + head.length]
    return body if len(body) == head.length and zlib.crc32(body) == head.checksum else None


def decode(head: Head, body: memoryview) -> Trace:
    """The trace of a record."""
    sample, *numbers = _FIXED.unpack_from(body)
    values: dict[str, Any] = {}
    start = _FIXED.size
    for name, length in zip(FIELDS, numbers[4:], strict=True):
        raw = body[start : start + length]
        values[name] = _ids(raw) if name in ID_FIELDS else str(raw, "utf-8")
        start += length
    return Trace(
        trace_id=head.key.hex(),
        sample=sample,
        state=STATES[head.state - 1],
        reasoning_span=_span(numbers[0:2]),
        answer_span=_span(numbers[2:4]),
        **values,
    )


def nobody() -> tuple[Head, memoryview]:
    """A record of no trace, which stands for one that proved damaged."""
    data = memoryview(encode(Trace(trace_id="", question_key="", state="failed"), bytes(KEY_BYTES), retry=True))
    head = head_at(data, 0)
    assert head is not None
    return head, data[HEAD_BYTES:]


def table_of(heads: Sequence[Head], bodies: Sequence[memoryview]) -> pa.Table:
    """The records as rows of RECORD_SCHEMA; what is held besides is as large as the table."""
    count = len(heads)
    raw = b"".join(body[: _FIXED.size] for body in bodies)
    numbers = np.frombuffer(raw, dtype="<i4").reshape(count, _NUMBERS)
    ends = _FIXED.size + np.cumsum(numbers[:, 5:], axis=1, dtype=np.int64)
    starts = ends - numbers[:, 5:]
    columns: dict[str, pa.Array] = {
        "trace_id": _strings(b"".join(head.key for head in heads).hex().encode(), np.full(count, 2 * KEY_BYTES)),
        "sample": integers(numbers[:, 0]),
        "state": _states([head.state for head in heads]),
        "reasoning_span": _spans(numbers[:, 1:3]),
        "answer_span": _spans(numbers[:, 3:5]),
        "retry": booleans(np.array([head.retry for head in heads])),
    }
    for place, name in enumerate(FIELDS):
        cuts = zip(bodies, starts[:, place].tolist(), ends[:, place].tolist(), strict=True)
        data, lengths = b"".join([body[start:end] for body, start, end in cuts]), numbers[:, 5 + place]
        columns[name] = _lists(data, lengths // 4) if name in ID_FIELDS else _strings(data, lengths)
    return pa.table([columns[name] for name in RECORD_SCHEMA.names], schema=RECORD_SCHEMA)


def _id_bytes(ids: Sequence[int]) -> bytes:
    """Ids as int32, in this machine's order of bytes."""
    return compact(ids).tobytes()


def _ids(raw: memoryview) -> list[int]:
    return raw.cast("i").tolist() if raw else []


def _span(pair: Sequence[int]) -> Span | None:
    return None if pair[0] < 0 else (pair[0], pair[1])


def integers(values: np.ndarray) -> pa.Array:
    """An int32 or int64 array as Arrow's. `pa.array` would import pandas (40 MB, half a second) in mid-run."""
    kind = {4: pa.int32(), 8: pa.int64()}[values.itemsize]
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def booleans(values: np.ndarray) -> pa.Array:
    """A bool array as Arrow's."""
    bits = pa.py_buffer(np.packbits(values, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, bits])


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def _strings(data: bytes, lengths: np.ndarray) -> pa.Array:
    buffers = [None, pa.py_buffer(_offsets(lengths)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.string(), len(lengths), buffers)


def _lists(data: bytes, lengths: np.ndarray) -> pa.Array:
    return pa.ListArray.from_arrays(integers(_offsets(lengths)), integers(np.frombuffer(data, dtype=np.int32)))


def _spans(pairs: np.ndarray) -> pa.Array:
    there = pairs[:, 0] >= 0
    offsets = integers(_offsets(np.where(there, 2, 0)))
    return pa.ListArray.from_arrays(offsets, integers(pairs[there].reshape(-1)), mask=booleans(~there))


def _states(codes: Sequence[int]) -> pa.Array:
    names = [STATES[code - 1].encode() for code in codes]
    return _strings(b"".join(names), np.array([len(name) for name in names]))


def state_of(code: int) -> State:
    """The name of a state code."""
    return STATES[code - 1]


def code_of(state: str) -> int:
    """The code of a state's name."""
    return STATES.index(cast(State, state)) + 1
