"""Wrong input to the queue: each is refused by a clear error that names it, and leaves everything as it was."""

from __future__ import annotations

import errno
import gc
import math
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

import holdfast
from holdfast import (
    BadBody,
    BadSettings,
    Busy,
    Closed,
    CorruptData,
    DiskFull,
    Empty,
    HoldfastError,
    InvalidRequest,
    LeaseLost,
    MessageTooLarge,
    NewMessage,
    NotAQueue,
    OffsetOutOfRange,
)
from holdfast.broker.check import repair_folder
from tests.unit.queues import FOLDER, PLAIN, Place, bodies

SETTINGS = f"{FOLDER}/topics/jobs/settings.json"
NOW = datetime(2026, 11, 16, tzinfo=UTC)

NO_DURATION = [-1, -0.001, math.nan, math.inf, -math.inf, "5", None.__class__, True, timedelta(seconds=-1), 1e300, [1]]
NO_TEXT = [5, 1.5, True, ["a"], {}, bytearray(b"a"), "\ud800"]


@pytest.fixture
def place() -> Place:
    return Place()


def refused(place: Place, call: Callable[[], object], *words: str, kind: type[HoldfastError] = InvalidRequest) -> None:
    """The call raises this error, with these words in its message, and changes nothing."""
    with place.unchanged():
        with pytest.raises(kind) as caught:
            call()
        text = str(caught.value)
        assert all(word in text for word in words), text


# Bodies


def test_an_empty_body_is_a_body(place):
    place.q.put(b"")
    place.q.put_many([b"", NewMessage(body=b"")])
    assert bodies(place.kill()) == [b"", b"", b""]


def test_an_empty_list_stores_nothing(place):
    with place.unchanged():
        assert place.q.put_many([]) == []


@pytest.mark.parametrize("body", [None, 5, 1.5, ["a"], {"a": 1}, object(), "text", True])
def test_a_body_of_another_type_is_refused(place, body):
    refused(place, lambda: place.q.put(body), "body", type(body).__name__)
    refused(place, lambda: place.q.put(body, key="k"), "body", type(body).__name__)
    refused(place, lambda: place.q.put_many([b"good", body]), "body", type(body).__name__)


def test_a_huge_body_is_refused_and_the_next_one_goes_on():
    place = Place(max_message_bytes=1_000)
    place.q.cancel(place.q.put(b"once", dedup_id="once", delay=1).id)
    refused(place, lambda: place.q.put(bytes(1_001)), "1001", "1000", kind=MessageTooLarge)
    refused(place, lambda: place.q.put(bytes(990), key="k" * 50), "limit", kind=MessageTooLarge)
    refused(place, lambda: place.q.put_many([b"good", bytes(1_001)]), "limit", kind=MessageTooLarge)
    refused(place, lambda: place.q.put(bytes(1_001), delay=5), "limit", kind=MessageTooLarge)
    refused(place, lambda: place.q.put(bytes(1_001), dedup_id="d"), "limit", kind=MessageTooLarge)
    assert not place.q.put(b"fits", dedup_id="d").duplicate
    assert bodies(place.q) == [b"fits"]


def test_a_batch_beyond_its_limit_is_refused_as_a_whole():
    place = Place(max_batch_bytes=1_000)
    refused(place, lambda: place.q.put_many([bytes(600), bytes(600)]), "limit", kind=MessageTooLarge)


# Arguments of put


@pytest.mark.parametrize("name", ["delay", "ttl"])
@pytest.mark.parametrize("value", NO_DURATION, ids=lambda value: type(value).__name__)
def test_what_is_no_duration_is_refused_at_put(place, name, value):
    refused(place, lambda: place.q.put(b"x", **{name: value}), name)


def test_a_time_to_live_of_nothing_is_refused(place):
    refused(place, lambda: place.q.put(b"x", ttl=0), "ttl")


@pytest.mark.parametrize(
    "value", [datetime(2026, 1, 1), "2026-01-01", 5, NOW.date()], ids=lambda value: type(value).__name__
)
def test_what_is_no_aware_datetime_is_refused(place, value):
    refused(place, lambda: place.q.put(b"x", at=value), "at=")
    refused(place, lambda: place.q.seek(time=value), "time=")


def test_a_delay_and_a_time_together_are_refused(place):
    refused(place, lambda: place.q.put(b"x", delay=5, at=NOW), "delay=", "at=")


@pytest.mark.parametrize(
    "priority", [10, -1, True, False, "7", 0.0, 7.0, None, 2**70], ids=lambda value: type(value).__name__
)
def test_a_priority_that_is_none_is_refused(place, priority):
    refused(place, lambda: place.q.put(b"x", priority=priority), "priority")
    refused(place, lambda: place.q.put_many([b"good", NewMessage(body=b"x", priority=priority)]), "priority")


@pytest.mark.parametrize("name", ["key", "dedup_id", "correlation_id"])
@pytest.mark.parametrize("value", NO_TEXT, ids=lambda value: type(value).__name__)
def test_what_is_no_text_is_refused(place, name, value):
    refused(place, lambda: place.q.put(b"x", **{name: value}), name)


@pytest.mark.parametrize("name", ["dedup_id", "correlation_id"])
@pytest.mark.parametrize("value", ["", "i" * 1_025])
def test_an_id_is_neither_empty_nor_endless(place, name, value):
    refused(place, lambda: place.q.put(b"x", **{name: value}), name)


def test_an_empty_key_is_a_key(place):
    place.q.put_many([NewMessage(body=b"x", key=""), NewMessage(body=b"y", key=b"")])
    assert [m.key for m in place.q.peek(2)] == ["", b""]


@pytest.mark.parametrize(
    "headers",
    [5, 0, False, "ab", "", b"ab", b"", ["ab"], [b"ab"], [("a",)], [("a", "b", "c")], {"a": 5}, {"a": None}, {5: "a"},
     {"": "a"}, {b"a": "b"}, {"\ud800": "a"}, {"a": "\ud800"}, [None]],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_headers_that_are_none_are_refused(place, headers):
    refused(place, lambda: place.q.put(b"x", headers=headers), "header")


def test_our_own_header_names_cannot_be_set(place):
    refused(place, lambda: place.q.put(b"x", headers={"holdfast.dead": "x"}), "holdfast.dead")
    refused(place, lambda: place.q.put(b"x", headers=[("fine", "x"), ("holdfast.", "x")]), "holdfast.")


@pytest.mark.parametrize("value", ["sometimes", 5, True, [], "FSYNC"], ids=lambda value: type(value).__name__)
def test_an_unknown_durability_is_refused(place, value):
    place.q.put(b"once", delay=1)
    refused(place, lambda: place.q.put(b"x", durability=value), "durability")
    refused(place, lambda: place.q.put(b"x", key="k", durability=value), "durability")
    refused(place, lambda: place.q.put(b"x", delay=5, durability=value), "durability")
    refused(place, lambda: place.q.put_many([b"x"], durability=value), "durability")


@pytest.mark.parametrize("value", ["brotli", 5, True, [], b"gzip"], ids=lambda value: type(value).__name__)
def test_an_unknown_codec_is_refused(place, value):
    refused(place, lambda: place.q.put(b"x", codec=value), "codec")


@pytest.mark.parametrize(
    "value", ["ab", b"ab", bytearray(b"ab"), None, 5, {"a": b"b"}, NewMessage(body=b"x")], ids=repr
)
def test_put_many_takes_a_list(place, value):
    refused(place, lambda: place.q.put_many(value), "put_many")


@pytest.mark.parametrize(
    "bad",
    [None, "text", NewMessage(body=b"x", priority=11), NewMessage(body=b"x", delay=-1), NewMessage(body="x"),
     NewMessage(body=b"x", headers={"a": 1}), NewMessage(body=b"x", ttl=math.nan)],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("at", [0, 1, 2])
def test_one_bad_item_keeps_all_others_out(place, bad, at):
    items: list[Any] = [NewMessage(body=b"a", dedup_id="a"), NewMessage(body=b"b", delay=5)]
    items.insert(at, bad)
    refused(place, lambda: place.q.put_many(items))
    assert not place.q.put(b"a", dedup_id="a").duplicate


def test_an_iterator_that_fails_midway_leaves_nothing(place):
    def items():
        yield b"a"
        raise RuntimeError("no more")

    with place.unchanged(), pytest.raises(RuntimeError, match="no more"):
        place.q.put_many(items())


# Arguments of get


@pytest.mark.parametrize("value", NO_DURATION, ids=lambda value: type(value).__name__)
def test_what_is_no_duration_is_refused_at_get(place, value):
    place.q.put(b"x")
    refused(place, lambda: place.q.get(timeout=value), "timeout")
    refused(place, lambda: place.q.get(timeout=0, lease=value), "lease")
    refused(place, lambda: place.q.get_many(5, timeout=0, lease=value), "lease")
    refused(place, lambda: place.q.get_nowait(lease=value), "lease")


def test_a_lease_of_nothing_is_refused(place):
    place.q.put(b"x")
    refused(place, lambda: place.q.get(timeout=0, lease=0), "lease")


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "5", None, 10**9], ids=lambda value: type(value).__name__)
def test_a_count_that_is_none_is_refused(place, count):
    place.q.put(b"x")
    refused(place, lambda: place.q.get_many(count, timeout=0), "count")
    refused(place, lambda: place.q.peek(count), "count")


@pytest.mark.parametrize("holder", [5, b"me", "h" * 201, "\ud800", True], ids=lambda value: type(value).__name__)
def test_a_holder_that_is_no_short_text_is_refused(place, holder):
    place.q.put(b"x")
    refused(place, lambda: place.q.get(timeout=0, holder=holder), "holder")


@pytest.mark.parametrize("name", ["renew", "detached"])
@pytest.mark.parametrize("value", ["yes", 1, None, 30], ids=lambda value: type(value).__name__)
def test_a_switch_is_true_or_false(place, name, value):
    place.q.put(b"x")
    refused(place, lambda: place.q.get(timeout=0, **{name: value}), name)


# A message in hand


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "5", True, [1]], ids=lambda value: type(value).__name__)
def test_a_refused_settling_leaves_the_message_in_hand(place, value):
    place.q.put(b"x")
    m = place.q.get(timeout=0)
    for call, name in (
        (lambda: m.nack(delay=value), "delay"),
        (lambda: m.defer(delay=value), "delay"),
        (lambda: m.extend(value), "lease"),
        (lambda: m.ack(durability="sometimes"), "durability"),
    ):
        refused(place, call, name)
        assert not m.settled
        assert not m.lost
    m.ack()


def test_a_handler_that_gives_a_bad_delay_gives_the_message_back(place):
    place.q.put(b"x")
    with pytest.raises(InvalidRequest, match="delay"), place.q.get(timeout=0) as m:
        m.nack(delay=-5)
    place.after(ms=100)
    assert place.q.get(timeout=0).attempt == 2


@pytest.mark.parametrize("error", ["\ud800", OSError("no file '\udcff'")], ids=lambda value: type(value).__name__)
def test_an_error_that_is_no_clean_text_is_kept_as_well_as_it_can_be(place, error):
    place.q.put(b"x")
    place.q.get(timeout=0).nack(error=error, delay=0)
    place.q.get(timeout=0).reject(error)
    (letter,) = place.kill().dead.list()
    assert len(letter.failures) == 2


def test_an_error_that_cannot_be_shown_still_gives_the_message_back(place):
    class Shy(Exception):
        def __str__(self) -> str:
            raise RuntimeError("not telling")

    place.q.put(b"x")
    with pytest.raises(Shy), place.q.get(timeout=0):
        raise Shy
    place.after(ms=100)
    m = place.q.get(timeout=0)
    assert m.attempt == 2
    m.nack(delay=0, error=Shy())
    assert place.q.stats().ready == 1


def test_a_state_that_is_no_json_is_refused(place):
    place.q.put(b"x")
    m = place.q.get(timeout=0)
    m.state.save({"step": 1})
    refused(place, lambda: m.state.save(object()), "state")
    refused(place, lambda: m.state.save({"a": {1, "b", object()}}), "state")
    refused(place, lambda: m.state.save({"text": "\ud800"}), "state")
    refused(place, lambda: m.state.save({"step": 2}, durability="sometimes"), "durability")
    assert m.state.load() == {"step": 1}
    m.state.save({"step": 2})
    m.ack()


@pytest.mark.parametrize("value", [None, 5, "m", ["m"], [None], [b"x"]], ids=lambda value: type(value).__name__)
def test_ack_many_takes_messages(place, value):
    refused(place, lambda: place.q.ack_many(value), "ack_many")
    refused(place, lambda: place.q.nack_many(value), "nack_many")


def test_a_message_of_another_queue_settles_nothing_here(place):
    other = Place()
    for each in (place, other):
        each.q.put(b"x")
    mine, foreign = place.q.get(timeout=0), other.q.get(timeout=0)
    refused(place, lambda: place.q.ack_many([foreign]), "queue")
    assert not mine.lost
    assert not foreign.lost
    refused(place, lambda: place.q.nack_many([foreign]), "queue")
    assert not mine.lost
    assert not foreign.lost


def test_the_same_message_twice_in_one_call_is_acked_once(place):
    place.q.put_many([b"a", b"b"])
    a, b = place.q.get_many(2)
    place.q.ack_many([a, b, a])
    assert place.q.stats().floor == 2
    assert place.q.stats().metrics.acked == 2


# Receipts and ids


@pytest.mark.parametrize(
    "receipt",
    ["", "x", "@", "jobs-0-0", "jobs-0-0@", "jobs-0-0@zz", "jobs-0-d0@1", "other-0-0@10000000001", None, 5, b"a@1",
     "jobs-0-0@" + "f" * 5_000, "jobs-0-" + "9" * 30 + "@1", "jobs-0-0@-1", "jobs-0-0@ 1"],
    ids=repr,
)  # fmt: skip
def test_a_garbled_receipt_is_refused(place, receipt):
    place.q.put(b"x")
    m = place.q.get(timeout=0)
    refused(place, lambda: place.q.resume(receipt), kind=HoldfastError)
    assert not m.lost
    m.ack()


def test_a_receipt_of_another_delivery_is_refused(place):
    place.q.put(b"x")
    m = place.q.get(timeout=0)
    stale = m.receipt
    m.defer()
    holding = place.q.get(timeout=0)
    refused(place, lambda: place.q.resume(stale), kind=LeaseLost)
    refused(place, lambda: place.q.resume("jobs-0-99@1"), kind=LeaseLost)
    assert not holding.lost


def test_a_receipt_of_the_queue_beside_is_refused():
    first, second = Place(), Place()
    second.q.close()
    second.q = holdfast.open("/data/others", world=second.world)
    for each in (first, second):
        each.q.put(b"x")
    foreign, mine = second.q.get(timeout=0), first.q.get(timeout=0)
    assert mine.receipt != foreign.receipt  # which also makes the key that receipts are signed with
    refused(first, lambda: first.q.resume(foreign.receipt), "others")
    assert not mine.lost


@pytest.mark.parametrize(
    "message_id",
    ["", "x", "-1", "jobs-0--1", "jobs-0-0-0", "others-0-0", "jobs.dlq-0-0", "jobs-7-0", None, 0, b"jobs-0-0", 1.5,
     "jobs-0-" + "9" * 30, "jobs-0-٣"],
    ids=repr,
)  # fmt: skip
def test_an_id_of_another_queue_or_of_nothing_is_refused(place, message_id):
    place.q.put_many([b"a", b"b", b"c", b"d"])
    refused(place, lambda: place.q.cancel(message_id))
    refused(place, lambda: place.q.dead.show(message_id))


def test_an_id_that_was_never_given_is_refused(place):
    place.q.put(b"x")
    refused(place, lambda: place.q.cancel("jobs-0-1"), "jobs-0-1")
    refused(place, lambda: place.q.cancel("jobs-0-d0"), "jobs-0-d0")


# Looking and seeking


@pytest.mark.parametrize("phase", ["gone", "", None, 5, "READY"], ids=lambda value: type(value).__name__)
def test_an_unknown_phase_is_refused_at_once(place, phase):
    refused(place, lambda: place.q.messages(phase), "phase")


@pytest.mark.parametrize("limit", [-1, 1.5, True, "5"], ids=lambda value: type(value).__name__)
def test_a_limit_that_is_none_is_refused(place, limit):
    place.q.put(b"x")
    place.q.get(timeout=0).reject()
    letter = place.q.dead.list()[0].id
    refused(place, lambda: place.q.messages("ready", limit=limit), "limit")
    refused(place, lambda: place.q.dead.list(limit=limit), "limit")
    refused(place, lambda: place.q.dead.redrive(limit=limit), "limit")
    refused(place, lambda: place.q.dead.redrive(letter, limit=limit), "limit")
    refused(place, lambda: place.q.dead.purge([letter], limit=limit), "limit")


@pytest.mark.parametrize(
    "where", ["", "key ==", "nonsense == 1", "(", 5, ["key"]], ids=lambda value: type(value).__name__
)
def test_a_condition_that_is_none_is_refused(place, where):
    refused(place, lambda: place.q.messages("ready", where=where))
    refused(place, lambda: place.q.dead.list(where=where))
    refused(place, lambda: place.q.dead.redrive(where=where))
    refused(place, lambda: place.q.dead.purge(where=where))


@pytest.mark.parametrize("rate", [0, -1, math.nan, math.inf, True, "5"], ids=lambda value: type(value).__name__)
def test_a_rate_that_is_none_is_refused(place, rate):
    place.q.put(b"x")
    place.q.get(timeout=0).reject()
    refused(place, lambda: place.q.dead.redrive(rate=rate), "rate")


@pytest.mark.parametrize(
    "ids", [5, [None], ["x"], ["jobs-0-0"], ["jobs.dlq-0-7"], b"ab"], ids=lambda value: type(value).__name__
)
def test_ids_that_are_no_dead_letters_are_refused(place, ids):
    place.q.put(b"x")
    place.q.get(timeout=0).reject()
    refused(place, lambda: place.q.dead.redrive(ids))
    refused(place, lambda: place.q.dead.purge(ids))


def test_ids_and_a_condition_together_are_refused(place):
    refused(place, lambda: place.q.dead.redrive(["jobs.dlq-0-0"], where="key == 'a'"), "ids", "where")


def test_a_dead_letter_named_twice_is_moved_once(place):
    place.q.put(b"x")
    place.q.get(timeout=0).reject()
    letter = place.q.dead.list()[0].id
    assert place.q.dead.redrive([letter, letter]).done == 1
    assert bodies(place.q) == [b"x"]


@pytest.mark.parametrize("to", ["begin", "", 5, b"start"], ids=lambda value: type(value).__name__)
def test_a_seek_to_nowhere_is_refused(place, to):
    refused(place, lambda: place.q.seek(to), "seek")


def test_a_seek_needs_one_target(place):
    refused(place, place.q.seek, "seek")
    refused(place, lambda: place.q.seek("start", offset=0), "seek")
    refused(place, lambda: place.q.seek(offset=0, time=NOW), "seek")


@pytest.mark.parametrize("offset", [True, 1.0, "0"], ids=lambda value: type(value).__name__)
def test_an_offset_is_a_whole_number(place, offset):
    refused(place, lambda: place.q.seek(offset=offset), "offset")


def test_a_seek_beyond_what_is_kept_is_refused(place):
    place.q.put_many([b"a", b"b"])
    for offset in (-1, 3, 2**70):
        refused(place, partial(place.q.seek, offset=offset), "0 to 2", kind=OffsetOutOfRange)


# Opening


def test_an_unknown_setting_is_refused_with_the_nearest_name(place):
    place.q.close()
    before = place.files()
    for name, near in (("max_atempts", "max_attempts"), ("lease", "lease_ms"), ("dedup_windows_ms", "dedup_window_ms")):
        with pytest.raises(BadSettings, match=f"unknown setting {name}; did you mean {near}"):
            place.open(**{name: 5})
    assert place.files() == before


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_attempts", 0), ("max_attempts", "5"), ("lease_ms", -1), ("lease_ms", 1.5), ("durability", "sometimes"),
     ("backoff_factor", math.nan), ("backoff_factor", 0.5), ("priority_weights", (1, 2)), ("priority_weights", None),
     ("priority_choice", "random"), ("ttl_ms", 0), ("backoff_jitter_percent", 101), ("expired_to_dead", "yes"),
     ("codec", "brotli"), ("dedup_window_ms", None)],
)  # fmt: skip
def test_a_setting_outside_its_limits_is_refused(place, name, value):
    place.q.close()
    before = place.files()
    with pytest.raises(BadSettings, match=name):
        place.open(**{name: value})
    assert place.files() == before


def test_a_refused_opening_makes_no_folder():
    place = Place()
    for options in ({"unknown": 1}, {"max_attempts": 0}, {"body_type": 5}, {"settings": {"lease_ms": 5}}):
        with pytest.raises(InvalidRequest):
            holdfast.open("/data/new", world=place.world, **options)
        assert not place.disk.exists("/data/new"), options


@pytest.mark.parametrize("settings", [{"lease_ms": 5}, 5, "lease_ms=5"], ids=lambda value: type(value).__name__)
def test_settings_of_another_type_are_refused(place, settings):
    place.q.close()
    with pytest.raises(BadSettings, match="settings must be QueueSettings"):
        place.open(settings=settings)


@pytest.mark.parametrize("folder", [None, 5, "", b"jobs", "a\0b", ["jobs"]], ids=lambda value: type(value).__name__)
def test_a_folder_that_is_no_path_is_refused(folder):
    with pytest.raises(InvalidRequest, match=r"folder|path"):
        holdfast.open(folder, world=Place().world)


@pytest.mark.parametrize("body_type", [5, "Order", [1]], ids=lambda value: type(value).__name__)
def test_a_body_type_that_is_none_is_refused_and_the_folder_is_free_again(place, body_type):
    place.q.close()
    with pytest.raises(InvalidRequest, match="body_type"):
        place.open(body_type=body_type)
    place.open().close()


def test_a_missing_folder_is_not_made_where_it_must_exist():
    place = Place()
    with pytest.raises(NotAQueue, match=r"/data/none does not exist.*create=True"):
        holdfast.open("/data/none", create=False, world=place.world)
    assert not place.disk.exists("/data/none")
    place.disk.make_folder("/data/none")
    with pytest.raises(NotAQueue, match="/data/none holds no queue"):
        holdfast.open("/data/none", create=False, world=place.world)
    assert place.disk.names("/data/none") == []
    assert not place.q.closed


def test_a_file_is_no_folder_for_a_queue(tmp_path):
    file = tmp_path / "jobs"
    file.write_text("mine")
    for create in (True, False):
        with pytest.raises(NotAQueue, match="jobs"):
            holdfast.open(file, create=create)
        with pytest.raises(HoldfastError, match="jobs"):
            holdfast.open(file / "inner", create=create)
    assert file.read_text() == "mine"


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(NotAQueue, match=r"thesis\.txt.*new or empty folder"):
        holdfast.open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_queue_is_not_made_inside_a_log(tmp_path):
    from holdfast.storage import open_log

    open_log(str(tmp_path / "log")).close()
    before = sorted(path.name for path in (tmp_path / "log").iterdir())
    with pytest.raises(NotAQueue):
        holdfast.open(tmp_path / "log")
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InvalidRequest, match="must be able to write"):
        holdfast.open(tmp_path / "jobs")
    with pytest.raises(InvalidRequest, match="must be able to write"):
        holdfast.open(tmp_path)
    tmp_path.chmod(0o700)
    holdfast.open(tmp_path / "jobs").close()


# Together the four try every call.
@pytest.mark.parametrize(("first", "code"), [(1, errno.EACCES), (2, errno.EROFS), (3, errno.EIO), (4, errno.ENOSPC)])
@pytest.mark.slow
def test_whatever_call_fails_at_opening_the_error_is_clear_and_the_next_try_succeeds(first, code):
    place = Place(max_attempts=1, dedup_window_ms=1_000, segment_bytes=4_096, frame_bytes=1_024)
    place.q.put_many([b"a", NewMessage(body=b"b", delay=100), NewMessage(body=b"c", dedup_id="c")])
    place.q.get(timeout=0).reject()
    gc.collect()
    gc.freeze()  # or each look for garbage below would be one at all that other tests have left
    try:
        _open_with_each_call_failing(place, first, code)
    finally:
        gc.unfreeze()


def _open_with_each_call_failing(place: Place, first: int, code: int) -> None:
    for nth in range(first, 1_000, 4):
        place.disk = place.disk.kill()
        place.disk.faults.fail(nth, code, sticky=True)
        try:
            place.open(max_attempts=2 + nth % 2).close()
        except HoldfastError as error:
            assert FOLDER in str(error)
        survived = not place.disk.faults.fired
        place.disk.faults.clear()
        gc.collect()
        place.q = place.open()
        assert (place.q.stats().delayed, place.q.stats().dead) == (1, 1)
        assert [m.body for m in place.q.peek(9)] == [b"c"]
        place.q.close()
        if survived:
            return
    pytest.fail("opening never succeeded")


@pytest.mark.slow
def test_one_failing_call_at_opening_leaves_nothing_owned():
    nth = 0
    while True:
        nth += 1
        place = Place(segment_bytes=4_096, frame_bytes=1_024)
        place.q.put_many([b"a", NewMessage(body=b"b", delay=100)])
        place.q.close()
        place.disk.faults.fail(nth, errno.EIO, sticky=False)
        try:
            q = place.open(max_attempts=3)
        except HoldfastError:
            assert place.disk.faults.fired
            place.disk.faults.clear()
        else:
            place.disk.faults.clear()
            q.close()
        place.open().close()
        if not place.disk.faults.fired:
            return


@pytest.mark.slow
def test_a_failing_close_lets_go_of_everything():
    nth = 0
    while True:
        nth += 1
        place = Place(segment_bytes=4_096, frame_bytes=1_024)
        place.q.put_many([b"a", NewMessage(body=b"b", delay=100), NewMessage(body=b"c", dedup_id="c")])
        place.q.get(timeout=0).reject()
        place.disk.faults.fail(nth, errno.EIO, sticky=True)
        fired_before = len(place.disk.faults.fired)
        try:
            place.q.close()
        except HoldfastError:
            assert place.disk.faults.fired
        place.disk.faults.clear()
        q = place.open()
        assert [m.body for m in q.peek(9)] == [b"c"]
        q.close()
        if len(place.disk.faults.fired) == fired_before:
            return


def test_a_disk_without_room_refuses_messages_and_lets_work_go_on():
    place = Place()
    place.q.put_many([b"a", b"b"])
    m = place.q.get(timeout=0)
    place.disk.faults.fail(1, errno.ENOSPC, sticky=True, calls=frozenset({"allocate", "write"}))
    with pytest.raises(DiskFull):
        for _ in range(100):
            place.q.put(bytes(1_000_000))
    m.ack()
    place.q.get(timeout=0).ack()
    place.disk.faults.clear()
    place.q.put(b"c")


def test_a_second_opening_is_told_who_owns_the_folder(tmp_path):
    with holdfast.open(tmp_path / "jobs") as q:
        q.put(b"x")
        with pytest.raises(Busy, match=rf"jobs is owned by process {os.getpid()} .*Close it there"):
            holdfast.open(tmp_path / "jobs", share=False)
        assert q.get(timeout=0).body == b"x"
    holdfast.open(tmp_path / "jobs").close()


def test_another_process_is_told_the_pid_of_the_owner(tmp_path):
    opening = (
        "import holdfast, sys\n"
        "try: holdfast.open(sys.argv[1], share=False)\n"
        "except holdfast.Busy as error: print(error)"
    )
    with holdfast.open(tmp_path / "jobs"):
        done = subprocess.run([sys.executable, "-c", opening, str(tmp_path / "jobs")], capture_output=True, text=True)
    assert f"process {os.getpid()} " in done.stdout, done.stderr


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"priority_weights": 5}', b'{"lease_ms": "long"}',
                b'{"unheard_of": 1}', b'{"lease_ms": -5}', b'{"lease_ms": 5', bytes(100)],
    ids=repr,
)  # fmt: skip
def test_damaged_settings_are_reported_with_their_file(place, content):
    place.q.put(b"x")
    place.q.close()
    file = place.disk.open(SETTINGS, write=True, create=True)
    file.truncate(0)
    file.write(0, [content])
    file.close()
    before = place.files()
    with pytest.raises(HoldfastError) as caught:
        place.open()
    assert isinstance(caught.value, CorruptData | BadSettings)
    assert "settings.json" in str(caught.value)
    after = place.files()
    after.pop(f"{FOLDER}/reserve")  # made by the first opening that finds topics; it holds nothing
    assert after == before
    place.disk.remove(SETTINGS)
    repair_folder(FOLDER, place.world)
    place.q = place.open()
    assert bodies(place.q) == [b"x"]


# Closed


VERBS: dict[str, Callable[[Any], object]] = {
    "put": lambda q: q.put(b"x"),
    "put with a key": lambda q: q.put(b"x", key="k"),
    "put later": lambda q: q.put(b"x", delay=5),
    "put once": lambda q: q.put(b"x", dedup_id="d"),
    "put_many": lambda q: q.put_many([b"x"]),
    "put nothing": lambda q: q.put_many([]),
    "get": lambda q: q.get(),
    "get for a time": lambda q: q.get(timeout=1),
    "get_nowait": lambda q: q.get_nowait(),
    "get_many": lambda q: q.get_many(5),
    "resume": lambda q: q.resume("jobs-0-0@1"),
    "peek": lambda q: q.peek(),
    "cancel": lambda q: q.cancel("jobs-0-0"),
    "cancel later": lambda q: q.cancel("jobs-0-d0"),
    "seek": lambda q: q.seek("start"),
    "messages": lambda q: list(q.messages("ready")),
    "delayed": lambda q: list(q.messages("delayed")),
    "dead": lambda q: q.dead.list(),
    "groups": lambda q: q.dead.groups(),
    "show": lambda q: q.dead.show("jobs.dlq-0-0"),
    "redrive": lambda q: q.dead.redrive(),
    "purge": lambda q: q.dead.purge(),
    "stats": lambda q: q.stats(),
    "compact": lambda q: q.compact(),
    "sync": lambda q: q.sync(),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("used", [False, True])
def test_a_closed_queue_says_so(verb, used):
    place = Place()
    if used:  # with delays, dedup ids and dead letters at hand
        place.q.put_many([b"a", NewMessage(body=b"b", delay=5), NewMessage(body=b"c", dedup_id="c")])
        place.q.get(timeout=0).reject()
    place.q.close()
    before = place.files()
    with pytest.raises(Closed, match=f"the queue in {FOLDER} is closed"):
        VERBS[verb](place.q)
    assert place.files() == before


def test_a_message_of_a_closed_queue_says_so(place):
    place.q.put_many([b"x", b"y"])
    taken = place.q.get_many(2)
    taken[0].state.save(1)
    place.q.close()
    _assert_closed(place.q, *taken)
    assert taken[0].body == b"x"
    assert taken[0].lost
    taken.clear()
    gc.collect()
    place.q = place.open()
    assert place.q.stats().ready == 2


def _assert_closed(q: Any, m: Any, other: Any) -> None:
    for call in (
        m.ack, m.nack, m.defer, m.reject, m.extend, lambda: m.ack(durability="fsync"), lambda: m.state.save(2),
        lambda: q.ack_many([m, other]), lambda: q.nack_many([m]),
    ):  # fmt: skip
        with pytest.raises(Closed, match="closed"):
            call()


def test_closing_twice_is_fine(place):
    place.q.close()
    place.q.close()
    assert place.q.closed
    assert list(place.q) == []
    assert "closed" in repr(place.q)


# Bodies of a type


def test_a_body_that_does_not_fit_its_type_is_refused():
    place = Place()
    place.q.close()
    place.q = place.open(body_type=dict[str, int])
    refused(place, lambda: place.q.put({"a": "b"}), "does not fit", kind=BadBody)
    refused(place, lambda: place.q.put(b"{}"), "does not fit", kind=BadBody)
    refused(place, lambda: place.q.put_many([{"a": 1}, {"a": object()}]), "does not fit", kind=BadBody)
    place.reopen(body_type=str)
    refused(place, lambda: place.q.put(b"bytes"), "must be str")
    refused(place, lambda: place.q.put("\ud800"), "text", kind=BadBody)


def test_empty_says_how_long_it_waited_and_where(place):
    with pytest.raises(Empty, match=f"no message is ready in {FOLDER}"):
        place.q.get_nowait()
    with pytest.raises(Empty, match=f"became ready within 2.5 s in {FOLDER}"):
        place.q.get(timeout=2.5)
    assert PLAIN["backoff_ms"] == 100
