"""Requests whose heads are known are answered as those that the parser reads, however their bytes come in.

Two servers get the same bytes, cut at the same places. One learns heads, the other never does.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.env import real_world
from holdfast.local.aio.broker import open_broker_port_async
from holdfast.server.http.connection import HttpConnection
from holdfast.server.http.heads import KnownHeads, cut
from holdfast.server.server import Server, make_server
from holdfast.settings import BrokerSettings, ServerSettings

_RECEIPT = b"@receipt@"
_HOST = b"host: 127.0.0.1\r\n"
_ENQUEUE = b"POST /v1/queues/jobs/enqueue?durability=os HTTP/1.1\r\n"
_DEQUEUE = b"POST /v1/queues/jobs/dequeue HTTP/1.1\r\n"
_ACK = b"POST /v1/queues/jobs/ack HTTP/1.1\r\n"
_APPEND = b"POST /v1/topics/jobs/partitions/0/append?producer=%s&durability=os&sequence=%s HTTP/1.1\r\n"


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.ended = ""

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else None

    def set_write_buffer_limits(self, **_: Any) -> None: ...

    def write(self, content: bytes) -> None:
        self.written += content

    def is_closing(self) -> bool:
        return bool(self.ended)

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = self.ended or "eof"

    def close(self) -> None:
        self.ended = self.ended or "closed"

    def abort(self) -> None:
        self.ended = self.ended or "aborted"


class Side:
    """One of the servers, and a connection to it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.receipt = b"none"
        self.producer = b"1"

    def connect(self) -> None:
        self.wire = Wire()
        self.connection = HttpConnection(self.server.http, asyncio.get_running_loop())
        self.connection.connection_made(self.wire)  # type: ignore[arg-type]

    async def send(self, content: bytes) -> None:
        """Send without waiting for an answer."""
        if not self.wire.ended:
            self.connection.data_received(content)

    async def rest(self) -> None:
        """Until every request that is complete is answered, or its connection is closed and its call has ended."""
        while (current := self.connection._current) is not None and current.complete and not self.wire.ended:
            await asyncio.sleep(0)
        if self.wire.ended and (task := self.connection.task) is not None:
            # A put of this connection may still be on its way to the disk. The next example makes the topic anew,
            # and the put must not land in that one.
            if self.connection._incoming is not None:
                self.connection._incoming.lose()
            await asyncio.wait([task])
        found = re.findall(rb'"receipt":"([^"]+)"', self.wire.written)
        self.receipt = found[-1] if found else self.receipt

    def said(self) -> tuple[bytes, str]:
        """Everything that was answered, without what differs from server to server."""
        text = re.sub(rb'(x-correlation-id: |content-length: |"correlation_id":")[^"\r]+', rb"\1", self.wire.written)
        text = re.sub(rb'"(receipt|receipts|timestamp_ns|fence)":(\[?"[^"]*"\]?|\d+)', rb'"\1":', text)
        return text.replace(self.producer, b"").replace(self.server.service.folder.encode(), b""), self.wire.ended


Pair = tuple[Side, Side]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as found:
        yield found


@pytest.fixture(scope="module")
def sides(runner: asyncio.Runner) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory() as folder:
        made = [runner.run(_server(Path(folder) / name)) for name in ("learns", "parses")]
        made[1].http.heads = KnownHeads()  # which nobody fills
        learning, parsing = Side(made[0]), Side(made[1])
        yield learning, parsing
        for server in made:
            runner.run(server.close())


async def _server(folder: Path) -> Server:
    port = await open_broker_port_async(folder, settings=BrokerSettings())
    return make_server(real_world(), port, ServerSettings(port=0))


def _with(line: bytes, body: bytes, *, more: bytes = b"", length: bytes | None = None, host: bytes = _HOST) -> bytes:
    size = b"%d" % len(body) if length is None else length
    return line + host + more + b"content-length: " + size + b"\r\n\r\n" + body


_JSON = b"content-type: application/json\r\n"
_BODIES = st.binary(max_size=40) | st.sampled_from([b"\r\n\r\n", _ENQUEUE + _HOST, b"content-length: 3\r\n\r\nabc"])
_GOOD = st.one_of(
    st.builds(lambda body: _with(_ENQUEUE, body), _BODIES),
    st.builds(lambda body: _with(_ENQUEUE, body).replace(b"content-l", b"Content-L"), _BODIES),
    st.sampled_from(
        [
            _with(_ENQUEUE.replace(b"=os", b"=fsync"), b"abc"),
            _with(_DEQUEUE, b'{"wait":0}', more=_JSON),
            _with(_DEQUEUE, b'{"attempt_id":"a","wait":0}', more=_JSON),
            _with(_DEQUEUE, b'{"count":2}', more=_JSON),
            _with(_ACK, b'{"receipts":["@receipt@"]}', more=_JSON),
            _with(_ACK, b'{"receipts":["wrong"]}', more=_JSON),
            _with(_ACK, b"{", more=_JSON),
        ]
    ),
    st.builds(
        lambda line, number: _with(line % (b"@producer@", b"%d" % number), b'{"bodies":["YQ=="]}', more=_JSON),
        st.sampled_from([_APPEND, _APPEND.replace(b"=os", b"=fsync")]),
        st.integers(0, 3),
    ),
)
_ODD = st.sampled_from(
    [
        _with(_ENQUEUE, b"abc", length=b"03"),
        _with(_ENQUEUE, b"abc", length=b"+3"),
        _with(_ENQUEUE, b"abc", length=b"3 "),
        _with(_ENQUEUE, b"abc", length=b"2"),
        _with(_ENQUEUE, b"abc", length=b"4"),
        _with(_ENQUEUE, b"abc", length=b"99999999999"),
        _with(_ENQUEUE, b"abc", more=b"content-length: 3\r\n"),
        _with(_ENQUEUE, b"abc", more=b"CONTENT-LENGTH: 4\r\n"),
        _with(_ENQUEUE, b"abc", more=b"transfer-encoding: chunked\r\n"),
        _with(_ENQUEUE, b"abc", more=b"connection: close\r\n"),
        _with(_ENQUEUE, b"abc", more=b"connection: keep-alive\r\n"),
        _with(_ENQUEUE, b"abc", more=b"x-other: 1\r\n"),
        _with(_ENQUEUE, b"abc", more=b"expect: 100-continue\r\n"),
        _with(_ENQUEUE, b"abc", more=_HOST),
        _with(_ENQUEUE, b"abc", host=b""),
        _with(_ENQUEUE, b"abc", host=b"host: elsewhere.example\r\n"),
        _with(_ENQUEUE, b"abc", host=b"host: 127.0.0.1\n"),
        _with(_ENQUEUE, b"abc", host=b"host:\r\n 127.0.0.1\r\n"),
        _with(_ENQUEUE.replace(b"1.1", b"1.0"), b"abc"),
        _with(_ENQUEUE.replace(b"1.1", b"1.0"), b"abc", more=b"connection: keep-alive\r\n"),
        _with(_ENQUEUE.replace(b"POST", b"PUT"), b"abc"),
        _with(_ENQUEUE.replace(b"jobs", b"none"), b"abc"),
        _with(_ENQUEUE.replace(b"=os", b"=os&priority=300"), b"abc"),
        _with(_ENQUEUE.replace(b"=os", b"=os&key=a"), b"abc"),
        _with(_ENQUEUE.replace(b"=os", b"=os&sequence=1"), b"abc"),
        _with(_APPEND % (b"@producer@", b"01"), b'{"bodies":["YQ=="]}', more=_JSON),
        _with(_APPEND % (b"@producer@", b"1&sequence=2"), b'{"bodies":["YQ=="]}', more=_JSON),
        _with(_APPEND % (b"@producer@", b"9999999999"), b'{"bodies":["YQ=="]}', more=_JSON),
        _with(_APPEND.replace(b"&sequence=%s", b"") % b"@producer@", b'{"bodies":["YQ=="]}', more=_JSON),
        _ENQUEUE + _HOST + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"GET /v1/queues/jobs/peek?count=2 HTTP/1.1\r\n" + _HOST + b"\r\n",
        b"\r\n",
        b"\r",
        b"\n",
        b"nonsense\r\n\r\n",
    ]
)


@given(
    st.lists(_GOOD | _GOOD | _ODD, min_size=1, max_size=8),
    st.lists(st.integers(0, 2_000), max_size=6) | st.just(range(2_000)),
    st.booleans(),
)
def test_known_heads_are_answered_as_the_parser_answers(
    runner: asyncio.Runner, sides: Pair, requests: list[bytes], cuts: Any, apart: bool
) -> None:
    async def story() -> None:
        for side in sides:
            await _warm(side, requests)
        await _both(sides, lambda side: _stream(side, requests, cuts, apart=apart))
        learnt, parsed = (side.said() for side in sides)
        assert learnt == parsed

    runner.run(story())


async def _both(sides: Pair, run: Callable[[Side], Any]) -> None:
    for side in sides:
        side.connect()
        await run(side)


async def _warm(side: Side, requests: list[bytes]) -> None:
    """A queue with a few messages, and every head seen often enough to be known, if it can be."""
    side.connect()
    await _sent(side, b"DELETE /v1/topics/jobs HTTP/1.1\r\n" + _HOST + b"\r\n")
    await _sent(side, _with(b"PUT /v1/queues/jobs HTTP/1.1\r\n", b"{}", more=_JSON))
    side.receipt = b"none"
    side.wire.written = b""
    await _sent(side, _with(b"POST /v1/producers HTTP/1.1\r\n", b"{}", more=_JSON))
    (side.producer,) = re.findall(rb'"id":"(\d+)"', side.wire.written)
    for request in (*requests, *requests, *requests):
        side.connect()
        await _sent(side, _filled(side, request))
    side.connect()
    for body in (b"a", b"b", b"c"):
        await _sent(side, _with(_ENQUEUE, body))


async def _sent(side: Side, request: bytes) -> None:
    await side.send(request)
    await side.rest()


def _filled(side: Side, request: bytes) -> bytes:
    """The request with what this server gave: its last receipt, and the number of its producer."""
    request = request.replace(b"@producer@", side.producer)
    if _RECEIPT not in request:
        return request
    return _with(_ACK, b'{"receipts":["%b"]}' % side.receipt, more=_JSON)


async def _stream(side: Side, requests: list[bytes], cuts: Any, *, apart: bool) -> None:
    """Send the requests in one stream, cut at these places; if they come apart, at their ends, too."""
    filled = [_filled(side, request) for request in requests]
    content = b"".join(filled)
    ends = accumulate(map(len, filled)) if apart else ()
    places = sorted({0, *ends, *(place for place in cuts if place < len(content)), len(content)})
    for begin, end in pairwise(places):
        await _sent(side, content[begin:end])


def test_heads_are_learnt_at_the_second_sight_and_the_oldest_go_first(runner: asyncio.Runner, sides: Pair) -> None:
    side = sides[0]

    async def story() -> None:
        await _warm(side, [])
        for name in (b"one", b"two", b"three"):
            for seen in range(3):
                assert (_key(name) in side.server.app.heads._known) is (seen > 1)
                side.connect()
                await _sent(side, _named(name))

    side.server.app.heads._known.clear()
    most, side.server.app.heads._most = side.server.app.heads._most, 2
    try:
        runner.run(story())
    finally:
        side.server.app.heads._most = most
    assert list(side.server.app.heads._known) == [_key(b"two"), _key(b"three")]


def _named(name: bytes) -> bytes:
    return _with(_ENQUEUE, b"abc", more=b"user-agent: %b\r\n" % name)


def _key(name: bytes) -> bytes:
    return _cut(_named(name))


@pytest.mark.parametrize(
    "more", [b"x-correlation-id: a\r\n", b"traceparent: a\r\n", b"user-agent: %b\r\n" % bytes(5_000)]
)
def test_heads_that_differ_from_call_to_call_or_are_long_are_not_kept(
    runner: asyncio.Runner, sides: Pair, more: bytes
) -> None:
    side = sides[0]
    before = dict(side.server.app.heads._known)

    async def story() -> None:
        await _warm(side, [_with(_ENQUEUE, b"abc", more=more.replace(b"\0", b"a"))])

    runner.run(story())
    assert set(side.server.app.heads._known) - set(before) <= {_cut(_with(_ENQUEUE, b"abc"))}


def _cut(request: bytes) -> bytes:
    found = cut(request)
    assert found is not None
    return found.key
