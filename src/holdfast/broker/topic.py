"""An open topic: its partitions, its groups in queue mode and its dead letters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Final
from weakref import WeakSet

import msgspec

from holdfast.broker.body_checks import BodyChecks
from holdfast.broker.dead_letters import DeadPartition
from holdfast.broker.dedup.window import Duplicates
from holdfast.broker.delivery import Delivery
from holdfast.broker.folder.contents import (
    DELAYED,
    NOT_KEPT,
    Catalog,
    GroupNote,
    GroupNotes,
    TopicFacts,
    dead_settings,
    groups_of,
    is_dedup,
    lacking,
    log_settings,
    missing_parts,
    renew_contents,
    strike_off,
)
from holdfast.broker.folder.layout import (
    DEAD_SUFFIX,
    DEFAULT_GROUP,
    GROUPS,
    SETTINGS,
    check_name,
    group_folder,
    partition_folder,
    topic_folder,
)
from holdfast.broker.group import QueueGroup
from holdfast.broker.journal import newest_snapshot
from holdfast.broker.leases import FolderKey, Prover, topic_key
from holdfast.broker.messages import ONLY_FOR, check_partition
from holdfast.broker.metrics import Metrics, Observer
from holdfast.broker.partition import LostPartition, Partition, Site
from holdfast.broker.streams.queries import Queries, query_gauges
from holdfast.broker.tracing.log import TraceLog
from holdfast.broker.tracing.observer import TopicTracing
from holdfast.delivery.events import PROVEN
from holdfast.env import World
from holdfast.env.process import get_logger
from holdfast.env.world import Abandoned, checkpoint
from holdfast.errors import BadSettings, Closed, CorruptData, HoldfastError, UnknownGroup, UnknownTopic
from holdfast.later import difflib
from holdfast.model import Pause, Retained
from holdfast.settings import GROUP_FIELDS, TopicSettings, load
from holdfast.storage.compaction import KeysCompacted, Progress
from holdfast.storage.files import is_log, is_of_its_files, translated
from holdfast.storage.keeper import soonest
from holdfast.storage.log import Log

logger = get_logger(__name__)

_ALIKE: Final = 0.8  # similarity of names: one letter in five may differ
_MOST_NAMES: Final = 20
_AFTER_ERROR_MS: Final = 1_000


class Topic:
    """An open topic. Thread-safe. Long-term users register in `holders`, which keeps it from being closed as idle."""

    body_checks: BodyChecks | None = None

    def __init__(
        self, world: World, root: str, name: str, facts: TopicFacts, settings: TopicSettings, *,
        observer: Observer | None = None, holder: str = "", check_owner: Callable[[], None] = lambda: None,
        on_attention: Callable[[], None] = lambda: None, traces: TraceLog | None = None,
        queries: Queries | None = None, key: FolderKey | None = None,
    ) -> None:  # fmt: skip
        self._world = world
        self.root, self.name = root, name
        self.id, self.created_ms = facts.id, facts.created_ms
        self.settings = settings
        self._observer = observer
        self._queries = queries or Queries(world, root)
        self.key = topic_key(world, topic_folder(root, name)) or key or FolderKey(world, root)
        self.metrics = self._new_metrics()
        self.holder = holder
        self._check_owner = check_owner
        self.logged_error = ""  # what the last upkeep failed with
        self.closed = self.deleted = self.leaving = False  # leaving: see `may_leave`
        self.holders: WeakSet[object] = WeakSet()  # while any is alive, the topic stays open
        self.users = 0  # those that use it for a moment, and keep it open meanwhile: see `Using`
        self.used_ns = world.clock.monotonic_ns()
        self.due_ns: int | None = 0  # when upkeep is due; None: not before `_attend` is called
        self.on_attention = on_attention
        self.on_pause: Callable[[], object] = self.release_late  # called at intervals during long work
        self.partitions: list[Partition] = []
        self.lost: dict[int, CorruptData] = {}  # partitions that cannot be opened, and why; the others work
        self.duplicates = Duplicates(world, topic_folder(root, name), self.metrics, window_ms=settings.dedup_window_ms)
        self.duplicates.on_new_part = self.list_parts
        self.duplicates.on_parting = partial(strike_off, world, root, name)
        self.groups: dict[str, QueueGroup] = {}
        self.damaged: dict[str, CorruptData] = {}  # groups that cannot be opened, and why; the others work
        self._missing: frozenset[str] = frozenset()  # parts that are listed but not on disk
        self._tracing = None if traces is None else TopicTracing(world.clock.now_ns, traces, name, facts.id)
        self._notes = GroupNotes(world, topic_folder(root, name))
        self._dead: dict[int, DeadPartition] = {}
        self._lock = threading.RLock()
        self._listing = threading.Lock()
        try:
            self._require_parts()
            self._open(facts.partitions)
            self.list_parts()
        except BaseException:
            self.closed = True
            self._close_all()
            raise

    def _require_parts(self) -> None:
        """Refuse a topic whose settings file is missing: opening it would silently restore the defaults."""
        with suppress(CorruptData):  # the list is damaged: it is rebuilt from what is there
            self._missing = frozenset(missing_parts(self._world, self.root, self.name))
        self._require(SETTINGS)

    def _require(self, part: str) -> None:
        if part in self._missing:
            raise lacking(self.root, self.name, part)

    def list_parts(self) -> None:
        """Record which parts the topic has, so that a lost one is noticed. A failure is only logged."""
        facts = TopicFacts(self.id, self.created_ms, len(self.partitions))
        with self._listing:
            try:
                renew_contents(self._world, self.root, self.name, facts)
            except OSError as error:
                logger.warning("parts not listed", extra={"topic": self.name, "error": str(error)})

    def _open(self, count: int) -> None:
        for number in range(count):
            self._check_owner()  # closing the folder should not have to wait for all of them
            checkpoint()  # an abandoned opening keeps the partitions made so far
            self._open_or_stand_in(number)
        if len(self.lost) == count:
            raise self.lost[0].__cause__ or self.lost[0]
        self._open_duplicates()
        self._finish_deletions()
        for group in sorted({*self._notes.names(count), *groups_of(self._missing)}):
            self._open_or_note(group)

    def _open_duplicates(self) -> None:
        for part in sorted(filter(is_dedup, self._missing)):
            self.duplicates.refuse(lacking(self.root, self.name, part))
        if self.duplicates.are_used():
            for partition in self.partitions:
                wrong = partition.lost or partition.lost_delays
                if wrong is not None:  # a lost message may have had any dedup id
                    self.duplicates.refuse(wrong)
        self.duplicates.open_if_used()

    def _open_or_note(self, name: str) -> None:
        """Open a group; if its files are damaged, note the error and keep all messages that it may still need."""
        try:
            self._require(f"{GROUPS}/{name}.json")
            note = self._notes.read(name)
            self._open_group(name, note, self._group_settings(note.settings))
        except CorruptData as error:
            self.damaged[name] = error
            for number, partition in enumerate(self.partitions):
                partition.log.pin(group_folder(self.root, self.name, number, name), partition.log.start)
            logger.error("a group cannot be opened", extra={"topic": self.name, "group": name, "error": str(error)})

    def _open_or_stand_in(self, number: int) -> None:
        """Open a partition; if its log is missing or unreadable, put a LostPartition in its place."""
        try:
            self._require(f"{number}/log")  # or an empty log would be created, hiding the loss
            self._open_partition(number)
        except HoldfastError as error:
            if not is_of_its_files(error):
                raise
            self._stand_in(number, error)

    def _stand_in(self, number: int, error: HoldfastError) -> None:
        folder = partition_folder(self.root, self.name, number)
        lost = error
        if not isinstance(lost, CorruptData):
            lost = CorruptData(f"{error}. The other partitions continue; this one is tried when the folder is reopened")
            lost.__cause__ = error
        self.lost[number] = lost
        self.partitions.append(LostPartition(self._world, folder, log_settings(self.settings), self.metrics, lost))
        facts = {"topic": self.name, "partition": number, "error": str(error)}
        logger.error("a partition cannot be opened", extra=facts)

    def _open_partition(self, number: int) -> None:
        folder = partition_folder(self.root, self.name, number)
        delayed = f"{number}/{DELAYED}"
        lost = lacking(self.root, self.name, delayed) if delayed in self._missing else None
        partition = Partition.open(self._world, folder, log_settings(self.settings), self.metrics, lost_delays=lost)
        partition.on_attention = partition.log.on_attention = self._attend
        partition.on_pause = self._pause
        partition.log.on_synced = self.metrics.sync_seconds.observe_ns
        partition.log.needed_outside = partial(self._queries.floor, self.name, self.id, number)
        if self.settings.trace_sample:
            self._trace_partition(partition, number)
        partition.on_new_part = self.list_parts
        with ExitStack() as unless_done:
            unless_done.callback(partition.close)
            self.duplicates.follow(number, partition)  # before anything can be published to it
            unless_done.pop_all()
        self.partitions.append(partition)  # in place: the API objects share this list

    def _open_group(self, name: str, note: GroupNote, settings: TopicSettings) -> QueueGroup:
        # A simple queue is a topic with one group: both share one set of metrics.
        group = QueueGroup(self, name, settings, self.metrics if name == DEFAULT_GROUP else self._new_metrics())
        group.paused = note.paused
        try:
            for number in range(len(self.partitions)):
                self._check_owner()
                checkpoint()
                self._open_delivery(group, number, note.start(number))
        except BaseException:
            self._close_group(group)  # or its journals would be in use at the next attempt
            raise
        self.groups = {**self.groups, name: group}
        return group

    def _new_metrics(self) -> Metrics:
        metrics = Metrics(self._observer)
        metrics.gauges(partial(query_gauges, self._queries, self))
        return metrics

    def _open_delivery(self, group: QueueGroup, number: int, start: int | None) -> None:
        partition = self.partitions[number]
        folder = group_folder(self.root, self.name, number, group.name)
        part = f"{number}/{GROUPS}/{group.name}"
        if part in self._missing and number not in self.lost and newest_snapshot(self._world, folder)[0] is None:
            self._require(part)  # with a snapshot, the group continues from there
        site = Site(
            self.name, number, partition, group.check_open, self.dead_partition, partial(self._prover, group.name)
        )
        world, log = partition.world, partition.log
        delivery = Delivery.open(
            world, log, folder, group.settings, group.metrics, name=group.name, start=start, site=site
        )
        with ExitStack() as unless_done:
            unless_done.callback(delivery.close)
            delivery.holder = self.holder
            delivery.on_attention = delivery.journal.log.on_attention = self._attend
            delivery.journal.log.on_synced = self.metrics.sync_seconds.observe_ns
            if self.settings.trace_sample:
                self._trace_delivery(delivery)
            partition.follow(delivery)
            unless_done.callback(partition.unfollow, delivery)
            delivery.recover(dead=self._world.disk.exists(topic_folder(self.root, self.name + DEAD_SUFFIX)))
            # Only now: a thread moving its dead letters may wait for our lock while we wait for that move.
            group.add(delivery)
            self._attend()
            unless_done.pop_all()

    def _prover(self, group: str) -> Prover:
        """The prover of a group's receipts, which are not valid for other groups or a later topic of this name."""
        return Prover(self.key.get(), "receipt", self.id, self.created_ms, group, mark=PROVEN)

    def dead_partition(self, number: int) -> DeadPartition:
        """The dead letters of a partition; created on first use."""
        with self._lock:
            self.check_open()  # or a deleted topic would get a dead-letter folder
            if number not in self._dead:
                checkpoint()
                self._dead[number] = self._open_dead(number)
            return self._dead[number]

    def _open_dead(self, number: int) -> DeadPartition:
        name, settings, metrics = self.name + DEAD_SUFFIX, dead_settings(self.settings), Metrics()
        self._require(f"{DEAD_SUFFIX}/{number}/log")
        self._require(f"{DEAD_SUFFIX}/{number}/{GROUPS}/{DEFAULT_GROUP}")
        with translated(topic_folder(self.root, name)), ExitStack() as opened:
            new = not is_log(self._world, group_folder(self.root, name, number, DEFAULT_GROUP))
            self._world.disk.make_folder(topic_folder(self.root, name))
            target = Partition.open(self._world, partition_folder(self.root, name, number), settings, metrics)
            opened.callback(target.close)
            folder = group_folder(self.root, name, number, DEFAULT_GROUP)
            letters = Delivery.open(self._world, target.log, folder, settings, metrics)
            opened.callback(letters.close)
            target.follow(letters)
            target.on_attention = target.log.on_attention = self._attend
            target.log.needed_outside = partial(self._queries.floor, name, TopicFacts().id, number)
            letters.on_attention = letters.journal.log.on_attention = self._attend
            place = DeadPartition(self.partitions[number], target, letters)
            place.recover()
            if new:
                self.list_parts()
            opened.pop_all()
        return place

    def dead_count(self) -> int:
        """Number of dead letters of all groups, including dead messages that are not moved yet."""
        unmoved = sum(len(delivery.group.burials) for group in self.groups.values() for delivery in group.deliveries)
        return unmoved + sum([place.letters.ready_count() for place in list(self._dead.values())])

    def partition(self, number: object) -> Partition:
        """Return a partition. Raises UnknownTopic if there is none, CorruptData if it could not be opened."""
        return self.partitions[self.usable(number)]

    def usable(self, number: object) -> int:
        """Check the number of a partition. Raises like `partition`."""
        known = self.number(number)
        if known in self.lost:
            raise self.lost[known]
        return known

    def usable_numbers(self) -> list[int]:
        """The numbers of all partitions that could be opened."""
        return [number for number in range(len(self.partitions)) if number not in self.lost]

    def number(self, number: object) -> int:
        """Check the number of a partition, open or not. Raises UnknownTopic if there is none."""
        return check_partition(number, self.name, len(self.partitions))

    def group(self, name: str, *, start: str = "earliest", changes: Mapping[str, Any] | None = None) -> QueueGroup:
        """Return the group, with `changes` to its settings; a new one starts at the "earliest" or "latest" message."""
        check_name(name, "group")
        with self._lock, translated(topic_folder(self.root, self.name)):
            self.check_open()
            if name in self.damaged:
                raise self.damaged[name]
            known, note = self.groups.get(name), self._notes.read(name)
            if note.deleted:  # an error interrupted its deletion
                self._finish_deletions()
                note = GroupNote()
            wanted = {**note.settings, **(changes or {})}
            settings = self._group_settings(wanted)  # raises before anything is created
            kept = {field: value for field, value in wanted.items() if field not in NOT_KEPT}
            if known is None:
                # If there are positions, an earlier call failed half way, and journals may begin at them.
                positions = note.positions
                if start == "latest" and not positions:
                    positions = [partition.log.written_end for partition in self.partitions]
                note = msgspec.structs.replace(note, positions=positions, settings=kept)
                self._notes.write(name, note, needed=bool(positions or kept))
                self._mind_slip(name)
                try:
                    group = self._open_group(name, note, settings)
                except Abandoned:  # undo it, or the next opening would create the rest of the group
                    self._notes.write(name, GroupNote(deleted=True))
                    self._forget_group(name)
                    raise
                self.list_parts()
                return group
            if kept != note.settings:
                self._notes.write(name, msgspec.structs.replace(note, settings=kept))
                self.list_parts()
            if settings != known.settings:  # a change resets the priority turns, so do not repeat it
                known.change(settings)
            return known

    def pause(self, group: QueueGroup, pause: Pause | None) -> bool:
        """Pause a group, or resume it if None, durably; returns False if it was so already."""
        with self._lock, translated(topic_folder(self.root, self.name)):
            group.check_open()
            if (pause is None) == (group.paused is None):
                return False
            self._notes.write(group.name, msgspec.structs.replace(self._notes.read(group.name), paused=pause))
            self.list_parts()
            group.pause(pause)
            return True

    def has_group(self, name: str) -> bool:
        """Whether there is a group of this name in queue mode, including one that could not be opened."""
        return name in self.groups or name in self.damaged

    def _mind_slip(self, name: str) -> None:
        """Warn if a new group's name looks like a misspelling of another: the new one gets every message."""
        if difflib.get_close_matches(name, self.groups, n=1, cutoff=_ALIKE):
            logger.warning(
                "the group %s of topic %s is new and gets all stored messages. If you meant another group, there are "
                "%s; delete this one with `holdfast group delete`",
                name,
                self.name,
                ", ".join(sorted(self.groups)[:_MOST_NAMES]),
                extra={"topic": self.name, "group": name},
            )

    def alter(self, settings: TopicSettings) -> None:
        """Apply new settings; current leases and delays are not affected."""
        with self._lock:
            self.check_open()
            self.settings = settings
            for partition in self.partitions:
                partition.change(log_settings(settings))
            for name, group in self.groups.items():
                group.change(self._group_settings(self._notes.read(name).settings))
            self._trace_all()
            for place in self._dead.values():
                place.target.change(dead_settings(settings))
        self._attend()

    def _trace_all(self) -> None:
        for number, partition in enumerate(self.partitions):
            self._trace_partition(partition, number)
        for group in self.groups.values():
            for delivery in group.deliveries:
                self._trace_delivery(delivery)

    def _trace_partition(self, partition: Partition, number: int) -> None:
        if self._tracing is not None:
            self._tracing.follow_partition(partition, number, self.settings.trace_sample)

    def _trace_delivery(self, delivery: Delivery) -> None:
        if self._tracing is not None:
            self._tracing.follow_group(delivery, delivery.name, delivery.number, self.settings.trace_sample)

    def _group_settings(self, changes: Mapping[str, Any]) -> TopicSettings:
        of_topic = sorted(set(changes) - GROUP_FIELDS & set(changes))
        if of_topic and of_topic[0] in self.settings.__struct_fields__:
            raise BadSettings(f"{of_topic[0]} is a setting of the topic, for all its groups: use alter_topic")
        return load(TopicSettings, {**msgspec.structs.asdict(self.settings), **changes})

    def delete_group(self, name: str) -> None:
        """Delete a group and its state; messages are no longer kept for it. Raises UnknownGroup."""
        with self._lock, translated(topic_folder(self.root, self.name)):
            self.check_open()
            group = self.groups.get(name)
            if group is None and name not in self.damaged:
                raise UnknownGroup(f"{self.name} has no group {name} in queue mode: see `holdfast group ls`")
            self._notes.write(name, GroupNote(deleted=True))
            if group is None:
                self._delete_damaged(name)
                return
            self.groups = {other: each for other, each in self.groups.items() if other != name}
            group.deleted = True
            self._close_group(group)
            self._finish_deletions()

    def _delete_damaged(self, name: str) -> None:
        """Delete a group that could not be opened."""
        self._finish_deletions()
        del self.damaged[name]
        self._missing = frozenset(part for part in self._missing if groups_of([part]) != {name})
        for number, partition in enumerate(self.partitions):
            partition.log.unpin(group_folder(self.root, self.name, number, name))

    def _close_group(self, group: QueueGroup) -> None:
        with ExitStack() as closing:
            closing.callback(group.waiters.wake_all)
            for delivery in group.deliveries:
                closing.callback(self._close_delivery, group, delivery)

    def _close_delivery(self, group: QueueGroup, delivery: Delivery) -> None:
        with ExitStack() as closing:
            # After the close (callbacks run in reverse): until then a running tick may pin the log again.
            closing.callback(delivery.partition.log.unpin, delivery.journal.log.folder)
            closing.callback(delivery.close)
            closing.callback(delivery.partition.unfollow, delivery)
            closing.callback(delivery.partition.leave, group.waiters)

    def _finish_deletions(self) -> None:
        """Remove the groups marked as deleted, their notes last, so that a crash leaves them marked."""
        for group in self._notes.deleted():
            if self._world.disk.exists(topic_folder(self.root, self.name + DEAD_SUFFIX)):
                for number in range(len(self.partitions)):
                    self.dead_partition(number).drop_letters_of(group)
            self._forget_group(group)

    def _forget_group(self, name: str) -> None:
        """Remove all files of a group except its dead letters."""
        count = len(self.partitions)
        parts = frozenset([f"{GROUPS}/{name}.json", *(f"{number}/{GROUPS}/{name}" for number in range(count))])
        with self._listing:  # throughout, so that what is being removed is not listed again
            strike_off(self._world, self.root, self.name, parts)
            self._notes.forget(name, count)

    def grow(self, count: int) -> None:
        """Open added partitions up to `count`; every group reads them from their first message."""
        with self._lock:
            self.check_open()
            for number in range(len(self.partitions), count):
                with ExitStack() as unless_done:
                    unless_done.callback(self._close_partition, number)
                    self._open_partition(number)
                    for group in self.groups.values():
                        self._open_delivery(group, number, 0)
                    unless_done.pop_all()
                self.settings = msgspec.structs.replace(self.settings, partitions=number + 1)
            self.list_parts()

    def _close_partition(self, number: int) -> None:
        """Close a new partition that could not be opened completely; its files stay for the next attempt."""
        with ExitStack() as closing:
            self.duplicates.unfollow(number)
            for partition in self.partitions[number:]:
                self.partitions.remove(partition)
                closing.callback(partition.close)
            place = self._dead.pop(number, None)
            if place is not None:
                closing.callback(place.close)
            for group in self.groups.values():
                for delivery in group.deliveries[number:]:
                    group.deliveries.remove(delivery)
                    closing.callback(self._close_delivery, group, delivery)

    def tick(self) -> int | None:
        """Do what is due; returns in how many ms to call again."""
        due: list[int | None] = []
        failure: Exception | None = None
        for part, upkeep in self._upkeep():
            try:
                due.append(upkeep())
            except (HoldfastError, OSError) as error:  # a failing part must not block the others
                self._check_owner()
                if part.closed or self.closed:
                    continue  # closed meanwhile, with its topic or its group
                failure = failure or error
                due.append(_AFTER_ERROR_MS)
        before, self.logged_error = self.logged_error, "" if failure is None else str(failure)
        if self.logged_error not in ("", before):  # log it once, not at every tick
            logger.error("upkeep failed", extra={"folder": self.root, "topic": self.name, "error": str(failure)})
        return soonest(*due)

    def _upkeep(self) -> Iterator[tuple[Partition | Delivery | Duplicates, Callable[[], int | None]]]:
        for partition in self.partitions:
            yield partition, partition.tick
        yield self.duplicates, self.duplicates.tick
        for group in self.groups.values():
            for delivery in group.deliveries:
                yield delivery, delivery.tick
                yield delivery, delivery.dead.store_dead
        for place in list(self._dead.values()):
            yield place.target, place.tick

    def due_ms(self) -> int | None:
        """Ms until the next lease, delay or scheduled message is due, not counting upkeep of files."""
        return soonest(
            *[partition.due_ms() for partition in self.partitions], *[group.due_ms() for group in self.groups.values()]
        )

    @property
    def busy(self) -> bool:
        """Whether it has users, holders, leased messages or waiting consumers, and must stay open."""
        working = (
            group.waiters or any(each.group.leases for each in group.deliveries) for group in self.groups.values()
        )
        return self.users > 0 or bool(self.holders) or any(working)

    def may_leave(self) -> bool:
        """Whether it is idle. If so, it is marked as leaving, and new users wait for the engine's lock."""
        self.leaving = True  # first: a user who comes without a lock either sees this or is seen by `busy`
        self.leaving = not self.busy
        return self.leaving

    def apply_retention(self) -> Retained:
        """Bring the groups' pins up to date, then `retain`."""
        self.check_open()
        self.bring_pins()
        gone = self.retain()
        for partition in self._with_dead():
            for delivery in partition.deliveries:
                delivery.tick()  # skips removed messages, if retention ignores pins
        return gone

    def retain(self) -> Retained:
        """Apply the retention settings to every partition now, dead letters included; returns what was removed."""
        messages = [partition.log for partition in self.partitions]
        letters = [place.target.log for place in list(self._dead.values())]
        starts = [log.start for log in [*messages, *letters]]
        gone = [log.retain() for log in [*messages, *letters]]
        removed = [trimmed.start - start for trimmed, start in zip(gone, starts, strict=True)]
        return Retained(
            messages=sum(removed[: len(messages)]),
            dead_letters=sum(removed[len(messages) :]),
            segments=sum(trimmed.segments for trimmed in gone),
            bytes=sum(trimmed.bytes for trimmed in gone),
        )

    def compact_keys(self, progress: Progress | None = None, *, roll: bool = False) -> KeysCompacted:
        """Keep only the last message of each key, as far as every group is done with the others.

        Only sealed segments can be compacted; with `roll`, pins are updated and the active segments sealed first.
        """
        total = KeysCompacted(0, 0, 0)
        if roll:
            self.duplicates.save()
        for partition in self.partitions:
            if roll:
                partition.bring_pins()
                partition.log.roll()
            done = partition.log.compact_keys(
                before=partition.log.end,
                tombstone_ms=self.settings.tombstone_ms,
                min_saving_percent=self.settings.compact_min_saving_percent,
                apart_header=ONLY_FOR,
                progress=progress,
            )
            total = KeysCompacted(
                total.segments + done.segments,
                total.removed_messages + done.removed_messages,
                total.freed_bytes + done.freed_bytes,
            )
        return total

    def trim(self) -> tuple[int, int]:
        """Remove the segments that every group is done with; returns their number and bytes."""
        freed = [self._trim_sealed()]  # before writing anything: the disk may be full
        self.duplicates.save()
        for partition in self._with_dead():
            partition.bring_pins()
            partition.log.roll()
        freed.append(self._trim_sealed())
        return sum(segments for segments, _ in freed), sum(size for _, size in freed)

    def _trim_sealed(self) -> tuple[int, int]:
        gone = [
            partition.log.trim(min([delivery.group.floor for delivery in partition.deliveries], default=0))
            for partition in self._with_dead()
        ]
        return sum(each.segments for each in gone), sum(each.bytes for each in gone)

    def logs(self) -> list[Log]:
        """The message logs, dead letters included."""
        return [partition.log for partition in self._with_dead()]

    def bring_pins(self) -> None:
        """Let the logs be trimmed up to what all groups are done with now."""
        for partition in self._with_dead():
            partition.bring_pins()

    def compact_dead(self) -> int:
        """Trim the journals of the dead letters up to new snapshots; returns the number of bytes freed."""
        return sum([place.letters.compact() for place in list(self._dead.values())])

    def sync(self) -> None:
        """Wait until everything written so far, acks included, is on disk."""
        self.check_open()
        for partition in self._with_dead():
            partition.sync()
            for delivery in partition.deliveries:
                delivery.sync()

    def _with_dead(self) -> list[Partition]:
        """All partitions, including those of the dead letters."""
        return [*self.partitions, *[place.target for place in list(self._dead.values())]]

    def _attend(self) -> None:
        """Request a tick soon. Finalizers call this too, so it must not take a lock."""
        self.due_ns = 0
        self.on_attention()

    def _pause(self) -> None:
        self.on_pause()

    def release_late(self) -> None:
        """Release due messages of all partitions; called in the middle of other work."""
        for partition in self.partitions:
            with suppress(HoldfastError, OSError):  # the partition's own tick will report it
                partition.release_late()

    def check_open(self) -> None:
        """Raise Closed or UnknownTopic if the topic can no longer be used."""
        self._check_owner()
        if self.deleted:
            Catalog(self._world, self.root).facts(self.name)  # UnknownTopic, as for a new caller
            raise UnknownTopic(
                f"the topic {self.name} in {self.root} was deleted; if it was created again, open the new one"
            )
        if self.closed:
            raise Closed(f"the topic {self.name} in {self.root} is closed: open its folder again")

    def close(self) -> None:
        """Sync, save and close all files. Closing twice is fine."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        self._close_all()
        self.list_parts()  # closing may have written the producers' files

    def _close_all(self) -> None:
        """Close everything even if some of it fails; groups first, because their last moves need the dead letters."""
        with ExitStack() as closing:
            for partition in self.partitions:
                closing.callback(partition.close)
            for place in self._dead.values():
                closing.callback(place.close)
            closing.callback(self.duplicates.close)
            for group in self.groups.values():
                closing.callback(group.waiters.wake_all)
                for delivery in group.deliveries:
                    closing.callback(delivery.close)
