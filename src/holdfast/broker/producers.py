"""Idempotent producers: their ids and epochs, and what each has written, so that a batch sent again is stored once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from holdfast.broker.folder.layout import check_name
from holdfast.checksum import crc32c
from holdfast.codec.encode import producer_field
from holdfast.env import World
from holdfast.env.disk import Disk
from holdfast.env.process import get_logger
from holdfast.errors import (
    ChecksumMismatch,
    CorruptData,
    Fenced,
    HoldfastError,
    InvalidRequest,
    OutOfSequence,
    TailLost,
    UnknownFormat,
)
from holdfast.model import Durability, LogPosition, Producer
from holdfast.storage.files import durable_replace, join, open_error, read_file

if TYPE_CHECKING:
    from holdfast.storage.log import Log

# The named producers: the file `producers` in the data folder.
#
#     at   size  field
#     0    8     magic    "HFNAMES" and the version, 1
#     8    n     body     MessagePack: name -> (id, epoch, since)
#     ..   4     check    CRC32C of all bytes before it

NAME: Final = "producers"  # also of the snapshot beside a partition's log
MOST_NAMES: Final = 10_000
_MAGIC: Final = b"HFNAMES\x01"
_CHECK: Final = Struct("<I")


class ProducerId(msgspec.Struct, frozen=True, array_like=True):
    """A producer's identity. `since` is the epoch in which its sequences began at 0: older if it resumes."""

    id: int
    epoch: int
    since: int = 0


class Producers:
    """The named producers of a data folder. Thread-safe."""

    def __init__(self, world: World, root: str, names: dict[str, ProducerId]) -> None:
        self._world = world
        self._root = root
        self._lock = threading.Lock()
        self.on_first: Callable[[], None] = lambda: None  # called after the file was created
        self._names = names
        self._epochs = {producer.id: producer.epoch for producer in names.values()}
        self._by_id = {producer.id: name for name, producer in names.items()}

    @staticmethod
    def open(world: World, root: str) -> Producers:
        """Read the folder's named producers; none if there is no file yet. Raises CorruptData."""
        path = join(root, NAME)
        try:
            content = read_file(world.disk, path)
        except OSError as error:
            raise open_error(path, error) from error
        return Producers(world, root, {} if content is None else _decode(path, content))

    def init(self, name: str | None = None, *, resume: bool = False) -> ProducerId:
        """Register a producer with a new epoch of its name, durably; without a name, just a new id.

        With `resume`, its sequences continue those of the previous epoch. Raises InvalidRequest if there are too many.
        """
        if name is None:
            return ProducerId(self._random_id(), 0)
        check_name(name, "producer")
        with self._lock:
            last = self._names.get(name)
            if last is None:
                producer = ProducerId(self._random_id(), 0)
                if len(self._names) >= MOST_NAMES:
                    raise InvalidRequest(
                        f"{self._root} already has {MOST_NAMES} named producers, which is the limit; use fewer names, "
                        "or leave the name out for producers that need not resume after a restart"
                    )
            else:
                producer = ProducerId(last.id, last.epoch + 1, last.since if resume else last.epoch + 1)
            self._keep({**self._names, name: producer})
            return producer

    def adopt(self, name: str, producer: ProducerId) -> None:
        """Know a producer that was registered in another folder, so that earlier ones of its name are fenced here."""
        check_name(name, "producer")
        with self._lock:
            known = self._names.get(name)
            if known is None or known.id != producer.id or known.epoch < producer.epoch:
                self._keep({**self._names, name: producer})

    def forget(self, name: str) -> bool:
        """Forget a name: a later producer of this name gets a new id. False if it is unknown."""
        with self._lock:
            if name not in self._names:
                return False
            self._keep({other: producer for other, producer in self._names.items() if other != name})
            return True

    def names(self) -> dict[str, ProducerId]:
        return dict(self._names)

    def name_of(self, producer_id: int) -> str | None:
        """The name of a producer, or None."""
        return self._by_id.get(producer_id)

    def check(self, producer_id: int, epoch: int) -> None:
        """Raise Fenced if a newer producer of the same name was registered."""
        newest = self._epochs.get(producer_id, epoch)
        if newest != epoch:
            raise Fenced(
                f"producer {producer_id} with epoch {epoch} is fenced: epoch {newest} of the same name has begun. "
                "What was not yet stored was dropped; only the newest producer of a name may continue: end this one"
            )

    def _keep(self, names: dict[str, ProducerId]) -> None:
        try:
            durable_replace(self._world.disk, self._root, NAME, _with_check(_MAGIC + msgspec.msgpack.encode(names)))
        except OSError as error:
            raise open_error(join(self._root, NAME), error) from error
        if not self._names:
            self.on_first()
        self._names = names
        self._epochs = {producer.id: producer.epoch for producer in names.values()}
        self._by_id = {producer.id: name for name, producer in names.items()}

    def _random_id(self) -> int:
        high, low = self._world.ids.random_u32(), self._world.ids.random_u32()
        return (high << 32 | low) & (2**63 - 1)


def _with_check(content: bytes) -> bytes:
    return content + _CHECK.pack(crc32c(content))


def _is_whole(content: bytes) -> bool:
    """Whether a file has a magic and matches the checksum at its end."""
    end = len(content) - _CHECK.size
    return end >= len(_MAGIC) and content[end:] == _CHECK.pack(crc32c(content[:end]))


def _decode(path: str, content: bytes) -> dict[str, ProducerId]:
    if not _is_whole(content):
        raise ChecksumMismatch(
            f"{path} does not match its checksum, so the named producers are unknown. Restore it from a backup; or "
            "move it away to start without it: then a producer that resumes may store messages a second time"
        )
    if content[: len(_MAGIC)] != _MAGIC:
        raise UnknownFormat(f"{path} is not a list of named producers that this release can read; upgrade to read it")
    try:
        return msgspec.msgpack.decode(content[len(_MAGIC) : -_CHECK.size], type=dict[str, ProducerId])
    except msgspec.MsgspecError as error:
        raise CorruptData(f"{path} cannot be read: {error}. Restore it from a backup") from error


# Sequences: what each producer has written to one partition.
#
# A producer numbers its messages from 0 on, separately for each partition, and sends them in order. The partition
# accepts the next number, recognizes earlier ones, and refuses a gap:
#
#     an older epoch                        Fenced: a newer producer of that name has taken over
#     the next sequence                     new: written to the log, then recorded
#     only earlier sequences                known: answered with the offsets of the first time
#     anything else                         OutOfSequence
#     a newer epoch                         starts at 0, or continues where the last one ended
#
# Sequences have 32 bits and wrap around. The frames of the log contain all of this, so it can be rebuilt from them; a
# snapshot in the file `producers` beside the log saves reading all of the log.


logger = get_logger(__name__)

IDLE_MS: Final = 7 * 24 * 3600 * 1000
MOST_PRODUCERS: Final = 10_000
_MOST_RUNS: Final = 16
_NUMBERS: Final = 2**32
_MOST_BEHIND: Final = 2**31 - 1  # beyond that, earlier and later sequences cannot be told apart
_SAVE_EVERY_MS: Final = 3_600_000
_SAVE_EVERY: Final = 1_000_000


class KnownBatch(msgspec.Struct, frozen=True):
    """Messages that the partition already has; without offsets if they were written too long ago."""

    offsets: Sequence[int]


class Sequences:
    """What producers have written to one partition.

    A publisher holds `lock` around `check`, the write and `record`. At most `most` producers are kept, and none that
    has been idle for `idle_ms`; one that returns after that must begin with a new epoch.
    """

    def __init__(self, world: World, folder: str, log: Log, *, idle_ms: int, most: int) -> None:
        self._world = world
        self._folder = folder
        self._log, self._writer = log, log.writer
        self._idle_ms = idle_ms
        self._most = most
        self._entries: dict[int, ProducerEntry] = {}  # by id; the one that wrote last comes last
        self._epoch = log.epoch
        self._unsure_from: int | None = None  # end of the log before a write that may not have been recorded
        self._saved_ms = self._mono_ms()
        self._changed = False
        self.lock = threading.Lock()
        self._save_lock = threading.Lock()
        self.covered = LogPosition(log.epoch, 0)

    @staticmethod
    def open(world: World, folder: str, log: Log, *, idle_ms: int = IDLE_MS, most: int = MOST_PRODUCERS) -> Sequences:
        """Load the snapshot in the partition's folder and read the log after it; without one, read all of the log.

        The log is pinned at the snapshot's position until the next save.
        """
        sequences = Sequences(world, folder, log, idle_ms=idle_ms, most=most)
        try:
            snapshot = load_snapshot(world.disk, folder, log.log_id)
        except UnknownFormat:
            raise
        except CorruptData as error:
            logger.warning("producers are read from the log", extra={"folder": folder, "error": str(error)})
            snapshot = None
        except OSError as error:
            raise open_error(folder, error) from error
        with sequences.lock:
            sequences._rebuild(snapshot)
        if snapshot is None:  # with a file, the next opening of the partition pins the log for it
            sequences._save_if_possible()
        return sequences

    def __len__(self) -> int:
        return len(self._entries)

    def check(self, producer: Producer, count: int) -> KnownBatch | None:
        """Check a batch: returns None if it is new (write it, then call `record`), or the known batch.

        The caller holds the lock until `record`, or until the write has failed. Raises Fenced, OutOfSequence or
        InvalidRequest.
        """
        if not 0 < producer.id < 2**64 or not 0 <= producer.epoch < _NUMBERS or not 0 < count <= _MOST_BEHIND:
            raise InvalidRequest(f"{count} messages of {producer} cannot be checked: the numbers are out of range")
        if self._unsure_from is not None or self._writer.epoch != self._epoch:
            self._catch_up()
        first = producer.first_sequence
        entry = self._entries.get(producer.id)
        if entry is None or producer.epoch > entry.epoch:
            expected = 0 if entry is None else entry.next_sequence
            if first not in (0, expected):
                raise _gap(producer, expected, known=entry is not None)
        elif producer.epoch < entry.epoch:
            raise Fenced(
                f"producer {producer.id} with epoch {producer.epoch} is fenced: epoch {entry.epoch} has written since. "
                "Nothing of this batch was kept; only the newest producer of a name may continue: end this one"
            )
        elif first != entry.next_sequence:
            return _known(entry, producer, count)
        self._unsure_from = self._writer.end
        return None

    def record(self, producer: Producer, count: int, offset: int) -> None:
        """Record messages that were written to the log from this offset on."""
        self._note(producer, count, offset, self._world.clock.now_ns() // 1_000_000)
        self._unsure_from = None

    def append_one(self, value: bytes, producer: Producer, chosen: Durability) -> int:
        """Write and record one plain value; returns its offset, or -1 if it is known or only a batch can hold it."""
        with self.lock:
            if self.check(producer, 1) is not None:
                return -1
            offset = self._log.write_alone(value, chosen, producer=producer_field(producer))
            if offset >= 0:
                self.record(producer, 1, offset)
            return offset

    def next_sequence(self, producer_id: int, since: int = 0) -> int:
        """The sequence of the producer's next message: the number of messages written so far, modulo 2**32.

        Messages from before the epoch `since` do not count, because its sequences started at 0 again.
        """
        with self.lock:
            self._catch_up()
            entry = self._entries.get(producer_id)
            return 0 if entry is None or entry.epoch < since else entry.next_sequence

    def offsets(self, producer_id: int, first: int, count: int) -> list[int | None]:
        """The offsets of a producer's messages; None for those no longer known."""
        found: list[int | None] = [None] * count
        with self.lock:
            entry = self._entries.get(producer_id)
            for run_first, run_count, run_offset in () if entry is None else entry.runs:
                # The start of the run relative to `first`, maybe negative; sequences wrap around.
                begin = (run_first - first + _NUMBERS // 2) % _NUMBERS - _NUMBERS // 2
                for i in range(max(begin, 0), min(begin + run_count, count)):
                    found[i] = run_offset + i - begin
        return found

    def tick(self) -> None:
        """Save if the last time was long ago, or much was written since."""
        due = self._mono_ms() - self._saved_ms > _SAVE_EVERY_MS
        if self._changed and (due or self._log.written_end - self.covered.offset > _SAVE_EVERY):
            self._save_if_possible()

    def save(self) -> None:
        """Write a snapshot, and let the log be trimmed up to it."""
        with self._save_lock:
            with self.lock:
                self._catch_up()
                self._forget_idle()
                position = LogPosition(self._log.epoch, self._log.written_end)
                entries = {producer: entry.copy() for producer, entry in self._entries.items()}
                self._changed = False
            self._saved_ms = self._mono_ms()
            # The log first: a snapshot must not contain messages that a power cut could remove.
            self._log.sync()
            try:
                save_snapshot(self._world.disk, self._folder, ProducersSnapshot(self._log.log_id, position, entries))
            except OSError as error:
                self._changed = True
                raise open_error(self._folder, error) from error
            self.covered = position
            self._log.pin("producers", position.offset)

    def close(self) -> None:
        """Save if anything has changed. Call this before the log is closed."""
        if self._changed and self._log.usable:
            self._save_if_possible()

    def _save_if_possible(self) -> None:
        """Save, and only log a failure: the snapshot just saves reading the log next time."""
        try:
            self.save()
        except HoldfastError as error:
            logger.warning("producers not saved", extra={"folder": self._folder, "error": str(error)})

    def _rebuild(self, snapshot: ProducersSnapshot | None) -> None:
        """Start from the snapshot, as far as the log still matches it, and read the rest of the log."""
        log = self._log
        start, kept_below = log.start, 0
        self._entries = {}
        if snapshot is not None:
            kept_below = self._believed_end(snapshot.position)
            # Producers that wrote after the point where the log lost its tail are read again from what is left.
            self._entries = {key: entry for key, entry in snapshot.entries.items() if entry.last_offset < kept_below}
            if kept_below == snapshot.position.offset:
                start = max(start, kept_below)
        self._epoch = log.epoch
        self._unsure_from = None
        self._read(start, frozenset(self._entries), kept_below)
        self._entries = dict(sorted(self._entries.items(), key=lambda pair: pair[1].last_ms))
        self._forget_idle()
        self.covered = LogPosition(log.epoch, start)
        log.pin("producers", start)

    def _believed_end(self, position: LogPosition) -> int:
        """The offset up to which the log is unchanged since that position."""
        try:
            self._log.check_position(position)
        except TailLost as lost:
            return lost.epoch_end
        return min(position.offset, self._log.written_end)

    def _catch_up(self) -> None:
        """Read from the log what an interrupted write has stored, or what a truncation has left."""
        log = self._log
        if log.epoch != self._epoch:
            log.sync()  # unsynced frames cannot be read
            self._rebuild(ProducersSnapshot(log.log_id, LogPosition(self._epoch, 2**63), self._entries))
            self._changed = True
        elif self._unsure_from is not None:
            if log.written_end > self._unsure_from:
                log.sync()
                self._read(self._unsure_from)
            self._unsure_from = None

    def _read(self, start: int, kept: frozenset[int] = frozenset(), kept_below: int = 0) -> None:
        """Note the producers of the frames from `start` on; for the `kept` ones, only from `kept_below` on."""
        for frame in self._log.read(start, on_damage="skip"):
            header = frame.header
            offset = header.base_offset
            if header.producer_id and offset >= start and (offset >= kept_below or header.producer_id not in kept):
                producer = Producer(header.producer_id, header.producer_epoch, header.first_sequence)
                self._note(producer, header.count, offset, header.max_time_ns // 1_000_000)

    def _note(self, producer: Producer, count: int, offset: int, now_ms: int) -> None:
        entry = self._entries.pop(producer.id, None)
        first = producer.first_sequence
        if entry is None:
            # Sequences begin at 0, so earlier messages were written even if the log no longer has them.
            entry = ProducerEntry(producer.epoch, first, first)
        elif producer.epoch > entry.epoch and first != entry.next_sequence:
            entry = ProducerEntry(producer.epoch, first, 0)
        entry.epoch = producer.epoch
        entry.add(first, count, offset, most_runs=_MOST_RUNS, most_behind=_MOST_BEHIND)
        entry.last_ms = now_ms
        self._entries[producer.id] = entry
        self._changed = True
        if len(self._entries) > self._most:
            del self._entries[next(iter(self._entries))]

    def _forget_idle(self) -> None:
        after_ms = self._world.clock.now_ns() // 1_000_000 - self._idle_ms
        idle = [producer for producer, entry in self._entries.items() if entry.last_ms <= after_ms]
        for producer in idle:
            del self._entries[producer]
        for producer in list(self._entries)[: max(len(self._entries) - self._most, 0)]:
            del self._entries[producer]

    def _mono_ms(self) -> int:
        return self._world.clock.monotonic_ns() // 1_000_000


def _known(entry: ProducerEntry, producer: Producer, count: int) -> KnownBatch:
    """The known batch for messages that are not next. Raises OutOfSequence if some of them are not stored."""
    behind = (entry.next_sequence - producer.first_sequence) % _NUMBERS
    if behind > entry.written:
        raise _gap(producer, entry.next_sequence)
    if count > behind:
        raise OutOfSequence(
            f"{count} messages from sequence {producer.first_sequence} on of producer {producer.id} are partly "
            f"stored: the first {behind} are stored, the others are not. Nothing of this batch was kept; send those "
            "from "
            f"sequence {entry.next_sequence} on as a separate batch",
            expected=entry.next_sequence,
            given=producer.first_sequence,
        )
    return KnownBatch(_offsets(entry.runs, producer.first_sequence, count))


def _offsets(runs: list[Run], first: int, count: int) -> Sequence[int]:
    offsets: list[int] = []
    for run_first, run_count, run_offset in runs:
        within = (first + len(offsets) - run_first) % _NUMBERS
        if within < run_count:
            taken = min(count - len(offsets), run_count - within)
            offsets += range(run_offset + within, run_offset + within + taken)
            if len(offsets) == count:
                return offsets
    return ()


def _gap(producer: Producer, expected: int, *, known: bool = True) -> OutOfSequence:
    why = "some in between are missing" if known else "the partition does not know this producer"
    return OutOfSequence(
        f"producer {producer.id} sent sequence {producer.first_sequence}, but {expected} was expected: {why}. Nothing "
        "of "
        f"this batch was kept; continue from sequence {expected}" + ("" if known else ", with a new epoch"),
        expected=expected,
        given=producer.first_sequence,
        known=known,
    )


# The snapshot of the sequences: the file `producers` beside a partition's log.
#
#     at   size  field
#     0    8     magic    "HFPRODS" and the version, 1
#     8    n     body     MessagePack: log id, then the epoch and offset of the log that it covers, entries
#     ..   4     check    CRC32C of all bytes before it
#
# An entry is a row: producer id, epoch, next sequence, number of messages before it known to be stored, time of the
# last write in ms, runs. A run is a row as well: first sequence, count, first offset.


_MAGIC_SEQUENCES: Final = b"HFPRODS\x01"
assert len(_MAGIC_SEQUENCES) == len(_MAGIC) == 8  # as the table above and `_is_whole` say


Run: TypeAlias = tuple[int, int, int]  # first sequence, count, first offset
_Row: TypeAlias = tuple[int, int, int, int, int, list[Run]]


class ProducerEntry:
    """What one producer has written: its epoch, its next sequence, and where its last messages are.

    `runs` are messages consecutive both in sequence and in offset, oldest run first.
    """

    __slots__ = ("epoch", "last_ms", "next_sequence", "runs", "written")

    def __init__(self, epoch: int, next_sequence: int, written: int, last_ms: int = 0) -> None:
        self.epoch = epoch
        self.next_sequence = next_sequence
        self.written = written
        self.last_ms = last_ms
        self.runs: list[Run] = []

    @property
    def last_offset(self) -> int:
        """Offset of the last known message; -1 if there is none."""
        if not self.runs:
            return -1
        _, count, offset = self.runs[-1]
        return offset + count - 1

    def add(self, first: int, count: int, offset: int, *, most_runs: int, most_behind: int) -> None:
        """Add messages that were written; if they continue the last run, it grows."""
        runs = self.runs
        joined = False
        if runs:
            last_first, last_count, last_offset = runs[-1]
            joined = last_offset + last_count == offset and (last_first + last_count) % _NUMBERS == first
            if joined:
                runs[-1] = (last_first, last_count + count, last_offset)
        if not joined:
            runs.append((first, count, offset))
        if len(runs) > most_runs:
            del runs[0]
        self.next_sequence = (first + count) % _NUMBERS
        self.written += count  # never less than what the runs have together
        if self.written > most_behind:
            self.written = most_behind
            # Because sequences wrap around, those too far back could be mistaken for new ones.
            while (over := sum([run[1] for run in runs]) - most_behind) > 0:
                oldest, oldest_count, oldest_offset = runs.pop(0)
                if oldest_count > over:
                    runs.insert(0, ((oldest + over) % _NUMBERS, oldest_count - over, oldest_offset + over))

    def copy(self) -> ProducerEntry:
        """A copy, for a snapshot."""
        entry = ProducerEntry(self.epoch, self.next_sequence, self.written, self.last_ms)
        entry.runs = list(self.runs)
        return entry


class ProducersSnapshot(msgspec.Struct, frozen=True):
    """All producers of a partition up to a position in its log."""

    log_id: int
    position: LogPosition
    entries: dict[int, ProducerEntry]


class _SnapshotBody(msgspec.Struct, frozen=True, array_like=True):
    log_id: int
    epoch: int
    offset: int
    rows: list[_Row]


def save_snapshot(disk: Disk, folder: str, snapshot: ProducersSnapshot) -> None:
    """Replace the snapshot file durably."""
    rows: list[_Row] = [
        (producer, entry.epoch, entry.next_sequence, entry.written, entry.last_ms, entry.runs)
        for producer, entry in snapshot.entries.items()
    ]
    body = _SnapshotBody(snapshot.log_id, snapshot.position.epoch, snapshot.position.offset, rows)
    durable_replace(disk, folder, NAME, _with_check(_MAGIC_SEQUENCES + msgspec.msgpack.encode(body)))


def load_snapshot(disk: Disk, folder: str, log_id: int) -> ProducersSnapshot | None:
    """Load the snapshot of this log; None if there is none. Raises CorruptData, or UnknownFormat for a newer one."""
    path = join(folder, NAME)
    content = read_file(disk, path)
    if content is None:
        return None
    if not _is_whole(content):
        raise ChecksumMismatch(f"{path} does not match its checksum")
    if content[: len(_MAGIC_SEQUENCES)] != _MAGIC_SEQUENCES:
        raise UnknownFormat(f"{path} is not a list of producers that this release can read; upgrade to read it")
    try:
        body = msgspec.msgpack.decode(content[len(_MAGIC_SEQUENCES) : -_CHECK.size], type=_SnapshotBody)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"{path} cannot be read: {error}. Restore it from a backup") from error
    if body.log_id != log_id:
        return None
    entries = {}
    for producer, epoch, next_sequence, written, last_ms, runs in body.rows:
        entries[producer] = entry = ProducerEntry(epoch, next_sequence, written, last_ms)
        entry.runs = runs
    return ProducersSnapshot(body.log_id, LogPosition(body.epoch, body.offset), entries)
