"""Duplicates: a dedup id holds for the whole topic, whichever partition its message went to.

    publish ──► one lock ──► known? ──► where the first one is
                   │
                   └── new ──► the message into its partition's log ──► the id into the index, in memory

One index serves all partitions, so that an id is known again with another key, and after partitions were added.
Looking up, writing and adding are one step under one lock: of two publishers with the same id, the second finds the
first's. No sync is waited for under it.

The message is the record of its id, and nothing else is written for it: there is no moment at which a crash could
leave one without the other. The index is a cache (see `dedup`). At opening the ids are read from every partition's
logs from where the last saved run ends; a save notes these places for all partitions, syncs the logs up to them,
and only then puts the run in place.

Earlier versions kept an index in each partition's folder. These are merged into the topic's when it is first opened,
then removed; a crash before the merged run is in place changes nothing, and one behind it leaves files to remove.
Where the disk has no room for that, they are read where they are, and merged when it has.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from holdfast.broker.dedup.runs import Covered
from holdfast.broker.dedup.window import DedupIndex
from holdfast.broker.messages import Draft, Manner, Place, Publication, first_place, reference_of, with_dedup_ids
from holdfast.broker.metrics import Metrics
from holdfast.broker.partition import Partition
from holdfast.env import World
from holdfast.errors import Closed, CorruptData, DiskFull
from holdfast.model import Appended
from holdfast.storage.files import join, remove_tree
from holdfast.storage.log import Log
from holdfast.storage.opening import open_error

logger = logging.getLogger(__name__)

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
                    index.add(draft.dedup_id, reference_of(place, number), now_ms)
        if known:
            self._metrics.duplicates.add(len(known))
            self._add_duplicates(publication, known, number, len(drafts))
        return publication

    def _add_duplicates(self, publication: Publication, known: dict[int, int], number: int, count: int) -> None:
        fresh = publication.places
        rest = iter(fresh)
        firsts = {
            i: first_place(reference_of(fresh[-1 - found], number) if found < 0 else found)
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
            index.add(dedup_id, reference_of(place, number), record.timestamp_ns // 1_000_000)
        if partition.delayed is not None:
            for record, dedup_id in with_dedup_ids(partition.delayed.intake, covered.intake.offset):
                place = Place(None, record.offset)
                index.add(dedup_id, reference_of(place, number), record.timestamp_ns // 1_000_000)

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
