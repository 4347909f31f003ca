"""Datasets to questions: known schemas, stable keys from content, duplicates counted and never lost.

A key is a hash over what a target would be asked: every turn but the recorded assistant answers (recorded tool calls
count, they stay in the history), and the tools. It never depends on the position, so shuffled or grown input keeps its
keys, and the same prompt recorded with two answers stays in one split. Nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from draftsmith.capture.rows import Question, question_of
from draftsmith.capture.sources import read_rows, source_fingerprint, source_name
from draftsmith.errors import UserError
from draftsmith.recipe import QuestionSettings


def read_questions(settings: QuestionSettings) -> list[Question]:
    """Distinct questions in the order they first occur.

    Raises:
        UserError: as `read_conversations`.
    """
    questions: dict[str, Question] = {}
    for question in read_conversations(settings):
        seen = questions.get(question.key)
        questions[question.key] = replace(seen, copies=seen.copies + 1) if seen else question
    return list(questions.values())


def read_conversations(settings: QuestionSettings) -> Iterator[Question]:
    """One Question per row (`copies` is 1), duplicates included: recorded answers may differ among them.

    Raises:
        UserError: the source is missing, unreadable or empty; a row has an unknown schema (the columns found are
            named), an unknown role, an image or no user turn; two different prompts carry the same id (P15).
    """
    name = source_name(settings.questions)
    ids: dict[str, tuple[str, str]] = {}
    count = 0
    for place, row in islice(read_rows(settings.questions, settings.split), settings.limit):
        question = question_of(place, row, name)
        count += 1
        if question.user_id:
            key, first = ids.setdefault(question.user_id, (question.key, place))
            if key != question.key:
                raise UserError(
                    f"{place}: id {question.user_id!r} is also the id of another prompt ({first}); "
                    "give each prompt its own id, or drop the id column"
                )
        yield question
    if not count:
        raise UserError(f"{settings.questions}: expected at least one row, found an empty dataset")


def questions_fingerprint(settings: QuestionSettings) -> str:
    """16 hex digits over the source: bytes of files, name and split of hub datasets, version of builtin questions.

    Raises:
        UserError: no such source.
    """
    return source_fingerprint(settings.questions, settings.split)
