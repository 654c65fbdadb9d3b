"""Which message is next when keys matter: one message per key at a time, and limits per key group.

    fed from the log ──► ready ──► offered ──► leased ──► settled: its place in the window is free
                           ▲       (its key is      │
                           │        idle)           ▼
                           └──────────────────── waiting for its retry: its key stays busy

The gate knows a window of messages that are not settled, from the group's floor on. Those after it wait until there is
room and nothing before them is on offer, so that a run of expired messages is skipped before it is read. Nothing of it
is stored on disk: it follows from the group's state and the keys in the log, and is built again at every opening and
after every seek. Messages without a key are never held back.

What must hold (`check` verifies it):

- With key order, at most one message of a key is offered or leased, and it is the oldest one; a message that waits for
  a retry still blocks its key. Without order, all ready messages of a key group are offered.
- A key group that offers something and is below its limits is *in line* with its oldest offered message, its head. A
  group whose rate is used up is *asleep* until its bucket has room. A group at its concurrency limit is neither, and
  gets in line when a message is settled.

The line is ordered by offset. With fair sharing it goes by rounds, in which each key group has one turn; a group that
is new, or was away, joins at the current or next round and has not saved up turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, TypeAlias

from pyroaring import BitMap64

from holdfast.delivery.events import (
    Acked,
    Buried,
    BuriedReady,
    Cancelled,
    Event,
    Expired,
    Leased,
    Lost,
    Opened,
    Phase,
    Released,
    Replayed,
    Returned,
    Runs,
    Skipped,
    each,
    pairs,
    run,
    size,
)
from holdfast.delivery.group import Group
from holdfast.delivery.key_policy import KeyPolicy, KeyRates

_NOBODY: Final = -1
_NO_LIMIT: Final = 2**63
_IN_LINE: Final = -1  # an iterator over the heads of several key groups, not over the messages of one


_Next: TypeAlias = tuple[int, int, Iterator[int], int]  # turn, offset, those after it, how many more of its key group


class _KeyGroup:
    """Keys that share limits and turns."""

    __slots__ = ("head", "leased", "name", "offered", "size", "turn")

    def __init__(self, name: bytes | None) -> None:
        self.name = name  # None: without limits
        self.offered = BitMap64()
        self.size = 0  # number of messages in the window
        self.leased = 0
        self.head = _NOBODY  # the offset with which it is in line
        self.turn = _NOBODY  # the round in which it is served next; a new group has none yet


class _Key:
    """The messages of one key or, without key order, of one whole key group."""

    __slots__ = ("busy", "group", "name", "offered", "only", "ordered", "ready", "size")

    def __init__(self, name: bytes | None, group: _KeyGroup, *, ordered: bool) -> None:
        self.name = name
        self.group = group
        self.ordered = ordered
        # With key order, the messages that are ready. Most keys have one at most, which takes no bitmap.
        self.only = _NOBODY
        self.ready: BitMap64 | None = None  # if there were several: all of them
        self.busy = 0  # messages leased or waiting for a retry
        self.offered = _NOBODY  # with key order: the one message on offer
        self.size = 0

    def add(self, offset: int) -> None:
        """With key order, add a message that is ready."""
        if self.ready is not None:
            self.ready.add(offset)
        elif self.only == _NOBODY:
            self.only = offset
        else:
            self.ready, self.only = BitMap64((self.only, offset)), _NOBODY

    def discard(self, offset: int) -> None:
        """With key order, remove a message that is no longer ready."""
        if self.ready is not None:
            self.ready.discard(offset)
        elif self.only == offset:
            self.only = _NOBODY

    def first(self) -> int:
        """With key order, the oldest message that is ready, or _NOBODY."""
        if self.ready is None:
            return self.only
        return int(self.ready.min()) if self.ready else _NOBODY


class KeyGate:
    """Chooses for one group on one partition. Time is an argument; the caller holds the group's lock."""

    def __init__(self, limits: KeyLimits) -> None:
        self.limits = limits
        self.policy = policy = limits.policy
        separator = policy.key_group_separator
        self._separator = None if separator is None else separator.encode()
        self._grouped = policy.limited or policy.key_group_fair
        self._fair = policy.key_group_fair
        self._now_ms = limits.since_ms
        self._round = 0  # the last round in which a key group was served
        self._groups: dict[bytes | None, _KeyGroup] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all messages; they must be fed again from the group's floor on. Rates are kept."""
        for name, group in self._groups.items():
            if name is not None:
                self.limits.unwatch(name, self)
                self.limits.give_back(name, group.leased, self)
        self._groups = {}
        self.scanned = _NOBODY  # all messages below are known or settled
        self._ready: dict[int, _Key] = {}
        self._leased: dict[int, _Key] = {}
        self._waiting: dict[int, _Key] = {}
        self._keys: dict[bytes | None, _Key] = {}
        self._line: dict[int, BitMap64] = {}  # turn -> the heads of the key groups that have it
        self._asleep: dict[bytes, int] = {}  # key groups whose rate is used up -> until when
        self._alarms: list[tuple[int, bytes]] = []  # a heap of the same

    def __len__(self) -> int:
        return len(self._ready) + len(self._leased) + len(self._waiting)

    @property
    def room(self) -> int:
        """How many more messages fit in the window."""
        return self.policy.key_lookahead - len(self)

    @property
    def ready(self) -> int:
        """How many messages of the window are ready, on offer or not."""
        return len(self._ready)

    def begin(self, group: Group, key_of: Callable[[int], bytes | None]) -> None:
        """Start over at the group's floor. Held messages keep their key busy, even far outside the window."""
        self.clear()
        for offset in sorted((*group.leases, *group.waiting)):
            self._hold(offset, key_of(offset), group.phase(offset))
        self.scanned = group.floor

    def fill(self, group: Group, end: int, key_of: Callable[[int], bytes | None], most: int | None = None) -> bool:
        """Read at most `most` further messages of the log, which ends at `end`, as far as there is room.

        Returns whether there was anything to read.
        """
        if self.scanned == _NOBODY:
            self.begin(group, key_of)
        offset = start = max(self.scanned, group.floor)
        if most is not None:
            end = min(end, start + most)
        while offset < end and self.room > 0:
            phase = group.phase(offset)
            if phase is not Phase.DONE and phase is not Phase.DEAD:
                self.feed(offset, key_of(offset), phase)
            offset += 1
        self.scanned = offset
        return offset > start

    def feed(self, offset: int, key: bytes | None, phase: Phase) -> None:
        """Add the next message of the log that is not settled, with its phase in the group."""
        if offset not in self._leased and offset not in self._waiting:
            self._hold(offset, key, phase)
        self.scanned = offset + 1

    def _hold(self, offset: int, key: bytes | None, phase: Phase) -> None:
        found = self._key(key)
        found.size += 1
        found.group.size += 1
        if phase is Phase.READY:
            self._make_ready(offset, found)
        else:
            found.busy += 1
            table = self._leased if phase is Phase.LEASED else self._waiting
            table[offset] = found
            if phase is Phase.LEASED:
                self._count_leased(found.group, None)
            self._offer(found)
        self._place(found.group)

    def choose(self, count: int, now_mono_ms: int) -> list[int]:
        """Return the next messages in order of delivery, up to `count`. Only `note` of their lease takes them."""
        self._wake(now_mono_ms)
        heap: list[_Next] = []
        for turn, heads in self._line.items():
            in_line = iter(heads)
            heap.append((turn, next(in_line), in_line, _IN_LINE))
        heapify(heap)
        chosen: list[int] = []
        while heap and len(chosen) < count:
            turn, offset, rest, left = heap[0]
            chosen.append(offset)
            if left == _IN_LINE:
                _advance(heap, turn, rest, _IN_LINE)
                self._add_rest(heap, offset, turn + self._fair)
            else:
                _advance(heap, turn + self._fair, rest, left - 1)
        return chosen

    def choose_one(self, now_mono_ms: int) -> int:
        """The fused form of `choose` for one message; -1 if there is none."""
        if self._alarms:
            self._wake(now_mono_ms)
        elif now_mono_ms > self._now_ms:
            self._now_ms = now_mono_ms
        line = self._line
        return int(line[min(line)].min()) if line else _NOBODY

    def _add_rest(self, heap: list[_Next], head: int, turn: int) -> None:
        """Push the other offered messages of a key group, whose head has just been chosen."""
        group = self._ready[head].group
        left = _NO_LIMIT if group.name is None else self.limits.left(group.name, self._now_ms) - 1
        rest = iter(group.offered)
        next(rest)
        following = next(rest, None) if left else None
        if following is not None:
            heappush(heap, (turn, following, rest, left))

    def any_next(self, now_mono_ms: int) -> bool:
        """Whether there is anything to choose."""
        self._wake(now_mono_ms)
        return bool(self._line)

    def next_ms(self, now_mono_ms: int) -> int | None:
        """Milliseconds until a rate allows the next message; None if nothing waits for that."""
        self._wake(now_mono_ms)
        while self._alarms:
            at_ms, name = self._alarms[0]
            if self._asleep.get(name) == at_ms:
                group = self._groups.get(name)
                if group is not None and group.offered and not self._is_full(group):
                    return at_ms - self._now_ms
                del self._asleep[name]
            heappop(self._alarms)
        return None

    def note(self, event: Event) -> None:
        """Follow an event of the group."""
        match event:
            case Leased():
                self._note_leased(event.runs, event.until_ms - event.lease_ms)
            case Acked() | Expired() | Cancelled() | Lost() | BuriedReady():
                self._note_settled(event.runs)
            case Buried():
                self._note_settled(run(event.offset))
            case Returned():
                self._note_returned(event.offset)
            case Released():
                self._note_released(event.runs)
            case Skipped() | Replayed() | Opened():
                self.clear()

    def check(self) -> list[str]:
        """Return what is wrong with the state; empty if nothing is."""
        wrong: list[str] = []
        for name, key in self._keys.items():
            ready = sorted(offset for offset, of in self._ready.items() if of is key)
            busy = [offset for table in (self._leased, self._waiting) for offset, of in table.items() if of is key]
            if (len(busy), len(ready) + len(busy)) != (key.busy, key.size):
                wrong.append(f"key {name!r}: {len(ready)} ready and {len(busy)} busy are counted otherwise")
            known = list(key.ready or ()) + [key.only] * (key.only != _NOBODY)
            if key.ordered and (known != ready or (key.offered in ready) != (bool(ready) and not busy)):
                wrong.append(f"key {name!r}: {ready} are ready, {busy} busy, and {key.offered} is on offer")
        for group in self._groups.values():
            wrong += self._wrong_with(group)
        in_line = {group.head: group.turn for group in self._groups.values() if group.head != _NOBODY}
        if {head: turn for turn, heads in self._line.items() for head in heads} != in_line:
            wrong.append(f"those in line are {self._line}, and should be {in_line}")
        return wrong

    def _wrong_with(self, group: _KeyGroup) -> Iterator[str]:
        of_group = [key for key in self._keys.values() if key.group is group]
        offered = {key.offered for key in of_group if key.ordered} - {_NOBODY}
        offered |= {offset for offset, key in self._ready.items() if key.group is group and not key.ordered}
        leased = sum(key.group is group for key in self._leased.values())
        if set(group.offered) != offered or group.leased != leased or group.size != sum(key.size for key in of_group):
            yield f"key group {group.name!r} offers {group.offered}, should offer {offered}; {leased} are leased"
        open_ = bool(offered) and not self._is_full(group)
        asleep = group.name in self._asleep and (self._asleep[group.name], group.name) in self._alarms
        if (group.head == _NOBODY and open_ and not asleep) or (group.head != _NOBODY and not open_):
            yield f"key group {group.name!r} stands at {group.head}, and offers {offered}"
        if group.head != _NOBODY and group.name is not None and not self.limits.left(group.name, self._now_ms):
            yield f"key group {group.name!r} stands in line at its limit"

    def lease_one(self, offset: int, now_mono_ms: int) -> None:
        """The fused form of `note(Leased)` for one message."""
        key = self._ready.get(offset)
        if key is None or key.group.head != offset or key.group.name is not None or self._fair:
            self._note_leased(run(offset), now_mono_ms)
            return
        # It was the first in line, and its key group has no limits: only the next one of the group takes its place.
        if now_mono_ms > self._now_ms:
            self._now_ms = now_mono_ms
        del self._ready[offset]
        self._leased[offset] = key
        group, heads = key.group, self._line[0]
        key.busy += 1
        if key.ordered:
            key.discard(offset)
            key.offered = _NOBODY
        group.leased += 1
        group.offered.discard(offset)
        heads.discard(offset)
        if group.offered:
            group.head = group.offered.min()
            heads.add(group.head)
        else:
            group.head = _NOBODY
            if not heads:
                del self._line[0]

    def ack_one(self, offset: int) -> None:
        """The fused form of `note(Acked)` for one message."""
        key = self._leased.get(offset)
        if key is None or key.group.name is not None:
            self._note_settled(run(offset))
            return
        del self._leased[offset]
        group = key.group
        key.size -= 1
        key.busy -= 1
        group.size -= 1
        group.leased -= 1
        if key.size:
            self._offer(key)
            self._place(group)
        else:
            del self._keys[key.name]
            if not group.size:
                del self._groups[None]
        if offset == self.scanned:
            self.scanned = offset + 1

    def _note_leased(self, runs: Runs, now_ms: int) -> None:
        self._now_ms = max(self._now_ms, now_ms)
        served: set[_KeyGroup] = set()
        for offset in each(runs):
            key = self._ready.pop(offset, None)
            if key is None:
                continue
            group = key.group
            # Out of line once, and back in line after the whole event: a group may get several messages at once.
            if group not in served:
                served.add(group)
                self._step_out(group)
            key.busy += 1
            self._withdraw(offset, key)
            self._leased[offset] = key
            self._count_leased(group, now_ms)
            self._round = max(self._round, group.turn)
            group.turn += self._fair
        for group in served:
            self._stand(group, group.turn)

    def _note_settled(self, runs: Runs) -> None:
        tables = (self._leased, self._ready, self._waiting)
        for offset in self._known_in(runs):
            for table in tables:
                key = table.pop(offset, None)
                if key is not None:
                    self._settle(offset, key, table)
                    break
        for start, stop in pairs(runs):
            if start <= self.scanned < stop:  # what is settled need not be read
                self.scanned = stop

    def _known_in(self, runs: Runs) -> Iterable[int]:
        """Return the messages of the window among them, and maybe others, by iterating over the smaller side."""
        if size(runs) <= len(self):
            return each(runs)
        tables = (self._ready, self._leased, self._waiting)
        return [o for start, stop in pairs(runs) for table in tables for o in table if start <= o < stop]

    def _settle(self, offset: int, key: _Key, table: dict[int, _Key]) -> None:
        group = key.group
        key.size -= 1
        group.size -= 1
        if table is self._ready:
            self._withdraw(offset, key)
        else:
            key.busy -= 1
            if table is self._leased:
                self._count_free(group)
            self._offer(key)
        if not key.size:
            del self._keys[key.name]
        self._place(group)
        if not group.size:
            del self._groups[group.name]
            if group.name is not None:
                self.limits.unwatch(group.name, self)

    def _note_returned(self, offset: int) -> None:
        key = self._leased.pop(offset, None)
        if key is not None:
            self._waiting[offset] = key
            self._count_free(key.group)
            self._place(key.group)

    def _note_released(self, runs: Runs) -> None:
        for offset in each(runs):
            key = self._waiting.pop(offset, None)
            if key is None:
                continue
            if offset >= self.scanned:  # older messages of its key may come before it: it is fed in its turn
                self._settle(offset, key, self._waiting)
            else:
                key.busy -= 1
                self._make_ready(offset, key)
                self._place(key.group)

    def _key(self, name: bytes | None) -> _Key:
        """Return the key or, without key order, the one that represents its whole key group."""
        group_name = self._group_name(name)
        ordered = self.policy.key_order and name is not None
        if not ordered:
            name = group_name
        key = self._keys.get(name)
        if key is None:
            group = self._groups.get(group_name)
            if group is None:
                group = self._groups[group_name] = _KeyGroup(group_name)
                if group_name is not None:
                    self.limits.watch(group_name, self)
            key = self._keys[name] = _Key(name, group, ordered=ordered)
        return key

    def _group_name(self, key: bytes | None) -> bytes | None:
        if key is None or not self._grouped:
            return None
        return key if self._separator is None else key.partition(self._separator)[0]

    # A message is offered if only the limits of its key group can hold it back.

    def _make_ready(self, offset: int, key: _Key) -> None:
        self._ready[offset] = key
        if key.ordered:
            key.add(offset)
            self._offer(key)
        else:
            key.group.offered.add(offset)

    def _withdraw(self, offset: int, key: _Key) -> None:
        """Remove a message that is no longer ready."""
        if key.ordered:
            key.discard(offset)
            self._offer(key)
        else:
            key.group.offered.discard(offset)

    def _offer(self, key: _Key) -> None:
        """With key order, offer the oldest message if its key is idle."""
        if not key.ordered:
            return
        first = _NOBODY if key.busy else key.first()
        if first != key.offered:
            if key.offered != _NOBODY:
                key.group.offered.discard(key.offered)
            if first != _NOBODY:
                key.group.offered.add(first)
            key.offered = first

    # A key group is in line, asleep until its rate allows more, or neither.

    def _place(self, group: _KeyGroup) -> None:
        """Update a key group's place after its offers or its number of leases have changed."""
        if group.head == _NOBODY:
            self._stand(group, self._first_turn(group))
        elif self._is_full(group) or not group.offered or group.offered.min() != group.head:
            self._leave_line(group)
            self._stand(group, group.turn)

    def _stand(self, group: _KeyGroup, turn: int) -> None:
        """Get in line with the oldest offered message, unless a limit is reached."""
        if not group.offered or self._is_full(group):
            return
        if group.name is not None:
            opens_ms = self.limits.opens_ms(group.name)
            if opens_ms > self._now_ms:
                self._sleep(group.name, opens_ms)
                return
        group.turn = turn
        group.head = group.offered.min()
        heads = self._line.get(turn)
        if heads is None:
            heads = self._line[turn] = BitMap64()
        heads.add(group.head)

    def _step_out(self, group: _KeyGroup) -> None:
        """Take the group out of line to serve it, whether or not it was in line."""
        if group.head == _NOBODY:
            group.turn = self._first_turn(group)
        else:
            self._leave_line(group)

    def _leave_line(self, group: _KeyGroup) -> None:
        heads = self._line[group.turn]
        heads.discard(group.head)
        if not heads:
            del self._line[group.turn]
        group.head = _NOBODY

    def _first_turn(self, group: _KeyGroup) -> int:
        """Return the earliest round it may join. New groups join the next one, or many would prolong this one."""
        if not self._fair:
            return 0
        return self._round + 1 if group.turn == _NOBODY else max(group.turn, self._round)

    def _sleep(self, name: bytes, until_ms: int) -> None:
        if self._asleep.get(name) != until_ms:
            self._asleep[name] = until_ms
            heappush(self._alarms, (until_ms, name))

    def _wake(self, now_ms: int) -> None:
        """Put key groups in line whose rate allows more by now."""
        self._now_ms = max(self._now_ms, now_ms)
        while self._alarms and self._alarms[0][0] <= self._now_ms:
            at_ms, name = heappop(self._alarms)
            if self._asleep.get(name) == at_ms:
                del self._asleep[name]
                group = self._groups.get(name)
                if group is not None:
                    self._place(group)

    def limit_changed(self, name: bytes) -> None:
        """A message of the key group was leased or settled in another partition."""
        group = self._groups.get(name)
        if group is not None:
            if group.head != _NOBODY and self.limits.opens_ms(name) > self._now_ms:
                self._leave_line(group)
            self._place(group)

    def _count_leased(self, group: _KeyGroup, now_ms: int | None) -> None:
        group.leased += 1
        if group.name is not None:
            self.limits.take(group.name, now_ms, self)

    def _count_free(self, group: _KeyGroup) -> None:
        group.leased -= 1
        if group.name is not None:
            self.limits.give_back(group.name, 1, self)

    def _is_full(self, group: _KeyGroup) -> bool:
        return group.name is not None and self.limits.is_full(group.name)


def _advance(heap: list[_Next], turn: int, rest: Iterator[int], left: int) -> None:
    """Replace the first entry of the heap by the one after it."""
    following = next(rest, None) if left else None
    if following is None:
        heappop(heap)
    else:
        heapreplace(heap, (turn, following, rest, left))


class KeyLimits:
    """How many messages of each key group are leased, and how fast they may go.

    All partitions of a group share one, since the keys of a key group may be in any of them. The caller holds the
    group's lock.
    """

    def __init__(self, policy: KeyPolicy, *, now_mono_ms: int, new: bool) -> None:
        """A new group starts with full buckets. After a restart each has a single token: otherwise many restarts would
        let many bursts through."""
        self.policy = policy
        self.since_ms = now_mono_ms
        self._most = policy.key_group_concurrency
        self._rates: KeyRates | None = None
        if policy.key_group_rate is not None:
            self._rates = KeyRates(policy.key_group_rate, policy.key_group_burst, since_ms=now_mono_ms, full=new)
        self._leased: dict[bytes, int] = {}
        self._watchers: dict[bytes, list[KeyGate]] = {}

    def watch(self, name: bytes, gate: KeyGate) -> None:
        self._watchers.setdefault(name, []).append(gate)

    def unwatch(self, name: bytes, gate: KeyGate) -> None:
        watchers = self._watchers[name]
        watchers.remove(gate)
        if not watchers:
            del self._watchers[name]

    def is_full(self, name: bytes) -> bool:
        """Whether the key group is at its concurrency limit."""
        return self._most is not None and self._leased.get(name, 0) >= self._most

    def opens_ms(self, name: bytes) -> int:
        """Return when the rate allows the next message of the key group; this may be long ago."""
        return self.since_ms if self._rates is None else self._rates.opens_ms(name)

    def left(self, name: bytes, now_ms: int) -> int:
        """Return how many messages of the key group may go now."""
        left = _NO_LIMIT if self._most is None else self._most - self._leased.get(name, 0)
        return left if self._rates is None else min(left, self._rates.left(name, now_ms))

    def take(self, name: bytes, now_ms: int | None, gate: KeyGate) -> None:
        """Count a leased message of the key group; `now_ms` is None if it was leased before this process started."""
        self._leased[name] = self._leased.get(name, 0) + 1
        if self._rates is not None and now_ms is not None:
            self._rates.take(name, now_ms)
        self._notify(name, gate)

    def give_back(self, name: bytes, count: int, gate: KeyGate) -> None:
        """Uncount messages of the key group that are no longer leased."""
        left = self._leased.get(name, 0) - count
        if left > 0:
            self._leased[name] = left
        else:
            self._leased.pop(name, None)
        self._notify(name, gate)

    def _notify(self, name: bytes, gate: KeyGate) -> None:
        for other in self._watchers.get(name, ()):
            if other is not gate:
                other.limit_changed(name)
