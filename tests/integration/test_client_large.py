"""Large bodies through the client: they come out whole by every way, and are nowhere held as a whole."""

from __future__ import annotations

import asyncio
import hashlib
import io
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import MessageTooLarge, Unavailable, UnknownTopic, aio
from holdfast.api.contents import Contents
from tests.integration.http_gear import Serving, serving
from tests.integration.proxies import proxied

MIB = 1 << 20
BODY = bytes(range(256)) * 4096 * 3 + b"end"  # 3 MiB and 3 bytes


def pieces(count: int) -> Iterator[bytes]:
    for i in range(count):
        yield i.to_bytes(4, "big") * (MIB // 4)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data", max_request_bytes=100 * MIB) as found:
        yield found


@pytest.fixture
def broker(server: Serving) -> Iterator[Any]:
    with holdfast.connect(server.url) as found:
        found.create_topic("big", max_message_bytes=32 * MIB, backoff_ms=0)
        yield found


def check(message: Any) -> None:
    assert message.size == len(BODY)
    assert f"{len(BODY):,} bytes" in repr(message)
    assert b"".join(message.chunks(100_000)) == BODY
    with message.open() as file:
        assert file.read(10) == BODY[:10]
        assert file.read() == BODY[10:]
    assert message.raw == message.body == BODY


def test_a_large_body_is_whole_wherever_its_message_is_met(broker: Any):
    queue = broker.queue("big")
    queue.put(BODY)
    check(*queue.peek())
    check(*queue.messages())
    check(*broker.read("big"))
    message = queue.get(timeout=5)
    check(*queue.messages("leased"))
    check(queue.resume(message.receipt))
    check(message)
    message.reject("no")
    (letter,) = queue.dead.list()
    check(letter)
    check(queue.dead.show(letter.id))
    queue.put(BODY, delay=3600)
    check(*queue.messages("delayed"))


def test_a_large_body_can_still_be_read_behind_its_ack(broker: Any):
    queue = broker.queue("big")
    queue.put(BODY)
    message = queue.get(timeout=5)
    message.ack()
    check(message)


def test_a_consumer_of_a_stream_gets_large_bodies(broker: Any):
    broker.publish("big", BODY)
    with broker.consumer("big", group="g") as consumer:
        (message,) = consumer.poll(timeout=10)
        check(message)


def test_a_condition_that_is_a_function_sees_large_bodies(broker: Any):
    queue = broker.queue("big")
    queue.put_many([BODY, b"small"])
    assert [each.size for each in queue.messages(where=lambda each: each.body.endswith(b"end"))] == [len(BODY)]


def test_tasks_read_a_large_body_without_holding_up_each_other(server: Serving, broker: Any):
    broker.publish("big", BODY)

    async def story() -> None:
        async with aio.connect(server.url) as remote:
            queue = await remote.queue("big")
            message = await queue.get(timeout=5)
            assert b"".join([chunk async for chunk in message.chunks()]) == BODY
            assert await asyncio.to_thread(lambda: message.body) == BODY
            await message.ack()

    asyncio.run(story())


def test_a_body_that_breaks_off_says_so_and_can_be_read_again(server: Serving, broker: Any):
    broker.publish_stream("big", pieces(20))
    with proxied(server.url) as proxy, holdfast.connect(proxy.url, timeout=5) as remote:
        message = remote.queue("big").get(timeout=5)
        chunks = iter(message.chunks())
        next(chunks)
        proxy.cut_all()
        with pytest.raises(Unavailable, match="broke after"):
            list(chunks)
        assert b"".join(message.chunks()) == b"".join(pieces(20))


def test_a_connection_whose_body_was_not_read_to_its_end_is_not_used_again(broker: Any):
    broker.publish_stream("big", pieces(5))
    message = broker.queue("big").get(timeout=5)
    for _ in range(3):
        assert next(iter(message.chunks(10))) == b"\0" * 10
    with message.open() as file:
        file.read(10)
    assert message.raw == b"".join(pieces(5))


class Pipe(io.RawIOBase):
    """A file that can be read once."""

    def __init__(self, content: Iterator[bytes]) -> None:
        self._content = content

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = next(self._content, b"")
        buffer[: len(piece)] = piece
        return len(piece)


@pytest.mark.parametrize("kind", ["iterator", "file", "pipe", "small", "empty pieces"])
def test_a_stream_is_stored_as_one_message_with_its_options(broker: Any, kind: str):
    whole = b"small" if kind == "small" else b"".join(pieces(6))
    stream: Any = {
        "iterator": pieces(6),
        "file": io.BytesIO(b"skipped" + whole),
        "pipe": Pipe(whole[i : i + 1000] for i in range(0, len(whole), 1000)),
        "small": iter([b"sm", b"all"]),
        "empty pieces": iter([b"", *pieces(3), b"", bytearray(whole[3 * MIB :]), b""]),
    }[kind]
    if kind == "file":
        stream.seek(7)
    stored = broker.publish_stream("big", stream, key=b"\xff", headers={"a": "text", "b": b"\xfe"}, priority=2)
    assert (stored.topic, stored.offset, stored.duplicate) == ("big", 0, False)
    (message,) = broker.queue("big").get_many(10, timeout=5)
    assert (message.key, dict(message.headers), message.priority) == (b"\xff", {"a": "text", "b": b"\xfe"}, 2)
    assert message.raw == whole


def test_options_of_a_stream_that_are_text_need_no_form(broker: Any, monkeypatch: Any):
    monkeypatch.setitem(sys.modules, "python_multipart", None)
    monkeypatch.delitem(sys.modules, "holdfast.server.api.enqueue", raising=False)
    headers = [("a", "1:ü & ="), ("a", "")]
    broker.publish_stream("big", pieces(3), key="ké/?", headers=headers, priority=2, ttl=3600, correlation_id="c&d")
    (message,) = broker.queue("big").get_many(10, timeout=5)
    assert (message.key, message.priority, message.correlation_id) == ("ké/?", 2, "c&d")
    assert message.headers.all("a") == ["1:ü & =", ""]
    assert message.expires_at is not None
    assert message.raw == b"".join(pieces(3))
    at = message.timestamp + timedelta(hours=1)
    assert broker.publish_stream("big", pieces(3), at=at, dedup_id="once").delayed_id is not None
    assert broker.publish_stream("big", pieces(3), delay=3600, dedup_id="once").duplicate


def test_a_stream_of_tasks_is_stored_as_it_comes(server: Serving, broker: Any):
    async def slowly() -> AsyncIterator[bytes]:
        for piece in pieces(6):
            await asyncio.sleep(0)
            yield piece

    async def story() -> None:
        async with aio.connect(server.url) as remote:
            queue = await remote.queue("big")
            await queue.put_stream(slowly())
            await queue.put_stream(io.BytesIO(b"".join(pieces(6))))

    asyncio.run(story())
    first, second = broker.queue("big").get_many(10, timeout=5)
    assert first.raw == second.raw == b"".join(pieces(6))


def test_a_stream_that_fails_stores_nothing(broker: Any):
    def failing() -> Iterator[bytes]:
        yield from pieces(3)
        raise KeyError("torn")

    with pytest.raises(KeyError, match="torn"):
        broker.publish_stream("big", failing())
    with pytest.raises(holdfast.InvalidRequest, match="must yield bytes, not str"):
        broker.publish_stream("big", iter([*pieces(3), "text"]))
    assert broker.queue("big").stats().ready == 0


def test_a_stream_that_is_refused_is_not_read_to_its_end(broker: Any):
    read = []

    def counted(count: int) -> Iterator[bytes]:
        for piece in pieces(count):
            read.append(1)
            yield piece

    with pytest.raises(UnknownTopic):
        broker.publish_stream("nobody", counted(60))
    with pytest.raises(MessageTooLarge):
        broker.publish_stream("big", counted(95))
    assert len(read) < 140
    assert broker.queue("big").stats().ready == 0


def test_a_file_is_sent_again_after_a_cut_and_stored_once(server: Serving, broker: Any):
    whole = b"".join(pieces(20))
    with proxied(server.url) as proxy, holdfast.connect(proxy.url, timeout=5) as remote:
        proxy.cut_request_at = 10 * MIB
        stored = remote.publish_stream("big", io.BytesIO(whole))
        assert not stored.duplicate
        proxy.cut_all()
        proxy.cut_answer_at = 60  # "go on" comes back, and no more
        remote.publish_stream("big", io.BytesIO(whole))
    found = broker.queue("big").get_many(10, timeout=5)
    assert [message.raw == whole for message in found] == [True, True]


def test_what_can_be_read_once_is_not_sent_again(server: Serving, broker: Any):
    with proxied(server.url) as proxy, holdfast.connect(proxy.url, timeout=5) as remote:
        proxy.cut_request_at = 10 * MIB
        with pytest.raises(Unavailable, match="cannot be read again"):
            remote.publish_stream("big", pieces(20))
    assert broker.queue("big").stats().ready == 0


MEASURED = """
import hashlib, re, sys, holdfast
MIB = 1 << 20
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
def pieces():
    for i in range(200):
        yield i.to_bytes(4, "big") * (MIB // 4)
with holdfast.connect(sys.argv[1]) as broker:
    broker.create_topic("huge", max_message_bytes=300 * MIB)
    before, most = anonymous(), 0
    broker.publish_stream("huge", pieces())
    most = max(most, anonymous())
    message = broker.queue("huge").get(timeout=30)
    assert message.size == 200 * MIB
    found = hashlib.sha256()
    for chunk in message.chunks():
        found.update(chunk)
        most = max(most, anonymous())
    with message.open() as file:
        while chunk := file.read(MIB):
            most = max(most, anonymous())
    message.ack()
print(found.hexdigest(), most - before)
"""


@pytest.mark.slow
def test_200_megabytes_go_both_ways_in_little_memory(tmp_path: Path):
    with serving(tmp_path / "data", max_request_bytes=300 * MIB) as server:
        ran = subprocess.run(
            [sys.executable, "-c", MEASURED, server.url], capture_output=True, text=True, timeout=300, check=True
        )
    found, grown = ran.stdout.split()
    wanted = hashlib.sha256()
    for piece in pieces(200):
        wanted.update(piece)
    assert found == wanted.hexdigest()
    assert int(grown) < 20, f"{grown} MiB"


def test_a_small_message_asks_for_nothing_more(broker: Any):
    queue = broker.queue("big")
    queue.put(b"x" * 1000)
    (seen,) = queue.peek()
    assert isinstance(seen, Contents)
    queue.close()
    broker.close()
    assert seen.raw == b"x" * 1000
