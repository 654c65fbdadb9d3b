"""The journal of one group on one partition: a log of delivery events, with snapshots that keep replay short.

A snapshot is the state after all events below its position. The one before it is kept, too, and the
journal is trimmed behind that one only: should the newer be damaged, nothing is lost but time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import msgspec

from holdfast.broker.snapshots import SNAPSHOT, SnapshotFiles
from holdfast.codec.frame import Kind
from holdfast.delivery.events import Event, decode_event, encode_event
from holdfast.delivery.group import Group, IllegalMove
from holdfast.delivery.image import Image, group_of, image_of
from holdfast.env import World
from holdfast.errors import CorruptData, DamagedRange
from holdfast.model import Appended, Durability
from holdfast.settings import LogSettings
from holdfast.storage.log import Log

logger = logging.getLogger(__name__)


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """The state after all events below `position` of the journal."""

    position: int
    image: Image


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Snapshot).decode


class Journal:
    """Events in, and the state that they add up to."""

    def __init__(self, world: World, folder: str, log: Log, snapshot_at: int) -> None:
        self._world = world
        self._folder = folder
        self.log = log
        self._snapshot_at = snapshot_at
        self._before_at = 0
        self._keeping = threading.Lock()
        self._files = SnapshotFiles(world, folder)
        self._start = 0  # where a new group began
        self.write_one = log.write_one

    @staticmethod
    def open(world: World, folder: str, settings: LogSettings, start: int) -> tuple[Journal, Group]:
        """The journal in the folder, and the group as it left it; a new group begins at `start`."""
        log = Log.open(folder, log_settings(settings), world, kind=Kind.JOURNAL)
        try:
            files = SnapshotFiles(world, folder)
            snapshot, _ = files.newest(_decode)
            group = Group(start) if snapshot is None else group_of(snapshot.image)
            journal = Journal(world, folder, log, 0 if snapshot is None else snapshot.position)
            journal._files = files
            journal._start = start
            if journal._snapshot_at > log.written_end:
                # Events were lost that the snapshot has: new ones would stand where replay does not look.
                journal._snapshot_at = log.written_end
                journal.snapshot(group)
            journal._replay(group, journal._snapshot_at)
        except BaseException:
            log.close()
            raise
        return journal, group

    def append(self, events: Sequence[Event], durability: Durability | None = None) -> Appended:
        """Write the events as one; the answer tells what to wait for."""
        return self.log.write([encode_event(event) for event in events], durability=durability)

    @property
    def events_since_snapshot(self) -> int:
        return self.log.written_end - self._snapshot_at

    def snapshot(self, group: Group, position: int | None = None) -> int:
        """Keep the state as it is after all events so far; answers how many bytes of old journal that freed."""
        position = self.log.written_end if position is None else position
        image = image_of(group)
        return self.keep(Snapshot(position, image))

    def keep(self, snapshot: Snapshot) -> int:
        """Write a snapshot that was taken earlier. The journal must not end before it after a power cut."""
        with self._keeping:
            return self._keep(snapshot)

    def _keep(self, snapshot: Snapshot) -> int:
        if snapshot.position < self._snapshot_at:
            return 0  # somebody else has kept a later one meanwhile
        self.log.sync()
        self._files.keep(_encode(snapshot))
        self._before_at, self._snapshot_at = self._snapshot_at, snapshot.position
        return self.log.trim(self._before_at).bytes

    def close(self) -> None:
        self.log.close()

    def restore(self, group: Group) -> None:
        """Make the group what the journal says it is: a call was interrupted, and nobody knows how far it came."""
        self.log.sync()  # an event that is held back could not be read
        with self._keeping:
            snapshot, _ = newest_snapshot(self._world, self._folder)
            fresh = Group(self._start) if snapshot is None else group_of(snapshot.image)
            self._replay(fresh, 0 if snapshot is None else snapshot.position)
        vars(group).update(vars(fresh))

    def _replay(self, group: Group, at: int) -> None:
        """Bring the group, as it was before the event `at`, up to the journal's end."""
        damaged = False
        if at < self.log.start:
            raise CorruptData(
                f"the journal in {self._folder} begins at event {self.log.start}, and no snapshot reaches "
                f"there: it was damaged. Restore {SNAPSHOT} from a backup, or remove the folder: then all messages "
                "that are still kept come again"
            )
        while at < self.log.end:
            try:
                for record in self.log.records(at):
                    self._apply(group, record.value, lenient=damaged)
                    at = record.offset + 1
            except DamagedRange as damage:
                damaged = True
                at = damage.next_offset
                logger.error(
                    "journal damaged: some messages may be delivered again",
                    extra={"folder": self._folder, "first": damage.first_offset, "next": damage.next_offset},
                )

    def _apply(self, group: Group, value: bytes, *, lenient: bool) -> None:
        try:
            group.apply(decode_event(value))
        except IllegalMove as error:
            if not lenient:
                raise CorruptData(f"the journal in {self._folder} does not add up: {error}") from error
            logger.warning("event passed over", extra={"folder": self._folder, "error": str(error)})
        except msgspec.DecodeError as error:
            raise CorruptData(f"the journal in {self._folder} holds an unknown event: {error}") from error


def newest_snapshot(world: World, folder: str) -> tuple[Snapshot | None, str]:
    """The newest snapshot that is whole, and its file's name."""
    return SnapshotFiles(world, folder).newest(_decode)


def log_settings(settings: LogSettings) -> LogSettings:
    """Acks go on when the disk has no room left for messages, and need no sync of their own."""
    return LogSettings(
        durability="interval",
        sync_interval_ms=settings.sync_interval_ms,
        segment_bytes=min(settings.segment_bytes, 16 * 1024 * 1024),
        min_free_bytes=0,
    )
