"""What senders hold of their messages: an answer for each, or one for a whole list. Threads ask, tasks await."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import msgspec

from holdfast.api.drafts import Stored
from holdfast.api.times import duration_ms
from holdfast.errors import Unavailable
from holdfast.producing.parcels import Parcel, Span

if TYPE_CHECKING:
    from holdfast.api.drafts import Seconds

_Sent = TypeVar("_Sent", bound="SentMessage")


class SentMessage(msgspec.Struct, gc=False, eq=False, repr_omit_defaults=True):
    """A message of a parcel."""

    # A struct, because one is made for each message, and this is the lightest kind of object there is.
    _parcel: Parcel
    _index: int

    def done(self) -> bool:
        """Whether the answer is there."""
        return self._parcel.done or self._parcel.unheeded

    def __repr__(self) -> str:
        outbox = self._parcel.outbox
        how = "waits" if not self.done() else "failed" if self._parcel.error is not None else "done"
        return f"<{type(self).__name__} {outbox.destination.name} partition {outbox.number}, {how}>"


class Sent(SentMessage, gc=False, eq=False, repr_omit_defaults=True):
    """A message that was sent: what comes of it, as soon as its parcel is answered."""

    def result(self, timeout: Seconds | None = None) -> Stored | None:
        """Where it is stored, or the error; waits for it. None at once with acks="none"."""
        parcel = self._parcel
        if not parcel.done and not parcel.unheeded:
            _await_answers([parcel], timeout)
        return parcel.stored(self._index)

    def exception(self, timeout: Seconds | None = None) -> Exception | None:
        """The error, or None where it is stored; waits for it."""
        parcel = self._parcel
        if not parcel.done and not parcel.unheeded:
            _await_answers([parcel], timeout)
        parcel.seen = True
        return None if parcel.unheeded else parcel.error

    def add_done_callback(self, callback: Callable[[Sent], object]) -> None:
        """Call with this object when the answer is there: in the sender's thread, or at once. It must not wait."""
        self._parcel.seen = True
        if self.done():
            callback(self)
        else:
            self._parcel.outbox.owner.call_when_done(self._parcel, lambda: callback(self))


class AsyncSent(SentMessage, gc=False, eq=False, repr_omit_defaults=True):
    """A message that was sent: await it for what comes of it."""

    def __await__(self) -> Generator[Any, None, Stored | None]:
        if not self.done():
            yield from self._parcel.outbox.owner.answered(self._parcel).__await__()
        return self._parcel.stored(self._index)


class SentList(Sequence[_Sent], Generic[_Sent]):
    """What became of the messages of one call; as a sequence, one answer for each."""

    _one: type[_Sent]

    def __init__(self, spans: list[Span], count: int) -> None:
        self._spans = spans
        self._count = count
        self._each: list[_Sent] | None = None  # one for each message, made when somebody asks

    def done(self) -> bool:
        """Whether all answers are there."""
        return all(parcel.done or parcel.unheeded for parcel, _, _ in self._spans)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> _Sent: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[_Sent]: ...
    def __getitem__(self, index: int | slice) -> _Sent | Sequence[_Sent]:
        return self._all()[index]

    def __iter__(self) -> Iterator[_Sent]:
        return iter(self._all())

    def _all(self) -> list[_Sent]:
        if self._each is None:
            each = {
                i: self._one(parcel, index)
                for parcel, first, which in self._spans
                for index, i in enumerate(which, first)
            }
            self._each = [each[i] for i in range(self._count)]
        return self._each

    def _unanswered(self) -> list[Parcel]:
        return [parcel for parcel, _, _ in self._spans if not parcel.done and not parcel.unheeded]

    def _results(self) -> list[Stored | None]:
        results: list[Stored | None] = [None] * self._count
        for parcel, first, which in self._spans:
            for i, stored in zip(which, parcel.stored_many(first, len(which)), strict=True):
                results[i] = stored
        return results


class SentMany(SentList[Sent]):
    """What `send_many` answers: one answer for all of them; as a sequence, one for each."""

    _one = Sent

    def result(self, timeout: Seconds | None = None) -> list[Stored | None]:
        """Where each is stored, in the order of the call, or the first error; waits for all of them."""
        _await_answers(self._unanswered(), timeout)
        return self._results()

    def exception(self, timeout: Seconds | None = None) -> Exception | None:
        """The first error, or None where all are stored; waits for all of them."""
        try:
            self.result(timeout)
        except Exception as error:
            if not self.done():
                raise
            return error
        return None


class AsyncSentMany(SentList[AsyncSent]):
    """What `send_many` answers: await it for the places of all of them, in the order of the call."""

    _one = AsyncSent

    def __await__(self) -> Generator[Any, None, list[Stored | None]]:
        for parcel in self._unanswered():
            yield from parcel.outbox.owner.answered(parcel).__await__()
        return self._results()


def _await_answers(parcels: Sequence[Parcel], timeout: Seconds | None) -> None:
    """Wait, as a thread, for parcels of one producer; Unavailable when the time is over."""
    timeout_s = None if timeout is None else duration_ms(timeout, "timeout") / 1000
    parcel = parcels[0].outbox.owner.answered_all(parcels, timeout_s) if parcels else None
    if parcel is not None:
        raise Unavailable(
            f"no answer from partition {parcel.outbox.number} of {parcel.outbox.destination.name} within "
            f"{timeout_s:g} s; the message is still on its way, ask again later"
        )
