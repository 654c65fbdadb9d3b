"""Threads, tasks and processes at one log at once: nobody loses, doubles, reorders, or sees too much or too early."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from struct import Struct

import pytest

from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import Closed, DiskFailed, HoldfastError, NotALog, Unavailable
from holdfast.model import Appended
from holdfast.settings import LogSettings
from holdfast.storage import Log, LogReader, open_log
from tests.crash.histories import FOLDER, small_settings
from tests.crash.writer_process import FORK, Follower, Journal, Numbered, kill_settings, started

# Far longer than anything here takes: only what hangs comes near it.
PATIENCE_S = 120

THREADS = 8
TASKS = 64


def follow_in_a_process(folder: str, settings: LogSettings, connection: Connection) -> None:
    """Read what another process writes, up to the end that it names when it is done."""
    follower, reader, end = Follower(), None, None
    while end is None or follower.next_offset < end:
        assert end is None or not connection.poll(), "the other side gave up"
        if end is None and connection.poll():
            end = connection.recv()
        if reader is None:
            try:
                reader = LogReader(folder, settings)
            except NotALog:
                os.sched_yield()
                continue
        follower.take_all(reader)
    connection.send((follower.next_offset, dict(follower.counts)))


def test_many_threads_and_tasks_append_while_others_read(tmp_path, scale):
    folder, settings = str(tmp_path / "log"), kill_settings(segment_bytes=65536)
    journal = Journal(1_000_000)
    writers = [Numbered(journal, number, 0, random.Random(number)) for number in range(THREADS + TASKS)]
    done = threading.Event()
    pipes = [FORK.Pipe() for _ in range(2)]

    def write(log: Log, writer: Numbered) -> None:
        for _ in range(scale(60, 1_000)):
            writer.append_to(log)

    async def write_in_tasks(log: Log) -> None:
        async def write_in_a_task(writer: Numbered) -> None:
            for _ in range(scale(15, 200)):
                await writer.append_async_to(log)
                await asyncio.sleep(0)

        await asyncio.gather(*map(write_in_a_task, writers[THREADS:]))

    def follow(log: Log) -> Follower:
        follower = Follower()
        while not done.is_set():
            follower.take_all(log)
        follower.take_all(log)
        return follower

    # The readers begin before the log is there: were they begun later, they would inherit its lock.
    with (
        started(follow_in_a_process, folder, settings, pipes[0][1]),
        started(follow_in_a_process, folder, settings, pipes[1][1]),
        open_log(folder, settings) as log,
        ThreadPoolExecutor(THREADS + 3) as pool,
    ):
        try:
            following = [pool.submit(follow, log) for _ in range(2)]
            writing = [pool.submit(write, log, writer) for writer in writers[:THREADS]]
            writing.append(pool.submit(asyncio.run, write_in_tasks(log)))
            for future in writing:
                future.result()
            log.sync()
        finally:
            done.set()
        assert log.end == log.written_end
        for future in following:
            assert future.result().firsts == journal.acked()
        for connection, _ in pipes:
            connection.send(log.end)
            assert connection.poll(PATIENCE_S), "the reader hangs, or failed: see its stderr"
            assert connection.recv() == (log.end, following[0].result().counts)
    with Log.open(folder, settings) as log:
        assert log.report.clean
        again = Follower()
        again.take_all(log)
        assert again.firsts == journal.acked()


def test_threads_may_share_a_reader(tmp_path, scale):
    folder, settings = str(tmp_path / "log"), kill_settings()
    with Log.open(folder, settings) as log, ThreadPoolExecutor(4) as pool:
        reader = LogReader(folder, settings)
        done = threading.Event()

        def follow(seed: int) -> None:
            rng, follower = random.Random(seed), Follower()
            while not done.is_set():
                follower.take_all(reader)
                if follower.next_offset:
                    offset = rng.randrange(follower.next_offset)
                    assert next(reader.records(offset)).offset == offset

        try:
            following = [pool.submit(follow, seed) for seed in range(4)]
            writer = Numbered(Journal(1_000_000), 0, 0, random.Random(0))
            for _ in range(scale(150, 2_000)):
                writer.append_to(log)
        finally:
            done.set()
        for future in following:
            future.result()


class Held:
    """One call of a disk that is held up until it is let go."""

    def __init__(self, call: str, nth: int, *, before: bool) -> None:
        self.call = call
        self.before = before
        self._nth = nth
        self._begun = threading.Event()
        self._may_go = threading.Event()

    def pass_by(self) -> None:
        self._nth -= 1
        if self._nth == 0:
            self._begun.set()
            assert self._may_go.wait(PATIENCE_S), f"nobody let this {self.call} go"

    def wait_until_begun(self) -> None:
        assert self._begun.wait(PATIENCE_S), f"no {self.call} was begun"

    def release(self) -> None:
        self._may_go.set()


class HoldingDisk(SimulatedDisk):
    """A simulated disk, single calls of which can be held up while others go on."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Held] = []

    def hold(self, call: str, nth: int = 1, *, before: bool = False) -> Held:
        """The nth such call has done its work and does not return yet; `before`: has not even done that."""
        held = Held(call, nth, before=before)
        self.held.append(held)
        return held

    def reach(self, call: str) -> bool:
        for held in self.held:
            if held.call == call and held.before:
                held.pass_by()
        return super().reach(call)

    def done(self, call: str) -> None:
        for held in self.held:
            if held.call == call and not held.before:
                held.pass_by()
        super().done(call)


@pytest.fixture
def disk() -> Iterator[HoldingDisk]:
    disk = HoldingDisk()
    yield disk
    for held in disk.held:
        held.release()


def world_of(disk: SimulatedDisk, boot: int = 1) -> World:
    return World(clock=ManualClock(), disk=disk, ids=SeededIds(boot))


def opened(disk: SimulatedDisk, *, boot: int = 1, **changes: object) -> Log:
    return Log.open(FOLDER, small_settings(**changes), world_of(disk, boot))


def in_a_thread(run: Callable[..., object], *args: object) -> Future[object]:
    """Like a pool's submit, but should the call hang, the tests still end."""
    done: Future[object] = Future()

    def call() -> None:
        try:
            done.set_result(run(*args))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return done


def values_of(log: Log | LogReader) -> list[bytes]:
    return [record.value for record in log.records(log.start)]


def survives_every_power_cut(disk: SimulatedDisk, expected: list[bytes]) -> None:
    """Whatever a power cut leaves, these messages are its beginning, and nothing is damaged."""
    for seed in range(40):
        with opened(disk.cut(random.Random(seed)), boot=1000 + seed) as log:
            assert log.report.damage == ()
            assert log.report.lost_tail is None
            assert values_of(log)[: len(expected)] == expected, f"lost in the cut of seed {seed}"


def test_appending_goes_on_while_a_sync_is_under_way(disk):
    log = opened(disk)
    log.append_one(b"before", "os")
    held = disk.hold("sync")
    syncing = in_a_thread(log.append_one, b"slow", "fsync")
    held.wait_until_begun()
    assert in_a_thread(log.append_one, b"quick", "os").result(PATIENCE_S).offset == 2
    assert in_a_thread(lambda: log.append([b"x" * 700] * 9).next_offset).result(PATIENCE_S) == 12
    assert not syncing.done()
    held.release()
    syncing.result(PATIENCE_S)
    assert log.end == 12


def test_a_reader_is_not_blocked_by_a_sync_and_sees_nothing_that_waits_for_it(disk):
    log = opened(disk)
    log.append_one(b"before", "os")
    reader = LogReader(FOLDER, small_settings(), world_of(disk))
    held = disk.hold("sync")
    syncing = in_a_thread(log.append_one, b"slow", "fsync")
    held.wait_until_begun()
    log.append_one(b"behind it", "os")
    for view in (log, reader):
        assert in_a_thread(values_of, view).result(PATIENCE_S) == [b"before"]
        assert view.end == 1
    assert (log.written_end, log.synced_end) == (3, 0)
    held.release()
    syncing.result(PATIENCE_S)
    for view in (log, reader):
        assert values_of(view) == [b"before", b"slow", b"behind it"]


def test_tasks_wait_for_a_sync_and_their_loop_does_not(disk):
    log = opened(disk)
    held = disk.hold("sync")

    async def story() -> None:
        task = asyncio.ensure_future(log.append_one_async(b"slow", "fsync"))
        await asyncio.to_thread(held.wait_until_begun)
        quick = await log.append_async([b"quick"], durability="os")
        assert quick.offset == 1
        assert not task.done()
        assert log.end == 0
        held.release()
        assert (await asyncio.wait_for(task, PATIENCE_S)).offset == 0

    asyncio.run(story())
    assert log.end == 2


def test_what_waits_for_one_sync_is_served_by_the_next(disk):
    log = opened(disk)
    held = disk.hold("sync")
    first = in_a_thread(log.append_one, b"0", "fsync")
    held.wait_until_begun()
    before = disk.calls["sync"]
    offsets = [in_a_thread(log.append_one, b"x", "fsync") for _ in range(8)]
    while log.written_end < 9:
        os.sched_yield()
    held.release()
    first.result(PATIENCE_S)
    assert sorted(future.result(PATIENCE_S).offset for future in offsets) == list(range(1, 9))
    assert disk.calls["sync"] - before <= 2, "the one that was held, and one for all others"


def test_nothing_with_fsync_is_ever_published_before_it_is_synced(disk):
    """At each store into the state file, which is what other processes see."""
    log = opened(disk, durability="fsync")
    state = Struct("<8Q")
    early: list[tuple[int, int]] = []

    def look(call: str) -> None:
        if call == "word_store":
            _, readable, synced, copy, *_ = state.unpack_from(disk.contents(f"{FOLDER}/state"))
            if readable > min(synced, copy):
                early.append((readable, min(synced, copy)))

    disk.on_call = look
    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(write_some, log, seed) for seed in range(THREADS)]:
            future.result()
    disk.on_call = None
    assert early == []
    assert log.end == log.synced_end == log.written_end


def write_some(log: Log, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        if rng.random() < 0.5:
            log.append_one(rng.randbytes(rng.randint(0, 300)))
        else:
            log.append([rng.randbytes(rng.randint(0, 300)) for _ in range(rng.randint(1, 9))])


def test_what_a_reader_saw_of_fsync_messages_survives_a_power_cut(disk):
    log = opened(disk, durability="fsync")
    held = disk.hold("sync")
    syncing = in_a_thread(log.append, [b"a" * 600] * 4)
    held.wait_until_begun()
    assert values_of(log) == []
    held.release()
    syncing.result(PATIENCE_S)
    survives_every_power_cut(disk, values_of(log))


def filled(disk: SimulatedDisk, *, segments: int, **changes: object) -> Log:
    """A log that has just begun its last segment."""
    log = opened(disk, **changes)
    while len(log.segments()) < segments:
        log.append_one(b"%d" % log.written_end + b"x" * 500, "os")
    return log


def test_a_trim_while_a_sync_is_under_way_takes_nothing_from_the_next_sync(disk):
    log = filled(disk, segments=2)
    held = disk.hold("sync", nth=2)  # the sealed segment is synced, and so is what the active one holds now
    syncing = in_a_thread(log.sync)
    held.wait_until_begun()
    assert log.trim(log.end).segments == 1
    while len(log.segments()) < 2:  # more in the same segment, until it is sealed too
        log.append_one(b"y" * 500, "os")
    acked = in_a_thread(log.append_one, b"acknowledged", "fsync")
    while log.written_end == log.end:
        os.sched_yield()
    held.release()
    syncing.result(PATIENCE_S)
    acked.result(PATIENCE_S)
    survives_every_power_cut(disk, values_of(log))


def test_two_trims_at_once_remove_no_more_than_was_asked_for(disk):
    log = filled(disk, segments=8)
    before = log.segments()[3].base_offset
    held = disk.hold("remove")
    trimming = in_a_thread(log.trim, before)
    held.wait_until_begun()
    in_a_thread(log.trim, before).result(PATIENCE_S)
    held.release()
    trimming.result(PATIENCE_S)
    assert log.start == before
    assert next(log.records(before)).offset == before


def test_retention_while_somebody_trims_keeps_what_it_should(disk):
    log = filled(disk, segments=8, retention_segments=5)
    before = log.segments()[3].base_offset
    held = disk.hold("remove")
    trimming = in_a_thread(log.trim, before)
    held.wait_until_begun()
    log.retain()
    held.release()
    trimming.result(PATIENCE_S)
    assert log.start == before
    assert len(log.segments()) == 5


def test_a_truncation_overtakes_a_sync_and_later_acknowledgements_still_mean_something(disk):
    log = opened(disk, durability="fsync")
    for n in range(10):
        log.append_one(b"%d" % n)
    sync, others = log.sync, []

    def sync_and_let_others_in() -> None:
        sync()
        held = disk.hold("sync")
        others.append(in_a_thread(log.append_one, b"in between"))
        held.wait_until_begun()
        others.append(held)

    log.sync = sync_and_let_others_in  # between the sync of a truncation and its cut, others get their turn
    log.truncate(5)
    log.sync = sync
    overtaken, held = others
    held.release()
    assert isinstance(overtaken.exception(PATIENCE_S), (HoldfastError, type(None)))
    assert log.synced_end <= log.written_end
    assert log.append_one(b"after").offset == 5
    survives_every_power_cut(disk, [b"0", b"1", b"2", b"3", b"4", b"after"])


def test_truncating_while_others_append_hangs_nobody(tmp_path, scale):
    log = Log.open(str(tmp_path / "log"), small_settings(durability="fsync"))
    enough = threading.Event()

    def append_until_enough(number: int) -> int:
        refused = 0
        while not enough.is_set():
            try:
                log.append_one(b"%d" % number)
            except Unavailable:
                refused += 1  # truncated before it was synced: it was not acknowledged
        return refused

    async def append_in_a_task(number: int) -> None:
        while not enough.is_set():
            try:
                await log.append_one_async(b"%d" % number)
            except Unavailable:
                continue

    async def append_in_tasks() -> None:
        await asyncio.gather(*(append_in_a_task(number) for number in range(8)))

    appending = [in_a_thread(append_until_enough, number) for number in range(4)]
    appending.append(in_a_thread(lambda: asyncio.run(append_in_tasks())))
    rng = random.Random(1)
    for _ in range(scale(60, 3_000)):
        deadline = time.monotonic() + PATIENCE_S
        grown = log.written_end + 20
        while log.written_end < grown:
            assert time.monotonic() < deadline, "nobody gets on"
            time.sleep(0.001)
        log.truncate(rng.randint(max(log.start, grown - 60), grown - 20))
    enough.set()
    for future in appending:
        future.result(PATIENCE_S)
    last = log.append([b"the last"])
    assert [record.value for record in log.records(last.offset)] == [b"the last"]
    expected = values_of(log)
    log.close()
    with Log.open(str(tmp_path / "log")) as log:
        assert log.report.clean
        assert values_of(log) == expected


def test_a_sync_that_is_interrupted_is_made_up_for(disk):
    log = filled(disk, segments=2)  # the name of the second segment is not synced yet

    def interrupt(call: str) -> None:
        if call == "sync":
            disk.on_call = None
            raise KeyboardInterrupt

    disk.on_call = interrupt
    with pytest.raises(KeyboardInterrupt):
        log.append_one(b"not acknowledged", "fsync")
    log.append_one(b"acknowledged", "fsync")
    survives_every_power_cut(disk, values_of(log))


def test_a_failed_sync_reaches_threads_and_tasks_and_stops_the_log(disk):
    log = opened(disk)
    log.append_one(b"synced", "fsync")
    held = disk.hold("sync", before=True)
    disk.faults.fail(1, errno.EIO, sticky=False, calls=frozenset({"sync"}))
    waiting = [in_a_thread(log.append_one, b"%d" % n, "fsync") for n in range(4)]
    held.wait_until_begun()
    waiting += [in_a_thread(asyncio.run, log.append_one_async(b"task", "fsync")) for _ in range(2)]
    while log.written_end < 7:
        os.sched_yield()
    held.release()
    assert {type(future.exception(PATIENCE_S)) for future in waiting} == {DiskFailed}
    with pytest.raises(DiskFailed):
        log.append_one(b"no more", "os")
    assert values_of(log) == [b"synced"]


@pytest.mark.parametrize("open_it", [Log.open, open_log])
def test_closing_while_others_append_loses_nothing_and_hangs_nobody(tmp_path, open_it, scale):
    for turn in range(scale(10, 500)):
        folder = str(tmp_path / str(turn))
        log, journal = open_it(folder, kill_settings()), Journal()
        writers = [Numbered(journal, number, 0, random.Random(number)) for number in range(8)]

        async def append_until_closed(writer: Numbered, log: Log = log) -> None:
            while True:
                await writer.append_async_to(log)
                await asyncio.sleep(0)

        async def append_in_tasks(tasks: list[Numbered] = writers[4:]) -> list[BaseException]:
            return await asyncio.gather(*map(append_until_closed, tasks), return_exceptions=True)

        appending = [in_a_thread(until_it_fails, writer.append_to, log) for writer in writers[:4]]
        in_tasks = in_a_thread(asyncio.run, append_in_tasks())
        while log.written_end < 100:
            os.sched_yield()
        log.close()
        errors = [future.result(PATIENCE_S) for future in appending] + in_tasks.result(PATIENCE_S)
        assert [error for error in errors if not isinstance(error, Closed)] == []
        with Log.open(folder, kill_settings()) as log:
            assert log.report.damage == ()
            follower = Follower()
            follower.take_all(log)
            assert journal.acked().items() <= follower.firsts.items()


def until_it_fails(call: Callable[..., object], *args: object) -> BaseException:
    while True:
        try:
            call(*args)
        except Exception as error:
            return error


def test_a_cancelled_append_is_in_the_log_or_not_and_the_others_go_on(tmp_path):
    async def story(log: Log) -> list[Appended]:
        tasks = [asyncio.ensure_future(log.append_one_async(b"%d" % n, "fsync")) for n in range(64)]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[::3])
        return [answer for answer in answers if isinstance(answer, Appended)]

    with Log.open(str(tmp_path / "log")) as log:
        acked = asyncio.run(story(log))
        assert len(acked) == 42
        found = {record.offset: record.value for record in log.records(0)}
        assert list(found) == list(range(log.end))
        assert len({found[appended.offset] for appended in acked}) == 42
