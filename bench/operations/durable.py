"""Puts that return when a power cut cannot take them: one caller, 64 threads, 64 tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

from bench.harness import Case, Operation, Timed
from bench.operations.puts import opened, peer_case, put_from_threads, repeated
from bench.peers import DURABLE, Peer
from bench.peers.ours import HoldfastSynced
from bench.scale import Scale, passes_that_fill

ALONE = Operation("durable put, 1 caller", "One message a call; each returns after a sync.")
THREADS = Operation("durable put, 64 threads", "64 threads, each puts one message at a time and waits for its sync.")
TASKS = Operation(
    "durable put, 64 tasks",
    "64 asyncio tasks do the same; peers have no async put and run in 64 threads behind the loop.",
)

# Short, because a sync takes 100 µs and more; see PASS_MESSAGES for the others.
_PASS_MESSAGES = 20


def cases(scale: Scale) -> list[Case]:
    """Everybody whose put syncs."""
    alone = [peer_case(ALONE, peer, partial(_alone, peer, scale)) for peer in DURABLE]
    threads = [
        peer_case(THREADS, peer, partial(put_from_threads, peer, scale, scale.callers))
        for peer in DURABLE
        if peer.threads
    ]
    return alone + threads + _task_cases(scale)


def _task_cases(scale: Scale) -> list[Case]:
    ours = [
        peer_case(TASKS, HoldfastSynced, partial(_our_tasks, scale)),
        peer_case(
            TASKS,
            HoldfastSynced,
            partial(_our_tasks, scale, on_uvloop=True),
            name="holdfast, uvloop",
            also_needs=("uvloop",),
        ),
    ]
    others = [peer for peer in DURABLE if peer.threads and peer is not HoldfastSynced]
    return ours + [
        peer_case(TASKS, peer, partial(_tasks_in_threads, peer, scale), name=f"{peer.name} (threads)")
        for peer in others
    ]


@contextmanager
def _alone(peer: type[Peer], scale: Scale, folder: Path) -> Iterator[Timed]:
    bodies = scale.bodies(_PASS_MESSAGES)
    with opened(peer, scale, folder) as queue:
        yield repeated(lambda: queue.put_each(bodies), scale, _PASS_MESSAGES)


@contextmanager
def _our_tasks(scale: Scale, folder: Path, *, on_uvloop: bool = False) -> Iterator[Timed]:
    with opened(HoldfastSynced, scale, folder) as queue, _loop(on_uvloop=on_uvloop) as loop:
        yield _tasks(loop, cast(HoldfastSynced, queue).put_async, scale)


@contextmanager
def _tasks_in_threads(peer: type[Peer], scale: Scale, folder: Path) -> Iterator[Timed]:
    with opened(peer, scale, folder) as queue, _loop(on_uvloop=False) as loop:
        # asyncio's own pool has cores + 4 threads: too few for 64 callers to be waiting at once.
        loop.set_default_executor(ThreadPoolExecutor(scale.callers))
        yield _tasks(loop, lambda body: asyncio.to_thread(queue.put, body), scale)


@contextmanager
def _loop(*, on_uvloop: bool) -> Iterator[asyncio.AbstractEventLoop]:
    loop = _new_loop(on_uvloop=on_uvloop)
    try:
        yield loop
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


def _new_loop(*, on_uvloop: bool) -> asyncio.AbstractEventLoop:
    if not on_uvloop:
        return asyncio.new_event_loop()
    import uvloop

    return cast(asyncio.AbstractEventLoop, uvloop.new_event_loop())


def _tasks(loop: asyncio.AbstractEventLoop, put: Callable[[bytes], Awaitable[None]], scale: Scale) -> Timed:
    (body,) = scale.bodies(1)

    async def caller(each: int) -> None:
        for _ in range(each):
            await put(body)

    async def all_callers(each: int) -> None:
        await asyncio.gather(*(caller(each) for _ in range(scale.callers)))

    each = passes_that_fill(lambda: loop.run_until_complete(all_callers(2)), scale, 2 * scale.callers) * 2

    def timed() -> int:
        loop.run_until_complete(all_callers(each))
        return scale.callers * each

    return timed
