"""Rate limits, barriers and the callbacks of groups, as documents that expire.

All counters of a limiter are in one document, so that a change of one of them is checked against the sum of all: a
sliding window has a counter for each second (`KEY@SECOND`), a bucket one for each interval. Expired counters are left
out when the document is next written, so it stays as small as the window is wide.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

from dramatiq.rate_limits import RateLimiterBackend

from holdfast.env import real_world
from holdfast.integrations.places import Tls, places
from holdfast.integrations.results import EXPIRES, Results

_MS: Final = 1000
_PAUSE_S: Final = (0.001, 0.05)  # the shortest and the longest between two looks at a document
_COUNTERS: Final = "counters"  # by key: the value, and when it expires


class HoldfastRateLimits(RateLimiterBackend):
    """A backend for dramatiq's rate limiters, barriers and `GroupCallbacks`, at the same places as the broker.

    Args:
        url: A folder, the address of a server, or a store.
        prefix: Of the names of documents, if several programs share a place.
        tls: For a server whose certificate comes from an authority of your own.
    """

    def __init__(self, url: str, *, prefix: str = "", tls: Tls = None) -> None:
        self.url = url
        opening = {} if tls is None else {"tls": tls}
        self._limits = Results(lambda: places.at(url, opening).broker, f"{prefix}dramatiq.limit.")
        self._clock = real_world().clock

    def add(self, key: str, value: int, ttl: int) -> bool:
        """Create a counter, unless there is one."""
        return self._set(key, ttl, lambda counters: None if key in counters else value)

    def incr(self, key: str, amount: int, maximum: int, ttl: int) -> bool:
        """Count up, unless that is more than the maximum."""
        return self._set(key, ttl, lambda counters: _at_most(maximum, counters.get(key, 0) + amount))

    def decr(self, key: str, amount: int, minimum: int, ttl: int) -> bool:
        """Count down, unless that is less than the minimum."""

        def less(counters: dict[str, int]) -> int | None:
            value = counters.get(key, 0) - amount
            return None if value < minimum else value

        return self._set(key, ttl, less)

    def incr_and_sum(self, key: str, keys: Callable[[], Iterable[str]], amount: int, maximum: int, ttl: int) -> bool:
        """Count up, unless the sum of all `keys`, which are counters of one limiter, is more than the maximum."""

        def more(counters: dict[str, int]) -> int | None:
            total = amount + sum(counters.get(each, 0) for each in keys())
            return None if total > maximum else _at_most(maximum, counters.get(key, 0) + amount)

        return self._set(key, ttl, more)

    def wait(self, key: str, timeout: int | None) -> bool:
        """Wait for `wait_notify`, which may have been called before; None: without a limit."""
        nothing, began_ns = threading.Event(), self._clock.monotonic_ns()
        shortest_s, longest_s = _PAUSE_S
        while self._limits.get(key) is None:
            waited_s = (self._clock.monotonic_ns() - began_ns) / 1e9
            if timeout is not None and waited_s >= timeout / _MS:
                return False
            self._clock.wait(nothing, min(longest_s, max(shortest_s, waited_s / 10)))
        return True

    def wait_notify(self, key: str, ttl: int) -> None:
        self._limits.put(key, {}, keep_s=ttl / _MS)

    def _set(self, key: str, ttl: int, choose: Callable[[dict[str, int]], int | None]) -> bool:
        """Give a counter the value that is chosen from all those of its limiter; None: leave it, and return False."""

        def changed(before: dict[str, Any]) -> dict[str, Any] | None:
            now_ms = self._limits.now_ms()
            live = {name: row for name, row in before.get(_COUNTERS, {}).items() if row[1] > now_ms}
            value = choose({name: row[0] for name, row in live.items()})
            if value is None:
                return None
            counters = {**live, key: [value, now_ms + ttl]}
            return {_COUNTERS: counters, EXPIRES: max(expires_at_ms for _, expires_at_ms in counters.values())}

        done = self._limits.change(_limiter(key), changed) is not None
        self._limits.sweep()
        return done


def _limiter(key: str) -> str:
    """The limiter that a counter belongs to: dramatiq writes the time of a counter behind the last @."""
    name, at, when = key.rpartition("@")
    return name if at and when.isdecimal() else key


def _at_most(maximum: int, value: int) -> int | None:
    return None if value > maximum else value
