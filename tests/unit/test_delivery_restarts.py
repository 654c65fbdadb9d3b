"""Stories of the delivery machine across restarts: reboots, lost tails, damaged journals."""

from __future__ import annotations

import pytest

from holdfast.delivery.choose import choose
from holdfast.delivery.events import (
    PROVEN,
    Ack,
    Acked,
    Extend,
    GiveUp,
    Nack,
    Receipt,
    Receive,
    Reject,
    Released,
    Returned,
    Save,
    Tick,
)
from holdfast.delivery.image import check
from holdfast.errors import LeaseLost
from tests.unit.stories import BOOT, Story, offsets_of


def test_a_restart_raises_the_fence_beyond_every_earlier_one():
    story = Story(2)
    story.receive()
    story.reopen()
    assert story.group.session == 2
    assert story.receive() == [Receipt(1, (2 << 40) + PROVEN + 1)]
    story.hold()


def test_who_held_a_lease_may_ack_after_a_restart():
    story = Story(1)
    receipts = story.receive()
    story.reopen()
    assert story.when(Ack(receipts)) == [Acked((0, 1))]


def test_a_restart_without_a_reboot_leaves_deadlines_where_they_were():
    story = Story(1)
    story.receive(lease_ms=50)
    story.mono_ms += 40
    story.reopen()
    assert story.when(Tick(), after_ms=9) == []
    assert story.when(Tick(), after_ms=1) != []


@pytest.mark.parametrize("boot_id", [BOOT + 1, 0])
def test_after_a_reboot_a_lease_gets_all_of_its_time_once_more(boot_id):
    story = Story(2)
    story.receive(lease_ms=50)
    story.when(Extend(story.receive(lease_ms=50), 200))
    story.mono_ms = 3
    story.reopen(boot_id=boot_id)
    assert {offset: lease.until_ms for offset, lease in story.group.leases.items()} == {0: 53, 1: 203}
    assert story.when(Tick(), after_ms=49) == []
    assert [event.offset for event in story.when(Tick(), after_ms=1) if isinstance(event, Returned)] == [0]
    story.hold()


def test_what_holders_of_earlier_sessions_held_comes_back_at_once():
    story = Story(4)
    story.receive(session=1)
    story.receive(session=0)
    story.reopen()
    story.receive(session=2)
    assert story.when(GiveUp()) == [
        Returned(0, 1_000_000, True, "holder gone", "", 1_000_000),
        Released((0, 1)),
    ]
    assert story.phases() == "rllr"
    assert story.group.attempts(0) == 1


def test_a_move_that_did_not_take_place_was_nobodys_attempt():
    story = Story(1)
    story.when(Receive([0], 1, 50, "redrive", session=1, moving_to=12))
    story.reopen()
    assert story.group.leases[0].moving_to == 12
    story.when(GiveUp())
    assert story.group.attempts(0) == 0
    assert story.phases() == "r"


def test_what_was_known_of_a_lost_tail_is_forgotten():
    story = Story(8)
    receipts = story.receive(7)
    story.when(Ack([receipts[0], receipts[4]]))
    story.when(Nack(receipts[5], 10, "oh"))
    story.when(Reject(receipts[6]))
    story.when(Save(receipts[3], 0, b"half"))
    story.reopen(end=3)
    assert (story.phases(), story.group.cursor) == ("dll", 3)
    story.publish(0, 9, 0, 0)
    assert story.phases() == "dllrrrr"
    assert offsets_of(story.receive(9)) == [4, 3, 5, 6]
    with pytest.raises(LeaseLost):
        story.when(Ack([receipts[3]]))
    assert story.when(Tick(), after_ms=10) == []
    story.hold()


def test_a_tail_that_is_lost_below_the_floor_takes_the_floor_along():
    story = Story()
    story.publish(0, 5, 0, 5)
    story.when(Ack(story.receive(4)))
    story.reopen(end=1)
    assert (story.group.floor, story.group.cursor) == (1, 1)
    story.publish(0, 0)
    assert offsets_of(story.receive(9)) == [1, 2]
    story.hold()


def test_a_lease_that_a_damaged_journal_lost_brings_its_messages_again():
    story = Story()
    story.publish(0, 0, 9, 0, 0)
    story.receive(3)
    story.when(Ack(story.receive(1)))
    group = story.replayed_without(1, 2)
    assert check(group) == []
    assert list(choose(group, 9, 5).offsets) == [2, 0, 1, 4]


def test_a_session_that_a_damaged_journal_lost_is_not_begun_again():
    story = Story(2)
    story.reopen()
    story.receive(session=2)
    group = story.replayed_without(1, 2)
    assert group.session == 3
    assert group.fence > story.group.fence
