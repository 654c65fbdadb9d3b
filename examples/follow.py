"""This process follows a log while another process, its owner, appends to it.

    python examples/follow.py

Readers take no lock and need no server: they open the same folder, see what the owner has published, and are woken
when there is more.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

from holdfast.storage import LogReader, open_log

MESSAGES = 50


def own(folder: str) -> None:
    """Append a message now and then; each is on disk before it becomes visible."""
    with open_log(folder) as log:
        for number in range(MESSAGES):
            log.append_one(f"message {number}".encode())
            time.sleep(0.01)


def follow(folder: str) -> None:
    """Print messages as they come, until the last one, or until none has come for a while."""
    seen = 0
    for record in LogReader(folder).follow(0, timeout=30):
        seen += 1
        if record.offset % 10 == 0:
            late_ms = (time.time_ns() - record.timestamp_ns) / 1e6
            print(f"offset {record.offset}: {record.value.decode()!r}, seen {late_ms:.1f} ms after its append")
        if seen == MESSAGES:
            break
    print(f"the reader has seen {seen} messages; the owner appended {MESSAGES}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        own(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            folder = f"{temporary}/followed"
            open_log(folder).close()  # so that there is something to read
            child = subprocess.Popen([sys.executable, __file__, folder])
            try:
                follow(folder)
                sys.exit(child.wait(timeout=30))
            finally:
                child.kill()  # no effect on a process that has ended
