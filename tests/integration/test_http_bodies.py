"""What one request may cost a server: its limits in every form, and that others are answered meanwhile."""

from __future__ import annotations

import threading
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast.protocol.media import JSON, encode
from holdfast.protocol.messages import MOST_HEADERS
from holdfast.server.turns import Job
from tests.integration.faults_gear import head_of, raw, request_of, status_of
from tests.integration.http_gear import Serving, serving
from tests.integration.one_request import QUEUE, SHAPES, attacked, listed, tried, zstd
from tests.integration.process_gear import until

LINES, MSGPACK = "application/x-ndjson", "application/msgpack"
HEALTH_S = 3.0  # a quiet machine: 0.25; one that is busy with other tests may take longer. It was 57 once
LARGE = listed([b'{"text":"%b"}' % (b"x" * 100)] * 1_000)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data", max_batch_messages=10) as found:
        found.request("PUT", QUEUE)
        yield found


def batch(kind: str, count: int) -> tuple[bytes, dict[str, str]]:
    """So many messages in one of the forms."""
    name, _, media = kind.partition(" as ")
    if media == LINES:
        return b"{}\n" * count, {"content-type": media}
    if media == "zstd":
        return zstd(b"{}\n" * count), {"content-type": LINES, "content-encoding": media}
    value = {name: [{} if name == "messages" else b""] * count}
    return encode(value, media), {"content-type": media}


@pytest.mark.parametrize("count", [11, 100_000])
@pytest.mark.parametrize(
    "kind",
    [
        "messages as application/json",
        "bodies as application/json",
        f"messages as {MSGPACK}",
        f"bodies as {MSGPACK}",
        f"messages as {LINES}",
        "messages as zstd",
    ],
)
def test_no_form_brings_more_messages_than_the_limit(server: Serving, kind: str, count: int):
    body, headers = batch(kind, count)
    for path in (f"{QUEUE}/batch", "/v1/topics/orders/messages"):
        answer = server.post(path, body, headers=headers)
        assert (answer.status, answer.code) == (400, "invalid_request")
        assert "more than 10 messages" in answer.body["error"]["message"]
        assert "max_batch_messages" in answer.body["error"]["message"]
    assert server.get(f"{QUEUE}/stats").body["ready"] == 0
    body, headers = batch(kind, 10)
    assert len(server.post(f"{QUEUE}/batch", body, headers=headers).body["stored"]) == 10


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_body_that_unpacks_to_too_many_times_its_size_is_refused(tmp_path: Path, encoding: str):
    import gzip

    pack = gzip.compress if encoding == "gzip" else zstd
    with serving(tmp_path / "data", max_unpack_ratio=20) as server:
        server.request("PUT", QUEUE)
        for path in (f"{QUEUE}/enqueue", f"{QUEUE}/batch", f"{QUEUE}/dequeue"):
            answer = server.post(path, pack(b" " * 2_000_000), headers={"content-encoding": encoding})
            assert (answer.status, answer.code) == (413, "message_too_large")
            assert "max_unpack_ratio" in answer.body["error"]["message"]
        small = server.post(f"{QUEUE}/enqueue", pack(bytes(1_000_000)), headers={"content-encoding": encoding})
        assert small.status == 201


def test_a_message_has_no_more_than_a_thousand_headers_in_every_form(server: Serving):
    headers = [{"name": "a", "value": "b"}] * (MOST_HEADERS + 1)
    for body, media in (
        (msgspec.json.encode({"messages": [{"headers": headers}]}), "application/json"),
        (msgspec.msgpack.encode({"messages": [{"headers": headers}]}), MSGPACK),
        (msgspec.json.encode({"headers": headers}), LINES),
    ):
        assert server.post(f"{QUEUE}/batch", body, headers={"content-type": media}).status == 400
    parts = b'--x\r\ncontent-disposition: form-data; name="options"\r\n\r\n' + msgspec.json.encode({"headers": headers})
    parts += b'\r\n--x\r\ncontent-disposition: form-data; name="payload"\r\n\r\nb\r\n--x--\r\n'
    form = {"content-type": "multipart/form-data; boundary=x"}
    assert server.post(f"{QUEUE}/enqueue", parts, headers=form).status == 400
    assert server.get(f"{QUEUE}/stats").body["ready"] == 0


@contextmanager
def full_pool(server: Serving) -> Iterator[Callable[[], None]]:
    """Every thread of the pool is busy, until what this yields is called."""
    go_on = threading.Event()
    begun = threading.Semaphore(0)

    def work(_: Job) -> None:
        begun.release()
        assert go_on.wait(60)

    async def fill() -> None:
        for _ in range(2):
            server.loop.create_task(server.server.service.pool.run(work))

    server.run(fill())
    for _ in range(2):
        assert begun.acquire(timeout=30)
    try:
        yield go_on.set
    finally:
        go_on.set()


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        (f"{QUEUE}/batch", LARGE, {"content-type": "application/json"}),
        (f"{QUEUE}/batch", b'{"text":"hello"}\n' * 1_100, {"content-type": LINES}),
        (f"{QUEUE}/batch", zstd(b"{}\n"), {"content-type": LINES, "content-encoding": "zstd"}),
        (f"{QUEUE}/enqueue?codec=gzip", bytes(300_000), {}),
        ("/v1/state/mine", b'{"value":"%b"}' % (b"x" * 70_000), {"content-type": "application/json"}),
    ],
    ids=["a batch", "lines", "zstd", "a body that is packed", "a document"],
)
def test_what_is_large_is_read_and_stored_beside_the_event_loop(
    tmp_path: Path, path: str, body: bytes, headers: dict[str, str]
):
    """It waits for a thread of the pool: then nothing of it can hold up the loop, whatever it costs."""
    with serving(tmp_path / "data") as server:
        server.request("PUT", QUEUE)
        server.request("PUT", "/v1/queues/other")  # what goes to the same topic meanwhile waits behind the large one
        method = "PUT" if path.startswith("/v1/state") else "POST"
        with full_pool(server) as go_on, raw(server.url) as connection:
            connection.sendall(request_of(method, path, body, *(f"{name}: {each}" for name, each in headers.items())))
            until(lambda: server.server.service.pool.waiting > 2, "it waits for a thread")
            assert server.get("/healthz").status == 200
            assert server.post("/v1/queues/other/enqueue", b"small").status == 201
            go_on()
            assert status_of(connection) in (200, 201)


def test_while_many_messages_are_on_their_way_to_a_topic_a_single_one_goes_the_same_way(tmp_path: Path):
    """It would find a lock taken otherwise, and the event loop would wait for it."""
    with serving(tmp_path / "data") as server:
        server.request("PUT", QUEUE)
        server.request("PUT", "/v1/queues/other")
        publishing = server.server.service.publishing
        with full_pool(server) as go_on:
            publishing._busy["orders"] += 1
            with raw(server.url) as connection:
                connection.sendall(request_of("POST", f"{QUEUE}/enqueue", b"one"))
                until(lambda: server.server.service.pool.waiting > 2, "it waits for a thread")
                assert server.post("/v1/queues/other/enqueue", b"another").status == 201
                go_on()
                assert status_of(connection) == 201
            del publishing._busy["orders"]
        assert not publishing._busy
        assert server.post(f"{QUEUE}/dequeue").body["messages"][0]["size"] == 3


def test_a_batch_whose_caller_vanishes_while_it_is_stored_is_stored_wholly(tmp_path: Path):
    with serving(tmp_path / "data") as server:
        server.request("PUT", QUEUE)
        service = server.server.service
        with full_pool(server) as go_on:
            with raw(server.url) as connection:
                connection.sendall(request_of("POST", f"{QUEUE}/enqueue?codec=none", b"y" * 300_000))
                until(lambda: len(service.publishing._under_way) == 1, "it is on its way")
            until(lambda: not any(each.busy for each in server.server.http.connections), "the caller is gone")
            go_on()
        until(lambda: not service.publishing._under_way, "it is stored")
        assert server.post(f"{QUEUE}/dequeue").body["messages"][0]["size"] == 300_000


def test_a_client_that_sends_ahead_is_not_listened_to_before_it_is_answered(tmp_path: Path):
    with serving(tmp_path / "data") as server:
        server.request("PUT", QUEUE)
        count, each = 20_000, request_of("GET", "/healthz", b"")
        with raw(server.url) as connection:
            first = request_of("POST", f"{QUEUE}/dequeue", b'{"wait": 60}')
            sending = threading.Thread(target=connection.sendall, args=(first + each * count,))
            sending.start()
            until(lambda: server.server.service.waits.waiting == 1, "the first one waits")
            (busy,) = [known for known in server.server.http.connections if known.busy]
            most = 8 + 2 * 32 * 1024 // len(each)
            assert len(busy._waiting) <= most
            server.post(f"{QUEUE}/enqueue", b"x")
            seen, rest = 0, b""
            while seen < count + 1:  # none of them is lost, wherever one was cut in two
                found = rest + connection.recv(1 << 16)
                assert len(found) > len(rest)
                *whole, rest = found.split(b"HTTP/1.1 200 ")
                seen, rest = seen + len(whole), rest[-12:]
                assert len(busy._waiting) <= most
            sending.join()


def test_a_body_in_very_many_tiny_chunks_is_refused_and_in_many_is_not(tmp_path: Path):
    with serving(tmp_path / "data") as server:
        server.request("PUT", QUEUE)
        for count, status in ((10_000, b"201"), (10_001, b"400"), (1_000_000, b"400")):
            with raw(server.url) as connection:
                content = head_of("POST", f"{QUEUE}/enqueue", "transfer-encoding: chunked")
                content += b"1\r\nx\r\n" * count + b"0\r\n\r\n"
                sending = threading.Thread(target=_send, args=(connection, content))
                sending.start()
                assert connection.recv(1_000).split(b" ")[1] == status
                sending.join()
        (message,) = server.post(f"{QUEUE}/dequeue").body["messages"]
        assert message["size"] == 10_000


def _send(connection: Any, content: bytes) -> None:
    try:
        connection.sendall(content)
    except OSError:
        return  # it was refused before its end


def test_a_request_of_too_many_headers_is_refused(server: Serving):
    with raw(server.url) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 1_000 + b"\r\n")
        assert status_of(connection) == 431


def test_an_answer_is_bounded_and_what_it_does_not_hold_is_ready_again(tmp_path: Path):
    with serving(tmp_path / "data") as server:
        server.request("PUT", QUEUE)
        body = msgspec.msgpack.encode({"bodies": [b"x" * 1_000_000] * 60})
        assert server.post(f"{QUEUE}/batch?durability=os", body, headers={"content-type": MSGPACK}).status == 201
        first = server.post(f"{QUEUE}/dequeue", {"count": 100}).body["messages"]
        assert 16 <= len(first) <= 34
        stats = server.get(f"{QUEUE}/stats").body
        assert (stats["ready"], stats["leased"]) == (60 - len(first), len(first))
        again = server.post(f"{QUEUE}/dequeue", {"count": 1}).body["messages"]
        assert (again[0]["offset"], again[0]["attempt"]) == (len(first), 1)


@pytest.mark.parametrize("media", [JSON, MSGPACK])
def test_a_long_answer_is_encoded_a_message_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, media: str):
    """The encoder holds the interpreter until it is done: of ten thousand messages at once, for 10 ms."""
    most = 0

    def watched(value: object, media: str) -> bytes:
        nonlocal most
        fields = msgspec.structs.asdict(value).values() if isinstance(value, msgspec.Struct) else ()
        lists = [field for field in fields if isinstance(field, list)]
        most = max(most, *(sum(isinstance(each, msgspec.Struct) for each in field) for field in lists), 0)
        return encode(value, media)

    monkeypatch.setattr("holdfast.server.service.encode", watched)
    count, accept = 1_500, {"accept": media}
    bodies = [f"number {i}".encode() for i in range(count)]
    with serving(tmp_path) as server:

        def call(method: str, path: str, body: object = None) -> Any:
            content = None if body is None else msgspec.msgpack.encode(body)
            answer = server.request(
                method, path, content, headers={**accept, "content-type": MSGPACK} if body is not None else accept
            )
            assert answer.status in (200, 201), answer
            return msgspec.msgpack.decode(answer.body) if media == MSGPACK else answer.body

        def bodies_of(messages: list[dict[str, Any]]) -> list[bytes]:
            return [each["body"] if media == MSGPACK else b64decode(each["body"]) for each in messages]

        stored = call("POST", "/v1/queues/jobs/batch?create=true", {"bodies": bodies})["stored"]
        assert [each["offset"] for each in stored] == list(range(count))
        assert bodies_of(call("GET", f"/v1/queues/jobs/peek?count={count}")["messages"]) == bodies
        read = call("GET", f"/v1/topics/jobs/partitions/0/messages?limit={count}")
        assert bodies_of(read["messages"]) == bodies
        assert read["next_offset"] == count
        taken = call("POST", "/v1/queues/jobs/dequeue", {"count": count, "wait": 0})["messages"]
        assert bodies_of(taken) == bodies
        assert len({each["receipt"] for each in taken}) == count
    assert most <= 200, "so many were encoded in one go"


def test_headers_count_for_what_an_answer_holds(tmp_path: Path):
    with serving(tmp_path / "data") as server:
        server.request("PUT", QUEUE)
        message = b'{"headers":[' + b",".join([b'{"name":"a","value":""}'] * MOST_HEADERS) + b"]}"
        assert server.post(f"{QUEUE}/batch?durability=os", listed([message] * 200)).status == 201
        for path in (f"{QUEUE}/peek?count=1000", "/v1/topics/orders/partitions/0/messages?limit=1000"):
            assert 0 < len(server.get(path).body["messages"]) < 200
        assert 0 < len(server.post(f"{QUEUE}/dequeue", {"count": 1000}).body["messages"]) < 200


@pytest.mark.slow
def test_a_client_sends_more_than_one_call_may_bring_in_several(tmp_path: Path):
    bodies = [b"%d" % i for i in range(100_001)]
    with serving(tmp_path / "data") as server, holdfast.connect(server.url) as broker:
        broker.create_topic("orders")
        stored = broker.publish_many("orders", bodies, durability="os")
        assert [each.offset for each in stored] == list(range(100_001))
        late = [holdfast.NewMessage(body=body, delay=3_600) for body in bodies]
        assert len({each.id for each in broker.publish_many("orders", late, durability="os")}) == 100_001
        assert [each.body for each in broker.read("orders", offset=99_999, limit=10)] == bodies[99_999:]


def test_a_client_is_told_of_a_server_that_takes_fewer(server: Serving):
    with holdfast.connect(server.url) as broker, pytest.raises(holdfast.InvalidRequest, match="more than 10 messages"):
        broker.publish_many("orders", [b"x"] * 11)
    assert server.get(f"{QUEUE}/stats").body["ready"] == 0


WORST = (
    "a zstd bomb of a million lines",
    "JSON of 100,000 full messages",
    "JSON of 1,500,000 messages",
    "a JSON value of 20,000,000 lists",
    "MessagePack of 60,000,000 lists",
    "a message of 2,800,000 headers",
    "400 messages of 1,000 headers",
    "a million chunks of one byte",
    "a take of 400,000 headers",
    "a document of 1 MiB of lists",
)


@pytest.mark.serial
@pytest.mark.slow
def test_others_are_answered_whatever_a_single_request_brings(tmp_path: Path):
    """`python -m tests.integration.one_request` tries all shapes, and prints what each of them costs."""
    with attacked(tmp_path / "data") as server:
        for name in WORST:
            seen = tried(server, SHAPES[name])
            assert seen.status in SHAPES[name].statuses, (name, seen)
            assert seen.worst_s < HEALTH_S, (name, seen)
