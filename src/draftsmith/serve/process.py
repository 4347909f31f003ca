"""An engine as a child process: started in a group of its own, watched until it answers, and ended with its children.

What it prints goes to a log file, whose last line is shown while it loads. SIGTERM ends it, SIGKILL what is left of its
group. On Linux it gets a SIGTERM also where this process ends without a word (killed, or its terminal closed), so that
none holds a GPU that nobody uses. A server that already answers at the address is never taken for ours.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.text import Text

from draftsmith.errors import DraftsmithError, Interrupted, UserError
from draftsmith.interrupts import stopping
from draftsmith.progress import Progress, State, View, clock, harmless
from draftsmith.serve.commands import PRIVATE, Launch, command, elsewhere
from draftsmith.target.direct import ask

POLL_SECONDS = 0.25
STOP_SECONDS = 30.0
"""From SIGTERM to SIGKILL."""
TAIL_BYTES = 16384
TAIL_LINES = 20
SHOWN = 200
"""Characters of the last line, shown while it loads."""
PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that a process gets when the thread that started it ends."""
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
MISSING = re.compile(r"No module named '?(vllm|sglang|draftsmith)\b")
COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def serve(launch: Launch, log: Path, progress: Progress, wait: float) -> None:
    """Runs an engine until SIGINT or SIGTERM, or until it ends by itself.

    Args:
        launch: what to start.
        log: the file its output goes to.
        progress: told the command, what it loads, and when it answers.
        wait: seconds until it must answer.

    Raises:
        UserError: the port is taken, or the interpreter does not exist.
        DraftsmithError: it ended or never answered.
    """
    progress.say(f"on another host: {elsewhere(launch)}")
    progress.say(f"starting: {shlex.join(command(launch))}")
    with stopping() as asked_to_stop, running(launch, log, progress, wait, asked_to_stop) as engine:
        draft = f"with {launch.draft_tokens} draft tokens" if launch.draft else "without a draft"
        progress.say(f"ready at {launch.url} ({launch.engine}, {draft}); its log is {log}; stop it with Ctrl-C")
        while not asked_to_stop():
            if engine.poll() is not None:
                raise _ended(engine, launch, log, progress)
            time.sleep(POLL_SECONDS)
        progress.say("stopping")


@contextmanager
def running(
    launch: Launch,
    log: Path,
    progress: Progress,
    wait: float,
    asked_to_stop: Callable[[], bool] = lambda: False,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """An engine that answers, for as long as the block runs; it and its children are gone afterwards.

    Raises:
        UserError: the port is taken, or the interpreter does not exist.
        DraftsmithError: it ended before it answered, or did not answer within `wait` seconds.
        Interrupted: a stop was asked for while it loaded.
    """
    _refuse_taken(launch)
    log.parent.mkdir(parents=True, exist_ok=True)
    words = command(launch)
    try:
        with open(log, "wb") as output:
            engine = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**(os.environ if environment is None else environment), **PRIVATE},
                start_new_session=True,
                preexec_fn=_end_with_parent if LIBC else None,
            )
    except OSError as error:
        raise UserError(f"{words[0]}: the engine cannot be started ({error.strerror}); give another --python") from None
    try:
        _wait(engine, launch, log, progress, wait, asked_to_stop)
        yield engine
    finally:
        end_group(engine)


def end_group(engine: subprocess.Popen[bytes]) -> None:
    """Asks the engine to end, then kills whatever is left of its group."""
    try:
        if engine.poll() is None:
            os.killpg(engine.pid, signal.SIGTERM)
            engine.wait(STOP_SECONDS)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
    finally:
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(engine.pid, signal.SIGKILL)
        engine.wait()


def last_line(log: Path) -> str:
    """The last line of a log that says anything, without colours."""
    lines = tail(log)
    return lines[-1] if lines else ""


def tail(log: Path, count: int = TAIL_LINES) -> list[str]:
    """The last lines of a log that say anything."""
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        text = COLOUR.sub("", file.read().decode(errors="replace"))
    lines = [line.strip() for line in re.split(r"[\r\n]", text)]
    return [line for line in lines if line][-count:]


def _end_with_parent() -> None:
    """Runs in the child, before the engine's program."""
    assert LIBC is not None
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(
    engine: subprocess.Popen[bytes],
    launch: Launch,
    log: Path,
    progress: Progress,
    wait: float,
    asked_to_stop: Callable[[], bool],
) -> None:
    started = time.monotonic()
    with progress.track("serve", 1, "engines", view=LOADING) as tracker:
        while not _answers(f"{launch.url}/health"):
            if engine.poll() is not None:
                raise _ended(engine, launch, log, progress)
            if asked_to_stop():
                raise Interrupted(f"{launch.engine}: stopped while it loaded")
            if time.monotonic() - started > wait:
                _show_tail(log, progress)
                raise DraftsmithError(
                    f"{launch.engine}: expected an answer at {launch.url}/health within {clock(wait)}, found none; "
                    f"its log is {log}, --wait gives it longer"
                )
            tracker.update(0, loading=last_line(log)[:SHOWN])
            time.sleep(POLL_SECONDS)
        tracker.update(1)


def _loading(state: State) -> str:
    return harmless(f"loading for {clock(state['seconds'])}: {state.get('loading', '')}")


LOADING = View(_loading, lambda state, width, height: Text(_loading(state)[:width]))


def _answers(url: str) -> bool:
    try:
        ask(url, timeout=30)
    except OSError:
        return False
    return True


def _refuse_taken(launch: Launch) -> None:
    family = socket.AF_INET6 if ":" in launch.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((launch.host, launch.port))
        except OSError as error:
            raise UserError(
                f"{launch.host}:{launch.port}: cannot listen there ({error.strerror}); give another --port"
            ) from None


def _ended(engine: subprocess.Popen[bytes], launch: Launch, log: Path, progress: Progress) -> DraftsmithError:
    said = last_line(log)
    if MISSING.search(said):
        return UserError(
            f"{launch.python}: expected an environment with {launch.engine}, found none ({said}); give another --python"
        )
    _show_tail(log, progress)
    status = engine.returncode
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    return DraftsmithError(f"{launch.engine} ended with {how}: {said or 'it said nothing'}; its log is {log}")


def _show_tail(log: Path, progress: Progress) -> None:
    for line in tail(log):
        progress.show(f"  {line}")
