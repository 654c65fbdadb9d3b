"""Takes whose answer does not reach the one who asked: they are asked for again, or given back; neither counts."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.server import served
from holdfast.server.served import ServedGroup
from holdfast.server.waiting import Attempts
from tests.integration.faults_gear import raw, request_of
from tests.integration.http_gear import Serving, serving
from tests.integration.process_gear import until

QUEUE = "/v1/queues/jobs"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path) as server:
        server.request("PUT", QUEUE, {"settings": {"lease_ms": 600_000}})
        yield server


def put(server: Serving, count: int = 1) -> None:
    for _ in range(count):
        server.post(f"{QUEUE}/enqueue", b"x")


def take(server: Serving, **wanted: Any) -> list[dict[str, Any]]:
    answer = server.post(f"{QUEUE}/dequeue", wanted)
    assert answer.status == 200, answer.body
    messages: list[dict[str, Any]] = answer.body["messages"]
    return messages


def test_a_take_that_is_asked_for_again_gives_the_same_messages_by_the_same_receipts(server: Serving):
    put(server, 4)
    first = take(server, count=2, attempt_id="one")
    assert take(server, count=2, attempt_id="one") == first
    assert [message["attempt"] for message in first] == [1, 1]
    other = take(server, count=1, attempt_id="two")
    assert other[0]["offset"] == 2
    server.post(f"{QUEUE}/ack", {"receipts": [first[0]["receipt"]]})
    assert take(server, count=2, attempt_id="one") == first[1:]
    server.post(f"{QUEUE}/ack", {"receipts": [first[1]["receipt"]]})
    assert [message["offset"] for message in take(server, count=2, attempt_id="one")] == [3]


def test_the_leases_of_a_take_that_is_asked_for_again_begin_anew(server: Serving):
    put(server)
    take(server, lease=60, attempt_id="one")
    (again,) = take(server, lease=3_000, attempt_id="one")
    assert again["lease_ms"] == 3_000_000
    (listed,) = server.get(f"{QUEUE}/messages", query={"phase": "leased"}).body["messages"]
    assert "attempts" not in listed


def test_an_id_is_that_of_one_take_of_one_group(server: Serving):
    put(server, 3)
    (mine,) = take(server, attempt_id="one")
    refused = server.post(f"{QUEUE}/dequeue", {"count": 2, "attempt_id": "one"})
    assert (refused.status, refused.code) == (400, "invalid_request")
    assert "was used to ask for 1 messages, and now for 2" in refused.body["error"]["message"]
    (theirs,) = take(server, attempt_id="one", group="billing")
    assert (mine["offset"], theirs["offset"]) == (0, 0)
    assert mine["receipt"] != theirs["receipt"]


@pytest.mark.parametrize("bad", ["", "a" * 129, "with space", "with\nline", "schön", 7])
def test_a_bad_id_is_refused_and_nothing_is_taken(server: Serving, bad: Any):
    put(server)
    refused = server.post(f"{QUEUE}/dequeue", {"attempt_id": bad})
    assert (refused.status, refused.code) == (400, "invalid_request")
    assert "attempt_id" in refused.body["error"]["message"]
    assert len(take(server)) == 1


def test_of_two_calls_by_one_id_that_wait_the_later_one_is_answered(server: Serving):
    wanted = json.dumps({"wait": 60, "attempt_id": "one"}).encode()
    waits = server.server.service.waits
    with raw(server.url) as earlier, raw(server.url) as later:
        earlier.sendall(request_of("POST", f"{QUEUE}/dequeue", wanted))
        until(lambda: waits.waiting == 1, "it waits")
        later.sendall(request_of("POST", f"{QUEUE}/dequeue", wanted))
        assert earlier.recv(100) == b""
        until(lambda: waits.waiting == 1, "the later one waits")
        put(server, 2)
        assert b'"jobs-0-0"' in later.recv(10_000)
    (again,) = take(server, attempt_id="one")
    assert (again["offset"], again["attempt"]) == (0, 1)


def test_what_is_remembered_is_bounded_for_each_caller(server: Serving):
    service = server.server.service
    service.attempts = Attempts(most_ids=3, most_messages=4)
    put(server, 12)
    for i in range(5):
        take(server, attempt_id=f"one-{i}")
    assert len(service.attempts) == 3
    assert [message["offset"] for message in take(server, attempt_id="one-4")] == [4]
    assert [message["offset"] for message in take(server, attempt_id="one-0")] == [5]
    take(server, count=4, attempt_id="many")
    assert len(service.attempts) == 1
    assert len(take(server, count=4, attempt_id="many")) == 4


def test_a_take_that_found_nothing_is_not_remembered(server: Serving):
    assert take(server, attempt_id="one") == []
    assert len(server.server.service.attempts) == 0


def test_a_waiter_that_goes_at_the_moment_of_arrival_costs_no_attempt(server: Serving, monkeypatch: pytest.MonkeyPatch):
    """The connection ends between the lease and the answer: the system takes the bytes, and nobody reads them."""
    leasing, waits = ServedGroup.take, server.server.service.waits

    with raw(server.url) as connection:

        async def take_and_go(*arguments: Any) -> Any:
            found = await leasing(*arguments)
            if found:
                connection.close()
            return found

        monkeypatch.setattr(ServedGroup, "take", take_and_go)
        connection.sendall(request_of("POST", f"{QUEUE}/dequeue", b'{"wait": 60}'))
        until(lambda: waits.waiting == 1, "it waits")
        put(server)
        until(lambda: not waits.waiting, "it was answered")
    (message,) = take(server, wait=30)
    assert message["attempt"] == 1


def test_a_client_that_goes_without_reading_its_answer_costs_no_attempt(server: Serving):
    put(server)
    with raw(server.url) as connection:
        connection.sendall(request_of("POST", f"{QUEUE}/dequeue", b"{}"))
        connection.recv(1, socket.MSG_PEEK)
    (message,) = take(server, wait=30)
    assert message["attempt"] == 1


def test_a_client_that_has_read_its_answer_and_goes_keeps_its_message(server: Serving):
    put(server)
    (message,) = take(server)
    with raw(server.url) as connection:
        connection.sendall(request_of("GET", "/healthz", b""))
        connection.recv(10_000)
    assert take(server) == []
    assert server.post(f"{QUEUE}/ack", {"receipts": [message["receipt"]]}).body == {"settled": 1}


def test_what_an_earlier_call_took_and_a_later_one_does_not_answer_with_is_given_back(
    server: Serving, monkeypatch: pytest.MonkeyPatch
):
    """The earlier one has its first hundred and goes on to the next when the later one takes those."""
    put(server, 1)
    server.post(f"{QUEUE}/batch", {"bodies": ["eA=="] * 149})
    reached, never = threading.Event(), server.run(_event())
    others = served.other_turns

    async def stuck() -> None:
        monkeypatch.setattr(served, "other_turns", others)
        reached.set()
        await never.wait()

    monkeypatch.setattr(served, "other_turns", stuck)
    with raw(server.url) as earlier:
        earlier.sendall(request_of("POST", f"{QUEUE}/dequeue", b'{"count": 200, "attempt_id": "one"}'))
        assert reached.wait(60)
        assert len(take(server, count=200, attempt_id="one")) == 50
        assert earlier.recv(100) == b""
    back = take(server, count=100, wait=30)
    assert [message["offset"] for message in back] == list(range(100))
    assert {message["attempt"] for message in back} == {1}


async def _event() -> asyncio.Event:
    return asyncio.Event()


def test_what_is_given_back_is_given_back_whole_though_its_call_is_ended_twice(
    server: Serving, monkeypatch: pytest.MonkeyPatch
):
    server.post(f"{QUEUE}/batch", {"bodies": ["eA=="] * 250})
    others = served.other_turns
    turns, ended = iter(range(1_000)), threading.Event()

    async def ends() -> None:
        """End the call while it takes its second hundred, and again while it gives back its first."""
        at = next(turns)
        if at in (1, 2) and not ended.is_set():
            if at == 2:
                ended.set()
            for connection in server.server.http.connections:
                if connection.task is not None:
                    connection.task.cancel()
        await others()

    monkeypatch.setattr(served, "other_turns", ends)
    with raw(server.url) as connection:
        connection.sendall(request_of("POST", f"{QUEUE}/dequeue", b'{"count": 250}'))
        assert connection.recv(100) == b""
    assert ended.is_set()
    until(lambda: server.get(f"{QUEUE}/stats").body["ready"] == 250, "all of them are ready again")
