"""Damaged messages are never passed over in silence, wherever they are read from."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import aio
from holdfast.errors import DamagedRange, InvalidRequest
from tests.integration.http_gear import Serving, serving
from tests.unit.commands import Run, runner


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Five messages, of which the third is damaged."""
    folder = tmp_path / "data"
    with holdfast.open_broker(folder) as broker:
        broker.create_topic("orders")
        for n in range(5):
            broker.publish("orders", b"message %d" % n)
    segment = folder / f"topics/orders/0/log/{0:020d}.log"
    content = bytearray(segment.read_bytes())
    content[content.index(b"message 2")] ^= 1
    segment.write_bytes(content)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def shown(server: Serving, path: str) -> str:
    """A page, as one line."""
    answer = server.get(path, headers={"accept": "text/html"})
    assert answer.status == 200, answer
    return " ".join(answer.body.decode().split())


def read_all(read: Callable[..., list[Any]]) -> None:
    assert [each.raw for each in read("orders")] == [b"message 0", b"message 1"]
    with pytest.raises(DamagedRange) as caught:
        read("orders", offset=2)
    assert (caught.value.first_offset, caught.value.next_offset) == (2, 3)
    assert [each.raw for each in read("orders", offset=3)] == [b"message 3", b"message 4"]
    assert [each.offset for each in read("orders", on_damage="skip")] == [0, 1, 3, 4]
    assert [each.offset for each in read("orders", offset=2, on_damage="skip", limit=1)] == [3]
    with pytest.raises(InvalidRequest, match="on_damage"):
        read("orders", on_damage="ignore")


def test_a_read_in_the_owners_process_tells_of_damaged_messages(data):
    with holdfast.open_broker(data) as broker:
        read_all(broker.read)


def test_a_read_of_a_task_tells_of_damaged_messages(data):
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with await aio.open_broker(data) as broker:

            def read(*args: Any, **options: Any) -> list[Any]:
                return asyncio.run_coroutine_threadsafe(broker.read(*args, **options), loop).result(60)

            await asyncio.to_thread(read_all, read)

    asyncio.run(main())


def test_a_read_over_http_tells_of_damaged_messages(data):
    with serving(data) as server, holdfast.connect(server.url) as broker:
        read_all(broker.read)


def test_a_group_counts_the_damaged_messages_that_it_passes_over(data):
    with holdfast.open_broker(data) as broker:
        group = broker.group("orders", "billing")
        taken = group.receive_many(10)
        assert [message.offset for message in taken] == [0, 1, 3, 4]
        assert group.stats().metrics.damaged == 1
        group.ack_many(taken)


def test_what_is_known_to_be_damaged_is_not_counted_as_ready(data):
    with holdfast.open_broker(data) as broker:
        billing, audit = broker.group("orders", "billing"), broker.group("orders", "audit")
        billing.ack_many(billing.receive_many(10))
        stats = audit.stats()
        assert (stats.ready, stats.damaged) == (4, 1)
        assert {info.name: info.lag for info in broker.groups("orders")} == {"audit": 4, "billing": 0}
        assert (billing.stats().ready, billing.stats().damaged) == (0, 1)
        held = audit.receive_many(2)
        assert (audit.stats().ready, audit.stats().leased) == (2, 2)
        audit.ack_many(held)


def test_damage_is_shown_over_http_in_the_metrics_and_on_the_pages(data):
    with serving(data, whole=True) as server, holdfast.connect(server.url) as broker:
        group = broker.group("orders", "billing")
        assert broker.read("orders", on_damage="skip")
        assert (group.stats().ready, group.stats().damaged) == (4, 1)
        assert "damaged" in shown(server, "/ui/queues/orders")
        assert "1 message is damaged" in shown(server, "/ui")
        metrics = shown(server, "/metrics")
        assert 'holdfast_ready_messages{group="billing",topic="orders"} 4' in metrics
        assert 'holdfast_lag_messages{group="billing",mode="queue",topic="orders"} 4' in metrics
        assert 'holdfast_log_damaged_messages{topic="orders"} 1' in metrics


def test_the_command_line_shows_damage_beside_what_is_ready(data, run):
    with holdfast.open_broker(data) as broker:
        group = broker.group("orders", "default")
        group.ack_many(group.receive_many(2))
    done = run("stats", data)
    assert re.search(r"ready +2\b", done.out)
    assert re.search(r"damaged +1\b", done.out)
    assert run("stats", data, "--json").document["damaged"] == 1


def left_out(caplog: pytest.LogCaptureFixture) -> list[int]:
    """What each listing said of messages that it left out."""
    found = [record for record in caplog.records if "left out of a list" in record.message]
    assert all(record.levelname == "WARNING" for record in found)
    counts = [record.messages for record in found]
    caplog.clear()
    return counts


def test_a_listing_warns_once_of_damaged_messages_that_it_leaves_out(data, caplog):
    with holdfast.open_broker(data) as broker:
        group = broker.group("orders", "billing")
        assert [message.offset for message in group.messages("ready")] == [0, 1, 3, 4]
        assert left_out(caplog) == [1]
        assert len(list(group.messages("ready", limit=2))) == 2
        assert left_out(caplog) == []  # it did not come so far
        assert len(list(group.messages("ready", limit=3))) == 3
        assert left_out(caplog) == [1]
        group.ack_many(group.receive_many(4))
        assert list(group.messages("ready")) == []
        assert left_out(caplog) == []  # passed over by the group, too: it is not ready any more


def test_a_listing_over_http_and_in_the_console_tells_of_damaged_messages(data, caplog):
    with serving(data, whole=True) as server, holdfast.connect(server.url) as broker:
        group = broker.group("orders", "default")
        assert [message.offset for message in group.messages("ready")] == [0, 1, 3, 4]
        assert left_out(caplog) == [1]
        assert server.get("/v1/queues/orders/messages").body["damaged"] == 1
        assert "1 message is damaged and not shown" in shown(server, "/ui/queues/orders")
        assert "not shown" not in shown(server, "/ui/queues/orders?tab=leased")


def test_a_list_of_dead_letters_warns_of_damaged_ones_that_it_leaves_out(data, caplog):
    with holdfast.open_broker(data) as broker:
        group = broker.group("orders", "default")
        for message in group.receive_many(10):
            message.reject("no")
    (segment,) = data.glob(f"topics/orders.dlq/0/log/{0:020d}.log")
    content = bytearray(segment.read_bytes())
    content[content.index(b"message 3")] ^= 1
    segment.write_bytes(content)
    caplog.clear()
    with holdfast.open_broker(data) as broker:
        whole = [letter.original_offset for letter in broker.group("orders", "default").dead.list()]
        assert 3 not in whole
        assert left_out(caplog) == [4 - len(whole)]
    with serving(data) as server, holdfast.connect(server.url) as broker:
        assert [letter.original_offset for letter in broker.group("orders", "default").dead.list()] == whole
        assert left_out(caplog) == [4 - len(whole)]
