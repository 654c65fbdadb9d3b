"""The journal of one group on one partition: a log of delivery events, with snapshots that keep replay short."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from holdfast.broker.past_events import PastEvents
from holdfast.broker.snapshots import SnapshotFiles
from holdfast.broker.state_journal import StateJournal, StateSnapshot
from holdfast.delivery.events import Event, decode_event, encode_event
from holdfast.delivery.group import FAR, Group
from holdfast.delivery.image import Image, group_of, image_of
from holdfast.env import World
from holdfast.model import Appended, Durability
from holdfast.settings import LogSettings


class Snapshot(StateSnapshot[Image], frozen=True, array_like=True):
    """A group after all events below `position` of its journal."""


_decode = msgspec.msgpack.Decoder(Snapshot).decode


class Journal(StateJournal[Group, Image]):
    """Events in, and the group that they add up to."""

    damage_means = "some messages may be delivered again"
    without_it = "all messages that are still kept come again"

    def __init__(self, world: World, folder: str, settings: LogSettings, start: int) -> None:
        super().__init__(world, folder, settings)
        self._start = start  # where a new group begins
        self.write_one = self.log.write_one
        self.past = PastEvents(world, self.log)
        self.kept: Callable[[], tuple[int, int]] = lambda: (0, FAR)  # from where to where messages are kept

    def _keep(self, snapshot: StateSnapshot[Image]) -> int:
        self.past.note_floor(snapshot.position, snapshot.image.floor)
        return super()._keep(snapshot)

    def _trim(self, before: int) -> int:
        start, end = self.kept()
        self.past.keep(before, end=end)
        self.past.forget(start)
        return super()._trim(before)

    @staticmethod
    def open(world: World, folder: str, settings: LogSettings, start: int) -> tuple[Journal, Group]:
        """The journal in the folder, and the group as it left it; a new group begins at `start`."""
        journal = Journal(world, folder, settings, start)
        return journal, journal.load()

    def append(self, events: Sequence[Event], durability: Durability | None = None) -> Appended:
        """Write the events as one; the answer tells what to wait for."""
        return self.log.write([encode_event(event) for event in events], durability=durability)

    def _new(self) -> Group:
        return Group(self._start)

    def _restored(self, image: Image) -> Group:
        return group_of(image)

    def _image(self, state: Group) -> Image:
        return image_of(state)

    def _decoded(self, payload: bytes) -> Snapshot:
        return _decode(payload)

    def _apply_value(self, state: Group, value: bytes) -> None:
        state.apply(decode_event(value))


def newest_snapshot(world: World, folder: str) -> tuple[Snapshot | None, str]:
    """The newest snapshot that is whole, and its file's name."""
    return SnapshotFiles(world, folder).newest(_decode)
