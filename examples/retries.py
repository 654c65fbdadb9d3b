"""A handler that fails: again after a while, then to the dead letters with every error, and back.

python examples/retries.py
"""

import tempfile
from contextlib import suppress

import holdfast

BANK = {"answers": False}


def pay(order: str) -> None:
    if not BANK["answers"]:
        raise ConnectionError(f"the bank did not answer for {order}")
    print(f"{order} is paid")


def drain(queue: holdfast.Queue) -> None:
    with suppress(holdfast.Empty):
        while True:
            with suppress(ConnectionError), queue.get(timeout=1) as message:  # an error nacks it, and goes on
                print(f"attempt {message.attempt}")
                pay(message.body)


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as temporary,
        holdfast.open(f"{temporary}/payments", body_type=str, max_attempts=3, backoff_ms=50) as queue,
    ):
        queue.put("order 7")
        drain(queue)
        (letter,) = queue.dead.list()
        print(f"dead: {letter.reason}, {len(letter.failures)} errors, the last: {letter.error.splitlines()[0]}")
        BANK["answers"] = True
        print("redriven:", queue.dead.redrive(where='error ~ "bank"').done)
        drain(queue)
