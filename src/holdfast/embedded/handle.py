"""A message in hand, whoever works with it: a thread or a task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Generic

import msgspec

from holdfast.broker.leases import Delivered
from holdfast.broker.locks import MOST_DOCUMENT_BYTES
from holdfast.broker.station import Pending, Station
from holdfast.delivery.commands import Save
from holdfast.delivery.group import Document
from holdfast.embedded.bodies import Bodies
from holdfast.embedded.message import Body, Said
from holdfast.errors import InvalidRequest, LeaseLost, MessageTooLarge
from holdfast.model import Record

# Not the handler's fault: these give the message back as if it had not been touched.
INTERRUPTIONS: Final = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)


# A struct: made in C, in half the time of another object; and nothing that it refers to refers to it.
class Handle(Said[Body], msgspec.Struct, Generic[Body], eq=False, gc=False):
    """A delivered message and the facts of its delivery."""

    _face: Any
    _home: Station
    _delivered: Delivered
    _settled: bool = False
    _state: Any = None

    __repr__ = Said.__repr__

    @property
    def _record(self) -> Record:  # type: ignore[override]
        return self._delivered.record

    @property
    def _bodies(self) -> Bodies:  # type: ignore[override]
        bodies: Bodies = self._face._bodies
        return bodies

    def __del__(self) -> None:
        if not self._settled:
            self._face._let_go(self._home, self._delivered)

    @property
    def attempt(self) -> int:
        """Which delivery this is: 1 for the first. Deferred ones are not counted."""
        return self._delivered.attempt

    @property
    def holder(self) -> str:
        return self._delivered.lease.holder

    @property
    def fence(self) -> int:
        """The number of this delivery: a later one of any message has a higher one."""
        return self._delivered.lease.fence

    @property
    def receipt(self) -> str:
        """The proof of this delivery as text, for a later process: see `resume`."""
        return self._home.receipt_text(self._delivered.record.offset, self._delivered.lease)

    @property
    def lost(self) -> bool:
        """Whether the lease has ended meanwhile: then stop, another consumer may have the message."""
        if self._settled:
            return False
        return self._face._ended or not self._home.delivery.holds(self._delivered.receipt)

    @property
    def settled(self) -> bool:
        """Whether it was acked, nacked, deferred or rejected by this handle."""
        return self._settled

    def _last(self, verb: Callable[..., Pending], *arguments: Any) -> Pending:
        """The last thing done with the message; after a call that was refused it is still in hand."""
        try:
            pending = verb(self, *arguments)
        except LeaseLost:
            self._end()
            raise
        self._end()
        return pending

    def _end(self) -> None:
        """This handle is through with the message."""
        self._settled = True
        self._home.delivery.renewals.remove(self._delivered.receipt)


class StateOf:
    """The document that goes with a message from one holder to the next, until it is acked."""

    def __init__(self, handle: Handle[Any]) -> None:
        self._station = handle._home
        self._receipt = handle._delivered.receipt
        self.version = 0
        self._look()

    def _look(self) -> Document | None:
        document = self._station.delivery.group.documents.get(self._receipt.offset)
        self.version = 0 if document is None else document.version
        return document

    def _load(self) -> Any:
        document = self._look()
        return None if document is None else msgspec.json.decode(document.content)

    def _save(self, value: Any, durability: Any) -> Pending:
        try:
            content = None if value is None else msgspec.json.encode(value)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise InvalidRequest(f"the state cannot be saved: {error}. It must be a value that JSON knows") from None
        check_state(content)
        pending = self._station.settle(Save(self._receipt, self.version, content), durability)
        self.version = 0 if content is None else self.version + 1
        return pending


def check_state(content: bytes | None) -> None:
    """Refuse what is too large: all states are in memory while their messages are not handled."""
    if content is not None and len(content) > MOST_DOCUMENT_BYTES:
        raise MessageTooLarge(
            f"the state cannot be saved: it has {len(content)} bytes as JSON; {MOST_DOCUMENT_BYTES} are allowed. Keep "
            "what is large in messages or files, and in the state where it is"
        )
