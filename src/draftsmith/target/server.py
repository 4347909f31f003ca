"""OpenAI-compatible chat servers as a target: connecting, sending, waiting, trying again.

One retry layer, this one. What a fault costs: a server that cannot be reached and one that asks for patience (429, or
503 with Retry-After) cost a question none of its tries, it waits; neither does the first generation that breaks off,
which is sent again at once. Other passing faults (408, 409, 425, 5xx, nonsense) are met with a jittered, doubling wait,
everything else is final at once. While no server is left, all requests wait and nothing is sent but a cheap GET, until
the user's signal. The only time limit of a generation is the deadline, counted from the moment its request is sent; a
reply is silent until its end, so silence means nothing. Costs no memory beyond the requests in flight.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import msgspec

from draftsmith.errors import UserError
from draftsmith.progress import clock
from draftsmith.target.dialect import Asked, Chat, Dialect
from draftsmith.target.endpoints import Endpoint, Endpoints, backoff
from draftsmith.target.metrics import Queue, queue_of
from draftsmith.target.models import Card, NotReady, choose, models_of, refuse_two_credentials
from draftsmith.target.reply import Reply
from draftsmith.target.transport import CONNECT_SECONDS, Transport, Unreachable
from draftsmith.target.wire import Aborted, ChatFailed, PassingFault, refusal

LOOK_TIMEOUT = 10.0
WATCH_SECONDS, METRICS_SECONDS = 0.25, 2.5
REMIND_SECONDS, SAY_WAIT_SECONDS = 60.0, 15.0
DEADLINE_FLOOR, SECONDS_PER_TOKEN = 600.0, 0.25
"""4 tokens a second: a busy server without a GPU."""


def deadline_for(max_tokens: int) -> float:
    """Seconds after which a non-streaming reply of so many tokens is given up: time to queue, and a slow server's."""
    return DEADLINE_FLOOR + SECONDS_PER_TOKEN * max_tokens


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
    """A request was still to be sent when the run was stopped: it has neither a reply nor a verdict."""


class ServerTarget:
    """One or several servers of one model, used as an async context manager; `connect` before `chat`.

    How many requests run at once is the caller's business; each goes to the least burdened server.

    Attributes:
        waiting: requests that wait for a server or for their next try.
        refused: requests answered by 429 or 503 so far.
        fits: asked about a server that comes back before anything is sent there; raises UserError if it must not be.
    """

    def __init__(
        self, urls: Sequence[str], model: str | None, *, api_key_env: str, deadline: float, retries: int
    ) -> None:
        self.pool = Endpoints(urls)
        self.endpoints = self.pool.all
        self.model, self.api_key_env, self.deadline, self.retries = model, api_key_env, deadline, retries
        self.dialect: Dialect = Chat()
        self.transport = Transport(api_key_env)
        self.draining = asyncio.Event()
        self.say: Callable[[str], object] = lambda message: None
        self.fits: Callable[[Endpoint], Awaitable[None]] | None = None
        self.max_model_len: int | None = None
        self.watcher: asyncio.Future[Any] | None = None
        self.waiting = self.refused = 0
        self.reminded_at = 0.0

    async def __aenter__(self) -> ServerTarget:
        refuse_two_credentials(self.endpoints, self.transport, self.api_key_env)
        await self.transport.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self.watcher is not None:
            self.watcher.cancel()
            await asyncio.gather(self.watcher, return_exceptions=True)
        await self.transport.__aexit__()

    async def connect(
        self, wait_seconds: float = 0.0, say: Callable[[str], object] = lambda message: None
    ) -> ServerInfo:
        """Asks every server for its models and settles which one is meant; goes on as soon as one server is ready.

        Servers that are down are looked at from then on, and used once they answer.

        Args:
            wait_seconds: patience while none is ready: connections refused, 5xx, or 404 while it is loading.
            say: where to tell what is seen, now and later.

        Raises:
            UserError: no server is ready in time, or one refuses the key or does not offer the model.
        """
        self.say = say
        ready = await self._ready(wait_seconds)
        cards = []
        for endpoint in ready:
            cards.append(choose(endpoint, ready[endpoint], self.model))
            self.model = cards[0].id
        self.watcher = asyncio.gather(*map(self._watch, self.endpoints))
        self.watcher.add_done_callback(lambda _: self.pool.wake())
        lengths = [card.max_model_len for card in cards if card.max_model_len is not None]
        self.max_model_len = min(lengths) if lengths else None
        return ServerInfo(
            model=cards[0].id,
            root=cards[0].root or cards[0].id,
            max_model_len=self.max_model_len,
            urls=tuple(endpoint.shown for endpoint in self.endpoints),
            engine=cards[0].owned_by or "unknown",
            version=await self._version(),
        )

    async def chat(self, asked: Asked) -> Reply:
        """One generation, retried through passing faults. Waiting between tries does not count towards the deadline.

        Raises:
            ChatFailed: the server refused for good, the deadline passed, or the last try met a passing fault too.
            NotSentAgain: `drain` was called while the request waited to be sent.
        """
        sent, hurried, avoid = 0, False, None
        while True:
            endpoint = await self._free_endpoint(avoid)
            sent_at, avoid = time.monotonic(), endpoint
            try:
                reply = await self._ask(endpoint, asked)
            except Unreachable as fault:
                self._say_left_out(endpoint, endpoint.lost(fault.reason, sent_at, time.monotonic()))
            except PassingFault as fault:
                self.refused += fault.status in (429, 503)
                if fault.busy:
                    await self._rest(endpoint, fault)
                    continue
                sent += 1
                self._say_left_out(endpoint, endpoint.faulted(fault.reason, sent_at, time.monotonic()))
                if isinstance(fault, Aborted) and not hurried:
                    hurried = True
                    continue
                if sent - hurried > self.retries:
                    raise ChatFailed(f"{fault.reason}, sent {sent} times", passing=True) from None
                await self._pause(max(fault.retry_after, backoff(sent)))
            except ChatFailed as failure:
                if not failure.passing:  # it answers, if only to say no
                    self._answered(endpoint, sent_at)
                raise
            else:
                self._answered(endpoint, sent_at)
                return replace(reply, timing=reply.timing | {"attempts": sent + 1})

    async def get(self, path: str, endpoint: Endpoint | None = None) -> tuple[int, bytes]:
        """Status and body of a GET with this target's auth, from `endpoint` (default: the first one that is up).

        Args:
            path: under the API base (`/models`) or, with two slashes, under the server's root (`//version`).

        Raises:
            PassingFault: no answer: a connection fault, or none within `CONNECT_SECONDS`.
        """
        return await self.transport.within(CONNECT_SECONDS, "GET", (endpoint or self._first()).at(path))

    async def post(
        self, path: str, body: bytes, endpoint: Endpoint | None = None, seconds: float | None = None
    ) -> tuple[int, bytes]:
        """Status and body of a POST of JSON, sent once; otherwise as `get`. `seconds`: its limit (default: deadline).

        Raises:
            PassingFault: no answer: a connection fault, or none within the limit.
        """
        url = (endpoint or self._first()).at(path)
        return await self.transport.within(seconds or self.deadline, "POST", url, body)

    def drain(self) -> None:
        """From now on nothing is sent: requests in flight may end, those waiting to be sent are over."""
        self.draining.set()
        self.pool.wake()

    @property
    def running(self) -> int:
        """Requests that are at a server."""
        return sum(endpoint.in_flight for endpoint in self.endpoints)

    @property
    def up(self) -> int:
        """Servers that are not left out."""
        return sum(not endpoint.reason for endpoint in self.endpoints)

    @property
    def queue(self) -> Queue | None:
        """What the servers' metrics say of their queues, together; None: they say nothing."""
        known = [endpoint.queue for endpoint in self.endpoints if endpoint.queue and not endpoint.reason]
        if not known:
            return None
        running, waiting = sum(queue.running for queue in known), sum(queue.waiting for queue in known)
        return Queue(running, waiting, min(queue.at for queue in known))

    def loads(self) -> list[dict[str, Any]]:
        """Each server as it is shown: `url`, `in_flight`, `state` (ok, resting, down), `queue` (None: unknown)."""
        now = time.monotonic()
        return [
            {
                "url": endpoint.shown,
                "in_flight": endpoint.in_flight,
                "state": endpoint.state(now),
                "queue": endpoint.queue.waiting if endpoint.queue else None,
            }
            for endpoint in self.endpoints
        ]

    async def _free_endpoint(self, avoid: Endpoint | None) -> Endpoint:
        self.waiting += 1
        try:
            while not self.draining.is_set():
                endpoint = self.pool.choose(time.monotonic(), avoid)
                if endpoint is not None:
                    return endpoint
                if self.watcher is not None and self.watcher.done():
                    self.watcher.result()
                await self.pool.changed.wait()
        finally:
            self.waiting -= 1
        raise NotSentAgain

    async def _pause(self, seconds: float) -> None:
        self.waiting += 1
        try:
            await asyncio.wait_for(self.draining.wait(), seconds)
        except TimeoutError:
            return
        finally:
            self.waiting -= 1
        raise NotSentAgain

    async def _ask(self, endpoint: Endpoint, asked: Asked) -> Reply:
        endpoint.begin()
        try:
            async with asyncio.timeout(self.deadline):
                return await self.dialect.ask(partial(self._post, endpoint), self.model or "", asked)
        except TimeoutError:
            # Sending it again would cost a whole generation again, and end the same way.
            raise ChatFailed(f"no reply within the deadline of {self.deadline:g} s", passing=True) from None
        finally:
            endpoint.in_flight -= 1

    async def _post(self, endpoint: Endpoint, path: str, body: bytes) -> bytes:
        status, headers, content = await self.transport.exchange("POST", endpoint.at(path), body)
        if status != 200:
            raise refusal(status, headers, content)
        return content

    async def _rest(self, endpoint: Endpoint, fault: PassingFault) -> None:
        """Sends nothing to a server that asks for patience; the request waits too, unless another server is free."""
        now = time.monotonic()
        seconds, news = endpoint.rest(fault.retry_after, now)
        if news and endpoint.worth_telling(seconds, now):
            since = now - (now if endpoint.refused_since is None else endpoint.refused_since)
            so_far = f" (nothing but that for {clock(since)}, {self.waiting} requests wait)" if since else ""
            self.say(f"{endpoint.shown}: {fault.reason}; nothing is sent there for {clock(seconds)}{so_far}")
        if self.pool.choose(now, endpoint) is None:
            await self._pause(random.uniform(1.0, 1.3) * seconds)  # not all at once when the rest is over

    def _say_left_out(self, endpoint: Endpoint, news: bool) -> None:
        if news:
            self.reminded_at = time.monotonic()
            rest = "the others go on" if self.up else "no server is left, so all requests wait until one answers"
            self.say(f"{endpoint.shown} is left out for now ({endpoint.reason}): {rest}")

    def _answered(self, endpoint: Endpoint, sent_at: float) -> None:
        since = endpoint.answered(sent_at)
        if since is not None:
            self.say(f"{endpoint.shown} answers again after {clock(time.monotonic() - since)}")
            self.pool.wake()

    async def _ready(self, wait_seconds: float) -> dict[Endpoint, list[Card]]:
        """The models of the servers that are ready; waits for the first one, and leaves out those that are not."""
        until, said, said_at = time.monotonic() + wait_seconds, "", 0.0
        while True:
            ready, missing = {}, {}
            found = await asyncio.gather(*(self._look(endpoint, CONNECT_SECONDS) for endpoint in self.endpoints))
            for endpoint, cards in zip(self.endpoints, found, strict=True):
                if isinstance(cards, NotReady):
                    missing[endpoint] = cards
                else:
                    ready[endpoint] = cards
            left = until - time.monotonic()
            if ready or left <= 0:
                break
            reasons = "; ".join(f"{endpoint.shown}: {fault.reason}" for endpoint, fault in missing.items())
            if reasons != said or time.monotonic() - said_at >= SAY_WAIT_SECONDS:
                said, said_at = reasons, time.monotonic()
                self.say(f"waiting {clock(left)} at most: {reasons}")
            await asyncio.sleep(min(2.0, left))
        for endpoint, fault in missing.items():
            if not ready:
                raise UserError(f"{endpoint.shown}: {fault.reason}; {fault.advice}")
            endpoint.leave_out(fault.reason, time.monotonic())
            self.say(f"{endpoint.shown} is left out until it answers: {fault.reason}")
        return ready

    async def _look(self, endpoint: Endpoint, seconds: float) -> list[Card] | NotReady:
        try:
            return await models_of(endpoint, self.transport, self.api_key_env, seconds)
        except NotReady as fault:
            return fault

    async def _watch(self, endpoint: Endpoint) -> None:
        """Looks after one server for ever: whether it is back, how long its queue is, when its rest is over."""
        metrics_at = 0.0
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            if endpoint.reason and now >= endpoint.look_at:
                await self._look_again(endpoint)
            elif not endpoint.reason and now >= metrics_at:
                endpoint.queue = await self._queue(endpoint)
                # One that has no metrics, or is too busy to tell, is asked less often.
                metrics_at = time.monotonic() + METRICS_SECONDS * (1 if endpoint.queue else 12)
            self._remind(now)
            self.pool.wake()

    async def _look_again(self, endpoint: Endpoint) -> None:
        endpoint.queue = None
        try:
            cards = await self._look(endpoint, LOOK_TIMEOUT)
            if not isinstance(cards, NotReady):
                self._refuse_less(choose(endpoint, cards, self.model))
                if self.fits is not None:
                    await self.fits(endpoint)
                endpoint.back(time.monotonic())
                return
            reason = cards.reason
        except UserError as error:  # another model, another key, other flags
            reason = str(error).removeprefix(f"{endpoint.shown}: ")
            if reason != endpoint.reason:
                self.say(f"{endpoint.shown} answers, but stays left out: {reason}")
        endpoint.leave_out(reason, time.monotonic())

    def _refuse_less(self, card: Card) -> None:
        """A server that comes back must take as many ids as those that the run was planned with.

        Raises:
            UserError: it takes fewer.
        """
        if self.max_model_len and card.max_model_len and card.max_model_len < self.max_model_len:
            raise UserError(f"expected a context of {self.max_model_len:,} ids, found {card.max_model_len:,}")

    async def _queue(self, endpoint: Endpoint) -> Queue | None:
        at = time.monotonic()
        try:
            status, content = await self.transport.within(LOOK_TIMEOUT, "GET", endpoint.at("//metrics"))
        except PassingFault:
            return None
        return queue_of(content, at) if status == 200 else None

    def _remind(self, now: float) -> None:
        """Says now and then that nothing is sent because no server is left."""
        if not self.up and now - self.reminded_at >= REMIND_SECONDS:
            self.reminded_at = now
            since = max(endpoint.left_out_at or now for endpoint in self.endpoints)
            reasons = "; ".join(f"{endpoint.shown}: {endpoint.reason}" for endpoint in self.endpoints)
            self.say(f"no server has answered for {clock(now - since)}, {self.waiting} requests wait ({reasons})")

    def _first(self) -> Endpoint:
        return next((endpoint for endpoint in self.endpoints if not endpoint.reason), self.endpoints[0])

    async def _version(self) -> str:
        """`/version` as vLLM answers it; "" where there is none."""
        try:
            status, content = await self.get("//version")
            return msgspec.json.decode(content, type=_Version).version if status == 200 else ""
        except (PassingFault, msgspec.DecodeError):
            return ""


class _Version(msgspec.Struct):
    version: str
