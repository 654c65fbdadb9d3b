"""Several servers on one store: any node answers, and what was promised is kept whatever becomes of one of them."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import threading
import time
from collections import Counter

import pytest

import holdfast
import holdfast.aio
from holdfast.api import port_of
from holdfast.cluster.placement import ranked, shard_of_key, shard_of_topic
from holdfast.errors import Empty, Fenced, HoldfastError, LeaseLost, NotInCluster
from tests.integration.cluster_gear import NAMES, Cluster, Node, cluster, until
from tests.integration.process_gear import COMMAND, plain_environment
from tests.integration.store_servers import postgres, postgres_program

pytestmark = [pytest.mark.slow, pytest.mark.serial]

LARGE = bytes(range(256)) * 8192  # 2 MiB


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """A cluster in which nobody dies."""
    with cluster(tmp_path_factory.mktemp("quiet")) as made:
        yield made


# Any node answers


def test_what_is_put_at_one_node_is_taken_at_another(quiet: Cluster):
    for at, node in enumerate(quiet.nodes):
        topic = quiet.topic_on(node, f"through-{at}")
        for number, via in enumerate(quiet.nodes):
            with holdfast.open(f"{via.url}/{topic}") as queue:
                queue.put(b"%d" % number, durability="fsync")
        for number, via in enumerate(quiet.nodes):
            with holdfast.open(f"{via.url}/{topic}") as queue:
                message = queue.get(timeout=10)
                assert message.body == b"%d" % number
                message.extend(30)
                message.ack()
                if number == 2:
                    with pytest.raises(Empty):
                        queue.get(timeout=0)


def test_a_message_taken_at_one_node_is_acked_at_another_by_its_receipt(quiet: Cluster):
    topic = quiet.topic_on(quiet.nodes[0], "receipt")
    first, second = quiet.nodes[1], quiet.nodes[2]
    with holdfast.open(f"{first.url}/{topic}") as queue:
        queue.put(b"x")
    taken = first.post(f"/v1/queues/{topic}/dequeue", {"wait": 5})
    assert taken.status == 200, taken
    receipts = [each["receipt"] for each in taken.body["messages"]]
    settled = second.post(f"/v1/queues/{topic}/ack", {"receipts": receipts})
    assert settled.status == 200, settled


def test_a_get_that_waits_at_one_node_wakes_for_a_put_at_another(quiet: Cluster):
    topic = quiet.topic_on(quiet.nodes[0], "wake")
    got = []

    def take() -> None:
        with holdfast.open(f"{quiet.nodes[1].url}/{topic}") as queue:
            got.append(queue.get(timeout=20).body)

    taking = threading.Thread(target=take)
    taking.start()
    time.sleep(0.5)
    with holdfast.open(f"{quiet.nodes[2].url}/{topic}") as queue:
        queue.put(b"now")
    taking.join(20)
    assert got == [b"now"]


def test_large_messages_go_through_another_node_in_both_directions(quiet: Cluster):
    topic = quiet.topic_on(quiet.nodes[0], "large")
    body = LARGE * 4
    with (
        holdfast.open(f"{quiet.nodes[1].url}/{topic}") as queue,
        holdfast.open(f"{quiet.nodes[2].url}/{topic}") as other,
    ):
        queue.put(body)
        assert bytes(other.get(timeout=20).body) == body


def test_a_stream_goes_through_another_node(quiet: Cluster):
    topic = quiet.topic_on(quiet.nodes[0], "stream")
    with holdfast.open(f"{quiet.nodes[1].url}/{topic}") as queue:
        queue.put_many([b"%d" % number for number in range(50)])
        connection = quiet.nodes[2].connection()
        connection.request(
            "POST", f"/v1/queues/{topic}/subscribe", b'{"prefetch": 50}', {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        assert answer.status == 200
        assert b'"receipt"' in b"".join(answer.readline() for _ in range(10))
        connection.close()
        answer.close()


def test_calls_that_are_passed_on_share_connections(quiet: Cluster):
    owner, other = quiet.nodes[0], quiet.nodes[1]
    topic = quiet.topic_on(owner, "pooled")

    def accepted() -> float:
        lines = owner.get("/metrics").body.decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("holdfast_http_connections_total "))

    with holdfast.open(f"{other.url}/{topic}") as queue:
        queue.put(b"first")
        owners = port_of(queue).client.caller.owners
        owners.places.clear()
        owners.learn = lambda *_: None  # it would go straight
        before = accepted()
        for _ in range(60):
            queue.put(b"x")
    assert accepted() - before < 20


def test_a_taker_behind_another_node_that_goes_away_takes_nothing(quiet: Cluster):
    owner, other = quiet.nodes[0], quiet.nodes[1]
    topic = quiet.topic_on(owner, "gone")
    with holdfast.connect(owner.url) as broker:
        queue = broker.queue(topic)
        for wait in (0, 0, 0, 90):  # the head of the last one is known
            connection = socket.create_connection(("127.0.0.1", other.port), 60)
            body = b'{"wait": %2d}' % wait
            head = f"POST /v1/queues/{topic}/dequeue HTTP/1.1\r\nhost: 127.0.0.1:{other.port}\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            if wait:
                until(lambda: queue.stats().waiters == 1, "the call waits")
            else:
                assert connection.recv(65536).startswith(b"HTTP/1.1 2")
            connection.close()
        until(lambda: queue.stats().waiters == 0, "the owner knows that the caller has gone")
        queue.put(b"x")
        assert queue.get(timeout=10).body == b"x"


def passed(node: Node) -> float:
    """How many calls the node has passed on."""
    lines = node.get("/metrics").body.decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("holdfast_cluster_passed_calls_total "))


def test_our_client_goes_straight_to_the_owner(quiet: Cluster):
    owner, other = quiet.nodes[0], quiet.nodes[1]
    topic = quiet.topic_on(owner, "straight")
    with holdfast.connect(other.url) as broker:
        broker.create_topic(topic)
        queue = broker.queue(topic)
        producer = broker.producer()
        consumer = broker.consumer([topic], group="straight")
        queue.put(b"x")
        queue.get(timeout=10).ack()
        producer.send(topic, b"x").result(30)
        assert consumer.poll(timeout=10)
        before = passed(other)
        for number in range(20):
            queue.put(b"%d" % number)
            with queue.get(timeout=10):
                pass
            producer.send(topic, b"x").result(30)
            assert consumer.poll(timeout=10)
            consumer.commit()
        assert passed(other) - before < 10  # such as the signs of life of the consumer, once for each caller


def test_our_client_of_tasks_goes_straight_to_the_owner(quiet: Cluster):
    owner, other = quiet.nodes[0], quiet.nodes[1]
    topic = quiet.topic_on(owner, "straight-tasks")

    async def put_and_get() -> None:
        async with holdfast.aio.open(f"{other.url}/{topic}") as queue:
            await queue.put(b"x")
            await (await queue.get(timeout=10)).ack()
            before = passed(other)
            for number in range(20):
                await queue.put(b"%d" % number)
                async with await queue.get(timeout=10):
                    pass
            assert passed(other) - before < 5

    asyncio.run(put_and_get())


def test_lists_name_what_is_in_all_shards(quiet: Cluster):
    names = [f"listed-{number}" for number in range(20)]
    with quiet.connect() as broker:
        for name in names:
            broker.create_topic(name)
            broker.publish(name, b"x")
    assert len({shard_of_topic(name, quiet.shards) for name in names}) > 3
    for node in quiet.nodes:
        found = node.get("/v1/topics").body["topics"]
        assert [each["name"] for each in found if each["name"].startswith("listed-")] == sorted(names)
        paged, after = [], ""
        while True:
            page = node.get("/v1/topics", query={"limit": 7, **({"after": after} if after else {})}).body
            paged += [each["name"] for each in page["topics"]]
            if not page.get("more"):
                break
            after = paged[-1]
        assert paged == [each["name"] for each in found]
        assert {each["name"] for each in node.get("/v1/standing").body["topics"]} >= set(names)
    said = subprocess.run(
        [*COMMAND, "topic", "ls", quiet.nodes[1].url],
        capture_output=True,
        text=True,
        env=plain_environment(),
        timeout=60,
    )
    assert said.returncode == 0, said.stderr
    assert all(name in said.stdout for name in names)


def test_locks_and_documents_are_the_same_at_every_node(quiet: Cluster):
    first, second = quiet.connect(quiet.nodes[0]), quiet.connect(quiet.nodes[1])
    with first, second:
        for number in range(6):
            lock = first.locks.acquire(f"lock-{number}", lease=30)
            with pytest.raises(holdfast.LockHeld):
                second.locks.acquire(f"lock-{number}", lease=30, wait=0)
            second.documents.update(f"lock-{number}", {"n": number}, lock=lock)
        held = {each["name"] for each in quiet.nodes[2].get("/v1/locks").body["locks"]}
        assert held >= {f"lock-{number}" for number in range(6)}
        assert set(quiet.nodes[2].get("/v1/state").body["names"]) >= held


def test_a_stream_group_works_through_every_node(quiet: Cluster):
    topic = quiet.topic_on(quiet.nodes[0], "group")
    with quiet.connect(quiet.nodes[1]) as broker, quiet.connect(quiet.nodes[2]) as other:
        broker.create_topic(topic, partitions=2)
        broker.publish_many(topic, [b"%d" % number for number in range(20)])
        with other.consumer(topic, group="readers", start="earliest") as consumer:
            seen = []
            while len(seen) < 20:
                seen += [bytes(message.body) for message in consumer.poll(timeout=10)]
            consumer.commit()
        assert sorted(seen) == sorted(b"%d" % number for number in range(20))
        told = quiet.nodes[0].get("/v1/groups/readers").body
        assert told["topics"][0]["topic"] == topic


def test_one_consumer_reads_topics_of_several_shards(quiet: Cluster):
    topics = [quiet.topic_on(node, f"spread-{at}") for at, node in enumerate(quiet.nodes)]
    assigned, revoked, got = [], [], []
    with quiet.connect(quiet.nodes[1]) as broker:
        for topic in topics:
            broker.create_topic(topic, partitions=2)

        def publish(start: int) -> None:
            for topic in topics:
                for number in range(start, start + 10):
                    broker.publish(topic, b"%d" % number, partition=number % 2, durability="fsync")

        publish(0)
        with broker.consumer(
            topics, group="spread", on_assigned=assigned.append, on_revoked=revoked.append
        ) as consumer:
            places = sorted((topic, partition) for topic in topics for partition in (0, 1))
            assert assigned == [places], "told once of all"
            assert consumer.assignment() == places
            first = consumer.poll(timeout=10, max_records=9)
            assert {message.topic for message in first} == set(topics), "each topic has its share"
            got += first
            while len(got) < 30:
                got += consumer.poll(timeout=10)
            assert consumer.poll(timeout=0.1) == []
            publish(10)
            for message in consumer:  # an iteration reads ahead
                got.append(message)
                if len(got) == 45:
                    break
            consumer.commit()
            assert {lag.topic for lag in consumer.lag()} == set(topics)
        assert revoked == [places]
        with broker.consumer(topics, group="spread") as consumer:
            while len(got) < 60:
                got += consumer.poll(timeout=10)
            assert consumer.poll(timeout=0.1) == []
            consumer.seek_to_start(topics[0])
            again = []
            while len(again) < 20:
                again += consumer.poll(timeout=10)
            assert {message.topic for message in again} == {topics[0]}
    found = Counter((message.topic, message.partition, message.offset) for message in got)
    assert len(found) == 60, found
    assert max(found.values()) == 1
    for topic in topics:
        for partition in (0, 1):
            offsets = [m.offset for m in got if (m.topic, m.partition) == (topic, partition)]
            assert offsets == sorted(offsets)


def test_consumers_of_several_shards_divide_the_partitions(quiet: Cluster):
    topics = [quiet.topic_on(node, f"divided-{at}") for at, node in enumerate(quiet.nodes)]

    async def divide() -> None:
        async with holdfast.aio.connect(quiet.url) as broker:
            for topic in topics:
                await broker.create_topic(topic, partitions=2)
            async with broker.consumer(topics, group="two") as one, broker.consumer(topics, group="two") as other:
                both: list[tuple[str, int]] = []
                while len(both) < 6 or len(one.assignment()) != 3:
                    await one.poll(timeout=0.2)
                    await other.poll(timeout=0.2)
                    both = one.assignment() + other.assignment()
                assert sorted(both) == sorted((topic, partition) for topic in topics for partition in (0, 1))
                for topic in topics:
                    for partition in (0, 1):
                        await broker.publish(topic, b"x", partition=partition)
                got: list[tuple[str, int]] = []
                while len(got) < 6:
                    for consumer in (one, other):
                        found = await consumer.poll(timeout=0.2)
                        assert all((each.topic, each.partition) in consumer.assignment() for each in found)
                        got += [(each.topic, each.partition) for each in found]
                assert sorted(got) == sorted(both)

    asyncio.run(divide())


def test_what_a_cluster_cannot_do_yet_says_so(quiet: Cluster):
    here, there = (quiet.topic_on(node, "apart") for node in quiet.nodes[:2])
    with quiet.connect() as broker:
        for name in (here, there):
            broker.create_topic(name, exist_ok=True)
    node = quiet.nodes[0]
    joined = node.post("/v1/groups/both/members", {"topics": [here, there]})
    assert (joined.status, joined.code) == (501, "not_in_cluster")
    for method, path, body in (
        ("POST", "/v1/transactions/commit", {}),
        ("POST", f"/v1/queues/{here}/dead/redrive", {"to": there}),
    ):
        answer = node.request(method, path, body)
        assert (answer.status, answer.code) == (501, "not_in_cluster"), path


def test_a_search_goes_through_all_shards_page_by_page(quiet: Cluster):
    names = [quiet.topic_on(node, f"haystack-{at}") for at, node in enumerate([*quiet.nodes, *quiet.nodes])]
    with quiet.connect() as broker:
        for name in names:
            broker.queue(name).put_many([b"needle %d" % number for number in range(3)])
        found, after = [], ""
        while True:
            page = quiet.nodes[0].get("/v1/search", query={"q": "needle queue=haystack", "limit": 4, "after": after})
            assert page.status == 200, page
            assert len(page.body["messages"]) <= 4
            found += [(each["topic"], each["offset"]) for each in page.body["messages"]]
            after = page.body.get("next", "")
            if not after:
                break
            assert page.body.get("left") or page.body.get("queues")
        assert sorted(found) == sorted((name, offset) for name in names for offset in range(3))
        wrong = quiet.nodes[0].get("/v1/search", query={"q": "needle queue=haystack", "after": "99999.x"})
        assert (wrong.status, wrong.code) == (400, "invalid_request"), wrong


def test_traces_of_all_topics_come_in_order_of_time(quiet: Cluster):
    names = [quiet.topic_on(node, f"traced-{at}") for at, node in enumerate(quiet.nodes)]
    with quiet.connect() as broker:
        for name in names:
            broker.create_topic(name, trace_sample=1.0)
        for _ in range(5):
            for name in names:
                broker.publish(name, b"x")
    query = {"event": "published", "limit": 4}

    def pages(**more: object) -> list[list[tuple[int, str]]]:
        found, after = [], {}
        while True:
            page = quiet.nodes[1].get("/v1/traces", query={**query, **more, **after})
            assert page.status == 200, page
            steps = [step for step in page.body["steps"] if step["topic"] in names]
            found.append([(step["at_ns"], step["topic"]) for step in steps])
            if not page.body.get("next"):
                return found
            after = {"after": page.body["next"]}

    until(lambda: sum(map(len, pages())) == 15, "all steps were written")
    forwards = [step for page in pages() for step in page]
    assert forwards == sorted(forwards)
    assert [step for page in reversed(pages(last="true")) for step in page] == forwards
    stats = quiet.nodes[1].get("/v1/traces/stats").body
    assert stats["steps"]["published"] >= 15
    assert stats["messages"] >= 15


def test_samples_are_those_of_all_shards(quiet: Cluster):
    total = quiet.nodes[0].get("/v1/samples", query={"last": 900})
    assert total.status == 200, total
    assert total.body["mode"] == "total"
    assert [sample["at"] for sample in total.body["samples"]] == sorted(
        {sample["at"] for sample in total.body["samples"]}
    )


def test_schedules_live_with_their_topics_and_are_found_at_every_node(quiet: Cluster):
    names = [quiet.topic_on(node, f"due-{at}") for at, node in enumerate(quiet.nodes)]
    with quiet.connect(quiet.nodes[2]) as broker:
        for name in names:
            broker.create_topic(name)
            broker.schedules.put(f"of-{name}", name, b"now", every=3600)
    for node in quiet.nodes:
        with quiet.connect(node) as broker:
            listed = [each.name for each in broker.schedules.list()]
            assert [name for name in listed if name.startswith("of-due-")] == sorted(f"of-{name}" for name in names)
            name = names[0]
            broker.schedules.run_now(f"of-{name}")
            broker.schedules.pause(f"of-{name}")
            broker.schedules.resume(f"of-{name}")
    with quiet.connect() as broker:
        assert len(broker.read(names[0], limit=10)) == 3
        with pytest.raises(NotInCluster, match="in another shard"):
            broker.schedules.put(f"of-{names[0]}", names[1], b"now", every=3600)
        for name in names:
            assert broker.schedules.delete(f"of-{name}")
        assert not broker.schedules.delete(f"of-{names[0]}")
        assert broker.schedules.get("of-nowhere") is None


def page(node: Node, path: str) -> str:
    answer = node.get(path, headers={"accept": "text/html"})
    assert answer.status == 200, (path, answer)
    return answer.body.decode()


def test_the_console_shows_the_queues_of_all_shards(quiet: Cluster):
    names = [quiet.topic_on(node, f"shown-{at}") for at, node in enumerate([*quiet.nodes, *quiet.nodes])]
    with quiet.connect() as broker:
        for name in names:
            broker.queue(name).put(b"needle-in-page")
            broker.consumer([name], group=f"of-{name}").close()
        broker.schedules.put("paged", names[0], b"x", every=3600)
        broker.locks.acquire("paged-lock", lease=60)
    for node in quiet.nodes:
        text = page(node, "/ui?name=shown-")
        assert [name in text for name in names] == [True] * 6
        first, second = (page(node, f"/ui?name=shown-&limit=3&start={start}") for start in (0, 3))
        assert [f"/ui/queues/{name}" in first for name in sorted(names)] == [True] * 3 + [False] * 3
        assert [f"/ui/queues/{name}" in second for name in sorted(names)] == [False] * 3 + [True] * 3
        groups = page(node, "/ui/groups?name=shown-")
        assert all(f"of-{name}" in groups for name in names)
        assert names[0] in page(node, f"/ui/groups/of-{names[0]}")
        assert "needle-in-page" in page(node, f"/ui/queues/{names[0]}")
        assert "paged" in page(node, "/ui/schedules?schedule=paged")
        assert "paged-lock" in page(node, "/ui/locks")
        found = page(node, "/ui/search?q=needle-in-page+queue%3Dshown")
        assert all(f"/ui/queues/{name}/messages/" in found for name in names)
        assert quiet.place in page(node, "/ui/health")
        page(node, "/ui/workers")
        page(node, "/ui/audit")
        assert page(node, "/ui/static/console.css")
        missing = node.get("/ui/queues/nowhere", headers={"accept": "text/html"})
        assert missing.status == 404
        assert b"<html" in missing.body


def test_the_page_of_the_cluster_shows_owners_epochs_and_standbys(quiet: Cluster):
    node = quiet.nodes[1]
    owners = node.shards()
    text = page(node, "/ui/cluster")
    for shard, owner in owners.items():
        row = text.partition(f">{shard:04d}<")[2].partition("</tr>")[0]
        assert f">{owner}<" in row, row
        standby = row.partition('data-label="standby">')[2].partition("<")[0]
        assert standby in {each.name for each in quiet.nodes} - {owner}, row
    assert all(each.url in text for each in quiet.nodes)
    assert "Cluster" in page(node, "/ui")


def test_an_unknown_topic_is_not_compared_with_those_of_its_shard_alone(quiet: Cluster):
    answer = quiet.nodes[0].get("/v1/topics/nowhere")
    assert answer.code == "unknown_topic"
    assert "none yet" not in answer.body["error"]["message"]


def test_a_newer_producer_fences_the_older_one_in_every_shard(quiet: Cluster):
    topics = [quiet.topic_on(node, "fence") for node in quiet.nodes]
    begun = [quiet.nodes[0].post("/v1/producers", {"name": "one"}).body for _ in range(2)]
    with quiet.connect() as broker:
        for topic in topics:
            broker.create_topic(topic, exist_ok=True)
    for node, topic in zip(quiet.nodes, topics, strict=True):
        query = {"producer": begun[0]["id"], "epoch": begun[0].get("epoch", 0), "sequence": 0}
        answer = node.post(f"/v1/topics/{topic}/partitions/0/append", {"messages": [{"body": "eA=="}]}, query=query)
        assert answer.code == Fenced.code, answer


def test_the_metrics_of_a_node_are_those_of_its_own_shards(quiet: Cluster):
    text = quiet.nodes[0].get("/metrics").body.decode()
    assert "holdfast_cluster_nodes 3.0" in text
    owned = {shard for shard, node in quiet.nodes[0].shards().items() if node == quiet.nodes[0].name}
    assert f"holdfast_cluster_owned_shards {len(owned)}.0" in text
    lines = [line for line in text.splitlines() if line.startswith("holdfast_store_epoch{")]
    assert {int(line.partition('shard="')[2].partition('"')[0]) for line in lines} == owned
    told = quiet.nodes[0].get("/v1/admin/status").body
    assert told["folder"] == quiet.place
    assert told["topics"] == len(quiet.nodes[1].get("/v1/topics").body["topics"])


def test_only_nodes_may_say_that_they_are_nodes(quiet: Cluster):
    node = quiet.nodes[0]
    topic = quiet.topic_on(quiet.nodes[1], "forged")
    for path in (f"/v1/topics/{topic}", "/v1/cluster/release", "/v1/cluster/node"):
        answer = node.get(path, headers={"x-holdfast-node": "0" * 64, "x-holdfast-peer": "local"})
        assert (answer.status, answer.code) == (403, "forbidden"), path
    assert node.get("/v1/cluster/node").status == 404  # without it, there is no such place
    # A call that says that it was passed on is not passed on again, and gets no other right by that.
    assert node.get(f"/v1/topics/{topic}", headers={"x-holdfast-hop": "1"}).status == 421


def test_nobody_but_a_node_can_name_an_owner(quiet: Cluster):
    owner, other = quiet.nodes[0], quiet.nodes[1]
    topic = quiet.topic_on(owner, "named")
    with holdfast.connect(owner.url) as broker:
        broker.create_topic(topic)
    evil = {"x-holdfast-owner": "http://127.0.0.1:1"}
    path = f"/v1/queues/{topic}/enqueue"
    passed_on = other.request("POST", path, b"x", headers=evil)
    assert passed_on.status < 300, passed_on
    assert passed_on.headers["x-holdfast-owner"] == owner.url
    assert "x-holdfast-owner" not in owner.request("POST", path, b"x", headers=evil).headers


def test_who_calls_goes_along_to_the_owner(tmp_path):
    tokens = tmp_path / "tokens.toml"
    made = {}
    for name, topics in (("all", "*"), ("some", "mine*")):
        said = subprocess.run(
            [*COMMAND, "token", "new", name, "--role", "publish,consume,read,admin", "--topics", topics,
             "--file", str(tokens), "--json"],
            capture_output=True, text=True, env=plain_environment(), timeout=60, check=True,
        )  # fmt: skip
        made[name] = json.loads(said.stdout)["token"]
    with cluster(tmp_path, "--tokens", str(tokens), nodes=2, shards=4) as two:

        def owners_of() -> dict[int, str]:
            answer = two.nodes[0].get("/v1/cluster", token=made["all"])
            told = answer.body["shards"] if answer.status == 200 else []
            return {each["shard"]: each.get("node", "") for each in told}

        until(lambda: {node.name for node in two.nodes} <= set(owners_of().values()), "each node owns shards")
        owners = owners_of()
        other = next(shard for shard, name in owners.items() if name == two.nodes[1].name)
        mine, yours = (
            next(f"{start}{n}" for n in range(1000) if shard_of_topic(f"{start}{n}", 4) == other)
            for start in ("mine", "yours")
        )
        for name in (mine, yours):
            assert two.nodes[0].request("PUT", f"/v1/queues/{name}", {}, token=made["all"]).status < 300
        put = {"body": "eA=="}
        via = two.nodes[0]
        assert via.post(f"/v1/queues/{mine}/enqueue", put, token=made["some"]).status < 300
        assert via.post(f"/v1/queues/{yours}/enqueue", put, token=made["some"]).code == "forbidden"
        assert via.post(f"/v1/queues/{yours}/enqueue", put).code == "unauthenticated"
        assert via.post(f"/v1/queues/{yours}/enqueue", put, token=made["all"]).status < 300
        names = [each["name"] for each in via.get("/v1/topics", token=made["some"]).body["topics"]]
        assert names == [mine]
        acts = via.get("/v1/admin/audit", token=made["all"])
        assert acts.status == 200


# Whatever becomes of a node


class Load:
    """Producers and consumers that run while nodes come and go, and what was acknowledged to them."""

    def __init__(self, made: Cluster, topics: list[str]) -> None:
        self.made, self.topics = made, topics
        self.put: set[tuple[str, bytes]] = set()
        self.got: Counter[tuple[str, bytes]] = Counter()
        self.failed: list[BaseException] = []
        self.longest_s = 0.0
        self.leases_lost = 0
        self.ending = threading.Event()
        with made.connect() as broker:
            for topic in topics:
                broker.create_topic(topic, exist_ok=True)
        self._producing = [threading.Thread(target=self._produce, args=(topic,)) for topic in topics]
        self._consuming = [threading.Thread(target=self._consume, args=(topic,)) for topic in topics]

    def __enter__(self) -> Load:
        for thread in (*self._producing, *self._consuming):
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        for thread in (*self._producing, *self._consuming):
            thread.join(90)
            assert not thread.is_alive()

    def _produce(self, topic: str) -> None:
        try:
            with self.made.connect() as broker:
                number = 0
                while not self.ending.is_set():
                    began = time.monotonic()
                    body = b"%s %d" % (topic.encode(), number)
                    broker.publish(topic, body, dedup_id=f"{topic}-{number}", durability="fsync")
                    self.put.add((topic, body))
                    self.longest_s = max(self.longest_s, time.monotonic() - began)
                    number += 1
                    time.sleep(0.005)
        except BaseException as error:
            self.failed.append(error)

    def _consume(self, topic: str) -> None:
        try:
            with holdfast.open(",".join(f"{node.url}/{topic}" for node in self.made.nodes)) as queue:
                while True:
                    try:
                        message = queue.get(timeout=2, lease=60)
                    except Empty:
                        if self.ending.is_set() and not any(thread.is_alive() for thread in self._producing):
                            return
                        continue
                    try:
                        message.ack(durability="fsync")
                    except LeaseLost:  # its owner died before the store had the lease: it is delivered again
                        self.leases_lost += 1
                        continue
                    self.got[topic, bytes(message.body)] += 1
        except BaseException as error:
            self.failed.append(error)

    def stored(self) -> Counter[tuple[str, bytes]]:
        """How often each message is in its topic."""
        found: Counter[tuple[str, bytes]] = Counter()
        with self.made.connect() as broker:
            for topic in self.topics:
                offset = 0
                while True:
                    records = broker.read(topic, offset=offset, limit=1_000)
                    if not records:
                        break
                    found.update((topic, bytes(each.body)) for each in records)
                    offset = records[-1].offset + 1
        return found

    def check(self) -> None:
        assert not self.failed, self.failed
        stored = self.stored()
        assert not self.put - set(stored), "a message that was acknowledged is gone"
        assert max(stored.values()) == 1, "a message with a dedup id was stored twice"
        assert not self.put - set(self.got), "a message was never delivered"


def test_nothing_is_lost_or_doubled_when_an_owner_is_killed(tmp_path):
    with cluster(tmp_path) as three:
        victim = three.busiest()
        topics = [three.topic_on(node, f"kill-{at}") for at, node in enumerate([victim, victim, *three.nodes])]
        with Load(three, topics) as load:
            time.sleep(1.0)
            before = len(load.put)
            victim.kill()
            time.sleep(4.0)
            assert len(load.put) > before
            victim.start()
            time.sleep(3.0)
        load.check()
        assert load.longest_s < 10, load.longest_s
        three.wait_until_whole()
        until(lambda: victim.name in victim.shards().values(), "the node owns shards again")


def test_no_message_is_in_two_hands_when_an_owner_is_stopped_and_woken(tmp_path):
    with cluster(tmp_path) as three:
        victim = three.busiest()
        others = [node for node in three.nodes if node is not victim]
        topic = three.topic_on(victim, "stop")
        with three.connect(*others) as broker:
            broker.create_topic(topic)
            broker.publish_many(topic, [b"%d" % number for number in range(100)], durability="fsync")
        held: list[str] = []
        with (
            holdfast.open(f"{others[0].url}/{topic}") as queue,
            holdfast.open(f"{victim.url}/{topic}", timeout=60) as old,
        ):
            first = old.get(timeout=5, lease=120)  # synced before it is stopped, as is its lease
            held.append(first.id)
            time.sleep(0.5)
            victim.send(signal.SIGSTOP)
            began = time.monotonic()
            waiting: list[str] = []

            def take_at_the_stopped_one() -> None:
                waiting.extend(message.id for message in old.get_many(50, timeout=30, lease=120))

            taking = threading.Thread(target=take_at_the_stopped_one)
            taking.start()
            mine = [message.id for message in queue.get_many(50, timeout=30, lease=120)]
            gap_s = time.monotonic() - began
            victim.send(signal.SIGCONT)
            taking.join(60)
            held += mine + waiting
        assert gap_s < 12, gap_s
        assert mine
        assert max(Counter(held).values()) == 1, Counter(held).most_common(3)


def test_a_rolling_restart_fails_no_call_of_our_client(tmp_path):
    with cluster(tmp_path) as three:
        topics = [three.topic_on(node, f"roll-{at}") for at, node in enumerate(three.nodes)]
        with Load(three, topics) as load:
            time.sleep(0.5)
            for node in three.nodes:
                assert node.stop() == 0
                node.start()
                three.wait_until_whole()
        load.check()
        assert load.longest_s < 10, load.longest_s
        assert max(load.got.values()) == 1, "a message was delivered twice although nobody died"
    assert not load.leases_lost, "a lease was lost although nobody died"


def test_one_node_is_a_cluster_and_a_second_one_takes_its_share(tmp_path):
    with cluster(tmp_path, nodes=2, shards=20) as two:  # so many that each node wins some
        first, second = two.nodes
        assert second.stop() == 0
        until(lambda: set(first.shards().values()) == {first.name}, "the first node has all")
        names = (f"alone-{number}" for number in range(1_000))
        topic = next(name for name in names if ranked(shard_of_topic(name, 20), NAMES[:2])[0] == second.name)
        with holdfast.open(f"{first.url}/{topic}") as queue:
            for number in range(5):  # so often that the first node knows the heads of these calls by heart
                queue.put(b"%d" % number, durability="fsync")
            second.start()
            until(lambda: set(second.shards().values()) == {first.name, second.name}, "the second one has its share")
            moved = shard_of_topic(topic, 20)
            until(lambda: first.shards()[moved] == second.name, "the topic has moved")
            for number in range(5, 10):
                queue.put(b"%d" % number, durability="fsync")
        with holdfast.open(f"{second.url}/{topic}") as queue:
            assert [queue.get(timeout=10).body for _ in range(10)] == [b"%d" % number for number in range(10)]


@pytest.mark.skipif(postgres_program("initdb") is None, reason="there is no PostgreSQL here")
def test_a_cluster_on_postgresql_survives_the_loss_of_a_node(tmp_path):
    with (
        postgres(tmp_path) as (url, environ),
        cluster(tmp_path, place=f"{url}-cluster", environ=environ, shards=4) as three,
    ):
        status = subprocess.run(
            [*COMMAND, "cluster", "status", three.place], capture_output=True, text=True, timeout=60, check=True,
            env={**plain_environment(), **environ},
        )  # fmt: skip
        assert "the store keeps one copy: it is PostgreSQL without synchronous standbys" in status.stdout
        victim = three.busiest()
        topics = [three.topic_on(victim, "pg")]
        with Load(three, topics) as load:
            time.sleep(1.0)
            victim.kill()
            time.sleep(3.0)
        load.check()


# Mistakes


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, env={**plain_environment(), **environ}, timeout=60
    )


def test_a_client_tries_the_next_address_if_one_cannot_be_reached(quiet: Cluster):
    with holdfast.connect(["http://127.0.0.1:9", quiet.nodes[0].url]) as broker:
        broker.create_topic("next-address", exist_ok=True)
        broker.publish("next-address", b"x")
        assert "next-address" in broker.topics()
    said = run("topic", "ls", f"http://127.0.0.1:9,{quiet.nodes[0].url}")
    assert said.returncode == 0, said.stderr
    said = run("topic", "ls", "http://127.0.0.1:9,http://127.0.0.1:10")
    assert said.returncode != 0
    assert "no server can be reached" in said.stderr


def test_mistakes_are_explained(tmp_path, quiet: Cluster):
    place = f"file://{tmp_path}/store"
    port = str(quiet.nodes[0].port)
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    for words, said in (
        (("cluster", "init", quiet.place, "--shards", "4"), "there is a cluster"),
        (("cluster", "init", place, "--shards", "0"), "--shards"),
        (("cluster", "init", place, "--shards", "4", "--lease", "1ms"), "--lease"),
        (("cluster", "init", "./jobs", "--shards", "4"), "is not a store"),
        (("cluster", "init", "file:///proc/none", "--shards", "4"), "cannot be opened"),
        (("cluster", "status", place), "there is no cluster"),
        (("serve", "--cluster", place, "--port", "0", "--node-id", "a"), "there is no cluster"),
        (("serve", "--cluster", quiet.place, "./jobs"), "--cluster goes without"),
        (("serve", "./jobs", "--advertise", "http://h:1"), "--cluster"),
        (("serve", "./jobs", "--zone", "a"), "--cluster"),
        (("serve", "--cluster", quiet.place, "--port", "0", "--weight", "0"), "--weight"),
        (("serve", "--cluster", quiet.place, "--port", "0", "--weight", "nan"), "--weight"),
        (("serve", "--cluster", quiet.place, "--port", "0"), "--node-id"),
        (("serve", "--cluster", quiet.place, "--port", port), "another program already does"),
        (
            ("serve", "--cluster", quiet.place, "--port", "0", "--node-id", "b", "--advertise", quiet.nodes[0].url),
            "does not lead to this node",
        ),
        (
            ("serve", "--cluster", quiet.place, "--port", "0", "--node-id", quiet.nodes[0].name),
            "is in use by another node",
        ),
        (("put", quiet.place, "x"), "holds a cluster"),
    ):
        got = run(*words, **cache)
        assert got.returncode != 0, words
        assert said in got.stderr, (words, got)
        assert "Traceback" not in got.stderr


def test_the_status_shows_nodes_owners_and_standbys(quiet: Cluster):
    until(lambda: "none yet" not in run("cluster", "status", quiet.place).stdout, "every shard was owned")
    assert "the store keeps one copy, unless the file system keeps more" in run("cluster", "status", quiet.place).stdout
    got = json.loads(run("cluster", "status", quiet.place, "--json").stdout)
    assert got["copies"] == "one copy, unless the file system keeps more"
    assert [shard["shard"] for shard in got["shards"]] == list(range(quiet.shards))
    assert {shard["node"] for shard in got["shards"]} <= {node.name for node in quiet.nodes}
    assert {node["node"] for node in got["nodes"]} == {node.name for node in quiet.nodes}
    until(
        lambda: all(
            s["standbys"] for s in json.loads(run("cluster", "status", quiet.place, "--json").stdout)["shards"]
        ),
        "each shard has a standby",
    )


def test_a_document_guarded_by_a_lock_of_another_shard_is_refused(quiet: Cluster):
    lock = "guard"
    document = next(f"doc-{n}" for n in range(100) if shard_of_key(f"doc-{n}", 8) != shard_of_key(lock, 8))
    with quiet.connect() as broker:
        held = broker.locks.acquire(lock, lease=30)
        with pytest.raises(HoldfastError) as refused:
            broker.documents.update(document, {"a": 1}, lock=held)
    assert refused.value.code == "not_in_cluster"


def test_zones_and_limits_decide_who_owns_and_who_stands_by(tmp_path):
    with cluster(tmp_path, "--zone", "west", nodes=2, shards=8) as two:
        first, second = two.nodes
        assert second.stop() == 0
        second.arguments = ("--node-id", second.name, "--zone", "east", "--max-shards", "2", "--weight", "0.5")
        second.start()
        until(lambda: sorted(first.shards().values()).count(second.name) == 2, "the limited node has two shards")
        told = {node["node"]: node for node in first.get("/v1/cluster").body["nodes"]}
        assert (told[second.name]["zone"], told[second.name]["max_shards"]) == ("east", 2)
        said = run("cluster", "status", two.place).stdout
        assert all(word in said for word in ("zone", "west", "east", "at most")), said
        first.kill()
        until(lambda: "own 6 of 8 shards" in str(second.get("/readyz").body), "it takes no more than it may")
