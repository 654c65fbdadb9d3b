"""What somebody sees who does not own the folder: dead letters, delayed messages, damage; while the owner goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.broker.inspect.messages import damage_in, letters_of, records_beside, waiting_beside
from holdfast.broker.inspect.status import FolderStatus
from holdfast.env import World
from holdfast.errors import CorruptData
from holdfast.settings import BrokerSettings, LogSettings, TopicSettings
from holdfast.storage import LogReader
from holdfast.storage.log import Log
from tests.unit.brokers import FOLDER, Place

SMALL = BrokerSettings(topic=TopicSettings(min_free_bytes=0, segment_bytes=4096, frame_bytes=1024, backoff_ms=0))
DELAYS = (60, 60.2, 120, 180)
PARTITION = f"{FOLDER}/topics/orders/0"


class Meddling:
    """A disk on which something happens right before its n-th call."""

    def __init__(self, disk: Any, at: int, happening: Callable[[], None]) -> None:
        self._disk = disk
        self._at = at
        self._happening = happening
        self.calls = 0
        self.happened = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._disk, name)

        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self._at:
                self.happened = True
                self._happening()
            return method(*args, **options)

        return call


def at_each_step(setup: Callable[[], Place], look: Callable[[World], Any], meddle: Callable[[Place], None]) -> Any:
    """(place, what was seen) with the owner doing something before the first call of the disk, the second, ..."""
    step, more = 0, True
    while more:
        step += 1
        place = setup()
        disk = Meddling(place.disk, step, lambda place=place: meddle(place))
        world = World(clock=place.clock, disk=disk, ids=place.ids)
        yield place, look(world)
        more = disk.happened
        place.close()


def reject_each(place: Place, *bodies: bytes, group: str = "billing") -> None:
    for body in bodies:
        place.broker.publish("orders", body)
    for message in place.broker.group("orders", group).receive_many(100, timeout=0):
        message.reject("no")


def letters(place: Place, partition: int = 0) -> dict[bytes, str]:
    return {seen.record.value: seen.state for seen in letters_of(place.world, FOLDER, "orders", partition)}


@pytest.fixture
def place() -> Any:
    with_topic = Place()
    with_topic.broker.create_topic("orders")
    yield with_topic
    with_topic.close()


# Dead letters


def test_a_topic_without_dead_letters_has_none(place):
    assert letters(place) == {}


def test_letters_tell_what_became_of_each(place):
    reject_each(place, b"kept", b"back", b"gone")
    dead = place.broker.group("orders", "billing").dead
    _, back, gone = dead.list()
    dead.redrive(back.id)
    dead.purge(gone.id)
    assert letters(place) == {b"kept": "waiting", b"back": "redriven", b"gone": "purged"}


def test_letters_of_every_group_are_seen(place):
    place.broker.group("orders", "audit")
    reject_each(place, b"x")
    reject_each(place, group="audit")
    seen = list(letters_of(place.world, FOLDER, "orders", 0))
    assert [(letter.note.group, letter.state) for letter in seen] == [("billing", "waiting"), ("audit", "waiting")]


def test_the_fate_of_a_letter_outlives_restarts(place):
    reject_each(place, b"kept", b"back", b"gone")
    dead = place.broker.group("orders", "billing").dead
    _, back, gone = dead.list()
    dead.redrive(back.id)
    dead.purge(gone.id)
    expected = {b"kept": "waiting", b"back": "redriven", b"gone": "purged"}
    place.reopen()
    assert letters(place) == expected
    place.kill()
    assert letters(place) == expected


def test_a_letter_is_done_where_the_journal_no_longer_says_how(place):
    reject_each(place, b"kept", b"back")
    group = place.broker.group("orders", "billing")
    group.dead.redrive(group.dead.list()[1].id)
    for _ in range(3):
        group.compact()
    assert letters(place) == {b"kept": "waiting", b"back": "done"}


def test_a_letter_that_stands_where_a_lost_one_stood_has_a_fate_of_its_own(place):
    reject_each(place, b"first")
    dead = place.broker.group("orders", "billing").dead
    dead.purge(dead.list()[0].id)
    place.broker.close()
    with Log.open(f"{FOLDER}/topics/orders.dlq/0/log", LogSettings(min_free_bytes=0), place.world) as log:
        log.truncate(0)
    place.broker = place.open()
    reject_each(place, b"second")
    assert letters(place) == {b"second": "waiting"}
    dead = place.broker.group("orders", "billing").dead
    dead.redrive(dead.list()[0].id)
    assert letters(place) == {b"second": "redriven"}


@pytest.mark.slow
def test_letters_are_whole_whatever_the_owner_does_meanwhile():
    def setup() -> Place:
        place = Place(settings=SMALL)
        place.broker.create_topic("orders")
        reject_each(place, *[b"%d" % number for number in range(40)])
        return place

    def meddle(place: Place) -> None:
        group = place.broker.group("orders", "billing")
        group.dead.redrive([letter.id for letter in group.dead.list(limit=30)])
        reject_each(place, b"late")
        for _ in range(3):
            group.compact()
            place.after(seconds=60)

    def look(world: World) -> list[tuple[int, str]]:
        return [(seen.record.offset, seen.state) for seen in letters_of(world, FOLDER, "orders", 0)]

    for _, seen in at_each_step(setup, look, meddle):
        offsets = [offset for offset, _ in seen]
        assert offsets == sorted(set(offsets))
        assert set(range(30, 40)) <= set(offsets)
        # All of one moment: before the redrive, or after it.
        assert len({phase for offset, phase in seen if offset < 30}) <= 1


# Delayed messages


def waiting(world: World, partition: str = PARTITION) -> list[tuple[int, bytes]]:
    found = [(message.id, message.record.value) for message in waiting_beside(world, partition)]
    assert len({id_ for id_, _ in found}) == len(found)
    return sorted(found)


def store_of(place: Place) -> Any:
    return place.engine.open_topic("orders").partitions[0].delayed


def test_what_is_not_due_yet_is_seen_in_the_intake_and_in_runs(place):
    assert waiting(place.world) == []
    for number in range(3):
        place.broker.publish("orders", b"%d" % number, delay=60 + number)
    expected = [(0, b"0"), (1, b"1"), (2, b"2")]
    assert waiting(place.world) == expected
    store_of(place).spill(0)
    assert waiting(place.world) == expected
    place.broker.publish("orders", b"3", delay=7200)
    assert waiting(place.world) == [*expected, (3, b"3")]


@pytest.mark.parametrize("spilled", [False, True])
def test_what_was_released_or_cancelled_is_not_seen_whether_it_is_in_the_manifest_or_not(place, spilled):
    stored = [place.broker.publish("orders", b"%d" % number, delay=delay) for number, delay in enumerate(DELAYS)]
    if spilled:
        store_of(place).spill(0)
    place.after(seconds=60)
    place.after(seconds=0.2)  # too soon for another manifest
    assert waiting(place.world) == [(2, b"2"), (3, b"3")]
    place.broker.group("orders", "billing").cancel(stored[2].id)
    assert waiting(place.world) == [(3, b"3")]
    group = place.broker.group("orders", "billing")
    group.ack_many(group.receive_many(10, timeout=0))
    for _ in range(20):
        place.after(seconds=1)
    group.compact()
    assert waiting(place.world) == [(3, b"3")]


def test_after_a_crash_it_is_seen_as_the_next_opening_would(place):
    for number, delay in enumerate(DELAYS):
        place.broker.publish("orders", b"%d" % number, delay=delay)
    place.after(seconds=60)
    place.after(seconds=0.2)
    place.disk = place.disk.kill()
    assert waiting(place.world) == [(2, b"2"), (3, b"3")]
    place.broker = place.open()
    assert waiting(place.world) == [(2, b"2"), (3, b"3")]


def unspilled() -> Place:
    """Twenty messages soon due and twenty late ones, all in the intake."""
    return half_spilled(spilled=())


def half_spilled(spilled: tuple[int, ...] = (0, 1)) -> Place:
    """Ten messages each: soon due and in runs, late and in runs, soon due and in the intake, late and in the intake."""
    place = Place(settings=SMALL)
    place.broker.create_topic("orders")
    place.broker.group("orders", "billing")
    for number, delay in enumerate((60, 100_000, 60, 200_000)):
        for i in range(10 * number, 10 * number + 10):
            place.broker.publish("orders", b"%d" % i * 200, delay=delay)
        if number in spilled:
            store_of(place).spill(0)
    place.after(seconds=1)
    return place


def spilled_meanwhile(place: Place) -> None:
    store_of(place).spill(place.clock.now_ns() // 1_000_000)


def released_meanwhile(place: Place) -> None:
    place.after(seconds=60)


def handled_meanwhile(place: Place) -> None:
    """Released, handled, forgotten, and the log trimmed behind that."""
    place.after(seconds=61)
    group = place.broker.group("orders", "billing")
    group.ack_many(group.receive_many(100, timeout=0))
    for _ in range(20):
        place.after(seconds=1)
    group.compact()


def all_done_meanwhile(place: Place) -> None:
    """All of it at once."""
    handled_meanwhile(place)
    spilled_meanwhile(place)
    place.after(seconds=1)


@pytest.mark.slow
@pytest.mark.parametrize("setup", [unspilled, half_spilled])
@pytest.mark.parametrize(
    "meddle", [spilled_meanwhile, released_meanwhile, handled_meanwhile, all_done_meanwhile], ids=lambda it: it.__name__
)
def test_delayed_messages_are_seen_once_and_whole_whatever_the_owner_does_meanwhile(setup, meddle):
    late, soon = {*range(10, 20), *range(30, 40)}, {*range(10), *range(20, 30)}
    for _, found in at_each_step(setup, waiting, meddle):
        seen = {id_ for id_, _ in found}
        assert all(value == b"%d" % id_ * 200 for id_, value in found)
        assert late <= seen
        if meddle is spilled_meanwhile:
            assert seen == late | soon
        if setup is unspilled:  # no file goes away while it is read: all of one moment
            assert seen - late in (soon, set())


# Damage


def damage_file(place: Place, path: str, position: int) -> None:
    file = place.disk.open(path, write=True)
    byte = file.read(position, 1)
    file.write(position, [bytes([byte[0] ^ 0xFF])])
    file.close()


def test_damaged_ranges_are_told_with_where_to_go_on():
    place = Place(settings=SMALL)
    place.broker.create_topic("orders")
    for number in range(50):
        place.broker.publish("orders", b"%d" % number * 100)
    folder = f"{PARTITION}/log"
    assert list(damage_in(place.world, folder)) == []
    name = next(name for name in place.disk.names(folder) if name.endswith(".log"))
    damage_file(place, f"{folder}/{name}", 300)
    reader = LogReader(folder, world=place.world)
    (damage,) = damage_in(place.world, folder)
    readable = {record.offset for record in records_beside(reader, 0, reader.end)}
    assert readable == set(range(50)) - set(range(damage.first_offset, damage.next_offset))
    assert damage.next_offset > damage.first_offset
    assert "damaged" in damage.reason
    place.close()


def test_a_damaged_manifest_is_told_and_not_guessed_around(place):
    place.broker.publish("orders", b"x", delay=60)
    store_of(place).save()
    damage_file(place, f"{PARTITION}/delayed/manifest", 9)
    with pytest.raises(CorruptData, match="manifest"):
        waiting(place.world)


# How topics and groups stand


@pytest.mark.slow
def test_groups_stand_somewhere_whatever_the_owner_does_meanwhile():
    def setup() -> Place:
        place = Place(settings=SMALL)
        place.broker.create_topic("orders")
        for number in range(60):
            place.broker.publish("orders", b"%d" % number * 100)
        place.broker.group("orders", "billing")
        return place

    def meddle(place: Place) -> None:
        group = place.broker.group("orders", "billing")
        group.ack_many(group.receive_many(50, timeout=0))
        for _ in range(3):
            group.compact()

    def look(world: World) -> Any:
        return FolderStatus(world, FOLDER).groups()

    for _, (group,) in at_each_step(setup, look, meddle):
        assert group.wrong == ()
        assert group.lag in (60, 10)
