"""A group in stream mode: its members, what they committed, and which of them to wake when something changes.

A change takes the same three steps as in a queue: decide, journal, apply. Of the membership, only the epoch and the
static members are journaled: all other members are gone after a restart, and join again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from holdfast.broker.folder.contents import lacking_root
from holdfast.broker.folder.layout import GROUPS, check_name, names_in, stream_group_folder
from holdfast.broker.partition import STREAM_PIN, Partition
from holdfast.broker.streams import GroupFacts, MemberFacts, PartitionLag, Reset, To, check_offset, lag_of
from holdfast.broker.waiters import Waiters
from holdfast.env.process import get_logger
from holdfast.errors import Closed, CorruptData, HoldfastError, InvalidRequest, UnknownGroup, UnknownTopic
from holdfast.later import on_demand, pattern
from holdfast.membership import TopicPartition
from holdfast.model import Appended, Durability
from holdfast.settings import ConsumerSettings
from holdfast.storage.files import join, open_error, remove_tree, translated
from holdfast.storage.keeper import soonest

if TYPE_CHECKING:
    from holdfast.broker.engine import BrokerEngine
    from holdfast.broker.streams import offsets as stored
    from holdfast.broker.streams.offsets import CommittedOffset, Offsets
    from holdfast.broker.topic import Topic
    from holdfast.membership import members as membership
    from holdfast.membership.members import Command, Event, Share
else:  # most folders have no group in stream mode
    stored = on_demand("holdfast.broker.streams.offsets")
    membership = on_demand("holdfast.membership.members")

logger = get_logger(__name__)


class PartitionWakeup(Waiters):
    """A place among the waiters of a partition, for the member that owns the partition at the time."""

    def __init__(self, partition: Partition) -> None:
        super().__init__()
        self.partition = partition
        self.line: Waiters | None = None

    def follow(self, line: Waiters | None) -> None:
        """Wake this line from now on; None if there is none."""
        self.line = line
        self.standing = [] if line is None else line.standing

    def __bool__(self) -> bool:
        return bool(self.line)

    def wake(self, count: int = 1) -> None:
        line = self.line
        if line is not None and count:
            line.wake_all()


class LocalMember(msgspec.Struct):
    """A member in this process: the line that wakes it, and how the keeper checks that it is alive (None: gone)."""

    line: Waiters
    alive: Callable[[], bool | None]
    heartbeat_ms: int


class StreamGroup:
    """One group in stream mode. Safe to use from any thread.

    Its lock may be held when the engine's is taken, never the other way round.
    """

    def __init__(self, engine: BrokerEngine, name: str, offsets: Offsets) -> None:
        self._engine = engine
        self._clock = engine.world.clock
        self.name = name
        self.offsets = offsets
        before = offsets.remembered
        self.members = membership.Members(before.assignor, before.rebalance, epoch=offsets.epoch)
        self.version = 0  # rises with every change that members should notice
        self.lock = threading.RLock()
        # Topics are held while a member wants them. Replaced, never mutated: `changed` reads this without the lock.
        self._topics: dict[str, Topic] = {}
        self._local_members: dict[str, LocalMember] = {}
        self._wakeups: dict[TopicPartition, PartitionWakeup] = {}
        self._pinned_at = -1
        for event in membership.remembered(before.statics, before.counts, offsets.epoch, self._now_ms()):
            self.members.apply(event)

    def topics(self) -> set[str]:
        """Return all topics that its members read or that it committed offsets for."""
        with self.lock:
            reading = {topic for member in self.members.members.values() for topic in member.topics}
        return reading | {entry.topic for entry in self.offsets.entries()}

    def join(
        self,
        topics: Iterable[str],
        settings: ConsumerSettings,
        *,
        instance_id: str = "",
        holder: str = "",
        alive: Callable[[], bool | None] | None = None,
        again: bool = False,
    ) -> tuple[str, Waiters]:
        """Add a member; return its name and the line that wakes it. Its share comes with the first heartbeat.

        With `alive`, the member is in this process and the keeper sends its heartbeats. With `again`, the member
        rejoins and may want topics that were deleted in the meantime.
        """
        wanted = tuple(topics)
        with self.lock:
            self._agree(settings)
            try:
                for topic in wanted:
                    self._look_after(topic)
                    if not again:
                        self._hold(topic)  # raises UnknownTopic
                found = [self._topics[topic] for topic in wanted if topic in self._topics]
                for each in found:
                    self._check_mode(each)
                for each in found:
                    self._begin(each, settings.start)
                self._recount()
                member = f"{self.name}-{self._engine.world.ids.random_u32():08x}"
                self._do(
                    membership.Join(
                        member=member,
                        topics=wanted,
                        instance_id=instance_id,
                        session_ms=settings.session_ms,
                        rebalance_ms=settings.rebalance_ms,
                        holder=holder,
                    )
                )
            finally:
                self._release_unwanted()
            line = Waiters()
            if alive is not None:
                self._local_members[member] = LocalMember(line, alive, settings.heartbeat_ms)
        self._engine.on_attention()
        return member, line

    def heartbeat(self, member: str, epoch: int, owned: Iterable[TopicPartition] | None) -> Share:
        """Note that the member works on `owned`; return what it should work on. Raises Fenced if it was removed."""
        with self.lock:
            self._recount()
            self._do(membership.Heartbeat(member, epoch, None if owned is None else tuple(owned)))
            return self.members.share(member)

    def epoch_of(self, member: str) -> int:
        """Return the last epoch given to a member; raises Fenced if it was removed."""
        with self.lock:
            return self.members.known(member, self.members.epoch).epoch

    def is_taken(self, instance_id: str) -> bool:
        """Whether a current member has this instance id."""
        with self.lock:
            return any(member.instance_id == instance_id for member in self.members.members.values())

    def leave(self, member: str, epoch: int) -> None:
        """Remove a member that has stopped working on its partitions."""
        with self.lock:
            self._do(membership.Leave(member, epoch))
            self._release_unwanted()

    def commit(
        self,
        member: str,
        epoch: int,
        offsets: Mapping[TopicPartition, int],
        durability: Durability | None = None,
        topic_ids: Mapping[TopicPartition, int] | None = None,
    ) -> Appended | None:
        """Record a member's offsets, for all these partitions or for none; pass the result to `wait`.

        `topic_ids` are those of the topics that it read, which may have been deleted and created again since.
        """
        with self.lock:
            entries = self.checked(member, epoch, offsets, topic_ids)
            return self.offsets.commit(entries, durability) if entries else None

    def checked(
        self,
        member: str,
        epoch: int,
        offsets: Mapping[TopicPartition, int],
        topic_ids: Mapping[TopicPartition, int] | None = None,
    ) -> list[CommittedOffset]:
        """Return the commits for a member's offsets, if it may make them. The caller holds the lock until they are."""
        entries = []
        for place, offset in offsets.items():
            self.members.may_commit(member, epoch, *place)
            topic = self._topic(place[0])
            if topic_ids is not None and topic_ids.get(place) != topic.id:
                raise UnknownTopic(
                    f"partition {place[1]} of {place[0]} is not the one that member {member} has read: the topic "
                    "was deleted and created again. Nothing was committed: close this consumer and open a new one"
                )
            check_offset(topic.partitions[place[1]].log, offset, place)
            entries.append(self._entry(topic, place[1], offset))
        return entries

    def committed(self, topic: Topic, partition: int) -> int | None:
        """Return the group's position in a partition; None before it began there."""
        found = self.offsets.of(topic.name, topic.id, partition)
        if found is not None and partition in topic.lost:
            return found.offset  # if its log comes back, the group resumes there
        return None if found is None else stored.usable_offset(topic.partitions[partition].log, found)

    def listen(self, place: TopicPartition, line: Waiters | None) -> tuple[Topic, Partition, int]:
        """Wake this line for arrivals in the partition from now on; return where to resume reading."""
        with self.lock:
            topic = self._topic(place[0])
            partition = topic.partitions[topic.number(place[1])]
            wakeup = self._wakeups.get(place)
            if wakeup is None or wakeup.partition is not partition:
                wakeup = self._wakeups[place] = PartitionWakeup(partition)
                partition.join(wakeup)
            wakeup.follow(line)
            self._begin(topic, "earliest")
            return topic, partition, self.committed(topic, place[1]) or 0

    def silence(self, place: TopicPartition, line: Waiters) -> None:
        """Stop waking this line for the partition."""
        with self.lock:
            wakeup = self._wakeups.get(place)
            if wakeup is not None and wakeup.line is line:
                wakeup.follow(None)

    def changed(self, version: int) -> bool:
        """Whether members should send a heartbeat: something changed since this version, or a topic has grown."""
        return version != self.version or any(
            topic.closed or len(topic.partitions) != self.members.counts.get(name)
            for name, topic in self._topics.items()
        )

    def reset(self, topic_name: str, to: To, *, partition: int | None = None, dry_run: bool = False) -> list[Reset]:
        """Move the group's position, in one partition or in all; with `dry_run`, only report what that would do."""
        with self._engine.using(topic_name) as topic:
            numbers = topic.usable_numbers() if partition is None else [topic.usable(partition)]
            found = [
                Reset(
                    topic=topic.name,
                    partition=number,
                    before=self.committed(topic, number),
                    after=to.find(topic.partitions[number].log),
                )
                for number in numbers
            ]
            if dry_run:
                return found
            with self.lock:
                if any(place[0] == topic_name for place in self.members.owners):
                    raise InvalidRequest(
                        f"group {self.name} has active consumers on {topic_name}, which keep their own positions: "
                        "close them first, or let them seek"
                    )
                appended = self.offsets.commit(
                    [self._entry(topic, each.partition, each.after) for each in found], "fsync"
                )
            self.offsets.wait(appended)
            self.pin(topic)
            return found

    def lag(self) -> list[PartitionLag]:
        """Return how far the group is behind, in each partition that it reads or has read."""
        found: list[PartitionLag] = []
        names = sorted({entry.topic for entry in self.offsets.entries()})
        for name in names:
            try:
                with self._engine.using(name) as topic:
                    found += self._lag(topic)
            except UnknownTopic:
                continue
        return found

    def _lag(self, topic: Topic) -> list[PartitionLag]:
        now_ns = self._clock.now_ns()
        found = []
        for number, partition in enumerate(topic.partitions):
            entry = self.offsets.of(topic.name, topic.id, number)
            if entry is not None:
                found.append(lag_of(partition.log, (topic.name, number), entry.offset, now_ns))
        return found

    def describe(self) -> GroupFacts:
        """Return the state of the group at this moment."""
        with self.lock:
            members, now_ms = self.members, self._now_ms()
            settled = all(set(members.members[name].owned) == set(share) for name, share in members.target.items())
            state: Literal["empty", "stable", "rebalancing"] = "stable" if settled else "rebalancing"
            each = [
                MemberFacts(
                    id=member.id,
                    instance_id=member.instance_id,
                    holder=member.holder,
                    topics=member.topics,
                    partitions=members.share(member.id).partitions,
                    epoch=member.epoch,
                    heard_ms_ago=now_ms - member.heard_ms,
                )
                for member in members.members.values()
            ]
            epoch, assignor, rebalance = members.epoch, members.assignor, members.rebalance
        return GroupFacts(
            name=self.name,
            state=state if each else "empty",
            epoch=epoch,
            assignor=assignor,
            rebalance=rebalance,
            members=each,
            lag=self.lag(),
        )

    def tick(self) -> int | None:
        """Check which members are alive, remove the others, save commits; return the ms until the next call."""
        with self.lock:
            for member, local in list(self._local_members.items()):
                self._check_alive(member, local)
            self._recount()
            self._do(membership.Tick())
            self._release_unwanted()
            due_ms = self.members.due_ms()
            left_ms = None if due_ms is None else max(due_ms - self._now_ms(), 0)
            beats = [local.heartbeat_ms for local in self._local_members.values()]
        return soonest(left_ms, min(beats, default=None), self._tick_offsets())

    def _tick_offsets(self) -> int | None:
        due_ms = self.offsets.tick()
        written = self.offsets.log.written_end
        if written != self._pinned_at and self.offsets.synced:
            for topic in self._engine.open_topics():  # including those that no member wants any more
                self.pin(topic)
            self._pinned_at = written
        return due_ms

    def pin(self, topic: Topic) -> None:
        """Make retention keep what the group has not handled. Takes no lock: the engine may hold its own."""
        for number, partition in enumerate(topic.partitions):
            entry = self.offsets.of(topic.name, topic.id, number)
            if entry is not None:
                partition.log.pin(STREAM_PIN + self.name, entry.offset)

    def unpin(self, topic: Topic) -> None:
        """Remove the pins of a group that is being deleted."""
        for partition in topic.partitions:
            partition.log.unpin(STREAM_PIN + self.name)

    def nudge(self) -> None:
        """Wake all waiters because something has changed. Does not take the group's lock."""
        for local in list(self._local_members.values()):
            local.line.wake_all()

    def close(self) -> None:
        """Save what was committed, and wake all waiters, which then find the group closed."""
        self.nudge()
        self.offsets.close()

    def _check_alive(self, member: str, local: LocalMember) -> None:
        known = self.members.members.get(member)
        alive = local.alive()
        if known is None:
            del self._local_members[member]
        elif alive:
            self._do(membership.Heartbeat(member, known.epoch))
        elif alive is None and not known.instance_id:
            logger.warning("a consumer was dropped without close", extra={"group": self.name, "member": member})
            self._do(membership.Leave(member, known.epoch))

    def _do(self, command: Command) -> None:
        """Decide, journal, apply."""
        events = membership.decide(self.members, command, self._now_ms())
        epoch = max(
            [event.epoch for event in events if isinstance(event, (membership.Joined, membership.Targeted))], default=0
        )
        if epoch > self.members.epoch:
            self.offsets.raise_epoch(epoch)
        for event in events:
            self.members.apply(event)
            self._note(event)
        if any(not isinstance(event, membership.Heard) for event in events):
            self.version += 1
            members = self.members
            self.offsets.remember(
                stored.Remembered(membership.statics_of(members), members.counts, members.assignor, members.rebalance)
            )
            self.nudge()

    def _note(self, event: Event) -> None:
        if isinstance(event, membership.Left):
            self._local_members.pop(event.member, None)
            logger.info("a member ended", extra={"group": self.name, "member": event.member, "why": event.why})

    def _agree(self, settings: ConsumerSettings) -> None:
        """Check that the member uses the group's assignment strategy, which the first member chooses."""
        members = self.members
        if not members.members:
            members.assignor, members.rebalance = settings.assignor, settings.rebalance
        elif (members.assignor, members.rebalance) != (settings.assignor, settings.rebalance):
            raise InvalidRequest(
                f"group {self.name} uses assignor={members.assignor!r} and "
                f"rebalance={members.rebalance!r}: use the same, or close its other consumers first"
            )

    def _check_mode(self, topic: Topic) -> None:
        if self.name in topic.groups:
            raise InvalidRequest(
                f"the group {self.name} reads {topic.name} in queue mode; choose another name for this one"
            )

    def _hold(self, name: str) -> None:
        if name not in self._topics:
            self._topics = {**self._topics, name: self._engine.hold(name, self)}

    def _topic(self, name: str) -> Topic:
        topic = self._topics.get(name)
        if topic is None or topic.closed:
            self._engine.check_here(name)
            raise UnknownTopic(
                f"the topic {name} was deleted, so group {self.name} can no longer read it: close this consumer"
            )
        return topic

    def _drop(self, name: str) -> None:
        self._topics[name].holders.discard(self)
        self._topics = {other: topic for other, topic in self._topics.items() if other != name}

    def _release_unwanted(self) -> None:
        wanted = {topic for member in self.members.members.values() for topic in member.topics}
        for name in [name for name in self._topics if name not in wanted]:
            self._drop(name)

    def _recount(self) -> None:
        """Notice topics that have grown, were created or were deleted."""
        self._engine.check_open()  # topics that close with the broker were not deleted
        members = self.members
        for name in {topic for member in members.members.values() for topic in member.topics}:
            self._look_after(name)
        counts = {name: len(topic.partitions) for name, topic in self._topics.items()}
        if counts != members.counts:
            for topic in self._topics.values():
                self._begin(topic, "earliest")
            self._do(membership.Partitions(counts))

    def _look_after(self, name: str) -> None:
        """Hold the topic of this name. A closed one was deleted, and another may have its name by now."""
        topic = self._topics.get(name)
        if topic is not None and topic.closed:
            self._drop(name)
            self.version += 1  # members must give up their partitions there
            self.nudge()
        if name not in self._topics:
            try:
                self._hold(name)
            except UnknownTopic:
                if any(entry.topic == name for entry in self.offsets.entries()):
                    self.offsets.forget(name)
            except Closed:
                return

    def _begin(self, topic: Topic, start: str) -> None:
        """Commit the group's start in partitions that are new to it, so that it is sure to resume there.

        `start` applies to a topic that the group has never read. Partitions added later are read from their first
        message, or messages that arrived in between would be skipped.
        """
        unknown = [
            number for number in range(len(topic.partitions)) if self.offsets.of(topic.name, topic.id, number) is None
        ]
        if not unknown:
            return
        to = To(end="latest" if start == "latest" and len(unknown) == len(topic.partitions) else "earliest")
        entries = [
            self._entry(topic, number, to.find(topic.partitions[number].log))
            for number in unknown
            if number not in topic.lost
        ]
        if not entries:
            return
        self.offsets.wait(self.offsets.commit(entries, "fsync"))
        self.pin(topic)

    def _entry(self, topic: Topic, number: int, offset: int) -> CommittedOffset:
        position = topic.partitions[number].log.position(offset)
        now_ms = self._clock.now_ns() // 1_000_000
        return stored.CommittedOffset(topic.name, topic.id, number, offset, position.epoch, now_ms)

    def _now_ms(self) -> int:
        return self._clock.monotonic_ns() // 1_000_000


# The groups in stream mode of a data folder. All are opened together, so that each pins what it has not read.


_AFTER_ERROR_MS: Final = 1_000
_GONE: Final = pattern(r"\.gone-.*")


class StreamGroups:
    """All groups in stream mode. Safe to use from any thread, also while the engine holds its lock."""

    def __init__(self, engine: BrokerEngine) -> None:
        self._engine = engine
        self._folder = join(engine.folder, GROUPS)
        self._lock = threading.Lock()
        self._groups: dict[str, StreamGroup] = {}
        self.damaged: dict[str, CorruptData] = {}  # groups that cannot be opened, and why; the others are not affected
        self._closed = False
        self._logged_error = ""
        try:
            for name in names_in(engine.world, self._folder):
                if _GONE.fullmatch(name):
                    remove_tree(engine.world.disk, join(self._folder, name))
                else:
                    self._open_or_note(name)
            for name in engine.missing_groups():
                self.damaged[name] = lacking_root(engine.folder, f"{GROUPS}/{name}")
        except BaseException:
            self.close()
            raise
        engine.on_topic.append(self._pin)

    def names(self) -> list[str]:
        return sorted([*self._groups, *self.damaged])

    def all(self) -> list[StreamGroup]:
        return list(self._groups.values())

    def group(self, name: str, *, create: bool = False) -> StreamGroup:
        """Return the group of this name; raises UnknownGroup if there is none and `create` is not set."""
        check_name(name, "group")
        with self._lock:
            self._engine.check_open()
            known = self._groups.get(name)
            if known is not None:
                return known
            if name in self.damaged:
                raise self.damaged[name]
            if not create:
                there = f"known groups: {', '.join(self.names()[:10])}" if self._groups else "there is none yet"
                unknown = UnknownGroup(f"there is no group {name} in stream mode; {there}")
                unknown.brief = f"there is no group {name} in stream mode"
                raise unknown
            made = self._open(name)
            self._engine.list_parts()
            return made

    def on(self, topic: Topic) -> list[StreamGroup]:
        """Return the groups that read this topic, or have read it."""
        return [
            group
            for _, group in sorted(self._groups.items())
            if any(entry.topic == topic.name and entry.topic_id == topic.id for entry in group.offsets.entries())
        ]

    def check_free(self, name: str, topic: Topic) -> None:
        """Refuse a name for queue mode if a group of this name reads the topic in stream mode."""
        if any(group.name == name for group in self.on(topic)):
            raise InvalidRequest(
                f"the group {name} reads {topic.name} in stream mode; choose another name, or delete that group first"
            )

    def bring_pins(self, topic: Topic) -> None:
        """Move the pins of the topic's logs up to what is committed now."""
        for group in self.on(topic):
            group.offsets.log.sync()
            group.pin(topic)

    def delete(self, name: str) -> None:
        """Delete a group and its commits; it must have no members."""
        if name in self.damaged:
            self._delete_damaged(name)
            return
        group = self.group(name)
        with group.lock:
            if group.members.members:
                raise InvalidRequest(
                    f"group {name} has {len(group.members.members)} members: close its consumers first"
                )
            disk = self._engine.world.disk
            gone = join(self._folder, f".gone-{name}-{self._engine.world.ids.random_u32()}")
            with self._lock:
                del self._groups[name]
                group.close()
                self._take_away(name, gone)
        for topic_name in {entry.topic for entry in group.offsets.entries()}:
            try:
                with self._engine.using(topic_name) as topic:
                    group.unpin(topic)
            except UnknownTopic:
                continue
        with translated(gone):
            remove_tree(disk, gone)

    def _delete_damaged(self, name: str) -> None:
        gone = join(self._folder, f".gone-{name}-{self._engine.world.ids.random_u32()}")
        with self._lock:
            self._take_away(name, gone)
            del self.damaged[name]
        for topic in self._engine.open_topics():
            for partition in topic.partitions:
                partition.log.unpin(stream_group_folder(self._engine.folder, name))
        with translated(gone):
            remove_tree(self._engine.world.disk, gone)

    def _take_away(self, name: str, gone: str) -> None:
        folder, disk = stream_group_folder(self._engine.folder, name), self._engine.world.disk
        try:
            with self._engine.parting(f"{GROUPS}/{name}"):
                if disk.exists(folder):
                    disk.rename(folder, gone)
                    disk.sync_folder(self._folder)
        except OSError as error:
            if disk.exists(folder) and name not in self.damaged:
                self._open(name)  # deleting failed, so the group stays in use
            raise open_error(folder, error) from error

    def tick(self) -> int | None:
        """Do what is due by now; return the ms until the next call."""
        return soonest(*map(self._tick, list(self._groups.values())))

    def _tick(self, group: StreamGroup) -> int | None:
        try:
            return group.tick()
        except HoldfastError as error:  # one failing group must not hold up the others
            if self._groups.get(group.name) is not group or self._closed or self._engine.closed:
                return None
            if str(error) != self._logged_error:  # log it once, not at every tick
                self._logged_error = str(error)
                logger.error("upkeep failed", extra={"group": group.name, "error": str(error)})
            return _AFTER_ERROR_MS

    def sync(self) -> None:
        """Return once everything committed so far is on disk."""
        for group in list(self._groups.values()):
            group.offsets.log.sync()

    def close(self) -> None:
        """Save what was committed and wake all waiters. Closing twice is fine."""
        with self._lock, ExitStack() as closing:
            self._closed = True
            for group in self._groups.values():
                closing.callback(group.close)

    def _pin(self, topic: Topic) -> None:
        for group in list(self._groups.values()):
            group.pin(topic)
            group.nudge()  # the topic may have grown
        for name in list(self.damaged):
            # The position of a damaged group is unknown: keep everything until it is repaired or deleted.
            for partition in topic.partitions:
                partition.log.pin(stream_group_folder(self._engine.folder, name), partition.log.start)

    def _open_or_note(self, name: str) -> None:
        try:
            self._open(name)
        except CorruptData as error:
            self.damaged[name] = error
            logger.error("a group in stream mode cannot be opened", extra={"group": name, "error": str(error)})

    def _open(self, name: str) -> StreamGroup:
        folder = stream_group_folder(self._engine.folder, name)
        try:
            offsets = stored.Offsets.open(self._engine.world, folder)
        except OSError as error:
            raise open_error(folder, error) from error
        offsets.log.on_attention = self._attention
        group = self._groups[name] = StreamGroup(self._engine, name, offsets)
        return group

    def _attention(self) -> None:
        self._engine.on_attention()  # looked up at each call, since the keeper sets it later
