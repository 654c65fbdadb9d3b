"""Dedup ids: exact within the window, kept across crashes, never given up because something is full."""

from __future__ import annotations

import errno
import random
import tracemalloc

import pytest

from holdfast.broker.dedup.runs import HEADER_BYTES, Covered
from holdfast.broker.dedup.window import DedupIndex
from holdfast.env import ManualClock, RealDisk, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import Closed, CorruptData, DiskFailed, DiskFull, UnknownFormat
from holdfast.model import LogPosition

FOLDER = "/queue/dedup"
WINDOW_MS = 60_000


@pytest.fixture
def world() -> World:
    disk = SimulatedDisk()
    disk.make_folder("/queue")
    return on(disk)


def on(disk, clock=None) -> World:
    return World(clock=clock or ManualClock(), disk=disk, ids=SeededIds(1))


def now_ms(world) -> int:
    return world.clock.now_ns() // 1_000_000


def opened(world, folder=FOLDER, **settings) -> DedupIndex:
    return DedupIndex.open(world, folder, **{"window_ms": WINDOW_MS, "max_recent": 100, **settings})


def upto(partition: int, intake: int = 0, *, epoch: int = 1) -> tuple[Covered, ...]:
    """Of two partitions; the second one stays empty."""
    return Covered(LogPosition(epoch, partition), LogPosition(epoch, intake)), Covered()


def end_of(index) -> int:
    """Up to where the index covers the log of the first partition."""
    return index.covered[0].partition.offset if index.covered else 0


def name(number: int) -> bytes:
    return b"order-%d" % number


def add_range(index, world, start: int, stop: int) -> None:
    for number in range(start, stop):
        index.add(name(number), number, now_ms(world))


def unknown(index, world, start: int, stop: int) -> list[int]:
    """Those that the index does not know, or takes for another."""
    return [number for number in range(start, stop) if index.find(name(number), now_ms(world)) != number]


def files(world) -> list[str]:
    return [each for each in world.disk.names(FOLDER) if each.endswith(".ids")]


# the window


@pytest.mark.parametrize("saved", [False, True])
def test_an_id_is_known_for_the_window_and_new_after_it(world, saved):
    index = opened(world)
    index.add(b"a", 7, 1_000)
    if saved:
        world.clock.step_wall(ns=-world.clock.now_ns())
        index.save(upto(8))
    assert index.find(b"a", 1_000) == 7
    assert index.find(b"a", 1_000 + WINDOW_MS - 1) == 7
    assert index.find(b"a", 1_000 + WINDOW_MS) is None
    assert index.find(b"b", 1_000) is None


def test_a_call_may_bring_its_own_window(world):
    index = opened(world)
    index.add(b"a", 7, 1_000)
    assert index.find(b"a", 1_010, window_ms=10) is None
    assert index.find(b"a", 1_010, window_ms=11) == 7
    assert index.find(b"a", 1_000, window_ms=0) is None


def test_an_id_that_comes_again_after_the_window_has_the_newer_reference(world):
    index = opened(world)
    start_ms = now_ms(world)
    for turn in range(4):  # in memory, in a run, in two runs, in a merged one
        index.add(b"a", turn, start_ms + turn * WINDOW_MS)
        assert index.find(b"a", start_ms + turn * WINDOW_MS) == turn
        index.save(upto(turn))
        assert index.find(b"a", start_ms + turn * WINDOW_MS) == turn
        world.clock.advance(ms=WINDOW_MS // 2)
    assert opened(world).find(b"a", start_ms + 3 * WINDOW_MS) == 3


def test_of_two_entries_the_later_counts_whichever_was_added_last(world):
    index = opened(world)
    at_ms = now_ms(world)
    index.add(b"a", 2, at_ms + 5)
    index.add(b"a", 1, at_ms)
    assert index.find(b"a", at_ms) == 2
    index.save(upto(0))
    index.add(b"a", 3, at_ms + 4)
    assert index.find(b"a", at_ms) == 2
    index.save(upto(0))
    assert opened(world).find(b"a", at_ms) == 2


def test_what_was_put_in_the_future_is_within_the_window(world):
    index = opened(world)
    index.add(b"a", 7, now_ms(world))
    world.clock.step_wall(ns=-(10**9) * 3600 * 24 * 365)
    index.save(upto(1))
    assert index.find(b"a", now_ms(world)) == 7
    assert opened(world).find(b"a", now_ms(world), window_ms=0) == 7


def test_a_clock_before_1970_or_far_ahead_breaks_nothing(world):
    index = opened(world)
    index.add(b"a", 1, -5_000)
    assert index.find(b"a", -5_000) == 1
    world.clock.step_wall(ns=-2 * world.clock.now_ns())
    index.save(upto(1))
    assert opened(world).find(b"a", now_ms(world)) == 1
    world.clock.step_wall(ns=10**9 * 3600 * 24 * 365 * 200)
    index.add(b"b", 2, now_ms(world))
    index.save(upto(2))
    assert opened(world).find(b"b", now_ms(world)) == 2
    assert index.find(b"a", now_ms(world)) is None


def test_ids_of_every_length_are_told_apart(world):
    index = opened(world)
    ids = [b"", b"\0", b"\0\0", bytes(1_000), bytes(1_001), b"a", b"b"]
    for reference, each in enumerate(ids):
        index.add(each, reference, now_ms(world))
    index.save(upto(0))
    assert index.find(b"c", now_ms(world)) is None
    index.add(b"d", 2**63 - 1, now_ms(world))  # not the one looked for last
    assert [index.find(each, now_ms(world)) for each in ids] == list(range(len(ids)))
    assert index.find(b"c", now_ms(world)) is None
    assert index.find(b"d", now_ms(world)) == 2**63 - 1


# saving


def test_nothing_is_written_before_a_save(world):
    index = opened(world)
    add_range(index, world, 0, 50)
    assert not world.disk.exists(FOLDER)
    assert index.covered == ()
    assert len(index) == 50


def test_memory_that_is_full_asks_for_a_save_and_goes_on(world):
    index = opened(world, max_recent=100)
    add_range(index, world, 0, 100)
    assert not index.full()
    add_range(index, world, 100, 1_000)
    assert index.full()
    assert unknown(index, world, 0, 1_000) == []
    index.save(upto(1_000))
    assert not index.full()
    assert unknown(index, world, 0, 1_000) == []


def test_what_was_saved_is_known_after_opening_again_with_the_place_to_go_on_from(world):
    index = opened(world)
    add_range(index, world, 0, 300)
    covered = Covered(LogPosition(3, 300), LogPosition(5, 2**40)), Covered(), Covered(LogPosition(1, 7))
    index.save(covered)
    add_range(index, world, 300, 310)
    again = opened(world)
    assert again.covered == covered
    assert unknown(again, world, 0, 310) == list(range(300, 310))
    assert len(again) == 300


def test_many_saves_leave_few_runs_and_forget_nothing(world):
    index = opened(world)
    sizes = random.Random(1)
    total = 0
    for turn in range(150):
        more = 40 if turn < 64 else sizes.randrange(1, 80)
        add_range(index, world, total, total + more)
        total += more
        index.save(upto(total))
        assert len(files(world)) <= total.bit_length()
    assert len(index) == total
    index.check()
    assert unknown(index, world, 0, total + 5) == list(range(total, total + 5))
    assert unknown(opened(world), world, 0, total) == []


def test_runs_stop_growing_so_that_no_save_takes_long(world, monkeypatch):
    monkeypatch.setattr("holdfast.broker.dedup.window._LARGEST_MERGED", 100)
    index = opened(world)
    for start in range(0, 1_000, 30):
        add_range(index, world, start, start + 30)
        index.save(upto(start + 30))
    assert 1_020 // 100 <= len(files(world)) <= 1_020 // 30
    assert all(len(world.disk.contents(f"{FOLDER}/{each}")) < 100 * 40 for each in files(world))
    assert unknown(opened(world), world, 0, 1_020) == []


def test_a_merge_of_several_parts_keeps_every_id_once(world):
    index = opened(world)
    add_range(index, world, 0, 20_000)
    index.save(upto(0))
    world.clock.advance(ms=1)
    add_range(index, world, 10_000, 40_000)
    index.save(upto(0))
    assert len(files(world)) == 1
    assert len(index) == 40_000
    index.check()
    assert unknown(index, world, 0, 40_000) == []
    assert unknown(index, world, 40_000, 60_000) == list(range(40_000, 60_000))


def test_what_has_expired_leaves_the_disk(world):
    index = opened(world)
    add_range(index, world, 0, 1_000)
    index.save(upto(1_000))
    world.clock.advance(ms=WINDOW_MS)
    add_range(index, world, 1_000, 1_010)
    index.save(upto(1_010))
    assert len(index) == 10
    assert len(files(world)) == 1
    world.clock.advance(ms=WINDOW_MS)
    index.save(upto(1_010))
    assert (len(index), index.covered) == (0, upto(1_010))
    assert opened(world).covered == upto(1_010)


def test_entries_that_expired_fall_out_of_a_merge_and_the_others_stay(world):
    index = opened(world)
    add_range(index, world, 0, 10)
    world.clock.advance(ms=WINDOW_MS - 1)
    add_range(index, world, 10, 20)
    index.save(upto(20))
    assert len(index) == 20
    world.clock.advance(ms=1)
    add_range(index, world, 20, 40)
    index.save(upto(40))
    assert len(index) == 30
    assert unknown(opened(world), world, 0, 40) == list(range(10))


def test_a_save_with_nothing_new_writes_nothing_and_one_with_a_new_place_does(world):
    index = opened(world)
    index.save(())
    assert not world.disk.exists(FOLDER)
    add_range(index, world, 0, 10)
    index.save(upto(10))
    before = dict(world.disk.calls)
    index.save(upto(10))
    assert world.disk.calls == before
    for place in range(11, 30):
        index.save(upto(place))
    assert opened(world).covered == upto(29)
    assert len(files(world)) <= 2
    assert unknown(opened(world), world, 0, 10) == []


def test_ids_come_and_go_while_a_save_is_written(world):
    index = opened(world)
    add_range(index, world, 0, 50)
    saving = index.begin_save(upto(50))
    add_range(index, world, 50, 60)
    assert unknown(index, world, 0, 60) == []
    assert len(index) == 60
    saving.write()
    add_range(index, world, 60, 70)
    assert unknown(index, world, 0, 70) == []
    index.finish_save(saving)
    assert unknown(index, world, 0, 70) == []
    assert (len(index), index.covered) == (70, upto(50))
    assert unknown(opened(world), world, 0, 50) == []


def test_a_closed_index_answers_nothing_rather_than_new(world):
    index = opened(world)
    add_range(index, world, 0, 10)
    index.close()
    index.close()
    with pytest.raises(Closed, match="open it again"):
        index.find(name(1), now_ms(world))
    with pytest.raises(Closed):
        index.save(upto(1))


def test_a_real_disk_keeps_ids_in_few_bytes_of_memory(tmp_path):
    world = on(RealDisk())
    folder = str(tmp_path / "queue" / "dedup")
    index = opened(world, folder)
    for start in range(0, 60_000, 10_000):
        add_range(index, world, start, start + 10_000)
        index.save(upto(start + 10_000))
    index.close()
    opened(world, folder).close()  # what is made only once is made
    tracemalloc.start()
    try:
        index = opened(world, folder)
        taken_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken_bytes < 60_000 * 3
    assert unknown(index, world, 0, 60_000) == []
    index.check()


# damage


def damaged_everywhere(world, path: str):
    """The same disk with one byte of the file changed, for each byte."""
    for position in range(len(world.disk.contents(path))):
        disk = world.disk.kill()
        disk.flip(path, position, 1 << position % 8)
        yield position, on(disk, world.clock)


@pytest.mark.parametrize("which", [0, 1])
def test_no_damaged_byte_makes_a_known_id_new(world, which):
    index = opened(world)
    add_range(index, world, 0, 25)
    index.save(upto(25))
    add_range(index, world, 25, 30)
    index.save(upto(30))
    path = f"{FOLDER}/{files(world)[which]}"
    for position, damaged in damaged_everywhere(world, path):
        try:
            again = opened(damaged)
        except CorruptData as error:
            assert path in str(error)
            continue
        assert position >= HEADER_BYTES, "a spoiled header was taken"
        wrong = 0
        for number in range(30):
            try:
                assert again.find(name(number), now_ms(world)) == number
            except CorruptData as error:
                wrong += 1
                assert path in str(error)
        assert wrong > 0
        with pytest.raises(CorruptData):
            again.check()


def test_a_damaged_block_stops_the_merge_and_nothing_is_forgotten(world):
    index = opened(world)
    add_range(index, world, 0, 50)
    index.save(upto(50))
    world.disk.flip(f"{FOLDER}/{files(world)[0]}", HEADER_BYTES + 100)
    again = opened(world)
    add_range(again, world, 50, 100)
    with pytest.raises(CorruptData, match=r"Restore the file from a backup"):
        again.save(upto(100))
    assert unknown(again, world, 50, 100) == []
    assert again.covered == upto(50)
    assert len(files(world)) == 1


def test_a_missing_run_or_a_shorter_one_is_an_error(world):
    index = opened(world)
    add_range(index, world, 0, 100)
    index.save(upto(100))
    add_range(index, world, 100, 110)
    index.save(upto(110))
    first, second = files(world)
    shorter = world.disk.kill()
    shorter.cut_file(f"{FOLDER}/{second}", 200)
    with pytest.raises(CorruptData, match="checksum"):
        opened(on(shorter))
    world.disk.remove(f"{FOLDER}/{first}")
    with pytest.raises(CorruptData, match="missing"):
        opened(world)
    world.disk.rename(f"{FOLDER}/{second}", f"{FOLDER}/{first}")
    with pytest.raises(CorruptData, match="missing"):
        opened(world)
    world.disk.remove(f"{FOLDER}/newest")
    with pytest.raises(CorruptData, match="copy of number 2"):
        opened(world)


def test_a_run_of_another_version_or_kind_is_refused(world):
    index = opened(world)
    add_range(index, world, 0, 10)
    index.save(upto(10))
    path = f"{FOLDER}/{files(world)[0]}"
    world.disk.flip(path, 7, 4)
    with pytest.raises(UnknownFormat, match="cannot read"):
        opened(world)
    world.disk.flip(path, 0)
    with pytest.raises(CorruptData, match="does not begin"):
        opened(world)


def test_opening_removes_a_torn_temporary_file_and_leaves_foreign_files_alone(world):
    index = opened(world)
    add_range(index, world, 0, 10)
    index.save(upto(10))
    for extra in ("run.tmp", "notes.txt"):
        world.disk.open(f"{FOLDER}/{extra}", write=True, create=True).write(0, [b"torn"])
    again = opened(world)
    assert world.disk.names(FOLDER) == [*files(world), "newest", "notes.txt"]
    assert unknown(again, world, 0, 10) == []


# disks that fail


def test_a_full_disk_forgets_nothing_and_the_next_save_may_succeed(world):
    index = opened(world)
    add_range(index, world, 0, 100)
    index.save(upto(100))
    add_range(index, world, 100, 200)
    world.disk.faults.short_write(1, sticky=True)
    for _ in range(3):
        with pytest.raises(DiskFull, match="free some space"):
            index.save(upto(200))
        assert index.full() is False
        assert "run.tmp" not in world.disk.names(FOLDER)
    add_range(index, world, 200, 300)
    assert index.full()
    assert unknown(index, world, 0, 300) == []
    assert index.covered == upto(100)
    world.disk.faults.clear()
    index.save(upto(300))
    assert unknown(opened(world), world, 0, 300) == []


@pytest.mark.parametrize("call", ["open", "write", "sync", "rename", "sync_folder", "close", "remove"])
def test_a_save_that_found_no_room_at_any_step_can_be_done_again(world, call):
    index = opened(world)
    add_range(index, world, 0, 40)
    index.save(upto(40))
    add_range(index, world, 40, 100)
    world.disk.faults.fail(1, errno.ENOSPC, sticky=False, calls=frozenset({call}))
    if call == "remove":
        index.save(upto(100))  # what it replaced stays until the next opening
    else:
        with pytest.raises(DiskFull):
            index.save(upto(100))
        assert unknown(index, world, 0, 100) == []
        index.save(upto(100))
    assert world.disk.faults.fired == [call]
    for seed in range(20):
        again = opened(on(world.disk.cut(random.Random(seed)), world.clock))
        assert again.covered == upto(100)
        assert unknown(again, world, 0, 100) == []
    assert len(opened(world)) == 100
    assert len(files(world)) == 1


@pytest.mark.parametrize("call", ["open", "write", "sync", "rename", "sync_folder", "close"])
def test_after_a_disk_error_ids_stay_known_and_nothing_more_is_saved(world, call):
    index = opened(world)
    add_range(index, world, 0, 100)
    index.save(upto(100))
    add_range(index, world, 100, 150)
    world.disk.faults.fail(1, errno.EIO, sticky=False, calls=frozenset({call}))
    with pytest.raises(DiskFailed, match="open the folder again"):
        index.save(upto(150))
    with pytest.raises(DiskFailed):
        index.save(upto(150))
    add_range(index, world, 150, 160)
    assert unknown(index, world, 0, 160) == []
    for seed in range(20):
        again = opened(on(world.disk.cut(random.Random(seed)), world.clock))
        assert unknown(again, world, 0, end_of(again)) == []


# power cuts


class History:
    """A log of ids with its index: adds and saves, and what must be true wherever the power is cut."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.disk = SimulatedDisk()
        self.clock = ManualClock()
        self.disk.make_folder("/queue")
        self.world = on(self.disk, self.clock)
        self.index = opened(self.world)
        self.end = 0
        self.saved = 0
        self.states = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            more = self.rng.choice([0, 1, 3, 40, 200])
            add_range(self.index, self.world, self.end, self.end + more)
            self.end += more
            self.disk.on_call = self.cut
            self.index.save(upto(self.end))
            self.saved = self.end
            self.cut("saved")
            self.disk.on_call = None

    def cut(self, call: str) -> None:
        for left in (self.disk.cut(self.rng), self.disk.kill()):
            self.states += 1
            world = on(left, self.clock)
            cuts = []

            def cut_again(call: str, left=left, cuts=cuts) -> None:
                cuts.append(left.cut(self.rng))

            left.on_call = cut_again
            index = self.check(world)
            left.on_call = None
            for each in cuts:  # the power goes again, while opening
                self.check(on(each, self.clock))
            add_range(index, world, end_of(index), self.end)
            index.save(upto(self.end + 1))
            self.check(world, known=self.end)
            self.check(on(left.cut(self.rng), self.clock), known=self.end)

    def check(self, world: World, known: int | None = None) -> DedupIndex:
        """Everything below the covered place is known, and this place is never one from before the last save."""
        index = opened(world)
        covered = end_of(index)
        assert covered in {self.saved, self.end} if known is None else covered == self.end + 1
        assert unknown(index, world, 0, covered if known is None else known) == []
        assert world.disk.exists(FOLDER) is False or "run.tmp" not in world.disk.names(FOLDER)
        return index


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.slow
def test_nothing_below_the_covered_place_is_lost_wherever_the_power_is_cut(seed):
    history = History(seed)
    history.run(steps=7)
    assert history.states > 40


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_calls_answers_as_a_plain_dict_does(seed):
    rng = random.Random(seed)
    clock = ManualClock()
    disk = SimulatedDisk()
    disk.make_folder("/queue")
    world = on(disk, clock)
    index = opened(world)
    log: list[tuple[bytes, int]] = []
    model: dict[bytes, tuple[int, int]] = {}
    gone_ms = 0  # what is older was outside the window at a save, and may be gone should the clock go back
    for _ in range(1_500):
        chance = rng.random()
        at_ms = now_ms(world)
        if chance < 0.9:
            each = name(rng.randrange(300))
            found = index.find(each, at_ms)
            then_ms, reference = model.get(each, (-WINDOW_MS, None))
            if then_ms > gone_ms:
                assert found == (reference if then_ms > at_ms - WINDOW_MS else None)
            if found is None:
                index.add(each, len(log), at_ms)
                model[each] = max((at_ms, len(log)), model.get(each, (0, 0)))
                log.append((each, at_ms))
        elif chance < 0.95:
            gone_ms = max(gone_ms, at_ms - WINDOW_MS)
            index.save(upto(len(log)))
        elif chance < 0.97:
            world = on(world.disk.cut(rng), clock)  # the log is synced with each message, the index is not
            index = opened(world)
            for reference in range(end_of(index), len(log)):
                index.add(log[reference][0], reference, log[reference][1])
        elif chance < 0.98:
            clock.step_wall(ns=rng.randrange(-WINDOW_MS, WINDOW_MS) * 1_000_000)
        clock.advance(ms=rng.randrange(WINDOW_MS // 100))
    index.check()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_run_that_is_in_place_counts_though_it_cannot_be_noted_as_the_last(world, code, monkeypatch):
    index = opened(world)
    add_range(index, world, 0, 10)
    index.save(upto(10))

    def fail(*_: object) -> None:
        raise OSError(code, "ordered")

    with monkeypatch.context() as failing:
        failing.setattr("holdfast.broker.dedup.window.note_newest", fail)
        for last in (20, 30, 40):
            add_range(index, world, last - 10, last)
            index.save(upto(last))
            assert end_of(index) == last
    assert len(files(world)) < 4  # what was merged is gone
    add_range(index, world, 40, 50)
    index.save(upto(50))
    again = opened(world)
    assert (unknown(again, world, 0, 50), end_of(again)) == ([], 50)
