"""Which server a request goes to: how busy each one is, how well it does, and which ones are left out for now.

The least burdened server is chosen. One that cannot be reached, or that gives nothing but faults, is left out and
looked at with growing pauses; once it answers, one request goes ahead on trial before the others follow. One that asks
for patience rests as long as it asked. No clock here but the caller's; choosing costs a look at each server.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from urllib.parse import urlsplit

from draftsmith.errors import UserError
from draftsmith.recipe import without_credentials
from draftsmith.target.metrics import Queue

FAULTS_IN_A_ROW = 3
"""So many, and a quarter of what a server has in flight, with no reply between them: it is left out."""
LOOK_SECONDS, LOOK_LIMIT = 1.0, 30.0
"""Pause before the first look at a server that is left out, and before the later ones at most."""
TRIAL_SECONDS = 5.0
"""A request on trial that has met no fault so long counts as a good sign: replies are silent until their end."""
TELL_REST_SECONDS, TELL_SECONDS = 10.0, 60.0
"""People hear of a rest as long as that, and of many short ones without a reply after a minute, and every minute."""
HEALTH_WEIGHT = 0.1
BACKOFF_SECONDS, BACKOFF_LIMIT = 0.5, 60.0


class Endpoint:
    """One server."""

    def __init__(self, url: str) -> None:
        self.url, self.shown = url, without_credentials(url)
        self.in_flight = self.sent = 0
        self.health = 1.0
        """Share of requests that met no fault, the latest counting most."""
        self.faults = self.refusals = 0
        """In a row."""
        self.reason = ""
        """Why it is left out; "": it is not."""
        self.left_out_at: float | None = None
        """Since when there was no reply; set until the first one after coming back."""
        self.look_at = self.pause = 0.0
        self.back_at = self.trial_until = 0.0
        self.tried = True
        self.rests_until = 0.0
        self.refused_since: float | None = None
        """Since when it asks for patience and nothing else; None: it does not."""
        self.told_at: float | None = None
        """When people were last told so."""
        self.queue: Queue | None = None

    def at(self, path: str) -> str:
        """The URL of a path under the API base or, with two slashes, under the server's root."""
        return self.url.removesuffix("/v1") + path[1:] if path.startswith("//") else self.url + path

    def state(self, now: float) -> str:
        """`ok`, `resting` or `down`."""
        return "down" if self.reason else "resting" if now < self.rests_until else "ok"

    def free(self, now: float) -> bool:
        """Whether a request may go there."""
        on_trial = now < self.trial_until
        return self.state(now) == "ok" and not (on_trial and self.tried)

    def burden(self) -> tuple[float, int]:
        """Order of preference: the fewest requests in flight for its health, then the fewest ever sent."""
        return (self.in_flight + 1) / max(self.health, 0.05), self.sent

    def begin(self) -> None:
        """A request goes out."""
        self.in_flight += 1
        self.sent += 1
        self.tried = True

    def answered(self, sent_at: float) -> float | None:
        """There was a reply. Returns since when there had been none, if this is the first after being left out."""
        self.health += HEALTH_WEIGHT * (1.0 - self.health)
        if self.reason or sent_at < self.back_at:
            return None  # a server that shuts down may still end what it has begun
        since, self.left_out_at = self.left_out_at, None
        self.faults = self.refusals = 0
        self.pause = self.trial_until = 0.0
        self.refused_since = self.told_at = None
        return since

    def faulted(self, reason: str, sent_at: float, now: float) -> bool:
        """A request sent at `sent_at` met a fault. Returns whether the server is left out now and was well before."""
        self.health -= HEALTH_WEIGHT * self.health
        if self.reason or sent_at < self.back_at:
            return False  # one of the old faults
        self.faults += 1
        if now < self.trial_until or self.faults >= max(FAULTS_IN_A_ROW, self.in_flight // 4):
            return self.leave_out(reason, now)
        return False

    def lost(self, reason: str, sent_at: float, now: float) -> bool:
        """It could not be reached. Returns as `faulted`."""
        if self.reason or sent_at < self.back_at:
            return False
        return self.leave_out(reason, now)

    def leave_out(self, reason: str, now: float) -> bool:
        """No request goes there until a look finds it answering; the looks become rarer. Returns as `faulted`."""
        self.pause = min(LOOK_LIMIT, 2 * self.pause) or LOOK_SECONDS
        self.reason, self.look_at = reason, now + random.uniform(0.7, 1.0) * self.pause
        news = self.left_out_at is None
        self.left_out_at = now if self.left_out_at is None else self.left_out_at
        return news

    def back(self, now: float) -> None:
        """A look found it answering: one request may go there, and after `TRIAL_SECONDS` or its reply all others."""
        self.reason, self.faults, self.tried = "", 0, False
        self.back_at, self.trial_until = now, now + TRIAL_SECONDS

    def rest(self, asked: float, now: float) -> tuple[float, bool]:
        """It asks for patience: nothing goes there for `asked` seconds, or else for a doubling time.

        Returns:
            The seconds, and whether this is news: it tells each of the requests that it refuses.
        """
        if now < self.rests_until:
            seconds = max(asked, self.rests_until - now)
            self.rests_until = max(self.rests_until, now + asked)
            return seconds, False
        self.refusals += 1
        self.refused_since = now if self.refused_since is None else self.refused_since
        seconds = max(asked, backoff(self.refusals))
        self.rests_until = now + seconds
        return seconds, True

    def worth_telling(self, seconds: float, now: float) -> bool:
        """Whether people should hear of a rest: a long one, and once a minute that it asks for nothing but patience."""
        quiet_since = self.refused_since if self.told_at is None else self.told_at
        first_long = self.told_at is None and seconds >= TELL_REST_SECONDS
        if first_long or (quiet_since is not None and now - quiet_since >= TELL_SECONDS):
            self.told_at = now
            return True
        return False


class Endpoints:
    """All servers of one model."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.all = [Endpoint(base_url(url)) for url in urls]
        self.changed = asyncio.Event()

    def choose(self, now: float, avoid: Endpoint | None) -> Endpoint | None:
        """The server to send to, another one than `avoid` if possible; None: none is free."""
        free = [endpoint for endpoint in self.all if endpoint.free(now)]
        others = [endpoint for endpoint in free if endpoint is not avoid]
        return min(others or free, key=Endpoint.burden, default=None)

    def wake(self) -> None:
        """Lets those who wait for a free server look again."""
        self.changed.set()
        self.changed.clear()


def backoff(attempt: int) -> float:
    """Seconds before try `attempt` + 1: doubling, bounded, and spread so that requests don't come back all at once."""
    doubled: float = BACKOFF_SECONDS * 2.0 ** min(attempt, 30)
    return random.uniform(0.5, 1.0) * min(BACKOFF_LIMIT, doubled)


def base_url(url: str) -> str:
    """The URL without a trailing slash or a pasted endpoint path; http:// where no scheme is given.

    Raises:
        UserError: no URL.
    """
    given, url = url, url if "://" in url else f"http://{url}"
    try:
        usable = urlsplit(url).scheme in ("http", "https") and urlsplit(url).hostname
    except ValueError:
        usable = None
    if not usable:
        raise no_url(given)
    return url.rstrip("/").removesuffix("/chat/completions").removesuffix("/models")


def no_url(given: str) -> UserError:
    """What to raise for a server's URL that is none."""
    shown = given and without_credentials(given)
    return UserError(f"--server: expected a URL such as http://localhost:8000, found {shown!r}")
