"""A lane's way into its partition, which knows how far it had come: rows that are there already are passed over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Final, Protocol

from holdfast.broker.bulk import BulkFrame, append_frames
from holdfast.broker.drafts import Draft
from holdfast.broker.marks import DEDUP_ID, WRITTEN, mark
from holdfast.broker.partition import Partition
from holdfast.codec.columns import HEADERS
from holdfast.codec.frame import Frame
from holdfast.env import World
from holdfast.errors import CorruptData
from holdfast.model import Producer, Record
from holdfast.spark.staging import LaneStart, Manifest
from holdfast.storage.log import Log

_APPEND_BYTES: Final = 8 << 20
_PUBLISH_ROWS: Final = 1_000


class Track(Protocol):
    """One lane's way into its partition."""

    def take(self, frame: Frame, stored: memoryview) -> None: ...

    def make_way(self) -> None:
        """Rows of another lane come, and must not pass those that were taken before."""

    def put_down(self) -> None:
        """Write what was taken."""


class Writer:
    """Who the log is told that it was, and how far that one had come."""

    def __init__(self, world: World, manifest: Manifest, resumed: bool) -> None:  # noqa: FBT001
        self._world = world
        self._resumed = resumed
        self._id = producer_id(manifest.write_id)
        self._epoch = manifest.batch + 1

    def plain(self, partition: Partition, start: LaneStart) -> Track:
        done = 0
        if self._resumed:
            for frame in _from(partition.log, start.log_end):
                header = frame.header
                if header.producer_id == self._id and header.producer_epoch == self._epoch:
                    done = header.first_sequence + header.count
        return _PlainTrack(self._world, partition, Producer(self._id, self._epoch), done)

    def general(self, partition: Partition, start: LaneStart) -> Track:
        prefix = b"%d.%d." % (self._id, self._epoch)
        done = 0
        if self._resumed:
            done = _marked(_records(partition.log, start.log_end), prefix)
            store = partition.delayed
            if store is not None:
                done = max(done, _marked(_records(store.intake, start.intake_end), prefix))
                if store.intake.start > start.intake_end:  # some were put away meanwhile
                    done = max(done, _marked((waiting.record for waiting in store.waiting()), prefix))
        return _GeneralTrack(partition, prefix, done)


def producer_id(write_id: str) -> int:
    """The write's number in the log's frames, where producers have theirs."""
    return int.from_bytes(blake2b(write_id.encode(), digest_size=8).digest(), "big") >> 1 | 1


class NoTrack:
    """For rows whose topic is gone."""

    def take(self, frame: Frame, stored: memoryview) -> None:
        """They are gone, too."""

    def make_way(self) -> None:
        """Nothing is in the way."""

    def put_down(self) -> None:
        """There is nothing."""


class _PlainTrack:
    """Frames that go into the log as they are; those that are there already are passed over."""

    def __init__(self, world: World, partition: Partition, producer: Producer, done: int) -> None:
        self._world = world
        self._partition = partition
        self._producer = producer
        self._done = done
        self._seen = 0
        self._pending: list[BulkFrame] = []
        self._pending_bytes = 0

    def take(self, frame: Frame, stored: memoryview) -> None:
        first, self._seen = self._seen, self._seen + frame.count
        if self._seen <= self._done:
            return
        if first < self._done:
            raise CorruptData(
                f"{self._done} rows of a batch are in {self._partition.log.folder}, and its staged frames begin at row "
                f"{first} and end at {self._seen}: they are not those that were written. Nothing more was written"
            )
        if self._pending_bytes + len(stored) > _APPEND_BYTES:
            self.put_down()
        self._pending.append(BulkFrame.of(frame, stored))
        self._pending_bytes += len(stored)

    def make_way(self) -> None:
        self.put_down()

    def put_down(self) -> None:
        if self._pending:
            now_ns = self._world.clock.now_ns()
            append_frames(self._partition, self._pending, self._producer.after(self._done), now_ns)
            self._done += sum(frame.header.count for frame in self._pending)
            self._pending, self._pending_bytes = [], 0


class _GeneralTrack:
    """Rows that become drafts, each marked with its number; the first `done` are there already, or were duplicates."""

    def __init__(self, partition: Partition, prefix: bytes, done: int) -> None:
        self._partition = partition
        self._prefix = prefix
        self._done = done
        self._seen = 0
        self._pending: list[Draft] = []
        self._pending_bytes = 0

    def take(self, frame: Frame, stored: memoryview) -> None:
        for record in frame.records():
            number, self._seen = self._seen, self._seen + 1
            if number >= self._done:
                self._pending.append(
                    Draft(
                        record.value,
                        record.key,
                        (*record.headers, (WRITTEN, self._prefix + b"%d" % number)),
                        record.priority,
                        record.expires_at_ms,
                        record.due_at_ms,
                        mark(record, DEDUP_ID),
                        record.flags,
                    )
                )
                self._pending_bytes += len(record.value)
            if len(self._pending) >= _PUBLISH_ROWS or self._pending_bytes >= _APPEND_BYTES:
                self.put_down()

    def make_way(self) -> None:
        if not all(draft.due_at_ms for draft in self._pending):  # what is due later follows in any case
            self.put_down()

    def put_down(self) -> None:
        if self._pending:
            # Their sizes were looked at when they were staged; each has a mark more since.
            self._partition.wait(self._partition.publish(self._pending, durability="fsync", any_size=True))
            self._pending, self._pending_bytes = [], 0


def _from(log: Log, offset: int) -> Iterator[Frame]:
    return log.read(min(max(offset, log.start), log.end))


def _records(log: Log, offset: int) -> Iterator[Record]:
    for frame in _from(log, offset):
        if frame.header.columns & HEADERS:
            yield from frame.records()


def _marked(records: Iterable[Record], prefix: bytes) -> int:
    """How many rows of this batch were handled: each piece was on disk before the next, so all before the last."""
    done = 0
    for record in records:
        written = mark(record, WRITTEN)
        if written is not None and written.startswith(prefix):
            done = max(done, int(written.removeprefix(prefix)) + 1)
    return done
