"""From a target's reply to a Trace: ids, spans, state, and whether the ids are exact enough to keep.

Where ids come from is `exactness`' business. What cannot be trained on honestly becomes a `rejected` trace with its
reason, never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from draftsmith.capture.conversation import Job
from draftsmith.capture.exactness import Exactness, problem, with_ids
from draftsmith.target.reply import Reply
from draftsmith.target.spelling import compact
from draftsmith.target.template import Template
from draftsmith.target.thinking import Delimiters, opened_by_prompt, split, text_of
from draftsmith.target.wire import ChatFailed
from draftsmith.trace import Trace

_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the target's ids are read."""

    template: Template
    delimiters: Delimiters | None
    exact: Exactness
    thought: bool = False
    """The target did think when a probe of this run asked it something."""


def trace_of(job: Job, reply: Reply, reading: Reading) -> Trace:
    """The trace of a reply, in its final state."""
    template, delimiters = reading.template, reading.delimiters
    reply = with_ids(reply, job.render, template, delimiters)
    ids = compact(reply.generated_ids)
    windows = template.windows(ids)
    parts = split(delimiters, template, reply.prompt_ids, ids, reply.finish_reason, windows)
    error = problem(reply, template, reading.exact, delimiters, parts.opened_by_prompt)
    return Trace(
        **_asked(job, parts.opened_by_prompt),
        prompt_ids=reply.prompt_ids,
        generated_ids=ids,
        finish_reason=reply.finish_reason,
        state="rejected" if error else parts.state,
        reasoning_span=parts.reasoning,
        answer_span=parts.answer,
        ids_source=reply.ids_source,
        reasoning=text_of(template, ids, parts.reasoning, windows),
        answer=text_of(template, ids, parts.answer, windows),
        usage=_json(_usage(reply, delimiters)),
        timing=_json(reply.timing),
        error=error,
    )


def failed_trace(job: Job, reason: str, reading: Reading) -> Trace:
    """The trace of a generation that never came: what was asked, and why there is nothing."""
    try:
        prompt_ids = job.render()
    except ChatFailed:  # the reason, or nothing to do with it
        prompt_ids = []
    opened = opened_by_prompt(reading.delimiters, reading.template, prompt_ids)
    return Trace(
        **_asked(job, opened),
        prompt_ids=prompt_ids,
        ids_source="rendered",
        state="failed",
        error=reason,
    )


def _asked(job: Job, opened: bool) -> dict[str, Any]:
    """The fields of a trace that say what was asked."""
    values = job.sampling
    sampling: dict[str, Any] = {name: getattr(values, name) for name in values.__slots__}
    if values.max_tokens < job.budget:
        sampling["clipped_from"] = job.budget
    sampling |= {"template_options": job.template.options, "prompt_opened_thinking": opened}
    return {
        "trace_id": job.trace_id,
        "question_key": job.question.key,
        "sample": job.sample,
        "source": job.question.source,
        "messages": _json(job.messages),
        "sampling": _json(sampling),
    }


def _usage(reply: Reply, delimiters: Delimiters | None) -> dict[str, Any]:
    """What the server counted, and the turn as it parsed it where that holds tool calls: ids alone do not say it."""
    if not reply.tool_calls:
        return reply.usage
    content = reply.answer_text or ""
    if delimiters:  # a server without a reasoning parser
        content = content.rpartition(delimiters.close_text)[2]
    return reply.usage | {"message": {"content": content.strip(), "tool_calls": list(reply.tool_calls)}}


def _json(value: Any) -> str:
    return _ENCODER.encode(value).decode()
