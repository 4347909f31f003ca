"""Headless Chromium over the DevTools protocol: opens a page at a width and tells what it shows and asks for."""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)
START_SECONDS = 60


def chromium() -> str | None:
    """The browser's path, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@dataclass
class Tab:
    """One open page. `requests` are the URLs it asked for, `errors` what it wrote to the console or threw."""

    socket: aiohttp.ClientWebSocketResponse
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    numbers: Any = field(default_factory=lambda: itertools.count(1))
    events: list[dict[str, Any]] = field(default_factory=list)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result; events that arrive meanwhile are noted."""
        number = next(self.numbers)
        await self.socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self.socket.receive_json()
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message)

    async def open(self, url: str, width: int, height: int, dark: bool = False) -> None:
        """Loads `url` at a size of the viewport and waits until it is loaded."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._note(await self.socket.receive_json())
        await self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    async def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression (promises are awaited)."""
        got = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    async def screenshot(self) -> bytes:
        """The viewport as PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot"))["data"])

    def _note(self, message: dict[str, Any]) -> None:
        self.events.append(message)
        method, params = message["method"], message["params"]
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])


@asynccontextmanager
async def open_tab() -> AsyncIterator[Tab]:
    """A fresh browser with one empty tab; ended on the way out."""
    profile = tempfile.mkdtemp()
    process = await asyncio.create_subprocess_exec(
        str(chromium()), *FLAGS, f"--user-data-dir={profile}", "about:blank", stderr=asyncio.subprocess.DEVNULL
    )
    try:
        port = await asyncio.wait_for(_port(Path(profile)), START_SECONDS)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                page = next(target for target in await reply.json() if target["type"] == "page")
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        process.terminate()
        await process.wait()
        shutil.rmtree(profile, ignore_errors=True)


async def _port(profile: Path) -> str:
    file = profile / "DevToolsActivePort"
    while not file.exists() or not file.read_text():  # noqa: ASYNC110 (another process writes it)
        await asyncio.sleep(0.05)
    return file.read_text().split("\n")[0]
