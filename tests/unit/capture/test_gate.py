from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from draftsmith import __main__ as program
from draftsmith.capture.gate import EXAMPLES, FIRST, Gate
from draftsmith.errors import GateStop
from draftsmith.recipe import GateLimits
from draftsmith.target.thinking import Delimiters
from draftsmith.trace import Trace

THINK = Delimiters("think", ((1,),), ((2,),), "<think>", "</think>")
ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}
FULL = '{"completion_tokens": 100}'
Make = Callable[[int], Trace]


def reply(number: int, options: dict[str, Any] | None = None, *, opened: bool = False, **changes: Any) -> Trace:
    """A good reply of 60 ids to question `number`, which thinks."""
    draw = random.Random(number)
    asked = {"max_tokens": 100, "template_options": options or {}, "prompt_opened_thinking": opened}
    trace = Trace(
        trace_id=f"t{number}",
        question_key=f"q{number}",
        messages=json.dumps([{"role": "user", "content": f"What is {number}?"}]),
        prompt_ids=[5],
        generated_ids=[1, *(draw.randrange(10, 9999) for _ in range(50)), 2, *range(10, 17), 3],
        finish_reason="stop",
        reasoning_span=(1, 51),
        answer_span=(52, 60),
        reasoning="hm",
        answer=f"It is {number}.",
        sampling=json.dumps(asked),
    )
    return replace(trace, **changes)


def mute(number: int, **more: Any) -> Trace:
    return reply(number, ON, reasoning_span=None, reasoning="", **more)


def cut(number: int) -> Trace:
    return reply(number, ON, state="cut_in_reasoning", finish_reason="length", answer_span=None, answer="", usage=FULL)


def cut_early(number: int) -> Trace:
    return replace(cut(number), usage='{"completion_tokens": 60}')


def failed(number: int) -> Trace:
    return reply(
        number, state="failed", error="HTTP 503: busy", reasoning_span=None, answer_span=None, generated_ids=()
    )


@dataclass
class Seen:
    """A gate with what it said and logged."""

    said: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def gate(
        self, warn: bool = False, delimiters: Delimiters | None = THINK, thought: bool = False, **limits: Any
    ) -> Gate:
        def event(kind: str, **fields: Any) -> None:
            self.events.append({"kind": kind, **fields})

        return Gate(GateLimits(**limits), delimiters, thought=thought, warn=warn, say=self.said.append, event=event)


def show(gate: Gate, traces: Iterable[Trace]) -> None:
    for trace in traces:
        gate.look(trace, passing_fault=False)


def mixed(bad: Make, share: float, count: int = 200) -> list[Trace]:
    """Traces of which exactly `share` are bad, evenly spread, good ones first."""
    return [bad(n) if int((n + 1) * share) > int(n * share) else reply(n, ON) for n in range(count)]


def empty(number: int) -> Trace:
    return reply(number, ON, answer="")


def looped(number: int) -> Trace:
    phrase = [random.Random(number).randrange(10, 999) for _ in range(40)]
    return reply(number, ON, generated_ids=[1, number, 2, *phrase * 20, 3])


def doubled(number: int) -> Trace:
    return reply(number, ON, answer="It is.</think> It is.")


def same(number: int) -> Trace:
    return reply(0, ON, trace_id=f"t{number}", question_key=f"q{number}")


def rejected(number: int) -> Trace:
    return reply(number, ON, state="rejected", error="ids not exact: rendered 5 + 60 ids, its usage says 5 + 61")


CASES: list[tuple[Make, str, str, str, bool]] = [
    (mute, "without_reasoning", "lack reasoning although thinking was asked for", "reasoning parser", True),
    (cut, "cut", r"are cut off \(in reasoning\)", "raise --max-tokens", False),
    (cut_early, "cut", "are cut off before they reach --max-tokens", "a limit of its own", True),
    (empty, "empty", "end without an answer", "stop strings", True),
    (looped, "loops", "repeat themselves until they end", "--temperature", False),
    (doubled, "delimiters", r"have faulty think delimiters \(closed twice\)", "--thinking", True),
    (same, "duplicates", "are the same as the reply to another question", "cache", True),
    (rejected, "rejected", r"are not usable \(ids not exact", "--exact any", True),
    (failed, "failed", r"never came \(HTTP 503\)", "look at the server", True),
]


@pytest.mark.parametrize(("bad", "limit", "words", "cure", "again"), CASES, ids=[case[0].__name__ for case in CASES])
def test_each_cause_stops_the_run_past_its_limit_by_name_with_its_cure(
    bad: Make, limit: str, words: str, cure: str, again: bool
) -> None:
    gate = Seen().gate()
    share: float = getattr(GateLimits(), limit)
    with pytest.raises(GateStop, match=words) as stop:
        show(gate, mixed(bad, min(1.0, share + 0.12)))
    assert cure in str(stop.value) and "\n" not in str(stop.value)
    assert gate.seen <= 64
    assert all(gate.withdrawn) if again else gate.withdrawn == []
    assert bool(gate.withdrawn) == again


@pytest.mark.parametrize(("bad", "limit"), [case[:2] for case in CASES], ids=[case[0].__name__ for case in CASES])
def test_no_cause_stops_the_run_below_its_limit(bad: Make, limit: str) -> None:
    share: float = getattr(GateLimits(), limit)
    show(Seen().gate(), mixed(bad, share - 0.08, 600))


def test_a_healthy_run_is_never_stopped_and_nothing_is_said() -> None:
    seen = Seen()
    show(seen.gate(), [reply(n, ON) for n in range(1500)])
    assert (seen.said, seen.events) == ([], [])


def test_what_goes_wrong_late_is_seen_in_the_window_though_the_whole_run_looks_well() -> None:
    gate = Seen().gate(window=64)
    with pytest.raises(GateStop, match="of the last 64 replies end without an answer"):
        show(gate, [reply(n, ON) if n < 1000 else empty(n) for n in range(1100)])
    assert 1000 < gate.seen < 1050
    assert set(gate.withdrawn) == {f"t{n}" for n in range(1000, gate.seen)}


def test_the_stop_shows_five_examples_with_question_reply_and_what_is_wrong() -> None:
    def wild(number: int) -> Trace:
        trace = reply(number, ON, answer="x" * 90 + "\x1b[2Jend</think> of\nit")
        return replace(trace, messages=json.dumps([{"role": "user", "content": f"{number} \u202e" + "long " * 40}]))

    gate = Seen().gate()
    with pytest.raises(GateStop) as stop:
        show(gate, [wild(n) for n in range(40)])
    shown = stop.value.details
    assert len(shown) == EXAMPLES
    assert all("closed twice" in line and "end</think> of it" in line and "..." in line for line in shown)
    assert not any(character in line for line in shown for character in "\x1b\u202e\n")
    assert all(len(line) < 200 for line in shown)


def test_warn_says_each_cause_once_goes_on_and_counts() -> None:
    seen = Seen()
    gate = seen.gate(warn=True)
    show(gate, [replace(empty(n), answer="") for n in range(100)])
    assert len(seen.said) == 1 and "end without an answer" in seen.said[0]
    assert seen.said[0].count("\n") == EXAMPLES
    assert [(event["kind"], event["cause"], event["action"]) for event in seen.events] == [("gate", "empty", "warn")]
    assert gate.warned == {"empty": 100}
    assert gate.withdrawn == []


def test_a_stop_is_in_the_event_log_too() -> None:
    seen = Seen()
    with pytest.raises(GateStop) as stop:
        show(seen.gate(), [empty(n) for n in range(100)])
    (event,) = seen.events
    assert (event["action"], event["message"], event["of"]) == ("stop", str(stop.value), 32)


# the fast path


@pytest.mark.parametrize("bad", [mute, rejected], ids=["no reasoning", "rejected"])
def test_eight_useless_replies_are_enough(bad: Make) -> None:
    gate = Seen().gate()
    with pytest.raises(GateStop, match="all of the first 8 replies"):
        show(gate, [bad(n) for n in range(30)])
    assert gate.seen == FIRST and len(gate.withdrawn) == FIRST


def test_one_good_reply_among_the_first_is_enough_to_go_on() -> None:
    show(Seen().gate(), [*(mute(n) for n in range(7)), reply(7, ON)])


def test_requests_that_fail_one_after_the_other_stop_even_a_run_that_only_warns() -> None:
    gate = Seen().gate(warn=True)
    show(gate, [reply(n, ON) for n in range(40)])
    with pytest.raises(GateStop, match=r"the last 8 requests failed \(HTTP 503: busy\)"):
        for number in range(40, 60):
            gate.look(failed(number), passing_fault=True)
    assert gate.seen == 48


def test_what_was_in_flight_at_the_stop_is_withdrawn_with_the_rest() -> None:
    gate = Seen().gate()
    with pytest.raises(GateStop):
        show(gate, [mute(n) for n in range(8)])
    gate.withdrawn.clear()
    show(gate, [mute(8), reply(9, ON)])
    assert gate.withdrawn == ["t8"]


# the thinking mode


def test_thinking_that_was_switched_off_stops_the_run() -> None:
    # P05
    with pytest.raises(GateStop, match="all of the first 8 replies hold reasoning although the template options"):
        show(Seen().gate(), [reply(n, OFF) for n in range(20)])


def test_worked_examples_that_think_are_no_contradiction_to_thinking_switched_off() -> None:
    shown = json.dumps([{"role": "system", "content": "First think inside <think> and </think>."}])
    gate = Seen().gate()
    show(gate, [reply(n, OFF, messages=shown) for n in range(60)])
    gate.end([])


def test_each_question_is_judged_by_its_own_mode() -> None:
    # P23: rows may switch thinking for themselves
    rows = [reply(n, ON) if n % 2 else reply(n, OFF, reasoning_span=None, reasoning="") for n in range(200)]
    show(Seen().gate(), rows)
    swapped = [reply(n, OFF) if n % 2 else mute(n) for n in range(200)]
    with pytest.raises(GateStop):
        show(Seen().gate(), swapped)


def test_a_prompt_that_opens_thinking_asks_for_it() -> None:
    with pytest.raises(GateStop, match="lack reasoning"):
        show(Seen().gate(), [reply(n, opened=True, reasoning_span=None, reasoning="") for n in range(20)])


def silent(number: int) -> Trace:
    return reply(number, reasoning_span=None, reasoning="")


def test_where_the_probe_saw_reasoning_none_in_the_first_replies_stops_the_run() -> None:
    seen = Seen()
    gate = seen.gate(thought=True)
    show(gate, map(silent, range(31)))
    with pytest.raises(GateStop, match="all of the first 32 replies lack the reasoning that the target began with"):
        show(gate, [silent(31)])
    assert len(gate.withdrawn) == 32
    assert seen.said == []


def test_one_thinking_reply_shows_that_a_target_thinks_when_it_likes() -> None:
    gate = Seen().gate(thought=True)
    show(gate, [reply(0), *map(silent, range(1, 300))])
    gate.end([])


def test_where_nobody_asked_for_thinking_its_absence_gets_a_word_and_no_stop() -> None:
    seen = Seen()
    show(seen.gate(), [reply(n, reasoning_span=None, reasoning="") for n in range(100)])
    assert len(seen.said) == 1 and "none of the first 32 replies thinks" in seen.said[0]
    silent = Seen()
    show(silent.gate(delimiters=None), [reply(n, reasoning_span=None, reasoning="") for n in range(100)])
    assert silent.said == []


# the end of small runs


@pytest.mark.parametrize("count", [1, 3, 7])
def test_a_run_of_few_replies_is_judged_at_its_end_by_the_thinking_mode_alone(count: int) -> None:
    gate = Seen().gate()
    show(gate, [mute(n) for n in range(count)])
    with pytest.raises(GateStop, match=f"all of the first {count} replies lack reasoning"):
        gate.end([])
    assert len(gate.withdrawn) == count
    gate = Seen().gate()
    show(gate, [cut(n) for n in range(count)])
    gate.end([])


def test_a_run_below_the_first_verdict_is_judged_at_its_end_by_all_shares() -> None:
    gate = Seen().gate()
    show(gate, [cut(n) for n in range(20)])
    with pytest.raises(GateStop, match=r"all of the first 20 replies are cut off"):
        gate.end([])


def test_a_small_run_that_was_resumed_is_judged_with_what_was_there_before() -> None:
    gate = Seen().gate()
    show(gate, [mute(n) for n in range(3)])
    with pytest.raises(GateStop, match="all of the first 5 replies lack reasoning"):
        gate.end(mute(n) for n in (3, 4))
    assert sorted(gate.withdrawn) == [f"t{n}" for n in range(5)]


def test_the_last_few_replies_of_a_large_run_do_not_speak_for_all() -> None:
    gate = Seen().gate()
    show(gate, [mute(n) for n in range(3)])
    gate.end(reply(n, ON) for n in range(100, 10_000))
    assert gate.seen == 32


def test_a_run_that_asked_nothing_is_not_judged() -> None:
    Seen().gate().end(mute(n) for n in range(50))


def test_records_that_no_request_was_made_for_say_nothing() -> None:
    later = [reply(n, state="failed", error="earlier turn failed: HTTP 400: no") for n in range(60)]
    unusable = [reply(n, state="failed", error="unusable question: rows.jsonl: line 3: an image") for n in range(60)]
    gate = Seen().gate()
    show(gate, [*later, *unusable])
    assert gate.seen == 0


def test_the_command_line_shows_the_examples_below_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise GateStop("all of them are empty\nreally", details=("  'Q1' -> ''", "  'Q2' -> '\x1b[2J'"))

    monkeypatch.setattr(program, "app", stopped)
    assert program.main([]) == 3
    assert capsys.readouterr().err.splitlines() == [
        "draftsmith: all of them are empty really",
        "  'Q1' -> ''",
        "  'Q2' -> '\\x1b[2J'",
    ]
