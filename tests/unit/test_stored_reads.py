"""What an owner says and hands out, when it cannot be sure any more that it is the owner: nothing."""

from __future__ import annotations

import asyncio
import threading

import pytest

import holdfast
import holdfast.aio
from holdfast import DiskFailed
from holdfast.env import SystemClock
from holdfast.env.chain import engines
from holdfast.env.chain.chain import Chain, Position, walk

URL = "memory://reads"
HOUR_NS = 3600 * 10**9


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(tmp_path))
    yield engines.open_store(engines.parse_place(URL))[0]
    del engines._memories[URL]


def sleep(chain):
    """Let the owner find that it has been asleep for an hour."""
    chain._confirmed_ns -= HOUR_NS
    chain._confirmed_at_ns -= HOUR_NS


def take_over(store):
    """Become the next owner, as another machine would meanwhile."""
    at = Position()
    for header, _ in walk(store, "", at):
        at = at.after(header)
    assert Chain.take_over(store, "", SystemClock(), at=at, writer=bytes(16)) is not None


def filled(broker):
    """A group with messages, leases and dead letters, and a lock and a document; returns what the calls below need."""
    broker.create_topic("jobs")
    group = broker.group("jobs", "g")
    stored = broker.publish_many("jobs", [b"%d" % i for i in range(12)])
    group.receive().reject("bad")
    taken = group.receive_many(8)
    broker.documents.update("d", 1)
    return group, stored[0].id, taken, broker.locks.acquire("l", lease=600)


CALLS = {
    "take": lambda broker, group, one, taken, lock: group.receive(timeout=0),
    "take more": lambda broker, group, one, taken, lock: group.receive_many(2, timeout=0),
    "ack": lambda broker, group, one, taken, lock: taken[0].ack(),
    "nack": lambda broker, group, one, taken, lock: taken[1].nack(),
    "reject": lambda broker, group, one, taken, lock: taken[2].reject("bad"),
    "defer": lambda broker, group, one, taken, lock: taken[3].defer(delay=1),
    "extend": lambda broker, group, one, taken, lock: taken[4].extend(),
    "ack many": lambda broker, group, one, taken, lock: group.ack_many(taken[5:7]),
    "peek": lambda broker, group, one, taken, lock: group.peek(1),
    "stats": lambda broker, group, one, taken, lock: group.stats(),
    "committed": lambda broker, group, one, taken, lock: group.committed(),
    "list": lambda broker, group, one, taken, lock: listed(group.messages("ready")),
    "dead letters": lambda broker, group, one, taken, lock: group.dead.list(),
    "history": lambda broker, group, one, taken, lock: group.history(one),
    "search": lambda broker, group, one, taken, lock: broker.search("1"),
    "topic": lambda broker, group, one, taken, lock: broker.describe_topic("jobs"),
    "topics": lambda broker, group, one, taken, lock: broker.topics(),
    "groups": lambda broker, group, one, taken, lock: broker.groups("jobs"),
    "read": lambda broker, group, one, taken, lock: broker.read("jobs"),
    "describe lock": lambda broker, group, one, taken, lock: broker.locks.describe("l"),
    "locks": lambda broker, group, one, taken, lock: broker.locks.list(),
    "keepalive": lambda broker, group, one, taken, lock: broker.locks.keepalive(lock),
    "document": lambda broker, group, one, taken, lock: broker.documents.get("d"),
    "documents": lambda broker, group, one, taken, lock: broker.documents.list(),
    "release": lambda broker, group, one, taken, lock: broker.locks.release(lock),
}


def listed(found):
    return every(found) if hasattr(found, "__aiter__") else list(found)


async def every(found):
    return [each async for each in found]


def test_an_owner_that_slept_proves_that_it_is_the_owner_before_each_answer(store):
    with holdfast.open_broker(URL) as broker:
        given = filled(broker)
        chain = broker._port.engine.store
        unproven = []
        for name, call in CALLS.items():
            sleep(chain)
            call(broker, *given)
            if not chain.is_current():
                unproven.append(name)
        assert unproven == []


def test_an_owner_that_was_replaced_while_it_slept_answers_nothing(store):
    broker = holdfast.open_broker(URL)
    given = filled(broker)
    broker.sync()
    take_over(store)
    sleep(broker._port.engine.store)
    for _, call in reversed(CALLS.items()):
        with pytest.raises(DiskFailed, match="another process has taken over"):
            call(broker, *given)
    with pytest.raises(DiskFailed):
        broker.close()


def test_no_task_holds_up_the_event_loop_while_the_owner_proves_that_it_is(store):
    create, on_loop = store.create, []

    def noted(key, content):
        on_loop.append(threading.current_thread() is threading.main_thread())
        return create(key, content)

    async def main():
        held_up = []
        async with holdfast.aio.open_broker(URL) as broker:
            given = await filled_async(broker)
            chain = broker._port.engine.store
            await broker.sync()
            store.create = noted
            for name, call in CALLS.items():
                sleep(chain)
                on_loop.clear()
                await call(broker, *given)
                if any(on_loop) or not on_loop:
                    held_up.append(name)
            del store.create
        assert held_up == []

    asyncio.run(main())


async def filled_async(broker):
    await broker.create_topic("jobs")
    group = await broker.group("jobs", "g")
    stored = await broker.publish_many("jobs", [b"%d" % i for i in range(12)])
    await (await group.receive()).reject("bad")
    taken = await group.receive_many(8)
    await broker.documents.update("d", 1)
    return group, stored[0].id, taken, await broker.locks.acquire("l", lease=600)
