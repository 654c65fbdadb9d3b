"""Readers that do not own the log: they follow the owner whatever it does, and change nothing."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from holdfast.env import File, RealDisk, SystemClock, SystemIds, World
from holdfast.errors import Busy, HoldfastError, OffsetOutOfRange, TailLost
from holdfast.settings import LogSettings
from holdfast.storage import Log, LogReader
from tests.crash.histories import small_settings
from tests.crash.writer_process import FORK, Follower, Head, Journal, Numbered, kill_settings, parse_value, started

# Far longer than anything here takes: only what hangs comes near it.
PATIENCE_S = 120

SMALL = small_settings()


class Owner:
    """A log that another process owns; what is called here is done there."""

    def __init__(self, process, connection: Connection) -> None:
        self.process = process
        self._connection = connection

    def call(self, name: str, *args: object, **options: object) -> object:
        self._connection.send((name, args, options))
        return self.answer()

    def answer(self) -> object:
        assert self._connection.poll(PATIENCE_S), "the owner does not answer"
        done, answer = self._connection.recv()
        assert done, answer
        return answer

    def write(self, *values: bytes) -> None:
        for value in values:
            self.call("append_one", value, "os")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@contextlib.contextmanager
def owner(folder: Path, settings: LogSettings = SMALL) -> Iterator[Owner]:
    here, there = FORK.Pipe()
    with started(own, str(folder), settings, there) as process:
        owner = Owner(process, here)
        owner.answer()
        yield owner


def own(folder: str, settings: LogSettings, connection: Connection) -> None:
    """Open the log and do what is asked, until killed or told to close."""
    log = Log.open(folder, settings)
    connection.send((True, None))
    name = ""
    while name != "close":
        name, args, options = connection.recv()
        try:
            asked = getattr(log, name)
            connection.send((True, asked(*args, **options) if callable(asked) else asked))
        except Exception as error:
            connection.send((False, f"{name}: {error!r}"))


def values_of(log: Log | LogReader, offset: int | None = None) -> list[bytes]:
    return [record.value for record in log.records(log.start if offset is None else offset)]


def numbered(first: int, next_number: int, size: int = 300) -> list[bytes]:
    return [b"%d " % n + b"x" * size for n in range(first, next_number)]


def test_a_reader_follows_its_owner_from_segment_to_segment(tmp_path):
    with owner(tmp_path) as own:
        own.write(b"first")
        reader = LogReader(str(tmp_path), SMALL)
        seen = values_of(reader)
        for first in range(0, 60, 4):
            own.write(*numbered(first, first + 4))
            seen += values_of(reader, len(seen))
        assert seen == [b"first", *numbered(0, 60)]
        assert len(reader.segments()) > 4
        assert reader.end == own.call("end")


def test_a_reader_that_begins_early_sees_the_first_segment_come(tmp_path):
    with owner(tmp_path) as own:
        reader = LogReader(str(tmp_path), SMALL)
        assert (reader.start, reader.end, values_of(reader)) == (0, 0, [])
        own.write(b"x")
        assert values_of(reader) == [b"x"]


def test_a_reader_is_told_where_to_go_on_when_the_head_was_trimmed(tmp_path):
    with owner(tmp_path) as own:
        own.write(*numbered(0, 60))
        reader = LogReader(str(tmp_path), SMALL)
        values_of(reader)
        start = own.call("trim", 40).start
        reader.refresh()
        with pytest.raises(OffsetOutOfRange) as caught:
            next(reader.records(0))
        assert (caught.value.offset, caught.value.start, caught.value.end) == (0, start, 60)
        assert values_of(reader, caught.value.start) == numbered(start, 60)


def test_a_reader_that_lags_is_told_so_too(tmp_path):
    """It has not looked since, and has none of the files open."""
    with owner(tmp_path) as own:
        own.write(*numbered(0, 60))
        reader = LogReader(str(tmp_path), SMALL)
        start = own.call("trim", 40).start
        with pytest.raises(OffsetOutOfRange) as caught:
            next(reader.records(0))
        assert caught.value.start == start
        assert reader.start == start


def test_a_reader_whose_segments_are_trimmed_while_it_reads_loses_nothing_silently(tmp_path):
    with owner(tmp_path) as own:
        own.write(*numbered(0, 60))
        reader = LogReader(str(tmp_path), SMALL)
        records = reader.records(0)
        seen = [next(records).offset]
        start = own.call("trim", 40).start
        with contextlib.suppress(OffsetOutOfRange):
            seen += [record.offset for record in records]
        assert seen in (list(range(60)), list(range(len(seen))))
        assert len(seen) == 60 or seen[-1] < start


@pytest.mark.parametrize("segment_bytes", [4096, 1 << 20], ids=["many segments", "one segment"])
@pytest.mark.parametrize("cut", [0, 1, 12, 26, 37, 59])
@pytest.mark.parametrize("size", [10, 900])
def test_a_reader_sees_a_truncation_and_what_came_after(tmp_path, segment_bytes, cut, size):
    settings = small_settings(segment_bytes=segment_bytes)
    with owner(tmp_path, settings) as own:
        own.write(*numbered(0, 60))
        reader = LogReader(str(tmp_path), settings)
        values_of(reader)
        held = reader.position(60)
        own.call("truncate", cut)
        own.write(*numbered(1000, 1000 + 80 - cut, size))
        reader.refresh()
        assert values_of(reader) == [*numbered(0, cut), *numbered(1000, 1000 + 80 - cut, size)]
        assert values_of(reader, 40) == values_of(reader)[40:]
        with pytest.raises(TailLost) as caught:
            reader.check_position(held)
        assert (caught.value.offset, caught.value.epoch_end) == (60, cut)
        reader.check_position(reader.position(80))


def test_a_segment_that_was_truncated_away_and_begun_anew_is_not_taken_for_the_old_one(tmp_path):
    with owner(tmp_path) as own:
        own.write(*numbered(0, 60))
        reader = LogReader(str(tmp_path), SMALL)
        values_of(reader)
        base = reader.segments()[2].base_offset
        own.call("truncate", base)
        own.write(*numbered(1000, 1060))
        assert base in [segment.base_offset for segment in own.call("segments")]
        reader.refresh()
        assert values_of(reader, base) == numbered(1000, 1060)


def test_a_reader_outlives_an_owner_that_closes_and_one_that_comes(tmp_path):
    with owner(tmp_path) as own:
        own.write(*numbered(0, 20))
        reader = LogReader(str(tmp_path), SMALL)
        held = reader.position(20)
        own.call("close")
    assert values_of(reader) == numbered(0, 20)
    with owner(tmp_path) as own:
        own.write(*numbered(20, 40))
        assert values_of(reader) == numbered(0, 40)
        reader.refresh()
        assert values_of(reader) == numbered(0, 40)
        reader.check_position(held)
        assert reader.identity.epoch == 1


def test_a_reader_outlives_an_owner_that_is_killed(tmp_path):
    with owner(tmp_path) as own:
        own.write(*numbered(0, 20))
        reader = LogReader(str(tmp_path), SMALL)
        held = reader.position(20)
        own.write(*numbered(20, 40))
        own.kill()
    assert values_of(reader) == numbered(0, 40)
    assert values_of(LogReader(str(tmp_path), SMALL)) == numbered(0, 40)
    with owner(tmp_path) as own:
        own.write(*numbered(40, 60))
        assert values_of(reader) == numbered(0, 60)
        assert reader.identity.epoch == 2
        reader.check_position(held)
        reader.check_position(reader.position(60))


def test_a_reader_follows_through_many_kills(tmp_path, scale):
    rng = random.Random(1)
    for turn in range(scale(1, 50)):
        folder = tmp_path / str(turn)
        with owner(folder, kill_settings()) as own:
            own.kill()
        reader, follower = LogReader(str(folder), kill_settings()), Follower()
        for _ in range(10):
            with started(write_on, str(folder), rng.getrandbits(32)) as process:
                wanted = follower.next_offset + rng.randint(1, 300)
                while follower.next_offset < wanted and process.is_alive():
                    follower.take_all(reader)
                process.kill()
                process.join()
            assert process.exitcode == -9, "the writer ended by itself; its error is in the captured stderr"
            follower.take_all(reader)


def write_on(folder: str, seed: int) -> None:
    """Append where the log ends, until killed."""
    log = Log.open(folder, kill_settings())
    last = parse_value(values_of(log, log.end - 1)[0]) if log.end > log.start else Head(0, -1)
    writer = Numbered(Journal(), 0, last.number + 1, random.Random(seed))
    while True:
        writer.append_to(log)


@pytest.mark.parametrize("damage", ["removed", "empty"])
def test_a_reader_finds_the_state_file_that_an_owner_made_anew(tmp_path, damage):
    with owner(tmp_path) as own:
        own.write(*numbered(0, 20))
        reader = LogReader(str(tmp_path), SMALL)
        own.kill()
    (tmp_path / "state").unlink()
    if damage == "empty":
        (tmp_path / "state").touch()
    with owner(tmp_path) as own:
        own.write(*numbered(20, 40))
        reader.refresh()
        assert values_of(reader) == numbered(0, 40)


def test_frames_that_a_reader_holds_outlive_their_segment(tmp_path):
    with owner(tmp_path) as own:
        own.write(*numbered(0, 40))
        reader = LogReader(str(tmp_path), SMALL)
        frames = list(reader.read(0))
        own.call("trim", 40)
        own.write(*numbered(40, 80))
        own.call("trim", 80)
        reader.refresh()
        values_of(reader)
        gc.collect()
        assert [value for frame in frames for value in frame.values()] == numbered(0, 40)
        own.kill()
    assert [record.value for frame in frames for record in frame.records()] == numbered(0, 40)


def test_frames_that_the_owner_holds_outlive_their_segment_and_the_log(tmp_path):
    with Log.open(str(tmp_path), SMALL) as log:
        for value in numbered(0, 40):
            log.append_one(value)
        frames = list(log.read(0))
        log.trim(40)
    del log
    gc.collect()
    assert [value for frame in frames for value in frame.values()] == numbered(0, 40)


@pytest.mark.parametrize("view", [Log, LogReader])
def test_a_frame_whose_messages_are_truncated_away_never_shows_other_bytes(tmp_path, view):
    with Log.open(str(tmp_path), SMALL) as log:
        for n in range(10):
            log.append([b"old %d" % n] * 3, durability="os")
        reader = log if view is Log else LogReader(str(tmp_path), SMALL)
        frames = list(reader.read(15))
        log.truncate(6)
        for values in ([b"old %d" % (5 + i)] * 3 for i in range(5)):
            with contextlib.suppress(HoldfastError):
                assert frames.pop(0).values() == values
        log.append([b"new"] * 50, durability="os")


@pytest.mark.parametrize("view", [Log, LogReader])
def test_a_truncation_under_a_reader_is_not_taken_for_damage(tmp_path, view):
    with Log.open(str(tmp_path), SMALL) as log:
        for n in range(40):
            log.append_one(b"old %d" % n, "os")
        records = (log if view is Log else LogReader(str(tmp_path), SMALL)).records(0)
        seen = [next(records).value for _ in range(5)]
        log.truncate(20)
        with contextlib.suppress(OffsetOutOfRange, TailLost):
            for record in records:
                seen.append(record.value)
        assert seen == [b"old %d" % n for n in range(len(seen))]
        assert len(seen) >= 20


def test_a_second_owner_is_told_who_the_first_one_is(tmp_path):
    program = tmp_path / "the_owner.py"
    program.write_text(
        "import sys; from holdfast.storage import Log\n"
        "log = Log.open(sys.argv[1]); print('owns', flush=True); sys.stdin.read()"
    )
    folder = str(tmp_path / "log")
    first = subprocess.Popen(
        [sys.executable, str(program), folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout.readline() == "owns\n"
        with pytest.raises(Busy) as caught:
            Log.open(folder)
        for fact in (str(first.pid), socket.gethostname(), f"the_owner.py {folder}", folder):
            assert fact in str(caught.value)
        assert LogReader(folder).end == 0
    finally:
        first.kill()
        first.communicate()
    Log.open(folder).close()


def test_a_log_is_opened_once_in_a_process_too(tmp_path):
    with Log.open(str(tmp_path), SMALL) as log:
        for _ in range(3):
            with pytest.raises(Busy, match=f"process {os.getpid()} on "):
                Log.open(str(tmp_path), SMALL)
        log.append_one(b"still mine", "fsync")
    with Log.open(str(tmp_path), SMALL) as log:
        assert log.report.clean
        assert values_of(log) == [b"still mine"]


def test_a_log_that_was_closed_is_free_though_a_forked_process_lives_on(tmp_path):
    log = Log.open(str(tmp_path), SMALL)
    with started(signal.pause):
        log.close()
        Log.open(str(tmp_path), SMALL).close()


def test_a_forked_process_that_ends_takes_no_lock_away(tmp_path):
    with Log.open(str(tmp_path), SMALL):
        with started(os.getpid) as process:
            process.join(PATIENCE_S)
        with pytest.raises(Busy):
            Log.open(str(tmp_path), SMALL)


class UntouchableDisk(RealDisk):
    """A real disk that nobody may change."""

    def open(self, path: str, *, write: bool = False, create: bool = False) -> File:
        assert not write, f"{path} is opened for writing"
        assert not create, f"{path} would be made"
        return super().open(path)

    def _refuse(self, *args: object) -> None:
        raise AssertionError(f"a reader changes the disk: {args}")

    make_folder = rename = remove = sync_folder = lock = _refuse


def everything_in(folder: Path) -> dict[str, object]:
    """Each name with what it holds and when that was changed; reading times are nobody's business."""
    paths = [folder, *sorted(folder.rglob("*"))]
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_ino, path.read_bytes() if path.is_file() else None)
        for path in paths
    }


def as_it_is(folder: Path) -> None:
    pass


def torn(folder: Path) -> None:
    segment = max(folder.glob("*.log"))
    with segment.open("r+b") as file:
        used = len(segment.read_bytes().rstrip(b"\0"))
        file.seek(-(-used // 8) * 8)
        file.write(b"torn " * 20)


def without_state(folder: Path) -> None:
    (folder / "state").unlink()


def without_indexes(folder: Path) -> None:
    for path in folder.glob("*.idx"):
        path.unlink()


def damaged(folder: Path) -> None:
    segment = min(folder.glob("*.log"))
    content = bytearray(segment.read_bytes())
    content[200] ^= 0xFF
    segment.write_bytes(content)


@pytest.mark.parametrize("change", [as_it_is, torn, without_state, without_indexes, damaged])
@pytest.mark.parametrize("owned", [True, False])
def test_a_reader_changes_nothing_in_the_folder(tmp_path, change, owned):
    live, folder = tmp_path / "live", tmp_path / "log"
    with owner(live) as own:
        own.write(*numbered(0, 60))
        own.call("truncate", 50)
        own.call("trim", 10)
        if not owned:
            own.kill()
        shutil.copytree(live, folder)
        change(folder)
        look_at_everything(folder)
        before = everything_in(live)
        look_at_everything(live)
        assert everything_in(live) == before


def look_at_everything(folder: Path) -> None:
    before = everything_in(folder)
    world = World(clock=SystemClock(), disk=UntouchableDisk(), ids=SystemIds())
    for _ in range(2):
        reader = LogReader(str(folder), SMALL, world)
        assert len(list(reader.records(reader.start, on_damage="skip"))) >= 30
        assert len(list(reader.read(reader.start, on_damage="skip"))) >= 30
        reader.refresh()
        assert reader.find_time(0) >= reader.start
        reader.check_position(reader.position(reader.end))
        assert reader.segments()
        assert everything_in(folder) == before


OPEN_SEGMENTS = 2 * 64  # a file and its map for each segment that may be open at once
SLACK = 30


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def deleted_files(folder: Path) -> list[str]:
    """Files in the folder that are open here and have no name any more: their room is not free."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [link for link in links if link.startswith(str(folder)) and link.endswith("(deleted)")]


@pytest.fixture
def before() -> int:
    """How many files are open when nothing waits to be collected."""
    gc.collect()
    return open_files()


def fill(log: Log, segments: int) -> None:
    for _ in range(segments):
        log.append([b"x" * 3500], durability="os")


def test_closed_logs_hold_no_files(tmp_path, before):
    closed = []
    for n in range(200):
        log = Log.open(str(tmp_path / f"{n}"), SMALL)
        log.append_one(b"x", "fsync")
        assert values_of(log) == [b"x"]
        log.close()
        closed.append(log)
    assert open_files() - before <= SLACK


def test_readers_that_nobody_holds_any_more_hold_no_files(tmp_path, before):
    with Log.open(str(tmp_path), SMALL) as log:
        fill(log, 5)
        for _ in range(200):
            assert len(values_of(LogReader(str(tmp_path), SMALL))) == 5
        gc.collect()
        assert open_files() - before <= SLACK


def test_writing_many_segments_keeps_few_files_open(tmp_path, before):
    with Log.open(str(tmp_path), SMALL) as log:
        for _ in range(4):
            fill(log, 50)
            log.sync()
        assert open_files() - before <= OPEN_SEGMENTS + SLACK


def test_reading_many_segments_keeps_few_files_open(tmp_path, before):
    with Log.open(str(tmp_path), SMALL) as log:
        fill(log, 200)
    with Log.open(str(tmp_path), SMALL) as log:
        reader = LogReader(str(tmp_path), SMALL)
        for _ in range(2):
            assert len(values_of(log)) == len(values_of(reader)) == 200
            assert len(log.segments()) == len(reader.segments()) == 200
            assert open_files() - before <= 2 * OPEN_SEGMENTS + SLACK


def test_the_owner_goes_on_while_others_read_more_segments_than_may_be_open(tmp_path):
    settings = small_settings(segment_bytes=65536)
    with Log.open(str(tmp_path), settings) as log:
        for _ in range(100):
            log.append([b"x" * 65000], durability="os")
        for _ in range(10):  # all in the last segment, which is not looked at for longest when it is written to
            log.append([b"y" * 500] * 9, durability="os")
            assert len(values_of(log)) == log.end
            records = log.records(0)
            assert [next(records).offset for _ in range(80)] == list(range(80))
        log.append_one(b"the last", "fsync")
    with Log.open(str(tmp_path), settings) as log:
        assert log.report.clean
        assert values_of(log, log.end - 1) == [b"the last"]


def test_the_room_of_trimmed_segments_is_free(tmp_path):
    with Log.open(str(tmp_path), SMALL) as log:
        fill(log, 100)
        reader = LogReader(str(tmp_path), SMALL)
        values_of(log), values_of(reader)
        log.trim(log.end)
        reader.refresh()
        gc.collect()
        assert deleted_files(tmp_path) == []
