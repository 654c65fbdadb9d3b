"""How keys decide which message is next: the settings of a group, and the rates of its key groups."""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.settings import QueueSettings, TopicSettings

_NS_PER_MS: Final = 1_000_000
_NS_PER_S: Final = 1_000_000_000
# Key groups whose bucket is full again are forgotten once there are this many, or twice as many as remained last time.
_FORGET_FROM: Final = 1_000


class KeyPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How keys decide which message is next. The key group is the part of a key before the separator."""

    key_order: bool = False
    key_group_separator: str | None = None
    key_group_concurrency: int | None = None
    key_group_rate: float | None = None  # messages per second
    key_group_burst: int = 1
    key_group_fair: bool = False
    key_lookahead: int = 10_000

    @staticmethod
    def of(settings: QueueSettings) -> KeyPolicy | None:
        """Return the policy in the settings; None if keys decide nothing."""
        if not isinstance(settings, TopicSettings) or not settings.keyed:
            return None
        return KeyPolicy(**{name: getattr(settings, name) for name in KeyPolicy.__struct_fields__})

    @property
    def limited(self) -> bool:
        """Whether a key group can have limits of its own."""
        return self.key_group_concurrency is not None or self.key_group_rate is not None


class KeyRates:
    """A token bucket for each key group: a burst at once, then as fast as the rate allows.

    A bucket is one number, the time at which it will be full again. A bucket that is not stored has been filling since
    the rates began, when it was full or had a single token.
    """

    def __init__(self, rate: float, burst: int, *, since_ms: int, full: bool) -> None:
        # Rounded up, because the rate is a promise. The clock counts in ms, so the bucket must hold a ms' worth of
        # tokens.
        self._interval_ns = max(-int(-_NS_PER_S // rate), 1)
        self._burst = max(burst, -int(-rate // 1_000))
        self._spare_ns = (self._burst - 1) * self._interval_ns
        self._began_ns = since_ms * _NS_PER_MS + (0 if full else self._spare_ns)
        self._full_at_ns: dict[bytes, int] = {}
        self._forget_at = _FORGET_FROM

    def left(self, name: bytes, now_ms: int) -> int:
        """Return how many messages of the key group may go now."""
        room_ns = now_ms * _NS_PER_MS - self._full_at(name) + self._spare_ns
        return 0 if room_ns < 0 else min(room_ns // self._interval_ns + 1, self._burst)

    def opens_ms(self, name: bytes) -> int:
        """Return when the next message of the key group may go."""
        return -((self._spare_ns - self._full_at(name)) // _NS_PER_MS)

    def take(self, name: bytes, now_ms: int) -> None:
        """Count a message of the key group."""
        now_ns = now_ms * _NS_PER_MS
        self._full_at_ns[name] = max(self._full_at(name), now_ns) + self._interval_ns
        if len(self._full_at_ns) > self._forget_at:
            self._full_at_ns = {name: at_ns for name, at_ns in self._full_at_ns.items() if at_ns > now_ns}
            self._forget_at = max(2 * len(self._full_at_ns), _FORGET_FROM)

    def _full_at(self, name: bytes) -> int:
        return self._full_at_ns.get(name, self._began_ns)
