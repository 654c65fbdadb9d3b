"""Topics that are put into a shard, and moved to another one while they are in use, whoever dies meanwhile."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections import Counter

import pytest

import holdfast
from holdfast.api import port_of
from holdfast.cluster.placement import shard_of_topic
from holdfast.errors import HoldfastError, InvalidRequest, TopicExists, UnknownTopic
from tests.integration.cluster_gear import Cluster, Node, cluster, until
from tests.integration.process_gear import COMMAND, plain_environment
from tests.integration.test_cluster import Load, passed

pytestmark = [pytest.mark.slow, pytest.mark.serial]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """A cluster in which nobody dies."""
    with cluster(tmp_path_factory.mktemp("moves")) as made:
        yield made


def shard_on(node: Node, *, but: int = -1) -> int:
    """A shard that a node owns, once it owns one."""

    def owned() -> list[int]:
        return [shard for shard, name in node.shards().items() if name == node.name and shard != but]

    until(owned, f"{node.name} owns a shard")
    return owned()[0]


def home(made: Cluster, topic: str) -> int:
    return shard_of_topic(topic, made.shards)


def shard_told(node: Node, topic: str) -> int:
    found: int = node.get(f"/v1/topics/{topic}").body["shard"]
    return found


def test_a_topic_lives_in_the_shard_where_it_was_put(quiet: Cluster):
    owner, other, third = quiet.nodes
    topic = quiet.topic_on(owner, "put")
    shard = shard_on(other)
    with quiet.connect(third) as broker:
        assert broker.create_topic(topic, shard=shard).shard == shard
        broker.publish(topic, b"x")
        assert broker.create_topic(topic, shard=shard, exist_ok=True).shard == shard
        with pytest.raises(TopicExists):
            broker.create_topic(topic, shard=home(quiet, topic))
        with pytest.raises(TopicExists):
            broker.create_topic(topic)
        with pytest.raises(InvalidRequest, match="there is no shard 8"):
            broker.create_topic("put-nowhere", shard=8)
    for node in quiet.nodes:
        assert shard_told(node, topic) == shard
        with holdfast.open(f"{node.url}/{topic}") as queue:
            assert queue.qsize() == 1
    # A topic that was deleted and is created again, without a shard, is where it was put.
    with quiet.connect(owner) as broker:
        broker.delete_topic(topic)
        assert broker.create_topic(topic).shard == shard


def test_what_clients_hold_stays_right_when_a_topic_moves(quiet: Cluster):
    owner, other, third = quiet.nodes
    topic, target = quiet.topic_on(owner, "held"), shard_on(other)
    with quiet.connect(third) as broker:
        broker.create_topic(topic, partitions=2, max_attempts=1, trace_sample=1.0)
        named = broker.producer(name="one")
        for number in range(10):
            named.send(topic, b"%d" % number)
        named.flush()
        broker.publish(topic, b"once", dedup_id="only")
        later = broker.publish(topic, b"later", delay=3600)
        reader = broker.consumer(topic, group="readers", start="earliest")
        seen = []
        while len(seen) < 11:
            seen += reader.poll(timeout=10)
        reader.commit()
        with broker.queue(topic) as queue:
            queue.get(timeout=10).reject("bad")
            taken = third.post(f"/v1/queues/{topic}/dequeue", {"count": 2, "wait": 5, "lease": 60}).body["messages"]
            held = queue.get(timeout=10, lease=60)
            told = broker.cluster.move_topic(topic, target)
            assert told.shard == target
            assert all(shard_told(node, topic) == target for node in quiet.nodes)
            held.extend(30)
            held.ack()
            settled = owner.post(f"/v1/queues/{topic}/ack", {"receipts": [each["receipt"] for each in taken]})
            assert settled.status == 200, settled
            assert [letter.error for letter in queue.dead.list()] == ["bad"]
            assert queue.cancel(later.id)
        assert broker.publish(topic, b"once", dedup_id="only").duplicate
        for number in range(10, 20):
            named.send(topic, b"%d" % number)
        named.flush()
        named.close()
        more = []
        while len(more) < 10:
            more += reader.poll(timeout=10)
        assert sorted(int(each.body) for each in more) == list(range(10, 20)), "the consumer goes on where it was"
        reader.commit()
        reader.close()
        assert {each.id for each in seen}.isdisjoint(each.id for each in more)
        assert [step.step for step in broker.trace(taken[0]["id"])][:2] == ["published", "leased"]
        broker.cluster.move_topic(topic, home(quiet, topic))  # and back
        assert shard_told(third, topic) == home(quiet, topic)
        with broker.queue(topic) as queue:
            assert len(queue.dead.list()) == 1


def test_our_client_follows_a_topic_that_moves(quiet: Cluster):
    owner, other, third = quiet.nodes
    topic, target = quiet.topic_on(owner, "followed"), shard_on(other)
    with holdfast.open(f"{third.url}/{topic}") as queue, quiet.connect(other) as broker:
        owners = port_of(queue).client.caller.owners

        def use(times: int) -> None:
            for _ in range(times):
                queue.put(b"x")
                with queue.get(timeout=10):
                    pass

        def goes_to() -> set[int]:
            return {endpoint.address.port for place, endpoint in owners.places.items() if place.endswith(topic)}

        use(2)
        assert goes_to() == {owner.port}
        broker.cluster.move_topic(topic, target)
        use(2)  # at the owner before, which passes the calls on
        assert goes_to() == {other.port}
        before = [passed(node) for node in quiet.nodes]
        use(20)
        assert all(passed(node) - was < 10 for node, was in zip(quiet.nodes, before, strict=True))
        assert queue.qsize() == 0


def test_the_same_call_finds_its_topic_wherever_that_moves(quiet: Cluster):
    owner, other, third = quiet.nodes
    topic = quiet.topic_on(owner, "repeated")
    head = f"POST /v1/queues/{topic}/enqueue HTTP/1.1\r\nhost: 127.0.0.1:{third.port}\r\n"
    call = f"{head}content-type: application/octet-stream\r\ncontent-length: 1\r\n\r\nx".encode()

    with quiet.connect(other) as broker, socket.create_connection(("127.0.0.1", third.port), 60) as connection:
        broker.create_topic(topic)
        count = 0
        for shard in (shard_on(other), shard_on(third), shard_on(owner, but=home(quiet, topic)), home(quiet, topic)):
            moving = threading.Thread(target=broker.cluster.move_topic, args=(topic, shard))
            for turn in range(20):  # the node knows the head soon, and passes it on as it is
                if turn == 5:
                    moving.start()
                while True:
                    connection.sendall(call)
                    answer = connection.recv(65536)
                    assert answer.startswith(b"HTTP/1.1 201"), answer
                    count += 1
                    if turn != 5 or not moving.is_alive():
                        break
            moving.join(60)
        assert broker.queue(topic).qsize() == count


def test_a_topic_moves_while_it_is_in_use(quiet: Cluster):
    owner, other, _ = quiet.nodes
    topic, still = quiet.topic_on(owner, "busy"), quiet.topic_on(owner, "beside")
    first, second = shard_on(other), shard_on(owner, but=home(quiet, topic))
    with Load(quiet, [topic, still]) as load, quiet.connect() as broker:
        for shard in (first, second, first, home(quiet, topic)):
            time.sleep(0.5)
            broker.cluster.move_topic(topic, shard)
    load.check()
    assert max(load.got.values()) == 1, "a message was delivered twice although nobody died"
    assert not load.leases_lost
    assert load.longest_s < 10, load.longest_s


def test_the_command_line_puts_shows_and_moves_topics(quiet: Cluster, tmp_path):
    url, topic = quiet.url, quiet.topic_on(quiet.nodes[0], "typed")
    first, second = shard_on(quiet.nodes[1]), shard_on(quiet.nodes[2])
    for words, said in (
        (("topic", "create", url, topic, "--shard", str(first)), f"created {topic}, 1 partition"),
        (("topic", "move", url, topic, "--to", str(second)), f"{topic} is in shard {second}"),
        (("topic", "show", url, topic, "--json"), f'"shard": {second}'),
    ):
        got = run(*words)
        assert got.returncode == 0, got
        assert said.replace(" ", "") in got.stdout.replace(" ", ""), got
    for words, said in (
        (("topic", "move", url, topic, "--to", "99"), "there is no shard 99"),
        (("topic", "move", url, "nowhere", "--to", str(first)), "there is no topic nowhere"),
        (("topic", "create", str(tmp_path / "data"), "x", "--shard", "0"), "this is not a cluster"),
        (("topic", "move", str(tmp_path / "none"), "x", "--to", "0"), "none"),
    ):
        got = run(*words)
        assert got.returncode != 0, got
        assert said in got.stderr, got
        assert "Traceback" not in got.stderr


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, env=plain_environment(), timeout=60)


def test_mistakes_are_explained_and_change_nothing(quiet: Cluster):
    topic = quiet.topic_on(quiet.nodes[0], "wrong")
    with quiet.connect() as broker:
        with pytest.raises(UnknownTopic):
            broker.cluster.move_topic(topic, shard_on(quiet.nodes[1]))
        broker.create_topic(topic)
        with pytest.raises(InvalidRequest, match="there is no shard 8"):
            broker.cluster.move_topic(topic, 8)
        with pytest.raises(InvalidRequest):
            broker.cluster.move_topic(topic, -1)
        assert broker.cluster.move_topic(topic, home(quiet, topic)).shard == home(quiet, topic)  # it is there
        broker.publish(topic, b"x")
    node = quiet.nodes[0]
    assert node.post(f"/v1/topics/{topic}/move", {"to": "x"}).status == 400
    assert node.post(f"/v1/topics/{topic}/move", {}).status == 400
    for step in ("depart", "read"):
        assert node.post(f"/v1/cluster/moves/{step}", {}).status in (403, 404)


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_move_is_finished_or_undone_when_an_owner_is_killed(tmp_path, side):
    with cluster(tmp_path, shards=6) as three:
        owner, other = three.nodes[0], three.nodes[1]
        victim = owner if side == "source" else other
        asked = next(node for node in three.nodes if node not in (owner, other))
        topic, target = three.topic_on(owner, "killed"), shard_on(other)
        with three.connect(asked) as broker:
            broker.create_topic(topic)
            for number in range(24):
                broker.publish(topic, b"%d" % number + bytes(1024 * 1024), durability="fsync")
        before = stored(three, topic, asked)
        with Load(three, [topic]) as load:
            killed = threading.Event()

            def progress(copied: int, total: int) -> None:
                if not killed.is_set():
                    killed.set()
                    victim.kill()

            with three.connect(asked, timeout=60) as broker:
                broker.cluster.move_topic(topic, target, progress=progress)
            assert killed.is_set()
            victim.start()
            three.wait_until_whole()
        load.check()
        until(lambda: all(shard_told(node, topic) == target for node in three.nodes), "all nodes know where it is")
        after = stored(three, topic, asked)
        assert not before - after, "a message is gone"
        # Nothing is left at the source: the topic can go back.
        with three.connect(asked) as broker:
            broker.cluster.move_topic(topic, home(three, topic))
        assert stored(three, topic, asked) == after


def test_kills_at_any_time_leave_one_copy(tmp_path, scale):
    with cluster(tmp_path, shards=8, lease="1s") as three:
        owner, other, asked = three.nodes
        shard_on(owner)
        topic = three.topic_on(owner, "any")
        with three.connect(asked) as broker:
            broker.create_topic(topic)
            broker.publish_many(topic, [b"%d" % number for number in range(500)], durability="fsync")
        expected = stored(three, topic, asked)
        for number in range(scale(4, 60)):
            victim = (owner, other)[number % 2]
            target = shard_on((other, owner)[number // 2 % 2], but=shard_told(asked, topic))
            moving = threading.Thread(target=moved_or_not, args=(three, asked, topic, target))
            moving.start()
            time.sleep(0.02 + number * 0.037 % 0.3)
            victim.kill()
            moving.join()
            victim.start()
            three.wait_until_whole()
            assert stored(three, topic, asked) == expected, number
            listed = Counter(each["name"] for each in asked.get("/v1/topics").body["topics"])
            assert listed[topic] == 1


def moved_or_not(made: Cluster, node: Node, topic: str, target: int) -> None:
    with made.connect(node) as broker:
        try:
            broker.cluster.move_topic(topic, target)
        except HoldfastError as error:
            assert error.retryable, error


def stored(made: Cluster, topic: str, node: Node) -> Counter[bytes]:
    """What is in a topic, and how often."""
    found: Counter[bytes] = Counter()
    with made.connect(node, timeout=60) as broker:
        offset = 0
        while records := broker.read(topic, offset=offset, limit=100):
            found.update(bytes(each.body) for each in records)
            offset = records[-1].offset + 1
    return found
