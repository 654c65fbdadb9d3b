"""Spark's sink beside a process that owns the folder: that one brings the staged rows in."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import holdfast
from holdfast import Busy
from holdfast.settings import BrokerSettings
from holdfast.spark.source import HoldfastSink, Task, WriteOptions
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
