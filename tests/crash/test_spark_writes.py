"""A commit of the Spark sink that is stopped at any disk call: the batch is run again, and each row is there once."""

from __future__ import annotations

import errno
import random

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from holdfast.env.sim.disk import SimulatedDisk  # noqa: E402
from holdfast.errors import HoldfastError  # noqa: E402
from tests.unit.sinks import Shop, batch_of  # noqa: E402

PLAIN = [b"plain-%d" % number for number in range(30)]
DELAYED = [b"delayed-%d" % number for number in range(5)]
UNIQUE = [b"unique-%d" % number for number in range(5)]
LOOKED_AT = 20  # disks of each story that the query starts anew on

STORIES = {"plain": PLAIN, "delayed": PLAIN + DELAYED, "unique": PLAIN + UNIQUE, "urgent": PLAIN, "traced": PLAIN}


def rows_of(story: str, order: random.Random):
    """The rows of a batch; a retry brings them in any order."""
    values = list(STORIES[story])
    order.shuffle(values)
    columns: dict[str, object] = {"key": [value[-1:] for value in values]}
    if story == "delayed":
        columns["delay"] = pa.array([60.0 if value in DELAYED else None for value in values])
    if story == "unique":
        columns["dedup_id"] = pa.array([value if value in UNIQUE else None for value in values], pa.binary())
    if story == "urgent":
        columns["priority"] = pa.array([len(value) % 3 for value in values], pa.int32())
    return batch_of(values, **columns)


def stage(shop: Shop, story: str, seed: int, attempt: int):
    rows = rows_of(story, random.Random(seed))
    half = rows.num_rows // 2
    return [
        shop.stage(rows.slice(0, half), batch=1, task=0, attempt=attempt),
        shop.stage(rows.slice(half), batch=1, task=1, attempt=attempt),
    ]


def started(story: str) -> Shop:
    """A folder with two partitions in small segments, one batch of the query in it, and messages of others."""
    shop = Shop(partitions=2, frame_bytes=1024, segment_bytes=4096, trace_sample=1.0 if story == "traced" else 0.0)
    with shop.broker() as broker:
        broker.group("orders", "workers")
        broker.publish_many("orders", [b"other"] * 3)
    shop.write(batch_of([b"before"]), batch=0)
    return shop


def check(disk: SimulatedDisk, story: str, seed: int) -> None:
    """The query starts anew on what was left, and runs the batch again."""
    shop = Shop(disk)
    with shop.broker() as broker:  # somebody else may use the folder first
        broker.publish("orders", b"between")
    shop.commit(*stage(shop, story, seed, attempt=9))
    shop.write(batch_of([b"after"]), batch=2)
    shop.clock.advance(ms=61_000)
    with shop.broker() as broker:
        broker._port.engine.topic("orders").tick()
    others = [b"other"] * 3 + [b"before", b"between", b"after"]
    assert sorted(shop.values()) == sorted(STORIES[story] + others)
    assert list(shop.files()) == ["query/done.json"]


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("stop", ["cut", "kill"])
def test_every_row_is_there_once_wherever_the_commit_is_stopped(stop, story, scale):
    shop, order, disks = started(story), random.Random(stop), []
    staged = stage(shop, story, seed=1, attempt=0)
    shop.disk.on_call = lambda call: disks.append(shop.disk.cut(order) if stop == "cut" else shop.disk.kill())
    shop.commit(*staged)
    shop.disk.on_call = None
    assert len(disks) > LOOKED_AT
    for seed, disk in enumerate(order.sample(disks, scale(LOOKED_AT, len(disks)))):
        check(disk, story, seed)


@pytest.mark.slow
@pytest.mark.parametrize("story", ["plain", "delayed"])
def test_a_second_stop_while_the_first_one_is_made_good_doubles_nothing_either(story, scale):
    shop, order, first = started(story), random.Random(1), []
    staged = stage(shop, story, seed=1, attempt=0)
    shop.disk.on_call = lambda call: first.append(shop.disk.cut(order))
    shop.commit(*staged)
    for seed, disk in enumerate(order.sample(first, scale(5, 50))):
        again, second = Shop(disk), []
        restaged = stage(again, story, seed + 2, attempt=5)
        disk.on_call = lambda call, disk=disk, second=second: second.append(disk.cut(order))
        again.commit(*restaged)
        disk.on_call = None
        for other in order.sample(second, min(scale(5, 50), len(second))):
            check(other, story, seed)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("story", ["plain", "delayed"])
def test_a_disk_that_fails_once_doubles_nothing(fault, story, scale):
    failed = 0
    for nth in range(1, 150, scale(6, 1)):
        shop = started(story)
        staged = stage(shop, story, seed=1, attempt=0)
        shop.disk.faults.fail(nth, getattr(errno, fault), sticky=False)
        try:
            shop.commit(*staged)
        except HoldfastError:
            failed += 1
            shop.disk.faults.clear()
            shop.sink().abort(staged)  # as Spark does
        shop.disk.faults.clear()
        check(shop.disk.kill(), story, nth)
    assert failed > 10
