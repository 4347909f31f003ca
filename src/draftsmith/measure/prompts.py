"""What is measured on: prompts the draft was never trained on, as the target's template renders them.

By default the run's own held-out traces give their prompt ids as captured. Other questions are rendered exactly as
capture would (same template options, same turns before every question); only the first turn of each is used, and a
question that is in the run's training split is left out, because a draft knows it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from draftsmith.capture.conversation import Conversation
from draftsmith.capture.overrides import template_of
from draftsmith.capture.questions import read_questions
from draftsmith.errors import UserError
from draftsmith.recipe import MeasureSettings, QuestionSettings
from draftsmith.target.reply import Sampling
from draftsmith.target.template import Template
from draftsmith.trace import held_out, read_traces, trace_files


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question to measure on."""

    key: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompts:
    """What is measured on, and what was left out of it."""

    prompts: list[Prompt]
    source: str
    """In words, for the result."""
    trained: int = 0
    """Questions left out because they are in the run's training split."""


def held_out_prompts(traces: Path, share: float, limit: int) -> Prompts:
    """The first turns of the run's held-out questions, at most `limit`, in stored order.

    Raises:
        UserError: no question is held out.
    """
    shortest: dict[str, tuple[int, ...]] = {}
    for trace in read_traces(traces):
        if held_out(trace.question_key, share):
            ids = tuple(trace.prompt_ids)
            # Of several turns or samples of one question, the first turn has the shortest prompt.
            if trace.question_key not in shortest or len(ids) < len(shortest[trace.question_key]):
                shortest[trace.question_key] = ids
    if not shortest:
        raise UserError(
            f"{traces}: no held-out question to measure on (held_out {share:g}); capture with a larger --held-out "
            "or more questions, or give measure its own --questions"
        )
    chosen = [Prompt(key, ids) for key, ids in shortest.items()][:limit]
    return Prompts(chosen, "the run's held-out questions")


def question_prompts(
    settings: MeasureSettings, template: Template, metadata: dict[str, str], traces: Path, share: float
) -> Prompts:
    """The first turn of each question of `settings.questions`, at most `settings.limit`.

    Raises:
        UserError: as `read_questions`; or no question is left.
    """
    assert settings.questions is not None
    preamble = json.loads(metadata.get("preamble", "[]"))
    trained = {key for key in _question_keys(traces) if not held_out(key, share)}
    prompts: list[Prompt] = []
    known = 0
    for question in read_questions(QuestionSettings(questions=settings.questions)):
        if len(prompts) == settings.limit:
            break
        conversation = Conversation(question, 0, preamble)
        if question.problem or conversation.done:
            continue
        if question.key in trained:
            known += 1
            continue
        own = template_of(template, question)
        prompts.append(Prompt(question.key, tuple(own.render(conversation.messages(), question.tools))))
    if not prompts:
        raise UserError(
            f"{settings.questions}: expected questions that the draft was not trained on, found none "
            f"({known} are in the training split); give other questions"
        )
    return Prompts(prompts, settings.questions, known)


def with_room(prompts: Sequence[Prompt], max_positions: int) -> list[Prompt]:
    """The prompts that leave room for a reply of at least two tokens in the target's context.

    Raises:
        UserError: none does.
    """
    fitting = [prompt for prompt in prompts if len(prompt.ids) + 2 <= max_positions]
    if not fitting:
        raise UserError(
            f"all {len(prompts)} prompts fill the target's context of {max_positions} tokens; give shorter questions"
        )
    return fitting


def samplings_of(
    prompts: Sequence[Prompt], settings: MeasureSettings, max_tokens: int, context: int
) -> dict[str, Sampling]:
    """Each prompt's sampling by its key: a seed of its own, and no more tokens than the target's context takes."""
    return {
        prompt.key: Sampling(
            max_tokens=min(max_tokens, context - len(prompt.ids)),
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            seed=settings.seed + index,
        )
        for index, prompt in enumerate(prompts)
    }


def longest_reply(traces: Path) -> int:
    """Ids of the longest generation: the budget for traces that were captured under none (static text)."""
    columns = (pq.read_table(path, columns=["generated_ids"])["generated_ids"] for path in trace_files(traces))
    return max(int(pc.max(pc.list_value_length(column)).as_py() or 0) for column in columns)


def _question_keys(traces: Path) -> set[str]:
    keys: set[str] = set()
    for path in trace_files(traces):
        keys.update(pq.read_table(path, columns=["question_key"])["question_key"].to_pylist())
    return keys
