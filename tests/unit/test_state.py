"""The state file where nothing may be stored into a map: written word by word, and a full disk is no reason to die."""

from __future__ import annotations

import errno
import logging

import pytest

from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import DiskFull
from holdfast.storage.log import Log
from holdfast.storage.reader import LogReader
from holdfast.storage.state import LogState
from tests.unit.logs import FOLDER, SMALL, Logged

WRITES = frozenset({"write"})


@pytest.fixture
def logged() -> Logged:
    return Logged(SimulatedDisk(maps=False))


def fill_up(disk: SimulatedDisk) -> None:
    """From now on every write needs a block, and there is none."""
    disk.faults.fail(1, errno.ENOSPC, sticky=True, calls=WRITES)


def test_nothing_is_stored_into_a_map_where_the_disk_cannot_take_it(logged: Logged) -> None:
    log = logged.fill(close=False)
    log.truncate(log.end - 5)
    log.trim(log.end)
    log.close()
    logged.open().close()
    assert logged.disk.calls["map_store"] == logged.disk.calls["word_store"] == 0


def test_a_disk_that_is_full_at_the_sync_costs_no_message(logged: Logged) -> None:
    log = logged.open()
    logged.append(log, [b"written"], durability="os")
    fill_up(logged.disk)
    log.sync()
    assert log.synced_end == log.end == 1
    logged.disk.faults.clear()
    logged.append(log, [b"more"], durability="os")
    state = LogState.open(logged.disk, FOLDER, write=False)
    assert state is not None
    assert (state.readable_end, state.synced_end) == (2, 1)  # with the next word the ones that were missing came


def test_a_log_closes_on_a_full_disk_and_the_next_opening_finds_its_end(
    logged: Logged, caplog: pytest.LogCaptureFixture
) -> None:
    log = logged.open()
    logged.append(log, [b"one", b"two"], durability="fsync")
    fill_up(logged.disk)
    with caplog.at_level(logging.WARNING):
        log.close()
    assert "clean shutdown not recorded: the next open will search for the end" in caplog.messages
    with pytest.raises(DiskFull, match="Free some space"):
        logged.open()
    logged.disk.faults.clear()
    with logged.open() as log:
        assert not log.report.clean
        assert [record.value for record in log.records(0)] == [b"one", b"two"]


def test_readers_elsewhere_see_what_was_published_once_there_is_room_again(logged: Logged) -> None:
    log = logged.open()
    logged.append(log, [b"seen"], durability="fsync")
    reader = LogReader(FOLDER, SMALL, logged.world)
    logged.append(log, [b"late"], durability="os")
    assert reader.end == 2
    logged.disk.faults.fail(2, errno.ENOSPC, sticky=True, calls=WRITES)  # the first one is the message
    logged.append(log, [b"later"], durability="os")
    assert reader.end == 2
    assert [record.value for record in log.records(0)] == [b"seen", b"late", b"later"]
    logged.disk.faults.clear()
    log.append([b"last"], durability="fsync")
    assert reader.end == 4


def test_a_reader_that_could_not_ask_for_a_sign_does_not_wait_for_one(logged: Logged) -> None:
    log: Log = logged.open()
    logged.append(log, [b"here"], durability="fsync")
    reader = LogReader(FOLDER, SMALL, logged.world)
    assert reader.ask_for_signal()
    fill_up(logged.disk)
    assert not reader.ask_for_signal()
