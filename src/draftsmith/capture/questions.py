"""Datasets to questions: known schemas, stable keys from content, duplicates counted and never lost.

A key is a hash over what a target would be asked: every turn but the recorded assistant answers (recorded tool calls
count, they stay in the history), and the tools. It never depends on the position, so shuffled or grown input keeps its
keys, and the same prompt recorded with two answers stays in one split. Nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from draftsmith.capture.rows import BadRow, Question, question_of
from draftsmith.capture.sources import Row, read_rows, source_fingerprint, source_name
from draftsmith.errors import UserError
from draftsmith.recipe import QuestionSettings

BAD_START = 20


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
        UserError: as `read_all`; the source is empty; two different prompts carry the same id (P15).
    """
    count = 0
    for question in apart(read_all(settings)):
        count += 1
        yield question
    if not count:
        raise UserError(f"{settings.questions}: expected at least one row, found an empty dataset")


def read_all(settings: QuestionSettings) -> Iterator[tuple[str, Question]]:
    """One Question per row with its place, rows that cannot be asked (`Question.problem`) included.

    Raises:
        UserError: the source is missing or unreadable; none of its first BAD_START rows can be asked, or less than half
            of all: then it is no source of questions. The message is the first such row's.
    """
    name = source_name(settings.questions)
    first, bad, count = "", 0, 0
    for place, row in islice(read_rows(settings.questions, settings.split), settings.limit):
        question = question_in(place, row, name)
        count += 1
        if question.problem:
            first, bad = first or question.problem, bad + 1
            if bad == count == BAD_START:
                break
        yield place, question
    if 2 * bad > count:
        raise UserError(f"{first} ({bad:,} of {count:,} rows cannot be asked)")


def question_in(place: str, row: Row, name: str) -> Question:
    """The question of one row of the source `name`, or what is kept of one that cannot be asked."""
    try:
        return question_of(place, row, name)
    except BadRow as bad:
        return bad.question


def apart(rows: Iterable[tuple[str, Question]]) -> Iterator[Question]:
    """The questions, as long as no two different ones carry the same id (P15).

    Raises:
        UserError: two do.
    """
    ids: dict[str, tuple[str, str]] = {}
    for place, question in rows:
        if question.user_id:
            key, first = ids.setdefault(question.user_id, (question.key, place))
            if key != question.key:
                raise UserError(
                    f"{place}: id {question.user_id!r} is also the id of another prompt ({first}); "
                    "give each prompt its own id, or drop the id column"
                )
        yield question


def questions_fingerprint(settings: QuestionSettings) -> str:
    """16 hex digits over the source: bytes of files, name and split of hub datasets, version of builtin questions.

    Raises:
        UserError: no such source.
    """
    return source_fingerprint(settings.questions, settings.split)
