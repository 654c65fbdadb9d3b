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
from collections.abc import Callable, Mapping
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
    Merge,
    Run,
    RunFacts,
    RunWriter,
    newest_noted,
    note_newest,
    open_run,
    prefix_of,
    reference_of,
    run_name,
)
from holdfast.env import Disk, World
from holdfast.errors import Closed, CorruptData, DiskFailed, DiskFull, HoldfastError
from holdfast.storage.files import FULL_DISK, join
from holdfast.storage.opening import open_error
from holdfast.storage.shortage import ran_out, shortage

logger = logging.getLogger(__name__)

_RUN: Final = re.compile(r"(\d{20})\.ids")

# Time and reference, in the order of bytes: the later of two is also the greater.
_ENTRY: Final = Struct(">QQ")

# A run does not grow beyond this by merging, so that a save takes seconds at most.
_LARGEST_MERGED: Final = 4_000_000


class DedupIndex:
    """Dedup id -> reference and time of the message that had it first."""

    def __init__(self, world: World, folder: str, runs: list[Run], *, window_ms: int, max_recent: int) -> None:
        self._world = world
        self._folder = folder
        self._window_ms = window_ms
        self._max_recent = max_recent
        self._recent: dict[bytes, bytes] = {}  # digest -> entry
        self._saving: Saving | None = None
        self._failure: HoldfastError | None = None
        self._adopted: list[Run] = []  # of partitions, in their folders: until the next save
        self._runs: list[Run] = []
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

    def _use(self, runs: list[Run]) -> None:
        self._runs = sorted(runs, key=_count_of)  # the largest first
        self._run_finds = [run.find for run in self._runs]

    def _begin(
        self,
        recent: dict[bytes, bytes],
        merged: list[Run],
        live: list[Run],
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
    merged: list[Run]
    kept: list[Run]
    stale: list[str]  # runs that the new one makes superfluous
    after_ms: int
    lost: Callable[[int], bool] | None
    run: Run | None = None
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


def _load_runs(world: World, folder: str) -> list[Run]:
    """The runs that belong together: the last one and those that it names. Removes what a crash left over."""
    disk = world.disk
    if not disk.exists(folder):
        return []
    names = disk.names(folder)
    numbers = sorted(int(match[1]) for name in names if (match := _RUN.fullmatch(name)))
    runs: list[Run] = []
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


def _to_merge(runs: list[Run], recent: int) -> list[Run]:
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


def _count_of(run: Run) -> int:
    return -run.count


def _refuse(error: HoldfastError, digest: bytes, prefix: int) -> bytes | None:
    raise error


def _remove(disk: Disk, path: str) -> None:
    """Remove a file that nobody needs; one that stays is removed by the next opening."""
    with suppress(OSError):
        disk.remove(path)
