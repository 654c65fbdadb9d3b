"""The table of epochs: from which offset on each owner wrote. It makes a lost tail noticeable.

    at  size  field
    0   8     magic     "HFEPOCH" and the version, 1
    8   4     log_id
    12  4     count
    16  12*n  entries   epoch (4), first offset (8)
    ..  4     check     CRC32C of all bytes before it

The epoch rises at every opening after which messages may be missing, and at every truncation. A
position (epoch, offset) is valid while the offset is not beyond the end of that epoch, which is where
the next one begins. A frame of an older epoch at or beyond that place is void: the entry is durable
before the first byte of such a frame is destroyed, so a half-done truncation finishes by itself.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from holdfast.checksum import crc32c
from holdfast.env.disk import Disk
from holdfast.errors import TailLost
from holdfast.model import LogPosition
from holdfast.storage.files import EPOCHS, durable_replace, join, read_file

_MAGIC: Final = b"HFEPOCH\x01"
_HEAD: Final = Struct("<8sII")
_ENTRY: Final = Struct("<IQ")
_CHECK: Final = Struct("<I")
assert _HEAD.size == 16  # keeps the table above and the code in step
assert _ENTRY.size == 12


class Epochs:
    """Epochs and their first offsets, both rising."""

    def __init__(self, entries: list[tuple[int, int]] | None = None) -> None:
        self._entries = list(entries or [])

    @property
    def entries(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._entries)

    @property
    def last(self) -> int:
        """The highest epoch, 0 before the first."""
        return self._entries[-1][0] if self._entries else 0

    @property
    def last_first_offset(self) -> int:
        """Where the highest epoch begins, 0 before the first."""
        return self._entries[-1][1] if self._entries else 0

    def end_of(self, epoch: int) -> int | None:
        """Offset at which what `epoch` wrote ends, or None while it goes on (or is not known)."""
        return next((first for later, first in self._entries if later > epoch), None)

    def cap(self, epoch: int, offset: int) -> int:
        """What is left of a claim that `epoch` made about everything below `offset`."""
        end = self.end_of(epoch)
        return offset if end is None else min(offset, end)

    def at(self, offset: int) -> int:
        """The epoch in which the message at `offset` was written, 0 before the first."""
        return max((epoch for epoch, first in self._entries if first <= offset), default=0)

    def check(self, position: LogPosition) -> None:
        """Raise TailLost if the position points beyond what its epoch left behind."""
        end = self.end_of(position.epoch)
        if end is not None and position.offset > end:
            raise TailLost(
                f"position {position.offset} of epoch {position.epoch} is gone: that epoch ends at {end}, "
                f"what followed was lost in a power cut or truncated. Go on from {end}",
                epoch=position.epoch,
                offset=position.offset,
                epoch_end=end,
            )

    def begin(self, epoch: int, first_offset: int) -> Epochs:
        """A table in which `epoch` begins at the offset; epochs that never got a message fall out."""
        kept = [(old, first) for old, first in self._entries if first < first_offset]
        return Epochs([*kept, (epoch, first_offset)])

    def save(self, disk: Disk, folder: str, log_id: int) -> None:
        content = _HEAD.pack(_MAGIC, log_id, len(self._entries)) + b"".join(_ENTRY.pack(*e) for e in self._entries)
        durable_replace(disk, folder, EPOCHS, content + _CHECK.pack(crc32c(content)))


NO_EPOCHS: Final = Epochs()


def load_epochs(disk: Disk, folder: str) -> tuple[int, Epochs] | None:
    """(log_id, table), or None where the file is missing or damaged: then the frames tell."""
    return parse_epochs(read_file(disk, join(folder, EPOCHS)) or b"")


def parse_epochs(content: bytes) -> tuple[int, Epochs] | None:
    """The same from bytes; any bytes are taken."""
    if len(content) < _HEAD.size + _CHECK.size:
        return None
    magic, log_id, count = _HEAD.unpack_from(content)
    if magic != _MAGIC or len(content) != _HEAD.size + count * _ENTRY.size + _CHECK.size:
        return None
    if _CHECK.unpack_from(content, len(content) - _CHECK.size)[0] != crc32c(content[: -_CHECK.size]):
        return None
    return log_id, Epochs(list(_ENTRY.iter_unpack(content[_HEAD.size : -_CHECK.size])))
