"""The checks of histories, each with a story that it must find, and the same story as it should be."""

from __future__ import annotations

from typing import Any

import pytest

from tests.nemesis.checks import Left, check_errors, check_locks, check_queues, check_streams
from tests.nemesis.history import NEVER, Event, Recorder, Result, read_history

QUEUE, STREAM, LOCK = "nemesis-queue-0", "nemesis-stream-0", "nemesis-lock-0"


def told(op: str, key: str, began: float, ended: float = 0, out: Any = None, **given: Any) -> Event:
    error = str(given.pop("error", ""))
    result = Result.UNKNOWN if ended == NEVER else Result.FAIL if error else Result.OK
    return Event("c", op, key, given, out, result, error, began, ended or began + 1)


def put(began: float, ended: float = 0) -> Event:
    return told("put", QUEUE, began, ended, {}, body="m")


def got(fence: int, began: float) -> Event:
    return told("get", QUEUE, began, out={"body": "m", "fence": fence, "attempt": 1}, lease=10)


def settled(op: str, fence: int, began: float, ended: float = 0) -> Event:
    return told(op, QUEUE, began, ended, body="m", fence=fence)


@pytest.mark.parametrize(
    ("events", "left", "found"),
    [
        ([put(0), got(1, 2), settled("ack", 1, 4)], [], ""),
        ([put(0)], [(QUEUE, "m")], ""),
        ([put(0, NEVER)], [], ""),
        ([put(0), got(1, 2), settled("ack", 1, 4, NEVER)], [], ""),
        ([put(0)], [], "is gone"),
        ([put(0)], [(QUEUE, "m"), (QUEUE, "m")], "is stored 2 times"),
        ([], [(QUEUE, "m")], "never put"),
        ([put(0), got(1, 2), settled("ack", 1, 4)], [(QUEUE, "m")], "is still there"),
        ([put(0), got(1, 2), settled("ack", 1, 4), got(2, 6)], [], "after it was acked"),
        ([put(0), got(1, 2), got(2, 4), settled("ack", 1, 6), settled("ack", 2, 8)], [], "acked by the holders"),
        ([put(0), got(1, 2), got(2, 4), settled("ack", 1, 6, 9), settled("ack", 2, 8)], [], ""),  # it was repeated
        ([put(0), got(2, 2), got(1, 4), settled("ack", 2, 6)], [], "came after 2"),
        ([put(0), got(2, 2), got(2, 4), settled("ack", 2, 6)], [], "was given 2 times"),
        ([put(0), got(1, 2), settled("pin", 1, 3), got(2, 5)], [(QUEUE, "m")], "was held by 1"),
        ([put(0), got(1, 2), settled("pin", 1, 3), got(2, 15)], [(QUEUE, "m")], ""),
        ([put(0), got(1, 2), settled("pin", 1, 3), settled("nack", 1, 5), got(2, 5)], [(QUEUE, "m")], ""),
    ],
)  # fmt: skip
def test_queues(events: list[Event], left: list[tuple[str, str]], found: str):
    assert_found(check_queues(events, Left(queued=left)), found)


def sent(body: str, offset: int, began: float, ended: float = 0, op: str = "publish") -> Event:
    given = {"body": body, "number": int(body[1:]), **({"of": "k"} if op == "publish" else {})}
    return told(op, STREAM, began, ended, {"partition": 0, "offset": offset}, **given)


def polled(began: float, *offsets: int) -> Event:
    return told("poll", STREAM, began, out=[[0, offset, f"m{offset}"] for offset in offsets], session="s")


def committed(began: float, offset: int) -> Event:
    return told("commit", STREAM, began, offsets={"0": offset}, session="s")


def read(began: float, offset: int, *bodies: str) -> Event:
    return told("read", STREAM, began, out=[[offset + at, body] for at, body in enumerate(bodies)],
                partition=0, offset=offset)  # fmt: skip


@pytest.mark.parametrize(
    ("events", "bodies", "found"),
    [
        ([sent("m0", 0, 0), sent("m1", 1, 2)], ["m0", "m1"], ""),
        ([sent("m0", 0, 0, NEVER)], [], ""),
        ([sent("m0", 0, 0)], [], "where None is now"),
        ([sent("m0", 0, 0), sent("m1", 0, 2)], ["m1"], "where m1 is now"),  # an offset used twice
        ([sent("m0", 0, 0)], ["m0", "m0"], "2 times"),
        ([sent("m0", 1, 2), sent("m1", 0, 0)], ["m1", "m0"], ""),
        ([sent("m0", 1, 0), sent("m1", 0, 2)], ["m1", "m0"], "had been stored before"),
        ([sent("m1", 1, 0, op="send"), sent("m2", 0, 0, op="send")], ["m2", "m1"], "of a producer"),
        ([], ["m0"], "nobody sent"),
        ([sent("m0", 0, 0), sent("m1", 1, 2), polled(4, 0, 1), committed(6, 2), polled(8)], ["m0", "m1"], ""),
        ([sent("m0", 0, 0), polled(4, 0), committed(6, 1), polled(8, 0)], ["m0"], "was read after 1"),
        ([sent("m0", 0, 0), sent("m1", 1, 2), polled(4, 1), committed(6, 2)], ["m0", "m1"], "nobody read m0"),
        ([sent("m0", 0, 0), sent("m1", 1, 2), read(4, 0, "m0", "m1"), read(6, 1, "m1")], ["m0", "m1"], ""),
        ([sent("m0", 0, 0), sent("m1", 1, 2), read(4, 0, "m0", "m1"), read(6, 0, "m0")], ["m0", "m1"], "ended at 0"),
        ([sent("m0", 0, 0), read(4, 0, "m7")], ["m0"], "and is m0"),
    ],
)  # fmt: skip
def test_streams(events: list[Event], bodies: list[str], found: str):
    assert_found(check_streams(events, Left(stored={(STREAM, 0): list(enumerate(bodies))})), found)


def acquired(fence: int, began: float) -> Event:
    return told("acquire", LOCK, began, out={"fence": fence}, lease=5)


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([acquired(1, 0), acquired(2, 7)], ""),
        ([acquired(1, 0), told("release", LOCK, 2, fence=1), acquired(2, 3)], ""),
        ([acquired(1, 0), acquired(2, 2)], "was held by 1"),
        ([acquired(1, 0), told("keepalive", LOCK, 4, fence=1, lease=5), acquired(2, 7)], "was held by 1"),
        ([acquired(1, 0), told("keepalive", LOCK, 4, NEVER, fence=1, lease=5), acquired(2, 7)], ""),
    ],
)
def test_locks(events: list[Event], found: str):
    assert_found(check_locks(events, Left()), found)


def test_errors_that_nobody_expects_are_found():
    assert check_errors([told("get", QUEUE, 0, error="empty")], Left()) == []
    assert_found(check_errors([told("get", QUEUE, 0, error="internal")], Left()), "internal")
    assert_found(check_errors([told("get", QUEUE, 0, error="!KeyError: 1")], Left()), "KeyError")


def test_a_history_is_read_as_it_was_recorded(tmp_path):
    recorder = Recorder(tmp_path, "c")
    with recorder.call("get", "x", lease=1) as call:
        call.out = {"body": "m"}
    with recorder.call("get", "x"):
        raise KeyError("a bug")
    recorder.begin(Event("c", "put", "x", {"body": "n"}, began=1e12))
    recorder.close()
    first, second, third = read_history(tmp_path)
    assert (first.ok, first.out, first.given, first.began <= first.ended) == (True, {"body": "m"}, {"lease": 1}, True)
    assert (second.result, second.error) == (Result.UNKNOWN, "!KeyError: 'a bug'")
    assert (third.result, third.ended) == (Result.UNKNOWN, NEVER)


def assert_found(lines: list[str], what: str) -> None:
    assert any(what in line for line in lines) if what else not lines, lines
