"""Many messages at once, or many leases that end together: others have their turn in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from holdfast.api.arguments import ACK
from holdfast.broker.delivery import _END_MOST
from holdfast.broker.leases import RUN_TOKEN_BYTES
from holdfast.delivery.events import Released
from holdfast.delivery.events import size as run_size
from holdfast.errors import LeaseLost
from holdfast.local.aio import group as group_module
from holdfast.local.aio.broker import open_broker_async
from holdfast.local.group import CLAIMS_AT_ONCE
from holdfast.protocol.messages import Receipts, RunReceipts
from holdfast.server.served import MOST_AT_ONCE, ServedGroup, Taken, receipts_of
from holdfast.server.served import texts_of as made_of_runs
from holdfast.server.waiting import Windows
from tests.unit.queues import Place

MANY = 5 * MOST_AT_ONCE


class Turns:
    """A task that counts how often it has its turn."""

    def __init__(self) -> None:
        self.count = 0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.count += 1

    def stop(self) -> None:
        self._task.cancel()


@asynccontextmanager
async def many_messages(folder: Path) -> AsyncIterator[ServedGroup]:
    async with open_broker_async(folder, durability="os") as broker:
        await broker.create_topic("jobs", min_free_bytes=0)
        await broker.publish_many("jobs", [b"x"] * MANY)
        group = await broker._port.served_group(ServedGroup, "jobs", "g", check=lambda *_: None)
        yield group
        await group.close()


def size(taken: Taken) -> int:
    return sum(len(delivered) for _, delivered in taken)


def texts_of(taken: Taken) -> list[str]:
    return [
        delivery.receipts.text(each.record.offset, each.lease) for delivery, delivered in taken for each in delivered
    ]


def test_a_large_take_and_its_ack_give_other_tasks_their_turn(tmp_path):
    async def story() -> None:
        async with many_messages(tmp_path) as group:
            found = await group.take(MANY, None, "bob")
            assert size(found) == MOST_AT_ONCE
            turns = Turns()
            await group.take_more(found, MANY, None, "bob")
            assert size(found) == MANY
            assert turns.count >= 3
            receipts = texts_of(found)
            turns.count = 0
            await group.port.settle(receipts, ACK, None)
            assert turns.count >= 6  # while they are read, and while they are settled
            turns.stop()
            stats = await group.port.stats()
            assert (stats.ready, stats.leased) == (0, 0)

    asyncio.run(story())


def test_an_ack_of_made_up_receipts_gives_other_tasks_their_turn_every_few_of_them(tmp_path, monkeypatch):
    async def story() -> None:
        async with many_messages(tmp_path) as group:
            read: list[int] = []
            claims = group_module.claims_of
            monkeypatch.setattr(
                group_module, "claims_of", lambda own, texts: read.append(len(texts)) or claims(own, texts)
            )
            turns = Turns()
            made_up = [f"jobs-0-{i}@10000000001" for i in range(MANY)]
            with pytest.raises(LeaseLost) as caught:
                await group.port.settle(made_up, ACK, None)
            assert len(caught.value.receipts) == MANY
            assert read == [CLAIMS_AT_ONCE] * (MANY // CLAIMS_AT_ONCE)
            assert turns.count >= len(read)
            turns.stop()

    asyncio.run(story())


@pytest.mark.parametrize("alone", [False, True], ids=["one run", "many runs"])
def test_receipts_are_made_from_runs_with_turns_for_other_tasks(tmp_path, alone):
    async def story() -> None:
        async with many_messages(tmp_path) as group:
            turns, offsets = Turns(), list(range(MANY))
            token = b"\x02" + bytes(RUN_TOKEN_BYTES - 1)
            runs = [
                RunReceipts(partition=0, token=token, offsets=some)
                for some in ([[each] for each in offsets] if alone else [offsets])
            ]
            texts = await made_of_runs(group, Receipts(receipts=["a"], runs=runs))
            assert [text.partition("@")[0] for text in texts] == ["a", *(f"jobs-0-{offset}" for offset in offsets)]
            assert turns.count >= MANY // CLAIMS_AT_ONCE - 1
            turns.stop()

    asyncio.run(story())


def test_many_settled_messages_leave_a_streams_window_with_turns_for_other_tasks(tmp_path):
    async def story() -> None:
        async with many_messages(tmp_path) as group:
            windows = Windows()
            found = await group.take(MANY, None, "bob")
            await group.take_more(found, MANY, None, "bob")
            with windows.one_more(group, MANY) as window:
                for delivery, taken in found:
                    for each in taken:
                        window.add(delivery, each.receipt)
                receipts = [
                    delivery.receipts.text(each.record.offset, each.lease)
                    for delivery, taken in found
                    for each in taken
                ]
                turns = Turns()
                await windows.settled(group, receipts)
                assert turns.count >= MANY // CLAIMS_AT_ONCE - 1
                turns.stop()
                assert len(window) == 0

    asyncio.run(story())


def test_a_large_take_that_is_given_back_gives_other_tasks_their_turn(tmp_path):
    async def story() -> None:
        async with many_messages(tmp_path) as group:
            found = await group.take(MANY, None, "bob")
            await group.take_more(found, MANY, None, "bob")
            turns = Turns()
            await group.give_back(receipts_of(found))
            assert turns.count >= 4
            turns.stop()
            assert (await group.port.stats()).ready == MANY

    asyncio.run(story())


def test_leases_that_end_together_end_in_portions_and_all_of_them():
    place = Place(max_attempts=2, backoff_ms=0, lease_ms=1_000)
    q = place.q
    many = 3 * _END_MOST + 7
    q.put_many([b"x"] * many)
    messages = q.get_many(many, detached=True)
    assert len(messages) == many
    delivery = q._port.deliveries[0]
    commits = []
    committed = delivery.commit_events
    delivery.commit_events = lambda events, *rest: commits.append(len(events)) or committed(events, *rest)
    place.after(seconds=2)
    assert max(commits) <= 2 * _END_MOST  # each comes back, and is ready at once
    assert len(commits) >= 4
    assert q.stats().ready == many


def test_many_retries_that_fall_due_together_are_released_a_bearable_number_at_a_time():
    place = Place(max_attempts=None)
    many = 3 * _END_MOST + 7
    place.q.put_many([b"x"] * many)
    for message in place.q.get_many(many, timeout=0):
        message.nack(delay=5)
    delivery = place.q._port.queue_group.deliveries[0]
    sizes: list[int] = []
    plain = delivery.commit_events

    def commit(events, durability=None):
        assert delivery.lock.locked()
        sizes.extend(run_size(event.runs) for event in events if isinstance(event, Released))
        return plain(events, durability)

    delivery.commit_events = commit
    place.after(seconds=6)
    assert sum(sizes) == many
    assert max(sizes) <= _END_MOST  # and the lock was free in between
    assert len(place.q.get_many(many, timeout=0)) == many
