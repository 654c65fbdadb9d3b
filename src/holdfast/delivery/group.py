"""What one group knows of one partition, in little memory: a deep backlog costs nothing.

    below `floor`              done, all of them
    from `cursor` on           ready, unless listed in `ahead`
    `leases`, `waiting`,       the exceptions above the floor: leased, delayed, dead (still to be moved to the dead
    `burials`, `done`          letters' log), done
    all others                 ready; those that the cursor has passed and those with a priority are in `lanes`

`ahead` holds the offsets from the cursor on that are not simply next: exceptions, and messages with a priority. It
follows from the other fields (`not_at_cursor`), and exists so that choosing need not search them.

State changes through `apply` only, live and at replay alike, so the two cannot differ. `apply` checks an event against
the table of moves before it changes anything. `lease_one` and `ack_one` are fused forms for the commonest case; a
property test holds them to `apply`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final

import msgspec
from pyroaring import BitMap64

from holdfast.delivery.events import (
    MOVES,
    SESSION_BITS,
    Acked,
    Buried,
    BuriedReady,
    Cancelled,
    DeadStored,
    Event,
    Expired,
    Extended,
    Leased,
    Lost,
    Opened,
    Phase,
    Released,
    Replayed,
    Returned,
    Runs,
    Saved,
    Skipped,
    each,
    pairs,
    run,
)
from holdfast.delivery.timers import Deadlines, Timers
from holdfast.model import Failure

LEVELS: Final = 10

# Past every offset, which have 63 bits: the end of a range of a bitmap.
FAR: Final = 2**63


class Lanes:
    """Ready messages by priority: 9 is the most urgent, 0 the default.

    `levels` holds the messages with each priority until they are done, `ready` those of them that are ready. Lane 0 of
    `ready` holds the returned messages without a priority; all others without one are found at the cursor, and cost
    nothing here. The bitmaps take about two bytes per message.
    """

    def __init__(self, scanned: int) -> None:
        self.levels = [BitMap64() for _ in range(LEVELS)]
        self.ready = [BitMap64() for _ in range(LEVELS)]
        self.scanned = scanned  # the priorities of all messages below are known
        self.used = False  # whether anything was ever added: if not, there is nothing to remove
        self.filled = False  # whether any lane has a message

    def level(self, offset: int) -> int:
        """Return the message's priority."""
        if self.used:
            for level in range(LEVELS - 1, 0, -1):
                if offset in self.levels[level]:
                    return level
        return 0

    def set_level(self, offset: int, level: int) -> None:
        """Record that the message has this priority, above 0."""
        self.used = True
        self.levels[level].add(offset)

    def add(self, offset: int, level: int | None = None) -> None:
        """Add a message that is ready; its priority is looked up if it is not given."""
        self.used = True
        if level is None:
            level = self.level(offset)
        if level:
            self.ready[0].discard(offset)  # at replay, it was returned before its priority was known
        self.ready[level].add(offset)
        self.filled = True

    def add_unranked(self, offsets: BitMap64) -> None:
        """Add ready messages whose priority is not known."""
        self.used = True
        self.ready[0] |= offsets
        self.update_flags()

    def remove(self, start: int, stop: int) -> None:
        """Remove messages that are no longer ready."""
        if self.filled:
            for lane in self.ready:
                if lane:
                    lane.remove_range(start, stop)
            self.update_flags()

    def remove_one(self, offset: int) -> None:
        """The fused form of `remove` for one message."""
        self._discard(self.ready, offset)

    def forget_one(self, offset: int) -> None:
        """The fused form of `forget` for one message that is not ready."""
        self._discard(self.levels, offset)

    def _discard(self, bitmaps: list[BitMap64], offset: int) -> None:
        for bitmap in reversed(bitmaps):  # the most urgent ones are mostly the first to go
            if bitmap and offset in bitmap:
                bitmap.discard(offset)
                if not bitmap:
                    self.update_flags()
                return

    def forget(self, start: int, stop: int) -> None:
        """Remove messages that are done."""
        for bitmap in (*self.levels, *self.ready):
            if bitmap:
                bitmap.remove_range(start, stop)
        self.update_flags()

    def forget_below(self, to: int, held: BitMap64) -> None:
        """Remove all messages below `to`, which are done, except those that are held."""
        for level in self.levels:
            kept = level & held
            level.remove_range(0, to)
            level.update(kept)
        for lane in self.ready:
            lane.remove_range(0, to)
        self.update_flags()

    def clear_from(self, to: int) -> None:
        """Forget everything about the messages from `to` on."""
        for bitmap in (*self.levels, *self.ready):
            bitmap.remove_range(to, FAR)
        self.scanned = min(self.scanned, to)
        self.update_flags()

    def update_flags(self) -> None:
        """Update `used` and `filled`."""
        self.filled = any(self.ready)
        self.used = self.filled or any(self.levels)


# A message that is retried forever must not fill the memory with its errors.
_MOST_FAILURES: Final = 100

# Deadlines of settled leases are kept until there are this many more of them than leases.
_STALE_DEADLINES: Final = 1_000


class Lease(msgspec.Struct, frozen=True, gc=False):
    """The right to work on messages for a time; messages leased together share one."""

    fence: int
    session: int
    lease_ms: int
    until_ms: int
    at_ms: int
    holder: str
    moving_to: int = -1

    def event(self, offset: int, cursor: int) -> Leased:
        """Return the event that gives this lease to one message."""
        runs, times = (offset, offset + 1), (self.lease_ms, self.until_ms, self.at_ms)
        return Leased(runs, cursor, self.fence, self.session, *times, self.holder, self.moving_to)


class History(msgspec.Struct, frozen=True, gc=False):
    """What is remembered of a returned message; it goes with the message into the dead letters."""

    attempts: int = 0
    first_ms: int = 0
    last_ms: int = 0
    failures: tuple[Failure, ...] = ()


class Burial(msgspec.Struct, frozen=True, gc=False):
    """A dead letter that is still to be moved to its log."""

    reason: str
    at_ms: int
    dead_from: int
    holder: str
    history: History


class HolderState(msgspec.Struct, frozen=True, gc=False):
    """A document that a holder stored with its message for the next holder."""

    version: int
    content: bytes


NO_HISTORY: Final = History()


class IllegalMove(AssertionError):
    """An event does not fit the state: a bug, never a user's mistake."""


class Group:
    """The state of one group on one partition."""

    def __init__(self, start: int = 0) -> None:
        self.floor = start
        self.cursor = start
        self.session = 0
        self.boot_id = 0
        self.fence = 0
        self.leases: dict[int, Lease] = {}
        self.deadlines = Deadlines()
        self.waiting: dict[int, int] = {}  # offset -> due_ms
        self.timers = Timers()
        self.burials: dict[int, Burial] = {}
        self.done = BitMap64()
        self.ahead = BitMap64()
        self.lanes = Lanes(start)
        self.histories: dict[int, History] = {}
        self.documents: dict[int, HolderState] = {}

    def phase(self, offset: int) -> Phase:
        """Return the phase of a message; offsets past the end of the log count as ready."""
        if offset < self.floor or offset in self.done:
            return Phase.DONE
        if offset in self.leases:
            return Phase.LEASED
        if offset in self.waiting:
            return Phase.DELAYED
        return Phase.DEAD if offset in self.burials else Phase.READY

    def ready_count(self, end: int, lost: BitMap64 | None = None) -> int:
        """Return how many messages below `end` are ready, without lost ones, even those the cursor has not reached."""
        settled = self.floor + len(self.done) + len(self.leases) + len(self.waiting) + len(self.burials)
        if lost:
            settled += len(self.ready_of(lost))
        return max(end - settled, 0)

    def ready_of(self, offsets: BitMap64) -> BitMap64:
        """Return those of the messages that are ready."""
        found = offsets - self.done
        found.remove_range(0, self.floor)
        for table in (self.leases, self.waiting, self.burials):
            found -= BitMap64([offset for offset in found if offset in table])
        return found

    def all_ready(self, start: int, stop: int) -> bool:
        """Whether every message from start to stop is ready."""
        return self.phase(start) is Phase.READY and self._all_in(Phase.READY, start, stop)

    def attempts(self, offset: int) -> int:
        """Return how often the message was leased and not handled."""
        history = self.histories.get(offset)
        return 0 if history is None else history.attempts

    def apply(self, event: Event) -> None:
        """Apply one event; raises IllegalMove, with nothing changed, if it does not fit."""
        self._APPLY[type(event)](self, event)

    def arrive(self, first: int, levels: bytes | list[int]) -> None:
        """Record the priorities of messages in the log from `first` on. These are not events: the log has them."""
        for offset, level in enumerate(levels, first):
            if level and offset >= self.floor and offset not in self.done:
                self.lanes.set_level(offset, level)
                if self.phase(offset) is Phase.READY:
                    self.lanes.add(offset, level)
                if offset >= self.cursor:
                    self.ahead.add(offset)
        self.lanes.scanned = max(self.lanes.scanned, first + len(levels))

    def arrive_one(self, offset: int, level: int) -> None:
        """The fused form of `arrive` for one message with a priority that was just written: it is ready."""
        lanes = self.lanes
        lanes.used = lanes.filled = True
        lanes.levels[level].add(offset)
        lanes.ready[level].add(offset)
        if offset >= self.cursor:
            self.ahead.add(offset)
        if offset >= lanes.scanned:
            lanes.scanned = offset + 1

    def forget_ended(self, wall_ms: int, mono_ms: int) -> None:
        """Drop deadlines and timers that have passed, as far as what they were for has happened."""
        leases, waiting = self.leases, self.waiting
        self.timers.forget(wall_ms, lambda due_ms, offset: waiting.get(offset) == due_ms)
        self.deadlines.forget(mono_ms, lambda offset: offset in leases and leases[offset].until_ms <= mono_ms)

    def not_at_cursor(self) -> BitMap64:
        """Return the messages from the cursor on that it must skip: exceptions, and those with a priority."""
        held = (*self.leases, *self.waiting, *self.burials)
        found = BitMap64([offset for offset in held if offset >= self.cursor])
        for bitmap in (self.done, *self.lanes.levels):
            if bitmap and bitmap.max() >= self.cursor:
                found |= bitmap
        found.remove_range(0, self.cursor)
        return found

    def lease_one(self, offset: int, cursor: int, lease: Lease) -> None:
        """The fused form of `apply(Leased)` for one message that is ready."""
        if self.lanes.filled:
            self.lanes.remove_one(offset)
        if self.ahead or offset != self.cursor or cursor == offset:  # by key, the cursor stays where it is
            if offset >= self.cursor:
                self.ahead.add(offset)
            if cursor > self.cursor:
                self._pass_to(cursor)
        else:
            self.cursor = cursor
        self.leases[offset] = lease
        self.fence = lease.fence
        self.deadlines.add(lease.until_ms, offset, offset + 1)
        if not offset % _STALE_DEADLINES:
            self._drop_stale_deadlines()

    def ack_one(self, offset: int) -> None:
        """The fused form of `apply(Acked)` for one leased message."""
        del self.leases[offset]
        if self.histories or self.documents:
            self.histories.pop(offset, None)
            self.documents.pop(offset, None)
        if self.lanes.used:
            self.lanes.forget_one(offset)
        if offset > self.floor:
            self.done.add(offset)
            return
        if offset == self.floor:
            self.floor = offset + 1
            if self.done or self.cursor <= offset:
                self._raise_floor()

    # A move leaves one phase and enters another. What each phase needs is said once, whichever event causes the move.

    def _move(self, event: Event, start: int, stop: int, value: Any = None) -> None:
        source = self._fitting(event, start, stop)
        self._exit(source, start, stop)
        self._enter(MOVES[source, type(event)], start, stop, value)

    def _move_runs(self, event: Event, runs: Runs, value: Any = None) -> None:
        if len(runs) > 2:
            for start, stop in pairs(runs):
                self._fitting(event, start, stop)  # check all of them before the first one moves
        for start, stop in pairs(runs):
            self._move(event, start, stop, value)

    def _fitting(self, event: Event, start: int, stop: int) -> Phase:
        """Return the phase that the event moves all of them out of; raises IllegalMove if there is no such move."""
        source = self.phase(start)
        if (source, type(event)) not in MOVES or not self._all_in(source, start, stop):
            raise IllegalMove(f"{event!r} does not fit: {start} is {source.value} (floor {self.floor})")
        return source

    def _all_in(self, phase: Phase, start: int, stop: int) -> bool:
        """Whether all of them are in the phase of the first."""
        if stop - start == 1:
            return True
        if phase is Phase.READY:
            if start >= self.cursor and not self.ahead:
                return True  # all exceptions from the cursor on are in `ahead`
            span = range(start, stop)
            return not self.done.range_cardinality(start, stop) and all(
                _is_apart(table, span) for table in (self.leases, self.waiting, self.burials)
            )
        return all(map(self._table(phase).__contains__, range(start, stop)))

    def _table(self, phase: Phase) -> dict[int, Any]:
        """Return the table of leased, delayed or dead messages."""
        if phase is Phase.LEASED:
            return self.leases
        return self.waiting if phase is Phase.DELAYED else self.burials

    def _exit(self, phase: Phase, start: int, stop: int) -> None:
        if phase is Phase.READY:
            self.lanes.remove(start, stop)
            if stop > self.cursor:
                self.ahead.add_range(max(start, self.cursor), stop)
            return
        table = self._table(phase)
        if len(table) == stop - start:  # these and no others
            table.clear()
        else:
            deque(map(table.__delitem__, range(start, stop)), maxlen=0)  # a loop that runs in C

    def _enter(self, phase: Phase, start: int, stop: int, value: Any) -> None:
        if phase is Phase.DONE:
            self._settle(start, stop)
        elif phase is Phase.LEASED:
            self.leases.update(dict.fromkeys(range(start, stop), value))
            self.deadlines.add(value.until_ms, start, stop)
            self._drop_stale_deadlines()
        elif phase is Phase.DELAYED:
            self.waiting[start] = value
            self.timers.add(value, start)
        elif phase is Phase.DEAD:
            self.burials.update(dict.fromkeys(range(start, stop), value))
        else:
            for offset in range(start, stop):
                self._make_ready(offset)

    def _make_ready(self, offset: int) -> None:
        if offset < self.cursor or self.lanes.level(offset):
            self.lanes.add(offset)
        else:
            self.ahead.discard(offset)

    def _settle(self, start: int, stop: int) -> None:
        if self.histories or self.documents:
            _drop(self.histories, start, stop)
            _drop(self.documents, start, stop)
        if self.lanes.used:
            self.lanes.forget(start, stop)
        # Below the floor nothing is stored: in the usual case, acks in order, this costs no memory at all.
        if start > self.floor:
            self.done.add_range(start, stop)
            return
        self.floor = max(self.floor, stop)
        self._raise_floor()

    def _raise_floor(self) -> None:
        done = self.done
        if done:
            floor = self.floor
            done.remove_range(0, floor)
            while floor in done:
                floor += 1
            done.remove_range(self.floor, floor)
            self.floor = floor
        if self.cursor < self.floor:
            self._move_cursor(self.floor)

    def _move_cursor(self, cursor: int) -> None:
        if self.ahead:
            self.ahead.remove_range(0, cursor)
        self.cursor = cursor

    def _pass_to(self, cursor: int) -> None:
        """Move the cursor past messages. Those still ready on the way go into a lane, or nobody would find them again.

        That happens at replay, when priorities are not known yet, or after events that were damaged.
        """
        if self.ahead.range_cardinality(self.cursor, cursor) < cursor - self.cursor:
            left = BitMap64()
            left.add_range(self.cursor, cursor)
            left -= self.ahead
            self.lanes.add_unranked(left)
        self._move_cursor(cursor)

    def _drop_stale_deadlines(self) -> None:
        if len(self.deadlines) > 2 * len(self.leases) + _STALE_DEADLINES:
            self._renew_deadlines()

    def _renew_deadlines(self) -> None:
        self.deadlines.renew([(lease.until_ms, offset, offset + 1) for offset, lease in self.leases.items()])

    def _leased(self, event: Leased) -> None:
        lease = Lease(
            event.fence, event.session, event.lease_ms, event.until_ms, event.at_ms, event.holder, event.moving_to
        )
        self._move_runs(event, event.runs, lease)
        self.fence = max(self.fence, event.fence)
        if event.cursor > self.cursor:
            self._pass_to(event.cursor)

    def _over_runs(self, event: Acked | Released | DeadStored | Expired | Cancelled | Lost) -> None:
        self._move_runs(event, event.runs)

    def _extended(self, event: Extended) -> None:
        leases = [(offset, self._lease_of(event, offset)) for offset in each(event.runs)]
        for offset, lease in leases:
            longer = msgspec.structs.replace(lease, lease_ms=event.lease_ms, until_ms=event.until_ms)
            self._move(event, offset, offset + 1, longer)

    def _returned(self, event: Returned) -> None:
        lease = self._lease_of(event, event.offset)
        self._move(event, event.offset, event.offset + 1, event.due_ms)
        failure = Failure(event.at_ms, lease.holder, event.why, event.error) if event.counted else None
        self.histories[event.offset] = self._history_after(event.offset, lease, failure)

    def _saved(self, event: Saved) -> None:
        lease = self._lease_of(event, event.offset)
        self._move(event, event.offset, event.offset + 1, lease)
        if event.document is None:
            self.documents.pop(event.offset, None)
        else:
            self.documents[event.offset] = HolderState(event.version, event.document)

    def _buried(self, event: Buried) -> None:
        offset, lease = event.offset, self.leases.get(event.offset)
        history, holder = self.histories.get(offset, NO_HISTORY), ""
        if lease is not None:
            failure = Failure(event.at_ms, lease.holder, event.reason, event.error)
            history, holder = self._history_after(offset, lease, failure), lease.holder
        self._move(event, offset, offset + 1, Burial(event.reason, event.at_ms, event.dead_from, holder, history))

    def _buried_ready(self, event: BuriedReady) -> None:
        self._move_runs(event, event.runs, Burial(event.reason, event.at_ms, event.dead_from, "", NO_HISTORY))
        if self.histories:  # of messages that were leased before
            for offset in [offset for offset in each(event.runs) if offset in self.histories]:
                burial = self.burials[offset]
                self.burials[offset] = msgspec.structs.replace(burial, history=self.histories[offset])

    def _skipped(self, event: Skipped) -> None:
        to = event.to
        for offset in [offset for offset in self.waiting if offset < to]:
            self._move(event, *run(offset))
        held = BitMap64([offset for offset in (*self.leases, *self.burials) if offset < to])
        self.lanes.forget_below(to, held)
        if to > self.floor:
            self.done.add_range(self.floor, to)
            self.done -= held
            for table in (self.histories, self.documents):
                for offset in [offset for offset in table if offset < to and offset not in held]:
                    del table[offset]
            self._raise_floor()
        if to > self.cursor:
            self._move_cursor(to)

    def _replayed(self, event: Replayed) -> None:
        to = event.to
        for offset in [offset for offset in self.waiting if offset >= to]:
            self._move(event, *run(offset))
        held = {*self.leases, *self.burials}
        for table in (self.histories, self.documents):
            for offset in [offset for offset in table if offset >= to and offset not in held]:
                del table[offset]
        # Their priorities are forgotten as well, and read from the log again: it has them.
        self.done.remove_range(to, FAR)
        self.lanes.clear_from(to)
        if to < self.floor:
            self.done.clear()  # all of them are above, and ready again
            self.floor = to
        self.cursor = min(self.cursor, to)
        self.ahead = self.not_at_cursor()

    def _opened(self, event: Opened) -> None:
        end = event.end
        for table in (self.leases, self.waiting, self.burials, self.histories, self.documents):
            for offset in [offset for offset in table if offset >= end]:
                del table[offset]
        for bitmap in (self.done, self.ahead):
            bitmap.remove_range(end, FAR)
        self.lanes.clear_from(end)
        self.floor, self.cursor = min(self.floor, end), min(self.cursor, end)
        if event.boot_id != self.boot_id or not event.boot_id:
            # Monotonic time means nothing after a reboot, so every lease starts over with its full length.
            self.leases = {
                offset: msgspec.structs.replace(lease, until_ms=event.mono_ms + lease.lease_ms)
                for offset, lease in self.leases.items()
            }
        self._renew_deadlines()
        self.session, self.boot_id = event.session, event.boot_id
        self.fence = max(self.fence, event.session << SESSION_BITS)

    def _lease_of(self, event: Event, offset: int) -> Lease:
        lease = self.leases.get(offset)
        if lease is None:
            raise IllegalMove(f"{event!r} does not fit: {offset} is {self.phase(offset).value}")
        return lease

    def _history_after(self, offset: int, lease: Lease, failure: Failure | None) -> History:
        before = self.histories.get(offset, NO_HISTORY)
        failures = before.failures if failure is None else (*before.failures, failure)
        if len(failures) > _MOST_FAILURES:  # keep the first and the latest ones
            failures = (failures[0], *failures[2:])
        return History(before.attempts + (failure is not None), before.first_ms or lease.at_ms, lease.at_ms, failures)

    _APPLY: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        Leased: _leased,
        Acked: _over_runs,
        Released: _over_runs,
        DeadStored: _over_runs,
        Expired: _over_runs,
        Cancelled: _over_runs,
        Lost: _over_runs,
        Extended: _extended,
        Returned: _returned,
        Saved: _saved,
        Buried: _buried,
        BuriedReady: _buried_ready,
        Skipped: _skipped,
        Replayed: _replayed,
        Opened: _opened,
    }


def _is_apart(table: dict[int, Any], span: range) -> bool:
    """Whether none of them is in the table, by iterating over the smaller side."""
    if len(table) < len(span):
        return not any(offset in span for offset in table)
    return table.keys().isdisjoint(span)


def _drop(table: dict[int, Any], start: int, stop: int) -> None:
    """Remove the offsets from start to stop, by iterating over the smaller side."""
    if not table:
        return
    if stop - start <= len(table):
        for offset in range(start, stop):
            table.pop(offset, None)
    else:
        gone: Iterable[int] = [offset for offset in table if start <= offset < stop]
        for offset in gone:
            del table[offset]
