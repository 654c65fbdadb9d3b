"""What a broker has besides topics and groups, for tasks: locks, documents, schedules, transactions, a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.api import Face
from holdfast.api.aio.message import AsyncDocuments, AsyncLocks
from holdfast.api.drafts import Seconds

if TYPE_CHECKING:
    from holdfast.api.aio.cluster import AsyncCluster
    from holdfast.api.aio.ports import AsyncBrokerPort
    from holdfast.api.aio.schedules import AsyncSchedules
    from holdfast.api.aio.schemas import AsyncSchemas
    from holdfast.api.aio.transactions import AsyncTransaction, AsyncTransactions


class AsyncBrokerParts(Face):
    """Few programs use any of it; what they do not use is not loaded."""

    _port: AsyncBrokerPort

    @property
    def locks(self) -> AsyncLocks:
        """Locks with leases and fencing numbers, shared by all who use the folder or the server."""
        return AsyncLocks(self._port.locks())

    @property
    def documents(self) -> AsyncDocuments:
        """State documents, each a JSON value with a version."""
        return AsyncDocuments(self._port.locks())

    @property
    def schedules(self) -> AsyncSchedules:
        """Messages that are published at certain times, once however many programs run."""
        from holdfast.api.aio.schedules import AsyncSchedules

        return AsyncSchedules(self._port.schedules())

    @property
    def cluster(self) -> AsyncCluster:
        """What only a cluster can do."""
        from holdfast.api.aio.cluster import AsyncCluster

        return AsyncCluster(self._port)

    @property
    def schemas(self) -> AsyncSchemas:
        """The registry of schemas: what message bodies look like, and how that may change."""
        from holdfast.api.aio.schemas import AsyncSchemas

        return AsyncSchemas(self._port.schemas())

    def transaction(self, name: str | None = None, *, timeout: Seconds = 60) -> AsyncTransaction:
        """Open a transaction: what its block publishes, acks, commits and writes takes effect together, or not at all.

            async with broker.transaction() as transaction:
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
        from holdfast.api.aio.transactions import AsyncTransaction

        return AsyncTransaction(self._port.transactions(), name, self._port.body_type, timeout)

    @property
    def transactions(self) -> AsyncTransactions:
        """The transactions that are known by name."""
        from holdfast.api.aio.transactions import AsyncTransactions

        return AsyncTransactions(self._port.transactions())
