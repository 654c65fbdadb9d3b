"""Dead letters: what they tell, how they are found, put back and dropped, and that nothing keeps them from moving."""

from __future__ import annotations

import contextlib
import errno
from datetime import UTC, datetime, timedelta

import pytest

import holdfast
from holdfast import DiskFull, InvalidRequest, NewMessage
from holdfast.broker import dead_letters
from holdfast.local.listing import find_message
from holdfast.local.sync.broker import queue_here
from tests.unit.queues import Place, bodies

LIMIT = 1_000


def at(place: Place) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=place.clock.now_ns() // 1_000)


def reject_each(place: Place, *messages: bytes | NewMessage, reason: str = "why") -> None:
    place.q.put_many(list(messages))
    for m in place.q.get_many(100, timeout=0):
        m.reject(reason)


# What a letter tells


def test_a_dead_letter_tells_every_error_the_reason_and_its_original_place():
    place = Place(max_attempts=3, dropped_delay_ms=0)
    place.q.put(b"before")
    stored = place.q.put(b"x", key=b"k", headers=[("a", "1"), ("a", "2")], priority=4, correlation_id="c-1")
    published = at(place)
    place.clock.advance(seconds=10)
    first = at(place)
    place.q.get(timeout=0, holder="ann").nack(error=ValueError("one"), delay=0)
    place.clock.advance(seconds=10)
    place.q.get(timeout=0, holder="bob", lease=5)  # dropped at once
    place.clock.advance(seconds=10)
    last = at(place)
    place.q.get(timeout=0, holder="cleo").nack(error="three")
    for q in (place.q, place.kill()):
        (letter,) = q.dead.list()
        assert (letter.body, letter.key, letter.headers.pairs) == (b"x", b"k", (("a", "1"), ("a", "2")))
        assert (letter.reason, letter.error, letter.attempts) == ("MAX_ATTEMPTS", "three", 3)
        assert (letter.original_id, letter.original_offset) == (stored.id, stored.offset)
        assert (letter.original_timestamp, letter.first_delivery, letter.last_delivery) == (published, first, last)
        assert (letter.dead_at, letter.priority, letter.correlation_id) == (last, 4, "c-1")
        assert [failure.holder for failure in letter.failures] == ["ann", "bob", "cleo"]
        assert [failure.why for failure in letter.failures] == ["nacked", "dropped unhandled", "MAX_ATTEMPTS"]
        assert [failure.error.partition("\n")[0] for failure in letter.failures] == ["ValueError: one", "", "three"]
        assert (letter.phase, letter.holder) == ("dead", "cleo")


def test_a_letter_keeps_the_correlation_id_that_the_message_had_without_one():
    place = Place()
    place.q.put(b"before")
    stored = place.q.put(b"x")
    m = place.q.get_many(2)[1]
    assert m.correlation_id == stored.id
    m.reject()
    assert place.q.dead.list()[0].correlation_id == stored.id


def test_a_rejected_message_says_why():
    place = Place()
    reject_each(place, b"x", reason="no such customer")
    (letter,) = place.q.dead.list()
    assert (letter.reason, letter.error, letter.attempts) == ("REJECTED", "no such customer", 1)


def test_an_error_is_kept_with_its_trace_as_far_as_there_is_room():
    place = Place(max_error_chars=200)
    place.q.put(b"x")
    with pytest.raises(ZeroDivisionError), place.q.get(timeout=0) as m:
        _ = 1 / len(m.body[1:])
    place.after(ms=100)
    place.q.get(timeout=0).reject("e" * 1_000)
    first, second = place.q.dead.list()[0].failures
    assert first.error.startswith("ZeroDivisionError: division by zero\n\nTraceback")
    assert (len(first.error), len(second.error)) == (200, 200)


def test_the_state_of_a_message_goes_with_it():
    place = Place()
    place.q.put(b"x")
    m = place.q.get(timeout=0)
    m.state.save({"step": 3})
    m.reject("why")
    assert place.q.dead.list()[0].state == {"step": 3}
    assert place.kill().dead.list()[0].state == {"step": 3}


def test_a_message_that_was_delayed_keeps_its_id():
    place = Place()
    stored = place.q.put(b"x", delay=5)
    place.after(seconds=5)
    place.q.get(timeout=0).reject()
    (letter,) = place.q.dead.list()
    assert letter.original_id == stored.id
    assert place.q.dead.show(letter.id).original_id == stored.id


def test_expired_messages_become_dead_letters_where_that_is_asked_for():
    place = Place(expired_to_dead=True)
    place.q.put(b"x", ttl=5)
    place.q.put(b"y")
    place.clock.advance(seconds=5)
    assert bodies(place.q) == [b"y"]
    (letter,) = place.q.dead.list()
    assert (letter.body, letter.reason, letter.attempts, letter.failures) == (b"x", "EXPIRED", 0, ())
    assert (letter.first_delivery, letter.last_delivery) == (None, None)
    assert place.q.dead.redrive().done == 1
    assert bodies(place.q) == [b"x"]


def test_many_expired_messages_become_dead_letters_in_order():
    place = Place(expired_to_dead=True)
    place.q.put_many([NewMessage(body=b"%d" % n, ttl=1) for n in range(2_500)])
    place.clock.advance(seconds=1)
    assert bodies(place.q) == []
    assert [letter.body for letter in place.q.dead.list()] == [b"%d" % n for n in range(2_500)]
    assert place.q.stats().metrics.expired == 2_500
    assert place.q.stats().metrics.buried == 2_500


# Finding


def test_letters_are_listed_by_condition_and_limit():
    place = Place()
    for key, reason in (("a", "timeout 1"), ("b", "refused"), ("a", "timeout 2")):
        reject_each(place, NewMessage(body=b'{"n": 1}', key=key), reason=reason)
    assert len(place.q.dead.list()) == 3
    assert [letter.error for letter in place.q.dead.list(where='key == "a"')] == ["timeout 1", "timeout 2"]
    assert [letter.key for letter in place.q.dead.list(where=lambda letter: letter.error == "refused")] == ["b"]
    assert [letter.error for letter in place.q.dead.list(where='error ~ "time" and json.n == 1', limit=1)] == [
        "timeout 1"
    ]
    assert place.q.dead.list(limit=0) == []
    assert [letter.id for letter in place.q.messages("dead")] == [letter.id for letter in place.q.dead.list()]


def test_letters_are_grouped_by_reason_and_kind_of_error():
    place = Place()
    for reason in ("no user 17", "no user 4711", "no address 0x7f001", "no user 'ann'"):
        reject_each(place, b"x", reason=reason)
        place.clock.advance(seconds=1)
    groups = place.q.dead.groups()
    assert [(group.reason, group.error, group.count) for group in groups] == [
        ("REJECTED", "no user …", 3),
        ("REJECTED", "no address …", 1),
    ]
    assert groups[0].last - groups[0].first == timedelta(seconds=3)
    assert place.q.dead.show(groups[0].example).error == "no user 'ann'"
    assert place.q.dead.groups(where='error ~ "address"')[0].count == 1


def test_one_letter_is_shown_by_its_id():
    place = Place()
    reject_each(place, b"a", b"b")
    second = place.q.dead.list()[1]
    assert place.q.dead.show(second.id).body == b"b"
    place.q.dead.purge(second.id)
    with pytest.raises(InvalidRequest, match="redriven or purged"):
        place.q.dead.show(second.id)


def test_looking_at_the_dead_letters_of_a_new_queue_makes_no_files():
    place = Place()
    with place.unchanged():
        assert place.q.dead.list() == []
        assert place.q.dead.groups() == []
        assert place.q.dead.redrive().matched == 0
        assert place.q.dead.purge().matched == 0


# Putting back


def test_redriven_messages_are_as_they_were_and_begin_anew():
    place = Place(max_attempts=2)
    place.q.put(b"x", key="k", headers={"h": b"v"}, priority=7, correlation_id="c", dedup_id="d")
    place.q.get(timeout=0).nack(delay=0)
    place.q.get(timeout=0).nack()
    answer = place.q.dead.redrive()
    assert (answer.matched, answer.done, len(answer.ids)) == (1, 1, 1)
    assert (place.q.stats().ready, place.q.stats().dead) == (1, 0)
    place.kill()
    assert (place.q.stats().ready, place.q.stats().dead) == (1, 0)
    m = place.q.get(timeout=0)
    assert (m.body, m.key, dict(m.headers), m.priority, m.correlation_id) == (b"x", "k", {"h": b"v"}, 7, "c")
    assert m.attempt == 1
    m.nack(delay=0)
    place.q.get(timeout=0).nack(error="again")
    (letter,) = place.q.dead.list()
    assert (letter.attempts, letter.error) == (2, "again")
    assert place.q.put(b"y", dedup_id="d").duplicate


def test_a_redrive_keeps_the_order_of_publishing():
    place = Place()
    place.q.put_many([b"%d" % n for n in range(6)])
    for m in reversed(place.q.get_many(6)):
        m.reject()
    assert [letter.body for letter in place.q.dead.list()] == [b"5", b"4", b"3", b"2", b"1", b"0"]
    place.q.dead.redrive()
    assert bodies(place.q) == [b"%d" % n for n in range(6)]


def test_a_dry_run_changes_nothing():
    place = Place()
    reject_each(place, b"a", b"b", b"c")
    with place.unchanged():
        redrive = place.q.dead.redrive(limit=2, dry_run=True)
        purge = place.q.dead.purge(where='body == "c"', dry_run=True)
    assert (redrive.matched, redrive.done) == (2, 0)
    assert (purge.matched, purge.done) == (1, 0)


def test_only_what_is_chosen_is_put_back():
    place = Place()
    reject_each(place, b"a", b"b", b"c", b"d")
    assert place.q.dead.redrive(where='body == "b"').done == 1
    first = place.q.dead.list()[0].id
    assert place.q.dead.redrive(first).done == 1
    assert place.q.dead.redrive(limit=1).done == 1
    assert [letter.body for letter in place.q.dead.list()] == [b"d"]
    assert bodies(place.q) == [b"b", b"a", b"c"]


def test_what_was_put_back_is_not_put_back_twice():
    place = Place()
    reject_each(place, b"a")
    letter = place.q.dead.list()[0].id
    place.q.dead.redrive()
    with pytest.raises(InvalidRequest, match="redriven or purged"):
        place.q.dead.redrive(letter)
    assert place.q.dead.redrive().matched == 0
    assert place.kill().dead.redrive().matched == 0
    assert bodies(place.q) == [b"a"]


def test_a_redrive_is_paced():
    place = Place()
    reject_each(place, *[b"%d" % n for n in range(100)])
    before_ns = place.clock.monotonic_ns()
    assert place.q.dead.redrive(rate=50).done == 100
    took_s = (place.clock.monotonic_ns() - before_ns) / 1e9
    assert 1.8 <= took_s <= 2.0


def test_a_redrive_cut_short_at_any_call_neither_loses_nor_doubles():
    place = Place()
    reject_each(place, b"a", b"b")
    stages = []
    place.disk.on_call = lambda call: stages.append(place.disk.kill())
    place.q.dead.redrive()
    place.disk.on_call = None
    assert len(stages) > 5
    for disk in stages:
        place.disk = disk
        place.q = place.open()
        left = [letter.body for letter in place.q.dead.list()]
        assert sorted(bodies(place.q) + left) == [b"a", b"b"]
        place.q.close()


def test_a_redrive_into_another_queue_cut_short_at_any_call_is_whole_after_the_next_one():
    place = Place()
    place.q._port.engine.create_topic("repairs")
    reject_each(place, b"a", b"b")
    stages = []
    place.disk.on_call = lambda call: stages.append(place.disk.kill())
    assert place.q.dead.redrive(to="repairs").done == 2
    place.disk.on_call = None
    assert len(stages) > 5
    for disk in stages:
        place.disk = disk
        place.q = place.open(topic="jobs")
        place.q.dead.redrive(to="repairs")
        assert place.q.dead.list() == []
        log = place.q._port.engine.topic("repairs").partitions[0].log
        assert sorted(bytes(record.value) for record in log.records(0)) == [b"a", b"b"]
        assert bodies(place.q) == []
        place.q.close()


def test_letters_at_the_places_of_a_topic_that_was_deleted_are_no_duplicates_of_its_own():
    place = Place()
    engine = place.q._port.engine
    engine.create_topic("repairs")
    name = place.q.name
    for _ in range(2):
        place.q.put(b"x")
        place.q.get(timeout=0).reject("never")
        assert place.q.dead.redrive(to="repairs").done == 1
        engine.delete_topic(name)
        engine.create_topic(name)
        place.q = queue_here(engine, engine.topic(name).group("default"), None)
    assert engine.topic("repairs").partitions[0].log.end == 2


def test_purged_letters_are_gone():
    place = Place()
    reject_each(place, b"a", b"b", b"c")
    answer = place.q.dead.purge(where='body != "b"')
    assert (answer.matched, answer.done) == (2, 2)
    for q in (place.q, place.kill()):
        assert [letter.body for letter in q.dead.list()] == [b"b"]
        assert q.stats().dead == 1
    assert bodies(place.q) == []


def test_letters_are_dropped_when_their_own_time_is_over():
    place = Place(dead_retention_ms=60_000, retention_check_ms=1_000, segment_bytes=4_096, frame_bytes=1_024)
    for n in range(30):
        reject_each(place, b"%d" % n + bytes(500))
    place.after(seconds=61)
    place.tick()  # what was trimmed away is noticed at the next look
    assert place.q.stats().dead < 30
    assert len(place.q.dead.list()) == place.q.stats().dead


# What is as large as may be


@pytest.mark.parametrize("way", ["reject", "nack", "expire"])
def test_a_message_of_the_largest_size_can_die_and_live_again(way):
    place = Place(max_message_bytes=LIMIT, max_attempts=1, expired_to_dead=True)
    body = bytes(LIMIT)
    place.q.put(body, ttl=60)
    place.q.put(b"behind")
    if way == "expire":
        place.clock.advance(seconds=60)
    else:
        m = place.q.get(timeout=0)
        m.state.save("s" * LIMIT)
        m.reject("e" * LIMIT) if way == "reject" else m.nack(error="e" * LIMIT)
    assert bodies(place.q) == [b"behind"]
    (letter,) = place.q.dead.list()
    assert letter.body == body
    assert place.q.dead.redrive().done == 1
    assert bodies(place.q) == [body]
    assert place.q.stats().floor == 3


def test_a_message_that_failed_very_often_can_still_die():
    place = Place(max_message_bytes=LIMIT, max_attempts=None)
    place.q.put(b"x")
    for _ in range(50):
        place.q.get(timeout=0).nack(error="e" * 100, delay=0)
    place.q.get(timeout=0).reject("enough")
    (letter,) = place.q.dead.list()
    assert (letter.attempts, letter.error) == (51, "enough")
    place.kill()
    assert place.q.dead.list()[0].attempts == 51


def test_a_delayed_message_of_the_largest_size_comes_due():
    place = Place(max_message_bytes=LIMIT)
    place.q.put(bytes(LIMIT), delay=5)
    place.q.put(b"other", delay=5)
    place.after(seconds=5)
    assert bodies(place.q) == [bytes(LIMIT), b"other"]


def test_more_than_a_batch_may_hold_can_die_come_due_and_live_again():
    place = Place(max_batch_bytes=2_000, max_attempts=1, expired_to_dead=True)
    body = bytes(900)
    for _ in range(5):
        place.q.put(body, delay=5, ttl=60)
    place.after(seconds=5)
    assert place.q.stats().ready == 5
    place.clock.advance(seconds=60)
    assert bodies(place.q) == []
    place.tick()
    assert len(place.q.dead.list()) == 5
    assert place.q.dead.redrive().done == 5
    assert bodies(place.q) == [body] * 5


def test_a_queue_with_a_letter_that_is_too_large_to_move_opens_again():
    place = Place(max_message_bytes=LIMIT)
    place.q.put_many([bytes(LIMIT), b"behind"])
    m = place.q.get(timeout=0)
    with contextlib.suppress(holdfast.MessageTooLarge):
        m.reject()
    place.kill()
    assert bodies(place.q) == [b"behind"]
    assert [letter.body for letter in place.q.dead.list()] == [bytes(LIMIT)]


# No room for them


NO_ROOM = frozenset({"make_folder", "reserve"})


def test_a_reject_that_finds_no_room_for_the_letter_has_happened_and_says_nothing_else(caplog):
    place = Place(lease_ms=1_000)
    place.q.put_many([b"bad", b"good"])
    bad, good = place.q.get_many(2, timeout=0)
    place.disk.faults.fail(1, errno.ENOSPC, sticky=True, calls=NO_ROOM)
    bad.reject("broken")
    good.ack()
    assert "dead letters wait to be moved" in caplog.messages
    assert place.q.stats().dead == 1
    place.after(seconds=5)
    assert place.q.get_many(10, timeout=0) == []
    with pytest.raises(DiskFull):  # rather than a list without it
        place.q.dead.list()
    place.disk.faults.clear()
    place.after(seconds=5)
    assert place.q.stats().dead == 1
    assert [(letter.body, letter.reason, letter.error) for letter in place.q.dead.list()] == [
        (b"bad", "REJECTED", "broken")
    ]


def test_a_queue_with_a_letter_on_its_way_opens_though_there_is_no_room_for_it():
    place, no_room = Place(), {"min_free_bytes": 1 << 60}
    reject_each(place, b"earlier")  # so that there is a topic of dead letters
    place.q.put_many([b"bad", b"good"])
    q = place.reopen(**no_room)
    q.get(timeout=0).reject("broken")
    q = place.kill(**no_room)
    assert q.stats().dead == 2
    assert bodies(q) == [b"good"]
    q = place.kill(min_free_bytes=0)
    place.after(seconds=5)
    assert sorted(letter.body for letter in q.dead.list()) == [b"bad", b"earlier"]


def test_one_letter_is_found_among_many_by_either_id_without_reading_their_notes(monkeypatch):
    place = Place()
    stored = place.q.put_many([b"%d" % number for number in range(300)])
    for message in place.q.get_many(300, timeout=0):
        message.reject("no")
    letters = place.q.dead.list()
    read = []
    plain = dead_letters.decode_note
    monkeypatch.setattr(dead_letters, "decode_note", lambda text: read.append(text) or plain(text))
    for number in (0, 1, 25, 299):
        for name in (stored[number].id, letters[number].id):
            read.clear()
            found = find_message(place.q._port, name)
            assert found is not None
            assert (found.message.body, found.phase) == (b"%d" % number, "dead")
            assert len(read) <= 2  # once for the letter, and once for its history
    assert find_message(place.q._port, "jobs.dlq-0-300") is None
    place.q.dead.purge()
    found = find_message(place.q._port, stored[25].id)
    assert found is None or found.phase == "done"
