"""Which dedup ids were published to a topic within the window. Exact, crash-safe, and bounded in memory.

                    add                     save                      save, now and then
    a message's id ─────► recent (memory) ─────────► a run on disk ─────────► one larger run
                          at most about max_recent   immutable, mapped        expired ids are dropped

The index is a cache of the ids in the logs of all partitions (each has two: its own and the delayed intake), and it
keeps an id for the whole window even after the logs have dropped the message. Adding an id writes nothing: what is not
yet in a run is in the logs from `covered` on, and the caller adds it again from there after opening. So the caller
pins all logs at `covered`: retention may only remove what a run holds.

Each save puts one file in place with one rename, and that file names the older runs that still belong to the index,
so a crash leaves the state before the save or the state after it. A missing or damaged run is an error, never a
forgotten id: the index does not answer "new" because it cannot read. Full memory does not lose ids either; `full`
only says that it is time to save.

Ids are compared by their 128-bit BLAKE2b digests. Two different ids practically never share one (with a billion ids
in the window, the chance is one in 10^20), so the answers are exact for all practical purposes, and an id of any
length costs the same.

Make one call at a time, under the caller's own lock. Only `Saving.write` may run concurrently with other calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import add
from struct import Struct
from typing import Final

import msgspec

from holdfast.broker.dedup.runs import (
    DIGEST_BYTES,
    TEMPORARY,
    Covered,
    DedupRun,
    Merge,
    RunFacts,
    RunWriter,
    expected_runs,
    note_newest,
    open_run,
    prefix_of,
    run_name,
)
from holdfast.broker.messages import Draft, DraftFields, Manner, Place, Publication, first_place, with_dedup_ids
from holdfast.broker.messages import reference_of as place_reference_of
from holdfast.broker.metrics import Metrics
from holdfast.broker.partition import Partition
from holdfast.env import Disk, World
from holdfast.env.process import get_logger, stand_back
from holdfast.errors import Closed, CorruptData, DamagedRange, DiskFailed, DiskFull, HoldfastError
from holdfast.later import hashlib
from holdfast.model import Appended, Durability
from holdfast.storage.files import FULL_DISK, join, open_error, ran_out, remove_tree, shortage
from holdfast.storage.log import Log

logger = get_logger(__name__)


# Time and reference, big endian: comparing entries as bytes compares their times first.
_ENTRY: Final = Struct(">QQ")

# Merging never makes a run larger than this, so that a save takes seconds at most.
_LARGEST_MERGED: Final = 4_000_000


class DedupIndex:
    """Maps a dedup id to the reference and the time of the first message that had it."""

    def __init__(self, world: World, folder: str, runs: list[DedupRun], *, window_ms: int, max_recent: int) -> None:
        self._world = world
        self._folder = folder
        self._window_ms = window_ms
        self._max_recent = max_recent
        self._recent: dict[bytes, bytes] = {}  # digest -> entry
        self._saving: Saving | None = None
        self._failure: HoldfastError | None = None
        self._adopted: list[DedupRun] = []  # runs in the partitions' own folders, until the next save
        self._runs: list[DedupRun] = []
        self._run_finds: list[Callable[[bytes, int], bytes | None]] = []
        self._use(runs)
        # An id is nearly always looked up just before it is added; reusing its digest halves the cost of adding it.
        self._last_id, self._last_digest = b"", _digest(b"")
        last = max((run.facts for run in runs), key=lambda facts: facts.sequence, default=None)
        self._sequence = 0 if last is None else last.sequence
        self.covered: tuple[Covered, ...] = () if last is None else last.covered

    @staticmethod
    def open(world: World, folder: str, *, window_ms: int, max_recent: int = 65_536) -> DedupIndex:
        """Load the runs in the folder. The caller then adds what the logs hold from `covered` on."""
        try:
            runs = _load_runs(world, folder)
        except OSError as error:
            raise open_error(folder, error) from error
        return DedupIndex(world, folder, runs, window_ms=window_ms, max_recent=max_recent)

    def find(self, dedup_id: bytes, now_ms: int, *, window_ms: int | None = None) -> int | None:
        """Return the reference of the message that had this id within the window, the newest if there were several.

        `window_ms` overrides the window for this call; a longer window sees only what is still kept. An entry dated in
        the future, written before the clock was set back, is within every window.
        """
        self._last_id = dedup_id
        self._last_digest = digest = _digest(dedup_id)
        found = self._recent.get(digest, b"")
        if self._saving is not None:
            found = max(found, self._saving.recent.get(digest, b""))
        if self._run_finds:
            prefix = prefix_of(digest)
            # Ask every run: if the clock was set back, the latest entry need not be the last one added.
            for find in self._run_finds:
                found = max(found, find(digest, prefix) or b"")
        if not found:
            return None
        at_ms, reference = _ENTRY.unpack(found)
        return reference if at_ms > now_ms - (self._window_ms if window_ms is None else window_ms) else None

    def add(self, dedup_id: bytes, reference: int, at_ms: int) -> None:
        """Remember an id, in memory. If the id is known already, the later entry wins."""
        digest = self._last_digest if dedup_id is self._last_id else _digest(dedup_id)
        entry = _ENTRY.pack(at_ms if at_ms > 0 else 0, reference)
        if self._recent.setdefault(digest, entry) < entry:
            self._recent[digest] = entry

    def full(self) -> bool:
        """Whether memory holds more than it should and a save is due. Everything keeps working until then."""
        return len(self._recent) > self._max_recent

    def save(self, covered: tuple[Covered, ...]) -> None:
        """Write the ids in memory to a run, durably. All logs must be synced up to `covered`, all ids below it added.

        If it raises, memory keeps its ids and nothing is forgotten; after a full disk, call it again.
        """
        saving = self.begin_save(covered)
        if saving is not None:
            self._complete(saving)

    def begin_save(self, covered: tuple[Covered, ...]) -> Saving | None:
        """Take the first of the three steps of a save, which is quick; return None if there is nothing to write.

        `Saving.write` does the work and may run without the caller's lock; `finish_save` must follow, whether `write`
        raised or not.
        """
        self._check_idle()
        after_ms = self._now_ms() - self._window_ms
        live = [run for run in self._runs if run.facts.newest_ms > after_ms]
        unchanged = covered == self.covered and len(live) == len(self._runs)
        if not self._recent and unchanged and not self._adopted:
            return None
        recent, self._recent = self._recent, {}
        return self._begin(recent, _to_merge(live, len(recent)), live, covered, after_ms)

    def finish_save(self, saving: Saving) -> None:
        """Take the last step of a save: use the new run, or take its ids back into memory if writing failed."""
        self._failure = self._failure or saving.failure
        if saving.run is not None:
            self.covered = saving.run.facts.covered
            self._use([*saving.kept, saving.run])
            self._adopted = []
        else:
            self._recent = _latest(saving.recent, self._recent)
        self._saving = None

    def adopt(self, folders: Mapping[int, str]) -> None:
        """Take in the indexes that partitions kept in these folders; the next save merges them into this one.

        Does nothing if this index has a run: then they were merged already, and a crash left the files behind.
        """
        covered: dict[int, Covered] = {}
        for number, folder in folders.items() if not self._sequence else ():
            runs = _load_runs(self._world, folder)
            for run in runs:
                run.partition = number
            self._adopted += runs
            covered |= {number: runs[0].facts.covered[0]} if runs else {}
        if covered:
            self.covered = tuple(covered.get(number, Covered()) for number in range(max(covered) + 1))
            self._use(self._adopted)

    def check(self) -> None:
        """Read everything on disk; raises CorruptData if it is not what was written."""
        for run in self._runs:
            run.check()

    def close(self) -> None:
        """Close the runs. Nothing is saved: call `save` first, or the next opening reads the ids from the logs."""
        self._failure = closed = Closed(f"the dedup index in {self._folder} is closed; open it again to use it")
        self._recent, self._runs, self._run_finds = {}, [], [partial(_refuse, closed)]

    def __len__(self) -> int:
        """Number of entries in memory and on disk, including expired and superseded ones."""
        saving = 0 if self._saving is None else len(self._saving.recent)
        return len(self._recent) + saving + sum(run.count for run in self._runs)

    def _use(self, runs: list[DedupRun]) -> None:
        self._runs = sorted(runs, key=_count_of)  # the largest first
        self._run_finds = [run.find for run in self._runs]

    def _begin(
        self,
        recent: dict[bytes, bytes],
        merged: list[DedupRun],
        live: list[DedupRun],
        covered: tuple[Covered, ...],
        after_ms: int,
    ) -> Saving:
        # Never reuse a number, not even after an error: the disk may hold a file of that name.
        self._sequence += 1
        # A run can only name runs in its own folder, so adopted ones are merged.
        merged = [*merged, *(run for run in self._adopted if run in live and run not in merged)]
        kept = [run for run in live if run not in merged]
        newest_ms = max(
            [_ENTRY.unpack(max(recent.values(), default=bytes(16)))[0], *(r.facts.newest_ms for r in merged)]
        )
        self._saving = Saving(
            disk=self._world.disk,
            folder=self._folder,
            facts=RunFacts(self._sequence, newest_ms, covered, tuple(run.facts.sequence for run in kept)),
            recent=recent,
            merged=merged,
            kept=kept,
            stale=[run.path for run in self._runs if run not in kept],
            after_ms=after_ms,
        )
        return self._saving

    def _check_idle(self) -> None:
        if self._failure is not None:
            raise self._failure
        assert self._saving is None, "one save at a time"

    def _complete(self, saving: Saving) -> None:
        try:
            saving.write()
        finally:
            self.finish_save(saving)

    def _now_ms(self) -> int:
        return self._world.clock.now_ns() // 1_000_000


class Saving(msgspec.Struct):
    """A save in progress. What it writes no longer changes."""

    disk: Disk
    folder: str
    facts: RunFacts
    recent: dict[bytes, bytes]
    merged: list[DedupRun]
    kept: list[DedupRun]
    stale: list[str]  # runs that the new one replaces
    after_ms: int
    run: DedupRun | None = None
    failure: HoldfastError | None = None

    def write(self) -> None:
        """Write the run durably, then remove the runs that it replaces. Their mapped views stay valid."""
        try:
            if not self.kept:
                self.disk.make_folder(self.folder)
            rows = sorted(map(add, self.recent.keys(), self.recent.values()))
            merge = Merge(self.merged, rows, after_ms=self.after_ms)
            run = RunWriter(self.disk, self.folder).write(self.facts, merge)
        except OSError as error:
            _remove(self.disk, join(self.folder, TEMPORARY))
            raise self._error(error) from error
        try:
            note_newest(self.disk, self.folder, self.facts.sequence)
        except OSError as error:  # the run is in place; without the note, its loss would merely go unnoticed
            facts = {"folder": self.folder, "error": str(error)}
            logger.warning("the newest run of dedup ids was not recorded", extra=facts)
        for path in self.stale:
            _remove(self.disk, path)
        self.run = run

    def _error(self, error: OSError) -> HoldfastError:
        why = error.strerror or str(error)
        if error.errno in FULL_DISK:
            return DiskFull(f"no room to save dedup ids in {self.folder}: {why}. They stay in memory; free some space")
        if ran_out(error):
            return shortage(f"dedup ids could not be saved in {self.folder}", error, "They stay in memory")
        self.failure = DiskFailed(
            f"saving dedup ids in {self.folder} failed: {why}. They stay in memory, and the logs hold them; nothing "
            "more is saved. Check the disk, then open the folder again"
        )
        logger.error("dedup ids not saved", extra={"folder": self.folder, "error": str(error)})
        return self.failure


def _load_runs(world: World, folder: str) -> list[DedupRun]:
    """Load the last run and the runs that it names. Removes what a crash left over."""
    disk = world.disk
    if not disk.exists(folder):
        return []
    numbers = expected_runs(world, folder)
    runs: list[DedupRun] = []
    if numbers:
        last = open_run(disk, folder, numbers[-1])
        runs = [last, *(open_run(disk, folder, number) for number in last.facts.kept)]
        # The process may have died before the last name was durable; the others may only be removed after this sync.
        disk.sync_folder(folder)
    for number in set(numbers) - {run.facts.sequence for run in runs}:
        disk.remove(join(folder, run_name(number)))
    if disk.exists(join(folder, TEMPORARY)):
        disk.remove(join(folder, TEMPORARY))
    return runs


def _to_merge(runs: list[DedupRun], recent: int) -> list[DedupRun]:
    """Choose the smallest runs, as long as each is less than twice the size of what is merged already.

    Each run that stays is then at least twice as large as the next one, so their number grows with the logarithm
    of the ids, until runs are too large to be merged.
    """
    merged, total = [], recent
    for run in reversed(runs):
        if run.count >= max(1, 2 * total) or total + run.count > _LARGEST_MERGED:
            break
        merged.append(run)
        total += run.count
    return merged


def _digest(dedup_id: bytes) -> bytes:
    return hashlib.blake2b(dedup_id, digest_size=DIGEST_BYTES).digest()


def _latest(one: dict[bytes, bytes], two: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Merge both; if both have a digest, the later entry wins."""
    return one | {digest: max(entry, one.get(digest, entry)) for digest, entry in two.items()}


def _count_of(run: DedupRun) -> int:
    return -run.count


def _refuse(error: HoldfastError, digest: bytes, prefix: int) -> bytes | None:
    raise error


def _remove(disk: Disk, path: str) -> None:
    """Remove a file that is no longer needed; if that fails, the next opening removes it."""
    with suppress(OSError):
        disk.remove(path)


# Duplicates: a dedup id is unique in the whole topic, whichever partition its message went to.
#
#     publish ──► one lock ──► known? ──► the place of the first message
#                    │
#                    └── new ──► append the message to its partition's log ──► add the id to the index, in memory
#
# One index serves all partitions, so an id is recognized with another key, and after partitions were added. Looking
# up, writing and adding are one step under one lock: if two publishers use the same id, the second finds the first's
# message. The lock is never held while waiting for a sync.
#
# The message is the record of its id, and nothing else is written, so a crash cannot leave one without the other. The
# index is a cache (see `DedupIndex`). Opening reads the ids from every partition's logs, starting where the last saved
# run ends; a save notes these positions for all partitions, syncs the logs up to them, and only then puts the run in
# place.
#
# Earlier versions kept an index in each partition's folder. These are merged into the topic's index when the topic is
# first opened, then removed. A crash before the merged run is in place changes nothing; a crash after it leaves files
# to remove. If the disk has no room to merge, they are read where they are until it does.


_NAME: Final = "dedup"
_SAVE_EVERY_MS: Final = 3_600_000
_FOREVER_MS: Final = 1 << 62
_MERGE_EVERY_MS: Final = 60_000  # how often to retry while the disk has no room


class Duplicates:
    """The dedup ids of a topic. Safe to use from any thread."""

    def __init__(self, world: World, folder: str, metrics: Metrics, *, window_ms: int) -> None:
        self._world = world
        self._topic_folder = folder
        self._folder = join(folder, _NAME)
        self._metrics = metrics
        self._window_ms = window_ms
        self._partitions: dict[int, Partition] = {}
        self.index: DedupIndex | None = None  # opened at first use
        self.on_new_part: Callable[[], None] = lambda: None  # called when the folder of ids was created
        self.on_parting: Callable[[frozenset[str]], object] = lambda _parts: None  # called before folders are removed
        self._error: CorruptData | None = None  # why ids cannot be looked up; messages without an id are not affected
        self.closed = False
        self._lock = threading.Lock()  # makes looking up and writing one step
        self._save_lock = threading.Lock()
        self._old: dict[int, str] = {}  # partition -> folder of an old index to merge into the topic's
        self._saved_ms = self._mono_ms()

    def follow(self, number: int, partition: Partition) -> None:
        """Register an open partition: from now on its messages with dedup ids are published through this object."""
        with self._lock:
            if self.index is not None:
                self._take_in(self.index, number, partition)
            if self._error is not None:
                partition.keep_for_dedup(Covered())
            self._partitions[number] = partition
        partition.publish_unseen = partial(self.publish, number, partition)
        partition.publish_one_unseen = partial(self.publish_one, number, partition)

    def unfollow(self, number: int) -> None:
        """Unregister a partition."""
        with self._lock:
            self._partitions.pop(number, None)

    def are_used(self) -> bool:
        """Whether any message has had a dedup id so far."""
        return self._world.disk.exists(self._folder) or bool(self._old_folders())

    def open_if_used(self) -> None:
        """Load the known ids when a topic is opened, after its partitions."""
        with self._lock:
            if self.are_used():
                try:
                    self._open()
                except CorruptData as error:
                    self._refuse(error)

    def refuse(self, error: CorruptData) -> None:
        """Refuse messages with dedup ids from now on: whether they are duplicates can no longer be known."""
        with self._lock:
            self._refuse(error)

    def _refuse(self, error: CorruptData) -> None:
        if self._error is None:
            self._error = error
            for partition in self._partitions.values():
                partition.keep_for_dedup(Covered())  # keep the whole log: its ids are all that is left
            logger.error("dedup ids cannot be read", extra={"folder": self._folder, "error": str(error)})

    def publish(
        self,
        number: int,
        partition: Partition,
        drafts: Sequence[Draft],
        manner: Manner,
        *,
        window_ms: int | None = None,
    ) -> Publication:
        """Store the drafts that duplicate neither an earlier message nor another draft of the same call.

        `window_ms` is as for `DedupIndex.find`.
        """
        now_ms = self._world.clock.now_ns() // 1_000_000
        fresh: list[Draft] = []
        known: dict[int, int] = {}  # index of a draft -> reference, or -1 - index of the fresh draft that it duplicates
        in_call: dict[bytes, int] = {}
        with self._lock:
            index = self._open()
            for i, draft in enumerate(drafts):
                if draft.dedup_id is not None:
                    found = index.find(draft.dedup_id, now_ms, window_ms=window_ms)
                    if found is not None and not self._is_lost(found):
                        known[i] = found
                        continue
                    if draft.dedup_id in in_call:
                        known[i] = -1 - in_call[draft.dedup_id]
                        continue
                    in_call[draft.dedup_id] = len(fresh)
                fresh.append(draft)
            publication = partition.store(fresh, manner)
            for draft, place in zip(fresh, publication.places, strict=True):
                if draft.dedup_id is not None:
                    index.add(draft.dedup_id, place_reference_of(place, number), now_ms)
        if known:
            self._metrics.duplicates.add(len(known))
            self._add_duplicates(publication, known, number, len(drafts))
        return publication

    def publish_one(
        self, number: int, partition: Partition, fields: DraftFields, chosen: Durability, time_ns: int
    ) -> int:
        """Fused form of `publish` for one message; -1 if only that can write it, or if its id is known."""
        now_ms = (time_ns or self._world.clock.now_ns()) // 1_000_000
        due_at_ms, dedup_id = fields[5], fields[6]
        assert dedup_id is not None
        if self._lock.locked():
            stand_back(self._lock)
        with self._lock:
            index = self._open()
            if index.find(dedup_id, now_ms) is not None:
                return -1
            at = partition.store_one(fields, chosen, time_ns)
            if at >= 0:
                place = Place(None, at) if due_at_ms else Place(at)
                index.add(dedup_id, place_reference_of(place, number), now_ms)
            return at

    def find(self, dedup_id: bytes) -> Place | None:
        """Where the first message with this id is, however long ago that was; None if it is new, or lost."""
        with self._lock:
            found = self._open().find(dedup_id, 0, window_ms=_FOREVER_MS)
            return None if found is None or self._is_lost(found) else first_place(found)

    def _add_duplicates(self, publication: Publication, known: dict[int, int], number: int, count: int) -> None:
        fresh = publication.places
        rest = iter(fresh)
        firsts = {
            i: first_place(place_reference_of(fresh[-1 - found], number) if found < 0 else found)
            for i, found in known.items()
        }
        publication.places = [firsts.get(i) or next(rest) for i in range(count)]
        if publication.durability == "fsync":
            # "Duplicate" is an acknowledgement as well: the first message must be on disk.
            publication.firsts = [wait for place in firsts.values() for wait in self._unsynced(place)]

    def _is_lost(self, reference: int) -> bool:
        """Whether the first message is damaged, or was at the end of a log and is missing: then its copy is stored.

        One that was removed is not lost: somebody was done with it.
        """
        place = first_place(reference)
        partition = self._partitions.get(place.partition or 0)
        if partition is None or partition.lost is not None:
            return False  # it may come back, and until then nothing is stored there
        for log, at in _where(partition, place):
            if log.start <= at < log.end:
                try:
                    next(log.read(at))
                except DamagedRange:
                    return True
        return False

    def _unsynced(self, place: Place) -> list[tuple[Log, Appended]]:
        """Return what to wait for until the message is on disk: its log, or nothing."""
        found = _where(self._partitions[place.partition or 0], place)
        return [(log, Appended(0, log.written_end, "fsync")) for log, at in found if at >= log.synced_end]

    def tick(self) -> None:
        """Save if memory is full or the last save was long ago. No wakeup is needed for this."""
        overdue = self._mono_ms() - self._saved_ms > (_MERGE_EVERY_MS if self._old else _SAVE_EVERY_MS)
        if self.index is not None and (overdue or self.index.full()):
            self.save()

    def save(self) -> None:
        """Write the ids that are only in memory to disk, after syncing their messages."""
        index = self.index
        if index is None:
            return
        with self._save_lock:
            with self._lock:
                partitions = dict(self._partitions)
                saving = index.begin_save(self._covered(index))
            self._saved_ms = self._mono_ms()
            if saving is not None:
                try:
                    for partition in partitions.values():
                        partition.sync()
                    saving.write()
                finally:
                    with self._lock:
                        index.finish_save(saving)
                for number, partition in partitions.items():
                    partition.keep_for_dedup(_covered_of(index, number))
            self._drop_old()

    def close(self) -> None:
        """Save, and close the files. Call this before closing the partitions."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        if self.index is not None:
            try:
                self.save()
            except DiskFull as error:  # the logs hold these ids: the next opening reads more, and nothing is lost
                logger.warning("dedup ids not saved", extra={"folder": self._folder, "error": str(error)})
            finally:
                self.index.close()

    def _open(self) -> DedupIndex:
        """Open the index if it is not open yet. The caller holds the lock."""
        if self._error is not None:
            raise self._error
        if self.index is None:
            if self.closed:
                raise Closed(f"the topic in {self._topic_folder} was deleted or closed: open it again to use it")
            try:
                self._old = self._old_folders()
                new = not self._old and not self._world.disk.exists(self._folder)
                if new:
                    self._world.disk.make_folder(self._folder)
                index = DedupIndex.open(self._world, self._folder, window_ms=self._window_ms)
                index.adopt(self._old)
                if new:
                    self.on_new_part()
            except OSError as error:
                raise open_error(self._folder, error) from error
            if self._old:
                self._merge_old(index)
            for number, partition in self._partitions.items():
                self._take_in(index, number, partition)
            self.index = index
        return self.index

    def _merge_old(self, index: DedupIndex) -> None:
        """Merge the partitions' old indexes into a run of the topic, if the disk has room."""
        try:
            index.save(index.covered)
            self._drop_old()
        except (DiskFull, OSError) as error:
            logger.warning(
                "dedup ids of an earlier version stay where they are until there is room to merge them",
                extra={"folder": self._topic_folder, "error": str(error)},
            )

    def _drop_old(self) -> None:
        """Remove the old indexes, which are now in a run of the topic."""
        if self._old:
            self.on_parting(frozenset(f"{number}/{_NAME}" for number in self._old))
            for folder in self._old.values():
                remove_tree(self._world.disk, folder)
            self._old = {}
            self.on_new_part()

    def _take_in(self, index: DedupIndex, number: int, partition: Partition) -> None:
        """Add the ids that only the partition's logs hold."""
        covered = _covered_of(index, number)
        partition.keep_for_dedup(covered)
        for record, dedup_id in with_dedup_ids(partition.log, covered.partition.offset):
            place = Place(record.offset)
            index.add(dedup_id, place_reference_of(place, number), record.timestamp_ns // 1_000_000)
        if partition.delayed is not None:
            for record, dedup_id in with_dedup_ids(partition.delayed.intake, covered.intake.offset):
                place = Place(None, record.offset)
                index.add(dedup_id, place_reference_of(place, number), record.timestamp_ns // 1_000_000)

    def _covered(self, index: DedupIndex) -> tuple[Covered, ...]:
        """Return the positions up to which a save that begins now covers every log."""
        count = max([len(index.covered), *[number + 1 for number in self._partitions]])
        return tuple(
            self._partitions[number].positions() if number in self._partitions else _covered_of(index, number)
            for number in range(count)
        )

    def _old_folders(self) -> dict[int, str]:
        """Return the folders of indexes that partitions kept before there was one for the topic."""
        folders = {number: join(join(self._topic_folder, str(number)), _NAME) for number in self._partitions}
        return {number: folder for number, folder in folders.items() if self._world.disk.exists(folder)}

    def _mono_ms(self) -> int:
        return self._world.clock.monotonic_ns() // 1_000_000


def _where(partition: Partition, place: Place) -> list[tuple[Log, int]]:
    """Return the log that the message was written to, and its offset there; nothing if that log cannot be used."""
    if place.offset is not None:
        return [(partition.log, place.offset)]
    if partition.delayed is not None and place.delayed_id is not None:
        return [(partition.delayed.intake, place.delayed_id)]
    return []


def _covered_of(index: DedupIndex, number: int) -> Covered:
    return index.covered[number] if number < len(index.covered) else Covered()
