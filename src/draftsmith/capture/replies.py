"""From a target's reply to a Trace: ids, spans, state, and whether the ids are exact enough to keep.

Ids the target gave are kept as they are. Where it gave none, the prompt is what the template renders and the reply is
rebuilt from its text fields and the delimiters; token counts in `usage` then decide between `rendered_verified` and
`rendered`. What cannot be trained on honestly becomes a `rejected` trace with its reason, never a guess.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from draftsmith.capture.conversation import Job
from draftsmith.target.reply import Reply
from draftsmith.target.template import Template
from draftsmith.target.thinking import Delimiters, opened_by_prompt, split, text_of
from draftsmith.trace import IdsSource, Trace

Exactness = Literal["engine", "verified", "any"]
RANK: Mapping[IdsSource, int] = {"rendered": 0, "rendered_verified": 1, "engine": 2}
LEAST: Mapping[Exactness, int] = {"any": 0, "verified": 1, "engine": 2}
NOT_EXACT, REASONING_LOST = "ids not exact", "reasoning lost"
"""Classes of rejection (what stands before the colon of an `error`) that the gate knows a cure for."""
LEAST_GENERATED = 2
"""The first generated id comes from the target itself, so one id alone gives the draft nothing to learn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the target's ids are read."""

    template: Template
    delimiters: Delimiters | None
    exact: Exactness


def trace_of(job: Job, reply: Reply, reading: Reading) -> Trace:
    """The trace of a reply, in its final state."""
    template, delimiters = reading.template, reading.delimiters
    reply = with_ids(job, reply, template, delimiters)
    parts = split(delimiters, template, reply.prompt_ids, reply.generated_ids, reply.finish_reason)
    problem = _problem(reply, reading, parts.opened_by_prompt)
    return replace(
        _bare(job, template, parts.opened_by_prompt),
        prompt_ids=reply.prompt_ids,
        generated_ids=reply.generated_ids,
        finish_reason=reply.finish_reason,
        state="rejected" if problem else parts.state,
        reasoning_span=parts.reasoning,
        answer_span=parts.answer,
        ids_source=reply.ids_source,
        reasoning=text_of(template, reply.generated_ids, parts.reasoning),
        answer=text_of(template, reply.generated_ids, parts.answer),
        usage=_json(reply.usage),
        timing=_json(reply.timing),
        error=problem,
    )


def failed_trace(job: Job, reason: str, reading: Reading) -> Trace:
    """The trace of a generation that never came: what was asked, and why there is nothing."""
    opened = opened_by_prompt(reading.delimiters, reading.template, job.prompt_ids)
    return replace(
        _bare(job, reading.template, opened),
        prompt_ids=job.prompt_ids,
        ids_source="rendered",
        state="failed",
        error=reason,
    )


def with_ids(job: Job, reply: Reply, template: Template, delimiters: Delimiters | None) -> Reply:
    """The reply with prompt and generated ids, and where they come from."""
    prompt_ids = reply.prompt_ids or job.prompt_ids
    exact = bool(reply.prompt_ids) or reply.usage.get("prompt_tokens") == len(prompt_ids)
    if reply.generated_ids:
        source = reply.ids_source if reply.prompt_ids else "rendered_verified" if exact else "rendered"
        return replace(reply, prompt_ids=prompt_ids, ids_source=source)
    generated = template.encode(_text(reply, delimiters, opened_by_prompt(delimiters, template, prompt_ids)))
    stop = template.tokenizer.eos_token_id
    if reply.finish_reason in ("stop", "tool_calls") and stop is not None:
        generated.append(stop)
    exact = exact and reply.usage.get("completion_tokens") == len(generated)
    return replace(
        reply,
        prompt_ids=prompt_ids,
        generated_ids=generated,
        ids_source="rendered_verified" if exact else "rendered",
    )


def _text(reply: Reply, delimiters: Delimiters | None, opened: bool) -> str:
    """The reply as one text, the way the target must have written it. No closing delimiter is invented (P03)."""
    reasoning, answer = reply.reasoning_text, reply.answer_text or ""
    if not reasoning or delimiters is None:
        return (reasoning or "") + answer
    opening = "" if opened else delimiters.open_text
    return opening + reasoning + (delimiters.close_text + answer if answer else "")


def _problem(reply: Reply, reading: Reading, opened: bool) -> str:
    """Why the reply cannot be kept, as `class: detail`; empty if it can."""
    rebuilt = reply.ids_source != "engine"
    if rebuilt and reply.tool_calls:
        return "tool call without ids: its text cannot be rebuilt from the parsed call"
    if rebuilt and opened and reply.finish_reason == "stop" and not reply.reasoning_text:
        closing = reading.delimiters.close_text if reading.delimiters else ""
        if closing not in (reply.answer_text or ""):
            return f"{REASONING_LOST}: the prompt opened it, the reply has no reasoning field and no closing delimiter"
    if RANK[reply.ids_source] < LEAST[reading.exact]:
        usage = reply.usage
        return (
            f"{NOT_EXACT}: the server gave no token ids; rendered {len(reply.prompt_ids)} + "
            f"{len(reply.generated_ids)} ids, its usage says {usage.get('prompt_tokens', 'nothing')} + "
            f"{usage.get('completion_tokens', 'nothing')}"
        )
    return too_short(reply.prompt_ids, reply.generated_ids)


def too_short(prompt_ids: Sequence[int], generated_ids: Sequence[int]) -> str:
    """Why nothing can be supervised, or everything would be (P18); empty for a trace that has both parts."""
    if prompt_ids and len(generated_ids) >= LEAST_GENERATED:
        return ""
    return f"too short: nothing to train on in {len(prompt_ids)} + {len(generated_ids)} ids"


def _bare(job: Job, template: Template, opened: bool) -> Trace:
    sampling: dict[str, Any] = asdict(job.sampling)
    if job.sampling.max_tokens < job.budget:
        sampling["clipped_from"] = job.budget
    sampling |= {"template_options": template.options, "prompt_opened_thinking": opened}
    return Trace(
        trace_id=job.trace_id,
        question_key=job.question.key,
        sample=job.sample,
        source=job.question.source,
        messages=_json(job.messages),
        sampling=_json(sampling),
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
