"""The Celery program that `bench.celery` runs, as its worker and as what sends.

`BENCH_CELERY` has its settings as JSON, and tasks that tell a time write it to the file `BENCH_NOTES`.
"""

from __future__ import annotations

import json
import os
import sys
import time

from celery import Celery

app = Celery("bench")
app.conf.update(json.loads(os.environ.get("BENCH_CELERY", "{}")))


ran: list[None] = []  # one for each task that this process has run


def _note(words: str) -> None:
    descriptor = os.open(os.environ["BENCH_NOTES"], os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)
    os.write(descriptor, f"{words} {time.monotonic_ns()}\n".encode())
    os.close(descriptor)


@app.task(name="nothing", ignore_result=True)
def nothing() -> None:
    ran.append(None)


@app.task(name="mark", ignore_result=True)
def mark(words: str) -> None:
    _note(f"{words} {len(ran)}")


def send(count: int, most_s: float) -> list[int]:
    """Send so many tasks, or as many as can be sent in this time; returns how long each call took."""
    took: list[int] = []
    mark.delay("first")
    ends = time.monotonic() + most_s
    while len(took) < count and time.monotonic() < ends:
        began = time.perf_counter_ns()
        nothing.delay()
        took.append(time.perf_counter_ns() - began)
    mark.delay("last")
    return took


def send_slowly(count: int, pause_s: float) -> list[int]:
    """Send one task after the other to a worker that has nothing to do. Before them, one that connects."""
    mark.delay("first")
    for _ in range(count):
        mark.delay(f"sent {time.monotonic_ns()}")
        time.sleep(pause_s)
    return []


if __name__ == "__main__":
    how, number, seconds = sys.argv[1:]
    print(json.dumps({"all": send, "slowly": send_slowly}[how](int(number), float(seconds))))
