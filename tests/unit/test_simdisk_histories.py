"""No cut of any history leaves what no kernel could have left, judged by a ledger kept beside it."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from contextlib import suppress

import pytest

from holdfast.env.disk import File
from holdfast.env.sim.disk import SimulatedDisk
from tests.unit.disks import PAGE, sim, simulated, synced


class Ledger:
    """For each byte of a file, the values that a cut may leave; for its length likewise."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.values: list[set[int]] = [{0} for _ in range(4 * PAGE)]
        self.fresh: set[int] = set()  # written since the last failed sync, or never lost
        self.lengths = {0}
        self.failed = False

    def step(self, rng: random.Random) -> None:
        start, stop = sorted(rng.sample(range(3 * PAGE), 2))
        kind = rng.choice(["write", "write", "write", "truncate", "reserve"])
        size = self.file.size()
        if kind == "write":
            self.file.write(start, [rng.randbytes(stop - start)])
            self._note(range(min(start, size), stop))
        elif kind == "truncate":
            self.file.truncate(start)
            self._note(range(min(start, size), max(start, size)))
        else:
            self.file.reserve(stop)
            self._note(range(size, stop))

    def sync(self) -> None:
        self.file.sync()
        content = self._content()
        for position in range(4 * PAGE) if not self.failed else self.fresh:
            self.values[position] = {content[position]}
        if not self.failed:
            self.lengths = {self.file.size()}

    def fail(self) -> None:
        with suppress(OSError):
            self.file.sync()
        self.failed = True
        self.fresh = set()

    def check(self, content: bytes) -> None:
        assert len(content) in self.lengths
        assert all(byte in values for byte, values in zip(content, self.values, strict=False))

    def _content(self) -> bytes:
        return self.file.read(0, 4 * PAGE).ljust(4 * PAGE, b"\0")

    def _note(self, touched: range) -> None:
        self.lengths.add(self.file.size())
        content, shortest = self._content(), min(self.lengths)
        for position in touched:
            # Zeros only where the length may have grown before the bytes.
            self.values[position] |= {content[position], 0} if position >= shortest else {content[position]}
        self.fresh |= set(touched) & set(range(self.file.size()))


@pytest.mark.slow
@pytest.mark.parametrize("with_failure", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_no_cut_of_any_history_shows_a_byte_that_no_kernel_could_have_left(seed: int, with_failure: bool) -> None:
    rng, place = random.Random(seed), simulated()
    ledger = Ledger(synced(place, "a", b""))
    for step in range(30):
        ledger.step(rng)
        if step == 15 and with_failure:
            sim(place).faults.fail(1, errno.EIO, sticky=False, calls=frozenset({"sync"}))
            ledger.fail()
        if rng.random() < 0.3:
            ledger.sync()
            assert with_failure or sim(place).durable(place.path("a")) == ledger.file.read(0, 4 * PAGE)
        for _ in range(5):
            ledger.check(sim(place).cut(rng).contents(place.path("a")))


def files_under(disk: SimulatedDisk, folder: str) -> Iterator[tuple[str, bytes]]:
    for name in disk.names(folder):
        path = f"{folder}/{name}"
        if name.startswith("folder"):
            yield from files_under(disk, path)
        else:
            yield path, disk.contents(path)


@pytest.mark.parametrize("seed", range(10))
def test_no_cut_of_any_history_of_names_doubles_a_file_or_loses_a_durable_one(seed: int) -> None:
    rng, place = random.Random(seed), simulated()
    folders = [place.folder, place.path("folder1"), place.path("folder1/folder2")]
    place.disk.make_folder(folders[2])
    removed_or_replaced: set[bytes] = set()
    for step in range(60):
        held = dict(files_under(sim(place), place.folder))
        target = f"{rng.choice(folders)}/{rng.choice('abcd')}"
        kind = rng.choice(["create", "rename", "rename", "remove", "sync"])
        if kind == "sync":
            place.disk.sync_folder(rng.choice(folders))
        elif kind == "create" and target not in held:
            file = place.disk.open(target, write=True, create=True)
            file.write(0, [b"%d" % step])
            file.sync()
        elif kind == "rename" and held:
            source = rng.choice(list(held))
            if source != target:
                removed_or_replaced |= {held[target]} if target in held else set()
                place.disk.rename(source, target)
        elif kind == "remove" and target in held:
            removed_or_replaced.add(held[target])
            place.disk.remove(target)
        durable = {content for path in held if (content := sim(place).durable(path)) is not None}
        for _ in range(5):
            left = [content for _, content in files_under(sim(place).cut(rng), place.folder)]
            assert len(left) == len(set(left))
            assert durable - removed_or_replaced <= set(left)
