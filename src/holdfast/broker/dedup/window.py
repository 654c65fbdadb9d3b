"""Which dedup ids were put to a topic within the window: exact, kept across crashes, in bounded memory.

                    add                     save                      save, now and then
    a message's id ─────► recent (memory) ─────────► a run on disk ─────────► one larger run
                          at most about max_recent   immutable, mapped        what has expired falls out

The index is a cache of the ids that the logs of all partitions hold (each has two: its own and the delayed
intake), and it keeps them for the window when the logs no longer do. Adding writes nothing: what is not yet in a
run is in the logs at or behind `covered`, and after opening the caller adds it again from there. So the caller
pins all logs at `covered`: retention may take only what a run has.

Each save puts one file in place, by one rename, and this file says which of the older runs still
belong to the index: a crash leaves the state before the save or the one after it. A run that is
missing or damaged is an error, never an id forgotten: the index does not answer "new" because it cannot
read. Memory that is full makes no id unknown either; `full` only says that it is time to save.

Ids are compared by their 128-bit BLAKE2b digests. That two different ids share one is as good as
impossible (a billion ids in the window: one chance in 10^20), so the answers are exact for all practical
purposes, and an id of any length costs the same.

One call at a time: the caller holds its own lock. Only `Saving.write` may run beside the other calls.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from operator import add
from struct import Struct
from typing import Final

from holdfast.broker.dedup.runs import (
    DIGEST_BYTES,
    TEMPORARY,
    Covered,
    DedupRun,
    Merge,
    RunFacts,
    RunWriter,
    newest_noted,
    note_newest,
    open_run,
    prefix_of,
    reference_of,
    run_name,
)
from holdfast.broker.messages import Draft, Manner, Place, Publication, first_place, with_dedup_ids
from holdfast.broker.messages import reference_of as messages_reference_of
from holdfast.broker.metrics import Metrics
from holdfast.broker.partition import Partition
from holdfast.env import Disk, World
from holdfast.errors import Closed, CorruptData, DiskFailed, DiskFull, HoldfastError
from holdfast.model import Appended
from holdfast.storage.files import FULL_DISK, join, open_error, ran_out, remove_tree, shortage
from holdfast.storage.log import Log

logger = logging.getLogger(__name__)

_RUN: Final = re.compile(r"(\d{20})\.ids")

# Time and reference, in the order of bytes: the later of two is also the greater.
_ENTRY: Final = Struct(">QQ")

# A run does not grow beyond this by merging, so that a save takes seconds at most.
_LARGEST_MERGED: Final = 4_000_000


class DedupIndex:
    """Dedup id -> reference and time of the message that had it first."""

    def __init__(self, world: World, folder: str, runs: list[DedupRun], *, window_ms: int, max_recent: int) -> None:
        self._world = world
        self._folder = folder
        self._window_ms = window_ms
        self._max_recent = max_recent
        self._recent: dict[bytes, bytes] = {}  # digest -> entry
        self._saving: Saving | None = None
        self._failure: HoldfastError | None = None
        self._adopted: list[DedupRun] = []  # of partitions, in their folders: until the next save
        self._runs: list[DedupRun] = []
        self._run_finds: list[Callable[[bytes, int], bytes | None]] = []
        self._use(runs)
        # An id is nearly always looked for just before it is added: half of the cost of adding it.
        self._last_id, self._last_digest = b"", _digest(b"")
        last = max((run.facts for run in runs), key=lambda facts: facts.sequence, default=None)
        self._sequence = 0 if last is None else last.sequence
        self.covered: tuple[Covered, ...] = () if last is None else last.covered

    @staticmethod
    def open(world: World, folder: str, *, window_ms: int, max_recent: int = 65_536) -> DedupIndex:
        """What the runs in the folder know. The caller then adds what the logs hold from `covered` on."""
        try:
            runs = _load_runs(world, folder)
        except OSError as error:
            raise open_error(folder, error) from error
        return DedupIndex(world, folder, runs, window_ms=window_ms, max_recent=max_recent)

    def find(self, dedup_id: bytes, now_ms: int, *, window_ms: int | None = None) -> int | None:
        """The reference of the message that had this id within the window; the newest if there were several.

        Another window may be given for the call. A longer one than the index has sees only what is still kept.
        What was put in the future, by a clock that was set back since, is within every window.
        """
        self._last_id = dedup_id
        self._last_digest = digest = _digest(dedup_id)
        prefix = prefix_of(digest)
        # All are asked, because after the clock was set back the latest entry need not be the last one added.
        found = [entry for find in self._run_finds if (entry := find(digest, prefix)) is not None]
        if (entry := self._recent.get(digest)) is not None:
            found.append(entry)
        if self._saving is not None and (entry := self._saving.recent.get(digest)) is not None:
            found.append(entry)
        if not found:
            return None
        at_ms, reference = _ENTRY.unpack(max(found))
        return reference if at_ms > now_ms - (self._window_ms if window_ms is None else window_ms) else None

    def add(self, dedup_id: bytes, reference: int, at_ms: int) -> None:
        """Remember an id, in memory. Of two entries for one id the later one counts."""
        digest = self._last_digest if dedup_id is self._last_id else _digest(dedup_id)
        entry = _ENTRY.pack(at_ms if at_ms > 0 else 0, reference)
        if self._recent.setdefault(digest, entry) < entry:
            self._recent[digest] = entry

    def full(self) -> bool:
        """Whether memory holds more than it should: save soon. Until then everything works on."""
        return len(self._recent) > self._max_recent

    def save(self, covered: tuple[Covered, ...]) -> None:
        """Put what memory holds into a run, durably; all logs are synced up to `covered`, all ids below are added.

        After an error nothing is forgotten: what memory held stays there. A full disk may be tried again.
        """
        saving = self.begin_save(covered)
        if saving is not None:
            self._complete(saving)

    def begin_save(self, covered: tuple[Covered, ...]) -> Saving | None:
        """The first of the three steps of a save, quick: what is to be written, or None where nothing is.

        `Saving.write` does all the work and may run without the caller's lock; `finish_save` must follow,
        whether it raised or not.
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
        """The last step: use the new run; or, where writing failed, take back what it should have held."""
        self._failure = self._failure or saving.failure
        if saving.run is not None:
            self.covered = saving.run.facts.covered
            self._use([*saving.kept, saving.run])
            self._adopted = []
        else:
            self._recent = _latest(saving.recent, self._recent)
        self._saving = None

    def adopt(self, folders: Mapping[int, str]) -> None:
        """Take in the indexes that partitions had of their own, in these folders: the next save makes them its own.

        Only where this one has no run yet: otherwise it has them already, and what is left of them is from a crash.
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

    def drop_from(self, lost: Callable[[int], bool], covered: tuple[Covered, ...] | None = None) -> int:
        """Forget every reference for which `lost` answers True, durably; answers how many these were.

        For an opening after which a log ends earlier than it did: the offsets behind its end are given to
        other messages soon, so this must be done before the first append. Where the log also ends below the
        covered position, the new one is given. Reads every record: about 0.3 s for a million ids.
        """
        self._check_idle()
        before = len(self)
        for digest in [digest for digest, entry in self._recent.items() if lost(reference_of(entry))]:
            del self._recent[digest]
        hit = [run for run in self._runs if run.has_reference(lost)]
        if hit or (covered is not None and covered != self.covered):
            # What memory holds is no part of this run: the logs may not have it on disk yet.
            self._complete(self._begin({}, hit, self._runs, covered or self.covered, after_ms=-1, lost=lost))
        return before - len(self)

    def check(self) -> None:
        """Read everything on disk; CorruptData where it is not what was written."""
        for run in self._runs:
            run.check()

    def close(self) -> None:
        """Let go of everything. Nothing is saved: call `save` before, or let the logs tell it next time."""
        self._failure = closed = Closed(f"the dedup index in {self._folder} is closed; open it again to use it")
        self._recent, self._runs, self._run_finds = {}, [], [partial(_refuse, closed)]

    def __len__(self) -> int:
        """Entries held, in memory and on disk; also some that expired, or that a newer one replaces."""
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
        lost: Callable[[int], bool] | None = None,
    ) -> Saving:
        # A number is never used twice, not even after an error: then nobody knows what is on disk.
        self._sequence += 1
        # A run can name others of its own folder only.
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
            lost=lost,
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


@dataclass(slots=True)
class Saving:
    """A save under way: what it writes does not change any more."""

    disk: Disk
    folder: str
    facts: RunFacts
    recent: dict[bytes, bytes]
    merged: list[DedupRun]
    kept: list[DedupRun]
    stale: list[str]  # runs that the new one makes superfluous
    after_ms: int
    lost: Callable[[int], bool] | None
    run: DedupRun | None = None
    failure: HoldfastError | None = None

    def write(self) -> None:
        """Write the run, durably, then remove those that it replaces. Their views stay valid."""
        try:
            if not self.kept:
                self.disk.make_folder(self.folder)
            rows = sorted(map(add, self.recent.keys(), self.recent.values()))
            merge = Merge(self.merged, rows, after_ms=self.after_ms, lost=self.lost)
            run = RunWriter(self.disk, self.folder).write(self.facts, merge)
        except OSError as error:
            _remove(self.disk, join(self.folder, TEMPORARY))
            raise self._error(error) from error
        try:
            note_newest(self.disk, self.folder, self.facts.sequence)
        except OSError as error:  # the run is in place: without the note it is only not missed, should it get lost
            facts = {"folder": self.folder, "error": str(error)}
            logger.warning("not noted which run of dedup ids is the last", extra=facts)
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
            "more is saved. Look at the disk, then open anew"
        )
        logger.error("dedup ids not saved", extra={"folder": self.folder, "error": str(error)})
        return self.failure


def _load_runs(world: World, folder: str) -> list[DedupRun]:
    """The runs that belong together: the last one and those that it names. Removes what a crash left over."""
    disk = world.disk
    if not disk.exists(folder):
        return []
    names = disk.names(folder)
    numbers = sorted(int(match[1]) for name in names if (match := _RUN.fullmatch(name)))
    runs: list[DedupRun] = []
    noted = 1  # where there is a note, there is a run; beside one, `check` tells of a damaged note
    with suppress(CorruptData):
        noted = newest_noted(disk, folder)
    if noted > (numbers[-1] if numbers else 0):
        numbers.append(noted)  # which is missing, and is said to be
    if numbers:
        last = open_run(disk, folder, numbers[-1])
        runs = [last, *(open_run(disk, folder, number) for number in last.facts.kept)]
        # The process may have died before the last name was durable; only now the others may go.
        disk.sync_folder(folder)
    for number in set(numbers) - {run.facts.sequence for run in runs}:
        disk.remove(join(folder, run_name(number)))
    if TEMPORARY in names:
        disk.remove(join(folder, TEMPORARY))
    return runs


def _to_merge(runs: list[DedupRun], recent: int) -> list[DedupRun]:
    """The smallest runs, as far as each is less than twice what is merged already.

    So each run that stays is at least twice as large as the next one, and their number grows with the
    logarithm of the ids, until runs are too large to be merged.
    """
    merged, total = [], recent
    for run in reversed(runs):
        if run.count >= max(1, 2 * total) or total + run.count > _LARGEST_MERGED:
            break
        merged.append(run)
        total += run.count
    return merged


def _digest(dedup_id: bytes) -> bytes:
    return blake2b(dedup_id, digest_size=DIGEST_BYTES).digest()


def _latest(one: dict[bytes, bytes], two: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Both together; of two entries for one digest the later one."""
    return one | {digest: max(entry, one.get(digest, entry)) for digest, entry in two.items()}


def _count_of(run: DedupRun) -> int:
    return -run.count


def _refuse(error: HoldfastError, digest: bytes, prefix: int) -> bytes | None:
    raise error


def _remove(disk: Disk, path: str) -> None:
    """Remove a file that nobody needs; one that stays is removed by the next opening."""
    with suppress(OSError):
        disk.remove(path)


# Duplicates: a dedup id holds for the whole topic, whichever partition its message went to.
#
#     publish ──► one lock ──► known? ──► where the first one is
#                    │
#                    └── new ──► the message into its partition's log ──► the id into the index, in memory
#
# One index serves all partitions, so that an id is known again with another key, and after partitions were added.
# Looking up, writing and adding are one step under one lock: of two publishers with the same id, the second finds the
# first's. No sync is waited for under it.
#
# The message is the record of its id, and nothing else is written for it: there is no moment at which a crash could
# leave one without the other. The index is a cache (see `dedup`). At opening the ids are read from every partition's
# logs from where the last saved run ends; a save notes these places for all partitions, syncs the logs up to them,
# and only then puts the run in place.
#
# Earlier versions kept an index in each partition's folder. These are merged into the topic's when it is first opened,
# then removed; a crash before the merged run is in place changes nothing, and one behind it leaves files to remove.
# Where the disk has no room for that, they are read where they are, and merged when it has.


_NAME: Final = "dedup"
_SAVE_EVERY_MS: Final = 3_600_000
_MERGE_EVERY_MS: Final = 60_000  # as long as there is no room for it


class Duplicates:
    """The dedup ids of a topic. Safe to use from any thread."""

    def __init__(self, world: World, folder: str, metrics: Metrics, *, window_ms: int) -> None:
        self._world = world
        self._topic_folder = folder
        self._folder = join(folder, _NAME)
        self._metrics = metrics
        self._window_ms = window_ms
        self._partitions: dict[int, Partition] = {}
        self.index: DedupIndex | None = None  # opened when first needed
        self.on_new_part: Callable[[], None] = lambda: None  # the ids have a folder from now on
        self.on_parting: Callable[[frozenset[str]], object] = lambda _parts: None  # these folders are about to go
        self._error: CorruptData | None = None  # why ids cannot be looked up; messages without one go on
        self.closed = False
        self._lock = threading.Lock()  # around what must be looked up and written as one
        self._save_lock = threading.Lock()
        self._old: dict[int, str] = {}  # folders of partitions whose ids are to be merged into the topic's
        self._saved_ms = self._mono_ms()

    def follow(self, number: int, partition: Partition) -> None:
        """The partition is open: its messages with dedup ids come here first."""
        with self._lock:
            if self.index is not None:
                self._take_in(self.index, number, partition)
            if self._error is not None:
                partition.keep_for_dedup(Covered())
            self._partitions[number] = partition
        partition.publish_unseen = partial(self.publish, number, partition)

    def unfollow(self, number: int) -> None:
        """The partition is not in use after all."""
        with self._lock:
            self._partitions.pop(number, None)

    def are_used(self) -> bool:
        """Whether any message had a dedup id so far."""
        return self._world.disk.exists(self._folder) or bool(self._old_folders())

    def open_if_used(self) -> None:
        """At the opening of a topic, behind its partitions: ids that were put before are known again."""
        with self._lock:
            if self.are_used():
                try:
                    self._open()
                except CorruptData as error:
                    self._refuse(error)

    def refuse(self, error: CorruptData) -> None:
        """Refuse messages with dedup ids from now on: nobody can tell whether they were here before."""
        with self._lock:
            self._refuse(error)

    def _refuse(self, error: CorruptData) -> None:
        if self._error is None:
            self._error = error
            for partition in self._partitions.values():
                partition.keep_for_dedup(Covered())  # the ids that the logs still hold are all that is left
            logger.error("dedup ids cannot be read", extra={"folder": self._folder, "error": str(error)})

    def publish(self, number: int, partition: Partition, drafts: Sequence[Draft], manner: Manner) -> Publication:
        """Store what is no duplicate, of an earlier message or of another one in the same call."""
        now_ms = self._world.clock.now_ns() // 1_000_000
        fresh: list[Draft] = []
        known: dict[int, int] = {}  # which of the drafts -> reference, or -1 - which of the fresh ones
        in_call: dict[bytes, int] = {}
        with self._lock:
            index = self._open()
            for i, draft in enumerate(drafts):
                if draft.dedup_id is not None:
                    found = index.find(draft.dedup_id, now_ms)
                    if found is not None:
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
                    index.add(draft.dedup_id, messages_reference_of(place, number), now_ms)
        if known:
            self._metrics.duplicates.add(len(known))
            self._add_duplicates(publication, known, number, len(drafts))
        return publication

    def _add_duplicates(self, publication: Publication, known: dict[int, int], number: int, count: int) -> None:
        fresh = publication.places
        rest = iter(fresh)
        firsts = {
            i: first_place(messages_reference_of(fresh[-1 - found], number) if found < 0 else found)
            for i, found in known.items()
        }
        publication.places = [firsts.get(i) or next(rest) for i in range(count)]
        if publication.durability == "fsync":
            # "Duplicate" is an acknowledgement as well: the first one must be on disk.
            publication.firsts = [wait for place in firsts.values() for wait in self._unsynced(place)]

    def _unsynced(self, place: Place) -> list[tuple[Log, Appended]]:
        """What to wait for until the message there is on disk: nothing, or its log."""
        partition = self._partitions[place.partition or 0]
        log, at = partition.log, place.offset
        if partition.delayed is not None and place.delayed_id is not None:
            log, at = partition.delayed.intake, place.delayed_id
        return [] if at is None or at < log.synced_end else [(log, Appended(0, log.written_end, "fsync"))]

    def tick(self) -> None:
        """Save, where memory is full or the last time was long ago. When that will be is nothing to wake up for."""
        overdue = self._mono_ms() - self._saved_ms > (_MERGE_EVERY_MS if self._old else _SAVE_EVERY_MS)
        if self.index is not None and (overdue or self.index.full()):
            self.save()

    def save(self) -> None:
        """Put the ids that only memory holds on disk; the messages that have them are on disk first."""
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
        """Save, and let go of the files. Call it before the partitions are closed."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        if self.index is not None:
            try:
                self.save()
            except DiskFull as error:  # the logs hold them: the next opening reads more, and nothing is lost
                logger.warning("dedup ids not saved", extra={"folder": self._folder, "error": str(error)})
            finally:
                self.index.close()

    def _open(self) -> DedupIndex:
        """The caller holds the lock."""
        if self._error is not None:
            raise self._error
        if self.index is None:
            if self.closed:
                raise Closed(f"the topic in {self._topic_folder} is closed: it was deleted, or let go")
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
        """Make what partitions had of their own a run of the topic, if there is room for that."""
        try:
            index.save(index.covered)
            self._drop_old()
        except (DiskFull, OSError) as error:
            logger.warning(
                "dedup ids of an earlier version stay where they are until there is room to merge them",
                extra={"folder": self._topic_folder, "error": str(error)},
            )

    def _drop_old(self) -> None:
        """They are in a run of the topic by now."""
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
            index.add(dedup_id, messages_reference_of(place, number), record.timestamp_ns // 1_000_000)
        if partition.delayed is not None:
            for record, dedup_id in with_dedup_ids(partition.delayed.intake, covered.intake.offset):
                place = Place(None, record.offset)
                index.add(dedup_id, messages_reference_of(place, number), record.timestamp_ns // 1_000_000)

    def _covered(self, index: DedupIndex) -> tuple[Covered, ...]:
        """Where a save that begins now would leave nothing out."""
        count = max([len(index.covered), *[number + 1 for number in self._partitions]])
        return tuple(
            self._partitions[number].positions() if number in self._partitions else _covered_of(index, number)
            for number in range(count)
        )

    def _old_folders(self) -> dict[int, str]:
        """The indexes that partitions have of their own: from before there was one for the topic."""
        folders = {number: join(join(self._topic_folder, str(number)), _NAME) for number in self._partitions}
        return {number: folder for number, folder in folders.items() if self._world.disk.exists(folder)}

    def _mono_ms(self) -> int:
        return self._world.clock.monotonic_ns() // 1_000_000


def _covered_of(index: DedupIndex, number: int) -> Covered:
    return index.covered[number] if number < len(index.covered) else Covered()
