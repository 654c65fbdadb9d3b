"""Runs, immutable files of delayed messages sorted by due time, and the manifest that names the current ones."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from struct import Struct
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta
from pyroaring import BitMap64

from holdfast.checksum import crc32c
from holdfast.codec.frame import HEADER_BYTES, Frame, FrameHeader, Kind, frame_bytes, read_frame, read_header
from holdfast.env import World
from holdfast.env.disk import Disk, File
from holdfast.env.process import get_logger
from holdfast.errors import ChecksumMismatch, CorruptData, UnknownFormat
from holdfast.large import LARGE_BYTES
from holdfast.later import pattern
from holdfast.model import Record
from holdfast.settings import check_fields
from holdfast.storage.files import durable_replace, join, ran_out, read_file, shortage
from holdfast.storage.frames import FrameRules, first_log_id, walk

NAME: Final = "manifest"
_MAGIC_PREFIX: Final = b"HFDELAY"
_MAGIC: Final = _MAGIC_PREFIX + b"\x01"
_CHECK: Final = Struct("<I")


class RunEntry(msgspec.Struct, frozen=True):
    """A run, as the manifest lists it."""

    name: str
    run_id: int
    messages: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the store at one moment; `gone` is a serialized bitmap."""

    accounted: int = 0
    spilled_below: int = 0
    next_number: int = 0
    runs: list[RunEntry] = []
    gone: bytes = b""

    def gone_ids(self) -> BitMap64:
        return BitMap64.deserialize(self.gone) if self.gone else BitMap64()


def save_manifest(disk: Disk, folder: str, manifest: Manifest) -> None:
    content = _MAGIC + msgspec.msgpack.encode(manifest)
    durable_replace(disk, folder, NAME, content + _CHECK.pack(crc32c(content)))


def load_manifest(disk: Disk, folder: str) -> Manifest | None:
    """Return the manifest, or None if there is none; raises CorruptData if it is not what was written."""
    content = read_file(disk, join(folder, NAME))
    if content is None:
        return None
    whole = len(content) >= len(_MAGIC) + _CHECK.size
    if not whole or _CHECK.unpack(content[-_CHECK.size :])[0] != crc32c(content[: -_CHECK.size]):
        raise ChecksumMismatch(f"{join(folder, NAME)}, the manifest of delayed messages, does not match its checksum")
    if content[: len(_MAGIC)] != _MAGIC:
        if content.startswith(_MAGIC_PREFIX):
            raise UnknownFormat(f"{join(folder, NAME)} was written by a newer release; upgrade to read it")
        raise CorruptData(f"{join(folder, NAME)} is not a manifest of delayed messages")
    try:
        return msgspec.msgpack.decode(content[len(_MAGIC) : -_CHECK.size], type=Manifest)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"{join(folder, NAME)}, the manifest of delayed messages, cannot be read: {error}") from error


# Opening the store: load the runs that the manifest names, and remove the files that it does not.
#
# If the manifest itself is damaged, nothing is removed: every run is loaded, a message that is both in a run and in
# the intake counts once, and the caller has to look for releases in the partition's whole log.


logger = get_logger(__name__)

_RUN: Final = pattern(r"\d{20}-(\d{10})\.run")


class LoadedManifest(msgspec.Struct):
    """What opening found in the folder."""

    manifest: Manifest
    runs: list[DelayedRun] = []
    damage: list[str] = []


def load(world: World, folder: str, *, intake_is_new: bool) -> LoadedManifest:
    """Load the manifest and its runs. The caller owns the folder."""
    disk = world.disk
    # The last owner may have died before the name of its last manifest was durable. Sync it before removing files:
    # a power cut could otherwise bring back the previous manifest, which needs them.
    disk.sync_folder(folder)
    names = disk.names(folder)
    run_names = [name for name in names if _RUN.fullmatch(name)]
    loaded = LoadedManifest(Manifest())
    try:
        manifest = load_manifest(disk, folder)
        damaged = "" if manifest or (intake_is_new and not run_names) else f"{join(folder, NAME)} is missing"
    except UnknownFormat:
        raise
    except CorruptData as error:
        manifest, damaged = None, str(error)
        _set_aside(disk, folder, NAME)
    if damaged:
        _note(loaded, folder, f"{damaged}; it was rebuilt from {len(run_names)} files. Cancellations may be lost")
        number = max((int(match[1]) for name in run_names if (match := _RUN.fullmatch(name))), default=-1) + 1
        manifest = Manifest(next_number=number, runs=[RunEntry(name, 0, 0) for name in run_names])
    else:
        named = {entry.name for entry in manifest.runs} if manifest else set()
        for name in names:
            if name.endswith(".tmp") or (_RUN.fullmatch(name) and name not in named):
                disk.remove(join(folder, name))
    if manifest is None:
        manifest = Manifest()
        save_manifest(disk, folder, manifest)
    loaded.manifest = manifest
    for entry in manifest.runs:
        _load_run(disk, folder, entry, loaded)
    return loaded


def _load_run(disk: Disk, folder: str, entry: RunEntry, loaded: LoadedManifest) -> None:
    try:
        run = open_run(disk, folder, entry.name, entry.run_id or None)
    except UnknownFormat:
        raise
    except FileNotFoundError:
        _note(loaded, folder, f"{join(folder, entry.name)} is missing: {entry.messages} delayed messages are lost")
        return
    except CorruptData as error:
        _note(loaded, folder, f"{error}: {entry.messages} delayed messages are lost; the file is kept")
        _set_aside(disk, folder, entry.name)
        return
    if run.messages < entry.messages:
        lost = entry.messages - run.messages
        _note(loaded, folder, f"{run.path} is damaged: {lost} of its {entry.messages} delayed messages are lost")
        run.keep_file = True
    loaded.runs.append(run)


def _set_aside(disk: Disk, folder: str, name: str) -> None:
    """Move a damaged file out of the way without deleting it: a person may want to look at it."""
    disk.rename(join(folder, name), join(folder, name + ".damaged"))
    disk.sync_folder(folder)


def _note(loaded: LoadedManifest, folder: str, what: str) -> None:
    loaded.damage.append(what)
    logger.error("damage among the delayed messages", extra={"folder": folder, "what": what})


class DelaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many messages wait in memory, and how often the state is saved."""

    spill_messages: Annotated[int, Meta(ge=1, le=10_000_000)] = 50_000
    save_ms: Annotated[int, Meta(ge=1, le=3_600_000)] = 5_000

    def __post_init__(self) -> None:
        check_fields(self)


# A run: an immutable file of delayed messages, sorted by (due time, id), in blocks of a few hundred.
#
#     part      contents
#     block     a control frame with one value (the due times, then the ids, as int64), followed by a data frame
#               with the messages themselves; repeated
#     footer    a journal frame with two values: the table of blocks (due time of the first message and position
#               of the block, as int64 pairs) and the bitmap of all ids
#     trailer   32 bytes, see below
#
#     at   size  field of the trailer
#     0    8     magic             "HFDRUN" and the version as two digits, "01"
#     8    8     footer_position
#     16   8     footer_bytes
#     24   4     run_id            the log id of the frames: a random number of this run
#     28   4     check             CRC32C of bytes 0..27
#
# Frames are those of a log, each with its checksums; their offsets count all values in the file. Footer and trailer
# are caches: if they are damaged, they are rebuilt from the blocks.


TRAILER_MAGIC: Final = b"HFDRUN01"
TRAILER_CHECKED: Final = Struct("<8sQQI")
_TRAILER: Final = Struct("<8sQQII")
TRAILER_BYTES: Final = _TRAILER.size
assert TRAILER_BYTES == 32  # keeps the table above and the code in step

# Lengths in frames have 32 bits. No tighter limit is needed: only the owner that wrote a run reads it.
_MOST_RAW_BYTES: Final = 2**32 - 1

NEVER_MS: Final = 2**63

# Where a message waits: its due time, id, run (None: the intake), and block and index in the run.
Entry: TypeAlias = "tuple[int, int, DelayedRun | None, int, int]"


class DelayedRun:
    """The read side of a run. Only the ids and the table of blocks stay in memory, not the messages."""

    __slots__ = (
        "_at",
        "_cached",
        "_disk",
        "_head",
        "_positions",
        "damaged",
        "first_dues_ms",
        "ids",
        "keep_file",
        "name",
        "path",
        "run_id",
    )

    def __init__(self, disk: Disk, folder: str, name: str, run_id: int, table: array[int], ids: BitMap64) -> None:
        self._disk = disk
        self.name = name
        self.path = join(folder, name)
        self.run_id = run_id
        self.ids = ids
        self.first_dues_ms = table[::2]
        self._positions = table[1::2]
        self._head, self._at = 0, 0  # block and index of the first message that may be live
        self._cached: tuple[int, array[int], array[int]] | None = None
        self.damaged: dict[int, str] = {}  # blocks that cannot be read, and why
        self.keep_file = False  # set for a damaged file, which a person may want to look at

    @property
    def messages(self) -> int:
        return len(self.ids)

    def not_before_ms(self) -> int:
        """Return a time before which no live message is due."""
        return self.first_dues_ms[self._head] if self._head < len(self.first_dues_ms) else NEVER_MS

    def first(self, gone: BitMap64) -> tuple[int, int] | None:
        """Return due time and id of the first message that is not gone."""
        while self._head < len(self.first_dues_ms):
            dues_ms, ids = self._index(self._head)
            at = self._at
            while at < len(ids) and ids[at] in gone:
                at += 1
            self._at = at
            if at < len(ids):
                return dues_ms[at], ids[at]
            self._head, self._at = self._head + 1, 0
        return None

    def entries(
        self, gone: BitMap64, *, after: tuple[int, int] | None = None, until_ms: int | None = None
    ) -> Iterator[Entry]:
        """Yield the messages that are not gone, in order, after a place and due by a time."""
        start = self._head
        if after is not None:
            start = max(start, bisect_left(self.first_dues_ms, after[0]) - 1)
        for block in range(start, len(self.first_dues_ms)):
            if until_ms is not None and self.first_dues_ms[block] > until_ms:
                return
            dues_ms, ids = self._index(block)
            for i in range(self._at if block == self._head else 0, len(ids)):
                due_at_ms, message_id = dues_ms[i], ids[i]
                if until_ms is not None and due_at_ms > until_ms:
                    return
                if message_id not in gone and (after is None or (due_at_ms, message_id) > after):
                    yield due_at_ms, message_id, self, block, i

    def find(self, message_id: int) -> Entry | None:
        """Return where the message is; None if its block cannot be read."""
        for block in range(len(self.first_dues_ms)):
            dues_ms, ids = self._index(block)
            if message_id in ids:
                i = ids.index(message_id)
                return dues_ms[i], message_id, self, block, i
        return None

    def records(self, block: int) -> list[Record]:
        """Return the messages of a block, with their ids as offsets; raises CorruptData if it cannot be read."""
        try:
            with self._opened() as file:
                index = self._frame(file, self._positions[block])
                return _with_ids(block_index(index)[1], self._frame(file, index.header.end))
        except CorruptData as error:
            self._mark_damaged(block, error)
            raise

    def blocks(self) -> Iterator[list[Record]]:
        """Yield the messages block by block, without damaged ones. The file may be unlinked meanwhile."""
        file = self._disk.open(self.path)
        try:
            for block, position in enumerate(self._positions):
                try:
                    index = self._frame(file, position)
                    yield _with_ids(block_index(index)[1], self._frame(file, index.header.end))
                except CorruptData as error:
                    self._mark_damaged(block, error)
        finally:
            file.close()

    def _index(self, block: int) -> tuple[array[int], array[int]]:
        """Return due times and ids of a block; nothing if it is damaged."""
        if self._cached is not None and self._cached[0] == block:
            return self._cached[1:]
        if block in self.damaged:
            return array("q"), array("q")
        try:
            with self._opened() as file:
                dues_ms, ids = block_index(self._frame(file, self._positions[block]))
        except CorruptData as error:
            self._mark_damaged(block, error)
            return array("q"), array("q")
        self._cached = (block, dues_ms, ids)
        return dues_ms, ids

    def _frame(self, file: File, position: int) -> Frame:
        header_bytes = memoryview(file.read(position, HEADER_BYTES))
        header = read_header(header_bytes, 0, position)
        if header.log_id != self.run_id:
            raise CorruptData(f"the frame at position {position} belongs to another file")
        length = frame_bytes(header.body_bytes)
        large = length > LARGE_BYTES
        content = file.view(position, length) if large else memoryview(file.read(position, length))
        return read_frame(content, 0, position, max_raw_bytes=_MOST_RAW_BYTES)

    @contextmanager
    def _opened(self) -> Iterator[File]:
        """Open the file for a short time. An unreadable part must not hold up all the others."""
        try:
            file = self._disk.open(self.path)
            try:
                yield file
            finally:
                file.close()
        except OSError as error:
            if ran_out(error):  # a shortage of resources, not damage: the messages can be read later
                raise shortage(f"cannot read {self.path}", error, "Nothing was changed") from error
            raise CorruptData(f"{self.path} cannot be read: {error.strerror or error}") from error

    def _mark_damaged(self, block: int, error: CorruptData) -> None:
        if self._cached is not None and self._cached[0] == block:
            self._cached = None
        self.damaged[block] = str(error)
        logger.error(
            "delayed messages cannot be read; their file is kept",
            extra={"file": self.path, "due_from_ms": self.first_dues_ms[block], "why": str(error)},
        )


def block_index(frame: Frame) -> tuple[array[int], array[int]]:
    """Decode due times and ids from the first frame of a block."""
    both = array("q", frame.values()[0])
    return both[: len(both) // 2], both[len(both) // 2 :]


def _with_ids(ids: array[int], frame: Frame) -> list[Record]:
    """Decode the second frame of a block as `Frame.records` does, but with the ids as offsets."""
    columns = frame.columns()
    if frame.count != len(ids):
        raise CorruptData(f"a block has {len(ids)} ids for {frame.count} messages")
    return list(
        map(
            Record,
            ids,
            columns.times_ns() or repeat(frame.header.max_time_ns),
            frame.stored_values(),
            columns.keys() or repeat(None),
            columns.headers() or repeat(()),
            columns.priorities() or repeat(0),
            columns.expires_at_ms() or repeat(0),
            columns.due_at_ms() or repeat(0),
            columns.flags() or repeat(0),
        )
    )


def open_run(disk: Disk, folder: str, name: str, run_id: int | None = None) -> DelayedRun:
    """Open a run by its footer, or by its blocks if the footer is damaged."""
    file = disk.open(join(folder, name))
    try:
        try:
            return _by_footer(disk, folder, name, file)
        except UnknownFormat:
            raise
        except CorruptData as error:
            logger.warning("footer rebuilt", extra={"file": join(folder, name), "why": str(error)})
            return _by_blocks(disk, folder, name, file.view(0, file.size()), run_id)
    finally:
        file.close()


def _by_footer(disk: Disk, folder: str, name: str, file: File) -> DelayedRun:
    size = file.size()
    trailer = file.read(max(0, size - TRAILER_BYTES), TRAILER_BYTES)
    if len(trailer) < TRAILER_BYTES:
        raise CorruptData("the file ends before its trailer")
    magic, position, length, run_id, check = _TRAILER.unpack(trailer)
    if crc32c(trailer[:-4]) != check or magic != TRAILER_MAGIC:
        raise CorruptData("the trailer does not match its checksum")
    frame = read_frame(memoryview(file.read(position, length)), 0, position, max_raw_bytes=_MOST_RAW_BYTES)
    if frame.header.log_id != run_id or frame.header.kind != Kind.JOURNAL:
        raise CorruptData("the footer belongs to another file")
    table, ids = frame.values()
    return DelayedRun(disk, folder, name, run_id, array("q", table), BitMap64.deserialize(ids))


def _by_blocks(disk: Disk, folder: str, name: str, data: memoryview, run_id: int | None) -> DelayedRun:
    run_id = run_id if run_id is not None else first_log_id(data)
    if run_id is None:
        raise CorruptData(f"{join(folder, name)} holds nothing that can be read")
    table, ids = array("q"), BitMap64()
    for found in walk(data, FrameRules(run_id, 0)):
        if isinstance(found, FrameHeader) and found.kind == Kind.CONTROL:
            dues_ms, of_block = block_index(
                read_frame(data, found.position, found.position, max_raw_bytes=_MOST_RAW_BYTES)
            )
            table.extend((dues_ms[0], found.position))
            ids.update(of_block.tolist())
    if not table:
        raise CorruptData(f"{join(folder, name)} holds nothing that can be read")
    return DelayedRun(disk, folder, name, run_id, table, ids)
