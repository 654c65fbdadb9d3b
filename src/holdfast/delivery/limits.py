"""What a group's key policy says, and the limits that it sets to key groups, over all partitions together."""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from holdfast.settings import QueueSettings, TopicSettings

_NS_PER_MS: Final = 1_000_000
_NS_PER_S: Final = 1_000_000_000
_NO_LIMIT: Final = 2**63

# Groups whose bucket is full again are forgotten when this many have gathered, or twice as many as were left.
_FORGET_FROM: Final = 1_000


class KeyPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How the keys of messages decide who is next. The key group is the part of a key before the separator."""

    key_order: bool = False
    key_group_separator: str | None = None
    key_group_concurrency: int | None = None
    key_group_rate: float | None = None  # messages per second
    key_group_burst: int = 1
    key_group_fair: bool = False
    key_lookahead: int = 10_000

    @staticmethod
    def of(settings: QueueSettings) -> KeyPolicy | None:
        """What the settings ask for; None if keys decide nothing."""
        if not isinstance(settings, TopicSettings) or not settings.keyed:
            return None
        return KeyPolicy(**{name: getattr(settings, name) for name in KeyPolicy.__struct_fields__})

    @property
    def limited(self) -> bool:
        """Whether a key group can be at a limit of its own."""
        return self.key_group_concurrency is not None or self.key_group_rate is not None


class Rates:
    """A bucket for each key group: so many messages at once, then as fast as the rate lets them through.

    A bucket is one number, the time at which it will be full again. One that is not known began, full or with
    a single message in it, when the rates did.
    """

    def __init__(self, rate: float, burst: int, *, since_ms: int, full: bool) -> None:
        # Rounded up: the rate is a promise. The clock counts in ms, so a ms' worth must fit into the bucket.
        self._interval_ns = max(-int(-_NS_PER_S // rate), 1)
        self._burst = max(burst, -int(-rate // 1_000))
        self._spare_ns = (self._burst - 1) * self._interval_ns
        self._began_ns = since_ms * _NS_PER_MS + (0 if full else self._spare_ns)
        self._full_at_ns: dict[bytes, int] = {}
        self._forget_at = _FORGET_FROM

    def left(self, name: bytes, now_ms: int) -> int:
        """How many messages of the key group may go now."""
        room_ns = now_ms * _NS_PER_MS - self._full_at(name) + self._spare_ns
        return 0 if room_ns < 0 else min(room_ns // self._interval_ns + 1, self._burst)

    def opens_ms(self, name: bytes) -> int:
        """When the next message of the key group may go."""
        return -((self._spare_ns - self._full_at(name)) // _NS_PER_MS)

    def take(self, name: bytes, now_ms: int) -> None:
        """A message of the key group went."""
        now_ns = now_ms * _NS_PER_MS
        self._full_at_ns[name] = max(self._full_at(name), now_ns) + self._interval_ns
        if len(self._full_at_ns) > self._forget_at:
            self._full_at_ns = {name: at_ns for name, at_ns in self._full_at_ns.items() if at_ns > now_ns}
            self._forget_at = max(2 * len(self._full_at_ns), _FORGET_FROM)

    def _full_at(self, name: bytes) -> int:
        return self._full_at_ns.get(name, self._began_ns)


class Watcher(Protocol):
    """Whoever has messages of a key group."""

    def limit_changed(self, name: bytes) -> None:
        """Somebody else took or gave back a message of the key group."""


class Limits:
    """How many messages of each key group are leased, and how fast they may go.

    All partitions of a group share one: the keys of a key group may lie in any of them. Whoever uses it holds the
    group's lock.
    """

    def __init__(self, policy: KeyPolicy, *, now_mono_ms: int, new: bool) -> None:
        """A new group begins with full buckets; after a restart there is one message in each, or many restarts
        would let many bursts through."""
        self.policy = policy
        self.since_ms = now_mono_ms
        self._most = policy.key_group_concurrency
        self._rates: Rates | None = None
        if policy.key_group_rate is not None:
            self._rates = Rates(policy.key_group_rate, policy.key_group_burst, since_ms=now_mono_ms, full=new)
        self._leased: dict[bytes, int] = {}
        self._watchers: dict[bytes, list[Watcher]] = {}

    def watch(self, name: bytes, who: Watcher) -> None:
        self._watchers.setdefault(name, []).append(who)

    def unwatch(self, name: bytes, who: Watcher) -> None:
        watchers = self._watchers[name]
        watchers.remove(who)
        if not watchers:
            del self._watchers[name]

    def is_full(self, name: bytes) -> bool:
        """Whether as many messages of the key group are leased as may be."""
        return self._most is not None and self._leased.get(name, 0) >= self._most

    def opens_ms(self, name: bytes) -> int:
        """When the rate lets the next message of the key group go; that may be long ago."""
        return self.since_ms if self._rates is None else self._rates.opens_ms(name)

    def left(self, name: bytes, now_ms: int) -> int:
        """How many messages of the key group may go now."""
        left = _NO_LIMIT if self._most is None else self._most - self._leased.get(name, 0)
        return left if self._rates is None else min(left, self._rates.left(name, now_ms))

    def take(self, name: bytes, now_ms: int | None, who: Watcher) -> None:
        """A message of the key group is leased: now, or, where there is no time, it was already."""
        self._leased[name] = self._leased.get(name, 0) + 1
        if self._rates is not None and now_ms is not None:
            self._rates.take(name, now_ms)
        self._tell(name, who)

    def give_back(self, name: bytes, count: int, who: Watcher) -> None:
        """Messages of the key group are leased no more."""
        left = self._leased.get(name, 0) - count
        if left > 0:
            self._leased[name] = left
        else:
            self._leased.pop(name, None)
        self._tell(name, who)

    def _tell(self, name: bytes, who: Watcher) -> None:
        for other in self._watchers.get(name, ()):
            if other is not who:
                other.limit_changed(name)
