"""The small mapped state file of a log: how far readers may read, and what is known to be on disk.

    word  field
    0     magic           "HFSTATE" and the version, 1
    1     readable_end    offset after the last message that readers may see
    2     synced_end      offset after the last message known to be on disk
    3     synced_copy     the same again, stored after it
    4     asked           1 if a reader waits for a signal from the owner
    5     sign_giver      sequence of the owner that gives signals; 0 once it has closed the log
    6     mount_id        the mount that the owner found the log on; 0 if that was not known
    7     removing_end    offset after the segment that is about to be removed; 0 if there is none
    8     slot A: sequence, then words 9 identity, 10 boot_id, 11 clean_end, 12 check
    16    slot B: the same

Words are 64-bit little endian, and each is stored at once: into a map, or with an eight-byte write where a store into a
map may have to allocate blocks, which on failure would kill the process by a signal. `readable_end` is one store per
append, so it costs next to nothing, and readers in other processes never see half of it. `synced_end` is stored only
after the sync it reports; whichever of the two copies was torn, the smaller one is true. Of the two slots, the valid
one with the higher sequence counts, and only the other one is written. So a crash between two stores leaves the older
one.

    identity   log_id in the low half, epoch in the high half
    clean_end  0 while the log is open, otherwise 1 + its end: the log was closed cleanly
    check      CRC32C of the four words before it

A store into a map wakes nobody. A reader that wants to sleep stores `asked`, looks once more, and watches the file.
When the owner moves the readable end and finds `asked` set, it clears the word with a write, of which the kernel
notifies the watchers. Readers store nothing else; those that may not write poll instead.

Before the owner asks whether somebody outside needs a segment, it stores `removing_end`; only then may it remove it. A
reader that starts first announces that it needs everything, and then looks at this word. So one of the two sees the
other: either the segment stays, or the reader starts after it. A word left by a crash is cleared at the next opening.

The log can be opened without this file. All that is lost is the knowledge of what was synced.
"""

from __future__ import annotations

import contextlib
from struct import Struct
from typing import Final, Protocol

import msgspec

from holdfast.checksum import crc32c
from holdfast.env.disk import Disk, File, write_fully
from holdfast.errors import TailLost
from holdfast.model import LogPosition
from holdfast.storage.files import EPOCHS, STATE, durable_replace, join, read_file

WORDS: Final = 24
STATE_BYTES: Final = WORDS * 8
MAGIC_WORD: Final = int.from_bytes(b"HFSTATE\x01", "little")

READABLE: Final = 1
_SYNCED: Final = 2
_SYNCED_COPY: Final = 3
ASKED: Final = 4
_SIGNALLER: Final = 5
_MOUNT: Final = 6
_REMOVING: Final = 7
_SLOTS: Final = (8, 16)
_SLOT: Final = Struct("<QQQQ")


class Identity(msgspec.Struct, frozen=True, gc=False):
    """Which log this is, in which epoch, since which boot; `clean_end` is set if it was closed cleanly."""

    log_id: int
    epoch: int
    boot_id: int
    clean_end: int | None = None


class StateWords(Protocol):
    """The words of the file, by number."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


class WrittenWords:
    """The words of a file that must not be stored through a map: read through it, each stored with a write.

    Such a write may fail, most likely because the disk is full. Then the file keeps an older end, which is still true,
    and no caller is refused: the word is written together with the next one. `require_all` raises if words are missing.
    """

    def __init__(self, file: File) -> None:
        self._file = file
        self._seen = file.words(WORDS)
        self._missing: dict[int, int] = {}
        self._error: OSError | None = None

    def __getitem__(self, index: int) -> int:
        return self._seen[index]

    def __setitem__(self, index: int, value: int) -> None:
        missing = self._missing
        missing.pop(index, None)
        missing[index] = value  # after those stored earlier: the order of stores is part of the format
        try:
            while missing:
                first = next(iter(missing))
                write_fully(self._file, first * 8, [missing[first].to_bytes(8, "little")])
                del missing[first]
            self._error = None
        except OSError as error:
            self._error = error

    def require_all(self) -> None:
        """Raise the error that kept a word from being written, if there was one."""
        if self._error is not None:
            raise self._error

    def release(self) -> None:
        release_words(self._seen)


class LogState:
    """The state file. Only its owner stores words, except for `ask_for_signal`."""

    def __init__(self, file: File, *, mapped: bool = True) -> None:
        self._file = file
        self.mapped = mapped
        self.words: StateWords = file.words(WORDS) if mapped else WrittenWords(file)

    @staticmethod
    def create(disk: Disk, folder: str, identity: Identity, end: int) -> LogState:
        """Create the file; it is in place before anything is written to the log."""
        words = [0] * WORDS
        words[0], words[READABLE], words[_SYNCED], words[_SYNCED_COPY] = MAGIC_WORD, end, end, end
        words[_SLOTS[0] : _SLOTS[0] + 5] = _slot_words(1, identity)
        words[_SIGNALLER], words[_MOUNT] = 1, disk.mount_id(folder)
        durable_replace(disk, folder, STATE, b"".join(word.to_bytes(8, "little") for word in words))
        mapped = disk.can_map(folder)
        return LogState(disk.open(join(folder, STATE), write=True), mapped=mapped)

    @staticmethod
    def open(disk: Disk, folder: str, *, write: bool, mapped: bool | None = None) -> LogState | None:
        """Open the existing file; None if it is missing, too short or not a state file.

        `mapped` says whether its words may be stored through a map, if the caller knows.
        """
        path = join(folder, STATE)
        if not disk.exists(path):
            return None
        if mapped is None:
            mapped = not write or disk.can_map(folder)
        file = disk.open(path, write=write)
        if file.size() >= STATE_BYTES:
            state = LogState(file, mapped=mapped)
            if state.words[0] == MAGIC_WORD and state.identity is not None:
                return state
        file.close()
        return None

    @property
    def identity(self) -> Identity | None:
        """The identity in the newest valid slot."""
        slot = self._newest_slot()
        if slot is None:
            return None
        identity, boot_id, clean = self.words[slot + 1], self.words[slot + 2], self.words[slot + 3]
        return Identity(identity & 0xFFFFFFFF, identity >> 32, boot_id, clean - 1 if clean else None)

    @property
    def sequence(self) -> int:
        """Increases whenever the log gets another owner or another epoch."""
        return max(self.words[slot] for slot in _SLOTS)

    @property
    def readable_end(self) -> int:
        return self.words[READABLE]

    @property
    def synced_end(self) -> int:
        return min(self.words[_SYNCED], self.words[_SYNCED_COPY])

    def set_synced(self, end: int) -> None:
        self.words[_SYNCED] = end
        self.words[_SYNCED_COPY] = end

    @property
    def mount_id(self) -> int:
        """The mount that the last owner found the log on."""
        return self.words[_MOUNT]

    def set_mount(self, mount_id: int) -> None:
        """Store the mount; it becomes durable with the next identity."""
        self.words[_MOUNT] = mount_id

    @property
    def removing_end(self) -> int:
        """Offset after the segment that is about to be removed; 0 if there is none."""
        return self.words[_REMOVING]

    def set_removing(self, end: int) -> None:
        self.words[_REMOVING] = end

    def set_identity(self, identity: Identity) -> None:
        """Write the slot that is not in use and sync it, together with everything stored before."""
        current = self._newest_slot()
        sequence = 1 if current is None else self.words[current] + 1
        slot = _SLOTS[0] if current != _SLOTS[0] else _SLOTS[1]
        for i, word in enumerate(_slot_words(sequence, identity)):
            self.words[slot + i] = word
        self.words[_SIGNALLER] = sequence if identity.clean_end is None else 0
        self._require_written()
        self._file.sync()
        if self.words[ASKED]:
            self.give_signal()

    def ask_for_signal(self) -> bool:
        """For a reader: have the owner turn its next change into an event of this file. Look once more before sleeping.

        Returns False if nobody will answer: no owner, an older release, or the word could not be written.
        """
        self.words[ASKED] = 1
        try:
            self._require_written()
        except OSError:
            return False
        return self.words[_SIGNALLER] == self.sequence

    def give_signal(self) -> None:
        """Wake all readers that asked, with one event."""
        self.words[ASKED] = 0  # even if the write fails, so that it is not tried again for every message
        with contextlib.suppress(OSError):
            self._file.write(ASKED * 8, [bytes(8)])

    def close(self) -> None:
        release_words(self.words)
        with contextlib.suppress(OSError):  # what had to be on disk was synced earlier
            self._file.close()

    def _require_written(self) -> None:
        if isinstance(self.words, WrittenWords):
            self.words.require_all()

    def _newest_slot(self) -> int | None:
        valid = [slot for slot in _SLOTS if self._slot_is_valid(slot)]
        return max(valid, key=lambda slot: self.words[slot]) if valid else None

    def _slot_is_valid(self, slot: int) -> bool:
        stored = [self.words[slot + i] for i in range(5)]
        return stored[0] > 0 and stored[4] == _check(*stored[:4])


def release_words(words: object) -> None:
    """Release the map, if there is one."""
    release = getattr(words, "release", None)
    if release is not None:
        release()


def _slot_words(sequence: int, identity: Identity) -> list[int]:
    clean = 0 if identity.clean_end is None else identity.clean_end + 1
    words = [sequence, identity.epoch << 32 | identity.log_id, identity.boot_id, clean]
    return [*words, _check(*words)]


def _check(sequence: int, identity: int, boot_id: int, clean: int) -> int:
    return crc32c(_SLOT.pack(sequence, identity, boot_id, clean))


# The epoch table: the offset at which each owner began to write. It makes a lost tail noticeable.
#
#     at  size  field
#     0   8     magic     "HFEPOCH" and the version, 1
#     8   4     log_id
#     12  4     count
#     16  12*n  entries   epoch (4), first offset (8)
#     ..  4     check     CRC32C of all bytes before it
#
# The epoch increases at every opening after which messages may be missing, and at every truncation. A position (epoch,
# offset) is valid while the offset is not past the end of that epoch, which is where the next one begins. A frame of an
# older epoch at or past that offset is void: the entry is durable before the first byte of such a frame is destroyed,
# so
# the next opening finishes a truncation that was cut short.
_MAGIC: Final = b"HFEPOCH\x01"
_HEAD: Final = Struct("<8sII")
_ENTRY: Final = Struct("<IQ")
_CHECK: Final = Struct("<I")
assert _HEAD.size == 16  # keeps the table above and the code in step
assert _ENTRY.size == 12


class Epochs:
    """Epochs and their first offsets, both increasing."""

    def __init__(self, entries: list[tuple[int, int]] | None = None) -> None:
        self._entries = list(entries or [])

    @property
    def entries(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._entries)

    @property
    def last(self) -> int:
        """The highest epoch; 0 before the first."""
        return self._entries[-1][0] if self._entries else 0

    @property
    def last_first_offset(self) -> int:
        """Where the highest epoch begins; 0 before the first."""
        return self._entries[-1][1] if self._entries else 0

    def end_of(self, epoch: int) -> int | None:
        """Return the offset at which `epoch` ends; None if it is still current, or not known."""
        return next((first for later, first in self._entries if later > epoch), None)

    def cap(self, epoch: int, offset: int) -> int:
        """Limit a claim that `epoch` made about everything below `offset` to what is left of that epoch."""
        end = self.end_of(epoch)
        return offset if end is None else min(offset, end)

    def at(self, offset: int) -> int:
        """Return the epoch in which the message at `offset` was written; 0 before the first."""
        return max((epoch for epoch, first in self._entries if first <= offset), default=0)

    def check(self, position: LogPosition) -> None:
        """Raise TailLost if the position is past the end of its epoch."""
        end = self.end_of(position.epoch)
        if end is not None and position.offset > end:
            raise TailLost(
                f"position {position.offset} of epoch {position.epoch} is gone: that epoch ends at {end}, "
                f"what followed was truncated or lost in a power cut. Continue from {end}",
                epoch=position.epoch,
                offset=position.offset,
                epoch_end=end,
            )

    def begin(self, epoch: int, first_offset: int) -> Epochs:
        """Return a table in which `epoch` begins at the offset; epochs without any message are dropped."""
        kept = [(old, first) for old, first in self._entries if first < first_offset]
        return Epochs([*kept, (epoch, first_offset)])

    def save(self, disk: Disk, folder: str, log_id: int) -> None:
        content = _HEAD.pack(_MAGIC, log_id, len(self._entries)) + b"".join(_ENTRY.pack(*e) for e in self._entries)
        durable_replace(disk, folder, EPOCHS, content + _CHECK.pack(crc32c(content)))


NO_EPOCHS: Final = Epochs()


def load_epochs(disk: Disk, folder: str) -> tuple[int, Epochs] | None:
    """Return (log_id, table); None if the file is missing or damaged, in which case the frames have to tell."""
    return parse_epochs(read_file(disk, join(folder, EPOCHS)) or b"")


def parse_epochs(content: bytes) -> tuple[int, Epochs] | None:
    """Parse the bytes of the epoch table, as in `load_epochs`; accepts any bytes."""
    if len(content) < _HEAD.size + _CHECK.size:
        return None
    magic, log_id, count = _HEAD.unpack_from(content)
    if magic != _MAGIC or len(content) != _HEAD.size + count * _ENTRY.size + _CHECK.size:
        return None
    if _CHECK.unpack_from(content, len(content) - _CHECK.size)[0] != crc32c(content[: -_CHECK.size]):
        return None
    return log_id, Epochs(list(_ENTRY.iter_unpack(content[_HEAD.size : -_CHECK.size])))
