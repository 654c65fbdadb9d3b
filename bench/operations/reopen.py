"""How long a log takes to open after its writer was killed, until it knows its end and takes the next put."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import OURS, Case, Operation, Timed
from bench.kill import fill_and_kill
from bench.operations.puts import peer_case
from bench.peers import Peer
from bench.peers.ours import Holdfast, delete_indexes
from bench.peers.sqlite_by_hand import SqliteNormal
from bench.scale import BATCH, MIB, Scale

REOPEN = Operation(
    "open after kill",
    "The writer was killed with -9; files in the page cache. Open and first put (SQLite: open and max(id)).",
    measures="opening",
    most_rounds=3,
)


class AcknowledgedLost(Exception):
    """Fewer messages than were acknowledged: then the speed does not matter."""


@dataclass(frozen=True)
class _Variant:
    name: str
    peer: type[Peer]
    held_bytes: int
    batch: int = BATCH
    damage: Callable[[Path], None] = lambda folder: None
    learn_end: Callable[[Any], int] = lambda queue: int(queue.end())


def cases(scale: Scale) -> list[Case]:
    """Ours by batches with and without indexes, ours by single puts, and SQLite for reference."""
    full, single, small = scale.reopen_bytes, scale.reopen_single_bytes, scale.reopen_peer_bytes
    variants = [
        _Variant(OURS, Holdfast, full),
        _Variant(
            f"{OURS}, indexes deleted",
            Holdfast,
            full,
            damage=delete_indexes,
            learn_end=Holdfast.end_with_indexes,
        ),
        _Variant(f"{OURS}, {_mib(single)} of single puts", Holdfast, single, batch=1),
        _Variant(f"{SqliteNormal.name}, {_mib(small)}", SqliteNormal, small),
    ]
    return [_case(variant, scale) for variant in variants]


def _mib(count: int) -> str:
    return f"{count / MIB:.0f} MiB"


def _case(variant: _Variant, scale: Scale) -> Case:
    @contextmanager
    def prepare(folder: Path) -> Iterator[Timed]:
        count = variant.held_bytes // scale.body_bytes
        acknowledged = fill_and_kill(variant.peer, scale, folder, count, batch=variant.batch)
        variant.damage(folder)
        queue: Any = variant.peer(scale.body_bytes)

        def timed() -> int:
            queue.open(folder)
            return _checked(variant.learn_end(queue), acknowledged)

        yield timed
        queue.close()

    return peer_case(REOPEN, variant.peer, prepare, name=variant.name)


def _checked(held: int, acknowledged: int) -> int:
    if held < acknowledged:
        raise AcknowledgedLost(f"{acknowledged} acknowledged, {held} found")
    return held
