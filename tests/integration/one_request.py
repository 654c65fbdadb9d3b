"""What one caller can send to a server in a single request, and how long everybody else waits meanwhile.

`python -m tests.integration.one_request` sends each shape to a server of its own process and prints the worst answer
of /healthz while it is at work; names behind it choose some of them.
"""

from __future__ import annotations

import http.client
import json
import socket
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import zstandard

from tests.integration.process_gear import ServerProcess

QUEUE = "/v1/queues/orders"
TOPIC = "/v1/topics/orders"
_PUT = f"{QUEUE}/enqueue"
MIB = 1 << 20
MESSAGES = 100_000  # what one call may bring
_JSON, _MSGPACK, _LINES = "application/json", "application/msgpack", "application/x-ndjson"
_PAUSE_S = 0.002
_AFTER_S = 0.2  # what a request leaves behind counts as well
_PATIENCE_S = 300


class Shape(NamedTuple):
    """One request, as bytes; and what it may be answered."""

    content: Callable[[], bytes]
    statuses: tuple[int, ...] = (201,)
    before: Callable[[], bytes] | None = None  # what is sent first, and not measured


class Seen(NamedTuple):
    """What came of a shape."""

    status: int
    seconds: float
    worst_s: float
    answer_bytes: int


def request(
    path: str, body: bytes = b"", media: str = "", *, method: str = "POST", encoding: str = "", more: str = ""
) -> bytes:
    """A request with a body, whole."""
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n{more}"
    head += f"content-type: {media}\r\n" if media else ""
    head += f"content-encoding: {encoding}\r\n" if encoding else ""
    return f"{head}\r\n".encode() + body


def batch(
    body: Callable[[], bytes], *statuses: int, media: str = _JSON, encoding: str = "", path: str = f"{QUEUE}/batch"
) -> Shape:
    """Messages for a queue."""
    return Shape(lambda: request(path, body(), media, encoding=encoding), statuses or (201,))


def value(path: str, body: Callable[[], bytes], *statuses: int, method: str = "POST") -> Shape:
    """A call with a body in JSON."""
    return Shape(lambda: request(path, body(), _JSON, method=method), statuses)


def form(body: Callable[[], bytes], *statuses: int) -> Shape:
    return Shape(lambda: request(f"{QUEUE}/enqueue", body(), "multipart/form-data; boundary=xx"), statuses)


def asked(path: str) -> Shape:
    return Shape(lambda: request(path, method="GET"), (200,))


def listed(items: Iterable[bytes], name: bytes = b"messages") -> bytes:
    return b'{"%s":[' % name + b",".join(items) + b"]}"


def many(each: bytes, count: int = MESSAGES) -> bytes:
    return listed([each] * count)


def lists(count: int, before: bytes = b'{"x":', behind: bytes = b"}") -> bytes:
    """JSON of very many values in little room."""
    return before + b"[" + b",".join([b"[]"] * count) + b"]" + behind


def names(count: int) -> bytes:
    return b'{"messages":[{"json":{' + b",".join(b'"%d":1' % i for i in range(count)) + b"}}]}"


def full(count: int) -> list[bytes]:
    each = {"text": "hello", "key": "customer-7", "headers": [{"name": "a", "value": "b"}, {"name": "c", "value": "d"}]}
    return [json.dumps(each).encode()] * count


def headers(count: int) -> bytes:
    return b'{"headers":[' + b",".join([b'{"name":"a","data":""}'] * count) + b"]}"


def packed(name: bytes, count: int, each: bytes) -> bytes:
    """MessagePack: one message with an array of very many values."""
    return b"\x81\xa8messages\x91\x81" + name + b"\xdd" + struct.pack(">I", count) + each * count


def zstd(body: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(body)


def gzip(body: bytes) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    return packer.compress(body) + packer.flush()


def bodies(count: int, size: int = 1) -> bytes:
    return msgspec.msgpack.encode({"bodies": [b"x" * size] * count})


def taken(queue: str, body: Callable[[], bytes], media: str = _JSON) -> Shape:
    """A take of as many messages as may be, from a queue of its own, where they are before."""
    path = f"/v1/queues/{queue}"
    return Shape(
        lambda: request(f"{path}/dequeue", b'{"count":10000}', _JSON),
        (200,),
        lambda: request(f"{path}/batch?durability=os&create=true", body(), media),
    )


def chunks(count: int) -> bytes:
    head = f"POST {QUEUE}/enqueue HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    return head + b"1\r\nx\r\n" * count + b"0\r\n\r\n"


def part(name: bytes, content: bytes) -> bytes:
    return b'--xx\r\ncontent-disposition: form-data; name="' + name + b'"\r\n\r\n' + content + b"\r\n"


END = b"--xx--\r\n"
REFUSED = (400, 413)
ANY = (201, 400, 413)
MANY = 20_000_000
MILLION = 1_000_000

_publishing = {
    "a zstd bomb of a million lines": batch(lambda: zstd(b"{}\n" * MILLION), *REFUSED, media=_LINES, encoding="zstd"),
    "a gzip bomb of a million lines": batch(lambda: gzip(b"{}\n" * MILLION), *REFUSED, media=_LINES, encoding="gzip"),
    "a zstd bomb of empty lines": batch(lambda: zstd(b"\n" * 60 * MIB), *REFUSED, media=_LINES, encoding="zstd"),
    "60 MB of empty lines": batch(lambda: b"\n" * 60 * MIB, *REFUSED, media=_LINES),
    "a zstd bomb of one body": Shape(lambda: request(_PUT, zstd(bytes(10**9)), encoding="zstd"), REFUSED),
    "many small zstd frames": Shape(lambda: request(_PUT, zstd(b"x") * MILLION, encoding="zstd"), REFUSED),
    "JSON of 100,000 messages": batch(lambda: many(b'{"text":"hello"}')),
    "JSON of 100,000 full messages": batch(lambda: listed(full(MESSAGES))),
    "JSON of 100,000 dedup ids": batch(lambda: listed(b'{"dedup_id":"%d"}' % i for i in range(MESSAGES))),
    "JSON of 100,000 delayed messages": batch(lambda: many(b'{"delay":3600}')),
    "JSON of 100,000 urgent messages": batch(lambda: many(b'{"priority":9}')),
    "JSON of 1,500,000 messages": batch(lambda: many(b"{}", 1_500_000), *REFUSED),
    "JSON of 999,999 messages": batch(lambda: many(b"{}", 999_999), *REFUSED),
    "JSON of 20,000,000 messages": batch(lambda: many(b"{}", MANY), *REFUSED),
    "JSON of 30,000,000 numbers": batch(lambda: many(b"0", 30_000_000), *REFUSED),
    "JSON of 100,000 bodies": batch(lambda: listed([b'"eA=="'] * MESSAGES, b"bodies")),
    "lines of 100,000 messages": batch(lambda: b'{"text":"hello"}\n' * MESSAGES, media=_LINES),
    "lines of 100,000 full messages": batch(lambda: b"\n".join(full(MESSAGES)), media=_LINES),
    "a JSON value of 20,000,000 lists": batch(lambda: lists(MANY, b'{"messages":[{"json":', b"}]}"), *REFUSED),
    "a line of 20,000,000 lists": batch(lambda: lists(MANY, b'{"json":'), *REFUSED, media=_LINES),
    "a JSON value of 5,000,000 names": batch(lambda: names(5_000_000), *REFUSED),
    "a JSON value of 333,000 names": batch(lambda: names(333_000)),
    "a JSON value of 333,000 lists": batch(lambda: lists(333_000, b'{"messages":[{"json":', b"}]}")),
    "a JSON number of 60 MB": batch(lambda: many(b'{"json":' + b"1" * (60 * MIB) + b"}", 1), *REFUSED),
    "JSON that is nested a million deep": batch(lambda: b'{"messages":' + b"[" * MILLION, *REFUSED),
    "a message of 2,800,000 headers": batch(lambda: listed([headers(2_800_000)]), *REFUSED),
    "400 messages of 1,000 headers": batch(lambda: listed([headers(1_000)] * 400)),
    "JSON of 60 MB of escapes": batch(lambda: many(b'{"text":"' + b"\\u00e9" * (10 * MIB) + b'"}', 1), *ANY),
    "JSON of 60 MB of spaces": batch(lambda: many(b" " * (60 * MIB) + b"{}", 1), *ANY),
    "JSON of 60 MB of quotes": batch(lambda: many(b'"' + b'\\"' * (30 * MIB) + b'"', 1), *ANY),
    "MessagePack of 100,000 bodies": batch(lambda: bodies(MESSAGES), media=_MSGPACK),
    "MessagePack of 60 MB of bodies": batch(lambda: bodies(600, 100_000), media=_MSGPACK),
    "MessagePack of a million messages": batch(
        lambda: b"\x81\xa8messages\xdd" + struct.pack(">I", MILLION) + b"\x80" * MILLION, *REFUSED, media=_MSGPACK
    ),
    "MessagePack of 60,000,000 lists": batch(lambda: packed(b"\xa4json", 3 * MANY, b"\x90"), *REFUSED, media=_MSGPACK),
    "MessagePack of 60,000,000 nils": batch(lambda: packed(b"\xa4json", 3 * MANY, b"\xc0"), *REFUSED, media=_MSGPACK),
    "MessagePack of 333,000 lists": batch(lambda: packed(b"\xa4json", 333_000, b"\x90"), media=_MSGPACK),
    "MessagePack of 7,000,000 headers": batch(
        lambda: packed(b"\xa7headers", 7 * MILLION, b"\x81\xa4name\xa1a"), *REFUSED, media=_MSGPACK
    ),
    "a producer's 100,000 messages": batch(
        lambda: listed(full(MESSAGES)), 201, 409, path=f"{TOPIC}/partitions/0/append?producer=7&sequence=0"
    ),
    "100,000 messages of a topic": batch(lambda: listed(full(MESSAGES)), path=f"{TOPIC}/messages"),
    "100,000 keys over 8 partitions": batch(
        lambda: listed(b'{"key":"%d"}' % i for i in range(MESSAGES)), path="/v1/topics/wide/messages"
    ),
    "a body that the server packs": Shape(lambda: request(f"{_PUT}?codec=gzip", bytes(range(256)) * (9 * MIB // 256))),
    "a producer of 20,000,000 lists": value("/v1/producers", lambda: lists(MANY), *REFUSED),
    "a million chunks of one byte": Shape(lambda: chunks(MILLION), REFUSED),
    "10,000 chunks of one byte": Shape(lambda: chunks(10_000)),
    "a body of 9 MiB": Shape(lambda: request(_PUT, b"x" * (9 * MIB))),
    "a form of a million parts": form(lambda: part(b"options", b"{}") + part(b"other", b"x") * MILLION + END, *REFUSED),
    "a form of 10 MB of headers": form(lambda: b"--xx\r\n" + b"a: b\r\n" * 1_700_000 + END, *REFUSED),
    "a form that nearly ends often": form(lambda: part(b"payload", b"\r\n--x" * (8 * MIB // 5)) + END, *ANY),
    "a form of 1 MB of options": form(lambda: part(b"options", headers(40_000)) + part(b"payload", b"x") + END, *ANY),
    "60 KiB of query": Shape(lambda: request(f"{_PUT}?" + "&".join(["header=a:b"] * 5_500)), REFUSED),
    "60 KiB of escapes in a query": Shape(lambda: request(f"{_PUT}?" + "&".join(["header=%61:b"] * 5_000)), REFUSED),
    "60 KiB of path": Shape(lambda: request("/v1/" + "%61/" * 15_000), (404,)),
    "60 KiB of headers": Shape(lambda: request("/healthz", method="GET", more="a:b\r\n" * 12_000), (431,)),
    "10,000 pipelined requests": Shape(lambda: request(f"{_PUT}?durability=os", b"x") * 10_000),
    "100,000 short pipelined requests": Shape(lambda: b"GET /healthz HTTP/1.1\r\nhost:x\r\n\r\n" * 100_000, (200, 403)),
}

_consuming = {
    "a take of 10,000": taken("small", lambda: bodies(10_000), _MSGPACK),
    "a take of 10,000 full messages": taken("full", lambda: listed(full(10_000))),
    "a take of 60 MB": taken("large", lambda: bodies(60, MILLION), _MSGPACK),
    "a take of 400,000 headers": taken("headers", lambda: listed([headers(1_000)] * 400)),
    "acks of 10,000 unknown receipts": value(
        f"{QUEUE}/ack", lambda: json.dumps({"receipts": [f"orders:0:{i}:1" for i in range(10_000)]}).encode(), 400, 409
    ),
    "acks of 5,000,000 receipts": value(f"{QUEUE}/ack", lambda: listed([b'"a"'] * 5_000_000, b"receipts"), *REFUSED),
    "a nack with 60 MB of an error": value(
        f"{QUEUE}/nack", lambda: b'{"receipts":["a"],"error":"' + b"x" * (60 * MIB) + b'"}', *REFUSED
    ),
    "a take of 20,000,000 lists": value(f"{QUEUE}/dequeue", lambda: lists(MANY), *REFUSED),
    "a document of 60 MB of lists": value("/v1/state/mine", lambda: lists(MANY, b'{"value":'), *REFUSED, method="PUT"),
    "a document of 1 MiB of lists": value("/v1/state/mine", lambda: lists(333_000, b'{"value":'), 200, method="PUT"),
    "a join with 20,000,000 lists": value(
        "/v1/groups/g/members", lambda: lists(MANY, b'{"topics":["orders"],"settings":{"x":', b"}}"), *REFUSED
    ),
    "a read of 10,000": asked(f"{TOPIC}/partitions/0/messages?limit=10000"),
    "a list of 10,000": asked(f"{QUEUE}/messages?limit=10000"),
    "a peek of 10,000": asked(f"{QUEUE}/peek?count=10000"),
}

SHAPES: dict[str, Shape] = _publishing | _consuming


def prepared(server: ServerProcess) -> None:
    """The queues that the shapes are about."""
    assert server.request("PUT", QUEUE, {}).status == 200
    assert server.request("PUT", "/v1/queues/wide", {"partitions": 8}).status == 200


def send(server: ServerProcess, content: bytes) -> tuple[int, int]:
    """The status and the size of the answer to a request, or to the last of many."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=_PATIENCE_S) as connection:
        # From another thread, for a server that answers before it has read all of it.
        sending = threading.Thread(target=_send, args=(connection, content))
        sending.start()
        got = http.client.HTTPResponse(connection)
        try:
            got.begin()
            return got.status, len(got.read())
        except (ConnectionError, http.client.HTTPException):
            return 0, 0
        finally:
            connection.shutdown(socket.SHUT_RDWR)
            sending.join()


def _send(connection: socket.socket, content: bytes) -> None:
    try:
        connection.sendall(content)
    except OSError:
        return  # it was refused, and nobody reads the rest


def tried(server: ServerProcess, shape: Shape) -> Seen:
    """Send a shape, and look at /healthz all the while."""
    if shape.before is not None:
        assert send(server, shape.before())[0] == 201
    content = shape.content()
    done = threading.Event()
    worst = 0.0

    def look() -> None:
        nonlocal worst
        connection = http.client.HTTPConnection(str(urlsplit(server.url).netloc), timeout=_PATIENCE_S)
        while not done.is_set():
            began = time.perf_counter()
            connection.request("GET", "/healthz")
            assert connection.getresponse().read()
            worst = max(worst, time.perf_counter() - began)
            time.sleep(_PAUSE_S)
        connection.close()

    looking = threading.Thread(target=look)
    looking.start()
    began = time.perf_counter()
    try:
        status, size = send(server, content)
        seconds = time.perf_counter() - began
        time.sleep(_AFTER_S)
    finally:
        done.set()
        looking.join()
    return Seen(status, seconds, worst, size)


@contextmanager
def attacked(folder: Path) -> Iterator[ServerProcess]:
    """A server of its own for the shapes."""
    server = ServerProcess(folder)
    server.start()
    try:
        prepared(server)
        yield server
    finally:
        server.end()


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, attacked(Path(folder) / "data") as server:
        for name, shape in SHAPES.items():
            if not names or any(each in name for each in names):
                seen = tried(server, shape)
                odd = "" if seen.status in shape.statuses else "  <- not as expected"
                sys.stdout.write(
                    f"{name:42s} {seen.status} {seen.seconds:7.2f} s  /healthz {seen.worst_s * 1000:8.0f} ms"
                    f"  answer {seen.answer_bytes:,} bytes{odd}\n"
                )
                sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
