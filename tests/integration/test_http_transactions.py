"""Transactions over HTTP, of a server from Python, and on the command line."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import holdfast
from holdfast.errors import Conflict, Fenced, LeaseLost
from holdfast.server.tokens import digest_of
from tests.integration.http_gear import Serving, serving

COMMIT = "/v1/transactions/commit"
MADE_UP = "orders-0-0@AgAAAYAAAAACz-V3oN_xKEbJ5VTUOFM9"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data", whole=True) as found:
        for topic in ("orders", "invoices"):
            assert found.post("/v1/topics", {"name": topic}).status == 201
        yield found


def bodies(server: Serving, topic: str = "invoices") -> list[bytes]:
    with holdfast.connect(server.url) as broker:
        return [message.body for message in broker.read(topic)]


def received(server: Serving) -> str:
    server.post("/v1/queues/orders/enqueue", {"text": "1 book"})
    return server.post("/v1/queues/orders/dequeue").body["messages"][0]["receipt"]


def test_one_call_publishes_acks_and_writes(server: Serving):
    begun = server.post("/v1/transactions", {"name": "billing"})
    assert (begun.status, begun.body) == (201, {"name": "billing", "epoch": 1})
    wanted = {
        **begun.body,
        "messages": [{"topic": "invoices", "json": {"n": 1}, "key": "a"}, {"topic": "invoices", "text": "2"}],
        "acks": [{"topic": "orders", "receipts": [received(server)]}],
        "documents": [{"name": "total", "value": {"n": 2}, "version": 0}],
    }
    done = server.post(COMMIT, wanted)
    assert done.status == 200
    assert [each["id"] for each in done.body["stored"]] == ["invoices-0-0", "invoices-0-1"]
    assert server.post(COMMIT, wanted).body == done.body  # sent again
    assert bodies(server) == [b'{"n":1}', b"2"]
    assert server.get("/v1/state/total").body["value"] == {"n": 2}
    assert server.post("/v1/queues/orders/dequeue").body["messages"] == []
    (told,) = server.get("/v1/transactions").body["transactions"]
    assert (told["name"], told["epoch"], told["committed"]) == ("billing", 1, True)
    assert "holdfast_transactions_committed_total 1.0" in server.get("/metrics").body.decode()
    assert server.request("DELETE", "/v1/transactions/billing").body == {"deleted": True}
    assert server.request("DELETE", "/v1/transactions/billing").body == {"deleted": False}


@pytest.mark.parametrize(
    ("more", "status", "code"),
    [
        ({"documents": [{"name": "total", "value": 1, "version": 7}]}, 409, "conflict"),
        ({"documents": [{"name": "total"}]}, 400, "invalid_request"),
        ({"documents": [{"name": "total", "value": 1, "remove": True}]}, 400, "invalid_request"),
        ({"acks": [{"topic": "orders", "receipts": [MADE_UP]}]}, 409, "lease_lost"),
        ({"acks": [{"topic": "orders", "receipts": ["x"]}]}, 409, "lease_lost"),
        ({"acks": [{"topic": "orders", "group": "nobody", "receipts": ["orders-0-0@1"]}]}, 409, "lease_lost"),
        ({"offsets": [{"group": "g", "member": "m", "offsets": [{"topic": "orders", "offset": 1}]}]}, 409, "fenced"),
        ({"name": "billing", "epoch": 3}, 409, "fenced"),
        ({"name": "~", "epoch": 1}, 400, "invalid_request"),
        ({"messages": [{"topic": "nowhere", "text": "x"}]}, 404, "unknown_topic"),
        ({"messages": [{"topic": "orders", "text": "x", "json": 1}]}, 400, "invalid_request"),
        ({"colour": 1}, 400, "invalid_request"),
    ],
)
def test_what_is_refused_does_nothing(server: Serving, more: dict, status: int, code: str):
    found = server.post(COMMIT, {"messages": [{"topic": "invoices", "text": "never"}], **more})
    assert (found.status, found.body["error"]["code"]) == (status, code)
    assert bodies(server) == []
    assert server.get("/v1/state/total").status == 404


def test_each_part_needs_its_right(tmp_path: Path):
    entries = [
        {"name": "all", "role": "admin"},
        {"name": "writer", "role": ["publish"], "topics": ["invoices"], "producers": ["writer-*"]},
    ]
    path = tmp_path / "tokens.json"
    path.touch(mode=0o600)
    path.write_bytes(
        msgspec.json.encode({"tokens": [{**each, "sha256": digest_of(str(each["name"]))} for each in entries]})
    )
    with serving(tmp_path / "data", whole=True, tokens_file=str(path)) as server:
        message = {"messages": [{"topic": "invoices", "text": "x"}]}
        server.post("/v1/queues/invoices/enqueue?create=true", {"text": "0"}, token="all")

        def status(body: dict, token: str = "writer") -> int:
            return server.post(COMMIT, body, token=token).status

        assert status(message) == 200
        assert status({"messages": [{"topic": "orders", "text": "x"}]}) == 403
        assert status({**message, "acks": [{"topic": "invoices", "receipts": ["x"]}]}) == 403
        assert status({**message, "documents": [{"name": "total", "value": 1}]}) == 403
        assert status({**message, "name": "billing"}) == 403
        assert status({**message, "name": "writer-1"}) == 409  # not begun
        assert server.post("/v1/transactions", {"name": "billing"}, token="writer").status == 403
        assert server.post("/v1/transactions", {"name": "writer-1"}, token="writer").status == 201
        assert server.post("/v1/transactions", {"name": "billing"}, token="all").status == 201
        names = [each["name"] for each in server.get("/v1/transactions", token="writer").body["transactions"]]
        assert names == ["writer-1"]
        assert server.request("DELETE", "/v1/transactions/billing", token="writer").status == 403


def test_a_client_has_the_same_transactions_as_a_folder(server: Serving):
    with holdfast.connect(server.url) as broker:
        queue = broker.queue("orders")
        queue.put_many([b"0", b"1"])
        with broker.transaction("billing") as transaction:
            message = queue.get(timeout=5)
            transaction.publish("invoices", b"a", key=b"\xff", headers={"h": b"\xff"}, dedup_id="d")
            transaction.ack(message)
            transaction.documents.update("total", [1])
        assert (message.settled, transaction.stored[0].id) == (True, "invoices-0-0")
        assert broker.documents.get("total").value == [1]
        with pytest.raises(Conflict), broker.transaction() as transaction:
            transaction.publish("invoices", b"never")
            transaction.documents.update("total", 2, version=9)
        with pytest.raises(Fenced), broker.transaction("billing") as transaction:
            transaction.publish("invoices", b"never")
            with broker.transaction("billing"):
                pass
        lost = queue.get(timeout=5)
        server.request("POST", f"/v1/queues/orders/messages/{lost.id}/takeBack")
        with pytest.raises(LeaseLost), broker.transaction() as transaction:
            transaction.publish("invoices", b"never")
            transaction.ack(lost)
        with broker.consumer("invoices", group="g", auto_commit=False) as consumer:
            assert [each.body for each in consumer.poll(timeout=5)] == [b"a"]
            with broker.transaction() as transaction:
                transaction.commit(consumer)
            assert consumer.committed("invoices", 0) == 1
        assert broker.transactions.delete("billing")
    assert bodies(server) == [b"a"]
    asyncio.run(in_tasks(server.url))


async def in_tasks(url: str) -> None:
    async with holdfast.aio.connect(url) as broker:
        async with broker.transaction() as transaction:
            transaction.publish("invoices", b"b")
        assert transaction.stored[0].offset == 1


def test_the_command_line_commits_lists_and_forgets(tmp_path: Path):
    folder = str(tmp_path / "data")

    def run(*words: str, given: str = "", code: int = 0) -> str:
        command = [sys.executable, "-m", "holdfast", *words]
        found = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120, check=False)
        assert found.returncode == code, found.stderr
        return found.stdout + found.stderr

    run("topic", "create", folder, "invoices")
    given = json.dumps({"messages": [{"topic": "invoices", "text": "x"}], "documents": [{"name": "d", "value": 1}]})
    assert run("transaction", "commit", folder, given=given) == "invoices-0-0\n"
    assert "no transactions" in run("transaction", "ls", folder)
    with holdfast.open_broker(folder) as broker, broker.transaction("billing") as transaction:
        transaction.publish("invoices", b"y")
    assert json.loads(run("transaction", "ls", folder, "--json"))["name"] == "billing"
    assert "committed" in run("transaction", "ls", folder)
    assert "forgotten" in run("transaction", "rm", folder, "billing")
    run("transaction", "rm", folder, "billing", code=3)
    for wrong in ("{", '{"colour": 1}', '{"messages": [{"topic": "nowhere", "text": "x"}]}'):
        assert "Traceback" not in run("transaction", "commit", folder, given=wrong, code=2)
    assert "cannot be read" in run("transaction", "commit", folder, "no such file", code=2)
