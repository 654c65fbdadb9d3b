"""Topics over a real socket: made, changed, read by offset, written by producers that send again."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from time import sleep
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast.server.turns import Scan
from tests.integration.http_gear import Serving, serving


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data") as found:
        yield found


@pytest.fixture
def orders(server: Serving) -> Serving:
    assert server.post("/v1/topics", {"name": "orders", "partitions": 2}).status == 201
    return server


def bodies(answer: Any) -> list[bytes]:
    return [base64.b64decode(message.get("body", "")) for message in answer.body["messages"]]


def begin(server: Serving, **more: Any) -> dict[str, Any]:
    answer = server.post("/v1/producers", more)
    assert answer.status == 201
    found: dict[str, Any] = answer.body
    return found


def append(server: Serving, producer: dict[str, Any], sequence: int, texts: list[str], partition: int = 0) -> Any:
    query = {"producer": producer["id"], "epoch": producer.get("epoch", 0), "sequence": sequence}
    body = {"messages": [{"text": text} for text in texts]}
    return server.post(f"/v1/topics/orders/partitions/{partition}/append", body, query=query)


def test_a_topic_is_made_described_changed_and_deleted(server: Serving) -> None:
    made = server.post("/v1/topics", {"name": "orders", "partitions": 3, "settings": {"retention_hours": 24}})
    assert (made.status, len(made.body["partitions"])) == (201, 3)
    changed = server.request("PATCH", "/v1/topics/orders", {"settings": {"max_attempts": 7}})
    assert changed.body["settings"] == {"max_attempts": 7, "retention_ms": 24 * 3_600_000}
    assert server.get("/v1/topics/orders").body["settings"] == changed.body["settings"]
    assert server.request("DELETE", "/v1/topics/orders").status == 204
    gone = server.get("/v1/topics/orders")
    assert (gone.status, gone.code) == (404, "unknown_topic")


def test_a_topic_that_is_there_already_is_refused_unless_that_is_fine(orders: Serving) -> None:
    again = orders.post("/v1/topics", {"name": "orders"})
    assert (again.status, again.code) == (409, "topic_exists")
    assert orders.post("/v1/topics", {"name": "orders", "exist_ok": True}).status == 201


@pytest.mark.parametrize(
    "wrong", [{"name": "../x"}, {"name": "a", "settings": {"nonsense": 1}}, {"name": "a", "settings": {"self": 1}}]
)
def test_a_topic_of_a_wrong_name_or_with_unknown_settings_is_refused(server: Serving, wrong: dict[str, Any]) -> None:
    assert server.post("/v1/topics", wrong).status == 400
    assert server.get("/v1/topics").body["topics"] == []


def test_topics_are_listed_some_at_a_time(server: Serving) -> None:
    for name in ("c", "a", "b"):
        server.post("/v1/topics", {"name": name})
    first = server.get("/v1/topics", query={"limit": 2}).body
    assert ([topic["name"] for topic in first["topics"]], first["more"]) == (["a", "b"], True)
    rest = server.get("/v1/topics", query={"limit": 2, "after": "b"}).body
    assert ([topic["name"] for topic in rest["topics"]], rest.get("more")) == (["c"], None)


def test_partitions_are_added(orders: Serving) -> None:
    assert len(orders.post("/v1/topics/orders/partitions", {"count": 2}).body["partitions"]) == 4


def test_a_topic_is_compacted_by_key(server: Serving) -> None:
    server.post("/v1/topics", {"name": "state", "settings": {"cleanup": "compact"}})
    batch = {"messages": [{"key": "k", "text": str(i)} for i in range(10)]}
    server.post("/v1/topics/state/messages", batch)
    assert server.post("/v1/topics/state/compact").body["removed_messages"] == 9
    read = server.get("/v1/topics/state/partitions/0/messages")
    assert bodies(read) == [b"9"]


def test_compacting_a_topic_that_keeps_everything_is_refused(orders: Serving) -> None:
    assert orders.post("/v1/topics/orders/compact").status == 400


def test_retention_is_applied_now_and_tells_what_is_gone(server: Serving) -> None:
    server.post("/v1/topics", {"name": "orders", "settings": {"retention_ms": 1}})
    server.post("/v1/topics/orders/messages", {"messages": [{"text": "old"}] * 3})
    sleep(0.01)  # they are older than a millisecond
    gone = server.post("/v1/topics/orders/apply-retention").body
    assert (gone["messages"], gone["dead_letters"], gone["segments"]) == (3, 0, 1)
    assert server.post("/v1/topics/nothing/apply-retention").code == "unknown_topic"


def test_a_group_in_queue_mode_has_settings_of_its_own(orders: Serving) -> None:
    made = orders.request("PUT", "/v1/topics/orders/groups/billing", {"settings": {"max_attempts": 2}})
    assert made.body["settings"]["max_attempts"] == 2
    assert orders.get("/v1/topics/orders").body["groups"] == ["billing"]


def test_messages_are_published_as_json_messagepack_and_lines(orders: Serving) -> None:
    path, into = "/v1/topics/orders/messages", {"partition": 1}
    orders.post(path, {"messages": [{"text": "json"}]}, query=into)
    packed = msgspec.msgpack.encode({"messages": [{"body": b"\x00\xff"}]})
    orders.post(path, packed, query=into, headers={"content-type": "application/msgpack"})
    lines = b'{"text": "line"}\n{"json": [1, 2]}\n'
    stored = orders.post(path, lines, query=into, headers={"content-type": "application/x-ndjson"})
    assert (stored.status, [each["offset"] for each in stored.body["stored"]]) == (201, [2, 3])
    read = orders.get("/v1/topics/orders/partitions/1/messages")
    assert bodies(read) == [b"json", b"\x00\xff", b"line", b"[1,2]"]
    assert (read.body["next_offset"], read.body["start"], read.body["end"]) == (4, 0, 4)


def test_a_partition_is_read_from_any_offset(orders: Serving) -> None:
    orders.post(
        "/v1/topics/orders/messages", {"messages": [{"text": str(i)} for i in range(5)]}, query={"partition": 0}
    )
    read = orders.get("/v1/topics/orders/partitions/0/messages", query={"offset": 2, "limit": 2})
    assert (bodies(read), read.body["next_offset"]) == ([b"2", b"3"], 4)
    beyond = orders.get("/v1/topics/orders/partitions/0/messages", query={"offset": 6})
    assert (beyond.status, beyond.code) == (416, "offset_out_of_range")
    assert beyond.body["error"]["facts"] == {"offset": 6, "start": 0, "end": 5}


def test_a_partition_that_is_not_there_is_refused(orders: Serving) -> None:
    assert orders.get("/v1/topics/orders/partitions/9/messages").status == 404
    assert orders.get("/v1/topics/orders/partitions/x/messages").status == 400


def test_reading_at_the_end_waits_until_something_comes(orders: Serving) -> None:
    found: list[Any] = []
    path = "/v1/topics/orders/partitions/0/messages"
    reader = threading.Thread(target=lambda: found.append(orders.get(path, query={"offset": 0, "wait": -1})))
    reader.start()
    while not orders.get("/v1/admin/status").body["waiters"]:
        pass
    orders.post("/v1/topics/orders/messages", {"messages": [{"text": "late"}]}, query={"partition": 0})
    reader.join(30)
    assert bodies(found[0]) == [b"late"]


def test_a_batch_sent_again_is_stored_once_and_answered_as_before(orders: Serving) -> None:
    producer = begin(orders)
    first = append(orders, producer, 0, ["a", "b"])
    assert (first.status, first.body["offsets"], first.body.get("duplicate")) == (201, [0, 1], None)
    again = append(orders, producer, 0, ["a", "b"])
    assert (again.status, again.body["offsets"], again.body["duplicate"]) == (201, [0, 1], True)
    assert append(orders, producer, 2, ["c"]).body["offsets"] == [2]
    assert bodies(orders.get("/v1/topics/orders/partitions/0/messages")) == [b"a", b"b", b"c"]


def test_a_gap_in_a_producers_numbers_is_refused_and_says_what_is_missing(orders: Serving) -> None:
    producer = begin(orders)
    append(orders, producer, 0, ["a"])
    gap = append(orders, producer, 5, ["f"])
    assert (gap.status, gap.code, gap.body["error"]["facts"]["expected"]) == (409, "out_of_sequence", 1)


def test_a_producer_of_the_same_name_fences_the_one_before(orders: Serving) -> None:
    first = begin(orders, name="importer")
    append(orders, first, 0, ["a"])
    second = begin(orders, name="importer")
    late = append(orders, first, 1, ["b"])
    assert (late.status, late.code) == (409, "fenced")
    assert append(orders, second, 0, ["c"]).status == 201


def test_a_producer_that_resumes_is_told_where_to_go_on(orders: Serving) -> None:
    append(orders, begin(orders, name="importer"), 0, ["a", "b", "c"])
    resumed = begin(orders, name="importer", resume=True)
    query = {"producer": resumed["id"], "since": resumed.get("since", 0)}
    answer = orders.get("/v1/topics/orders/partitions/0/sequence", query=query)
    assert answer.body == {"sequence": 3}
    answer = orders.get("/v1/topics/orders/partitions/0/sequence", query={**query, "first": 1, "count": 3})
    assert answer.body == {"sequence": 3, "offsets": [1, 2, None]}
    assert append(orders, resumed, 3, ["d"]).status == 201


def test_what_has_a_time_or_a_dedup_id_of_its_own_is_no_part_of_a_sequence(orders: Serving) -> None:
    producer = begin(orders)
    query = {"producer": producer["id"], "sequence": 0}
    late = orders.post("/v1/topics/orders/partitions/0/append", {"messages": [{"text": "a", "delay": 5}]}, query=query)
    assert (late.status, late.code) == (400, "invalid_request")


def test_delayed_messages_are_listed_by_time_and_taken_back(orders: Serving) -> None:
    for text, delay in (("late", 7200), ("soon", 3600)):
        orders.post("/v1/topics/orders/messages", {"messages": [{"text": text, "delay": delay}]})
    found = orders.get("/v1/topics/orders/delayed").body["messages"]
    assert [base64.b64decode(each["body"]) for each in found] == [b"soon", b"late"]
    path = f"/v1/topics/orders/delayed/{found[0]['id']}"
    assert orders.request("DELETE", path).body == {"cancelled": True}
    assert orders.request("DELETE", path).body == {"cancelled": False}
    assert len(orders.get("/v1/topics/orders/delayed").body["messages"]) == 1
    assert orders.request("DELETE", "/v1/topics/orders/delayed/nonsense").status == 404


def test_delayed_messages_are_listed_page_by_page_across_partitions(orders: Serving) -> None:
    orders.request("PATCH", "/v1/topics/orders", {"settings": {"partitions": 3}})
    at = "2100-01-01T00:00:00Z"  # the same for most, so that places with one time must be told apart
    drafts = [{"text": f"{i}", "at": at if i % 4 else "2099-01-01T00:00:00Z"} for i in range(12)]
    for draft in drafts:
        assert orders.post("/v1/topics/orders/messages", {"messages": [draft]}).status == 201
    whole = [each["id"] for each in orders.get("/v1/topics/orders/delayed").body["messages"]]
    assert len(set(whole)) == 12
    paged: list[str] = []
    query: dict[str, object] = {"limit": 5}
    while True:
        page = orders.get("/v1/topics/orders/delayed", query=query).body
        paged += [each["id"] for each in page["messages"]]
        assert page.get("scanned", 0) <= 5, "no more is looked at than is told"
        if not page.get("next"):
            break
        query["after"] = page["next"]
    assert paged == whole
    refused = orders.get("/v1/topics/orders/delayed", query={"after": "nonsense"})
    assert (refused.status, refused.code) == (400, "invalid_request")


def test_traces_are_found_page_by_page_and_a_page_looks_at_no_more_than_it_may(tmp_path: Path) -> None:
    with serving(tmp_path, scan_messages=7) as server:
        assert server.request("PUT", "/v1/queues/traced", {"settings": {"trace_sample": 1.0}}).status == 200
        for i in range(10):
            server.post("/v1/queues/traced/enqueue", b"%d" % i)
        whole: list[str] = []
        query: dict[str, object] = {"topic": "traced", "limit": 4}
        pages = 0
        while True:
            page = server.get("/v1/traces", query=query).body
            assert len(page["steps"]) <= 4
            whole += [step["id"] for step in page["steps"]]
            pages += 1
            if not page.get("next"):
                break
            query["after"] = page["next"]
        assert whole == [f"traced-0-{i}" for i in range(10)]
        assert pages >= 3
        rare = server.get("/v1/traces", query={"topic": "traced", "event": "acked"}).body
        assert (rare["steps"], bool(rare["next"])) == ([], True), "seven were looked at, and there are more"
        with holdfast.open_broker(server.url) as broker:
            assert [step.id for step in broker.search_traces(topic="traced", limit=9)] == whole[:9]


def test_the_last_traces_are_found_page_by_page_backwards_and_a_page_looks_at_no_more_than_it_may(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, scan_messages=7) as server:
        assert server.request("PUT", "/v1/queues/traced", {"settings": {"trace_sample": 1.0}}).status == 200
        for i in range(20):
            server.post("/v1/queues/traced/enqueue", b"%d" % i)
        whole, pages = [], 0
        query: dict[str, object] = {"topic": "traced", "limit": 4, "last": "true"}
        while True:
            page = server.get("/v1/traces", query=query).body
            assert len(page["steps"]) <= 4
            whole = [step["id"] for step in page["steps"]] + whole
            pages += 1
            if not page.get("next"):
                break
            query["after"] = page["next"]
        assert whole == [f"traced-0-{i}" for i in range(20)]
        assert pages >= 5
        rare = server.get("/v1/traces", query={"topic": "traced", "event": "acked", "last": "true"}).body
        assert (rare["steps"], bool(rare["next"])) == ([], True), "seven were looked at, and there are more"
        with holdfast.open_broker(server.url) as broker:
            assert [step.id for step in broker.search_traces(topic="traced", limit=9, last=True)] == whole[-9:]
            assert broker.search_traces(topic="traced", event="acked", last=True) == []
            assert len(broker.search_traces(topic="traced", since=timedelta(hours=1), last=True)) == 20


def test_the_life_of_a_message_is_told_page_by_page(tmp_path: Path) -> None:
    with serving(tmp_path, scan_messages=7) as server:
        assert server.request("PUT", "/v1/queues/traced", {"settings": {"trace_sample": 1.0}}).status == 200
        server.post("/v1/queues/traced/enqueue", b"a")
        receipt = server.post("/v1/queues/traced/dequeue", {}).body["messages"][0]["receipt"]
        for _ in range(8):
            extended = server.post("/v1/queues/traced/extend", {"receipts": [receipt], "lease": 60})
            assert extended.status == 200
            server.post("/v1/queues/traced/enqueue", b"others")
        whole: list[str] = []
        query: dict[str, object] = {"limit": 4}
        while True:
            page = server.get("/v1/traces/traced-0-0", query=query).body
            assert len(page["steps"]) <= 4
            whole += [step["step"] for step in page["steps"]]
            if not page.get("next"):
                break
            query["after"] = page["next"]
        assert whole == ["published", "leased", *["extended"] * 8]
        with holdfast.open_broker(server.url) as broker:
            assert [step.step for step in broker.trace("traced-0-0")] == whole


@pytest.mark.parametrize("path", ["/v1/traces/stats?topic=traced", "/v1/traces/traced-0-0"])
def test_numbers_and_lives_are_found_in_pieces_between_which_others_have_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    scans: list[int] = []
    begin = Scan.__init__

    def counted(self: Scan, most: int) -> None:
        scans.append(most)
        begin(self, most)

    with serving(tmp_path, scan_messages=7) as server:
        assert server.request("PUT", "/v1/queues/traced", {"settings": {"trace_sample": 1.0}}).status == 200
        for i in range(30):
            server.post("/v1/queues/traced/enqueue", b"%d" % i)
        monkeypatch.setattr(Scan, "__init__", counted)
        found = server.request("GET", path).body
        assert found.get("messages", 30) == 30
        assert len(scans) >= 30 / 7


def test_standing_is_told_page_by_page(orders: Serving) -> None:
    for i in range(4):
        assert orders.request("PUT", f"/v1/queues/more{i}", {}).status == 200
    whole = [topic["name"] for topic in orders.get("/v1/standing").body["topics"]]
    assert whole == sorted(whole)
    first = orders.get("/v1/standing", query={"limit": 2}).body
    rest = orders.get("/v1/standing", query={"after": first["next"]}).body
    assert [topic["name"] for page in (first, rest) for topic in page["topics"]] == whole
    assert (first["next"], rest.get("next")) == (whole[1], None)


def test_settings_of_a_topic_say_where_they_come_from(orders: Serving) -> None:
    orders.request("PATCH", "/v1/topics/orders/settings", {"settings": {"max_attempts": 4}})
    found = {each["name"]: each for each in orders.get("/v1/topics/orders/settings").body["settings"]}
    assert (found["max_attempts"]["value"], found["max_attempts"]["kind"]) == (4, "folder")
    assert found["lease_ms"].get("kind", "default") == "default"
    own = orders.get("/v1/topics/orders/settings", query={"all": "false"}).body["settings"]
    assert {each["name"] for each in own} == {"max_attempts", "partitions"}


def test_settings_of_the_server_are_told(server: Serving) -> None:
    found = {each["name"]: each["value"] for each in server.get("/v1/settings").body["settings"]}
    assert found["server.drain_ms"] == 2_000


def test_the_server_tells_how_it_does(orders: Serving) -> None:
    answer = orders.get("/v1/admin/status").body
    assert (answer["topics"], answer["connections"], answer["waiters"]) == (1, 1, 0)
    assert answer["disk_free_bytes"] > 0
    assert answer["uptime_seconds"] >= 0
    assert orders.post("/v1/admin/sync").status == 204


def test_the_life_of_a_message_is_told(server: Serving) -> None:
    server.post("/v1/topics", {"name": "traced", "settings": {"trace_sample": 1.0}})
    server.request("PUT", "/v1/topics/traced/groups/work", {})
    stored = server.post("/v1/topics/traced/messages", {"messages": [{"text": "a"}]}).body["stored"][0]
    taken = server.post("/v1/queues/traced/dequeue", {"group": "work"}).body["messages"][0]
    server.post("/v1/queues/traced/ack", {"group": "work", "receipts": [taken["receipt"]]})
    steps = [step["step"] for step in server.get(f"/v1/traces/{stored['id']}").body["steps"]]
    assert steps == ["published", "leased", "acked"]
    found = server.get("/v1/traces", query={"topic": "traced", "event": "acked"}).body["steps"]
    assert [step["id"] for step in found] == [stored["id"]]
    assert server.get("/v1/traces/stats", query={"topic": "traced"}).body["messages"] == 1


def test_a_body_that_is_no_json_is_refused(server: Serving) -> None:
    answer = server.post("/v1/topics", b"{", headers={"content-type": "application/json"})
    assert (answer.status, answer.code) == (400, "invalid_request")
    assert json.dumps(answer.body)
