from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftsmith.__main__ import main
from draftsmith.artifacts import Plan, Stage
from draftsmith.capture import engine
from draftsmith.capture.probing import SAID, probe_command, screen, short
from draftsmith.errors import GateStop, UserError
from draftsmith.progress import Progress
from draftsmith.recipe import CaptureSettings
from draftsmith.target import probe
from draftsmith.target.findings import MARKS, Finding
from draftsmith.target.probe import QUESTIONS, Verdict
from draftsmith.target.template import Template, load_template
from draftsmith.trace import Trace, read_traces
from fault_server import Fault, FaultServer, Says
from mock_engine import MockEngine
from mock_replies import MockConfig
from toy_chat import TEMPLATE, save_toy_tokenizer

OPENS = {"prompt_opens": True}
ALL = frozenset({"ok", "cut_in_reasoning", "cut_in_answer", "rejected", "failed"})
MOST_REQUESTS = 12
REASONING, ANSWER = "twelve and seven more", "Nineteen"
Serve = Callable[..., FaultServer]


def says(text: str, body: dict[str, Any]) -> Says:
    """A target that thinks unless the prompt says not to, honours sampling values, and keeps to its budget."""
    thinks = body.get("chat_template_kwargs", {}).get("enable_thinking", True)
    sampled = body["temperature"] and body["top_k"] != 1
    draw = f"{body['seed']} " if sampled else ""
    reasoning, answer, room = draw + REASONING, draw + ANSWER, body["max_tokens"]
    if not thinks:
        return Says(answer=answer[:room], reasoning=None, finish="stop" if room > len(answer) else "length")
    if room <= len(reasoning):
        return Says(answer="", reasoning=reasoning[:room], finish="length", closed=False)
    return Says(answer=answer, reasoning=reasoning)


def thoughtless(text: str, body: dict[str, Any]) -> Says:
    """As `says`, of a target that never thinks."""
    return says(text, {**body, "chat_template_kwargs": {"enable_thinking": False}})


class Deaf(FaultServer):
    """Renders its prompts without the options that it is sent."""

    def _template(self, body: dict[str, Any]) -> Template:
        assert self.template is not None
        return self.template


class Renamed(FaultServer):
    """Has a new name for its reasoning field."""

    def _completion(self, body: dict[str, Any], prompt: list[int], says: Says) -> dict[str, Any]:
        completion = super()._completion(body, prompt, says)
        message = completion["choices"][0]["message"]
        message["thoughts"] = message.pop("reasoning")
        return completion


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_toy_tokenizer(tmp_path_factory.mktemp("toy"))


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "WAIT_SECONDS", 0.01)


@pytest.fixture
def serve(tokenizer: str) -> Iterator[Serve]:
    running = []

    def start(kind: type[FaultServer] = FaultServer, **options: Any) -> FaultServer:
        values = {"template": load_template(tokenizer, {}, False), "says": says, "max_model_len": 4096} | options
        running.append(kind(**values).__enter__())
        return running[-1]

    yield start
    for server in running:
        server.__exit__()


@pytest.fixture
def look(tokenizer: str) -> Callable[..., Verdict]:
    def look(*servers: FaultServer | MockEngine, **settings: Any) -> Verdict:
        values = {"server": [server.url for server in servers], "tokenizer": tokenizer} | settings
        return probe_command(CaptureSettings(**values), Progress(quiet=True))

    return look


def about(verdict: Verdict, what: str) -> list[Finding]:
    return [finding for finding in verdict.findings if finding.about == what]


def levels(verdict: Verdict) -> set[str]:
    return {finding.level for finding in verdict.findings}


def test_a_healthy_server_is_called_fit_after_a_few_requests(serve: Serve, look: Callable[..., Verdict]) -> None:
    server = serve()
    verdict = look(server, template_options=OPENS)
    assert levels(verdict) == {"ok"}, verdict.findings
    assert (verdict.engine, verdict.version, verdict.max_model_len) == ("vllm", "0.32.0", 4096)
    assert (verdict.dialect.name, verdict.ids_source) == ("chat", "engine")
    assert len(server.requests) <= MOST_REQUESTS
    assert set(server.questions()) == QUESTIONS
    assert max(request.body["max_tokens"] for request in server.requests) <= 512
    assert "fit for a capture: " in screen(verdict)
    assert "opened by the prompt, </think> is one id" in about(verdict, "reasoning")[0].text


@pytest.mark.parametrize("shape", ["reasoning", "reasoning_content", "tags"])
def test_wherever_reasoning_comes_it_is_seen(
    serve: Serve, look: Callable[..., Verdict], shape: str
) -> None:  # P01 a, b, c
    server = serve(shape=shape, ids="none")
    verdict = look(server, template_options=OPENS)
    (found,) = about(verdict, "reasoning")
    place = "inside content" if shape == "tags" else f"in the field {shape};"
    assert (found.level, place in found.text) == ("ok", True), found
    assert verdict.ids_source == "rendered_verified" and not verdict.fatal
    assert len(server.requests) <= MOST_REQUESTS


def captured(tmp_path: Path, tokenizer: str, server: FaultServer | MockEngine, **changes: Any) -> list[Trace]:
    """The traces of a capture of three questions; what it said lies in `tmp_path`/said."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": f"{n}+{n}?"}) + "\n" for n in range(3)))
    work = tmp_path / "run" / "traces.partial"
    work.mkdir(parents=True, exist_ok=True)
    values = {"server": [server.url], "questions": str(questions), "tokenizer": tokenizer, "max_tokens": 100}
    console = Console(record=True, width=1000, file=io.StringIO())
    try:
        stage = Stage(tmp_path / "run", Plan("traces", {}, {}), work)
        engine.build(stage, CaptureSettings(**values | changes), Progress(console=console))
    finally:
        (tmp_path / "said").write_text(console.export_text())
    return list(read_traces(work, ALL))


def test_lost_reasoning_stops_a_capture_before_its_first_question(
    serve: Serve, tmp_path: Path, tokenizer: str
) -> None:  # P01 d
    server = serve(shape="neither", ids="none")
    with pytest.raises(GateStop, match="no reasoning seen although it is opened by the prompt") as stop:
        captured(tmp_path, tokenizer, server, template_options=OPENS)
    assert stop.value.exit_code == 3
    assert set(server.questions()) == QUESTIONS


def test_a_reasoning_field_of_a_new_name_is_named(serve: Serve, look: Callable[..., Verdict]) -> None:  # P01
    found = look(serve(Renamed, ids="none"), template_options=OPENS).fatal
    assert "(the field thoughts holds text that nobody reads)" in found[0].text


def test_reasoning_that_was_asked_for_and_never_comes_is_fatal(serve: Serve, look: Callable[..., Verdict]) -> None:
    verdict = look(serve(says=thoughtless), template_options={"enable_thinking": True})
    assert [finding.about for finding in verdict.fatal] == ["reasoning"]
    assert "no reasoning seen although it was asked for" in verdict.fatal[0].text


def test_reasoning_that_nobody_asked_for_may_be_absent(serve: Serve, look: Callable[..., Verdict]) -> None:
    verdict = look(serve(says=thoughtless))
    assert [found.level for found in about(verdict, "reasoning")] == ["warning"]
    assert not verdict.fatal


def test_a_target_without_a_thinking_mode_is_healthy(
    serve: Serve, look: Callable[..., Verdict], tmp_path: Path
) -> None:
    plain = "{%- for m in messages -%}<|user|>{{ m.content }}<|end|>{%- endfor -%}<|assistant|>"
    folder = save_toy_tokenizer(tmp_path / "plain", plain)
    server = serve(says=thoughtless, template=load_template(folder, {}, False))
    verdict = look(server, tokenizer=folder, thinking="none")
    assert [found.level for found in about(verdict, "reasoning")] == ["note"]
    assert levels(verdict) == {"ok", "note"}


def test_reasoning_between_other_delimiters_names_them_and_the_flags(
    serve: Serve, look: Callable[..., Verdict]
) -> None:
    opening, closing = MARKS[1]
    server = serve(says=lambda text, body: Says(answer=f"{opening}hm{closing}{ANSWER}", reasoning=None))
    verdict = look(server, template_options={"enable_thinking": True})
    (found,) = verdict.fatal
    assert f"--think-open '{opening}' --think-close '{closing}'" in found.text


def test_a_server_that_ignores_template_options_is_fatal_by_ids(serve: Serve, look: Callable[..., Verdict]) -> None:
    # P05
    verdict = look(serve(Deaf), template_options=OPENS)
    assert "prompt_opens=True has no effect" in about(verdict, "template options")[0].text
    assert verdict.fatal


def test_a_server_that_ignores_template_options_is_fatal_by_counts(serve: Serve, look: Callable[..., Verdict]) -> None:
    # P05
    verdict = look(serve(Deaf, ids="none"), template_options=OPENS)
    assert "prompt_opens=True has no effect" in about(verdict, "template options")[0].text


def test_a_server_that_ignores_template_options_nobody_gave_is_only_warned_of(
    serve: Serve, look: Callable[..., Verdict]
) -> None:
    (found,) = about(look(serve(Deaf)), "template options")
    assert (found.level, "ignores them" in found.text) == ("warning", True)


def test_an_option_that_the_template_never_reads_is_fatal_and_the_right_one_is_named(
    serve: Serve, look: Callable[..., Verdict]
) -> None:  # P05
    found = look(serve(), template_options={"thinking": False}).fatal[0]
    assert "option thinking has no effect" in found.text and "it reads enable_thinking" in found.text
    dashed = look(serve(), template_options={"prompt-opens": True}).fatal[0]
    assert "it reads prompt_opens" in dashed.text


def test_thinking_switched_off_that_comes_all_the_same_is_fatal(serve: Serve, look: Callable[..., Verdict]) -> None:
    # P05: neither ids nor counts tell, the reply does
    server = serve(ids="none", usage=False, says=lambda text, body: Says())
    verdict = look(server, template_options={"enable_thinking": False}, exact="any")
    assert any("hold reasoning although the template options switch it off" in found.text for found in verdict.fatal)


def test_thinking_switched_off_with_none_coming_is_well(serve: Serve, look: Callable[..., Verdict]) -> None:  # P23
    verdict = look(serve(), template_options={"enable_thinking": False})
    assert levels(verdict) == {"ok"}, verdict.findings


@pytest.mark.parametrize(("wanted", "level"), [(0.7, "fatal"), (0.0, "warning")])
def test_a_temperature_without_effect_is_fatal_for_who_gave_one(
    serve: Serve, look: Callable[..., Verdict], wanted: float, level: str
) -> None:  # P05
    server = serve(says=lambda text, body: says(text, {**body, "temperature": 0}))
    found = about(look(server, template_options=OPENS, temperature=wanted), "sampling")
    assert level in {finding.level for finding in found if "temperature has no effect" in finding.text}


def test_a_seed_without_effect_is_named(serve: Serve, look: Callable[..., Verdict]) -> None:
    server = serve(says=lambda text, body: says(text, {**body, "seed": 1}))
    found = about(look(server, template_options=OPENS), "sampling")
    assert any(finding.level == "warning" and "seed has no effect" in finding.text for finding in found)


@pytest.mark.parametrize(("wanted", "level"), [(20, "fatal"), (0, "warning")])
def test_a_top_k_without_effect_is_fatal_for_who_gave_one(
    serve: Serve, look: Callable[..., Verdict], wanted: int, level: str
) -> None:  # P05
    server = serve(says=lambda text, body: says(text, {**body, "top_k": -1}))
    found = about(look(server, template_options=OPENS, top_k=wanted), "sampling")
    assert level in {finding.level for finding in found if "top_k has no effect" in finding.text}


def test_a_budget_without_effect_is_named(serve: Serve, look: Callable[..., Verdict]) -> None:
    server = serve(says=lambda text, body: says(text, {**body, "max_tokens": 999}))
    found = about(look(server, template_options=OPENS), "sampling")
    assert any("max_tokens has no effect: asked for 8 tokens at most" in finding.text for finding in found)


def test_another_tokenizer_than_the_servers_is_fatal_and_shown_at_its_first_differing_token(
    serve: Serve, look: Callable[..., Verdict], make_template: Callable[..., Template]
) -> None:
    (found,) = [f for f in look(serve(template=make_template()), thinking="none").fatal if f.about == "prompt"]
    assert "another tokenizer than the server's, at token 0" in found.text


@pytest.mark.parametrize("ids", ["vllm", "none"])
def test_another_template_than_the_servers_is_warned_of(
    serve: Serve, look: Callable[..., Verdict], tmp_path: Path, ids: str
) -> None:
    folder = save_toy_tokenizer(tmp_path / "other", "<|system|>Be brief.<|end|>" + TEMPLATE)
    server = serve(template=load_template(folder, {}, False), ids=ids)
    (found,) = about(look(server, exact="any"), "prompt")
    where = "at token 0" if ids == "vllm" else "the server counts"
    assert (found.level, where in found.text) == ("warning", True), found


def test_ids_that_were_demanded_and_never_come_are_fatal(serve: Serve, look: Callable[..., Verdict]) -> None:
    server = serve(ids="none")
    assert "ids not exact" in look(server, template_options=OPENS, exact="engine").fatal[0].text
    assert not look(server, template_options=OPENS, exact="verified").fatal
    silent = serve(ids="none", usage=False)
    assert "ids not exact" in look(silent, template_options=OPENS, exact="verified").fatal[0].text
    assert not look(silent, template_options=OPENS, exact="any").fatal


@pytest.mark.parametrize("place", ["content", "a reasoning field"])
def test_a_reply_cut_inside_its_thinking_is_recognised_wherever_its_text_comes(
    serve: Serve, look: Callable[..., Verdict], place: str
) -> None:  # P03
    server = serve(ids="none", shape="cut_in_content" if place == "content" else "reasoning")
    (found,) = about(look(server, template_options=OPENS), "cut replies")
    assert (found.level, f"comes in {place}" in found.text) == ("ok", True)


def test_further_servers_must_answer_as_the_first_does(
    serve: Serve, look: Callable[..., Verdict], tmp_path: Path
) -> None:
    first, alike = serve(), serve()
    assert [found.level for found in about(look(first, alike, template_options=OPENS), "servers")] == ["ok"]
    assert len(alike.requests) == 2
    folder = save_toy_tokenizer(tmp_path / "other", "<|system|>Be brief.<|end|>" + TEMPLATE)
    others = {
        "gives no token ids": serve(ids="none"),
        "another tokenizer or template": serve(template=load_template(folder, {}, False)),
        "starts another greedy reply": serve(says=lambda text, body: Says(reasoning="quite something else")),
    }
    for reason, other in others.items():
        verdict = look(first, other, template_options=OPENS)
        assert reason in about(verdict, "servers")[0].text and verdict.fatal
    late = serve(says=lambda text, body: replace(says(text, body), reasoning="twelve AND"))
    assert [found.level for found in about(look(first, late, template_options=OPENS), "servers")] == ["warning"]


@pytest.mark.parametrize(
    ("config", "dialect", "source"),
    [
        (MockConfig(engine="vllm"), "chat", "engine"),
        (MockConfig(engine="sglang"), "chat", "engine"),
        (MockConfig(engine="sglang", ids=False), "generate", "engine"),
        (MockConfig(engine="llamacpp"), "llamacpp", "engine"),
        (MockConfig(engine="vllm", ids=False), "chat, ids in logprobs", "rendered_verified"),
        (MockConfig(engine="trtllm"), "chat, tokens in logprobs", "rendered_verified"),
    ],
)
def test_every_engine_is_asked_in_the_way_that_gives_the_most(
    tokenizer: str, tmp_path: Path, config: MockConfig, dialect: str, source: str
) -> None:
    with MockEngine(replace(config, tokenizer=tokenizer, thinking=True, max_model_len=4096)) as mock:
        traces = captured(tmp_path, tokenizer, mock, template_options=OPENS)
        paths = mock.stats()["paths"]
        generations = paths.get("/v1/chat/completions", 0) + paths.get("/generate", 0)
        assert generations <= MOST_REQUESTS + len(traces)
    assert {trace.ids_source for trace in traces} == {source}
    assert {trace.state for trace in traces} == {"ok"}
    said = (tmp_path / "said").read_text()
    assert f"by {dialect};" in said
    assert sum(line.startswith("probe: ") for line in said.splitlines()) <= SAID


def test_faults_that_pass_do_not_fail_the_probe(serve: Serve, look: Callable[..., Verdict]) -> None:
    server = serve(fault=lambda text, nth: Fault(503) if nth == 1 else None)
    assert not look(server, template_options=OPENS).fatal


def test_a_server_that_answers_nothing_cannot_be_probed(
    serve: Serve, look: Callable[..., Verdict], tmp_path: Path, tokenizer: str
) -> None:
    server = serve(fault=lambda text, nth: Fault(400))
    with pytest.raises(UserError, match="expected an answer to a plain question, found HTTP 400: as told"):
        look(server)
    with pytest.raises(GateStop, match="answers no plain question"):
        captured(tmp_path, tokenizer, server)


def test_a_capture_that_skips_the_probe_asks_only_its_questions(serve: Serve, tmp_path: Path, tokenizer: str) -> None:
    server = serve()
    captured(tmp_path, tokenizer, server, template_options=OPENS, probe=False)
    assert not QUESTIONS & set(server.questions())


def test_the_worst_findings_are_said_first_and_in_few_lines(serve: Serve, look: Callable[..., Verdict]) -> None:
    verdict = look(serve(Deaf, ids="none", shape="neither"), template_options=OPENS, temperature=0.5)
    lines = short(verdict)
    assert len(lines) <= SAID
    assert lines[1].startswith("probe: fatal: ")


def test_the_commands_exit_code_says_fit_unfit_or_unreachable(
    serve: Serve, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve()
    words = ["probe", server.url, "--tokenizer", tokenizer, "--template-options.prompt_opens", "true"]
    assert main(words) == 0
    assert "fit for a capture: 7 ok" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fatal"] is False
    assert main(["probe", serve(Deaf).url, *words[2:]]) == 3
    said = capsys.readouterr()
    assert "not fit for a capture: " in said.out and said.err.count("\n") == 1
    assert main(["probe", "http://127.0.0.1:9", *words[2:]]) == 2
