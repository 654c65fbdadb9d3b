"""Locks and documents after power cuts, kills and damage: what was answered counts, and no fence comes twice."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

import holdfast
from holdfast import CorruptData, HoldfastError, LeaseLost, LockHeld
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.simdisk import SimulatedDisk
from holdfast.locking.commands import Write
from holdfast.locking.table import check
from tests.crash.writer_process import Journal, Note, started
from tests.unit.brokers import FOLDER, SETTINGS, Place

LOCKS = f"{FOLDER}/locks"
SEEDS = range(30)


def reopened(disk: SimulatedDisk, clock: ManualClock | None = None) -> holdfast.Broker:
    world = World(clock=clock or ManualClock(), disk=disk, ids=SeededIds(99))
    return holdfast.open_broker(FOLDER, world=world, settings=SETTINGS)


def every_cut(place: Place) -> list[SimulatedDisk]:
    """What cuts of one moment may leave: all, nothing and much in between."""
    return [place.disk.cut(random.Random(seed)) for seed in SEEDS]


def test_a_lock_that_was_answered_is_held_after_a_power_cut():
    place = Place()
    lock = place.broker.locks.acquire("report", owner="ann", lease=20)
    for disk in every_cut(place):
        with reopened(disk) as broker:
            assert broker.locks.describe("report").lease_id == lock.lease_id
            with pytest.raises(LockHeld, match="ann"):
                broker.locks.acquire("report", wait=0)


def test_a_lease_that_was_made_longer_is_as_long_after_a_power_cut():
    place = Place()
    lock = place.broker.locks.acquire("report", lease=20)
    place.broker.locks.keepalive(lock, lease=200)
    for disk in every_cut(place):
        with reopened(disk) as broker:
            assert broker.locks.keepalive(lock).lease == 200


def test_a_document_that_was_seen_is_the_same_after_a_power_cut():
    place = Place()
    place.broker.documents.update("plan", 1)
    locks = place.engine.locks()
    # Somebody has written, and does not know yet that it is done; somebody else looks, and knows.
    locks.change(Write("plan", b"2"))
    seen = place.broker.documents.get("plan")
    for disk in every_cut(place):
        with reopened(disk) as broker:
            assert broker.documents.get("plan") == seen


