"""Processes that own a log until they are killed, and how they tell their killer what they did.

A process notes what it is about to try, and again once it was acknowledged, in memory that outlives it.
So whoever opens the log after the kill knows what must be there, what may be, and what may not.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import mmap
import multiprocessing
import os
import random
import signal
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import partial
from hashlib import blake2b
from multiprocessing.process import BaseProcess
from struct import Struct
from typing import NamedTuple

from holdfast.model import Appended, Record
from holdfast.settings import LogSettings
from holdfast.storage import Log, LogReader, open_log
from tests.crash.histories import small_settings

FORK = multiprocessing.get_context("fork")

# A crowd's log trims itself; this many segments always stay.
RETAINED_SEGMENTS = 8
THREADS = 3
TASKS = 8

_HEAD = Struct("<BIHH")
_NOTE = Struct("<BBHIQ")

_PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent dies


@contextlib.contextmanager
def started(run: Callable[..., object], *args: object) -> Iterator[BaseProcess]:
    """A process that runs the function. It is dead when the block ends, or this process, however that ends."""
    process = FORK.Process(target=_run, args=(run, *args), daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _run(run: Callable[..., object], *args: object) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.freeze()  # what the parent had is not worth looking at, and looking at it would copy it
    run(*args)


class What(IntEnum):
    """What a note tells. A call in flight when the process died has its first note and not its second."""

    OPENED = 1  # `offset`: the end that was found
    BEGUN = 2  # `count` messages from number `first` on are being appended as one batch
    ACKED = 3  # they were, at `offset`
    TRIMMING = 4  # what lies below `offset` may go
    TRUNCATING = 5  # what lies at `offset` or above goes; `first` is where the log ends now
    TRUNCATED = 6
    CLOSING = 7


class Note(NamedTuple):
    """One thing that a process did; the fields mean what `What` says."""

    what: int
    writer: int = 0
    count: int = 0
    first: int = 0
    offset: int = 0


class Journal:
    """The notes, in memory that is shared with the one who made this before the process began."""

    def __init__(self, most: int = 20_000) -> None:
        self._memory = mmap.mmap(-1, 8 + most * _NOTE.size)
        self._words = memoryview(self._memory).cast("Q")
        self._most = most
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._words[0]

    def note(self, note: Note) -> None:
        with self._lock:
            count = self._words[0]
            if count == self._most:
                signal.pause()  # as good a place to be killed as any other
            _NOTE.pack_into(self._memory, 8 + count * _NOTE.size, *note)
            self._words[0] = count + 1  # one store, after the note is whole

    def acked(self) -> dict[tuple[int, int], int]:
        """(writer, number) of the first message of each batch that was acknowledged -> its offset."""
        return {(note.writer, note.first): note.offset for note in self.notes() if note.what == What.ACKED}

    def notes(self) -> list[Note]:
        size = _NOTE.size
        return [Note(*_NOTE.unpack_from(self._memory, 8 + i * size)) for i in range(len(self))]


class Head(NamedTuple):
    """How a message begins: who sent it, which of its sender's it is, and where it stands in its batch."""

    writer: int
    number: int
    index: int = 0
    count: int = 1


LEAST_BYTES = _HEAD.size


def value_of(head: Head, size: int) -> bytes:
    """The message that begins so: `size` bytes, all of which are known to whoever knows its beginning."""
    packed = _HEAD.pack(*head)
    return (packed + blake2b(packed, digest_size=32).digest() * (size // 32 + 1))[:size]


def parse_value(value: bytes) -> Head:
    """How a message begins, every byte of which is as it was sent."""
    head = Head(*_HEAD.unpack_from(value))
    assert value == value_of(head, len(value)), f"wrong bytes in {head}"
    return head


class Follower:
    """Takes records as they come, and fails when they are not what writers that wait leave behind."""

    def __init__(self) -> None:
        self.next_offset = 0
        self.firsts: dict[tuple[int, int], int] = {}  # (writer, number) of each batch's first message -> offset
        self.counts: dict[int, int] = defaultdict(int)  # writer -> how many of its messages came
        self._head: Head | None = None  # of the message before, while its batch is not whole

    def take(self, record: Record) -> None:
        assert record.offset == self.next_offset, f"offset {record.offset} where {self.next_offset} was due"
        head, before = parse_value(record.value), self._head
        assert head.number == self.counts[head.writer], f"{head} is lost, doubled or out of order"
        if before is None:
            assert head.index == 0, f"{head} is read without the beginning of its batch"
            self.firsts[head.writer, head.number] = record.offset
        else:
            assert head == Head(before.writer, before.number + 1, before.index + 1, before.count), "batches are mixed"
        self.next_offset += 1
        self.counts[head.writer] += 1
        self._head = None if head.index + 1 == head.count else head

    def take_all(self, log: Log | LogReader) -> None:
        """Everything that may be read now, which ends with a whole batch."""
        for record in log.records(self.next_offset):
            self.take(record)
        assert self._head is None, f"only a part of a batch can be read: {self._head} is the last"
        assert self.next_offset <= log.end, "beyond the readable end"


def kill_settings(**changes: object) -> LogSettings:
    """Tiny segments and frames, syncs and retention within milliseconds."""
    usual = {"sync_interval_ms": 3, "codec_min_bytes": 64, "retention_check_ms": 2}
    return small_settings(**usual | changes)


def crowd_settings() -> LogSettings:
    return kill_settings(retention_segments=RETAINED_SEGMENTS)


class Numbered:
    """Makes numbered messages for one writer, in every shape that takes a way of its own through the log."""

    def __init__(self, journal: Journal, writer: int, first: int, rng: random.Random) -> None:
        self._journal = journal
        self._writer = writer
        self._next = first
        self.rng = rng

    def shape(self) -> tuple[list[bytes], dict[str, object]]:
        """The next batch and how to append it; the note is made."""
        rng = self.rng
        sizes = rng.choices(
            [
                [rng.randint(LEAST_BYTES, 300)],
                [rng.randint(LEAST_BYTES, 200) for _ in range(rng.randint(2, 12))],
                [rng.randint(300, 700) for _ in range(rng.randint(3, 8))],  # several frames
                [40_000, 20, 40_000],  # beyond a segment, and so long that it is written, not mapped
            ],
            [12, 5, 3, 0.3],
        )[0]
        count = len(sizes)
        values = [value_of(Head(self._writer, self._next + i, i, count), size) for i, size in enumerate(sizes)]
        self._journal.note(Note(What.BEGUN, self._writer, count, self._next))
        how = {
            "durability": rng.choice(["os", "os", "fsync", "interval"]),
            "codec": rng.choice([None, None, None, "zstd", "lz4", "gzip"]),
        }
        return values, how

    def acked(self, appended: Appended) -> None:
        count = appended.next_offset - appended.offset
        self._journal.note(Note(What.ACKED, self._writer, count, self._next, appended.offset))
        self._next += count

    def append_to(self, log: Log) -> Appended:
        values, how = self.shape()
        if len(values) == 1 and how["codec"] is None:
            appended = log.append_one(values[0], how["durability"])
        else:
            appended = log.append(values, **how)
        self.acked(appended)
        return appended

    async def append_async_to(self, log: Log) -> None:
        values, how = self.shape()
        if len(values) == 1 and how["codec"] is None:
            appended = await log.append_one_async(values[0], how["durability"])
        else:
            appended = await log.append_async(values, **how)
        self.acked(appended)


class Life:
    """One process with one thread and a log: what it does next is drawn from its seed, until it is killed."""

    def __init__(self, journal: Journal, folder: str, seed: int, first: int) -> None:
        self._journal = journal
        self._folder = folder
        self._rng = random.Random(seed)
        self._numbered = Numbered(journal, 0, first, self._rng)
        self._batch_starts: list[int] = []
        self._open()

    def run(self, weights: dict[str, float]) -> None:
        steps = [getattr(self, name) for name in weights]
        while True:
            self._rng.choices(steps, list(weights.values()))[0]()

    def append(self) -> None:
        self._batch_starts.append(self._numbered.append_to(self._log).offset)

    def append_in_tasks(self) -> None:
        """A task waits for its sync in another thread."""
        start = self._log.written_end
        asyncio.run(self._numbered.append_async_to(self._log))
        self._batch_starts.append(start)

    def tick(self) -> None:
        self._log.tick()

    def sync(self) -> None:
        self._log.sync()

    def trim(self) -> None:
        before = self._rng.randint(self._log.start, self._log.end)
        self._journal.note(Note(What.TRIMMING, offset=before))
        self._log.trim(before)

    def truncate(self) -> None:
        candidates = [start for start in self._batch_starts[-80:] if start >= self._log.start]
        if not candidates:
            return
        offset, end = self._rng.choice(candidates), self._log.written_end
        self._journal.note(Note(What.TRUNCATING, first=end, offset=offset))
        self._log.truncate(offset)
        self._journal.note(Note(What.TRUNCATED, offset=offset))
        self._batch_starts = [start for start in self._batch_starts if start < offset]

    def reopen(self) -> None:
        self._journal.note(Note(What.CLOSING))
        self._log.close()
        self._open()
        assert self._log.report.clean, "closed in order, and yet it was not"

    def _open(self) -> None:
        self._log = Log.open(self._folder, kill_settings())
        self._journal.note(Note(What.OPENED, offset=self._log.end))


def write(journal: Journal, folder: str, seed: int, first: int) -> None:
    """Mostly appends."""
    weights = {"append": 60, "append_in_tasks": 3, "tick": 6, "sync": 1, "trim": 2, "reopen": 1}
    Life(journal, folder, seed, first).run(weights)


def truncate(journal: Journal, folder: str, seed: int, first: int) -> None:
    """Appends and cuts off what it appended, over and over."""
    Life(journal, folder, seed, first).run({"append": 8, "truncate": 4, "trim": 0.3, "reopen": 0.3})


def reopen(journal: Journal, folder: str, seed: int, first: int) -> None:
    """Opens and closes, over and over."""
    Life(journal, folder, seed, first).run({"append": 2, "reopen": 2, "trim": 0.3})


def write_in_a_crowd(journal: Journal, folder: str, seed: int, first: int) -> None:
    """Threads and tasks together, with a keeper that syncs and trims in between."""
    log = open_log(folder, crowd_settings())
    journal.note(Note(What.OPENED, offset=log.end))
    rngs = [random.Random(seed * 1_000 + writer) for writer in range(THREADS + TASKS)]
    writers = [Numbered(journal, writer, first, rng) for writer, rng in enumerate(rngs)]

    def in_a_thread(numbered: Numbered) -> None:
        while True:
            numbered.append_to(log)

    async def in_a_task(numbered: Numbered) -> None:
        while True:
            await numbered.append_async_to(log)
            await asyncio.sleep(0)  # an `os` append never waits, and the others want a turn

    async def in_tasks() -> None:
        await asyncio.gather(*(in_a_task(numbered) for numbered in writers[THREADS:]))

    for numbered in writers[:THREADS]:
        threading.Thread(target=_or_die, args=(partial(in_a_thread, numbered),), daemon=True).start()
    asyncio.run(in_tasks())


def _or_die(run: Callable[[], None]) -> None:
    """An error in any thread ends the process, so that the test sees it."""
    try:
        run()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
