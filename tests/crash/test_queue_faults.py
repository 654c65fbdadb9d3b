"""A queue on a disk that fails or spoils what it keeps: never a false answer, nothing lost, a clear error."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator

import pytest

from holdfast import Queue
from holdfast.delivery.image import check
from holdfast.env import ManualClock, SeededIds
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import DamagedRange, HoldfastError
from tests.crash.queue_histories import QueueHistory
from tests.crash.queue_promises import FOLDER, check_after_cut, number_of, small_queue
from tests.crash.queue_stories import OPERATIONS

GROUP = f"{FOLDER}/topics/orders/0/groups/default"
DAMAGE_MASK = 0x10


def opened(disk: SimulatedDisk, clock: ManualClock | None = None, **changes) -> Queue[bytes]:
    return small_queue(disk, clock or ManualClock(), SeededIds(1), **changes)


# Calls that fail


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "for-good"])
@pytest.mark.parametrize("fault", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_fault_makes_the_queue_lie(name, fault, sticky, scale):
    calls = calls_of(name)
    rng = random.Random(f"{name} {fault} {sticky}")
    for nth in sorted(rng.sample(range(1, calls + 1), min(calls, scale(10, calls)))):
        for durability in scale([rng.choice(["fsync", "os"])], ["fsync", "os"]):
            strike(name, durability, fault, nth, sticky=sticky)


def calls_of(name: str) -> int:
    """How many disk calls the operation makes that could fail."""
    history, operate = prepared(name, "fsync", maps=True)
    history.disk.faults.fail(10**9, errno.EIO, sticky=False)
    operate(history)
    return history.disk.faults._faults[0].seen


def prepared(name: str, durability: str, *, maps: bool) -> tuple[QueueHistory, Callable[[QueueHistory], object]]:
    prepare, operate = OPERATIONS[name]
    history = QueueHistory(1, durability=durability, maps=maps)
    prepare(history)
    return history, operate


def strike(name: str, durability: str, fault: str, nth: int, *, sticky: bool) -> None:
    """Let the nth disk call of the operation fail, and look whether anybody was told a lie."""
    history, operate = prepared(name, durability, maps=nth % 3 > 0)
    history.disk.faults.fail(nth, getattr(errno, fault), sticky=sticky)
    try:
        attempt(lambda: operate(history))
        history.disk.faults.clear()
        check_after_cut(history, history.disk.kill(), killed=True)
        check_after_cut(history, history.disk.cut(random.Random(nth)), go_on=False)
        attempt(history.ack)
        attempt(history.close)
        check_after_cut(history, history.disk.kill(), killed=True, go_on=False)
    except BaseException as error:
        error.add_note(f"{name}, {durability}, {fault} at call {nth}, sticky={sticky}: {history.disk.faults.fired[:3]}")
        raise


def attempt(step: Callable[[], object]) -> None:
    """Any error but one of ours is a bug: this lets it through."""
    try:
        step()
    except HoldfastError as error:
        assert len(str(error)) > 20, "that says nothing"


# Bytes that were spoiled


def rich_disk() -> SimulatedDisk:
    """A queue with something in every kind of file, killed."""
    history = QueueHistory(3, durability="fsync")
    for options in ({"key": "a"}, {"priority": 5}, {"dedup_id": "x"}, {"delay": 60}, {"delay": 9_000}, {}):
        for _ in range(3):
            history.put(**{**options, **({"dedup_id": f"x{history.promises.next}"} if "dedup_id" in options else {})})
    history.get(4)
    history.reject()
    history.nack()
    history.compact()
    history.put(delay=20)
    history.put()
    history.reject()
    history.sync()  # damage to what was never synced looks like a write that was cut short
    return history.disk.kill()


def files_of(disk: SimulatedDisk, folder: str) -> Iterator[str]:
    for name in disk.names(folder):
        path = f"{folder}/{name}"
        try:
            yield from files_of(disk, path)
        except OSError:
            yield path


RICH_FILES = sorted(files_of(rich_disk(), FOLDER))


def kind_of(path: str) -> str:
    return path.removeprefix(f"{FOLDER}/").replace("/", "-")


@pytest.mark.parametrize("path", RICH_FILES, ids=kind_of)
def test_a_queue_with_a_spoiled_byte_opens_or_says_what_is_wrong(path, scale, caplog):
    whole = rich_disk()
    with opened(whole.kill()) as q:
        bodies = bodies_in(q)
    used = [position for position, byte in enumerate(whole.contents(path)) if byte]
    rng = random.Random(path)
    for position in sorted(rng.sample(used, min(len(used), scale(8, 400)))):
        disk = whole.kill()
        disk.flip(path, position, DAMAGE_MASK)
        caplog.clear()
        try:
            with opened(disk) as q:
                check_damaged(q, bodies)
        except HoldfastError as error:
            assert len(str(error)) > 20, f"byte {position} of {path} is spoiled, and the error says nothing"
        except BaseException as error:
            error.add_note(f"byte {position} of {path}; logged: {[record.message for record in caplog.records]}")
            raise


def bodies_in(q: Queue[bytes]) -> dict[int, bytes]:
    phases = ("ready", "leased", "delayed", "dead")
    return {number_of(message.raw): message.raw for phase in phases for message in q.messages(phase)}


def check_damaged(q: Queue[bytes], bodies: dict[int, bytes]) -> None:
    """No message has changed; if one is lost, somebody was told."""
    found = bodies_in(q)
    for number, body in bodies.items():
        assert found.get(number, body) == body, f"{number} has changed"
    assert check(q._port.deliveries[0].group) == []
    lost = bodies.keys() - found.keys()
    assert not lost or damage_of(q), f"{lost} are lost, and nobody was told"


def damage_of(q: Queue[bytes]) -> list[object]:
    """What the opened queue knows to be damaged."""
    delivery = q._port.deliveries[0]
    partitions = [delivery.partition] + ([] if delivery.dead.dead_log is None else [delivery.dead.dead_log.target])
    stores = [partition.delayed for partition in partitions if partition.delayed is not None]
    logs = [partition.log for partition in partitions] + [store.intake for store in stores]
    known: list[object] = [damage for store in stores for damage in store.damage]
    for log in logs:
        known += log.report.damage
        try:
            list(log.records(log.start))
        except DamagedRange as damage:
            known.append(damage)
    return known


def test_a_kill_inside_the_snapshot_that_follows_a_damaged_one_loses_nothing():
    disk = SimulatedDisk()
    q = opened(disk)
    for i in range(120):
        q.put(b"%d " % i, durability="os")
        q.get(timeout=0).ack()
        if i % 60 == 59:
            q.compact()
    q._port.deliveries[0].save()
    disk = disk.kill()
    disk.flip(f"{GROUP}/snapshot", 20)
    q = opened(disk)
    left: list[SimulatedDisk] = []
    disk.on_call = lambda call: left.append(disk.kill())
    q._port.deliveries[0].save()
    for each in left:
        assert opened(each).get_many(1, timeout=0) == []


def test_acks_count_though_the_journal_has_lost_what_its_snapshot_covers():
    disk = SimulatedDisk()
    q = opened(disk)
    q.put_many([b"0 ", b"1 ", b"2 "])
    q.get(timeout=0).ack()
    q._port.deliveries[0].save()
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
        q._port.engine.tick()
    start = q.seek("start")
    clock.advance(seconds=60)
    q._port.engine.tick()
    assert q.stats().ready == 40 - start
