"""The way of every call, without a server: which of several failed tries is told of, and how connections end."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.client import network
from holdfast.client.calling import Answer, AnswerLost, AnswerReader, Ask, Caller, Unsent
from holdfast.client.network import PlainThreadTransport, TaskNetwork, ThreadNetwork, run
from holdfast.client.opening import parse_address
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import Unavailable


@pytest.mark.parametrize("kind", [AnswerLost, Unsent])
def test_a_last_try_that_our_own_time_cuts_short_tells_less_than_the_one_before(kind: type[Exception]):
    world = World(clock=ManualClock(), disk=SimulatedDisk(), ids=SeededIds(1))
    caller = Caller(world, ThreadNetwork(world.clock), parse_address("http://127.0.0.1:1"), timeout_s=5)
    tries = 0

    async def attempt(left_s: float) -> Answer:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise kind("it hung up") from ConnectionResetError()
        world.clock.advance(seconds=left_s)
        raise kind("it timed out") from TimeoutError()

    with pytest.raises(Unavailable, match="it hung up"):
        run(caller.answered(Ask(method="GET", path="/healthz"), attempt))
    assert tries == 3


def test_a_connection_can_be_closed_whose_other_end_hung_up_before_it_had_read_all():
    ended = asyncio.Event()

    async def answer_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"no")
        writer.write_eof()
        while await reader.read(1 << 20):
            pass
        writer.close()
        await writer.wait_closed()
        ended.set()

    async def hung_up_on() -> None:
        async with await asyncio.start_server(answer_first, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            wire = await TaskNetwork(ManualClock()).connect(parse_address(f"http://127.0.0.1:{port}"), 60, None)
            await wire.send(b"x" * 50_000_000, 60)  # more than the system takes at once: the rest waits here
            assert [await wire.receive(60), await wire.receive(60)] == [b"no", b""]
            wire.close()
            await ended.wait()

    asyncio.run(hung_up_on())


def test_each_call_of_a_task_has_its_own_time_though_they_share_an_alarm():
    async def calls() -> None:
        ended = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while asked := await reader.read(100):
                await asyncio.sleep(float(asked))
                writer.write(b"answer")
            writer.close()
            ended.set()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            address = parse_address(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            wire = await TaskNetwork(ManualClock()).connect(address, 60, None)
            for _ in range(2):
                assert await wire.exchange(b"0", 60) == b"answer"  # sets an alarm that is much later than the next
                with pytest.raises(TimeoutError):
                    await wire.exchange(b"0.2", 0.02)
                assert await wire.receive(60) == b"answer"
                assert await wire.exchange(b"0", 0.05) == b"answer"
                assert await wire.exchange(b"0.2", 60) == b"answer"  # the alarm of the call before rings meanwhile
            wire.close()
            await ended.wait()

    asyncio.run(calls())


@pytest.fixture
def ends() -> Iterator[tuple[PlainThreadTransport, socket.socket]]:
    """A connection for threads, and its other end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield PlainThreadTransport(ours, 30), theirs


def test_a_call_sends_once_and_receives_once_and_asks_the_system_for_nothing_else():
    class Counted:
        def __init__(self, connection: socket.socket) -> None:
            self.connection, self.calls = connection, []

        def __getattr__(self, name: str) -> Any:
            self.calls.append(name)
            return getattr(self.connection, name)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        counted = Counted(ours)
        wire = PlainThreadTransport(counted, 30)
        assert ours.gettimeout() is None  # or each call would wait until the connection is ready before it uses it
        counted.calls.clear()
        for timeout_s in (30, 45.5, 29.9, 600):
            theirs.send(b"answer")
            assert run(wire.exchange(b"ask", timeout_s)) == b"answer"
        assert counted.calls == ["send", "recv"] * 4


def test_an_answer_that_does_not_come_in_time_is_a_timeout(ends, monkeypatch):
    monkeypatch.setattr(network, "_SLICE_S", 0.02)
    wire, theirs = ends
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        run(wire.receive(0.1))
    assert time.monotonic() - began >= 0.09
    theirs.send(b"late")
    assert run(wire.receive(30)) == b"late"


def test_an_answer_that_takes_longer_than_one_wait_of_the_system_is_received(ends, monkeypatch):
    monkeypatch.setattr(network, "_SLICE_S", 0.01)
    wire, theirs = ends
    answering = threading.Timer(0.1, theirs.send, [b"answer"])
    answering.start()
    assert run(wire.receive(30)) == b"answer"
    answering.join()


def test_what_the_system_does_not_take_at_once_is_sent_as_the_other_end_reads(ends):
    wire, theirs = ends
    content = os.urandom(5_000_000)
    read: list[bytes] = []

    def read_all() -> None:
        while sum(map(len, read)) < len(content):
            read.append(theirs.recv(100_000))
        theirs.send(b"answer")

    reading = threading.Thread(target=read_all)
    reading.start()
    run(wire.send(content, 30))
    assert run(wire.receive(30)) == b"answer"
    reading.join()
    assert b"".join(read) == content


def test_an_end_that_reads_nothing_ends_a_send_in_time(ends):
    wire, _ = ends
    with pytest.raises(TimeoutError):
        run(wire.send(bytes(50_000_000), 0.05))


_START = "HTTP/1.1 {} OK\r\ncache-control: no-store\r\n"
_TYPE = "content-type: application/msgpack\r\n"
_END = "content-length: 3\r\nx-correlation-id: a-1\r\n\r\n"


@pytest.mark.parametrize(
    "content",
    [
        _START.format(200) + _TYPE + _END + "abc",
        _START.format(201) + "content-type: application/json\r\n" + _END + "abc",
        _START.format(404) + _TYPE + _END + "abc",
        _START.format(200) + "connection: close\r\n" + _END + "abc",
        _START.format(200) + "retry-after: 1\r\n" + _END + "abc",
        _START.format(200).replace("1.1", "1.0") + _TYPE + _END + "abc",
        _START.format(200) + _TYPE + _END.replace("\r\n\r\n", "\r\nconnection: close\r\n\r\n") + "abc",
        _START.format(200) + "transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        "HTTP/1.1 204 No Content\r\nx-correlation-id: a-1\r\n\r\n",
        "HTTP/1.1 100 Continue\r\n\r\n" + _START.format(200) + _TYPE + _END + "abc",
    ],
)
def test_an_answer_is_read_alike_whether_it_comes_whole_or_byte_by_byte(content: str):
    whole, in_bytes = AnswerReader(), AnswerReader()
    for _ in range(3):  # what the parser found the first time is used from then on
        answer = whole.feed(content.encode())
        parts = [in_bytes.feed(bytes([byte])) for byte in content.encode()]
        assert answer is not None
        assert parts[-1] is not None
        assert parts[:-1] == [None] * (len(parts) - 1)
        for name in ("status", "body", "keep"):
            assert getattr(answer, name) == getattr(parts[-1], name)
        assert answer.headers.get("content-type") == parts[-1].headers.get("content-type")
        if not answer.keep:
            return
