"""Delayed messages and a partition that they enter once: power cuts and kills anywhere in random histories."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from holdfast.broker.delayed import Delayed, DelaySettings, DelayStore
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import HoldfastError
from holdfast.model import Batch
from holdfast.storage.log import Log
from tests.crash.histories import small_settings

HOUR_MS = 3_600_000
YEAR_MS = 365 * 24 * HOUR_MS
SLICES = 8


class Broker:
    """A partition in small: a log, the delayed messages, and the steps by which they get from here to there."""

    def __init__(self, world: World) -> None:
        self.clock = world.clock
        self.partition = Log.open("data/partition", small_settings(), world)
        delays = DelaySettings(spill_messages=12, save_ms=200)
        self.store = DelayStore.open(world, "data/delayed", small_settings(), delays)
        assert self.store.damage == []
        assert self.store.accounted <= self.partition.end, "a release was counted that the partition does not have"
        start = max(self.store.accounted, self.partition.start)
        self.store.forget([delayed_id(record) for record in self.partition.records(start)])
        self.store.settled(self.partition.end)
        self.store.check()

    @property
    def now_ms(self) -> int:
        return self.clock.now_ns() // 1_000_000

    def release(self, limit: int, durability: str = "os") -> list[bytes]:
        """Put what is due into the partition."""
        found = self.store.due(self.now_ms, limit)
        assert all(each.due_at_ms <= self.now_ms for each in found), "released early"
        assert found == sorted(found, key=lambda each: (each.due_at_ms, each.id))
        if found:
            appended = self.partition.append(as_batch(found), durability=durability)
            self.store.released([each.id for each in found], appended.next_offset)
        return [each.record.value for each in found]

    def settle(self) -> None:
        self.store.settled(self.partition.synced_end)

    def trim(self) -> None:
        self.partition.pin("delayed", self.store.accounted)
        self.partition.trim(self.partition.end)

    def tokens(self) -> list[bytes]:
        """What is in the partition."""
        return [record.value for record in self.partition.records(self.partition.start)]

    def close(self) -> None:
        self.store.close()
        self.partition.close()


def as_batch(found: list[Delayed]) -> Batch:
    ids = [(("delayed-id", each.id.to_bytes(8, "little")),) for each in found]
    return Batch(values=[each.record.value for each in found], headers=ids)


def delayed_id(record) -> int:
    return int.from_bytes(dict(record.headers)["delayed-id"], "little")


@dataclass
class Promises:
    """What the store was told and what it promised; a message is known by its value, which no other has."""

    due_at_ms: dict[bytes, int] = field(default_factory=dict)
    acknowledged: set[bytes] = field(default_factory=set)
    durable: set[bytes] = field(default_factory=set)
    cancelled: set[bytes] = field(default_factory=set)
    cancelling: bytes | None = None
    trimmed: set[bytes] = field(default_factory=set)  # they were in the partition for certain


class History:
    """One random life; `on_cut_point` is called after every change of the disk."""

    def __init__(self, seed: int, on_cut_point, disk=None) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.disk = disk or SimulatedDisk(maps=seed % 2 == 0)
        self.clock = ManualClock()
        self.ids = SeededIds(seed)
        self.promises = Promises()
        self.disk.make_folder("data")
        self._on_cut_point = on_cut_point
        self._hook()
        self.broker = Broker(self.world(self.disk, self.ids))

    def run(self, steps: int) -> None:
        actions = [self.put, self.release, self.settle, self.cancel, self.tick, self.spill, self.save]
        actions += [self.pass_time, self.set_clock, self.trim, self.reopen, self.kill]
        for _ in range(steps):
            self.rng.choices(actions, [12, 8, 4, 3, 3, 1, 1, 4, 1, 1, 1, 1])[0]()
            self.broker.store.check()
        self.broker.close()

    def put(self) -> None:
        rng, promises = self.rng, self.promises
        count = rng.choice([1, 1, 2, 5, 9])
        tokens = [b"%d" % (len(promises.due_at_ms) + i) for i in range(count)]
        tokens = [token.ljust(rng.choice([1, 1, 300, 900]), b".") for token in tokens]
        delays_ms = [rng.choice([0, 1, 700, 1500, 5000, HOUR_MS, 240 * HOUR_MS, 2 * YEAR_MS]) for _ in tokens]
        dues_ms = [self.broker.now_ms + delay_ms + rng.randint(0, 50) for delay_ms in delays_ms]
        promises.due_at_ms |= dict(zip(tokens, dues_ms, strict=True))
        durability = rng.choice(["fsync", "fsync", "os", "interval"])
        appended = self.broker.store.write(Batch(values=tokens, due_at_ms=dues_ms), durability=durability)
        self.broker.store.wait(appended)
        promises.acknowledged |= set(tokens)
        if durability == "fsync":
            promises.durable |= promises.acknowledged

    def release(self) -> None:
        durability = self.rng.choice(["os", "os", "fsync"])
        self.broker.release(self.rng.choice([1, 3, 100]), durability)

    def settle(self) -> None:
        if self.rng.random() < 0.5:
            self.broker.partition.sync()
        self.broker.settle()

    def cancel(self) -> None:
        waiting = list(self.broker.store.waiting())
        if not waiting:
            return
        chosen = self.rng.choice(waiting)
        self.promises.cancelling = chosen.record.value
        assert self.broker.store.cancel(chosen.id)
        assert self.broker.store.get(chosen.id) is None
        self.promises.cancelled.add(chosen.record.value)
        self.promises.cancelling = None

    def tick(self) -> None:
        self.broker.store.tick(self.broker.now_ms)
        self.broker.partition.tick()

    def spill(self) -> None:
        self.broker.store.spill(self.broker.now_ms)

    def save(self) -> None:
        self.broker.store.save()

    def pass_time(self) -> None:
        self.clock.advance(ms=self.rng.choice([1, 300, 1000, 6000, HOUR_MS, 300 * HOUR_MS]))

    def set_clock(self) -> None:
        self.clock.step_wall(ns=self.rng.choice([-HOUR_MS, -400, HOUR_MS]) * 1_000_000)

    def trim(self) -> None:
        partition = self.broker.partition
        before = min(self.broker.store.accounted, partition.end)
        self.promises.trimmed |= {r.value for r in partition.records(partition.start) if r.offset < before}
        self.broker.trim()

    def reopen(self) -> None:
        live = len(self.broker.store)
        self.broker.close()
        self.promises.durable |= self.promises.acknowledged
        self.broker = Broker(self.world(self.disk, self.ids))
        assert len(self.broker.store) == live

    def kill(self) -> None:
        live = len(self.broker.store)
        self.disk = self.disk.kill()
        self._hook()
        self.broker = Broker(self.world(self.disk, self.ids))
        assert len(self.broker.store) == live
        self.promises.durable |= self.promises.acknowledged

    def world(self, disk: SimulatedDisk, ids: SeededIds, clock: ManualClock | None = None) -> World:
        return World(clock=clock or self.clock, disk=disk, ids=ids)

    def _hook(self) -> None:
        self.disk.on_call = lambda call: self._on_cut_point(self, call)


def check_left_over(history: History, disk: SimulatedDisk, promised: set[bytes], rng: random.Random) -> None:
    """Open what is left, let all time pass, and count what arrives in the partition."""
    promises = history.promises
    clock = ManualClock(history.clock.now_ns())
    ids = SeededIds(-history.seed - 1)
    broker = Broker(history.world(disk, ids, clock))
    later = [b"later %d" % i for i in range(3)]
    promised_dues_ms = promises.due_at_ms | dict.fromkeys(later, broker.now_ms + 1)
    # Ids that a lost tail had are issued anew here: nobody may take these messages for the old ones.
    broker.store.wait(broker.store.write(Batch(values=later, due_at_ms=[broker.now_ms + 1] * 3), durability="fsync"))
    if rng.random() < 0.3:
        disk = disk.cut(rng)
        broker = Broker(history.world(disk, ids, clock))
    before = broker.tokens()
    drained = []
    for wait_ms in (0, 1, 999, HOUR_MS, 3 * YEAR_MS):
        clock.advance(ms=wait_ms)
        while tokens := broker.release(rng.choice([2, 50])):
            drained += tokens
            assert all(promised_dues_ms[token] <= broker.now_ms for token in tokens), "released early"
        if rng.random() < 0.3:
            broker.store.spill(broker.now_ms)
    assert len(broker.store) == 0
    assert broker.store.next_due_ms() is None
    twice = [token for token, times in Counter(before + drained).items() if times > 1]
    assert not twice, f"released twice: {twice}"
    assert not set(drained) & promises.trimmed, "released again after the partition was trimmed"
    arrived = set(before) | set(drained)
    assert not arrived & promises.cancelled, f"cancelled ones came back: {arrived & promises.cancelled}"
    wanted = (promised - promises.cancelled - promises.trimmed - {promises.cancelling}) | set(later)
    assert wanted <= arrived, f"lost: {sorted(wanted - arrived)}"
    assert arrived <= set(promised_dues_ms)
    broker.partition.sync()
    broker.settle()
    broker.store.save()
    assert not [name for name in disk.names("data/delayed") if name.endswith(".run")], "empty files stay"
    broker.close()


def stop_everywhere(seed: int, *, kill: bool, every: int, steps: int) -> int:
    """Run one history and look at what is left at some of its write points."""
    rng = random.Random(seed)
    states = checked = 0

    def stop(history: History, call: str) -> None:
        nonlocal states, checked
        states += 1
        if rng.randrange(every):
            return
        checked += 1
        if kill:
            check_left_over(history, history.disk.kill(), set(history.promises.acknowledged), rng)
        else:
            check_left_over(history, history.disk.cut(rng), set(history.promises.durable), rng)

    try:
        History(seed, stop).run(steps)
    except BaseException as error:
        error.add_note(f"history seed {seed}, state {states}")
        raise
    return checked


@pytest.mark.parametrize("part", range(SLICES))
def test_delayed_messages_are_released_once_wherever_the_power_is_cut(part, scale):
    wanted = scale(120, 50_000)
    checked, seed = 0, part * 1_000_000
    while checked < wanted:
        steps = 10 + seed % 7 * 10
        checked += stop_everywhere(seed, kill=False, every=6, steps=steps)
        seed += 1


@pytest.mark.parametrize("part", range(2))
def test_delayed_messages_are_released_once_wherever_the_process_is_killed(part, scale):
    wanted = scale(120, 50_000)
    checked, seed = 0, 500_000 + part * 1_000_000
    while checked < wanted:
        checked += stop_everywhere(seed, kill=True, every=6, steps=10 + seed % 7 * 10)
        seed += 1


@pytest.mark.parametrize("call", ["write", "sync", "rename", "sync_folder", "open", "remove", "reserve"])
def test_a_disk_that_fails_during_upkeep_loses_nothing(call, scale):
    """Whatever fails, what was acknowledged is there after opening anew."""
    for seed in range(scale(12, 2_000)):
        rng = random.Random(seed)
        history = History(seed, lambda history, call: None)
        for _ in range(25):
            rng.choice([history.put, history.release, history.settle, history.pass_time, history.save])()
        history.disk.faults.fail(rng.randint(1, 6), 5, sticky=rng.random() < 0.5, calls=frozenset({call}))
        try:
            history.broker.store.spill(history.broker.now_ms)
            history.broker.store.save()
        except (HoldfastError, OSError):
            pass
        history.broker.store.check()
        check_left_over(history, history.disk.cut(rng), set(history.promises.durable), rng)
