"""SIGINT and SIGTERM as a request: the first drains, the second abandons what is in flight."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stop:
    """What SIGINT and SIGTERM do: the first asks to drain, the second abandons what is in flight."""

    def __init__(self, drain: Callable[[], object], abandon: Callable[[], object]) -> None:
        self.drain, self.abandon = drain, abandon
        self.signals = 0

    def __call__(self, *_: object) -> None:
        """The signal handler."""
        self.signals += 1
        (self.drain if self.signals == 1 else self.abandon)()

    def requested(self) -> bool:
        """Whether a signal came."""
        return self.signals > 0


@contextmanager
def on_signals(
    install: Callable[[signal.Signals], object], remove: Callable[[signal.Signals], object]
) -> Iterator[None]:
    """Handles SIGINT and SIGTERM inside the block; outside the main thread Python allows no handlers."""
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    for number in numbers:
        install(number)
    try:
        yield
    finally:
        for number in numbers:
            remove(number)
