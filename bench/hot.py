"""`python -m bench.hot`: the CPU time of each verb, one message at a time, against its goal.

Where `python -m bench` compares with peers by wall time, this asks what one call costs the processor. A sample is
timed in slices of a few hundred calls, short enough to fall between the turns of other programs, and its best slice
counts: on a busy machine the minimum is the figure, since others only ever add to it. What happens once in thousands of
calls, such as a new segment, is therefore not in it. Peers that are installed do the same work.

To compare two versions, run them in turn: `PYTHONPATH=OLD/src python -m bench.hot`, then the new one, and again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import holdfast
from bench.floors import Floors
from bench.goals import Figures, Goal, Sample, run
from bench.harness import missing_modules
from bench.queues.base import Queue
from bench.queues.lmdb_by_hand import LmdbQueue
from bench.queues.persist_queue import PersistAckQueue
from bench.queues.queuelib_disk import QueuelibQueue
from bench.queues.rocksdict_by_hand import RocksdictQueue
from bench.queues.sqlite_by_hand import SqliteClaimed
from holdfast.settings import BrokerSettings

_BODY = os.urandom(100)
_SLICE = 200
_SLICES = 25
_COUNT = _SLICES * _SLICE
_MANY = 100
_PEER_SLICES = 5  # some take a millisecond a message
_PEERS: tuple[type[Queue], ...] = (SqliteClaimed, LmdbQueue, RocksdictQueue, QueuelibQueue, PersistAckQueue)
_THREADS = 16
_TOPICS = 500


GOALS = {
    "put": Goal(1.3),
    "put from 16 threads": Goal(250, "k/s"),
    "put_many(100), a message": Goal(0.12),
    "get + ack": Goal(3.4),
    "get_many + ack_many(100), a message": Goal(0.6),
    "put with key, headers, correlation id": Goal(3),
    "get + ack of it": Goal(None, "µs"),
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
    "floor: put": Goal(None, "µs"),
    "floor: get + ack": Goal(None, "µs"),
    "floor: get_many + ack_many(100), a message": Goal(None, "µs"),
    "floor: put with key, headers, correlation id": Goal(None, "µs"),
}


def _cpu_us(call: Callable[[], object], count: int) -> float:
    began = time.process_time_ns()
    call()
    return (time.process_time_ns() - began) / 1000 / count


def _best_us(call: Callable[[], object]) -> float:
    """The CPU time of one of the `_SLICE` calls that this makes, in the best of many slices."""
    return min(_cpu_us(call, _SLICE) for _ in range(_SLICES))


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
        for _ in range(_SLICE):
            call(*args, **options)

    return run


def _plain(folder: Path) -> Figures:
    with _queue(folder) as queue:
        put = _best_us(_times(queue.put, _BODY))

        def take() -> None:
            get = queue.get
            for _ in range(_SLICE):
                get().ack()

        return {"put": put, "get + ack": _best_us(take)}


def _many(folder: Path) -> Figures:
    with _queue(folder) as queue:
        bodies = [_BODY] * _MANY

        def put() -> None:
            for _ in range(_SLICE // _MANY):
                queue.put_many(bodies)

        def take() -> None:
            for _ in range(_SLICE // _MANY):
                queue.ack_many(queue.get_many(_MANY))

        return {
            "put_many(100), a message": _best_us(put),
            "get_many + ack_many(100), a message": _best_us(take),
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
            for _ in range(_SLICE):
                queue.get().ack()

        return {"put with key, headers, correlation id": _best_us(put), "get + ack of it": _best_us(get)}


def _special(folder: Path) -> Figures:
    with _queue(folder) as queue:
        ids = iter(map(str, range(10**9)))
        queue.put(_BODY, delay=3600)
        queue.put(_BODY, dedup_id="first")

        def dedup() -> None:
            for _ in range(_SLICE):
                queue.put(_BODY, dedup_id=next(ids))

        return {
            "put with ttl": _best_us(_times(queue.put, _BODY, ttl=3600)),
            "put with dedup id": _best_us(dedup),
            "delayed put": _best_us(_times(queue.put, _BODY, delay=3600)),
        }


def _publish(folder: Path) -> Figures:
    with holdfast.open_broker(folder / "data", durability="os") as broker:
        broker.create_topic("hot", partitions=3)
        for _ in range(200):
            broker.publish("hot", _BODY, key="warm")
        return {
            "broker.publish": _best_us(_times(broker.publish, "hot", _BODY)),
            "broker.publish with key": _best_us(_times(broker.publish, "hot", _BODY, key="k1")),
        }


def _tasks(folder: Path) -> Figures:
    async def run() -> Figures:
        async with holdfast.aio.open(folder / "data", durability="os") as queue:
            figures: Figures = {}

            async def timed(name: str, work: Callable[[], Any]) -> None:
                slices = []
                for _ in range(_SLICES):
                    began = time.process_time_ns()
                    await work()
                    slices.append((time.process_time_ns() - began) / 1000 / _SLICE)
                figures[name] = min(slices)

            async def put() -> None:
                for _ in range(_SLICE):
                    await queue.put(_BODY)

            async def keyed() -> None:
                for _ in range(_SLICE):
                    await queue.put(_BODY, key="k1")

            async def take() -> None:
                for _ in range(_SLICE):
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
        given = iter([{option: each[i % len(each)] for option, each in options.items()} for i in range(_COUNT)])
        taken: list[Any] = []
        to_ack = iter(taken)

        def put() -> None:
            for each in islice(given, _SLICE):
                queue.put(_BODY, **each)

        def get() -> None:
            for _ in range(_SLICE):
                taken.append(queue.get())

        def ack() -> None:
            for message in islice(to_ack, _SLICE):
                message.ack()

        return {f"{name}: {call.__name__}": _best_us(call) for call in (put, get, ack)}


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


def _floors(folder: Path) -> Figures:
    """What some of these calls cannot do without: see `bench.floors`."""
    floors, found = Floors(folder), {}
    for name, (step, messages) in floors.steps.items():
        found[f"floor: {name}"] = _best_us(_times(step)) / messages
    return found


def _peer(kind: type[Queue], folder: Path) -> Figures:
    peer = kind(len(_BODY))
    peer.open(folder)
    bodies, many = [_BODY] * _SLICE, [_BODY] * _MANY
    slices = _PEER_SLICES

    def best_us(call: Callable[[], object], count: int) -> float:
        return min(_cpu_us(call, count) for _ in range(slices))

    try:
        return {
            f"{peer.name}: put": best_us(lambda: peer.put_each(bodies), _SLICE),
            f"{peer.name}: get + ack": best_us(lambda: peer.take_each(_SLICE), _SLICE),
            f"{peer.name}: put_many(100), a message": best_us(lambda: peer.put_many(many), _MANY),
            f"{peer.name}: get_many + ack_many(100), a message": best_us(lambda: peer.take_many(_MANY), _MANY),
        }
    finally:
        peer.close()


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
    "floors": _floors,
    **{f"peer {kind.name}": partial(_peer, kind) for kind in _PEERS if not missing_modules(kind.needs)},
}
GOALS |= {
    f"{kind.name}: {row}": Goal(None, "µs")
    for kind in _PEERS
    for row in ("put", "get + ack", "put_many(100), a message", "get_many + ack_many(100), a message")
}
MISSING = {kind.name: missing_modules(kind.needs) for kind in _PEERS}


def main() -> None:
    """Measure the CPU time of each verb and show it beside its goal."""
    run("bench.hot", "Measure the CPU time of each verb and show it beside its goal.", SAMPLES, GOALS, MISSING)


if __name__ == "__main__":
    main()
