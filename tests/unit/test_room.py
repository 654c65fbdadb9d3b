"""Room in memory for bodies: each caller has its own, and those for whom there is none stand in line."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.errors import TooManyWaiters
from holdfast.server.limits import MOST_WAITING, Room


async def _rounds() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_caller_waits_for_room_in_its_order_and_nobody_else_does():
    async def story() -> None:
        room, got = Room(100), []

        async def take(name: str, size: int) -> None:
            await room.take("a", size)
            got.append(name)

        assert await room.take("a", 70) == 70
        tasks = [asyncio.ensure_future(take("large", 50)), asyncio.ensure_future(take("small", 10))]
        await _rounds()
        assert got == [], "a small one does not overtake: a large one would never have its turn"
        assert room.waiting("a") == 2
        assert await room.take("b", 100) == 100
        room.give_back("a", 70)
        await asyncio.gather(*tasks)
        assert got == ["large", "small"]
        room.give_back("a", 50)
        room.give_back("a", 10)
        room.give_back("b", 100)
        assert not room._used
        assert not room._lines

    asyncio.run(story())


def test_what_is_larger_than_all_room_has_it_for_itself():
    async def story() -> None:
        room = Room(100)
        assert await room.take("a", 1_000) == 100
        room.give_back("a", 100)
        assert room.used("a") == 0

    asyncio.run(story())


def test_who_gives_up_waiting_takes_no_room_and_lets_those_behind_it_in():
    async def story() -> None:
        room = Room(100)
        await room.take("a", 60)
        gone = asyncio.ensure_future(room.take("a", 90))
        stays = asyncio.ensure_future(room.take("a", 40))
        await _rounds()
        gone.cancel()
        assert await stays == 40
        late = asyncio.ensure_future(room.take("a", 10))
        await _rounds()
        room.give_back("a", 60)
        late.cancel()  # at the moment at which it was its turn
        await asyncio.wait([late])
        assert room.used("a") == 40
        assert room.waiting("a") == 0

    asyncio.run(story())


def test_so_many_wait_and_one_more_is_refused():
    async def story() -> None:
        room = Room(100)
        await room.take("a", 100)
        waiting = [asyncio.ensure_future(room.take("a", 1)) for _ in range(MOST_WAITING)]
        await _rounds()
        with pytest.raises(TooManyWaiters, match="nothing was done"):
            await room.take("a", 1)
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
        assert room.waiting("a") == 0

    asyncio.run(story())


def test_where_nobody_can_wait_there_is_room_at_once_or_none():
    room = Room(100)
    assert room.try_take("a", 70) == 70
    assert room.try_take("a", 40) is None
    assert room.try_take("b", 40) == 40
    assert room.try_take("a", 40, always=True) == 40
    for caller, size in (("a", 70), ("b", 40), ("a", 40)):
        room.give_back(caller, size)
    assert not room._used
