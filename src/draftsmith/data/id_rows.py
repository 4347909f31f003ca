"""Rows of ids that another tool wrote, as traces: the loss mask tells prompt and reply apart, nothing is rendered.

Each supervised span is one reply, everything before it its prompt: a row of several turns gives one trace per turn. A
mask that cannot be the boundary of a generation (P18; or, by the template's own header, one that is off) makes the row
a `rejected` trace with its reason. `ids_source` is `rendered`: the ids are somebody's, no engine vouched for them here;
only a row that is a trace already keeps what it says about itself. Rows of one conversation (`primary_id`) keep one
question key, so that they stay on one side of the held-out split; without one, the prompt's ids are the key.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from draftsmith.capture.exactness import RANK, too_short
from draftsmith.data.masks import MAY_BE_RIGHT, ReplyStart, mask_fault, reply_start, start_fault, supervised_spans
from draftsmith.data.peers import ids_of
from draftsmith.errors import UserError
from draftsmith.target.template import Template
from draftsmith.target.thinking import Delimiters, split, text_of
from draftsmith.trace import SCHEMA, Span, Trace, trace_id

KEY_COLUMNS = ("question_key", "primary_id")


def holds_ids(row: Mapping[str, Any]) -> bool:
    """Whether a row's columns are ids with a mask, or those of a trace."""
    return {"input_ids", "loss_mask"} <= row.keys() or {"prompt_ids", "generated_ids"} <= row.keys()


class IdRows:
    """Turns rows into traces, one after another; rows of one key are numbered as its samples."""

    def __init__(self, template: Template, delimiters: Delimiters | None, source: str) -> None:
        self.template, self.delimiters, self.source = template, delimiters, source
        self.start: ReplyStart | None = reply_start(template, delimiters)
        self.samples: Counter[str] = Counter()

    def traces(self, place: str, row: Mapping[str, Any]) -> Iterator[Trace]:
        """The traces of one row, in order.

        Raises:
            UserError: the row holds no ids.
        """
        if "prompt_ids" in row and "generated_ids" in row:
            yield self._numbered(_own_trace(place, row))
            return
        ids, mask = ids_of(row.get("input_ids")), ids_of(row.get("loss_mask"))
        if ids is None or mask is None:
            raise UserError(f"{place}: expected input_ids and loss_mask as lists of integers, found something else")
        own = row.get("source")
        bare = Trace(
            trace_id="",
            question_key=next((str(row[name]) for name in KEY_COLUMNS if row.get(name) is not None), ""),
            source=own if isinstance(own, str) and own else self.source,
            ids_source="rendered",
        )
        spans = supervised_spans(mask)
        fault = mask_fault(ids, mask) or ("mask all zero: no ids at all" if not spans else "")
        if fault:
            yield self._numbered(replace(bare, prompt_ids=ids.tolist(), state="rejected", error=fault))
            return
        for span in spans:
            fault = start_fault(ids, span, self.start) if self.start else ""
            yield self._numbered(self._reply(bare, ids, span, "" if fault.startswith(MAY_BE_RIGHT) else fault))

    def _reply(self, bare: Trace, ids: Any, span: Span, fault: str) -> Trace:
        prompt, generated = ids[: span[0]].tolist(), ids[span[0] : span[1]].tolist()
        ended = any(
            index in self.template.stop_ids for index in (*generated[-1:], *ids[span[1] : span[1] + 1].tolist())
        )
        reason = "stop" if ended else "length"
        parts = split(self.delimiters, self.template, prompt, generated, reason)
        problem = fault or too_short(prompt, generated)
        sampling = {"template_options": self.template.options, "prompt_opened_thinking": parts.opened_by_prompt}
        return replace(
            bare,
            prompt_ids=prompt,
            generated_ids=generated,
            finish_reason=reason,
            state="rejected" if problem else parts.state,
            reasoning_span=parts.reasoning,
            answer_span=parts.answer,
            reasoning=text_of(self.template, generated, parts.reasoning),
            answer=text_of(self.template, generated, parts.answer),
            sampling=json.dumps(sampling),
            error=problem,
        )

    def _numbered(self, trace: Trace) -> Trace:
        key = trace.question_key or _ids_key(trace)
        number = self.samples[key]
        self.samples[key] += 1
        return replace(trace, question_key=key, sample=number, trace_id=trace_id(key, 0, number))


def _own_trace(place: str, row: Mapping[str, Any]) -> Trace:
    """A row that has a trace's columns; those it lacks are left at their defaults."""
    values = {name: row[name] for name in SCHEMA.names if row.get(name) is not None}
    for name in ("prompt_ids", "generated_ids"):
        found = ids_of(values.get(name, []))
        if found is None:
            raise UserError(f"{place}: {name}: expected a list of integers, found something else")
        values[name] = found.tolist()
    for name in ("reasoning_span", "answer_span"):
        if name in values:
            values[name] = tuple(values[name])
    values = {"trace_id": "", "question_key": "", "ids_source": "rendered", **values}
    if values["ids_source"] not in RANK:
        raise UserError(f"{place}: ids_source: expected one of {', '.join(RANK)}, found {values['ids_source']!r}")
    return Trace(**values)


def _ids_key(trace: Trace) -> str:
    data = np.array(trace.prompt_ids or trace.generated_ids, np.int64).tobytes()
    return hashlib.sha256(data).hexdigest()[:24]
