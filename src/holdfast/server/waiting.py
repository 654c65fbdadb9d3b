"""Calls that wait for messages, the windows of streams, and takes that clients retry."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Final, TypeAlias

import msgspec

from holdfast.api.drafts import lease_of
from holdfast.broker.delivery import Delivery
from holdfast.broker.leases import Delivered
from holdfast.delivery.events import Extend, Receipt
from holdfast.errors import InvalidRequest, LeaseLost, TooManyWaiters
from holdfast.protocol.messages import Take
from holdfast.server.served import MOST_AT_ONCE, Leased, ServedGroup, Taken
from holdfast.server.tokens import LOCAL, Principal
from holdfast.server.turns import other_turns

ADMIN_RESERVE: Final = 64  # calls of admins that may wait beyond the limit


class WaitLimit:
    """Limits the number of calls that wait at the same time, in all and for each caller.

    Unless it is set, a caller's share is half of all, so that no caller can keep all others from waiting. On a server
    without tokens there is no share: all callers have the same name there.
    """

    def __init__(self, most: int, most_each: int | None = None) -> None:
        self.most = most
        self.waiting = 0
        self._most_each = most_each
        self._by_caller: dict[tuple[str, bool], int] = {}

    def share(self, principal: Principal) -> int:
        """Number of calls of this caller that may wait."""
        if self._most_each is not None:
            return self._most_each
        return self.most if principal.name == LOCAL and principal.entry is None else max(self.most // 2, 1)

    def of(self, principal: Principal) -> int:
        """Number of calls of this caller that wait."""
        return self._by_caller.get(caller_of(principal), 0)

    def check(self, principal: Principal) -> None:
        """Raise TooManyWaiters if no more calls of this caller may wait."""
        own = self.of(principal)
        if own >= self.share(principal):
            raise TooManyWaiters(
                f"{own} calls of {principal.name} are already waiting, which is the limit for one caller "
                "(max_waiters_per_principal); nothing was taken. Try again in a second, or wait with fewer calls at a "
                "time"
            )
        if self.waiting >= self.most + (ADMIN_RESERVE if principal.may("admin") else 0):
            raise TooManyWaiters(
                f"{self.waiting} calls are already waiting, which is the limit (max_waiters); nothing was taken. Try "
                "again in a second, or wait with fewer calls at a time"
            )

    @contextmanager
    def one_more(self, principal: Principal) -> Iterator[None]:
        """Count one more waiting call while the block runs. Raises TooManyWaiters if the limit is reached."""
        self.check(principal)
        caller = caller_of(principal)
        self.waiting += 1
        self._by_caller[caller] = self._by_caller.get(caller, 0) + 1
        try:
            yield
        finally:
            self.waiting -= 1
            self._by_caller[caller] -= 1
            if not self._by_caller[caller]:
                del self._by_caller[caller]


def caller_of(principal: Principal) -> tuple[str, bool]:
    """The key of a caller. The name alone is not enough: a token may have the name used for callers without one."""
    return principal.name, principal.entry is None


class Window:
    """The messages that one stream has sent and that are not settled yet: at most its prefetch."""

    def __init__(self, group: ServedGroup, size: int) -> None:
        self._group = group
        self._size = size
        self._out: dict[tuple[int, Receipt], Delivery] = {}
        self._changed = asyncio.Event()

    @property
    def free(self) -> int:
        return self._size - len(self._out)

    def __len__(self) -> int:
        return len(self._out)

    def add(self, delivery: Delivery, receipt: Receipt) -> None:
        self._out[delivery.number, receipt] = delivery

    def settled(self, number: int, receipt: Receipt) -> bool:
        """Remove a settled message. Returns whether it was in this window."""
        found = self._out.pop((number, receipt), None) is not None
        if found:
            self._changed.set()
        return found

    def look(self) -> None:
        """Remove messages that are no longer leased: the lease expired, or the group was deleted."""
        for (number, receipt), delivery in list(self._out.items()):
            if not self._group.holds(delivery, receipt):
                del self._out[number, receipt]

    async def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until there is room. Returns whether there is, at the latest when the timeout ends."""
        self.look()
        if self.free <= 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                self.look()
        return self.free > 0


class Windows:
    """All windows of a server, by topic and group."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], list[Window]] = {}

    @contextmanager
    def one_more(self, group: ServedGroup, size: int) -> Iterator[Window]:
        window = Window(group, size)
        place = group.topic, group.group
        self._open.setdefault(place, []).append(window)
        try:
            yield window
        finally:
            self._open[place].remove(window)
            if not self._open[place]:
                del self._open[place]

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def of(self, group: ServedGroup) -> int:
        """Number of windows of one group."""
        return len(self._open.get((group.topic, group.group), ()))

    async def settled(self, group: ServedGroup, receipts: Sequence[str]) -> None:
        """Remove settled messages from all windows. Gives other tasks a turn in between."""
        place = group.topic, group.group
        if place not in self._open:
            return
        claims = await group.port.claims(receipts)
        for delivery, claimed in claims.good.items():
            for i, receipt in enumerate(claimed, 1):
                any(window.settled(delivery.number, receipt) for window in self._open.get(place, ()))
                if not i % MOST_AT_ONCE:
                    await other_turns()


# Retried takes: a client that got no answer to its first call gets the same messages from the second.
#
# Every delivery counts as an attempt. If lost answers counted too, a message could use up its attempts without ever
# reaching a handler. So a client gives each take an `attempt_id` and repeats it when it retries. As long as the leases
# of the first call hold, the retry returns the same messages with the same receipts, and the leases start again.
#
# Two calls with the same id may run at once, if the connection of the first is broken and the server has not noticed.
# Then the later call counts: the earlier one may neither take messages nor give back those that the later one returns.

MOST_IDS: Final = 10_000  # takes that are remembered for one caller
MOST_MESSAGES: Final = 20_000  # messages of these takes in all; the oldest takes are forgotten first

_Caller: TypeAlias = tuple[str, bool]
_Key: TypeAlias = tuple[str, str, str]  # topic, group, attempt_id
_HeldOne: TypeAlias = tuple[Receipt, int]  # with the time of its lease


_AT_MS: Final = attrgetter("lease.at_ms")


class _Held(msgspec.Struct, frozen=True, gc=False):
    """Messages delivered by one partition. It refers to no object of the group, which may be closed and reopened."""

    partition: int
    receipts: list[Receipt]
    leased_at_ms: list[int]


class Attempt:
    """One take with an `attempt_id`, and its retries."""

    __slots__ = ("_task", "caller", "count", "held", "key", "messages", "turn")

    def __init__(self, caller: _Caller, key: _Key, count: int) -> None:
        self.caller = caller
        self.key = key
        self.count = count
        self.held: list[_Held] = []
        self.messages = 0  # in all of these
        self.turn = 0  # the number of the latest call
        self._task: asyncio.Task[object] | None = None  # the call that is taking messages now

    def begin(self) -> None:
        """Start a call in the current task. Cancels an earlier one that is still taking messages."""
        if self._task is not None:
            self._task.cancel()
        self.turn += 1
        self._task = asyncio.current_task()

    def took(self, turn: int, found: Taken, leased: Leased) -> None:
        """Remember the messages that a call took, and their receipts, unless there is a later call."""
        if turn == self.turn:
            self._task = None
            self.held, self.messages = [], 0
            for (delivery, some), (_, receipts) in zip(found, leased, strict=True):
                self.held.append(_Held(delivery.number, receipts, list(map(_AT_MS, some))))
                self.messages += len(receipts)

    def over(self, turn: int) -> None:
        """The call takes no more messages, so a retry need not cancel it."""
        if turn == self.turn:
            self._task = None

    def unneeded(self, turn: int, taken: Leased) -> Leased:
        """The messages of a call that may be given back: all except those that a later call returns."""
        if turn == self.turn:
            return taken
        kept = {(each.partition, receipt) for each in self.held for receipt in each.receipts}
        return [
            (delivery, [receipt for receipt in receipts if (delivery.number, receipt) not in kept])
            for delivery, receipts in taken
        ]

    async def again(self, group: ServedGroup, lease_s: float | None) -> Taken:
        """The messages of the earlier call that are still leased, with renewed leases. May be empty."""
        found: Taken = []
        by_partition: dict[int, list[_HeldOne]] = {}
        for each in self.held:
            ones = zip(each.receipts, each.leased_at_ms, strict=True)
            by_partition.setdefault(each.partition, []).extend(ones)
        for number, some in by_partition.items():
            if number >= len(group.deliveries):
                continue  # that was an earlier topic of the same name
            delivery = group.queue_group.delivery(number)
            taken: list[Delivered] = []
            for i in range(0, len(some), MOST_AT_ONCE):
                taken += await _resumed(group, delivery, some[i : i + MOST_AT_ONCE], lease_s)
                await asyncio.sleep(0)
            if taken:
                found.append((delivery, taken))
        return found


async def _resumed(
    group: ServedGroup, delivery: Delivery, some: list[_HeldOne], lease_s: float | None
) -> list[Delivered]:
    leases = delivery.group.leases
    receipts = [
        receipt
        for receipt, leased_at_ms in some
        if (lease := leases.get(receipt.offset)) is not None
        and (lease.fence, lease.at_ms) == (receipt.fence, leased_at_ms)
    ]
    lease_ms = group.settings.lease_ms if lease_s is None else lease_of(lease_s)
    if receipts:
        with suppress(LeaseLost):  # some expired just now
            await delivery.wait_async(delivery.settle_all([Extend([receipt], lease_ms) for receipt in receipts]))
    return [delivery.resume(receipt) for receipt in receipts if delivery.holds(receipt)]


class Attempts:
    """The takes with an `attempt_id`, by caller. If a caller has too many, its oldest are forgotten."""

    def __init__(self, most_ids: int = MOST_IDS, most_messages: int = MOST_MESSAGES) -> None:
        self._most_ids = most_ids
        self._most_messages = most_messages
        self._callers: dict[_Caller, _Remembered] = {}

    def __len__(self) -> int:
        return sum(len(own.attempts) for own in self._callers.values())

    def knows(self, principal: Principal, group: ServedGroup, wanted: Take) -> bool:
        """Whether this is a retry of a take."""
        own = self._callers.get(caller_of(principal)) if wanted.attempt_id is not None else None
        return own is not None and (group.topic, group.group, wanted.attempt_id) in own.attempts

    def begin(self, principal: Principal, group: ServedGroup, wanted: Take) -> Attempt | None:
        """Start a call of a take, new or retried; None if it has no `attempt_id`.

        Raises InvalidRequest if the id was used for a take of another size.
        """
        name = wanted.attempt_id
        if name is None:
            return None
        caller, key = caller_of(principal), (group.topic, group.group, name)
        own = self._callers.setdefault(caller, _Remembered())
        attempt = own.attempts.get(key)
        if attempt is None:
            attempt = own.attempts[key] = Attempt(caller, key, wanted.count)
        elif attempt.count != wanted.count:
            raise InvalidRequest(
                f"attempt_id={name!r} was used to ask for {attempt.count} messages, and now for {wanted.count}; "
                "nothing was taken. Repeat the call as it was, or give every new call an id of its own"
            )
        own.attempts.move_to_end(key)
        attempt.begin()
        return attempt

    def took_at_once(
        self, principal: Principal, group: ServedGroup, wanted: Take, found: Taken, leased: Leased
    ) -> Attempt:
        """Remember a take that nobody knows yet, and that took messages in one step.

        The same as `begin`, `took` and `ended`, for a call that no retry can meet on its way.
        """
        assert wanted.attempt_id is not None
        caller, key = caller_of(principal), (group.topic, group.group, wanted.attempt_id)
        own = self._callers.get(caller)
        if own is None:
            own = self._callers[caller] = _Remembered()
        attempt = own.attempts[key] = Attempt(caller, key, wanted.count)
        attempt.turn = 1
        self.took(attempt, 1, found, leased)
        return attempt

    def took(self, attempt: Attempt, turn: int, found: Taken, leased: Leased) -> None:
        """Remember the messages that a call took, and their receipts."""
        before = attempt.messages
        attempt.took(turn, found, leased)
        own = self._callers.get(attempt.caller)
        if own is None or own.attempts.get(attempt.key) is not attempt:
            return  # forgotten meanwhile
        own.messages += attempt.messages - before
        while len(own.attempts) > self._most_ids or (own.messages > self._most_messages and len(own.attempts) > 1):
            own.messages -= own.attempts.popitem(last=False)[1].messages

    def ended(self, attempt: Attempt, turn: int) -> None:
        """The call has ended. A take without messages is forgotten."""
        attempt.over(turn)
        own = self._callers.get(attempt.caller)
        if own is None or attempt.held or turn != attempt.turn:
            return
        if own.attempts.get(attempt.key) is attempt:
            del own.attempts[attempt.key]
            if not own.attempts:
                del self._callers[attempt.caller]


class _Remembered:
    """The takes of one caller, oldest first, and the number of messages in them."""

    def __init__(self) -> None:
        self.attempts: OrderedDict[_Key, Attempt] = OrderedDict()
        self.messages = 0
