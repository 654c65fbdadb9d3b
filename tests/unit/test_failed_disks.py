"""After the disk has failed under a real folder: nothing is acknowledged, and closing lets go of all of it."""

from __future__ import annotations

import errno
import os
import random
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

import holdfast
from holdfast.cli.opening import topics_of
from holdfast.env.disk import RealDisk
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import DiskFailed, InvalidRequest
from holdfast.storage.log import Log
from tests.unit.disks import fails
from tests.unit.logs import Logged

CHANGES = frozenset({"write", "reserve", "truncate", "sync", "sync_folder", "rename", "remove", "make_folder"})


def held_below(folder: Path) -> list[str]:
    """Files below the folder that this process has open or mapped."""
    held = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that listed them
            held.append(os.readlink(f"/proc/self/fd/{fd}"))
    held += [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return [path for path in held if path.startswith(f"{folder}/")]


def make_read_only(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """What the kernel tells of the folders' file system from now on; a sync there succeeds, as it does in truth."""
    asked = os.fstatvfs

    def fstatvfs(fd: int) -> object:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if any(path == str(folder) or path.startswith(f"{folder}/") for folder in folders):
            return SimpleNamespace(f_flag=os.ST_RDONLY)
        return asked(fd)

    monkeypatch.setattr(os, "fstatvfs", fstatvfs)


def test_a_file_system_that_became_read_only_fails_a_sync_that_the_kernel_calls_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = RealDisk()
    file = disk.open(str(tmp_path / "a"), write=True, create=True)
    file.write(0, [b"before"])
    file.sync()
    disk.sync_folder(str(tmp_path))
    make_read_only(monkeypatch, tmp_path)
    fails(errno.EROFS, file.sync)
    fails(errno.EROFS, lambda: disk.sync_folder(str(tmp_path)))


def test_what_cannot_be_kept_is_not_acknowledged_on_a_file_system_that_became_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with suppress(DiskFailed), holdfast.open(tmp_path / "q", durability="fsync", min_free_bytes=0) as queue:
        queue.put(b"kept")
        make_read_only(monkeypatch, tmp_path)
        with pytest.raises(DiskFailed, match=r"a sync failed .* Read-only file system"):
            queue.put(b"lost")
        with pytest.raises(DiskFailed, match="Reading still works"):
            queue.put(b"refused", durability="os")
        assert queue.get(timeout=1).body == b"kept"


def test_a_folder_on_a_disk_below_a_read_only_one_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container whose root is read-only, with a disk for its data."""
    (tmp_path / "root" / "data").mkdir(parents=True)
    below = tmp_path / "root" / "data"
    asked = os.fstatvfs

    def fstatvfs(fd: int) -> object:
        at_root = os.readlink(f"/proc/self/fd/{fd}") == str(below.parent)
        return SimpleNamespace(f_flag=os.ST_RDONLY) if at_root else asked(fd)

    monkeypatch.setattr(os, "fstatvfs", fstatvfs)
    RealDisk().make_folder(str(below))
    RealDisk().make_folder(str(below / "new"))
    assert (below / "new").is_dir()


def test_nothing_that_was_acknowledged_is_lost_when_a_disk_becomes_read_only() -> None:
    logged = Logged(SimulatedDisk())
    log: Log = logged.open()
    logged.append(log, [b"one", b"two"], durability="fsync")
    logged.disk.faults.fail(1, errno.EROFS, sticky=True, calls=CHANGES)
    with pytest.raises(DiskFailed, match="Read-only file system"):
        log.append([b"three"], durability="fsync")
    with pytest.raises(DiskFailed, match="open the log again"):
        log.append([b"four"], durability="os")
    assert [record.value for record in log.records(0)] == [b"one", b"two"]
    for seed in range(20):
        later = Logged(logged.disk.cut(random.Random(seed)))
        with later.open() as log:
            assert [record.value for record in log.records(0)][:2] == [b"one", b"two"]


@pytest.mark.parametrize("used", [False, True], ids=["only-put", "also-got"])
def test_after_a_failure_closing_closes_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, used: bool
) -> None:
    queue = holdfast.open(tmp_path / "q", durability="fsync", min_free_bytes=0)
    queue.put(b"one")
    if used:
        queue.get(timeout=1).ack()
    assert held_below(tmp_path)

    def failing(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(DiskFailed) as kept:  # as a program does that logs it later
        queue.put(b"two")
    with suppress(DiskFailed):
        queue.close()
    assert held_below(tmp_path) == []
    assert "Input/output error" in str(kept.value)


def test_a_queue_that_is_closed_holds_no_file_though_somebody_holds_the_queue(tmp_path: Path) -> None:
    queue = holdfast.open(tmp_path / "q", min_free_bytes=0)
    queue.put(b"one")
    message = queue.get(timeout=1)
    message.ack()
    queue.close()
    assert held_below(tmp_path) == []


def test_a_folder_that_may_not_be_looked_into_is_not_taken_for_one_without_a_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.open(tmp_path / "q", min_free_bytes=0) as queue:
        queue.put(b"here")
    asked = os.stat

    def stat(path: object, *args: object, **options: object) -> os.stat_result:
        if str(path).startswith(str(tmp_path / "q")):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return asked(path, *args, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "stat", stat)
    for look in (lambda: holdfast.open(tmp_path / "q", create=False), lambda: topics_of(str(tmp_path / "q"))):
        with pytest.raises(InvalidRequest, match="Permission denied"):
            look()
