"""A queue on a disk that fails or spoils what it keeps: never a false answer, nothing lost, a clear error."""

from __future__ import annotations

from holdfast import Queue
from holdfast.env import ManualClock, SeededIds
from holdfast.env.simdisk import SimulatedDisk
from tests.crash.queue_histories import FOLDER, small_queue

GROUP = f"{FOLDER}/topics/orders/0/groups/default"


def opened(disk: SimulatedDisk, clock: ManualClock | None = None, **changes) -> Queue[bytes]:
    return small_queue(disk, clock or ManualClock(), SeededIds(1), **changes)


def test_a_kill_inside_the_snapshot_that_follows_a_damaged_one_loses_nothing():
    disk = SimulatedDisk()
    q = opened(disk)
    for i in range(120):
        q.put(b"%d " % i, durability="os")
        q.get(timeout=0).ack()
        if i % 60 == 59:
            q.compact()
    q._engine.delivery.save()
    disk = disk.kill()
    disk.flip(f"{GROUP}/snapshot", 20)
    q = opened(disk)
    left: list[SimulatedDisk] = []
    disk.on_call = lambda call: left.append(disk.kill())
    q._engine.delivery.save()
    for each in left:
        assert opened(each).get_many(1, timeout=0) == []


def test_acks_count_though_the_journal_has_lost_what_its_snapshot_covers():
    disk = SimulatedDisk()
    q = opened(disk)
    q.put_many([b"0 ", b"1 ", b"2 "])
    q.get(timeout=0).ack()
    q._engine.delivery.save()
    disk = disk.kill()
    for name in disk.names(GROUP):
        if name.endswith((".log", ".idx")) or name in {"state", "epochs"}:
            disk.remove(f"{GROUP}/{name}")
    q = opened(disk)
    message = q.get(timeout=0)
    assert message.raw == b"1 "
    message.ack(durability="fsync")
    assert opened(disk.kill()).get(timeout=0).raw == b"2 "


def test_retention_does_not_take_what_a_seek_has_just_brought_back():
    clock = ManualClock()
    q = opened(SimulatedDisk(), clock, retention_ms=10_000, retention_check_ms=1_000)
    for i in range(40):
        q.put(b"%d " % i + bytes(300))
    q.ack_many(q.get_many(100, timeout=0), durability="fsync")
    for _ in range(3):
        q._engine.tick()
    start = q.seek("start")
    clock.advance(seconds=60)
    q._engine.tick()
    assert q.stats().ready == 40 - start
