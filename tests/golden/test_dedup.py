"""Dedup ids from when each partition had an index of its own: they hold for the whole topic after the upgrade.

`dedup-v1.tar.gz` is a data folder of the last such version: the topic `orders` with three partitions and ids that were
saved in runs (`saved-*`, and `later-*` with delayed messages) or stood in the logs alone when the process was killed
(`killed-*`). `expected.json` has the id and the partition of each message.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest

import holdfast
from holdfast.env import File, ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk

ARCHIVE = Path(__file__).parent / "dedup-v1.tar.gz"
OLD = [f"topics/orders/{number}/dedup" for number in range(3)]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def check(old: Path) -> None:
    """Every id is known, with a key that leads to another partition for most."""
    expected = json.loads((old / "expected.json").read_text())
    with holdfast.open_broker(old / "data") as broker:
        for dedup_id, (message_id, partition) in expected.items():
            again = broker.publish("orders", b"again", key="another", dedup_id=dedup_id)
            assert (again.duplicate, again.id, again.partition) == (True, message_id, partition)
        assert not broker.publish("orders", b"new", dedup_id=f"new {os.urandom(8).hex()}").duplicate


def test_the_windows_of_all_partitions_become_one(old: Path):
    check(old)
    assert not [folder for folder in OLD if (old / "data" / folder).exists()]
    check(old)


def test_a_crash_before_the_merged_run_is_in_place_changes_nothing(old: Path):
    (old / "data/topics/orders/dedup").mkdir(mode=0o700)
    (old / "data/topics/orders/dedup/run.tmp").write_bytes(b"cut short")
    check(old)


def test_a_crash_before_the_old_ones_are_removed_is_finished(old: Path, tmp_path: Path):
    shutil.copytree(old / "data", tmp_path / "before")
    check(old)
    shutil.copytree(tmp_path / "before" / OLD[1], old / "data" / OLD[1])
    check(old)
    assert not (old / "data" / OLD[1]).exists()


class FullDisk:
    """The old folder on a disk that has no room for a new file, only the reserve that an owner keeps."""

    def __init__(self, old: Path) -> None:
        self.disk = SimulatedDisk()
        self.clock = ManualClock()
        self._copy(old / "data", "/data")
        reserve = self.disk.open("/data/reserve", write=True, create=True)
        reserve.write(0, [bytes(1 << 20)])
        reserve.close()
        self.full = True

    def _refuse_new(self) -> None:
        """What the reserve gives is for the logs; nothing is left for others."""
        make_folder, open_file = self.disk.make_folder, self.disk.open

        def refuse(path: str) -> None:
            if self.full and path.startswith("/data/topics/orders/dedup") and not self.disk.exists(path):
                raise OSError(errno.ENOSPC, "No space left on device")

        def make(path: str) -> None:
            refuse(path)
            make_folder(path)

        def opened(path: str, *, write: bool = False, create: bool = False) -> File:
            refuse(path)
            return open_file(path, write=write, create=create)

        self.disk.make_folder, self.disk.open = make, opened  # type: ignore[method-assign, assignment]
        self.disk._capacity_bytes = self.disk._tree.allocated_bytes() if self.full else None

    def _copy(self, source: Path, target: str) -> None:
        self.disk.make_folder(target)
        for path in sorted(source.iterdir()):
            if path.is_dir():
                self._copy(path, f"{target}/{path.name}")
            elif path.name != "lock":
                file = self.disk.open(f"{target}/{path.name}", write=True, create=True)
                file.write(0, [path.read_bytes()])
                file.sync()
                file.close()
        self.disk.sync_folder(target)

    def open(self) -> holdfast.Broker:
        self._refuse_new()
        return holdfast.open_broker("/data", world=World(clock=self.clock, disk=self.disk, ids=SeededIds(1)))

    def old_folders(self) -> list[str]:
        return [folder for folder in OLD if self.disk.exists(f"/data/{folder}")]


def all_known(broker: holdfast.Broker, old: Path) -> None:
    for dedup_id, (message_id, partition) in json.loads((old / "expected.json").read_text()).items():
        again = broker.publish("orders", b"again", key="another", dedup_id=dedup_id)
        assert (again.duplicate, again.id, again.partition) == (True, message_id, partition)


@pytest.mark.parametrize("ended", ["closed", "killed"])
def test_a_full_disk_puts_the_merge_off_and_keeps_nobody_from_the_ids(old: Path, ended: str):
    place = FullDisk(old)
    for _ in range(2):
        broker = place.open()
        all_known(broker, old)
        assert place.old_folders() == OLD
        if ended == "closed":
            broker.close()
        place.disk = place.disk.kill()
    broker = place.open()
    place.full, place.disk._capacity_bytes = False, None
    assert not broker.publish("orders", b"new", dedup_id="new").duplicate
    place.clock.advance(seconds=61)
    broker._port.engine.tick()
    assert place.old_folders() == []
    all_known(broker, old)
    broker.close()
    with place.open() as broker:
        all_known(broker, old)
        assert broker.publish("orders", b"new", dedup_id="new").duplicate
