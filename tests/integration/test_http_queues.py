"""The verbs of a queue over HTTP: every route, real sockets."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.broker.past import PastEvents
from holdfast.protocol.media import FRAMES, MSGPACK, Unframer
from tests.integration.http_gear import Answer, Serving, serving

QUEUE = "/v1/queues/orders"
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path, max_wait_ms=20_000) as found:
        assert found.request("PUT", QUEUE, {"settings": {"backoff_ms": 0, "max_attempts": 2}}).status == 200
        yield found


def put(server: Serving, body: bytes = b"x", **query: Any) -> Answer:
    answer = server.post(f"{QUEUE}/enqueue", body, query=query)
    assert answer.status == 201, answer
    return answer


def take(server: Serving, **wanted: Any) -> list[dict[str, Any]]:
    answer = server.post(f"{QUEUE}/dequeue", wanted)
    assert answer.status == 200, answer
    return list(answer.body["messages"])


def standing(server: Serving) -> dict[str, int]:
    stats = server.get(f"{QUEUE}/stats").body
    return {name: stats[name] for name in ("ready", "leased", "delayed", "dead") if stats[name]}


def until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)


@pytest.mark.parametrize("body", [b"", b"\0\xff\xfe", bytes(range(256)) * 100, "žluť".encode(), b'{"a": 1}'])
def test_a_body_comes_out_byte_for_byte_in_every_way(server: Serving, body: bytes):
    for _ in range(4):
        put(server, body)
    (first,) = take(server)
    assert base64.b64decode(first.get("body", "")) == body
    packed = server.post(f"{QUEUE}/dequeue", headers={"accept": MSGPACK})
    assert msgspec.msgpack.decode(packed.body)["messages"][0].get("body", b"") == body
    plain = server.post(f"{QUEUE}/dequeue", headers={"accept": "application/octet-stream"})
    assert plain.body == body
    assert json.loads(plain.headers["holdfast-message"])["receipt"] == plain.headers["holdfast-receipt"]


def test_everything_that_goes_with_a_message_comes_out_again(server: Serving):
    options = {
        "key": "k",
        "headers": [{"name": "tenant", "value": "ä"}, {"name": "bin", "data": "AP8="}],
        "priority": 7,
        "ttl": 3600,
        "correlation_id": "c-1",
    }
    answer = server.post(f"{QUEUE}/batch", {"messages": [{**options, "json": {"a": [1, None]}}]})
    assert answer.status == 201
    (message,) = take(server, owner="w-1", lease=60)
    assert base64.b64decode(message["body"]) == b'{"a":[1,null]}'
    assert (message["key"], message["priority"], message["correlation_id"]) == ("k", 7, "c-1")
    assert message["headers"] == options["headers"]
    assert message["expires_at_ms"] > 0
    assert (message["holder"], message["lease_ms"], message["attempt"]) == ("w-1", 60_000, 1)


@pytest.mark.parametrize("media", ["application/json", "application/x-ndjson", "application/msgpack"])
def test_headers_may_be_a_plain_map(server: Serving, media: str):
    message = {"headers": {"tenant": "ä", "n": "1"}, "text": "x"}
    content = {
        "application/json": lambda: json.dumps({"messages": [message]}).encode(),
        "application/x-ndjson": lambda: json.dumps(message).encode() + b"\n",
        "application/msgpack": lambda: msgspec.msgpack.encode({"messages": [message]}),
    }[media]()
    assert server.post(f"{QUEUE}/batch", content, headers={"content-type": media}).status == 201
    (found,) = take(server)
    assert found["headers"] == [{"name": "tenant", "value": "ä"}, {"name": "n", "value": "1"}]


@pytest.mark.parametrize(
    "headers", [{"a": 1}, {"": "x"}, {"holdfast.dead": "x"}, "a:b", {"a": None}, {f"h{i}": "" for i in range(1_001)}]
)
def test_headers_that_are_none_are_refused_and_nothing_is_stored(server: Serving, headers: Any):
    answer = server.post(f"{QUEUE}/batch", {"messages": [{"text": "fine"}, {"headers": headers, "text": "x"}]})
    assert (answer.status, answer.code) == (400, "invalid_request")
    assert take(server) == []


def test_a_lease_of_nothing_gives_the_message_back_now_and_one_beyond_the_longest_is_refused(server: Serving):
    put(server, b"x")
    (message,) = take(server)
    receipts = [message["receipt"]]
    assert server.post(f"{QUEUE}/extend", {"receipts": receipts, "lease": 1e9}).code == "invalid_request"
    assert server.post(f"{QUEUE}/extend", {"receipts": receipts, "lease": 0}).body == {"settled": 1}
    assert server.post(f"{QUEUE}/extend", {"receipts": receipts, "lease": 0}).code == "lease_lost"
    (again,) = take(server)
    assert (again["id"], again["attempt"]) == (message["id"], 1)


def test_a_purge_drops_what_nobody_has_in_hand(server: Serving):
    for body in (b"held", b"a", b"b"):
        put(server, body)
    take(server)
    assert server.post(f"{QUEUE}/purge").body == {"purged": 2}
    stats = server.get(f"{QUEUE}/stats").body
    assert (stats["ready"], stats["leased"]) == (0, 1)


def test_options_may_be_said_in_the_address_or_in_a_form(server: Serving):
    put(server, b"a", key="k", header="x:y", priority=3, correlation_id="c")
    form = (
        b'--b\r\ncontent-disposition: form-data; name="options"\r\n\r\n'
        b'{"key": "k", "priority": 3, "headers": [{"name": "x", "value": "y"}], "correlation_id": "c"}'
        b'\r\n--b\r\ncontent-disposition: form-data; name="payload"; filename="p"\r\n\r\n\0a\r\n\r\n--b--\r\n'
    )
    answer = server.post(f"{QUEUE}/enqueue", form, headers={"content-type": "multipart/form-data; boundary=b"})
    assert answer.status == 201
    assert answer.headers["x-correlation-id"] == "c"
    first, second = take(server, count=2)
    assert base64.b64decode(second["body"]) == b"\0a\r\n"
    for name in ("key", "priority", "headers", "correlation_id"):
        assert first[name] == second[name], name


def test_many_messages_may_come_as_lines_as_json_and_as_messagepack(server: Serving):
    lines = b'{"text": "a"}\n{"body": "AA=="}\n\n{"json": 1}'
    assert server.post(f"{QUEUE}/batch", lines, headers={"content-type": "application/x-ndjson"}).status == 201
    packed = msgspec.msgpack.encode({"messages": [{"body": b"\xff"}, {"text": "b"}]})
    answer = server.post(f"{QUEUE}/batch", packed, headers={"content-type": MSGPACK})
    assert [stored["offset"] for stored in answer.body["stored"]] == [3, 4]
    bodies = [base64.b64decode(message["body"]) for message in take(server, count=10)]
    assert bodies == [b"a", b"\0", b"1", b"\xff", b"b"]


PUBLISHING = (f"{QUEUE}/batch", "/v1/topics/orders/messages")
CURL = "application/x-www-form-urlencoded"  # of whatever it is given with -d


@pytest.mark.parametrize("path", PUBLISHING)
def test_what_curl_sends_without_a_word_about_it_is_json(server: Serving, path: str):
    content = b'{"messages": [{"text": "a"}, {"text": "b"}]}'
    assert server.post(path, content, headers={"content-type": CURL}).status == 201
    assert len(take(server, count=10)) == 2


@pytest.mark.parametrize("path", PUBLISHING)
def test_lines_that_are_not_sent_as_lines_are_refused_with_how_to_send_them(server: Serving, path: str):
    lines = b'{"text": "a"}\n{"text": "b"}\n'
    without_ends = lines.replace(b"\n", b"")  # as `curl -d @FILE` sends them
    sent = [(CURL, lines), ("application/json", lines), ("application/x-ndjson", without_ends)]
    for media, content in sent:
        answer = server.post(path, content, headers={"content-type": media})
        assert answer.status == 400
        message = answer.body["error"]["message"]
        assert "curl -H 'content-type: application/x-ndjson' --data-binary @FILE" in message
        assert "Nothing was stored" in message
    assert take(server, count=10) == []
    # One line is a JSON document as well, and one message is not a batch.
    answer = server.post(path, b'{"text": "a"}', headers={"content-type": CURL})
    assert (answer.status, "x-ndjson" in answer.body["error"]["message"]) == (400, True)


@pytest.mark.parametrize("path", [*PUBLISHING, f"{QUEUE}/dequeue"])
def test_a_content_type_that_nobody_knows_is_refused_with_those_that_are(server: Serving, path: str):
    answer = server.post(path, b"{}", headers={"content-type": "text/plain"})
    assert answer.status == 415
    message = answer.body["error"]["message"]
    assert "content-type text/plain" in message
    assert "curl -H 'content-type: application/json'" in message


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"text": "a", "body": "AA=="}],
        [{"text": "a"}, {"unknown": 1}],
        [{"text": "a"}, {"text": "b", "priority": 10}],
        [{"text": "a"}, {"text": "b", "headers": [{"name": "x"}]}],
        [{"text": "a"}, {"text": "b", "delay": 1, "at": "2030-01-01T00:00:00Z"}],
    ],
)
def test_a_batch_with_a_mistake_stores_nothing(server: Serving, messages: list[dict[str, Any]]):
    answer = server.post(f"{QUEUE}/batch", {"messages": messages})
    assert (answer.status, answer.code) == (400, "invalid_request")
    assert standing(server) == {}


def test_an_unknown_queue_is_made_only_if_that_is_said(server: Serving):
    answer = server.post("/v1/queues/new/enqueue", b"x")
    assert (answer.status, answer.code) == (404, "unknown_topic")
    assert "create" in "".join(answer.body["error"]["notes"])
    assert server.post("/v1/queues/new/enqueue", b"x", query={"create": "true"}).status == 201
    assert server.get("/v1/queues/new/stats").body["ready"] == 1


def test_a_duplicate_is_answered_with_the_first_ones_id(server: Serving):
    first, second = (put(server, dedup_id="d-1").body for _ in range(2))
    assert (second["id"], second["duplicate"]) == (first["id"], True)
    assert standing(server) == {"ready": 1}


def test_the_trace_of_a_call_goes_onto_its_message(server: Serving):
    headers = {"traceparent": TRACE, "tracestate": "a=b"}
    server.post(f"{QUEUE}/enqueue", b"x", headers=headers)
    own = {"text": "y", "headers": [{"name": "traceparent", "value": "own"}]}
    server.post(f"{QUEUE}/batch", {"messages": [own]}, headers=headers)
    first, second = take(server, count=2)
    assert {header["name"]: header["value"] for header in first["headers"]} == headers
    assert second["headers"] == own["headers"]


def test_ack_nack_defer_reject_and_extend_do_what_they_say(server: Serving):
    for _ in range(5):
        put(server)
    acked, nacked, deferred, rejected, extended = take(server, count=5)

    def settle(verb: str, message: dict[str, Any], **more: Any) -> None:
        answer = server.post(f"{QUEUE}/{verb}", {"receipts": [message["receipt"]], **more})
        assert (answer.status, answer.body) == (200, {"settled": 1})

    settle("ack", acked, durability="fsync")
    settle("nack", nacked, error="ValueError: no", delay=3600)
    settle("nack", deferred, intent="defer")
    settle("reject", rejected, reason="never")
    settle("extend", extended, lease=3600)
    assert standing(server) == {"ready": 1, "leased": 1, "delayed": 1, "dead": 1}
    (again,) = take(server)
    assert (again["id"], again["attempt"]) == (deferred["id"], 1)
    (waiting,) = server.get(f"{QUEUE}/messages", query={"phase": "delayed"}).body["messages"]
    assert (waiting["attempts"], waiting["error"]) == (1, "ValueError: no")
    (dead,) = server.get(f"{QUEUE}/messages", query={"phase": "dead"}).body["messages"]
    assert (dead["reason"], dead["error"]) == ("REJECTED", "never")


def test_a_dropped_message_waits_for_the_backoff_as_after_a_failed_attempt(server: Serving):
    server.request("PUT", QUEUE, {"settings": {"backoff_ms": 600_000}})
    put(server)
    (taken,) = take(server)
    dropped = {"receipts": [taken["receipt"]], "intent": "drop"}
    refused = server.post(f"{QUEUE}/nack", {**dropped, "error": "no"})
    assert (refused.status, refused.code) == (400, "invalid_request")
    assert "intent=drop has no error" in refused.body["error"]["message"]
    assert server.post(f"{QUEUE}/nack", dropped).body == {"settled": 1}
    (waiting,) = server.get(f"{QUEUE}/messages", query={"phase": "delayed"}).body["messages"]
    assert (waiting["id"], waiting["attempts"]) == (taken["id"], 1)


@pytest.mark.parametrize("verb", ["ack", "nack", "reject", "extend"])
def test_a_late_receipt_is_refused_and_the_others_count(server: Serving, verb: str):
    for _ in range(3):
        put(server)
    first, second, third = take(server, count=3, owner="me")
    server.post(f"{QUEUE}/nack", {"receipts": [second["receipt"]], "intent": "defer"})
    (again,) = take(server, owner="you")
    receipts = [message["receipt"] for message in (first, second, third)]
    answer = server.post(f"{QUEUE}/{verb}", {"receipts": receipts})
    assert (answer.status, answer.code) == (409, "lease_lost")
    assert answer.body["error"]["facts"]["receipts"] == [second["receipt"]]
    assert answer.body["error"]["facts"]["holder"] == "you"
    assert again["fence"] > second["fence"]
    held = {message["id"] for message in server.get(f"{QUEUE}/messages", query={"phase": "leased"}).body["messages"]}
    assert held == ({again["id"]} if verb != "extend" else {first["id"], again["id"], third["id"]})


def test_a_receipt_that_is_none_changes_nothing(server: Serving):
    put(server)
    (message,) = take(server)
    for wrong in ("", "nonsense", "other-0-0@1", "orders-7-0@1"):
        answer = server.post(f"{QUEUE}/ack", {"receipts": [message["receipt"], wrong]})
        assert answer.status in (400, 404), wrong
    assert standing(server) == {"leased": 1}


def test_a_call_that_waits_is_woken_by_arrival(server: Serving):
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(take(server, wait=-1)))
    waiting.start()
    until(lambda: server.server.service.waits.waiting == 1)
    put(server, b"now")
    waiting.join(30)
    assert [base64.b64decode(message["body"]) for message in found[0]] == [b"now"]


def test_calls_that_wait_are_served_in_the_order_they_came(server: Serving):
    order: list[int] = []
    threads = []
    for i in range(5):
        threads.append(threading.Thread(target=lambda i=i: order.append((i, take(server, wait=20)[0]["offset"]))))
        threads[-1].start()
        until(lambda i=i: server.server.service.waits.waiting == i + 1)
    for _ in range(5):
        put(server)
    for thread in threads:
        thread.join(30)
    assert sorted(order) == [(i, i) for i in range(5)]


def test_a_wait_ends_with_nothing_when_its_time_is_over(server: Serving):
    assert take(server, wait=0.05) == []
    assert server.post(f"{QUEUE}/dequeue", headers={"accept": "application/octet-stream"}).status == 204


def test_a_call_that_waits_gets_a_delayed_message_when_it_is_due(server: Serving):
    put(server, b"later", delay=0.3)
    (message,) = take(server, wait=20)
    assert base64.b64decode(message["body"]) == b"later"


def test_a_client_that_goes_away_while_it_waits_takes_nothing_with_it(server: Serving):
    gone = server.connection()
    gone.request("POST", f"{QUEUE}/dequeue", b'{"wait": 20}', {"content-type": "application/json"})
    until(lambda: server.server.service.waits.waiting == 1)
    gone.close()
    until(lambda: server.server.service.waits.waiting == 0)
    put(server)
    (message,) = take(server)
    assert message["attempt"] == 1


def test_one_waiter_too_many_is_told_to_come_back(tmp_path: Path):
    with serving(tmp_path, max_waiters=1) as server:
        server.request("PUT", QUEUE)
        first = server.connection()
        first.request("POST", f"{QUEUE}/dequeue", b'{"wait": 20}', {"content-type": "application/json"})
        until(lambda: server.server.service.waits.waiting == 1)
        answer = server.post(f"{QUEUE}/dequeue", {"wait": 5})
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (429, "too_many_waiters", "1")
        assert server.post(f"{QUEUE}/subscribe").status == 429
        put(server)
        with first.getresponse() as response:
            assert json.loads(response.read())["messages"]
        first.close()


def test_a_document_goes_with_its_message_from_one_holder_to_the_next(server: Serving):
    put(server)
    (message,) = server.post(f"{QUEUE}/dequeueWithState").body["messages"]
    assert message["state"] == {}
    receipt = message["receipt"]
    assert server.get(f"{QUEUE}/state", query={"receipt": receipt}).body == {}
    saved = server.request("PUT", f"{QUEUE}/state", {"receipt": receipt, "version": 0, "value": {"step": 1}})
    assert saved.body == {"value": {"step": 1}, "version": 1}
    stale = server.request("PUT", f"{QUEUE}/state", {"receipt": receipt, "version": 0, "value": {"step": 2}})
    assert (stale.status, stale.code) == (409, "conflict")
    server.post(f"{QUEUE}/nack", {"receipts": [receipt]})
    late = server.request("PUT", f"{QUEUE}/state", {"receipt": receipt, "version": 1, "value": 2})
    assert (late.status, late.code) == (409, "lease_lost")
    (again,) = take(server, state=True)
    assert again["state"] == {"value": {"step": 1}, "version": 1}


def test_a_document_of_a_message_that_is_too_large_is_refused(server: Serving):
    put(server)
    (message,) = take(server)
    for value, status in (("x" * (1_048_576 - 2), 200), ("x" * (1_048_576 - 1), 413)):
        wanted = {"receipt": message["receipt"], "version": 0, "value": value}
        answer = server.request("PUT", f"{QUEUE}/state", wanted)
        assert answer.status == status
    assert answer.code == "message_too_large"
    assert server.get(f"{QUEUE}/state", query={"receipt": message["receipt"]}).body["version"] == 1


@contextmanager
def answering(server: Serving, method: str, path: str, body: bytes = b"", **headers: str) -> Iterator[HTTPResponse]:
    """An answer that goes on, until we go away."""
    connection = server.connection()
    connection.request(method, path, body, {"content-type": "application/json", **headers})
    response = connection.getresponse()
    try:
        yield response
    finally:
        response.close()
        connection.close()


def lines_of(response: Any) -> Iterator[dict[str, Any]]:
    for line in response:
        found = json.loads(line)
        if found:
            yield found


def test_a_subscription_sends_no_more_than_its_prefetch_until_some_are_settled(server: Serving):
    for _ in range(5):
        put(server)
    with answering(server, "POST", f"{QUEUE}/subscribe", b'{"prefetch": 2, "heartbeat": 0.1}') as response:
        messages = lines_of(response)
        first, second = next(messages), next(messages)
        assert standing(server) == {"ready": 3, "leased": 2}
        for expected in range(2, 5):
            server.post(f"{QUEUE}/ack", {"receipts": [first["receipt"]]})
            first, second = second, next(messages)
            assert second["offset"] == expected
            assert standing(server)["leased"] == 2


def test_a_subscription_goes_on_when_a_lease_has_ended_by_itself(server: Serving):
    put(server)
    body = b'{"prefetch": 1, "lease": 0.2, "heartbeat": 0.1}'
    with answering(server, "POST", f"{QUEUE}/subscribe", body) as response:
        messages = lines_of(response)
        assert [next(messages)["attempt"], next(messages)["attempt"]] == [1, 2]


def test_a_subscription_in_messagepack_is_cut_by_lengths(server: Serving):
    put(server, b"\0\n\xff")
    unframer, found = Unframer(FRAMES), []
    with answering(server, "POST", f"{QUEUE}/subscribeWithState", accept=FRAMES) as response:
        while not found:
            found = [value for value in map(msgspec.msgpack.decode, unframer.feed(response.read1())) if value]
    assert found[0]["body"] == b"\0\n\xff"
    assert found[0]["state"] == {}


def test_a_subscriber_that_goes_away_frees_its_place(server: Serving):
    with answering(server, "POST", f"{QUEUE}/subscribe", b'{"heartbeat": 0.1}') as response:
        response.readline()
        until(lambda: server.server.service.waits.waiting == 1)
    until(lambda: server.server.service.waits.waiting == 0)
    put(server)
    assert len(take(server)) == 1


def test_a_watcher_sees_what_comes_and_takes_nothing(server: Serving):
    put(server, b"before")
    with answering(server, "GET", f"{QUEUE}/watch?bodies=true&stats=0.1") as response:
        assert response.getheader("content-type") == "text/event-stream"
        assert event(response, "stats")["ready"] == 1
        taken: list[Any] = []
        consumer = threading.Thread(target=lambda: taken.append([take(server, wait=20), take(server, wait=20)]))
        consumer.start()
        put(server, b"now")
        assert base64.b64decode(event(response, "message")["body"]) == b"now"
        consumer.join(30)
    assert [len(found) for found in taken[0]] == [1, 1], "the watcher must not have taken a consumer's turn"


def event(response: HTTPResponse, name: str) -> Any:
    """The next event of this name."""
    kind = ""
    while True:
        line = response.readline().decode().rstrip("\n")
        if line.startswith("event: "):
            kind = line[7:]
        elif line.startswith("data: ") and kind == name:
            return json.loads(line[6:])


def test_a_message_is_shown_by_its_own_id_until_it_is_done(server: Serving):
    for i in range(3):
        put(server, b"%d" % i)
    delayed = put(server, b"later", delay=3600).body["id"]
    first, second, third = take(server, count=3)
    server.post(f"{QUEUE}/ack", {"receipts": [first["receipt"]]})
    server.post(f"{QUEUE}/reject", {"receipts": [second["receipt"]], "reason": "no"})

    def phase_of(message: str) -> str | int:
        answer = server.get(f"{QUEUE}/messages/{message}")
        return answer.body["phase"] if answer.status == 200 else answer.status

    shown = [phase_of(each) for each in ("orders.dlq-0-0", third["id"], delayed)]
    assert shown == ["dead", "leased", "delayed"]
    assert server.get(f"{QUEUE}/messages/{third['id']}").body["holder"] == third["holder"]
    unknown = [first["id"], second["id"], "orders-0-99", "orders-7-0", "other-0-0", "orders.dlq-0-5", "orders-x", "x"]
    assert [phase_of(each) for each in unknown] == [404] * len(unknown)


def test_messages_are_listed_peeked_shown_and_cancelled(server: Serving):
    for i in range(3):
        put(server, json.dumps({"n": i}).encode(), key=f"k{i}")
    assert [message["offset"] for message in server.get(f"{QUEUE}/peek", query={"count": 2}).body["messages"]] == [0, 1]
    chosen = server.get(f"{QUEUE}/messages", query={"where": "json.n >= 1", "limit": 1}).body["messages"]
    assert [message["key"] for message in chosen] == ["k1"]
    bare = server.get(f"{QUEUE}/messages", query={"bodies": "false"}).body["messages"][0]
    assert ("body" not in bare, bare["omitted"], bare["size"]) == (True, True, 8)
    assert server.get(f"{QUEUE}/messages/orders-0-2").body["key"] == "k2"
    assert server.get(f"{QUEUE}/messages/orders-0-99").status == 404
    assert server.request("DELETE", f"{QUEUE}/messages/orders-0-2").body == {"cancelled": True}
    assert server.request("DELETE", f"{QUEUE}/messages/orders-0-2").body == {"cancelled": False}
    assert standing(server) == {"ready": 2}
    wrong = server.get(f"{QUEUE}/messages", query={"where": "json.n >"})
    assert (wrong.status, wrong.code) == (400, "invalid_request")


def test_a_queue_is_sought_compacted_and_told_how_far_it_is(server: Serving):
    for _ in range(3):
        put(server)
    server.post(f"{QUEUE}/ack", {"receipts": [message["receipt"] for message in take(server, count=2)]})
    assert server.get(f"{QUEUE}/committed").body == {"offsets": {"0": 2}}
    assert server.post(f"{QUEUE}/seek", {"to": "start"}).body == {"offset": 0}
    assert standing(server) == {"ready": 3}
    assert server.post(f"{QUEUE}/seek", {"offset": 99}).status == 416
    assert server.post(f"{QUEUE}/seek", {}).status == 400
    assert set(server.post(f"{QUEUE}/compact").body) == {"segments", "bytes", "journal_bytes"}


def test_looking_makes_no_group(server: Serving):
    for path in ("stats", "peek", "messages", "committed"):
        answer = server.get(f"{QUEUE}/{path}", query={"group": "other"})
        assert (answer.status, answer.code) == (404, "unknown_group"), path
    assert server.post(f"{QUEUE}/ack", {"receipts": ["orders-0-0@1"], "group": "other"}).status == 404
    put(server)
    assert len(take(server, group="other")) == 1
    assert server.get(f"{QUEUE}/stats", query={"group": "other"}).body["leased"] == 1
    assert standing(server) == {"ready": 1}


def test_what_is_leased_outlives_the_server(tmp_path: Path):
    with serving(tmp_path) as server:
        server.request("PUT", QUEUE)
        put(server)
        (message,) = take(server, lease=3600)
    with serving(tmp_path) as server:
        assert take(server) == []
        assert server.post(f"{QUEUE}/ack", {"receipts": [message["receipt"]]}).status == 200
        assert standing(server) == {}


def test_whoever_waits_when_the_server_goes_is_answered_at_once(tmp_path: Path):
    with serving(tmp_path, drain_ms=60_000) as server:
        server.request("PUT", QUEUE)
        waiting, stream, watcher = (server.connection() for _ in range(3))
        waiting.request("POST", f"{QUEUE}/dequeue", b'{"wait": 60}', {"content-type": "application/json"})
        stream.request("POST", f"{QUEUE}/subscribe", b'{"heartbeat": 60}', {"content-type": "application/json"})
        watcher.request("GET", f"{QUEUE}/watch?stats=0")
        until(lambda: server.server.service.waits.waiting == 3)
        began = time.monotonic()
    assert time.monotonic() - began < 20
    said = []
    for connection in (waiting, stream, watcher):
        with connection.getresponse() as response:
            said.append(response.read())
        connection.close()
    assert json.loads(said[0]) == {"messages": []}
    assert said[1].strip(b"{}\n") == b""
    assert b"stats" in said[2]


def test_the_server_says_when_it_is_about_to_go(server: Serving):
    assert server.get("/readyz").body == {"status": "ready"}
    server.server.service.leaving = True
    assert (server.get("/readyz").status, server.get("/healthz").status) == (503, 200)


def test_a_message_is_shown_read_and_cancelled_without_a_look_at_its_history(tmp_path, monkeypatch):
    """For which a whole journal has to be read."""

    def unwanted(*_: Any) -> Any:
        raise AssertionError("nobody asked for the history")

    with serving(tmp_path) as server:
        server.request("PUT", "/v1/queues/jobs", {})
        server.post("/v1/queues/jobs/enqueue", b"x")
        monkeypatch.setattr(PastEvents, "of", unwanted)
        path = "/v1/queues/jobs/messages/jobs-0-0"
        assert server.get(path).status == 200
        assert server.get(f"{path}/payload").body == b"x"
        assert server.request("DELETE", path).body == {"cancelled": True}


def test_a_conflict_of_a_state_is_told_only_once_it_is_on_disk(server):
    """A client that got no answer repeats its call, and compares what it is then told with what it sent."""
    server.post(f"{QUEUE}/enqueue", {"body": "eA=="})
    (message,) = server.post(f"{QUEUE}/dequeue", {}).body["messages"]
    given = {"receipt": message["receipt"], "version": 0, "value": {"step": 1}}
    assert server.request("PUT", f"{QUEUE}/state", {**given, "durability": "os"}).status == 200
    assert server.request("PUT", f"{QUEUE}/state", {**given, "durability": "fsync"}).code == "conflict"
    engine = server.server.service.port.engine
    (delivery,) = engine.topic(QUEUE.rpartition("/")[2]).group("default").deliveries
    assert delivery.journal.log.synced_end == delivery.journal.log.written_end
