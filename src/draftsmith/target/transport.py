"""HTTP to the servers: one session, and which of its faults mean that a request was never sent.

Costs about 0.15 ms of CPU per exchange. Cookies, compression and redirects are off; connections are kept for less time
than the servers keep them, and are watched by the kernel, so that a host that vanished is noticed within two minutes,
however long its replies may be silent.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from typing import Any

import aiohttp

from draftsmith.target.wire import Aborted, PassingFault, one_line

CONNECT_SECONDS = 30.0
"""Patience for a connection, and for what a healthy server answers at once."""
KEEPALIVE_SECONDS = 4.0
"""vLLM (uvicorn) closes idle connections after 5 s; reusing one it just closed is a reset."""
READ_BYTES = 1 << 20
"""Of a body that may wait to be taken: with less, reading a long reply is halted again and again."""
PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


class Unreachable(PassingFault):
    """No connection: the request was never sent."""


class Transport:
    """The session, used as an async context manager. Without `kept`, every request has a connection of its own."""

    def __init__(self, api_key_env: str, *, kept: bool = True) -> None:
        self.kept = kept
        key = os.environ.get(api_key_env, "").strip()  # a line break is no header, and would be shown
        self.authorization = {"Authorization": f"Bearer {key}"} if key else {}

    async def __aenter__(self) -> Transport:
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                force_close=not self.kept,
                keepalive_timeout=KEEPALIVE_SECONDS if self.kept else None,
                socket_factory=_socket,
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            read_bufsize=READ_BYTES,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity", "Content-Type": "application/json"} | self.authorization,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def exchange(self, method: str, url: str, body: bytes | None = None) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of a response, however long it takes.

        Raises:
            Unreachable: there was no connection.
            Aborted: the connection broke.
            aiohttp.InvalidURL: no URL.
        """
        try:
            async with self.session.request(method, url, data=body, allow_redirects=False) as response:
                return response.status, response.headers, await response.read()
        except aiohttp.InvalidURL:
            raise
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unreachable(one_line(str(error))) from None
        except aiohttp.ClientError as error:
            raise Aborted(f"connection fault: {one_line(str(error) or type(error).__name__)}") from None

    async def within(self, seconds: float, method: str, url: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of a response that must come soon.

        Raises:
            PassingFault: as `exchange`, or it did not come within `seconds`.
        """
        try:
            async with asyncio.timeout(seconds):
                status, _, content = await self.exchange(method, url, body)
        except TimeoutError:
            raise PassingFault(f"no answer within {seconds:g} s") from None
        return status, content


def _socket(address: tuple[Any, ...]) -> socket.socket:
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in PROBES.items():
        if hasattr(socket, name):  # macOS has other names, Windows other calls
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
