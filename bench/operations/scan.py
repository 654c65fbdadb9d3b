"""Read everything back, from the first message to the last."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.harness import OURS, Case, Operation, Timed
from bench.operations.puts import opened, peer_case
from bench.peers import OS_CLASS, Peer
from bench.peers.ours import Holdfast
from bench.peers.persist_queue import PersistQueueSqlite
from bench.scale import BATCH, Scale

SCAN = Operation(
    "scan",
    f"Read all messages back, written {BATCH} a call unless it says otherwise; files in the page cache.",
)


def cases(scale: Scale) -> list[Case]:
    """Everybody who can read all in one go."""
    peers: list[type[Peer]] = [peer for peer in OS_CLASS if peer.scans]
    peers.append(PersistQueueSqlite)
    batched = [peer_case(SCAN, peer, partial(_scan, peer, BATCH, scale)) for peer in peers]
    singles = peer_case(SCAN, Holdfast, partial(_scan, Holdfast, 1, scale), name=f"{OURS}, single puts")
    return [*batched, singles]


@contextmanager
def _scan(peer: type[Peer], batch: int, scale: Scale, folder: Path) -> Iterator[Timed]:
    with opened(peer, scale, folder) as queue:
        _fill(queue.put_each if batch == 1 else queue.put_many, scale)
        yield queue.read_all


def _fill(put: Callable[[list[bytes]], None], scale: Scale) -> None:
    """By time, since some peers need a thousand times longer; capped by size."""
    bodies = scale.bodies(BATCH)
    ends = time.monotonic() + scale.seconds
    for _ in range(scale.most_messages // BATCH):
        put(bodies)
        if time.monotonic() > ends:
            return
