"""What a client promises by the way it was opened, and of calls about many messages."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.remote import group
from tests.integration.http_gear import serving


def test_the_durability_that_a_client_was_opened_with_is_that_of_its_queues(tmp_path: Path):
    with serving(tmp_path) as server, holdfast.connect(server.url, durability="os") as broker:
        queue = broker.queue("orders")
        assert queue.put(b"x").durability == "os"
        assert {stored.durability for stored in queue.put_many([b"y", b"z"])} == {"os"}
        assert queue.put_stream(iter([b"a" * 2_000_000])).durability == "os"
        assert queue.put(b"x", durability="fsync").durability == "fsync"


def test_all_that_can_be_acked_is_acked_though_some_of_each_piece_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(group, "MOST_AT_ONCE", 3)
    with serving(tmp_path) as server, holdfast.connect(server.url) as broker:
        queue = broker.queue("orders")
        queue.put_many([b"%d" % i for i in range(9)])
        messages = [queue.get() for _ in range(9)]
        for i in (0, 4, 8):
            queue.resume(messages[i].receipt).defer()
        with pytest.raises(holdfast.LeaseLost) as lost:
            queue.ack_many(messages)
        assert lost.value.receipts == tuple(messages[i].receipt for i in (0, 4, 8))
        assert [listed.offset for listed in queue.messages("ready")] == [0, 4, 8]
        assert list(queue.messages("leased")) == []


def test_puts_of_plain_bytes_go_to_the_topic_that_is_there_now(tmp_path: Path):
    with serving(tmp_path / "data") as server, holdfast.connect(server.url) as broker:
        queue = broker.queue("jobs")
        queue.put(b"a")
        assert [stored.offset for stored in queue.put_many([b"b", b"c"])] == [1, 2]
        broker.delete_topic("jobs")
        for put in (lambda: queue.put(b"d"), lambda: queue.put_many([b"d"])):
            with pytest.raises(holdfast.UnknownTopic):
                put()
        queue = broker.queue("jobs")
        assert queue.put(b"e").offset == 0
        assert [stored.offset for stored in queue.put_many([b"f", b"g"])] == [1, 2]
        assert [message.body for message in queue.get_many(3)] == [b"e", b"f", b"g"]


def test_plain_bytes_are_shared_out_among_partitions_by_both_ways_of_putting(tmp_path: Path):
    with serving(tmp_path / "data") as server, holdfast.connect(server.url) as broker:
        broker.create_topic("jobs", partitions=3)
        queue = broker.queue("jobs")
        assert sorted(queue.put(b"a").partition for _ in range(3)) == [0, 1, 2]
        assert sorted(queue.put_many([b"b", b"c"])[0].partition for _ in range(3)) == [0, 1, 2]
