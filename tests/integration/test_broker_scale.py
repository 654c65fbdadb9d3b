"""Very many topics, and many groups on one: memory and file handles stay bounded, a message is stored once."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast
from holdfast import BrokerSettings, TopicSettings
from holdfast.broker.topic import Topic

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.serial, pytest.mark.timeout(900)]

PARTITIONS = 3
OPEN_PARTITIONS = 30
GROUPS = 10

# Far more than anything here takes on a busy machine; --log-cli-level=info shows the real figures.
SOME_SECONDS = 60
SETTINGS = BrokerSettings(
    open_partitions=OPEN_PARTITIONS, topic=TopicSettings(partitions=PARTITIONS, min_free_bytes=0, durability="os")
)


def anonymous_mb() -> float:
    """Memory of this process that no file stands behind."""
    gc.collect()
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def stored_bytes(folder: Path) -> int:
    """What the files below the folder take on the disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def test_a_thousand_topics_are_opened_in_seconds_with_bounded_memory_and_handles(tmp_path, scale):
    names = [f"topic-{number:04d}" for number in range(scale(60, 1_000))]
    folder = tmp_path / "data"
    first_handles, first_mb = handles(), anonymous_mb()

    def create() -> None:
        with holdfast.open_broker(folder, settings=SETTINGS) as broker:
            for name in names:
                broker.create_topic(name)

    def publish(broker: holdfast.Broker, seen: list[int]) -> None:
        for name in names:
            for number in range(PARTITIONS):
                broker.publish(name, b"%d" % number, partition=number)
            seen.append(handles() - first_handles)

    took = {"create": seconds(create)}
    began = time.perf_counter()
    with holdfast.open_broker(folder, settings=SETTINGS) as broker:
        assert broker.topics() == names
        took["open"] = time.perf_counter() - began
        seen: list[int] = []
        took["first round"] = seconds(lambda: publish(broker, seen))
        after_first = anonymous_mb()
        took["second round"] = seconds(lambda: publish(broker, seen))
        after_second = anonymous_mb()
        for name in names[:: max(1, len(names) // 20)]:
            assert broker.describe_topic(name).messages == 2 * PARTITIONS
        assert sum(len(topic.partitions) for topic in broker._port.engine._topics.values()) <= OPEN_PARTITIONS
        gc.collect()
        alive = sum(issubclass(type(each), Topic) for each in gc.get_objects())
    figures = ", ".join(f"{name} {value:.2f} s" for name, value in took.items())
    logger.info("%d topics: %s, %d handles, %.1f MB", len(names), figures, max(seen), after_second - first_mb)
    assert took["open"] < SOME_SECONDS
    assert max(seen) <= 6 * OPEN_PARTITIONS + 20, "more files are open than the open partitions need"
    assert alive <= 4 * OPEN_PARTITIONS // PARTITIONS, "topics that were let go are still in memory"
    assert after_second - after_first < 16, "memory grows with the topics that were used"
    assert after_second - first_mb < 100
    assert handles() <= first_handles + 1


def test_a_producer_holds_no_more_topics_open_than_may_be(tmp_path, scale):
    names = [f"topic-{number:04d}" for number in range(scale(40, 400))]
    with holdfast.open_broker(tmp_path / "data", settings=SETTINGS) as broker, broker.producer(linger_ms=0) as producer:
        for name in names:
            broker.create_topic(name)
        first, seen = handles(), 0
        for _ in range(2):
            for name in names:
                producer.send(name, b"x").result(SOME_SECONDS)
                seen = max(seen, handles() - first)
        assert seen <= 6 * 2 * OPEN_PARTITIONS + 20
        assert all(broker.describe_topic(name).messages == 2 for name in names[::10])


def test_ten_groups_cost_their_state_and_no_copy_of_the_data(tmp_path, scale):
    count, body = scale(20_000, 1_000_000), b"x" * 100
    with holdfast.open_broker(tmp_path / "data", settings=SETTINGS) as broker:
        broker.create_topic("orders")
        for _ in range(count // 1_000):
            broker.publish_many("orders", [body] * 1_000)
        broker.sync()
        data_bytes, before_mb = stored_bytes(tmp_path), anonymous_mb()
        groups = [broker.group("orders", f"group-{number}") for number in range(GROUPS)]
        after_mb, with_groups = anonymous_mb(), stored_bytes(tmp_path)
        for group in groups:
            left = count
            while left:
                messages = group.receive_many(1_000, timeout=SOME_SECONDS)
                group.ack_many(messages)
                left -= len(messages)
            assert group.stats().floor == count
        consumers = [broker.consumer("orders", group=f"stream-{number}") for number in range(GROUPS)]
        for consumer in consumers:
            left = count
            while left:
                left -= len(consumer.poll(SOME_SECONDS, max_records=10_000))
            consumer.commit()
        del messages
        broker.sync()
        read_mb, read_bytes = anonymous_mb(), stored_bytes(tmp_path)
        kib = [size >> 10 for size in (data_bytes, with_groups - data_bytes, read_bytes - data_bytes)]
        logger.info("%d messages: KiB of data, new groups, groups that have read all: %s", count, kib)
        logger.info("MB of memory: new groups %.1f, having read all %.1f", after_mb - before_mb, read_mb - before_mb)
        for consumer in consumers:
            consumer.close()
    per_group = (with_groups - data_bytes) / GROUPS
    assert per_group < PARTITIONS * 160 * 1024, "a new group takes more than the first steps of its journals"
    assert after_mb - before_mb < 20
    assert read_mb - before_mb < 60
    assert read_bytes - with_groups < 2 * GROUPS * PARTITIONS * 256 * 1024, "journals hold more than runs of offsets"
