"""What a server must not be led into: by odd values, by clients that go away, by those who send more than they read."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.api.drafts import PublishRequest
from holdfast.protocol.media import LINES, MSGPACK
from holdfast.protocol.topics import Join
from holdfast.server.http.messages import Request
from holdfast.server.service import Call
from holdfast.server.tokens import digest_of
from holdfast.settings import BrokerSettings
from tests.integration.faults_gear import head_of, raw, request_of, status_of, vanish
from tests.integration.http_gear import Serving, serving
from tests.integration.process_gear import until

QUEUE = "/v1/queues/orders"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data", drain_ms=20_000) as found:
        assert found.request("PUT", QUEUE).status == 200
        yield found


def packed(server: Serving, method: str, path: str, value: Any) -> int:
    headers = {"content-type": MSGPACK}
    return server.request(method, path, msgspec.msgpack.encode(value), headers=headers).status


def leased(server: Serving) -> int:
    return int(server.get(f"{QUEUE}/stats").body["leased"])


def all_of(connection: socket.socket) -> bytes:
    """What comes until nothing more does."""
    connection.settimeout(1)
    content = b""
    try:
        while more := connection.recv(1 << 20):
            content += more
    except TimeoutError:
        pass
    return content


def test_messages_that_a_slow_client_has_read_stay_in_its_hands_when_its_connection_ends(server: Serving):
    for _ in range(50):
        server.post(f"{QUEUE}/enqueue", bytes(200_000), query={"durability": "os"})
    with raw(server.url) as connection:
        connection.sendall(request_of("POST", f"{QUEUE}/dequeue", b'{"count": 50, "lease": 600}'))
        until(lambda: leased(server) == 50, "the messages are taken")
        assert len(all_of(connection)) > 50 * 200_000
    until(lambda: not server.server.http.connections, "the connection is closed")
    assert leased(server) == 50


def test_messages_that_a_client_has_not_read_are_ready_again_when_it_vanishes(server: Serving):
    for _ in range(50):
        server.post(f"{QUEUE}/enqueue", bytes(200_000), query={"durability": "os"})
    with raw(server.url) as connection:
        connection.sendall(request_of("POST", f"{QUEUE}/dequeue", b'{"count": 50, "lease": 600}'))
        until(lambda: leased(server) == 50, "the messages are taken")
        vanish(connection)
    until(lambda: leased(server) == 0, "the messages are back")


def test_the_answer_to_head_has_no_body_also_where_that_would_go_on(server: Serving):
    with raw(server.url) as connection:
        connection.sendall(head_of("HEAD", f"{QUEUE}/watch"))
        head, _, behind = all_of(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert behind == b""


def test_what_comes_behind_a_body_is_no_header_of_the_request(server: Serving):
    with raw(server.url) as connection:
        chunks = b"1\r\na\r\n0\r\nx-correlation-id: from-behind\r\nhost: evil.example\r\n\r\n"
        connection.sendall(head_of("POST", f"{QUEUE}/enqueue", "transfer-encoding: chunked") + chunks)
        answer = all_of(connection)
    assert answer.startswith(b"HTTP/1.1 201")
    assert b"from-behind" not in answer


def test_many_requests_at_once_cost_no_more_than_one_after_the_other(server: Serving):
    with raw(server.url) as connection:
        connection.sendall(request_of("POST", f"{QUEUE}/dequeue", b'{"wait": 30}'))
        until(lambda: server.server.service.waits.waiting == 1, "it waits")
        sending = threading.Thread(target=_send_all, args=(connection, head_of("GET", "/healthz") * 5_000))
        sending.start()
        began = time.monotonic()
        while sending.is_alive() and time.monotonic() - began < 1:
            assert server.get("/healthz").status == 200
        assert all(len(each._waiting) < 10_000 for each in list(server.server.http.connections))
        connection.shutdown(socket.SHUT_RDWR)
        sending.join()


def _send_all(connection: socket.socket, content: bytes) -> None:
    with suppress(OSError):
        connection.sendall(content)


def test_a_large_body_behind_a_call_that_waits_is_not_gathered_in_memory(server: Serving):
    with raw(server.url) as connection:
        connection.sendall(request_of("POST", f"{QUEUE}/dequeue", b'{"wait": 30}'))
        until(lambda: server.server.service.waits.waiting == 1, "it waits")
        sending = threading.Thread(target=_send_all, args=(connection, request_of("POST", "/x", bytes(30_000_000))))
        sending.start()
        sending.join(1)
        assert sending.is_alive()
        (held,) = [each for each in server.server.http.connections if each._waiting]
        assert held._waiting[0].buffered < 2_000_000
        connection.shutdown(socket.SHUT_RDWR)
        sending.join()


@pytest.mark.parametrize("begun", [b"GET /healthz HTT", b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc"])
def test_half_a_request_behind_a_whole_one_is_not_waited_for_without_end(tmp_path: Path, begun: bytes):
    with serving(tmp_path / "data", header_timeout_ms=300, body_timeout_ms=300) as server, raw(server.url) as client:
        client.sendall(head_of("GET", "/healthz") + begun)
        assert status_of(client) == 200
        until(lambda: not server.server.http.connections, "the connection is closed")


def test_a_client_that_sends_on_and_does_not_read_is_cut_off(tmp_path: Path):
    with serving(tmp_path / "data", write_timeout_ms=500, body_timeout_ms=60_000) as server:
        server.request("PUT", QUEUE)
        for _ in range(50):
            server.post(f"{QUEUE}/enqueue", bytes(500_000), query={"durability": "os"})
        with raw(server.url) as client:
            client.sendall(head_of("GET", f"{QUEUE}/messages?limit=50"))
            until(lambda: any(each.why == "write" for each in server.server.http.connections), "it is too much")
            client.sendall(request_of("POST", f"{QUEUE}/ack", b"{}"))
            until(lambda: not server.server.http.connections, "the connection is closed")


def test_a_head_that_begins_behind_a_body_is_not_taken_for_a_large_head(tmp_path: Path):
    with serving(tmp_path / "data", max_header_bytes=4_096) as server, raw(server.url) as client:
        second = head_of("GET", "/healthz")
        client.sendall(request_of("POST", "/v1/nowhere", bytes(20_000)) + second[:-5])
        assert status_of(client) == 404
        client.sendall(second[-5:])
        assert status_of(client) == 200


@pytest.mark.parametrize("text", ["a\r\nevil: b", "a\x00b", "übung", "x" * 1024])
def test_any_correlation_id_comes_back_as_a_header_that_clients_can_read(server: Serving, text: str):
    stored = server.request("POST", f"{QUEUE}/enqueue", b"x", query={"correlation_id": text})
    assert stored.status == 201
    assert "evil" not in stored.headers
    assert stored.headers["x-correlation-id"].isprintable()
    taken = server.post(f"{QUEUE}/dequeue", headers={"accept": "application/octet-stream"})
    assert taken.headers["x-correlation-id"] == stored.headers["x-correlation-id"]
    assert json.loads(taken.headers["holdfast-message"])["correlation_id"] == text


@pytest.mark.parametrize("name", ["name", "self", "exist_ok", "topic"])
@pytest.mark.parametrize("queue", ["orders", "fresh"])
def test_what_is_no_setting_of_a_queue_is_the_callers_mistake(server: Serving, queue: str, name: str):
    answer = server.request("PUT", f"/v1/queues/{queue}", {"settings": {name: "x"}})
    assert (answer.status, answer.code) == (400, "bad_settings")


@pytest.mark.parametrize("value", [msgspec.msgpack.Ext(5, b"x"), {None: 1}, {(1, 2): 3}])
def test_a_value_that_json_does_not_know_is_the_callers_mistake(server: Serving, value: Any):
    assert packed(server, "POST", f"{QUEUE}/batch", {"messages": [{"json": value}]}) == 400
    server.post(f"{QUEUE}/enqueue", b"x")
    (message,) = server.post(f"{QUEUE}/dequeue").body["messages"]
    state = {"receipt": message["receipt"], "version": 0, "value": value}
    assert packed(server, "PUT", f"{QUEUE}/state", state) == 400


def test_a_message_that_is_due_after_the_last_moment_of_the_calendar_is_listed(server: Serving):
    due = {"messages": [{"text": "far", "at": "9999-12-31T23:59:59-14:00"}]}
    assert server.post(f"{QUEUE}/batch", due).status == 201
    assert len(server.get("/v1/topics/orders/delayed").body["messages"]) == 1
    assert len(server.get(f"{QUEUE}/messages", query={"phase": "delayed"}).body["messages"]) == 1


def test_a_long_line_is_read_in_a_time_that_grows_with_its_length(server: Serving):
    line = json.dumps({"text": "x" * 30_000_000}).encode()
    server.request("PUT", QUEUE, {"settings": {"max_message_bytes": 40_000_000, "max_batch_bytes": 64_000_000}})
    answer = server.request("POST", f"{QUEUE}/batch", line, headers={"content-type": LINES}, timeout_s=60)
    assert answer.status == 201


def test_a_stream_has_room_again_for_what_is_nacked_together_with_a_lost_one(server: Serving):
    for _ in range(4):
        server.post(f"{QUEUE}/enqueue", b"x")
    connection = server.connection()
    connection.request("POST", f"{QUEUE}/subscribe", json.dumps({"prefetch": 2, "heartbeat": 3600, "lease": 600}))
    stream = connection.getresponse()
    messages = _messages(stream, 2)
    lost = messages[0]["receipt"]
    server.post(f"{QUEUE}/ack", {"receipts": [lost]})
    _messages(stream, 1)
    answer = server.post(f"{QUEUE}/reject", {"receipts": [lost, messages[1]["receipt"]]})
    assert (answer.status, answer.code) == (409, "lease_lost")
    _messages(stream, 1)
    stream.close()
    connection.close()


def _messages(stream: http.client.HTTPResponse, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while len(found) < count:
        message = json.loads(stream.readline())
        found += [message] if message else []
    return found


def test_nobody_begins_to_wait_at_a_server_that_goes(server: Serving):
    service = server.server.service

    async def waited() -> str:
        service.leaving = True
        call = Call(service, Request(None, "local", None), None, {}, "")
        return await service.wait(call, asyncio.sleep(60, "waited"), "nothing")

    assert server.run(waited()) == "nothing"
    service.leaving = False


def test_a_group_that_somebody_waits_for_stays_open_however_many_others_are_used(tmp_path: Path):
    few = BrokerSettings(open_partitions=3)
    with serving(tmp_path / "data", broker=few) as server, raw(server.url) as connection:
        server.request("PUT", QUEUE)
        connection.sendall(request_of("POST", f"{QUEUE}/dequeue", b'{"wait": 30}'))
        until(lambda: server.server.service.waits.waiting == 1, "it waits")
        for number in range(6):
            assert server.request("PUT", f"/v1/queues/other{number}").status == 200
        assert len(server.server.service.groups()) <= 3
        assert len(server.server.port.engine.open_topics()) <= 4
        server.post(f"{QUEUE}/enqueue", b"x")
        assert status_of(connection) == 200


def test_a_member_whose_client_goes_while_it_leaves_has_left_all_the_same(server: Serving):
    members = server.server.service.members
    joined = server.post("/v1/groups/billing/members", {"topics": ["orders"], "settings": {"session_ms": 600_000}})
    name = joined.body["member"]

    async def leave_and_go() -> None:
        member = members.find("billing", name)
        await member._lock.acquire()  # a call of it is under way
        leaving = asyncio.ensure_future(members.leave("billing", name))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        member._lock.release()

    server.run(leave_and_go())
    until(lambda: not _members_of(server), "the member is gone")


def test_one_who_goes_while_it_joins_is_no_member(server: Serving):
    members = server.server.service.members

    async def join_and_go() -> None:
        joining = asyncio.ensure_future(
            members.join("billing", Join(topics=["orders"], settings={"session_ms": 600_000}), "somebody")
        )
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        joining.cancel()
        await asyncio.wait([joining])
        await asyncio.gather(*members._ending)

    server.run(join_and_go())
    assert not _members_of(server)


def _members_of(server: Serving) -> list[Any]:
    stream = server.get("/v1/groups/billing").body["stream"]
    return list(stream["members"])


def test_a_redrive_that_tells_how_far_it_is_is_in_the_audit_log_as_it_ended(tmp_path: Path):
    with serving(tmp_path / "data", whole=True) as server:
        server.request("PUT", QUEUE)
        for _ in range(3):
            server.post(f"{QUEUE}/enqueue", b"x")
            (message,) = server.post(f"{QUEUE}/dequeue").body["messages"]
            server.post(f"{QUEUE}/reject", {"receipts": [message["receipt"]]})
        connection = server.connection()
        body = json.dumps({"rate": 0.01})
        connection.request("POST", f"{QUEUE}/dead/redrive", body, {"accept": LINES})
        stream = connection.getresponse()
        while json.loads(stream.readline())["done"] < 1:
            pass
        newest = _newest_act(server)
        assert (newest["outcome"], newest.get("count")) == ("begun", None)
        stream.close()
        connection.close()
        until(lambda: _newest_act(server)["outcome"] != "begun", "its end is noted")
        newest = _newest_act(server)
        assert (newest["outcome"], newest["count"]) == ("unavailable", 1)


def _newest_act(server: Serving) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/v1/admin/audit").body["acts"][0]
    return found


def test_a_body_that_is_too_large_has_the_same_code_however_that_is_found_out(tmp_path: Path):
    with serving(tmp_path / "data", max_request_bytes=1_000) as server:
        server.request("PUT", QUEUE)
        assert server.post(f"{QUEUE}/enqueue", bytes(1_001)).code == "message_too_large"
        with raw(server.url) as client:
            chunk = b"%x\r\n%b\r\n" % (1_001, bytes(1_001))
            client.sendall(head_of("POST", f"{QUEUE}/enqueue", "transfer-encoding: chunked") + chunk)
            assert b"message_too_large" in all_of(client)


def test_a_connection_too_many_is_told_that_it_may_try_again(tmp_path: Path):
    with serving(tmp_path / "data", max_connections=1) as server:
        assert server.request("PUT", QUEUE).status == 200
        with raw(server.url) as first:
            first.sendall(request_of("POST", f"{QUEUE}/dequeue", b'{"wait": 60}'))
            until(lambda: server.server.service.waits.waiting == 1, "the only connection is at work")
            answer = server.post(f"{QUEUE}/dequeue", {"wait": 60})
            assert (answer.status, answer.code) == (503, "unavailable")
            assert answer.body["error"]["retryable"] is True


def test_a_queue_that_is_deleted_while_somebody_waits_for_it_is_not_there(server: Serving):
    with raw(server.url) as connection:
        connection.sendall(request_of("POST", f"{QUEUE}/dequeue", b'{"wait": 30}'))
        until(lambda: server.server.service.waits.waiting == 1, "it waits")
        assert server.request("DELETE", "/v1/topics/orders").status == 204
        assert status_of(connection) == 404


def test_what_is_cut_off_at_the_end_is_given_back_before_the_folder_is_closed(tmp_path: Path):
    with serving(tmp_path / "data", drain_ms=1) as server:
        server.request("PUT", QUEUE)
        for _ in range(50):
            server.post(f"{QUEUE}/enqueue", bytes(200_000), query={"durability": "os"})
        with raw(server.url) as connection:
            connection.sendall(request_of("POST", f"{QUEUE}/dequeue", b'{"count": 50, "lease": 600}'))
            until(lambda: leased(server) == 50, "the messages are taken")
            until(lambda: any(each.why == "write" for each in server.server.http.connections), "nobody reads them")
            server.run(server.server.drain())
            until(lambda: server.run(_leased(server)) == 0, "the messages are back")


async def _leased(server: Serving) -> int:
    return (await (await server.server.service.group("orders")).port.stats()).leased


def test_no_answer_holds_much_more_than_it_should_however_much_is_asked_for(server: Serving):
    for _ in range(24):
        server.post(f"{QUEUE}/batch", {"messages": [{"text": "x" * 90_000}] * 10}, query={"durability": "os"})
    looked = server.get(f"{QUEUE}/messages", query={"limit": 1_000}).body["messages"]
    assert len(looked) == 240
    assert 0 < sum(not each.get("omitted") for each in looked) < 200
    taken = server.post(f"{QUEUE}/dequeue", {"count": 1_000}).body["messages"]
    assert 100 <= len(taken) <= 200  # by the hundred, until that is as much as an answer should hold
    assert len(server.post(f"{QUEUE}/dequeue", {"count": 1_000}).body["messages"]) == 240 - len(taken)


def test_a_watch_ends_when_its_token_is_taken_back_also_where_no_stats_are_asked_for(tmp_path: Path):
    tokens = tmp_path / "tokens.json"
    tokens.touch(mode=0o600)
    entry = {"name": "somebody", "sha256": digest_of("secret"), "role": "admin"}
    tokens.write_text(json.dumps({"tokens": [entry]}))
    with serving(tmp_path / "data", tokens_file=str(tokens)) as server:
        server.request("PUT", QUEUE, token="secret")
        connection = server.connection()
        connection.request("GET", f"{QUEUE}/watch?stats=0", headers={"authorization": "Bearer secret"})
        stream = connection.getresponse()
        assert stream.readline() == b"event: stats\n"
        port = server.server.port
        tokens.write_text('{"tokens": []}')
        until(lambda: server.get(QUEUE + "/stats", token="secret").status == 401, "the token is taken back")
        server.run(port.publish("orders", PublishRequest([b"x"])))
        rest = stream.read()
        connection.close()
    assert b"event: error\n" in rest
    assert b"event: message\n" not in rest
