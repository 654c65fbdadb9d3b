"""Puts that return when the bytes are in the page cache: alone, a hundred at a time, and from many threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from bench.harness import Case, Operation, Timed
from bench.peers import OS_CLASS, Peer
from bench.scale import BATCH, PASS_MESSAGES, Scale, passes_that_fill

_CALLERS = 16

PUT = Operation("put", "One message a call, one caller; no sync. What a put survives differs: see the column.")
PUT_MANY = Operation(f"put many ({BATCH})", f"{BATCH} messages a call, one caller; no sync.")
THREADS = Operation(
    f"put, {_CALLERS} threads",
    f"{_CALLERS} threads at once, each puts one message a call; no sync. All messages count.",
)


def cases(scale: Scale) -> list[Case]:
    """Everybody whose put does not sync."""
    single = [peer_case(PUT, peer, partial(put_each, peer, scale)) for peer in OS_CLASS]
    many = [peer_case(PUT_MANY, peer, partial(put_many, peer, scale)) for peer in OS_CLASS]
    threads = [
        peer_case(THREADS, peer, partial(put_from_threads, peer, scale, _CALLERS)) for peer in OS_CLASS if peer.threads
    ]
    return single + many + threads


def peer_case(
    operation: Operation,
    peer: type[Peer],
    prepare: Callable[[Path], AbstractContextManager[Timed]],
    *,
    name: str = "",
    also_needs: tuple[str, ...] = (),
) -> Case:
    """A case that carries what its peer says about itself."""
    return Case(operation, name or peer.name, prepare, peer.survives, peer.note, peer.needs + also_needs)


@contextmanager
def opened(peer: type[Peer], scale: Scale, folder: Path) -> Iterator[Peer]:
    """The peer, open in the folder; closed afterwards."""
    queue = peer(scale.body_bytes)
    queue.open(folder)
    try:
        yield queue
    finally:
        queue.close()


@contextmanager
def put_each(peer: type[Peer], scale: Scale, folder: Path) -> Iterator[Timed]:
    bodies = scale.bodies()
    with opened(peer, scale, folder) as queue:
        yield repeated(lambda: queue.put_each(bodies), scale, PASS_MESSAGES)


@contextmanager
def put_many(peer: type[Peer], scale: Scale, folder: Path) -> Iterator[Timed]:
    bodies = scale.bodies()
    first, second = bodies[:BATCH], bodies[BATCH:]
    with opened(peer, scale, folder) as queue:

        def run_pass() -> None:
            queue.put_many(first)
            queue.put_many(second)

        yield repeated(run_pass, scale, PASS_MESSAGES)


@contextmanager
def put_from_threads(peer: type[Peer], scale: Scale, callers: int, folder: Path) -> Iterator[Timed]:
    """Threads that put one message at a time, all at once."""
    (body,) = scale.bodies(1)
    with opened(peer, scale, folder) as queue, ThreadPoolExecutor(callers) as pool:

        def warm_up() -> None:
            _start_threads(pool, queue, body, callers, 2)()

        each = 2 * passes_that_fill(warm_up, scale, 2 * callers)
        yield _start_threads(pool, queue, body, callers, each)


def _start_threads(pool: ThreadPoolExecutor, queue: Peer, body: bytes, callers: int, each: int) -> Timed:
    """Threads that have put once and stand ready; the answer lets them run and waits for them."""
    ready, go = threading.Barrier(callers + 1), threading.Event()

    def caller() -> None:
        queue.put(body)
        ready.wait()
        go.wait()
        put = queue.put
        for _ in range(each):
            put(body)

    running: list[Future[None]] = [pool.submit(caller) for _ in range(callers)]
    ready.wait(timeout=60)

    def timed() -> int:
        go.set()
        for future in running:
            future.result()
        return callers * each

    return timed


def repeated(run_pass: Callable[[], object], scale: Scale, messages_each: int) -> Timed:
    """Warm up now; what is returned repeats the pass for about the scale's time."""
    passes = passes_that_fill(run_pass, scale, messages_each)

    def timed() -> int:
        for _ in range(passes):
            run_pass()
        return passes * messages_each

    return timed
