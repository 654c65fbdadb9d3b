"""The store of delayed messages: nothing early, nothing twice, little in memory, and what damage does to it."""

from __future__ import annotations

import asyncio
import random
import threading
import tracemalloc
from collections.abc import Iterable

import pytest

from holdfast.broker.delayed import Delayed, DelaySettings, DelayStore
from holdfast.broker.delayed.intake import DAY_MS, HOUR_MS, MONTH_MS, DelayedTimers
from holdfast.broker.delayed.upkeep import bucket_of, in_due_order
from holdfast.env import ManualClock, SeededIds, World, real_world
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import BadSettings, Busy, Closed, InvalidRequest, Unavailable, UnknownFormat
from holdfast.model import Batch, Record
from holdfast.settings import LogSettings
from holdfast.storage.log import Log

FOLDER = "/data/delayed"
YEAR_MS = 365 * DAY_MS


class Waiting:
    """A store on a simulated disk; times are milliseconds from its beginning."""

    def __init__(self, **delays: int) -> None:
        self.disk = SimulatedDisk()
        self.clock = ManualClock()
        self.ids = SeededIds(1)
        self.start_ms = self.clock.now_ns() // 1_000_000
        self.delays = DelaySettings(**delays)
        self.log_settings = LogSettings(min_free_bytes=0, segment_bytes=8192, frame_bytes=2048, durability="os")
        self.store = self.open()

    def open(self) -> DelayStore:
        world = World(clock=self.clock, disk=self.disk, ids=self.ids)
        return DelayStore.open(world, FOLDER, self.log_settings, self.delays)

    def put(self, *dues_ms: int, **columns) -> list[int]:
        """One message for each due time, which is its value, too."""
        values = [b"%d" % due_ms for due_ms in dues_ms]
        batch = Batch(values=values, due_at_ms=[self.start_ms + due_ms for due_ms in dues_ms], **columns)
        appended = self.store.write(batch)
        self.store.wait(appended)
        return list(range(appended.offset, appended.next_offset))

    def due(self, at_ms: int, limit: int = 1000) -> list[int]:
        return self.times(self.store.due(self.start_ms + at_ms, limit))

    def release(self, at_ms: int, limit: int = 1000, position: int = 1) -> list[int]:
        found = self.store.due(self.start_ms + at_ms, limit)
        self.store.released([each.id for each in found], position)
        self.store.check()
        return self.times(found)

    def times(self, found: Iterable[Delayed]) -> list[int]:
        found = list(found)
        for each in found:
            assert each.id == each.record.offset
            assert each.due_at_ms == each.record.due_at_ms == self.start_ms + int(each.record.value)
        return [int(each.record.value) for each in found]

    def listed(self, **options) -> list[int]:
        return self.times(self.store.waiting(**options))

    def next_ms(self) -> int | None:
        due_at_ms = self.store.next_due_ms()
        return None if due_at_ms is None else due_at_ms - self.start_ms

    def spill(self) -> int:
        moved = self.store.spill(self.start_ms)
        self.store.check()
        return moved

    def reopen(self) -> None:
        self.store.close()
        self.store = self.open()
        self.store.check()

    def kill(self) -> None:
        self.disk = self.disk.kill()
        self.store = self.open()
        self.store.check()

    def runs(self) -> list[str]:
        return [name for name in self.disk.names(FOLDER) if name.endswith(".run")]

    def path(self, name: str) -> str:
        return f"{FOLDER}/{name}"


def test_nothing_is_released_a_millisecond_early():
    waiting = Waiting()
    waiting.put(1, 250, 999, 1000, 1001)
    for now_ms in range(1003):
        assert waiting.release(now_ms) == [now_ms] * (now_ms in {1, 250, 999, 1000, 1001})


@pytest.mark.parametrize("spilled", [False, True])
def test_what_is_due_comes_by_due_time_and_then_by_id(spilled):
    waiting = Waiting()
    rng = random.Random(1)
    dues_ms = [rng.choice([0, 5, 10, HOUR_MS, 3 * DAY_MS, YEAR_MS]) for _ in range(300)]
    for start in range(0, 300, 30):
        waiting.put(*dues_ms[start : start + 30])
    if spilled:
        assert waiting.spill() == 300
    found = waiting.store.due(waiting.start_ms + 2 * YEAR_MS, 1000)
    assert [(each.due_at_ms, each.id) for each in found] == sorted((each.due_at_ms, each.id) for each in found)
    assert waiting.times(found) == sorted(dues_ms)
    assert waiting.due(7) == sorted(due_ms for due_ms in dues_ms if due_ms <= 7)


def test_asking_what_is_due_changes_nothing():
    waiting = Waiting()
    waiting.put(1, 2, 3)
    assert waiting.due(2) == waiting.due(2) == [1, 2]
    assert waiting.due(2, limit=1) == [1]
    assert len(waiting.store) == 3
    assert waiting.release(3, limit=2) == [1, 2]
    assert waiting.due(3) == [3]
    assert len(waiting.store) == 1


def test_messages_of_the_intake_and_of_runs_come_in_one_order():
    waiting = Waiting()
    waiting.put(1, 40, 3)
    waiting.spill()
    waiting.put(2, 30)
    waiting.spill()
    waiting.put(10, 20, YEAR_MS)
    assert waiting.listed() == [1, 2, 3, 10, 20, 30, 40, YEAR_MS]
    assert waiting.release(35, limit=4) == [1, 2, 3, 10]
    assert waiting.release(35) == [20, 30]
    assert (waiting.next_ms(), len(waiting.store)) == (40, 2)


def test_every_column_of_a_message_comes_back_from_the_intake_and_from_a_run():
    waiting = Waiting()
    columns = {
        "times_ns": [11, 12, 13],
        "keys": [b"k", None, b""],
        "headers": [(("a", b"1"), ("a", b"2")), (), (("b", b""),)],
        "priorities": [9, 0, 5],
        "expires_at_ms": [0, 77, 88],
        "flags": [1, 0, 1],
    }
    waiting.put(3, 2, 1, **columns)
    before = [each.record for each in waiting.store.due(waiting.start_ms + 5, 10)]
    waiting.spill()
    after = [each.record for each in waiting.store.due(waiting.start_ms + 5, 10)]
    assert [r.key for r in after] == [b"", None, b"k"]
    assert [(r.offset, *astuple(r)) for r in before] == [(r.offset, *astuple(r)) for r in after]


def astuple(record: Record) -> tuple:
    """All but the epoch, which only the intake knows."""
    return tuple(getattr(record, name) for name in record.__struct_fields__ if name != "epoch")


def test_a_plain_message_takes_no_columns_that_it_does_not_use():
    waiting = Waiting()
    waiting.put(5)
    waiting.spill()
    (found,) = waiting.store.due(waiting.start_ms + 5, 1)
    now_ns = waiting.clock.now_ns()
    assert found == Delayed(0, waiting.start_ms + 5, Record(0, now_ns, b"5", due_at_ms=waiting.start_ms + 5))


def test_large_and_empty_messages_wait_like_others():
    waiting = Waiting()
    values = [b"", b"x" * 300_000, b"y" * 70_000, b""]
    waiting.store.write(Batch(values=values, due_at_ms=[4, 3, 2, 1]))
    waiting.spill()
    waiting.reopen()
    assert [each.record.value for each in waiting.store.due(9, 9)] == values[::-1]


def test_a_clock_set_forward_releases_and_one_set_back_waits():
    waiting = Waiting()
    waiting.put(5, DAY_MS, DAY_MS + 1)
    assert waiting.release(DAY_MS) == [5, DAY_MS]
    assert waiting.release(0) == []
    waiting.put(1, 3)
    assert waiting.release(2) == [1]
    assert waiting.next_ms() == 3
    assert waiting.release(DAY_MS + 1) == [3, DAY_MS + 1]


def test_a_message_is_shown_only_when_it_is_as_durable_as_promised():
    waiting = Waiting()
    appended = waiting.store.write(Batch(values=[b"1"], due_at_ms=[waiting.start_ms + 1]), durability="fsync")
    assert waiting.due(5) == []
    assert waiting.listed() == []
    waiting.store.wait(appended)
    assert waiting.due(5) == [1]


def test_whatever_due_answers_is_on_disk():
    waiting = Waiting()
    waiting.put(1)
    assert waiting.due(0) == []
    syncs = waiting.disk.calls["sync"]
    assert waiting.due(1) == [1]
    assert waiting.disk.calls["sync"] > syncs
    for seed in range(20):
        waiting.disk = waiting.disk.cut(random.Random(seed))
        assert len(waiting.open()) == 1


def test_waiting_for_a_sync_works_for_tasks():
    waiting = Waiting()

    async def put() -> None:
        appended = waiting.store.write(Batch(values=[b"1"], due_at_ms=[1]), durability="fsync")
        await waiting.store.wait_async(appended)
        cancelled = waiting.store.write_cancel(appended.offset)
        assert cancelled is not None
        await waiting.store.wait_async(cancelled)

    asyncio.run(put())
    assert len(waiting.store) == 0


@pytest.mark.parametrize("batch", [Batch(values=[b"x"]), Batch(values=[b"x"], due_at_ms=[1, 2])])
def test_a_message_without_a_due_time_is_refused(batch):
    waiting = Waiting()
    with pytest.raises(InvalidRequest, match="due time"):
        waiting.store.write(batch)
    with pytest.raises(InvalidRequest, match="1970"):
        waiting.store.write(Batch(values=[b"x"], due_at_ms=[-1]))
    for wrong in (2**63, 1.5, None):
        with pytest.raises(InvalidRequest, match="whole number"):
            waiting.store.write(Batch(values=[b"x"], due_at_ms=[wrong]))
    with pytest.raises(InvalidRequest):
        waiting.store.write(Batch(values=["text"], due_at_ms=[1]))
    assert len(waiting.store) == 0
    waiting.store.check()


def test_an_empty_batch_is_fine():
    waiting = Waiting()
    appended = waiting.store.write(Batch(values=[], due_at_ms=[]))
    waiting.store.wait(appended)
    assert appended.offset == appended.next_offset
    assert (len(waiting.store), waiting.next_ms(), waiting.spill()) == (0, None, 0)


@pytest.mark.parametrize("spilled", [False, True])
def test_a_cancelled_message_never_comes(spilled):
    waiting = Waiting()
    ids = waiting.put(1, 2, 3)
    if spilled:
        waiting.spill()
    assert waiting.store.cancel(ids[1])
    assert not waiting.store.cancel(ids[1])
    assert waiting.store.get(ids[1]) is None
    for again in (waiting.kill, waiting.spill, waiting.kill, waiting.reopen, waiting.spill, waiting.kill):
        again()
        assert waiting.listed() == [1, 3]
    assert waiting.due(9) == [1, 3]
    assert not waiting.store.cancel(ids[1])


def test_what_is_unknown_or_released_cannot_be_cancelled():
    waiting = Waiting()
    (first, second) = waiting.put(1, 2)
    waiting.release(1)
    assert not waiting.store.cancel(first)
    assert not waiting.store.cancel(second + 1)
    assert not waiting.store.cancel(-1)
    assert waiting.store.get(-1) is None
    assert waiting.store.cancel(second)
    assert len(waiting.store) == 0


def test_a_cancellation_is_on_disk_when_the_call_returns():
    for seed in range(20):
        waiting = Waiting()
        ids = waiting.put(1, 2)
        waiting.store.cancel(ids[0])
        waiting.disk = waiting.disk.cut(random.Random(seed))
        waiting.store = waiting.open()
        assert waiting.listed() == [2]


def test_one_message_is_found_by_its_id():
    waiting = Waiting()
    ids = waiting.put(*range(0, 3000, 7))
    waiting.spill()
    ids += waiting.put(5, 6)
    for message_id, due_ms in zip(ids, [*range(0, 3000, 7), 5, 6], strict=True):
        found = waiting.store.get(message_id)
        assert found is not None
        assert waiting.times([found]) == [due_ms]
    assert waiting.store.get(ids[-1] + 1) is None


def test_the_next_due_time_passes_over_what_is_gone():
    waiting = Waiting()
    ids = waiting.put(1, 2, 500_000, 600_000, YEAR_MS)
    assert waiting.next_ms() == 1
    waiting.store.cancel(ids[0])
    assert waiting.next_ms() == 2
    waiting.store.cancel(ids[2])
    waiting.release(5)
    assert waiting.next_ms() == 600_000
    waiting.spill()
    assert waiting.next_ms() == 600_000
    waiting.store.cancel(ids[3])
    assert waiting.next_ms() == YEAR_MS
    waiting.store.cancel(ids[4])
    assert waiting.next_ms() is None


def test_a_listing_goes_on_behind_a_place():
    waiting = Waiting()
    waiting.put(*[5, 5, 5, 1, 9] * 100)
    waiting.spill()
    waiting.put(*[5, 2, 7] * 100)
    whole = list(waiting.store.waiting())
    pages: list[Delayed] = []
    while page := list(waiting.store.waiting(after=(pages[-1].due_at_ms, pages[-1].id) if pages else None, limit=70)):
        pages += page
    assert pages == whole
    assert len(whole) == 800
    assert waiting.listed(limit=0) == []


def test_a_listing_shows_each_message_once_while_others_work():
    waiting = Waiting()
    rng = random.Random(3)
    dues_ms = [rng.randrange(2, 10 * DAY_MS) for _ in range(3000)]
    waiting.put(*dues_ms)
    listing = waiting.store.waiting()
    seen = [next(listing) for _ in range(300)]
    waiting.spill()
    seen += [next(listing) for _ in range(600)]
    assert waiting.store.cancel(dues_ms.index(max(dues_ms)))
    waiting.put(1, 10 * DAY_MS)
    waiting.spill()
    seen += listing
    shown = waiting.times(seen)
    assert [due_ms for due_ms in shown if due_ms != 10 * DAY_MS] == sorted(dues_ms)[:-1]


def test_a_spill_empties_the_intake_and_what_comes_later_stays_there():
    waiting = Waiting()
    for start in range(0, 1000, 100):
        waiting.put(*range(start, start + 100))
    segments = [name for name in waiting.disk.names(f"{FOLDER}/intake") if name.endswith(".log")]
    assert len(segments) > 1
    assert waiting.spill() == 1000
    assert [n for n in waiting.disk.names(f"{FOLDER}/intake") if n.endswith(".log")] == [f"{1000:020d}.log"]
    assert waiting.put(7) == [1000]
    for again in (waiting.kill, waiting.reopen):
        again()
        assert waiting.listed() == sorted([*range(1000), 7])
    assert waiting.spill() == 1


class Happenings:
    """What may happen in the pauses of a spill, beside a plain model: id and due time of all that waits."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.waiting = Waiting()
        self.model: dict[int, int] = {}
        self.released: set[int] = set()
        self.now_ms = 0

    def ordered(self) -> list[int]:
        return sorted(self.model, key=lambda message_id: (self.model[message_id], message_id))

    def put(self) -> None:
        delays_ms = [self.rng.choice([1, 90, 700, 5_000, HOUR_MS, DAY_MS]) for _ in range(self.rng.randint(1, 20))]
        dues_ms = [self.now_ms + delay_ms for delay_ms in delays_ms]
        self.model.update(zip(self.waiting.put(*dues_ms), dues_ms, strict=True))

    def cancel(self) -> None:
        message_id = self.rng.choice([*self.model, 0])
        assert self.waiting.store.cancel(message_id) == (self.model.pop(message_id, None) is not None)

    def release(self) -> None:
        self.now_ms += self.rng.choice([0, 50, 800, HOUR_MS])
        found = [each.id for each in self.waiting.store.due(self.waiting.start_ms + self.now_ms, 10)]
        assert found == [message_id for message_id in self.ordered() if self.model[message_id] <= self.now_ms][:10]
        self.waiting.store.released(found, 1)
        self.waiting.store.settled(self.rng.choice([0, 1]))
        self.released.update(found)
        for message_id in found:
            del self.model[message_id]

    def something(self) -> None:
        if self.rng.random() < 0.5:
            self.rng.choice([self.put, self.cancel, self.release])()
        self.waiting.store.check()
        assert len(self.waiting.store) == len(self.model)

    def spill(self) -> None:
        self.waiting.store.on_pause = self.something
        self.waiting.store.spill(self.waiting.start_ms + self.now_ms)
        self.waiting.store.check()
        assert [each.id for each in self.waiting.store.waiting()] == self.ordered()

    def kill(self) -> None:
        self.waiting.kill()
        self.waiting.store.forget(self.released)  # as found in the partition's log
        assert [each.id for each in self.waiting.store.waiting()] == self.ordered()


@pytest.mark.parametrize("seed", range(4))
def test_what_happens_in_the_pauses_of_a_spill_is_not_undone_by_it(seed, monkeypatch: pytest.MonkeyPatch, scale):
    """Messages come in, come due, are cancelled: each comes out once, in order, or never; also after a kill."""
    for name, small in {"_PAUSE_FRAMES": 1, "_PAUSE_MESSAGES": 3, "_PIECE_MESSAGES": 5, "_SAMPLE_MOST": 8}.items():
        monkeypatch.setattr(f"holdfast.broker.delayed.upkeep.{name}", small)
    monkeypatch.setattr("holdfast.broker.delayed.intake._DROP_MOST", 4)
    rng = random.Random(seed)
    for _ in range(scale(4, 100)):
        story = Happenings(rng)
        for _ in range(4):
            for _ in range(rng.randint(1, 10)):
                story.put()
            story.spill()
            if rng.random() < 0.5:
                story.kill()
        story.now_ms += 2 * DAY_MS
        while story.model:
            story.release()
        assert story.waiting.next_ms() is None


def test_a_tick_spills_when_many_wait_and_says_when_it_wants_to_be_called():
    waiting = Waiting(spill_messages=50, save_ms=300)
    assert waiting.store.tick(waiting.start_ms) is None
    waiting.put(*range(61_000, 61_049))
    assert waiting.store.tick(waiting.start_ms) == 61_000
    assert waiting.runs() == []
    waiting.put(60_900)
    assert waiting.store.tick(waiting.start_ms) == 60_900
    assert waiting.runs() != []
    waiting.release(60_900)
    waiting.store.settled(1)
    assert waiting.store.tick(waiting.start_ms + 60_900) == 100
    waiting.clock.advance(ms=300)
    assert waiting.store.accounted == 0
    waiting.store.tick(waiting.start_ms + 60_900)
    assert waiting.store.accounted == 1
    assert waiting.store.tick(waiting.start_ms + 62_000) == 0


def test_what_is_due_soon_is_not_spilled_unless_it_is_very_much():
    """It would be released before the spill is done: that is work for nothing, while others are due."""
    waiting = Waiting(spill_messages=50)
    waiting.put(*range(1_000, 1_150), *range(60_000, 60_049))
    waiting.store.tick(waiting.start_ms)
    assert waiting.runs() == []
    waiting.put(1_150, 1_151)
    waiting.store.tick(waiting.start_ms)
    assert waiting.runs() != []


def test_messages_that_are_gone_at_the_head_of_the_intake_need_no_spill():
    waiting = Waiting(spill_messages=50, save_ms=1)
    for now_ms in range(0, 4000, 10):
        waiting.put(*[now_ms + 25] * 10)
        waiting.release(now_ms, position=now_ms)
        waiting.store.settled(now_ms)
        waiting.clock.advance(ms=10)
        waiting.store.tick(waiting.start_ms + now_ms)
        waiting.store.check()
        assert waiting.runs() == []
    assert len(waiting.store._state.gone) < 50
    assert len([n for n in waiting.disk.names(f"{FOLDER}/intake") if n.endswith(".log")]) < 4
    left = waiting.listed()
    waiting.kill()
    waiting.store.forget(range(4_000 - len(left)))
    assert waiting.listed() == left
    assert waiting.spill() == len(left)
    assert waiting.listed() == left


def test_short_delays_do_not_let_the_intake_grow():
    waiting = Waiting(spill_messages=50, save_ms=1)
    waiting.put(YEAR_MS)
    for now_ms in range(0, 4000, 10):
        waiting.put(*[now_ms + 5] * 10)
        waiting.release(now_ms + 5, position=now_ms)
        waiting.store.settled(now_ms)
        waiting.clock.advance(ms=10)
        waiting.store.tick(waiting.start_ms + now_ms)
        waiting.store.check()
    assert len([n for n in waiting.disk.names(f"{FOLDER}/intake") if n.endswith(".log")]) < 4
    assert len(waiting.runs()) == 1
    assert waiting.listed() == [YEAR_MS]


def test_retention_of_the_partition_does_not_touch_what_waits():
    waiting = Waiting()
    waiting.store.close()
    waiting.log_settings = LogSettings(
        min_free_bytes=0, segment_bytes=4096, retention_bytes=0, retention_segments=1, retention_ms=1, segment_ms=1
    )
    waiting.store = waiting.open()
    waiting.put(*range(2000))
    waiting.clock.advance(seconds=7200)
    waiting.store.tick(waiting.start_ms)
    assert len(waiting.listed()) == 2000


@pytest.mark.parametrize("spilled", [False, True])
def test_a_release_counts_only_when_the_partition_is_synced(spilled):
    waiting = Waiting()
    waiting.put(1, 2, 3)
    if spilled:
        waiting.spill()
    assert waiting.release(2, position=10) == [1, 2]
    waiting.store.settled(9)
    waiting.reopen()
    assert waiting.store.accounted == 9
    assert waiting.due(9) == [1, 2, 3]  # the caller finds them in the partition's log from 9 on, or nobody does
    assert waiting.release(2, position=10) == [1, 2]
    waiting.store.settled(10)
    waiting.reopen()
    assert waiting.store.accounted == 10
    assert waiting.due(9) == [3]


def test_a_release_that_is_not_settled_survives_a_spill():
    waiting = Waiting()
    waiting.put(1, 2)
    waiting.release(1, position=10)
    assert waiting.spill() == 2
    assert waiting.listed() == [2]
    waiting.kill()
    assert waiting.listed() == [1, 2]
    waiting.release(2, position=10)
    waiting.store.save()
    assert len(waiting.runs()) == 1
    waiting.store.settled(10)
    waiting.store.save()
    assert waiting.runs() == []


def test_the_intake_is_not_trimmed_for_releases_that_are_not_settled():
    waiting = Waiting()
    for start in range(0, 1000, 100):
        waiting.put(*range(start, start + 100))
    waiting.release(5000, position=10)
    waiting.store.save()
    waiting.kill()
    assert waiting.release(5000, position=10) == list(range(1000))
    waiting.store.settled(10)
    waiting.store.save()
    assert len([n for n in waiting.disk.names(f"{FOLDER}/intake") if n.endswith(".log")]) == 1
    waiting.kill()
    assert waiting.due(5000) == []


def test_a_kill_and_then_a_power_cut_do_not_bring_back_a_manifest_whose_files_are_gone():
    waiting = Waiting()
    waiting.put(1, 2)
    waiting.spill()
    waiting.release(5)
    waiting.store.settled(1)
    killed: list[SimulatedDisk] = []
    disk = waiting.disk
    disk.on_call = lambda call: killed.append(disk.kill()) if call == "rename" else None
    waiting.store.save()  # names no run any more
    for seed in range(30):
        waiting.disk = killed[0].kill()
        waiting.open()
        waiting.disk = waiting.disk.cut(random.Random(seed))
        waiting.store = waiting.open()
        assert waiting.store.damage == []
        assert len(waiting.store) == 0


def test_a_manifest_speaks_only_of_ids_that_no_power_cut_can_issue_anew():
    for seed in range(30):
        rng = random.Random(seed)
        waiting = Waiting()
        (lost,) = waiting.put(1)
        assert waiting.store.write_cancel(lost) is not None  # and nobody waits for it
        waiting.store.save()
        waiting.disk = waiting.disk.cut(rng)
        waiting.store = waiting.open()
        waiting.store.wait(
            waiting.store.write(Batch(values=[b"2"], due_at_ms=[waiting.start_ms + 2]), durability="fsync")
        )
        waiting.disk = waiting.disk.cut(rng)
        waiting.store = waiting.open()
        assert waiting.due(9) == [2]


def test_ids_found_in_the_partition_are_not_released_again():
    waiting = Waiting()
    ids = waiting.put(1, 2, 3, 4)
    waiting.spill()
    ids += waiting.put(5, 6)
    waiting.store.forget([ids[0], ids[4], 999])
    waiting.store.forget([ids[0]])
    waiting.store.settled(3)
    waiting.store.check()
    assert (waiting.listed(), len(waiting.store)) == ([2, 3, 4, 6], 4)
    waiting.reopen()
    assert (waiting.listed(), len(waiting.store)) == ([2, 3, 4, 6], 4)


def test_years_of_sparse_delays_make_few_files():
    waiting = Waiting(spill_messages=1000)
    rng = random.Random(5)
    waiting.put(*[rng.randrange(10 * YEAR_MS) for _ in range(1000)])
    waiting.store.tick(waiting.start_ms)
    assert 2 <= len(waiting.runs()) <= 25
    assert waiting.listed(limit=5) == waiting.due(YEAR_MS, 5)


def test_buckets_are_wider_the_farther_away_they_are():
    now_ms = 1_700_000_000_000
    for distance_ms, width_ms in ((0, HOUR_MS), (DAY_MS, HOUR_MS), (3 * DAY_MS, DAY_MS), (YEAR_MS, MONTH_MS)):
        due_at_ms = now_ms + distance_ms
        assert bucket_of(due_at_ms, now_ms) % width_ms == 0
        assert 0 <= due_at_ms - bucket_of(due_at_ms, now_ms) < width_ms


def test_a_spill_larger_than_its_memory_is_sorted_all_the_same():
    waiting = Waiting()
    rng = random.Random(2)
    dues_ms = [rng.randrange(100) for _ in range(500)]
    waiting.put(*dues_ms)
    log = waiting.store._log
    reads = 0

    def frames():
        nonlocal reads
        reads += 1
        return log.read(0)

    found = list(in_due_order(frames, lambda i: i % 3 != 0, memory_bytes=20_000))
    wanted = sorted((waiting.start_ms + due_ms, i) for i, due_ms in enumerate(dues_ms) if i % 3)
    assert [(r.due_at_ms, r.offset) for r in found] == wanted
    assert reads > 3


def test_timers_agree_with_a_sorted_list():
    for seed in range(40):
        rng = random.Random(seed)
        timers, model, now_ms, gone = DelayedTimers(), set(), 1_000_000, set()
        for message_id in range(400):
            distance_ms = rng.choice([0, 10, 999, 5000, 200_000, HOUR_MS * 5, DAY_MS * 9, YEAR_MS])
            entry = (now_ms + rng.randint(-500, distance_ms), message_id)
            timers.add_pairs([entry])
            model.add(entry)
            now_ms += rng.choice([0, 0, 1, 700, 5000, DAY_MS, -600])
            timers.advance(now_ms)
            due = [entry for entry in timers.near(now_ms) if entry[1] not in gone]
            assert due == sorted(entry for entry in model if entry[0] <= now_ms)
            for entry in due[: rng.choice([0, 1, 5])]:
                gone.add(entry[1])
                model.discard(entry)
            timers.shed(gone.__contains__)
            assert timers.first(gone.__contains__) == min(model, default=None)
        assert [entry for entry in timers.ordered() if entry[1] not in gone] == sorted(model)
        for message_id, _ in enumerate(timers.dropping_below(200), 400):  # while others come in, and time passes
            entry = (now_ms + rng.choice([0, 999, 5000, HOUR_MS * 5, YEAR_MS]), message_id)
            timers.add_pairs([entry])
            model.add(entry)
            timers.advance(now_ms := now_ms + rng.choice([0, 700, 5000]))
        dropped = gone | set(range(200))
        model = {entry for entry in model if entry[1] >= 200}
        assert {entry for entry in timers.ordered() if entry[1] not in dropped} == model
        assert timers.first(dropped.__contains__) == min(model, default=None)


@pytest.mark.parametrize("span_ms", [HOUR_MS, YEAR_MS])
def test_a_timer_takes_less_than_twenty_four_bytes(span_ms):
    rng = random.Random(1)
    tracemalloc.start()
    timers = DelayedTimers()
    timers.advance(1_700_000_000_000)
    for message_id in range(20_000):
        timers.add_pairs([(1_700_000_000_000 + 120_000 + rng.randrange(span_ms), message_id)])
    used_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used_bytes < 24 * 20_000


def test_a_second_owner_is_refused():
    waiting = Waiting()
    with pytest.raises(Busy):
        waiting.open()
    waiting.store.close()
    waiting.store.close()
    with waiting.open() as store:
        assert len(store) == 0


def test_a_closed_store_says_so():
    waiting = Waiting()
    ids = waiting.put(1)
    waiting.spill()
    waiting.store.close()
    calls = [
        lambda: waiting.due(5),
        lambda: waiting.store.get(ids[0]),
        lambda: waiting.store.cancel(ids[0]),
        lambda: waiting.put(1),
        waiting.listed,
        lambda: waiting.store.tick(0),
        lambda: waiting.store.spill(0),
    ]
    for call in calls:
        with pytest.raises(Closed):
            call()


def test_settings_are_held_to_their_limits():
    with pytest.raises(BadSettings):
        DelaySettings(spill_messages=0)


def test_files_that_the_manifest_does_not_name_are_removed():
    waiting = Waiting()
    waiting.put(1, 2)
    waiting.spill()
    (name,) = waiting.runs()
    content = waiting.disk.contents(waiting.path(name))
    waiting.store.close()
    for left_over in (f"{'7' * 20}-{9:010d}.run", "spill.tmp"):
        file = waiting.disk.open(waiting.path(left_over), write=True, create=True)
        file.write(0, [content])
    waiting.store = waiting.open()
    assert waiting.runs() == [name]
    assert waiting.listed() == [1, 2]
    assert "spill.tmp" not in waiting.disk.names(FOLDER)


def damaged(position_of) -> tuple[Waiting, list[int]]:
    """A store with a run of many blocks, one byte of which is flipped."""
    waiting = Waiting()
    waiting.put(*range(1000))
    waiting.spill()
    (name,) = waiting.runs()
    waiting.store.close()
    size = len(waiting.disk.contents(waiting.path(name)))
    waiting.disk.flip(waiting.path(name), position_of(size))
    waiting.store = waiting.open()
    return waiting, list(range(1000))


@pytest.mark.parametrize("back", [1, 20, 60, 100, 150])
def test_a_spoiled_footer_is_made_anew(back):
    waiting, dues_ms = damaged(lambda size: size - back)
    assert waiting.listed() == dues_ms
    assert waiting.store.damage == []
    assert waiting.release(5000) == dues_ms


@pytest.mark.parametrize("place", [0.0, 0.02, 0.05, 0.3, 0.5, 0.7, 0.9])
def test_a_spoiled_block_is_reported_and_the_others_are_released(place):
    waiting, dues_ms = damaged(lambda size: int(size * place))
    released = waiting.release(5000, limit=400) + waiting.release(5000) + waiting.release(5000)
    assert released == sorted(set(released))
    assert 700 < len(released) < 1000
    assert set(released) <= set(dues_ms)
    (damage,) = waiting.store.damage
    assert waiting.runs()[0] in damage
    waiting.store.settled(1)
    waiting.reopen()
    assert waiting.due(5000) == []
    assert len(waiting.runs()) == 1, "the damaged file is kept"
    assert waiting.store.tick(waiting.start_ms) is None


def test_a_file_that_the_disk_does_not_give_holds_up_no_other_message():
    waiting = Waiting()
    waiting.put(1, 2)
    waiting.spill()
    waiting.put(3, 4)
    waiting.spill()
    waiting.disk.faults.fail(1, 5, sticky=False, calls=frozenset({"read"}))
    assert waiting.release(9) == [3, 4]
    assert "cannot be read" in waiting.store.damage[0]
    waiting.store.settled(1)
    waiting.reopen()
    assert waiting.release(9) == [1, 2]


@pytest.mark.parametrize("codec", ["zstd", "lz4", "gzip"])
def test_packed_messages_wait_packed(codec):
    waiting = Waiting()
    waiting.store.close()
    waiting.log_settings = LogSettings(min_free_bytes=0, codec=codec)
    waiting.store = waiting.open()
    values = [bytes([i]) * 3000 for i in range(100)]
    waiting.store.write(Batch(values=values, due_at_ms=range(100)))
    waiting.spill()
    assert len(waiting.disk.contents(waiting.path(waiting.runs()[0]))) < 30_000
    waiting.reopen()
    assert [each.record.value for each in waiting.store.due(99, 1000)] == values


def test_a_run_that_is_gone_or_worthless_is_reported_and_the_rest_is_served():
    waiting = Waiting()
    for due_ms in (1, 2, 3):
        waiting.put(due_ms)
        waiting.spill()
    names = waiting.runs()
    waiting.store.close()
    waiting.disk.remove(waiting.path(names[0]))
    waiting.disk.cut_file(waiting.path(names[1]), 40)
    waiting.store = waiting.open()
    assert waiting.listed() == [3]
    assert [("missing" in what, "lost" in what) for what in waiting.store.damage] == [(True, True), (False, True)]
    assert names[1] + ".damaged" in waiting.disk.names(FOLDER)
    waiting.reopen()
    assert waiting.listed() == [3]
    assert waiting.store.damage == []


@pytest.mark.parametrize("how", ["flipped", "cut", "removed"])
def test_a_spoiled_manifest_loses_no_message(how):
    waiting = Waiting()
    waiting.put(1, 2, 3)
    waiting.spill()
    waiting.put(4, 5)
    waiting.store.settled(8)
    waiting.store.close()
    path = waiting.path("manifest")
    if how == "flipped":
        waiting.disk.flip(path, 12)
    elif how == "cut":
        waiting.disk.cut_file(path, 5)
    else:
        waiting.disk.remove(path)
    waiting.store = waiting.open()
    assert waiting.listed() == [1, 2, 3, 4, 5]
    assert "manifest" in waiting.store.damage[0]
    assert waiting.store.accounted == 0
    waiting.put(6)
    waiting.spill()
    waiting.reopen()
    assert waiting.store.damage == []
    assert waiting.release(9) == [1, 2, 3, 4, 5, 6]


def test_without_a_manifest_a_message_in_both_places_counts_once():
    waiting = Waiting()
    waiting.put(1, 2, 3)
    waiting.disk.faults.fail(1, 5, sticky=True, calls=frozenset({"remove"}))  # the intake is not trimmed
    with pytest.raises(Unavailable):
        waiting.store.spill(waiting.start_ms)
    waiting.disk = waiting.disk.kill()
    waiting.disk.remove(waiting.path("manifest"))
    waiting.store = waiting.open()
    waiting.store.check()
    assert (waiting.listed(), len(waiting.store)) == ([1, 2, 3], 3)
    waiting.put(4)
    waiting.spill()
    assert waiting.release(9) == [1, 2, 3, 4]


def test_a_manifest_of_a_newer_release_is_refused():
    from crc32c import crc32c

    waiting = Waiting()
    waiting.store.close()
    content = b"HFDELAY\x02" + b"whatever"
    file = waiting.disk.open(waiting.path("manifest"), write=True)
    file.truncate(0)
    file.write(0, [content + crc32c(content).to_bytes(4, "little")])
    with pytest.raises(UnknownFormat, match="newer"):
        waiting.open()
    with pytest.raises(UnknownFormat):  # and the folder is let go
        waiting.open()


def test_damage_in_the_intake_costs_only_the_damaged_messages():
    waiting = Waiting()
    for due_ms in range(200):
        waiting.put(due_ms)
    waiting.store._log.sync()
    waiting.disk.flip(f"{FOLDER}/intake/{0:020d}.log", 100)
    released = waiting.release(500)
    assert released == list(range(1, 200))
    assert "1 messages cannot be read" in waiting.store.damage[0]
    assert waiting.next_ms() is None
    waiting.store.settled(1)
    waiting.put(3)
    waiting.spill()
    assert f"{0:020d}.log" in waiting.disk.names(f"{FOLDER}/intake"), "the damaged segment is kept"
    assert waiting.due(9) == [3]


@pytest.mark.parametrize("call", ["write", "sync", "rename", "sync_folder", "open"])
def test_a_disk_that_is_full_puts_off_a_spill(call):
    waiting = Waiting(spill_messages=10, save_ms=100)
    waiting.put(*range(61_000, 61_030))
    waiting.store._log.sync()
    waiting.disk.faults.fail(1, 28, sticky=False, calls=frozenset({call}))
    assert waiting.store.tick(waiting.start_ms) == 100
    waiting.disk.faults.clear()
    waiting.store.check()
    assert waiting.listed() == list(range(61_000, 61_030))
    waiting.clock.advance(ms=100)
    waiting.store.tick(waiting.start_ms)
    assert len(waiting.runs()) >= 1
    waiting.kill()
    assert waiting.listed() == list(range(61_000, 61_030))


def test_rolling_a_log_lets_all_of_it_be_trimmed(tmp_path):
    with Log.open(tmp_path / "log", LogSettings(min_free_bytes=0)) as log:
        log.append([b"a", b"b"])
        assert log.trim(2).segments == 0
        log.roll()
        log.roll()
        assert log.trim(2).segments == 1
        assert (log.start, log.end, log.append([b"c"]).offset) == (2, 2, 2)


class Traffic:
    """Threads that put, cancel, release and keep up, on a real disk."""

    def __init__(self, folder: str) -> None:
        self.world = real_world()
        settings = LogSettings(min_free_bytes=0, segment_bytes=65536)
        self.store = DelayStore.open(self.world, folder, settings, DelaySettings(spill_messages=200, save_ms=5))
        self.cancelled: list[bytes] = []
        self.released: list[bytes] = []
        self.failures: list[BaseException] = []
        self.partition = threading.Lock()  # as the caller has one: nobody cancels between due and released
        self.stop = threading.Event()

    def now_ms(self) -> int:
        return self.world.clock.now_ns() // 1_000_000

    def thread(self, work, *arguments) -> threading.Thread:
        def call() -> None:
            try:
                work(*arguments)
            except BaseException as error:
                self.failures.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        return thread

    def produce(self, number: int) -> None:
        rng = random.Random(number)
        for i in range(100):
            values = [b"%d %d %d" % (number, i, k) for k in range(5)]
            dues_ms = [self.now_ms() + rng.choice([0, 1, 5, 20]) for _ in values]
            batch = Batch(values=values, due_at_ms=dues_ms)
            appended = self.store.write(batch, durability=rng.choice(["os", "fsync"]))
            self.store.wait(appended)
            if i % 10 == 0:
                with self.partition:
                    if self.store.cancel(appended.offset):
                        self.cancelled.append(values[0])

    def consume(self) -> None:
        while not self.failures and (not self.stop.is_set() or len(self.store)):
            with self.partition:
                found = self.store.due(self.now_ms(), 50)
                self.store.released([each.id for each in found], len(self.released) + len(found))
                self.released += [each.record.value for each in found]
                self.store.settled(len(self.released))

    def keep_up(self) -> None:
        while not self.stop.is_set():
            self.store.tick(self.now_ms())
            list(self.store.waiting(limit=20))


def test_many_threads_lose_and_double_nothing(tmp_path):
    traffic = Traffic(str(tmp_path / "delayed"))
    others = [traffic.thread(traffic.consume), traffic.thread(traffic.keep_up)]
    for producer in [traffic.thread(traffic.produce, number) for number in range(3)]:
        producer.join()
    traffic.stop.set()
    for thread in others:
        thread.join()
    assert not traffic.failures
    traffic.store.check()
    traffic.store.close()
    everything = [b"%d %d %d" % (n, i, k) for n in range(3) for i in range(100) for k in range(5)]
    assert sorted(traffic.released + traffic.cancelled) == sorted(everything)
