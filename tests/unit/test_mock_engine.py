"""The mock engine keeps its word: other tests compute from it what must have been captured."""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from draftsmith.target.template import load_template
from mock_engine import BROKEN, FAULTS, HTTP, MockConfig, MockEngine, fault_of, reply_ids
from toy_chat import save_toy_tokenizer


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_toy_tokenizer(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def engine(toy: str) -> Iterator[MockEngine]:
    with MockEngine(MockConfig(tokenizer=toy)) as started:
        yield started


def post(engine: MockEngine, path: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(engine.url + path, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=10) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def chat(engine: MockEngine, question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return post(engine, "/v1/chat/completions", messages=messages, max_tokens=200, return_token_ids=True, **more)


def test_vllm_gives_the_ids_that_the_pure_function_computes(engine: MockEngine, toy: str) -> None:
    engine.change(engine="vllm", length=(20, 60), thinking=True, faults={})
    template = load_template(toy, {}, trust_remote_code=False)

    reply = chat(engine, "what?")

    ids = reply["choices"][0]["token_ids"]
    message = reply["choices"][0]["message"]
    assert ids == reply_ids("what?", engine.config)
    assert reply["prompt_token_ids"] == template.render([{"role": "user", "content": "what?"}])
    assert template.decode(ids) == f"<think>{message['reasoning']}</think>{message['content']}<|end|>"
    assert reply["usage"]["completion_tokens"] == len(ids)


def test_a_reply_is_cut_at_max_tokens_and_starts_in_thinking_where_the_prompt_opened_it(engine: MockEngine) -> None:
    engine.change(engine="vllm", length=50, thinking=True, faults={})
    messages = [{"role": "user", "content": "and?"}]

    reply = post(
        engine,
        "/v1/chat/completions",
        messages=messages,
        max_tokens=10,
        return_token_ids=True,
        chat_template_kwargs={"prompt_opens": True},
    )

    choice = reply["choices"][0]
    assert choice["token_ids"] == reply_ids("and?", engine.config, opened=True, max_tokens=10)
    assert len(choice["token_ids"]) == 10
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None


def test_sglang_gives_ids_in_the_choice_or_for_ids_alone(engine: MockEngine) -> None:
    engine.change(engine="sglang", length=30, thinking=False, faults={})
    choice = chat(engine, "so?")["choices"][0]

    bare = post(engine, "/generate", input_ids=choice["prompt_token_ids"], sampling_params={"max_new_tokens": 200})

    assert choice["response_token_ids"] == reply_ids("so?", engine.config)
    assert len(bare["output_ids"]) == bare["meta_info"]["completion_tokens"] == 30


def test_llama_cpp_gives_ids_as_verbose_and_after_apply_template(engine: MockEngine) -> None:
    engine.change(engine="llamacpp", length=30, thinking=False, faults={})
    messages = [{"role": "user", "content": "llama?"}]
    verbose = chat(engine, "llama?", verbose=True, return_tokens=True)["__verbose"]

    prompt = post(engine, "/apply-template", messages=messages)["prompt"]
    tokens = post(engine, "/tokenize", content=prompt, add_special=True, parse_special=True)["tokens"]
    native = post(engine, "/completion", prompt=tokens, n_predict=200, return_tokens=True)

    assert verbose["tokens"] == native["tokens"] == reply_ids("llama?", engine.config)
    assert verbose["prompt"] == prompt
    assert verbose["tokens_evaluated"] == native["tokens_evaluated"] == len(tokens)


def test_trtllm_gives_no_ids(engine: MockEngine) -> None:
    engine.change(engine="trtllm", length=30, thinking=True, faults={})
    reply = chat(engine, "ids?")
    assert "token_ids" not in json.dumps(reply)
    assert reply["choices"][0]["message"]["reasoning"]


@pytest.mark.parametrize("engine_name", ["vllm", "llamacpp"])
def test_a_prompt_over_the_limit_is_refused_as_the_engine_words_it(engine: MockEngine, engine_name: Any) -> None:
    engine.change(engine=engine_name, max_model_len=50, faults={})  # P14
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        chat(engine, "long " * 20)
    assert "context" in refused.value.read().decode()
    engine.change(max_model_len=0)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_happens(engine: MockEngine, fault: str) -> None:
    engine.change(engine="vllm", length=40, thinking=True, slow_seconds=0.2, faults={fault: 1.0})
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=0.5 if fault == "hang" else 10)
    body = json.dumps({"messages": [{"role": "user", "content": fault}], "return_token_ids": True})
    connection.request("POST", "/v1/chat/completions", body)
    try:
        response = connection.getresponse()
        status, found = response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        assert fault in BROKEN, error
        return
    finally:
        connection.close()
    assert status == HTTP.get(fault, 400 if fault == "too_long" else 200)
    engine.change(faults={})
    with urllib.request.urlopen(engine.url + "/v1/chat/completions", body.encode(), timeout=10) as response:
        assert (found == response.read()) == (fault in ("slow", "wrong_type"))
    assert engine.stats()["questions"][fault][0] == fault


def test_what_befalls_a_request_depends_on_question_seed_and_number_alone(toy: str) -> None:
    config = MockConfig(tokenizer=toy, faults={"http_500": 0.3, "hang": 0.2})
    drawn = [fault_of(f"q{i}", 1, config) for i in range(2000)]
    assert drawn == [fault_of(f"q{i}", 1, config) for i in range(2000)]
    assert drawn != [fault_of(f"q{i}", 2, config) for i in range(2000)]
    assert 500 < drawn.count("http_500") < 700
    assert 330 < drawn.count("hang") < 470


def test_requests_above_the_slots_wait_and_the_metrics_say_so(engine: MockEngine) -> None:
    engine.change(engine="vllm", length=20, thinking=False, faults={}, latency=0.5, slots=2)
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(chat, engine, f"queued {i}") for i in range(6)]
        seen = set()
        while not all(future.done() for future in asked):
            with urllib.request.urlopen(engine.url + "/metrics", timeout=10) as response:
                lines = response.read().decode().splitlines()
            seen.add(tuple(float(line.split()[-1]) for line in lines if not line.startswith("#")))
            time.sleep(0.02)
    assert (2.0, 4.0) in seen
    assert max(waiting for _, waiting in seen) == 4.0
    engine.change(latency=0.0, slots=0)


def test_idle_connections_are_closed_and_a_restart_keeps_the_port(toy: str) -> None:
    with MockEngine(MockConfig(tokenizer=toy, keepalive=0.1)) as engine:
        port = engine.port
        with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
            plain.sendall(b"GET /v1/models HTTP/1.1\r\n\r\n")
            received = b""
            while data := plain.recv(4096):  # ends because the engine closes
                received += data
        assert received.startswith(b"HTTP/1.1 200")
        engine.restart()
        assert engine.port == port
        assert engine.stats()["requests"] == 0


def test_the_engine_ends_with_the_process_that_started_it(toy: str) -> None:
    engine = MockEngine(MockConfig(tokenizer=toy))
    engine.start()
    assert engine.process is not None and engine.process.stdin is not None
    engine.process.stdin.close()
    assert engine.process.wait(10) == 0
    engine.process = None


def test_a_folder_without_a_tokenizer_is_not_needed(tmp_path: Path) -> None:
    with MockEngine() as engine:
        assert chat(engine, "toy")["choices"][0]["token_ids"] == reply_ids("toy", engine.config)
