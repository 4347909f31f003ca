from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.target import endpoints
from draftsmith.target import server as server_module
from draftsmith.target.reply import Sampling
from draftsmith.target.server import NotSentAgain, ServerTarget, deadline_for
from draftsmith.target.template import Template, load_template
from draftsmith.target.wire import ChatFailed, PassingFault, explanation
from fault_server import Fault, FaultServer, Says
from mock_engine import MockConfig, MockEngine
from toy_chat import asking, save_toy_tokenizer

QUESTION = [{"role": "user", "content": "2+2?"}]
ANY = asking(QUESTION, (), Sampling(max_tokens=50), {})


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return load_template(save_toy_tokenizer(tmp_path_factory.mktemp("toy")), {}, False)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(endpoints, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(endpoints, "LOOK_LIMIT", 0.02)
    monkeypatch.setattr(server_module, "WATCH_SECONDS", 0.01)


@pytest.fixture
def serve(template: Template) -> Iterator[Callable[..., FaultServer]]:
    running = []

    def start(**options: Any) -> FaultServer:
        running.append(FaultServer(template=template, **options).__enter__())
        return running[-1]

    yield start
    for server in running:
        server.__exit__()


@asynccontextmanager
async def connected(*servers: FaultServer, **options: Any) -> AsyncIterator[ServerTarget]:
    async with target_of(*(server.url for server in servers), **options) as target:
        yield target


@asynccontextmanager
async def target_of(
    *urls: str, say: Callable[[str], object] = print, wait: float = 0.0, **options: Any
) -> AsyncIterator[ServerTarget]:
    options = {"model": None, "api_key_env": "TOY_KEY", "deadline": 20.0, "retries": 3, **options}
    async with ServerTarget(urls, options.pop("model"), **options) as target:
        await target.connect(wait, say)
        yield target


async def test_ids_and_texts_come_back_as_vllm_gives_them(
    serve: Callable[..., FaultServer], template: Template
) -> None:
    async with connected(serve()) as target:
        reply = await target.chat(asking(QUESTION, (), Sampling(max_tokens=50), {"prompt_opens": True}))
    assert template.decode(reply.prompt_ids) == "<|user|>2+2?<|end|><|assistant|><think>"
    assert template.decode(reply.generated_ids) == "two and two</think>Four<|end|>"
    assert (reply.reasoning_text, reply.answer_text, reply.finish_reason) == ("two and two", "Four", "stop")
    assert reply.ids_source == "engine"
    assert reply.usage["completion_tokens"] == len(reply.generated_ids)
    assert reply.timing["attempts"] == 1


async def test_ids_per_choice_are_read_too(serve: Callable[..., FaultServer], template: Template) -> None:
    async with connected(serve(ids="sglang")) as target:
        reply = await target.chat(asking(QUESTION, (), Sampling(max_tokens=50), {}))
    assert reply.prompt_ids == template.render(QUESTION)
    assert template.decode(reply.generated_ids) == "<think>two and two</think>Four<|end|>"


@pytest.mark.parametrize("shape", ["reasoning", "reasoning_content"])
async def test_the_reasoning_is_found_under_both_names(serve: Callable[..., FaultServer], shape: str) -> None:  # P01
    async with connected(serve(shape=shape)) as target:
        reply = await target.chat(asking(QUESTION, (), Sampling(max_tokens=50), {}))
    assert reply.reasoning_text == "two and two"


async def test_every_sampling_value_and_template_option_is_on_the_top_level(
    serve: Callable[..., FaultServer],
) -> None:  # P05
    server = serve()
    async with connected(server) as target:
        await target.chat(asking(QUESTION, (), Sampling(max_tokens=7), {"enable_thinking": False}))
    body = server.requests[0].body
    sent = {name: body[name] for name in ("temperature", "top_p", "top_k", "seed", "max_tokens")}
    assert sent == {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "seed": 0, "max_tokens": 7}
    neutral = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert neutral.items() <= body.items()
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["return_token_ids"] is True
    assert "extra_body" not in body


async def test_tool_arguments_travel_as_json_text_and_tools_reach_the_server(
    serve: Callable[..., FaultServer],
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"t": 1}}}
    tools = [{"type": "function", "function": {"name": "add"}}]
    messages = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]
    server = serve()
    async with connected(server) as target:
        await target.chat(asking(messages, tools, Sampling(max_tokens=50), {}))
    sent = server.requests[0].body
    assert json.loads(sent["messages"][1]["tool_calls"][0]["function"]["arguments"]) == {"t": 1}
    assert sent["tools"] == tools


async def test_a_long_silence_is_one_request_and_a_kept_reply(serve: Callable[..., FaultServer]) -> None:  # P11
    server = serve(fault=lambda text, nth: Fault(silent=1.2))
    async with connected(server) as target:
        reply = await target.chat(asking(QUESTION, (), Sampling(max_tokens=50), {}))
    assert reply.answer_text == "Four"
    assert len(server.requests) == 1


async def test_a_reply_past_the_deadline_is_not_asked_for_again(serve: Callable[..., FaultServer]) -> None:  # P11
    server = serve(fault=lambda text, nth: Fault(hang=True))
    async with connected(server, deadline=0.2) as target:
        with pytest.raises(ChatFailed, match=r"no reply within the deadline of 0\.2 s") as failure:
            await target.chat(asking(QUESTION, (), Sampling(max_tokens=50), {}))
    assert failure.value.passing
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
async def test_a_final_status_is_sent_once(serve: Callable[..., FaultServer], status: int) -> None:  # P12
    server = serve(fault=lambda text, nth: Fault(status=status))
    async with connected(server) as target:
        with pytest.raises(ChatFailed, match=f"HTTP {status}: as told") as failure:
            await target.chat(asking(QUESTION, (), Sampling(max_tokens=50), {}))
    assert failure.value.passing is (status in (401, 403, 404))  # these say nothing about the question
    assert len(server.requests) == 1


PASSING = {
    "503": Fault(status=503),
    "500": Fault(status=500),
    "408": Fault(status=408),
    "409": Fault(status=409),
    "reset": Fault(reset=True),
    "cut transfer": Fault(cut_transfer=True),
    "cut JSON": Fault(body=b'{"choices": [{"message": {"content": "Fo'),
    "HTML": Fault(body=b"<html>gateway</html>"),
    "no choice": Fault(body=b'{"choices": []}'),
    "other JSON": Fault(body=b'{"ok": true}'),
    "aborted": Fault(body=b'{"choices": [{"message": {"content": ""}, "finish_reason": "abort"}]}'),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING.keys())
async def test_a_passing_fault_is_met_with_another_try(serve: Callable[..., FaultServer], fault: Fault) -> None:  # P12
    server = serve(fault=lambda text, nth: fault if nth < 3 else None)
    async with connected(server) as target:
        reply = await target.chat(asking(QUESTION, (), Sampling(max_tokens=50), {}))
    assert reply.answer_text == "Four"
    assert reply.timing["attempts"] == len(server.requests) == 3


async def test_a_fault_that_does_not_pass_ends_after_the_last_try(serve: Callable[..., FaultServer]) -> None:
    server = serve(fault=lambda text, nth: Fault(status=503))
    async with connected(server, retries=2) as target:
        with pytest.raises(ChatFailed, match="HTTP 503: as told, sent 3 times") as failure:
            await target.chat(asking(QUESTION, (), Sampling(max_tokens=50), {}))
    assert failure.value.passing
    assert len(server.requests) == 3


async def test_retry_after_is_honoured(serve: Callable[..., FaultServer]) -> None:  # P12
    server = serve(fault=lambda text, nth: Fault(status=429, headers={"Retry-After": "1"}) if nth == 1 else None)
    async with connected(server) as target:
        await target.chat(asking(QUESTION, (), Sampling(max_tokens=50), {}))
    first, second = server.requests
    assert second.at - first.at >= 1.0


async def test_a_prompt_that_does_not_fit_is_named_and_final(serve: Callable[..., FaultServer]) -> None:  # P14
    server = serve(max_model_len=10)
    async with connected(server) as target:
        with pytest.raises(ChatFailed, match="prompt_too_long: This model's maximum context length is 10") as failure:
            await target.chat(asking(QUESTION, (), Sampling(max_tokens=50), {}))
    assert not failure.value.passing
    assert len(server.requests) == 1


async def test_draining_ends_the_wait_for_another_try(serve: Callable[..., FaultServer]) -> None:
    server = serve(fault=lambda text, nth: Fault(status=429, headers={"Retry-After": "600"}))
    async with connected(server) as target:
        chat = asyncio.create_task(target.chat(asking(QUESTION, (), Sampling(max_tokens=50), {})))
        await asyncio.to_thread(server.wait_for, lambda: len(server.requests) == 1)
        target.drain()
        with pytest.raises(NotSentAgain):
            await chat


async def test_the_first_break_is_tried_again_at_once(
    serve: Callable[..., FaultServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "BACKOFF_SECONDS", 1000.0)
    server = serve(fault=lambda text, nth: Fault(reset=True) if nth == 1 else None)
    async with connected(server) as target, asyncio.timeout(20):
        assert (await target.chat(ANY)).timing["attempts"] == 2


async def test_a_request_that_broke_goes_to_another_server(serve: Callable[..., FaultServer]) -> None:
    well, ill = serve(), serve(fault=lambda text, nth: Fault(cut_transfer=True))
    async with connected(ill, well) as target:
        assert (await target.chat(ANY)).answer_text == "Four"
    assert (len(ill.requests), len(well.requests)) == (1, 1)


async def test_a_request_for_patience_costs_no_try(serve: Callable[..., FaultServer]) -> None:  # P12
    faults = {1: Fault(status=429), 2: Fault(status=503, headers={"Retry-After": "0.01"})}
    server = serve(fault=lambda text, nth: faults.get(nth))
    async with connected(server, retries=0) as target:
        assert (await target.chat(ANY)).timing["attempts"] == 1
        assert target.refused == 2
    assert len(server.requests) == 3


async def test_a_server_that_asks_for_nothing_but_patience_is_not_silent_for_ever(
    serve: Callable[..., FaultServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "TELL_SECONDS", 0.02)
    monkeypatch.setattr(endpoints, "BACKOFF_LIMIT", 0.01)
    said: list[str] = []
    server = serve(fault=lambda text, nth: Fault(status=429))
    async with target_of(server.url, say=said.append) as target:
        asked = asyncio.create_task(target.chat(ANY))
        await until(lambda: len(said) >= 3)
        target.drain()
        with pytest.raises(NotSentAgain):
            await asked
    assert all("HTTP 429" in line and "nothing but that for" in line for line in said), said


async def test_a_server_that_asks_for_patience_is_left_alone_and_its_request_goes_elsewhere(
    serve: Callable[..., FaultServer],
) -> None:
    well, ill = serve(), serve(fault=lambda text, nth: Fault(status=503, headers={"Retry-After": "600"}))
    async with connected(ill, well) as target, asyncio.timeout(20):
        replies = [await target.chat(ANY) for _ in range(4)]
        assert [load["state"] for load in target.loads()] == ["resting", "ok"]
    assert [reply.answer_text for reply in replies] == ["Four"] * 4
    assert (len(well.requests), len(ill.requests)) == (4, 1)


async def test_each_request_goes_to_the_server_with_the_fewest(serve: Callable[..., FaultServer]) -> None:
    servers = [serve(fault=lambda text, nth: Fault(silent=0.2)) for _ in range(3)]
    async with connected(*servers) as target:
        chats = [asyncio.create_task(target.chat(ANY)) for _ in range(9)]
        await asyncio.to_thread(servers[0].wait_for, lambda: sum(len(s.requests) for s in servers) == 9)
        assert [load["in_flight"] for load in target.loads()] == [3, 3, 3]
        assert target.running == 9
        await asyncio.gather(*chats)
        assert target.running == 0
    assert [len(server.requests) for server in servers] == [3, 3, 3]


async def test_a_content_type_is_no_reason_to_lose_a_reply(serve: Callable[..., FaultServer]) -> None:
    body = b'{"choices": [{"message": {"content": "Four"}, "finish_reason": "stop"}]}'
    async with connected(serve(fault=lambda text, nth: Fault(body=body))) as target:  # application/octet-stream
        assert (await target.chat(ANY)).answer_text == "Four"


async def test_a_connection_that_the_server_closed_while_idle_costs_no_try() -> None:
    with MockEngine(MockConfig(keepalive=0.05)) as engine:
        async with target_of(engine.url) as target:
            for _ in range(3):
                assert (await target.chat(ANY)).timing["attempts"] == 1
                await asyncio.sleep(0.3)
        paths = engine.stats()["paths"]
    assert paths["/v1/chat/completions"] == 3


async def test_a_cancelled_request_leaves_nothing_behind(serve: Callable[..., FaultServer]) -> None:
    server = serve(fault=lambda text, nth: Fault(hang=True))
    async with connected(server) as target:
        chat = asyncio.create_task(target.chat(ANY))
        await asyncio.to_thread(server.wait_for, lambda: len(server.requests) == 1)
        chat.cancel()
        await asyncio.gather(chat, return_exceptions=True)
        assert (target.running, target.waiting) == (0, 0)


# servers that go and come


async def until(condition: Callable[[], object]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition never came true")


async def test_requests_wait_for_a_server_that_is_down_and_lose_neither_a_try_nor_their_deadline(
    serve: Callable[..., FaultServer],
) -> None:
    server = serve()
    said: list[str] = []
    async with target_of(server.url, say=said.append, retries=0, deadline=0.5) as target:
        server.__exit__()
        chats = [asyncio.create_task(target.chat(ANY)) for _ in range(5)]
        await until(lambda: target.waiting == 5)
        await asyncio.sleep(0.7)
        assert target.up == 0
        again = serve(port=server.port)
        replies = await asyncio.gather(*chats)
    assert [reply.answer_text for reply in replies] == ["Four"] * 5
    assert len(again.requests) == 5
    assert "no server is left, so all requests wait until one answers" in said[0]
    assert "answers again after" in said[1]
    assert len(said) == 2


async def test_a_dead_server_is_left_out_while_the_others_go_on_and_comes_back(
    serve: Callable[..., FaultServer],
) -> None:
    one, other = serve(), serve()
    said: list[str] = []
    async with target_of(one.url, other.url, say=said.append, retries=0) as target:
        one.__exit__()
        replies = await asyncio.gather(*(target.chat(ANY) for _ in range(8)))
        assert [load["state"] for load in target.loads()] == ["down", "ok"]
        assert len(other.requests) == 8
        one = serve(port=one.port)
        await until(lambda: target.up == 2)
        replies += await asyncio.gather(*(target.chat(ANY) for _ in range(8)))
    assert [reply.answer_text for reply in replies] == ["Four"] * 16
    assert len(one.requests) > 0
    assert "the others go on" in said[0] and "answers again after" in said[1]


async def test_while_a_server_gives_nothing_but_faults_nothing_is_sent_but_a_look(
    serve: Callable[..., FaultServer],
) -> None:
    server = serve(fault=lambda text, nth: Fault(status=502))
    said: list[str] = []
    async with target_of(server.url, say=said.append, retries=2) as target:
        server.models_status = 502
        chats = [asyncio.create_task(target.chat(ANY)) for _ in range(8)]
        await until(lambda: target.waiting == 8 and target.up == 0)
        sent = len(server.requests)
        await asyncio.sleep(0.3)
        assert len(server.requests) == sent <= 2 * 8
        server.fault, server.models_status = lambda text, nth: None, 200
        replies = await asyncio.gather(*chats)
    assert [reply.answer_text for reply in replies] == ["Four"] * 8
    assert "HTTP 502" in said[0]


async def test_a_server_that_lists_its_models_but_fails_every_request_costs_one_question_at_a_time(
    serve: Callable[..., FaultServer],
) -> None:
    server = serve(fault=lambda text, nth: Fault(status=500))
    async with target_of(server.url, retries=3) as target:
        chats = [asyncio.create_task(target.chat(ANY)) for _ in range(6)]
        await until(lambda: any(chat.done() for chat in chats))
        assert sum(chat.done() for chat in chats) < 6
        server.fault = lambda text, nth: None
        ended = await asyncio.gather(*chats, return_exceptions=True)
    assert any(isinstance(end, ChatFailed) and "HTTP 500: as told, sent 4 times" in end.reason for end in ended)
    assert any(not isinstance(end, BaseException) for end in ended)


async def test_draining_ends_the_wait_for_a_server(serve: Callable[..., FaultServer]) -> None:
    server = serve()
    async with connected(server) as target:
        server.__exit__()
        chat = asyncio.create_task(target.chat(ANY))
        await until(lambda: target.waiting == 1)
        target.drain()
        with pytest.raises(NotSentAgain):
            await chat


async def test_connecting_waits_for_a_server_that_is_still_loading(serve: Callable[..., FaultServer]) -> None:
    server = serve(models_status=503)
    said: list[str] = []

    def say(message: str) -> None:
        said.append(message)
        server.models_status = 200

    async with target_of(server.url, say=say, wait=20) as target:
        assert target.model == "toy"
    assert len(said) == 1
    assert "waiting 19 s at most" in said[0] and "found HTTP 503 (loading)" in said[0]


async def test_waiting_in_vain_says_what_was_found(serve: Callable[..., FaultServer]) -> None:
    said: list[str] = []
    with pytest.raises(UserError, match="the server does not answer .*; start it, or correct --server"):
        async with target_of("http://127.0.0.1:9", say=said.append, wait=0.1):
            pass
    assert "the server does not answer" in said[0]


async def test_one_server_that_is_up_is_enough_to_begin_with(serve: Callable[..., FaultServer]) -> None:
    late, well = serve(), serve()
    said: list[str] = []
    late.__exit__()
    async with target_of(late.url, well.url, say=said.append) as target:
        assert "is left out until it answers: the server does not answer" in said[0]
        await target.chat(ANY)
        late = serve(port=late.port)
        await until(lambda: target.up == 2)
        for _ in range(3):
            await target.chat(ANY)
    assert len(late.requests) > 0


async def test_a_server_that_comes_back_with_another_model_stays_out(serve: Callable[..., FaultServer]) -> None:
    one, other = serve(), serve()
    async with target_of(one.url, other.url) as target:
        one.__exit__()
        await asyncio.gather(*(target.chat(ANY) for _ in range(4)))
        one = serve(port=one.port, models=("another",))
        await until(lambda: "the server offers another" in target.endpoints[0].reason)
        await asyncio.gather(*(target.chat(ANY) for _ in range(4)))
    assert len(one.requests) == 0


async def test_servers_that_serve_different_models_are_refused(serve: Callable[..., FaultServer]) -> None:
    with pytest.raises(UserError, match="expected the model toy, the server offers another"):
        async with connected(serve(), serve(models=("another",))):
            pass


async def test_paths_are_taken_from_the_api_base_or_the_root(serve: Callable[..., FaultServer]) -> None:
    async with connected(serve()) as target:
        assert (await target.get("/models"))[0] == 200
        assert json.loads((await target.get("//version"))[1]) == {"version": "0.32.0"}
        assert (await target.get("/nothing"))[0] == 404
        assert (await target.post("//nothing", b"{}"))[0] == 404
        target.transport.session.headers.clear()
        with pytest.raises(PassingFault, match="no answer within 1e-09 s"):
            await target.post("/chat/completions", b"{}", seconds=1e-9)


async def test_the_queue_is_read_from_metrics_of_the_servers_that_have_them(serve: Callable[..., FaultServer]) -> None:
    with MockEngine(MockConfig(engine="sglang", latency=1.5, slots=1)) as engine:
        async with target_of(engine.url, serve(models=("mock",)).url) as target:
            target.endpoints[1].reason = "not part of this"
            chats = [asyncio.create_task(target.chat(ANY)) for _ in range(3)]
            await until(lambda: target.running == 3)
            target.endpoints[0].queue = await target._queue(target.endpoints[0])
            assert target.queue is not None and target.queue[:2] == (1, 2)
            assert target.loads()[0]["queue"] == 2
            assert await target._queue(target.endpoints[1]) is None
            for chat in chats:
                chat.cancel()
            await asyncio.gather(*chats, return_exceptions=True)


def test_a_deadline_grows_with_the_reply_and_leaves_time_to_queue() -> None:  # P11
    assert deadline_for(1) > 600
    assert deadline_for(8192) > 40 * 60


# connecting


async def test_connecting_tells_model_limit_engine_and_version(serve: Callable[..., FaultServer]) -> None:
    server = serve(max_model_len=2048)
    for url in (server.url, server.url + "/v1", server.url + "/v1/", server.url + "/v1/chat/completions"):
        async with ServerTarget([url], None, api_key_env="TOY_KEY", deadline=9, retries=0) as target:
            info = await target.connect()
            assert (info.model, info.max_model_len, info.engine, info.version) == ("toy", 2048, "vllm", "0.32.0")


async def test_credentials_in_the_url_are_never_shown(serve: Callable[..., FaultServer]) -> None:
    url = serve().url.replace("http://", "http://me:secret@")
    async with ServerTarget([url], None, api_key_env="TOY_KEY", deadline=9, retries=0) as target:
        assert "secret" not in repr(await target.connect())
    async with ServerTarget(["http://me:secret@127.0.0.1:9"], None, api_key_env="K", deadline=9, retries=0) as target:
        with pytest.raises(UserError, match="does not answer") as error:
            await target.connect()
        assert "secret" not in str(error.value)


async def test_the_key_of_the_named_variable_is_sent(
    serve: Callable[..., FaultServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(api_key="sesame")
    with pytest.raises(UserError, match=r"HTTP 401.*environment variable TOY_KEY, it is not set"):
        async with connected(server):
            pass
    monkeypatch.setenv("TOY_KEY", "wrong")
    with pytest.raises(UserError, match="its key was refused"):
        async with connected(server):
            pass
    monkeypatch.setenv("TOY_KEY", "sesame\n")  # as `cat file` gives it
    async with connected(server) as target:
        await target.chat(asking(QUESTION, (), Sampling(max_tokens=50), {}))
    assert server.requests[0].headers["Authorization"] == "Bearer sesame"


CONNECT_FAULTS = {
    "wrong path": ({"prefix": "/elsewhere"}, None, "expected an OpenAI-compatible API, found none at"),
    "wrong name": ({"models": ("a", "b")}, "c", "the model c, the server offers a, b; name one with --model"),
    "no name": ({"models": ("a", "b")}, None, "one model of several, the server offers a, b"),
    "loading": ({"models_status": 503}, None, r"found HTTP 503 \(loading\); wait until the server is ready"),
}


@pytest.mark.parametrize(("options", "model", "message"), CONNECT_FAULTS.values(), ids=CONNECT_FAULTS.keys())
async def test_connecting_names_what_is_wrong(
    serve: Callable[..., FaultServer], options: dict[str, Any], model: str | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        async with connected(serve(**options), model=model):
            pass


@pytest.mark.parametrize("url", ["http://", "http://no such host", "http://127.0.0.1:1", "http://[", "http://h:port"])
async def test_a_server_that_is_not_there_is_a_users_error(url: str) -> None:
    with pytest.raises(UserError, match="expected a URL such as|does not answer"):
        async with ServerTarget([url], None, api_key_env="TOY_KEY", deadline=9, retries=0) as target:
            await target.connect()


def test_retry_after_may_be_a_date_or_nonsense() -> None:
    from draftsmith.target.wire import _retry_after

    later = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 3600))
    assert 3500 < _retry_after(later) <= 3600
    assert _retry_after("soon") == _retry_after("-3") == 0.0


@pytest.mark.parametrize(
    "body",
    [b'{"error": {"message": "bad"}}', b'{"message": "bad", "object": "error"}', b'{"detail": "bad"}', b"bad\n"],
)
def test_the_explanation_is_found_in_every_engines_error_body(body: bytes) -> None:
    assert explanation(body) == "bad"


def test_backoff_doubles_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "BACKOFF_SECONDS", 0.5)
    for attempt, most in [(1, 1.0), (2, 2.0), (5, 16.0), (30, 60.0)]:
        assert all(most / 2 <= endpoints.backoff(attempt) <= most for _ in range(20))


async def test_says_can_be_cut(serve: Callable[..., FaultServer]) -> None:
    cut = Says(answer="", reasoning="first add 3 and", finish="length", closed=False)
    async with connected(serve(says=lambda text, body: cut)) as target:
        reply = await target.chat(asking(QUESTION, (), Sampling(max_tokens=50), {}))
    assert (reply.finish_reason, reply.answer_text) == ("length", None)


def test_the_toy_tokenizer_gives_text_back_unchanged(template: Template, tmp_path: Path) -> None:
    text = "<think>two and\ntwo</think>Four<|end|>"
    assert template.decode(template.encode(text)) == text
