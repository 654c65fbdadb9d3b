"""Two consumers share the partitions of a topic; one leaves, the other goes on where it was; then all of it again.

python examples/stream_consumers.py
"""

import tempfile
from collections import Counter

import holdfast

CLICKS = 1_000


def drain(*consumers: holdfast.Consumer) -> Counter:
    """Poll them in turn until nothing comes any more; answers how often each offset was seen."""
    seen: Counter[tuple[int, int]] = Counter()
    quiet = 0
    while quiet < 3:
        found = [message for consumer in consumers for message in consumer.poll(timeout=0.05, max_records=100)]
        seen.update((message.partition, message.offset) for message in found)
        quiet = 0 if found else quiet + 1
    return seen


def main(folder: str) -> None:
    with holdfast.open_broker(folder, body_type=str) as broker:
        broker.create_topic("clicks", partitions=4)
        with broker.producer() as producer:
            for number in range(CLICKS):
                producer.send("clicks", f"click {number}", key=f"user-{number % 40}")

        first = broker.consumer("clicks", group="statistics")
        print("alone:", len(first.assignment()), "partitions")
        second = broker.consumer("clicks", group="statistics")
        seen = drain(first, second)  # the first one gives two back, the second one takes them
        print("together:", len(first.assignment()), "and", len(second.assignment()), "partitions")
        print(f"read: {seen.total()}, each once: {set(seen.values()) == {1}}")

        second.close()  # commits, and gives its partitions back
        broker.publish_many("clicks", ["late click"] * 10)
        print(f"after one has left: {drain(first).total()} more, lag {sum(lag.messages for lag in first.lag())}")
        first.close()

        plan = broker.reset_offsets("statistics", "clicks", to="earliest", dry_run=True)
        print(f"a reset would bring {sum(reset.messages for reset in plan)} again")
        broker.reset_offsets("statistics", "clicks", to="earliest")
        with broker.consumer("clicks", group="statistics", auto_commit=False) as again:
            print(f"again: {drain(again).total()}")
            again.commit()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(f"{temporary}/shop")
