"""OpenAI-compatible chat servers as a target: connecting, balancing, waiting, trying again.

One retry layer, this one: passing faults are met with a jittered, doubling wait (never less than a `Retry-After`),
everything else is final at once. The only time limit of a generation is the deadline, counted from the moment its
request is sent; a reply is silent until its end, so silence means nothing. Costs no memory beyond requests in flight.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from urllib.parse import urlsplit

import aiohttp
import msgspec

from draftsmith.errors import UserError
from draftsmith.recipe import without_credentials
from draftsmith.target.dialect import Asked, Chat, Dialect
from draftsmith.target.reply import Reply
from draftsmith.target.wire import ChatFailed, PassingFault, explanation, one_line, refusal

CONNECT_SECONDS = 30.0
"""Patience for `/v1/models`, which a healthy server answers at once."""
KEEPALIVE_SECONDS = 4.0
"""vLLM (uvicorn) closes idle connections after 5 s; reusing one it just closed is a reset."""
BACKOFF_SECONDS, BACKOFF_LIMIT = 0.5, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What the servers say about themselves; they all serve the same model."""

    model: str
    root: str
    """What the server loaded `model` from (a path on its machine, or a hub id), as far as it says so."""
    max_model_len: int | None
    """Prompt + generated ids at most; the least of all servers; None: they don't say."""
    urls: tuple[str, ...]
    """API base URLs without credentials."""
    engine: str
    version: str


class NotSentAgain(Exception):
    """A request met a passing fault while the run is being stopped: it has neither a reply nor a verdict."""


class ServerTarget:
    """One or several servers of one model, used as an async context manager; `connect` before `chat`.

    How many requests run at once is the caller's business; each goes to the server with the fewest in flight.
    """

    def __init__(
        self, urls: Sequence[str], model: str | None, *, api_key_env: str, deadline: float, retries: int
    ) -> None:
        self.endpoints = [_Endpoint(_base_url(url)) for url in urls]
        self.model, self.api_key_env, self.deadline, self.retries = model, api_key_env, deadline, retries
        self.dialect: Dialect = Chat()
        self.draining = asyncio.Event()

    async def __aenter__(self) -> ServerTarget:
        key = os.environ.get(self.api_key_env, "").strip()  # a line break is no header, and would be shown
        for endpoint in self.endpoints:
            if key and "@" in urlsplit(endpoint.url).netloc:  # one header cannot carry both
                raise UserError(
                    f"{endpoint.shown}: expected either a user in the URL or a key in {self.api_key_env}, found both; "
                    "drop one, or name another variable with --api-key-env"
                )
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.session.close()

    async def connect(self) -> ServerInfo:
        """Asks every server for its models and settles which one is meant.

        Raises:
            UserError: a server is down, is no OpenAI-compatible one, refuses the key, or does not offer the model.
        """
        cards = [self._choose(endpoint, await self._models(endpoint)) for endpoint in self.endpoints]
        self.model = cards[0].id
        lengths = [card.max_model_len for card in cards if card.max_model_len is not None]
        return ServerInfo(
            model=self.model,
            root=cards[0].root or self.model,
            max_model_len=min(lengths) if lengths else None,
            urls=tuple(endpoint.shown for endpoint in self.endpoints),
            engine=cards[0].owned_by or "unknown",
            version=await self._version(self.endpoints[0]),
        )

    async def chat(self, asked: Asked) -> Reply:
        """One generation, retried through passing faults. Waiting between tries does not count towards the deadline.

        Raises:
            ChatFailed: the server refused for good, the deadline passed, or the last try met a passing fault too.
            NotSentAgain: `drain` was called while the request waited for its next try.
        """
        attempt = 0
        while True:
            attempt += 1
            endpoint = min(self.endpoints, key=_Endpoint.burden)
            try:
                reply = await self._ask(endpoint, asked)
            except PassingFault as fault:
                if attempt > self.retries:
                    raise ChatFailed(f"{fault.reason}, {attempt} tries", passing=True) from None
                wait = max(fault.retry_after, _backoff(attempt))
                endpoint.rests_until = time.monotonic() + wait
                await self._pause(wait)
            else:
                return replace(reply, timing=reply.timing | {"attempts": attempt})

    def drain(self) -> None:
        """From now on nothing is sent again: requests in flight may end, those waiting for their next try are over."""
        self.draining.set()

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self.draining.wait(), seconds)
        except TimeoutError:
            return
        raise NotSentAgain

    async def _ask(self, endpoint: _Endpoint, asked: Asked) -> Reply:
        endpoint.in_flight += 1
        try:
            async with asyncio.timeout(self.deadline):
                return await self.dialect.ask(partial(self._post, endpoint), self.model or "", asked)
        except TimeoutError:
            # Sending it again would cost a whole generation again, and end the same way.
            raise ChatFailed(f"no reply within the deadline of {self.deadline:g} s", passing=True) from None
        finally:
            endpoint.in_flight -= 1

    async def _post(self, endpoint: _Endpoint, path: str, body: bytes) -> bytes:
        base = endpoint.url.removesuffix("/v1") if path.startswith("//") else endpoint.url
        try:
            async with self.session.post(
                base + path.replace("//", "/", 1),
                data=body,
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
            ) as response:
                content = await response.read()
        except aiohttp.ClientError as error:
            raise PassingFault(f"connection fault: {one_line(str(error) or type(error).__name__)}") from None
        if response.status != 200:
            raise refusal(response.status, response.headers, content)
        return content

    async def _models(self, endpoint: _Endpoint) -> list[_Card]:
        """The model list, under the URL as given or with /v1; settles the endpoint's base URL."""
        tried = [endpoint.url] if endpoint.url.endswith("/v1") else [endpoint.url + "/v1", endpoint.url]
        for url in tried:
            status, content = await self._get(url + "/models", endpoint.shown)
            if status == 404:
                continue
            if status in (401, 403):
                found = "its key was refused" if os.environ.get(self.api_key_env) else "it is not set"
                raise UserError(
                    f"{endpoint.shown}: HTTP {status}, expected an API key in the environment variable "
                    f"{self.api_key_env}, {found}; export the right key, or name its variable with --api-key-env"
                )
            if status != 200:
                raise UserError(
                    f"{endpoint.shown}: expected its model list, found HTTP {status} ({explanation(content)}); "
                    "wait until the server is ready, or correct --server"
                )
            try:
                cards = msgspec.json.decode(content, type=_Cards).data
            except msgspec.DecodeError:
                continue
            endpoint.url = url
            return cards
        raise UserError(
            f"{endpoint.shown}: expected an OpenAI-compatible API, found none at "
            f"{' or '.join(without_credentials(url) + '/models' for url in tried)}; give --server its base URL"
        )

    def _choose(self, endpoint: _Endpoint, cards: list[_Card]) -> _Card:
        offered = [card.id for card in cards]
        if self.model is None and len(cards) == 1:
            return cards[0]
        for card in cards:
            if card.id == self.model:
                return card
        wanted = "one model of several" if self.model is None else f"the model {self.model}"
        raise UserError(
            f"{endpoint.shown}: expected {wanted}, the server offers {', '.join(offered) or 'none'}; "
            "name one with --model"
        )

    async def _version(self, endpoint: _Endpoint) -> str:
        """`/version` as vLLM answers it; "" where there is none."""
        status, content = await self._get(endpoint.url.removesuffix("/v1") + "/version", endpoint.shown)
        try:
            return msgspec.json.decode(content, type=_Version).version if status == 200 else ""
        except msgspec.DecodeError:
            return ""

    async def _get(self, url: str, shown: str) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                async with self.session.get(url) as response:
                    return response.status, await response.read()
        except aiohttp.InvalidURL:
            raise UserError(f"{shown}: expected a URL such as http://localhost:8000") from None
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = one_line(str(error)) or f"no answer within {CONNECT_SECONDS:g} s"
            raise UserError(f"{shown}: the server does not answer ({reason}); start it, or correct --server") from None


class _Endpoint:
    """One server and how busy it is."""

    def __init__(self, url: str) -> None:
        self.url, self.shown = url, without_credentials(url)
        self.in_flight = 0
        self.rests_until = 0.0

    def burden(self) -> tuple[bool, int]:
        """Order of preference: one that just failed rests a while, then the fewest requests in flight."""
        return time.monotonic() < self.rests_until, self.in_flight


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    owned_by: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Version(msgspec.Struct):
    version: str


def _backoff(attempt: int) -> float:
    """Seconds before try `attempt` + 1: doubling, bounded, and spread so that requests don't come back all at once."""
    doubled: float = BACKOFF_SECONDS * 2.0**attempt
    return random.uniform(0.5, 1.0) * min(BACKOFF_LIMIT, doubled)


def _base_url(url: str) -> str:
    """The URL without a trailing slash or a pasted endpoint path; http:// where no scheme is given.

    Raises:
        UserError: no URL.
    """
    url = url if "://" in url else f"http://{url}"
    try:
        urlsplit(url)
    except ValueError:
        raise UserError(f"{without_credentials(url)}: expected a URL such as http://localhost:8000") from None
    return url.rstrip("/").removesuffix("/chat/completions").removesuffix("/models")
