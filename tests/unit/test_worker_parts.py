"""What a worker is made of: slots, backoff, time limits, the health page."""

from __future__ import annotations

import http.client
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast import InvalidRequest
from holdfast.env import ManualClock, SeededIds
from holdfast.worker.handling import HandlerRun, Runs
from holdfast.worker.sources import Backoff, Slots
from tests.unit.workers import PATIENCE_S, Place, eventually


def test_one_lane_has_all_slots():
    slots = Slots(3, ["a"])
    assert slots.take("a", 2) == 2
    assert slots.take("a", 10) == 1
    slots.give("a", 2)
    assert slots.take("a", 10) == 2


def test_the_last_slot_of_a_lane_is_never_taken_by_another():
    slots = Slots(4, ["a", "b", "c"])
    assert slots.take("a", 10) == 2
    assert slots.take("b", 10) == 1
    assert slots.take("c", 10) == 1
    slots.give("a", 1)  # the shared one
    assert slots.take("b", 10) == 1
    slots.give("a", 1)
    assert slots.take("a", 10) == 1


def test_who_waits_for_a_slot_is_woken_by_one_or_by_the_end():
    slots = Slots(1, ["a"])
    slots.take("a", 1)
    answers: list[int] = []
    for give in (lambda: slots.give("a"), slots.close):
        waiting = threading.Thread(target=lambda: answers.append(slots.take("a", 1)))
        waiting.start()
        give()
        waiting.join(PATIENCE_S)
    assert answers == [1, 0]


def test_pauses_grow_up_to_a_limit_and_differ():
    backoff = Backoff(SeededIds(1))
    pauses = [backoff.next_s() for _ in range(2000)]
    for number, pause in enumerate(pauses[:9]):
        assert 0.05 * 2**number <= pause <= 0.1 * 2**number
    assert all(15 <= pause <= 30 for pause in pauses[9:])
    assert len(set(pauses)) > 1990
    backoff.reset()
    assert backoff.next_s() <= 0.1


def test_control_sleeps_until_the_first_deadline_that_there_can_be():
    clock, looks = ManualClock(), []
    runs = Runs(clock, 5_000, lambda: looks.append(clock.monotonic_ns()))
    one, other = (HandlerRun(None, None, "lane") for _ in range(2))  # type: ignore[arg-type]
    for run in (one, other):
        runs.add(run)
    assert runs.next_s() == 5
    clock.advance(seconds=1)
    assert runs.begin(one)
    clock.advance(seconds=3)
    assert runs.begin(other)
    assert runs.next_s() == 2
    clock.advance(seconds=2)
    assert runs.overdue() == [one]
    assert runs.overdue() == []
    assert runs.next_s() == 3
    assert runs.remove(one)
    assert not runs.remove(one)
    runs.close()
    assert not runs.begin(HandlerRun(None, None, "lane"))  # type: ignore[arg-type]
    assert runs.remove(other)
    assert len(looks) == 1  # nothing is left
    assert Runs(clock, None, lambda: None).next_s() is None


def test_a_message_is_settled_by_one_of_two_only():
    run = HandlerRun(None, None, "lane")  # type: ignore[arg-type]
    assert run.claim("control")
    assert not run.claim("handler")
    assert run.abandoned


def asked(port: int, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("GET", path)
    answer = connection.getresponse()
    try:
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_the_health_page_says_how_it_is(tmp_path: Path):
    place = Place(tmp_path)
    place.q.put(b"a")
    hang, hanging, go = threading.Event(), threading.Event(), threading.Event()

    class Hanging:
        name, closed = "hanging", False

        def receive_many(self, *arguments: Any, **options: Any) -> Any:
            if hang.is_set():
                hanging.set()
                assert go.wait(PATIENCE_S)
            return place.q.receive_many(*arguments, **options)

    worker = place.worker(lambda message: None, queue=Hanging(), health_port=0)
    with worker:
        port = worker.health_port
        assert port is not None
        eventually(lambda: worker.health().handled == 1)
        status, health = asked(port, "/healthz")
        assert (status, health["status"]) == (200, "running")
        assert (health["running"], health["handled"], health["failed"], health["restarts"]) == (0, 1, 0, 0)
        assert health["seconds_since_last_receive"] < 1
        hang.set()
        assert hanging.wait(PATIENCE_S)
        place.clock.advance(seconds=61)
        status, health = asked(port, "/healthz?now")
        assert (status, health["status"]) == (503, "silent")
        assert asked(port, "/")[0] == 404
        go.set()
    with pytest.raises(ConnectionRefusedError):
        asked(port, "/healthz")
    place.q.close()


def test_a_port_that_is_taken_is_refused_in_a_sentence(tmp_path: Path):
    place = Place(tmp_path)
    with place.worker(lambda message: None, health_port=0) as worker:
        other = place.worker(lambda message: None, health_port=worker.health_port)
        with pytest.raises(InvalidRequest, match="Address already in use; choose another port"):
            other.start()
    with pytest.raises(InvalidRequest, match="health_port=-1 cannot be used"):
        place.worker(lambda message: None, health_port=-1).start()
    place.q.close()
