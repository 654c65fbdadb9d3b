"""The short ways of a group: one message in plain order, received or acked without detours.

Each is the fused form of what `Delivery` does in steps; a property test holds the two to each other. A group whose
messages have ordering keys, or are traced, goes the long way always.
"""

from __future__ import annotations

from typing import Any

from holdfast.broker.choose import KeyedGroup
from holdfast.broker.keyed_delivery import KeyedDelivery
from holdfast.broker.leases import Delivered
from holdfast.broker.messages import MOVED
from holdfast.delivery.commands import PROVEN, Receipt
from holdfast.delivery.events import Acked, Leased, encode_event
from holdfast.delivery.group import Lease
from holdfast.errors import DamagedRange, LeaseLost, OffsetOutOfRange
from holdfast.settings import TopicSettings


class QuickDelivery(KeyedDelivery):
    """A delivery that knows short ways."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._write_event = self.journal.write_one
        self._is_plain = is_plain(self.settings)

    def change(self, settings: TopicSettings, keyed: KeyedGroup | None = None) -> None:
        self._is_plain = False  # before anybody relies on seeing every event
        super().change(settings, keyed)
        self._is_plain = is_plain(settings)

    def receive_next(self) -> Delivered | None:
        """The next message in plain order, for the group's own lease; None where anything is special."""
        with self.lock:
            return self._receive_plain(self.settings.lease_ms, self.holder, self.group.session)

    def _receive_plain(self, lease_ms: int, holder: str, session: int) -> Delivered | None:
        group = self.group
        if not self._is_plain or self._dropped or group.lanes.filled or group.ahead or group.cursor >= self._log.end:
            return None
        try:
            return self._receive_one(lease_ms, holder, session)
        except BaseException as error:
            self._mend(error)
            raise

    def _receive_one(self, lease_ms: int, holder: str, session: int) -> Delivered | None:
        """The fused form of `_receive` for one message in plain order; None where anything is special."""
        group = self.group
        offset = group.cursor
        try:
            record = self._supply.record(offset)
        except (DamagedRange, OffsetOutOfRange):
            return None
        if record.expires_at_ms or record.flags & MOVED:
            return None
        now_ns = self._now_ns()
        until_ms = self._mono_ns() // 1_000_000 + lease_ms
        fence = (group.fence + 1) | PROVEN  # as next_fence
        at_ms = now_ns // 1_000_000
        self._write_event(
            encode_event(Leased((offset, offset + 1), offset + 1, fence, session, lease_ms, until_ms, at_ms, holder)),
            now_ns,
        )
        lease = Lease(fence, session, lease_ms, until_ms, at_ms, holder)
        group.lease_one(offset, lease)
        if until_ms < self._due_mono_ms:
            self._due_mono_ms = until_ms
            self.on_attention()
        self._count_delivered()
        self._observe_wait(now_ns - record.timestamp_ns)
        return Delivered(record, lease, 1, self.home)

    def ack_one(self, offset: int, fence: int) -> LeaseLost | None:
        """The fused form of `ack` for one message, where acks need not be synced."""
        with self.lock:
            plain, group, now_ns = self._is_plain, self.group, self._now_ns()
            lease = group.leases.get(offset)
            if lease is None or lease.fence != fence:
                return self._lost([Receipt(offset, fence)])
            if plain:
                try:
                    self._write_event(encode_event(Acked((offset, offset + 1))), now_ns)
                    group.ack_one(offset)
                except BaseException as error:
                    self._mend(error)
                    raise
        if not plain:
            return super().ack_one(offset, fence)
        self._count_acked()
        self._observe_handle(now_ns - lease.at_ms * 1_000_000)
        return None


def is_plain(settings: TopicSettings) -> bool:
    """Whether the messages of a group with these settings may go the short ways."""
    return not settings.keyed and not settings.trace_sample
