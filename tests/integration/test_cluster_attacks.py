"""Hostile and slow callers of a node that passes their calls on, and nodes that are started wrongly or cut short."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import holdfast
from tests.integration.cluster_gear import NAMES, Cluster, Node, cluster, until
from tests.integration.process_gear import COMMAND, plain_environment
from tests.integration.proxies import Proxy
from tests.integration.store_servers import postgres, postgres_program

pytestmark = [pytest.mark.slow, pytest.mark.serial]

ANSWER_S = 20  # a node that is stuck does not answer at all; a busy machine is not


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("pair"), nodes=2, shards=4) as made:
        yield made


def dial(node: Node) -> socket.socket:
    parts = urlsplit(node.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=60)


def head(topic: str, verb: str, length: int, more: str = "") -> bytes:
    return (
        f"POST /v1/queues/{topic}/{verb} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n{more}\r\n"
    ).encode()


def answers(node: Node, topic: str) -> float:
    """Put and take through a node; returns how long that took."""
    began = time.monotonic()
    assert node.request("PUT", f"/v1/queues/{topic}", {}, timeout_s=ANSWER_S).status < 300
    assert node.post(f"/v1/queues/{topic}/enqueue", {"body": "eA=="}, timeout_s=ANSWER_S).status < 300
    assert node.post(f"/v1/queues/{topic}/dequeue", {"wait": 5}, timeout_s=ANSWER_S).status == 200
    return time.monotonic() - began


def test_callers_that_send_their_bodies_slowly_stop_nobody(pair: Cluster):
    owner, other = pair.nodes
    topic = pair.topic_on(owner, "slow")
    with ExitStack() as closing:
        for _ in range(50):
            slow = closing.enter_context(dial(other))
            slow.sendall(head(topic, "enqueue", 100_000) + b'{"body": "')
        for _ in range(5):
            answers(other, topic)
            answers(owner, topic)
    answers(other, topic)


def test_callers_that_do_not_read_their_answers_stop_nobody(pair: Cluster):
    owner, other = pair.nodes
    topic = pair.topic_on(owner, "deaf")
    with holdfast.open(f"{owner.url}/{topic}") as queue:
        queue.put_many([b"x" * 1_000_000] * 8)
    with ExitStack() as closing:
        for _ in range(20):
            deaf = closing.enter_context(dial(other))
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.sendall(f"GET /v1/queues/{topic}/messages?limit=8 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
        quick = pair.topic_on(owner, "quick")
        for _ in range(5):
            answers(other, quick)
            answers(owner, quick)


def test_one_caller_with_many_long_polls_does_not_stop_others_from_waiting(pair: Cluster):
    """Each is passed on over a connection of its own; none of the limits of a node is that of one caller."""
    owner, other = pair.nodes
    topic, quick = pair.topic_on(owner, "polled"), pair.topic_on(owner, "waited")
    body = json.dumps({"wait": 30}).encode()
    with ExitStack() as closing:
        for _ in range(300):
            polling = closing.enter_context(dial(other))
            polling.sendall(head(topic, "dequeue", len(body)) + body)
        got = []

        def wait() -> None:
            with holdfast.open(f"{other.url}/{quick}", timeout=60) as queue:
                got.append(queue.get(timeout=30).body)

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.5)
        answers(other, pair.topic_on(owner, "beside"))
        with holdfast.open(f"{other.url}/{quick}") as queue:
            queue.put(b"now")
        waiting.join(60)
        assert got == [b"now"]

    def connections() -> float:
        lines = owner.get("/metrics").body.decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("holdfast_http_open_connections "))

    until(lambda: connections() < 100, "the connections of callers that are gone are closed at the owner, too")


def test_a_body_that_is_too_large_is_refused_by_the_owner_before_it_is_sent(pair: Cluster):
    owner, other = pair.nodes
    topic = pair.topic_on(owner, "huge")
    with dial(other) as calling:
        calling.sendall(head(topic, "enqueue", 1 << 40, "expect: 100-continue\r\n"))
        calling.settimeout(ANSWER_S)
        assert b" 413 " in calling.recv(4096).split(b"\r\n")[0]
    answers(other, topic)


def test_a_caller_that_goes_in_the_middle_of_its_body_leaves_nothing(pair: Cluster):
    owner, other = pair.nodes
    topic = pair.topic_on(owner, "gone")
    assert owner.request("PUT", f"/v1/queues/{topic}", {}).status < 300
    for _ in range(20):
        with dial(other) as calling:
            calling.sendall(head(topic, "enqueue", 5_000_000) + b'{"body": "' + b"A" * 300_000)
    answers(other, topic)
    assert owner.get(f"/v1/queues/{topic}/stats").body["ready"] == 0


@pytest.mark.parametrize(
    "request_line",
    [
        "GET /v1/groups/g/members/9999-x HTTP/1.1", "GET /v1/groups/g/members/-1-x/assignment HTTP/1.1",
        "POST /v1/groups/g/members/0-/poll HTTP/1.1", "GET /v1/topics/%00 HTTP/1.1", "GET /v1/topics/%2e%2e HTTP/1.1",
        "GET /v1/topics/..%2f..%2fetc HTTP/1.1", "GET /v1/traces/nonsense HTTP/1.1", "GET /v1/cluster/x HTTP/1.1",
        "GET /v1/queues/a%0d%0ax-holdfast-node:%20x/stats HTTP/1.1", "DELETE /v1/locks/%ff HTTP/1.1",
        "GET /v1/topics?limit=-1 HTTP/1.1", "GET /v1/topics?limit=x&after=%00 HTTP/1.1",
        "PUT /v1/state/a?lease_id=x HTTP/1.1",
        "GET http://elsewhere/v1/topics HTTP/1.1", "GET //v1/topics HTTP/1.1",
    ],
)  # fmt: skip
def test_paths_that_make_no_sense_are_refused_without_a_fault_of_the_node(pair: Cluster, request_line: str):
    for node in pair.nodes:
        with dial(node) as calling:
            calling.sendall(f"{request_line}\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\n\r\n{{}}".encode())
            calling.settimeout(ANSWER_S)
            status = int(calling.recv(4096).split()[1])
        assert 200 <= status < 500 or status == 501, (request_line, status)
        assert "Traceback" not in node.log.read_text()


# Nodes


def started(place: str, folder: Path, *words: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "serve", "--cluster", place, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**plain_environment(), "XDG_CACHE_HOME": str(folder / "cache"), **environ},
    )  # fmt: skip


def test_of_two_nodes_of_one_name_that_start_at_once_at_most_one_stays(tmp_path: Path):
    with cluster(tmp_path, nodes=1, shards=2) as one:
        pair = [started(one.place, tmp_path / str(n), "--port", "0", "--node-id", "twin") for n in range(2)]
        try:
            until(lambda: any(each.poll() is not None for each in pair), "one of them has given up")
            (loser,) = [each for each in pair if each.poll() is not None][:1]
            assert "is in use by another node" in loser.communicate(timeout=60)[1]
            assert loser.returncode != 0
            with holdfast.connect(one.url) as broker:
                broker.create_topic("t", exist_ok=True)
                broker.publish("t", b"x", durability="fsync")
        finally:
            for each in pair:
                each.kill()
                each.communicate()


def test_a_node_whose_description_is_another_one_is_refused(tmp_path: Path):
    """Somebody has created the cluster anew below running nodes, or copied another one's description."""
    with cluster(tmp_path, nodes=1, shards=2) as one:
        node = one.nodes[0]
        other = f"file://{tmp_path}/other"
        words = [*COMMAND, "cluster", "init", other, "--shards", "4"]
        subprocess.run(words, check=True, env=plain_environment(), timeout=60, stdout=subprocess.DEVNULL)
        shutil.copy(tmp_path / "other/cluster/description", tmp_path / "store/cluster/description")
        third = started(one.place, tmp_path / "x", "--port", "0", "--node-id", "third")
        try:
            # It does not know the secret of the others, nor they its: it never gets a shard of theirs.
            with holdfast.connect(node.url) as broker:
                broker.create_topic("t", exist_ok=True)
                for number in range(20):
                    broker.publish("t", b"%d" % number, durability="fsync")
                    assert set(node.shards().values()) == {node.name}
        finally:
            third.kill()
            third.communicate()


@pytest.mark.parametrize("after_s", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_node_that_is_stopped_while_it_starts_leaves_no_trace(
    pair: Cluster, tmp_path: Path, number: int, after_s: float
):
    process = started(pair.place, tmp_path, "--port", "0", "--node-id", "brief")
    time.sleep(after_s)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert "Traceback" not in said, said
    node = pair.nodes[0]
    until(lambda: set(node.shards().values()) <= set(NAMES), "every shard has an owner, and it is not this one")
    answers(node, pair.topic_on(pair.nodes[1], "brief"))


def test_a_node_whose_keys_are_revoked_gives_its_shards_up_and_takes_them_again(tmp_path: Path):
    if postgres_program("initdb") is None:
        pytest.skip("there is no PostgreSQL here")
    import psycopg

    with postgres(tmp_path) as (url, environ):
        admin = psycopg.connect(url.rpartition("/")[0], autocommit=True)
        admin.execute("CREATE ROLE clerk LOGIN")
        admin.execute("GRANT ALL ON SCHEMA public TO clerk")
        place = f"{url.replace('holdfast@', 'clerk@')}-keys"
        with cluster(tmp_path, place=place, environ=environ, nodes=2, shards=2) as two:
            topic = two.topic_on(two.nodes[0], "keys")
            with two.connect(timeout=60) as broker:
                broker.create_topic(topic)
                broker.publish(topic, b"before", durability="fsync")
                admin.execute("ALTER ROLE clerk NOLOGIN")
                admin.execute("REVOKE ALL ON holdfast_objects FROM clerk")
                admin.execute("ALTER TABLE holdfast_objects OWNER TO holdfast")
                with pytest.raises(holdfast.HoldfastError), two.connect(timeout=3) as hasty:
                    hasty.publish(topic, b"meanwhile", durability="fsync")
                for node in two.nodes:
                    assert node.get("/healthz").status == 200
                admin.execute("GRANT ALL ON holdfast_objects TO clerk")
                admin.execute("ALTER TABLE holdfast_objects OWNER TO clerk")
                admin.execute("ALTER ROLE clerk LOGIN")
                broker.publish(topic, b"after", durability="fsync")
                bodies = [each.body for each in broker.read(topic)]
            assert (bodies[0], bodies[-1]) == (b"before", b"after")
            for node in two.nodes:
                assert "Traceback" not in node.log.read_text()
        admin.close()


def test_a_store_that_is_down_for_long_stops_calls_and_loses_nothing(tmp_path: Path, scale):
    if postgres_program("initdb") is None:
        pytest.skip("there is no PostgreSQL here")
    with postgres(tmp_path) as (url, environ), ExitStack() as closing:
        proxy = Proxy(("127.0.0.1", urlsplit(url).port))
        closing.callback(proxy.close)
        place = url.replace(f":{urlsplit(url).port}", f":{proxy.port}") + "-down"
        with cluster(tmp_path, place=place, environ=environ, nodes=2, shards=4) as two:
            topic = two.topic_on(two.nodes[0], "down")
            with two.connect(timeout=90) as broker:
                broker.create_topic(topic)
                broker.publish(topic, b"before", durability="fsync")
                proxy.swallow = True
                time.sleep(scale(14, 240))  # longer than any call to the store may take
                for node in two.nodes:
                    assert node.get("/healthz").status == 200
                    assert node.get("/metrics").status == 200
                proxy.swallow = False
                proxy.cut_all()
                broker.publish(topic, b"after", durability="fsync")
                assert [each.body for each in broker.read(topic)] == [b"before", b"after"]
            two.wait_until_whole()
            for node in two.nodes:
                assert "Traceback" not in node.log.read_text()


def test_a_node_that_runs_out_of_descriptors_answers_again_when_its_callers_are_gone(tmp_path: Path):
    with cluster(tmp_path, nodes=2, shards=2) as two:
        small, other = two.nodes
        assert small.stop() == 0
        command = [*COMMAND, "serve", "--cluster", two.place, "--port", str(small.port), *small.arguments]
        with small.log.open("a") as log:
            small.process = subprocess.Popen(
                ["sh", "-c", 'ulimit -n "$0" && exec "$@"', "480", *command], stdout=subprocess.PIPE, stderr=log,
                text=True, env=small._environ, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        small.wait_for_start()
        two.wait_until_whole()
        with ExitStack() as closing:
            for _ in range(600):
                with suppress(OSError):
                    closing.enter_context(dial(small))
            with two.connect(other, timeout=60) as broker:
                broker.create_topic("t", exist_ok=True)
                for number in range(10):
                    broker.publish("t", b"%d" % number, durability="fsync")
        until(small.is_ready, "it answers again")
        for node in two.nodes:
            answers(small, two.topic_on(node, "few"))


def test_a_node_whose_cache_is_full_loses_nothing_and_stops_nobody(tmp_path: Path):
    """A small disk of its own, where one can be mounted; the other node goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no disk can be mounted here")
    try:
        with cluster(tmp_path, nodes=2, shards=4) as two:
            full, other = two.nodes
            assert full.stop() == 0
            full._environ = {**full._environ, "XDG_CACHE_HOME": str(disk)}
            full.start()
            two.wait_until_whole()
            until(lambda: full.name in full.shards().values(), "it owns shards")
            here, there = two.topic_on(full, "full"), two.topic_on(other, "free")
            kept = []
            with two.connect(timeout=3) as broker:
                for topic in (here, there):
                    broker.create_topic(topic)
                for number in range(80):
                    try:
                        kept.append(broker.publish(here, bytes([number]) * 1_000_000, durability="fsync").offset)
                    except holdfast.HoldfastError as error:
                        assert error.retryable, error
                        break
                else:
                    pytest.fail("the disk was never full")
            with two.connect(other, timeout=60) as broker:
                broker.publish(there, b"x", durability="fsync")
            assert full.stop() == 0
            with two.connect(other, timeout=60) as broker:
                for offset in kept:
                    (found,) = broker.read(here, offset=offset, limit=1)
                    assert len(found.body) == 1_000_000
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
