"""The topics of a server: requests and answers, as tasks and threads share them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Final
from weakref import WeakSet

import msgspec
from msgspec import UNSET

from holdfast.api.arguments import Question, moment_ns
from holdfast.api.drafts import Bodies, instant_ns, moment_at, to_datetime
from holdfast.api.locks import Lock
from holdfast.api.schedules import ScheduleRequest
from holdfast.api.topics import ConsumedPartition, MemberRequest, StreamHome, StreamMessage
from holdfast.api.transactions import PublishedMessage, TransactionRequest
from holdfast.broker.folder.layout import parse_message_id
from holdfast.broker.messages import DELAYED_ID
from holdfast.broker.streams import Reset, To
from holdfast.client.calling import Ask, Caller, path_of
from holdfast.client.network import run
from holdfast.env.process import get_logger
from holdfast.errors import HoldfastError, Unavailable
from holdfast.membership import TopicPartition
from holdfast.model import Durability
from holdfast.protocol import topics as wire
from holdfast.protocol.messages import PutSchedule, Said
from holdfast.protocol.topics import Beat, KeepLock, Offset
from holdfast.protocol.transactions import (
    CommitTransaction,
    TransactionAcks,
    TransactionDocument,
    TransactionMessage,
    TransactionOffsets,
)
from holdfast.remote.client import Client, ask_of
from holdfast.remote.publisher import WireDrafter
from holdfast.remote.records import RemoteBody, record_from
from holdfast.settings import BrokerSettings, ConsumerSettings, load

MOST_READ: Final = 10_000  # messages, steps or groups that one call answers


class RemoteBroker:
    """One server, or the owner of a folder."""

    def __init__(self, client: Client, body_type: Any = None, durability: Durability | None = None) -> None:
        self.client = client
        self.body_type = body_type
        self.bodies = Bodies(body_type)
        self.durability = durability  # default for publishing calls
        self._sending: WeakSet[Any] = WeakSet()  # producers, which may have messages that are not stored yet

    @property
    def place(self) -> str:
        """The address of the server."""
        return self.client.caller.address.text

    @property
    def settings(self) -> BrokerSettings:
        """The defaults: those in force are the server's own."""
        return BrokerSettings()

    @property
    def closed(self) -> bool:
        return self.client.caller.closed

    @property
    def shared(self) -> bool:
        """Always true: other processes can use the same server."""
        return True

    def after_fork(self) -> Any:
        """Return this port: the client opens connections of its own in a child."""
        return self

    def publish_now(self, *_: object) -> None:
        """Return None: to publish is a call to the server."""

    def _searched(self, question: Question) -> dict[str, Any]:
        """Encode a search; a timedelta means that long before now."""
        asked: dict[str, Any] = {
            name: value for name, value in msgspec.structs.asdict(question).items() if value is not None
        }
        for name in ("since", "until"):
            value = asked.get(name)
            if isinstance(value, timedelta):
                value = to_datetime(moment_ns(value, name, self.client.world.clock.now_ns()))
            if value is not None:
                instant_ns(value, name)
                asked[name] = value.isoformat()
        return asked


def reset_of(topic: str, to: To, partition: int | None, *, dry_run: bool) -> wire.ResetOffsets:
    """Encode the target of a reset."""
    return wire.ResetOffsets(
        topic=topic,
        to=to.end,
        offset=to.offset,
        time=None if to.time_ns is None else to_datetime(to.time_ns),
        partition=partition,
        dry_run=dry_run,
    )


def resets_from(done: wire.ResetDone) -> list[Reset]:
    """Where it went."""
    return [
        Reset(topic=each.topic, partition=each.partition, before=each.before, after=each.after)
        for each in done.partitions
    ]


def plain(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as plain values, as they are sent."""
    plain: dict[str, Any] = msgspec.to_builtins(dict(changes))
    return plain


# A consumer on a server: its heartbeats, its settings and its messages. Nothing here blocks.


logger = get_logger(__name__)

_NS: Final = 1_000_000
_OURS: Final = frozenset({"auto_commit", "auto_commit_ms", "max_poll_ms"})  # handled by the client


class Heartbeats:
    """A consumer as the client's thread sees it: it tells the server that the consumer lives, and keeps none alive."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._path = ""
        self._every_ns = self._most_ns = 0
        self.closed = False
        self.polling = False
        self.polled_ns = 0

    def begin(self, path: str, heartbeat_ms: int, max_poll_ms: int) -> None:
        """Note that it has joined under this member id."""
        self._path = path
        self._every_ns, self._most_ns = heartbeat_ms * _NS, max_poll_ms * _NS
        self.polled_ns = self._caller.world.clock.monotonic_ns()

    def beat(self, now_ns: int) -> int:
        """Send a heartbeat, unless the consumer has not polled for `max_poll_ms` and counts as stuck."""
        if self.polling or now_ns - self.polled_ns < self._most_ns:
            try:
                run(self._caller.call(Ask(method="POST", path=self._path, answers=Beat)))
            except HoldfastError as error:  # its next poll will tell
                logger.debug("heartbeat not accepted", extra={"path": self._path, "why": str(error)})
        return now_ns + self._every_ns


def member_settings(request: MemberRequest) -> tuple[ConsumerSettings, Mapping[str, Any]]:
    """Return the settings of a consumer, and those of them to send to the server."""
    changes = {**_differing(request.settings), **request.changes}
    settings = load(ConsumerSettings, changes)
    return settings, {name: value for name, value in changes.items() if name not in _OURS}


def _differing(settings: ConsumerSettings | None) -> dict[str, Any]:
    if settings is None:
        return {}
    usual = ConsumerSettings()
    given = msgspec.structs.asdict(settings)
    return {name: value for name, value in given.items() if value != getattr(usual, name)}


def messages_from(
    client: Client, bodies: Bodies, partitions: Mapping[TopicPartition, ConsumedPartition], message: Iterable[Said]
) -> list[StreamMessage[Any]]:
    """Decode the messages of a poll; those of one partition usually come together."""
    found: list[StreamMessage[Any]] = []
    place: TopicPartition | None = None
    home = StreamHome("", 0)
    for each in message:
        if place is None or each.partition != place[1] or each.topic != place[0]:
            place = each.topic, each.partition
            home = partitions[place].home if place in partitions else StreamHome(*place)
        record = record_from(each, _payload(client, each) if each.omitted else None)
        if each.id[each.id.rfind("-") + 1] == "d":  # it was delayed, and keeps its id
            number = parse_message_id(each.id, each.topic).delayed_id
            record = msgspec.structs.replace(record, headers=(*record.headers, (DELAYED_ID, b"%d" % (number or 0))))
        found.append(StreamMessage(home, bodies, record))
    return found


def _payload(client: Client, message: Said) -> RemoteBody:
    path = path_of("topics", message.topic, "partitions", message.partition, "payload", offset=message.offset)
    return RemoteBody(client.beside, path, message.size)


# Locks of a server that are renewed in the background.


_SOON_NS: Final = 250 * _NS


class Renewing:
    """A lock as the client's thread sees it: it renews the lease, and keeps no lock alive that nobody has."""

    def __init__(self, client: Client, lock: Lock) -> None:
        self._caller = client.beside
        self._lock = lock
        self._lease_ns = round(lock.lease * 1e9)
        self._every_ns = max(self._lease_ns // 3, _NS)
        self.closed = False
        self.lost = False
        self.until_ns = client.world.clock.monotonic_ns() + self._lease_ns
        self._first = True

    def beat(self, now_ns: int) -> int:
        """Renew it if that is due; returns when it is due again."""
        if self._first:
            self._first = False
            return now_ns + self._every_ns
        body = KeepLock(lease_id=self._lock.lease_id, lease=self._lock.lease)
        try:
            run(self._caller.call(ask_of("POST", path_of("locks", self._lock.name, "keepalive"), Lock, body)))
        except Unavailable:
            return now_ns + min(self._every_ns, _SOON_NS)
        except HoldfastError:
            self.lost = self.closed = True
            return now_ns + self._every_ns
        self.until_ns = now_ns + self._lease_ns
        return now_ns + self._every_ns


class RemoteKeptLock:
    """A lock of a server that this client renews."""

    def __init__(self, client: Client, lock: Lock) -> None:
        self.lock = lock
        self._clock = client.world.clock
        self._renewing = Renewing(client, lock)
        client.upkeep.beat(self._renewing)

    @property
    def lost(self) -> bool:
        """Whether the server said that the lease is lost, or it ended before it could be renewed."""
        return self._renewing.lost or self._clock.monotonic_ns() >= self._renewing.until_ns

    def end(self) -> None:
        """Stop renewing it."""
        self._renewing.closed = True


def put_schedule_of(request: ScheduleRequest, bodies: Bodies) -> PutSchedule:
    """Return the schedule as it is sent."""
    timing, message = request.timing, request.message
    headers: Any = message.headers
    return PutSchedule(
        topic=request.topic,
        body=bodies.encode(message.body),
        key=None if message.key is None else str(message.key),
        headers=dict(headers or {}),
        priority=message.priority,
        cron=timing.cron or None,
        timezone=timing.timezone,
        every=timing.every_ms / 1000 if timing.every_ms else None,
        at=moment_at(timing.at_ms),
        misfire=request.misfire,
        jitter=request.jitter_ms / 1000,
    )


def commit_of(request: TransactionRequest) -> CommitTransaction:
    """Return a transaction as it is sent."""
    drafter = WireDrafter(Bodies(None))
    return CommitTransaction(
        name=request.name,
        epoch=request.epoch,
        messages=[_transaction_message(drafter, each) for each in request.messages],
        acks=[TransactionAcks(topic=each.topic, group=each.group, receipts=each.receipts) for each in request.acks],
        offsets=[
            TransactionOffsets(
                group=each.group,
                member=each.member,
                offsets=[Offset(topic=at[0], partition=at[1], offset=offset) for at, offset in each.offsets.items()],
            )
            for each in request.offsets
        ],
        documents=[
            TransactionDocument(
                name=each.name,
                value=UNSET if each.content is None else msgspec.json.decode(each.content),
                remove=each.content is None,
                version=each.version,
            )
            for each in request.documents
        ],
    )


def _transaction_message(drafter: WireDrafter, published: PublishedMessage) -> TransactionMessage:
    # The time plays no part: the server counts delays from when it commits.
    message, _ = drafter.draft(published.message, 0)
    return TransactionMessage(topic=published.topic, partition=published.partition, **msgspec.structs.asdict(message))
