"""A dedup id holds for a whole topic: with any key, in any partition, across growth, crashes and upgrades."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

import holdfast
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk

HOUR_MS = 3_600_000


class Shop:
    """A broker on a simulated disk, with one topic of four partitions."""

    def __init__(self, *, partitions: int = 4, durability: str = "fsync", **settings: Any) -> None:
        self.durability = durability
        self.disk, self.clock, self.seed = SimulatedDisk(), ManualClock(), 1
        self.broker = self._open()
        self.broker.create_topic("orders", partitions=partitions, min_free_bytes=0, **settings)

    def _open(self) -> holdfast.Broker:
        self.seed += 1
        world = World(clock=self.clock, disk=self.disk, ids=SeededIds(self.seed))
        return holdfast.open_broker("/shop", world=world, durability=self.durability)

    def put(self, dedup_id: str, **options: Any) -> holdfast.Stored:
        return self.broker.publish("orders", b"body", dedup_id=dedup_id, **options)

    @property
    def topic(self) -> Any:
        return self.broker._port.engine.topic("orders")

    def count(self) -> int:
        return sum(partition.log.written_end for partition in self.topic.partitions)

    def reopen(self) -> None:
        self.broker.close()
        self.broker = self._open()

    def kill(self) -> None:
        self.disk = self.disk.kill()
        self.broker = self._open()

    def cut_power(self, seed: int) -> None:
        self.disk = self.disk.cut(random.Random(seed))
        self.broker = self._open()


def known(shop: Shop, firsts: dict[str, holdfast.Stored], **options: Any) -> bool:
    """Whether every id is a duplicate, of the message that had it first."""
    again = {name: shop.put(name, **options) for name in firsts}
    return all(
        (each.duplicate, each.id, each.partition, each.offset) == (True, first.id, first.partition, first.offset)
        for each, first in zip(again.values(), firsts.values(), strict=True)
    )


def test_an_id_is_known_again_with_another_key_and_in_another_partition():
    shop = Shop()
    firsts = {f"id-{n}": shop.put(f"id-{n}", key=f"key-{n}") for n in range(40)}
    assert len({stored.partition for stored in firsts.values()}) == 4
    assert known(shop, firsts, key="another")
    assert known(shop, firsts)
    assert all(known(shop, firsts, partition=number) for number in range(4))
    assert shop.count() == 40


def test_an_id_is_known_again_after_partitions_were_added():
    shop = Shop(partitions=1)
    firsts = {f"id-{n}": shop.put(f"id-{n}", key=f"key-{n}") for n in range(50)}
    shop.broker.add_partitions("orders", 8)
    assert known(shop, firsts, key="another")
    assert shop.count() == 50
    firsts |= {f"more-{n}": shop.put(f"more-{n}") for n in range(50)}
    for again in (shop.kill, shop.reopen):
        again()
        assert known(shop, firsts)
    assert shop.count() == 100


def test_the_same_id_for_two_partitions_in_one_call_is_stored_once():
    shop = Shop()
    messages = [holdfast.NewMessage(body=b"%d" % n, key=f"key-{n}", dedup_id="same") for n in range(20)]
    stored = shop.broker.publish_many("orders", messages)
    assert [each.duplicate for each in stored].count(False) == 1
    assert len({each.id for each in stored}) == 1
    assert shop.count() == 1


def test_a_delayed_message_is_known_by_its_delayed_id_in_all_partitions():
    shop = Shop()
    first = shop.put("later", key="a", delay=60)
    for number in range(4):
        again = shop.put("later", partition=number)
        assert (again.duplicate, again.id) == (True, first.id)
    shop.kill()
    assert shop.put("later", key="b", delay=5).id == first.id


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_power_cut_leaves_every_synced_id_known_in_all_partitions(seed, saved):
    shop = Shop()
    firsts = {f"id-{n}": shop.put(f"id-{n}", key=f"key-{n}", delay=60 if n % 5 == 0 else None) for n in range(30)}
    if saved:
        shop.topic.duplicates.save()
        firsts |= {f"behind-{n}": shop.put(f"behind-{n}") for n in range(5)}
    shop.cut_power(seed)
    assert known(shop, firsts, key="another")


def test_retention_may_take_messages_and_their_ids_stay_known():
    shop = Shop(segment_bytes=4096, frame_bytes=1024, retention_ms=1_000)
    firsts = {f"id-{n}": shop.put(f"id-{n}", key=f"key-{n}") for n in range(200)}
    shop.clock.advance(ms=HOUR_MS + 1)
    shop.broker._port.engine.tick()
    shop.topic.duplicates.save()
    for partition in shop.topic.partitions:
        partition.log.roll()
    shop.topic.retain()
    assert all(partition.log.start > 0 for partition in shop.topic.partitions)
    assert known(shop, firsts, key="another")
    shop.kill()
    assert known(shop, firsts, key="another")


def test_an_id_is_new_again_when_the_window_is_over():
    shop = Shop(dedup_window_ms=1_000)
    shop.put("id", key="a")
    shop.clock.advance(ms=1_001)
    assert not shop.put("id", key="b").duplicate


def test_a_duplicate_is_answered_with_fsync_only_when_the_first_is_on_disk_wherever_that_is():
    for seed in range(5):
        shop = Shop(durability="os")
        first = shop.put("id", partition=1)
        again = shop.put("id", partition=2, durability="fsync")
        assert (again.duplicate, again.id) == (True, first.id)
        shop.cut_power(seed)
        assert shop.topic.partitions[1].log.end == 1


def test_publishers_at_once_to_different_partitions_store_each_id_once(tmp_path):
    with holdfast.open_broker(tmp_path, durability="os") as broker:
        broker.create_topic("orders", partitions=4)
        answers: list[list[holdfast.Stored]] = [[] for _ in range(4)]
        start = threading.Barrier(4)

        def publish(number: int) -> None:
            start.wait()
            for n in range(300):
                answers[number].append(broker.publish("orders", b"", dedup_id=f"id-{n}", partition=number))

        threads = [threading.Thread(target=publish, args=[number]) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for n in range(300):
            of_id = [each[n] for each in answers]
            assert [stored.duplicate for stored in of_id].count(False) == 1
            assert len({(stored.id, stored.partition, stored.offset) for stored in of_id}) == 1


def test_a_producers_own_ids_for_delayed_messages_differ_by_partition():
    shop = Shop()
    with shop.broker.producer(name="till") as producer:
        sent = [producer.send("orders", b"x", partition=n % 4, delay=60) for n in range(12)]
        stored = [each.result(timeout=10) for each in sent]
    assert not any(each.duplicate for each in stored if each is not None)
    assert len({each.id for each in stored if each is not None}) == 12


def test_a_full_memory_is_saved_for_all_partitions_at_once():
    shop = Shop()
    shop.put("first")
    shop.topic.duplicates.index._max_recent = 10
    firsts = {f"id-{n}": shop.put(f"id-{n}", key=f"key-{n}") for n in range(40)}
    shop.broker._port.engine.tick()
    index = shop.topic.duplicates.index
    assert index._runs
    assert [place.partition.offset for place in index.covered] == [p.log.written_end for p in shop.topic.partitions]
    assert known(shop, firsts, key="another")
