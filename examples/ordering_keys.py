"""Many workers, and the messages of each key one at a time, in order, also when one of them has to be tried again.

python examples/ordering_keys.py
"""

import tempfile
import threading
from collections import defaultdict
from contextlib import suppress

import holdfast

ACCOUNTS, BOOKINGS, WORKERS = 20, 10, 8


def work(queue: holdfast.Queue, booked: dict, failed: set) -> None:
    while True:
        try:
            with suppress(ConnectionError), queue.get(timeout=1) as message:
                number = int(message.body)
                if number == 3 and message.key not in failed:  # the bank does not answer at first
                    failed.add(message.key)
                    raise ConnectionError
                booked[message.key].append(number)  # no lock: nobody else has a message of this key now
        except holdfast.Empty:
            return


def main(folder: str) -> None:
    booked: dict[str, list[int]] = defaultdict(list)
    failed: set[str] = set()
    with holdfast.open(folder, body_type=str, key_order=True, backoff_ms=50) as queue:
        for number in range(BOOKINGS):
            queue.put_many([holdfast.NewMessage(body=str(number), key=f"account-{n}") for n in range(ACCOUNTS)])
        workers = [threading.Thread(target=work, args=(queue, booked, failed)) for _ in range(WORKERS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    print(f"{sum(map(len, booked.values()))} bookings for {len(booked)} accounts by {WORKERS} workers")
    in_order = all(numbers == list(range(BOOKINGS)) for numbers in booked.values())
    print(f"{len(failed)} were tried again; each account in order: {in_order}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(f"{temporary}/bank")
