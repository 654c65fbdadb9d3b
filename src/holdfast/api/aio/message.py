"""A message in flight, and the document that goes with it, for tasks."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from types import TracebackType
from typing import Any, Generic

import msgspec

from holdfast.api.aio.ports import AsyncGroupPort
from holdfast.api.arguments import INTERRUPTIONS, error_text, gives_back, state_content
from holdfast.api.bodies import Bodies
from holdfast.api.contents import Body, Home, MessageFields, Taken
from holdfast.api.drafts import Seconds, duration_ms, lease_of
from holdfast.errors import Closed, LeaseLost, Unavailable, UnknownTopic
from holdfast.model import Durability, Record


class AsyncState:
    """The document that goes with a message from one holder to the next, until it is acked."""

    def __init__(self, port: AsyncGroupPort, taken: Taken) -> None:
        self._port = port
        self._taken = taken
        self.version = port.state_version(taken)

    async def load(self) -> Any:
        """The document, or None."""
        value, self.version = await self._port.load_state(self._taken)
        return value

    async def save(self, value: Any, *, durability: Durability | None = None) -> None:
        """Replace it, if nobody has since it was loaded: Conflict otherwise. None takes it away."""
        content = state_content(value)
        self.version = await self._port.save_state(self._taken, self.version, content, durability)


# A struct: made in C, in half the time of another object; and nothing that it refers to refers to it.
class AsyncMessage(MessageFields[Body], msgspec.Struct, Generic[Body], eq=False, gc=False):
    """A message in hand. As a context manager: ack on success, nack with the error on an exception."""

    _port: Any  # an AsyncGroupPort
    _taken: Any  # what the port knows it by
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
        """Which delivery this is: 1 for the first. Deferred ones are not counted."""
        attempt: int = self._taken.attempt
        return attempt

    @property
    def holder(self) -> str:
        holder: str = self._taken.holder
        return holder

    @property
    def fence(self) -> int:
        """The number of this delivery: a later one of any message has a higher one."""
        fence: int = self._taken.fence
        return fence

    @property
    def receipt(self) -> str:
        """The proof of this delivery as text, for a later process: see `resume`."""
        receipt: str = self._port.receipt(self._taken)
        return receipt

    @property
    def lost(self) -> bool:
        """Whether the lease has ended meanwhile, as far as is known here: then stop, another may have the message."""
        return not self._settled and self._port.lost(self._taken)

    @property
    def settled(self) -> bool:
        """Whether it was acked, nacked, deferred or rejected by this handle."""
        return self._settled

    @property
    def state(self) -> AsyncState:
        if self._state is None:
            self._state = AsyncState(self._port, self._taken)
        state: AsyncState = self._state
        return state

    # What is refused because the lease was lost settles the message for this handle, as success does. After any other
    # error it is still in hand: the caller may try again, and the finalizer gives it back.

    async def ack(self, *, durability: Durability | None = None) -> None:
        """It is handled and never comes back."""
        try:
            if durability is not None or not self._port.ack_now(self._taken):
                await self._port.ack([self._taken], durability)
        except LeaseLost:
            self._settled = True
            raise
        self._settled = True

    async def nack(self, *, delay: Seconds | None = None, error: object = None) -> None:
        """It failed: again after the queue's backoff, or after `delay`; to the dead letters after the last attempt."""
        delay_ms = None if delay is None else duration_ms(delay, "delay")
        text = error_text(error, self._port.settings.max_error_chars)
        try:
            await self._port.nack([self._taken], delay_ms, text)
        except LeaseLost:
            self._settled = True
            raise
        self._settled = True

    async def defer(self, *, delay: Seconds = 0) -> None:
        """Not now: it comes back without counting as an attempt."""
        delay_ms = duration_ms(delay, "delay")
        try:
            await self._port.defer(self._taken, delay_ms)
        except LeaseLost:
            self._settled = True
            raise
        self._settled = True

    async def reject(self, reason: object = "") -> None:
        """It can never be handled: straight to the dead letters."""
        text = error_text(reason, self._port.settings.max_error_chars)
        try:
            await self._port.reject(self._taken, text)
        except LeaseLost:
            self._settled = True
            raise
        self._settled = True

    async def extend(self, lease: Seconds | None = None) -> None:
        """So much time from now on; the queue's own lease where none is given. 0 gives it back now, as `defer` does."""
        if gives_back(lease):
            await self.defer()
            return
        await self._port.extend(self._taken, None if lease is None else lease_of(lease))

    async def __aenter__(self) -> AsyncMessage[Body]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._settled:
            return
        if error is None:
            await self.ack()
            return
        try:
            if isinstance(error, INTERRUPTIONS):
                await self._port.release(self._taken)
                self._settled = True
            else:
                await self.nack(error=error)
        except (LeaseLost, Closed, Unavailable, UnknownTopic) as late:
            error.add_note(f"the message could not be given back: {late}")


# For the rest of the package: what its port knows a message by.
taken_of: Callable[[AsyncMessage[Any]], Any] = attrgetter("_taken")


def settle(messages: list[AsyncMessage[Any]]) -> None:
    """Their handles are through with them."""
    for message in messages:
        message._settled = True  # noqa: SLF001  users are not to set it
