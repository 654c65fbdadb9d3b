"""What receipts and lease ids are worth to those who were not given them: nothing, wherever they look."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.protocol.messages import Ack
from holdfast.protocol.topics import KeepLock
from holdfast.server.audit import _given
from tests.integration.http_gear import Serving
from tests.integration.test_http_access import guarded, routes_of
from tests.integration.test_http_queues import answering, lines_of

QUEUE = "/v1/queues/orders"
ADMIN: dict[str, Any] = {"token": "token-of-admin"}
CONSUMER: dict[str, Any] = {"token": "token-of-consumer"}
READER: dict[str, Any] = {"token": "token-of-reader"}
LOCKER: dict[str, Any] = {"token": "token-of-only-lock"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with guarded(tmp_path) as found:
        assert found.request("PUT", QUEUE, {}, **ADMIN).status == 200
        yield found


def put(server: Serving, count: int = 1) -> None:
    for _ in range(count):
        assert server.post(f"{QUEUE}/enqueue", b"x", **ADMIN).status == 201


def take(server: Serving, **wanted: Any) -> list[dict[str, Any]]:
    answer = server.post(f"{QUEUE}/dequeue", wanted, **ADMIN)
    assert answer.status == 200, answer
    return list(answer.body["messages"])


def leased(server: Serving, group: str = "default") -> int:
    return int(server.get(f"{QUEUE}/stats", query={"group": group}, **ADMIN).body["leased"])


def test_one_who_may_look_learns_no_receipt_and_no_lease_id_wherever_it_looks(server: Serving, tmp_path: Path):
    put(server)
    (message,) = take(server)
    lock = server.post("/v1/locks/orders/acquire", {}, **ADMIN).body
    proofs = [message["receipt"].partition("@")[2], lock["lease_id"].partition("@")[2]]
    query = {"lease_id": lock["lease_id"]}
    assert (
        server.request("PUT", "/v1/state/other.x", {"value": 1}, query=query, token="token-of-of-others").status == 403
    )
    values = {"queue": "orders", "topic": "orders", "name": "orders", "id": message["id"], "message_id": message["id"]}
    paths = {"/v1/queues/orders/lookup?id=" + message["id"], "/v1/queues/orders/messages?phase=leased"}
    for route in routes_of(server):
        if route.method == "GET" and "text/event-stream" not in route.gives:
            path = route.pattern
            for name, value in {**values, "partition": "0", "offset": "0", "group": "default"}.items():
                path = path.replace("{" + name + "}", value)
            paths.add(path)
    answered = 0
    for path in sorted(paths):
        connection = server.connection(timeout_s=20)
        connection.request("GET", path, headers={"authorization": "Bearer token-of-admin"})
        answer = connection.getresponse()
        content = answer.read(2_000_000).decode(errors="replace") if answer.status == 200 else ""
        connection.close()
        answered += answer.status == 200
        assert not [proof for proof in proofs if proof in content], path
    assert answered > 30
    written = [file.read_text() for file in tmp_path.rglob("audit*.jsonl*")]
    assert written
    assert not [proof for proof in proofs for text in written if proof in text]


def test_what_is_written_down_of_a_call_has_no_proof():
    assert _given(KeepLock(lease_id="report@1", lease=5)) == {"lease": 5}
    assert _given(Ack(receipts=["orders-0-0@1"], group="audit")) == {"group": "audit"}


def test_lists_have_no_field_for_a_proof(server: Serving):
    put(server)
    (message,) = take(server)
    server.post("/v1/locks/orders/acquire", {}, **ADMIN)
    answers = [
        *server.get(f"{QUEUE}/messages", query={"phase": "leased"}, **READER).body["messages"],
        server.get(f"{QUEUE}/messages/{message['id']}", **READER).body,
        server.get(f"{QUEUE}/lookup", query={"id": message["id"]}, **READER).body,
        *server.get("/v1/locks", **LOCKER).body["locks"],
        server.get("/v1/locks/orders", **LOCKER).body,
    ]
    assert len(answers) == 5
    assert not [each for each in answers if "receipt" in each or "lease_id" in each]


@pytest.mark.parametrize("verb", ["ack", "nack", "reject", "extend"])
def test_a_consumer_settles_nothing_by_what_it_can_see(server: Serving, verb: str):
    put(server)
    (message,) = take(server)
    (other,) = take(server, group="audit")
    seen = server.get(f"{QUEUE}/lookup", query={"id": message["id"]}, **CONSUMER).body
    name, _, token = message["receipt"].partition("@")
    made_up = [
        f"{seen['id']}@{message['fence']:x}",
        f"{seen['offset']}@{message['fence']:x}",
        f"{name}@{'A' * 32}",
        f"{name}@{token[:-1]}{'A' if token[-1] != 'A' else 'B'}",
        other["receipt"],
    ]
    sentences = set()
    for receipt in made_up:
        answer = server.post(f"{QUEUE}/{verb}", {"receipts": [receipt]}, **CONSUMER)
        assert (answer.status, answer.code) == (409, "lease_lost")
        assert answer.body["error"]["facts"]["receipts"] == [receipt]
        sentences.add(answer.body["error"]["message"])
    assert len(sentences) == 1  # nobody learns what was wrong with it
    assert (leased(server), leased(server, "audit")) == (1, 1)
    body = {"receipts": [message["receipt"], *made_up]}
    partly = server.post(f"{QUEUE}/{verb}", body, **CONSUMER)
    assert sorted(partly.body["error"]["facts"]["receipts"]) == sorted(made_up)
    assert leased(server) == (verb == "extend")
    assert leased(server, "audit") == 1


def test_the_ways_to_a_message_in_hand_want_the_receipt_of_its_group(server: Serving):
    put(server)
    (message,), (other,) = take(server), take(server, group="audit")
    for receipt, status in ((message["receipt"], 200), (other["receipt"], 409), (f"{message['id']}@1", 409)):
        for path in ("inHand", "payload", "state"):
            assert server.get(f"{QUEUE}/{path}", query={"receipt": receipt}, **CONSUMER).status == status
        body = {"receipt": receipt, "version": 0, "value": 1}
        assert server.request("PUT", f"{QUEUE}/state", body, **CONSUMER).status == status


def test_the_same_receipt_twice_or_again_is_answered_as_ever(server: Serving):
    put(server, 2)
    first, second = take(server, count=2)
    twice = server.post(f"{QUEUE}/nack", {"receipts": [first["receipt"]] * 2, "delay": 60}, **CONSUMER)
    assert (twice.status, twice.body) == (200, {"settled": 1})
    assert server.post(f"{QUEUE}/ack", {"receipts": [second["receipt"]]}, **CONSUMER).status == 200
    again = server.post(f"{QUEUE}/ack", {"receipts": [second["receipt"]]}, **CONSUMER)
    assert (again.status, again.code) == (409, "lease_lost")
    assert "it is done" in again.body["error"]["message"]


@pytest.mark.parametrize("verb", ["ack", "nack", "reject", "extend"])
def test_one_message_is_settled_once_however_its_receipt_is_spelled(server: Serving, verb: str):
    put(server)
    (message,) = take(server)
    token = message["receipt"].partition("@")[2]
    spelled = [message["receipt"], f"0@{token}", f"orders-0-00@{token}"]
    assert server.post(f"{QUEUE}/{verb}", {"receipts": spelled}, **CONSUMER).status == 200
    put(server)
    assert take(server)[0]["id"] == "orders-0-1"  # and the journal adds up


def test_made_up_receipts_give_a_stream_no_more_room(server: Serving):
    put(server, 3)
    headers = {"authorization": "Bearer token-of-admin"}
    body = b'{"prefetch": 1, "heartbeat": 0.1}'
    with answering(server, "POST", f"{QUEUE}/subscribe", body, **headers) as response:
        messages = lines_of(response)
        message = next(messages)
        made_up = {"receipts": [f"{message['id']}@{message['fence']:x}"]}
        assert server.post(f"{QUEUE}/ack", made_up, **CONSUMER).code == "lease_lost"
        ((window,),) = server.server.app.service.windows._open.values()
        assert len(window) == 1
        assert server.post(f"{QUEUE}/ack", {"receipts": [message["receipt"]]}, **CONSUMER).status == 200
        assert next(messages)["id"] != message["id"]


def test_a_lock_is_taken_from_its_holder_by_an_administrator_alone(server: Serving):
    lock = server.post("/v1/locks/orders/acquire", {}, **LOCKER).body
    assert server.request("DELETE", "/v1/locks/orders", **LOCKER).status == 403
    assert server.request("DELETE", "/v1/locks/orders", token="token-of-only-admin").status == 403
    assert server.post("/v1/locks/orders/release", {"lease_id": f"orders@{lock['fence']:x}"}, **LOCKER).status == 409
    assert server.get("/v1/locks/orders", **LOCKER).body["held"] is True
    assert server.request("DELETE", "/v1/locks/orders", **ADMIN).body == {"released": True}
    assert server.request("DELETE", "/v1/locks/orders", **ADMIN).body == {"released": False}
    assert server.post("/v1/locks/orders/keepalive", {"lease_id": lock["lease_id"]}, **LOCKER).code == "lease_lost"
