"""Load a column of an Arrow table into a log and read it back as Arrow, without touching a message.

    python examples/arrow_load.py [MESSAGES]

Needs pyarrow: pip install '.[arrow]' in a clone.
"""

from __future__ import annotations

import sys
import tempfile
import time

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.codec.arrow import values_to_arrow
from holdfast.storage import LogReader, open_log


def load(folder: str, count: int) -> None:
    """Append the column, read it back, compare."""
    numbers = pc.cast(pa.array(range(count)), pa.string())
    column = pc.binary_join_element_wise("order ", numbers, " from Arrow", "")
    start = time.perf_counter()
    with open_log(folder) as log:
        appended = log.append_arrow(column)  # one batch, one sync
    seconds = time.perf_counter() - start
    print(f"{appended.next_offset:,} messages in, on disk, in {seconds * 1000:.0f} ms")

    reader = LogReader(folder)
    start = time.perf_counter()
    chunks = [values_to_arrow(frame) for frame in reader.read(reader.start)]
    seconds = time.perf_counter() - start
    back = pa.chunked_array(chunks)
    print(f"{len(back):,} messages out, as {len(chunks)} Arrow arrays over the mapped file, in {seconds * 1000:.0f} ms")
    print(f"the last one: {back[-1].as_py().decode()!r}")
    assert back.cast(pa.string()).equals(pa.chunked_array([column]))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        load(f"{temporary}/orders", int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
