"""A log of events with snapshots that keep replay short, and the state that they add up to, whatever it is of.

A snapshot is the state after all events below its position. The one before it is kept, too, and the
journal is trimmed behind that one only: should the newer be damaged, nothing is lost but time.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

import msgspec

from holdfast.broker.snapshots import SNAPSHOT, SnapshotFiles
from holdfast.codec.frame import Kind
from holdfast.delivery.group import IllegalMove
from holdfast.env import World
from holdfast.errors import CorruptData, DamagedRange
from holdfast.settings import LogSettings
from holdfast.storage.log import Log

logger = logging.getLogger(__name__)

_State = TypeVar("_State")
_Image = TypeVar("_Image")


class StateSnapshot(msgspec.Struct, Generic[_Image], frozen=True, array_like=True):
    """The state after all events below `position` of the journal."""

    position: int
    image: _Image


_encode = msgspec.msgpack.Encoder().encode


class StateJournal(ABC, Generic[_State, _Image]):
    """Events in, and the state that they add up to. What the state is, a subclass says."""

    damage_means: ClassVar[str]  # what users will notice of events that cannot be read
    without_it: ClassVar[str]  # what happens to whoever removes the folder

    def __init__(self, world: World, folder: str, settings: LogSettings) -> None:
        self._world = world
        self._folder = folder
        self._snapshot_at = 0
        self._before_at = 0
        self._keeping = threading.Lock()
        self._files = SnapshotFiles(world, folder)
        self.lost_events = 0  # how many of them could not be read at opening
        self.log = Log.open(folder, log_settings(settings), world, kind=Kind.JOURNAL)

    @abstractmethod
    def _new(self) -> _State:
        """The state before the first event."""

    @abstractmethod
    def _restored(self, image: _Image) -> _State:
        """The state that an image was made of."""

    @abstractmethod
    def _image(self, state: _State) -> _Image:
        """A copy of the state as one value."""

    @abstractmethod
    def _decoded(self, payload: bytes) -> StateSnapshot[_Image]:
        """The snapshot that a file holds."""

    @abstractmethod
    def _apply_value(self, state: _State, value: bytes) -> None:
        """Let the event of these bytes happen."""

    def load(self) -> _State:
        """The state as the journal left it; closes the journal where that cannot be found out."""
        try:
            snapshot, _ = self._files.newest(self._decoded)
            state = self._new() if snapshot is None else self._restored(snapshot.image)
            self._snapshot_at = 0 if snapshot is None else snapshot.position
            if self._snapshot_at > self.log.written_end:
                # Events were lost that the snapshot has: new ones would stand where replay does not look.
                self._snapshot_at = self.log.written_end
                self.snapshot(state)
            self._replay(state, self._snapshot_at)
        except BaseException:
            self.log.close()
            raise
        return state

    @property
    def events_since_snapshot(self) -> int:
        return self.log.written_end - self._snapshot_at

    def snapshot(self, state: _State, position: int | None = None) -> int:
        """Keep the state as it is after all events so far; answers how many bytes of old journal that freed."""
        position = self.log.written_end if position is None else position
        return self.keep(StateSnapshot(position, self._image(state)))

    def keep(self, snapshot: StateSnapshot[_Image]) -> int:
        """Write a snapshot that was taken earlier. The journal must not end before it after a power cut."""
        with self._keeping:
            return self._keep(snapshot)

    def _keep(self, snapshot: StateSnapshot[_Image]) -> int:
        if snapshot.position < self._snapshot_at:
            return 0  # somebody else has kept a later one meanwhile
        self.log.sync()
        self._files.keep(_encode(snapshot))
        self._before_at, self._snapshot_at = self._snapshot_at, snapshot.position
        return self._trim(self._before_at)

    def _trim(self, before: int) -> int:
        """Let go of the events below `before`, in whole segments; answers how many bytes that freed."""
        return self.log.trim(before).bytes

    def close(self) -> None:
        self.log.close()

    def restore(self, state: _State) -> None:
        """Make the state what the journal says it is: a call was interrupted, and nobody knows how far it came."""
        self.log.sync()  # an event that is held back could not be read
        with self._keeping:
            snapshot, _ = self._files.newest(self._decoded)
            fresh = self._new() if snapshot is None else self._restored(snapshot.image)
            self._replay(fresh, 0 if snapshot is None else snapshot.position)
        vars(state).update(vars(fresh))

    def _replay(self, state: _State, at: int) -> None:
        """Bring the state, as it was before the event `at`, up to the journal's end."""
        damaged = False
        if at < self.log.start:
            raise CorruptData(
                f"the journal in {self._folder} begins at event {self.log.start}, and no snapshot reaches "
                f"there: it was damaged. Restore {SNAPSHOT} from a backup, or remove the folder: then {self.without_it}"
            )
        while at < self.log.end:
            try:
                for record in self.log.records(at):
                    self._apply(state, bytes(record.value), lenient=damaged)
                    at = record.offset + 1
            except DamagedRange as damage:
                damaged = True
                at = damage.next_offset
                self.lost_events += damage.next_offset - damage.first_offset
                logger.error(
                    "journal damaged: %s",
                    self.damage_means,
                    extra={"folder": self._folder, "first": damage.first_offset, "next": damage.next_offset},
                )

    def _apply(self, state: _State, value: bytes, *, lenient: bool) -> None:
        try:
            self._apply_value(state, value)
        except IllegalMove as error:
            if not lenient:
                raise CorruptData(f"the journal in {self._folder} does not add up: {error}") from error
            logger.warning("event passed over", extra={"folder": self._folder, "error": str(error)})
        except msgspec.DecodeError as error:
            raise CorruptData(f"the journal in {self._folder} holds an unknown event: {error}") from error


def log_settings(settings: LogSettings) -> LogSettings:
    """Acks go on when the disk has no room left for messages, and need no sync of their own."""
    return LogSettings(
        durability="interval",
        sync_interval_ms=settings.sync_interval_ms,
        segment_bytes=min(settings.segment_bytes, 16 * 1024 * 1024),
        min_free_bytes=0,
    )
