"""Open a log, append, read from an offset and from a time, keep a position, open it again.

    python examples/log_basics.py [FOLDER]

Without a folder it uses a temporary one and removes it.
"""

from __future__ import annotations

import sys
import tempfile
import time

from holdfast.model import Batch
from holdfast.settings import LogSettings
from holdfast.storage import open_log


def tour(folder: str) -> None:
    """Write in one opening, read in the next."""
    with open_log(folder) as log:
        # Returns when the message is on disk: the default durability is fsync.
        first = log.append_one(b"order 1 placed")
        print(f"offset {first.offset} survives a power cut ({first.durability})")

        # A list is one batch: all of it is stored, or none. This one asks for less and returns sooner.
        more = log.append([b"order 2 placed", b"order 3 placed"], durability="os")
        print(f"offsets {more.offset} to {more.next_offset - 1} survive kill -9 ({more.durability})")

        # Keys, headers and more are columns of the batch.
        log.append(Batch(values=[b"order 1 paid"], keys=[b"1"], headers=[[("source", b"shop")]]))

        since_ns = time.time_ns()
        log.append_one(b"order 2 paid")
        place = log.position(log.end)  # an offset to keep outside the log, with its epoch

    with open_log(folder, LogSettings(durability="os")) as log:
        print(f"opened again: offsets {log.start} to {log.end - 1}, ended in order: {log.report.clean}")
        for record in log.records(log.start):
            print(f"  {record.offset}  {record.value.decode()}")
        late = log.find_time(since_ns)
        print(f"the first message since then: {next(log.records(late)).value.decode()}")
        log.check_position(place)  # raises TailLost if what was before it is gone
        print(f"nothing new since {place}: {list(log.records(place.offset)) == []}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        tour(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            tour(f"{temporary}/orders")
