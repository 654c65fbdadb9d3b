"""Which messages are next: urgent ones first, oldest first within a level, the aged before all, fair by weights."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.delivery.choose import PriorityTurns, choose
from holdfast.delivery.events import Cancel, Nack, Receive, Reject, Seek, Tick
from holdfast.delivery.image import image_of
from tests.unit.stories import Story, offsets_of, plain

WEIGHTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def story_of(*levels: int) -> Story:
    story = Story()
    story.publish(*levels)
    return story


def chosen(story: Story, count: int, **options: object) -> list[int]:
    return list(choose(story.group, count, story.readable, **options).offsets)  # type: ignore[arg-type]


def test_without_priorities_it_is_plain_fifo():
    story = Story(5)
    assert choose(story.group, 3, 5).offsets == range(3)
    assert choose(story.group, 3, 5).cursor == 3
    assert chosen(story, 99) == [0, 1, 2, 3, 4]


def test_nothing_is_chosen_from_an_empty_log():
    story = Story()
    found = choose(story.group, 3, 0)
    assert (list(found.offsets), found.cursor) == ([], 0)


def test_an_end_below_the_cursor_moves_nothing_back():
    story = Story(4)
    story.receive(4)
    found = choose(story.group, 3, 2)
    assert (list(found.offsets), found.cursor) == ([], 4)


def test_the_urgent_come_first_and_the_oldest_first_within_a_level():
    story = story_of(0, 5, 9, 0, 5, 9, 0)
    assert chosen(story, 99) == [2, 5, 1, 4, 0, 3, 6]
    assert chosen(story, 3) == [2, 5, 1]


def test_a_batch_is_chosen_as_single_messages_would_be():
    together, single = story_of(0, 5, 9, 0, 5, 9, 0), story_of(0, 5, 9, 0, 5, 9, 0)
    one_by_one = [offset for _ in range(7) for offset in offsets_of(single.receive(1))]
    assert one_by_one == offsets_of(together.receive(7))


def test_choosing_changes_nothing():
    story = story_of(0, 3, 0, 3)
    before = plain(image_of(story.group))
    assert chosen(story, 3) == chosen(story, 3)
    assert plain(image_of(story.group)) == before


@pytest.mark.parametrize("end", range(8))
def test_nothing_beyond_the_readable_end_is_chosen(end):
    levels = [0, 9, 0, 5, 9, 0, 9]
    story = story_of(*levels)
    expected = sorted(range(end), key=lambda offset: (-levels[offset], offset))
    found = choose(story.group, 99, end)
    assert list(found.offsets) == expected
    assert found.cursor <= max(end, 0)


def test_urgent_messages_beyond_the_readable_end_do_not_hide_the_others():
    story = story_of(0, 0)
    story.publish(9, 9, readable=False)
    assert chosen(story, 4) == [0, 1]
    story.readable = 4
    assert chosen(story, 4) == [2, 3, 0, 1]


def test_the_aged_and_fair_choices_respect_the_readable_end_too():
    story = story_of(0, 5)
    story.publish(5, 0, readable=False)
    assert chosen(story, 9, aged_below=99) == [0, 1]
    assert sorted(chosen(story, 9, turns=PriorityTurns(WEIGHTS))) == [0, 1]


def test_a_returned_message_comes_before_those_behind_it():
    story = Story(4)
    first, _second = story.receive(2)
    story.when(Nack(first, 0))
    assert chosen(story, 9) == [0, 2, 3]


def test_a_returned_message_keeps_its_priority():
    story = story_of(0, 5, 5, 9)
    for receipt in story.receive(3):
        story.when(Nack(receipt, 0))
    assert chosen(story, 9) == [3, 1, 2, 0]


def test_the_cursor_passes_over_what_is_not_ready_there():
    story = Story(6)
    story.when(Cancel(1))
    story.when(Cancel(2))
    found = choose(story.group, 2, 6)
    assert (list(found.offsets), found.cursor) == ([0, 3], 4)
    story.when(Receive(found.offsets, found.cursor, 50, "ann"))
    assert chosen(story, 9) == [4, 5]
    story.hold()


def test_held_messages_are_passed_over_after_a_seek_back():
    story = Story(5)
    receipts = story.receive(4)
    story.when(Reject(receipts[1]))
    story.when(Nack(receipts[3], 0))
    story.when(Seek(0))
    assert story.phases() == "lxlrr"
    assert chosen(story, 9) == [3, 4]
    story.hold()


def test_priorities_that_are_known_late_still_count():
    """At replay the journal comes first, and the priorities follow from the log."""
    story = story_of(0, 5, 9, 0)
    story.when(Nack(story.receive(1)[0], 0))
    story.when(Nack(story.receive(1)[0], 30))
    story.receive(1)
    story.reopen()
    story.when(Tick(), after_ms=30)
    assert chosen(story, 9) == [2, 0, 3]


def test_what_was_published_long_ago_counts_as_most_urgent():
    story = story_of(0, 0, 1, 9, 0, 9)
    assert chosen(story, 9, aged_below=2) == [0, 1, 3, 5, 2, 4]
    assert chosen(story, 9, aged_below=3) == [0, 1, 2, 3, 5, 4]
    assert chosen(story, 1, aged_below=1) == [0]


def test_a_steady_stream_of_urgent_messages_starves_nobody_that_is_promoted():
    story = story_of(0, 0)
    served = []
    for turn in range(20):
        story.publish(9, 9)
        aged_below = max(0, len(story.log) - 10)  # promoted when ten newer ones are there
        found = choose(story.group, 1, story.readable, aged_below=aged_below)
        story.when(Receive(found.offsets, found.cursor, 10**6, "ann"))
        served += [(offset, turn) for offset in found.offsets if offset < 2]
    assert [offset for offset, _ in served] == [0, 1]
    assert all(turn <= 6 for _, turn in served)


@pytest.mark.parametrize("levels", [(0, 9), (0, 1, 2), tuple(range(10))])
def test_fair_turns_are_shared_by_weights(levels):
    turns, total = PriorityTurns(WEIGHTS), sum(WEIGHTS[level] for level in levels)
    served = Counter(turns.next(levels) for _ in range(total * 10))
    for level in levels:
        assert abs(served[level] - 10 * WEIGHTS[level]) <= 1


def test_fair_turns_never_let_a_lane_wait_long():
    turns, waited = PriorityTurns(WEIGHTS), Counter[int]()
    for _ in range(2_000):
        served = turns.next(range(10))
        waited.update(range(10))
        waited[served] = 0
        for level in range(10):
            assert waited[level] <= -(-sum(WEIGHTS) // WEIGHTS[level]) + 10


def test_a_lane_that_was_empty_saves_no_turns_up():
    turns = PriorityTurns([1] * 10)
    for _ in range(100):
        turns.next([0])
    served = Counter(turns.next([0, 1]) for _ in range(20))
    assert abs(served[0] - served[1]) <= 2


def test_a_lane_that_was_served_alone_owes_nothing_afterwards():
    turns = PriorityTurns(WEIGHTS)
    for _ in range(100):
        turns.next([9])
    served = Counter(turns.next([0, 9]) for _ in range(330))
    assert served[0] == pytest.approx(10, abs=1)


def test_fair_choice_takes_each_lane_in_order():
    story = story_of(*[0, 9] * 40)
    found = chosen(story, 40, turns=PriorityTurns(WEIGHTS))
    for level in (0, 9):
        lane = [offset for offset in found if story.log[offset] == level]
        assert lane == [offset for offset in range(80) if story.log[offset] == level][: len(lane)]
    assert sum(story.log[offset] == 0 for offset in found) == 2


@given(
    st.lists(st.integers(0, 9), max_size=30),
    st.integers(0, 30),
    st.integers(0, 30),
    st.integers(1, 30),
)
def test_choosing_is_sorting(levels, aged_below, end, count):
    story = story_of(*levels)
    end = min(end, len(levels))
    aged = [offset for offset in range(end) if offset < aged_below]
    others = [offset for offset in range(end) if offset >= aged_below]
    others.sort(key=lambda offset: (-levels[offset], offset))
    found = choose(story.group, count, end, aged_below=aged_below)
    assert list(found.offsets) == [*aged, *others][:count]
