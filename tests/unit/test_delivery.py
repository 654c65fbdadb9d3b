"""Stories of the delivery machine: commands in, events out."""

from __future__ import annotations

import pytest

from holdfast.delivery.choose import choose
from holdfast.delivery.decide import backoff_ms
from holdfast.delivery.events import (
    PROVEN,
    Ack,
    Acked,
    Buried,
    BuriedReady,
    Bury,
    Cancel,
    Cancelled,
    DeadStored,
    Expired,
    Extend,
    Extended,
    Leased,
    Lost,
    Nack,
    Receipt,
    Receive,
    Reject,
    Released,
    Replayed,
    Returned,
    Save,
    Saved,
    Seek,
    Skipped,
    Tick,
)
from holdfast.delivery.group import Lease
from holdfast.delivery.image import image_of
from holdfast.errors import Conflict, LeaseLost
from holdfast.model import Failure
from holdfast.settings import QueueSettings
from tests.unit.stories import PLAIN, Story, offsets_of, plain

SESSION = (1 << 40) + PROVEN


def test_a_message_is_handed_out_once_and_acked():
    story = Story(1)
    story.receive(lease_ms=50, holder="ann")
    assert story.group.leases == {0: Lease(SESSION + 1, 0, 50, 550, 1_000_000, "ann")}
    assert story.receive() == []
    assert story.when(Ack([Receipt(0, SESSION + 1)])) == [Acked((0, 1))]
    assert story.phases() == "d"
    assert story.group.floor == 1


def test_messages_handed_out_together_are_one_event_and_share_a_lease():
    story = Story(5)
    chosen = choose(story.group, 3, 5)
    events = story.when(Receive(chosen.offsets, chosen.cursor, 50, "ann", session=1))
    assert events == [Leased((0, 3), 3, SESSION + 1, 1, 50, 550, 1_000_000, "ann")]
    assert story.when(Ack([Receipt(2, SESSION + 1), Receipt(0, SESSION + 1)])) == [Acked((0, 1, 2, 3))]
    assert story.phases() == "dldrr"
    assert story.group.floor == 1
    story.hold()


def test_to_receive_nothing_is_no_event():
    story = Story()
    assert story.when(Receive([], 0, 50, "ann")) == []


def test_an_ack_out_of_order_waits_above_the_floor():
    story = Story(4)
    first, second, third = story.receive(3)
    story.when(Ack([third]))
    story.when(Ack([second]))
    assert (story.group.floor, list(story.group.done)) == (0, [1, 2])
    story.when(Ack([first]))
    assert (story.group.floor, list(story.group.done)) == (3, [])


def test_an_expired_lease_comes_back_after_the_retry_delay():
    story = Story(1)
    story.receive(lease_ms=50)
    assert story.when(Tick(), after_ms=49) == []
    assert story.when(Tick(), after_ms=1) == [Returned(0, 1_000_150, True, "lease ended", "", 1_000_050)]
    assert story.when(Tick(), after_ms=99) == []
    assert story.when(Tick(), after_ms=1) == [Released((0, 1))]
    assert offsets_of(story.receive()) == [0]


def test_a_worker_that_dies_again_and_again_does_not_loop_for_ever():
    story = Story(1)
    for _ in range(4):
        assert story.receive(lease_ms=50)
        story.when(Tick(), after_ms=50)
        story.when(Tick(), after_ms=1_000)
    story.receive(lease_ms=50)
    assert story.when(Tick(), after_ms=50) == [Buried(0, "MAX_ATTEMPTS", "lease ended", story.wall_ms, 40)]
    assert story.group.burials[0].history.attempts == 5


def test_the_delay_doubles_with_each_attempt_up_to_its_bound():
    story = Story(1, policy=QueueSettings(backoff_ms=100, backoff_max_ms=350, backoff_jitter_percent=0))
    delays = []
    for _ in range(4):
        (returned,) = story.when(Nack(story.receive()[0]))
        assert isinstance(returned, Returned)
        delays.append(returned.due_ms - story.wall_ms)
        story.when(Tick(), after_ms=400)
    assert delays == [100, 200, 350, 350]


def test_a_nack_may_choose_its_own_delay_to_the_millisecond():
    story = Story(1)
    assert story.when(Nack(story.receive()[0], 7, "oh")) == [
        Returned(0, 1_000_007, True, "nacked", "oh", 1_000_000),
    ]
    assert story.when(Tick(), after_ms=6) == []
    assert story.when(Tick(), after_ms=1) == [Released((0, 1))]


def test_a_nack_without_delay_makes_the_message_ready_at_once():
    story = Story(2)
    (receipt,) = story.receive()
    assert [type(event) for event in story.when(Nack(receipt, 0))] == [Returned, Released]
    assert offsets_of(story.receive()) == [0]


def test_a_deferral_is_no_attempt():
    story = Story(1, policy=QueueSettings(max_attempts=1))
    for _ in range(3):
        story.when(Nack(story.receive()[0], why="deferred", counted=False))
    assert story.group.attempts(0) == 0
    assert story.phases() == "r"
    assert story.group.histories[0].failures == ()


def test_a_retry_of_one_message_holds_up_no_other():
    story = Story(3)
    story.when(Nack(story.receive()[0], 10**9))
    story.when(Nack(story.receive()[0], 5))
    story.when(Tick(), after_ms=5)
    assert offsets_of(story.receive(9)) == [1, 2]


def test_a_delay_does_not_move_with_the_monotonic_clock_nor_a_lease_with_the_wall_clock():
    story = Story(2)
    story.when(Nack(story.receive()[0], 100))
    story.receive(lease_ms=100)
    story.wall_ms += 100
    assert story.when(Tick()) == [Released((0, 1))]
    story.wall_ms -= 10_000
    story.mono_ms += 100
    assert [type(event) for event in story.when(Tick())] == [Returned]


def test_a_dead_letter_takes_every_error_along():
    story = Story(1, policy=QueueSettings(max_attempts=3, backoff_jitter_percent=0, backoff_ms=0))
    for name, error in (("ann", "first"), ("bob", "second"), ("cid", "third")):
        (receipt,) = story.receive(holder=name)
        events = story.when(Nack(receipt, error=error), after_ms=10)
    assert events == [Buried(0, "MAX_ATTEMPTS", "third", 1_000_030, 40)]
    burial = story.group.burials[0]
    assert burial.history.failures == (
        Failure(1_000_010, "ann", "nacked", "first"),
        Failure(1_000_020, "bob", "nacked", "second"),
        Failure(1_000_030, "cid", "MAX_ATTEMPTS", "third"),
    )
    assert (burial.history.first_ms, burial.history.last_ms) == (1_000_000, 1_000_020)
    assert (burial.holder, burial.dead_from) == ("cid", 40)


def test_a_rejected_message_holds_the_floor_until_its_dead_letter_is_safe():
    story = Story(3)
    bad, good = story.receive(2)
    assert story.when(Reject(bad, "never")) == [Buried(0, "REJECTED", "never", 1_000_000, 40)]
    story.when(Ack([good]))
    assert (story.phases(), story.group.floor) == ("xdr", 0)
    assert offsets_of(story.receive()) == [2]
    story.happen(DeadStored((0, 1)))
    assert (story.phases(), story.group.floor) == ("ddl", 2)
    assert not story.group.histories
    story.hold()


def test_only_ready_messages_are_buried_without_a_receipt():
    story = Story(5)
    leased, delayed, done = story.receive(3)
    story.when(Nack(delayed, 10))
    story.when(Ack([done]))
    assert story.when(Bury((0, 4), "EXPIRED")) == [BuriedReady((3, 4), "EXPIRED", "", 1_000_000, 40)]
    assert story.group.burials[3].history.attempts == 0
    assert story.when(Ack([leased])) == [Acked((0, 1))]
    story.hold()


def test_a_late_ack_is_told_who_has_the_message_now():
    story = Story(1)
    (late,) = story.receive(holder="ann", lease_ms=50)
    story.when(Tick(), after_ms=50)
    story.when(Tick(), after_ms=100)
    story.receive(holder="bob")
    with pytest.raises(LeaseLost, match=r"bob has had it since .* \(attempt 2\)") as lost:
        story.when(Ack([late]))
    assert (lost.value.holder, lost.value.since_ms) == ("bob", 1_000_150)
    assert story.phases() == "l"


def test_a_late_holder_is_told_why_its_lease_ended():
    story = Story(1)
    (late,) = story.receive(holder="ann", lease_ms=50)
    story.when(Tick(), after_ms=50)
    with pytest.raises(LeaseLost, match="lease ended") as lost:
        story.when(Extend([late], 50))
    assert (lost.value.since_ms, lost.value.holder) == (1_000_050, "")
    story.when(Cancel(0))
    with pytest.raises(LeaseLost, match="it is done"):
        story.when(Nack(late))


def test_a_receipt_that_was_never_given_out_is_refused():
    story = Story(1)
    with pytest.raises(LeaseLost, match="it is ready"):
        story.when(Ack([Receipt(0, SESSION + 1)]))
    with pytest.raises(LeaseLost):
        story.when(Ack([Receipt(99, SESSION + 1)]))


def test_one_stale_receipt_spoils_the_whole_call_and_changes_nothing():
    story = Story(3)
    good, bad = story.receive(2)
    story.when(Ack([bad]))
    before = plain(image_of(story.group))
    for command in (Ack([good, bad]), Extend([good, bad], 99), Ack([good, good])):
        with pytest.raises(LeaseLost):
            story.when(command)
    assert plain(image_of(story.group)) == before


def test_an_extended_lease_outlives_its_first_deadline():
    story = Story(2)
    receipts = story.receive(2, lease_ms=50)
    assert story.when(Extend(receipts, 80), after_ms=30) == [Extended((0, 2), 80, 610)]
    assert story.when(Tick(), after_ms=20) == []
    assert story.when(Tick(), after_ms=59) == []
    assert [event.offset for event in story.when(Tick(), after_ms=1) if isinstance(event, Returned)] == [0, 1]


def test_a_lease_may_be_made_shorter():
    story = Story(1)
    receipts = story.receive(lease_ms=1_000)
    story.when(Extend(receipts, 10))
    assert [type(event) for event in story.when(Tick(), after_ms=10)] == [Returned]
    story.when(Tick(), after_ms=100)
    story.receive(lease_ms=5_000)
    assert story.when(Tick(), after_ms=1_000) == [], "the first deadline is no longer anybody's"


def test_a_document_waits_for_the_next_holder_and_goes_with_the_ack():
    story = Story(1)
    (receipt,) = story.receive()
    assert story.when(Save(receipt, 0, b"half")) == [Saved(0, 1, b"half")]
    story.when(Nack(receipt, 0))
    (receipt,) = story.receive()
    assert story.group.documents[0].content == b"half"
    story.when(Save(receipt, 1, b"more"))
    story.hold()
    story.when(Ack([receipt]))
    assert story.group.documents == {}


def test_a_document_is_saved_only_over_the_version_that_was_loaded():
    story = Story(1)
    (receipt,) = story.receive()
    story.when(Save(receipt, 0, b"one"))
    with pytest.raises(Conflict, match="has version 1, not 0") as conflict:
        story.when(Save(receipt, 0, b"two"))
    assert conflict.value.version == 1
    assert story.when(Save(receipt, 1, None)) == [Saved(0, 2, None)]
    assert story.group.documents == {}


def test_saving_leaves_the_deadline_where_it_was():
    story = Story(1)
    (receipt,) = story.receive(lease_ms=50)
    story.when(Save(receipt, 0, b"one"), after_ms=20)
    assert story.when(Tick(), after_ms=29) == []
    assert story.when(Tick(), after_ms=1) != []


def test_a_message_is_cancelled_only_while_nobody_works_on_it():
    story = Story(3)
    _held, delayed = story.receive(2)
    story.when(Nack(delayed, 100))
    assert story.when(Cancel(0)) == []
    assert story.when(Cancel(1)) == [Cancelled((1, 2))]
    assert story.when(Cancel(2)) == [Cancelled((2, 3))]
    assert story.when(Cancel(2)) == []
    assert story.when(Tick(), after_ms=100) != []
    assert story.phases() == "wdd"
    story.hold()


def test_a_seek_back_brings_everything_again_but_what_is_held():
    story = Story(6)
    done, leased, dead, delayed = story.receive(4)
    story.when(Ack([done]))
    story.when(Reject(dead))
    story.when(Nack(delayed, 1_000, "oh"))
    assert story.when(Seek(0)) == [Skipped(0), Replayed(0)]
    assert story.phases() == "rlxrrr"
    assert story.group.attempts(3) == 0
    assert offsets_of(story.receive(9)) == [0, 3, 4, 5]
    story.when(Ack([leased]))
    story.happen(DeadStored((2, 3)))
    assert story.phases() == "lddlll"
    story.hold()


def test_a_delay_that_a_seek_ended_does_not_end_a_later_one():
    story = Story(1)
    story.when(Nack(story.receive()[0], 100))
    story.when(Seek(0))
    story.when(Nack(story.receive()[0], 500))
    assert story.when(Tick(), after_ms=100) == []
    assert story.when(Tick(), after_ms=399) == []
    assert story.when(Tick(), after_ms=1) == [Released((0, 1))]


def test_a_seek_forward_passes_over_all_but_what_is_held():
    story = Story(6)
    _leased, dead, delayed = story.receive(3)
    story.when(Reject(dead))
    story.when(Nack(delayed, 1_000))
    story.when(Seek(5))
    assert (story.phases(), story.group.floor, story.group.cursor) == ("lxdddr", 0, 5)
    assert story.when(Tick(), after_ms=1_000) != []
    assert offsets_of(story.receive(9)) == [5]
    story.hold()


def test_a_seek_to_the_end_leaves_nothing_and_a_seek_to_the_start_brings_it_back():
    story = Story(4)
    story.when(Seek(4))
    assert (story.group.floor, story.receive()) == (4, [])
    story.when(Seek(0))
    assert offsets_of(story.receive(9)) == [0, 1, 2, 3]


def test_a_seek_back_finds_the_priorities_again():
    story = Story()
    story.publish(0, 9, 5, 9)
    story.when(Ack(story.receive(4)))
    story.when(Seek(1))
    assert offsets_of(story.receive(9)) == [1, 3, 2]
    story.hold()


def test_a_held_message_keeps_its_priority_through_a_seek():
    story = Story()
    story.publish(0, 5, 0, 0)
    (urgent,) = story.receive()
    story.when(Seek(2))
    story.when(Nack(urgent, 0))
    story.publish(1)
    story.hold()
    assert offsets_of(story.receive(9)) == [1, 4, 2, 3]


def test_expired_and_lost_messages_are_passed():
    story = Story(6)
    story.happen(Expired((0, 2, 3, 4)))
    story.happen(Lost((2, 3)))
    assert (story.group.floor, story.phases()) == (4, "ddddrr")
    assert offsets_of(story.receive(9)) == [4, 5]
    story.hold()


def test_a_chosen_message_that_is_not_taken_comes_again():
    story = Story(4)
    chosen = choose(story.group, 4, 4)
    story.when(Receive([1, 3], chosen.cursor, 50, "ann"))
    assert offsets_of(story.receive(9)) == [0, 2]
    story.hold()


@pytest.mark.parametrize("attempts", [1, 2, 10, 1_000, 10**6])
def test_backoff_is_bounded_however_often_a_message_failed(attempts):
    policy = QueueSettings(backoff_ms=10, backoff_factor=100.0, backoff_max_ms=5_000, backoff_jitter_percent=0)
    assert backoff_ms(policy, 3, attempts) == {1: 10, 2: 1_000}.get(attempts, 5_000)


def test_jitter_spreads_and_only_shortens():
    policy = QueueSettings(backoff_ms=1_000, backoff_jitter_percent=20)
    delays = [backoff_ms(policy, offset, 1) for offset in range(1_000)]
    assert min(delays) in range(800, 820)
    assert max(delays) in range(980, 1_001)
    assert abs(sum(delays) / 1_000 - 900) < 10
    assert delays == [backoff_ms(policy, offset, 1) for offset in range(1_000)], "the same at every replay"


def test_without_backoff_retries_come_at_once():
    policy = QueueSettings(backoff_ms=0, backoff_max_ms=0)
    assert backoff_ms(policy, 1, 4) == 0
    assert backoff_ms(PLAIN, 1, 1) == 100
