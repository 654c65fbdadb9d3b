"""`python -m bench.hot`: the CPU time of each verb, one message at a time, against its goal.

Where `python -m bench` compares with peers by wall time, this asks what one call of ours costs the processor. It shows
minima and medians over the rounds; on a busy machine the minimum is the figure, since others only ever add to it. To
compare two versions, run them in turn: `PYTHONPATH=OLD/src python -m bench.hot`, then the new one, and again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import holdfast
from bench.goals import Figures, Goal, Sample, run
from holdfast.settings import BrokerSettings

_BODY = os.urandom(100)
_COUNT = 5_000
_MANY = 100
_THREADS = 16
_TOPICS = 500


GOALS = {
    "put": Goal(1.3),
    "put from 16 threads": Goal(250, "k/s"),
    "put_many(100), a message": Goal(0.12),
    "get + ack": Goal(3.4),
    "get_many + ack_many(100), a message": Goal(0.6),
    "put with key, headers, correlation id": Goal(3),
    "get of it": Goal(3.4),
    "broker.publish": Goal(3),
    "broker.publish with key": Goal(3),
    "tasks: put": Goal(2),
    "tasks: get + ack": Goal(4.5),
    "tasks: put with key": Goal(3),
    "priorities: put": Goal(3),
    "priorities: get": Goal(5),
    "priorities: ack": Goal(1.5),
    "key order: put": Goal(3),
    "key order: get": Goal(8),
    "key order: ack": Goal(4),
    "traced: put": Goal(6),
    "traced: get": Goal(8),
    "traced: ack": Goal(6),
    "delayed put": Goal(4),
    "put with dedup id": Goal(4),
    "put with ttl": Goal(4),
    "open after kill, 100,000 messages": Goal(0.2, "s"),
    "publish in turn to 500 topics": Goal(20),
    "the same, few descriptors": Goal(300),
    "the same, few open partitions": Goal(None, "µs"),
    "on disk for 100 bytes": Goal(140, "bytes"),
}


def _cpu_us(call: Callable[[], object], count: int) -> float:
    began = time.process_time_ns()
    call()
    return (time.process_time_ns() - began) / 1000 / count


@contextmanager
def _queue(folder: Path, **settings: Any) -> Iterator[Any]:
    with holdfast.open(folder / "data", durability="os", **settings) as queue:
        _warm(queue.put, queue.get)
        yield queue


def _warm(put: Callable[..., Any], get: Callable[..., Any]) -> None:
    for _ in range(200):
        put(_BODY)
    for _ in range(200):
        get().ack()


def _times(call: Callable[..., Any], *args: Any, **options: Any) -> Callable[[], None]:
    """Call it so many times. The loop itself costs about 20 ns a round."""

    def run() -> None:
        for _ in range(_COUNT):
            call(*args, **options)

    return run


def _plain(folder: Path) -> Figures:
    with _queue(folder) as queue:
        put = _cpu_us(_times(queue.put, _BODY), _COUNT)

        def take() -> None:
            get = queue.get
            for _ in range(_COUNT):
                get().ack()

        return {"put": put, "get + ack": _cpu_us(take, _COUNT)}


def _many(folder: Path) -> Figures:
    with _queue(folder) as queue:
        bodies = [_BODY] * _MANY

        def put() -> None:
            for _ in range(_COUNT // _MANY):
                queue.put_many(bodies)

        def take() -> None:
            for _ in range(_COUNT // _MANY):
                queue.ack_many(queue.get_many(_MANY))

        return {
            "put_many(100), a message": _cpu_us(put, _COUNT),
            "get_many + ack_many(100), a message": _cpu_us(take, _COUNT),
        }


def _threads(folder: Path) -> Figures:
    with _queue(folder) as queue:
        each = 20 * _COUNT // _THREADS
        start = threading.Barrier(_THREADS + 1)

        def work() -> None:
            start.wait()
            for _ in range(each):
                queue.put(_BODY)

        threads = [threading.Thread(target=work) for _ in range(_THREADS)]
        for thread in threads:
            thread.start()
        start.wait()
        began = time.perf_counter()
        for thread in threads:
            thread.join()
        return {"put from 16 threads": each * _THREADS / (time.perf_counter() - began) / 1000}


def _options(folder: Path) -> Figures:
    with _queue(folder) as queue:
        put = _times(queue.put, _BODY, key="k1", headers={"kind": "test"}, correlation_id="c-17")

        def get() -> None:
            for _ in range(_COUNT):
                queue.get().ack()

        return {"put with key, headers, correlation id": _cpu_us(put, _COUNT), "get of it": _cpu_us(get, _COUNT)}


def _special(folder: Path) -> Figures:
    with _queue(folder) as queue:
        ids = iter(map(str, range(10**9)))
        queue.put(_BODY, delay=3600)
        queue.put(_BODY, dedup_id="first")

        def dedup() -> None:
            for _ in range(_COUNT):
                queue.put(_BODY, dedup_id=next(ids))

        return {
            "put with ttl": _cpu_us(_times(queue.put, _BODY, ttl=3600), _COUNT),
            "put with dedup id": _cpu_us(dedup, _COUNT),
            "delayed put": _cpu_us(_times(queue.put, _BODY, delay=3600), _COUNT),
        }


def _publish(folder: Path) -> Figures:
    with holdfast.open_broker(folder / "data", durability="os") as broker:
        broker.create_topic("hot", partitions=3)
        for _ in range(200):
            broker.publish("hot", _BODY, key="warm")
        return {
            "broker.publish": _cpu_us(_times(broker.publish, "hot", _BODY), _COUNT),
            "broker.publish with key": _cpu_us(_times(broker.publish, "hot", _BODY, key="k1"), _COUNT),
        }


def _tasks(folder: Path) -> Figures:
    async def run() -> Figures:
        async with holdfast.aio.open(folder / "data", durability="os") as queue:
            figures: Figures = {}

            async def timed(name: str, work: Callable[[], Any]) -> None:
                began = time.process_time_ns()
                await work()
                figures[name] = (time.process_time_ns() - began) / 1000 / _COUNT

            async def put() -> None:
                for _ in range(_COUNT):
                    await queue.put(_BODY)

            async def keyed() -> None:
                for _ in range(_COUNT):
                    await queue.put(_BODY, key="k1")

            async def take() -> None:
                for _ in range(_COUNT):
                    await (await queue.get()).ack()

            await put()
            await take()
            await timed("tasks: put", put)
            await timed("tasks: get + ack", take)
            await timed("tasks: put with key", keyed)
            return figures

    return asyncio.run(run())


def _three(folder: Path, name: str, options: dict[str, Any], **settings: Any) -> Figures:
    """Put, get and ack apart. The queue holds as many messages as are put."""
    with _queue(folder, **settings) as queue:
        taken: list[Any] = []
        numbers = range(_COUNT)

        def put() -> None:
            for i in numbers:
                queue.put(_BODY, **{option: values[i % len(values)] for option, values in options.items()})

        def get() -> None:
            for _ in numbers:
                taken.append(queue.get())

        def ack() -> None:
            for message in taken:
                message.ack()

        return {f"{name}: {call.__name__}": _cpu_us(call, _COUNT) for call in (put, get, ack)}


def _priorities(folder: Path) -> Figures:
    return _three(folder, "priorities", {"priority": list(range(1, 10))})


def _key_order(folder: Path) -> Figures:
    return _three(folder, "key order", {"key": [f"k{i}" for i in range(_COUNT)]}, key_order=True)


def _traced(folder: Path) -> Figures:
    return _three(folder, "traced", {}, trace_sample=1.0)


def _reopen(folder: Path) -> Figures:
    count = 100_000
    child = os.fork()
    if child == 0:
        queue = holdfast.open(folder / "data", durability="os")
        for _ in range(count):
            queue.put(_BODY)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    log = folder / "data" / "topics" / "data" / "0" / "log"
    size = sum(_held_bytes(path) for path in log.glob("*.log")) if log.exists() else 0.0

    opened: list[Any] = []
    seconds = _cpu_us(lambda: opened.append(holdfast.open(folder / "data", durability="os")), 1) / 1e6
    opened[0].close()
    return {"open after kill, 100,000 messages": seconds, "on disk for 100 bytes": size / count}


def _held_bytes(path: Path) -> int:
    """How long a file is without the zeros at its end, which are only reserved."""
    return len(path.read_bytes().rstrip(b"\0"))


def _in_turn(folder: Path, **settings: Any) -> float:
    with holdfast.open_broker(folder / "data", durability="os", **settings) as broker:
        names = [f"t{i}" for i in range(_TOPICS)]
        for name in names:
            broker.create_topic(name)
            broker.publish(name, _BODY)

        def publish() -> None:
            for _ in range(4):
                for name in names:
                    broker.publish(name, _BODY)

        return _cpu_us(publish, 4 * _TOPICS)


def _topics(folder: Path) -> Figures:
    return {"publish in turn to 500 topics": _in_turn(folder)}


def _topics_tight(folder: Path) -> Figures:
    return {"the same, few descriptors": _in_turn(folder, settings=BrokerSettings(open_files=500))}


def _topics_closed(folder: Path) -> Figures:
    """Whole topics are closed and opened, with all that is known of their groups, not just files."""
    return {"the same, few open partitions": _in_turn(folder, settings=BrokerSettings(open_partitions=100))}


SAMPLES: dict[str, Sample] = {
    "plain": _plain,
    "many": _many,
    "threads": _threads,
    "options": _options,
    "special": _special,
    "publish": _publish,
    "tasks": _tasks,
    "priorities": _priorities,
    "key order": _key_order,
    "traced": _traced,
    "reopen": _reopen,
    "topics": _topics,
    "topics, tight": _topics_tight,
    "topics, closed": _topics_closed,
}


def main() -> None:
    """Measure the CPU time of each verb and show it beside its goal."""
    run("bench.hot", "Measure the CPU time of each verb and show it beside its goal.", SAMPLES, GOALS)


if __name__ == "__main__":
    main()
