"""After a crash a check finds nothing lost, wherever dedup, growth, deletion or an upgrade of a broker stopped."""

from __future__ import annotations

import errno
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast
from holdfast.broker.check import check_folder
from holdfast.broker.folder.contents import Contents, save_contents
from holdfast.env import Ids, ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.settings import BrokerSettings, TopicSettings

FOLDER = "/data/broker"
AFTER_A_RESTART = 1_000_007
OLD = Path(__file__).parent.parent / "golden" / "dedup-v1.tar.gz"


class Machine:
    """A broker on a simulated disk."""

    def __init__(
        self,
        disk: SimulatedDisk | None = None,
        clock: ManualClock | None = None,
        ids: Ids | None = None,
        *,
        open_now: bool = True,
    ) -> None:
        self.disk, self.clock = disk or SimulatedDisk(), clock or ManualClock()
        self.ids = ids or SeededIds(3)
        if open_now:
            self.open()

    def open(self) -> None:
        settings = BrokerSettings(topic=TopicSettings(min_free_bytes=0, durability="os"))
        world = World(clock=self.clock, disk=self.disk, ids=self.ids)
        self.broker = holdfast.open_broker(FOLDER, world=world, settings=settings)

    def tick(self, seconds: int) -> None:
        self.clock.advance(seconds=seconds)
        self.broker._port.engine.tick()

    def publish(self, name: str, numbers: range, partitions: int = 2) -> None:
        for n in numbers:
            self.broker.publish("orders", b"%d" % n, partition=n % partitions, dedup_id=f"{name}{n}")


def with_everything() -> Machine:
    """One of every part that a topic can have."""
    machine = Machine()
    broker = machine.broker
    broker.create_topic(
        "orders",
        partitions=2,
        segment_messages=4,
        segment_bytes=4096,
        snapshot_events=100,
        retention_done_bytes=2_000,
        retention_check_ms=1_000,
    )
    machine.publish("first", range(20))
    broker.publish("orders", b"later", partition=0, delay=50, dedup_id="later")
    group = broker.group("orders", "billing", max_attempts=2)
    for message in group.receive_many(8):
        message.ack()
    for message in group.receive_many(2):
        message.reject("no")
    with broker.consumer("orders", group="analytics", auto_commit=False) as consumer:
        consumer.poll(timeout=0)
        consumer.commit()
    with broker.producer(name="loader") as producer:
        producer.send("orders", b"sent", partition=1)
    return machine


def save_dedup_ids(machine: Machine) -> None:
    machine.publish("first", range(10, 40), partitions=1)
    machine.tick(4_000)


def add_partitions(machine: Machine) -> None:
    machine.broker.alter_topic("orders", partitions=4)
    machine.publish("grown", range(4), partitions=4)


def delete_a_group(machine: Machine) -> None:
    machine.broker.delete_group("billing", "orders")


def delete_a_stream_group(machine: Machine) -> None:
    machine.broker.delete_group("analytics")


def delete_the_topic(machine: Machine) -> None:
    machine.broker.delete_topic("orders")


def pack_past_events_and_drop_what_is_done(machine: Machine) -> None:
    group = machine.broker.group("orders", "billing")
    for n in range(0, 120, 20):
        machine.publish("work", range(n, n + 20))
        for message in group.receive_many(30):
            message.ack()
        machine.tick(5)


def close(machine: Machine) -> None:
    machine.broker.close()


# How often each is stopped in a usual run: those with many calls more seldom.
OPERATIONS = {
    save_dedup_ids: 0.2,
    add_partitions: 0.2,
    delete_a_group: 0.5,
    delete_a_stream_group: 0.5,
    delete_the_topic: 0.3,
    pack_past_events_and_drop_what_is_done: 0.03,
    close: 0.2,
}


def alarms(disk: SimulatedDisk, ids: Ids) -> list[str]:
    """All that a check calls damage."""
    if not disk.exists(f"{FOLDER}/topics"):
        return []
    report = check_folder(FOLDER, World(clock=ManualClock(), disk=disk, ids=ids))
    found = [
        str(finding.what) for part in report.parts for finding in part.log.findings if finding.severity == "damage"
    ]
    return [*found, *(what for part in report.parts for what in part.wrong), *report.missing, *report.wrong]


def stop_now_and_then(machine: Machine, rng: random.Random, often: float) -> Callable[[str], None]:
    """Look at what a power cut and a kill leave, and now and then at what the next owner makes of it."""

    def stop(_: str) -> None:
        if rng.random() >= often:
            return
        machine.disk.on_call = None
        for disk, ids in (
            (machine.disk.cut(rng), SeededIds(AFTER_A_RESTART)),
            (machine.disk.kill(), machine.ids),
        ):
            assert alarms(disk, ids) == []
            if rng.random() < 0.1:
                again = Machine(disk, ManualClock(machine.clock.now_ns()), ids)
                for topic in again.broker.topics():
                    again.broker._port.engine.topic(topic)
                again.broker.close()
                assert alarms(disk, ids) == []
        machine.disk.on_call = stop

    return stop


@pytest.mark.slow
@pytest.mark.parametrize("operate", OPERATIONS, ids=lambda operate: operate.__name__)
def test_nothing_is_missed_wherever_an_operation_is_cut_short(operate, scale):
    machine = with_everything()
    machine.disk.on_call = stop_now_and_then(machine, random.Random(operate.__name__), scale(OPERATIONS[operate], 1.0))
    operate(machine)


def old_folder() -> SimulatedDisk:
    """A data folder of the version that kept dedup ids in each partition, and no lists."""
    disk = SimulatedDisk()
    with tarfile.open(OLD) as archive:
        for member in archive.getmembers():
            path = member.name.removeprefix("./").replace("data", FOLDER, 1)
            if path.startswith(f"{FOLDER}/") and (content := archive.extractfile(member)) is not None:
                folder = path.rpartition("/")[0]
                disk.make_folder(folder)
                file = disk.open(path, write=True, create=True)
                file.write(0, [content.read()])
                file.sync()
                file.close()
                disk.sync_folder(folder)
    return disk


@pytest.mark.slow
def test_nothing_is_missed_wherever_an_upgrade_is_cut_short(scale):
    disk, clock = old_folder(), ManualClock()
    assert alarms(disk, SeededIds(3)) == []
    machine = Machine(disk, clock)
    machine.disk.on_call = stop_now_and_then(machine, random.Random(1), scale(0.3, 1.0))
    assert machine.broker._port.engine.topic("orders").duplicates.index is not None
    machine.broker.alter_topic("orders", partitions=5)
    machine.broker.close()


@pytest.mark.parametrize("unlisted", [FOLDER, f"{FOLDER}/topics/orders"])
def test_a_list_that_an_upgrade_had_no_room_for_is_not_missed(unlisted, monkeypatch):
    def save(world: World, folder: str, contents: Contents) -> None:
        if folder == unlisted:
            raise OSError(errno.ENOSPC, "no space")
        save_contents(world, folder, contents)

    machine = Machine(old_folder(), open_now=False)
    with monkeypatch.context() as full:
        full.setattr("holdfast.broker.folder.contents.save_contents", save)
        machine.open()
        machine.broker._port.engine.topic("orders")
        assert not machine.disk.exists(f"{unlisted}/contents")
        machine.broker.close()
    assert alarms(machine.disk, machine.ids) == []
    machine.open()
    machine.broker._port.engine.topic("orders")
    machine.broker.close()
    assert machine.disk.exists(f"{unlisted}/contents")
    assert alarms(machine.disk, machine.ids) == []
    machine.disk.remove(f"{unlisted}/contents")
    assert len(alarms(machine.disk, machine.ids)) == 1
