from __future__ import annotations

import threading
import urllib.error
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from draftsmith.target.direct import ask

Asked = list[tuple[str, str | None, str | None, bytes]]


@pytest.fixture
def server() -> Iterator[tuple[int, Asked]]:
    """A port, and of each request there its method, authorization, content type and body."""
    asked: Asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            asked.append((self.command, self.headers["Authorization"], self.headers["Content-Type"], body))
            if self.path == "/refused":
                self.send_error(503)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"here")

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    found = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found.server_address[1], asked
    found.shutdown()
    found.server_close()


def test_an_engine_is_asked_past_a_proxy_of_the_environment(
    server: tuple[int, Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert ask(f"http://127.0.0.1:{server[0]}/health", timeout=10) == b"here"


def test_user_and_password_of_an_address_are_sent_unless_a_key_is(server: tuple[int, Asked]) -> None:
    port, asked = server
    ask(f"http://user:p%40ss@127.0.0.1:{port}/metrics", timeout=10)
    ask(f"http://user:p%40ss@127.0.0.1:{port}/metrics", 10, {"Authorization": "Bearer key"})
    assert [one[1] for one in asked] == ["Basic dXNlcjpwQHNz", "Bearer key"]


def test_a_body_is_posted_as_json(server: tuple[int, Asked]) -> None:
    ask(f"http://127.0.0.1:{server[0]}/v1/completions", timeout=10, body=b"{}")
    assert server[1] == [("POST", None, "application/json", b"{}")]


def test_a_refusal_is_an_error(server: tuple[int, Asked]) -> None:
    with pytest.raises(urllib.error.HTTPError, match="503"):
        ask(f"http://127.0.0.1:{server[0]}/refused", timeout=10)
