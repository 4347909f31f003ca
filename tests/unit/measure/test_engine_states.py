"""Hidden states that a vLLM hands out as files, beside those of our own target."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.measure import engine_states
from draftsmith.measure.engine_states import states_link
from draftsmith.measure.links import Link
from draftsmith.measure.scene import Alive, Scene
from draftsmith.target.endpoints import Endpoint
from draftsmith.target.loading import load_model
from tiny_target import save_tiny_target

PROMPT = tuple(range(8, 20))
WANTED = [0, 2, 4]
"""Layers whose outputs the draft reads; vLLM numbers them by their inputs, one more."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save_tiny_target(tmp_path_factory.mktemp("target"), layers=6)
    return load_model(str(folder), torch.float32, torch.device("cpu"))


@pytest.fixture
def scene(model: Any) -> Scene:
    values = dict.fromkeys(Scene.__dataclass_fields__) | {
        "model": model,
        "store": SimpleNamespace(target={"layers": WANTED}),
    }
    return Scene(**values)


@pytest.fixture
def vllm() -> Iterator[Callable[[dict[str, Any]], Any]]:
    """Starts a server that asks for a key and whose completions carry these fields; as measurements know it."""
    servers = []

    def start(fields: dict[str, Any], key: str = "key") -> Any:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert (asked["prompt"], asked["max_tokens"]) == (list(PROMPT), 1)
                if self.headers["Authorization"] != "Bearer key":
                    self.send_error(401)
                    return
                body = json.dumps({"choices": [{"text": ""}], **fields}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{servers[-1].server_address[1]}/v1"
        transport = SimpleNamespace(authorization={"Authorization": f"Bearer {key}"})
        return SimpleNamespace(engine="vllm", model="m", endpoint=Endpoint(url), transport=transport)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def states_of(model: Any, layers: list[int]) -> dict[str, torch.Tensor]:
    """What vLLM writes: the states of all prompt tokens at the outputs of these layers, some rows of padding behind."""
    with torch.inference_mode():
        hidden = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    states = torch.stack([hidden[layer + 1][0] for layer in layers], dim=1)
    return {"token_ids": torch.tensor(PROMPT), "hidden_states": torch.cat([states, torch.zeros_like(states[:3])])}


def link(scene: Scene, server: Any) -> Link:
    return states_link(scene, server, Alive("q", PROMPT, (1, 2)), None)


def test_an_engine_with_our_own_states_is_not_at_fault(
    scene: Scene, model: Any, vllm: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> None:
    save_file(states_of(model, WANTED), tmp_path / "s.safetensors")
    found = link(scene, vllm({"kv_transfer_params": {"hidden_states_path": str(tmp_path / "s.safetensors")}}))
    assert found.value == pytest.approx(1.0)
    assert found.suspects == ()
    assert [f"output of layer {layer} (0.0% off)" in found.note for layer in WANTED] == [True, True, True]


def test_layers_that_are_off_by_one_are_named(
    scene: Scene, model: Any, vllm: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> None:
    save_file(states_of(model, [1, 3, 4]), tmp_path / "s.safetensors")
    [suspect] = link(
        scene, vllm({"kv_transfer_params": {"hidden_states_path": str(tmp_path / "s.safetensors")}})
    ).suspects
    assert (suspect.name, suspect.certain) == ("layer ids", True)
    assert "the draft reads outputs of [0, 2, 4]" in suspect.found


def test_states_of_other_weights_are_called_another_target(
    scene: Scene, vllm: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> None:
    other = load_model(str(save_tiny_target(tmp_path / "other", layers=6, seed=1)), torch.float32, torch.device("cpu"))
    save_file(states_of(other, WANTED), tmp_path / "s.safetensors")
    [suspect] = link(
        scene, vllm({"kv_transfer_params": {"hidden_states_path": str(tmp_path / "s.safetensors")}})
    ).suspects
    assert suspect.name == "quantised or other target"


def test_a_file_that_is_written_after_the_reply_is_waited_for(
    scene: Scene, model: Any, vllm: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> None:
    path = tmp_path / "s.safetensors"
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    path.write_bytes(b"half of it")

    def write() -> None:
        time.sleep(0.3)
        save_file(states_of(model, WANTED), path)
        os.close(lock)

    thread = threading.Thread(target=write)
    thread.start()
    found = link(scene, vllm({"kv_transfer_params": {"hidden_states_path": str(path)}}))
    thread.join()
    assert found.value == pytest.approx(1.0)


def test_a_vllm_without_a_connector_and_one_on_another_host_are_told_apart(
    scene: Scene, vllm: Callable[[dict[str, Any]], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_states, "WRITTEN_SECONDS", 0.3)
    without = link(scene, vllm({}))
    elsewhere = link(scene, vllm({"kv_transfer_params": {"hidden_states_path": str(tmp_path / "not-here")}}))
    assert without.value is None and "not started with a hidden-states connector" in without.note
    assert elsewhere.value is None and "run this on the server's own host" in elsewhere.note


def test_a_server_that_refuses_the_prompt_is_not_said_to_lack_a_connector(
    scene: Scene, vllm: Callable[[dict[str, Any]], Any]
) -> None:
    found = link(scene, vllm({}, key="another"))
    assert found.value is None
    assert "expected the server's answer to a prompt, found none (HTTP Error 401" in found.note
