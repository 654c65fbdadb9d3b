"""Where keys decide who is next: the gates of a group's partitions, fed from their logs."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from holdfast.delivery.events import Event
from holdfast.delivery.group import Group
from holdfast.delivery.keys import KeyGate
from holdfast.delivery.limits import KeyPolicy, Limits
from holdfast.errors import DamagedRange, OffsetOutOfRange
from holdfast.settings import TopicSettings
from holdfast.storage.keeper import soonest
from holdfast.storage.log import Log


class KeyedGroup:
    """What the partitions of a group share: the limits of key groups, whose keys may lie in any of them.

    Its lock is taken after that of a partition's delivery, and held from a choice until its leases are noted, or
    two partitions could both give the last message that a limit allows.
    """

    def __init__(self, policy: KeyPolicy, *, now_mono_ms: int, new: bool) -> None:
        self.policy = policy
        self.lock = threading.RLock()
        self.limits = Limits(policy, now_mono_ms=now_mono_ms, new=new)
        self.gates: list[KeyGate] = []

    @staticmethod
    def of(settings: TopicSettings, *, now_mono_ms: int, new: bool) -> KeyedGroup | None:
        """What the settings ask for; None where keys decide nothing."""
        policy = KeyPolicy.of(settings)
        return None if policy is None else KeyedGroup(policy, now_mono_ms=now_mono_ms, new=new)


class Keyed:
    """The gate of one partition. Whoever uses it holds the lock of the partition's delivery."""

    def __init__(self, shared: KeyedGroup, log: Log, group: Group) -> None:
        self.lock = shared.lock
        self._log = log
        self._group = group
        self._record = log.follower().record
        with self.lock:
            self._gate = KeyGate(shared.limits)
            # An event here can let something go elsewhere only where there are limits.
            shared.gates.append(self._gate)
            self._gates = shared.gates if shared.policy.limited else [self._gate]
            self.begin()

    def begin(self) -> None:
        """Begin anew at the group's floor."""
        with self.lock:
            self._gate.begin(self._group, self._key_of)

    def choose(self, count: int, now_mono_ms: int) -> list[int]:
        """The next messages, up to `count`, in order of delivery."""
        with self.lock:
            self._gate.fill(self._group, self._log.end, self._key_of)
            return self._gate.choose(count, now_mono_ms)

    def note(self, events: Sequence[Event]) -> None:
        """These have happened."""
        with self.lock:
            for event in events:
                self._gate.note(event)
            if self._gate.scanned < 0:
                self.begin()

    def any_next(self, now_mono_ms: int) -> bool:
        """Whether any partition has something to give, as far as that can be seen from here."""
        with self.lock:
            self._gate.fill(self._group, self._log.end, self._key_of)
            return any(gate.any_next(now_mono_ms) for gate in self._gates)

    def next_ms(self, now_mono_ms: int) -> int | None:
        """In how many ms a rate lets the next message of this partition through."""
        with self.lock:
            return self._gate.next_ms(now_mono_ms)

    def next_anywhere_ms(self, now_mono_ms: int) -> int | None:
        """The same for all partitions: what is taken from one may make the others wait."""
        with self.lock:
            return soonest(*[gate.next_ms(now_mono_ms) for gate in self._gates])

    def _key_of(self, offset: int) -> bytes | None:
        try:
            return self._record(offset).key
        except (DamagedRange, OffsetOutOfRange):
            return None  # nobody is held back by what cannot be read; whoever would get it finds out
