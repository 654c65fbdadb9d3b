"""The writer of a log: appends frames, rolls segments, syncs, and stops for good when the disk fails.

All state changes happen under one lock. Syncing happens outside it, so that appends continue meanwhile. Three offsets
move forward in this order:

    end           after the last message written; the next message gets this offset
    readable_end  after the last message that readers may see
    synced_end    after the last message known to be on disk

Readers see a contiguous prefix. A message that asked for `fsync` holds back itself and everything after it until a sync
covers it, so nobody acts on a message that a power cut could still take away. Messages with weaker durability are
readable at once, and so `readable_end` may be ahead of `synced_end`.

A batch is visible as a whole or not at all: a reader, and recovery after a crash, ignore the frames of a batch until
its last one is there. If an append fails halfway, by an error or a signal, its bytes are wiped (`forget`) before the
lock is released: the next append must not be preceded by frames that nobody acknowledged.

A write or sync that fails with an I/O error ends the writer: any byte not yet synced may be affected, and later syncs
may report success without having written it. A full disk, or a shortage of descriptors or memory, refuses one call.

A small value with nothing else gets a short frame, which does not say what is synced. So it follows a long one in its
segment, and nothing was synced in between; and one frame in 64 KiB is long, in case another is damaged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from holdfast.checksum import crc32c
from holdfast.codec.encode import (
    CRC,
    LONG_HEADER,
    ONE_VALUE,
    PADDING,
    SHORT_PACKS,
    SIZES,
    SMALL,
    Body,
    FramePlace,
    constant_field,
    encode_values,
    header_for,
    one_with,
    origin_field,
    plain_value,
    short_pack,
)
from holdfast.codec.frame import ENDS_BYTES, HEADER_BYTES, MAY_HOLD_SHORT, SHORT_MOST, Kind
from holdfast.codec.singles import log_prefixes
from holdfast.env import File, OpenFolder, World
from holdfast.env.process import get_logger, stand_back
from holdfast.errors import Closed, DiskFailed, DiskFull, HoldfastError, MessageTooLarge
from holdfast.model import NO_PRODUCER, Producer
from holdfast.settings import LogSettings
from holdfast.storage.batches import LaidOut, lay_out
from holdfast.storage.files import FULL_DISK, no_room, ran_out, room, shortage, sync_all
from holdfast.storage.frames import SegmentIndex
from holdfast.storage.recovery import Recovered, SegmentLimits, open_segment
from holdfast.storage.segment import MOST_RESERVE, ActiveSegment, Segment, blocks, drop_segment
from holdfast.storage.state import ASKED, READABLE, Epochs, LogState

logger = get_logger(__name__)

_ADVICE: Final = "Reading still works. Check the disk (`dmesg`), then open the log again: it recovers what is there"
_MOST_SEGMENT_BYTES: Final = 2**32 - 1  # positions are stored in 32 bits
_NO_LIMIT: Final = 2**63
_MOST_UNSYNCED: Final = 16
_MOST_TRIES: Final = 5  # to find room on a full disk: others may take what was freed
# A message of at least this size gets a segment of its own, which is filled without holding the lock.
_APART_BYTES: Final = 16 << 20
_MOST_SHORT: Final = 64 * 1024  # bytes of short frames between two long ones
_MOST_AROUND: Final = HEADER_BYTES + ENDS_BYTES + 7  # of a long frame with a value: whether one is due is known late


class Writer:
    """Appends for one log. Every method may be called from any thread."""

    # What every append needs: a slot takes half the time of an entry in a dict.
    __slots__ = (
        "__dict__", "__weakref__", "_fast_until", "_held_from", "_log_prefix", "_ones", "_origin", "_short_prefix",
        "_short_until", "_small", "_words", "active", "end", "epoch", "failure", "lock", "readable_end", "synced_end",
    )  # fmt: skip

    def __init__(
        self, world: World, folder: str, settings: LogSettings, recovered: Recovered, kind: Kind = Kind.DATA
    ) -> None:
        self._world = world
        self._folder = folder
        self._settings = settings
        self._limits = SegmentLimits(settings.index_bytes, settings.segment_bytes)
        self.lock = threading.Lock()
        self.log_id = recovered.log_id
        self.epoch = recovered.epoch
        self.epochs = recovered.epochs
        self.state = recovered.state
        self.active = recovered.active
        self.segments: tuple[Segment, ...] = (*recovered.sealed, *([self.active] if self.active else []))
        self.end = recovered.end
        self.readable_end = recovered.end
        self.synced_end = recovered.end
        self.failure: HoldfastError | None = None
        self.resting = False  # whether its files are closed until they are needed
        self.wake: Callable[[], None] = lambda: None  # opens them again; the caller holds the lock
        self.apart_bytes = _APART_BYTES
        self.on_segment: Callable[[], None] = lambda: None
        # For a journal on a full disk: replaces its events by a snapshot, if that is worth it or `urgent`.
        self.fold: Callable[[bool], bool] = lambda urgent: False
        self.on_readable: Callable[[int], None] = lambda count: None
        self.on_synced: Callable[[int], None] = lambda ns: None
        self._words = recovered.state.words
        # With the files they were written through: the segment may be closed, but a sync must see the file's errors.
        self._unsynced_sealed: list[tuple[Segment, File]] = []
        # Opened before a segment gets its name: once messages wait for a sync, it must not need a new descriptor.
        self._changed_folder: OpenFolder | None = None
        self._held_from: int | None = None  # the first message that readers may not see before a sync
        self._held_since_sync: int | None = None  # the first such message appended since the last sync began
        self._fast_until = 0  # position up to which a single message can be stored without checking any limit
        self._is_journal = kind is Kind.JOURNAL
        self._kind = kind
        self._ones = one_with(kind)
        self._log_prefix, self._short_prefix = log_prefixes(self.log_id)
        self._origin = origin_field(self.epoch)
        self._expect_long()
        if self.active is not None:
            self._use(self.active)

    def append_one(
        self,
        value: bytes,
        now_ns: int,
        hold: bool,  # noqa: FBT001  a keyword costs time here
        head: bytes = b"",
        columns: int = 0,
        count: int = 1,
        producer: bytes = b"",
    ) -> int:
        """Append one message and return its offset: a fast version of `append` for the most common case.

        `head` and `columns` are those of `single_head`; or `head` are the ends of `count` values, joined, as those of
        `plain_parts`. `producer` is a `producer_field`. Fuses all steps; a property test compares it with `append`.
        """
        length = len(value)
        if head or producer or length >= self._small:
            head = head or ONE_VALUE(0, length)
            body_bytes = len(head) + length
            body = head + value + PADDING[body_bytes & 7]
            crc, total = crc32c(body), HEADER_BYTES + len(body)
        else:
            body, body_bytes, crc, total = b"", 0, 0, length + _MOST_AROUND
        if (lock := self.lock).locked():
            stand_back(lock)
        with lock:
            segment = self.active
            if segment is None or segment.position + total > self._fast_until:
                segment = self._segment_for(total, now_ns)
            position, offset, mapped = segment.position, self.end, segment.map
            if body:
                origin = origin_field(self.epoch, producer) if producer else self._origin
                one = self._ones[columns] if count == 1 and position else self._constant(count, columns, position)
                sizes = SIZES(body_bytes, body_bytes, one)
                checked = LONG_HEADER(self._log_prefix, position, sizes, offset, now_ns, self.synced_end, origin, crc)
                frame, stop = checked + CRC(crc32c(checked)) + body, position + total
            elif position < self._short_until:
                pack = SHORT_PACKS[length] or short_pack(length)
                checked = pack(self._short_prefix, position, length, self.epoch, offset, now_ns, value)
                frame = checked + CRC(crc32c(checked))
                stop = position + len(frame)
            else:
                return self._append_long(value, segment, now_ns, hold=hold)
            if mapped is not None and stop <= self._fast_until:
                mapped[position:stop] = frame  # until the new end nothing is called, so no signal handler can run
                segment.position = stop
            else:
                self._store_whole(segment, frame)
            segment.next_offset = self.end = end = offset + count
            index = segment.index
            if position >= index.next_entry_at:
                index.add_entry(position, offset)
            index.max_time_ns = now_ns if now_ns > index.max_time_ns else index.max_time_ns
            if hold or self._held_from is not None:
                return self._hold(offset, hold=hold)
            words = self._words
            self.readable_end = words[READABLE] = end
            if words[ASKED]:
                self.state.give_signal()
            return offset

    def _constant(self, count: int, columns: int, position: int) -> bytes:
        return constant_field(count, self._kind, 0, 0 if position else MAY_HOLD_SHORT, columns)

    def _append_long(self, value: bytes, segment: ActiveSegment, now_ns: int, *, hold: bool) -> int:
        offset, _ = self._append_bodies(segment, [encode_values([value], now_ns)], NO_PRODUCER, hold=hold)
        self._short_until = segment.position + _MOST_SHORT if self._small else 0
        return offset

    def append(self, bodies: Sequence[Body], now_ns: int, *, producer: Producer, hold: bool) -> tuple[int, int]:
        """Append a batch, all or nothing; returns its first offset and the one after its last."""
        value = plain_value(bodies[0]) if len(bodies) == 1 and producer.id == 0 else None
        if value is not None and len(value) < self._small:
            offset = self.append_one(value, bodies[0].max_time_ns, hold)
            return offset, offset + 1
        if len(bodies) == 1 and bodies[0].body_bytes >= self.apart_bytes:
            placed = self._append_apart(bodies[0], producer, hold=hold)
            if placed is not None:
                return placed
        # A batch goes into one segment: recovery and truncation then never have to look for its rest in another file.
        total = sum([body.frame_bytes for body in bodies])
        if self.lock.locked():
            stand_back(self.lock)
        with self.lock:
            segment = self.active
            if segment is None or segment.position + total > self._fast_until:
                segment = self._segment_for(total, now_ns)
            return self._append_bodies(segment, bodies, producer, hold=hold)

    def _append_bodies(
        self, segment: ActiveSegment, bodies: Sequence[Body], producer: Producer, *, hold: bool
    ) -> tuple[int, int]:
        offset = base = self.end
        position = start = segment.position
        remaining = len(bodies)
        try:
            for body in bodies:
                remaining -= 1
                place = FramePlace(self.log_id, self.epoch, position, offset, self.synced_end)
                header = header_for(body, place, batch_remaining=remaining, producer=producer.after(offset - base))
                self._store(segment, (header, *body.parts), body.frame_bytes)
                position += body.frame_bytes
                offset += body.count
            segment.next_offset = self.end = offset
        except BaseException:  # a signal, too: unacknowledged frames must not precede the next ones
            segment.forget(start)
            self._fast_until = 0
            raise
        self._add_to_index(segment, bodies, start, base)
        self._hold(base, hold=hold)
        return base, offset

    def _append_apart(self, body: Body, producer: Producer, *, hold: bool) -> tuple[int, int] | None:
        """Append a large frame as a segment of its own, filled while others append; None if that is not possible.

        Others have to wait only while its header and its name are written, whatever its size.
        """
        laid_out = None
        try:
            with self.lock:
                self.check_usable()
                if body.home is None:
                    self._find_free(body.frame_bytes)
            laid_out = lay_out(self._world, self._folder, body)
            if hold:
                laid_out.sync()  # outside the lock; otherwise the next sync, which others wait for, would have to do it
            with self.lock:
                self.check_usable()
                self.ensure_open()
                if self.active is not None and self.active.position == 0:
                    return None  # an empty segment already has the name that this one would need
                return self._take_apart(laid_out, body, producer, hold=hold)
        except OSError as error:
            raise self._refusal("a large message could not be written", error) from error
        finally:
            if laid_out is not None:
                laid_out.close()

    def _take_apart(self, laid_out: LaidOut, body: Body, producer: Producer, *, hold: bool) -> tuple[int, int]:
        offset = self.end
        place = FramePlace(self.log_id, self.epoch, 0, offset, self.synced_end)
        # The header last: without it the file is not a frame, whatever else of it is on disk.
        laid_out.write(0, [header_for(body, place, batch_remaining=0, producer=producer)])
        index = SegmentIndex(offset, self._limits.index_bytes)
        index.add(0, body.frame_bytes, offset, offset + 1, body.max_time_ns)
        try:
            self._begin_segment(index, laid_out)
            self.end = offset + 1
        except BaseException:  # a signal, too: the name must not be taken when the next message needs it
            if self.end == offset and (self.active is None or self.active.base_offset < offset):
                drop_segment(self._world.disk, self._folder, offset)
            raise
        self._hold(offset, hold=hold)
        return offset, offset + 1

    def sync(self) -> int:
        """Make everything written so far durable and return its end; raises DiskFailed, and from then on always."""
        with self.lock:
            if isinstance(self.failure, DiskFailed):
                self.check_usable()
            # Everything the sync has to cover is fixed here. What is appended from now on belongs to the next one,
            # even if the disk happens to write it already.
            target = self.end
            if target == self.synced_end:
                return target
            epoch, sealed = self.epoch, list(self._unsynced_sealed)
            files = [file for _, file in sealed]
            files += [self.active.file] if self.active is not None else []
            changed, self._changed_folder = self._changed_folder, None
            self._held_since_sync = None
        began_ns = self._world.clock.monotonic_ns()
        try:
            sync_all(files, changed)
        except OSError as error:
            if changed is not None:
                changed.close()
            files.clear()  # the traceback keeps this frame, and with it the files, alive
            sealed.clear()
            raise self.fail("a sync failed", error) from error
        except BaseException:  # interrupted: the next sync must do all of it
            with self.lock:
                self._note_changed(changed)
                self._held_since_sync = self._held_from
            raise
        if changed is not None:
            changed.close()
        with self.lock:
            readable_end = self.readable_end
            # Otherwise the tail was truncated meanwhile, and what we synced is not the log any more; or another sync
            # came first, and the log went to rest after it.
            if self.epoch == epoch and not self.resting:
                self._note_synced(target, sealed)
            synced_end, count = self.synced_end, self.readable_end - readable_end
        self.on_synced(self._world.clock.monotonic_ns() - began_ns)
        if count > 0:
            self.on_readable(count)
        return synced_end

    def roll(self) -> None:
        """Seal the active segment if it holds anything; the next append goes to a new one."""
        with self.lock:
            self.check_usable()
            if self.active is not None and self.active.position > 0:
                self.ensure_open()
                try:
                    self._begin_segment()
                except OSError as error:
                    raise self._refusal("a segment could not be started", error) from error

    def sync_names(self) -> None:
        """Make the names of the segments durable, but not necessarily their contents.

        Under the lock: a concurrent sync would find no name left to sync, and report its messages safe too early.
        """
        with self.lock:
            if self._changed_folder is None:
                return
            try:
                self._changed_folder.sync()
            except OSError as error:
                raise self.fail("the names of segments could not be synced", error) from error
            self._changed_folder.close()
            self._changed_folder = None

    def announce_removal(self, end: int) -> None:
        """Tell readers that messages below `end` are about to be removed; 0 means that none are."""
        with self.lock:
            if self.failure is None:  # otherwise nothing is removed, and the files may be closed
                self.ensure_open()
                self.state.set_removing(end)

    def unsynced_segments(self) -> int:
        return len(self._unsynced_sealed)

    def fail(self, what: str, error: OSError) -> DiskFailed:
        """Stop for good: the failure may affect any byte that is not yet synced. Returns the error to raise."""
        advice = getattr(error, "advice", _ADVICE)
        why = (
            f"{what} in {self._folder}: {error.strerror or error}. Messages not yet acknowledged may be lost; nothing "
            f"more is accepted. {advice}"
        )
        # Keep no exception that was raised: its frames hold files, and after a failure, too, closing the log must
        # close them all, or the disk cannot be unmounted.
        error.__traceback__ = None
        if self.failure is None:
            self.failure = DiskFailed(why)
            logger.error("log stopped", extra={"folder": self._folder, "what": what, "error": str(error)})
        self._fast_until = 0
        return DiskFailed(why)

    def stop(self) -> None:
        """Refuse every change from now on; what is written can still be synced."""
        with self.lock:
            self._fast_until = 0
            if self.failure is None:
                self.failure = Closed(f"the log in {self._folder} is closed; open it again to use it")

    def disown(self, why: str) -> None:
        """Refuse everything. Makes a new lock: after a fork, a thread that does not exist here may hold the old one."""
        self.failure = Closed(why)
        self._fast_until = 0
        self.lock = threading.Lock()

    def release(self) -> None:
        """Close all files. No sync may be running or follow."""
        with self.lock:
            for segment in self.segments:
                segment.close_files()
            if self.active is not None:
                self.active.release()
            self._unsynced_sealed = []
            if self._changed_folder is not None:
                self._changed_folder.close()
            self.state.close()

    def may_rest(self) -> bool:
        """Whether nothing needs the files at the moment. The caller holds the lock."""
        return self.failure is None and self.end == self.synced_end and self._changed_folder is None

    def rest(self) -> None:
        """Close all files until `wake`; users notice nothing. The caller holds the lock and has checked `may_rest`."""
        self._fast_until = 0
        self.resting = True
        for segment, _ in self._unsynced_sealed:
            segment.close_files()
        self._unsynced_sealed = []  # everything written is synced
        if self.active is not None:
            self.active.release()
        self.state.close()

    def reopen(self, state: LogState) -> None:
        """Continue with this state and the segments as they were. The caller holds the lock."""
        if self.active is not None:
            self.active.reopen()
        self.state, self._words = state, state.words
        self.resting = False

    def ensure_open(self) -> None:
        """Make sure that the files are open. The caller holds the lock."""
        if self.resting:
            self.wake()

    def change(self, settings: LogSettings) -> None:
        """Continue with other settings; segment limits apply from the next message."""
        with self.lock:
            self._settings = settings
            self._limits = SegmentLimits(settings.index_bytes, settings.segment_bytes)
            self._fast_until = 0

    def begin_epoch(self, epoch: int, epochs: Epochs) -> None:
        """Write frames with the new epoch from now on. The caller holds the lock."""
        self._small = 0
        self.epoch, self.epochs = epoch, epochs
        self._origin = origin_field(epoch)
        self._expect_long()

    def _expect_long(self) -> None:
        """Make the next frame a long one. Short ones follow it unless epoch, segment or kind of log forbid that."""
        self._short_until = 0  # position below which the next frame may be a short one
        # A segment that an older release has begun says that it holds none.
        may_hold = self.active is None or self.active.index.flags & MAY_HOLD_SHORT
        is_short = self._kind is Kind.DATA and self.epoch <= SHORT_MOST and may_hold
        self._small = SMALL if is_short else 0  # length of a value from which on it gets a long frame

    def replace(self, segments: tuple[Segment, ...], active: ActiveSegment | None) -> None:
        """Set the segments that are left after a trim or a truncation. The caller holds the lock."""
        self.segments = segments
        self._unsynced_sealed = [pair for pair in self._unsynced_sealed if pair[0] in segments]
        if active is not self.active:
            self._fast_until = self._small = self._short_until = 0
            self.active = active
            self._expect_long()

    def cut_to(self, end: int) -> None:
        """Forget the messages from `end` on, for readers first. Everything is synced. The caller holds the lock."""
        self._held_from = self._held_since_sync = None
        self._publish(min(self.readable_end, end))
        self._expect_long()
        self.end = self.synced_end = end
        self.state.set_synced(end)

    def _note_changed(self, folder: OpenFolder | None) -> None:
        if self._changed_folder is None:  # otherwise it was changed again since, and one sync is enough for both
            self._changed_folder = folder

    def _note_synced(self, end: int, sealed: list[tuple[Segment, File]]) -> None:
        self._unsynced_sealed = [pair for pair in self._unsynced_sealed if pair not in sealed]
        for segment, _ in sealed:
            segment.close_files()
        # Readers in other processes may act on a message as soon as it is published, so first it is on record as
        # synced.
        self._expect_long()  # before the end moves: a signal in between must not leave short frames that say less
        self.synced_end = end
        self.state.set_synced(end)
        self._held_from = self._held_since_sync
        self._publish(self.end if self._held_from is None else self._held_from)

    def _segment_for(self, total: int, now_ns: int) -> ActiveSegment:
        """Return the active segment with room for `total` bytes, after rolling if a limit is reached.

        The lock may be released meanwhile, so the caller must read the log's state after this, not before.
        """
        if self.resting and self._world.open_files.is_full:
            self._make_room_for_files()
        if total > _MOST_SEGMENT_BYTES - HEADER_BYTES:
            raise MessageTooLarge(f"a batch of {total} bytes does not fit in a segment; split it")
        refusal = ""
        for tries in range(_MOST_TRIES):
            try:
                segment = self._prepared(total, now_ns)
            except DiskFull as error:
                refusal = str(error)
            else:
                if tries > 1:
                    self._world.put_aside()  # what is left of it, before other programs take it
                return segment
            # Not while it is handled: its frames hold files that are about to be removed, which would still take room.
            if not self._made_space(total, tries):
                break
        raise DiskFull(refusal)

    def _make_room_for_files(self) -> None:
        """Have other logs close their files. The caller holds the lock, which is released for as long as this takes."""
        self.lock.release()
        try:
            self._world.open_files.make_room()
        finally:
            self.lock.acquire()

    def _made_space(self, total: int, tries: int = 0) -> bool:
        """Have handled messages removed; returns whether another try is worthwhile. The caller holds the lock.

        The lock is released meanwhile: removing takes the locks of other logs, which in turn may be doing the same.
        After the first of several `tries`, a journal gets more than it needs: file systems need blocks of their own.
        """
        self.lock.release()
        try:
            wanted = self._settings.min_free_bytes + total + MOST_RESERVE
            if not self._is_journal:
                return self._world.make_space(wanted)
            # A journal that has grown is folded while there is still something in reserve to do that with.
            folded, more_bytes = self.fold(False), blocks(((1 << tries) - 1) * 8192)
            if self._world.make_space(wanted, urgent_bytes=self._urgent_bytes(total) + more_bytes) or folded:
                return True
            return self.fold(True) and self._world.make_space(wanted, urgent_bytes=self._urgent_bytes(total))
        finally:
            self.lock.acquire()

    def _urgent_bytes(self, total: int) -> int:
        segment = self.active
        if segment is None or segment.position + total > self._settings.segment_bytes:
            return blocks(total)
        return segment.least_shortage(total)

    def give_tail(self) -> int:
        """Give back what is reserved for messages to come; returns how many bytes that was."""
        with self.lock:
            if self.failure is not None or self.active is None:
                return 0
            self.ensure_open()
            size = self.active.give_tail()
            self._use(self.active)
            return size

    def _prepared(self, total: int, now_ns: int) -> ActiveSegment:
        self.check_usable()
        self.ensure_open()
        segment = self.active
        try:
            if segment is None or self._must_roll(segment, total, now_ns):
                segment = self._begin_segment()
            shortage = segment.shortage(total)
            # With min_free_bytes=0 only the disk can tell: a file that was reopened may already have its blocks.
            tight = segment.mapped and not self._settings.min_free_bytes and self._free() < shortage
            if not tight:
                self._check_free(shortage)
            segment.make_room(total, tight=tight)
        except OSError as error:
            raise self._refusal("a segment could not be prepared", error) from error
        self._use(segment)
        return segment

    def _must_roll(self, segment: ActiveSegment, total: int, now_ns: int) -> bool:
        return segment.position > 0 and (
            segment.position + total > self._settings.segment_bytes
            or self.end - segment.base_offset >= (self._settings.segment_messages or _NO_LIMIT)
            or now_ns - segment.created_ns >= (self._settings.segment_ms or _NO_LIMIT) * 1_000_000
        )

    def _begin_segment(self, index: SegmentIndex | None = None, laid_out: LaidOut | None = None) -> ActiveSegment:
        index = SegmentIndex(self.end, self._limits.index_bytes) if index is None else index
        folder, before = self._changed_folder or self._world.disk.open_folder(self._folder), self.active
        try:
            segment = open_segment(self._world, self._folder, self._limits, self.log_id, index, laid_out)
            self._follow(before, segment, folder)
        except BaseException:  # a signal, too: others would take an empty file of this name for the end of the log
            if folder is not self._changed_folder:
                folder.close()
            if self.active is before and (before is None or before.base_offset < index.base_offset):
                drop_segment(self._world.disk, self._folder, index.base_offset)
            raise
        if before is not None:
            before.release()  # callers may still hold it, and a file that is removed takes room until it is closed
        self._use(segment)
        self._expect_long()
        self.on_segment()
        return segment

    def _follow(self, before: ActiveSegment | None, segment: ActiveSegment, folder: OpenFolder) -> None:
        segments = self.segments
        if before is None:
            # Nothing else says where a log begins: if this name were lost, a later segment would seem to be the first.
            folder.sync()
            folder.close()
        else:
            self._changed_folder = folder
            # The old segment stays listed as unsynced: its last messages may still wait for a sync.
            sealed = before.sealed()
            self._unsynced_sealed.append((sealed, before.file))
            if len(self._unsynced_sealed) > _MOST_UNSYNCED:
                # If nobody ticks this log, syncing falls to the one who fills segments; otherwise files would pile up.
                try:
                    self._unsynced_sealed[0][1].sync()
                except OSError as error:
                    raise self.fail("a sync failed", error) from error
                self._unsynced_sealed.pop(0)[0].close_files()
            segments = (*segments[:-1], sealed)
        # All at once: no signal handler can run from here on.
        self._fast_until = self._short_until = 0
        self.segments, self.active = (*segments, segment), segment

    def _use(self, segment: ActiveSegment) -> None:
        """Compute how far single messages may go before a limit has to be checked again."""
        settings = self._settings
        # Limits by count and age need a check for every message, on the slower path.
        limited = settings.segment_messages is not None or settings.segment_ms is not None
        self._fast_until = 0 if limited else min(segment.filled, settings.segment_bytes)

    def _store(self, segment: ActiveSegment, parts: Sequence[bytes | memoryview], length: int) -> None:
        try:
            segment.store(parts, length)
        except OSError as error:
            self._fast_until = 0
            raise self._refusal("a write failed", error) from error

    def _store_whole(self, segment: ActiveSegment, frame: bytes) -> None:
        position = segment.position
        try:
            self._store(segment, (frame,), len(frame))
        except BaseException:  # a signal, too, as in `append`
            segment.forget(position)
            raise

    def _add_to_index(self, segment: ActiveSegment, bodies: Sequence[Body], position: int, offset: int) -> None:
        for body in bodies:
            end, next_offset = position + body.frame_bytes, offset + body.count
            segment.index.add(position, end, offset, next_offset, body.max_time_ns)
            position, offset = end, next_offset
        segment.next_offset = offset

    def _hold(self, base: int, *, hold: bool) -> int:
        """Move the readable end, or hold it back at `base` until a sync; returns `base`."""
        if hold:
            if self._held_from is None:
                self._held_from = base
            if self._held_since_sync is None:
                self._held_since_sync = base
        if self._held_from is None:
            self._publish(self.end)
        return base

    def _publish(self, end: int) -> None:
        moved = end != self.readable_end
        self.readable_end = end
        self._words[READABLE] = end
        if moved and self._words[ASKED]:
            self.state.give_signal()

    def _free(self) -> int:
        return self._world.disk.free_bytes(self._folder)

    def _check_free(self, shortage: int) -> None:
        if shortage and (free := self._free()) - shortage < self._settings.min_free_bytes:
            raise self._disk_full(room(free, shortage, self._settings.min_free_bytes))

    def _find_free(self, total: int) -> None:
        try:
            self._check_free(total)
        except DiskFull:
            if not self._made_space(total):
                raise
            self._check_free(total)

    def _refusal(self, what: str, error: OSError) -> HoldfastError:
        """Build the error for a failed write: a shortage refuses one call, any other error ends the log."""
        if error.errno in FULL_DISK:
            return self._disk_full(error.strerror or "no room")
        if ran_out(error):
            return shortage(
                f"{what} in {self._folder}", error, "Nothing of this call was kept, and the log keeps working"
            )
        return self.fail(what, error)

    def _disk_full(self, why: str) -> DiskFull:
        return no_room(self._folder, why, is_journal=self._is_journal)

    def check_usable(self) -> None:
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))
