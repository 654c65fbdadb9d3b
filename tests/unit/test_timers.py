"""What falls due when: to the millisecond, in any order of adding, and looking takes nothing away."""

from __future__ import annotations

from heapq import heappush
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.delivery.events import each, pairs, run, runs_of, size
from holdfast.delivery.timers import Deadlines, Timers

# Around the edges of a tick, where an entry is most easily early or late.
edges_ms = st.sampled_from([0, 1, 62, 63, 64, 65, 127, 128, 129, 1_000, 10**12]) | st.integers(-200, 400)


@pytest.mark.parametrize("due_ms", [0, 1, 63, 64, 65, 127, 128, 1_700_000_000_123])
def test_an_entry_is_due_in_its_millisecond_and_not_before(due_ms):
    timers = Timers()
    timers.add(due_ms, 5)
    assert timers.next_ms() == due_ms
    assert list(timers.due(due_ms - 1)) == []
    assert list(timers.due(due_ms)) == [(due_ms, 5)]


def test_entries_of_one_tick_keep_their_own_milliseconds():
    timers = Timers()
    for due_ms in (70, 66, 127, 64):
        timers.add(due_ms, 1000 + due_ms)
    assert sorted(timers.due(66)) == [(64, 1064), (66, 1066)]
    timers.forget(66)
    assert timers.next_ms() == 70
    assert list(timers.due(126)) == [(70, 1070)]


def test_looking_takes_nothing_away():
    timers = Timers()
    timers.add(10, 1)
    timers.add(500, 2)
    assert list(timers.due(500)) == list(timers.due(500)) == [(10, 1), (500, 2)]
    assert timers.next_ms() == 10


def test_what_had_its_turn_is_forgotten_and_its_tick_may_be_used_again():
    timers = Timers()
    timers.add(10, 1)
    timers.forget(10)
    assert timers.next_ms() is None
    assert list(timers.entries()) == []
    timers.add(11, 2)
    assert list(timers.due(11)) == [(11, 2)]


def test_the_same_number_may_wait_for_two_times():
    timers = Timers()
    timers.add(10, 1)
    timers.add(90, 1)
    timers.add(10, 1)
    assert list(timers.due(90)) == [(10, 1), (10, 1), (90, 1)]


def test_one_far_timer_does_not_hold_up_the_near_ones():
    timers = Timers()
    timers.add(10**13, 1)
    timers.add(5, 2)
    assert list(timers.due(5)) == [(5, 2)]
    timers.forget(5)
    assert timers.next_ms() == 10**13


@given(st.lists(st.tuples(edges_ms, st.integers(0, 9))), st.lists(edges_ms))
def test_timers_are_a_sorted_list(entries, looks):
    timers, left = Timers(), sorted(entries)
    for due_ms, number in entries:
        timers.add(due_ms, number)
    for now_ms in looks:
        due = [entry for entry in left if entry[0] <= now_ms]
        assert sorted(timers.due(now_ms)) == due
        ticks = [due_ms // 64 for due_ms, _ in timers.due(now_ms)]
        assert ticks == sorted(ticks)
        timers.forget(now_ms)
        left = [entry for entry in left if entry[0] > now_ms]
        assert sorted(timers.entries()) == left
        assert timers.next_ms() == (left[0][0] if left else None)


@given(st.lists(st.tuples(edges_ms, st.integers(0, 99))), edges_ms, st.integers(1, 3))
def test_a_turn_may_be_had_in_portions_and_nothing_is_passed_over_that_still_counts(entries, now_ms, most):
    timers, waiting = Timers(), dict.fromkeys(entries, True)
    for entry in entries:
        timers.add(*entry)
    had = []
    while portion := [entry for entry in timers.due(now_ms) if entry in waiting][:most]:
        had += dict.fromkeys(portion)
        for entry in dict.fromkeys(portion):
            del waiting[entry]
        timers.forget(now_ms, lambda *entry: entry in waiting)
        first = next(timers.due(now_ms), None)
        assert first is None or first in waiting, "what had its turn is not looked at again"
    assert sorted(had) == sorted({entry for entry in entries if entry[0] <= now_ms})
    assert sorted(timers.entries()) == sorted(entry for entry in entries if entry[0] > now_ms)


def test_a_deadline_has_come_in_its_millisecond_and_not_before():
    deadlines = Deadlines()
    deadlines.add(100, 3, 6)
    assert deadlines.due(99) == []
    assert deadlines.due(100) == [(3, 6)]
    deadlines.forget(99)
    assert deadlines.next_ms() == 100
    deadlines.forget(100)
    assert deadlines.next_ms() is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5))), st.integers(1, 3), st.randoms())
def test_leases_may_end_in_portions_and_none_is_passed_over_that_still_counts(runs, most, rng):
    deadlines, leases, start = Deadlines(), {}, 0
    for until_ms, count in runs:
        deadlines.add(until_ms, start, start + count)
        leases |= dict.fromkeys(range(start, start + count), until_ms)
        start += count
    wanted, now_ms = dict(leases), 5
    ended: list[int] = []
    while portion := [o for a, b in deadlines.due(now_ms) for o in range(a, b) if leases.get(o, 99) <= now_ms][:most]:
        for offset in portion:
            del leases[offset]
        ended += portion
        for offset in [o for o in leases if rng.random() < 0.1]:  # acked meanwhile
            del leases[offset], wanted[offset]
        deadlines.forget(now_ms, lambda offset: leases.get(offset, 99) <= now_ms)
    assert sorted(ended) == sorted(o for o, until_ms in wanted.items() if until_ms <= now_ms)


def test_a_short_lease_behind_a_long_one_ends_first():
    deadlines = Deadlines()
    deadlines.add(10**9, 0, 1)
    deadlines.add(50, 1, 2)
    deadlines.add(60, 2, 3)
    assert deadlines.next_ms() == 50
    assert deadlines.due(50) == [(1, 2)]
    deadlines.forget(50)
    assert deadlines.due(60) == [(2, 3)]
    assert len(deadlines) == 2


@given(st.lists(st.integers(0, 50)), st.lists(st.integers(0, 60)), st.booleans())
def test_deadlines_are_a_sorted_list(times_ms, looks, renewed):
    deadlines = Deadlines()
    left = sorted((until_ms, at, at + 1) for at, until_ms in enumerate(times_ms))
    for at, until_ms in enumerate(times_ms):
        deadlines.add(until_ms, at, at + 1)
    if renewed:
        deadlines.renew(list(left))
    for now_ms in looks:
        assert sorted(deadlines.due(now_ms)) == sorted(entry[1:] for entry in left if entry[0] <= now_ms)
        deadlines.forget(now_ms)
        left = [entry for entry in left if entry[0] > now_ms]
        assert sorted(deadlines.entries()) == left
        assert deadlines.next_ms() == (left[0][0] if left else None)
        assert len(deadlines) == len(left)


def test_deadlines_that_came_out_of_order_are_found_like_the_others():
    rng, deadlines, heap = Random(4), Deadlines(), []
    deadlines.add(10**9, 0, 1)
    for at in range(1, 500):
        until_ms = rng.randrange(1_000)
        deadlines.add(until_ms, at, at + 1)
        heappush(heap, (until_ms, at))
    assert sorted(deadlines.due(500)) == sorted((at, at + 1) for until_ms, at in heap if until_ms <= 500)


@given(st.sets(st.integers(0, 60)))
def test_runs_hold_the_same_offsets_in_fewer_numbers(offsets):
    runs = runs_of(offsets)
    assert list(each(runs)) == sorted(offsets)
    assert size(runs) == len(offsets)
    assert all(stop < start for stop, start in zip(runs[1::2], runs[2::2], strict=False)), (
        "a run is as long as it can be"
    )
    assert sum(stop - start for start, stop in pairs(runs)) == len(offsets)


def test_the_run_of_one_offset():
    assert run(7) == runs_of([7]) == (7, 8)
    assert runs_of([]) == ()
