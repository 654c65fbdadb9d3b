"""Spark's sink beside a process that owns the folder: that one brings the staged rows in."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

import holdfast
from holdfast import Busy
from holdfast.client.spark_commits import routes
from holdfast.codec.frame import frames_in
from holdfast.errors import DiskFailed
from holdfast.protocol.media import RAW
from holdfast.server.tokens import ACTIONS, digest_of
from holdfast.settings import BrokerSettings
from holdfast.spark import commits
from holdfast.spark.places import ServerAccess, ServerPlace
from holdfast.spark.ranges import Range
from holdfast.spark.source import HoldfastSink, StagedRows, Task, WriteOptions
from tests.integration.http_gear import serving
from tests.unit.sinks import batch_of


def sink(folder: Path) -> HoldfastSink:
    return HoldfastSink(
        WriteOptions(
            path=str(folder), topic="orders", new_partitions=None, owner_wait_ms=300, settings=BrokerSettings()
        )
    )


def test_rows_come_in_through_the_owner_each_once(tmp_path):
    with holdfast.open_broker(tmp_path) as broker:
        broker.create_topic("orders")
        broker.publish("orders", b"before")
        writer = sink(tmp_path)
        writer.check_owner()
        staged = writer.stage(iter([batch_of([b"a", b"b"])]), "query", 0, Task(0, 0))
        for _ in range(2):  # the driver may ask again
            writer.commit([staged], kept=True, streaming=True)
        broker.publish("orders", b"after")
        assert [each.body for each in broker.read("orders")] == [b"before", b"a", b"b", b"after"]


def test_a_consumer_of_the_owner_is_woken_by_rows_that_come_in(tmp_path):
    with holdfast.open_broker(tmp_path) as broker:
        broker.create_topic("orders")
        group = broker.group("orders", "workers")
        got: list[bytes] = []
        waiting = threading.Thread(target=lambda: got.append(group.receive(timeout=30).body))
        waiting.start()
        writer = sink(tmp_path)
        writer.commit([writer.stage(iter([batch_of([b"a"])]), "once", 0, Task(0, 0))], kept=False)
        waiting.join(30)
        assert got == [b"a"]


def test_rows_and_messages_of_others_may_come_at_the_same_time(tmp_path):
    with holdfast.open_broker(tmp_path) as broker:
        broker.create_topic("orders")
        stop = threading.Event()
        published: list[bytes] = []

        def publish() -> None:
            while not stop.is_set():
                published.append(b"m%d" % len(published))
                broker.publish("orders", published[-1], durability="os")

        others = threading.Thread(target=publish)
        others.start()
        writer = sink(tmp_path)
        rows = [b"row%d" % i for i in range(3_000)]
        for batch in range(3):
            some = rows[batch * 1_000 : (batch + 1) * 1_000]
            staged = writer.stage(iter([batch_of(some)]), "query", batch, Task(0, batch))
            writer.commit([staged], kept=True, streaming=True)
        stop.set()
        others.join()
        kept: list[bytes] = []
        while some := [each.body for each in broker.read("orders", offset=len(kept), limit=100_000)]:
            kept += some  # there may be any number of them: what Spark's side needs is loaded meanwhile
    assert [body for body in kept if body.startswith(b"row")] == rows
    assert [body for body in kept if body.startswith(b"m")] == published


def test_an_owner_that_does_not_share_is_named(tmp_path):
    with holdfast.open_broker(tmp_path, share=False) as broker:
        broker.create_topic("orders")
        with pytest.raises(Busy, match="does not share it"):
            sink(tmp_path).check_owner()


# Through a server, by callers that need not be trusted.


@pytest.fixture
def guarded(tmp_path):
    """A server that asks for tokens, and the sink of somebody who may publish to one topic."""
    tokens = tmp_path / "tokens"
    roles = {"writer": (["publish", "read"], ["orders"]), "other": (["publish", "read"], ["orders"])}
    roles["boss"] = (list(ACTIONS), ["*"])
    tokens.write_text(
        "".join(
            f'[[tokens]]\nname = "{name}"\nrole = {actions}\nsha256 = "{digest_of(name)}"\ntopics = {topics}\n'
            for name, (actions, topics) in roles.items()
        )
    )
    tokens.chmod(0o600)
    with serving(tmp_path / "shop", more=lambda: [routes], tokens_file=str(tokens)) as server:
        with holdfast.connect(server.url, token="boss") as broker:
            for topic in ("orders", "secrets"):
                broker.create_topic(topic, max_message_bytes=1000)
        yield server


def writer_of(server, topic="orders", token="writer"):
    return HoldfastSink(
        WriteOptions(
            path=server.url,
            topic=topic,
            new_partitions=None,
            owner_wait_ms=0,
            settings=BrokerSettings(),
            server=ServerAccess(server.url, token),
        )
    )


def bodies(server, topic="orders"):
    with holdfast.connect(server.url, token="boss") as broker:
        return [each.body for each in broker.read(topic)]


def test_rows_are_uploaded_and_committed_once(guarded):
    writer = writer_of(guarded)
    staged = writer.stage(iter([batch_of([b"a", b"b"])]), "query", 0, Task(0, 0))
    assert bodies(guarded) == []
    for _ in range(2):
        writer.commit([staged], kept=True, streaming=True)
    assert bodies(guarded) == [b"a", b"b"]


def test_rows_that_are_given_up_are_removed_and_committed_ones_stay(guarded, tmp_path):
    writer = writer_of(guarded)
    staged = writer.stage(iter([batch_of([b"a"])]), "query", 0, Task(0, 0))
    files = list((tmp_path / "shop/staging").rglob("*.frames"))
    assert len(files) == 1
    writer.abort([staged])
    assert not files[0].exists()
    staged = writer.stage(iter([batch_of([b"a"])]), "query", 0, Task(0, 1))
    writer.commit([staged], kept=True, streaming=True)
    writer.abort([staged])  # as Spark does after a commit whose answer was lost
    assert bodies(guarded) == [b"a"]


def test_a_write_belongs_to_its_caller(guarded, tmp_path):
    writer, other = writer_of(guarded), writer_of(guarded, token="other")
    staged = writer.stage(iter([batch_of([b"a"])]), "nightly", 0, Task(0, 0))
    stolen = other.stage(iter([batch_of([b"spoiled"])]), "nightly", 0, Task(0, 0))
    other.abort([StagedRows("nightly", 0, staged.files)])
    assert len(list((tmp_path / "shop/staging").rglob("*.frames"))) == 2, (
        "each has a file, and none removed the other's"
    )
    other.commit([stolen], kept=True)  # which does not count as batch 0 of the writer's
    writer.commit([staged], kept=True)
    writer.commit([staged], kept=True)
    assert bodies(guarded) == [b"spoiled", b"a"]


def test_frames_that_no_producer_could_send_are_refused(guarded, tmp_path):
    writer, chosen = writer_of(guarded), "0-0-0000002a-1-0.frames"
    too_long = writer.stage(iter([batch_of([b"fine"])]), "query", 0, Task(0, 0))
    [file] = too_long.files
    with pytest.raises(holdfast.Forbidden):  # rows for another topic, whatever the path of the upload
        lane = msgspec.structs.replace(file.lanes[0][0], topic="secrets")
        moved = msgspec.structs.replace(file, lanes=((lane, 1),))
        writer.commit([StagedRows("query", 0, (moved,))], kept=True)
    [stored] = (tmp_path / "shop/staging").rglob("*.frames")
    content = stored.read_bytes()
    for wrong in (
        msgspec.structs.replace(file, lanes=((file.lanes[0][0], 2),)),
        msgspec.structs.replace(file, log_id=7),
    ):
        with pytest.raises(holdfast.InvalidRequest, match="Nothing was written"):
            writer.commit([StagedRows("query", 0, (wrong,))], kept=True)
    with holdfast.connect(guarded.url, token="boss") as broker:
        broker.alter_topic("orders", max_message_bytes=2)
    with pytest.raises(holdfast.MessageTooLarge, match="a row has 4 bytes"):
        writer.commit([too_long], kept=True)
    assert bodies(guarded) == []
    for path, status in (
        (f"/v1/staged/query/0/{chosen}?position=8", 409),
        ("/v1/staged/query/0/manifest.json", 400),
        (f"/v1/staged/../0/{chosen}", 400),
        (f"/v1/staged/query/x/{chosen}", 400),
    ):
        answer = guarded.request("POST", path, content, headers={"content-type": RAW}, token="writer")
        assert answer.status == status, answer


def test_frames_are_fetched_a_bounded_piece_at_a_time(guarded):
    with holdfast.connect(guarded.url, token="boss") as broker:
        for number in range(50):
            broker.publish("orders", b"%d" % number + bytes(500))
    place, wanted = ServerPlace(ServerAccess(guarded.url, "writer")), Range("orders", 0, 10, 20)
    found = [frame.base_offset for frame in place.frames(wanted, 10)]
    assert found == [*range(10, 20)]
    path = "/v1/topics/orders/partitions/0/frames"
    some = guarded.get(path, query={"offset": 0, "bytes": 2000}, token="writer")
    assert some.headers["content-type"] == RAW
    assert [frame.base_offset for frame in frames_in(memoryview(some.body), max_raw_bytes=10_000)] == [0, 1, 2]
    assert guarded.get(path, query={"offset": 50}, token="writer").body == b""
    assert guarded.get(path, query={"offset": 51}, token="writer").code == "offset_out_of_range"
    assert guarded.get("/v1/topics/secrets/partitions/0/frames", query={"offset": 0}, token="writer").status == 403


def test_a_commit_that_the_server_could_not_finish_is_finished_when_the_batch_comes_again(guarded, monkeypatch):
    def fail(*given, **more):
        raise DiskFailed("the machine stops here")

    writer = writer_of(guarded)
    staged = writer.stage(iter([batch_of([b"a", b"b"])]), "query", 0, Task(0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(commits, "_carry_out", fail)
        with pytest.raises(DiskFailed):
            writer.commit([staged], kept=True, streaming=True)
    again = writer.stage(iter([batch_of([b"b", b"a"])]), "query", 0, Task(0, 1))
    writer.commit([again], kept=True, streaming=True)
    assert bodies(guarded) == [b"a", b"b"]
