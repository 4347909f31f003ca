"""One round of load on one server: all prompts once, so many at a time, and what the server counted meanwhile.

A closed loop: as soon as a reply ends, the next prompt is sent, so the batch is full until the last prompts run out.
How full it was is reported (`in_flight`). Anything that the server generated for somebody else is found by its own
count of tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from draftsmith.errors import UserError
from draftsmith.measure.counters import CountedEngine, Counters, difference, read_counters
from draftsmith.measure.prompts import Prompt
from draftsmith.measure.streaming import Streamed, stream
from draftsmith.target.endpoints import Endpoint
from draftsmith.target.reply import Sampling
from draftsmith.target.transport import Transport
from draftsmith.target.wire import PassingFault

FOREIGN = 0.02
"""Of the tokens a server generated in a round: more than this share for others, and its round counts as disturbed."""
SETTLE_SECONDS, SETTLE_TRIES = 0.1, 20
"""Engines publish their counters up to a step late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that is measured."""

    side: str
    """`draft` or `baseline`."""
    endpoint: Endpoint
    engine: CountedEngine
    model: str
    version: str
    transport: Transport

    def counters(self) -> Counters:
        """Its counters now."""
        return read_counters(self.endpoint.url, self.transport.authorization)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One round on one server."""

    replies: tuple[Streamed, ...]
    """In prompt order."""
    seconds: float
    counted: Counters

    @property
    def tokens(self) -> int:
        """Generated, stop ids included."""
        return sum(len(reply.ids) for reply in self.replies)

    @property
    def tokens_per_second(self) -> float:
        """Output of the whole server, prompts' own time included."""
        return self.tokens / self.seconds

    @property
    def in_flight(self) -> float:
        """Requests that ran at a time, on average."""
        return sum(reply.seconds for reply in self.replies) / self.seconds

    @property
    def drafts(self) -> int:
        """Steps that drafted, by the server's counters, or as its replies tell (SGLang)."""
        return self.counted.drafts or sum(reply.verified or 0 for reply in self.replies)

    @property
    def foreign(self) -> int:
        """Tokens that the server generated for others meanwhile."""
        return max(0, (self.counted.generated or self.tokens) - self.tokens)

    @property
    def disturbed(self) -> bool:
        """Whether others used the server so much that its numbers are not ours."""
        return self.foreign > FOREIGN * self.tokens


async def run_load(
    server: Server,
    prompts: Sequence[Prompt],
    samplings: Mapping[str, Sampling],
    stop_ids: frozenset[int],
    concurrency: int,
    tick: Callable[[], None],
) -> Load:
    """Runs all prompts, `concurrency` at a time; `tick` is called after each.

    Raises:
        UserError: a request failed: a round without all of its replies measures something else.
    """
    waiting = list(enumerate(prompts))[::-1]
    found: dict[int, Streamed] = {}

    async def worker() -> None:
        while waiting:
            index, prompt = waiting.pop()
            found[index] = await stream(
                server.transport,
                server.endpoint,
                server.engine,
                server.model,
                prompt.key,
                prompt.ids,
                samplings[prompt.key],
                stop_ids,
            )
            tick()

    before = server.counters()
    started = perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(prompts))):
                group.create_task(worker())
    except* PassingFault as faults:
        first = next(iter(_leaves(faults)))
        raise UserError(
            f"{server.endpoint.shown}: expected a reply to every prompt, one failed ({first}); nothing is kept of this "
            "round, see the server's log and measure again"
        ) from None
    seconds = perf_counter() - started
    replies = tuple(found[index] for index in range(len(prompts)))
    return Load(replies=replies, seconds=seconds, counted=await _settled(server, before, replies))


async def _settled(server: Server, before: Counters, replies: Sequence[Streamed]) -> Counters:
    """What was counted since `before`, once the server has counted all of our tokens."""
    ours = sum(len(reply.ids) for reply in replies)
    for _ in range(SETTLE_TRIES):
        counted = difference(server.counters(), before)
        if counted.generated is None or counted.generated >= ours:
            break
        await asyncio.sleep(SETTLE_SECONDS)
    return counted


def _leaves(group: BaseExceptionGroup[PassingFault]) -> list[str]:
    """The reasons in a group, however deep."""
    found: list[str] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error.reason]
    return found
