"""Retention: by age, bytes and count, with a minimum, never what somebody still needs."""

from __future__ import annotations

import itertools
import random

import pytest

from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import OffsetOutOfRange
from holdfast.settings import LogSettings
from holdfast.storage.log import Log
from tests.crash.histories import FOLDER, small_settings

DAY_MS = 24 * 3600 * 1000


class Kept:
    """A log of one-kilobyte messages, four of them to a segment."""

    def __init__(self, **settings) -> None:
        self.disk = SimulatedDisk()
        self.clock = ManualClock()
        self.settings: LogSettings = small_settings(**settings)
        self.log = Log.open(FOLDER, self.settings, World(clock=self.clock, disk=self.disk, ids=SeededIds(1)))

    def fill(self, segments: int) -> Kept:
        while len(self.log.segments()) < segments:
            self.log.append([bytes(1000)])
        return self

    @property
    def files(self) -> int:
        return sum(name.endswith(".log") for name in self.disk.names(FOLDER))


def test_without_limits_nothing_is_removed():
    kept = Kept().fill(5)
    assert kept.log.retain().segments == 0
    kept.clock.advance(seconds=10**9)
    assert kept.log.tick() is None
    assert kept.files == 5


def test_too_many_segments_are_removed_oldest_first_and_the_answer_says_what_was_freed():
    kept = Kept(retention_segments=2).fill(5)
    freed = kept.log.retain()
    assert (freed.segments, freed.start, kept.files) == (3, kept.log.start, 2)
    assert freed.bytes == 3 * 4096
    assert [r.offset for r in kept.log.records(freed.start)] == list(range(freed.start, kept.log.end))


def test_bytes_are_kept_below_the_limit_but_for_the_minimum():
    kept = Kept(retention_bytes=3 * 4096).fill(6)
    assert kept.log.retain().segments == 3
    kept = Kept(retention_bytes=0, retention_min_segments=4).fill(6)
    assert kept.log.retain().segments == 2


def test_age_counts_from_the_newest_message_of_a_segment():
    kept = Kept(retention_ms=DAY_MS).fill(3)
    kept.clock.advance(seconds=12 * 3600)
    kept.fill(5)
    kept.clock.advance(seconds=13 * 3600)
    assert kept.log.retain().segments == 2  # the third got its last message half a day ago
    kept.clock.advance(seconds=12 * 3600)
    assert kept.log.retain().segments == 3  # the last of them was the active one when we first looked
    assert kept.files == 1


def test_the_active_segment_is_never_removed():
    kept = Kept(retention_segments=1, retention_bytes=0).fill(4)
    kept.clock.advance(seconds=3600)
    kept.log.retain()
    assert kept.files == 1
    kept.clock.advance(seconds=3600)
    assert kept.log.retain().segments == 0
    assert kept.log.end > kept.log.start


def test_an_old_active_segment_is_rolled_by_age_and_then_goes_too():
    kept = Kept(retention_ms=DAY_MS, segment_ms=3600 * 1000)
    kept.log.append([b"old"])
    kept.clock.advance(seconds=30 * 3600)
    kept.log.tick()
    assert (kept.files, kept.log.start, kept.log.end) == (1, 1, 1)
    assert kept.log.append([b"ids go on"]).offset == 1


def test_a_quiet_log_drops_its_only_messages_in_time_though_nothing_more_is_appended():
    kept = Kept(retention_ms=DAY_MS)
    kept.log.append([b"a person's address"])
    for _ in range(23):
        kept.clock.advance(seconds=3600)
        kept.log.tick()
        assert [r.value for r in kept.log.records(0)] == [b"a person's address"]
    kept.clock.advance(seconds=3600 + 61)
    kept.log.tick()
    assert (kept.files, kept.log.start, kept.log.end) == (1, 1, 1)
    assert kept.log.append([b"ids go on"]).offset == 1


def test_a_message_is_gone_at_most_a_tenth_of_the_time_late_however_little_is_appended():
    kept = Kept(retention_ms=10 * DAY_MS, segment_bytes=1 << 20)
    for _ in range(40 * 24):
        kept.log.append([b"one each hour"])
        kept.clock.advance(seconds=3600)
        kept.log.tick()
        oldest = next(kept.log.records(kept.log.start))
        assert kept.clock.now_ns() - oldest.timestamp_ns <= (11 * DAY_MS + 2 * 3600 * 1000) * 1_000_000
        assert kept.files <= 13


def test_a_log_that_is_opened_anew_all_the_time_ages_as_well():
    kept = Kept(retention_ms=10 * DAY_MS, segment_bytes=1 << 20, retention_check_ms=1)
    for _ in range(40):
        kept.log.append([b"one a day"])
        kept.clock.advance(seconds=24 * 3600)
        kept.log.tick()
        kept.log.close()
        kept.log = Log.open(FOLDER, kept.settings, World(clock=kept.clock, disk=kept.disk, ids=SeededIds(1)))
    assert kept.log.end - kept.log.start <= 13


def test_without_a_limit_by_age_no_segment_is_sealed_by_age():
    kept = Kept(retention_segments=5, retention_check_ms=1)
    kept.log.append([b"x"])
    kept.clock.advance(seconds=10**6)
    kept.log.tick()
    assert (kept.files, kept.log.start, kept.log.end) == (1, 0, 1)


def test_what_is_pinned_stays_until_the_pin_moves_or_goes():
    kept = Kept(retention_segments=1).fill(6)
    third = kept.log.segments()[2].base_offset
    kept.log.pin("group:billing", third)
    kept.log.pin("query:spark-1", third + 9)
    assert (kept.log.retain().segments, kept.log.start) == (2, third)
    kept.log.pin("group:billing", kept.log.end)
    kept.log.retain()
    assert kept.log.start <= third + 9
    kept.log.unpin("query:spark-1")
    kept.log.retain()
    assert kept.files == 1


def test_a_policy_may_ignore_pins_but_only_by_name():
    kept = Kept(retention_segments=1, retention_ignores_pins=True).fill(4)
    kept.log.pin("group:slow", 0)
    assert kept.log.retain().segments == 3


def test_trim_by_hand_obeys_pins_and_keeps_a_segment_that_reaches_beyond():
    kept = Kept().fill(5)
    second = kept.log.segments()[1]
    assert kept.log.trim(second.next_offset - 1).start == second.base_offset
    kept.log.pin("group:a", second.base_offset)
    assert kept.log.trim(kept.log.end).segments == 0
    kept.log.unpin("group:a")
    assert kept.log.trim(kept.log.end).segments == 3


def test_a_trimmed_offset_is_refused_with_the_first_that_is_kept():
    kept = Kept(retention_segments=1).fill(3)
    kept.log.retain()
    with pytest.raises(OffsetOutOfRange, match=r"offset 0 was trimmed away: .* read from \d+") as caught:
        list(kept.log.read(0))
    assert caught.value.start == kept.log.start


def test_ticks_apply_retention_when_it_is_due_and_say_when_they_want_to_be_called_again():
    kept = Kept(retention_segments=2, retention_check_ms=60_000)
    kept.log.tick()
    kept.fill(5)
    assert 0 < kept.log.tick() <= 60_001
    assert kept.files == 5
    kept.clock.advance(seconds=61)
    kept.log.tick()
    assert kept.files == 2


@pytest.mark.slow
def test_a_crash_between_any_two_steps_of_retention_leaves_a_whole_log():
    """An oldest part is gone or not; never a middle, and never what was to be kept."""
    for seed in range(200):
        kept = Kept(retention_segments=2).fill(6)
        start, end = kept.log.segments()[-2].base_offset, kept.log.end
        kept.log.sync()
        disks = []
        kept.disk.on_call = lambda call, kept=kept, disks=disks, seed=seed: disks.append(
            (kept.disk.cut(random.Random(seed)), kept.disk.kill())
        )
        kept.log.retain()
        assert len(disks) >= 4 * 3  # index, segment, folder, for each of four
        for after_cut, after_kill in disks:
            for disk, boot in ((after_cut, 2), (after_kill, 1)):
                with Log.open(FOLDER, kept.settings, World(clock=kept.clock, disk=disk, ids=SeededIds(boot))) as log:
                    assert not log.report.damage
                    assert log.start <= start
                    assert log.end == end
                    assert [r.offset for r in log.records(log.start)] == list(range(log.start, end))


def test_facts_of_segments_add_up():
    kept = Kept().fill(4)
    facts = kept.log.segments()
    assert facts[0].base_offset == 0
    assert facts[-1].next_offset == kept.log.end
    assert all(a.next_offset == b.base_offset for a, b in itertools.pairwise(facts))
