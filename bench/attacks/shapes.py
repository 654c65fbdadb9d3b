"""What a single caller can try. Each attack runs until its process is killed.

An attack names the token it uses: none, a producer's, a consumer's or an admin's, always limited to the topics of
team a. Team b must not notice any of them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import resource
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, Final, NamedTuple

import zstandard

from bench.attacks.wire import Connection, Place, call

Attack = Callable[[Place], Awaitable[None]]


class Shape(NamedTuple):
    """An attack, and with whose rights it comes."""

    name: str
    role: str  # none, producer, consumer, admin
    attack: Attack


SHAPES: Final[list[Shape]] = []

_GONE = (ConnectionError, asyncio.IncompleteReadError, OSError)


def shape(role: str) -> Callable[[Attack], Attack]:
    def add(attack: Attack) -> Attack:
        SHAPES.append(Shape(attack.__name__.replace("_", " "), role, attack))
        return attack

    return add


def run(name: str, place: Place) -> None:
    """Run an attack until this process is killed."""
    chosen = next(each for each in SHAPES if each.name == name)

    async def attack() -> None:
        await chosen.attack(place)

    raise_files()
    asyncio.run(attack())


def raise_files() -> None:
    """Raise the limit on open files as far as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _each(place: Place, connections: int, use: Callable[[Connection, int], Awaitable[Any]]) -> None:
    """Use many connections at once, each in a loop; reopen one that the server closes."""

    async def one(number: int) -> None:
        while True:
            with contextlib.suppress(*_GONE):
                connection = await Connection.open(place)
                try:
                    while True:
                        await use(connection, number)
                finally:
                    connection.close()
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        for number in range(connections):
            group.create_task(one(number))


async def _again(call_once: Callable[[], Awaitable[Any]]) -> None:
    while True:
        with contextlib.suppress(*_GONE):
            await call_once()
        await asyncio.sleep(0)


# Without a token.


@shape("none")
async def idle_connections(place: Place) -> None:
    """Many connections that say nothing."""

    async def hold(connection: Connection, _: int) -> None:
        await connection.reader.readexactly(1)

    await _each(place, 3_000, hold)


@shape("none")
async def slow_headers(place: Place) -> None:
    async def trickle(connection: Connection, _: int) -> None:
        for byte in connection.head("GET", "/v1/topics", {"x-long": "y" * 1000}):
            connection.writer.write(bytes([byte]))
            await connection.writer.drain()
            await asyncio.sleep(1)

    await _each(place, 500, trickle)


@shape("none")
async def refused_for_want_of_a_token(place: Place) -> None:
    await _each(place, 64, lambda each, _: each.call("POST", "/v1/queues/b.jobs/dequeue", {"wait": 0}))


@shape("none")
async def garbage(place: Place) -> None:
    async def send(connection: Connection, _: int) -> None:
        connection.writer.write(b"\x16\x03\x01\x02 nothing like HTTP \r\n\r\n")
        await connection.reader.read()
        raise ConnectionResetError

    await _each(place, 64, send)


# A producer.


def _packed_lines(lines: int) -> bytes:
    return zstandard.compress(b'{"body":""}\n' * lines)


@shape("producer")
async def a_bomb_of_a_million_lines(place: Place) -> None:
    packed = _packed_lines(1_000_000)
    await _again(
        lambda: call(
            place,
            "POST",
            "/v1/queues/a.jobs/batch",
            packed,
            content_encoding="zstd",
            content_type="application/x-ndjson",
        )
    )


@shape("producer")
async def as_many_lines_as_are_allowed(place: Place) -> None:
    lines = b'{"body":""}\n' * 100_000
    await _again(lambda: call(place, "POST", "/v1/queues/a.jobs/batch", lines, content_type="application/x-ndjson"))


def _batch(messages: int) -> bytes:
    return b'{"messages":[' + b",".join([b'{"body":"eHh4"}'] * messages) + b"]}"


@shape("producer")
async def json_of_many_messages(place: Place) -> None:
    body = _batch(100_000)
    await _again(lambda: call(place, "POST", "/v1/queues/a.jobs/batch", body, content_type="application/json"))


@shape("producer")
async def json_of_too_many_messages(place: Place) -> None:
    body = _batch(1_500_000)
    await _again(lambda: call(place, "POST", "/v1/queues/a.jobs/batch", body, content_type="application/json"))


@shape("producer")
async def json_with_a_million_headers(place: Place) -> None:
    headers = [{"name": f"n{i}", "value": ""} for i in range(300_000)]
    body = json.dumps({"messages": [{"body": "", "headers": headers}]}).encode()
    await _again(lambda: call(place, "POST", "/v1/queues/a.jobs/batch", body, content_type="application/json"))


@shape("producer")
async def a_list_nested_as_deep_as_it_goes(place: Place) -> None:
    body = b"[" * 10_000_000
    await _again(lambda: call(place, "POST", "/v1/queues/a.jobs/batch", body, content_type="application/json"))


@shape("producer")
async def chunks_of_one_byte(place: Place) -> None:
    async def send(connection: Connection, _: int) -> None:
        connection.writer.write(connection.head("POST", "/v1/queues/a.jobs/enqueue", {"transfer-encoding": "chunked"}))
        piece = b"1\r\nx\r\n" * 10_000
        for _ in range(100):
            connection.writer.write(piece)
            await connection.writer.drain()
        connection.writer.write(b"0\r\n\r\n")
        await connection.answer()

    await _each(place, 1, send)


@shape("producer")
async def large_raw_bodies(place: Place) -> None:
    body = b"x" * 9_000_000
    await _each(place, 4, lambda each, _: each.call("POST", "/v1/queues/a.jobs/enqueue", body))


@shape("producer")
async def a_flood_of_small_messages(place: Place) -> None:
    await _each(place, 64, lambda each, _: each.call("POST", "/v1/queues/a.jobs/enqueue", b"x"))


@shape("producer")
async def requests_ahead_of_answers(place: Place) -> None:
    async def send(connection: Connection, _: int) -> None:
        for _ in range(100):
            await connection.send("POST", "/v1/queues/a.jobs/enqueue", b"x")
        for _ in range(100):
            await connection.answer()

    await _each(place, 16, send)


@shape("producer")
async def many_refused_acts(place: Place) -> None:
    long = "x" * 5_000
    await _each(
        place, 32, lambda each, _: each.call("POST", f"/v1/queues/b.jobs/seek?correlation={long}", {"to": "start"})
    )


# A consumer.


@shape("consumer")
async def long_polls(place: Place) -> None:
    await _each(place, 3_000, lambda each, _: each.call("POST", "/v1/queues/a.empty/dequeue", {"wait": 60}))


@shape("consumer")
async def new_group_names(place: Place) -> None:
    names = count()
    await _each(
        place,
        8,
        lambda each, _: each.call("POST", "/v1/queues/a.empty/dequeue", {"group": f"g{next(names)}", "wait": 0}),
    )


@shape("consumer")
async def streams_that_beat_often(place: Place) -> None:
    async def watch(connection: Connection, _: int) -> None:
        await connection.send("GET", "/v1/queues/a.empty/watch?stats=0.1")
        while await connection.reader.read(65_536):
            pass
        raise ConnectionResetError

    await _each(place, 1_500, watch)


@shape("producer")
async def bodies_that_never_end(place: Place) -> None:
    async def hold(connection: Connection, _: int) -> None:
        size = 60 * 1024 * 1024
        head = {"content-length": str(size), "content-type": "application/json"}
        connection.writer.write(connection.head("POST", "/v1/queues/a.jobs/batch", head))
        for _ in range(59):
            connection.writer.write(b" " * (1024 * 1024))
            await connection.writer.drain()
        await connection.reader.read()
        raise ConnectionResetError

    await _each(place, 50, hold)


@shape("consumer")
async def searches(place: Place) -> None:
    path = "/v1/queues/a.many/messages?where=size%20%3E%201000000&limit=10"
    await _each(place, 12, lambda each, _: each.call("GET", path))


@shape("admin")
async def regular_expressions(place: Place) -> None:
    path = "/v1/queues/a.letters/messages?where=body%20~%20%22(a%2B)%2B%24%22"
    await _each(place, 2, lambda each, _: each.call("GET", path))


@shape("consumer")
async def a_flood_of_empty_takes(place: Place) -> None:
    await _each(place, 64, lambda each, _: each.call("POST", "/v1/queues/a.empty/dequeue", {"wait": 0}))


@shape("consumer")
async def a_flood_of_statistics(place: Place) -> None:
    await _each(place, 64, lambda each, _: each.call("GET", "/v1/queues/a.many/stats"))


@shape("consumer")
async def large_takes(place: Place) -> None:
    await _each(
        place,
        4,
        lambda each, _: each.call("POST", "/v1/queues/a.many/dequeue", {"count": 10_000, "wait": 0, "lease": 1}),
    )


@shape("consumer")
async def one_take_over_expired_messages(place: Place) -> None:
    await _each(place, 2, lambda each, _: each.call("POST", "/v1/queues/a.expired/dequeue", {"wait": 0}))


@shape("consumer")
async def acks_of_made_up_receipts(place: Place) -> None:
    receipts = [f"a.many-0-{i}@10000000001" for i in range(10_000)]
    await _each(place, 4, lambda each, _: each.call("POST", "/v1/queues/a.many/ack", {"receipts": receipts}))


# Callers whose heads the server knows, as it does all above that repeat themselves; and those who abuse that.


@shape("producer")
async def heads_that_push_out_those_of_others(place: Place) -> None:
    names = count()

    async def send(connection: Connection, _: int) -> None:
        agent = f"agent-{next(names)}"
        for _ in range(3):  # a head is kept when it comes for the second time
            await connection.call("POST", "/v1/queues/a.jobs/enqueue", b"x", user_agent=agent)

    await _each(place, 32, send)


@shape("consumer")
async def known_heads_with_broken_bodies(place: Place) -> None:
    async def send(connection: Connection, _: int) -> None:
        for body in (b'{"wait":0}', b'{"wait":0', b'{"wait":9e99}', b'{"other":1}', b"\xff" * 32_000):
            await connection.call("POST", "/v1/queues/a.empty/dequeue", body, content_type="application/json")

    await _each(place, 32, send)


_RUNS: Final = {"accept": "application/msgpack;runs=1", "content_type": "application/json"}


@shape("consumer")
async def a_flood_of_takes_in_runs(place: Place) -> None:
    body = json.dumps({"count": 100, "wait": 0, "lease": 1}).encode()
    await _each(place, 32, lambda each, _: each.call("POST", "/v1/queues/a.many/dequeue", body, **_RUNS))


@shape("consumer")
async def acks_of_made_up_runs(place: Place) -> None:
    token = base64.b64encode(b"\x02" + bytes(28)).decode()
    body = json.dumps(
        {"receipts": [], "runs": [{"partition": 0, "token": token, "offsets": list(range(10_000))}]}
    ).encode()
    await _each(place, 4, lambda each, _: each.call("POST", "/v1/queues/a.many/ack", body, **_RUNS))


@shape("consumer")
async def acks_of_many_small_made_up_runs(place: Place) -> None:
    token = base64.b64encode(b"\x02" + bytes(28)).decode()
    runs = [{"partition": 0, "token": token, "offsets": [offset]} for offset in range(10_000)]
    body = json.dumps({"receipts": [], "runs": runs}).encode()
    await _each(place, 4, lambda each, _: each.call("POST", "/v1/queues/a.many/ack", body, **_RUNS))


# An admin of team a's topics.


@shape("admin")
async def ten_thousand_partitions(place: Place) -> None:
    await _again(lambda: call(place, "POST", "/v1/topics/a.grows/partitions", {"count": 9_000}))


@shape("admin")
async def topics_without_end(place: Place) -> None:
    names = count()
    await _each(place, 8, lambda each, _: each.call("PUT", f"/v1/queues/a.t{next(names)}", {}))


@shape("admin")
async def lock_waiters(place: Place) -> None:
    await _each(place, 1_000, lambda each, _: each.call("POST", "/v1/locks/a.lock/acquire", {"wait": 60}))
