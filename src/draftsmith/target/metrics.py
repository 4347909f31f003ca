"""What a server's own metrics say of its queue, where it has such: vLLM, SGLang and llama.cpp in Prometheus' text."""

from __future__ import annotations

import re
from typing import NamedTuple

RUNNING = (b"vllm:num_requests_running", b"sglang:num_running_reqs", b"llamacpp:requests_processing")
WAITING = (b"vllm:num_requests_waiting", b"sglang:num_queue_reqs", b"llamacpp:requests_deferred")
LINE = re.compile(rb"^(%s)(?:\{.*\})? ([0-9.eE+-]+)(?=\s|$)" % b"|".join(RUNNING + WAITING), re.MULTILINE)


class Queue(NamedTuple):
    """Requests that a server works on and that wait in it, whoever sent them."""

    running: int
    waiting: int
    at: float = 0.0
    """When it was asked for."""

    @property
    def share(self) -> float:
        """Of all its requests, those that wait."""
        return self.waiting / max(1, self.running + self.waiting)


def queue_of(metrics: bytes, at: float) -> Queue | None:
    """The queue, summed over a server's ranks; None where the text does not tell."""
    found = [(name, float(value)) for name, value in LINE.findall(metrics)]
    if not found:
        return None
    return Queue(
        running=int(sum(value for name, value in found if name in RUNNING)),
        waiting=int(sum(value for name, value in found if name in WAITING)),
        at=at,
    )
