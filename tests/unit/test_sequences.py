"""Idempotent producers: a batch sent again is stored once, gaps and old epochs are refused, also after a restart."""

from __future__ import annotations

import errno
import random

import pytest

from holdfast.broker.producers import MOST_NAMES, KnownBatch, Producers, Sequences, load_snapshot
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import (
    ChecksumMismatch,
    DiskFull,
    Fenced,
    HoldfastError,
    InvalidRequest,
    OutOfSequence,
    UnknownFormat,
)
from holdfast.model import Producer
from holdfast.settings import LogSettings
from holdfast.storage.log import Log

FOLDER = "/data/0"
SMALL = LogSettings(segment_bytes=4096, frame_bytes=1024, index_bytes=512, min_free_bytes=0, durability="os")


class Part:
    """A log and what producers have written to it, on a simulated disk."""

    def __init__(self, **options: int) -> None:
        self.disk, self.clock, self.ids = SimulatedDisk(), ManualClock(), SeededIds(1)
        self.options = options
        self.disk.make_folder(FOLDER)
        self.open()

    @property
    def world(self) -> World:
        return World(clock=self.clock, disk=self.disk, ids=self.ids)

    def open(self) -> None:
        self.log = Log.open(f"{FOLDER}/log", SMALL, self.world)
        self.sequences = Sequences.open(self.world, FOLDER, self.log, **self.options)

    def close(self) -> None:
        self.sequences.close()
        self.log.close()

    def reopen(self) -> None:
        self.close()
        self.open()

    def kill(self) -> None:
        self.disk = self.disk.kill()
        self.open()

    def send(self, producer: Producer, count: int = 1, *, size: int = 10) -> KnownBatch | int:
        """Store messages, or learn that they are there: the way of a partition."""
        with self.sequences.lock:
            known = self.sequences.check(producer, count)
            if known is not None:
                return known
            offset = self.log.write([bytes(size)] * count, producer=producer).offset
            self.sequences.record(producer, count, offset)
            return offset

    def states(self) -> dict[int, tuple[object, ...]]:
        return {
            key: (entry.epoch, entry.next_sequence, entry.written, entry.runs, entry.last_ms)
            for key, entry in self.sequences._entries.items()
        }


@pytest.fixture
def part() -> Part:
    return Part()


def of(first: int, *, producer: int = 7, epoch: int = 0) -> Producer:
    return Producer(producer, epoch, first)


def test_a_batch_sent_again_is_answered_with_its_first_offsets(part):
    assert part.send(of(0), 3) == 0
    assert part.send(of(3), 2) == 3
    assert part.send(of(0), 3) == KnownBatch([0, 1, 2])
    assert part.send(of(3), 2) == KnownBatch([3, 4])
    assert part.log.written_end == 5


def test_a_gap_is_refused_and_says_what_was_expected(part):
    part.send(of(0), 3)
    with pytest.raises(OutOfSequence, match="sent sequence 5, but 3 was expected") as caught:
        part.send(of(5))
    assert (caught.value.expected, caught.value.given, caught.value.known) == (3, 5, True)
    assert part.log.written_end == 3
    assert part.send(of(3)) == 3


def test_an_unknown_producer_begins_at_zero(part):
    with pytest.raises(OutOfSequence, match=r"does not know this producer.*with a new epoch") as caught:
        part.send(of(1))
    assert not caught.value.known


def test_an_old_epoch_is_fenced(part):
    part.send(of(0, epoch=1))
    with pytest.raises(Fenced, match="epoch 0 is fenced: epoch 1"):
        part.send(of(1, epoch=0))


@pytest.mark.parametrize("first", [0, 3])
def test_a_new_epoch_begins_at_zero_or_goes_on(part, first):
    part.send(of(0), 3)
    assert part.send(of(first, epoch=1), 2) == 3
    assert part.send(of(first, epoch=1), 2) == KnownBatch([3, 4])
    assert part.send(of(first + 2, epoch=1)) == 5


@pytest.mark.parametrize("first", [1, 2, 4])
def test_a_new_epoch_begins_nowhere_else(part, first):
    part.send(of(0), 3)
    with pytest.raises(OutOfSequence, match="but 3 was expected"):
        part.send(of(first, epoch=1))


def test_what_a_new_epoch_resumed_is_known_to_it(part):
    part.send(of(0), 3)
    part.send(of(3, epoch=1))
    assert part.send(of(1, epoch=1), 3) == KnownBatch([1, 2, 3])


def test_what_came_before_a_new_beginning_is_not_known_to_it(part):
    part.send(of(0), 10)
    part.send(of(0, epoch=1), 2)
    with pytest.raises(OutOfSequence):
        part.send(of(5, epoch=1))


def test_what_was_never_written_is_not_known(part):
    part.send(of(0), 2)
    with pytest.raises(OutOfSequence):
        part.send(of(2**32 - 1))


def test_messages_that_are_known_in_part_are_refused(part):
    part.send(of(0), 3)
    with pytest.raises(OutOfSequence, match=r"partly stored: the first 2 are stored.*from sequence 3 on"):
        part.send(of(1), 5)
    assert part.log.written_end == 3


def test_messages_in_other_batches_than_before_are_known_all_the_same(part):
    part.send(of(0), 3)
    part.log.append([b"of somebody else"])
    part.send(of(3), 3)
    assert part.send(of(2), 3) == KnownBatch([2, 4, 5])


def test_a_batch_of_several_frames_is_one(part):
    assert part.send(of(0), 8, size=500) == 0
    frames = list(part.log.read(0))
    assert len(frames) > 2
    assert part.send(of(0), 8) == KnownBatch(list(range(8)))
    part.kill()
    assert part.send(of(0), 8) == KnownBatch(list(range(8)))
    assert part.send(of(8)) == 8


def test_where_old_messages_are_is_forgotten_but_not_that_they_are_there(part):
    for number in range(100):
        part.send(of(number))
        part.log.append([b"of somebody else"])
    assert part.send(of(95)) == KnownBatch([190])
    assert part.send(of(0)) == KnownBatch(())


def test_at_least_five_batches_can_be_told(part):
    for number in range(0, 200, 2):
        part.send(of(number), 2)
        part.send(of(number, producer=8), 2)
    for back in range(5):
        assert part.send(of(198 - 2 * back), 2).offsets == [396 - 4 * back, 397 - 4 * back]


def test_sequences_begin_anew_behind_the_last_number(part):
    part.send(of(0), 2)
    entry = part.sequences._entries[7]
    entry.next_sequence, entry.runs[:] = 2**32 - 2, [(2**32 - 4, 2, 0)]
    assert part.send(of(2**32 - 2), 5) == 2
    assert part.send(of(3), 1) == 7
    assert part.send(of(2**32 - 1), 4) == KnownBatch([3, 4, 5, 6])
    with pytest.raises(OutOfSequence, match="sent sequence 5, but 4 was expected"):
        part.send(of(5))


def test_numbers_out_of_range_are_refused(part):
    for wrong in (Producer(0, 0, 0), Producer(2**64, 0, 0), Producer(7, -1, 0), Producer(7, 2**32, 0)):
        with pytest.raises(InvalidRequest):
            part.sequences.check(wrong, 1)
    with pytest.raises(InvalidRequest):
        part.sequences.check(of(0), 0)


def test_a_write_that_failed_is_not_recorded():
    part = Part()
    part.send(of(0), 3)
    part.disk.faults.fail(1, errno.ENOSPC, sticky=True)
    with pytest.raises(DiskFull):
        for _ in range(1_000):
            part.send(of(part.sequences.next_sequence(7)), 3, size=400)
    part.disk.faults.clear()
    expected = part.sequences.next_sequence(7)
    assert expected == part.log.written_end
    assert part.send(of(expected), 3) == expected


def test_a_write_that_was_interrupted_is_found_in_the_log(part):
    part.send(of(0), 3)
    with part.sequences.lock:
        assert part.sequences.check(of(3), 2) is None
        part.log.write([b"", b""], producer=of(3), durability="fsync")
        # A signal comes here: nothing is recorded.
    assert part.send(of(3), 2) == KnownBatch([3, 4])
    assert part.send(of(5)) == 5


def test_a_kill_changes_nothing(part):
    for number in range(20):
        part.send(of(number))
        part.send(of(2 * number, producer=9, epoch=3), 2)
    before = part.states()
    part.kill()
    assert part.states() == before
    assert part.sequences.covered.offset == 0  # it was all read from the log


def test_closing_changes_nothing_and_spares_reading_the_log(part):
    for number in range(20):
        part.send(of(number))
        part.send(of(2 * number, producer=9, epoch=3), 2)
    before = part.states()
    part.close()
    part.open()
    assert part.states() == before
    assert part.sequences.covered.offset == part.log.written_end == 60


def test_what_came_after_the_snapshot_is_read_from_the_log(part):
    part.send(of(0), 3)
    part.sequences.save()
    part.send(of(3), 3)
    part.send(of(0, producer=8))
    before = part.states()
    part.kill()
    assert part.states() == before
    assert part.sequences.covered.offset == 3


def test_a_saved_producer_outlives_its_messages(part):
    part.send(of(0), 3)
    for _ in range(40):
        part.log.append([bytes(500)])
    part.sequences.save()
    part.log.roll()
    part.log.append([b""])
    assert part.log.trim(40).segments > 0
    part.kill()
    assert part.send(of(1), 2) == KnownBatch([1, 2])
    assert part.send(of(3)) == part.log.written_end - 1


def test_what_is_not_saved_is_not_trimmed(part):
    part.send(of(0), 3)
    for _ in range(40):
        part.log.append([bytes(500)])
    part.log.trim(part.log.written_end)
    assert part.log.start == 0
    part.sequences.save()
    part.log.trim(part.log.written_end)
    assert part.log.start > 0


def test_a_producer_whose_beginning_was_trimmed_away_goes_on(part):
    for number in range(40):
        part.send(of(number), size=500)
    part.log.unpin("producers")
    part.log.trim(30)
    assert part.log.start > 0
    part.kill()
    assert part.send(of(0)) == KnownBatch(())
    assert part.send(of(40)) == 40


def test_a_truncated_tail_is_forgotten_at_once(part):
    part.send(of(0), 3)
    part.send(of(0, producer=8), 2)
    part.send(of(3), 3)
    part.log.truncate(5)
    assert part.sequences.next_sequence(7) == 3
    assert part.send(of(3), 1) == 5
    assert part.send(of(0, producer=8), 2) == KnownBatch([3, 4])


def test_a_snapshot_of_a_lost_tail_is_void_from_there_on(part):
    part.send(of(0, producer=8), 2)
    part.send(of(0), 3)
    part.send(of(3), 3)
    part.sequences.save()
    part.log.truncate(5)
    part.sequences._changed = False  # so that the snapshot stays that of before
    part.log.write([b""], producer=of(2, producer=8))
    part.kill()
    assert part.sequences.next_sequence(7) == 3
    assert part.send(of(0, producer=8), 3) == KnownBatch([0, 1, 5])
    assert part.send(of(3), 2) == 6


@pytest.mark.parametrize("seed", range(20))
def test_a_power_cut_takes_no_more_from_the_snapshot_than_from_the_log(part, seed):
    part.send(of(0), 3)
    part.sequences.save()
    part.send(of(3), 3)
    part.send(of(6), 3)
    part.disk = part.disk.cut(random.Random(seed))
    part.ids.reboot()
    part.open()
    assert part.log.written_end in (3, 6, 9)
    assert part.sequences.next_sequence(7) == part.log.written_end


def test_a_damaged_snapshot_is_read_from_the_log_again(part):
    part.send(of(0), 3)
    part.close()
    before = part.states()
    for position in range(len(part.disk.contents(f"{FOLDER}/producers"))):
        part.disk.flip(f"{FOLDER}/producers", position, 0x01)
        part.log = Log.open(f"{FOLDER}/log", SMALL, part.world)
        part.sequences = Sequences.open(part.world, FOLDER, part.log)
        assert part.states() == before
        part.log.close()
        assert load_snapshot(part.disk, FOLDER, part.log.log_id) is not None  # it is whole again


def test_a_snapshot_of_a_newer_release_is_not_written_over(part):
    from crc32c import crc32c

    from holdfast.storage.files import durable_replace

    content = b"HFPRODS\x02whatever"
    durable_replace(part.disk, FOLDER, "producers", content + crc32c(content).to_bytes(4, "little"))
    with pytest.raises(UnknownFormat):
        Sequences.open(part.world, FOLDER, part.log)


def test_a_snapshot_of_another_log_is_none(part):
    part.send(of(0), 3)
    part.close()
    for name in part.disk.names(f"{FOLDER}/log"):
        part.disk.remove(f"{FOLDER}/log/{name}")
    part.open()
    assert part.sequences.next_sequence(7) == 0


def test_idle_producers_are_forgotten():
    part = Part(idle_ms=10_000)
    part.send(of(0))
    part.clock.advance(seconds=6)
    part.send(of(0, producer=8))
    part.clock.advance(seconds=4)
    part.reopen()
    assert list(part.states()) == [8]
    with pytest.raises(OutOfSequence) as caught:
        part.send(of(1))
    assert not caught.value.known


def test_of_too_many_producers_those_idle_for_longest_are_forgotten():
    part = Part(most=3)
    for producer in (1, 2, 3):
        part.send(of(0, producer=producer))
        part.clock.advance(ms=1)
    part.send(of(1, producer=1))
    part.clock.advance(ms=1)
    part.send(of(0, producer=4))
    assert list(part.states()) == [3, 1, 4]
    part.kill()
    assert list(part.states()) == [3, 1, 4]


def test_a_full_disk_stops_neither_saving_later_nor_closing(part):
    part.send(of(0), 3)
    part.disk.faults.fail(1, errno.ENOSPC, sticky=True, calls=frozenset({"write"}))
    with pytest.raises(DiskFull):
        part.sequences.save()
    part.sequences.close()
    part.disk.faults.clear()
    part.sequences.save()
    assert part.sequences.covered.offset == 3


def test_it_saves_now_and_then(part):
    part.send(of(0), 3)
    part.sequences.tick()
    assert part.sequences.covered.offset == 0
    part.clock.advance(seconds=3601)
    part.sequences.tick()
    assert part.sequences.covered.offset == 3


def test_a_named_producer_fences_the_one_before(part):
    producers = Producers.open(part.world, "/data")
    first = producers.init("loader")
    second = producers.init("loader")
    assert (second.id, first.epoch, second.epoch) == (first.id, 0, 1)
    producers.check(second.id, 1)
    with pytest.raises(Fenced, match="epoch 1 of the same name"):
        producers.check(first.id, 0)


def test_a_named_producer_is_known_after_a_restart(part):
    first = Producers.open(part.world, "/data").init("loader")
    part.disk = part.disk.kill()
    again = Producers.open(part.world, "/data").init("loader", resume=True)
    assert (again.id, again.epoch, again.since) == (first.id, 1, 0)
    last = Producers.open(part.world, "/data").init("loader")
    assert (last.id, last.epoch, last.since) == (first.id, 2, 2)


def test_an_epoch_is_durable_before_it_is_used(part):
    producers = Producers.open(part.world, "/data")
    producers.init("loader")
    part.disk.faults.fail(1, errno.EIO, sticky=True, calls=frozenset({"sync"}))
    with pytest.raises(HoldfastError):
        producers.init("loader")
    part.disk.faults.clear()
    assert producers.names()["loader"].epoch == 0
    assert producers.init("loader").epoch == 1


def test_producers_without_a_name_are_strangers(part):
    producers = Producers.open(part.world, "/data")
    one, two = producers.init(), producers.init()
    assert one.id != two.id
    assert 0 < one.id < 2**63
    producers.check(one.id, one.epoch)
    assert not part.disk.exists("/data/producers")


def test_a_forgotten_name_is_somebody_else_later(part):
    producers = Producers.open(part.world, "/data")
    first = producers.init("loader")
    assert producers.forget("loader")
    assert not producers.forget("loader")
    assert producers.init("loader").id != first.id


def test_names_are_checked_and_bounded(part, monkeypatch):
    producers = Producers.open(part.world, "/data")
    for wrong in ("", "../x", 5, "a" * 201):
        with pytest.raises(InvalidRequest):
            producers.init(wrong)
    monkeypatch.setattr("holdfast.broker.producers.MOST_NAMES", 2)
    assert MOST_NAMES > 2
    producers.init("a")
    producers.init("b")
    producers.init("a")
    with pytest.raises(InvalidRequest, match="already has 2 named producers"):
        producers.init("c")


def test_damaged_names_are_refused(part):
    Producers.open(part.world, "/data").init("loader")
    for position in range(len(part.disk.contents("/data/producers"))):
        part.disk.flip("/data/producers", position, 0x10)
        with pytest.raises(ChecksumMismatch, match="move it away"):
            Producers.open(part.world, "/data")
        part.disk.flip("/data/producers", position, 0x10)
