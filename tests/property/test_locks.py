"""Locks and documents through any order of calls, restarts, kills and power cuts, beside a model that is plain."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast import Conflict, LeaseLost, LockHeld
from holdfast.broker.locks import Ticket
from holdfast.locking import Acquire, check, image_of
from tests.unit.brokers import Place

NAMES = ("a", "b", "c")
names = st.sampled_from(NAMES)
leases_s = st.sampled_from([1, 5, 30])
seeds = st.integers(0, 2**32)


@dataclass
class Held:
    """Who has a lock, until when."""

    fence: int
    lease_id: str
    lease_ms: int
    until_ms: int


@dataclass
class Standing:
    """Somebody in line, and for how long they want the lock."""

    ticket: Ticket
    lease_ms: int
    woken: bool = False

    def wake(self) -> None:
        self.woken = True


@dataclass
class Model:
    """What must be so."""

    held: dict[str, Held] = field(default_factory=dict)
    lines: dict[str, list[Standing]] = field(default_factory=lambda: {name: [] for name in NAMES})
    documents: dict[str, tuple[object, int]] = field(default_factory=dict)
    old: list[str] = field(default_factory=list)  # leases that were lost or released
    fence: int = 0
    version: int = 0


class LockMachine(RuleBasedStateMachine):
    """The embedded face, on a clock that stands still unless it is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Place()
        self.model = Model()

    @property
    def locks(self):
        return self.place.broker.locks

    @property
    def now_ms(self) -> int:
        return self.place.clock.monotonic_ns() // 1_000_000

    def teardown(self) -> None:
        self.place.close()

    @rule(name=names, lease=leases_s)
    def acquire(self, name, lease):
        if name in self.model.held:
            with pytest.raises(LockHeld):
                self.locks.acquire(name, lease=lease, wait=0)
        else:
            self.granted(name, self.locks.acquire(name, lease=lease, wait=0).fence, lease * 1_000)

    @rule(name=names, lease=leases_s)
    def acquire_if_not_exists(self, name, lease):
        if name in self.model.held or name in self.model.documents:
            with pytest.raises(Conflict):
                self.locks.acquire(name, lease=lease, if_not_exists=True)
        else:
            self.granted(name, self.locks.acquire(name, lease=lease, if_not_exists=True).fence, lease * 1_000)

    @rule(name=names, lease=leases_s)
    def stand_in_line(self, name, lease):
        if name in self.model.held:
            standing = Standing(None, lease * 1_000)  # type: ignore[arg-type]
            wanted = Acquire(name, "somebody", round(lease * 1_000))
            standing.ticket = self.place.engine.locks().ask(wanted, standing)
            assert not standing.ticket.over
            self.model.lines[name].append(standing)

    @rule(name=names, number=st.integers(0, 3))
    def leave_the_line(self, name, number):
        line = self.model.lines[name]
        if number < len(line):
            self.place.engine.locks().leave(line.pop(number).ticket)

    @rule(name=names, lease=leases_s)
    def keepalive(self, name, lease):
        held = self.model.held.get(name)
        if held is not None:
            assert self.locks.keepalive(held.lease_id, lease=lease).fence == held.fence
            held.lease_ms, held.until_ms = lease * 1_000, self.now_ms + lease * 1_000

    @rule(name=names)
    def release(self, name):
        held = self.model.held.get(name)
        if held is not None:
            self.locks.release(held.lease_id)
            self.freed(name)

    @rule(number=st.integers(0, 100))
    def use_an_old_lease(self, number):
        if self.model.old:
            lease_id = self.model.old[number % len(self.model.old)]
            for call in (
                lambda: self.locks.keepalive(lease_id),
                lambda: self.locks.release(lease_id),
                lambda: self.place.broker.documents.update("a", 0, lock=lease_id),
            ):
                with pytest.raises(LeaseLost):
                    call()

    @rule(name=names, value=st.integers(-(2**63), 2**63), known=st.booleans(), stale=st.booleans())
    def update(self, name, value, known, stale):
        version = self.model.documents.get(name, (None, 0))[1]
        expected = version + stale if known else None
        if known and stale:
            with pytest.raises(Conflict):
                self.place.broker.documents.update(name, value, version=expected)
            return
        written = self.place.broker.documents.update(name, value, version=expected)
        assert written.version > self.model.version
        self.model.version = written.version
        self.model.documents[name] = (value, written.version)

    @rule(name=names)
    def remove(self, name):
        assert self.place.broker.documents.remove(name) == (name in self.model.documents)
        self.model.documents.pop(name, None)

    @rule(ms=st.sampled_from([1, 999, 1_000, 5_000]), ticks=st.booleans())
    def time_passes(self, ms, ticks):
        self.place.clock.advance(ms=ms)
        if ticks:
            self.place.engine.tick()
        else:
            for name in NAMES:
                self.locks.describe(name)
        self.expire()

    @rule()
    def snapshot(self):
        locks = self.place.engine.locks()
        locks.journal.snapshot(locks.table)

    @rule(killed=st.booleans())
    def restart(self, killed):
        self.model.lines = {name: [] for name in NAMES}
        before = image_of(self.place.engine.locks().table)
        if killed:
            self.place.kill()
        else:
            self.place.reopen()
        after = image_of(self.place.engine.locks().table)
        assert (after.held, after.documents, after.endings) == (before.held, before.documents, before.endings)

    @rule(seed=seeds)
    def power_cut(self, seed):
        """Holders and documents are as they were answered; that a lease ended may be forgotten, and it ends again."""
        self.model.lines = {name: [] for name in NAMES}
        self.place.disk = self.place.disk.cut(random.Random(seed))
        self.place.ids.reboot()
        self.place.broker = self.place.open()
        table = self.place.engine.locks().table
        for name, held in self.model.held.items():
            assert table.held[name].fence == held.fence
            assert table.held[name].until_ms >= self.now_ms + held.lease_ms
        for name, held in table.held.items():
            lease_id = self.lease_id(name)
            if name not in self.model.held:
                self.model.old.remove(lease_id)
            self.model.held[name] = Held(held.fence, lease_id, held.lease_ms, held.until_ms)

    @invariant()
    def all_is_as_it_must_be(self):
        table = self.place.engine.locks().table
        assert check(table) == []
        found = {name: (held.fence, held.until_ms) for name, held in table.held.items()}
        assert found == {name: (held.fence, held.until_ms) for name, held in self.model.held.items()}
        for name in NAMES:
            document = self.place.broker.documents.get(name)
            assert (document and (document.value, document.version)) == self.model.documents.get(name)
            assert self.locks.describe(name).waiting == len(self.model.lines[name])

    def granted(self, name: str, fence: int, lease_ms: int) -> None:
        assert fence > self.model.fence
        self.model.fence = fence
        self.model.held[name] = Held(fence, self.lease_id(name), lease_ms, self.now_ms + lease_ms)

    def lease_id(self, name: str) -> str:
        """As the holder was told it."""
        locks = self.place.engine.locks()
        return locks.lease_id(name, locks.table.held[name])

    def freed(self, name: str) -> None:
        """The first in line has it by now."""
        self.model.old.append(self.model.held.pop(name).lease_id)
        if self.model.lines[name]:
            first = self.model.lines[name].pop(0)
            assert first.woken
            assert first.ticket.granted is not None
            locks = self.place.engine.locks()
            locks.journal.log.wait(locks.settle(first.ticket))  # as whoever waits does, before anybody is told
            self.granted(name, first.ticket.granted.fence, first.lease_ms)

    def expire(self) -> None:
        over = [name for name, held in self.model.held.items() if held.until_ms <= self.now_ms]
        fences = self.place.engine.locks().table.held
        for name in sorted(over, key=lambda name: fences[name].fence if name in fences else 0):
            self.freed(name)


TestLocks = LockMachine.TestCase
