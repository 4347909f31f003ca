"""SIGINT and SIGTERM as a request to stop at the next safe place; a second signal stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether a stop was asked for; handlers are restored afterwards.

    The second signal raises KeyboardInterrupt. Outside the main thread, where Python allows no handlers, it is never
    asked for.
    """
    signals: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        if len(signals) > 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, handle) for number in numbers]
    try:
        yield lambda: bool(signals)
    finally:
        for number, old in zip(numbers, previous, strict=True):
            signal.signal(number, old)
