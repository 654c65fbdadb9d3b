"""Names beside the topics: whose groups, producers, locks and documents they are, and who may make groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast.errors import Empty, Forbidden
from holdfast.server.tokens import digest_of
from tests.integration.http_gear import Answer, Serving, serving

# Two teams; each has the names that begin with its letter.
TEAMS: dict[str, dict[str, Any]] = {
    "root": {"role": "admin"},
    "aprod": {"role": "producer", "topics": ["a.*"]},
    "acons": {"role": "consumer", "topics": ["a.*"], "create_groups": True},
    "aadmin": {"role": "admin", "topics": ["a.*"]},
    "bprod": {"role": "producer", "topics": ["b.*"]},
    "bcons": {"role": "consumer", "topics": ["b.*"], "create_groups": True},
    "plain": {"role": "consumer", "topics": ["b.*"]},
    "named": {"role": "consumer", "topics": ["b.*"], "groups": ["shared.*"], "create_groups": True},
    "writer": {"role": "producer", "topics": ["b.*"], "producers": ["payments"]},
    "both": {"role": "consumer", "topics": ["a.*", "b.*"], "groups": ["*"], "create_groups": True},
    "onlya": {"role": "consumer", "topics": ["a.*"], "groups": ["*"], "create_groups": True},
}


class Teams:
    """A server with two topics, and a token for each caller."""

    def __init__(self, server: Serving) -> None:
        self.server = server

    def call(self, who: str, method: str, path: str, body: Any = None, **more: Any) -> Answer:
        return self.server.request(method, path, body, token=f"token-of-{who}", **more)

    def post(self, who: str, path: str, body: Any = None, **more: Any) -> Answer:
        return self.call(who, "POST", path, {} if body is None else body, **more)

    def get(self, who: str, path: str, **more: Any) -> Answer:
        return self.call(who, "GET", path, **more)

    def join(self, who: str, group: str, *topics: str, **more: Any) -> Answer:
        return self.post(who, f"/v1/groups/{group}/members", {"topics": list(topics), **more})


def tokens_file(folder: Path, callers: dict[str, dict[str, Any]]) -> str:
    path = folder / "tokens.json"
    path.touch(mode=0o600)
    listed = [{"name": name, "sha256": digest_of(f"token-of-{name}"), **facts} for name, facts in callers.items()]
    path.write_bytes(msgspec.json.encode({"tokens": listed}))
    return str(path)


@contextmanager
def teams(folder: Path) -> Iterator[Teams]:
    with serving(folder / "data", whole=True, tokens_file=tokens_file(folder, TEAMS), max_wait_ms=1) as server:
        found = Teams(server)
        for topic in ("a.x", "b.x"):
            assert found.call("root", "PUT", f"/v1/queues/{topic}", {}).status == 200
        yield found


def refused(answer: Answer, *words: str) -> None:
    assert (answer.status, answer.code) == (403, "forbidden"), answer
    for each in words:
        assert each in answer.body["error"]["message"]


def test_a_producer_of_one_team_cannot_fence_that_of_another(tmp_path: Path):
    with teams(tmp_path) as there:
        begun = there.post("bprod", "/v1/producers", {"name": "b.payments"})
        assert begun.status == 201
        refused(there.post("aprod", "/v1/producers", {"name": "b.payments"}), "'b.payments'", "a.*", "producers")
        refused(there.post("aprod", "/v1/producers", {"name": "b.payments", "resume": True}))
        append = "/v1/topics/b.x/partitions/0/append"
        query = {"producer": begun.body["id"], "sequence": 0}
        batch = {"messages": [{"text": "1"}]}
        assert there.post("bprod", append, batch, query=query).status == 201
        assert there.post("aprod", "/v1/producers", {"name": "a.payments"}).status == 201
        assert there.post("aprod", "/v1/producers", {}).status == 201  # without a name there is nobody to fence


def test_a_named_producer_is_used_only_by_those_who_may_be_it(tmp_path: Path):
    with teams(tmp_path) as there:
        begun = there.post("writer", "/v1/producers", {"name": "payments"}).body
        refused(there.post("bprod", "/v1/producers", {"name": "payments"}))
        query = {"producer": begun["id"], "sequence": 0}
        path = "/v1/topics/b.x/partitions/0"
        batch = {"messages": [{"text": "1"}]}
        refused(there.post("bprod", f"{path}/append", batch, query=query), "'payments'")
        refused(there.get("bprod", f"{path}/sequence", query={"producer": begun["id"]}), "'payments'")
        assert there.post("writer", f"{path}/append", batch, query=query).status == 201
        assert there.get("writer", f"{path}/sequence", query={"producer": begun["id"]}).body == {"sequence": 1}
        refused(there.post("writer", "/v1/producers", {"name": "b.other"}), "payments")


def test_a_group_of_one_team_is_out_of_reach_of_another(tmp_path: Path):
    with teams(tmp_path) as there:
        joined = there.join("bcons", "b.readers", "b.x", instance_id="w1")
        assert joined.status == 201
        refused(there.join("acons", "b.readers", "a.x", instance_id="w1"), "'b.readers'", "a.*")
        member = f"/v1/groups/b.readers/members/{joined.body['member']}"
        for method, path, body in (
            ("POST", f"{member}/heartbeat", {}),
            ("POST", f"{member}/poll", {"poll": 1}),
            ("POST", f"{member}/commit", {"offsets": [{"topic": "b.x", "partition": 0, "offset": 0}]}),
            ("POST", f"{member}/seek", {"to": "start"}),
            ("DELETE", member, None),
            ("GET", "/v1/groups/b.readers", None),
            ("GET", "/v1/groups/b.readers/offsets", None),
        ):
            refused(there.call("acons", method, path, body))
        refused(there.call("aadmin", "DELETE", "/v1/groups/b.readers"))
        refused(there.post("aadmin", "/v1/groups/b.readers/reset", {"topic": "a.x", "to": "earliest"}))
        assert there.post("bcons", f"{member}/heartbeat").status == 200


def test_nobody_takes_a_name_of_another_team_first(tmp_path: Path):
    with teams(tmp_path) as there:
        eager = {"settings": {"rebalance": "eager", "assignor": "range"}}
        refused(there.join("acons", "b.readers", "a.x", **eager))
        assert there.join("bcons", "b.readers", "b.x").status == 201
        assert there.join("acons", "a.readers", "a.x", **eager).status == 201


def test_a_group_is_joined_only_by_those_who_may_consume_all_that_it_reads(tmp_path: Path):
    with teams(tmp_path) as there:
        reading = there.join("both", "everything", "a.x", "b.x")
        assert reading.status == 201
        refused(there.join("onlya", "everything", "a.x"), "'b.x'")
        member = f"/v1/groups/everything/members/{reading.body['member']}"
        assert there.call("both", "DELETE", member).status == 204
        refused(there.join("onlya", "everything", "a.x"), "'b.x'")  # what was committed stays the group's
        refused(there.call("aadmin", "DELETE", "/v1/groups/everything"))
        assert there.call("root", "DELETE", "/v1/groups/everything").status == 204
        assert there.join("onlya", "everything", "a.x").status == 201


def test_lists_show_only_the_groups_that_the_caller_may_use(tmp_path: Path):
    with teams(tmp_path) as there:
        assert there.join("root", "b.readers", "b.x").status == 201
        assert there.join("root", "ops", "b.x").status == 201
        assert there.call("root", "PUT", "/v1/topics/b.x/groups/billing", {}).status == 200
        assert there.call("root", "PUT", "/v1/topics/b.x/groups/shared.one", {}).status == 200

        def seen(who: str) -> list[tuple[str, str]]:
            return [(each["name"], each["mode"]) for each in there.get(who, "/v1/groups").body["groups"]]

        assert seen("bcons") == [
            ("b.readers", "stream"),
            ("billing", "queue"),
            ("default", "queue"),
            ("shared.one", "queue"),
        ]
        assert seen("named") == [("default", "queue"), ("shared.one", "queue")]
        assert {"ops", "b.readers"} <= {name for name, _ in seen("root")}
        topic = there.get("bcons", "/v1/topics/b.x").body
        assert topic["stream_groups"] == ["b.readers"]
        assert there.get("named", "/v1/topics/b.x").body["groups"] == ["default", "shared.one"]
        (standing,) = there.get("bcons", "/v1/standing").body["topics"]
        assert "ops" not in [group["name"] for group in standing["groups"]]
        for page in ("/ui/groups", "/ui/workers", "/ui/queues/b.x", "/ui"):
            shown = there.get("named", page).body.decode()
            assert "billing" not in shown, page
            assert "b.readers" not in shown, page
            assert ">ops<" not in there.get("bcons", page).body.decode(), page
        assert "billing" in there.get("bcons", "/ui/groups").body.decode()
        refused(there.get("bcons", "/ui/groups/ops"))


def test_listed_groups_hold_in_queue_mode_too_and_the_default_group_is_the_topics(tmp_path: Path):
    with teams(tmp_path) as there:
        assert there.call("root", "PUT", "/v1/topics/b.x/groups/billing", {}).status == 200
        path = "/v1/queues/b.x"
        assert there.post("named", f"{path}/dequeue").status == 200
        assert there.post("named", f"{path}/dequeue", {"group": "shared.one"}).status == 200
        for method, verb, body, query in (
            ("POST", "dequeue", {"group": "billing"}, {}),
            ("POST", "dequeueWithState", {"group": "billing"}, {}),
            ("POST", "subscribe", {"group": "billing"}, {}),
            ("POST", "ack", {"group": "billing", "receipts": ["x"]}, {}),
            ("GET", "stats", None, {"group": "billing"}),
            ("GET", "peek", None, {"group": "billing"}),
            ("GET", "dead", None, {"group": "billing"}),
            ("GET", "watch", None, {"group": "billing"}),
            ("GET", "committed", None, {"group": "billing"}),
        ):
            refused(there.call("named", method, f"{path}/{verb}", body, query=query), "'billing'", "shared.*")
        refused(there.get("named", "/ui/queues/b.x", query={"group": "billing"}))
        assert there.post("plain", f"{path}/dequeue", {"group": "billing"}).status == 200  # guarded by its topic


def test_the_life_of_a_message_leaves_out_groups_that_the_caller_may_not_use(tmp_path: Path):
    with teams(tmp_path) as there:
        settings = {"settings": {"trace_sample": 1.0}}
        assert there.call("root", "PUT", "/v1/queues/b.x", settings).status == 200
        assert there.call("root", "PUT", "/v1/topics/b.x/groups/billing", {}).status == 200
        stored = there.post("root", "/v1/queues/b.x/enqueue", b"1").body["id"]
        for group in ("default", "billing"):
            there.post("root", "/v1/queues/b.x/dequeue", {"group": group})

        def groups(who: str, path: str, **query: str) -> set[str]:
            return {step.get("group", "") for step in there.get(who, path, query=query).body["steps"]}

        for path, query in ((f"/v1/traces/{stored}", {}), ("/v1/traces", {"topic": "b.x"})):
            assert groups("bcons", path, **query) == {"", "default", "billing"}
            assert groups("named", path, **query) == {"", "default"}
        refused(there.get("named", "/v1/traces", query={"topic": "b.x", "group": "billing"}))


def test_locks_and_documents_are_those_of_the_topics_where_nothing_else_is_said(tmp_path: Path):
    with teams(tmp_path) as there:
        taken = there.post("root", "/v1/locks/b.deploy/acquire", {"owner": "b"})
        assert taken.status == 200
        assert there.call("root", "PUT", "/v1/state/b.config", {"value": 1}).status == 200
        for method, path, body in (
            ("GET", "/v1/locks/b.deploy", None),
            ("POST", "/v1/locks/b.deploy/acquire", {}),
            ("POST", "/v1/locks/b.deploy/keepalive", {"lease_id": taken.body["lease_id"]}),
            ("POST", "/v1/locks/b.deploy/release", {"lease_id": taken.body["lease_id"]}),
            ("GET", "/v1/state/b.config", None),
            ("PUT", "/v1/state/b.config", {"value": 2}),
            ("DELETE", "/v1/state/b.config", None),
        ):
            refused(there.call("aadmin", method, path, body))
        assert there.get("aadmin", "/v1/locks").body == {"locks": []}
        assert there.get("aadmin", "/v1/state").body == {"names": []}
        assert "b.deploy" not in there.get("aadmin", "/ui/locks").body.decode()
        assert there.post("aadmin", "/v1/locks/a.deploy/acquire", {}).status == 200
        assert there.call("aadmin", "PUT", "/v1/state/a.config", {"value": 2}).status == 200


def test_making_a_group_is_a_right_of_its_own(tmp_path: Path):
    with teams(tmp_path) as there:
        path = "/v1/queues/b.x"
        for verb in ("dequeue", "dequeueWithState", "subscribe", "subscribeWithState"):
            refused(
                there.post("plain", f"{path}/{verb}", {"group": "new"}), "'new'", "create_groups", "PUT /v1/topics/b.x"
            )
        refused(there.join("plain", "b.new", "b.x"), "'b.new'", "create_groups")
        names = [group["name"] for group in there.get("root", "/v1/groups").body["groups"]]
        assert set(names) == {"default"}
        assert there.post("plain", f"{path}/dequeue").status == 200
        assert there.call("root", "PUT", "/v1/topics/b.x/groups/new", {}).status == 200
        assert there.post("plain", f"{path}/dequeue", {"group": "new"}).status == 200
        assert there.post("bcons", f"{path}/dequeue", {"group": "newer"}).status == 200
        assert there.join("bcons", "b.new", "b.x").status == 201
        assert there.join("plain", "b.new", "b.x").status == 201


def test_a_plain_consumer_works_on_a_queue_whoever_made_it_and_however(tmp_path: Path):
    with teams(tmp_path) as there:
        assert there.post("root", "/v1/topics", {"name": "b.topic"}).status == 201
        made = there.post("root", "/v1/queues/b.enqueued/enqueue", b"1", query={"create": "true"})
        assert made.status == 201
        for topic in ("b.x", "b.topic", "b.enqueued"):
            there.post("root", f"/v1/queues/{topic}/enqueue", b"2")
            (message, *_) = there.post("plain", f"/v1/queues/{topic}/dequeue").body["messages"]
            done = there.post("plain", f"/v1/queues/{topic}/ack", {"receipts": [message["receipt"]]})
            assert done.body == {"settled": 1}
        assert there.post("root", "/v1/topics", {"name": "b.other"}).status == 201
        there.post("root", "/v1/topics/b.other/messages", {"messages": [{"text": "3"}]})
        with holdfast.connect(there.server.url, token="token-of-plain") as broker:
            message = broker.queue("b.other", body_type=str).get(timeout=0)
            assert message.body == "3"
            message.ack()


def test_the_client_says_what_to_ask_the_operator_for(tmp_path: Path):
    with teams(tmp_path) as there, holdfast.connect(there.server.url, token="token-of-plain") as broker:
        group = broker.group("b.x", "new")
        with pytest.raises(Forbidden, match="create_groups"):
            group.receive(timeout=0)
        with pytest.raises(Empty):
            broker.group("b.x", "default").receive(timeout=0)


def test_an_open_server_lets_everybody_make_groups(tmp_path: Path):
    with serving(tmp_path / "data") as server:
        server.request("PUT", "/v1/queues/x", {})
        assert server.post("/v1/queues/x/dequeue", {"group": "new"}).status == 200
        assert server.post("/v1/groups/readers/members", {"topics": ["x"]}).status == 201
