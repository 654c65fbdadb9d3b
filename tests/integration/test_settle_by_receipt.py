"""What became of messages is told to a port by their receipts alone: on an engine here, and on a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import aio
from holdfast.api import port_of
from holdfast.api.arguments import ACK, MessageOutcome, ReceiveRequest
from holdfast.errors import InvalidRequest, LeaseLost
from tests.integration.http_gear import serving


@pytest.fixture(params=["folder", "server"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "data")
        return
    with serving(tmp_path / "data") as server:
        yield server.url


def opened(place: str) -> Any:
    return holdfast.connect(place) if place.startswith("http") else holdfast.open_broker(place)


def taken(port: Any, count: int = 1) -> list[str]:
    """The receipts of messages that nothing but their leases holds."""
    return [port.receipt(each) for each in port.take(ReceiveRequest(count, 5.0, detached=True))]


def counts(queue: holdfast.Queue[bytes]) -> tuple[int, int, int, int]:
    stats = queue.stats()
    return stats.ready, stats.leased, stats.delayed, stats.dead


@pytest.mark.parametrize(
    ("outcome", "after"),
    [
        (ACK, (0, 0, 0, 0)),
        (MessageOutcome("nack", 0, "ValueError: no"), (2, 0, 0, 0)),
        (MessageOutcome("nack", 60_000), (0, 0, 2, 0)),
        (MessageOutcome("defer"), (2, 0, 0, 0)),
        (MessageOutcome("drop", 0), (2, 0, 0, 0)),
        (MessageOutcome("reject", why="never"), (0, 0, 0, 2)),
        (MessageOutcome("extend", lease_ms=60_000), (0, 2, 0, 0)),
    ],
)
def test_messages_are_settled_by_their_receipts(place: str, outcome: MessageOutcome, after: tuple[int, int, int, int]):
    with opened(place) as broker, broker.queue("jobs", min_free_bytes=0) as queue:
        queue.put_many([b"a", b"b"])
        port = port_of(queue)
        receipts = taken(port, 2)
        port.settle([*receipts, receipts[0]], outcome, None)
        assert counts(queue) == after


def test_those_that_were_lost_are_named_and_the_others_settled(place: str):
    with opened(place) as broker, broker.queue("jobs", min_free_bytes=0) as queue:
        queue.put_many([b"a", b"b", b"c"])
        port = port_of(queue)
        first, second, third = taken(port, 3)
        port.settle([second], ACK, None)
        made_up = f"{third.partition('@')[0]}@{'A' * len(third.partition('@')[2])}"
        with pytest.raises(LeaseLost) as caught:
            port.settle([first, second, made_up], ACK, None)
        assert set(caught.value.receipts) == {second, made_up}
        assert counts(queue) == (0, 1, 0, 0)
        with pytest.raises(LeaseLost):
            port.settle([first], MessageOutcome("nack", why="late"), None)
        with pytest.raises(InvalidRequest):
            port.settle([third, "no receipt"], ACK, None)
        assert counts(queue) == (0, 1, 0, 0)
        port.settle([third], ACK, "fsync")
        assert counts(queue) == (0, 0, 0, 0)


def test_a_task_settles_by_receipt_as_a_thread_does(place: str):
    async def story() -> None:
        opening = aio.connect(place) if place.startswith("http") else aio.open_broker(place)
        async with opening as broker, broker.queue("jobs", min_free_bytes=0) as queue:
            await queue.put_many([b"x"] * 250)
            port: Any = port_of(queue)
            receipts = [port.receipt(each) for each in await port.take(ReceiveRequest(250, 5.0, detached=True))]
            await port.settle(receipts, ACK, None)
            stats = await queue.stats()
            assert (len(receipts), stats.ready, stats.leased) == (250, 0, 0)

    asyncio.run(story())
