"""Being told to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

ENDING: Final = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def first_signal(tell: Callable[[int], object]) -> Iterator[None]:
    """Inside, the first SIGTERM or SIGINT is told of, and from then on one ends the process as if nobody listened.

    `tell` is called at any point of the main thread: it must take no lock. In another thread signals cannot be
    heard, and nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def heard(number: int, _frame: Any) -> None:
        for each in ENDING:
            signal.signal(each, signal.SIG_DFL)
        tell(number)

    before = {each: signal.signal(each, heard) for each in ENDING}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
