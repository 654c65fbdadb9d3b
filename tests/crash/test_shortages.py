"""Descriptors, memory or maps run out at any call to the disk: one call is refused, and nothing else is changed by it.

That is no failed disk. Whatever was refused may be tried again, the same object goes on once there is enough again, and
what was acknowledged is there.
"""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import holdfast
from holdfast import Queue
from holdfast.broker.dead_letters import DeadLetterLog
from holdfast.broker.partition import Partition
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import DiskFull, HoldfastError, TopicExists, Unavailable, UnknownGroup
from holdfast.settings import BrokerSettings, TopicSettings
from holdfast.storage.log import Log
from tests.crash import test_disk_faults as log_faults
from tests.crash.broker_histories import WEIGHTS as BROKER_WEIGHTS
from tests.crash.broker_histories import BrokerHistory
from tests.crash.histories import FOLDER, small_settings
from tests.crash.queue_histories import WEIGHTS as QUEUE_WEIGHTS
from tests.crash.queue_histories import QueueHistory
from tests.crash.queue_promises import check_after_cut, number_of
from tests.crash.queue_stories import OPERATIONS
from tests.crash.test_disk_faults import Run, check_after_kill, check_after_power_cut, check_still_reads, used_disk

# What needs a descriptor: also a map, for which Python takes a second one.
_OPENING = {"open", "open_folder", "names", "make_folder", "lock", "map", "words", "view"}
SHORTAGES = {
    "EMFILE": frozenset(_OPENING),
    "ENFILE": frozenset(_OPENING),
    "ENOMEM": frozenset(_OPENING | {"exists", "free_bytes", "reserve", "rename", "remove", "remove_folder"}),
}


def run_out(disk: SimulatedDisk, shortage: str, nth: int, *, sticky: bool) -> None:
    disk.faults.fail(nth, getattr(errno, shortage), sticky=sticky, calls=SHORTAGES[shortage])


def check_refused(errors: list[HoldfastError]) -> None:
    for error in errors:
        assert isinstance(error, Unavailable), f"{error!r} is final"
        assert not isinstance(error, DiskFull)
        assert error.retryable


# A log


LOG_OPERATIONS = [
    log_faults.publish,
    log_faults.sync,
    log_faults.roll,
    log_faults.apart,
    log_faults.trim,
    log_faults.close,
    log_faults.recovery,
]


@pytest.mark.parametrize("maps", [True, False], ids=["mapped", "written"])
@pytest.mark.parametrize("sticky", [False, True], ids=["once", "for-a-while"])
@pytest.mark.parametrize("shortage", SHORTAGES)
@pytest.mark.parametrize("operation", LOG_OPERATIONS, ids=lambda operation: operation.__name__)
def test_what_runs_out_refuses_one_call_of_a_log_and_the_same_log_goes_on(operation, shortage, sticky, maps):
    template = used_disk(maps=maps)
    with Log.open(FOLDER, small_settings(), Run(template.kill()).world()) as log:
        before = {record.offset: (record.value, "fsync") for record in log.records(log.start)}
    fired, nth = ["first"], 0
    while fired:
        nth += 1
        run = Run(template.kill())
        run.acknowledged = dict(before)
        if operation is not log_faults.recovery:
            run.open()
        run_out(run.disk, shortage, nth, sticky=sticky)
        operation(run)
        fired = run.disk.faults.fired
        run.disk.faults.clear()
        try:
            check_log(run)
        except BaseException as error:
            error.add_note(f"{operation.__name__}, {shortage} at call {nth} ({fired[:1]}), {sticky=}, {maps=}")
            raise


def check_log(run: Run) -> None:
    check_refused(run.refused)
    if run.log is not None and run.log._lock is not None:
        check_still_reads(run)
        stored = {record.offset: record.value for record in run.log.records(run.log.start)}
        assert set(stored) <= set(run.acknowledged), "a call was refused, and its messages are stored"
        assert run.log.usable
        run.append([b"on it goes"], "fsync")
        run.append([b"over a roll" * 400], "fsync")
    check_after_kill(run)
    if run.log is not None:
        run.log.close()
    with Log.open(FOLDER, small_settings(), run.world()) as log:
        assert [log.append([b"fresh"], durability="fsync").durability for _ in range(2)] == ["fsync", "fsync"]
    for seed in range(3):
        check_after_power_cut(run, seed)


# A queue: every operation that touches more than one file


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "for-a-while"])
@pytest.mark.parametrize("shortage", SHORTAGES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_runs_out_refuses_one_call_of_a_queue_and_the_same_queue_goes_on(name, shortage, sticky, scale):
    calls = calls_of(name, shortage)
    rng = random.Random(f"{name} {shortage} {sticky}")
    for nth in sorted(rng.sample(range(1, calls + 1), min(calls, scale(15, calls)))):
        durability = rng.choice(["fsync", "os"])
        history, operate = prepared(name, durability, maps=nth % 3 > 0)
        run_out(history.disk, shortage, nth, sticky=sticky)
        try:
            refused = refusal_of(partial(operate, history))
            history.disk.faults.clear()
            check_refused(refused)
            check_queue(history, closes=name == "closing")
        except BaseException as error:
            fired = history.disk.faults.fired[:3]
            error.add_note(f"{name}, {durability}, {shortage} at call {nth} of {calls}, {sticky=}: {fired}")
            raise


@pytest.mark.parametrize("shortage", SHORTAGES)
def test_a_dead_letter_is_stored_once_though_the_journal_has_closed_its_files_and_cannot_open_them(
    shortage, monkeypatch
):
    history, reject = prepared("another dead letter", "fsync", maps=True)
    append = DeadLetterLog._append

    def append_and_rest(dead_log: DeadLetterLog, burials: dict[int, Any]) -> None:
        append(dead_log, burials)
        assert dead_log._delivery.journal.log._files.rest(wait=True)
        run_out(history.disk, shortage, 1, sticky=True)

    with monkeypatch.context() as patch:
        patch.setattr(DeadLetterLog, "_append", append_and_rest)
        refusal_of(partial(reject, history))
    assert history.disk.faults.fired
    history.disk.faults.clear()
    check_queue(history, closes=False)


@pytest.mark.parametrize("at_rest", ["queue", "journal"])
@pytest.mark.parametrize("shortage", SHORTAGES)
def test_a_redrive_that_is_refused_leaves_the_letters_for_the_next_try_and_moves_them_once(
    at_rest, shortage, monkeypatch
):
    history, _ = prepared("a redrive", "fsync", maps=True)
    before, letters = history.q.stats(), history.q._port.deliveries[0].dead.open().letters
    append = Partition.append_moved

    def append_without_files(partition: Partition, batch: Any) -> Any:
        appended = append(partition, batch) if at_rest == "journal" else None
        log = letters.journal.log if at_rest == "journal" else partition.log
        assert log._files.rest(wait=True)
        run_out(history.disk, shortage, 1, sticky=True)
        return appended or append(partition, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Partition, "append_moved", append_without_files)
        with pytest.raises(Unavailable):
            history.q.dead.redrive()
    assert history.disk.faults.fired
    history.disk.faults.clear()
    if at_rest == "journal":
        for _ in range(3):  # the lease under which they were moved ends, and the pause behind it
            history.q._port.engine.tick()
            history.clock.advance(seconds=2 * 3600)
        history.q._port.engine.tick()
    assert history.q.dead.redrive().done == (before.dead if at_rest == "queue" else 0)
    assert history.q.stats().dead == 0


def calls_of(name: str, shortage: str) -> int:
    """How many disk calls the operation makes that could run out of something."""
    history, operate = prepared(name, "fsync", maps=True)
    run_out(history.disk, shortage, 10**9, sticky=False)
    operate(history)
    return history.disk.faults._faults[0].seen


def prepared(name: str, durability: str, *, maps: bool) -> tuple[QueueHistory, Callable[[QueueHistory], object]]:
    prepare, operate = OPERATIONS[name]
    history = QueueHistory(1, durability=durability, maps=maps)
    prepare(history)
    return history, operate


def refusal_of(step: Callable[[], object]) -> list[HoldfastError]:
    """Any error but one of ours is a bug: this lets it through."""
    try:
        step()
    except HoldfastError as error:
        return [error]
    return []


def check_queue(history: QueueHistory, *, closes: bool) -> None:
    """The same queue does everything again, and what it had promised is there."""
    check_after_cut(history, history.disk.kill(), killed=True)
    check_after_cut(history, history.disk.cut(random.Random(1)), go_on=False)
    if closes and history.q._port.engine.closed:  # refused or not, it let go of the folder
        history._restart()
    history.q._port.engine.tick()
    assert not [log.folder for log in logs_of(history.q) if not log.usable]
    history.promises.taking = True
    for options in ({}, {"delay": 1}, {"dedup_id": "another"}, {"key": "a"}):
        history.put(**options)
    history.clock.advance(seconds=2)
    history.get(3)
    history.ack()
    history.reject()
    history.compact()
    history.close()
    check_after_cut(history, history.disk.kill(), killed=True)


def logs_of(q: Queue[bytes]) -> list[Log]:
    delivery = q._port.deliveries[0]
    places = [(delivery.partition, delivery)]
    if delivery.dead.dead_log is not None:
        places.append((delivery.dead.dead_log.target, delivery.dead.dead_log.letters))
    logs = [log for partition, delivery in places for log in (partition.log, delivery.journal.log)]
    return logs + [partition.delayed.intake for partition, _ in places if partition.delayed is not None]


# Whole lives, in which something runs out again and again


@pytest.mark.slow
@pytest.mark.parametrize("shortage", SHORTAGES)
@pytest.mark.parametrize("kind", [QueueHistory, BrokerHistory], ids=["queue", "broker"])
def test_a_life_in_which_things_run_out_again_and_again_ends_with_all_that_was_promised(kind, shortage, scale):
    for seed in range(scale(12, 300)):
        history = kind(seed, durability=["fsync", "os"][seed % 2], maps=seed % 3 > 0)
        rng = random.Random(seed)
        try:
            live_through_shortages(history, rng, shortage)
        except BaseException as error:
            error.add_note(f"{shortage}, seed {seed}, fired {history.disk.faults.fired[-3:]}: {history.steps[-5:]}")
            raise


def live_through_shortages(history: QueueHistory | BrokerHistory, rng: random.Random, shortage: str) -> None:
    weights = {name: weight for name, weight in weights_of(history).items() if name not in _STARTS_ANEW}
    first = "create_topic" if isinstance(history, BrokerHistory) else "put"
    for name in [first, *rng.choices(list(weights), list(weights.values()), k=40)]:
        if rng.random() < 0.3:
            run_out(history.disk, shortage, rng.randint(1, 30), sticky=rng.random() < 0.5)
        chance = history.rng.getstate()
        try:
            history.step(name)
        except Unavailable as error:
            check_refused([error])
            history.disk.faults.clear()
            if name in {"make_group", "delete_group", "add_partitions"}:  # or nobody knows how far it came
                history.rng.setstate(chance)
                if name != "delete_group":
                    forget_half_made(history)
                with contextlib.suppress(UnknownGroup):  # it was deleted, but for its files
                    history.step(name)
                forget_half_made(history)
            elif name == "reject" and isinstance(history, QueueHistory):
                expect_dead(history)
        finally:
            history.disk.faults.clear()
    history.step("kill")
    history.step("close")


def forget_half_made(history: BrokerHistory) -> None:
    for name, topic in history.promises.topics.items():
        topic.groups = {group: promises for group, promises in topic.groups.items() if promises.there == {True}}
        if topic.there == {True}:
            topic.partitions = {len(history.broker.describe_topic(name).partitions)}


def expect_dead(history: QueueHistory) -> None:
    """A reject that was refused may have been noted: then the message is moved by the next tick."""
    for offset in history.q._port.deliveries[0].group.burials:
        history.promises.begin_replay(
            {number_of(next(history.q._port.deliveries[0].partition.log.records(offset)).value)}
        )


_STARTS_ANEW = {"reopen", "kill", "power_cut"}


def weights_of(history: QueueHistory | BrokerHistory) -> dict[str, float]:
    return BROKER_WEIGHTS if isinstance(history, BrokerHistory) else QUEUE_WEIGHTS


# A broker: what a queue does not have


class Story:
    """Locks, documents, streams, producers, delays, dedup ids, compaction: what was answered, and what refused."""

    def __init__(self, disk: SimulatedDisk | None = None, answered: set[bytes] | None = None) -> None:
        self.disk = disk or SimulatedDisk()
        self.clock = ManualClock()
        self.answered: set[bytes] = set(answered or ())
        self.refused: list[HoldfastError] = []
        self.count = len(self.answered)
        self.open()

    def open(self) -> None:
        topic = TopicSettings(segment_bytes=4096, frame_bytes=1024, min_free_bytes=0, trace_sample=1.0)
        world = World(clock=self.clock, disk=self.disk, ids=SeededIds(self.count))
        self.broker = holdfast.open_broker(FOLDER, world=world, settings=BrokerSettings(topic=topic))

    def attempt(self, step: Callable[[], object]) -> None:
        self.refused += refusal_of(step)

    def make(self, topic: str, **settings: object) -> None:
        with contextlib.suppress(TopicExists):
            self.broker.create_topic(topic, **settings)

    def publish(self, topic: str, **options: object) -> None:
        body = b"%d " % self.count
        self.count += 1
        self.broker.publish(topic, body + bytes(1500), **options)
        self.answered.add(body)

    def tell(self) -> None:
        for topic, settings in [("orders", {}), ("states", {"cleanup": "compact", "compact_min_saving_percent": 0})]:
            self.attempt(lambda topic=topic, settings=settings: self.make(topic, **settings))
        for n in range(4):
            self.attempt(lambda n=n: self.publish("orders", key=f"k{n}", dedup_id=f"{self.count}"))
            self.attempt(lambda n=n: self.publish("states", key=f"state {self.count}"))
        self.attempt(lambda: self.publish("orders", delay=1))
        self.attempt(self.work)
        self.attempt(self.stream)
        self.attempt(lambda: self.broker.compact_topic("states"))
        self.attempt(lambda: self.broker.documents.update("plan", {"count": self.count}))
        self.attempt(self.lock)
        self.attempt(self.save)
        self.clock.advance(seconds=2)
        self.attempt(self.broker._port.engine.tick)
        self.attempt(self.produce)

    def work(self) -> None:
        group = self.broker.group("orders", "workers")
        for message in group.receive_many(3, timeout=0):
            message.ack()

    def stream(self) -> None:
        with self.broker.consumer(["states"], group="readers") as consumer:
            consumer.poll(0)
            consumer.commit()

    def lock(self) -> None:
        lock = self.broker.locks.acquire("report", wait=0)
        try:
            self.broker.locks.keepalive(lock)
        finally:
            self.broker.locks.release(lock)

    def save(self) -> None:
        """What a queue writes down beside its log: delays, dedup ids, snapshots."""
        for topic in self.broker._port.engine.open_topics():
            topic.duplicates.save()
            for partition in topic.partitions:
                partition.save()
                if partition.delayed is not None:
                    partition.delayed.spill(self.clock.now_ns() // 1_000_000)
            for group in topic.groups.values():
                for delivery in group.deliveries:
                    delivery.save()
            topic.retain()

    def produce(self) -> None:
        with self.broker.producer(name="till") as producer:
            producer.send("orders", b"till " + bytes(100)).result(timeout=10)

    def stored(self) -> list[bytes]:
        found = []
        for partition in [p for name in ("orders", "states") for p in self.broker._port.engine.topic(name).partitions]:
            found += [record.value for record in partition.log.records(partition.log.start)]
            if partition.delayed is not None:
                found += [message.record.value for message in partition.delayed.waiting()]
        return [bytes(body[: body.index(b" ") + 1]) for body in found]


@pytest.mark.slow
@pytest.mark.parametrize("sticky", [False, True], ids=["once", "for-a-while"])
@pytest.mark.parametrize("shortage", SHORTAGES)
def test_what_runs_out_refuses_one_call_of_a_broker_and_the_same_broker_goes_on(shortage, sticky, scale):
    story = Story()
    story.tell()
    assert story.refused == []
    story.broker.close()
    template, answered = story.disk, story.answered
    story = Story(template.kill(), answered)
    run_out(story.disk, shortage, 10**9, sticky=False)
    story.tell()
    calls = story.disk.faults._faults[0].seen
    assert calls > 100
    rng = random.Random(f"{shortage} {sticky}")
    for nth in sorted(rng.sample(range(1, calls + 1), scale(15, calls))):
        story = Story(template.kill(), answered)
        run_out(story.disk, shortage, nth, sticky=sticky)
        try:
            story.tell()
            story.disk.faults.clear()
            check_story(story)
        except BaseException as error:
            error.add_note(f"{shortage} at call {nth} of {calls}, {sticky=}: {story.disk.faults.fired[:3]}")
            raise


def check_story(story: Story) -> None:
    check_refused(story.refused)
    story.refused.clear()
    story.clock.advance(seconds=60)  # a lock whose release was refused is held until its lease ends
    story.tell()
    assert story.refused == [], "what ran out is there again"
    story.broker.close()
    story.open()
    stored = [body for body in story.stored() if body != b"till "]
    assert sorted(stored) == sorted(story.answered), "lost, stored twice, or refused and stored"
    story.broker.close()
