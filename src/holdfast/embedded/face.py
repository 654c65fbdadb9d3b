"""What the faces for threads and for tasks share: arguments in, engine called, answers out; no waiting."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from os import PathLike
from typing import Any, Final, Generic, TypeVar, get_args

import msgspec

from holdfast.broker.engine import Compacted, Pending, QueueEngine, QueueStats
from holdfast.broker.hands import Delivered
from holdfast.broker.layout import message_id
from holdfast.broker.metrics import Observer
from holdfast.broker.partition import Publication
from holdfast.delivery.commands import DEFERRED, NO_SESSION, Extend, Nack, Receipt, Reject
from holdfast.embedded.bodies import Bodies
from holdfast.embedded.drafts import Drafter, NewMessage, Seconds
from holdfast.embedded.handle import Handle
from holdfast.embedded.message import Body, Contents
from holdfast.embedded.times import duration_ms, instant_ns
from holdfast.env import World
from holdfast.errors import Empty, InvalidRequest, OffsetOutOfRange
from holdfast.model import Appended, CodecName, Durability
from holdfast.settings import QueueSettings

_Face = TypeVar("_Face")

_MOST_AT_ONCE: Final = 100_000
_USUAL: Final = (None, None, None, False, False)
_NO_OPTIONS: Final = (None,) * 8


class Stored(msgspec.Struct, frozen=True, gc=False):
    """What `put` answers: the message's id, where it is, and what it survives."""

    topic: str
    offset: int | None
    delayed_id: int | None
    duplicate: bool
    durability: Durability

    @property
    def id(self) -> str:
        """The id of the message; for a duplicate: of the one that came first."""
        return message_id(self.topic, 0, self.offset, self.delayed_id)


class Wanted(msgspec.Struct, frozen=True, gc=False):
    """What a consumer asks for, checked."""

    count: int
    timeout_s: float | None
    lease_ms: int
    holder: str
    renew: bool
    detached: bool


class Face(Generic[Body]):
    """One opened queue, seen by a user."""

    def __init__(self, engine: QueueEngine, body_type: Any) -> None:
        self._engine = engine
        self._bodies = Bodies(body_type)
        self._drafter = Drafter(self._bodies, engine.settings)
        self._delivery = engine.delivery
        self._log = engine.partition.log
        self._mono_ns = engine.world.clock.monotonic_ns
        self._put_seconds = engine.metrics.put_seconds
        self._published = engine.metrics.published
        self._published_bytes = engine.metrics.published_bytes

    @property
    def name(self) -> str:
        """The name of the queue's topic."""
        return self._engine.topic

    @property
    def folder(self) -> str:
        return self._engine.folder

    @property
    def settings(self) -> QueueSettings:
        return self._engine.settings

    @property
    def closed(self) -> bool:
        return self._engine.closed

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} in {self.folder}{' (closed)' if self.closed else ''}>"

    def _is_plain(self, body: object, options: tuple[object, ...], priority: int) -> bool:
        """Whether a message is nothing but its bytes: then it goes the short way."""
        plain = (
            type(body) is bytes
            and self._drafter.plain
            and options == _NO_OPTIONS
            and type(priority) is int
            and not priority
        )
        return plain and not self._engine.closed

    def _plain_stored(self, body: Any, appended: Appended, began_ns: int) -> Stored:
        # A put that waits for no disk is timed now and then only: timing costs a tenth of it.
        if appended.durability == "fsync" or not appended.offset & 63:
            self._put_seconds.observe_ns(self._mono_ns() - began_ns)
        self._published.add()
        self._published_bytes.add(len(body))
        if self._delivery.waiters and appended.durability != "fsync":  # otherwise the sync has done it
            self._engine.partition.wake()
        return Stored(self._engine.topic, appended.offset, None, False, appended.durability)

    def _all_plain(self, messages: object, codec: object) -> bool:
        """The same for a list of messages."""
        plain = self._drafter.plain and isinstance(messages, list) and set(map(type, messages)) == {bytes}
        return plain and codec is None and not self._engine.closed

    def _plain_many(self, bodies: Any, appended: Appended, began_ns: int) -> list[Stored]:
        self._put_seconds.observe_ns(self._mono_ns() - began_ns)
        self._published.add(len(bodies))
        self._published_bytes.add(sum(map(len, bodies)))
        if self._delivery.waiters and appended.durability != "fsync":
            self._engine.partition.wake(len(bodies))
        topic, durability = self._engine.topic, appended.durability
        return [
            Stored(topic, offset, None, False, durability) for offset in range(appended.offset, appended.next_offset)
        ]

    def _publish(self, messages: Iterable[Any], durability: Durability | None, codec: Any) -> Publication:
        """Write bodies or NewMessages, all of them or none."""
        self._engine.check_open()
        if isinstance(messages, (bytes, bytearray, str, Mapping)) or not isinstance(messages, Iterable):
            raise InvalidRequest(f"put_many takes a list of bodies or NewMessages, not {type(messages).__name__}")
        _check_codec(codec)
        now_ms = self._engine.world.clock.now_ns() // 1_000_000
        drafts = [
            self._drafter.draft(message if isinstance(message, NewMessage) else NewMessage(body=message), now_ms)
            for message in messages
        ]
        publication = self._engine.partition.publish(drafts, durability=durability, codec=codec)
        fresh = [draft for draft, place in zip(drafts, publication.places, strict=True) if not place.duplicate]
        self._published.add(len(fresh))
        self._published_bytes.add(sum(len(draft.value) for draft in fresh))
        return publication

    def _stored(self, publication: Publication, began_ns: int) -> list[Stored]:
        self._put_seconds.observe_ns(self._mono_ns() - began_ns)
        topic, durability = self._engine.topic, publication.durability
        return [
            Stored(topic, place.offset, place.delayed_id, place.duplicate, durability) for place in publication.places
        ]

    def _is_usual(self, *options: object) -> bool:
        """Whether a message is asked for without further ado, and the queue is open."""
        return options == _USUAL and not self._engine.closed

    def _wanted(
        self,
        count: int,
        timeout: Seconds | None,
        lease: Seconds | None,
        holder: object,
        *,
        renew: object,
        detached: object = False,
    ) -> Wanted:
        if type(count) is not int or not 1 <= count <= _MOST_AT_ONCE:
            raise InvalidRequest(f"count={count!r} cannot be used: give a whole number from 1 to {_MOST_AT_ONCE}")
        timeout_s = None if timeout is None else duration_ms(timeout, "timeout") / 1000
        lease_ms = self.settings.lease_ms if lease is None else duration_ms(lease, "lease", minimum_ms=1)
        if holder is None:
            holder = self._engine.holder
        if not isinstance(holder, str) or len(holder) > 200 or not _is_clean(holder):
            raise InvalidRequest(f"holder={holder!r} cannot be used: give a short text")
        return Wanted(count, timeout_s, lease_ms, holder, _switch(renew, "renew"), _switch(detached, "detached"))

    def _take(self, wanted: Wanted) -> list[Delivered]:
        if self._engine.closed:
            self._engine.check_open()
        taken = self._delivery.receive(
            wanted.count, lease_ms=wanted.lease_ms, holder=wanted.holder, detached=wanted.detached
        )
        if wanted.renew:
            for delivered in taken:
                self._delivery.renew(delivered.receipt, wanted.lease_ms)
        return taken

    def _deadline_ns(self, wanted: Wanted) -> int | None:
        if wanted.timeout_s is None:
            return None
        return self._engine.world.clock.monotonic_ns() + round(wanted.timeout_s * 1e9)

    def _left_s(self, deadline_ns: int | None) -> float | None:
        if deadline_ns is None:
            return None
        return (deadline_ns - self._engine.world.clock.monotonic_ns()) / 1e9

    def _empty(self, wanted: Wanted) -> Empty:
        within = "now" if not wanted.timeout_s else f"within {wanted.timeout_s:g} s"
        return Empty(f"no message is ready {within} in {self.folder}")

    def _ack_one(self, delivered: Delivered) -> None:
        """The way of a single ack, without detours."""
        if self._engine.closed:
            self._engine.check_open()
        delivery = self._delivery
        if delivery.unhurried:
            refused = delivery.ack_one(delivered.record.offset, delivered.lease.fence)
            if refused is not None:
                raise refused
        else:
            self._engine.wait(self._engine.ack([delivered.receipt]))

    def _ack_all(self, handles: Sequence[Handle[Body]], durability: Durability | None) -> Pending:
        """Ack in one go; each handle is through with its message, whatever comes of it."""
        handles = self._own(handles, "ack")
        if not handles:
            return Pending()
        taken = [handle._delivered for handle in handles]
        pending = self._engine.ack([Receipt(one.record.offset, one.lease.fence) for one in taken], durability)
        for handle in handles:
            handle._settled = True
        return pending

    def _own(self, handles: object, verb: str) -> list[Any]:
        """The messages, if they are messages of this queue."""
        if isinstance(handles, (str, bytes)) or not isinstance(handles, Iterable):
            raise InvalidRequest(f"{verb}_many takes a list of messages, not {type(handles).__name__}")
        handles = list(handles)
        for kind in set(map(type, handles)):
            if not issubclass(kind, Handle):
                raise InvalidRequest(f"{verb}_many takes messages, not {kind.__name__}")
        for engine in {handle._engine for handle in handles}:
            if engine is not self._engine:
                raise InvalidRequest("a message is of another queue, or of an earlier opening; nothing was changed")
        return handles

    def _nack(self, receipt: Receipt, delay: Seconds | None, error: object) -> Pending:
        delay_ms = None if delay is None else duration_ms(delay, "delay")
        pending = self._engine.settle(Nack(receipt, delay_ms, self._error_text(error)))
        self._engine.metrics.nacked.add()
        return pending

    def _nack_all(self, handles: object, delay: Seconds | None, error: object) -> Pending:
        """Nack in one go; each handle is through with its message, whatever comes of it."""
        own = list(dict.fromkeys(self._own(handles, "nack")))
        delay_ms = None if delay is None else duration_ms(delay, "delay")
        text = self._error_text(error)
        pending = self._engine.settle_all([Nack(handle._delivered.receipt, delay_ms, text) for handle in own])
        for handle in own:
            handle._end()
        self._engine.metrics.nacked.add(len(own))
        return pending

    def _defer(self, receipt: Receipt, delay: Seconds) -> Pending:
        pending = self._engine.settle(Nack(receipt, duration_ms(delay, "delay"), why=DEFERRED, counted=False))
        self._engine.metrics.deferred.add()
        return pending

    def _reject(self, receipt: Receipt, reason: object) -> Pending:
        pending = self._engine.settle(Reject(receipt, self._error_text(reason)))
        self._engine.metrics.rejected.add()
        return pending

    def _extend(self, receipts: Sequence[Receipt], lease: Seconds | None) -> Pending:
        lease_ms = self.settings.lease_ms if lease is None else duration_ms(lease, "lease", minimum_ms=1)
        return self._engine.settle(Extend(receipts, lease_ms))

    def _error_text(self, error: object) -> str:
        """An error as it is kept: its own line first, then where it came from, as far as there is room."""
        if error is None:
            return ""
        if isinstance(error, BaseException):
            summary = "".join(traceback.format_exception_only(error)).strip()
            trace = "".join(traceback.format_exception(error)).strip()
            text = summary if trace == summary else f"{summary}\n\n{trace}"
        else:
            text = str(error)
        return text.encode(errors="backslashreplace").decode()[: self.settings.max_error_chars]

    def _seek(self, to: str | None, offset: int | None, time: datetime | None) -> int:
        self._engine.check_open()
        if sum(argument is not None for argument in (to, offset, time)) != 1:
            raise InvalidRequest('seek takes one of "start", "end", offset=... or time=...')
        start, end = self._log.start, self._log.end
        if to is not None:
            if to not in ("start", "end"):
                raise InvalidRequest(f'seek cannot go to {to!r}; use "start", "end", offset=... or time=...')
            target = start if to == "start" else end
        elif time is not None:
            target = max(self._log.find_time(instant_ns(time, "time")), start)
        else:
            if type(offset) is not int:
                raise InvalidRequest(f"offset={offset!r} is no offset; give a whole number")
            target = offset
        if not start <= target <= end:
            raise OffsetOutOfRange(
                f"cannot seek to {target}: the queue keeps {start} to {end}", offset=target, start=start, end=end
            )
        self._delivery.seek(target)
        return target

    def _peek(self, count: int) -> list[Contents[Body]]:
        wanted = self._wanted(count, 0, None, None, renew=False)
        self._engine.check_open()
        return [Contents(self._engine, self._bodies, record) for record in self._delivery.peek(wanted.count)]

    def _stats(self) -> QueueStats:
        return self._engine.stats()

    def _compact(self) -> Compacted:
        return self._engine.compact()

    def observe(self, observer: Observer | None) -> None:
        """From now on tell this one of every count and every time; None: nobody."""
        self._engine.metrics.set_observer(observer)

    def _let_go(self, delivered: Delivered) -> None:
        """A message was dropped unhandled; called by its finalizer."""
        if self._engine.closed:
            return
        if delivered.lease.session == NO_SESSION:  # detached: it ends by itself, in its own time
            self._delivery.renewals.remove(delivered.receipt)
        else:
            self._delivery.drop(delivered.receipt)


def open_face(
    kind: Callable[[QueueEngine, Any], _Face],
    folder: str | PathLike[str],
    *,
    create: bool,
    durability: Durability | None,
    body_type: Any,
    settings: QueueSettings | None,
    observer: Observer | None,
    world: World | None,
    changes: Mapping[str, Any],
) -> _Face:
    """A face of the queue in a folder, with a thread that looks after it where time runs by itself."""
    Bodies(body_type)  # refused before anything is made
    if durability is not None:
        changes = {**changes, "durability": durability}
    engine = QueueEngine.open(folder, create=create, settings=settings, changes=changes, observer=observer, world=world)
    try:
        if world is None:
            engine.keep()
        return kind(engine, body_type)
    except BaseException:
        engine.close()
        raise


def _check_codec(codec: object) -> None:
    if codec is not None and not (isinstance(codec, str) and codec in get_args(CodecName)):
        raise InvalidRequest(f"codec={codec!r} is not known; use one of {', '.join(get_args(CodecName))}")


def _switch(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name}={value!r} cannot be used: give True or False")
    return value


def _is_clean(text: str) -> bool:
    """Whether the text can be stored: a lone surrogate cannot."""
    return text.encode(errors="replace").decode() == text
