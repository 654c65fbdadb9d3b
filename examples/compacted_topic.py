"""A topic that says how things are: the last message of each key is kept, and a table is made of it at any time.

python examples/compacted_topic.py
"""

import random
import tempfile

import holdfast

PRODUCTS, CHANGES, PARTITIONS = 50, 5_000, 2


def change_prices(broker: holdfast.Broker) -> dict[str, float]:
    """Many changes of few prices; answers with the prices as they are at the end."""
    prices: dict[str, float] = {}
    with broker.producer() as producer:
        for number in range(CHANGES):
            product, price = f"product-{number % PRODUCTS}", round(random.uniform(1, 9), 2)
            producer.send("prices", price, key=product)
            prices[product] = price
    broker.publish("prices", None, key="product-7")  # a tombstone: there is no such product any more
    del prices["product-7"]
    return prices


def table(broker: holdfast.Broker, group: str) -> dict[str, float]:
    """All prices, as a newcomer sees them who reads the topic from its start."""
    prices: dict[str, float] = {}
    with broker.consumer("prices", group=group) as consumer:
        while messages := consumer.poll(timeout=0.2):
            for message in messages:
                if message.body is None:
                    prices.pop(message.key, None)
                else:
                    prices[message.key] = message.body
    return prices


def main(folder: str) -> None:
    with holdfast.open_broker(folder, body_type=float) as broker:
        broker.create_topic("prices", partitions=PARTITIONS, cleanup="compact")
        prices = change_prices(broker)
    with holdfast.open_broker(folder, body_type=float) as broker:
        broker.compact_topic("prices")  # otherwise it happens by itself, as segments fill up
        left = sum(len(broker.read("prices", partition=n, limit=10_000)) for n in range(PARTITIONS))
        print(f"stored: {CHANGES + 1}, left: {left}")
        print(f"a table of {len(prices)} prices, as it should be: {table(broker, 'shop-window') == prices}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(f"{temporary}/shop")
