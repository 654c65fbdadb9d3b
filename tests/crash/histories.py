"""Random histories of a log on a simulated disk, and what must hold wherever the power is cut."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import InvalidRequest, TailLost
from holdfast.large import Value
from holdfast.model import Batch, LogPosition
from holdfast.settings import LogSettings
from holdfast.storage.batches import Spool
from holdfast.storage.log import Log

FOLDER = "data/log"


def small_settings(**changes) -> LogSettings:
    """Tiny segments and frames, so that a short history crosses every boundary."""
    return LogSettings(
        **{"segment_bytes": 4096, "frame_bytes": 1024, "index_bytes": 512, "min_free_bytes": 0, "durability": "os"}
        | changes
    )


@dataclass
class Promises:
    """What the log was told and what it answered: the model that a cut is held against."""

    written: dict[tuple[int, int], bytes] = field(default_factory=dict)  # (epoch, offset) -> value, also unfinished
    acknowledged: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # offset -> (epoch, value)
    durable: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # those of them that were synced
    batches: list[tuple[int, int, int]] = field(default_factory=list)  # epoch, first offset, next offset
    held: list[LogPosition] = field(default_factory=list)  # what readers keep outside
    trimmed_below: int = 0
    truncating_from: int | None = None


class History:
    """One random life of a log; `on_cut_point` is called after every change of the disk."""

    def __init__(self, seed: int, *, maps: bool, on_cut_point=None, disk=None) -> None:
        self.rng = random.Random(seed)
        self.disk = disk or SimulatedDisk(maps=maps)
        self.ids = SeededIds(seed)
        self.clock = ManualClock()
        self.promises = Promises()
        self._on_cut_point = on_cut_point
        self._hook()
        self.log = self._open()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.rng.choices(
                [
                    self.append,
                    self.append_many,
                    self.append_large,
                    self.sync,
                    self.trim,
                    self.truncate,
                    self.reopen,
                    self.kill,
                    self.tick,
                ],
                [10, 4, 2, 2, 1, 1, 1, 1, 1],
            )[0]()
        self.log.close()

    def append(self) -> None:
        self._append([self._value() for _ in range(self.rng.randint(1, 3))])

    def append_many(self) -> None:
        """A batch of several frames."""
        self._append([self.rng.randbytes(self.rng.randint(300, 700)) for _ in range(self.rng.randint(2, 5))])

    def append_large(self) -> None:
        """One that comes in pieces, and then gets a segment of its own: the file that it came in, or a copy."""
        value, log = self.rng.randbytes(self.rng.randint(300, 5000)), self.log
        log._writer.apart_bytes = 200
        head_bytes = self.rng.choice([8, 8, 0])
        world = World(clock=self.clock, disk=self.disk, ids=self.ids)
        with Spool(world, log.folder, log.settings, head_bytes=head_bytes, file_bytes=250) as spool:
            for at in range(0, len(value), 500):
                if spool.add(value[at : at + 500]):
                    spool.write_gathered()
            self._note_and(value, spool.value())
        log._writer.apart_bytes = 1 << 40

    def sync(self) -> None:
        self.log.sync()
        self._all_durable()

    def trim(self) -> None:
        before = self.rng.randint(self.log.start, self.log.end)
        self.promises.trimmed_below = max(self.promises.trimmed_below, before)
        self.log.trim(before)
        self.promises.trimmed_below = self.log.start
        self._forget(range(self.log.start))

    def truncate(self) -> None:
        offset = self.rng.randint(self.log.start, self.log.written_end)
        self.promises.truncating_from = offset
        try:
            self.log.truncate(offset)
        except InvalidRequest:
            self.promises.truncating_from = None  # inside a frame: refused, nothing happened
            return
        self._forget(range(offset, 1 << 60))
        self.promises.truncating_from = None

    def reopen(self) -> None:
        self.log.sync()
        self._all_durable()
        self.log.close()
        self.log = self._open()
        assert self.log.report.clean

    def kill(self) -> None:
        """kill -9: what the kernel had is all there."""
        end = self.log.written_end
        self.disk = self.disk.kill()
        self._hook()
        self.log = self._open()
        assert self.log.end == end
        self._all_durable()

    def tick(self) -> None:
        self.clock.advance(seconds=self.rng.random())
        self.log.tick()

    def hold_position(self) -> None:
        self.promises.held.append(self.log.position(self.log.end))

    def _append(self, values: list[bytes]) -> None:
        durability = self.rng.choice(["fsync", "os", "os", "interval"])
        first, epoch = self.log.written_end, self.log.epoch
        for i, value in enumerate(values):
            self.promises.written[epoch, first + i] = value
        self.promises.batches.append((epoch, first, first + len(values)))
        keys = [b"k%d" % i if i % 2 else None for i in range(len(values))] if self.rng.random() < 0.3 else None
        codec = self.rng.choice([None, None, "zstd", "lz4"])
        if len(values) == 1 and keys is None and codec is None:
            appended = self.log.append_one(values[0], durability)
        else:
            appended = self.log.append(Batch(values=values, keys=keys), durability=durability, codec=codec)
        assert (appended.offset, appended.next_offset) == (first, first + len(values))
        for i, value in enumerate(values):
            self.promises.acknowledged[first + i] = (epoch, value)
        if durability == "fsync":
            self._all_durable()
        if self.rng.random() < 0.3:
            self.hold_position()

    def _note_and(self, value: bytes, large: Value) -> None:
        durability = self.rng.choice(["fsync", "os", "interval"])
        first, epoch = self.log.written_end, self.log.epoch
        self.promises.written[epoch, first] = value
        self.promises.batches.append((epoch, first, first + 1))
        appended = self.log.append(Batch(values=[large]), durability=durability)
        assert (appended.offset, appended.next_offset) == (first, first + 1)
        self.promises.acknowledged[first] = (epoch, value)
        if durability == "fsync":
            self._all_durable()

    def _value(self) -> bytes:
        return self.rng.randbytes(self.rng.choice([0, 1, 7, 8, 50, 200, 900]))

    def _all_durable(self) -> None:
        """Everything that is there now was acknowledged as synced."""
        for record in self.log.records(self.log.start):
            self.promises.durable[record.offset] = (record.epoch, record.value)

    def _forget(self, offsets: range) -> None:
        for promised in (self.promises.acknowledged, self.promises.durable):
            for offset in [o for o in promised if o in offsets]:
                del promised[offset]

    def _open(self) -> Log:
        return Log.open(FOLDER, small_settings(), self.world(self.disk, self.ids))

    def world(self, disk: SimulatedDisk, ids: SeededIds) -> World:
        return World(clock=self.clock, disk=disk, ids=ids)

    def _hook(self) -> None:
        if self._on_cut_point is not None:
            self.disk.on_call = lambda call: self._on_cut_point(self, call)


def cut_while_opening(history: History, disk: SimulatedDisk, seed: int, rng: random.Random) -> list[SimulatedDisk]:
    """Open what a cut left, and cut again: one possible disk for each write point of the recovery."""
    disks: list[SimulatedDisk] = []
    disk.on_call = lambda call: disks.append(disk.cut(rng))
    Log.open(FOLDER, small_settings(), history.world(disk, SeededIds(-seed - 2)))
    disk.on_call = None
    return disks


def check_after_kill(history: History, disk: SimulatedDisk, seed: int, *, write_again: bool) -> None:
    """The same after kill -9, without a restart of the machine: what was acknowledged as `os` is there, too."""
    check_opened(history, disk, SeededIds(seed), history.promises.acknowledged, write_again=write_again)


def check_after_cut(history: History, disk: SimulatedDisk, seed: int, *, write_again: bool) -> None:
    """Open what the cut left, and hold it against what had been promised by then."""
    another_boot = SeededIds(-seed - 1)
    check_opened(history, disk, another_boot, history.promises.durable, write_again=write_again)


def check_opened(
    history: History,
    disk: SimulatedDisk,
    ids: SeededIds,
    promised: dict[int, tuple[int, bytes]],
    *,
    write_again: bool,
) -> None:
    promises = history.promises
    with Log.open(FOLDER, small_settings(), history.world(disk, ids)) as log:
        assert not log.report.damage, log.report
        assert log.report.lost_tail is None, log.report
        found = {record.offset: record for record in log.records(log.start)}
        assert list(found) == list(range(log.start, log.end)), "offsets have holes"
        for offset, record in found.items():
            assert promises.written[record.epoch, offset] == record.value, f"wrong bytes at {offset}"
        assert log.start <= max(promises.trimmed_below, min(promised, default=0)), "trimmed too much"
        for offset, (epoch, value) in promised.items():
            if offset < promises.trimmed_below or (
                promises.truncating_from is not None and offset >= promises.truncating_from
            ):
                continue
            assert offset in found, f"acknowledged message {offset} is lost"
            assert (found[offset].epoch, found[offset].value) == (epoch, value)
        for epoch, first, next_offset in promises.batches:
            there = [o for o in range(first, next_offset) if o in found and found[o].epoch == epoch]
            # The head of a batch may be trimmed away with its segment; half a batch at the end may never be.
            assert not there or there[-1] == next_offset - 1 or log.start > first, "half a batch"
        if write_again:
            _write_again(history, log, found)
    if write_again:
        with Log.open(FOLDER, small_settings(), history.world(disk, ids)) as log:
            assert log.report.clean
            assert [record.value for record in log.records(log.end - 1)] == [b"after the cut"]


def _write_again(history: History, log: Log, found: dict) -> None:
    end = log.end
    log.append([b"new"] * 3 + [b"after the cut"], durability="fsync")
    for held in history.promises.held:
        if held.offset <= end or held.offset > log.end:
            continue
        try:
            log.check_position(held)
        except TailLost:
            continue
        raise AssertionError(f"{held} points into a lost tail, and nobody says so")
