"""Spills, manifests and the removal of files, in the background: the state's lock is only held to adopt the results.

The order of the steps keeps this crash-safe. A spill syncs the intake, writes the runs, names them in a manifest, and
trims the intake. Saving a manifest notes what is gone, syncs the intake (so that it holds every id that the manifest
mentions), puts the manifest in place, and only then removes files that nothing refers to any more.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import pairwise
from operator import attrgetter
from threading import Lock
from typing import Final, TypeVar

import msgspec
from pyroaring import BitMap64

from holdfast.broker.delayed.intake import DAY_MS, HOUR_MS, MONTH_MS, SOON_MS, DelayedIntake, DelayedTimers
from holdfast.broker.delayed.runs import (
    NEVER_MS,
    TRAILER_CHECKED,
    TRAILER_MAGIC,
    DelayedRun,
    DelaySettings,
    Entry,
    LoadedManifest,
    Manifest,
    RunEntry,
    save_manifest,
)
from holdfast.checksum import crc32c
from holdfast.codec.encode import PLAIN, Body, FramePlace, Packing, encode_batch, header_for
from holdfast.codec.frame import Frame, Kind
from holdfast.env import World
from holdfast.env.disk import File, write_fully
from holdfast.env.process import get_logger
from holdfast.errors import Closed, DiskFull, HoldfastError, Unavailable
from holdfast.large import LargeValue
from holdfast.model import Batch, Record
from holdfast.storage.files import FULL_DISK, advice, join
from holdfast.storage.keeper import soonest

# The state in memory: where each message is, which are gone, and which of those for certain.
#
# known     ids in a file: in the intake or in a run
# gone      known ids that were released or cancelled
# settled   gone ids whose releases are synced in the partition's log


_MOST = 2**64 - 1


class DelayedState:
    """The state of the store. Hold its lock while calling any method."""

    def __init__(self, intake: DelayedIntake, loaded: LoadedManifest) -> None:
        self.lock = Lock()
        self.intake = intake
        self.runs = loaded.runs
        self.damage = loaded.damage
        self.timers = DelayedTimers()
        self.floor = loaded.manifest.spilled_below  # messages of the intake below this are in runs, or gone
        self.next_number = loaded.manifest.next_number
        self.saved_position = self.settled_position = loaded.manifest.accounted
        self.unsettled: deque[tuple[int, BitMap64]] = deque()  # released ids, with the position that they are below
        self.changed = bool(loaded.damage)  # since the last manifest
        self.closed = False
        # No waiting message is due before this: the last answer of `tick`, or the due time of an earlier arrival.
        self.not_before_ms = 0
        spilled = self.in_runs()
        before = loaded.manifest.gone_ids()
        cancelled = intake.load(self.floor, self.timers, before | spilled)
        # Messages of an unfinished spill that are in runs already; only if the manifest was lost.
        self.twice = intake.present & spilled
        intake.present -= spilled
        self.gone = (before | cancelled) & (intake.present | spilled)

    def check_open(self) -> None:
        if self.closed:
            raise Closed(f"the delayed messages of {self.intake.log.folder} are closed; open them again to use them")

    def in_runs(self) -> BitMap64:
        ids = BitMap64()
        for run in self.runs:
            ids |= run.ids
        return ids

    def known(self, ids: BitMap64) -> BitMap64:
        """Return the ids that are in a file."""
        known = ids & self.intake.present
        for run in self.runs:
            known |= ids & run.ids
        return known

    def live(self) -> int:
        return sum(run.messages for run in self.runs) + len(self.intake.present) - len(self.gone)

    def is_full(self, most: int, soon_ms: int) -> bool:
        """Whether to spill: many messages wait in memory, or many that are gone keep the intake long.

        Messages due by `soon_ms` do not count: they would be released before the spill is done, or soon after.
        """
        present = self.intake.present
        waiting = present - self.gone
        if len(waiting) < most and len(present) < 4 * most:
            return False
        later = len(waiting) - self.timers.count_near(soon_ms)
        return later >= most or (later > 0 and len(present) - present.rank(waiting.min()) >= 4 * most)

    def done_here(self, message_id: int) -> bool:
        """Whether a timer of the intake is obsolete."""
        intake = self.intake
        return message_id in self.gone or message_id not in intake.present or message_id in intake.unreadable

    def runs_due(self, now_ms: int) -> list[DelayedRun]:
        """Return the runs with messages that are due by now."""
        return [run for run in self.runs if run.not_before_ms() <= now_ms and run.first(self.gone)]

    def all_wait_here(self, ids: Sequence[int]) -> bool:
        """Whether `waiting_here` would yield all of these."""
        wanted, intake = BitMap64(ids), self.intake
        return (
            max(ids) < intake.log.end
            and wanted <= intake.present
            and not wanted.intersect(self.gone)
            and not wanted.intersect(intake.unreadable)
        )

    def waiting_here(self, entries: Iterable[tuple[int, int]]) -> Iterator[Entry]:
        """Yield the entries that wait in the intake and are as durable as their policy promised."""
        end = self.intake.log.end
        for due_at_ms, message_id in entries:
            if message_id < end and not self.done_here(message_id):
                yield due_at_ms, message_id, None, 0, 0

    def _next_due_ms(self) -> int | None:
        first = self.timers.first(self.done_here)
        best_ms = first[0] if first is not None else NEVER_MS
        for run in sorted(self.runs, key=DelayedRun.not_before_ms):
            if run.not_before_ms() >= best_ms:
                break
            first = run.first(self.gone)
            if first is not None:
                best_ms = min(best_ms, first[0])
        return best_ms if best_ms < NEVER_MS else None

    def look_ahead(self) -> int | None:
        """Find out when the first waiting message is due, and remember it; None if none waits."""
        first_ms = self._next_due_ms()
        self.not_before_ms = NEVER_MS if first_ms is None else first_ms
        return first_ms

    def settled(self) -> BitMap64:
        """Return a copy of the ids that are gone for certain."""
        ids = self.gone.copy()
        for _, released in self.unsettled:
            ids -= released
        return ids

    def take_over(self, runs: list[DelayedRun], cut: int) -> Iterator[None]:
        """Adopt the runs of a spill: everything that waited in the intake below `cut` is in them.

        The iterator returned drops obsolete timers step by step; the lock may be released between two steps.
        """
        present = self.intake.present
        below = present.copy()
        below.remove_range(cut, _MOST)
        for run in runs:
            below -= run.ids
        self.gone -= below
        present.remove_range(0, cut)
        self.runs = self.runs + runs
        self.next_number += len(runs)
        self.floor = cut
        self.intake.forget_all()
        self.changed = True
        return self.timers.dropping_below(cut)

    def take_out_finished(self, settled: BitMap64) -> list[DelayedRun]:
        """Remove and return the runs whose messages are all gone for certain, and drop their ids."""
        finished = [run for run in self.runs if run.ids.intersection_cardinality(settled) == run.messages]
        self.runs = [run for run in self.runs if run not in finished]
        for run in finished:
            self.gone -= run.ids
            settled -= run.ids
        return finished

    def raise_floor(self, settled: BitMap64) -> None:
        """Raise the floor past the leading messages of the intake that are gone for certain, as they need no spill.

        Their ids are dropped from the store and from `settled`, which goes into the next manifest.
        """
        needed = self.intake.present - settled
        end = self.intake.log.end
        floor = min(needed.min(), end) if needed else end
        if floor > self.floor:
            behind = self.intake.present.copy()
            behind.remove_range(0, floor)
            below = self.intake.present - behind
            self.intake.present = behind
            self.gone -= below
            settled -= below
            self.floor = floor

    def manifest(self, settled: BitMap64) -> Manifest:
        settled.run_optimize()
        return Manifest(
            accounted=self.settled_position,
            spilled_below=self.floor,
            next_number=self.next_number,
            runs=[RunEntry(run.name, run.run_id, run.messages) for run in self.runs],
            gone=settled.serialize(),
        )

    def check(self) -> None:
        """Assert the invariants."""
        known = self.intake.present.copy()
        for run in self.runs:
            assert not known & run.ids, f"{run.name} holds messages that wait elsewhere, too"
            known |= run.ids
        assert self.gone <= known, "messages are gone that are in no file"
        assert all(ids <= self.gone for _, ids in self.unsettled), "released, but not gone"
        here = [message_id for _, message_id in self.timers.ordered()]
        assert len(here) == len(set(here)), "a timer is set twice"
        assert self.intake.present - self.gone - self.intake.unreadable <= BitMap64(here), "a message has no timer"


# Spilling the intake to runs: messages in order of arrival become files in order of due time.
#
# A file ends where a bucket of time ends: an hour for near due times, then a day, then thirty days. So a file can be
# removed soon after its last message was due. Small neighbouring buckets share a file, so that years of sparse delays
# do not make thousands of files.


_BLOCK_MESSAGES: Final = 256
_BLOCK_BYTES: Final = 64 * 1024
_FILE_BYTES: Final = 1 << 30  # positions in frames have 32 bits
_UNCUT: Final = 1 << 62
# Approximate memory of a decoded message besides its own bytes.
_MESSAGE_BYTES: Final = 400
_DUE_ORDER: Final = attrgetter("due_at_ms", "offset")
# Messages sorted at once, which takes a few milliseconds.
_PIECE_MESSAGES: Final = 2_000
_SAMPLE_MOST: Final = 8_000
# Bytes of a run synced at a time: a release that is synced meanwhile has to wait for them.
_SYNC_BYTES: Final = 4 << 20


class SpillPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a spill."""

    folder: str
    number: int  # of the first file
    now_ms: int
    least_messages: int  # a file with fewer continues into the next bucket
    packing: Packing = PLAIN
    memory_bytes: int = 16 << 20


def bucket_of(due_at_ms: int, now_ms: int) -> int:
    """Return the start of the bucket that holds this due time."""
    distance_ms = due_at_ms - now_ms
    width_ms = HOUR_MS if distance_ms < 2 * DAY_MS else DAY_MS if distance_ms < 2 * MONTH_MS else MONTH_MS
    return due_at_ms - due_at_ms % width_ms


def in_due_order(
    frames: Callable[[], Iterator[Frame]], wanted: Callable[[int], bool], memory_bytes: int
) -> Iterator[Record]:
    """Yield the wanted messages sorted by (due, id). `frames` is read several times rather than held in memory.

    Sorts in small pieces: no other thread runs during a sort, and no message is released.
    """
    for first, end in pairwise(_bounds(frames, wanted, memory_bytes)):
        pieces: list[list[Record]] = [[]]
        for frame in frames():
            chosen = {
                i
                for i, due in enumerate(_dues_ms(frame), frame.base_offset)
                if first[0] <= due <= end[0] and first <= (due, i) < end and wanted(i)
            }
            if chosen:
                pieces[-1] += [record for record in frame.records() if record.offset in chosen]
            if len(pieces[-1]) >= _PIECE_MESSAGES:
                pieces[-1].sort(key=_DUE_ORDER)
                pieces.append([])
        pieces[-1].sort(key=_DUE_ORDER)
        yield from merge(*pieces, key=_DUE_ORDER)


def _bounds(
    frames: Callable[[], Iterator[Frame]], wanted: Callable[[int], bool], memory_bytes: int
) -> list[tuple[int, int]]:
    """Choose bounds in the order of the wanted messages, such that what lies between two of them about fits in memory.

    Estimated from a sample: sorting all keys would take a second for some hundred thousand of them.
    """
    sample: list[tuple[int, int]] = []
    count, every, raw_bytes = 0, 1, 0
    for frame in frames():
        found = [(due, i) for i, due in enumerate(_dues_ms(frame), frame.base_offset) if wanted(i)]
        sample += found[-count % every :: every]
        count += len(found)
        if not frame.is_large:  # large values stay in their file and take no memory
            raw_bytes += frame.header.raw_bytes * len(found) // frame.count
        if len(sample) > _SAMPLE_MOST:
            del sample[1::2]
            every *= 2
    if not count:
        return []
    sample.sort()
    parts = min(-(-(raw_bytes + count * _MESSAGE_BYTES) // memory_bytes), len(sample))
    return [(0, 0), *(sample[len(sample) * i // parts] for i in range(1, parts)), (NEVER_MS, 0)]


def write_runs(world: World, records: Iterator[Record], plan: SpillPlan) -> list[DelayedRun]:
    """Write sorted messages to as many runs as the buckets and the file size require; all are durable on return."""
    runs: list[DelayedRun] = []
    writer: _RunWriter | None = None
    bucket, temporary = 0, join(plan.folder, "spill.tmp")
    try:
        for record in records:
            here = bucket_of(record.due_at_ms, plan.now_ms)
            if writer is not None and (
                (here != bucket and writer.messages >= plan.least_messages) or writer.position > _FILE_BYTES
            ):
                runs.append(writer.finish())
                writer = None
            if writer is None:
                writer = _RunWriter(world, temporary, plan, plan.number + len(runs), record.due_at_ms)
            bucket = here
            writer.add(record)
        if writer is not None:
            runs.append(writer.finish())
            writer = None
        if runs:
            world.disk.sync_folder(plan.folder)
    except BaseException:
        if writer is not None:
            writer.file.close()
        for path in [temporary, *(run.path for run in runs)]:
            with contextlib.suppress(OSError):
                world.disk.remove(path)
        raise
    return runs


class _RunWriter:
    """Writes one run under a temporary name, block by block."""

    def __init__(self, world: World, temporary: str, plan: SpillPlan, number: int, first_due_ms: int) -> None:
        self._world = world
        self._temporary = temporary
        self._folder = plan.folder
        self._name = f"{bucket_of(first_due_ms, plan.now_ms):020d}-{number:010d}.run"
        self._packing = plan.packing
        self._run_id = world.ids.random_u32()
        self._offset = self._synced = 0
        self._block: list[Record] = []
        self._block_bytes = 0
        self._table = array("q")
        self._ids = BitMap64()
        self.messages = 0
        self.position = 0
        self.file: File = world.disk.open(temporary, write=True, create=True)
        self.file.truncate(0)

    def add(self, record: Record) -> None:
        if self._block and isinstance(record.value, LargeValue):  # a large value gets its own block
            self._end_block()
        self._block.append(record)
        self._block_bytes += len(record.value)
        self.messages += 1
        if len(self._block) >= _BLOCK_MESSAGES or self._block_bytes >= _BLOCK_BYTES:
            self._end_block()

    def finish(self) -> DelayedRun:
        """Rename the file to its final name, which is durable after the next sync of the folder."""
        if self._block:
            self._end_block()
        self._ids.run_optimize()
        footer_position = self.position
        self._write(_body(Batch(values=[self._table.tobytes(), self._ids.serialize()]), Kind.JOURNAL))
        trailer = TRAILER_CHECKED.pack(TRAILER_MAGIC, footer_position, self.position - footer_position, self._run_id)
        write_fully(self.file, self.position, [trailer, crc32c(trailer).to_bytes(4, "little")])
        self.file.sync()
        self.file.close()
        self._world.disk.rename(self._temporary, join(self._folder, self._name))
        return DelayedRun(self._world.disk, self._folder, self._name, self._run_id, self._table, self._ids)

    def _end_block(self) -> None:
        records, self._block, self._block_bytes = self._block, [], 0
        ids = array("q", [record.offset for record in records])
        dues_ms = array("q", [record.due_at_ms for record in records])
        self._table.extend((dues_ms[0], self.position))
        self._ids.update(ids.tolist())
        self._write(_body(Batch(values=[dues_ms.tobytes() + ids.tobytes()]), Kind.CONTROL))
        self._write(_body(_as_batch(records), Kind.DATA, self._packing))

    def _write(self, body: Body) -> None:
        place = FramePlace(self._run_id, 0, self.position, self._offset, 0)
        write_fully(self.file, self.position, [header_for(body, place, batch_remaining=0), *body.parts])
        self.position += body.frame_bytes
        self._offset += body.count
        if self.position >= self._synced + _SYNC_BYTES:
            self.file.sync()
            self._synced = self.position


def _body(batch: Batch, kind: Kind, packing: Packing = PLAIN) -> Body:
    return encode_batch(batch, 0, packing=packing, cap_bytes=_UNCUT, kind=kind)[0]


def _as_batch(records: Sequence[Record]) -> Batch:
    """Turn messages into columns, leaving out columns that none of them uses."""
    return Batch(
        values=[r.value for r in records],
        times_ns=[r.timestamp_ns for r in records],
        keys=[r.key for r in records] if any(r.key is not None for r in records) else None,
        headers=[r.headers for r in records] if any(r.headers for r in records) else None,
        priorities=[r.priority for r in records] if any(r.priority for r in records) else None,
        expires_at_ms=[r.expires_at_ms for r in records] if any(r.expires_at_ms for r in records) else None,
        due_at_ms=[r.due_at_ms for r in records],
        flags=[r.flags for r in records] if any(r.flags for r in records) else None,
    )


def _dues_ms(frame: Frame) -> Sequence[int]:
    return frame.columns().due_at_ms() or [0] * frame.count


logger = get_logger(__name__)

_Item = TypeVar("_Item")

# Frames between two pauses of a spill: a few milliseconds.
_PAUSE_FRAMES: Final = 10
_PAUSE_MESSAGES: Final = 256


class DelayedUpkeep:
    """Spills and saves, one at a time."""

    def __init__(self, world: World, folder: str, settings: DelaySettings, state: DelayedState) -> None:
        self._world = world
        self._folder = folder
        self._settings = settings
        self._state = state
        self._log = state.intake.log
        self._lock = Lock()
        self._saved_ns = world.clock.monotonic_ns()
        self._failed_ns: int | None = None
        self._garbage: list[DelayedRun] = []  # finished runs, removed after the next manifest
        self.on_pause: Callable[[], object] = lambda: None
        log_settings = self._log.settings
        self._packing = Packing.named(
            log_settings.codec,
            level=log_settings.codec_level,
            min_bytes=log_settings.codec_min_bytes,
            min_saving_percent=log_settings.codec_min_saving_percent,
            max_bytes=log_settings.max_raw_bytes,
        )

    def tick(self, now_ms: int) -> int | None:
        """Do what is due by now and return the ms until the next call. A full disk does not stop it."""
        state = self._state
        log_ms = self._log.tick()
        with state.lock:
            state.timers.advance(now_ms)
            state.timers.shed(state.done_here)
            full = state.is_full(self._settings.spill_messages, now_ms + SOON_MS)
            # If only the position moved, saving is less urgent: it merely shortens the next opening.
            waits = 1 if state.changed else 10 if state.settled_position > state.saved_position else None
        save_ms = None
        if full or waits is not None:
            save_ms = 0 if full and self._failed_ns is None else self._ms_until_save(waits or 1)
            if save_ms == 0:
                save_ms = self._try(now_ms, full=full)
        with state.lock:
            first_ms = state.look_ahead()
        due_ms = None if first_ms is None else max(0, first_ms - now_ms)
        return soonest(log_ms, save_ms, due_ms)

    def spill(self, now_ms: int) -> int:
        """Move the waiting messages of the intake to runs, and return their number."""
        with self._lock, _naming_errors(self._folder):
            return self._spill(now_ms)

    def save(self, on_pause: Callable[[], object] = lambda: None) -> None:
        """Write the manifest, and remove the files that it makes obsolete.

        Messages are not released meanwhile unless `on_pause` does so: a caller that compacts does not expect new
        messages in the log, and may hold locks that a release would wait for.
        """
        with self._lock, _naming_errors(self._folder):
            self._save(on_pause)

    def close(self) -> None:
        """Save, and close the intake. The folder is released even if this fails; nothing acknowledged is lost."""
        with self._lock:
            with self._state.lock:
                if self._state.closed:
                    return
                self._state.closed = True
            try:
                self._save(lambda: None)
            except (OSError, HoldfastError) as error:
                logger.warning("manifest not written", extra={"folder": self._folder, "error": str(error)})
            finally:
                self._log.close()

    def _try(self, now_ms: int, *, full: bool) -> int | None:
        try:
            if full:
                self.spill(now_ms)
            else:
                self.save(self.on_pause)
        except Unavailable as error:
            logger.warning("upkeep put off", extra={"folder": self._folder, "error": str(error)})
            self._failed_ns = self._world.clock.monotonic_ns()
            return self._settings.save_ms
        self._failed_ns = None
        return None

    def _ms_until_save(self, times: int) -> int:
        since_ns = max(self._saved_ns, self._failed_ns or self._saved_ns)
        waited_ms = (self._world.clock.monotonic_ns() - since_ns) // 1_000_000
        return max(0, self._settings.save_ms * times - waited_ms)

    def _spill(self, now_ms: int) -> int:
        state, log = self._state, self._log
        cut = log.written_end
        log.sync()
        with state.lock:
            state.check_open()
            floor, elsewhere = state.floor, state.settled() | state.twice
            plan = SpillPlan(
                folder=self._folder,
                number=state.next_number,
                now_ms=now_ms,
                least_messages=max(1, self._settings.spill_messages // 24),
                packing=self._packing,
            )
        records = in_due_order(
            lambda: self._with_pauses(state.intake.data_frames(floor, cut), _PAUSE_FRAMES),
            lambda message_id: message_id >= floor and message_id not in elsewhere,
            plan.memory_bytes,
        )
        runs = write_runs(self._world, self._with_pauses(records, _PAUSE_MESSAGES), plan)
        with state.lock:
            dropping = state.take_over(runs, cut)
        while self._step(dropping):
            self.on_pause()
        log.roll()
        self._save(self.on_pause)
        return sum(run.messages for run in runs)

    def _step(self, steps: Iterator[None]) -> bool:
        """Take one step under the lock; return whether there was one."""
        with self._state.lock:
            return next(steps, self) is None

    def _with_pauses(self, items: Iterator[_Item], every: int) -> Iterator[_Item]:
        """Pause now and then: a spill may take a second, and messages that come due must not wait for its end."""
        for i, item in enumerate(items):
            if not i % every:
                self.on_pause()
            yield item

    def _save(self, on_pause: Callable[[], object]) -> None:
        state = self._state
        with state.lock:
            settled = state.settled()
            state.raise_floor(settled)
            self._garbage += state.take_out_finished(settled)
            manifest = state.manifest(settled)
            state.changed = False
        try:
            self._log.sync()
            save_manifest(self._world.disk, self._folder, manifest)
        except BaseException:
            state.changed = True
            raise
        self._saved_ns = self._world.clock.monotonic_ns()
        state.saved_position = manifest.accounted
        garbage, self._garbage = self._garbage, []
        for run in garbage:
            on_pause()
            with contextlib.suppress(OSError):  # not in the manifest any more, so the next opening removes it
                if run.keep_file:
                    self._world.disk.rename(run.path, run.path + ".damaged")
                else:
                    self._world.disk.remove(run.path)
        for segment in self._log.segments()[:-1]:
            if segment.next_offset > manifest.spilled_below:
                return
            on_pause()  # removing a large file takes a while
            self._log.trim(segment.next_offset)


@contextlib.contextmanager
def _naming_errors(folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = DiskFull if error.errno in FULL_DISK else Unavailable
        raise kind(
            f"the delayed messages in {folder} could not be reorganized: {advice(error)}. Nothing is lost: all of them "
            "stay where they were, and this is retried later"
        ) from error
