"""Producers at a server: for threads, and for tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import TimeoutError as NotInTime
from datetime import datetime
from types import TracebackType
from typing import Any, overload

from holdfast.api.drafts import HeadersLike, NewMessage, Seconds, Stored, Text, message_of
from holdfast.api.times import duration_ms
from holdfast.client.producing import Answer, RemoteProducing
from holdfast.client.ways import run
from holdfast.errors import HoldfastError, Unavailable


class RemoteSent:
    """A message that was sent: what comes of it, as soon as it is answered."""

    __slots__ = ("_answer",)

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def done(self) -> bool:
        """Whether the answer is there."""
        return self._answer.done()

    def result(self, timeout: Seconds | None = None) -> Stored | None:
        """Where it is stored, or the error; waits for it. None at once with acks="none"."""
        try:
            return self._answer.result(_seconds(timeout))
        except NotInTime:
            raise _late(timeout) from None

    def exception(self, timeout: Seconds | None = None) -> BaseException | None:
        """The error, or None where it is stored; waits for it."""
        try:
            return self._answer.exception(_seconds(timeout))
        except NotInTime:
            raise _late(timeout) from None

    def add_done_callback(self, callback: Callable[[RemoteSent], object]) -> None:
        """Call with this object when the answer is there: in the sender's thread, or at once. It must not wait."""
        self._answer.add_done_callback(lambda _: callback(self))


class RemoteSentMany(Sequence[RemoteSent]):
    """What `send_many` answers: one answer for all of them; as a sequence, one for each."""

    def __init__(self, each: list[RemoteSent]) -> None:
        self._each = each

    def done(self) -> bool:
        """Whether all answers are there."""
        return all(sent.done() for sent in self._each)

    def result(self, timeout: Seconds | None = None) -> list[Stored | None]:
        """Where each is stored, in the order of the call, or the first error; waits for all of them."""
        return [sent.result(timeout) for sent in self._each]

    def exception(self, timeout: Seconds | None = None) -> BaseException | None:
        """The first error, or None where all are stored; waits for all of them."""
        return next((error for sent in self._each if (error := sent.exception(timeout)) is not None), None)

    def __len__(self) -> int:
        return len(self._each)

    @overload
    def __getitem__(self, index: int) -> RemoteSent: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RemoteSent]: ...
    def __getitem__(self, index: int | slice) -> RemoteSent | Sequence[RemoteSent]:
        return self._each[index]


class RemoteProducer(RemoteProducing):
    """Sends messages to topics, many at once. Safe to use from any thread."""

    def send(
        self,
        topic: str,
        body: Any,
        *,
        key: Text | None = None,
        headers: HeadersLike | None = None,
        priority: int = 0,
        delay: Seconds | None = None,
        at: datetime | None = None,
        ttl: Seconds | None = None,
        dedup_id: Text | None = None,
        correlation_id: str | None = None,
        partition: int | None = None,
    ) -> RemoteSent:
        """Send a message; returns at once, or when there is room for it. The answer comes to what is returned."""
        message = message_of(body, key, headers, priority, delay, at, ttl, dedup_id, correlation_id)
        return self.send_many(topic, [message], partition=partition)[0]

    def send_many(
        self, topic: str, messages: Iterable[Any | NewMessage], *, partition: int | None = None
    ) -> RemoteSentMany:
        """Send messages; an item is a body or a NewMessage. One answer for all of them, or one for each."""
        known, prepared = run(self._prepared(topic, messages, partition))
        placed = [self._place(topic, known, message, draft, partition) for message, draft in prepared]
        return RemoteSentMany([RemoteSent(self._add(place, parcel)) for place, parcel in placed])

    def flush(self, timeout: Seconds | None = None) -> None:
        """Send what was gathered and wait for its answers; raises the first error that nobody was told of yet."""
        timeout_s = _seconds(timeout)
        if not self._drain(timeout_s):
            raise Unavailable(f"not everything was stored within {timeout_s:g} s; it is still on its way")
        self._raise_unseen()

    def close(self, timeout: Seconds | None = None) -> None:
        """Send what is left, wait for its answers, end. What is not stored within the timeout is answered with Closed.

        Raises the first error that nobody was told of. Closing twice is fine.
        """
        self._finish(_seconds(timeout))

    def __enter__(self) -> RemoteProducer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except HoldfastError as failure:
            if error is None:
                raise
            error.add_note(f"messages were not stored: {failure}")


class AsyncRemoteSent:
    """A message that was sent: await it for what comes of it."""

    __slots__ = ("_answer",)

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def done(self) -> bool:
        """Whether the answer is there."""
        return self._answer.done()

    def __await__(self) -> Generator[Any, None, Stored | None]:
        return asyncio.wrap_future(self._answer).__await__()


class AsyncRemoteSentMany:
    """What `send_many` answers: await it for the places of all of them, in the order of the call."""

    __slots__ = ("_each",)

    def __init__(self, each: list[AsyncRemoteSent]) -> None:
        self._each = each

    def done(self) -> bool:
        """Whether all answers are there."""
        return all(sent.done() for sent in self._each)

    def __len__(self) -> int:
        return len(self._each)

    def __getitem__(self, index: int) -> AsyncRemoteSent:
        return self._each[index]

    def __await__(self) -> Generator[Any, None, list[Stored | None]]:
        return self._all().__await__()

    async def _all(self) -> list[Stored | None]:
        return [await sent for sent in self._each]


class AsyncRemoteProducer(RemoteProducing):
    """Sends messages to topics, many at once, for the tasks of any event loop. A thread of its own sends them."""

    async def send(
        self,
        topic: str,
        body: Any,
        *,
        key: Text | None = None,
        headers: HeadersLike | None = None,
        priority: int = 0,
        delay: Seconds | None = None,
        at: datetime | None = None,
        ttl: Seconds | None = None,
        dedup_id: Text | None = None,
        correlation_id: str | None = None,
        partition: int | None = None,
    ) -> AsyncRemoteSent:
        """Send a message; returns at once, or when there is room for it. The answer comes to what is returned."""
        message = message_of(body, key, headers, priority, delay, at, ttl, dedup_id, correlation_id)
        return (await self.send_many(topic, [message], partition=partition))[0]

    async def send_many(
        self, topic: str, messages: Iterable[Any | NewMessage], *, partition: int | None = None
    ) -> AsyncRemoteSentMany:
        """Send messages; an item is a body or a NewMessage. One answer for all of them, or one for each."""
        known, prepared = await self._prepared(topic, messages, partition)
        found = []
        for message, draft in prepared:
            place, parcel = self._place(topic, known, message, draft, partition)
            full = self._bytes + parcel.size > self.settings.buffer_bytes
            answer = await asyncio.to_thread(self._add, place, parcel) if full else self._add(place, parcel)
            found.append(AsyncRemoteSent(answer))
        return AsyncRemoteSentMany(found)

    async def flush(self, timeout: Seconds | None = None) -> None:
        """Send what was gathered and wait for its answers; raises the first error that nobody was told of yet."""
        timeout_s = _seconds(timeout)
        if not await asyncio.to_thread(self._drain, timeout_s):
            raise Unavailable(f"not everything was stored within {timeout_s:g} s; it is still on its way")
        self._raise_unseen()

    async def close(self, timeout: Seconds | None = None) -> None:
        """Send what is left, wait for its answers, end. `RemoteProducer.close` says more."""
        await asyncio.to_thread(self._finish, _seconds(timeout))

    async def __aenter__(self) -> AsyncRemoteProducer:
        await asyncio.to_thread(self._sender.begin)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except HoldfastError as failure:
            if error is None:
                raise
            error.add_note(f"messages were not stored: {failure}")


def _seconds(timeout: Seconds | None) -> float | None:
    return None if timeout is None else duration_ms(timeout, "timeout") / 1000


def _late(timeout: Seconds | None) -> Unavailable:
    return Unavailable(
        f"no answer came within {_seconds(timeout):g} s; the message is still on its way, ask again later"
    )
