"""Locks and documents after power cuts, kills and damage: what was answered counts, and no fence comes twice."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

import holdfast
from holdfast import CorruptData, LeaseLost, LockHeld
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.locking import ReplaceDocument, check
from tests.crash.writer_process import Journal, Note, started
from tests.unit.brokers import FOLDER, SETTINGS, Place

LOCKS = f"{FOLDER}/locks"
SEEDS = range(30)


def reopened(disk: SimulatedDisk, clock: ManualClock | None = None) -> holdfast.Broker:
    world = World(clock=clock or ManualClock(), disk=disk, ids=SeededIds(99))
    return holdfast.open_broker(FOLDER, world=world, settings=SETTINGS)


def every_cut(place: Place) -> list[SimulatedDisk]:
    """What cuts of one moment may leave: all, nothing and much in between."""
    return [place.disk.cut(random.Random(seed)) for seed in SEEDS]


def test_a_lock_that_was_answered_is_held_after_a_power_cut():
    place = Place()
    lock = place.broker.locks.acquire("report", owner="ann", lease=20)
    for disk in every_cut(place):
        with reopened(disk) as broker:
            assert broker.locks.keepalive(lock.lease_id).lease_id == lock.lease_id
            with pytest.raises(LockHeld, match="ann"):
                broker.locks.acquire("report", wait=0)


def test_a_lease_that_was_made_longer_is_as_long_after_a_power_cut():
    place = Place()
    lock = place.broker.locks.acquire("report", lease=20)
    place.broker.locks.keepalive(lock, lease=200)
    for disk in every_cut(place):
        with reopened(disk) as broker:
            assert broker.locks.keepalive(lock).lease == 200


def test_a_document_that_was_seen_is_the_same_after_a_power_cut():
    place = Place()
    place.broker.documents.update("plan", 1)
    locks = place.engine.locks()
    # Somebody has written, and does not know yet that it is done; somebody else looks, and knows.
    locks.change(ReplaceDocument("plan", b"2"))
    seen = place.broker.documents.get("plan")
    for disk in every_cut(place):
        with reopened(disk) as broker:
            assert broker.documents.get("plan") == seen


@dataclass
class Promises:
    """What was answered, and what may be besides."""

    held: dict[str, int] = field(default_factory=dict)  # lock -> fence
    fence: int = 0  # the highest that anybody can know of
    documents: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> value, version
    begun: str = ""  # what is being written just now, and not answered
    version: int = 0

    def check(self, broker: holdfast.Broker) -> None:
        for name, fence in self.held.items():
            if name != self.begun:
                assert broker.locks.describe(name).fence == fence, name
        for name, known in self.documents.items():
            document = broker.documents.get(name)
            if name != self.begun:
                assert document is not None
                assert (document.value, document.version) == known
        assert check(broker._port.engine.locks().table) == []
        lock = broker.locks.acquire("new", wait=0)
        assert lock.fence > self.fence
        assert broker.documents.update("new", 0).version > self.version
        broker.locks.release(lock)


def history(place: Place, promises: Promises, rng: random.Random, steps: int) -> None:
    """Calls of all kinds; before each it is noted what it may change, afterwards what it has changed."""
    locks, documents = place.broker.locks, place.broker.documents
    leases: dict[str, holdfast.Lock] = {}
    for number in range(steps):
        name = promises.begun = rng.choice(["a", "b", "c"])
        did = rng.choice(["acquire", "acquire", "release", "keepalive", "update", "update", "remove", "snapshot"])
        if did == "acquire" and name not in leases:
            lock = leases[name] = locks.acquire(name, lease=1000)
            promises.held[name] = promises.fence = lock.fence
        elif did == "release" and name in leases:
            promises.held.pop(name)
            locks.release(leases.pop(name))
        elif did == "keepalive" and name in leases:
            locks.keepalive(leases[name], lease=rng.choice([500, 2000]))
        elif did == "update":
            document = documents.update(name, number)
            promises.documents[name] = (number, document.version)
            promises.version = document.version
        elif did == "remove":
            promises.documents.pop(name, None)
            documents.remove(name)
        elif did == "snapshot":
            promises.begun = ""
            engine = place.engine.locks()
            engine.journal.snapshot(engine.table)
    promises.begun = ""


@pytest.mark.parametrize("killed", [False, True])
def test_nothing_that_was_answered_is_undone_wherever_the_power_is_cut_or_the_process_killed(killed, scale):
    states, seed = 0, 0
    while states < scale(150, 20_000):
        place, promises, rng = Place(), Promises(), random.Random(seed)
        place.broker.locks.describe("a")

        def stop(call: str, place: Place = place, promises: Promises = promises, rng: random.Random = rng) -> None:
            nonlocal states
            if rng.random() < 0.1:
                states += 1
                disk = place.disk.kill() if killed else place.disk.cut(rng)
                with reopened(disk) as broker:
                    promises.check(broker)

        place.disk.on_call = stop
        try:
            history(place, promises, rng, steps=30)
        except BaseException as error:
            error.add_note(f"seed {seed}, killed={killed}")
            raise
        seed += 1


def written_journal() -> tuple[Place, str, list[tuple[Any, ...]]]:
    """A journal of some events of three owners, its file, and what the state was after each of them."""
    place = Place()
    states = [state_of(place.broker)]

    def step(call: Callable[[], Any]) -> Any:
        answer = call()
        states.append(state_of(place.broker))
        return answer

    lock = step(lambda: place.broker.locks.acquire("a", owner="ann", lease=1000))
    step(lambda: place.broker.documents.update("a", {"x": 1}, lock=lock))
    step(lambda: place.broker.locks.keepalive(lock, lease=2000))
    place.reopen()
    step(lambda: place.broker.locks.acquire("b", lease=1000))
    step(lambda: place.broker.documents.update("b", [1, 2, 3]))
    step(lambda: place.broker.documents.remove("a"))
    place.reopen()
    step(lambda: place.broker.locks.release(lock))
    step(lambda: place.broker.locks.acquire("a", owner="bob", lease=1000))
    place.broker.close()
    (name,) = [name for name in place.disk.names(LOCKS) if name.endswith(".log")]
    return place, f"{LOCKS}/{name}", states


def state_of(broker: holdfast.Broker) -> tuple[Any, ...]:
    table = broker._port.engine.locks().table
    return (
        {name: (held.owner, held.fence, held.lease_ms) for name, held in table.held.items()},
        {name: (document.version, document.content) for name, document in table.documents.items()},
    )


@pytest.mark.slow
def test_a_journal_that_ends_at_any_byte_is_that_of_an_earlier_moment():
    place, path, states = written_journal()
    length = len(place.disk.contents(path).rstrip(b"\0"))
    last = max(held[1] for held in states[-1][0].values())
    seen = set()
    for end in range(length + 16):  # a frame may end with zeros
        disk = place.disk.kill()
        disk.cut_file(path, end)
        with reopened(disk) as broker:
            found = state_of(broker)
            assert found in states, f"cut at {end}"
            seen.add(states.index(found))
            fence = broker.locks.acquire("new", wait=0).fence
            assert fence > last, f"cut at {end}"
            broker.documents.update("new", 1)
        with reopened(disk) as broker:
            assert broker.locks.describe("new").fence == fence
    assert seen == set(range(len(states)))


def test_a_journal_with_any_byte_spoiled_opens_and_no_fence_comes_twice(scale):
    place, path, states = written_journal()
    length = len(place.disk.contents(path).rstrip(b"\0"))
    last = max(held[1] for held in states[-1][0].values())
    for position in range(0, length, scale(7, 1)):
        disk = place.disk.kill()
        disk.flip(path, position)
        try:
            with reopened(disk) as broker:
                assert check(broker._port.engine.locks().table) == []
                assert broker.locks.acquire("new", wait=0).fence > last, f"spoiled at {position}"
                broker.documents.update("new", 1)
        except CorruptData as error:
            assert len(str(error)) > 20


# kill -9

OWNERS, NAMES = 4, ("x", "y")
TAKEN, WROTE = 1, 2
PATIENCE_S = 120


def live(journal: Journal, folder: str, seed: int) -> None:
    """A process whose threads want the same few locks, and count in documents while they have them."""
    broker = holdfast.open_broker(folder)

    def work(owner: int) -> None:
        rng = random.Random(seed + owner)
        while True:
            place = rng.randrange(len(NAMES))
            name = NAMES[place]
            try:
                lock = broker.locks.acquire(name, owner=f"w{owner}", lease=rng.choice([0.05, 30]), wait=0.5)
                journal.note(Note(TAKEN, owner, place, lock.fence))
                found = broker.documents.get(name)
                count = 0 if found is None else found.value
                document = broker.documents.update(
                    name, count + 1, version=0 if found is None else found.version, lock=lock
                )
                journal.note(Note(WROTE, owner, place, count + 1, document.version))
                broker.locks.release(lock)
            except (LockHeld, LeaseLost):
                continue

    threads = [threading.Thread(target=work, args=(owner,)) for owner in range(OWNERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.serial
def test_after_kills_every_count_stands_and_every_fence_is_higher(tmp_path, scale):
    folder, rng = str(tmp_path / "data"), random.Random(7)
    counts, versions = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0)
    fences = dict.fromkeys(NAMES, 0)
    for life in range(scale(4, 200)):
        journal = Journal()
        with started(live, journal, folder, rng.getrandbits(32)) as process:
            deadline = time.monotonic() + PATIENCE_S
            wanted = rng.randint(1, 400)
            while len(journal) < wanted and process.is_alive():
                assert time.monotonic() < deadline, f"life {life}: {len(journal)} notes of {wanted}"
                time.sleep(0.0005)
            process.kill()
            process.join()
        assert process.exitcode == -9, "the process ended by itself; its error is in the captured stderr"
        given: set[tuple[int, int]] = set()
        for note in journal.notes():
            name = NAMES[note.count]
            if note.what == TAKEN:
                assert note.first not in {fence for _, fence in given}
                given.add((note.count, note.first))
            elif note.what == WROTE:
                counts[name] = max(counts[name], note.first)
                versions[name] = max(versions[name], note.offset)
        for name in NAMES:
            mine = [fence for place, fence in given if NAMES[place] == name]
            assert min(mine, default=fences[name] + 1) > fences[name]
            fences[name] = max([fences[name], *mine])
        with holdfast.open_broker(folder) as broker:
            for name in NAMES:
                found = broker.documents.get(name)
                value, version = (0, 0) if found is None else (found.value, found.version)
                # One that was not answered yet may stand, too.
                assert counts[name] <= value <= counts[name] + OWNERS
                assert version >= versions[name]
                counts[name] = value
                broker.locks.force_release(name)
