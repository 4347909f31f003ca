from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.capture.journal import Journal
from draftsmith.capture.planning import Plan
from draftsmith.errors import UserError
from draftsmith.recipe import CaptureSettings
from draftsmith.trace import Trace, trace_id

MakePlan = Callable[..., Plan]


@pytest.fixture
def plan_of(tmp_path: Path) -> MakePlan:
    """A plan over rows in `questions.jsonl`."""

    def make(*rows: Any, **settings: Any) -> Plan:
        lines = [json.dumps(row if isinstance(row, dict) else {"prompt": row}) + "\n" for row in rows]
        (tmp_path / "questions.jsonl").write_text("".join(lines))
        return Plan(CaptureSettings(questions=str(tmp_path / "questions.jsonl"), **settings))

    return make


def two_turns(first: str, second: str) -> dict[str, Any]:
    roles = ("user", "assistant", "user")
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, (first, "said", second), strict=True)]}


def key_of(plan: Plan, row: int) -> str:
    return plan.keys[12 * row : 12 * row + 12].hex()


def test_the_nth_row_of_the_same_content_gets_the_nth_samples(plan_of: MakePlan) -> None:  # P15
    plan = plan_of("A", "B", "A", "A", samples=2)
    assert [list(plan.samples_of(row)) for row in range(len(plan))] == [[0, 1], [0, 1], [2, 3], [4, 5]]
    assert plan.generations == 8 == len(set(plan.order()))
    assert list(plan.order())[4:6] == [trace_id(key_of(plan, 0), 0, 2), trace_id(key_of(plan, 0), 0, 3)]


def test_shuffled_and_grown_rows_ask_for_the_same_generations(plan_of: MakePlan) -> None:  # P15
    before = set(plan_of("A", "A", "B", two_turns("1", "2")).order())
    grown = plan_of("N", two_turns("1", "2"), "A", "B", "A")
    assert before < set(grown.order()) and grown.generations == len(before) + 1


def test_every_turn_is_a_generation_and_they_follow_each_other(plan_of: MakePlan) -> None:
    plan = plan_of(two_turns("1", "2"), "B")
    ((first, second),) = plan.conversations(0)
    assert list(plan.order())[:2] == [first, second] == [trace_id(key_of(plan, 0), turn, 0) for turn in (0, 1)]


def test_two_prompts_under_one_id_are_an_error_before_anything_is_asked(plan_of: MakePlan) -> None:  # P15
    with pytest.raises(UserError, match=r"line 3: id '7' is also the id of another prompt \(.*line 1\)"):
        plan_of({"id": 7, "prompt": "A"}, {"id": 7, "prompt": "A"}, {"id": 7, "prompt": "B"}, {"id": 8, "prompt": "B"})


def test_rows_that_cannot_be_asked_are_counted_and_a_source_of_nothing_else_is_refused(plan_of: MakePlan) -> None:
    plan = plan_of("A", {"text": "no prompt"}, "B")
    assert (plan.unusable, plan.generations) == (1, 3)
    with pytest.raises(UserError, match="line 1: unknown schema"):
        plan_of({"text": "no prompt"}, {"text": "none either"})
    with pytest.raises(UserError, match="expected at least one row"):
        plan_of()


def test_what_stands_and_what_is_left_follow_from_the_journal(plan_of: MakePlan, tmp_path: Path) -> None:
    plan = plan_of("A", two_turns("1", "2"), two_turns("3", "4"), "B", "C")
    ids = list(plan.order())
    with Journal(tmp_path) as journal:
        for id, state, retry in ((0, "ok", False), (1, "ok", False), (3, "ok", False), (4, "failed", False)):
            journal.append(Trace(trace_id=ids[id], question_key="k", state=state), retry=retry)
        journal.append(Trace(trace_id=ids[5], question_key="k", state="failed"), retry=True)
        before, left = plan.standing(journal)
    assert before == Counter({"ok": 3, "failed": 1})
    assert list(left) == [0, 1, 0, 1, 1]
    assert [question.messages[0]["content"] for _, question in plan.read(left)] == ["1", "B", "C"]


def test_a_source_that_changes_while_it_is_asked_is_noticed(plan_of: MakePlan) -> None:
    plan = plan_of("A", "B", "C")
    plan_of("A", "other", "C")
    with pytest.raises(UserError, match=r"line 2: changed while its questions were being asked; run the same command"):
        list(plan.read(bytearray([1, 1, 1])))
    plan_of("A", "B")
    with pytest.raises(UserError, match=r"expected 3 rows as at the start, found 2; it changed while"):
        list(plan.read(bytearray([1, 1, 1])))


def test_a_limit_bounds_the_rows_of_every_pass(plan_of: MakePlan) -> None:
    plan = plan_of("A", "A", "B", limit=2)
    assert plan.generations == 2
    assert [row for row, _ in plan.read(bytearray([1, 1]))] == [0, 1]


def test_a_plan_takes_eighteen_bytes_a_row(plan_of: MakePlan) -> None:
    plan = plan_of(*(f"{number}" for number in range(100)))
    assert len(plan.keys) + plan.turns.itemsize * len(plan.turns) + plan.earlier.nbytes == 18 * 100
