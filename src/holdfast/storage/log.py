"""The log: append a batch, read from an offset, find by time, trim the head, truncate the tail.

Durability is chosen by name, for the log or for a single call, and the result says which one applied:

    fsync     the call returns when the bytes are on disk; one sync serves all callers that wait
    interval  the call returns at once; a sync follows within `sync_interval_ms`
    os        the call returns when the kernel has the bytes: they survive kill -9 but not a power cut
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, get_args

from pyroaring import BitMap64

from holdfast.codec.encode import Body, producer_field
from holdfast.codec.frame import Frame, Kind
from holdfast.env import FolderLock, World, close_in_children, real_world
from holdfast.env.process import get_logger
from holdfast.errors import Closed, DamagedRange, InvalidRequest, OffsetOutOfRange
from holdfast.model import NO_PRODUCER, Appended, Batch, CodecName, Durability, LogPosition, Producer, Record, Trimmed
from holdfast.settings import LogSettings
from holdfast.storage.batches import Encoder, check_origin, most_plain_bytes
from holdfast.storage.compaction import CompactionLimits, KeysCompacted, Progress, compact_keys
from holdfast.storage.files import FULL_DISK, is_log, open_error, require_log, take_lock, with_space
from holdfast.storage.gate import SyncGate
from holdfast.storage.log_files import LogFiles
from holdfast.storage.recovery import OpenReport, Recovered, SegmentLimits, recover
from holdfast.storage.retention import SegmentFacts, done_segments, expired, remove_head, seal_after_ms, truncate_tail
from holdfast.storage.segment import Segment
from holdfast.storage.state import Identity
from holdfast.storage.view import Follower, LogView, OnDamage
from holdfast.storage.writer import Writer

if TYPE_CHECKING:
    import pyarrow as pa

logger = get_logger(__name__)

# Space that opening may use when the disk is full: enough to get to where something can be removed.
_TO_OPEN_BYTES = 64 * 1024
_DURABILITIES: dict[str, Durability] = {known: known for known in get_args(Durability)}


class Log:
    """A log in a folder, owned by this object until it is closed. Every method may be called from any thread."""

    def __init__(
        self,
        world: World,
        folder: str,
        settings: LogSettings,
        lock: FolderLock,
        recovered: Recovered,
        kind: Kind = Kind.DATA,
    ) -> None:
        self._world = world
        self._kind = kind
        self.folder = folder
        self.settings = settings
        self.report: OpenReport = recovered.report
        self.on_attention: Callable[[], None] = lambda: None  # something is due soon: call `tick`
        self.on_readable: Callable[[int], None] = lambda count: None  # a sync made this many held messages readable
        self.on_synced: Callable[[int], None] = lambda ns: None  # a sync took this long
        self.before_close: Callable[[], None] = lambda: None
        # The disk is full: see `Writer.fold`.
        self.fold: Callable[[bool], bool] = lambda urgent: False
        # The first offset that somebody outside this process needs; asked at each removal, since it may change.
        self.needed_outside: Callable[[], int | None] = lambda: None
        # Every message below this offset is handled, and kept only for replay; None if that is not known.
        self.done_before: Callable[[], int | None] = lambda: None
        self._writer = Writer(world, folder, settings, recovered, kind)
        self.writer = self._writer  # for those who need its state with every message
        self._writer.on_segment = self._call_attention
        self._writer.on_readable = self._call_readable
        self._writer.on_synced = self._call_synced
        self._writer.fold = self._call_fold
        world.still.register(folder, self._writer)
        self._gate = SyncGate(self._writer.sync, recovered.end)
        self._view = LogView(
            lambda: self._writer.segments,
            lambda: self._writer.readable_end,
        )
        for found in recovered.report.damage:
            self._view.note_damage(found.first_offset, found.next_offset)
        self._scanned = recovered.scanned  # until the first tick: those who open with us scan the tail
        self._files = LogFiles(world, folder, lock, self._writer, self._view, self.sync)
        self._lock: LogFiles | None = self._files
        self.write_one = self._write_one = self._writer.append_one  # the first for journals: see `note_unsynced`
        self._encoder = Encoder(settings)
        self._now_ns = world.clock.now_ns
        self._default_durability: Durability = settings.durability
        self._most_plain_bytes = most_plain_bytes(settings)
        self._pins: dict[str, int] = {}
        self._first_of_active = (-1, 0)  # the base offset of an active segment, and the time of its first message
        self._compacting = threading.RLock()
        self.unsynced_since_ns: int | None = None
        close_in_children(self)
        # Not at once: those who need old messages must have time to pin them.
        self._retention_due_ns = world.clock.monotonic_ns() + settings.retention_check_ms * 1_000_000

    @staticmethod
    def open(
        folder: str | PathLike[str],
        settings: LogSettings | None = None,
        world: World | None = None,
        *,
        create: bool = True,
        kind: Kind = Kind.DATA,
    ) -> Log:
        """Open the log in the folder and own it; it is created if missing, and recovered after an unclean end."""
        folder = fspath(folder)
        world = world or real_world()
        settings = settings or LogSettings()
        if world.open_files.is_full:
            world.open_files.make_room()
        with world.still.moving():  # recovery writes where no writer's lock is held yet
            try:
                if not create:
                    require_log(world, folder)
                elif not is_log(world, folder):
                    world.disk.make_folder(folder)
                lock = take_lock(world, folder)
                try:
                    limits = SegmentLimits(settings.index_bytes, settings.segment_bytes)
                    recovered = with_space(world, _TO_OPEN_BYTES, lambda: recover(world, folder, limits))
                except BaseException:
                    lock.release()
                    raise
            except OSError as error:
                raise open_error(folder, error) from error
            return Log(world, folder, settings, lock, recovered, kind)

    @property
    def start(self) -> int:
        """Offset of the first message still kept."""
        return self._view.start()

    @property
    def end(self) -> int:
        """Offset after the last message that readers may see."""
        return self._writer.readable_end

    @property
    def written_end(self) -> int:
        """Offset that the next message will get."""
        return self._writer.end

    @property
    def synced_end(self) -> int:
        """Offset after the last message known to be on disk."""
        return self._writer.synced_end

    @property
    def epoch(self) -> int:
        return self._writer.epoch

    @property
    def log_id(self) -> int:
        return self._writer.log_id

    @property
    def usable(self) -> bool:
        """Whether it still accepts messages: not after it was closed or the disk failed."""
        return self._writer.failure is None

    def change(self, settings: LogSettings) -> None:
        """Continue with other settings; what is stored stays as it is."""
        self.settings = settings
        self._writer.change(settings)
        self._encoder = Encoder(settings)
        self._default_durability = settings.durability
        self._most_plain_bytes = most_plain_bytes(settings)

    def chosen(self, asked: object) -> Durability:
        """Return the durability that applies: the one asked for, or that of the settings. Raises InvalidRequest."""
        if asked is None:
            return self._default_durability
        known = _DURABILITIES.get(asked) if isinstance(asked, str) else None
        if known is None:
            raise InvalidRequest(f"durability={asked!r} is not known; use one of {', '.join(get_args(Durability))}")
        return known

    def segments(self) -> list[SegmentFacts]:
        """Return the segments, oldest first; the last one is active."""
        with suppress(FileNotFoundError):
            return self._view.facts()
        return self._open_view().facts()  # raises Closed if the log was deleted meanwhile

    def damaged(self) -> BitMap64:
        """Return the offsets still kept that are known to be damaged, found on opening or by a reader."""
        return self._view.damaged()

    def append(
        self,
        messages: Sequence[bytes] | Batch,
        *,
        durability: Durability | None = None,
        codec: CodecName | None = None,
        kind: Kind | None = None,
        producer: Producer = NO_PRODUCER,
    ) -> Appended:
        """Append messages as one batch, all or none. Returns when they are as durable as requested."""
        appended = self.write(messages, durability=durability, codec=codec, kind=kind, producer=producer)
        self.wait(appended)
        return appended

    def append_one(self, value: bytes, durability: Durability | None = None) -> Appended:
        """Same as `append([value])`, but faster: used for a single put."""
        chosen = self.chosen(durability)
        if type(value) is not bytes or len(value) > self._most_plain_bytes:
            return self.append([value], durability=chosen)
        if chosen == "os":
            offset = self._write_one(value, self._now_ns(), False)
        else:
            offset = self._write_one(value, self._now_ns(), chosen == "fsync")
            if chosen == "fsync":
                self._gate.wait(offset + 1)
            else:
                self.note_unsynced()
        return Appended(offset, offset + 1, chosen)

    def write_single(self, value: object, durability: Durability | None) -> Appended | None:
        """Same as `write([value])`, but faster; None if only `write` can store it."""
        chosen = self.chosen(durability)
        offset = self.write_alone(value, chosen)
        return None if offset < 0 else Appended(offset, offset + 1, chosen)

    def write_alone(
        self,
        value: object,
        chosen: Durability,
        head: bytes = b"",
        columns: int = 0,
        time_ns: int = 0,
        count: int = 1,
        producer: bytes = b"",
    ) -> int:
        """Write one message and return its offset: a faster `write` of a batch of one; -1 if only that can store it.

        `head`, `columns`, `count` and `producer` are those of `Writer.append_one`, the durability is what `chosen`
        returns. The message's time is the current one unless it is given.
        """
        if type(value) is not bytes or len(head) + len(value) > self._most_plain_bytes:
            return -1
        offset = self._write_one(value, time_ns or self._now_ns(), chosen == "fsync", head, columns, count, producer)
        if chosen == "interval":
            self.note_unsynced()
        return offset

    async def append_one_async(self, value: bytes, durability: Durability | None = None) -> Appended:
        """Async version of `append_one`."""
        chosen = self.chosen(durability)
        if type(value) is not bytes or len(value) > self._most_plain_bytes:
            return await self.append_async([value], durability=chosen)
        offset = self._write_one(value, self._now_ns(), chosen == "fsync")
        if chosen == "fsync":
            synced = self._gate.promise(offset + 1)
            if synced is not None:
                await synced
        elif chosen != "os":
            self.note_unsynced()
        return Appended(offset, offset + 1, chosen)

    async def append_async(
        self,
        messages: Sequence[bytes] | Batch,
        *,
        durability: Durability | None = None,
        codec: CodecName | None = None,
        kind: Kind | None = None,
        producer: Producer = NO_PRODUCER,
    ) -> Appended:
        """Async version of `append`."""
        appended = self.write(messages, durability=durability, codec=codec, kind=kind, producer=producer)
        await self.wait_async(appended)
        return appended

    def write(
        self,
        messages: Sequence[bytes] | Batch,
        *,
        durability: Durability | None = None,
        codec: CodecName | None = None,
        kind: Kind | None = None,
        producer: Producer = NO_PRODUCER,
        any_size: bool = False,
        time_ns: int = 0,
    ) -> Appended:
        """First half of `append`, which never waits; `wait` then makes the batch as durable as the result says.

        The messages' time is the current one unless it is given.
        """
        chosen = self.chosen(durability)
        kind = self._kind if kind is None else kind
        check_origin(kind, producer)
        now_ns = time_ns or self._now_ns()
        if codec is None and kind is self._kind:
            plain = self._encoder.plain(messages)
            if plain is not None:
                head, joined, count = plain
                origin = b"" if producer is NO_PRODUCER else producer_field(producer)
                offset = self.write_alone(joined, chosen, head, 0, now_ns, count, origin)
                if offset >= 0:
                    return Appended(offset, offset + count, chosen)
        bodies = self._encoder.encode(messages, now_ns, codec=codec, kind=kind, any_size=any_size)
        return self._write(bodies, now_ns, chosen, producer)

    def write_bodies(self, bodies: Sequence[Body], producer: Producer = NO_PRODUCER) -> Appended:
        """Append bodies encoded elsewhere, within this log's limits, as one batch. Readers see it after a sync."""
        return self._write(bodies, self._now_ns(), "fsync", producer)

    def wait(self, appended: Appended) -> None:
        """Wait until what was written is as durable as the result says."""
        if appended.durability == "fsync":
            self._gate.wait(appended.next_offset)

    async def wait_async(self, appended: Appended) -> None:
        """Async version of `wait`."""
        if appended.durability == "fsync":
            await self._gate.wait_async(appended.next_offset)

    def append_arrow(self, values: pa.Array[Any], *, durability: Durability | None = None) -> Appended:
        """Append an Arrow array of binary or text values as one batch, without creating objects for messages."""
        chosen = self.chosen(durability)
        now_ns = self._now_ns()
        bodies = self._encoder.encode_arrow(values, now_ns)
        appended = self._write(bodies, now_ns, chosen, NO_PRODUCER)
        self.wait(appended)
        return appended

    def sync(self) -> None:
        """Wait until everything appended so far is on disk."""
        self._gate.wait(self._writer.end)

    def read(self, offset: int, *, on_damage: OnDamage = "raise") -> Iterator[Frame]:
        """Yield frames from the one that holds `offset` to the readable end."""
        return self._open_view().read(offset, on_damage=on_damage)

    def frames_with(self, columns: int, offset: int) -> Iterator[Frame]:
        """Yield frames that have one of these columns, from the one that holds `offset` on; damaged ones are skipped.

        In the tail that opening has scanned, only the frames that match are read again.
        """
        view, scanned = self._open_view(), self._scanned
        if scanned is not None and scanned.first < scanned.end and offset < scanned.end:
            for frame in view.read(offset, on_damage="skip") if offset < scanned.first else ():
                if frame.base_offset >= scanned.first:
                    break
                if frame.header.columns & columns:
                    yield frame
            for at in scanned.frames_with(columns, offset):
                with suppress(DamagedRange):
                    frame = view.locate(max(at, offset))[0]
                    if frame.base_offset == at:  # otherwise the frame at `at` ends before `offset`
                        yield frame
            offset = scanned.end
        for frame in view.read(offset, on_damage="skip"):
            if frame.header.columns & columns:
                yield frame

    def records(self, offset: int, *, on_damage: OnDamage = "raise", whole: bool = True) -> Iterator[Record]:
        """Yield messages from `offset` to the readable end; large values stay in the file unless `whole`."""
        return self._open_view().records(offset, on_damage=on_damage, whole=whole)

    def follower(self) -> Follower:
        """Return a reader, for one thread at a time, that moves from message to message at little cost."""
        return self._files.follower(self._open_view())

    def find_time(self, time_ns: int) -> int:
        """Return the offset of the first message with this timestamp or a later one; the end if there is none."""
        return self._open_view().find_time(time_ns)

    def away_latest_ns(self, offset: int) -> int | None:
        """Return the latest time in the segment that holds the offset, if only a store has it; otherwise None."""
        return self._open_view().away_latest_ns(offset)

    def position(self, offset: int) -> LogPosition:
        """Return the offset with its epoch, to be stored outside the log."""
        return LogPosition(self._writer.epochs.at(offset), offset)

    def check_position(self, position: LogPosition) -> None:
        """Raise TailLost if the position points into a tail that this log no longer has."""
        self._writer.epochs.check(position)

    def pin(self, name: str, offset: int) -> None:
        """Keep everything from `offset` on, whatever retention says, until `unpin` or a later `pin`."""
        self._pins[name] = offset

    def unpin(self, name: str) -> None:
        self._pins.pop(name, None)

    @property
    def pins(self) -> dict[str, int]:
        return dict(self._pins)

    def roll(self) -> None:
        """Seal the active segment so that it can be trimmed; the name of the new one is durable afterwards."""
        # Without its successor's name on disk, a trimmed segment could leave a log that seems to have no beginning.
        self._writer.roll()
        self._writer.sync_names()

    def give_tail(self) -> int:
        """Give back the blocks reserved for messages to come, because the disk is full; returns their size."""
        return self._writer.give_tail()

    def trim(self, before: int) -> Trimmed:
        """Remove whole segments below `before`; pinned messages and the active segment stay."""
        floor = min([before, *self._pins.values()])
        return self._remove_head(self._unneeded([s for s in self.segments()[:-1] if s.next_offset <= floor]))

    def retain(self) -> Trimmed:
        """Apply the retention settings now; returns what was freed."""
        self._seal_aged()
        floor = min(self._pins.values(), default=None)
        segments, now_ns = self.segments(), self._now_ns()
        going = segments[
            : expired(segments, self.settings, now_ns=now_ns, floor=floor, done_before=self._done_before())
        ]
        # Forced retention asks nobody: it exists so that a forgotten pin cannot fill the disk.
        forced = self.settings.retention_ignores_pins
        return self._remove_head([s.base_offset for s in going] if forced else self._unneeded(going))

    def done_segments(self) -> list[SegmentFacts]:
        """Return the segments that hold only handled messages, oldest first; never the active one."""
        segments, keep = self.segments(), self.settings.retention_min_segments
        return done_segments(segments, self._done_before())[: max(len(segments) - keep, 0)]

    def drop_done(self, segment: SegmentFacts) -> Trimmed:
        """Remove a segment of `done_segments` if it is now the oldest and still not needed."""
        done_before = self._done_before()
        done = done_before is not None and segment.next_offset <= done_before
        return self._remove_head(self._unneeded([segment] if done else []))

    @property
    def all_done(self) -> bool:
        """Whether the active segment holds messages and all of them are handled."""
        active, done_before = self._writer.active, self._done_before()
        held = active is not None and active.position > 0
        return held and done_before is not None and done_before >= self._writer.end

    def sealed(self, base_offset: int) -> Segment | None:
        """Return a sealed segment, which is synced and has its index on disk; None if it is not there."""
        self.sync()
        segment = next((each for each in self._writer.segments if each.base_offset == base_offset), None)
        if segment is None or segment.is_active:
            return None
        if not self._world.disk.exists(segment.index_path):
            segment.save_index()
        return segment

    def keeping(self, segment: Segment, rewrites: int, step: Callable[[str], None]) -> bool:
        """Call `step` with the path of a sealed segment; nobody replaces or removes the file meanwhile.

        Returns False if the segment is gone, or was rewritten in between. Readers open the file anew afterwards.
        """
        with self._writer.lock:
            if segment not in self._writer.segments or segment.rewrites != rewrites:
                return False
            step(segment.path)
            segment.close_files()
        return True

    def compact_keys(
        self,
        *,
        before: int,
        tombstone_ms: int,
        min_saving_percent: int = 20,
        apart_header: str | None = None,
        progress: Progress | None = None,
    ) -> KeysCompacted:
        """Keep only the last message of each key, in sealed segments below `before` and all pins; offsets never change.

        A tombstone is removed once it is older than `tombstone_ms` and no earlier message of its key is left. A segment
        is rewritten only if that saves enough. Messages with the header `apart_header` are kept and replace no others.
        `progress` is called with the segments done and to do.
        """
        if before < 0 or tombstone_ms < 0 or not 0 <= min_saving_percent <= 100:
            raise InvalidRequest(
                f"cannot compact with {before=}, {tombstone_ms=}, {min_saving_percent=}: they are 0 or more, "
                "and the last at most 100"
            )
        with self._compacting:
            self._writer.check_usable()
            self.sync()
            floor = min([before, *self._pins.values()])
            limits = CompactionLimits(
                floor, tombstone_ms, min_saving_percent, apart_header, needed_outside=self.needed_outside
            )
            self._scanned = None  # frames may start at other offsets from now on
            return compact_keys(self._world, self._writer, self.folder, self.settings, limits, progress)

    def truncate(self, offset: int) -> None:
        """Remove every message from `offset` on, which must be on a frame boundary; a new epoch begins."""
        self._writer.check_usable()
        self.sync()
        start, end = self.start, self._writer.end
        if not start <= offset <= end:
            raise OffsetOutOfRange(
                f"cannot truncate at {offset}: the log holds {start} to {end - 1}; choose one of these",
                offset=offset,
                start=start,
                end=end,
            )
        limits = SegmentLimits(self.settings.index_bytes, self.settings.segment_bytes)
        truncate_tail(self._world, self._writer, self.folder, limits, offset)
        self._files.forget()
        self._view.forget_damage(offset)  # new messages will get these offsets
        self._scanned = None
        self._gate.synced_end = self._writer.synced_end

    def tick(self) -> int | None:
        """Do what is due: syncs, rolls by age, retention. Returns the milliseconds until more is due, or None."""
        self._writer.check_usable()
        self._scanned = None
        due_ms = [*self._tick_sync(), *self._tick_roll(), *self._tick_retention()]
        return min(due_ms, default=None)

    def close(self) -> None:
        """Sync, record the clean end, release the folder. May be called twice."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        self.before_close()  # the keeper first: its tick must not find a log that is half closed
        writer = self._writer
        failed = writer.failure is not None
        # No more appends, and only then the last sync: nothing can slip in between it and the record of a clean end.
        writer.stop()
        with self._compacting:  # a compaction under way notices the stop and ends
            pass
        try:
            if not failed:
                self.sync()
                self._note_orderly_end()
        finally:
            self._gate.close()
            writer.release()
            lock.release()

    def disown(self) -> None:
        """After a fork, in the child: the parent owns the files and continues with them."""
        self._lock = None
        self._writer.disown(
            f"the log in {self.folder} was opened before a fork, by the parent; open it in this process"
        )

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write(self, bodies: Sequence[Body], now_ns: int, chosen: Durability, producer: Producer) -> Appended:
        if not bodies:
            end = self._writer.end
            return Appended(end, end, chosen)
        offset, next_offset = self._writer.append(bodies, now_ns, producer=producer, hold=chosen == "fsync")
        if chosen == "interval":
            self.note_unsynced()
        return Appended(offset, next_offset, chosen)

    def _open_view(self) -> LogView:
        """Return the view for reading, which works after the disk failed but not after closing."""
        if self._lock is None:
            raise Closed(f"the log in {self.folder} is closed; open it again to use it")
        return self._view

    def _call_attention(self) -> None:
        self.on_attention()

    def _call_readable(self, count: int) -> None:
        self.on_readable(count)

    def _call_synced(self, ns: int) -> None:
        self.on_synced(ns)

    def _call_fold(self, urgent: bool) -> bool:  # noqa: FBT001  a callback
        return self.fold(urgent)

    def note_unsynced(self) -> None:
        """Have what was written synced after the interval. Needed only while `unsynced_since_ns` is None."""
        if self.unsynced_since_ns is None:
            self.unsynced_since_ns = self._world.clock.monotonic_ns()
            self.on_attention()

    def _tick_sync(self) -> list[int]:
        since_ns = self.unsynced_since_ns
        waited_ms = 0 if since_ns is None else (self._world.clock.monotonic_ns() - since_ns) // 1_000_000
        overdue = since_ns is not None and waited_ms >= self.settings.sync_interval_ms
        # Sealed segments are synced soon under any policy, so that a crash leaves little to examine.
        if overdue or self._writer.unsynced_segments():
            self.unsynced_since_ns = None
            self.sync()
            return []
        return [] if since_ns is None else [self.settings.sync_interval_ms - waited_ms]

    def _tick_roll(self) -> list[int]:
        segment_ms, active = self.settings.segment_ms, self._writer.active
        if segment_ms is None or active is None:
            return []
        age_ms = (self._now_ns() - active.created_ns) // 1_000_000
        if age_ms >= segment_ms:
            self._writer.roll()
            return [segment_ms]
        return [segment_ms - age_ms]

    def _tick_retention(self) -> list[int]:
        settings = self.settings
        limits = (
            settings.retention_ms,
            settings.retention_bytes,
            settings.retention_segments,
            settings.retention_done_bytes,
        )
        if not any(limit is not None for limit in limits):
            return []
        now_ns = self._world.clock.monotonic_ns()
        if now_ns >= self._retention_due_ns:
            self._retention_due_ns = now_ns + settings.retention_check_ms * 1_000_000
            self.retain()
        return [(self._retention_due_ns - now_ns) // 1_000_000 + 1]

    def _seal_aged(self) -> None:
        """Seal the active segment if its first message is so old that retention by age will soon want to remove it.

        Not done while appending, where it would cost a check for every message.
        """
        after_ms, since_ns = seal_after_ms(self.settings), self._active_since_ns()
        if after_ms is not None and since_ns is not None and self._now_ns() - since_ns >= after_ms * 1_000_000:
            self.roll()

    def _active_since_ns(self) -> int | None:
        """Time of the active segment's first message; None if it has none yet."""
        active = self._writer.active
        if active is None or active.base_offset >= self._writer.readable_end:
            return None
        base, since_ns = self._first_of_active
        if base != active.base_offset:
            # Read from the file: the index of a small segment knows its last write, not its first.
            first = next(self.read(active.base_offset, on_damage="skip"), None)
            since_ns = active.created_ns if first is None else first.header.max_time_ns
            self._first_of_active = active.base_offset, since_ns
        return since_ns

    def _done_before(self) -> int | None:
        done_before = None if self.settings.retention_done_bytes is None else self.done_before()
        return None if done_before is None else min([done_before, *self._pins.values()])

    def _unneeded(self, segments: Sequence[SegmentFacts]) -> Iterator[int]:
        """Yield base offsets, each checked just before its removal: a reader may have appeared meanwhile."""
        for segment in segments:
            # Announce before asking: a reader that starts after the answer sees the announcement and keeps off.
            self._writer.announce_removal(segment.next_offset)
            floor = self.needed_outside()
            if floor is not None and segment.next_offset > floor:
                break
            yield segment.base_offset
        if segments:
            self._writer.announce_removal(0)

    def _remove_head(self, bases: Iterable[int]) -> Trimmed:
        self._writer.check_usable()
        return remove_head(self._world, self._writer, self.folder, bases)

    def _note_orderly_end(self) -> None:
        """Record the clean end, so that the next opening need not scan for it. All messages are synced."""
        writer = self._writer
        try:
            with writer.lock:
                writer.ensure_open()
                if writer.active is not None:
                    writer.active.save_index()
                writer.state.set_identity(
                    Identity(writer.log_id, writer.epoch, self._world.ids.boot_id(), clean_end=writer.end)
                )
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise writer.fail("closing failed", error) from error
            logger.warning(
                "clean shutdown not recorded: the next open will search for the end",
                extra={"folder": self.folder, "error": str(error)},
            )
