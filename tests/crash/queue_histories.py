"""Random histories of a queue on a simulated disk, and what must hold wherever the power is cut.

Every message has a number of its own, and begins with it. What the queue was told is noted before the call
(from then on it may have happened) and again when it has answered (from then on it is promised).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import holdfast
from holdfast import LeaseLost, NewMessage, Queue
from holdfast.codec.frame import Kind
from holdfast.delivery.check import check
from holdfast.delivery.events import Phase
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.simdisk import SimulatedDisk

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
class Told:
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
    engine = q._engine
    group, log = engine.delivery.group, engine.partition.log
    records = list(log.records(log.start))
    live = Counter(number_of(r.value) for r in records if group.phase(r.offset) is not Phase.DONE)
    store = engine.partition.delayed
    waiting = [] if store is None else [number_of(message.record.value) for message in store.waiting()]
    stored = {number_of(record.value) for record in records}
    whole = log.start == 0
    if store is not None:
        whole = whole and store.intake.start == 0
        for frame in store.intake.read(store.intake.start):
            if frame.header.kind == Kind.DATA:
                stored |= {number_of(value) for value in frame.values()}
    return Found(live, Counter(waiting), Counter(number_of(m.raw) for m in q.dead.list()), stored, whole)


class QueueHistory:
    """One random life of a queue; `on_cut_point` is called after every change of the disk."""

    def __init__(self, seed: int, *, durability: str, maps: bool = True, on_cut_point: Any = None) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.durability = durability
        self.disk = SimulatedDisk(maps=maps)
        self.ids = SeededIds(seed)
        self.clock = ManualClock()
        self.clock.advance(seconds=5_000)
        self.told = Told()
        self.held: dict[int, Any] = {}
        self.detached: set[int] = set()
        self._on_cut_point = on_cut_point
        self.steps: list[str] = []
        self.verdict: Exception | None = None
        self._hook()
        self.q = self.open()

    def open(self) -> Queue[bytes]:
        return small_queue(self.disk, self.clock, self.ids, durability=self.durability)

    WEIGHTS = {
        "put": 8, "put_many": 3, "get": 7, "ack": 4, "ack_many": 2, "nack": 3, "defer": 1, "reject": 2, "extend": 1,
        "save_state": 1, "cancel": 1, "seek": 0.3, "redrive": 1, "purge": 0.4, "compact": 0.5, "sync": 1, "wait": 4,
        "snapshot": 1, "reopen": 0.6, "kill": 0.6, "power_cut": 0.5,
    }  # fmt: skip

    def run(self, steps: int, *, without: str | None = None) -> None:
        weights = {name: weight for name, weight in self.WEIGHTS.items() if name != without}
        for _ in range(steps):
            self.step(self.rng.choices(list(weights), list(weights.values()))[0])
        self.step("close")

    def step(self, name: str) -> None:
        self.steps.append(name)
        self.do(getattr(self, name))

    def do(self, call: Callable[[], object]) -> None:
        """One thing to do. What a look behind a cut has found is raised here, not where the queue would hide it."""
        try:
            call()
        finally:
            if self.verdict is not None:
                raise self.verdict

    # Publishing

    def put(self, **options: Any) -> int:
        message = self.new_message(**options)
        self._put([message], lambda how: [self.q.put(message.body, **_arguments(message), durability=how)])
        return number_of(message.body)

    def put_many(self) -> None:
        messages = [self.new_message() for _ in range(self.rng.randint(2, 4))]
        self._put(messages, lambda how: self.q.put_many(messages, durability=how))

    def new_message(self, **options: Any) -> NewMessage:
        n, rng = self.told.next, self.rng
        self.told.next += 1
        if not options:
            options = {
                name: value()
                for name, value in {
                    "key": lambda: f"k{rng.randint(0, 2)}",
                    "headers": lambda: {"h": "x" * rng.randint(0, 50)},
                    "priority": lambda: rng.randint(1, 9),
                    "delay": lambda: rng.choice([0.5, 5, 60]),
                    "ttl": lambda: rng.choice([2, 100]),
                    "dedup_id": lambda: f"d{rng.randint(0, 12)}",
                }.items()
                if rng.random() < 0.2
            }
        return NewMessage(body=b"%d " % n + bytes(rng.choice([0, 0, 30, 300, 900])), **options)

    def _put(self, messages: list[NewMessage], call: Any) -> None:
        told, how = self.told, self.rng.choice([None, None, "fsync", "os", "interval"])
        for message in messages:
            if message.ttl is not None:
                due_ms = self.clock.now_ns() // 1_000_000 + round((message.delay or 0) * 1000)
                told.expires_ms[number_of(message.body)] = due_ms + round(message.ttl * 1000)
        for message, stored in zip(messages, call(how), strict=True):
            n = number_of(message.body)
            if stored.duplicate:
                assert message.dedup_id in told.dedup, f"{message.dedup_id} was never put, and counts as a duplicate"
                n = told.dedup[message.dedup_id]
            elif message.dedup_id is not None:
                assert message.dedup_id not in told.dedup, f"{message.dedup_id} was put twice"
                told.dedup[message.dedup_id] = n
            told.put.add(n)
            if stored.durability == "fsync":
                told.durable.add(n)

    # Consuming

    def get(self, count: int | None = None) -> None:
        detached = self.rng.random() < 0.15
        self.told.taking = True
        taken = self.q.get_many(count or self.rng.randint(1, 3), timeout=0, detached=detached)
        self.told.taking = False
        for message in taken:
            self._took(message)
            if detached:
                self.detached.add(number_of(message.raw))

    def _took(self, message: Any) -> None:
        n, told = number_of(message.raw), self.told
        assert n not in told.ended or n in told.replayed, f"{n} was done, and came back"
        assert message.fence >= told.fence, "a fencing number fell"
        told.fence = message.fence
        told.attempts[n] = message.attempt
        told.deferred.discard(n)
        self.held[n] = message

    def ack(self) -> None:
        self._ack(self._pick(1))

    def ack_many(self) -> None:
        self._ack(self._pick(3))

    def _ack(self, numbers: list[int]) -> None:
        if not numbers:
            return
        durability = self.rng.choice([None, None, "fsync"])
        messages = [self.held.pop(n) for n in numbers]
        self._begin_end(numbers)
        try:
            if len(messages) == 1:
                messages[0].ack(durability=durability)
            else:
                self.q.ack_many(messages, durability=durability)
        except LeaseLost as lost:
            gone = [n for n, m in zip(numbers, messages, strict=True) if m.offset in lost.offsets]
            assert gone
            self.told.ended |= set(numbers) - set(gone)
            return
        self.told.ended |= set(numbers)
        if durability == "fsync":
            self.told.journal_synced()

    def nack(self) -> None:
        self._settle(lambda m: m.nack(delay=self.rng.choice([None, 0, 3]), error="no"))

    def defer(self) -> None:
        def defer(message: Any) -> None:
            self.told.deferred.add(number_of(message.raw))
            self.told.deferred_since.add(number_of(message.raw))
            message.defer(delay=self.rng.choice([0, 2]))

        self._settle(defer)

    def reject(self) -> None:
        n = self._settle(lambda m: m.reject("never"))
        if n is not None and n not in self.told.replayed:
            self.told.buried.add(n)

    def extend(self) -> None:
        self._settle(lambda m: m.extend(20), keep=True)

    def save_state(self) -> None:
        self._settle(lambda m: m.state.save({"step": self.rng.randint(0, 9)}), keep=True)

    def _settle(self, call: Any, *, keep: bool = False) -> int | None:
        for n in self._pick(1):
            message = self.held[n] if keep else self.held.pop(n)
            try:
                call(message)
            except LeaseLost:
                self.held.pop(n, None)
                return None
            return n
        return None

    def _pick(self, most: int) -> list[int]:
        held = sorted(self.held)
        return self.rng.sample(held, min(most, len(held)))

    # Operating

    def cancel(self) -> None:
        listed = [*self.q.messages("ready"), *self.q.messages("delayed")]
        if listed:
            chosen = self.rng.choice(listed)
            n = number_of(chosen.raw)
            self._begin_end([n])
            if self.q.cancel(chosen.id):
                self.told.ended.add(n)

    def seek(self) -> None:
        log, group = self.q._log, self.q._delivery.group
        to = self.rng.randint(log.start, log.end)
        records = list(log.records(log.start))
        before = {number_of(r.value) for r in records if r.offset < to and group.phase(r.offset) is not Phase.DONE}
        held = {m.offset for m in self.held.values()}
        skipped = {number_of(r.value) for r in records if r.offset < to and r.offset not in held}
        self._begin_end(before)
        self.told.begin_replay({number_of(r.value) for r in records if r.offset >= to})
        self.q.seek(offset=to)
        self.told.ended |= before & skipped - set(self.held) - self.told.replayed

    def redrive(self) -> None:
        self._with_letters(lambda ids: self.q.dead.redrive(ids), ends=False)

    def purge(self) -> None:
        self._with_letters(lambda ids: self.q.dead.purge(ids), ends=True)

    def _with_letters(self, call: Any, *, ends: bool) -> None:
        letters = self.q.dead.list()
        chosen = self.rng.sample(letters, min(len(letters), self.rng.randint(1, 3)))
        numbers = {number_of(letter.raw) for letter in chosen}
        self.told.buried -= numbers
        self.told.dead -= numbers
        for n in numbers:
            self.told.forget_attempts(n)
        if ends:
            self._begin_end(numbers)
        assert call([letter.id for letter in chosen]).done == len(chosen)
        if ends:
            self.told.purged |= numbers
            self.told.ended |= numbers - self.told.replayed

    def _begin_end(self, numbers: Any) -> None:
        self.told.ending |= set(numbers)

    def compact(self) -> None:
        self.q.compact()

    def sync(self) -> None:
        self.q.sync()
        self.told.all_synced()

    def snapshot(self) -> None:
        self.q._engine.delivery.save()
        self.told.journal_synced()

    def wait(self) -> None:
        self.clock.advance(ms=self.rng.choice([1, 200, 1_100, 6_000, 30_000]))
        self.q._engine.tick()

    # Restarts

    def reopen(self) -> None:
        self.q.close()
        self.told.all_synced()
        self._restart()

    def close(self) -> None:
        self.q.close()

    def kill(self) -> None:
        """kill -9: what the kernel had is all there."""
        self.disk = self.disk.kill()
        self._hook()
        self._restart()
        check_promises(self, self.q, killed=True)
        self.told.all_synced()  # by those who opened the logs anew

    def power_cut(self) -> None:
        """Go on with what a cut leaves."""
        self.disk = self.disk.cut(self.rng)
        self._hook()
        self.ids.reboot()
        clock = ManualClock(self.clock.now_ns())
        self.clock = clock
        self._restart()
        check_promises(self, self.q)
        self._learn(look(self.q))

    def _learn(self, found: Found) -> None:
        """What is there now will stay; what is not is gone for ever."""
        told = self.told
        told.put, told.durable = set(found.all), set(found.all)
        told.ended = set(range(told.next)) - told.put - told.replayed
        told.ending -= told.put
        told.buried = set(found.dead) - told.replayed
        told.done, told.dead = set(told.ended), set(told.buried)
        told.attempts, told.synced_attempts = {}, {}
        told.dedup = {name: n for name, n in told.dedup.items() if n in found.stored or n in told.put}

    def _restart(self) -> None:
        self.held.clear()
        self.detached.clear()
        self.q = self.open()

    def _hook(self) -> None:
        if self._on_cut_point is not None:
            self.disk.on_call = self._cut_point

    def _cut_point(self, call: str) -> None:
        try:
            if self.verdict is None:
                self._on_cut_point(self, call)
        except Exception as error:
            error.add_note(f"after: {', '.join(self.steps)}; inside a call of {call}")
            self.verdict = error


def _arguments(message: NewMessage) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__ if name != "body"}


# What must hold


def check_promises(history: QueueHistory, q: Queue[bytes], *, killed: bool = False) -> Found:
    """Hold what is there against what was promised by then."""
    told, now_ms = history.told, history.clock.now_ns() // 1_000_000
    check_invariants(q)
    found = look(q)
    promised = told.put if killed else told.durable
    expired = {n for n, at_ms in told.expires_ms.items() if at_ms <= now_ms}
    for n in sorted(promised - told.ending - expired):
        assert found.all[n], f"{n} was acknowledged, and is lost"
    for n in sorted((told.ended if killed else told.done) - told.replayed):
        assert not found.all[n], f"{n} was done, and is back ({where(found, n)})"
    for n, count in found.all.items():
        assert count == 1 or n in told.replayed, f"{n} is there {count} times ({where(found, n)})"
        assert n < told.next, f"{n} was never put"
    for n in sorted((told.buried if killed else told.dead) - told.replayed - told.ending):
        assert found.dead[n] == 1, f"{n} was a dead letter, and is not ({where(found, n)})"
    return found


def where(found: Found, n: int) -> str:
    return f"live {found.live[n]}, delayed {found.delayed[n]}, dead {found.dead[n]}"


def check_invariants(q: Queue[bytes]) -> None:
    engine = q._engine
    assert check(engine.delivery.group) == []
    if engine._graves is not None:
        assert check(engine._graves.letters.group) == []
    if engine.partition.delayed is not None:
        engine.partition.delayed.check()
        assert engine.partition.delayed.damage == []


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
            q._engine.tick()
            assert not q.get_many(10, timeout=0), "what was done came back"
            check_invariants(q)


def same_boot(clock: ManualClock) -> ManualClock:
    """A clock of its own that shows the same times."""
    copy = ManualClock(clock.now_ns() - clock.monotonic_ns())
    copy.advance(ns=clock.monotonic_ns())
    return copy


def check_dedup(history: QueueHistory, q: Queue[bytes], found: Found) -> None:
    """What was acknowledged is known again; what was lost is not taken for a duplicate."""
    told = history.told
    for name, n in sorted(told.dedup.items()):
        if n in told.durable:
            assert q.put(b"%d" % told.next, dedup_id=name, durability="os").duplicate, f"{name} was put twice"
        elif found.whole and n not in found.stored and n not in found.all and n not in told.ending:
            stored = q.put(b"%d" % told.next, dedup_id=name, durability="os")
            assert not stored.duplicate, f"{n} is lost, and {name} counts as a duplicate"


def check_drained(history: QueueHistory, q: Queue[bytes], clock: ManualClock, *, killed: bool) -> None:
    """Everything is handed out in the end, each once, with higher fences and the attempts counted."""
    told = history.told
    expected = look(q)
    expired = set(told.expires_ms)
    known = told.attempts if killed else told.synced_attempts
    delivered: Counter[int] = Counter()
    for _ in range(8):
        clock.advance(seconds=100)
        q._engine.tick()
        for message in q.get_many(1_000, timeout=0):
            n = number_of(message.raw)
            delivered[n] += 1
            assert message.fence > told.fence, "a fencing number was given out again"
            if n in known and n in told.attempts and n not in told.replayed:
                least = known[n] + (n not in (told.deferred if killed else told.deferred_since))
                most = told.attempts[n] + 1 + told.taking
                assert least <= message.attempt <= most, f"{n}: attempt {message.attempt}, not {least} to {most}"
            message.ack(durability="os")
    for n in sorted(set((expected.live + expected.delayed)) - expired):
        if look(q).dead[n] > expected.dead[n]:
            continue  # its last lease, of a script, ended
        assert delivered[n] == (expected.live + expected.delayed)[n], f"{n} was handed out {delivered[n]} times"
