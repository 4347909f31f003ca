from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftsmith.artifacts import Plan, Stage
from draftsmith.capture import engine, room, serving, writing
from draftsmith.capture.journal import JOURNAL, Journal
from draftsmith.capture.records import MAGIC
from draftsmith.capture.sealing import NO_LONGER_ASKED
from draftsmith.errors import GateStop, Interrupted, UserError
from draftsmith.progress import Progress
from draftsmith.recipe import CaptureSettings
from draftsmith.target import endpoints
from draftsmith.target.reply import Reply
from draftsmith.target.template import Template, load_template
from draftsmith.trace import TRAINABLE, Trace, read_metadata, read_traces, supervised_rows
from fault_server import Fault, FaultServer, Says
from toy_chat import save_toy_tokenizer

ALL = frozenset({"ok", "cut_in_reasoning", "cut_in_answer", "rejected", "failed"})
OPENS = {"prompt_opens": True}


@dataclass
class Toy:
    """A run folder, a toy tokenizer and the settings most tests share."""

    folder: Path
    tokenizer: str
    template: Template
    output: Console

    def settings(self, target: FaultServer | None, questions: list[Any], **changes: Any) -> CaptureSettings:
        path = self.folder / "questions.jsonl"
        rows = [{"prompt": question} if isinstance(question, str) else question for question in questions]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        values = {
            "server": [target.url] if target else [],
            "questions": str(path),
            "tokenizer": self.tokenizer,
            "max_tokens": 100,
            "probe": False,  # what these servers are is no matter here; test_probing asks
        }
        return CaptureSettings(**values | changes)

    def work(self) -> Path:
        path = self.folder / "run" / "traces.partial"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def build(self, settings: CaptureSettings, replaces: Path | None = None) -> dict[str, Any]:
        stage = Stage(self.folder / "run", Plan("traces", {}, {}), self.work(), replaces)
        return engine.build(stage, settings, Progress(console=self.output))

    def capture(self, target: FaultServer | None, questions: list[Any], **changes: Any) -> dict[str, Any]:
        return self.build(self.settings(target, questions, **changes))

    def traces(self) -> list[Trace]:
        return list(read_traces(self.work(), ALL))

    def said(self) -> str:
        return self.output.export_text(clear=False)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_toy_tokenizer(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def toy(tmp_path: Path, tokenizer: str) -> Toy:
    console = Console(record=True, width=1000, file=io.StringIO())
    return Toy(tmp_path, tokenizer, load_template(tokenizer, {}, False), console)


@pytest.fixture
def serve(toy: Toy) -> Iterator[Callable[..., FaultServer]]:
    running = []

    def start(**options: Any) -> FaultServer:
        running.append(FaultServer(template=toy.template, **options).__enter__())
        return running[-1]

    yield start
    for server in running:
        server.__exit__()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(endpoints, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(endpoints, "LOOK_LIMIT", 0.02)


def written(toy: Toy) -> int:
    """Records in the journal's files by now."""
    return sum(path.read_bytes().count(MAGIC) for path in (toy.work() / JOURNAL).glob("*.log"))


def without_timing(trace: Trace) -> Trace:
    return replace(trace, timing="{}", usage="{}")


def test_a_reply_becomes_a_trace_with_ids_spans_and_what_was_asked(toy: Toy, serve: Callable[..., FaultServer]) -> None:
    counts = toy.capture(serve(max_model_len=500), ["2+2?"], template_options=OPENS, temperature=0.5, seed=7)
    (trace,) = toy.traces()
    assert toy.template.decode(trace.prompt_ids) == "<|user|>2+2?<|end|><|assistant|><think>"
    assert toy.template.decode(trace.generated_ids) == "two and two</think>Four<|end|>"
    assert (trace.state, trace.reasoning, trace.answer) == ("ok", "two and two", "Four")
    assert toy.template.decode(trace.generated_ids[slice(*trace.answer_span)]) == "Four<|end|>"
    assert json.loads(trace.messages) == [{"role": "user", "content": "2+2?"}]
    assert json.loads(trace.sampling) == {
        "max_tokens": 100,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 0,
        "seed": 7,
        "template_options": OPENS,
        "prompt_opened_thinking": True,
    }
    assert counts == {
        "questions": 1,
        "traces": 1,
        "ok": 1,
        "cut_in_reasoning": 0,
        "cut_in_answer": 0,
        "rejected": 0,
        "failed": 0,
        "with_reasoning": 1,
        "prompt_tokens": len(trace.prompt_ids),
        "generated_tokens": len(trace.generated_ids),
        "ids_source": {"engine": 1},
        "reasons": {},
        "no_longer_asked": 0,
    }


def test_the_file_metadata_says_what_made_the_traces(toy: Toy, serve: Callable[..., FaultServer]) -> None:
    server = serve(max_model_len=500)
    toy.capture(server, ["2+2?"], template_options=OPENS, held_out=0.25)
    found = read_metadata(toy.work())
    assert all(isinstance(value, str) for value in found.values())
    assert (found["source_kind"], found["target"], found["held_out"]) == ("capture", "toy", "0.25")
    assert json.loads(found["server"])["engine"] == "vllm"
    assert json.loads(found["delimiters"])["close_text"] == "</think>"
    assert json.loads(found["stop_ids"]) == [toy.template.token_id("<|end|>")]
    assert found["template_fingerprint"] == load_template(toy.tokenizer, OPENS, False).fingerprint


# P01


@pytest.mark.parametrize("ids", ["vllm", "none"])
def test_wherever_a_server_puts_the_reasoning_the_record_is_the_same(
    toy: Toy, serve: Callable[..., FaultServer], tmp_path: Path, ids: str
) -> None:
    records = []
    for shape in ("reasoning_content", "reasoning", "tags"):
        toy.folder = tmp_path / shape
        toy.folder.mkdir()
        toy.capture(serve(shape=shape, ids=ids), ["2+2?", "again?"], template_options=OPENS)
        records.append([without_timing(trace) for trace in toy.traces()])
    assert records[0] == records[1] == records[2]
    assert {trace.ids_source for trace in records[0]} == {"engine" if ids == "vllm" else "rendered_verified"}
    assert toy.template.decode(records[0][0].generated_ids) == "two and two</think>Four<|end|>"


@pytest.mark.parametrize("options", [OPENS, {"enable_thinking": True}])
@pytest.mark.parametrize("questions", [3, 20])
def test_thinking_asked_for_but_never_seen_stops_the_run_early(
    toy: Toy, serve: Callable[..., FaultServer], options: dict[str, Any], questions: int
) -> None:
    server = serve(shape="neither", ids="none")
    with pytest.raises(GateStop, match=r"all of the first \d replies lack reasoning although thinking was asked for"):
        toy.capture(server, [f"{n}?" for n in range(questions)], template_options=options, exact="any", concurrency=1)
    assert len(server.requests) == min(questions, 8)
    # After the server was mended, the replies the verdict was about are asked for again.
    server.shape = "reasoning"
    toy.capture(server, [f"{n}?" for n in range(questions)], template_options=options, exact="any", concurrency=1)
    assert {trace.reasoning for trace in toy.traces()} == {"two and two"}
    assert len(toy.traces()) == questions


# P03


@pytest.mark.parametrize("ids", ["vllm", "none"])
@pytest.mark.parametrize("shape", ["cut_in_content", "reasoning"])
def test_a_reply_cut_in_its_thinking_has_no_answer_whatever_the_field(
    toy: Toy, serve: Callable[..., FaultServer], shape: str, ids: str
) -> None:
    cut = Says(answer="", reasoning="first add 3 and", finish="length", closed=False)
    toy.capture(serve(shape=shape, ids=ids, says=lambda text, body: cut), ["2+2?"], template_options=OPENS)
    (trace,) = toy.traces()
    assert (trace.state, trace.answer, trace.answer_span) == ("cut_in_reasoning", "", None)
    assert trace.reasoning == "first add 3 and"
    assert toy.template.decode(trace.generated_ids) == "first add 3 and"


# P05


def obedient(text: str, body: dict[str, Any]) -> Says:
    thinks = body.get("chat_template_kwargs", {}).get("enable_thinking", True)
    return Says(reasoning="hm" if thinks else None, answer=f"at {body.get('temperature', 0.6)}")


def test_switching_thinking_off_takes_effect_and_sampling_is_explicit(
    toy: Toy, serve: Callable[..., FaultServer]
) -> None:
    toy.capture(serve(says=obedient), ["2+2?"], template_options={"enable_thinking": False})
    (trace,) = toy.traces()
    assert (trace.reasoning_span, trace.answer) == (None, "at 0.0")
    assert toy.template.decode(trace.prompt_ids).endswith("<think></think>")
    assert json.loads(trace.sampling)["temperature"] == 0.0


def test_a_server_that_ignores_thinking_off_stops_the_run(toy: Toy, serve: Callable[..., FaultServer]) -> None:
    def deaf(text: str, body: dict[str, Any]) -> Says:
        del body["chat_template_kwargs"]
        return Says(reasoning="hm")

    server = serve(says=deaf)
    with pytest.raises(GateStop, match="all of the first 8 replies hold reasoning although"):
        toy.capture(server, [f"{n}?" for n in range(20)], template_options={"enable_thinking": False}, concurrency=1)
    assert len(server.requests) == 8


def test_a_target_that_renders_other_prompts_is_noticed_once(toy: Toy, serve: Callable[..., FaultServer]) -> None:
    server = serve()
    server.template = replace(toy.template, tokenizer=load_template(toy.tokenizer, {}, False).tokenizer)
    server.template.tokenizer.chat_template = "{{ messages[-1].content }}<|assistant|>"
    toy.capture(server, ["2+2?", "3+3?"])
    assert toy.said().count("the target's prompt of 5 ids differs from the 7") == 1
    assert toy.template.decode(toy.traces()[0].prompt_ids) == "2+2?<|assistant|>"


# P06


def test_ids_are_kept_as_the_engine_gave_them_and_never_tokenised_again(
    toy: Toy, serve: Callable[..., FaultServer]
) -> None:
    ids = [toy.template.token_id(token) for token in ("he", "llo", "<|end|>")]
    toy.capture(serve(says=lambda text, body: Says(answer="hello", reasoning=None, ids=ids)), ["hi"])
    (trace,) = toy.traces()
    assert list(trace.generated_ids) == ids
    assert trace.answer == "hello"


def test_rendered_ids_are_refused_below_the_asked_exactness(toy: Toy, serve: Callable[..., FaultServer]) -> None:
    def merged(text: str, body: dict[str, Any]) -> Says:  # the engine counts 3 ids, rendering gives 6
        return Says(answer="hello", reasoning=None, ids=[toy.template.token_id(t) for t in ("he", "llo", "<|end|>")])

    server = serve(ids="none", says=merged)
    with pytest.raises(UserError, match="none of 1 replies can be trained on; 1 of them: ids not exact"):
        toy.capture(server, ["hi"])
    counts = toy.capture(server, ["hi"], exact="any")
    assert counts["ids_source"] == {"rendered": 1}


def test_a_run_whose_first_replies_all_lack_exact_ids_stops(toy: Toy, serve: Callable[..., FaultServer]) -> None:
    server = serve(ids="none", usage=False)
    with pytest.raises(GateStop, match=r"all of the first 8 replies are not usable \(ids not exact.*--exact any"):
        toy.capture(server, [f"{n}?" for n in range(20)], concurrency=2)
    assert len(server.requests) <= 9


def test_verified_rendering_is_refused_where_engine_ids_are_asked_for(
    toy: Toy, serve: Callable[..., FaultServer]
) -> None:
    server = serve(ids="none")
    with pytest.raises(UserError, match="ids not exact"):
        toy.capture(server, ["2+2?"], exact="engine")
    assert toy.capture(server, ["2+2?"], exact="verified")["ids_source"] == {"rendered_verified": 1}


# P11, P12


def test_silence_is_no_fault(toy: Toy, serve: Callable[..., FaultServer]) -> None:
    server = serve(fault=lambda text, nth: Fault(silent=1.2))
    assert toy.capture(server, ["2+2?"], deadline=20)["ok"] == 1
    assert len(server.requests) == 1
    assert "a request may take 20 s" in toy.said()


def test_each_class_of_refusal_costs_what_it_must_and_no_more(toy: Toy, serve: Callable[..., FaultServer]) -> None:
    def fault(text: str, nth: int) -> Fault | None:
        if text == "row 3":
            return Fault(status=400)
        if text == "row 5":
            return Fault(status=503) if nth < 3 else None
        return Fault(status=429, headers={"Retry-After": "1"}) if text == "row 6" and nth == 1 else None

    server = serve(fault=fault)
    counts = toy.capture(server, [f"row {n}" for n in range(1, 7)])
    assert server.questions() == Counter({"row 1": 1, "row 2": 1, "row 3": 1, "row 4": 1, "row 5": 3, "row 6": 2})
    first, second = (request.at for request in server.requests if request.question == "row 6")
    assert second - first >= 1.0
    assert [trace.state for trace in toy.traces()] == ["ok", "ok", "failed", "ok", "ok", "ok"]
    assert toy.traces()[2].error == "HTTP 400: as told"
    assert counts["reasons"] == {"HTTP 400": 1}


def test_a_server_that_begins_to_refuse_the_key_stops_the_run_and_its_questions_are_asked_again(
    toy: Toy, serve: Callable[..., FaultServer]
) -> None:
    questions = [f"{n}?" for n in range(30)]
    server = serve(fault=lambda text, nth: Fault(status=401) if int(text[:-1]) >= 10 else None)
    with pytest.raises(GateStop, match=r"the last 8 requests failed \(HTTP 401"):
        toy.capture(server, questions, concurrency=1)
    assert len(server.requests) == 18
    server.fault = lambda text, nth: None
    assert toy.capture(server, questions)["ok"] == 30


def test_replies_that_came_together_are_all_kept_when_the_gate_stops_the_run(
    toy: Toy, serve: Callable[..., FaultServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []

    def together(drive: serving.Drive, task: Any) -> None:
        held.append(task)
        if len(held) == 12:
            drive.ended.extend(held)
            drive.wake.set()

    server = serve(shape="neither", ids="none")
    settings = toy.settings(server, [f"{n}?" for n in range(12)], template_options=OPENS, exact="any", concurrency=12)
    monkeypatch.setattr(serving.Drive, "_over", together)
    with pytest.raises(GateStop, match="all of the first 8 replies lack reasoning"):
        toy.build(settings)
    with Journal(toy.work()) as journal:
        assert len(journal) == 12
        assert not any(map(journal.final, journal.ids()))  # all show what stopped the run


def test_a_server_that_stops_answering_stops_the_run_and_loses_nothing(
    toy: Toy, serve: Callable[..., FaultServer]
) -> None:
    questions = [f"{n}?" for n in range(30)]
    server = serve(fault=lambda text, nth: Fault(reset=True) if int(text[:-1]) >= 10 else None)
    with pytest.raises(GateStop, match=r"the last 8 requests failed \(connection fault.*run the same command"):
        toy.capture(server, questions, retries=0, concurrency=1)
    server.fault = lambda text, nth: None
    assert toy.capture(server, questions, concurrency=1)["ok"] == 30
    assert all(server.questions()[f"{n}?"] == 1 for n in range(10))


# P14


def test_long_prompts_fail_by_name_and_short_room_clips_the_budget(toy: Toy, serve: Callable[..., FaultServer]) -> None:
    def question(ids: int) -> str:
        return "x" * (ids - len(toy.template.render([{"role": "user", "content": ""}])))

    short = Says(answer="12345", reasoning=None, finish="length")
    server = serve(max_model_len=100, says=lambda text, body: short)
    toy.capture(server, [question(120), question(95), question(100), question(20)], max_tokens=50)
    long, clipped, full, normal = toy.traces()
    assert [len(trace.prompt_ids) for trace in toy.traces()] == [120, 95, 100, 20]
    for trace in (long, full):
        assert trace.state == "failed" and trace.error.startswith("prompt_too_long: ")
    assert [request.body["max_tokens"] for request in server.requests] == [5, 50]
    assert json.loads(clipped.sampling)["max_tokens"] == 5
    assert json.loads(clipped.sampling)["clipped_from"] == 50
    assert "clipped_from" not in json.loads(normal.sampling)
    assert (clipped.state, normal.state) == ("cut_in_answer", "cut_in_answer")


def test_a_server_that_tells_no_limit_is_asked_once_and_believed(toy: Toy, serve: Callable[..., FaultServer]) -> None:
    refusal = Fault(status=400, body=b'{"message": "exceeds the model\'s maximum context length of 100 tokens"}')
    server = serve(fault=lambda text, nth: refusal if len(text) > 100 else None)
    toy.capture(server, ["x" * 120, "2+2?"])
    assert len(server.requests) == 2
    assert [trace.state for trace in toy.traces()] == ["failed", "ok"]
    assert toy.traces()[0].error.startswith("prompt_too_long: exceeds the model's maximum context length")


# P15


def test_a_resumed_run_asks_only_for_what_is_missing_whatever_the_order(
    toy: Toy, serve: Callable[..., FaultServer]
) -> None:
    hold = {"A": 1, "B": 0}  # replies given before the rest hangs

    def fault(text: str, nth: int) -> Fault | None:
        if text == "D" and nth == 1:
            return Fault(status=503)
        return Fault(hang=True) if nth > hold.get(text, 99) else None

    def says(text: str, body: dict[str, Any]) -> Says:
        return Says(answer="", reasoning=None, ids=[5]) if text == "C" else Says(answer=text)

    server = serve(fault=fault, says=says)
    settings = toy.settings(server, ["A", "A", "B", "C", "D"], retries=0, deadline=60)

    def stop_when_three_are_in_the_journal() -> None:
        server.wait_for(lambda: written(toy) == 3)
        server.wait_for(lambda: len(server.requests) == 5)
        os.kill(os.getpid(), signal.SIGINT)
        server.wait_for(lambda: "stopping" in toy.said())
        os.kill(os.getpid(), signal.SIGINT)

    stopper = threading.Thread(target=stop_when_three_are_in_the_journal)
    stopper.start()
    with pytest.raises(Interrupted, match=r"2 of 5 replies.*run the same command to go on"):
        toy.build(settings)
    stopper.join()
    before = server.questions()
    hold.clear()
    counts = toy.capture(server, ["N", "D", "B", "A", "C", "A"], retries=0)
    again = server.questions() - before
    assert again == Counter({"N": 1, "D": 1, "B": 1, "A": 1})
    rows = Counter((json.loads(trace.messages)[0]["content"], trace.sample) for trace in toy.traces())
    assert rows == Counter([("N", 0), ("D", 0), ("B", 0), ("A", 0), ("A", 1), ("C", 0)])
    states = {json.loads(trace.messages)[0]["content"]: trace.state for trace in toy.traces()}
    assert states == {"N": "ok", "D": "ok", "B": "ok", "A": "ok", "C": "rejected"}
    assert counts["questions"] == 5 and counts["traces"] == 6


def test_what_a_passing_fault_ended_is_asked_once_more_at_the_end_and_only_then_failed(
    toy: Toy, serve: Callable[..., FaultServer]
) -> None:
    bad = {"ill": 9, "weak": 1}
    server = serve(says=numbered, fault=lambda text, nth: Fault(status=503) if nth <= bad.get(text, 0) else None)
    counts = toy.capture(server, ["ill", two_turns(), "weak", "well"], retries=0, concurrency=1)
    assert server.questions() == Counter({"ill": 2, "weak": 2, "Q1": 1, "Q2": 1, "well": 1})
    assert [request.question for request in server.requests[-2:]] == ["ill", "weak"]
    assert (counts["ok"], counts["failed"], counts["reasons"]) == (4, 1, {"HTTP 503": 1})
    assert json.loads((toy.work() / "progress.json").read_text()) == {"done": 5, "total": 5, "ok": 4, "failed": 1}
    assert "asking once more for 2 replies that passing faults ended" in toy.said()


def test_replies_to_questions_that_were_removed_are_kept_beside_the_others_and_come_back_with_their_question(
    toy: Toy, serve: Callable[..., FaultServer]
) -> None:
    server = serve()
    toy.capture(server, ["A", "B", "gone"])
    published = toy.work().rename(toy.folder / "run" / "traces")
    counts = toy.build(toy.settings(server, ["B", "A", "N"]), replaces=published)
    assert (counts["traces"], counts["no_longer_asked"]) == (3, 1)
    shutil.rmtree(published)
    toy.work().rename(published)
    assert [question_of(trace) for trace in read_traces(published, ALL)] == ["B", "A", "N"]
    assert [question_of(trace) for trace in read_traces(published / NO_LONGER_ASKED, ALL)] == ["gone"]
    counts = toy.build(toy.settings(server, ["gone", "A"]), replaces=published)
    assert (counts["traces"], counts["no_longer_asked"]) == (2, 2)
    assert server.questions() == Counter({"A": 1, "B": 1, "gone": 1, "N": 1})


def test_a_record_found_damaged_while_sealing_is_asked_again(toy: Toy, serve: Callable[..., FaultServer]) -> None:
    # P34: right size, one byte flipped, after the journal was opened
    server = serve()
    settings = toy.settings(server, ["A", "B", "C"])
    killed_before_sealing(toy, settings)
    real = engine.seal

    def flipped(journal: Journal, *given: Any) -> Any:
        path = toy.work() / JOURNAL / "000000.log"
        raw = bytearray(path.read_bytes())
        raw[raw.index(b'"B"')] ^= 1
        path.write_bytes(raw)
        return real(journal, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "seal", lambda *given: patch.undo() or flipped(*given))
        assert toy.build(settings)["ok"] == 3
    assert server.questions() == Counter({"A": 1, "B": 2, "C": 1})
    assert [question_of(trace) for trace in toy.traces()] == ["A", "B", "C"]
    assert re.search(r"000000.log: row \d damaged; 1 questions are asked again", toy.said())


def test_a_full_disk_pauses_the_run_which_goes_on_when_there_is_room(
    toy: Toy, serve: Callable[..., FaultServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    full, real = threading.Event(), os.pwrite

    def pwrite(file: int, data: Any, offset: int) -> int:
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, offset)

    def fault(text: str, nth: int) -> Fault | None:
        if text == "5?":
            full.set()
        return None

    def make_room() -> None:
        server.wait_for(lambda: "paused: " in toy.said())
        asked.append(len(server.requests))
        time.sleep(1.5)
        asked.append(len(server.requests))
        full.clear()

    asked: list[int] = []
    monkeypatch.setattr(writing.os, "pwrite", pwrite)
    monkeypatch.setattr(writing, "RETRY_SECONDS", 0.05)
    server = serve(fault=fault)
    room = threading.Thread(target=make_room)
    room.start()
    counts = toy.capture(server, [f"{n}?" for n in range(60)], concurrency=1)
    room.join()
    assert counts["ok"] == 60 and set(server.questions().values()) == {1}
    assert asked[0] == asked[1] < 60
    said = toy.said()
    assert f"paused: {toy.work() / JOURNAL}: no space left on the disk (" in said and "needed for the rest" in said
    assert "the disk takes replies again, going on" in said


def test_a_run_that_is_stopped_while_the_disk_is_full_says_what_was_lost(
    toy: Toy, serve: Callable[..., FaultServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def pwrite(file: int, data: Any, offset: int) -> int:
        if offset > 2000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, offset)

    def stop() -> None:
        server.wait_for(lambda: "paused: " in toy.said())
        os.kill(os.getpid(), signal.SIGTERM)

    server = serve()
    questions = [f"{n}?" for n in range(60)]
    with monkeypatch.context() as patch:
        patch.setattr(writing.os, "pwrite", pwrite)
        stopper = threading.Thread(target=stop)
        stopper.start()
        with pytest.raises(
            Interrupted, match=r"(\d+) replies could not be written .*No space left.*asked again"
        ) as end:
            toy.capture(server, questions, concurrency=1)
        stopper.join()
    lost = int(re.search(r"; (\d+) replies could", str(end.value)).group(1))
    before = server.questions()
    assert toy.capture(server, questions)["ok"] == 60
    again = server.questions() - before
    assert again.total() == 60 - before.total() + lost and 0 < lost < before.total()


def test_a_disk_that_turns_read_only_stops_the_run_with_its_path(
    toy: Toy, serve: Callable[..., FaultServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(file: int, data: Any, offset: int) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    server = serve()
    questions = [f"{n}?" for n in range(200)]
    with monkeypatch.context() as patch:
        patch.setattr(writing.os, "pwrite", pwrite)
        with pytest.raises(UserError, match=r"journal: cannot be written \(Read-only file system\); make it writable"):
            toy.capture(server, questions, concurrency=1)
    assert toy.capture(server, questions)["ok"] == 200


def test_a_disk_that_is_full_when_the_traces_are_sealed_is_waited_for(
    toy: Toy, serve: Callable[..., FaultServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, free = engine.seal, [0, 0, 0, 1 << 30]

    def seal(*given: Any) -> Any:
        if free:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*given)

    server = serve()
    settings = toy.settings(server, ["A", "B"])
    killed_before_sealing(toy, settings)
    monkeypatch.setattr(engine, "seal", seal)
    monkeypatch.setattr(room, "LOOK_SECONDS", 0.01)
    usage = shutil._ntuple_diskusage(1 << 30, 1 << 30, 0)
    monkeypatch.setattr(room.shutil, "disk_usage", lambda folder: usage._replace(free=free.pop(0)))
    assert toy.build(settings)["ok"] == 2
    assert f"paused: {toy.work()}: no space left on the disk (0.0 KiB free, about " in toy.said()
    assert set(server.questions().values()) == {1}


@pytest.mark.parametrize(("limit", "rendered"), [(None, 64), (100_000, 64), (4_500, 200)])
def test_prompts_are_rendered_only_to_be_compared_or_where_they_may_not_fit(
    toy: Toy, serve: Callable[..., FaultServer], monkeypatch: pytest.MonkeyPatch, limit: int | None, rendered: int
) -> None:
    renders: list[str] = []
    real = Template.render

    def render(self: Template, messages: Any, tools: Any = ()) -> list[int]:
        if threading.current_thread() is threading.main_thread():
            renders.append(messages[-1]["content"])
        return real(self, messages, tools)

    monkeypatch.setattr(Template, "render", render)
    server = serve(max_model_len=limit)
    assert toy.capture(server, [f"{n:03}{'?' * 500}" for n in range(200)], concurrency=4)["ok"] == 200
    compared_later = 2 if rendered == 64 else 0  # the 128th reply and the 192nd
    assert len(renders) == len(set(renders)) == rendered + compared_later


def test_a_run_that_cannot_fit_on_the_disk_is_refused_before_the_first_question(
    toy: Toy, serve: Callable[..., FaultServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    monkeypatch.setattr(room.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 10**9, 100))
    with pytest.raises(
        UserError, match=r"journal: 2 replies need 1\.0 KiB at the very least, 0\.1 KiB are free; make room"
    ):
        toy.capture(server, ["A", "B"])
    assert not server.requests


def question_of(trace: Trace) -> str:
    content: str = json.loads(trace.messages)[-1]["content"]
    return content


def test_traces_lie_in_input_order_and_samples_differ_by_seed(toy: Toy, serve: Callable[..., FaultServer]) -> None:
    server = serve(fault=lambda text, nth: Fault(silent=0.2) if text == "first" else None)
    toy.capture(server, ["first", "second"], samples=2, temperature=1.0, seed=10)
    rows = [(json.loads(t.messages)[0]["content"], t.sample, json.loads(t.sampling)["seed"]) for t in toy.traces()]
    assert rows == [("first", 0, 10), ("first", 1, 11), ("second", 0, 10), ("second", 1, 11)]
    assert len({trace.trace_id for trace in toy.traces()}) == 4


def test_a_finished_folder_is_only_counted_again(toy: Toy, serve: Callable[..., FaultServer]) -> None:
    server = serve()
    counts = toy.capture(server, ["2+2?"])
    assert toy.capture(server, ["2+2?"]) == counts
    assert len(server.requests) == 1
    assert [path.suffix for path in toy.work().iterdir() if path.name != "progress.json"] == [".parquet"]


def test_a_capture_that_only_lacks_sealing_needs_no_server(toy: Toy, serve: Callable[..., FaultServer]) -> None:
    server = serve(max_model_len=500)
    settings = toy.settings(server, ["A", "B"], template_options=OPENS)
    killed_before_sealing(toy, settings)
    settings = settings.model_copy(update={"server": ["http://127.0.0.1:1"], "held_out": 0.5})
    assert toy.build(settings)["ok"] == 2
    assert "all 2 replies are there, nothing is asked" in toy.said()
    found = read_metadata(toy.work())
    assert (found["target"], found["held_out"]) == ("toy", "0.5")
    assert json.loads(found["server"])["max_model_len"] == 500
    assert not (toy.work() / engine.TARGET).exists()


def test_questions_that_come_after_sealing_are_asked_and_the_rest_is_kept(
    toy: Toy, serve: Callable[..., FaultServer]
) -> None:
    # Killed between sealing and publishing; then the input grew.
    server = serve()
    toy.capture(server, ["A", "B"])
    assert toy.capture(server, ["N", "B", "A"])["ok"] == 3
    assert server.questions() == Counter({"A": 1, "B": 1, "N": 1})
    assert [json.loads(trace.messages)[0]["content"] for trace in toy.traces()] == ["N", "B", "A"]


def test_traces_of_the_folder_to_be_replaced_are_kept_by_question_and_failures_get_another_chance(
    toy: Toy, serve: Callable[..., FaultServer]
) -> None:
    server = serve(fault=lambda text, nth: Fault(status=400) if text == "ill" and nth == 1 else None)
    toy.capture(server, ["A", "A", "ill", "gone"])
    published = toy.work().rename(toy.folder / "run" / "traces")
    settings = toy.settings(server, ["N", "ill", "A", "A"])
    assert toy.build(settings, replaces=published)["ok"] == 4
    assert server.questions() == Counter({"A": 2, "ill": 2, "gone": 1, "N": 1})
    assert "3 finished traces of" in toy.said() and "going on from 2 of 4 replies" in toy.said()


def test_a_begun_capture_refuses_another_target(toy: Toy, serve: Callable[..., FaultServer]) -> None:
    server = serve(fault=lambda text, nth: Fault(status=503) if text == "B" else None)
    killed_before_sealing(toy, toy.settings(server, ["A", "B"], retries=0))
    with pytest.raises(UserError, match=r"target it was begun with \(target toy\), found other; use another --run"):
        toy.capture(serve(models=("other",)), ["A", "B"])


# P16


def test_line_separators_in_a_reply_survive_journal_and_sealing(toy: Toy, serve: Callable[..., FaultServer]) -> None:
    says = Says(reasoning="a\u2028b\u0085c", answer="d\u2028e")
    toy.capture(serve(says=lambda text, body: says), ["2+2?"], template_options=OPENS)
    (trace,) = toy.traces()
    assert (trace.reasoning, trace.answer) == ("a\u2028b\u0085c", "d\u2028e")


# P18


def test_a_reply_too_short_to_train_on_is_rejected(toy: Toy, serve: Callable[..., FaultServer]) -> None:
    def says(text: str, body: dict[str, Any]) -> Says:
        return Says(reasoning=None, answer="") if text == "silent" else Says()

    toy.capture(serve(says=says), ["silent", "2+2?"])
    rejected, kept = toy.traces()
    assert rejected.state == "rejected" and rejected.error.startswith("too short: ")
    rows = supervised_rows(len(kept.prompt_ids), len(kept.prompt_ids) + len(kept.generated_ids))
    assert 0 < len(rows) < len(kept.prompt_ids) + len(kept.generated_ids)
    assert rows.start == len(kept.prompt_ids) - 1


@pytest.mark.parametrize("tags", ["{%- generation -%}{{ m.content }}{%- endgeneration -%}", "{{ m.content }}"])
def test_what_is_trained_on_follows_from_the_prompts_length_not_from_template_tags(
    toy: Toy, serve: Callable[..., FaultServer], tmp_path: Path, tags: str
) -> None:
    source = (
        "{% for m in messages %}<|user|>" + tags + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    toy.tokenizer = save_toy_tokenizer(tmp_path / "other", source)
    server = serve(says=lambda text, body: Says(reasoning=None, answer="beta"))
    server.template = load_template(toy.tokenizer, {}, False)
    toy.capture(server, ["alpha"])
    (trace,) = toy.traces()
    assert toy.template.decode(trace.prompt_ids) == "<|user|>alpha<|assistant|>"
    assert toy.template.decode(trace.generated_ids) == "beta<|end|>"


# P22 and other turns


def two_turns() -> dict[str, Any]:
    turns = [("user", "Q1"), ("assistant", "recorded"), ("user", "Q2")]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def killed_before_sealing(toy: Toy, settings: CaptureSettings) -> None:
    def killed(*_: object) -> None:
        raise Interrupted("killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "seal", killed)
        with pytest.raises(Interrupted, match="killed"):
            toy.build(settings)


def numbered(text: str, body: dict[str, Any]) -> Says:
    return Says(reasoning="T" + text[1:], answer="A" + text[1:])


def test_each_turn_is_its_own_trace_and_sees_what_the_template_shows_of_earlier_ones(
    toy: Toy, serve: Callable[..., FaultServer]
) -> None:
    toy.capture(serve(says=numbered), [two_turns()], template_options=OPENS)
    first, second = toy.traces()
    assert toy.template.decode(first.generated_ids) == "T1</think>A1<|end|>"
    assert toy.template.decode(second.generated_ids) == "T2</think>A2<|end|>"
    prompt = toy.template.decode(second.prompt_ids)
    assert prompt == "<|user|>Q1<|end|><|assistant|>A1<|end|><|user|>Q2<|end|><|assistant|><think>"
    assert first.question_key == second.question_key and first.trace_id != second.trace_id


@pytest.mark.parametrize("passing", [True, False])
def test_after_a_failed_turn_the_later_ones_fail_with_it_until_it_succeeds(
    toy: Toy, serve: Callable[..., FaultServer], passing: bool
) -> None:
    ill = Fault(status=503 if passing else 400)
    server = serve(says=numbered, fault=lambda text, nth: ill if text == "Q1" else None)
    settings = toy.settings(server, [two_turns(), "Q3"], retries=0)
    killed_before_sealing(toy, settings)
    with Journal(toy.work()) as journal:
        errors = [journal.read(name).error for name in journal.ids()]
    assert sum(error.startswith("earlier turn failed: HTTP") for error in errors) == 1
    server.fault = lambda text, nth: None
    toy.build(settings)
    assert [trace.state for trace in toy.traces()] == (["ok"] * 3 if passing else ["failed", "failed", "ok"])
    assert server.questions() == Counter({"Q1": 3, "Q2": 1, "Q3": 1} if passing else {"Q1": 1, "Q3": 1})


def test_a_conversation_is_taken_up_at_the_turn_where_a_kill_left_it(
    toy: Toy, serve: Callable[..., FaultServer]
) -> None:
    server = serve(says=numbered, fault=lambda text, nth: Fault(status=503) if text == "Q2" and nth <= 2 else None)
    settings = toy.settings(server, [two_turns()], retries=0, template_options=OPENS)
    killed_before_sealing(toy, settings)
    toy.build(settings)
    assert json.loads((toy.work() / "progress.json").read_text()) == {"done": 2, "total": 2, "ok": 2}
    assert server.questions() == Counter({"Q1": 1, "Q2": 3})
    assert "A1<|end|>" in toy.template.decode(toy.traces()[1].prompt_ids)


def test_system_turns_come_before_worked_examples(toy: Toy, serve: Callable[..., FaultServer]) -> None:
    row = {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "Q1"}]}
    preamble = [
        {"role": "system", "content": "all"},
        {"role": "user", "content": "E"},
        {"role": "assistant", "content": "F"},
    ]
    toy.capture(serve(), [row], preamble=preamble)
    assert [turn["content"] for turn in json.loads(toy.traces()[0].messages)] == ["all", "own", "E", "F", "Q1"]


def test_a_conversation_the_template_refuses_fails_alone(
    toy: Toy, serve: Callable[..., FaultServer], tmp_path: Path
) -> None:
    check = "{% if m.content == 'bad' %}{{ raise_exception('no') }}{% endif %}"
    source = "{% for m in messages %}" + check + "{{ m.content }}{% endfor %}"
    toy.tokenizer = save_toy_tokenizer(tmp_path / "strict", source)
    server = serve()
    server.template = load_template(toy.tokenizer, {}, False)
    toy.capture(server, ["bad", "good"])
    assert [trace.state for trace in toy.traces()] == ["failed", "ok"]
    assert toy.traces()[0].error.startswith("template: ")
    assert server.questions() == Counter({"good": 1})


# what a run says when it cannot go on


def test_a_run_without_a_trainable_trace_is_an_error_that_can_be_mended(
    toy: Toy, serve: Callable[..., FaultServer]
) -> None:
    server = serve(fault=lambda text, nth: Fault(status=400))
    with pytest.raises(UserError, match="none of 2 replies can be trained on; 2 of them: HTTP 400"):
        toy.capture(server, ["2+2?", "3+3?"])
    server.fault = lambda text, nth: None
    assert toy.capture(server, ["2+2?", "3+3?"])["ok"] == 2


def test_no_target_is_a_users_error(toy: Toy) -> None:
    with pytest.raises(UserError, match="give --server URL or --local MODEL"):
        toy.capture(None, ["2+2?"])


def test_a_model_that_cannot_be_found_here_asks_for_the_tokenizer(toy: Toy, serve: Callable[..., FaultServer]) -> None:
    with pytest.raises(UserError, match="give the target's tokenizer with --tokenizer DIR"):
        toy.capture(serve(models=("/models/elsewhere",)), ["2+2?"], tokenizer=None)


# in this process


class Local:
    """Plays LocalTarget: batches of two, one reply at a time; `interrupt` before a reply is handed out."""

    name, fingerprint, max_length = "toy", "f00d", 60

    def __init__(self, tokenizer: str, interrupt: Callable[[int], None] = lambda given: None) -> None:
        self.template = load_template(tokenizer, OPENS, False)
        self.interrupt = interrupt
        self.waited = False
        self.given = 0

    def generate(self, jobs: Iterator[Any], stop: Callable[[], bool]) -> Iterator[tuple[str, Reply]]:
        batch: list[Any] = []
        more = True
        while batch or (more and not stop()):
            while more and len(batch) < 2 and not stop():
                job = next(jobs, "end")
                if job is None:
                    self.waited = True
                    break
                more = job != "end"
                batch += [job] if more else []
            if batch:
                self.interrupt(self.given)
                self.given += 1
                key, prompt, sampling = batch.pop(0)
                ids = self.template.encode("T</think>A<|end|>")
                yield key, Reply(prompt_ids=prompt, generated_ids=ids[: sampling.max_tokens])


def test_the_local_target_runs_the_same_capture(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    local = Local(toy.tokenizer)
    monkeypatch.setattr("draftsmith.target.local.load_local", lambda settings, progress: local)
    counts = toy.capture(None, [two_turns(), "x" * 60], local="toy", template_options=OPENS)
    assert [trace.state for trace in toy.traces()] == ["ok", "ok", "failed"]
    assert "A<|end|><|user|>Q2" in local.template.decode(toy.traces()[1].prompt_ids)
    assert counts["reasons"] == {"prompt_too_long": 1}
    assert local.waited
    assert read_metadata(toy.work())["target_fingerprint"] == "f00d"


@pytest.mark.parametrize(("signals", "kept"), [(1, 4), (2, 2)])
def test_the_local_target_drains_at_the_first_signal_and_is_abandoned_at_the_second(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, signals: int, kept: int
) -> None:
    def interrupt(given: int) -> None:
        if given == 2:
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    questions = [f"{n}?" for n in range(6)]
    local = Local(toy.tokenizer, interrupt)
    monkeypatch.setattr("draftsmith.target.local.load_local", lambda settings, progress: local)
    with pytest.raises(Interrupted, match=f"with {kept} of 6 replies"):
        toy.capture(None, questions, local="toy", template_options=OPENS)
    assert signal.getsignal(signal.SIGINT) == handler
    local.interrupt = lambda given: None
    assert toy.capture(None, questions, local="toy", template_options=OPENS)["ok"] == 6
    assert local.given == 6


# signals, in a process of its own

DRIVER = """
import sys
from pathlib import Path
from draftsmith.artifacts import Plan, Stage
from draftsmith.capture.engine import build
from draftsmith.errors import DraftsmithError
from draftsmith.progress import Progress
from draftsmith.recipe import CaptureSettings
run = Path(sys.argv[1])
(run / "traces.partial").mkdir(parents=True, exist_ok=True)
try:
    stage = Stage(run, Plan("traces", {}, {}), run / "traces.partial")
    build(stage, CaptureSettings.model_validate_json(sys.argv[2]), Progress())
except DraftsmithError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def start(toy: Toy, settings: CaptureSettings) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", DRIVER, str(toy.folder / "run"), settings.model_dump_json()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_replies_in_flight_and_the_same_command_goes_on(
    toy: Toy, serve: Callable[..., FaultServer], number: signal.Signals
) -> None:
    slow = {"seconds": 3.0}
    server = serve(fault=lambda text, nth: Fault(silent=slow["seconds"]))
    settings = toy.settings(server, [f"{n}?" for n in range(10)], concurrency=3)
    process = start(toy, settings)
    server.wait_for(lambda: len(server.requests) == 3, 60)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopping: waiting for 3 replies in flight" in output
    assert "capture interrupted with 3 of 10 replies" in output
    assert "Traceback" not in output
    assert len(server.requests) == 3 and server.replied.total() == 3
    slow["seconds"] = 0.0
    assert toy.build(settings)["ok"] == 10
    assert set(server.questions().values()) == {1}
    assert "going on from 3 of 10 replies" in toy.said()


def test_a_killed_process_costs_only_what_was_in_flight(toy: Toy, serve: Callable[..., FaultServer]) -> None:
    stuck = {"from": 5}
    server = serve(fault=lambda text, nth: Fault(hang=True) if int(text[:-1]) >= stuck["from"] else None)
    settings = toy.settings(server, [f"{n}?" for n in range(10)], concurrency=2)
    process = start(toy, settings)
    server.wait_for(lambda: written(toy) == 5, 60)
    process.kill()
    process.wait(60)
    with open(toy.work() / JOURNAL / "000000.log", "ab") as file:  # and the record it was writing
        file.write(MAGIC + b"half of it")
    asked_before = server.questions()
    stuck["from"] = 99
    assert toy.build(settings)["ok"] == 10
    again = server.questions() - asked_before
    assert set(again) == {f"{n}?" for n in range(5, 10)}
    assert "the last record was cut off" in toy.said()
    assert [json.loads(t.messages)[0]["content"] for t in toy.traces()] == [f"{n}?" for n in range(10)]
    assert all(trace.state in TRAINABLE for trace in toy.traces())
