"""Power cuts, kills and faults in the life of a broker: at random disk calls, and at every call of its operations."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import pytest

from holdfast import Broker, Group
from holdfast.env import ManualClock, SeededIds
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import DiskFailed, HoldfastError
from tests.crash.broker_histories import BrokerHistory
from tests.crash.broker_promises import check_after_cut, small_broker

SLICES = 2
STOPS = 20  # of each operation, in a usual run


@pytest.mark.parametrize("durability", ["fsync", "os"])
@pytest.mark.parametrize("part", range(SLICES))
def test_nothing_that_was_promised_is_undone_wherever_the_power_is_cut(durability, part, scale):
    wanted = scale(30, 40_000) // SLICES
    states, seed = 0, part * 1_000_000
    while states < wanted:
        states += stop_here_and_there(seed, durability, killed=False)
        seed += 1


def test_nothing_that_was_answered_is_undone_wherever_the_process_is_killed(scale):
    states, seed = 0, 0
    while states < scale(30, 20_000):
        states += stop_here_and_there(seed, "os", killed=True)
        seed += 1


def stop_here_and_there(seed: int, durability: str, *, killed: bool) -> int:
    """Run one history, and look at one possible disk after some of its write points."""
    rng = random.Random(seed)
    states = 0

    def stop(history: BrokerHistory, call: str) -> None:
        nonlocal states
        if rng.random() < 0.015:
            states += 1
            check_after_cut(history, history.disk.kill() if killed else history.disk.cut(rng), killed=killed)

    try:
        history = BrokerHistory(seed, durability=durability, maps=seed % 2 == 0, on_cut_point=stop)
        history.run(steps=rng.choice([10, 40, 100]), without="power_cut" if killed else None)
    except BaseException as error:
        error.add_note(f"history seed {seed}, {durability}, killed={killed}, state {states}")
        raise
    return states


# Inside one operation, at every call


def nothing(history: BrokerHistory) -> None:
    history.create_topic("mails", 2)


def busy(history: BrokerHistory) -> None:
    """A topic with two groups in queue mode, messages in hand, dead letters, a consumer that committed."""
    history.create_topic("orders", 2)
    history.make_group("earliest")
    for _ in range(3):
        history.publish_many()
    history.make_group("earliest", 2)
    for _ in range(4):
        history.receive(3)
    history.ack()
    history.join()
    history.poll()
    history.commit()
    history.publish_many()


def with_dead_letters(history: BrokerHistory) -> None:
    busy(history)
    history.reject()
    history.reject()


def one_group(history: BrokerHistory) -> None:
    history.create_topic("orders", 2)
    history.publish_many()
    history.publish_many()
    history.make_group("earliest")


def create_again(history: BrokerHistory) -> None:
    """A topic of the same name as one that was deleted, with groups of the same names: it begins with nothing."""
    history.delete_topic()
    history.create_topic("orders", 2)
    history.make_group("earliest")
    history.publish_many()


def make_again(history: BrokerHistory) -> None:
    history.delete_group()
    history.make_group("earliest")
    history.receive(2)


def read_and_commit(history: BrokerHistory) -> None:
    history.poll()
    history.commit()


OPERATIONS: dict[str, tuple[Callable[[BrokerHistory], None], Callable[[BrokerHistory], object]]] = {
    "create_topic": (nothing, lambda history: history.create_topic("orders", 2)),
    "delete_topic": (with_dead_letters, BrokerHistory.delete_topic),
    "a topic deleted and made again": (with_dead_letters, create_again),
    "add_partitions": (busy, BrokerHistory.add_partitions),
    "alter_topic": (busy, BrokerHistory.alter_topic),
    "a new group": (one_group, lambda history: history.make_group("earliest")),
    "a new group at the end": (one_group, lambda history: history.make_group("latest")),
    "a new group with settings": (one_group, lambda history: history.make_group("earliest", 2)),
    "delete_group": (with_dead_letters, BrokerHistory.delete_group),
    "a group deleted and made again": (with_dead_letters, make_again),
    "publish to several partitions": (busy, BrokerHistory.publish_many),
    "the first dead letter": (busy, BrokerHistory.reject),
    "a redrive": (with_dead_letters, BrokerHistory.redrive),
    "a reset in queue mode": (with_dead_letters, BrokerHistory.reset_queue),
    "a new group in stream mode": (one_group, BrokerHistory.join),
    "a commit": (busy, read_and_commit),
    "a reset in stream mode": (busy, BrokerHistory.reset_stream),
    "a stream group deleted": (busy, BrokerHistory.delete_stream),
    "compacting": (with_dead_letters, BrokerHistory.compact),
    "closing": (with_dead_letters, BrokerHistory.reopen),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_cut_or_a_kill_inside_an_operation_undoes_nothing(name, scale):
    prepare, operate = OPERATIONS[name]
    for seed in range(scale(1, 200)):
        rng = random.Random(f"{name} {seed}")
        chance = scale(STOPS / changes_of(name), 1)  # in a long run at every call

        def stop(history: BrokerHistory, call: str, rng: random.Random = rng, chance: float = chance) -> None:
            if rng.random() < chance:
                check_after_cut(history, history.disk.cut(rng), go_on=rng.random() < scale(0.2, 1))
            if rng.random() < chance / 3:
                check_after_cut(history, history.disk.kill(), killed=True, go_on=rng.random() < scale(0.2, 1))

        history = BrokerHistory(seed, durability=rng.choice(["fsync", "os"]), maps=(seed + len(name)) % 2 == 0)
        prepare(history)
        history.cut_with(stop)
        history.do(lambda history=history, operate=operate: operate(history))
        for _ in range(3):
            check_after_cut(history, history.disk.cut(rng))


def changes_of(name: str) -> int:
    """How many changes of the disk the operation makes."""
    history, operate = prepared(name, "fsync")
    changes: list[str] = []
    history.disk.on_call = changes.append
    operate(history)
    return len(changes)


# Calls that fail


@pytest.mark.parametrize("fault", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_fault_makes_the_broker_lie(name, fault, scale):
    calls = calls_of(name)
    rng = random.Random(f"{name} {fault}")
    for nth in sorted(rng.sample(range(1, calls + 1), min(calls, scale(3, calls)))):
        strike(name, fault, nth, sticky=rng.random() < 0.5)


def calls_of(name: str) -> int:
    """How many disk calls the operation makes that could fail."""
    history, operate = prepared(name, "fsync")
    history.disk.faults.fail(10**9, errno.EIO, sticky=False)
    operate(history)
    return history.disk.faults._faults[0].seen


def prepared(name: str, durability: str) -> tuple[BrokerHistory, Callable[[BrokerHistory], object]]:
    prepare, operate = OPERATIONS[name]
    history = BrokerHistory(1, durability=durability)
    prepare(history)
    return history, operate


def strike(name: str, fault: str, nth: int, *, sticky: bool) -> None:
    """Let the nth disk call of the operation fail, and look whether anybody was told a lie; then go on."""
    history, operate = prepared(name, ["fsync", "os"][nth % 2])
    history.disk.faults.fail(nth, getattr(errno, fault), sticky=sticky)
    try:
        attempt(lambda: operate(history))
        history.disk.faults.clear()
        check_after_cut(history, history.disk.kill(), killed=True)
        check_after_cut(history, history.disk.cut(random.Random(nth)), go_on=False)
        attempt(lambda: operate(history))
        attempt(history.publish_many)
        check_after_cut(history, history.disk.kill(), killed=True, go_on=False)
        attempt(history.close)
        check_after_cut(history, history.disk.kill(), killed=True)
    except BaseException as error:
        error.add_note(f"{name}, {fault} at call {nth}, sticky={sticky}: {history.disk.faults.fired[:3]}")
        raise


def attempt(step: Callable[[], object]) -> None:
    """Any error but one of ours is a bug: this lets it through."""
    try:
        step()
    except HoldfastError as error:
        assert len(str(error)) > 20, "that says nothing"


# Each of these was broken once


def every_cut(history: BrokerHistory) -> list[SimulatedDisk]:
    """What cuts of one moment may leave: all, nothing and much in between."""
    return [history.disk.cut(random.Random(seed)) for seed in range(30)]


def reopened(disk: SimulatedDisk) -> Broker:
    return small_broker(disk, ManualClock(), SeededIds(99), durability="fsync")


def test_a_deleted_topic_takes_its_dead_letters_with_it_for_good():
    history = BrokerHistory(1, durability="fsync")
    with_dead_letters(history)
    history.delete_topic()
    for disk in every_cut(history):
        with reopened(disk) as broker:
            broker.create_topic("orders")
            assert broker.group("orders", "billing").dead.list() == broker.group("orders", "audit").dead.list() == []


def test_a_deleted_group_stays_deleted_with_its_dead_letters():
    history = BrokerHistory(1, durability="fsync")
    with_dead_letters(history)
    for name in ("billing", "audit"):
        history.broker.delete_group(name, "orders")
    for disk in every_cut(history):
        with reopened(disk) as broker:
            assert broker.describe_topic("orders").groups == []
            for name in ("billing", "audit"):
                group = broker.group("orders", name)
                assert (group.dead.list(), group.stats().floor) == ([], 0)


def counted(history: BrokerHistory, call: Callable[[BrokerHistory], object]) -> int:
    """How many disk calls it makes that could fail."""
    history.disk.faults.fail(10**9, errno.EIO, sticky=False)
    call(history)
    return history.disk.faults._faults[0].seen


def topic_of_two(*groups: str) -> BrokerHistory:
    history = BrokerHistory(1, durability="fsync")
    history.broker.create_topic("orders", partitions=2)
    for name in groups:
        history.broker.group("orders", name)
    for number in range(2):
        history.broker.publish("orders", b"%d " % number, partition=number)
    return history


def test_a_group_that_could_not_be_made_can_be_made_later():
    def make(history: BrokerHistory) -> Group[bytes]:
        return history.broker.group("orders", "late", start="latest", max_attempts=2)

    for nth in range(1, counted(topic_of_two(), make) + 1):
        history = topic_of_two()
        history.disk.faults.fail(nth, errno.ENOSPC, sticky=True)
        attempt(lambda history=history: make(history))
        history.disk.faults.clear()
        group = make(history)
        history.broker.publish("orders", b"2 ", partition=1)
        assert [message.raw for message in group.receive_many(5, timeout=0)] == [b"2 "], f"call {nth}"
        assert group.stats().partitions == 2


def test_partitions_that_could_not_be_added_can_be_added_later_and_serve_every_group(scale):
    def grow(history: BrokerHistory) -> object:
        return history.broker.alter_topic("orders", partitions=4)

    groups = ("audit", "billing")
    for nth in range(1, counted(topic_of_two(*groups), grow) + 1, scale(3, 1)):
        history = topic_of_two(*groups)
        history.disk.faults.fail(nth, errno.ENOSPC, sticky=True)
        attempt(lambda history=history: grow(history))
        history.disk.faults.clear()
        grow(history)
        for number in range(4):
            history.broker.publish("orders", b"%d " % (number + 2), partition=number)
        for name in groups:
            group = history.broker.group("orders", name)
            assert [delivery.number for delivery in group._port.queue_group.deliveries] == [0, 1, 2, 3]
            assert len(group.receive_many(10, timeout=0)) == 6, f"call {nth}"


def test_a_group_that_was_deleted_half_begins_anew_when_it_is_made_again(scale):
    def delete(history: BrokerHistory) -> None:
        history.broker.delete_group("billing", "orders")

    def settled() -> BrokerHistory:
        history = topic_of_two("billing")
        first, second = history.broker.group("orders", "billing").receive_many(2, timeout=0)
        first.ack(durability="fsync")
        second.reject("never")
        return history

    for nth in range(1, counted(settled(), delete) + 1, scale(3, 1)):
        history = settled()
        history.disk.faults.fail(nth, errno.EIO, sticky=False)
        attempt(lambda history=history: delete(history))
        history.disk.faults.clear()
        try:
            made_again(history.broker, nth)
        except DiskFailed:  # a log has stopped: whoever opens the folder next goes on
            with reopened(history.disk.kill()) as broker:
                made_again(broker, nth)
            continue
        with reopened(history.disk.kill()) as broker:
            assert broker.describe_topic("orders").groups == ["billing"]
            assert len(broker.group("orders", "billing").receive_many(10, timeout=0)) == 2


def made_again(broker: Broker, nth: int) -> None:
    if "billing" in broker.describe_topic("orders").groups:
        broker.delete_group("billing", "orders")
    assert len(broker.group("orders", "billing").receive_many(10, timeout=0)) == 2, f"call {nth}"
