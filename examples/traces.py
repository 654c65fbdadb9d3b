"""What became of a message: every step of its life, written down as it happened.

python examples/traces.py
"""

import tempfile
from datetime import timedelta

import holdfast


def main(folder: str) -> None:
    with holdfast.open_broker(folder, body_type=str) as broker:
        broker.create_topic("orders", trace_sample=1.0)  # every message; 0.01 is one in a hundred
        stored = broker.publish("orders", "one pizza")
        billing = broker.group("orders", "billing", max_attempts=2)

        billing.receive(holder="ann").nack(delay=0, error="no route to the bank")
        billing.receive(holder="bob").nack(error="no route to the bank")  # that was the last attempt
        billing.dead.redrive()
        billing.receive(holder="eve").ack()

        began = None
        for step in broker.trace(stored.id):  # with the life of the message that it was redriven into
            began = began or step.at_ns
            who = f"{step.group}, attempt {step.attempt}, by {step.holder}" if step.holder else ""
            why = step.why or step.error
            print(f"{(step.at_ns - began) / 1e6:6.1f} ms  {step.id}  {step.step:9}  {who}  {why}".rstrip())

        failed = broker.search_traces(topic="orders", event="nacked", since=timedelta(hours=1))
        print(f"nacked in the last hour: {[step.holder for step in failed]}")
        stats = broker.trace_stats(topic="orders")
        print(f"{stats.messages} messages, steps: {sum(stats.steps.values())}, errors: {stats.errors}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(f"{temporary}/shop")
