"""An inference engine that only plays one, in a process of its own: exact, fast, and as faulty as told.

    with MockEngine(MockConfig(length=600, latency=2.0, faults={"http_503": 0.1})) as engine:
        ...engine.url...
        engine.stats()["questions"]["What is 2 + 2?"]   # ["http_503", "ok"]: what became of each request for it

It speaks as vLLM, SGLang (`/generate` too), TRT-LLM or llama.cpp. What a question is answered is `reply_ids`, what
befalls its nth request is `fault_of`, both pure. One core makes more than 2,000 replies of 600 ids a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from jinja2 import TemplateError

from mock_pace import Pace
from mock_replies import MockConfig, fault_of, reply_ids, say, seconds_of, vocabulary
from mock_shapes import ENDPOINTS, GENERATES, Asked, chat_body, error_body, native_body, read_asked, too_long

__all__ = ["FAULTS", "MockConfig", "MockEngine", "fault_of", "reply_ids", "seconds_of"]

HTTP = {"http_400": 400, "http_401": 401, "http_404": 404, "http_408": 408, "http_429": 429, "http_500": 500}
HTTP |= {"http_502": 502, "http_503": 503, "http_504": 504, "retry_after": 429}
BROKEN = ("reset_before", "reset_in_body", "closed_before", "closed_in_body", "hang")
"""No whole response comes."""
GARBAGE = ("html", "truncated_json", "empty_body", "no_choice", "aborted")
"""A 200 that holds no reply."""
TWISTED = ("slow", "wrong_type", "no_ids", "ids_short", "ids_long", "usage_wrong", "content_null", "both_fields")
TWISTED += ("neither_field", "renamed_field", "lone_surrogate", "line_separators", "huge", "cut_in_thinking")
TWISTED += ("cut_in_content", "no_reasoning", "no_delimiters", "empty_answer", "loop", "too_long")
"""A reply with something about it (`too_long` is a 400)."""
FAULTS = (*HTTP, *BROKEN, *GARBAGE, *TWISTED)
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 408: "Request Timeout"}
REASONS |= {429: "Too Many Requests", 500: "Internal Server Error", 502: "Bad Gateway", 503: "Service Unavailable"}


class MockEngine:
    """The engine as tests see it: a context manager with `url`, `stats`, `change`, `stop`, `kill` and `restart`."""

    def __init__(self, config: MockConfig | None = None, *, cpus: set[int] | None = None) -> None:
        config = config or MockConfig()
        self.folder = tempfile.TemporaryDirectory()
        if not config.tokenizer:
            from toy_chat import save_toy_tokenizer

            config = replace(config, tokenizer=save_toy_tokenizer(Path(self.folder.name)))
        unknown = set(config.faults) - set(FAULTS)
        assert not unknown, f"no such faults: {unknown}"
        self.config, self.cpus, self.port = config, cpus, 0
        self.process: subprocess.Popen[str] | None = None

    @classmethod
    def elsewhere(cls, url: str, tokenizer: str) -> MockEngine:
        """One that another process started; `stats` and `change` work."""
        engine = cls(MockConfig(tokenizer=tokenizer))
        engine.port = int(url.rpartition(":")[2])
        return engine

    def __enter__(self) -> MockEngine:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
        self.folder.cleanup()

    @property
    def url(self) -> str:
        """Without /v1."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts the process (the first time on any free port, then always on that one) and waits until it listens."""
        assert self.process is None
        command = [sys.executable, __file__, "--port", str(self.port), "--config", json.dumps(asdict(self.config))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the mock engine did not start"
        self.port = int(line)
        if self.cpus:
            os.sched_setaffinity(self.process.pid, self.cpus)

    def stop(self) -> None:
        """Ends the process by SIGTERM: connections are closed at once."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the process by SIGKILL; fine if it has ended."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Kills it and starts it on the same port; its statistics begin anew."""
        self.kill()
        self.start()

    def stats(self) -> dict[str, Any]:
        """`questions` (last user text -> what became of each of its requests), `requests`, `connections`, `in_flight`,
        `most_in_flight`, `replies` (good ones), `cpu_seconds`, `paths` (path -> requests)."""
        return self._call("/_stats", None)

    def change(self, **settings: Any) -> None:
        """Changes the configuration of the running engine (and of later starts)."""
        self.config = replace(self.config, **settings)
        self._call("/_config", json.dumps(asdict(self.config)).encode())

    def _call(self, path: str, body: bytes | None) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + path, body, timeout=60) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def _end(self, how: signal.Signals) -> None:
        if self.process is None:
            return
        self.process.send_signal(how)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process = None


class Server:
    """State of the mock's own process."""

    def __init__(self, config: MockConfig, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.pace, self.over = loop, Pace(loop), asyncio.Event()
        self.started = time.monotonic()
        self.asked: dict[str, list[str]] = {}
        self.paths: dict[str, int] = {}
        self.connections = self.in_flight = self.most_in_flight = self.replies = 0
        self.configure(config)

    def configure(self, config: MockConfig) -> None:
        self.config, self.words = config, vocabulary(config.tokenizer)
        self.pace.knee, self.pace.slots = config.knee, config.slots

    def stats(self) -> dict[str, Any]:
        return {
            "questions": self.asked,
            "requests": sum(self.paths.values()),
            "paths": self.paths,
            "connections": self.connections,
            "in_flight": self.in_flight,
            "most_in_flight": self.most_in_flight,
            "replies": self.replies,
            "running": len(self.pace.running),
            "waiting": len(self.pace.waiting),
            "cpu_seconds": time.process_time(),
        }


class Connection(asyncio.Protocol):
    """One client connection: HTTP/1.1, requests one after the other."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.data = bytearray()
        self.busy = self.hung = False
        self.idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.server.connections += 1

    def connection_lost(self, error: Exception | None) -> None:
        self.server.in_flight -= self.hung
        if self.idle:
            self.idle.cancel()

    def data_received(self, data: bytes) -> None:
        self.data += data
        if self.idle:
            self.idle.cancel()
            self.idle = None
        if not self.busy:
            self._next()

    def _next(self) -> None:
        """Takes the next whole request, if there is one."""
        head_end = self.data.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = bytes(self.data[:head_end]).decode("latin-1")
        lines = head.split("\r\n")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        size = int(headers.get("content-length", 0))
        if len(self.data) < head_end + 4 + size:
            return
        body = bytes(self.data[head_end + 4 : head_end + 4 + size])
        del self.data[: head_end + 4 + size]
        self.busy = True
        method, path, _ = lines[0].split(" ", 2)
        self._handle(method, path.partition("?")[0], headers, body)

    def _handle(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        server = self.server
        config = server.config
        if path == "/_stats":
            return self.answer(200, msgspec.json.encode(server.stats()))
        if path == "/_config":
            server.configure(msgspec.convert(json.loads(body), MockConfig))
            return self.answer(200, b"{}")
        server.paths[path] = server.paths.get(path, 0) + 1
        if time.monotonic() < server.started + config.loading:
            return self.answer(503, error_body(config, 503, "Loading model"))
        if config.api_key and headers.get("authorization") != f"Bearer {config.api_key}" and path != "/health":
            return self.answer(401, b'{"error": "Unauthorized"}')
        try:
            found = ENDPOINTS[config.engine].get((method, path))
            if found is GENERATES:
                return self._generate(path, body)
            if found is None or (path == "/metrics" and not config.metrics):
                return self.answer(404, error_body(config, 404, "Not Found"))
            content = found(server, body)
        except (ValueError, TemplateError, msgspec.DecodeError) as error:
            return self.answer(400, error_body(config, 400, str(error)))
        return self.answer(200, content, "text/plain" if path == "/metrics" else "application/json")

    def _generate(self, path: str, body: bytes) -> None:
        server = self.server
        config, asked = server.config, read_asked(path, body, server.words)
        history = server.asked.setdefault(asked.question, [])
        fault = fault_of(asked.question, len(history) + 1, config)
        history.append(fault or "ok")
        nth = len(history)
        server.in_flight += 1
        server.most_in_flight = max(server.most_in_flight, server.in_flight)
        if config.refuse_above and server.in_flight > config.refuse_above:
            history[-1] = "refused"
            return self._refuse(429, "too many requests", retry_after=True)
        if fault in HTTP:
            return self._refuse(HTTP[fault], fault, retry_after=fault == "retry_after")
        if fault == "hang":
            self.hung = True
            return None
        if fault in ("reset_before", "closed_before"):
            return self._break(reset=fault == "reset_before")
        refusal = too_long(asked, config, always=fault == "too_long")
        if refusal:
            history[-1] = "too_long"
            server.in_flight -= 1
            return self.answer(400, refusal)
        status, content, count = self._content(path, asked, fault)
        seconds = seconds_of(asked.question, nth, count, config) + (config.slow_seconds if fault == "slow" else 0.0)
        if seconds:
            server.pace.add(seconds, lambda: self._reply(status, content, fault))
        else:
            self._reply(status, content, fault)
        return None

    def _content(self, path: str, asked: Asked, fault: str) -> tuple[int, bytes, int]:
        """Status, body and number of generated ids."""
        config = self.server.config
        if fault == "html":
            return 200, b"<html><body>gateway</body></html>", 0
        if fault == "empty_body":
            return 200, b"", 0
        if fault == "no_choice":
            return 200, b'{"id": "x", "object": "chat.completion", "choices": []}', 0
        said = say(
            asked.question,
            config,
            opened=asked.prompt_text.rstrip().endswith(config.think_open.rstrip()),
            thinks=config.thinking and not asked.thinking_off(config) and fault != "no_reasoning",
            max_tokens=asked.max_tokens,
            sample=asked.sample,
            cut_in_thinking=fault in ("cut_in_thinking", "cut_in_content"),
        )
        shape = chat_body if path == "/v1/chat/completions" else native_body
        content = shape(asked, said, config, self.server.words, fault)
        return 200, content[: len(content) // 2] if fault == "truncated_json" else content, said.count()

    def _reply(self, status: int, content: bytes, fault: str) -> None:
        if fault in ("reset_in_body", "closed_in_body") and not self.transport.is_closing():
            self.transport.write(_head(200, len(content), "application/json") + content[: len(content) // 2])
            # The half must be on its way before a reset throws the rest away.
            self.server.loop.call_later(0.01, self._break, fault == "reset_in_body")
            return
        self.server.in_flight -= 1
        self.server.replies += 1
        kinds = {"html": "text/html", "wrong_type": "text/plain"}
        self.answer(status, content, kinds.get(fault, "application/json"))

    def _refuse(self, status: int, message: str, *, retry_after: bool) -> None:
        config = self.server.config
        self.server.in_flight -= 1
        extra = f"Retry-After: {config.retry_after:g}\r\n" if retry_after else ""
        self.answer(status, error_body(config, status, message), extra=extra)

    def _break(self, reset: bool) -> None:
        self.server.in_flight -= 1
        if reset:  # linger 0: what the peer sees is a reset, not an end
            plain = self.transport.get_extra_info("socket")
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            self.transport.abort()
        else:
            self.transport.close()

    def answer(self, status: int, content: bytes, kind: str = "application/json", extra: str = "") -> None:
        """Sends a response and goes on to the next request, or waits for one until the idle time is over."""
        if self.transport.is_closing():
            return
        self.transport.writelines((_head(status, len(content), kind, extra), content))
        self.busy = False
        self.idle = self.server.loop.call_later(self.server.config.keepalive, self.transport.close)
        if self.data:
            self.server.loop.call_soon(self._again)

    def _again(self) -> None:
        if not self.busy:
            self._next()


def _head(status: int, size: int, kind: str, extra: str = "") -> bytes:
    reason = REASONS.get(status, "Status")
    return (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\n{extra}"
        f"Content-Length: {size}\r\nConnection: keep-alive\r\n\r\n"
    ).encode()


async def _serve(config: MockConfig, port: int) -> None:
    loop = asyncio.get_running_loop()
    server = Server(config, loop)
    listening = await loop.create_server(lambda: Connection(server), "127.0.0.1", port, backlog=4096)
    loop.add_signal_handler(signal.SIGTERM, server.over.set)
    loop.add_reader(0, server.over.set)  # the pipe to the tests' process ends with it
    print(listening.sockets[0].getsockname()[1], flush=True)
    await server.over.wait()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--config", type=json.loads, default={}, help="fields of MockConfig as JSON")
    options = parser.parse_args()
    config = msgspec.convert(options.config, MockConfig)
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve(config, options.port))
    else:
        uvloop.run(_serve(config, options.port))


if __name__ == "__main__":
    main()
