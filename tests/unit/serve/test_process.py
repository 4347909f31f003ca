"""Starting and ending an engine, with a small stand-in for it: a process with a child of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith.errors import DraftsmithError, Interrupted, UserError
from draftsmith.progress import Progress
from draftsmith.serve import process
from draftsmith.serve.commands import Launch
from draftsmith.serve.process import running, serve, tail

ENGINE = """
import http.server, signal, subprocess, sys, time
port, children, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf])
open(children, "w").write(str(child.pid))
print("\\x1b[32mloading shard 1 of 2\\x1b[0m", flush=True)
if mode == "dies":
    print("out of memory", flush=True)
    sys.exit(7)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        self.send_response(503 if mode == "never" or Handler.asked < 3 else 200)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@pytest.fixture
def launch() -> Launch:
    return Launch(
        engine="vllm",
        target="toy",
        draft=None,
        draft_tokens=3,
        context=None,
        parallel=None,
        dtype=None,
        host="127.0.0.1",
        port=free_port(),
        python=sys.executable,
    )


def standing_in(monkeypatch: pytest.MonkeyPatch, folder: Path, mode: str) -> None:
    def words(launch: Launch) -> list[str]:
        return [launch.python, "-c", ENGINE, str(launch.port), str(folder / "child"), mode]

    monkeypatch.setattr(process, "command", words)


def gone(pid: int) -> bool:
    """Whether a process has ended (a killed orphan may stay as a zombie where nobody collects it)."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def soon(condition: object) -> bool:
    until = time.monotonic() + 10
    while not condition() and time.monotonic() < until:  # type: ignore[operator]
        time.sleep(0.02)
    return bool(condition())  # type: ignore[operator]


def test_it_is_handed_over_when_it_answers_and_is_gone_with_its_children_afterwards(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: Progress
) -> None:
    standing_in(monkeypatch, tmp_path, "plain")
    log = tmp_path / "logs" / "engine.log"
    with running(launch, log, progress, 30) as engine:
        with urllib.request.urlopen(f"{launch.url}/health") as reply:
            assert reply.status == 200
        child = int((tmp_path / "child").read_text())
        assert not gone(child)
    assert engine.returncode == -signal.SIGTERM
    assert soon(lambda: gone(child))  # although it ignores SIGTERM
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{launch.url}/health", timeout=1)
    assert tail(log) == ["loading shard 1 of 2"]


def test_an_engine_gets_the_environment_of_the_moment_whatever_object_holds_it(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: Progress
) -> None:
    """`datasets` puts a copy in the place of os.environ when it maps with several processes."""
    shows = 'import os; print("found", os.environ["CONNECTOR"], flush=True); raise SystemExit(7)'
    monkeypatch.setattr(process, "command", lambda launch: [launch.python, "-c", shows])
    monkeypatch.setattr(os, "environ", {**os.environ, "CONNECTOR": "here"})
    with pytest.raises(DraftsmithError, match="found here"), running(launch, tmp_path / "log", progress, 30):
        pass


def test_an_engine_that_ignores_sigterm_is_killed(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: Progress
) -> None:
    standing_in(monkeypatch, tmp_path, "stubborn")
    monkeypatch.setattr(process, "STOP_SECONDS", 0.2)
    with running(launch, tmp_path / "engine.log", progress, 30) as engine:
        pass
    assert engine.returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent has ended")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_an_engine_ends_with_whoever_started_it_however_that_ends(number: int, launch: Launch, tmp_path: Path) -> None:
    log, ready = tmp_path / "engine.log", tmp_path / "ready"
    holder = f"""
import sys, time
from pathlib import Path
from draftsmith.progress import Progress
from draftsmith.serve import process
from draftsmith.serve.commands import Launch
words = [sys.executable, "-c", {ENGINE!r}, {str(launch.port)!r}, {str(tmp_path / "child")!r}, "plain"]
process.command = lambda launch: words
with process.running({launch!r}, Path({str(log)!r}), Progress(), 30) as engine:
    Path({str(ready)!r}).write_text(str(engine.pid))
    time.sleep(600)
"""
    started = subprocess.Popen([sys.executable, "-c", holder], stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        assert soon(lambda: ready.exists() and ready.read_text() != "")
        engine_id, child = int(ready.read_text()), int((tmp_path / "child").read_text())
        started.send_signal(number)
        assert started.wait(10) == -number
        assert soon(lambda: gone(engine_id))
    finally:
        started.kill()
        with suppress(ProcessLookupError, UnboundLocalError):
            os.kill(child, signal.SIGKILL)  # the stand-in's, which ignores what would end an engine's own


def test_an_engine_that_dies_while_it_loads_is_quoted(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: Progress
) -> None:
    standing_in(monkeypatch, tmp_path, "dies")
    with (
        pytest.raises(DraftsmithError, match="vllm ended with status 7: out of memory; its log is .*engine.log"),
        running(launch, tmp_path / "engine.log", progress, 30),
    ):
        pytest.fail("it never answered")
    child = int((tmp_path / "child").read_text())
    assert soon(lambda: gone(child))


def test_an_interpreter_without_the_engine_is_a_users_mistake(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: Progress
) -> None:
    monkeypatch.setattr(process, "command", lambda launch: [launch.python, "-S", "-m", "vllm.entrypoints"])
    with (
        pytest.raises(UserError, match=r"expected an environment with vllm, found none .*; give another --python"),
        running(launch, tmp_path / "engine.log", progress, 30),
    ):
        pass


def test_an_engine_that_is_killed_without_a_word_is_said_to_be(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: Progress
) -> None:
    words = [sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"]
    monkeypatch.setattr(process, "command", lambda launch: words)
    with (
        pytest.raises(DraftsmithError, match="vllm ended with SIGSEGV: it said nothing; its log is"),
        running(launch, tmp_path / "engine.log", progress, 30),
    ):
        pass


def test_an_engine_that_never_answers_is_given_up(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: Progress
) -> None:
    standing_in(monkeypatch, tmp_path, "never")
    with (
        pytest.raises(DraftsmithError, match="expected an answer at .*/health within 0 s, found none"),
        running(launch, tmp_path / "engine.log", progress, 0.5),
    ):
        pytest.fail("it never answered")


def test_a_server_that_is_there_already_is_never_taken_for_ours(
    launch: Launch, tmp_path: Path, progress: Progress
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", launch.port))
        other.listen()
        with (
            pytest.raises(UserError, match=f"127.0.0.1:{launch.port}: cannot listen there .*--port"),
            running(launch, tmp_path / "engine.log", progress, 30),
        ):
            pytest.fail("nothing was started")
    assert not (tmp_path / "engine.log").exists()


def test_an_interpreter_that_does_not_exist_is_one_line(launch: Launch, tmp_path: Path, progress: Progress) -> None:
    missing = replace(launch, python=str(tmp_path / "no" / "python"))
    with (
        pytest.raises(UserError, match="cannot be started .*--python"),
        running(missing, tmp_path / "engine.log", progress, 30),
    ):
        pytest.fail("nothing was started")


def test_a_stop_while_it_loads_ends_it(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: Progress
) -> None:
    standing_in(monkeypatch, tmp_path, "never")
    with (
        pytest.raises(Interrupted, match="stopped while it loaded"),
        running(launch, tmp_path / "engine.log", progress, 30, lambda: True),
    ):
        pytest.fail("it never answered")


def test_serving_says_the_command_for_other_hosts_and_ends_with_the_engine(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing_in(monkeypatch, tmp_path, "plain")
    said: list[str] = []

    class Listening(Progress):
        def say(self, message: str) -> None:
            said.append(message)
            if message.startswith("ready at"):
                with suppress(ProcessLookupError):
                    os.kill(int((tmp_path / "engine.pid").read_text()), signal.SIGKILL)

    started = subprocess.Popen

    def noted(*words: object, **options: object) -> object:
        engine = started(*words, **options)  # type: ignore[call-overload]
        (tmp_path / "engine.pid").write_text(str(engine.pid))
        return engine

    monkeypatch.setattr(subprocess, "Popen", noted)
    with pytest.raises(DraftsmithError, match="vllm ended with SIGKILL"):
        serve(launch, tmp_path / "engine.log", Listening(quiet=True), 30)
    assert said[0] == f"on another host: vllm serve toy --host 127.0.0.1 --port {launch.port}"
    assert any(line.startswith(f"ready at {launch.url} (vllm, without a draft)") for line in said)
