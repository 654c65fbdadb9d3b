"""A process appends and is killed with -9; everything that it was told is safe is there afterwards.

    python examples/survive_kill.py

Its exit code is 1 if a message is missing, doubled or out of order.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

from holdfast.settings import LogSettings
from holdfast.storage import open_log

# No sync at all: the bytes are in the kernel's page cache, which outlives the process.
SETTINGS = LogSettings(durability="os")


def write_for_ever(folder: str) -> None:
    """Append numbers, and say each number once its append has returned."""
    with open_log(folder, SETTINGS) as log:
        while True:
            appended = log.append_one(b"message %d" % log.written_end)
            print(appended.offset, flush=True)


def kill_and_count(folder: str) -> int:
    """Answers 0 when nothing that was acknowledged is missing."""
    writer = subprocess.Popen([sys.executable, __file__, folder], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.5)
    finally:
        writer.kill()  # SIGKILL: no handler runs, nothing is closed
    said, _ = writer.communicate()
    # The kill may have cut the last line short; what ends with a newline was acknowledged.
    acknowledged = int(said[: said.rindex("\n")].rpartition("\n")[2]) + 1

    with open_log(folder, SETTINGS) as log:
        numbers = [int(record.value.split()[1]) for record in log.records(log.start)]
        print(f"killed after {acknowledged:,} acknowledged messages; the log has {len(numbers):,}")
        print(f"ended in order: {log.report.clean}; epoch {log.epoch}; cut off: {log.report.cut}")
        log.append_one(b"and on it goes")
    in_order = numbers == list(range(len(numbers)))
    whole = in_order and len(numbers) >= acknowledged
    print("nothing is lost, all in order, each once" if whole else "SOMETHING IS LOST")
    return 0 if whole else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write_for_ever(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            sys.exit(kill_and_count(f"{temporary}/killed"))
