"""Groups over a real socket: members that live elsewhere poll and commit, and lose nothing when an answer does."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.server.tokens import TokenEntry, digest_of, with_entry
from tests.integration.http_gear import Answer, Serving, serving


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data") as found:
        found.post("/v1/topics", {"name": "orders", "partitions": 2})
        yield found


class Client:
    """A member, as a client in any language would be one."""

    def __init__(self, server: Serving, group: str = "billing", **more: Any) -> None:
        self.server = server
        self.joined = server.post(f"/v1/groups/{group}/members", {"topics": ["orders"], **more})
        assert self.joined.status == 201, self.joined
        self.path = f"/v1/groups/{group}/members/{self.joined.body['member']}"
        self.number = 0

    def poll(self, **more: Any) -> Answer:
        self.number += 1
        return self.again(**more)

    def again(self, **more: Any) -> Answer:
        return self.server.post(f"{self.path}/poll", {"poll": self.number, **more})


def publish(server: Serving, *texts: str, partition: int = 0) -> None:
    messages = {"messages": [{"text": text} for text in texts]}
    assert server.post("/v1/topics/orders/messages", messages, query={"partition": partition}).status == 201


def texts(answer: Answer) -> list[str]:
    assert answer.status == 200, answer
    return [base64.b64decode(message["body"]).decode() for message in answer.body["messages"]]


def places(answer: Answer) -> list[tuple[str, int]]:
    return [(each["topic"], each["partition"]) for each in answer.body["assignment"]]


def at(offset: int, partition: int = 0) -> dict[str, Any]:
    return {"topic": "orders", "partition": partition, "offset": offset}


def committed(server: Serving, group: str = "billing") -> dict[int, int]:
    found = server.get(f"/v1/groups/{group}/offsets", query={"topic": "orders"}).body["offsets"]
    return {each["partition"]: each["offset"] for each in found}


def wait_until_somebody_waits(server: Serving, count: int = 1) -> None:
    while server.get("/v1/admin/status").body["waiters"] < count:
        pass


def test_a_member_gets_the_partitions_and_their_messages(server: Serving) -> None:
    member = Client(server)
    assert places(member.joined) == [("orders", 0), ("orders", 1)]
    assert member.joined.body["session_ms"] > member.joined.body["heartbeat_ms"]
    publish(server, "a", "b")
    publish(server, "c", partition=1)
    found = member.poll(wait=10)
    assert sorted(texts(found) + texts(member.poll())) == ["a", "b", "c"]


def test_a_poll_that_is_repeated_is_answered_with_the_same_messages(server: Serving) -> None:
    member = Client(server)
    publish(server, "a", "b", "c")
    assert texts(member.poll(max_records=2)) == ["a", "b"]
    assert texts(member.again(max_records=2)) == ["a", "b"]
    assert texts(member.poll()) == ["c"]


def test_a_poll_that_is_long_over_is_refused(server: Serving) -> None:
    member = Client(server)
    member.poll()
    member.poll()
    member.number = 1
    assert member.again().status == 400


def test_what_was_handled_is_committed_by_the_next_poll(server: Serving) -> None:
    member = Client(server)
    publish(server, "a", "b")
    member.poll()
    assert committed(server)[0] == 0
    assert "refused" not in member.poll(commit=[at(2)]).body
    assert committed(server)[0] == 2


def test_what_nobody_committed_comes_again_to_the_next_member(server: Serving) -> None:
    first = Client(server)
    publish(server, "a", "b", "c")
    assert texts(first.poll()) == ["a", "b", "c"]
    assert server.post(f"{first.path}/commit", {"offsets": [at(1)]}).body == {"committed": 1}
    assert server.request("DELETE", first.path).status == 204
    assert texts(Client(server).poll()) == ["b", "c"]


def test_a_poll_that_waits_is_woken_by_arrival(server: Serving) -> None:
    member, found = Client(server), list[Answer]()
    waiting = threading.Thread(target=lambda: found.append(member.poll(wait=-1)))
    waiting.start()
    wait_until_somebody_waits(server)
    publish(server, "late")
    waiting.join(30)
    assert texts(found[0]) == ["late"]


def test_a_client_that_goes_away_while_it_waits_loses_nothing(server: Serving) -> None:
    member = Client(server)
    connection = server.connection()
    connection.request("POST", f"{member.path}/poll", b'{"poll": 1, "wait": -1}')
    wait_until_somebody_waits(server)
    connection.close()
    publish(server, "a")
    assert texts(member.poll(wait=10)) == ["a"]


def test_a_newer_call_of_a_member_ends_a_poll_that_still_waits(server: Serving) -> None:
    member, found = Client(server), list[Answer]()
    waiting = threading.Thread(target=lambda: found.append(member.poll(wait=-1)))
    waiting.start()
    wait_until_somebody_waits(server)
    assert server.post(f"{member.path}/commit", {"offsets": [at(0)]}).status == 200
    waiting.join(30)
    assert texts(found[0]) == []


def test_a_member_hears_at_once_that_it_must_share(server: Serving) -> None:
    first, found = Client(server), list[Answer]()
    waiting = threading.Thread(target=lambda: found.append(first.poll(wait=-1)))
    waiting.start()
    wait_until_somebody_waits(server)
    second = Client(server)
    waiting.join(30)
    assert len(places(found[0])) == 1
    both = places(found[0])
    while len(both) < 2:
        both = [*places(first.poll()), *places(second.poll())]
    assert sorted(both) == [("orders", 0), ("orders", 1)]


def test_what_is_not_the_members_any_more_is_not_committed_by_a_poll(server: Serving) -> None:
    first = Client(server)
    publish(server, "a")
    publish(server, "b", partition=1)
    first.poll()
    second = Client(server)
    mine = places(first.poll())
    while len(mine) == 2 or not places(second.poll()):
        mine = places(first.poll())
    polled = first.poll(commit=[at(1, 0), at(1, 1)])
    lost = [each.get("partition", 0) for each in polled.body["refused"]]
    assert [partition for _, partition in mine] != lost
    assert sum(committed(server).values()) == 1
    direct = server.post(f"{first.path}/commit", {"offsets": [at(1, lost[0])]})
    assert (direct.status, direct.code) == (409, "fenced")


def test_a_member_that_is_not_heard_of_is_put_out(server: Serving) -> None:
    silent = Client(server, settings={"session_ms": 300})
    taken = threading.Event()
    other = Client(server)
    while len(places(other.poll(wait=1))) < 2:
        taken.wait(0.01)
    late = silent.poll()
    assert (late.status, late.code) == (409, "fenced")


def test_heartbeats_keep_a_member_that_works_for_long(server: Serving) -> None:
    member = Client(server, settings={"session_ms": 400})
    pause = threading.Event()
    for _ in range(12):
        pause.wait(0.1)
        beat = server.post(f"{member.path}/heartbeat")
        assert (beat.status, len(beat.body["assignment"])) == (200, 2)
    assert member.poll().status == 200


def test_a_static_member_that_comes_back_has_its_place(server: Serving) -> None:
    first = Client(server, instance_id="worker-1")
    second = Client(server, instance_id="worker-1")
    assert places(second.joined) == places(first.joined)
    assert first.poll().code == "fenced"


def test_a_member_reads_on_where_it_is_told_and_passes_over_what_is_paused(server: Serving) -> None:
    member = Client(server)
    publish(server, "a", "b")
    publish(server, "c", partition=1)
    assert len(texts(member.poll())) == 3
    moved = server.post(f"{member.path}/seek", {"topic": "orders", "partition": 0, "offset": 1})
    assert moved.body["assignment"][0]["position"] == 1
    paused = [{"topic": "orders", "partition": 0}]
    assert texts(member.poll(paused=paused)) == []
    assert texts(member.poll()) == ["b"]
    server.post(f"{member.path}/seek", {"to": "start"})
    assert len(texts(member.poll())) == 3


def test_settings_that_are_the_clients_business_are_refused(server: Serving) -> None:
    wrong = server.post("/v1/groups/g/members", {"topics": ["orders"], "settings": {"auto_commit": True}})
    assert (wrong.status, wrong.code) == (400, "bad_settings")
    unknown = server.post("/v1/groups/g/members", {"topics": ["nothing"]})
    assert (unknown.status, unknown.code) == (404, "unknown_topic")


def test_groups_are_listed_and_described(server: Serving) -> None:
    member = Client(server, owner="worker-7")
    publish(server, "a", "b")
    member.poll()
    server.request("PUT", "/v1/topics/orders/groups/mail", {})
    found = server.get("/v1/groups", query={"topic": "orders"}).body["groups"]
    assert [(each["name"], each["mode"], each["lag"]) for each in found] == [
        ("billing", "stream", 2),
        ("mail", "queue", 2),
    ]
    answer = server.get("/v1/groups/billing").body
    assert [each["holder"] for each in answer["stream"]["members"]] == ["worker-7"]
    assert answer["stream"]["state"] == "stable"
    missing = server.get("/v1/groups/nobody")
    assert (missing.status, missing.code) == (404, "unknown_group")


def test_a_group_is_reset_after_a_look_at_what_that_would_do(server: Serving) -> None:
    member = Client(server)
    publish(server, "a", "b", "c")
    member.poll()
    member.poll(commit=[at(3)])
    back = {"topic": "orders", "to": "earliest", "partition": 0}
    dry = server.post("/v1/groups/billing/reset", {**back, "dry_run": True}).body
    assert [(each["before"], each["after"], each["messages"]) for each in dry["partitions"]] == [(3, 0, 3)]
    busy = server.post("/v1/groups/billing/reset", back)
    assert (busy.status, busy.code) == (400, "invalid_request")
    server.request("DELETE", member.path)
    assert server.post("/v1/groups/billing/reset", back).status == 200
    assert texts(Client(server).poll()) == ["a", "b", "c"]
    both = server.post("/v1/groups/billing/reset", {"topic": "orders", "to": "latest", "offset": 1})
    assert both.status == 400


def test_a_group_is_deleted(server: Serving) -> None:
    member = Client(server)
    server.request("PUT", "/v1/topics/orders/groups/mail", {})
    assert server.request("DELETE", "/v1/groups/billing").status == 400
    server.request("DELETE", member.path)
    assert server.request("DELETE", "/v1/groups/billing").status == 204
    assert server.request("DELETE", "/v1/groups/mail", query={"topic": "orders"}).status == 204
    assert server.get("/v1/groups").body["groups"] == []
    assert server.request("DELETE", "/v1/groups/mail").code == "unknown_group"


def test_members_are_gone_with_the_server_and_what_they_committed_is_not(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server:
        server.post("/v1/topics", {"name": "orders"})
        member = Client(server)
        publish(server, "a", "b")
        member.poll()
        member.poll(commit=[at(1)])
    with serving(tmp_path / "data") as server:
        member.server = server
        assert member.poll().code == "fenced"
        assert texts(Client(server).poll()) == ["b"]


def test_a_member_is_nothing_to_those_who_may_not_read_its_topics(tmp_path: Path) -> None:
    text = ""
    for name, topics in (("all", ("*",)), ("mail", ("mail",))):
        entry = TokenEntry(name=name, sha256=digest_of(f"secret-{name}"), role="admin", topics=topics)
        text = with_entry(text, entry, "tokens")
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(text)
    tokens.chmod(0o600)
    with serving(tmp_path / "data", tokens_file=str(tokens)) as server:
        server.post("/v1/topics", {"name": "orders"}, token="secret-all")
        joined = server.post("/v1/groups/billing/members", {"topics": ["orders"]}, token="secret-all")
        path = f"/v1/groups/billing/members/{joined.body['member']}"
        for method, call, body in (
            ("POST", f"{path}/poll", {"poll": 1}),
            ("POST", f"{path}/heartbeat", None),
            ("POST", f"{path}/commit", {"offsets": [at(0)]}),
            ("POST", f"{path}/seek", {"to": "end"}),
            ("DELETE", path, None),
            ("DELETE", "/v1/groups/billing", None),
        ):
            assert server.request(method, call, body, token="secret-mail").code == "forbidden", call
        assert server.get("/v1/groups", token="secret-mail").body["groups"] == []
        assert server.get("/v1/groups/billing", token="secret-mail").code == "forbidden"
        assert server.post(f"{path}/heartbeat", token="secret-all").status == 200
