"""Whole captures against servers that are wrong in one way: stopped within 64 replies, with the cause named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftsmith.artifacts import Plan, Stage
from draftsmith.capture import engine, serving
from draftsmith.capture.probing import probed
from draftsmith.errors import GateStop
from draftsmith.progress import Progress
from draftsmith.recipe import CaptureSettings
from draftsmith.target.dialect import PLAIN
from draftsmith.trace import read_traces
from mock_engine import MockConfig, MockEngine

QUESTIONS = 150
PROBES = 12
"""Requests of one probe at most."""
OPENED = {"prompt_opens": True}
"""The prompt ends in <think>."""
ASKED = {"enable_thinking": True}
"""The reply itself opens its thinking."""


@pytest.fixture(scope="module")
def server() -> Iterator[MockEngine]:
    with MockEngine(MockConfig(length=96, thinking=True)) as running:
        yield running


class Run:
    """One run folder against the server."""

    def __init__(self, folder: Path, server: MockEngine, **settings: Any) -> None:
        path = folder / "questions.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"What is {n}?"}) + "\n" for n in range(QUESTIONS)))
        values = {"server": [server.url], "questions": str(path), "tokenizer": server.config.tokenizer}
        values |= {"max_tokens": 200, "concurrency": 4, "probe": False}
        self.settings = CaptureSettings(**values | settings)
        self.folder, self.work, self.server = folder, folder / "traces.partial", server
        self.work.mkdir()
        self.before = self._requests()

    def build(self, **changes: Any) -> dict[str, Any]:
        stage = Stage(self.folder, Plan("traces", {}, {}), self.work, None)
        progress = Progress(quiet=True, events=self.folder / "events.jsonl")
        counts: dict[str, Any] = engine.build(stage, self.settings.model_copy(update=changes), progress)
        return counts

    def asked(self) -> int:
        """Requests since the run began."""
        return self._requests() - self.before

    def _requests(self) -> int:
        return sum(map(len, self.server.stats()["questions"].values()))


WRONG = [
    ("renamed_field", False, OPENED, "lack reasoning .*the server puts it into the field 'thoughts'"),
    ("renamed_field", False, ASKED, "lack reasoning .*the server puts it into the field 'thoughts'"),
    ("renamed_field", False, {}, "lack reasoning .*the server puts it into the field 'thoughts'"),
    ("no_delimiters", False, OPENED, "lack reasoning .*no reasoning field and no closing delimiter.*reasoning parser"),
    ("no_delimiters", False, ASKED, "lack reasoning "),
    ("no_delimiters", True, OPENED, "faulty think delimiters .never closed by </think>"),
    ("no_delimiters", True, ASKED, "lack reasoning .*no delimiter among its ids"),
    ("cut_in_thinking", False, OPENED, "are cut off before they reach --max-tokens .in reasoning"),
    ("cut_in_thinking", True, OPENED, "are cut off before they reach --max-tokens .in reasoning"),
    ("cut_in_thinking", False, ASKED, "are cut off before they reach --max-tokens .in reasoning"),
    ("cut_in_thinking", True, ASKED, "are cut off before they reach --max-tokens .in reasoning"),
]


@pytest.mark.parametrize(("fault", "ids", "options", "cause"), WRONG)
def test_a_server_that_is_wrong_is_stopped_within_64_replies_by_name(
    server: MockEngine, tmp_path: Path, fault: str, ids: bool, options: dict[str, Any], cause: str
) -> None:
    # P01, P03
    server.change(faults={fault: 1.0}, ids=ids, parser=True)
    run = Run(tmp_path, server, template_options=options)
    with pytest.raises(GateStop, match=cause) as stop:
        run.build()
    assert run.asked() <= 64
    assert stop.value.details
    server.change(faults={})
    assert run.build()["ok"] == QUESTIONS


TURNED = [
    ("renamed_field", False, "lack reasoning .*the server puts it into the field 'thoughts'"),
    ("no_delimiters", False, "lack the reasoning that the target began with .*drop the think delimiters"),
    ("no_delimiters", True, "lack the reasoning that the target began with .*drop the think delimiters"),
    ("cut_in_thinking", False, "are cut off before they reach --max-tokens .in reasoning"),
    ("cut_in_thinking", True, "are cut off before they reach --max-tokens .in reasoning"),
]


@pytest.fixture
def turning(server: MockEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, bool], None]:
    """Makes the server well while it is probed, and wrong from the first question on."""

    def turn(fault: str, ids: bool) -> None:
        server.change(faults={}, ids=ids, parser=True)

        async def probed_well(*args: Any) -> Any:
            verdict = await probed(*args)
            args[1].dialect = args[1].dialect if ids else PLAIN  # logprobs tell what was generated
            server.change(faults={fault: 1.0})
            return verdict

        monkeypatch.setattr(serving, "probed", probed_well)

    return turn


@pytest.mark.parametrize(("fault", "ids", "cause"), TURNED)
def test_a_server_that_turns_wrong_after_the_probe_is_stopped_though_nobody_asked_for_thinking(
    server: MockEngine, tmp_path: Path, turning: Callable[[str, bool], None], fault: str, ids: bool, cause: str
) -> None:
    # P01, P03
    turning(fault, ids)
    run = Run(tmp_path, server, probe=True, exact="any")
    with pytest.raises(GateStop, match=cause) as stop:
        run.build()
    assert run.asked() <= 64 + PROBES
    assert stop.value.details


def test_a_field_renamed_after_the_probe_is_no_matter_where_ids_come(
    server: MockEngine, tmp_path: Path, turning: Callable[[str, bool], None]
) -> None:
    # P01
    turning("renamed_field", True)
    counts = Run(tmp_path, server, probe=True).build()
    assert (counts["ok"], counts["with_reasoning"]) == (QUESTIONS, QUESTIONS)


def test_a_resumed_run_remembers_that_its_target_thought(
    server: MockEngine, tmp_path: Path, turning: Callable[[str, bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    turning("no_delimiters", True)
    run = Run(tmp_path, server, probe=True)
    with pytest.raises(GateStop):
        run.build()
    monkeypatch.setattr(serving, "probed", probed)  # which now sees a target that does not think
    with pytest.raises(GateStop, match="lack the reasoning that the target began with"):
        run.build()
    server.change(faults={})
    assert run.build()["with_reasoning"] == QUESTIONS


def test_a_server_that_counts_delimiters_which_its_text_lacks_is_stopped_though_any_ids_will_do(
    server: MockEngine, tmp_path: Path
) -> None:
    server.change(faults={"no_delimiters": 1.0}, ids=False, parser=True)
    run = Run(tmp_path, server, template_options=ASKED, exact="any")
    with pytest.raises(GateStop, match="lack reasoning"):
        run.build()
    assert run.asked() <= 64


@pytest.mark.parametrize("options", [OPENED, ASKED, {}])
def test_a_renamed_reasoning_field_is_no_matter_where_ids_come(
    server: MockEngine, tmp_path: Path, options: dict[str, Any]
) -> None:
    # P01
    server.change(faults={"renamed_field": 1.0}, ids=True, parser=True)
    counts = Run(tmp_path, server, template_options=options).build()
    assert (counts["ok"], counts["with_reasoning"]) == (QUESTIONS, QUESTIONS)


def test_warn_takes_the_replies_as_they_are_and_counts_them(server: MockEngine, tmp_path: Path) -> None:
    server.change(faults={"cut_in_thinking": 1.0}, ids=True, parser=True)
    run = Run(tmp_path, server, template_options=OPENED)
    counts = run.build(on_gate="warn")
    assert counts["cut_in_reasoning"] == QUESTIONS
    assert counts["gate"] == {"cut by the server": QUESTIONS}
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["cause"] for event in events if event["kind"] == "gate"] == ["cut by the server"]


def test_replies_that_are_kept_are_not_paid_for_twice(server: MockEngine, tmp_path: Path) -> None:
    # A budget that is too small is no fault of the server's: what was cut stays, and the user may go on.
    server.change(faults={}, ids=True, parser=True, length=120)
    run = Run(tmp_path, server, template_options=OPENED, max_tokens=40)
    with pytest.raises(GateStop, match=r"are cut off \(in reasoning\); raise --max-tokens"):
        run.build()
    asked = run.asked()
    run.build(on_gate="warn")
    assert run.asked() - asked <= QUESTIONS - asked + 4  # four were in flight
    assert len(list(read_traces(run.work))) == QUESTIONS
    server.change(length=96)


def test_a_small_capture_that_is_taken_up_again_is_judged_as_a_whole(server: MockEngine, tmp_path: Path) -> None:
    server.change(faults={"no_reasoning": 1.0}, ids=True, parser=True)
    run = Run(tmp_path, server, template_options=ASKED)
    assert run.build(limit=3, on_gate="warn")["ok"] == 3
    with pytest.raises(GateStop, match="all of the first 5 replies lack reasoning"):
        run.build(limit=5)
    assert run.asked() == 5
    server.change(faults={})
    counts = run.build(limit=5)
    assert (counts["ok"], counts["with_reasoning"], run.asked()) == (5, 5, 10)
