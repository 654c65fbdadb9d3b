"""Reading a log beside its owner, who may trim it meanwhile: what is gone is passed over, nothing is seen by halves."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from holdfast.codec.frame import Frame
from holdfast.env import World
from holdfast.errors import CorruptData, DamagedRange, OffsetOutOfRange, UnknownFormat
from holdfast.model import Record
from holdfast.storage import LogReader


class Damage(msgspec.Struct, frozen=True, gc=False):
    """The messages [first_offset, next_offset) cannot be read, and why."""

    first_offset: int
    next_offset: int
    reason: str


def frames_beside(reader: LogReader, start: int, stop: int) -> Iterator[Frame]:
    """The frames that hold messages of [start, stop), without what is damaged or was trimmed away meanwhile."""
    at = max(start, reader.start)
    stop = min(stop, reader.end)
    while at < stop:
        try:
            for frame in reader.read(at, on_damage="skip"):
                if frame.base_offset >= stop:
                    return
                yield frame
                at = frame.next_offset
            return
        except OffsetOutOfRange as trimmed:
            if trimmed.start <= at:
                return  # it ends before: a tail was cut off
            at = trimmed.start


def records_beside(reader: LogReader, start: int, stop: int) -> Iterator[Record]:
    """The messages of [start, stop), in the same way."""
    for frame in frames_beside(reader, start, stop):
        for record in frame.records():
            if start <= record.offset < stop:
                yield record


def damage_in(world: World, folder: str) -> Iterator[Damage]:
    """What a reader of the log cannot have, in order; looks at every byte below the readable end."""
    reader = LogReader(folder, world=world)
    at, stop = reader.start, reader.end
    while at < stop:
        try:
            for frame in reader.read(at):
                if frame.base_offset >= stop:
                    return
                yield from _undecodable(frame)
                at = frame.next_offset
            return
        except DamagedRange as damage:
            yield Damage(damage.first_offset, damage.next_offset, str(damage))
            at = damage.next_offset
        except OffsetOutOfRange as trimmed:
            if trimmed.start <= at:
                return
            at = trimmed.start


def _undecodable(frame: Frame) -> Iterator[Damage]:
    try:
        frame.records()
    except UnknownFormat:
        raise
    except CorruptData as error:
        yield Damage(frame.base_offset, frame.next_offset, str(error))
