"""Random transactions, refusals, kills and power cuts: every order becomes one invoice, and is counted once."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Conflict, Fenced, LeaseLost
from tests.unit.brokers import Place

ORDERS = 12
KINDS = "commit, commit, commit, abort, stale document, stale name, lost lease, kill, cut, close, wait"
STEPS = st.sampled_from(KINDS.split(", "))


class Shop:
    """A broker whose workers turn orders into invoices."""

    def __init__(self, seed: int) -> None:
        self.place = Place()
        self.rng = random.Random(seed)
        self.place.broker.create_topic("invoices", partitions=2)
        self.opened()
        self.orders.put_many([b"%d" % i for i in range(ORDERS)])

    def opened(self) -> None:
        self.place.engine.tick()
        self.orders = self.place.broker.queue("orders", lease_ms=5_000, max_attempts=1_000)

    def filled(self, name: str | None = None) -> Any:
        """A transaction that turns some orders into invoices."""
        broker = self.place.broker
        transaction = broker.transaction(name).__enter__()
        taken = self.orders.get_many(self.rng.randint(1, 3), timeout=0)
        for message in taken:
            key = self.rng.choice([None, "k"])
            transaction.publish("invoices", message.body, key=key, priority=self.rng.choice([0, 0, 9]))
        transaction.ack(*taken)
        count = broker.documents.get("count")
        transaction.documents.update(
            "count", (count.value if count else 0) + len(taken), version=count.version if count else 0
        )
        return transaction

    def step(self, what: str) -> None:
        match what:
            case "commit":
                self.filled(self.rng.choice([None, "worker"])).__exit__(None, None, None)
            case "abort":
                self.filled().abort()
            case "stale document":
                transaction = self.filled()
                self.filled().__exit__(None, None, None)
                self.refused(transaction, Conflict)
            case "stale name":
                transaction = self.filled("worker")
                self.filled("worker").__exit__(None, None, None)
                self.refused(transaction, Fenced)
            case "lost lease":
                transaction = self.filled()
                self.place.after(seconds=60)
                if transaction._acked:
                    self.refused(transaction, LeaseLost)
            case "kill":
                self.place.kill()
                self.opened()
            case "cut":
                self.place.disk = self.place.disk.cut(self.rng)
                self.place.broker = self.place.open()
                self.opened()
            case "close":
                self.place.reopen()
                self.opened()
            case "wait":
                self.place.after(seconds=60)

    @staticmethod
    def refused(transaction: Any, error: type[Exception]) -> None:
        try:
            transaction.__exit__(None, None, None)
        except error:
            return
        raise AssertionError(f"{error} was expected")

    def check(self) -> None:
        broker = self.place.broker
        with self.place.engine.using("invoices") as topic:
            stored = [int(each.value) for part in topic.partitions for each in part.log.records(part.log.start)]
        stats = self.orders.stats()
        count = broker.documents.get("count")
        assert len(stored) == len(set(stored))
        assert stats.ready + stats.leased + stats.delayed == ORDERS - len(stored)
        assert (count.value if count else 0) == len(stored)

    def finish(self) -> None:
        for _ in range(3 * ORDERS):
            self.place.after(seconds=600)
            self.filled().__exit__(None, None, None)
        self.check()
        assert self.place.broker.documents.get("count").value == ORDERS
        self.place.close()


@given(seed=st.integers(0, 2**32), steps=st.lists(STEPS, max_size=12))
def test_every_order_becomes_one_invoice(seed: int, steps: list[str]):
    shop = Shop(seed)
    for what in steps:
        shop.step(what)
        shop.check()
    shop.finish()
