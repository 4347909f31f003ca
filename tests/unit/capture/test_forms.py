"""Forms of conversations through a whole capture: what is asked, what the target is shown, what the trace records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftsmith.artifacts import Plan, Stage
from draftsmith.capture import engine, planning
from draftsmith.progress import Progress
from draftsmith.recipe import CaptureSettings
from draftsmith.target.template import load_template
from draftsmith.trace import Trace, read_traces
from fault_server import FaultServer, Says
from toy_chat import TEMPLATE, save_toy_tokenizer

Serve = Callable[..., FaultServer]
ALL = frozenset({"ok", "cut_in_reasoning", "cut_in_answer", "rejected", "failed"})
PLAIN = Says(reasoning=None, answer="Four")
CLOCK = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]


class Place:
    """A tokenizer, and captures with it."""

    def __init__(self, folder: Path, template: str = TEMPLATE) -> None:
        self.folder = folder
        self.tokenizer = save_toy_tokenizer(folder / "toy", template)
        self.template = load_template(self.tokenizer, {}, False)

    def capture(self, server: FaultServer, rows: list[dict[str, Any]], **settings: Any) -> list[Trace]:
        path = self.folder / "questions.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        values = {"server": [server.url], "questions": str(path), "tokenizer": self.tokenizer, "max_tokens": 100}
        work = self.folder / "traces.partial"
        work.mkdir(exist_ok=True)
        stage = Stage(self.folder, Plan("traces", {}, {}), work, None)
        engine.build(stage, CaptureSettings(**values | {"probe": False} | settings), Progress(quiet=True))
        return list(read_traces(work, ALL))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def serve(place: Place) -> Iterator[Serve]:
    running = []

    def start(says: Callable[[str, dict[str, Any]], Says], **options: Any) -> FaultServer:
        options = {"template": place.template} | options
        running.append(FaultServer(says=says, **options).__enter__())
        return running[-1]

    yield start
    for server in running:
        server.__exit__()


def sampling(trace: Trace) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(trace.sampling)
    return values


# a question's own values


def test_a_questions_own_sampling_is_sent_and_recorded_and_the_rest_is_the_runs(place: Place, serve: Serve) -> None:
    server = serve(lambda text, body: PLAIN)
    rows: list[dict[str, Any]] = [
        {"prompt": "A"},
        {"prompt": "B", "sampling": {"temperature": 0.7, "max_tokens": 40}},
        {"prompt": "C", "top_k": 5},
    ]
    traces = place.capture(server, rows, temperature=1.0, top_p=0.9)
    names = ("temperature", "top_p", "top_k", "max_tokens")
    found = [tuple(sampling(trace)[name] for name in names) for trace in traces]
    assert found == [(1.0, 0.9, 0, 100), (0.7, 0.9, 0, 40), (1.0, 0.9, 5, 100)]
    sent = {request.question: request.body for request in server.requests}
    assert [sent[text]["temperature"] for text in "ABC"] == [1.0, 0.7, 1.0]
    assert (sent["B"]["max_tokens"], sent["C"]["top_k"]) == (40, 5)


def test_the_largest_budget_of_any_question_sets_the_deadline(place: Place) -> None:
    # P11
    path = place.folder / "questions.jsonl"
    path.write_text('{"prompt": "A", "max_tokens": 5000}\n{"prompt": "B"}\n')
    assert planning.Plan(CaptureSettings(questions=str(path), max_tokens=100)).max_tokens == 5000
    assert planning.Plan(CaptureSettings(questions=str(path), max_tokens=9000)).max_tokens == 9000


def test_a_questions_own_seed_wins_and_each_sample_counts_on_from_it(place: Place, serve: Serve) -> None:
    server = serve(lambda text, body: PLAIN)
    traces = place.capture(server, [{"prompt": "A"}, {"prompt": "B", "seed": 500}], samples=2, temperature=1.0, seed=7)
    assert [sampling(trace)["seed"] for trace in traces] == [7, 8, 500, 501]


def test_a_budget_of_a_questions_own_is_clipped_to_the_room_like_any_other(place: Place, serve: Serve) -> None:
    # P14
    server = serve(lambda text, body: replace(PLAIN, finish="length"), max_model_len=60)
    long, short = place.capture(server, [{"prompt": "A", "max_tokens": 500}, {"prompt": "B", "max_tokens": 9}])
    assert sampling(long)["max_tokens"] == 60 - len(long.prompt_ids) and sampling(long)["clipped_from"] == 500
    assert sampling(short)["max_tokens"] == 9 and "clipped_from" not in sampling(short)


@pytest.mark.parametrize("ids", ["vllm", "none"])
def test_template_options_of_a_question_are_exact_in_prompt_request_and_spans(
    place: Place, serve: Serve, ids: str
) -> None:
    # P23: the mode is the question's, and the record says it
    def obeys(text: str, body: dict[str, Any]) -> Says:
        thinks = body.get("chat_template_kwargs", {}).get("enable_thinking", True)
        return Says(reasoning="hm" if thinks else None, answer="Four")

    server = serve(obeys, ids=ids)
    rows: list[dict[str, Any]] = [{"prompt": "A"}, {"prompt": "B", "chat_template_kwargs": {"enable_thinking": False}}]
    on, off = place.capture(server, rows, template_options={"prompt_opens": True})
    assert place.template.decode(on.prompt_ids).endswith("<|assistant|><think>")
    assert place.template.decode(off.prompt_ids).endswith("<|assistant|><think></think>")
    assert (on.reasoning, off.reasoning_span, off.answer) == ("hm", None, "Four")
    assert sampling(on)["template_options"] == {"prompt_opens": True}
    assert sampling(off)["template_options"] == {"prompt_opens": True, "enable_thinking": False}
    assert (sampling(on)["prompt_opened_thinking"], sampling(off)["prompt_opened_thinking"]) == (True, False)
    assert {on.ids_source, off.ids_source} == {"engine" if ids == "vllm" else "rendered_verified"}


# rows that cannot be asked


def test_a_bad_row_is_kept_as_failed_with_its_reason_and_the_others_are_asked(place: Place, serve: Serve) -> None:
    server = serve(lambda text, body: PLAIN)
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    rows: list[dict[str, Any]] = [
        {"prompt": "A"},
        {"messages": [{"role": "user", "content": image}]},
        {"messages": [{"role": "narrator", "content": "B"}]},
        {"prompt": "C"},
        {"prompt": "D", "sampling": {"heat": 1}},
        {"prompt": "E"},
        {"prompt": "F"},
    ]
    traces = place.capture(server, rows)
    assert [trace.state for trace in traces] == ["ok", "failed", "failed", "ok", "failed", "ok", "ok"]
    for trace, line, reason in zip(
        (traces[1], traces[2], traces[4]), (2, 3, 5), ("image_url", "narrator", "heat"), strict=True
    ):
        assert trace.error.startswith("unusable question: ")
        assert f"line {line}: " in trace.error and reason in trace.error
    assert {request.question for request in server.requests} == set("ACEF")
    assert place.capture(server, rows) == traces and len(server.requests) == 4


# system and developer turns


def test_a_developer_turn_goes_to_the_target_as_one(place: Place, serve: Serve) -> None:
    # The toy tokenizer has no mark for the role, but its template writes any role out.
    server = serve(lambda text, body: PLAIN)
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Q"}]
    (trace,) = place.capture(server, [{"messages": messages}])
    assert place.template.decode(trace.prompt_ids).startswith("<|developer|>Be brief.<|end|><|user|>Q")
    assert server.requests[0].body["messages"] == messages


@pytest.mark.parametrize("refuses", [True, False])
def test_a_template_without_developer_turns_fails_such_a_question_by_name(
    tmp_path: Path, serve: Serve, refuses: bool
) -> None:
    raises = "{{ raise_exception('no such role') }}" if refuses else ""
    source = (
        "{% for m in messages %}{% if m.role == 'developer' %}" + raises + "{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    place = Place(tmp_path / "strict", source)
    server = serve(lambda text, body: PLAIN, template=place.template)
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Q"}]
    failed, asked = place.capture(server, [{"messages": messages}, {"prompt": "R"}])
    assert (failed.state, asked.state) == ("failed", "ok")
    assert failed.error.startswith("template: ")
    assert ("no such role" if refuses else "it leaves out the developer turn") in failed.error
    assert [request.question for request in server.requests] == ["R"]


# several turns


@pytest.mark.parametrize("ids", ["vllm", "none"])
def test_each_turn_is_a_trace_and_earlier_thinking_is_shown_as_the_template_shows_it(
    place: Place, serve: Serve, ids: str
) -> None:
    # P22: two turns, both with thinking; the template keeps thinking only after the last user turn
    server = serve(lambda text, body: Says(reasoning="T" + text[1:], answer="A" + text[1:]), ids=ids)
    turns = [("user", "Q1"), ("assistant", "recorded"), ("user", "Q2"), ("assistant", "recorded too")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    first, second = place.capture(server, [row], template_options={"prompt_opens": True})
    assert place.template.decode(first.generated_ids) == "T1</think>A1<|end|>"
    assert place.template.decode(second.generated_ids) == "T2</think>A2<|end|>"
    prompt = place.template.decode(second.prompt_ids)
    assert prompt == "<|user|>Q1<|end|><|assistant|>A1<|end|><|user|>Q2<|end|><|assistant|><think>"
    assert "T1" not in prompt and "recorded" not in prompt


# tools


def tool_row(arguments: Any, question: str = "Q") -> dict[str, Any]:
    called = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "9"},
        {"role": "assistant", "content": "recorded"},
    ]
    return {"messages": messages, "tools": CLOCK}


def calls(name: str, arguments: str) -> Callable[[str, dict[str, Any]], Says]:
    """A target that calls a function, and answers once it has a result."""
    made = {"id": "x1", "type": "function", "function": {"name": name, "arguments": arguments}}

    def says(text: str, body: dict[str, Any]) -> Says:
        if body["messages"][-1]["role"] == "tool" or not text.startswith("Q"):
            return Says(reasoning=None, answer="Nine.")
        return Says(reasoning=None, answer=name + arguments, finish="tool_calls", tool_calls=[made])

    return says


def test_a_tool_call_is_a_trace_and_the_recorded_result_answers_it(place: Place, serve: Serve) -> None:
    # P24
    server = serve(calls("clock", '{"t":2}'))
    first, second = place.capture(server, [tool_row({"t": 1})])
    assert place.template.decode(first.generated_ids) == 'clock{"t":2}<|end|>'
    assert (first.state, first.finish_reason, second.state) == ("ok", "tool_calls", "ok")
    prompt = place.template.decode(second.prompt_ids)
    assert prompt.startswith("<|system|>" + json.dumps(CLOCK))
    assert prompt.endswith('<|user|>Q<|end|><|assistant|>clock{"t": 2}<|end|><|tool|>9<|end|><|assistant|>')
    sent = server.requests[1].body
    assert sent["tools"] == CLOCK
    assert sent["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"t": 2}'
    assert sent["messages"][2] == {"role": "tool", "tool_call_id": "x1", "content": "9"}


def test_arguments_of_any_type_and_form_load_and_render_alike(place: Place, serve: Serve) -> None:
    # P24: a number, the same as JSON text, and a string
    server = serve(calls("clock", "{}"))
    rows: list[dict[str, Any]] = [tool_row({"t": 1}, "Q1"), tool_row('{"t": 1}', "Q2"), tool_row({"t": "1"}, "Q3")]
    traces = place.capture(server, rows)
    assert [trace.state for trace in traces] == ["ok"] * 6
    shown = [place.template.decode(trace.prompt_ids)[-40:] for trace in traces[1::2]]
    assert len(set(shown)) == 1


def test_a_result_that_does_not_fit_ends_the_conversation_and_says_why(place: Place, serve: Serve) -> None:
    server = serve(lambda text, body: PLAIN)
    first, second = place.capture(server, [tool_row({"t": 1})])
    assert (first.state, second.state) == ("ok", "failed")
    assert second.error == ("no fitting tool result: the target called no tool where the recorded results answer clock")
    assert len(server.requests) == 1


def test_a_call_without_ids_cannot_be_rebuilt_and_is_rejected(place: Place, serve: Serve) -> None:
    server = serve(calls("clock", "{}"), ids="none")
    first, second, other = place.capture(server, [tool_row({"t": 1}), {"prompt": "R"}], exact="any")
    assert first.state == "rejected" and first.error.startswith("tool call without ids")
    assert second.error.startswith("earlier turn rejected")
    assert other.state == "ok"
