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
