"""Power cuts and faults at every disk call of the catalog: a topic is wholly there or wholly not, and stays so."""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Callable

import pytest

from holdfast.broker.folder.contents import Catalog
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import HoldfastError
from holdfast.settings import TopicSettings

ROOT = "data"
BASE = TopicSettings()
WIDE = TopicSettings(partitions=3, max_attempts=9)
CUTS = 6  # possible disks for each call


class Life:
    """A catalog that does a few things, and what may be found after each disk call."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        self.disk.make_folder(f"{ROOT}/topics")
        self.disk.sync_folder(ROOT)
        self.catalog = Catalog(World(clock=ManualClock(), disk=self.disk, ids=SeededIds(1)), ROOT)
        self.allowed: dict[str, set[int]] = {}  # topic -> how many partitions it may have; 0: it is not there

    def create(self, name: str) -> None:
        self.allowed[name] = {0, 3}
        self.catalog.create(name, WIDE, BASE)
        self.allowed[name] = {3}

    def grow(self, name: str) -> None:
        self.allowed[name] = {3, 5}
        self.catalog.grow(name, 5)
        self.allowed[name] = {5}

    def delete(self, name: str) -> None:
        self.allowed[name] = {0, *self.allowed[name]}
        self.catalog.delete(name)
        self.allowed[name] = {0}

    def fill(self, name: str) -> None:
        """Give the topic messages and dead letters."""
        for folder in (f"{name}/0/log", f"{name}/2/groups/billing", f"{name}.dlq/0/log"):
            self.disk.make_folder(f"{ROOT}/topics/{folder}")
            file = self.disk.open(f"{ROOT}/topics/{folder}/x", write=True, create=True)
            file.write(0, [b"x"])
            file.sync()
            file.close()
            self.disk.sync_folder(f"{ROOT}/topics/{folder}")

    def check(self, disk: SimulatedDisk) -> None:
        """Open what was left: the next owner tidies up first."""
        catalog = Catalog(World(clock=ManualClock(), disk=disk, ids=SeededIds(2)), ROOT)
        catalog.tidy()
        for name, allowed in self.allowed.items():
            found = catalog.facts(name).partitions if name in catalog else 0
            assert found in allowed, f"{name}: {found}, not {allowed}"
            if found:
                assert disk.exists(f"{ROOT}/topics/{name}/settings.json")
        left = {name.removesuffix(".dlq") for name in disk.names(f"{ROOT}/topics")}
        assert left == set(catalog.names()), f"{left - set(catalog.names())} were left behind"


def story(life: Life) -> None:
    life.create("orders")
    life.fill("orders")
    life.create("mails")
    life.grow("orders")
    life.delete("mails")
    life.delete("orders")
    life.create("orders")


@pytest.mark.parametrize("stop", ["cut", "kill"])
def test_the_catalog_is_whole_wherever_it_is_stopped(stop, scale):
    life, rng, states = Life(), random.Random(stop), 0

    def look(call: str) -> None:
        nonlocal states
        for _ in range(scale(CUTS, 200) if stop == "cut" else 1):
            states += 1
            life.check(life.disk.cut(rng) if stop == "cut" else life.disk.kill())

    life.disk.on_call = look
    story(life)
    assert states > 100 if stop == "cut" else states > 30


def test_a_second_cut_while_tidying_up_leaves_nothing_half_done_either(scale):
    life, rng, disks = Life(), random.Random(1), []
    life.disk.on_call = lambda call: disks.append(life.disk.cut(rng)) if rng.random() < 0.3 else None
    life.create("orders")
    life.fill("orders")
    life.disk.on_call = None
    life.disk.on_call = lambda call: disks.append(life.disk.cut(rng))
    life.delete("orders")
    life.allowed["orders"] = {0, 3}
    for disk in disks[:: scale(3, 1)]:
        again: list[SimulatedDisk] = []
        disk.on_call = lambda call, disk=disk, again=again: again.append(disk.cut(rng))
        life.check(disk)
        for other in again:
            life.check(other)


@pytest.mark.parametrize("fault", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("sticky", [False, True], ids=["once", "for-good"])
def test_after_a_fault_the_catalog_is_what_it_was_or_what_it_was_to_be(fault, sticky):
    calls = counted(story)
    assert calls > 50
    for nth in range(1, calls + 1):
        life = Life()
        life.disk.faults.fail(nth, getattr(errno, fault), sticky=sticky)
        with contextlib.suppress(OSError, HoldfastError):
            story(life)
        life.disk.faults.clear()
        life.check(life.disk.kill())
        for seed in range(3):
            life.check(life.disk.cut(random.Random(seed)))


def counted(run: Callable[[Life], None]) -> int:
    life = Life()
    life.disk.faults.fail(10**9, errno.EIO, sticky=False)
    run(life)
    return life.disk.faults._faults[0].seen
