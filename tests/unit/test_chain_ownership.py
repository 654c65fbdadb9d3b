"""Becoming the owner of a folder in a store, and ceasing to be it: also for processes that were stopped for hours."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest

from holdfast.env import ManualClock, SeededIds, SystemClock
from holdfast.env.chain.chain import ChainTimes, OwnershipLost
from holdfast.env.chain.checkpoints import KEPT_NS, checkpoint_key, checkpoints, clean_up, write_checkpoint
from holdfast.env.chain.disk import INLINE_BYTES
from holdfast.env.chain.engines import MemoryStore, StoreRefused, StoreUnreachable
from holdfast.env.chain.format import BadObject
from holdfast.env.chain.ownership import ChainFollower, OwnedElsewhere, StandbyNote, StoreOwner, standing, take_over
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.env.world import World

PATIENCE_S = 60
HOUR_S = KEPT_NS / 1e9


class Machine:
    """One process with a cache of its own; all share the clock."""

    def __init__(self, store: MemoryStore, clock: ManualClock, number: int) -> None:
        self.store, self.clock = store, clock
        self.local = SimulatedDisk(maps=False)
        self.world = World(clock=clock, disk=self.local, ids=SeededIds(number))

    def own(self, wait_s: float | None = None) -> StoreOwner:
        return take_over(self.store, "", self.world, "data", unrecorded=frozenset(), times=ChainTimes(), wait_s=wait_s)

    def follower(self) -> ChainFollower:
        return ChainFollower(self.store, "", self.world, "data")


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def machines(store, clock):
    return [Machine(store, clock, number) for number in range(3)]


def put(owner, name, content=b"x"):
    file = owner.disk.open(f"data/{name}", write=True, create=True)
    file.write(0, [content])
    file.sync()
    file.close()


def move_on(owner, clock, store):
    """Work for hours, with checkpoints: the chain behind them is cleaned up."""
    for hour in range(3):
        put(owner, f"hour-{hour}")
        write_checkpoint(owner.disk, clock.now_ns())
        clock.advance(seconds=HOUR_S)
        owner.chain.tick()
    assert clean_up(store, "", clock.now_ns(), owner.chain.confirm) > 0


def test_an_owner_that_slept_until_its_chain_was_cleaned_up_counts_nothing(machines, clock, store):
    sleeper = machines[0].own()
    put(sleeper, "before")
    move_on(machines[1].own(), clock, store)
    with pytest.raises(OwnershipLost, match="another process has taken over"):
        put(sleeper, "after")


def test_an_owner_whose_machine_slept_counts_nothing_either(machines, clock, store):
    """The monotonic clock of a sleeping machine stands still."""
    mine = ManualClock()
    sleeper = Machine(store, mine, 7).own()
    put(sleeper, "before")
    move_on(machines[1].own(), clock, store)
    mine.step_wall(seconds=3 * HOUR_S)
    assert not sleeper.chain.is_current()
    with pytest.raises(OwnershipLost, match="another process has taken over"):
        put(sleeper, "after")


def test_an_owner_that_was_silent_and_is_still_the_owner_goes_on(machines, clock, store):
    owner = machines[0].own()
    put(owner, "before")
    write_checkpoint(owner.disk, clock.now_ns())
    clock.advance(seconds=HOUR_S)
    put(owner, "after")
    assert owner.chain.is_current()


def test_one_that_is_stopped_while_it_cleans_up_leaves_what_its_successor_has_found(
    machines, clock, store, monkeypatch
):
    """A content that no checkpoint lists, and that comes back: it need not be stored, because it is still there."""
    first, content, taken, remove = machines[0].own(), b"spool" * INLINE_BYTES, [], store.remove
    put(first, "spool", content)
    write_checkpoint(first.disk, clock.now_ns())
    first.disk.remove("data/spool")
    for _ in range(2):
        clock.advance(seconds=HOUR_S)
        put(first, "small")
        write_checkpoint(first.disk, clock.now_ns())

    def stopped(key):
        monkeypatch.setattr(store, "remove", remove)
        remove(key)
        taken.append(machines[1].own())
        put(taken[0], "again", content)
        write_checkpoint(taken[0].disk, clock.now_ns())

    monkeypatch.setattr(store, "remove", stopped)
    with pytest.raises(OwnershipLost):
        first.checkpoint()
    assert taken
    machines[2].follower().begin()
    assert machines[2].local.contents("data/again") == content


def test_a_standby_that_slept_until_its_chain_was_cleaned_up_does_not_fence_in_the_gap(machines, clock, store):
    owner = machines[0].own()
    put(owner, "before")
    standby = machines[1]
    seen = []

    def sleep_once(event, timeout_s, wait=clock.wait):
        if not seen:
            seen.append(True)
            move_on(owner, clock, store)
        else:
            owner.chain.confirm()  # it is alive
        return wait(event, timeout_s)

    standby.world.clock.wait = sleep_once
    with pytest.raises(OwnedElsewhere):
        standby.own(wait_s=30)
    owner.chain.confirm()
    assert standby.local.exists("data/hour-2")


def test_a_newer_checkpoint_and_no_chain_is_not_an_empty_folder(machines, clock, store):
    owner = machines[0].own()
    put(owner, "kept")
    move_on(owner, clock, store)
    owner.close()
    for number in checkpoints(store, ""):
        content = store.read(checkpoint_key("", number))
        store.remove(checkpoint_key("", number))
        store.create(checkpoint_key("", number), content[:4] + b"\x63" + content[5:])
    with pytest.raises(BadObject, match="cannot be read"):
        machines[1].own()


def test_a_chain_without_its_beginning_is_not_an_empty_folder(machines, store):
    """As a rule of the bucket that removes old objects leaves it."""
    owner = machines[0].own()
    put(owner, "kept")
    owner.close()
    store.remove(next(store.keys("chain/")))
    with pytest.raises(BadObject, match="have been removed"):
        machines[1].own()


def test_a_checkpoint_that_is_cleaned_up_while_it_is_fetched_is_followed_by_the_next(machines, clock, store):
    owner = machines[0].own()
    put(owner, "a", b"a" * 200_000)
    write_checkpoint(owner.disk, clock.now_ns())
    follower = machines[1].follower()
    read, seen = store.read, []

    def slow_read(key):
        if key.startswith("content/") and not seen:
            seen.append(key)
            put(owner, "a", b"b" * 200_000)
            move_on(owner, clock, store)
        return read(key)

    store.read = slow_read
    follower.begin()
    follower.catch_up()
    assert seen
    assert machines[1].local.exists("data/hour-2")


def test_a_fence_of_ours_that_came_late_does_not_keep_us_waiting(machines, clock, store):
    machines[0].own().close()
    create, late = store.create, []

    def slow_create(key, content):
        if not late and key.startswith("chain/"):
            late.append(key)
            clock.advance(seconds=11)
        return create(key, content)

    store.create = slow_create
    began_ns = clock.monotonic_ns()
    machines[1].own()
    assert late
    assert clock.monotonic_ns() - began_ns < 15e9


def test_an_object_that_exists_and_cannot_be_read_is_not_asked_for_for_ever(machines, store):
    owner = machines[0].own()
    store.create = lambda key, content: False
    with pytest.raises(OwnershipLost, match="did not respond"):
        put(owner, "file")


def test_an_owner_with_a_longer_lease_than_ours_is_given_that(machines, clock, store):
    """It believes for that long that it is the owner, whatever we have set."""
    owner = machines[0].own()
    machine = machines[1]
    began_ns = clock.monotonic_ns()
    times = ChainTimes(lease_s=1, slowest_s=10)
    take_over(store, "", machine.world, "data", unrecorded=frozenset(), times=times)
    assert clock.monotonic_ns() - began_ns >= owner.chain.times.lease_s * 1e9
    assert not owner.chain.is_current()


def test_a_checkpoint_that_fails_is_not_tried_again_at_once(machines, clock, store):
    owner = machines[0].own()
    put(owner, "file", b"x" * 200_000)
    create, tried = store.create, []

    def failing(key, content):
        if key.startswith("content/"):
            tried.append(key)
            raise StoreRefused("too large")
        return create(key, content)

    store.create = failing
    for _ in range(3_600 * 5):
        clock.advance(seconds=0.2)
        with suppress(StoreRefused):
            owner.checkpoint_if_due()
    assert 2 <= len(tried) <= 20


def test_an_owner_that_is_closed_during_a_checkpoint_is_the_owner_until_the_end(store):
    """What nobody waits for is sent meanwhile, and the others see that it lives."""
    disk = SimulatedDisk(maps=False)
    world = World(clock=SystemClock(), disk=disk, ids=SeededIds(1))
    owner = take_over(store, "", world, "data", unrecorded=frozenset(), times=ChainTimes(send_s=0.01))
    for i in range(20):
        put(owner, f"file-{i}", bytes([i]) * 200_000)
    create, begun, may_go_on = store.create, threading.Event(), threading.Event()
    uploaded = []

    def slow(key, content):
        if key.startswith("content/"):
            uploaded.append(key)
            begun.set()
            may_go_on.wait(PATIENCE_S)
        return create(key, content)

    store.create = slow
    owner._checkpoint_at = -10_000  # it is due
    owner.keep()
    assert begun.wait(PATIENCE_S)
    closing = threading.Thread(target=owner.close)
    closing.start()
    assert owner._closing.wait(PATIENCE_S)
    owner.disk.make_folder("data/late")
    until = time.monotonic() + PATIENCE_S
    while owner.chain.batch.count and time.monotonic() < until:
        time.sleep(0.01)
    assert not owner.chain.batch.count
    may_go_on.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert len(uploaded) < 20  # the rest of the checkpoint is left out


def test_the_owner_s_thread_survives_what_nobody_expects(store, caplog):
    world = World(clock=SystemClock(), disk=SimulatedDisk(maps=False), ids=SeededIds(1))
    owner = take_over(store, "", world, "data", unrecorded=frozenset(), times=ChainTimes(send_s=0.01))
    tick, calls, twice = owner.chain.tick, [], threading.Event()

    def failing():
        calls.append(True)
        if len(calls) == 1:
            raise RuntimeError("can't start new thread")
        twice.set()
        tick()

    owner.chain.tick = failing
    owner.keep()
    assert twice.wait(PATIENCE_S)
    owner.close()


def standing_by(machines, clock, during):
    """Wait as a standby until its patience is over; `during` is called in every pause."""

    def pause(event, timeout_s, wait=clock.wait):
        during()
        return wait(event, timeout_s)

    machines[1].world.clock.wait = pause
    with pytest.raises(OwnedElsewhere):
        machines[1].own(wait_s=30)


def test_a_standby_tells_how_far_it_is_and_leaves_nothing_behind(machines, clock, store):
    owner = machines[0].own()
    seen = []

    def during():
        put(owner, "file", str(clock.now_ns()).encode())
        seen.extend(owner.standbys.read())
        assert len(list(store.keys("standby/"))) <= 2

    standing_by(machines, clock, during)
    assert max(each.number for each in seen) > owner.chain.committed - 40
    assert 0 < max(each.lag_seconds for each in seen) <= ChainTimes().lease_s / 2 + 1
    assert all(each.lag_objects > 0 for each in seen)
    assert not list(store.keys("standby/"))


def test_anybody_can_see_the_owner_and_the_standbys_in_the_store(machines, clock, store):
    assert standing(store, "", clock.now_ns()).epoch == 0
    owner = machines[0].own()
    found = []
    standing_by(machines, clock, lambda: (owner.chain.confirm(), found.append(standing(store, "", clock.now_ns()))))
    last = found[-1]
    assert (last.epoch, last.objects, len(last.standbys)) == (1, owner.chain.committed, 1)
    assert last.owner.startswith("process ")
    write_checkpoint(owner.disk, clock.now_ns())
    owner.chain.close()
    assert standing(store, "", clock.now_ns()).owner == ""


def test_a_standby_that_was_killed_is_soon_forgotten_and_its_notes_are_cleaned_up(machines, clock, store):
    owner = machines[0].own()
    note = StandbyNote(store, "", clock, b"k" * 16, b"{}", 5)
    note.tell(owner.chain.committed)
    put(owner, "file")
    assert len(owner.standbys.read()) == 1
    clock.advance(seconds=61)
    owner.chain.confirm()
    assert owner.standbys.read() == []
    move_on(owner, clock, store)
    assert not list(store.keys("standby/"))


def test_the_owner_shows_the_last_standbys_known_while_the_store_does_not_answer(machines, clock, store):
    owner = machines[0].own()
    StandbyNote(store, "", clock, b"k" * 16, b"{}", 5).tell(owner.chain.committed)
    before = owner.standbys.read()
    assert len(before) == 1
    clock.advance(seconds=5)

    def silent(prefix, after=""):
        raise StoreUnreachable("gone")

    store.keys = silent
    assert owner.standbys.read() == before
