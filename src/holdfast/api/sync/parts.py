# Generated from aio/parts.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""What a broker has besides topics and groups, for threads: locks, documents, schedules, transactions, a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.api import Face
from holdfast.api.drafts import Seconds
from holdfast.api.sync.message import Documents, Locks

if TYPE_CHECKING:
    from holdfast.api.sync.cluster import Cluster
    from holdfast.api.sync.ports import BrokerPort
    from holdfast.api.sync.schedules import Schedules
    from holdfast.api.sync.schemas import Schemas
    from holdfast.api.sync.transactions import Transaction, Transactions


class BrokerParts(Face):
    """Few programs use any of it; what they do not use is not loaded."""

    _port: BrokerPort

    @property
    def locks(self) -> Locks:
        """Locks with leases and fencing numbers, shared by all who use the folder or the server."""
        return Locks(self._port.locks())

    @property
    def documents(self) -> Documents:
        """State documents, each a JSON value with a version."""
        return Documents(self._port.locks())

    @property
    def schedules(self) -> Schedules:
        """Messages that are published at certain times, once however many programs run."""
        from holdfast.api.sync.schedules import Schedules

        return Schedules(self._port.schedules())

    @property
    def cluster(self) -> Cluster:
        """What only a cluster can do."""
        from holdfast.api.sync.cluster import Cluster

        return Cluster(self._port)

    @property
    def schemas(self) -> Schemas:
        """The registry of schemas: what message bodies look like, and how that may change."""
        from holdfast.api.sync.schemas import Schemas

        return Schemas(self._port.schemas())

    def transaction(self, name: str | None = None, *, timeout: Seconds = 60) -> Transaction:
        """Open a transaction: what its block publishes, acks, commits and writes takes effect together, or not at all.

            with broker.transaction() as transaction:
                transaction.publish("invoices", b"1 book")
                transaction.ack(message)

        Args:
            name: The name of the program, or of its share of the work. A later transaction with this name fences this
                one, so that a program that was thought dead cannot commit after its successor has begun.
            timeout: A block that takes longer commits nothing, in seconds or as a timedelta; an hour at most.

        Returns:
            The transaction, which begins with its block.

        Raises:
            InvalidRequest: An argument cannot be used.
        """
        from holdfast.api.sync.transactions import Transaction

        return Transaction(self._port.transactions(), name, self._port.body_type, timeout)

    @property
    def transactions(self) -> Transactions:
        """The transactions that are known by name."""
        from holdfast.api.sync.transactions import Transactions

        return Transactions(self._port.transactions())
