"""Long lists through the client: page by page, whole, in the same order as in a folder."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import NewMessage, aio
from holdfast.local.listing import listed
from tests.integration.http_gear import Serving, serving

COUNT = 2_500  # more than two pages


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data") as found:
        yield found


@pytest.fixture
def broker(server: Serving) -> Iterator[Any]:
    with holdfast.connect(server.url) as found:
        found.create_topic("jobs", partitions=3, backoff_ms=3_600_000)
        yield found


def fill(queue: Any, phase: str) -> None:
    """Messages in a phase, in all partitions."""
    delay = 3600 if phase == "delayed" else None
    messages = [NewMessage(body=b"%d" % i, key=f"k{i}", delay=delay and delay + i % 7) for i in range(COUNT)]
    queue.put_many(messages)
    if phase == "leased":
        assert len(queue.get_many(COUNT, timeout=5, lease=600, detached=True)) == COUNT
    elif phase == "dead":
        queue.nack_many(queue.get_many(COUNT, timeout=5), error="no")
    elif phase == "delayed":  # some that wait in the group, too
        queue.put_many([NewMessage(body=b"again", key=f"k{i}") for i in range(1_200)])
        queue.nack_many(queue.get_many(1_200, timeout=5), delay=3600)


@pytest.mark.parametrize("phase", ["ready", "leased", "delayed", "dead"])
def test_a_list_is_whole_and_in_order_in_every_phase(server: Serving, broker: Any, phase: str):
    queue = broker.queue("jobs", max_attempts=1 if phase == "dead" else 20)
    fill(queue, phase)
    found = [message.id for message in queue.messages(phase)]
    group = server.run(server.server.service.group("jobs"))
    assert found == [message.id for message in listed(group.port, phase, None, None)]
    assert len(set(found)) == COUNT + (1_200 if phase == "delayed" else 0)
    assert [message.id for message in queue.messages(phase, limit=1_700)] == found[:1_700]
    assert [message.id for message in queue.messages(phase, where=lambda each: each.id == found[-1])] == found[-1:]


def test_a_list_is_fetched_as_far_as_it_is_read_and_goes_on_where_it_was(broker: Any):
    queue = broker.queue("jobs")
    fill(queue, "ready")
    messages = queue.messages()
    first = [next(messages).id for _ in range(1_000)]
    for message in queue.get_many(500, timeout=5):  # what was seen, in part, is gone by now
        message.ack()
    rest = [message.id for message in messages]
    assert not set(first) & set(rest)
    assert len(rest) >= COUNT - 1_000 - 500


def test_a_function_chooses_among_all_dead_letters(broker: Any):
    queue = broker.queue("jobs", max_attempts=1)
    fill(queue, "dead")
    assert len(queue.dead.list()) == COUNT
    assert sum(group.count for group in queue.dead.groups(where=lambda _: True)) == COUNT
    assert queue.dead.purge(where=lambda letter: int(letter.raw) % 2 == 0).done == COUNT // 2
    assert len(queue.dead.list()) == COUNT // 2


def test_tasks_list_page_by_page(server: Serving, broker: Any):
    fill(broker.queue("jobs"), "ready")

    async def story() -> int:
        async with aio.connect(server.url) as remote:
            queue = await remote.queue("jobs")
            return len([message async for message in queue.messages()])

    assert asyncio.run(story()) == COUNT


def test_pages_by_hand(server: Serving, broker: Any):
    broker.queue("jobs").put_many([NewMessage(body=b"x", key=f"k{i}") for i in range(7)])
    found, after = [], None
    for _ in range(4):
        query = {"limit": 2, **({"after": after} if after else {})}
        page = server.get("/v1/queues/jobs/messages", query=query).body
        found += [message["id"] for message in page["messages"]]
        after = page.get("next")
    assert after is None
    assert len(set(found)) == 7
    for wrong in ("x", "1.2", "1.2.3.-4", "1.2.3.99999999999999999999"):
        answer = server.get("/v1/queues/jobs/messages", query={"after": wrong})
        assert (answer.status, answer.code) == (400, "invalid_request")
