"""The events of a group that its snapshots have made unnecessary, kept for those who ask what became of a message.

A journal is trimmed behind its snapshots in whole segments. Each of them is packed into one file before it goes, and
that is kept for as long as the log holds a message that it may tell of. It is packed as it is, in one call that holds
up nobody: what it says is read only when somebody asks.

The name of a file says what it is about, so that a look for one message opens few:

    <base>-<lowest>-<end>.past     events from `base` on, of messages from `lowest` up to, not including, `end`

at   size  field
0    4     magic    "HFP" and the version, 1
4    4     check    CRC32C of the rest
8    n     payload  the segment's bytes, packed by zlib
"""

from __future__ import annotations

import logging
import re
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from struct import Struct
from typing import Final, NamedTuple

from holdfast.checksum import crc32c
from holdfast.codec.frame import HEADER_BYTES, Frame, FrameHeader
from holdfast.delivery.events import Event, decode_event
from holdfast.env import World
from holdfast.errors import CorruptData, HoldfastError
from holdfast.settings import LogSettings
from holdfast.storage.files import durable_replace, join, read_file, segment_name
from holdfast.storage.log import Log
from holdfast.storage.walk import Wanted, first_log_id, walk

logger = logging.getLogger(__name__)

_NAME: Final = re.compile(r"(\d{20})-(\d{20})-(\d{20})\.past")
_HEADER: Final = Struct("<4sI")
_MAGIC: Final = b"HFP\x01"
assert _HEADER.size == 8  # keeps the table above and the code in step
_FAST: Final = 1  # the level of packing: a journal repeats itself, and more work would save little
_MOST_RAW_BYTES: Final = LogSettings().max_raw_bytes


class Happened(NamedTuple):
    """An event, and when it was journaled."""

    at_ns: int
    event: Event


class Past(NamedTuple):
    """One file: events from `base` on, of messages from `lowest` up to `end`."""

    base: int
    lowest: int
    end: int

    @property
    def name(self) -> str:
        return f"{self.base:020d}-{self.lowest:020d}-{self.end:020d}.past"


def is_past(name: str) -> bool:
    """Whether that is the name of such a file."""
    return _NAME.fullmatch(name) is not None


def damaged_pasts(world: World, folder: str) -> Iterator[str]:
    """What is wrong with the files beside the journal in a folder, in words."""
    for name in filter(is_past, world.disk.names(folder)):
        path = join(folder, name)
        try:
            content = read_file(world.disk, path)
            if content is not None:
                _unpack(content)
        except FileNotFoundError:
            continue  # an owner has removed it meanwhile
        except (CorruptData, OSError) as error:
            yield f"{path} cannot be read: {error}; the history of some settled messages is lost, and nothing else"


class PastEvents:
    """The files beside one journal. Whoever keeps snapshots calls, one at a time."""

    def __init__(self, world: World, log: Log) -> None:
        self._world = world
        self._log = log
        self._lock = threading.Lock()
        self._floors: list[tuple[int, int]] = []  # from which event on no message below a floor is touched

    def note_floor(self, position: int, floor: int) -> None:
        """All events from this one on are about messages from the floor on, unless a seek goes back behind it."""
        with self._lock:
            self._floors.append((position, floor))

    def sought(self, to: int) -> None:
        """A seek may bring back messages from there on."""
        with self._lock:
            self._floors[:] = [(position, min(floor, to)) for position, floor in self._floors]

    def keep(self, before: int, *, end: int) -> None:
        """Pack the segments that lie below `before`, where the log of the messages ends at `end`.

        Where that cannot be done their history is lost, and nothing else: the journal must not grow for it.
        """
        segments = self._log.segments()
        if not segments:
            return  # a journal that was lost, and has no event yet
        going = [facts.base_offset for facts in segments[:-1] if facts.next_offset <= before]
        first_left = segments[len(going)].base_offset
        try:
            there = {past.base for past in self._files()} if going else set()
            for base in going:
                if base not in there:
                    self._pack(Past(base, self._lowest(base), end))
        except (OSError, HoldfastError) as error:
            facts = {"folder": self._log.folder, "why": str(error)}
            logger.warning("what became of settled messages is forgotten", extra=facts)
        with self._lock:
            passed = sum(position <= first_left for position, _ in self._floors)
            del self._floors[: max(passed - 1, 0)]  # the last of them holds for what is packed next

    def forget(self, start: int) -> None:
        """Remove what tells of messages below `start` only: the log has dropped them."""
        with suppress(OSError):  # the next one tries again
            for past in self._files():
                if past.end <= start:
                    self._world.disk.remove(join(self._log.folder, past.name))

    def of(self, offset: int) -> Iterator[Happened]:
        """Events that may tell of the message at the offset, oldest first, those of the journal as it is included."""
        journal_start = self._log.start
        for past in self._files():
            if past.base < journal_start and past.lowest <= offset < past.end:
                yield from self._unpacked(past)
        self._log.sync()  # an event that is held back could not be read
        for record in self._log.records(self._log.start, on_damage="skip"):
            yield Happened(record.timestamp_ns, decode_event(bytes(record.value)))

    def _lowest(self, base: int) -> int:
        with self._lock:
            return max((floor for position, floor in self._floors if position <= base), default=0)

    def _files(self) -> list[Past]:
        found = map(_NAME.fullmatch, self._world.disk.names(self._log.folder))
        return sorted(Past(*map(int, match.groups())) for match in found if match)

    def _pack(self, past: Past) -> None:
        content = read_file(self._world.disk, join(self._log.folder, segment_name(past.base)))
        if content is not None:
            payload = zlib.compress(content, _FAST)
            durable_replace(
                self._world.disk, self._log.folder, past.name, _HEADER.pack(_MAGIC, crc32c(payload)) + payload
            )

    def _unpacked(self, past: Past) -> Iterator[Happened]:
        """The events of a file; one that is damaged tells nothing."""
        try:
            data = memoryview(_unpack(read_file(self._world.disk, join(self._log.folder, past.name)) or b""))
        except (CorruptData, OSError) as error:
            logger.warning("past events cannot be read", extra={"file": past.name, "why": str(error)})
            return
        for found in walk(data, Wanted(first_log_id(data) or 0, past.base)):
            if isinstance(found, FrameHeader):
                start = found.position + HEADER_BYTES
                frame = Frame(found, data[start : start + found.body_bytes], max_raw_bytes=_MOST_RAW_BYTES)
                for record in frame.records():
                    yield Happened(record.timestamp_ns, decode_event(bytes(record.value)))


def _unpack(content: bytes) -> bytes:
    if len(content) < _HEADER.size:
        raise CorruptData("the file has no header")
    magic, crc = _HEADER.unpack_from(content)
    payload = memoryview(content)[_HEADER.size :]
    if magic != _MAGIC or crc != crc32c(payload):
        raise CorruptData("its bytes are not those that were written")
    try:
        return zlib.decompress(payload)
    except zlib.error as error:
        raise CorruptData(str(error)) from None
