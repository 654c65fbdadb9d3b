"""Messages that come as an Arrow array, as from Spark or pandas: no Python object for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from bench.harness import Case, Operation, Timed
from bench.operations.puts import opened, peer_case, repeated
from bench.peers.ours import Holdfast
from bench.peers.raw_log import RawLog
from bench.scale import Scale

PUT_ARROW = Operation(
    "put from Arrow", "A pyarrow BinaryArray of 100,000 messages a call (20,000 with --quick); no sync."
)


def cases(scale: Scale) -> list[Case]:
    """Ours, ours by way of Python objects, and the bare write of the array's bytes."""
    return [
        peer_case(PUT_ARROW, Holdfast, partial(_ours, scale), also_needs=("pyarrow",)),
        peer_case(
            PUT_ARROW,
            Holdfast,
            partial(_as_list, scale),
            name="holdfast, to_pylist()",
            also_needs=("pyarrow",),
        ),
        peer_case(PUT_ARROW, RawLog, partial(_raw, scale), also_needs=("pyarrow",)),
    ]


def _array(scale: Scale) -> Any:
    import pyarrow as pa

    return pa.array(scale.bodies(scale.arrow_messages), pa.binary())


@contextmanager
def _ours(scale: Scale, folder: Path) -> Iterator[Timed]:
    array = _array(scale)
    with opened(Holdfast, scale, folder) as queue:
        put_arrow = cast(Holdfast, queue).put_arrow
        yield repeated(lambda: put_arrow(array), scale, scale.arrow_messages)


@contextmanager
def _as_list(scale: Scale, folder: Path) -> Iterator[Timed]:
    array = _array(scale)
    with opened(Holdfast, scale, folder) as queue:
        yield repeated(lambda: queue.put_many(array.to_pylist()), scale, scale.arrow_messages)


@contextmanager
def _raw(scale: Scale, folder: Path) -> Iterator[Timed]:
    array = _array(scale)
    with opened(RawLog, scale, folder) as queue:
        put_buffer = cast(RawLog, queue).put_buffer
        yield repeated(lambda: put_buffer(memoryview(array.buffers()[2])), scale, scale.arrow_messages)
