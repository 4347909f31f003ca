"""SIGINT and SIGTERM as a request to stop at the next safe place; a second signal stops at once."""

from __future__ import annotations

import signal
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NUMBERS = (signal.SIGINT, signal.SIGTERM)


def abandon() -> None:
    """What a second signal does where nothing else is said.

    Raises:
        KeyboardInterrupt: always.
    """
    raise KeyboardInterrupt


@contextmanager
def stopping(
    first: Callable[[], object] = lambda: None,
    second: Callable[[], object] = abandon,
    loop: AbstractEventLoop | None = None,
) -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether a stop was asked for; handlers are restored afterwards.

    Outside the main thread, where Python allows no handlers, it is never asked for.

    Args:
        first: called at the first signal.
        second: called at every further one.
        loop: an event loop that is to run both, between its own steps; None: they run wherever the program is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    signals = 0

    def handle(*_: object) -> None:
        nonlocal signals
        signals += 1
        (first if signals == 1 else second)()

    before = {number: signal.getsignal(number) for number in NUMBERS}
    for number in NUMBERS:
        if loop is None:
            signal.signal(number, handle)
        else:
            loop.add_signal_handler(number, handle)
    try:
        yield lambda: signals > 0
    finally:
        for number, handler in before.items():
            if loop is not None:
                loop.remove_signal_handler(number)
            signal.signal(number, handler or signal.SIG_DFL)
