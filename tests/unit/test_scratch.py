"""Notes of leases and acks in the scratch file: nothing of them is lost, and nothing counts twice."""

from __future__ import annotations

import errno
import random
from typing import Any

import msgspec
import pytest

from holdfast.broker import scratch
from holdfast.broker.check import check_folder
from holdfast.broker.history import history
from holdfast.broker.inspect.status import replayed_group
from holdfast.broker.journal import newest_snapshot
from holdfast.delivery.events import NOTE_PRIME, Acked, Leased, Noted, next_fence
from holdfast.delivery.image import image_of
from holdfast.errors import DiskFailed
from holdfast.storage import LogReader
from tests.unit.queues import FOLDER, Place, bodies

JOURNAL = f"{FOLDER}/topics/jobs/0/groups/default"
RUN = Noted(begun=7, base=100, since_ms=5_000, ahead_ms=-200, fence=3, session=1, lease_ms=30, holder="me")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_STEADY", 0)


def noting(count: int = 3, **settings: Any) -> Place:
    """A queue of which the last lease was noted, after `count` messages that were got and acked."""
    place = Place(**settings)
    place.q.put_many([b"%d" % n for n in range(count + 3)])
    for _ in range(count):
        place.q.get().ack()
    place.held = place.q.get()  # type: ignore[attr-defined]
    assert delivery(place).journal.scratch.is_noting
    return place


def delivery(place: Place) -> Any:
    return place.q._port.deliveries[0]


def word(payload: int, run: Noted = RUN) -> bytes:
    return (payload * NOTE_PRIME + run.mark).to_bytes(8, "little")


def test_a_note_is_the_event_that_it_stands_for():
    words = word(9 << 28 | 4 << 4 | 3 << 2 | 2) + word(10 << 28 | 1 << 4) + word(65_535 << 28 | 4 << 4 | 1)
    noted = RUN.with_words(RUN.intact(words))
    first, second = next_fence(3), next_fence(next_fence(3))
    assert list(noted.events()) == [
        (5_009, Leased((104, 105), 105, first, 1, 30, 4_812, 5_009, "me")),
        (5_010, Leased((101, 102), 0, second, 1, 30, 4_810, 5_010, "me")),
        (70_535, Acked((104, 105))),
    ]
    assert noted.places() == (101, 105)
    assert RUN.places() == (100, 100)


def test_no_flip_of_one_or_two_bits_makes_another_note():
    whole = int.from_bytes(word(123 << 28 | 77 << 4 | 2), "little")
    for one in range(64):
        for two in range(one + 1):
            flipped = whole ^ (1 << one) ^ (1 << two if two != one else 0)
            assert RUN.intact(flipped.to_bytes(8, "little")) == b""


def test_zeros_words_of_other_runs_and_what_follows_them_do_not_count():
    other = msgspec.structs.replace(RUN, begun=8)
    assert RUN.intact(bytes(16)) == b""
    assert RUN.intact(word(16) + word(32, other) + word(48)) == word(16)
    assert RUN.intact(word(16) + word(32)[:7]) == word(16)


def test_notes_survive_the_death_of_the_process():
    place = noting(5)
    assert delivery(place).journal.log.written_end == 2  # the group was opened, and a run began
    place.kill()
    assert place.q.stats().floor == 5
    place.after(seconds=1)
    assert sorted(bodies(place.q)) == [b"5", b"6", b"7"]


def test_a_full_scratch_file_is_stored_and_the_next_run_begins():
    place = Place()
    count = scratch.NOTES + 300
    place.q.put_many([b"x"] * count)
    for _ in range(count - 1):
        place.q.get().ack()
    assert delivery(place).journal.log.written_end < 12
    place.kill()
    assert len(bodies(place.q)) == 1


def test_acks_alone_begin_a_run_too():
    place = Place()
    place.q.put_many([b"x"] * 50)
    held = place.q.get_many(50)
    before = delivery(place).journal.log.written_end
    for message in held[:20]:
        message.ack()
    assert delivery(place).journal.log.written_end == before + 1
    place.kill()
    assert place.q.stats().floor == 20
    place.after(seconds=1)
    assert len(bodies(place.q)) == 30


@pytest.mark.parametrize("steady", [0, 3])
def test_holders_in_turn_begin_no_run(monkeypatch: pytest.MonkeyPatch, steady: int):
    monkeypatch.setattr(scratch, "_STEADY", steady)
    place = Place()
    place.q.put_many([b"x"] * 20)
    for n in range(20):
        place.q.get(holder=f"h{n % 2}").ack()
    assert delivery(place).journal.scratch.is_noting == (steady == 0)


def test_nothing_is_noted_after_a_message_too_far_from_the_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scratch, "PLACES", 4)
    place = Place()
    place.q.put_many([b"%d" % n for n in range(8)])
    held = [place.q.get() for _ in range(7)]
    for at in (5, 1, 6, 2):
        held[at].ack()
    place.kill()
    place.after(seconds=1)
    assert sorted(bodies(place.q)) == [b"0", b"3", b"4", b"7"]


def test_notes_are_synced_after_the_interval():
    place = noting()
    place.after(seconds=2)
    assert not delivery(place).journal.scratch.is_noting
    place.disk = place.disk.cut(random.Random(1))
    place.q = place.open()
    assert place.q.stats().floor == 3


def test_notes_taken_while_a_tick_syncs_are_synced_by_the_next():
    place = noting()
    log = delivery(place).journal.log
    tick = log.tick

    def busy() -> int | None:
        place.held.ack()
        place.q.get().ack()
        return tick()

    log.tick = busy
    place.after(seconds=2)
    log.tick = tick
    assert delivery(place).journal.scratch.is_noting
    place.after(seconds=2)
    place.disk = place.disk.cut(random.Random(1))
    place.q = place.open()
    assert place.q.stats().floor == 5


def test_the_log_is_never_trimmed_by_what_is_only_noted():
    place = noting()
    delivery(place).pin()
    assert not delivery(place).journal.scratch.is_noting


def test_a_reader_beside_the_owner_sees_the_notes():
    place = noting()
    group = replayed_group(place.world, JOURNAL).group
    assert image_of(group) == image_of(delivery(place).group)
    assert (group.floor, list(group.leases)) == (3, [3])


def test_the_history_of_a_message_has_its_notes():
    place = noting()
    steps = [step.step for step in history(delivery(place), 1)]
    assert steps == ["published", "leased", "acked"]


def test_what_was_noted_before_a_snapshot_and_after_it_counts_once():
    place = noting()
    place.q.compact()
    place.held.ack()
    place.q.get().ack()
    assert delivery(place).journal.scratch.is_noting
    place.kill()
    assert place.q.stats().floor == 5
    assert bodies(place.q) == [b"5"]


def test_notes_that_were_stored_twice_count_once():
    place = noting()
    journal = delivery(place).journal
    noted = journal.scratch.end()
    for _ in range(2):  # as if a signal had come before the first write was remembered
        journal.scratch.pending = noted
        journal.store_notes()
    place.kill()
    assert place.q.stats().floor == 3


def test_words_that_opening_finds_are_erased_durably():
    place = noting()
    place.kill()
    assert not any(place.disk.durable(f"{JOURNAL}/scratch")[8:])


@pytest.mark.parametrize(("position", "floor"), [(0, 0), (8, 0), (15, 0), (16, 0), (24, 1), (40, 2), (56, 3)])
def test_a_flipped_byte_costs_the_notes_from_there_on(position: int, floor: int):
    place = noting()
    place.disk = place.disk.kill()
    place.disk.flip(f"{JOURNAL}/scratch", position)
    place.q = place.open()
    assert place.q.stats().floor == floor
    place.after(seconds=1)
    assert len(bodies(place.q)) == 6 - floor
    assert check_folder(FOLDER, place.world).ok


def test_a_missing_scratch_file_costs_the_notes():
    place = noting()
    place.disk = place.disk.kill()
    place.disk.remove(f"{JOURNAL}/scratch")
    place.q = place.open()
    assert len(bodies(place.q)) == 6


def test_a_version_without_notes_refuses_a_journal_with_a_run():
    place = noting()
    log = delivery(place).journal.log
    log.sync()
    last = list(log.records(0))[-1]
    assert msgspec.msgpack.decode(last.value)[:2] == [16, last.offset]  # a tag that it does not know


def test_after_a_clean_close_no_event_of_a_run_is_replayed():
    place = noting()
    place.q.close()
    snapshot, _ = newest_snapshot(place.world, JOURNAL)
    assert snapshot is not None
    assert snapshot.position == LogReader(JOURNAL, world=place.world).end


def test_nothing_is_noted_where_a_store_into_a_map_may_fail():
    place = Place()
    place.q.close()
    place.disk.maps = False
    place.q = place.open()
    place.q.put_many([b"a", b"b"])
    for _ in range(2):
        place.q.get().ack()
    assert "scratch" not in place.disk.names(JOURNAL)


def test_nothing_is_noted_after_the_disk_failed():
    place = noting()
    place.disk.faults.fail(1, errno.EIO, sticky=False, calls=frozenset({"sync"}))
    with pytest.raises(DiskFailed):
        delivery(place).journal.log.sync()
    with pytest.raises(DiskFailed):
        place.held.ack()


def test_a_child_after_a_fork_notes_nothing():
    place = noting()
    before = place.disk.contents(f"{JOURNAL}/scratch")
    scratch_file = delivery(place).journal.scratch
    scratch_file.disown()
    assert not scratch_file.ack(3, RUN.since_ms)
    assert not scratch_file.is_noting
    assert place.disk.contents(f"{JOURNAL}/scratch") == before


def test_a_run_begins_only_where_it_is_worth_its_frames(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    place = Place(backoff_ms=1)
    place.q.put_many([b"x"] * 20)
    for _ in range(6):
        place.q.get().nack()
    assert "scratch" not in place.disk.names(JOURNAL)
    for _ in range(6):
        place.q.get().ack()
    assert "scratch" in place.disk.names(JOURNAL)
