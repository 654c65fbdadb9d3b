"""Waiting for a log that somebody else owns: who wakes us, and how often we look."""

from __future__ import annotations

import errno
import logging
import os
import threading

import pytest

from holdfast.env import ManualClock, RealDisk, SeededIds, World, real_world
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.env.world import FolderWatch, InotifyWatch, WatchRefused, is_remote
from holdfast.errors import InvalidRequest, NotALog, OffsetOutOfRange
from holdfast.settings import LogSettings
from holdfast.storage import Log, LogReader
from holdfast.storage.files import join
from holdfast.storage.reader import Arrivals, FollowSettings
from holdfast.storage.state import ASKED, LogState

FOLDER = "/data/log"
SETTINGS = LogSettings(durability="os")


class TellingDisk(SimulatedDisk):
    """A disk that tells of writes, as a kernel does: stores into maps make no event."""

    def __init__(self) -> None:
        super().__init__()
        self.events = 0
        self.on_call = self._note

    def _note(self, call: str) -> None:
        self.events += call in ("write", "rename", "remove")


class SimulatedWatch:
    """Told by a disk in memory. While nothing is told, time passes, and what is due in the meantime is done."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._seen = place.disk.events
        self.watched: list[str] = []
        self.closed = False

    def add_file(self, path: str) -> None:
        self.watched.append(path)

    def add_folder(self, path: str) -> None:
        self.watched.append(path)

    def wait(self, timeout_s: float) -> bool:
        self._place.sleeps.append(timeout_s)
        if self._place.fails_with is not None:
            raise self._place.fails_with
        self._place.happen()
        if self._place.disk.events == self._seen:
            self._place.clock.advance(seconds=timeout_s)
            return False
        self._seen = self._place.disk.events
        return True

    def close(self) -> None:
        self.closed = True


class Place:
    """An owner and what happens while a reader sleeps: one thing for each sleep."""

    def __init__(self, *, refused: str | None = None) -> None:
        self.disk = TellingDisk()
        self.clock = ManualClock()
        self.refused = refused
        self.fails_with: OSError | None = None
        self.sleeps: list[float] = []
        self.plan: list[object] = []
        self.watches: list[SimulatedWatch] = []
        self.world = World(self.clock, self.disk, SeededIds(7), watch=self._watch)
        self.log = Log.open(FOLDER, SETTINGS, self.world)

    def _watch(self) -> FolderWatch:
        if self.refused is not None:
            raise WatchRefused(self.refused)
        self.watches.append(SimulatedWatch(self))
        return self.watches[-1]

    def happen(self) -> None:
        if self.plan:
            thing = self.plan.pop(0)
            if callable(thing):
                thing()

    def asked(self) -> int:
        state = LogState.open(self.disk, FOLDER, write=False)
        assert state is not None
        return state.words[ASKED]

    def arrivals(self, **settings: object) -> Arrivals:
        return Arrivals(self.world, FollowSettings(**settings))


def no_news() -> bool:
    return False


def test_a_reader_that_follows_gets_what_was_there_and_what_comes():
    place = Place()
    place.log.append([b"one", b"two"])
    reader = LogReader(FOLDER, world=place.world)
    place.plan = [lambda: place.log.append_one(b"three"), lambda: place.log.append([b"four", b"five"])]
    found = [record.value for record in reader.follow(0, timeout=1000)]
    assert found == [b"one", b"two", b"three", b"four", b"five"]
    assert place.watches[0].closed


def test_a_reader_follows_from_the_end_of_the_moment_when_it_is_asked_and_not_later():
    place = Place()
    place.log.append_one(b"before")
    following = LogReader(FOLDER, world=place.world).follow(timeout=1)
    place.log.append_one(b"after")
    assert [record.value for record in following] == [b"after"]


def test_an_owner_that_is_not_asked_writes_nothing_for_a_message():
    place = Place()
    place.log.append_one(b"the first segment")
    events = place.disk.events
    for _ in range(100):
        place.log.append_one(b"x")
    assert place.disk.events == events


def test_an_owner_that_is_asked_gives_one_sign_however_many_messages_there_are():
    place = Place()
    place.log.append_one(b"the first segment")
    assert LogReader(FOLDER, world=place.world).ask_for_signal()
    events = place.disk.events
    for _ in range(100):
        place.log.append_one(b"x")
    assert place.disk.events == events + 1
    assert place.asked() == 0


@pytest.mark.parametrize("durability", ["os", "interval", "fsync"])
def test_a_sign_comes_when_the_message_can_be_read_and_not_before(durability):
    place = Place()
    reader = LogReader(FOLDER, world=place.world)
    reader.ask_for_signal()
    written = place.log.write([b"x"], durability=durability)
    assert (place.asked() == 0) == (reader.end == 1) == (durability != "fsync")
    place.log.wait(written)
    assert (place.asked(), reader.end) == (0, 1)


def test_a_sync_that_lets_nobody_see_more_is_no_news():
    place = Place()
    reader = LogReader(FOLDER, world=place.world)
    place.log.append_one(b"x")
    reader.ask_for_signal()
    place.log.sync()
    assert place.asked() == 1


def test_a_reader_that_will_be_told_sleeps_until_the_safety_look():
    place = Place()
    reader = LogReader(FOLDER, world=place.world)
    arrivals = place.arrivals()
    assert not arrivals.wait([reader], no_news, timeout_s=900)
    assert place.sleeps == pytest.approx([300, 300, 300])
    assert arrivals.looks == 4


def test_the_safety_look_finds_what_nobody_told():
    place = Place()
    reader = LogReader(FOLDER, world=place.world)

    def replace_the_state_file() -> None:
        place.log._lock.release()  # as if it was killed: the old file is as it was
        place.disk.remove(join(FOLDER, "state"))
        with Log.open(FOLDER, SETTINGS, place.world) as log:
            log.append_one(b"in another file")
        place.disk.events = place.watches[0]._seen  # and nobody tells

    place.plan = [replace_the_state_file]
    assert [record.value for record in reader.follow(0, timeout=301)] == [b"in another file"]
    assert len(place.sleeps) > 1


def test_whoever_is_not_told_looks_every_interval_with_jitter_from_the_given_randomness():
    place = Place(refused="no more watches")
    reader = LogReader(FOLDER, world=place.world)
    waits: list[float] = []
    place.clock.wait = lambda event, timeout_s: (waits.append(timeout_s), place.clock.advance(seconds=timeout_s))[0]
    place.arrivals().wait([reader], no_news, timeout_s=100)
    same = SeededIds(7)
    same.random_u32()  # the log's id
    assert waits[:-1] == pytest.approx([3 + 0.5 * same.random_u32() / 2**32 for _ in waits[:-1]])
    assert 100 / 3.5 <= len(waits) <= 100 / 3 + 1
    assert len({round(each, 6) for each in waits}) > 20


def test_messages_come_also_by_looking():
    place = Place(refused="no more watches")
    reader = LogReader(FOLDER, world=place.world)
    real_wait = place.clock.wait
    place.plan = [None, lambda: place.log.append_one(b"late")]

    def wait(event: threading.Event, timeout_s: float | None) -> bool:
        place.happen()
        return real_wait(event, timeout_s)

    place.clock.wait = wait
    assert [record.value for record in reader.follow(0, timeout=20)] == [b"late"]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_watch_that_fails_is_logged_once_and_looking_takes_its_place(at_once, caplog):
    place = Place(refused="the limit is reached" if at_once else None)
    if not at_once:
        place.fails_with = OSError(errno.EBADF, "bad file descriptor")
    reader = LogReader(FOLDER, world=place.world)
    arrivals = place.arrivals()
    with caplog.at_level(logging.WARNING, "holdfast"):
        arrivals.wait([reader], no_news, timeout_s=60)
        arrivals.wait([reader], no_news, timeout_s=60)
    assert [record.message for record in caplog.records] == ["files cannot be watched: polling instead"]
    assert not arrivals.watching
    assert arrivals.looks > 30
    assert all(watch.closed for watch in place.watches)


def test_whoever_wants_no_watch_gets_none_and_no_warning(caplog):
    place = Place()
    reader = LogReader(FOLDER, world=place.world)
    arrivals = place.arrivals(watch=False, poll_interval_ms=1000, poll_jitter_ms=0)
    with caplog.at_level(logging.WARNING, "holdfast"):
        arrivals.wait([reader], no_news, timeout_s=10)
    assert (place.watches, arrivals.looks, caplog.records) == ([], 11, [])
    assert place.asked() == 0


def test_whoever_wants_no_safety_look_sleeps_for_good():
    place = Place()
    place.arrivals(safety_poll_ms=0).wait([LogReader(FOLDER, world=place.world)], no_news, timeout_s=10_000)
    assert place.sleeps == [10_000]


@pytest.mark.parametrize("wrong", [{"poll_interval_ms": 0}, {"poll_jitter_ms": -1}, {"safety_poll_ms": -1}])
def test_settings_that_would_never_rest_are_refused(wrong):
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        FollowSettings(**wrong)


def test_without_an_owner_nobody_is_relied_upon_until_there_is_one_again():
    place = Place()
    place.log.close()
    reader = LogReader(FOLDER, world=place.world)
    assert not reader.ask_for_signal()
    place.arrivals().wait([reader], no_news, timeout_s=30)
    assert max(place.sleeps) < 4
    place.log = Log.open(FOLDER, SETTINGS, place.world)
    assert place.asked() == 0  # whoever waits is told that somebody came
    assert reader.end == 0
    assert reader.ask_for_signal()


def test_an_owner_of_an_older_version_is_not_relied_upon():
    place = Place()
    reader = LogReader(FOLDER, world=place.world)
    place.log._writer.state.words[5] = 0
    assert not reader.ask_for_signal()


def test_a_reader_is_told_of_a_truncation_and_of_an_owner_that_comes():
    place = Place()
    place.log.append([b"1", b"2"])
    place.log.append([b"3"])
    reader = LogReader(FOLDER, world=place.world)
    place.plan = [lambda: place.log.truncate(2)]
    with pytest.raises(OffsetOutOfRange, match="beyond the end"):
        list(reader.follow(3, timeout=100))
    assert len(place.sleeps) == 1
    assert reader.ask_for_signal()  # also of the next epoch


def test_a_log_that_is_removed_ends_the_waiting_with_an_error():
    place = Place()
    reader = LogReader(FOLDER, world=place.world)

    def remove() -> None:
        place.log.close()
        for name in place.disk.names(FOLDER):
            place.disk.remove(join(FOLDER, name))

    place.plan = [remove]
    with pytest.raises(NotALog):
        list(reader.follow(0))


@pytest.mark.parametrize(
    ("kind", "remote"),
    [("nfs4", True), ("cifs", True), ("fuse.sshfs", True), ("ext4", False), ("tmpfs", False), ("overlay", False)],
)
def test_network_file_systems_are_known(kind, remote):
    assert is_remote(kind) == remote


def test_a_network_file_system_is_not_watched(caplog):
    place = Place()
    place.disk.kind = lambda folder: "nfs4"
    arrivals = place.arrivals()
    with caplog.at_level(logging.WARNING, "holdfast"):
        arrivals.wait([LogReader(FOLDER, world=place.world)], no_news, timeout_s=10)
    assert not arrivals.watching
    assert "nfs4" in caplog.records[0].error


# The kernel's own


def test_the_kernel_tells_of_a_write_and_not_of_a_store_into_a_map(tmp_path):
    file = RealDisk().open(str(tmp_path / "file"), write=True, create=True)
    file.write(0, [bytes(64)])
    watch = InotifyWatch()
    watch.add_file(str(tmp_path / "file"))
    file.words(8)[0] = 1
    file.sync()
    assert not watch.wait(0)
    file.write(8, [bytes(8)])
    assert watch.wait(10)
    assert not watch.wait(0)
    watch.close()
    watch.close()
    file.close()


def test_the_kernel_tells_of_new_names_in_a_folder_and_a_file_that_takes_anothers_name(tmp_path):
    watch = InotifyWatch()
    (tmp_path / "state").write_bytes(b"old")
    watch.add_file(str(tmp_path / "state"))
    (tmp_path / "new").write_bytes(b"new")
    assert not watch.wait(0)
    os.replace(tmp_path / "new", tmp_path / "state")
    assert watch.wait(10)
    watch.add_file(str(tmp_path / "state"))  # the new one
    watch.wait(0)
    with (tmp_path / "state").open("ab") as file:
        file.write(b"more")
    assert watch.wait(10)
    watch.add_folder(str(tmp_path))
    (tmp_path / "folder").mkdir()
    assert watch.wait(10)
    watch.close()


def test_what_is_not_there_cannot_be_watched(tmp_path):
    watch = InotifyWatch()
    with pytest.raises(FileNotFoundError):
        watch.add_file(str(tmp_path / "state"))
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError):
        watch.add_folder(str(tmp_path / "file"))
    watch.close()


def test_a_kernel_that_gives_no_more_watches_is_a_refusal_that_names_the_limit(tmp_path):
    (tmp_path / "file").touch()
    watch = InotifyWatch()

    def refuse(*arguments: object) -> int:
        import ctypes

        ctypes.set_errno(errno.ENOSPC)
        return -1

    watch._add_watch = refuse
    with pytest.raises(WatchRefused, match="max_user_watches is reached"):
        watch.add_file(str(tmp_path / "file"))
    watch.close()


def test_a_state_file_that_may_not_be_written_is_read_all_the_same():
    place = Place()
    place.log.append_one(b"x")
    reader = LogReader(FOLDER, world=place.world)
    real_open = place.disk.open

    def open_for_reading_only(path: str, *, write: bool = False, create: bool = False):
        if write:
            raise OSError(errno.EROFS, "read-only file system", path)
        return real_open(path)

    place.disk.open = open_for_reading_only
    assert not reader.ask_for_signal()
    assert [record.value for record in reader.records(0)] == [b"x"]


def test_the_real_world_watches():
    watch = real_world().watch()
    assert not watch.wait(0)
    watch.close()
