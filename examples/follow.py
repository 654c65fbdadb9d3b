"""This process follows a log while another process, its owner, appends to it.

    python examples/follow.py

Readers take no lock and need no server: they open the same folder and see what the owner has published.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

from holdfast.errors import NotALog
from holdfast.storage import LogReader, open_log

MESSAGES = 50


def own(folder: str) -> None:
    """Append a message now and then; each is on disk before it becomes visible."""
    with open_log(folder) as log:
        for number in range(MESSAGES):
            log.append_one(f"message {number}".encode())
            time.sleep(0.01)


def follow(folder: str, owner: subprocess.Popen[bytes]) -> None:
    """Print messages as they come, until the last one, or until the owner is gone."""
    reader, offset, alive = None, 0, True
    while offset < MESSAGES and alive:
        alive = owner.poll() is None
        try:
            reader = reader or LogReader(folder)
        except NotALog:  # its owner has not made it yet
            time.sleep(0.01)
            continue
        for record in reader.records(offset):
            if record.offset % 10 == 0:
                late_ms = (time.time_ns() - record.timestamp_ns) / 1e6
                print(f"offset {record.offset}: {record.value.decode()!r}, seen {late_ms:.1f} ms after its append")
            offset = record.offset + 1
        time.sleep(0.002)  # nothing new: look again soon
    print(f"the reader has seen {offset} messages; the owner appended {MESSAGES}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        own(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            child = subprocess.Popen([sys.executable, __file__, f"{temporary}/followed"])
            try:
                follow(f"{temporary}/followed", child)
                sys.exit(child.wait(timeout=30))
            finally:
                child.kill()  # no effect on a process that has ended
