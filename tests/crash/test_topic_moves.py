"""Power cuts and kills at every disk call of a move between two folders: one whole copy, where the table says."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast.broker.moving import PIECE_BYTES, MovedFile, MoveNote
from holdfast.cluster.placement import shard_of_topic
from holdfast.cluster.table import Placed, PlacedOtherwise
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.chain.engines import MemoryStore
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import Conflict, HoldfastError, TopicExists, Unavailable, UnknownTopic
from holdfast.server.cluster.places import Places, settle_coming, settle_leaving, settle_moves
from tests.unit.brokers import SETTINGS

SHARDS = 2
TOPIC = "orders"
HOME = shard_of_topic(TOPIC, SHARDS)
BODIES = [b"%d" % number for number in range(40)]


class Shard:
    """One folder of two, and what its owner knows."""

    def __init__(self, number: int, disk: SimulatedDisk, store: MemoryStore, clock: ManualClock, seed: int = 1) -> None:
        self.number, self.disk = number, disk
        world = World(clock=clock, disk=disk, ids=SeededIds(seed * 10 + number))
        self.broker: Any = holdfast.open_broker(f"/data/{number}", world=world, settings=SETTINGS)
        self.engine = self.broker._port.engine
        self.places = Places(store, "", SHARDS, world.ids)
        self.moves = settle_moves(self.engine, number, self.places)

    def close(self) -> None:
        self.broker.close()


class Pair:
    """Both folders, and the store that has the table."""

    def __init__(self) -> None:
        self.store, self.clock = MemoryStore(), ManualClock()
        self.shards = [Shard(number, SimulatedDisk(), self.store, self.clock) for number in range(SHARDS)]

    @property
    def source(self) -> Shard:
        return self.shards[HOME]

    @property
    def target(self) -> Shard:
        return self.shards[1 - HOME]

    def fill(self) -> None:
        """A topic with something of everything."""
        broker = self.source.broker
        broker.create_topic(TOPIC, partitions=2, max_attempts=1, dedup_window_ms=3_600_000)
        broker.publish_many(TOPIC, BODIES[:20], durability="fsync")
        broker.publish(TOPIC, b"later", delay=3600, durability="fsync")
        broker.publish(TOPIC, b"once", dedup_id="only", durability="fsync")
        queue = broker.queue(TOPIC)
        for message in queue.get_many(3, timeout=0):
            message.ack(durability="fsync")
        queue.get(timeout=0).reject("bad")
        with broker.consumer(TOPIC, group="readers", start="earliest") as consumer:
            assert consumer.poll(0)
            consumer.commit(durability="fsync")
        broker.publish_many(TOPIC, BODIES[20:], durability="fsync")
        broker.schedules.put("nightly", TOPIC, b"tick", every=86_400)
        self.source.engine.sync()

    def close(self) -> None:
        for shard in self.shards:
            shard.close()


def note_of(pair: Pair, source: Shard, target: Shard) -> MoveNote:
    return MoveNote(
        move=target.places.new_move(), topic=TOPIC, source=source.number, target=target.number,
        before=target.places.read().move_of(TOPIC),
    )  # fmt: skip


def copy(source: Shard, target: Shard, files: list[MovedFile]) -> None:
    for file in files:
        for position in range(0, max(file.size, 1), PIECE_BYTES):
            content = source.moves.read(file.at, position, min(PIECE_BYTES, file.size - position))
            target.moves.write(TOPIC, file.path, position, content, file.size)


def move(source: Shard, target: Shard, note: MoveNote) -> None:
    """All steps, as the nodes make them."""
    target.moves.expect(note)
    source.moves.packed_early(TOPIC)
    copy(source, target, source.moves.sealed_files(TOPIC))
    files = source.moves.depart(note)
    copy(source, target, files)
    target.moves.complete(TOPIC, files)
    table = target.places.put(TOPIC, note.before, Placed(target.number, note.move))
    assert settle_coming(target.moves, note, table)
    settle_leaving(source.moves, note, source.places.read())


def stored(shard: Shard) -> list[bytes]:
    found = []
    for partition in range(2):
        found += [bytes(each.body) for each in shard.broker.read(TOPIC, partition=partition, limit=1_000)]
    return sorted(found)


def check(shards: list[Shard]) -> int:
    """One of them has the topic, all of it, and the other one refuses it; returns which."""
    place = shards[0].places.read().shard_of(TOPIC, SHARDS)
    here, there = shards[place], shards[1 - place]
    assert TOPIC in here.engine.catalog, "no living copy"
    assert here.broker.topics() == [TOPIC]
    assert TOPIC not in there.engine.catalog, "two living copies"
    assert there.broker.topics() == []
    with pytest.raises(Unavailable, match="another shard"):
        there.broker.publish(TOPIC, b"x")
    with pytest.raises(Unavailable, match="another shard"):
        there.broker.create_topic(TOPIC)
    for shard in shards:
        assert not shard.moves.leaving
        assert not shard.moves.coming
        for above in ("in", "out"):
            folder = f"/data/{shard.number}/moves/{above}"
            assert not shard.disk.exists(folder) or not shard.disk.names(folder)
    assert stored(here) == sorted([*BODIES, b"once"])
    queue = here.broker.queue(TOPIC)
    assert len(queue.dead.list()) == 1
    assert queue.qsize() == len(BODIES) + 1 - 3 - 1
    assert here.broker.publish(TOPIC, b"once", dedup_id="only").duplicate
    assert [shard.number for shard in shards if "nightly" in shard.engine.schedules().all()] == [place]
    lag = {each.topic: each.lag for each in here.broker.groups() if each.name == "readers"}
    assert lag == {TOPIC: 20}
    return place


def test_a_moved_topic_is_what_it_was():
    pair = Pair()
    pair.fill()
    move(pair.source, pair.target, note_of(pair, pair.source, pair.target))
    assert check(pair.shards) == pair.target.number
    move(pair.target, pair.source, note_of(pair, pair.target, pair.source))  # and back
    assert check(pair.shards) == pair.source.number
    pair.clock.advance(seconds=3601)
    pair.source.engine.tick()
    assert b"later" in stored(pair.source)
    pair.close()


@pytest.mark.parametrize("stop", ["cut", "kill"])
@pytest.mark.parametrize("side", ["source", "target"])
def test_wherever_a_move_is_stopped_one_whole_copy_lives(stop, side, scale):
    pair, rng, outcomes, calls = Pair(), random.Random(f"{stop}{side}"), set[int](), 0
    pair.fill()

    def look(call: str) -> None:
        nonlocal calls
        calls += 1
        if calls % scale(12, 1):
            return
        store = MemoryStore()
        store._objects = dict(pair.store._objects)
        disks = [shard.disk.cut(rng) if stop == "cut" else shard.disk.kill() for shard in pair.shards]
        order = [0, 1] if rng.random() < 0.5 else [1, 0]
        clock = ManualClock()
        opened = {number: Shard(number, disks[number], store, clock, seed=calls + 2) for number in order}
        shards = [opened[0], opened[1]]
        outcomes.add(check(shards))
        for shard in shards:
            shard.close()

    note = note_of(pair, pair.source, pair.target)
    getattr(pair, side).disk.on_call = look
    move(pair.source, pair.target, note)
    for shard in pair.shards:
        shard.disk.on_call = None
    assert calls > 100
    assert outcomes == {0, 1}, "the move is either undone or finished, depending on when it is stopped"
    pair.close()


Undoing = Callable[[Pair, MoveNote], None]


def owner_of_the_source_changes(pair: Pair, note: MoveNote) -> None:
    pair.source.disk = pair.source.disk.kill()
    pair.shards[HOME] = Shard(HOME, pair.source.disk, pair.store, pair.clock, seed=7)


def owner_of_the_target_changes(pair: Pair, note: MoveNote) -> None:
    disk = pair.target.disk.kill()
    pair.shards[1 - HOME] = Shard(1 - HOME, disk, pair.store, pair.clock, seed=8)


@pytest.mark.parametrize("change", [owner_of_the_source_changes, owner_of_the_target_changes])
def test_an_old_owner_that_goes_on_cannot_finish_a_move_that_was_undone(change: Undoing):
    pair = Pair()
    pair.fill()
    source, target = pair.source, pair.target
    note = note_of(pair, source, target)
    target.moves.expect(note)
    files = source.moves.depart(note)
    copy(source, target, files)
    target.moves.complete(TOPIC, files)
    with pytest.raises(Unavailable, match="moving"):
        source.broker.publish(TOPIC, b"x")
    change(pair, note)
    with pytest.raises(PlacedOtherwise):
        target.places.put(TOPIC, note.before, Placed(target.number, note.move))
    # The other side finds out from the table.
    for shard in pair.shards:
        for each in list(shard.moves.leaving.values()):
            settle_leaving(shard.moves, each, shard.places.read())
        for each in list(shard.moves.coming.values()):
            assert not settle_coming(shard.moves, each, shard.places.read())
    assert check(pair.shards) == HOME
    pair.close()


def test_a_late_call_does_not_take_away_the_note_of_a_topic_that_is_leaving():
    pair = Pair()
    pair.fill()
    source, target = pair.source, pair.target
    note = note_of(pair, source, target)
    target.moves.expect(note)
    files = source.moves.depart(note)
    source.moves.packed_early(TOPIC)
    assert source.moves.depart(note) == files
    with pytest.raises(Conflict, match="already moving"):
        source.moves.depart(msgspec.structs.replace(note, move="other"))
    again = Shard(HOME, source.disk.kill(), MemoryStore(), pair.clock, seed=9)  # where nothing is decided
    assert again.places.table.move_of(TOPIC), "its next owner has found the note, and decided"
    again.close()
    pair.close()


def test_a_name_can_be_put_elsewhere_before_there_is_a_topic():
    pair = Pair()
    note = note_of(pair, pair.source, pair.target)
    pair.target.moves.expect(note)
    assert pair.source.moves.depart(note, only_new=True) == []
    for shard in pair.shards:
        with pytest.raises(Unavailable):
            shard.broker.create_topic(TOPIC)
    table = pair.target.places.put(TOPIC, "", Placed(pair.target.number, note.move))
    settle_coming(pair.target.moves, note, table)
    settle_leaving(pair.source.moves, note, pair.source.places.read())
    pair.target.broker.create_topic(TOPIC)
    assert pair.source.broker.topics() == []
    with pytest.raises(Unavailable, match="another shard"):
        pair.source.broker.create_topic(TOPIC)
    with pytest.raises(TopicExists):
        pair.target.moves.depart(note_of(pair, pair.target, pair.source), only_new=True)
    pair.close()


def test_what_cannot_be_moved_is_refused_and_nothing_is_changed():
    pair = Pair()
    note = note_of(pair, pair.source, pair.target)
    with pytest.raises(UnknownTopic):
        pair.source.moves.depart(note)
    pair.fill()
    for path in ("topics/../../../etc/passwd", "settings.json", "/etc/passwd"):
        with pytest.raises(HoldfastError):
            pair.source.moves.read(path, 0, 10)
    with pytest.raises(HoldfastError):
        pair.target.moves.write(TOPIC, "topic/x", 0, b"x", 1)
    pair.target.moves.expect(note)
    with pytest.raises(HoldfastError):
        pair.target.moves.write(TOPIC, "../x", 0, b"x", 1)
    pair.target.moves.give_up(TOPIC)
    assert check(pair.shards) == HOME
    pair.close()
