"""The heartbeats of a consumer, as the thread beside sees them: they keep no consumer alive that nobody has."""

from __future__ import annotations

import logging
from typing import Final

from holdfast.client.calling import Caller
from holdfast.client.http import Ask
from holdfast.client.ways import run
from holdfast.errors import HoldfastError
from holdfast.protocol.groups import Beat

logger = logging.getLogger(__name__)

_NS: Final = 1_000_000


class Pulse:
    """Whether the consumer lives, and how the server hears of it."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._path = ""
        self._every_ns = self._most_ns = 0
        self.closed = False
        self.polling = False
        self.polled_ns = 0

    def begin(self, path: str, heartbeat_ms: int, max_poll_ms: int) -> None:
        """It has joined, and is a member of this name from now on."""
        self._path = path
        self._every_ns, self._most_ns = heartbeat_ms * _NS, max_poll_ms * _NS
        self.polled_ns = self._caller.world.clock.monotonic_ns()

    def beat(self, now_ns: int) -> int:
        """Say that it lives, if it does: one that has not polled for so long is taken for stuck."""
        if self.polling or now_ns - self.polled_ns < self._most_ns:
            try:
                run(self._caller.call(Ask(method="POST", path=self._path, answers=Beat)))
            except HoldfastError as error:  # its next poll will tell
                logger.debug("heartbeat not taken", extra={"path": self._path, "why": str(error)})
        return now_ns + self._every_ns
