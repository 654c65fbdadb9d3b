"""A group on a partition in which keys may decide who is next: a gate goes along with every event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.broker.choose import Keyed, KeyedGroup
from holdfast.broker.delivery import Delivery
from holdfast.broker.leases import Delivered
from holdfast.delivery.decide import Moment
from holdfast.delivery.events import Event
from holdfast.errors import HoldfastError
from holdfast.model import Appended, Durability
from holdfast.settings import TopicSettings
from holdfast.storage.keeper import soonest


class KeyedDelivery(Delivery):
    """A delivery that follows keys, once it is told to."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._keyed_group: KeyedGroup | None = None

    @property
    def is_new(self) -> bool:
        """Whether nobody has served the group before."""
        return self.group.session == 1

    def mono_ms(self) -> int:
        """The time by which leases end."""
        return self._mono_ns() // 1_000_000

    def follow_keys(self, keyed: KeyedGroup | None) -> None:
        """Let keys decide who is next, or no longer."""
        with self.lock:
            if keyed is not self._keyed_group:
                self._supply.keyed = None if keyed is None else Keyed(keyed, self._log, self.group)
                self._keyed_group = keyed
        self.waiters.wake_all()

    def change(self, settings: TopicSettings, keyed: KeyedGroup | None = None) -> None:
        """Go on with other settings; leases that are running keep their ends."""
        super().change(settings)
        self.follow_keys(keyed)

    def commit_events(self, events: Sequence[Event], durability: Durability | None = None) -> Appended:
        """Journal, then apply. The caller holds the lock."""
        keyed = self._supply.keyed
        if keyed is None:
            return super().commit_events(events, durability)
        try:
            appended = super().commit_events(events, durability)
            keyed.note(events)
            self._look_at_keys(keyed)
        except BaseException as error:
            self._mend(error)
            raise
        return appended

    def count_next(self, most: int) -> int:
        """How many messages are ready now, as far as `most`; one that has expired since is counted."""
        with self.lock:
            self._take_back_dropped()
            return len(self._supply.choose(most, self._moment(), look=True).offsets)

    def tick(self) -> int | None:
        """Do what is due by now; answers in how many ms more will be due."""
        with self.lock:
            if self._supply.keyed is not None:
                self._look_at_keys(self._supply.keyed)
        return super().tick()

    def _receive(self, count: int, lease_ms: int, holder: str, session: int) -> list[Delivered] | None:
        keyed = self._supply.keyed
        if keyed is None:
            return super()._receive(count, lease_ms, holder, session)
        with keyed.lock:
            taken = super()._receive(count, lease_ms, holder, session)
        if taken == []:  # it may be that only time is missing
            mono_ms = self.mono_ms()
            self._expect_within(keyed.next_ms(mono_ms), mono_ms)
        return taken

    def _mend(self, error: BaseException) -> None:
        super()._mend(error)
        if self._supply.keyed is not None and not isinstance(error, HoldfastError):
            self._supply.keyed.begin()

    def _next_due_ms(self, now: Moment) -> int | None:
        keyed = self._supply.keyed
        return soonest(super()._next_due_ms(now), None if keyed is None else keyed.next_ms(now.mono_ms))

    def _look_at_keys(self, keyed: Keyed) -> None:
        """What happened to one message, or the time that has passed, may let others go."""
        mono_ms = self.mono_ms()
        if self.waiters and keyed.any_next(mono_ms):
            self.waiters.wake()  # one: whoever takes something comes here again
        self._expect_within(keyed.next_anywhere_ms(mono_ms), mono_ms)

    def _expect_within(self, due_ms: int | None, mono_ms: int) -> None:
        if due_ms is not None:
            self._expect_tick(mono_ms + due_ms)
