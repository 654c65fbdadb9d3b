"""What a broker was told, what an opened one holds, and the promises that tie the two together.

Every message has a number of its own, and begins with it. What the broker was told is noted before the call
(from then on it may have happened) and again when it has answered (from then on it is promised).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import holdfast
from holdfast import Broker
from holdfast.broker.messages import REDRIVEN_FROM, is_for, mark
from holdfast.delivery.events import Phase
from holdfast.delivery.image import check
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.settings import BrokerSettings, ConsumerSettings, TopicSettings
from tests.crash.queue_promises import number_of, same_boot

if TYPE_CHECKING:
    from tests.crash.broker_histories import BrokerHistory

FOLDER = "data"
LEASE_MS = 10_000
MAX_ATTEMPTS = 3
STREAM = "readers"  # the one group in stream mode
PROBE = 10**9  # numbers from here on are of messages that only a check publishes


def small_broker(disk: SimulatedDisk, clock: ManualClock, ids: SeededIds, *, durability: Any) -> Broker:
    """Tiny segments and frames, so that a short history crosses every boundary; few partitions stay open."""
    topic = TopicSettings(
        segment_bytes=4096,
        frame_bytes=1024,
        index_bytes=512,
        min_free_bytes=0,
        lease_ms=LEASE_MS,
        max_attempts=MAX_ATTEMPTS,
        snapshot_events=100,
    )
    settings = BrokerSettings(topic=topic, open_partitions=4, consumer=ConsumerSettings(auto_commit=False))
    world = World(clock=clock, disk=disk, ids=ids)
    return holdfast.open_broker(FOLDER, world=world, durability=durability, settings=settings)


@dataclass
class GroupPromises:
    """A group in queue mode. `there` is every answer that would be right."""

    there: set[bool]
    max_attempts: set[int | None]  # its own, None where it has the topic's
    owed: set[int] = field(default_factory=set)  # these must reach it, and no others
    ending: set[int] = field(default_factory=set)  # an ack, a purge or a skip was begun
    ended: set[int] = field(default_factory=set)  # and has returned
    done: set[int] = field(default_factory=set)  # and was synced
    buried: set[int] = field(default_factory=set)  # became a dead letter
    dead: set[int] = field(default_factory=set)  # and that was synced
    replayed: set[int] = field(default_factory=set)  # may be there more than once: a reset went back

    def replay(self, numbers: set[int]) -> None:
        """These may come again, whatever became of them."""
        self.replayed |= numbers
        for promised in (self.ended, self.done, self.buried, self.dead):
            promised -= numbers

    def synced(self) -> None:
        self.done |= self.ended
        self.dead |= self.buried


@dataclass
class TopicPromises:
    """A topic: each field is every answer that would be right."""

    there: set[bool]
    partitions: set[int]
    max_attempts: set[int]
    id: int | None = None
    published: set[int] = field(default_factory=set)  # the call has returned
    durable: set[int] = field(default_factory=set)  # and it was synced
    batches: list[set[int]] = field(default_factory=list)  # each stored wholly or not at all
    groups: dict[str, GroupPromises] = field(default_factory=dict)
    trimmed: bool = False  # somebody has let go of what all groups are through with
    committed: dict[int, list[int]] = field(default_factory=dict)  # partition -> commits since the last that was synced


@dataclass
class Promises:
    """All of it."""

    next: int = 0
    topics: dict[str, TopicPromises] = field(default_factory=dict)
    stream: set[bool] = field(default_factory=lambda: {False})  # whether there is the group in stream mode
    committing: dict[tuple[str, int], set[int]] = field(default_factory=dict)  # begun, and not answered

    def sync(self) -> None:
        """Everything that was answered is on disk."""
        for topic in self.topics.values():
            topic.durable |= topic.published
            for group in topic.groups.values():
                group.synced()
        self.commits_synced()

    def commits_synced(self) -> None:
        for topic in self.topics.values():
            topic.committed = {number: line[-1:] for number, line in topic.committed.items()}

    def restarted(self) -> None:
        """After a kill and an opening: no call is in flight any more."""
        self.sync()


@dataclass
class View:
    """What one group has, and where."""

    live: Counter[int]
    dead: Counter[int]

    @property
    def all(self) -> Counter[int]:
        return self.live + self.dead


def records_of(broker: Broker, name: str) -> list[list[Any]]:
    """What the partitions of a topic hold, one list for each."""
    with broker._port.engine.using(name) as topic:
        return [list(each.log.records(each.log.start)) for each in topic.partitions]


def view_of(broker: Broker, name: str, group: str) -> View:
    """What a group in queue mode has still to do with, by way of the files."""
    live: Counter[int] = Counter()
    with broker._port.engine.using(name) as topic:
        for delivery in topic.groups[group].deliveries:
            state = delivery.group
            assert check(state) == []
            assert delivery.settings.max_attempts == topic.groups[group].settings.max_attempts
            log = delivery.partition.log
            live.update(
                number_of(record.value)
                for record in log.records(max(state.floor, log.start))
                if state.phase(record.offset) is not Phase.DONE and is_for(record, group.encode())
            )
        letters = broker.group(name, group).dead.list()
    return View(live, Counter(number_of(letter.raw) for letter in letters))


def check_promises(history: BrokerHistory, broker: Broker, *, killed: bool = False) -> None:
    """Hold what is there against what was promised by then."""
    check_catalog(history.promises, broker)
    for name in broker.topics():
        topic = history.promises.topics[name]
        check_log(topic, name, broker, killed=killed)
        found = set(broker.describe_topic(name).groups)
        for group, promises in topic.groups.items():
            assert (group in found) in promises.there, (
                f"group {group} of {name}: {group in found}, not {promises.there}"
            )
            if group in found:
                check_group(topic, promises, name, group, broker, killed=killed)
        assert found <= set(topic.groups), f"nobody made {found - set(topic.groups)}"
    check_stream(history, broker, killed=killed)


def check_catalog(promises: Promises, broker: Broker) -> None:
    """Each topic is wholly there or wholly not, with its settings; nothing half made or half deleted is left."""
    names = set(broker.topics())
    for name, topic in promises.topics.items():
        assert (name in names) in topic.there, f"{name} is {'' if name in names else 'not '}there"
        if name in names:
            facts = broker.describe_topic(name)
            assert topic.id in (None, facts.id), f"{name} is another topic"
            assert len(facts.partitions) in topic.partitions, f"{name}: {len(facts.partitions)} partitions"
            found = facts.settings.get("max_attempts", 5)
            assert found in topic.max_attempts, f"{name}: max_attempts={found}, not {topic.max_attempts}"
    assert names <= set(promises.topics), f"nobody made {names - set(promises.topics)}"
    disk = broker._port.engine.world.disk
    if disk.exists(f"{FOLDER}/topics"):
        left = {name.removesuffix(".dlq") for name in disk.names(f"{FOLDER}/topics")} - {"__traces"}
        assert left <= names, f"{left - names} were left behind"


def check_log(topic: TopicPromises, name: str, broker: Broker, *, killed: bool) -> None:
    """Every message that was promised is there once, in the order of publishing; batches are whole."""
    promised = topic.published if killed else topic.durable
    found: Counter[int] = Counter()
    for number, records in enumerate(records_of(broker, name)):
        numbers = [number_of(each.value) for each in records if mark(each, REDRIVEN_FROM) is None]
        assert numbers == sorted(numbers), f"partition {number} of {name} is out of order: {numbers}"
        found.update(numbers)
    for n, count in found.items():
        assert count == 1, f"{n} was published once, and is there {count} times"
    if not topic.trimmed:
        assert promised <= set(found), f"{promised - set(found)} of {name} are lost"
        for batch in topic.batches:
            assert not batch & set(found) or batch <= set(found), f"half of the batch {batch}"


def check_group(
    topic: TopicPromises, promises: GroupPromises, name: str, group: str, broker: Broker, *, killed: bool
) -> None:
    """The group has what it is owed and has not settled, each once."""
    view = view_of(broker, name, group)
    promised = (topic.published if killed else topic.durable) & promises.owed
    for n in sorted(promised - promises.ending):
        assert view.all[n], f"{n} was promised to {group}, and is lost"
    for n in sorted((promises.ended if killed else promises.done) - promises.replayed):
        assert not view.all[n], f"{n} was done for {group}, and is back (live {view.live[n]}, dead {view.dead[n]})"
    for n, count in view.all.items():
        assert count == 1 or n in promises.replayed, f"{n} is there {count} times for {group}"
        assert n in promises.owed, f"{n} is not for {group}"
    for n in sorted((promises.buried if killed else promises.dead) - promises.replayed - promises.ending):
        assert view.dead[n] == 1, f"{n} was a dead letter of {group}, and is not (live {view.live[n]})"
    with broker._port.engine.using(name) as opened:
        found = opened.groups[group].settings.max_attempts
        allowed = {each for own in promises.max_attempts for each in ({own} if own is not None else topic.max_attempts)}
        assert found in allowed, f"{group} has max_attempts={found}, not {allowed}"


def check_stream(history: BrokerHistory, broker: Broker, *, killed: bool) -> None:
    """The group in stream mode goes on where it was told to."""
    promises, there = history.promises, STREAM in broker._port.engine.streams.names()
    assert there in promises.stream, f"{STREAM} is {'' if there else 'not '}there"
    if not there:
        return
    group = broker._port.engine.streams.group(STREAM)
    for name in broker.topics():
        for number, line in promises.topics[name].committed.items():
            with broker._port.engine.using(name) as topic:
                found, end = group.committed(topic, number), topic.partitions[number].log.end
            allowed = set(line[-1:] if killed else line)
            allowed |= promises.committing.get((name, number), set())
            if found is None and not line:
                continue  # it has not begun there
            if promises.stream == {True}:
                least = {min(offset, end) for offset in allowed}
                assert found in least, f"{STREAM} goes on at {found} in {number} of {name}, not at {least}"


def check_after_cut(history: BrokerHistory, disk: SimulatedDisk, *, killed: bool = False, go_on: bool = True) -> None:
    """Open what was left, look, and work on with it."""
    clock = same_boot(history.clock) if killed else ManualClock(history.clock.now_ns())
    ids = SeededIds(history.seed if killed else -history.seed - 1)
    with small_broker(disk, clock, ids, durability=history.durability) as broker:
        check_promises(history, broker, killed=killed)
        if go_on:
            check_drained(broker, clock)
    if go_on:
        with small_broker(disk, clock, ids, durability=history.durability) as broker:
            clock.advance(seconds=4_000)
            broker._port.engine.tick()
            for name in broker.topics():
                for group in broker.describe_topic(name).groups:
                    assert not broker.group(name, group).receive_many(10, timeout=0), "what was done came back"


def check_drained(broker: Broker, clock: ManualClock) -> None:
    """New messages go to every partition; each group gets them and all that it had, each once; so does a stream."""
    for name in broker.topics():
        facts = broker.add_partitions(name, 1)
        for number in range(len(facts.partitions)):
            broker.publish(name, b"%d " % (PROBE + number), partition=number)
        for group in facts.groups:
            expected = view_of(broker, name, group).live
            assert drained(broker, clock, name, group) == expected, f"{group} on {name}"
        expected_ids = [
            f"{name}-{number}-{record.offset}"
            for number, records in enumerate(records_of(broker, name))
            for record in records
            if is_for(record, b"probe")
        ]
        with broker.consumer(name, group="probe") as consumer:
            assert sorted(each.id for each in polled(consumer)) == sorted(expected_ids)


def polled(consumer: Any) -> Iterable[Any]:
    while some := consumer.poll(0):
        yield from some


def drained(broker: Broker, clock: ManualClock, name: str, group: str) -> Counter[int]:
    """Take and ack all that comes in time; what has used up its attempts meanwhile counts as come."""
    found: Counter[int] = Counter()
    workers = broker.group(name, group)
    letters = len(workers.dead.list())
    for _ in range(4):
        clock.advance(seconds=100)
        broker._port.engine.tick()
        while taken := workers.receive_many(1_000, timeout=0):
            found.update(number_of(message.raw) for message in taken)
            workers.ack_many(taken)
    assert len(workers.dead.list()) == letters
    return found
