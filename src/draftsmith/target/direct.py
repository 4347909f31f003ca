"""Single blocking requests to an engine: its metrics, its health, a prompt outside any load.

Never through a proxy, like all that goes over `transport`: an engine often listens on this machine or inside a cluster,
where a proxy of the environment cannot reach it.
"""

from __future__ import annotations

import base64
import urllib.request
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(url: str, timeout: float, headers: Mapping[str, str] | None = None, body: bytes | None = None) -> bytes:
    """The body of the answer; a POST of JSON where there is a body.

    Args:
        url: may hold a user and a password, which are sent as basic authorization unless `headers` have another.
        timeout: seconds without a sign of it.
        headers: sent along.
        body: JSON.

    Raises:
        OSError: no answer, or an error's (urllib.error.HTTPError).
    """
    parts = urlsplit(url)
    sent = {"Content-Type": "application/json"} if body is not None else {}
    user, at, host = parts.netloc.rpartition("@")
    if at:
        sent["Authorization"] = "Basic " + base64.b64encode(unquote(user).encode()).decode()
    request = urllib.request.Request(parts._replace(netloc=host).geturl(), body, sent | dict(headers or {}))
    with OPENER.open(request, timeout=timeout) as answer:
        content: bytes = answer.read()
        return content
