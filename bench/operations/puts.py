"""Puts that return when the bytes are in the page cache: alone, and a hundred at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from bench.harness import Case, Operation, Timed
from bench.peers import OS_CLASS, Peer
from bench.scale import BATCH, PASS_MESSAGES, Scale, passes_that_fill

PUT = Operation("put", "One message a call, one caller; no sync. What a put survives differs: see the column.")
PUT_MANY = Operation(f"put many ({BATCH})", f"{BATCH} messages a call, one caller; no sync.")


def cases(scale: Scale) -> list[Case]:
    """Everybody whose put does not sync."""
    single = [peer_case(PUT, peer, partial(put_each, peer, scale)) for peer in OS_CLASS]
    many = [peer_case(PUT_MANY, peer, partial(put_many, peer, scale)) for peer in OS_CLASS]
    return single + many


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


def repeated(run_pass: Callable[[], object], scale: Scale, messages_each: int) -> Timed:
    """Warm up now; what is returned repeats the pass for about the scale's time."""
    passes = passes_that_fill(run_pass, scale, messages_each)

    def timed() -> int:
        for _ in range(passes):
            run_pass()
        return passes * messages_each

    return timed
