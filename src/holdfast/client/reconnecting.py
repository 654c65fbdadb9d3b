"""One state machine for the way to a server, shared by every call of a client.

    open ── a connection breaks, or none can be made ──► broken ── the pause is over ──► trying
      ▲                                                    ▲                               │
      └──────────── a connection is made ◄─────────────────┼───────────────────────────────┤
                                                           └────── none can be made ◄──────┘

While it is broken nobody tries but when the pause is over, however many wait; each pause is longer than the one
before, up to a limit, and nobody's is quite as long as another's. The limit is low at first: a server that starts
again is back within seconds, and its clients should be as soon. One that stays away is asked less often.
"""

from __future__ import annotations

from typing import Final

from holdfast.env import World

FIRST_PAUSE_MS: Final = 25
SOON_PAUSE_MS: Final = 250  # while the server may only be starting again
SOON_S: Final = 5
MOST_PAUSE_MS: Final = 1_000

_NS: Final = 1_000_000


class Reconnecting:
    """Whether the server can be reached, and when to try again."""

    def __init__(self, world: World) -> None:
        self._clock = world.clock
        self._random = world.ids.random_u32
        self.failures = 0  # one after the other
        self._next_ns = 0
        self._since_ns = 0  # of the first of them

    @property
    def is_open(self) -> bool:
        return self.failures == 0

    def pause_s(self) -> float:
        """How long to wait before a connection is tried; 0 where nothing is wrong."""
        if self.failures == 0:
            return 0.0
        return max(self._next_ns - self._clock.monotonic_ns(), 0) / 1e9

    def failed(self) -> None:
        """No connection could be made."""
        now_ns = self._clock.monotonic_ns()
        if self.failures and now_ns < self._next_ns:
            return  # somebody else has found that out just now
        if not self.failures:
            self._since_ns = now_ns
        self.failures += 1
        self._next_ns = now_ns + round(self.backoff_ms(self.failures - 1) * _NS)

    def opened(self) -> None:
        """A connection was made."""
        self.failures = 0

    def backoff_ms(self, attempt: int) -> float:
        """The pause before another attempt: twice as long each time, and a half of it by chance."""
        is_back_soon = self.failures and self._clock.monotonic_ns() - self._since_ns < SOON_S * 1_000 * _NS
        longest = min(FIRST_PAUSE_MS << min(attempt, 16), SOON_PAUSE_MS if is_back_soon else MOST_PAUSE_MS)
        return longest * (0.5 + self._random() / 2**33)
