"""What the tests of disks share: a disk with a folder on it, and what cuts may leave there."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from holdfast.env.disk import Disk, File
from holdfast.env.sim.disk import SimulatedDisk

PAGE = 4096


class Place:
    """A disk and a folder on it."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self.disk = disk
        self.folder = folder

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def file(self, name: str = "a", content: bytes = b"") -> File:
        file = self.disk.open(self.path(name), write=True, create=True)
        if content:
            assert file.write(0, [content]) == len(content)
        return file


def simulated(*, capacity_bytes: int | None = None) -> Place:
    disk = SimulatedDisk(capacity_bytes=capacity_bytes)
    disk.make_folder("/data/log")
    return Place(disk, "/data/log")


def sim(place: Place) -> SimulatedDisk:
    assert isinstance(place.disk, SimulatedDisk)
    return place.disk


def synced(place: Place, name: str, content: bytes) -> File:
    file = place.file(name, content)
    file.sync()
    place.disk.sync_folder(place.folder)
    return file


def cuts(place: Place, count: int = 200) -> list[SimulatedDisk]:
    return [sim(place).cut(random.Random(seed)) for seed in range(count)]


def outcomes(place: Place, name: str = "a", *, count: int = 200) -> set[bytes | None]:
    """What a file may hold after a cut; None where its name is gone."""
    path = place.path(name)
    return {disk.contents(path) if disk.exists(path) else None for disk in cuts(place, count)}


def fails(code: int, call: Callable[[], object]) -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011 (the number is checked below)
        call()
    assert caught.value.errno == code
