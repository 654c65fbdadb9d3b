"""What became of a message: told from the journals, for as long as the message is kept."""

from __future__ import annotations

import errno
import random
import struct
import zlib
from typing import Any

import pytest

from holdfast import NewMessage, NotFound
from holdfast.broker.check import check_folder
from holdfast.broker.history import _MessageLife
from holdfast.broker.past import PastEvents, is_past
from holdfast.broker.tracing import TraceStep
from holdfast.checksum import crc32c
from holdfast.delivery.events import Event, Noted, decode_event
from tests.unit.queues import Place

CHAIN = [
    ("jobs-0-0", "published", "", 0, ""),
    ("jobs-0-0", "leased", "", 1, ""),
    ("jobs-0-0", "nacked", "", 1, "no"),
    ("jobs-0-0", "leased", "", 2, ""),
    ("jobs-0-0", "buried", "MAX_ATTEMPTS", 2, "never"),
    ("jobs-0-0", "redriven", "", 0, ""),
    ("jobs-0-1", "published", "redriven", 0, ""),
    ("jobs-0-1", "leased", "", 1, ""),
    ("jobs-0-1", "acked", "", 1, ""),
]


def facts_of(steps: list[TraceStep]) -> list[tuple[str, str, str, int, str]]:
    return [(step.id, step.step, step.why, step.attempt, step.error) for step in steps]


def names(steps: list[TraceStep]) -> list[str]:
    return [step.step for step in steps]


def died_and_came_back(**settings: Any) -> Place:
    place = Place(max_attempts=2, backoff_ms=0, **settings)
    place.q.put(b"x")
    for error in ("no", "never"):
        place.q.get(holder="worker-1").nack(error=error)
    place.tick()
    place.q.dead.redrive()
    place.q.get(holder="worker-2").ack()
    return place


def test_the_whole_chain_is_told_from_any_of_its_messages_and_after_a_restart():
    place = died_and_came_back()
    topic = place.q.name
    chain = [(name.replace("jobs", topic), *rest) for name, *rest in CHAIN]
    for _ in range(2):
        assert facts_of(place.q.history(f"{topic}-0-0")) == chain
        assert facts_of(place.q.history(f"{topic}-0-1")) == chain
        place.reopen()
    holders = [step.holder for step in place.q.history(f"{topic}-0-0") if step.step == "leased"]
    assert holders == ["worker-1", "worker-1", "worker-2"]


def test_a_message_with_one_clean_delivery_is_published_leased_and_acked():
    place = Place()
    stored = place.q.put(b"x")
    place.clock.advance(seconds=5)
    place.q.get(holder="worker-1").ack()
    published, leased, acked = place.q.history(stored.id)
    assert (published.step, leased.step, acked.step) == ("published", "leased", "acked")
    assert leased.at_ns - published.at_ns >= 5 * 10**9
    assert (acked.holder, acked.attempt) == ("worker-1", 1)


def test_how_a_delivery_ended_without_a_word_is_told():
    place = Place(backoff_ms=0, lease_ms=1_000)
    stored = place.q.put(b"x")
    place.q.get()  # and the message is dropped
    place.tick()
    message = place.q.get(renew=False)
    place.clock.advance(seconds=2)
    place.tick()
    del message
    place.q.get().defer(delay=60)
    steps = place.q.history(stored.id)
    assert [(step.why, step.attempt) for step in steps if step.step == "returned"] == [
        ("dropped unhandled", 1),
        ("lease ended", 2),
        ("deferred", 3),
    ]


def test_a_purged_letter_a_cancelled_message_and_a_seek_are_told():
    place = Place(max_attempts=1)
    dead, cancelled, skipped = (place.q.put(body).id for body in (b"dead", b"cancelled", b"skipped"))
    place.q.get().nack()
    place.tick()
    place.q.dead.purge()
    place.q.cancel(cancelled)
    place.q.seek("end")
    assert names(place.q.history(dead)) == ["published", "leased", "buried", "cancelled"]
    assert place.q.history(dead)[-1].why == "purged"
    assert names(place.q.history(cancelled)) == ["published", "cancelled"]
    assert names(place.q.history(skipped)) == ["published", "skipped"]
    place.q.seek("start")
    place.q.get()  # and the message is dropped
    assert names(place.q.history(cancelled))[1:3] == ["cancelled", "replayed"]


def test_a_message_that_waits_for_its_time_has_a_history_too():
    place = Place()
    stored = place.q.put(b"x", delay=60)
    assert names(place.q.history(stored.id)) == ["published", "delayed"]
    place.clock.advance(seconds=61)
    place.tick()
    place.q.get().ack()
    steps = place.q.history(stored.id)
    assert names(steps) == ["published", "leased", "acked"]
    assert {step.id for step in steps} == {stored.id}


def test_an_id_that_leads_to_nothing_is_not_found():
    place = Place()
    with pytest.raises(NotFound, match="there is no message"):
        place.q.history(f"{place.q.name}-0-7")


def pasts(place: Place) -> list[str]:
    delivery = place.q._port.deliveries[0]
    return [name for name in place.disk.names(delivery.journal.log.folder) if is_past(name)]


def worked_through(place: Place, count: int) -> None:
    for i in range(count):
        place.q.put(b"%d" % i)
        message = place.q.get(holder=f"worker-{i}")
        if i % 7 == 3:
            message.nack(error=f"error {i}", delay=0)
            message = place.q.get(holder=f"second-{i}")
        message.ack()
        if i % 20 == 0:
            place.tick()


def test_history_outlives_the_segments_of_the_journal_that_had_it():
    place = Place(segment_bytes=4096, snapshot_events=100)
    worked_through(place, 300)
    journal = place.q._port.deliveries[0].journal
    assert journal.log.start > 0
    assert len(pasts(place)) > 3
    for _ in range(2):
        for i in (0, 1, 3, 150, 151, 299):
            steps = place.q.history(f"{place.q.name}-0-{i}")
            expected = ["published", "leased", "nacked", "leased", "acked"] if i % 7 == 3 else []
            assert names(steps) == (expected or ["published", "leased", "acked"])
            assert steps[1].holder == f"worker-{i}"
        place.reopen()


def test_a_look_for_one_message_opens_few_of_the_files(monkeypatch: pytest.MonkeyPatch):
    place = Place(segment_bytes=16384, snapshot_events=100)
    worked_through(place, 1_000)
    past = place.q._port.deliveries[0].journal.past
    opened: list[object] = []
    unpacked = type(past)._unpacked
    monkeypatch.setattr(type(past), "_unpacked", lambda self, *of: opened.append(of) or unpacked(self, *of))
    place.q.history(f"{place.q.name}-0-400")
    assert 1 <= len(opened) <= 4 < len(pasts(place))


@pytest.mark.parametrize("restarted", [False, True])
def test_a_look_for_one_message_reads_few_events_of_the_journal(restarted: bool):
    place = Place(snapshot_events=1_000_000)
    worked_through(place, 2_000)
    if restarted:
        place.kill()
    journal = place.q._port.deliveries[0].journal
    assert journal.log.end > 4_000
    for offset in (0, 3, 1_000, 1_999):
        assert len(list(journal.past.of(offset))) <= 1_600
        assert names(place.q.history(f"{place.q.name}-0-{offset}"))[-1] == "acked"


def test_a_look_finds_every_event_of_each_message_whatever_happened_to_it():
    rng = random.Random(4)
    place = Place(snapshot_events=1_000_000, segment_bytes=4096, max_attempts=3, lease_ms=1_000)
    for step in range(600):
        place.q.put_many([NewMessage(body=b"", priority=rng.randrange(3)) for _ in range(rng.randrange(4))])
        for message in place.q.get_many(rng.randrange(1, 4), timeout=0):
            rng.choice([message.ack, message.ack, message.nack])()
        if step % 97 == 96:
            place.q.seek(offset=rng.randrange(step))
        if step % 150 == 149:
            place.reopen()
        place.after(ms=rng.choice([0, 50, 300]))
        if step % 20 == 19:
            check_looks(place)
    log = place.q._port.deliveries[0].journal.log
    place.disk.flip(f"{log.folder}/{log.start:020d}.log", 2_000)  # a damaged frame costs what is in it
    check_looks(place)


def check_looks(place: Place) -> None:
    """What a look for a message finds is all that the whole journal says of it."""
    delivery = place.q._port.deliveries[0]
    journal = delivery.journal
    journal.log.sync()
    start = journal.log.start
    packed = [past for past in journal.past._files() if past.base < start]
    stored = [decode_event(bytes(record.value)) for record in journal.log.records(start, on_damage="skip")]
    whole = [each for event in stored for each in _told_by(event)]
    for offset in range(0, delivery.partition.log.end, 37):
        before = sum(
            len(list(journal.past._unpacked(past, offset))) for past in packed if past.lowest <= offset < past.end
        )
        found = [event for _, event in journal.past.of(offset)][before:]
        is_meant = _MessageLife(delivery, offset, "")._is_meant
        assert list(filter(is_meant, found)) == list(filter(is_meant, whole))


def _told_by(event: Event) -> list[Event]:
    return [noted for _, noted in event.events()] if isinstance(event, Noted) else [event]


def test_past_events_go_with_the_messages_that_they_tell_of():
    place = Place(segment_bytes=4096, snapshot_events=100, retention_segments=2)
    worked_through(place, 300)
    log = place.q._port.deliveries[0].partition.log
    place.q.compact()
    log.retain()
    place.q.compact()
    worked_through(place, 50)
    assert log.start > 250
    assert all(int(name.split("-")[2].removesuffix(".past")) > log.start for name in pasts(place))


def test_past_events_that_are_damaged_cost_their_own_history_and_nothing_else():
    place = Place(segment_bytes=4096, snapshot_events=100)
    worked_through(place, 300)
    folder = place.q._port.deliveries[0].journal.log.folder
    first = sorted(pasts(place))[0]
    file = place.disk.open(f"{folder}/{first}", write=True)
    file.write(20, [b"spoiled"])
    file.close()
    assert names(place.q.history(f"{place.q.name}-0-0")) == ["published"]
    assert names(place.q.history(f"{place.q.name}-0-299")) == ["published", "leased", "acked"]
    place.q.put(b"more")
    place.q.get().ack()


@pytest.mark.parametrize("damage", ["first byte", "middle", "emptied"])
def test_a_check_names_past_events_that_are_damaged_and_calls_the_folder_whole(damage: str):
    place = Place(segment_bytes=4096, snapshot_events=100)
    worked_through(place, 300)
    folder, first = place.q._port.deliveries[0].journal.log.folder, sorted(pasts(place))[0]
    root = place.q._port.engine.folder
    world = place.q._port.engine.world
    place.q.close()
    assert check_folder(root, world).notes == ()
    path = f"{folder}/{first}"
    if damage == "emptied":
        place.disk.cut_file(path, 0)
    else:
        place.disk.flip(path, 0 if damage == "first byte" else len(place.disk.contents(path)) // 2)
    report = check_folder(root, world)
    (note,) = report.notes
    assert path in note
    assert report.ok


def test_the_original_id_names_the_first_life_however_often_a_message_died():
    place = Place(max_attempts=1)
    first = place.q.put(b"x")
    for _ in range(3):
        message = place.q.get()
        assert message.original_id == first.id
        message.nack(error="no")
        place.tick()
        (letter,) = place.q.dead.list()
        assert (letter.original_id, letter.original_offset) == (first.id, first.offset)
        assert letter.original_timestamp.timestamp() <= message.timestamp.timestamp()
        place.q.dead.redrive()
    last = place.q.get()
    assert (last.id, last.original_id) == (f"{place.q.name}-0-3", first.id)
    assert last.headers == {}
    lives = [step.id for step in place.q.history(last.id) if step.step == "published"]
    assert lives == [f"{place.q.name}-0-{i}" for i in range(4)]


def test_a_dead_letter_keeps_when_its_message_was_due_and_when_it_would_have_expired():
    place = Place(max_attempts=1)
    place.q.put(b"x", delay=10, ttl=100)
    place.after(seconds=11)
    message = place.q.get()
    due_at, expires_at = message.due_at, message.expires_at
    assert due_at is not None
    assert expires_at is not None
    message.nack()
    place.after(seconds=1_000)
    (letter,) = place.q.dead.list()
    assert (letter.due_at, letter.expires_at) == (due_at, expires_at)


def test_a_message_that_was_gone_before_its_letter_is_told_by_the_letter():
    place = Place(max_attempts=2, backoff_ms=0, segment_bytes=4096, retention_segments=1)
    place.q.put(b"x" * 3_000)
    for error in ("no", "never"):
        place.q.get(holder="worker-1").nack(error=error)
    place.tick()
    for _ in range(5):
        place.q.put(b"y" * 3_000)
        place.q.get().ack()
    place.q.compact()
    place.q._port.deliveries[0].partition.log.retain()
    (letter,) = place.q.dead.list()
    assert names(place.q.history(letter.id)) == ["published", "nacked", "buried"]


def test_a_file_of_past_events_is_a_packed_segment_with_a_checksum():
    place = Place(segment_bytes=4096, snapshot_events=100)
    worked_through(place, 200)
    folder = place.q._port.deliveries[0].journal.log.folder
    content = place.disk.contents(f"{folder}/{sorted(pasts(place))[0]}")
    magic, check = struct.unpack_from("<4sI", content)
    assert (magic, check) == (b"HFP\x01", crc32c(content[8:]))
    assert len(zlib.decompress(content[8:])) == 4096


def test_what_is_packed_and_not_trimmed_yet_is_told_once():
    """A crash may come between the two."""
    place = Place(segment_bytes=4096)
    worked_through(place, 100)
    journal = place.q._port.deliveries[0].journal
    journal.past.keep(journal.log.end, end=100, pack=True)
    assert journal.log.start == 0
    assert pasts(place)
    assert names(place.q.history(f"{place.q.name}-0-0")) == ["published", "leased", "acked"]
    place.kill()
    assert names(place.q.history(f"{place.q.name}-0-0")) == ["published", "leased", "acked"]


def test_a_journal_is_trimmed_though_its_past_cannot_be_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(PastEvents, "_pack", no_room)
    place = Place(segment_bytes=4096, snapshot_events=100)
    worked_through(place, 200)
    assert place.q._port.deliveries[0].journal.log.start > 0
    assert "history of settled messages dropped" in caplog.text
    assert names(place.q.history(f"{place.q.name}-0-0")) == ["published"]


def test_history_is_right_across_seeks_and_restarts():
    place = Place(segment_bytes=4096, snapshot_events=100)
    worked_through(place, 200)
    place.q.seek("start")
    for _ in range(200):
        place.q.get().ack()
    place.reopen()
    place.q.seek(offset=100)
    for i in range(100):
        place.q.get().ack()
        if i % 20 == 0:
            place.tick()
    clean = ["published", "leased", "acked"]
    again = ["replayed", "leased", "acked"]
    assert names(place.q.history(f"{place.q.name}-0-0")) == clean + again
    assert names(place.q.history(f"{place.q.name}-0-151")) == clean + again + again


def test_what_a_seek_brought_back_is_told_though_its_journal_began_behind_those_messages():
    """A segment that began at message 100 tells of message 0 as well, once a seek has gone back there."""
    place = Place(segment_bytes=4096, snapshot_events=100)
    journal = place.q._port.deliveries[0].journal
    place.q.put_many([b"%d" % i for i in range(500)])
    for _ in range(100):
        place.q.get().ack()
        place.tick()
    segments = len(journal.log.segments())
    while len(journal.log.segments()) == segments:
        place.q.get().ack(durability="interval")  # not a note: those fill no segments
    begun = journal.log.segments()[-1].base_offset
    place.q.seek("start")
    while journal.log.start <= begun:
        place.q.get().ack(durability="interval")
        place.tick()
    assert names(place.q.history(f"{place.q.name}-0-0"))[-3:] == ["replayed", "leased", "acked"]


def test_of_a_very_long_history_the_first_and_the_last_steps_are_told_and_how_many_are_not():
    place = Place()
    place.q.put(b"x")
    for number in range(1_000):
        place.q.get(holder=f"worker-{number}").defer(delay=0)
    steps = place.q.history("jobs-0-0")
    assert len(steps) == 1_001
    assert names(steps)[:2] == ["published", "leased"]
    assert [(step.step, step.why) for step in steps[500:501]] == [("omitted", "1001 steps")]
    assert (steps[-1].step, steps[-1].holder) == ("returned", "worker-999")
