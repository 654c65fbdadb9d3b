"""One topic, two groups: each gets every message, has its own retries and its own dead letters.

python examples/topics_and_groups.py
"""

import tempfile
import threading
from collections import Counter

import holdfast

WORKERS, ORDERS = 3, 300


def bill(order: str) -> None:
    if order == "order 13":
        raise ValueError("this order has no price")


def work(billing: holdfast.Group, done: Counter) -> None:
    while True:
        try:
            with billing.receive(timeout=0.5) as message:  # from all partitions, in turn
                bill(message.body)
                done[message.partition] += 1
        except ValueError:
            continue  # nacked: it comes again, and is a dead letter after the second time
        except holdfast.Empty:
            return


def main(folder: str) -> None:
    with holdfast.open_broker(folder, body_type=str) as broker:
        broker.create_topic("orders", partitions=3)
        orders = [holdfast.NewMessage(body=f"order {n}", key=f"customer-{n % 50}") for n in range(ORDERS)]
        broker.publish_many("orders", orders)

        billing = broker.group("orders", "billing", max_attempts=2, backoff_ms=10)
        shipping = broker.group("orders", "shipping")
        done: Counter[int] = Counter()
        workers = [threading.Thread(target=work, args=(billing, done)) for _ in range(WORKERS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        print(f"billed: {done.total()}, from partitions {sorted(done)}")
        print(f"dead in billing: {[letter.body for letter in billing.dead.list()]}")

        shipped = shipping.receive_many(ORDERS)
        shipping.ack_many(shipped)
        print(f"shipped: {len(shipped)}, dead in shipping: {len(shipping.dead.list())}")
        for group in broker.groups("orders"):
            print(f"{group.name}: {group.mode} mode, {group.lag} left")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(f"{temporary}/shop")
