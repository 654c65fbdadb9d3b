"""The journal of the locks and documents of a data folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from holdfast.broker.snapshots import SnapshotFiles
from holdfast.broker.state_journal import StateJournal, StateSnapshot
from holdfast.env import World
from holdfast.locking.events import Event, decode_event, encode_event
from holdfast.locking.table import Image, Table, image_of, table_of
from holdfast.model import Appended, Durability
from holdfast.settings import LogSettings

# Replay must stay short, but a large state is written less often than a small one.
_SNAPSHOT_BYTES: Final = 4 * 1024 * 1024
_SNAPSHOT_EVENTS: Final = 20_000


class LocksSnapshot(StateSnapshot[Image], frozen=True, array_like=True):
    """The locks and documents after all events below `position` of their journal."""


_decode = msgspec.msgpack.Decoder(LocksSnapshot).decode


class LocksJournal(StateJournal[Table, Image]):
    """Events in, and the locks and documents that they add up to."""

    damage_means = "some locks may be held by nobody, and some documents be those of an earlier write"
    without_it = "no lock is held, there is no document, and fencing numbers begin anew"

    def __init__(self, world: World, folder: str, settings: LogSettings) -> None:
        super().__init__(world, folder, settings)
        self._grown_bytes = 0

    def append(self, events: Sequence[Event], durability: Durability) -> Appended:
        """Write the events as one; the answer tells what to wait for."""
        values = [encode_event(event) for event in events]
        appended = self.log.write(values, durability=durability)
        self._grown_bytes += sum(map(len, values))
        return appended

    def snapshot_if_due(self, table: Table) -> LocksSnapshot | None:
        """A copy of the state, if it is time to `keep` one."""
        many = self.events_since_snapshot >= max(_SNAPSHOT_EVENTS, len(table.held))
        if not many and self._grown_bytes < max(_SNAPSHOT_BYTES, table.document_bytes):
            return None
        self._grown_bytes = 0
        return LocksSnapshot(self.log.written_end, image_of(table))

    def _new(self) -> Table:
        return Table()

    def _restored(self, image: Image) -> Table:
        return table_of(image)

    def _image(self, state: Table) -> Image:
        return image_of(state)

    def _decoded(self, payload: bytes) -> LocksSnapshot:
        return _decode(payload)

    def _apply_value(self, state: Table, value: bytes) -> None:
        self._grown_bytes += len(value)
        state.apply(decode_event(value))


def newest_locks(world: World, folder: str) -> tuple[LocksSnapshot | None, str]:
    """The newest snapshot that is whole, and its file's name."""
    return SnapshotFiles(world, folder).newest(_decode)
