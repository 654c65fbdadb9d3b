"""Very many messages: memory stays flat, and a deep queue is as fast as a shallow one."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast
from holdfast import NewMessage

pytestmark = [pytest.mark.serial, pytest.mark.timeout(900)]

# Far more than anything here takes on a busy machine; the benchmark tells the real figures.
SOME_SECONDS = 60


def anonymous_mb() -> float:
    """Memory of this process that no file stands behind."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def get_and_ack(queue: holdfast.Queue, count: int) -> None:
    for _ in range(count):
        queue.get(timeout=5).ack()


def test_ten_million_ready_messages_cost_no_memory_and_no_time(tmp_path):
    count = 10_000_000
    with holdfast.open(tmp_path / "shallow", durability="os") as shallow:
        shallow.put_many([b"x" * 20] * 1_000)
        at_thousand = seconds(lambda: get_and_ack(shallow, 1_000))
    queue = holdfast.open(tmp_path / "deep", durability="os")
    gc.collect()
    before = anonymous_mb()
    batch = [b"x" * 20] * 10_000
    for _ in range(count // len(batch)):
        queue.put_many(batch)
    at_depth = min(seconds(lambda: get_and_ack(queue, 1_000)) for _ in range(3))
    assert anonymous_mb() - before < 100
    assert anonymous_mb() < 150 + before
    assert at_depth < 10 * at_thousand
    queue.close()
    assert seconds(lambda: holdfast.open(tmp_path / "deep").close()) < SOME_SECONDS
    with holdfast.open(tmp_path / "deep") as queue:
        assert queue.stats().ready == count - 3_000
        assert anonymous_mb() - before < 100
        get_and_ack(queue, 10)


def test_a_million_expired_messages_are_passed_in_seconds(tmp_path):
    with holdfast.open(tmp_path / "queue", durability="os") as queue:
        batch = [NewMessage(body=b"x", ttl=0.001)] * 1_000
        for _ in range(1_000):
            queue.put_many(batch)
        time.sleep(0.01)
        queue.put(b"alive")
        assert seconds(lambda: queue.get(timeout=SOME_SECONDS).ack()) < SOME_SECONDS
        stats = queue.stats()
        assert (stats.ready, stats.metrics.expired, stats.metrics.acked) == (0, 1_000_000, 1)
    assert seconds(lambda: holdfast.open(tmp_path / "queue").close()) < SOME_SECONDS


def test_a_million_delayed_messages_take_little_memory_and_none_is_early(tmp_path, scale):
    count = scale(200_000, 1_000_000)
    queue = holdfast.open(tmp_path / "queue", durability="os")
    queue.put(b"far", delay=3600)  # whatever is needed only once is there by now
    gc.collect()
    before = anonymous_mb()
    far = [NewMessage(body=b"x" * 20, delay=86_400 * day) for day in range(1, 1_001)]
    for _ in range(count // len(far)):
        queue.put_many(far)
    gc.collect()
    fixed_mb = 16  # for what is not there for each message: buffers of the files being written
    assert (anonymous_mb() - before - fixed_mb) * 1024 * 1024 < 40 * count
    queue.close()
    assert seconds(lambda: holdfast.open(tmp_path / "queue").close()) < SOME_SECONDS
    with holdfast.open(tmp_path / "queue", durability="os") as queue:
        assert queue.stats().delayed == count + 1
        near = [NewMessage(body=b"%d" % ms, delay=ms / 1000) for ms in range(1_000, 3_000)]
        stored = queue.put_many(near)
        assert all(message.offset is None for message in stored)
        taken = 0
        while taken < len(near):
            messages = queue.get_many(1_000, timeout=SOME_SECONDS)
            assert messages
            for message in messages:
                assert message.due_at <= message.timestamp, "released before its time"
            queue.ack_many(messages)
            taken += len(messages)
        lateness = queue.stats().metrics.lateness_seconds
        assert lateness.count == len(near)
        assert lateness.p99 < SOME_SECONDS
        assert queue.stats().delayed == count + 1
