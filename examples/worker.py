"""A worker: handlers in threads, retries, a time limit, an end in order."""

import logging
import tempfile
import threading
import time

import holdfast

seen: list[str] = []
done = threading.Event()
too_long = threading.Event()


def handle(message: holdfast.Message[str]) -> None:
    """Return: ack. Raise: nack with the error, again after the queue's backoff."""
    if message.body == "nonsense":
        raise holdfast.Reject("this can never work")  # straight to the dead letters
    if message.body == "early" and message.attempt == 1:
        raise holdfast.Retry("the bank is closed", delay=0.05)
    if message.body == "flaky" and message.attempt < 3:
        raise ConnectionError("no route to the bank")
    if message.body == "stuck" and message.attempt == 1:
        too_long.wait()  # a thread cannot be killed: it is left behind, and its message goes to another
        return
    time.sleep(0.01)  # the work
    seen.append(f"{message.body} (attempt {message.attempt})")
    if len(seen) == 13:
        done.set()


def main(folder: str) -> None:
    with holdfast.open(folder, body_type=str, backoff_ms=10) as queue:
        queue.put_many(["nonsense", "early", "flaky", "stuck", *(f"order {number}" for number in range(10))])
        worker = holdfast.Worker(handle, queue=queue, concurrency=4, time_limit=0.5)
        with worker:  # or worker.run(), which returns after SIGTERM or Ctrl-C
            done.wait()
        health = worker.health()
        print(sorted(text for text in seen if "order" not in text))
        print(f"handled {health.handled}, failed {health.failed}, retried {health.retried}, rejected {health.rejected}")
        print(f"timed out: {health.timed_out}, dead: {[letter.body for letter in queue.dead.list()]}")
        stats = queue.stats()
        print(f"left: {stats.ready + stats.leased + stats.delayed}")
        too_long.set()


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # what failed is on the screen below
    with tempfile.TemporaryDirectory() as temporary:
        main(f"{temporary}/orders")
