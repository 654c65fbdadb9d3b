"""Locks and documents as a pure machine: stories in commands and events."""

from __future__ import annotations

import pytest

from holdfast.delivery.decide import Moment
from holdfast.delivery.group import IllegalMove
from holdfast.errors import Conflict, LeaseLost, LockHeld
from holdfast.locking import (
    EXPIRED,
    PROVEN,
    RELEASED,
    Acquire,
    Acquired,
    Begun,
    Command,
    DocumentWritten,
    Ended,
    Event,
    LockTable,
    OpenLocks,
    Proof,
    Release,
    Remove,
    RemovedDocument,
    Renew,
    Renewed,
    ReplaceDocument,
    Tick,
    check,
    decide,
    decode_event,
    encode_event,
    image_of,
    table_of,
)

BOOT = 77
FIRST = (1 << 24) + PROVEN + 1
WALL_MS = 1_700_000_000_000


class Story:
    """A table that is open, and a clock."""

    def __init__(self) -> None:
        self.table = LockTable()
        self.mono_ms = 1_000
        self.when(OpenLocks(BOOT))

    def when(self, command: Command, *, after_ms: int = 0) -> list[Event]:
        """What follows; it has happened by then."""
        self.mono_ms += after_ms
        events = decide(self.table, command, Moment(WALL_MS + self.mono_ms, self.mono_ms))
        for event in events:
            self.table.apply(decode_event(encode_event(event)))
        assert check(self.table) == []
        assert image_of(table_of(image_of(self.table))) == image_of(self.table)
        return events


def test_a_free_lock_is_taken_with_a_fence_and_a_time():
    story = Story()
    assert story.when(Acquire("report", "ann", 500)) == [Acquired("report", "ann", FIRST, 500, 1_500, WALL_MS + 1_000)]


def test_a_lock_that_somebody_holds_is_refused_and_the_error_says_who_has_it():
    story = Story()
    story.when(Acquire("report", "ann", 500))
    with pytest.raises(LockHeld, match="ann") as refused:
        story.when(Acquire("report", "bob", 500), after_ms=100)
    assert (refused.value.holder, refused.value.since_ms) == ("ann", WALL_MS + 1_000)
    assert refused.value.until_ms == WALL_MS + 1_500


def test_a_lease_ends_exactly_when_its_time_is_over():
    story = Story()
    story.when(Acquire("report", "ann", 500))
    assert story.when(Tick(), after_ms=499) == []
    assert story.when(Tick(), after_ms=1) == [Ended("report", EXPIRED, WALL_MS + 1_500)]


def test_a_lease_that_is_over_counts_no_more_though_nobody_has_ticked():
    story = Story()
    story.when(Acquire("report", "ann", 500))
    with pytest.raises(LeaseLost, match="its lease expired"):
        story.when(Renew(Proof("report", FIRST)), after_ms=500)
    taken = story.when(Acquire("report", "bob", 500))
    assert [type(event) for event in taken] == [Ended, Acquired]


def test_every_fence_is_higher_than_all_before_it_whatever_the_lock():
    story = Story()
    fences = []
    for name in ("a", "b", "a", "c"):
        (event,) = story.when(Acquire(name, "ann", 500))
        assert isinstance(event, Acquired)
        fences.append(event.fence)
        story.when(Release(Proof(name, event.fence)))
    assert fences == sorted(set(fences))


def test_a_renewed_lease_has_all_its_time_again_or_as_much_as_was_said():
    story = Story()
    story.when(Acquire("report", "ann", 500))
    assert story.when(Renew(Proof("report", FIRST)), after_ms=100) == [Renewed("report", 500, 1_600)]
    assert story.when(Renew(Proof("report", FIRST), 50), after_ms=100) == [Renewed("report", 50, 1_250)]
    assert story.when(Tick(), after_ms=50) == [Ended("report", EXPIRED, WALL_MS + 1_250)]


def test_a_late_holder_is_told_who_has_the_lock_now():
    story = Story()
    story.when(Acquire("report", "ann", 500))
    story.when(Tick(), after_ms=500)
    story.when(Acquire("report", "bob", 500))
    for command in (Renew(Proof("report", FIRST)), Release(Proof("report", FIRST))):
        with pytest.raises(LeaseLost, match=f"bob has had it since .* higher fence {FIRST + 1}") as lost:
            story.when(command)
        assert lost.value.holder == "bob"


def test_a_late_holder_is_told_how_its_lease_ended_where_nobody_has_the_lock():
    story = Story()
    story.when(Acquire("report", "ann", 500))
    assert story.when(Release(Proof("report", FIRST))) == [Ended("report", RELEASED, WALL_MS + 1_000)]
    with pytest.raises(LeaseLost, match="it was released at 2023"):
        story.when(Release(Proof("report", FIRST)))
    with pytest.raises(LeaseLost, match="is not yours"):
        story.when(Release(Proof("report", 5)))


def test_a_lock_only_if_it_does_not_exist_is_refused_where_it_is_held_or_has_a_document():
    story = Story()
    story.when(Acquire("report", "ann", 500, if_not_exists=True))
    with pytest.raises(Conflict, match="somebody holds"):
        story.when(Acquire("report", "bob", 500, if_not_exists=True))
    story.when(ReplaceDocument("plan", b"1"))
    with pytest.raises(Conflict, match="version 1"):
        story.when(Acquire("plan", "bob", 500, if_not_exists=True))
    story.when(Release(Proof("report", FIRST)))
    assert len(story.when(Acquire("report", "bob", 500, if_not_exists=True))) == 1


def test_a_document_is_replaced_only_by_somebody_who_knows_its_version():
    story = Story()
    assert story.when(ReplaceDocument("plan", b"1", expected=0)) == [DocumentWritten("plan", 1, b"1", WALL_MS + 1_000)]
    with pytest.raises(Conflict, match="has version 1, but version 0 was expected") as conflict:
        story.when(ReplaceDocument("plan", b"2", expected=0))
    assert conflict.value.version == 1
    story.when(ReplaceDocument("plan", b"2", expected=1))
    with pytest.raises(Conflict):
        story.when(Remove("plan", expected=1))
    assert story.when(Remove("plan", expected=2)) == [RemovedDocument("plan")]
    with pytest.raises(Conflict, match="does not exist"):
        story.when(ReplaceDocument("plan", b"3", expected=2))


def test_a_version_never_comes_again_though_the_document_was_removed_and_made_anew():
    story = Story()
    story.when(ReplaceDocument("plan", b"1"))
    story.when(Remove("plan"))
    story.when(ReplaceDocument("plan", b"2"))
    with pytest.raises(Conflict, match="has version 2"):
        story.when(ReplaceDocument("plan", b"3", expected=1))


def test_a_write_that_demands_a_lock_is_refused_when_that_is_lost():
    story = Story()
    story.when(Acquire("report", "ann", 500))
    proof = Proof("report", FIRST)
    story.when(ReplaceDocument("plan", b"1", proof=proof))
    with pytest.raises(LeaseLost):
        story.when(ReplaceDocument("plan", b"2", proof=proof), after_ms=500)
    with pytest.raises(LeaseLost):
        story.when(Remove("plan", proof=proof))
    assert story.table.documents["plan"].content == b"1"


def test_removing_what_is_not_there_changes_nothing():
    story = Story()
    assert story.when(Remove("plan")) == story.when(Remove("plan", expected=0)) == []


def test_leases_go_on_after_a_restart_of_the_same_boot():
    story = Story()
    story.when(Acquire("report", "ann", 500))
    assert story.when(OpenLocks(BOOT), after_ms=200) == [Begun(2, BOOT, 1_200)]
    assert story.when(Tick(), after_ms=299) == []
    assert len(story.when(Tick(), after_ms=1)) == 1


@pytest.mark.parametrize("boot_id", [0, BOOT + 1])
def test_after_a_new_boot_every_holder_has_all_its_time_once_more(boot_id):
    story = Story()
    story.when(Acquire("report", "ann", 500))
    story.mono_ms = 3  # the clock began anew
    story.when(OpenLocks(boot_id))
    assert story.when(Tick(), after_ms=499) == []
    assert len(story.when(Tick(), after_ms=1)) == 1


def test_fences_and_versions_rise_above_all_that_lost_events_can_have_given():
    story = Story()
    story.when(ReplaceDocument("plan", b"1"))
    story.when(OpenLocks(BOOT, lost_events=10))
    assert story.table.session == 12
    (taken,) = story.when(Acquire("report", "ann", 500))
    assert isinstance(taken, Acquired)
    assert taken.fence > 11 << 24
    (written,) = story.when(ReplaceDocument("plan", b"2"))
    assert isinstance(written, DocumentWritten)
    assert written.version == 12


def test_a_session_with_very_many_fences_is_followed_by_a_higher_one():
    story = Story()
    story.table.fence = 5 << 24
    (begun,) = story.when(OpenLocks(BOOT))
    assert isinstance(begun, Begun)
    assert begun.session == 6


def test_how_leases_ended_is_remembered_for_the_last_thousand_locks():
    table = LockTable()
    for number in range(1, 1_101):
        table.apply(Acquired(f"lock-{number}", "ann", number, 500, 500, 0))
        table.apply(Ended(f"lock-{number}", RELEASED, number))
    assert len(table.endings) == 1_000
    assert next(iter(table.endings)) == "lock-101"


@pytest.mark.parametrize(
    "event",
    [
        Begun(1, BOOT, 0),
        Acquired("report", "bob", FIRST + 1, 500, 2_000, 0),
        Acquired("other", "bob", FIRST, 500, 2_000, 0),
        Renewed("nobody", 500, 2_000),
        Ended("nobody", RELEASED, 0),
        DocumentWritten("plan", 1, b"2", 0),
        RemovedDocument("nothing"),
    ],
)
def test_an_event_that_does_not_fit_is_refused_and_changes_nothing(event):
    story = Story()
    story.when(Acquire("report", "ann", 500))
    story.when(ReplaceDocument("plan", b"1"))
    before = image_of(story.table)
    with pytest.raises(IllegalMove):
        story.table.apply(event)
    assert image_of(story.table) == before
    assert check(story.table) == []
