"""Many threads and tasks on one queue at once: each message exactly once, nothing lost, nobody left waiting."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

import holdfast

PATIENCE_S = 60


def test_eight_threads_share_a_queue_and_each_message_comes_once(tmp_path, scale):
    each = scale(500, 20_000)
    seen: list[bytes] = []
    with holdfast.open(tmp_path / "queue", durability="os") as queue:

        def produce(number: int) -> None:
            for i in range(each):
                queue.put(b"%d:%d" % (number, i))

        def consume() -> None:
            while True:
                with queue.get(timeout=PATIENCE_S) as message:
                    if message.body == b"stop":
                        return
                    seen.append(message.body)

        with ThreadPoolExecutor(8) as pool:
            consumers = [pool.submit(consume) for _ in range(4)]
            for produced in [pool.submit(produce, number) for number in range(4)]:
                produced.result(PATIENCE_S)
            queue.put_many([b"stop"] * 4)
            for consumed in consumers:
                consumed.result(PATIENCE_S)
        assert queue.stats().ready == queue.stats().leased == 0
    assert Counter(seen) == Counter(b"%d:%d" % (number, i) for number in range(4) for i in range(each))


def test_one_consumer_sees_the_messages_of_each_producer_in_their_order(tmp_path):
    each = 300
    with holdfast.open(tmp_path / "queue", durability="os") as queue:

        def produce(number: int) -> None:
            for i in range(each):
                queue.put(b"%d" % i, key=str(number))

        threads = [threading.Thread(target=produce, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        seen: dict[object, list[int]] = {}
        for _ in range(4 * each):
            with queue.get(timeout=PATIENCE_S) as message:
                seen.setdefault(message.key, []).append(int(message.body))
        for thread in threads:
            thread.join()
    assert seen == {str(number): list(range(each)) for number in range(4)}


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_thirty_two_tasks_share_a_queue_and_each_message_comes_once(tmp_path, durability, scale):
    each = scale(60, 2_000)
    seen: list[bytes] = []

    async def story() -> None:
        async with holdfast.aio.open(tmp_path / "queue", durability=durability) as queue:

            async def produce(number: int) -> None:
                for i in range(each):
                    await queue.put(b"%d:%d" % (number, i))

            async def consume() -> None:
                while True:
                    async with await queue.get(timeout=PATIENCE_S) as message:
                        if message.body == b"stop":
                            return
                        seen.append(message.body)

            consumers = [asyncio.create_task(consume()) for _ in range(16)]
            await asyncio.gather(*(produce(number) for number in range(16)))
            await queue.put_many([b"stop"] * 16)
            await asyncio.wait_for(asyncio.gather(*consumers), PATIENCE_S)

    asyncio.run(story())
    assert Counter(seen) == Counter(b"%d:%d" % (number, i) for number in range(16) for i in range(each))


def test_closing_sends_every_waiting_consumer_home(tmp_path):
    queue = holdfast.open(tmp_path / "queue")
    ended: list[int] = []

    def consume(number: int) -> None:
        for message in queue:
            with suppress(holdfast.Closed):  # it may be closed between the two
                message.ack()
        ended.append(number)

    threads = [threading.Thread(target=consume, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    queue.put(b"x")
    queue.close()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(ended) == [0, 1, 2, 3]
