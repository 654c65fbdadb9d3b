"""What the faces for threads and for tasks share: arguments in, engine called, answers out; no waiting."""

from __future__ import annotations

import traceback
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from operator import attrgetter
from os import PathLike
from typing import Any, Final, Generic, NoReturn, TypeVar

import msgspec

from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.layout import DEFAULT_GROUP
from holdfast.broker.folder.policy import check_settings
from holdfast.broker.group import Compacted, QueueGroup, QueueStats
from holdfast.broker.leases import Delivered
from holdfast.broker.metrics import Observer
from holdfast.broker.station import Pending, Station
from holdfast.broker.topic import Topic
from holdfast.broker.waiters import Waiter
from holdfast.delivery.commands import DEFERRED, NO_SESSION, Extend, Nack, Reject
from holdfast.embedded.bodies import Bodies, kind_of
from holdfast.embedded.drafts import Seconds
from holdfast.embedded.handle import Handle
from holdfast.embedded.message import Body, Contents
from holdfast.embedded.times import duration_ms, instant_ns, lease_of
from holdfast.env import World, close_in_children, refuse_to_pickle
from holdfast.env.process import environment
from holdfast.errors import Closed, DiskFull, Empty, HoldfastError, InvalidRequest, OffsetOutOfRange
from holdfast.model import BodyKind, Durability, Retained
from holdfast.settings import BrokerSettings, QueueSettings, TopicSettings
from holdfast.storage.log import Log
from holdfast.storage.opening import TRUST

_Face = TypeVar("_Face")

_MOST_AT_ONCE: Final = 100_000
_HOME: Final = attrgetter("_home")
_USUAL: Final = (None, None, None, False, False)


class Wanted(msgspec.Struct, frozen=True, gc=False):
    """What a consumer asks for, checked."""

    count: int
    timeout_s: float | None
    lease_ms: int
    holder: str
    renew: bool
    detached: bool


class Face(Generic[Body], metaclass=ABCMeta):  # others stand in for it, and are told of with `register`
    """One group of an open topic, seen by a user."""

    def __init__(self, engine: BrokerEngine, group: QueueGroup, body_type: Any) -> None:
        self._engine = engine
        self._group = group
        group.topic.holders.add(self)  # it stays open for us
        self._closed = False
        self._bodies = Bodies(body_type)
        self._stations = group.stations
        self._standing = group.waiters.standing
        self._station = group.stations[0]
        self._delivery = self._station.delivery
        self._log = self._station.partition.log
        close_in_children(self)

    def disown(self) -> None:
        """In a child after a fork: the parent goes on with it; where others may come to it, so may we."""
        if self._engine.stand_in is not None:
            self._engine.stand_in(self)

    @property
    def _kept_bodies(self) -> BodyKind | None:
        return self._group.topic.settings.bodies

    @property
    def name(self) -> str:
        """The name of the topic."""
        return self._group.topic.name

    @property
    def topic(self) -> str:
        """The name of the topic."""
        return self._group.topic.name

    @property
    def group(self) -> str:
        """The name of the group."""
        return self._group.name

    @property
    def folder(self) -> str:
        return self._engine.folder

    @property
    def settings(self) -> TopicSettings:
        return self._group.settings

    @property
    def closed(self) -> bool:
        return self._closed or self._ended

    @property
    def _ended(self) -> bool:
        """Whether the group itself is closed, and not only this view of it."""
        return self._engine.closed or self._group.topic.closed or self._group.deleted

    def _check_open(self) -> None:
        self._engine.check_open()
        self._group.check_open()
        if self._closed:
            raise Closed(f"this view of the group {self._group.name} is closed; take it anew")

    def __reduce__(self) -> NoReturn:
        refuse_to_pickle(self)

    def __repr__(self) -> str:
        of_group = "" if self._group.name == DEFAULT_GROUP else f" of {self._group.name}"
        return f"<{type(self).__name__}{of_group} {self.name} in {self.folder}{' (closed)' if self.closed else ''}>"

    def _is_usual(self, *options: object) -> bool:
        """Whether a message is asked for without further ado, and the queue is open."""
        return options == _USUAL and not self._closed and not self._engine.closed

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
        lease_ms = self.settings.lease_ms if lease is None else lease_of(lease)
        if holder is None:
            holder = self._engine.holder
        if not isinstance(holder, str) or len(holder) > 200 or not _is_clean(holder):
            raise InvalidRequest(f"holder={holder!r} cannot be used: give a short text")
        return Wanted(count, timeout_s, lease_ms, holder, switch(renew, "renew"), switch(detached, "detached"))

    def _take(self, wanted: Wanted, waiter: Waiter | None = None) -> list[tuple[Station, list[Delivered]]] | None:
        """What is ready now; None where there is more to look through, and others should have a turn first."""
        if self.closed:
            self._check_open()
        try:
            found = self._group.receive(
                wanted.count, lease_ms=wanted.lease_ms, holder=wanted.holder, detached=wanted.detached, waiter=waiter
            )
        except HoldfastError:
            self._check_open()  # that it was closed meanwhile says more
            raise
        if found and wanted.renew:
            for station, taken in found:
                for delivered in taken:
                    station.delivery.renew(delivered.receipt, wanted.lease_ms)
        return found

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

    def _ack_one(self, station: Station, delivered: Delivered) -> None:
        """The way of a single ack, without detours."""
        if self._engine.closed:
            self._check_open()
        delivery = station.delivery
        if delivery.unhurried:
            refused = delivery.ack_one(delivered.record.offset, delivered.lease.fence)
            if refused is not None:
                raise refused
        else:
            station.wait(station.ack([delivered.receipt]))

    def _ack_all(self, handles: Sequence[Handle[Body]], durability: Durability | None) -> list[tuple[Station, Pending]]:
        """Ack in one go; each handle is through with its message, whatever comes of it."""
        pending = []
        for station, own in self._own(handles, "ack"):
            pending.append((station, station.ack_taken([handle._delivered for handle in own], durability)))
            for handle in own:
                handle._settled = True
        return pending

    def _own(self, handles: object, verb: str) -> list[tuple[Station, list[Any]]]:
        """The messages, if they are messages of this group, by partition."""
        if isinstance(handles, (str, bytes)) or not isinstance(handles, Iterable):
            raise InvalidRequest(f"{verb}_many takes a list of messages, not {type(handles).__name__}")
        handles = list(handles)
        for kind in set(map(type, handles)):
            if not issubclass(kind, Handle):
                raise InvalidRequest(f"{verb}_many takes messages, not {kind.__name__}")
        found: dict[Station, list[Any]] = {station: [] for station in set(map(_HOME, handles))}
        for station in found:
            if station not in self._stations:
                raise InvalidRequest("a message is of another queue, or of an earlier opening; nothing was changed")
        if len(found) == 1:
            return [(next(iter(found)), handles)]
        for handle in handles:
            found[handle._home].append(handle)
        return list(found.items())

    def _nack(self, handle: Handle[Body], delay: Seconds | None, error: object) -> Pending:
        delay_ms = None if delay is None else duration_ms(delay, "delay")
        station = handle._home
        pending = station.settle(Nack(handle._delivered.receipt, delay_ms, self._error_text(error)))
        station.metrics.nacked.add()
        return pending

    def _nack_all(self, handles: object, delay: Seconds | None, error: object) -> list[tuple[Station, Pending]]:
        """Nack in one go; each handle is through with its message, whatever comes of it."""
        delay_ms = None if delay is None else duration_ms(delay, "delay")
        text = self._error_text(error)
        pending = []
        for station, given in self._own(handles, "nack"):
            # Several handles may stand for one message; it can be given back only once.
            receipts = dict.fromkeys(handle._delivered.receipt for handle in given)
            pending.append((station, station.settle_all([Nack(receipt, delay_ms, text) for receipt in receipts])))
            for handle in given:
                handle._end()
            station.metrics.nacked.add(len(receipts))
        return pending

    def _defer(self, handle: Handle[Body], delay: Seconds) -> Pending:
        command = Nack(handle._delivered.receipt, duration_ms(delay, "delay"), why=DEFERRED, counted=False)
        pending = handle._home.settle(command)
        handle._home.metrics.deferred.add()
        return pending

    def _reject(self, handle: Handle[Body], reason: object) -> Pending:
        pending = handle._home.settle(Reject(handle._delivered.receipt, self._error_text(reason)))
        handle._home.metrics.rejected.add()
        return pending

    def _extend(self, handle: Handle[Body], lease: Seconds | None) -> Pending:
        lease_ms = self.settings.lease_ms if lease is None else lease_of(lease)
        return handle._home.settle(Extend([handle._delivered.receipt], lease_ms))

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

    def _seek(self, to: str | None, offset: int | None, time: datetime | None, partition: int | None) -> int:
        self._check_open()
        if sum(argument is not None for argument in (to, offset, time)) != 1:
            raise InvalidRequest('seek takes one of "start", "end", offset=... or time=...')
        if to is not None and to not in ("start", "end"):
            raise InvalidRequest(f'seek cannot go to {to!r}; use "start", "end", offset=... or time=...')
        if offset is not None and partition is None and len(self._stations) > 1:
            raise InvalidRequest(
                f"{self.name} has {len(self._stations)} partitions, each with offsets: give partition=..."
            )
        stations = self._stations if partition is None else [self._group.station(partition)]
        targets = [(station, self._target(station.partition.log, to, offset, time)) for station in stations]
        for station, target in targets:
            station.delivery.seek(target)
        return targets[0][1]

    def _target(self, log: Log, to: str | None, offset: object, time: datetime | None) -> int:
        start, end = log.start, log.end
        if to is not None:
            return start if to == "start" else end
        if time is not None:
            return max(log.find_time(instant_ns(time, "time")), start)
        if type(offset) is not int:
            raise InvalidRequest(f"offset={offset!r} is no offset; give a whole number")
        if not start <= offset <= end:
            raise OffsetOutOfRange(
                f"cannot seek to {offset}: the queue keeps {start} to {end}", offset=offset, start=start, end=end
            )
        return offset

    def _committed(self) -> dict[int, int]:
        self._check_open()
        return {station.number: station.delivery.group.floor for station in self._stations}

    def _peek(self, count: int, most_bytes: int | None = None) -> list[Contents[Body]]:
        wanted = self._wanted(count, 0, None, None, renew=False)
        self._check_open()
        found = self._group.peek(wanted.count, most_bytes)
        return [Contents(station, self._bodies, record) for station, record in found]

    def _qsize(self) -> int:
        self._check_open()
        return sum(station.ready_count() for station in self._stations)

    def _stats(self) -> QueueStats:
        self._check_open()
        return self._group.stats()

    def _purge(self) -> int:
        self._check_open()
        topic, engine = self._group.topic, self._engine
        # What waits for its time is not in the log yet: it is of all who read the topic.
        alone = len(topic.groups) == 1 and not engine.streams.on(topic) and not engine.queries.on(topic)
        return sum(station.purge(delayed=alone) for station in self._stations)

    def _compact(self) -> Compacted:
        self._check_open()
        return self._group.compact()

    def _apply_retention(self) -> Retained:
        self._check_open()
        self._group.check_open()
        return self._group.topic.apply_retention()

    def observe(self, observer: Observer | None) -> None:
        """From now on tell this one of every count and every time; None: nobody."""
        self._group.metrics.set_observer(observer)

    def _let_go(self, station: Station, delivered: Delivered) -> None:
        """A message was dropped unhandled; called by its finalizer."""
        if self._ended:
            return
        if delivered.lease.session == NO_SESSION:  # detached: it ends by itself, in its own time
            station.delivery.renewals.remove(delivered.receipt)
        else:
            station.delivery.drop(delivered.receipt)


def open_face(
    kind: Callable[[BrokerEngine, QueueGroup, Any], _Face],
    folder: str | PathLike[str],
    *,
    create: bool,
    topic: str | None,
    durability: Durability | None,
    body_type: Any,
    settings: QueueSettings | None,
    observer: Observer | None,
    world: World | None,
    trust_folder: bool | None,
    changes: Mapping[str, Any],
) -> _Face:
    """A face of the queue in a folder, with a thread that looks after it where time runs by itself."""
    Bodies(body_type)  # refused before anything is made
    switch(create, "create")
    if durability is not None:
        changes = {**changes, "durability": durability}
    check_settings(settings, changes)
    trusting = BrokerSettings(trust_folder=trusts(trust_folder, world))
    engine = BrokerEngine.open(folder, create=create, settings=trusting, observer=observer, world=world)
    try:
        opened = engine.queue_topic(topic, settings, changes, create=create)
        keep_bodies(engine, opened, body_type)
        group = opened.group(DEFAULT_GROUP)
        if world is None:
            engine.keep()
        return kind(engine, group, body_type)
    except BaseException:
        engine.close()
        raise


def keep_bodies(engine: BrokerEngine, topic: Topic, body_type: Any) -> None:
    """Note what the bodies of a queue are, for workers; where there is no room for that, it is as good without."""
    kind = kind_of(body_type)
    if kind is not None and topic.settings.bodies is None:
        with suppress(OSError, DiskFull):
            engine.alter_topic(topic.name, {"bodies": kind})


def trusts(given: bool | None, world: World | None) -> bool:  # noqa: FBT001  as it was given
    """Whether other users who may write to the folder are trusted: as was said here, or else in the environment."""
    if given is not None:
        return switch(given, "trust_folder")
    said = environment().get(TRUST) if world is None else None
    if said is None:
        return False
    from holdfast.config.settings_file import load_settings

    return load_settings(None, {TRUST: said}).broker.trust_folder


def waiting(block: object, timeout: Seconds | None) -> Seconds | None:
    """How long to wait: not at all for one who does not want to."""
    return timeout if switch(block, "block") else 0


def gives_back(lease: Seconds | None) -> bool:
    """Whether a lease of this length gives the message back now."""
    return lease is not None and lease_of(lease, minimum_ms=0) == 0


def switch(value: object, name: str) -> bool:
    """The argument, if it is True or False."""
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name}={value!r} cannot be used: give True or False")
    return value


def _is_clean(text: str) -> bool:
    """Whether the text can be stored: a lone surrogate cannot."""
    return text.encode(errors="replace").decode() == text
