# Generated from aio/message.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""A message in flight and its state document, for threads."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from types import TracebackType
from typing import Any, Generic

import msgspec

from holdfast.api.arguments import INTERRUPTIONS, error_text, gives_back, state_content
from holdfast.api.bodies import Bodies
from holdfast.api.contents import Body, Home, MessageFields, Taken
from holdfast.api.drafts import Seconds, duration_ms, lease_of
from holdfast.api.sync.ports import GroupPort
from holdfast.errors import Closed, LeaseLost, Unavailable, UnknownTopic
from holdfast.model import Durability, Record


class State:
    """The state document of a message: it is passed from one holder to the next until the message is acked."""

    def __init__(self, port: GroupPort, taken: Taken) -> None:
        self._port = port
        self._taken = taken
        self.version = port.state_version(taken)

    def load(self) -> Any:
        """Return the document, or None if there is none."""
        value, self.version = self._port.load_state(self._taken)
        return value

    def save(self, value: Any, *, durability: Durability | None = None) -> None:
        """Replace the document; None removes it. The value must be representable as JSON.

        Raises Conflict if it has changed since you loaded it, LeaseLost if the lease of the message has ended, and
        MessageTooLarge above 1 MiB.
        """
        content = state_content(value)
        self.version = self._port.save_state(self._taken, self.version, content, durability)


# A struct is created in C, in half the time of an ordinary object. It needs no garbage collection (gc=False), because
# nothing it refers to refers back to it.
class Message(MessageFields[Body], msgspec.Struct, Generic[Body], eq=False, gc=False):
    """A message that you have leased. Settle it with `ack`, `nack`, `defer` or `reject`.

    As a context manager it is acked if the block succeeds and nacked with the error if the block raises. If you drop
    a message without settling it, it returns to the queue.

        with queue.get() as message:
            handle(message.body)
    """

    _port: Any  # an GroupPort
    _taken: Any  # the port's own object for this delivery
    _settled: bool = False
    _state: Any = None

    __repr__ = MessageFields.__repr__

    @property
    def _record(self) -> Record:  # type: ignore[override]
        record: Record = self._taken.record
        return record

    @property
    def _home(self) -> Home:  # type: ignore[override]
        home: Home = self._taken.home
        return home

    @property
    def _bodies(self) -> Bodies:  # type: ignore[override]
        bodies: Bodies = self._port.bodies
        return bodies

    def __del__(self) -> None:
        if not self._settled:
            self._port.drop(self._taken)

    @property
    def attempt(self) -> int:
        """The number of this delivery, 1 for the first. Deliveries that ended in `defer` do not count."""
        attempt: int = self._taken.attempt
        return attempt

    @property
    def holder(self) -> str:
        """The name of the consumer that holds the lease."""
        holder: str = self._taken.holder
        return holder

    @property
    def fence(self) -> int:
        """The fencing number of this delivery. Every later delivery, of any message, has a higher one."""
        fence: int = self._taken.fence
        return fence

    @property
    def receipt(self) -> str:
        """The proof of this delivery as text. A later process can pass it to `resume`."""
        receipt: str = self._port.receipt(self._taken)
        return receipt

    @property
    def lost(self) -> bool:
        """Whether the lease has ended, as far as this process knows. If so, stop: another consumer may have it."""
        return not self._settled and self._port.lost(self._taken)

    @property
    def settled(self) -> bool:
        """Whether you have settled it through this object: acked, nacked, deferred or rejected it."""
        return self._settled

    @property
    def state(self) -> State:
        """The state document of this message."""
        if self._state is None:
            self._state = State(self._port, self._taken)
        state: State = self._state
        return state

    # LeaseLost settles the message for this object, as success does. After any other error it is still in flight: the
    # caller may try again, and otherwise the finalizer returns it to the queue.

    def ack(self, *, durability: Durability | None = None) -> None:
        """Acknowledge the message: it is done and is not delivered again. Raises LeaseLost if the lease has ended.

        The ack is on disk within a second; with durability="fsync", when the call returns.
        """
        try:
            if durability is not None or not self._port.ack_now(self._taken):
                self._port.ack([self._taken], durability)
        except LeaseLost:
            self._settled = True
            raise
        self._settled = True

    def nack(self, *, delay: Seconds | None = None, error: object = None) -> None:
        """Report a failure: the message is retried after the queue's backoff, or after `delay`.

        After the last attempt it becomes a dead letter. `error` is an exception or a text, which is stored with it.
        Raises LeaseLost if the lease has ended.
        """
        delay_ms = None if delay is None else duration_ms(delay, "delay")
        text = error_text(error, self._port.settings.max_error_chars)
        try:
            self._port.nack([self._taken], delay_ms, text)
        except LeaseLost:
            self._settled = True
            raise
        self._settled = True

    def defer(self, *, delay: Seconds = 0) -> None:
        """Return the message to the queue, now or after `delay`, without counting this delivery as an attempt.

        Raises LeaseLost if the lease has ended.
        """
        delay_ms = duration_ms(delay, "delay")
        try:
            self._port.defer(self._taken, delay_ms)
        except LeaseLost:
            self._settled = True
            raise
        self._settled = True

    def reject(self, reason: object = "") -> None:
        """Make the message a dead letter now, with this reason: a text or an exception.

        Raises LeaseLost if the lease has ended.
        """
        text = error_text(reason, self._port.settings.max_error_chars)
        try:
            self._port.reject(self._taken, text)
        except LeaseLost:
            self._settled = True
            raise
        self._settled = True

    def extend(self, lease: Seconds | None = None) -> None:
        """Extend the lease to this long from now; by default, to the queue's own lease time.

        A lease of 0 returns the message to the queue now, as `defer` does. Raises LeaseLost if the lease has ended.
        """
        if gives_back(lease):
            self.defer()
            return
        self._port.extend(self._taken, None if lease is None else lease_of(lease))

    def __enter__(self) -> Message[Body]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._settled:
            return
        if error is None:
            self.ack()
            return
        try:
            if isinstance(error, INTERRUPTIONS):
                self._port.release(self._taken)
                self._settled = True
            else:
                self.nack(error=error)
        except (LeaseLost, Closed, Unavailable, UnknownTopic) as late:
            error.add_note(f"the message could not be given back: {late}")


# For the rest of the package: the port's own object for a message.
taken_of: Callable[[Message[Any]], Any] = attrgetter("_taken")


def settle(messages: list[Message[Any]]) -> None:
    """Mark the messages as settled."""
    for message in messages:
        message._settled = True  # noqa: SLF001  users are not to set it
