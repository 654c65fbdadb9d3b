"""The offsets that a group in stream mode committed, in a journal with snapshots.

A commit of many partitions is one frame, so it is atomic. Each offset carries the epoch of its log, so that the loss
of a log's tail in a power cut is noticed rather than skipped over. The epoch of the group's membership is kept as
well, so that fenced members stay fenced after a restart, and so are its static members.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final, TypeAlias

import msgspec

from holdfast.broker.journal import SNAPSHOT, SnapshotFiles, log_settings
from holdfast.codec.frame import Kind
from holdfast.env import World
from holdfast.env.process import get_logger
from holdfast.errors import CorruptData, DamagedRange, DiskFull, TailLost
from holdfast.membership import Assignor, TopicPartition
from holdfast.membership.members import Rebalance, StaticMember
from holdfast.model import Appended, Durability, LogPosition
from holdfast.settings import LogSettings
from holdfast.storage.log import Log

logger = get_logger(__name__)

# Take a snapshot after this many commits, which cost about as much as the snapshot.
_SNAPSHOT_FRAMES: Final = 2_000


class CommittedOffset(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Everything below `offset` of this partition is handled. `topic_id` tells topics of the same name apart."""

    topic: str
    topic_id: int
    partition: int
    offset: int
    epoch: int
    at_ms: int

    @property
    def place(self) -> TopicPartition:
        return self.topic, self.partition

    @property
    def position(self) -> LogPosition:
        return LogPosition(self.epoch, self.offset)


class Commits(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=1):
    """Offsets were committed, all at once."""

    entries: tuple[CommittedOffset, ...]


class Forgotten(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=2):
    """The group has forgotten a topic."""

    topic: str


class Risen(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=3):
    """The epoch of the membership rose; members with an older one are fenced."""

    epoch: int


class Remembered(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=4):
    """The static members, the assignment strategy, and the number of partitions of each topic."""

    statics: tuple[StaticMember, ...] = ()
    counts: dict[str, int] = {}
    assignor: Assignor = "sticky"
    rebalance: Rebalance = "cooperative"


Event: TypeAlias = Commits | Forgotten | Risen | Remembered

_encode_event = msgspec.msgpack.Encoder().encode
decode_event = msgspec.msgpack.Decoder(Event).decode


class _Image(msgspec.Struct, frozen=True, array_like=True):
    """The state after all events of the journal below `position`."""

    position: int
    entries: tuple[CommittedOffset, ...]
    epoch: int
    remembered: Remembered


_encode_image = msgspec.msgpack.Encoder().encode
decode_image = msgspec.msgpack.Decoder(_Image).decode


class CommitTable:
    """The state of a group's commits, built by applying the events of its journal to a snapshot."""

    def __init__(self, image: _Image | None = None) -> None:
        image = image or _Image(0, (), 0, Remembered())
        self.position = image.position  # events below it are in the snapshot
        self.entries: dict[TopicPartition, CommittedOffset] = {entry.place: entry for entry in image.entries}
        self.epoch = image.epoch
        self.remembered = image.remembered

    def apply(self, event: Event) -> None:
        if isinstance(event, Commits):
            self.entries.update((entry.place, entry) for entry in event.entries)
        elif isinstance(event, Forgotten):
            self.entries = {place: entry for place, entry in self.entries.items() if place[0] != event.topic}
        elif isinstance(event, Risen):
            self.epoch = max(self.epoch, event.epoch)
        else:
            self.remembered = event

    def ordered(self) -> list[CommittedOffset]:
        """Return all commits, ordered by topic and partition."""
        return sorted(self.entries.values(), key=lambda entry: entry.place)


class Offsets:
    """What one group has committed. Safe to use from any thread and under any lock: it calls no other component."""

    def __init__(self, folder: str, log: Log, files: SnapshotFiles) -> None:
        self.folder = folder
        self.log = log
        self._files = files
        self._lock = threading.Lock()
        self._snapshot_at = 0
        self._before_at = 0
        self._table = CommitTable()
        log.fold = self._fold

    @staticmethod
    def open(world: World, folder: str, settings: LogSettings | None = None) -> Offsets:
        """Open the commits in the folder and own them; the folder is created if there is none."""
        log = Log.open(folder, log_settings(settings or LogSettings()), world, kind=Kind.JOURNAL)
        try:
            offsets = Offsets(folder, log, SnapshotFiles(world, folder))
            offsets._recover()
        except BaseException:
            log.close()
            raise
        return offsets

    def commit(self, entries: Iterable[CommittedOffset], durability: Durability | None = None) -> Appended:
        """Write the commits atomically; pass the result to `wait`."""
        return self._write(Commits(tuple(entries)), durability)

    def forget(self, topic: str) -> None:
        """Forget a topic that is gone or is to be read afresh."""
        self._write(Forgotten(topic))

    def raise_epoch(self, epoch: int) -> None:
        """Return once the epoch is durable, so that no later owner can issue it again."""
        self.wait(self._write(Risen(epoch), "fsync"))

    def remember(self, remembered: Remembered) -> None:
        """Save the static members if they have changed."""
        if remembered != self.remembered and (remembered.statics or self.remembered.statics):
            self._write(remembered)

    @property
    def epoch(self) -> int:
        return self._table.epoch

    @property
    def remembered(self) -> Remembered:
        return self._table.remembered

    def wait(self, appended: Appended) -> None:
        """Return once what was written is as durable as requested."""
        self.log.wait(appended)

    async def wait_async(self, appended: Appended) -> None:
        """Async version of `wait`."""
        await self.log.wait_async(appended)

    def of(self, topic: str, topic_id: int, partition: int) -> CommittedOffset | None:
        """Return the commit for a partition if it was made for the topic of this id."""
        found = self._table.entries.get((topic, partition))
        return found if found is not None and found.topic_id == topic_id else None

    def entries(self) -> list[CommittedOffset]:
        """Return all commits, in order."""
        with self._lock:
            return self._table.ordered()

    @property
    def synced(self) -> bool:
        """Whether everything would survive a power cut now."""
        return self.log.synced_end >= self.log.written_end

    def tick(self) -> int | None:
        """Do what is due by now; return the ms until the next call."""
        if self.log.written_end - self._snapshot_at >= _SNAPSHOT_FRAMES:
            self.snapshot()
        return self.log.tick()

    def snapshot(self) -> None:
        """Save the current state, and drop the journal up to the previous snapshot."""
        with self._lock:
            self._keep(self._image())

    def close(self) -> None:
        self.log.close()

    def _keep(self, image: _Image) -> None:
        self.log.sync()  # after a power cut the journal must not end before the snapshot
        self._files.keep(_encode_image(image))
        self._before_at, self._snapshot_at = self._snapshot_at, image.position
        self.log.trim(self._before_at)

    def _fold(self, urgent: bool) -> bool:  # noqa: FBT001  a callback of the log
        """The disk is full: replace all events by a snapshot, as `StateJournal` does; the caller holds the lock."""
        if self.log.written_end == self.log.start:
            return False
        try:
            self._keep(self._image())
            self.log.roll()
            self.log.trim(self._snapshot_at)
        except DiskFull:
            return False
        return True

    def _image(self) -> _Image:
        table = self._table
        return _Image(self.log.written_end, tuple(table.entries.values()), table.epoch, table.remembered)

    def _write(self, event: Event, durability: Durability | None = None) -> Appended:
        with self._lock:
            appended = self.log.write([_encode_event(event)], durability=durability)
            self._table.apply(event)
        return appended

    def _recover(self) -> None:
        image, _ = self._files.newest(decode_image)
        if image is not None:
            self._snapshot_at = image.position
            self._table = CommitTable(image)
            if image.position > self.log.written_end:
                # Events that the snapshot includes were lost: new ones would get offsets that replay skips.
                self._keep(msgspec.structs.replace(image, position=self.log.written_end))
        if self._snapshot_at < self.log.start:
            raise CorruptData(
                f"the commits in {self.folder} start at event {self.log.start}, and no snapshot covers the events "
                f"before: it was damaged. Restore {SNAPSHOT} from a backup; or delete the group (`holdfast group "
                "delete`), let it start over, and reset it to where it should continue"
            )
        self._replay(self._snapshot_at)

    def _replay(self, at: int) -> None:
        while at < self.log.end:
            try:
                for record in self.log.records(at):
                    self._table.apply(decode_event(bytes(record.value)))
                    at = record.offset + 1
            except DamagedRange as damage:
                at = damage.next_offset
                logger.error(
                    "commits damaged: some messages may be delivered again",
                    extra={"folder": self.folder, "first": damage.first_offset, "next": damage.next_offset},
                )
            except msgspec.DecodeError as error:
                raise CorruptData(
                    f"the commits in {self.folder} have an unknown event: {error}. If a newer release wrote it, "
                    "upgrade; otherwise run `holdfast check` on the data folder"
                ) from error


# A group's position in a partition, where it can be moved, and how far behind it is.


def usable_offset(log: Log, committed: CommittedOffset) -> int:
    """Return where to resume from a commit: its offset, unless the log has lost messages around it."""
    facts = {"topic": committed.topic, "partition": committed.partition, "committed": committed.offset}
    try:
        log.check_position(committed.position)
    except TailLost as lost:
        # The offsets of the lost messages, which the group had read, are reused for other messages.
        logger.warning("messages that had been read were lost from the end", extra={**facts, "go_on": lost.epoch_end})
        return max(lost.epoch_end, log.start)
    if committed.offset < log.start:
        logger.warning("messages were trimmed before they were read", extra={**facts, "go_on": log.start})
        return log.start
    return min(committed.offset, log.end)
