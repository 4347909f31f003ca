"""A dataset's own answers as traces: static text, so that the rest of the chain runs on it unchanged, for comparison.

Each recorded answer becomes one trace. Its prompt is what serving would send for the history before it (preamble and
recorded earlier answers included); its generated ids are the turn as the template writes it in place, up to the stop
id, tokenised apart from the prompt. Where the template writes a finished turn otherwise than it starts a reply, the
recorded text follows the prompt directly. `ids_source` is `rendered` and `source` is `static`: nobody generated these.
Rows that hold ids already (`input_ids` and `loss_mask`, or exported traces) are not rendered at all: see `id_rows`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from draftsmith.artifacts import Stage
from draftsmith.capture.conversation import ASKING_ROLES, Conversation, Message
from draftsmith.capture.exactness import too_short
from draftsmith.capture.overrides import template_of
from draftsmith.capture.questions import read_conversations
from draftsmith.capture.rows import Question
from draftsmith.capture.sealing import question_metadata, summary, write_parts
from draftsmith.capture.sources import read_rows, source_name
from draftsmith.data.id_rows import IdRows, holds_ids
from draftsmith.errors import UserError
from draftsmith.progress import Progress, Tracker
from draftsmith.recipe import CaptureSettings, ImportSettings
from draftsmith.target.embedded import resolve_model
from draftsmith.target.template import Template, TemplateRefusal, load_template
from draftsmith.target.thinking import Delimiters, find_delimiters, opened_by_prompt, split, text_of
from draftsmith.trace import TRAINABLE, Trace, trace_id


@dataclass(frozen=True, slots=True)
class Importer:
    """What turns recorded answers into ids."""

    template: Template
    delimiters: Delimiters | None
    stop_id: int
    """Ends a turn where the template does not write it."""
    preamble: tuple[Message, ...]


def build(stage: Stage, settings: ImportSettings, progress: Progress) -> dict[str, Any]:
    """Writes `part-*.parquet` into `stage.work`; an interrupted attempt's parts are written again.

    Raises:
        UserError: no tokenizer given, questions unreadable (`read_conversations`), or no row holds a usable answer.
    """
    importer = load_importer(settings, progress)
    metadata = {
        "source_kind": "static",
        "target": "",
        "target_fingerprint": "",
        "server": "",
        "max_tokens": str(CaptureSettings.model_fields["max_tokens"].default),
        "sampling": "{}",
        **question_metadata(settings, importer.template, importer.delimiters),
    }
    total, traces = _all_traces(settings, importer)
    with progress.track("import", total, "rows") as tracker:
        counts = summary(write_parts(stage.work, _tracked(traces, tracker), metadata))
    if not any(counts[state] for state in TRAINABLE):
        reason = next(iter(counts["reasons"]))
        raise UserError(f"{settings.questions}: none of {total} rows holds an answer to learn from ({reason})")
    return counts


def load_importer(settings: ImportSettings, progress: Progress) -> Importer:
    """The template and delimiters that recorded answers are rendered with.

    Raises:
        UserError: no tokenizer given, or as `load_template` and `find_delimiters`.
    """
    if settings.tokenizer is None:
        raise UserError("import: expected the target's tokenizer, found none; give --tokenizer DIR")
    name = resolve_model(settings.tokenizer, progress)
    template = load_template(name, settings.template_options, settings.trust_remote_code)
    delimiters = find_delimiters(template, settings.thinking, settings.think_open, settings.think_close)
    preamble = tuple(message.model_dump() for message in settings.preamble)
    return Importer(template, delimiters, _turn_end(template), preamble)


def recorded_traces(question: Question, sample: int, importer: Importer) -> Iterator[Trace]:
    """One trace per turn that asks for an answer, in order; without a usable recorded answer it is `rejected`."""
    if question.problem:
        reason = f"unusable question: {question.problem}"
        id = trace_id(question.key, 0, sample)
        yield Trace(
            trace_id=id,
            question_key=question.key,
            sample=sample,
            source="static",
            ids_source="rendered",
            state="rejected",
            error=reason,
        )
        return
    importer = replace(importer, template=template_of(importer.template, question))
    history = Conversation(question, sample, importer.preamble).history
    body = question.messages[len(history) - len(importer.preamble) :]
    turn = 0
    for number, message in enumerate((*body, None)):
        asked = number > 0 and body[number - 1]["role"] in ASKING_ROLES
        if asked and (message is None or message["role"] == "assistant"):
            bare = Trace(
                trace_id=trace_id(question.key, turn, sample),
                question_key=question.key,
                sample=sample,
                source="static",
                messages=json.dumps([*history, *body[:number]], ensure_ascii=False),
                finish_reason="stop",
                ids_source="rendered",
            )
            yield _recorded(bare, [*history, *body[:number]], message, question.tools, importer)
            turn += 1


def _all_traces(settings: ImportSettings, importer: Importer) -> tuple[int, Iterator[tuple[int, Trace]]]:
    """The number of rows, and their traces, each with the number of its row."""
    first = next(read_rows(settings.questions, settings.split), None)
    if first is None or not holds_ids(first[1]):
        rows = list(read_conversations(settings))
        return len(rows), _traces(rows, importer)
    # Ids are large: read twice, to count them first, rather than held.
    total = sum(1 for _ in islice(read_rows(settings.questions, settings.split), settings.limit))
    return total, _traces_of_ids(settings, importer)


def _traces_of_ids(settings: ImportSettings, importer: Importer) -> Iterator[tuple[int, Trace]]:
    id_rows = IdRows(importer.template, importer.delimiters, source_name(settings.questions))
    rows = islice(read_rows(settings.questions, settings.split), settings.limit)
    for done, (place, row) in enumerate(rows, start=1):
        for trace in id_rows.traces(place, row):
            yield done, trace


def _tracked(traces: Iterator[tuple[int, Trace]], tracker: Tracker) -> Iterator[Trace]:
    """The traces alone, while the bar follows their rows."""
    rejected = 0
    for done, trace in traces:
        rejected += trace.state == "rejected"
        yield trace
        tracker.update(done, rejected=rejected)


def _traces(rows: Sequence[Question], importer: Importer) -> Iterator[tuple[int, Trace]]:
    """Traces of all rows, each with the number of its row; rows of the same content are samples of one question."""
    samples: Counter[str] = Counter()
    for done, row in enumerate(rows, start=1):
        for trace in recorded_traces(row, samples[row.key], importer):
            yield done, trace
        samples[row.key] += 1


def _recorded(
    bare: Trace, history: list[Message], message: Message | None, tools: Sequence[dict[str, Any]], importer: Importer
) -> Trace:
    """`bare` with the ids, spans and state of one recorded answer."""
    template, delimiters = importer.template, importer.delimiters
    if message is None or not (message["content"].strip() or message.get("tool_calls")):
        return replace(bare, state="rejected", error="no recorded answer")
    try:
        prompt_ids = template.render(history, tools)
        generated_ids = _turn_ids(importer, history, message, tools, prompt_ids)
    except TemplateRefusal as refusal:
        return replace(bare, state="rejected", error=f"template refused: {refusal}")
    parts = split(delimiters, template, prompt_ids, generated_ids, "stop")
    if parts.state == "cut_in_reasoning":
        # A recorded answer is complete. Where the prompt opens thinking it just holds none: all of it is the answer.
        parts = replace(parts, reasoning=None, answer=(0, len(generated_ids)), state="ok")
    problem = too_short(prompt_ids, generated_ids)
    sampling = {"template_options": template.options, "prompt_opened_thinking": parts.opened_by_prompt}
    return replace(
        bare,
        prompt_ids=prompt_ids,
        generated_ids=generated_ids,
        state="rejected" if problem else parts.state,
        reasoning_span=parts.reasoning,
        answer_span=parts.answer,
        reasoning=text_of(template, generated_ids, parts.reasoning),
        answer=text_of(template, generated_ids, parts.answer),
        sampling=json.dumps(sampling),
        error=problem,
    )


def _turn_ids(
    importer: Importer,
    history: list[Message],
    message: Message,
    tools: Sequence[dict[str, Any]],
    prompt_ids: Sequence[int],
) -> list[int]:
    """Ids of one recorded turn, stop id included.

    Raises:
        TemplateRefusal: the template cannot render the turn in place, and a tool call cannot be written without it.
    """
    template = importer.template
    prompt = template.text(history, tools)
    rendered = template.transcript([*history, message], tools)
    if rendered.startswith(prompt):
        ids = template.encode(rendered[len(prompt) :])
        end = next((i for i, index in enumerate(ids) if index in template.stop_ids), None)
        if end is not None:
            return ids[: end + 1]
    if message.get("tool_calls"):
        raise TemplateRefusal(f"{template.name}: the template does not write a finished tool call where a reply starts")
    opened = opened_by_prompt(importer.delimiters, template, prompt_ids)
    return [*template.encode(_plain_text(message, importer.delimiters, opened)), importer.stop_id]


def _plain_text(message: Message, delimiters: Delimiters | None, opened: bool) -> str:
    """The recorded turn as a reply to the prompt; an opening delimiter that the prompt holds is not repeated."""
    content: str = message["content"].strip()
    if delimiters is None:
        return content
    if opened and content.startswith(delimiters.open_text):
        return content.removeprefix(delimiters.open_text).lstrip()
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return content
    opening = "" if opened else f"{delimiters.open_text}\n"
    return f"{opening}{reasoning.strip()}\n{delimiters.close_text}\n\n{content}"


def _turn_end(template: Template) -> int:
    """The stop id that the template itself puts after an answer; else the tokenizer's EOS.

    Raises:
        UserError: the tokenizer has no stop id at all.
    """
    if not template.stop_ids:
        raise UserError(f"{template.name}: expected an end-of-sequence token, found none; set eos_token")
    try:
        text = template.transcript([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    except TemplateRefusal:
        text = ""
    written = [index for index in template.encode(text) if index in template.stop_ids]
    eos: int | None = template.tokenizer.eos_token_id
    return written[-1] if written else eos if eos is not None else min(template.stop_ids)
