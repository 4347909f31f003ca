"""Real servers on CPU for tests and benchmarks: vLLM, and llama.cpp out of the package xllamacpp."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # the target in the test's own process wants the same few cores
}
READY_SECONDS = 300.0
SERVED_AS = "smollm2"


class Vllm:
    """vLLM in float32 with a context of 1024 ids and a reasoning parser; it can be killed and started again.

    The parser is one that looks for the delimiters in the text: they are not tokens of the embedded model.
    """

    def __init__(self, python: str, model: str, folder: Path) -> None:
        port = free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", folder / "server.log"
        self.command = [
            *(python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
            *("--model", model, "--served-model-name", SERVED_AS, "--reasoning-parser", "olmo3"),
            *("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "16", "--enforce-eager"),
        ]

    def start(self) -> None:
        with open(self.log, "ab") as output:
            # A session of its own, so that the engine's child processes die with it.
            self.server = subprocess.Popen(
                self.command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | ENVIRONMENT,
                cwd=self.log.parent,
                start_new_session=True,
            )

    def ready(self) -> None:
        wait_until_healthy(f"{self.url}/health", self.server, self.log)

    def stop(self) -> None:
        stop(self.server)

    def kill(self) -> None:
        """As a crash or an impatient operator would: requests in flight are lost."""
        kill_group(self.server.pid)
        self.server.wait()


@contextmanager
def llamacpp(folder: Path, *options: str, context: int = 4096, threads: int = 1) -> Iterator[str]:
    """llama.cpp's server with these options of `draftsmith.serve.llamacpp`; its output goes to `folder`/server.log."""
    log, port = folder / "server.log", free_port()
    command = [sys.executable, "-m", "draftsmith.serve.llamacpp", "--port", str(port), *options]
    command += ["--context", str(context), "--threads", str(threads)]
    with open(log, "wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
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
            raise AssertionError(f"the server {what}:\n{tail}")
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
