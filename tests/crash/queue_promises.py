"""What a queue was told, what an opened one holds, and the promises that tie the two together.

Every message has a number of its own, and begins with it. What the queue was told is noted before the call
(from then on it may have happened) and again when it has answered (from then on it is promised).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import holdfast
from holdfast import Queue
from holdfast.codec.frame import Kind
from holdfast.delivery.events import Phase
from holdfast.delivery.image import check
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk

if TYPE_CHECKING:
    from tests.crash.queue_histories import QueueHistory

FOLDER = "data/orders"
LEASE_MS = 10_000
MAX_ATTEMPTS = 3


def small_queue(disk: SimulatedDisk, clock: ManualClock, ids: SeededIds, **changes: Any) -> Queue[bytes]:
    """Tiny segments and frames, so that a short history crosses every boundary."""
    usual = {
        "segment_bytes": 4096,
        "frame_bytes": 1024,
        "index_bytes": 512,
        "min_free_bytes": 0,
        "lease_ms": LEASE_MS,
        "max_attempts": MAX_ATTEMPTS,
        "snapshot_events": 100,
    }
    return holdfast.open(FOLDER, world=World(clock=clock, disk=disk, ids=ids), **usual | changes)


def number_of(body: bytes) -> int:
    return int(body.split(b" ", 1)[0])


@dataclass
class Promises:
    """What the queue was told and what it answered: the model that a cut is held against."""

    next: int = 0
    put: set[int] = field(default_factory=set)  # the put has returned
    durable: set[int] = field(default_factory=set)  # and it was synced
    expires_ms: dict[int, int] = field(default_factory=dict)
    ending: set[int] = field(default_factory=set)  # an ack, cancel, purge or skip was begun
    ended: set[int] = field(default_factory=set)  # and has returned
    purged: set[int] = field(default_factory=set)  # ended among the dead letters, which have a journal of their own
    done: set[int] = field(default_factory=set)  # and was synced
    buried: set[int] = field(default_factory=set)  # became a dead letter
    dead: set[int] = field(default_factory=set)  # and that was synced
    replayed: set[int] = field(default_factory=set)  # may be there more than once: a seek went back
    dedup: dict[str, int] = field(default_factory=dict)  # id -> the message that had it first
    attempts: dict[int, int] = field(default_factory=dict)  # of the last delivery
    synced_attempts: dict[int, int] = field(default_factory=dict)
    deferred: set[int] = field(default_factory=set)  # its last delivery does not count
    deferred_since: set[int] = field(default_factory=set)  # at any time since the attempts were synced
    fence: int = 0
    taking: bool = False  # a get has begun: somebody may have got a message, and nobody knows of it

    def all_synced(self) -> None:
        """Everything that was answered is on disk."""
        self.durable |= self.put
        self.done |= self.ended
        self.dead |= self.buried
        self._attempts_synced()

    def journal_synced(self) -> None:
        """The queue's own journal is on disk: acks, leases, burials; not what was put."""
        self.done |= self.ended - self.purged
        self._attempts_synced()

    def _attempts_synced(self) -> None:
        self.synced_attempts = dict(self.attempts)
        self.deferred_since = set(self.deferred)

    def begin_replay(self, numbers: set[int]) -> None:
        """These may come again, whatever became of them."""
        self.replayed |= numbers
        for promised in (self.ended, self.done, self.buried, self.dead):
            promised -= numbers
        for n in numbers:
            self.forget_attempts(n)

    def forget_attempts(self, n: int) -> None:
        self.attempts.pop(n, None)
        self.synced_attempts.pop(n, None)


@dataclass
class Found:
    """Which messages an opened queue holds, and where."""

    live: Counter[int]
    delayed: Counter[int]
    dead: Counter[int]
    stored: set[int]  # those in a log, also if they are done
    whole: bool  # nothing was ever trimmed

    @cached_property
    def all(self) -> Counter[int]:
        return self.live + self.delayed + self.dead


def look(q: Queue[bytes]) -> Found:
    """All that is there, by way of the files."""
    delivery = q._port.deliveries[0]
    group, log = delivery.group, delivery.partition.log
    records = list(log.records(log.start))
    live = Counter(number_of(r.value) for r in records if group.phase(r.offset) is not Phase.DONE)
    store = delivery.partition.delayed
    waiting = [] if store is None else [number_of(message.record.value) for message in store.waiting()]
    stored = {number_of(record.value) for record in records}
    whole = log.start == 0
    if store is not None:
        whole = whole and store.intake.start == 0
        for frame in store.intake.read(store.intake.start):
            if frame.header.kind == Kind.DATA:
                stored |= {number_of(value) for value in frame.values()}
    return Found(live, Counter(waiting), Counter(number_of(m.raw) for m in q.dead.list()), stored, whole)


def check_promises(history: QueueHistory, q: Queue[bytes], *, killed: bool = False) -> Found:
    """Hold what is there against what was promised by then."""
    promises, now_ms = history.promises, history.clock.now_ns() // 1_000_000
    check_invariants(q)
    found = look(q)
    promised = promises.put if killed else promises.durable
    expired = {n for n, at_ms in promises.expires_ms.items() if at_ms <= now_ms}
    for n in sorted(promised - promises.ending - expired):
        assert found.all[n], f"{n} was acknowledged, and is lost"
    for n in sorted((promises.ended if killed else promises.done) - promises.replayed):
        assert not found.all[n], f"{n} was done, and is back ({where(found, n)})"
    for n, count in found.all.items():
        assert count == 1 or n in promises.replayed, f"{n} is there {count} times ({where(found, n)})"
        assert n < promises.next, f"{n} was never put"
    for n in sorted((promises.buried if killed else promises.dead) - promises.replayed - promises.ending):
        assert found.dead[n] == 1, f"{n} was a dead letter, and is not ({where(found, n)})"
    return found


def where(found: Found, n: int) -> str:
    return f"live {found.live[n]}, delayed {found.delayed[n]}, dead {found.dead[n]}"


def check_invariants(q: Queue[bytes]) -> None:
    delivery = q._port.deliveries[0]
    assert check(delivery.group) == []
    if delivery.dead.dead_log is not None:
        assert check(delivery.dead.dead_log.letters.group) == []
    if delivery.partition.delayed is not None:
        delivery.partition.delayed.check()
        assert delivery.partition.delayed.damage == []


def check_after_cut(history: QueueHistory, disk: SimulatedDisk, *, killed: bool = False, go_on: bool = True) -> None:
    """Open what was left, look, and work on with it."""
    clock = same_boot(history.clock) if killed else ManualClock(history.clock.now_ns())
    ids = SeededIds(history.seed if killed else -history.seed - 1)
    with small_queue(disk, clock, ids, durability=history.durability) as q:
        found = check_promises(history, q, killed=killed)
        if go_on:
            check_dedup(history, q, found)
            check_drained(history, q, clock, killed=killed)
    if go_on:
        with small_queue(disk, clock, ids, durability=history.durability) as q:
            clock.advance(seconds=4_000)
            q._port.engine.tick()
            assert not q.get_many(10, timeout=0), "what was done came back"
            check_invariants(q)


def same_boot(clock: ManualClock) -> ManualClock:
    """A clock of its own that shows the same times."""
    copy = ManualClock(clock.now_ns() - clock.monotonic_ns())
    copy.advance(ns=clock.monotonic_ns())
    return copy


def check_dedup(history: QueueHistory, q: Queue[bytes], found: Found) -> None:
    """What was acknowledged is known again; what was lost is not taken for a duplicate."""
    promises = history.promises
    for name, n in sorted(promises.dedup.items()):
        if n in promises.durable:
            assert q.put(b"%d" % promises.next, dedup_id=name, durability="os").duplicate, f"{name} was put twice"
        elif found.whole and n not in found.stored and n not in found.all and n not in promises.ending:
            stored = q.put(b"%d" % promises.next, dedup_id=name, durability="os")
            assert not stored.duplicate, f"{n} is lost, and {name} counts as a duplicate"


def check_drained(history: QueueHistory, q: Queue[bytes], clock: ManualClock, *, killed: bool) -> None:
    """Everything is handed out in the end, each once, with higher fences and the attempts counted."""
    promises = history.promises
    expected = look(q)
    expired = set(promises.expires_ms)
    known = promises.attempts if killed else promises.synced_attempts
    delivered: Counter[int] = Counter()
    for _ in range(8):
        clock.advance(seconds=100)
        q._port.engine.tick()
        for message in q.get_many(1_000, timeout=0):
            n = number_of(message.raw)
            delivered[n] += 1
            assert message.fence > promises.fence, "a fencing number was given out again"
            if n in known and n in promises.attempts and n not in promises.replayed:
                least = known[n] + (n not in (promises.deferred if killed else promises.deferred_since))
                most = promises.attempts[n] + 1 + promises.taking
                assert least <= message.attempt <= most, f"{n}: attempt {message.attempt}, not {least} to {most}"
            message.ack(durability="os")
    for n in sorted(set(expected.live + expected.delayed) - expired):
        if look(q).dead[n] > expected.dead[n]:
            continue  # its last lease, of a script, ended
        assert delivered[n] == (expected.live + expected.delayed)[n], f"{n} was handed out {delivered[n]} times"
