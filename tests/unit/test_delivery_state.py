"""The state of a group: the table of moves, the bytes of events, images, memory, and what `check` finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.delivery.events import (
    MOVES,
    Ack,
    Acked,
    Buried,
    BuriedReady,
    Cancelled,
    DeadStored,
    Event,
    Expired,
    Extended,
    Leased,
    Lost,
    Nack,
    Noted,
    Opened,
    Phase,
    Reject,
    Released,
    Replayed,
    Returned,
    Save,
    Saved,
    Skipped,
    decode_event,
    encode_event,
    next_fence,
)
from holdfast.delivery.group import Burial, Group, History, HolderState, IllegalMove, Lease
from holdfast.delivery.image import check, decode_image, encode_image, group_of, image_of
from tests.unit.stories import Story, offsets_of, plain

# One of each, about the message 1; with the bytes that stand for it in journals for ever.
EVENTS: list[tuple[Event, str]] = [
    (Leased((1, 2), 2, 9, 3, 50, 550, 77, "ann"), "9a0192010202090332cd02264da3616e6eff"),
    (Acked((1, 2)), "9202920102"),
    (Returned(1, 99, True, "nacked", "oh", 77), "97030163c3a66e61636b6564a26f684d"),
    (Released((1, 2)), "9204920102"),
    (Extended((1, 2), 60, 600), "94059201023ccd0258"),
    (Saved(1, 1, b"x"), "94060101c40178"),
    (Buried(1, "REJECTED", "no", 77, 40), "960701a852454a4543544544a26e6f4d28"),
    (DeadStored((1, 2)), "9208920102"),
    (Expired((1, 2)), "9209920102"),
    (Cancelled((1, 2)), "920a920102"),
    (Lost((1, 2)), "920b920102"),
    (Skipped(2), "920c02"),
    (Replayed(1), "920d01"),
    (Opened(2, 8, 3, 6), "950e02080306"),
    (BuriedReady((1, 2), "EXPIRED", "", 77, 40), "960f920102a745585049524544a04d28"),
]
# Notes are not applied themselves: the events that they stand for are.
NOTED = (Noted(7, 1, 77, "ann", 3, 50, 500, 8, b"\1\2"), "9a1007014da3616e6e0332cd01f408c4020102")
OF_ONE_MESSAGE = [event for event, _ in EVENTS if not isinstance(event, Skipped | Replayed | Opened)]


def story_with(phase: Phase) -> Story:
    """Message 1 in that phase, between two others that are ready and leased."""
    story = Story(3)
    _first, second = story.receive(2)
    story.when(Nack(_first, 0))
    if phase is Phase.READY:
        story.when(Nack(second, 0))
    elif phase is Phase.DELAYED:
        story.when(Nack(second, 500))
    elif phase is Phase.DONE:
        story.when(Ack([second]))
    elif phase is Phase.DEAD:
        story.when(Reject(second))
    assert story.group.phase(1) is phase
    return story


@pytest.mark.parametrize(("event", "stored"), [*EVENTS, NOTED], ids=lambda part: type(part).__name__)
def test_an_event_has_the_same_bytes_for_ever(event, stored):
    assert encode_event(event).hex() == stored
    assert decode_event(bytes.fromhex(stored)) == event


@pytest.mark.parametrize("event", OF_ONE_MESSAGE, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("phase", Phase)
def test_every_move_is_in_the_table_and_every_other_is_refused(phase, event):
    story = story_with(phase)
    target = MOVES.get((phase, type(event)))
    if target is not None:
        story.happen(event)
        assert story.group.phase(1) is target
        story.hold()
        return
    before = plain(image_of(story.group))
    with pytest.raises(IllegalMove, match=phase.value):
        story.group.apply(event)
    assert plain(image_of(story.group)) == before


@pytest.mark.parametrize("phase", Phase)
def test_a_seek_moves_by_the_table(phase):
    for event, touched in ((Skipped(2), (Phase.READY, Phase.DELAYED)), (Replayed(1), (Phase.DONE, Phase.DELAYED))):
        story = story_with(phase)
        story.happen(event)
        assert story.group.phase(1) is (MOVES[phase, type(event)] if phase in touched else phase)
        assert check(story.group) == []


@pytest.mark.parametrize(
    "event",
    [
        Leased((2, 3, 4, 5), 5, 2**41, 0, 50, 50, 0, "ann"),
        Leased((2, 5), 5, 2**41, 0, 50, 50, 0, "ann"),
        Acked((0, 1, 2, 3)),
        Acked((0, 3)),
        Extended((0, 1, 2, 3), 50, 9_999),
        Cancelled((2, 3, 4, 5)),
        Expired((2, 3, 1, 2)),
        Lost((2, 2_000)),
    ],
)
def test_an_event_that_fits_in_part_changes_nothing(event):
    story = Story(5)
    story.receive(2)
    story.happen(Expired((4, 5)))
    before = plain(image_of(story.group))
    with pytest.raises(IllegalMove):
        story.group.apply(event)
    assert plain(image_of(story.group)) == before
    assert check(story.group) == []


def test_the_fused_forms_agree_with_the_plain_ones():
    fused, plainly = Story(3).group, Story(3).group
    lease = Lease(next_fence(fused.fence), 1, 50, 550, 7, "ann")
    fused.lease_one(0, 1, lease)
    plainly.apply(Leased((0, 1), 1, lease.fence, 1, 50, 550, 7, "ann"))
    assert plain(image_of(fused)) == plain(image_of(plainly))
    assert list(fused.deadlines.entries()) == list(plainly.deadlines.entries())
    fused.ack_one(0)
    plainly.apply(Acked((0, 1)))
    assert plain(image_of(fused)) == plain(image_of(plainly))
    assert fused.floor == 1


def test_a_million_expired_in_a_row_are_one_step():
    group = Group()
    group.apply(Expired((0, 1_000_000)))
    assert (group.floor, group.cursor, len(group.done)) == (1_000_000, 1_000_000, 0)
    group.apply(Expired((1_000_001, 2_000_000)))
    assert len(image_of(group).done) < 10_000


def test_an_image_is_the_whole_state():
    story = Story()
    story.publish(0, 9, 5, 0, 0, 0, 0)
    receipts = story.receive(5)
    story.when(Ack(receipts[:1]))
    story.when(Nack(receipts[1], 100, "oh"))
    story.when(Reject(receipts[2], "never"))
    story.when(Save(receipts[3], 0, b"half"))
    story.happen(Cancelled((6, 7)))
    group = group_of(decode_image(encode_image(image_of(story.group))))
    assert plain(image_of(group)) == plain(image_of(story.group))
    assert list(group.ahead) == [6]
    assert check(group) == []
    assert group.deadlines.next_ms() == story.group.deadlines.next_ms() == 550
    assert list(group.timers.due(1_000_100)) == list(story.group.timers.due(1_000_100)) != []
    story.snapshot()
    story.when(Nack(receipts[3], 0))
    story.publish(9)
    story.hold()
    story.reopen()
    assert story.phases() == "xdwrlrdr"
    assert offsets_of(story.receive(9)) == [7, 3, 5]


def test_the_deadlines_of_settled_leases_do_not_gather():
    fused, plainly = Group(), Group()
    for offset in range(20_000):
        lease = Lease(offset + 1, 0, 50, 10**9, 0, "ann")
        fused.lease_one(offset, offset + 1, lease)
        fused.ack_one(offset)
        plainly.apply(Leased((offset, offset + 1), offset + 1, offset + 1, 0, 50, 10**9, 0, "ann"))
        plainly.apply(Acked((offset, offset + 1)))
    assert len(fused.deadlines) < 3_000
    assert len(plainly.deadlines) < 3_000


LEASE = Lease(1, 0, 50, 550, 0, "ann")

SPOILED: dict[str, tuple[Callable[[Group], Any], str]] = {
    "floor": (lambda group: setattr(group, "floor", 9), "above the cursor"),
    "floor is done": (lambda group: group.done.add(0), "should have risen"),
    "below the floor": (lambda group: (group.done.add(0), setattr(group, "floor", 1)), "below the floor"),
    "fence": (lambda group: setattr(group, "fence", 5 << 40), "later session"),
    "two phases": (lambda group: group.burials.update({2: Burial("", 0, 0, "", History())}), "2 is dead and also"),
    "held and done": (lambda group: group.done.add(2), "and also done"),
    "history": (lambda group: group.histories.update({1: History()}), "still has a history"),
    "document": (lambda group: group.documents.update({1: HolderState(1, b"")}), "still has a document"),
    "no deadline": (lambda group: group.deadlines.renew([]), "the lease of 2 has no deadline"),
    "late deadline": (lambda group: group.deadlines.renew([(551, 2, 3)]), "the lease of 2 has no deadline"),
    "no timer": (lambda group: group.waiting.update({3: 1_000_101}), "the delay of 3 has no timer"),
    "leased in a lane": (lambda group: group.lanes.ready[0].add(2), "2 is leased and stands in lane 0"),
    "wrong lane": (lambda group: group.lanes.ready[4].add(0), "0 stands in lane 4, its priority is 0"),
    "in no lane": (lambda group: group.lanes.ready[0].clear(), "no lane has it"),
    "urgent in no lane": (lambda group: group.lanes.ready[9].clear(), "5 is ready and not in its lane 9"),
    "two priorities": (lambda group: group.lanes.levels[3].add(5), "5 has the priorities 9 and 3"),
    "done with a priority": (lambda group: group.lanes.levels[3].add(1), "1 is done and still has a priority"),
    "ahead": (lambda group: group.ahead.clear(), "ahead of the cursor"),
    "too much ahead": (lambda group: group.ahead.add(6), "ahead of the cursor"),
    "empty": (lambda group: setattr(group.lanes, "filled", False), "count as empty"),
    "unused": (lambda group: setattr(group.lanes, "used", False), "count as unused"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_check_finds(name):
    story = Story(4)
    returned, done, _leased, delayed = story.receive(4)
    story.when(Nack(returned, 0))
    story.when(Ack([done]))
    story.when(Nack(delayed, 100))
    story.publish(0, 9, 0)
    assert story.phases() == "rdlwrrr"
    story.hold()
    damage, finding = SPOILED[name]
    damage(story.group)
    assert any(finding in wrong for wrong in check(story.group)), check(story.group)
