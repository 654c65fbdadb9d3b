"""Producers and workers as tasks of one event loop: they share syncs, and the loop never waits for the disk.

python examples/async_workers.py
"""

import asyncio
import tempfile

import holdfast

PRODUCERS, WORKERS, EACH = 16, 8, 50


async def produce(queue: holdfast.aio.AsyncQueue, producer: int) -> None:
    for number in range(EACH):
        await queue.put({"producer": producer, "number": number})  # on disk before this task goes on


async def work(queue: holdfast.aio.AsyncQueue, seen: list) -> None:
    async for message in queue:
        async with message:  # ack, or nack with the error
            await asyncio.sleep(0)  # the work
            seen.append((message.body["producer"], message.body["number"]))


async def main(folder: str) -> None:
    seen: list[tuple[int, int]] = []
    async with holdfast.aio.open(folder, body_type=dict) as queue:
        workers = [asyncio.create_task(work(queue, seen)) for _ in range(WORKERS)]
        await asyncio.gather(*(produce(queue, producer) for producer in range(PRODUCERS)))
        while (stats := await queue.stats()).ready or stats.leased:
            await asyncio.sleep(0.01)
    await asyncio.gather(*workers)  # closing the queue has ended their loops
    print(f"{len(seen)} messages from {PRODUCERS} tasks handled by {WORKERS}, each once: {len(set(seen)) == len(seen)}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        asyncio.run(main(f"{temporary}/work"))
