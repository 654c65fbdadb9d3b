"""Locks and state documents of a data folder, for threads and for tasks."""

from __future__ import annotations

import asyncio
import errno
import gc
import queue
import threading
from datetime import timedelta
from functools import wraps

import pytest

import holdfast
from holdfast import Closed, Conflict, CorruptData, HoldfastError, InvalidRequest, LeaseLost, LockHeld, MessageTooLarge
from holdfast.broker import locks as engine_locks
from holdfast.errors import TooManyWaiters
from holdfast.locking import Acquire, check
from tests.unit.brokers import FOLDER, Place

LOCKS = f"{FOLDER}/locks"


@pytest.fixture(params=["threads", "tasks"])
def place(request):
    place = Place(tasks=request.param == "tasks")
    yield place
    place.close()


@pytest.fixture
def alone():
    place = Place()
    yield place
    place.close()


def in_a_loop(test):
    """A test that is a task."""

    @wraps(test)
    def run(*args, **options):
        asyncio.run(test(*args, **options))

    return run


def test_a_lock_says_who_holds_it_and_until_when(place):
    lock = place.broker.locks.acquire("report", owner="ann", lease=20)
    assert (lock.name, lock.owner, lock.lease) == ("report", "ann", 20)
    assert lock.expires_at - lock.acquired_at == timedelta(seconds=20)
    info = place.broker.locks.describe("report")
    assert (info.held, info.owner, info.fence) == (True, "ann", lock.fence)
    assert (info.acquired_at, info.expires_at, info.waiting) == (lock.acquired_at, lock.expires_at, 0)
    assert info.document_version == 0


def test_a_lock_that_nobody_has_is_described_as_free(place):
    assert place.broker.locks.describe("report") == holdfast.LockInfo(name="report", held=False)


def test_a_lock_is_held_by_one_at_a_time(place):
    lock = place.broker.locks.acquire("report", owner="ann")
    with pytest.raises(LockHeld, match="held by ann"):
        place.broker.locks.acquire("report", owner="bob", wait=0)
    place.broker.locks.release(lock)
    assert place.broker.locks.acquire("report", owner="bob", wait=0).fence > lock.fence


def test_whoever_waits_long_enough_has_the_lock_when_the_lease_ends(place):
    place.broker.locks.acquire("report", owner="ann", lease=20)
    began_ns = place.clock.monotonic_ns()
    lock = place.broker.locks.acquire("report", owner="bob", wait=60)
    assert lock.owner == "bob"
    assert place.clock.monotonic_ns() - began_ns == 20 * 10**9


def test_whoever_has_no_more_patience_is_told_who_holds_the_lock(place):
    place.broker.locks.acquire("report", owner="ann", lease=60)
    with pytest.raises(LockHeld, match="held by ann"):
        place.broker.locks.acquire("report", owner="bob", wait=20)
    assert place.broker.locks.describe("report").waiting == 0


def test_a_lock_that_is_kept_alive_stays(place):
    lock = place.broker.locks.acquire("report", lease=20)
    for _ in range(5):
        place.after(seconds=15)
        lock = place.broker.locks.keepalive(lock)
    assert place.broker.locks.keepalive(lock.lease_id, lease=100).lease == 100
    place.after(seconds=99)
    assert place.broker.locks.describe("report").fence == lock.fence


def test_a_lost_lock_can_neither_be_kept_alive_nor_released(place):
    lock = place.broker.locks.acquire("report", owner="ann", lease=20)
    place.after(seconds=20)
    with pytest.raises(LeaseLost, match="its lease expired"):
        place.broker.locks.keepalive(lock)
    other = place.broker.locks.acquire("report", owner="bob")
    with pytest.raises(LeaseLost, match="bob has had it"):
        place.broker.locks.release(lock)
    assert place.broker.locks.describe("report").fence == other.fence


def test_a_lock_that_must_not_exist_yet(place):
    place.broker.locks.acquire("report", if_not_exists=True)
    with pytest.raises(Conflict, match="report already exists"):
        place.broker.locks.acquire("report", if_not_exists=True)
    place.broker.documents.update("plan", 1)
    with pytest.raises(Conflict, match="a document"):
        place.broker.locks.acquire("plan", if_not_exists=True)


def test_the_locks_that_are_held_are_listed(place):
    for name in ("b", "a", "c"):
        place.broker.locks.acquire(name, lease=10 if name == "c" else 20)
    place.clock.advance(seconds=10)
    assert [info.name for info in place.broker.locks.list()] == ["a", "b"]


@pytest.mark.parametrize("name", ["", "../etc", "a/b", ".hidden", "-x", "a b", "x" * 201, "a\n", None, 7, "ü"])
def test_no_name_that_could_be_a_path_is_taken(place, name):
    for call in (
        lambda: place.broker.locks.acquire(name),
        lambda: place.broker.locks.describe(name),
        lambda: place.broker.documents.get(name),
        lambda: place.broker.documents.update(name, 1),
        lambda: place.broker.documents.remove(name),
    ):
        with pytest.raises(InvalidRequest, match="cannot be used"):
            call()


@pytest.mark.parametrize(
    "options",
    [
        *({"lease": lease} for lease in (0, -1, "1", 31 * 86400)),
        *({"owner": owner} for owner in ("", "x" * 201, "a\nb", 5)),
        {"wait": -1},
        {"if_not_exists": 1},
    ],
)
def test_arguments_that_make_no_sense_are_refused(place, options):
    with pytest.raises(InvalidRequest):
        place.broker.locks.acquire("report", **options)
    assert place.broker.locks.list() == []


@pytest.mark.parametrize("lease_id", ["", "report", "report@", "report@xyz", "../x@1", None, 5, "report@" + "f" * 17])
def test_what_is_no_lease_is_refused_as_a_mistake(place, lease_id):
    with pytest.raises(InvalidRequest, match="is not a lease"):
        place.broker.locks.release(lease_id)


def test_a_document_has_a_value_and_a_version(place):
    assert place.broker.documents.get("plan") is None
    written = place.broker.documents.update("plan", {"step": 1, "of": [1, None, "ü"]})
    found = place.broker.documents.get("plan")
    assert found == written
    assert found.value == {"step": 1, "of": [1, None, "ü"]}
    assert place.broker.documents.update("plan", None).version > written.version
    assert place.broker.documents.get("plan").value is None
    assert place.broker.documents.list() == ["plan"]


def test_a_document_is_replaced_by_compare_and_swap(place):
    first = place.broker.documents.update("plan", 1, version=0)
    second = place.broker.documents.update("plan", 2, version=first.version)
    with pytest.raises(Conflict, match=f"has version {second.version}") as conflict:
        place.broker.documents.update("plan", 3, version=first.version)
    assert conflict.value.version == second.version
    with pytest.raises(Conflict):
        place.broker.documents.remove("plan", version=first.version)
    assert place.broker.documents.get("plan") == second
    assert place.broker.documents.remove("plan", version=second.version)
    assert not place.broker.documents.remove("plan")
    assert place.broker.documents.get("plan") is None


def test_a_document_can_be_guarded_by_a_lock(place):
    lock = place.broker.locks.acquire("report", lease=20)
    place.broker.documents.update("plan", 1, lock=lock)
    place.after(seconds=20)
    for late in (lock, lock.lease_id):
        with pytest.raises(LeaseLost):
            place.broker.documents.update("plan", 2, lock=late)
        with pytest.raises(LeaseLost):
            place.broker.documents.remove("plan", lock=late)
    assert place.broker.documents.get("plan").value == 1


def test_a_document_outlives_the_lock_of_its_name(place):
    lock = place.broker.locks.acquire("report")
    version = place.broker.documents.update("report", 1, lock=lock).version
    place.broker.locks.release(lock)
    assert place.broker.documents.get("report").value == 1
    assert place.broker.locks.describe("report").document_version == version


def test_a_document_that_is_too_large_or_no_json_is_refused(place):
    with pytest.raises(MessageTooLarge, match="1048577 bytes"):
        place.broker.documents.update("plan", "x" * (1024 * 1024 - 1))
    place.broker.documents.update("plan", "x" * (1024 * 1024 - 2))
    for value in (object(), {"x": 1j}, "\ud800", 2**70):
        with pytest.raises(InvalidRequest, match="JSON"):
            place.broker.documents.update("plan", value)
    for version in (-1, "1", True, 1.0, 2**63):
        with pytest.raises(InvalidRequest, match="version="):
            place.broker.documents.update("plan", 1, version=version)


def test_all_documents_together_have_a_limit(place, monkeypatch):
    monkeypatch.setattr(engine_locks, "_MOST_BYTES", 1_000)
    place.broker.documents.update("a", "x" * 500)
    with pytest.raises(InvalidRequest, match="there is room for 1000"):
        place.broker.documents.update("b", "x" * 500)
    place.broker.documents.update("a", "x" * 900)
    place.broker.documents.remove("a")
    place.broker.documents.update("b", "x" * 500)


def test_locks_and_documents_are_there_after_closing_and_after_a_kill(place):
    for reopen in (place.reopen, place.kill):
        lock = place.broker.locks.acquire("report", owner="ann", lease=100, wait=0)
        document = place.broker.documents.update("plan", [1])
        reopen()
        assert place.broker.locks.describe("report").fence == lock.fence
        assert place.broker.documents.get("plan") == document
        place.broker.locks.keepalive(lock)
        with pytest.raises(LockHeld):
            place.broker.locks.acquire("report", wait=0)
        place.broker.locks.release(lock)
        later = place.broker.locks.acquire("report")
        assert later.fence > lock.fence + 2**23
        place.broker.locks.release(later)


def test_a_lease_goes_on_while_nobody_owns_the_folder_and_begins_anew_after_a_boot(place):
    place.broker.locks.acquire("report", lease=100)
    place.broker.close()
    place.clock.advance(seconds=60)
    place.broker = place.open()
    place.after(seconds=39)
    assert place.broker.locks.describe("report").held
    place.broker.close()
    place.ids.reboot()
    place.broker = place.open()
    place.after(seconds=99)
    assert place.broker.locks.describe("report").held
    place.after(seconds=1)
    assert not place.broker.locks.describe("report").held


def test_a_clock_on_the_wall_that_is_set_changes_no_lease(place):
    lock = place.broker.locks.acquire("report", lease=100)
    for hours in (1, -2):
        place.clock.step_wall(ns=hours * 3600 * 10**9)
        place.after(seconds=0)
        assert place.broker.locks.describe("report").fence == lock.fence
    place.after(seconds=100)
    assert not place.broker.locks.describe("report").held


def test_a_folder_without_locks_has_no_file_of_theirs(place):
    place.broker.create_topic("orders")
    place.reopen()
    assert not place.disk.exists(LOCKS)


def test_a_folder_with_nothing_but_locks_is_ours(place):
    place.broker.locks.acquire("report", lease=100)
    place.broker.close()
    place.broker = place.open(create=False)
    assert place.broker.locks.describe("report").held


def test_everything_is_refused_after_closing(place):
    lock = place.broker.locks.acquire("report")
    place.broker.close()
    for call in (
        lambda: place.broker.locks.acquire("report"),
        lambda: place.broker.locks.keepalive(lock),
        lambda: place.broker.locks.release(lock),
        place.broker.locks.list,
        lambda: place.broker.documents.get("plan"),
        lambda: place.broker.documents.update("plan", 1),
    ):
        with pytest.raises(Closed):
            call()


# A block that holds a lock


def test_a_block_holds_its_lock_for_as_long_as_it_runs(alone):
    with alone.broker.locks.hold("report", owner="ann", lease=30) as lock:
        for _ in range(10):
            alone.after(seconds=11)
            assert not lock.lost
        info = alone.broker.locks.describe("report")
        assert (info.owner, info.fence) == ("ann", lock.fence)
        alone.broker.documents.update("plan", 1, lock=lock)
    assert not alone.broker.locks.describe("report").held
    assert not lock.lost


def test_a_block_that_lost_its_lock_sees_it_and_ends_with_an_error(alone):
    with pytest.raises(LeaseLost, match="its lease expired"), alone.broker.locks.hold("report", lease=30) as lock:
        alone.clock.advance(seconds=30)  # nobody renewed it meanwhile
        alone.engine.tick()
        assert lock.lost


def test_an_error_of_the_block_says_more_than_that_the_lock_was_lost(alone):
    with pytest.raises(ZeroDivisionError) as raised, alone.broker.locks.hold("report", lease=30):
        alone.clock.advance(seconds=30)
        _ = 1 / 0
    assert "no longer held" in raised.value.__notes__[0]
    with pytest.raises(ZeroDivisionError), alone.broker.locks.hold("report", lease=30):
        _ = 1 / 0
    assert not alone.broker.locks.describe("report").held


def test_a_lock_that_nobody_has_in_hand_any_more_is_not_renewed_for_ever(alone):
    held = alone.broker.locks.hold("report", lease=30)
    held.__enter__()
    del held
    gc.collect()
    alone.after(seconds=20)
    alone.after(seconds=10)
    assert not alone.broker.locks.describe("report").held


def test_a_block_that_was_not_entered_has_no_fence(alone):
    with pytest.raises(InvalidRequest, match="not been acquired"):
        _ = alone.broker.locks.hold("report").fence


@in_a_loop
async def test_a_block_of_a_task_holds_its_lock():
    place = Place(tasks=False)
    place.broker.close()
    async with holdfast.aio.open_broker(FOLDER, world=place.world) as broker:
        async with broker.locks.hold("report", lease=30) as lock:
            for _ in range(5):
                place.clock.advance(seconds=11)
                broker._port.engine.tick()
            assert (await broker.locks.describe("report")).fence == lock.fence
        assert not (await broker.locks.describe("report")).held
        with pytest.raises(LeaseLost):
            async with broker.locks.hold("report", lease=30):
                place.clock.advance(seconds=30)


# In line


def waiting(broker, name: str, count: int) -> None:
    """Return when so many wait."""
    pause = threading.Event()
    while broker.locks.describe(name).waiting < count:
        pause.wait(0.001)


def test_whoever_waits_has_the_lock_in_the_order_in_which_they_came(tmp_path):
    order: queue.Queue[str] = queue.Queue()
    with holdfast.open_broker(tmp_path / "data") as broker:

        def work(owner: str) -> None:
            lock = broker.locks.acquire("report", owner=owner, wait=60)
            order.put(owner)
            broker.locks.release(lock)

        lock = broker.locks.acquire("report")
        threads = []
        for number in range(20):
            threads.append(threading.Thread(target=work, args=(f"w{number}",)))
            threads[-1].start()
            waiting(broker, "report", number + 1)
        broker.locks.release(lock)
        for thread in threads:
            thread.join()
        assert [order.get_nowait() for _ in range(20)] == [f"w{number}" for number in range(20)]
        assert not broker.locks.describe("report").held


def test_a_lease_that_ends_lets_the_next_one_in_by_itself(tmp_path):
    with holdfast.open_broker(tmp_path / "data") as broker:
        first = broker.locks.acquire("report", lease=0.2)
        second = broker.locks.acquire("report", wait=60)
        assert second.fence > first.fence
        assert second.acquired_at >= first.expires_at - timedelta(milliseconds=2)


def test_nobody_who_comes_later_is_faster_than_whoever_waits(alone):
    locks = alone.broker.locks
    first = locks.acquire("report", owner="ann")
    ticket = alone.engine.locks().ask(Acquire("report", "bob", 30_000), Nobody())
    locks.release(first)
    with pytest.raises(LockHeld, match="held by bob"):
        locks.acquire("report", owner="cid", wait=0)
    assert ticket.over
    assert locks.describe("report").owner == "bob"


class Nobody:
    """Somebody in line whom nobody wakes."""

    woken = False

    def wake(self) -> None:
        self.woken = True


def test_whoever_goes_away_gives_back_what_was_granted_meanwhile(alone):
    engine = alone.engine.locks()
    first = alone.broker.locks.acquire("report", owner="ann")
    tickets = [engine.ask(Acquire("report", owner, 30_000), Nobody()) for owner in ("bob", "cid")]
    alone.broker.locks.release(first)
    engine.leave(tickets[0])
    assert tickets[1].waiter.woken
    assert alone.broker.locks.describe("report").owner == "cid"
    engine.leave(tickets[1])
    assert not alone.broker.locks.describe("report").held


@in_a_loop
async def test_a_task_that_is_cancelled_while_it_waits_leaves_the_line(tmp_path):
    async with holdfast.aio.open_broker(tmp_path / "data") as broker:
        first = await broker.locks.acquire("report")
        tasks = []
        for number in range(2):
            tasks.append(asyncio.create_task(broker.locks.acquire("report", owner=f"t{number}")))
            while (await broker.locks.describe("report")).waiting <= number:
                await asyncio.sleep(0)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        assert (await broker.locks.describe("report")).waiting == 1
        await broker.locks.release(first)
        assert (await tasks[1]).owner == "t1"


@in_a_loop
async def test_a_task_that_is_cancelled_when_the_lock_was_just_granted_gives_it_back(tmp_path):
    async with holdfast.aio.open_broker(tmp_path / "data") as broker:
        first = await broker.locks.acquire("report")
        task = asyncio.create_task(broker.locks.acquire("report", owner="bob"))
        while not (await broker.locks.describe("report")).waiting:
            await asyncio.sleep(0)
        await broker.locks.release(first)
        assert (await broker.locks.describe("report")).owner == "bob"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not (await broker.locks.describe("report")).held


def test_whoever_waits_is_sent_away_when_the_broker_is_closed(tmp_path):
    broker = holdfast.open_broker(tmp_path / "data")
    broker.locks.acquire("report")
    ended: queue.Queue[HoldfastError] = queue.Queue()

    def work() -> None:
        try:
            broker.locks.acquire("report")
        except HoldfastError as error:
            ended.put(error)

    thread = threading.Thread(target=work)
    thread.start()
    waiting(broker, "report", 1)
    broker.close()
    assert isinstance(ended.get(timeout=60), Closed)
    thread.join()


def test_there_is_a_limit_to_how_many_wait(alone, monkeypatch):
    monkeypatch.setattr(engine_locks, "_MOST_WAITERS", 1)
    engine = alone.engine.locks()
    alone.broker.locks.acquire("report")
    ticket = engine.ask(Acquire("report", "x", 30_000), Nobody())
    with pytest.raises(TooManyWaiters):
        alone.broker.locks.acquire("report", wait=5)
    engine.leave(ticket)
    with pytest.raises(LockHeld):
        alone.broker.locks.acquire("report", wait=5)


def test_whoever_waits_has_the_lock_though_a_signal_came_just_when_it_was_to_be_handed_on(alone, monkeypatch):
    locks, engine = alone.broker.locks, alone.engine.locks()
    first = locks.acquire("report", owner="ann")
    ticket = engine.ask(Acquire("report", "bob", 30_000), Nobody())
    with monkeypatch.context() as patched:
        patched.setattr(engine, "_grant", interrupted)
        with pytest.raises(KeyboardInterrupt):
            locks.release(first)
    assert not ticket.over
    with pytest.raises(LockHeld, match="held by bob"):
        locks.acquire("report", owner="cid", wait=0)
    assert ticket.waiter.woken


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


# Trouble with the disk


def test_a_lock_that_could_not_be_written_is_not_held(alone):
    alone.broker.locks.describe("report")
    alone.disk.faults.fail(1, errno.ENOSPC, sticky=True)
    with pytest.raises(HoldfastError):
        alone.broker.documents.update("plan", "x" * 1_000_000)
    alone.disk.faults.clear()
    assert check(alone.engine.locks().table) == []


def test_a_journal_that_is_damaged_costs_what_was_in_there_and_no_fence_comes_twice(alone, caplog):
    fences = [alone.broker.locks.acquire(f"lock-{number}", lease=1000).fence for number in range(5)]
    version = alone.broker.documents.update("plan", 1).version
    alone.reopen()
    fences.append(alone.broker.locks.acquire("late", lease=1000).fence)
    alone.broker.close()
    (segment,) = [name for name in alone.disk.names(LOCKS) if name.endswith(".log")]
    content = alone.disk.contents(f"{LOCKS}/{segment}")
    alone.disk.flip(f"{LOCKS}/{segment}", content.index(b"lock-3"))
    alone.broker = alone.open()
    assert alone.broker.locks.acquire("new").fence > max(fences)
    assert "journal damaged" in caplog.text
    assert not alone.broker.locks.describe("lock-3").held
    assert alone.broker.locks.describe("lock-4").fence == fences[4]
    assert alone.broker.documents.update("plan", 2).version > version + 1


def test_snapshots_keep_the_journal_short_and_everything_as_it_was(alone, monkeypatch):
    monkeypatch.setattr("holdfast.broker.locks._SNAPSHOT_EVENTS", 50)
    lock = alone.broker.locks.acquire("report", lease=10_000)
    document = alone.broker.documents.update("plan", {"a": 1})
    other = alone.broker.locks.acquire("other")
    alone.broker.locks.release(other)
    for _ in range(200):
        lock = alone.broker.locks.keepalive(lock)
        alone.engine.tick()
    assert {"snapshot", "snapshot.before"} <= set(alone.disk.names(LOCKS))
    assert alone.engine.locks().journal.events_since_snapshot < 50
    alone.reopen()
    assert alone.broker.locks.keepalive(lock.lease_id).lease_id == lock.lease_id
    assert alone.broker.documents.get("plan") == document
    with pytest.raises(LeaseLost, match="it was released"):
        alone.broker.locks.release(other)


def test_two_damaged_snapshots_are_reported_with_what_to_do(alone, monkeypatch):
    monkeypatch.setattr("holdfast.broker.locks._SNAPSHOT_EVENTS", 2)
    alone.broker.documents.update("plan", 1)
    locks = alone.engine.locks()
    for _ in range(3):
        alone.broker.documents.update("plan", 1)
        alone.broker.documents.update("plan", 1)
        locks.journal.log.roll()
        alone.engine.tick()
    alone.broker.close()
    for name in ("snapshot", "snapshot.before"):
        alone.disk.flip(f"{LOCKS}/{name}", 20)
    alone.broker = alone.open()
    alone.broker.create_topic("orders")  # nobody else is disturbed
    with pytest.raises(CorruptData, match="fencing numbers start again"):
        alone.broker.documents.get("plan")
