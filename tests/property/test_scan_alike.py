"""The scan of an opening that goes over frames of one kind together finds what it finds frame by frame."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from unittest.mock import patch

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import InvalidRequest
from holdfast.model import Batch
from holdfast.storage import examine as scanning
from holdfast.storage.log import Log
from holdfast.storage.state import LogState
from tests.crash.histories import FOLDER, small_settings

_sizes = st.sampled_from([0, 8, 100, 100, 100])
_steps = st.lists(
    st.tuples(st.just("one"), _sizes, st.integers(1, 30))
    | st.tuples(st.just("keyed"), _sizes, st.integers(1, 5))
    | st.tuples(st.just("urgent"), _sizes, st.integers(1, 5))
    | st.tuples(st.just("batch"), _sizes, st.integers(1, 5))
    | st.tuples(st.just("clock"), st.integers(-50, 50), st.just(0))
    | st.tuples(st.just("truncate"), st.integers(0, 80), st.just(0))
    | st.tuples(st.sampled_from(["sync", "roll", "reopen"]), st.just(0), st.just(0)),
    min_size=1,
    max_size=12,
)
_flips = st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 7)), max_size=2)


def _written(steps: list[tuple[str, int, int]]) -> World:
    world = World(clock=ManualClock(), disk=SimulatedDisk(), ids=SeededIds(3))
    log = Log.open(FOLDER, small_settings(segment_bytes=8192), world)
    for verb, number, count in steps:
        value = bytes(number) if number >= 0 else b""
        match verb:
            case "one":
                for _ in range(count):
                    log.append_one(value)
            case "keyed":
                for _ in range(count):
                    log.append(Batch(values=[value], keys=[b"k"]))
            case "urgent":
                for _ in range(count):
                    log.append(Batch(values=[value], priorities=b"\x05"))
            case "batch":
                log.append([value] * count)
            case "clock":
                world.clock.step_wall(ns=number)  # type: ignore[attr-defined]
            case _:
                log = _managed(log, world, verb, number)
    return world


def _managed(log: Log, world: World, verb: str, number: int) -> Log:
    if verb == "truncate":
        with suppress(InvalidRequest):  # inside a batch
            log.truncate(min(number, log.end))
    elif verb == "reopen":
        log.close()
        return Log.open(FOLDER, small_settings(segment_bytes=8192), world)
    else:
        getattr(log, verb)()
    return log


def _found(world: World) -> dict[str, Any]:
    state = LogState.open(world.disk, FOLDER, write=False)
    findings = msgspec.structs.asdict(scanning.examine(world, FOLDER, state, index_bytes=512, everything=True))
    shown = {name: repr(value) for name, value in findings.items() if name not in ("epochs", "indexes", "scanned")}
    for base, index in findings["indexes"].items():
        shown[f"index {base}"] = index.encode(7)
    scanned = findings["scanned"]
    shown["scanned"] = None if scanned is None else [*scanned.frames_with(2**32 - 1, 0)]
    return shown


@example([("one", 100, 30), ("clock", 40, 0), ("one", 100, 30)], [(200 * 20 + 130, 3)])
@example([("one", 100, 30), ("truncate", 20, 0), ("one", 100, 30), ("sync", 0, 0), ("one", 100, 9)], [])
@given(_steps, _flips)
def test_frames_that_are_alike_are_found_as_they_are_one_by_one(steps, flips):
    world = _written(steps)
    paths = [f"{FOLDER}/{name}" for name in world.disk.names(FOLDER) if name.endswith(".log")]
    for at, bit in flips if paths else ():
        file = world.disk.open(paths[at % len(paths)], write=True)
        place = at % max(file.size(), 1)
        byte = file.read(place, 1) if file.size() else b""
        if byte:
            file.write(place, [bytes([byte[0] ^ 1 << bit])])
    together = _found(world)
    with patch.object(scanning, "frames_alike", lambda *_: iter(())):
        one_by_one = _found(world)
    assert together == one_by_one


def test_a_long_tail_of_messages_of_one_length_is_not_walked_one_by_one():
    world = _written([("one", 100, 30)])
    added: list[object] = []
    add_frame = scanning._Scan._add_frame
    with patch.object(scanning._Scan, "_add_frame", lambda *args: (added.append(1), add_frame(*args))):
        assert "30" in _found(world)["end"]
    assert len(added) == 2
