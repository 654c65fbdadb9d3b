"""Transactions after kills and power cuts: all of one, or nothing of it, wherever its owner is stopped."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections import Counter
from typing import Any, NamedTuple

import pytest

import holdfast
from holdfast.broker.transactions import FolderTransactions
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import DiskFull, HoldfastError
from tests.unit.brokers import FOLDER, SETTINGS, Place

CUTS = 2  # possible disks for each call
EVERY = 1  # of them, this one is looked at
LONG_S = 3600.0


class Found(NamedTuple):
    """What there is of a transaction."""

    invoices: tuple[bytes, ...]
    delayed: int
    orders: int  # still to be handled
    document: Any
    offset: int | None


NOTHING = Found((), 0, 3, None, 0)
ALL = Found((b"keyed", b"plain", b"urgent"), 1, 1, "paid 2", 2)


def prepared(place: Place) -> tuple[Any, Any]:
    """Three orders for a queue and a stream, and two topics to publish to."""
    broker = place.broker
    broker.create_topic("orders")
    broker.create_topic("invoices", partitions=2)
    broker.create_topic("later")
    queue = broker.queue("orders")
    queue.put_many([b"0", b"1", b"2"])
    consumer = broker.consumer("orders", group="readers", auto_commit=False)
    broker.sync()
    return queue, consumer


def run(broker: Any, queue: Any, consumer: Any) -> None:
    with broker.transaction("billing") as transaction:
        transaction.ack(*queue.get_many(2))
        consumer.poll(timeout=1, max_records=2)
        transaction.commit(consumer)
        transaction.publish("invoices", b"keyed", key="a")
        transaction.publish("invoices", b"plain")
        transaction.publish("invoices", b"urgent", priority=9, partition=1)
        transaction.publish("later", b"later", delay=10 * LONG_S)
        transaction.documents.update("account", "paid 2", version=0)


def reopened(disk: SimulatedDisk, after_s: float = LONG_S) -> holdfast.Broker:
    clock = ManualClock()
    clock.advance(seconds=after_s)
    broker = holdfast.open_broker(FOLDER, world=World(clock=clock, disk=disk, ids=SeededIds(9)), settings=SETTINGS)
    broker._port.engine.tick()
    return broker


def found_in(broker: holdfast.Broker) -> Found:
    engine = broker._port.engine
    with engine.using("invoices") as topic:
        records = [bytes(each.value) for part in topic.partitions for each in part.log.records(part.log.start)]
    document = broker.documents.get("account")
    stats = broker.queue("orders").stats()
    offsets = {at.offset for at in engine.streams.group("readers").offsets.entries()}
    return Found(
        tuple(sorted(records)),
        broker.queue("later").stats().delayed,
        stats.ready + stats.leased + stats.delayed,
        None if document is None else document.value,
        max(offsets, default=None),
    )


@pytest.mark.parametrize("stop", ["kill", "cut"])
def test_a_transaction_is_there_as_a_whole_or_not_at_all_wherever_its_owner_is_stopped(stop, scale):
    place, rng, left = Place(), random.Random(stop), []
    queue, consumer = prepared(place)

    def look(call: str) -> None:
        left.extend(place.disk.cut(rng) if stop == "cut" else place.disk.kill() for _ in range(looks))

    looks = scale(CUTS, 30) if stop == "cut" else 1
    place.disk.on_call = look
    run(place.broker, queue, consumer)
    place.disk.on_call = None
    done = [place.disk.cut(rng) if stop == "cut" else place.disk.kill() for _ in range(looks)]
    place.close()
    outcomes = Counter()
    for disk in [*left[:: scale(EVERY, 1)], *done]:
        with reopened(disk) as broker:
            found = found_in(broker)
            assert found in (NOTHING, ALL)
            outcomes[found] += 1
            if any(disk is each for each in done):
                assert found == ALL
            # What was acked does not come again, and what was not comes again.
            assert sorted(message.body for message in broker.queue("orders").get_many(3)) == (
                [b"2"] if found == ALL else [b"0", b"1", b"2"]
            )
            assert all(not each.unfinished for each in broker.transactions.list())
    assert min(outcomes[NOTHING], outcomes[ALL]) > 1


def test_a_second_stop_while_a_transaction_is_finished_changes_nothing(scale):
    place, rng, left = Place(), random.Random(1), []
    queue, consumer = prepared(place)
    place.disk.on_call = lambda call: left.append(place.disk.cut(rng)) if rng.random() < 0.5 else None
    run(place.broker, queue, consumer)
    place.disk.on_call = None
    place.close()
    seen = 0
    for disk in left[:: scale(3 * EVERY, 1)]:
        again: list[SimulatedDisk] = []
        disk.on_call = lambda call, disk=disk, again=again: again.append(disk.cut(rng))
        with reopened(disk) as broker:
            disk.on_call = None
            first = found_in(broker)
        for other in again[:: scale(4 * EVERY, 1)]:
            seen += 1
            with reopened(other, 2 * LONG_S) as broker:
                assert found_in(broker) == first
    assert seen > 3


def test_what_is_decided_is_finished_after_the_window_of_its_topic(monkeypatch):
    """Only the messages are stored, not the note: the next owner must find them, however late it comes."""
    place = Place()
    queue, consumer = prepared(place)
    place.broker.alter_topic("invoices", dedup_window_ms=1_000)
    monkeypatch.setattr(FolderTransactions, "_write", lambda *_, **__: None)
    with pytest.raises(holdfast.Fenced):  # its beginning was not stored either
        run(place.broker, queue, consumer)
    with place.broker.transaction() as transaction:
        transaction.publish("invoices", b"once")
    monkeypatch.undo()
    disk = place.disk.kill()
    place.close()
    with reopened(disk, 30 * 24 * LONG_S) as broker:
        assert found_in(broker).invoices == (b"once",)


def test_a_full_disk_refuses_a_transaction_as_a_whole_or_finishes_it_later():
    place = Place()
    prepared(place)
    outcomes = Counter()
    for free in range(0, 400_000, 8_192):
        disk = place.disk.kill()
        clock = ManualClock()
        world = World(clock=clock, disk=disk, ids=SeededIds(9))
        broker = holdfast.open_broker(FOLDER, world=world, settings=SETTINGS)
        orders = broker.queue("orders")
        reader = broker.consumer("orders", group="readers", auto_commit=False)
        disk._capacity_bytes = disk._tree.allocated_bytes() + free
        try:
            run(broker, orders, reader)
            outcomes["done"] += 1
        except DiskFull:
            outcomes["refused"] += 1
        except HoldfastError as error:
            outcomes[type(error).__name__] += 1
        disk._capacity_bytes = None
        clock.advance(seconds=LONG_S)
        broker._port.engine.tick()
        assert found_in(broker) in (NOTHING, ALL)
        broker.close()
    assert outcomes["done"]
    assert outcomes["refused"]
    place.close()


# Real processes

_WORKER = """
import sys, holdfast
with holdfast.open_broker(sys.argv[1]) as broker:
    queue = broker.queue("orders", lease_ms=2_000, max_attempts=1_000)
    print("open", flush=True)
    while True:
        with broker.transaction("worker") as transaction:
            messages = queue.get_many(5, timeout=1)
            for message in messages:
                transaction.publish("invoices", message.body, key=message.body)
            transaction.ack(*messages)
            count = broker.documents.get("count")
            if messages:
                transaction.documents.update(
                    "count", (count.value if count else 0) + len(messages), version=count.version if count else 0
                )
        print("committed", flush=True)
"""


@pytest.mark.serial
@pytest.mark.slow
def test_workers_that_are_killed_turn_each_order_into_one_invoice(tmp_path, scale):
    folder, rng, count = str(tmp_path / "data"), random.Random(5), scale(2_000, 20_000)
    with holdfast.open_broker(folder) as broker:
        broker.create_topic("invoices", partitions=3)
        broker.queue("orders", lease_ms=2_000, max_attempts=1_000).put_many([b"%d" % i for i in range(count)])
    left = count
    kills = 0
    while left:
        worker = subprocess.Popen([sys.executable, "-c", _WORKER, folder], stdout=subprocess.PIPE, text=True)
        assert worker.stdout is not None
        assert worker.stdout.readline().strip() == "open"
        for _ in range(rng.randint(1, scale(60, 600))):  # then it is somewhere in the next one
            worker.stdout.readline()
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
        kills += 1
        with holdfast.open_broker(folder) as broker:
            stats = broker.queue("orders").stats()
            left = stats.ready + stats.leased + stats.delayed
            stored = [
                message.body for part in range(3) for message in broker.read("invoices", partition=part, limit=count)
            ]
            assert len(stored) == len(set(stored)) == count - left
            document = broker.documents.get("count")
            assert (document.value if document else 0) == count - left
        assert kills < 200
    assert kills > 2
