"""A consumer behind a server: its heartbeats, its settings, and its messages as they are told. Nothing here waits."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from holdfast.api.bodies import Bodies
from holdfast.api.consumers import ConsumedPartition, MemberRequest, StreamHome, StreamMessage
from holdfast.broker.folder.layout import parse_message_id
from holdfast.broker.messages import DELAYED_ID
from holdfast.client.calling import Caller
from holdfast.client.http import Ask, path_of
from holdfast.client.network import run
from holdfast.errors import HoldfastError
from holdfast.membership.assignment import TopicPartition
from holdfast.protocol.groups import Beat
from holdfast.protocol.messages import Said
from holdfast.remote.client import Client
from holdfast.remote.records import RemoteBody, record_told
from holdfast.settings import ConsumerSettings, load

logger = logging.getLogger(__name__)

_NS: Final = 1_000_000
_OURS: Final = frozenset({"auto_commit", "auto_commit_ms", "max_poll_ms"})  # the client's own business


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
        """It has joined, and is a member of this name from now on."""
        self._path = path
        self._every_ns, self._most_ns = heartbeat_ms * _NS, max_poll_ms * _NS
        self.polled_ns = self._caller.world.clock.monotonic_ns()

    def beat(self, now_ns: int) -> int:
        """Say that it lives, if it does: one that has not polled for `max_poll_ms` is taken for stuck."""
        if self.polling or now_ns - self.polled_ns < self._most_ns:
            try:
                run(self._caller.call(Ask(method="POST", path=self._path, answers=Beat)))
            except HoldfastError as error:  # its next poll will tell
                logger.debug("heartbeat not taken", extra={"path": self._path, "why": str(error)})
        return now_ns + self._every_ns


def member_settings(request: MemberRequest) -> tuple[ConsumerSettings, Mapping[str, Any]]:
    """The settings of a consumer, and those of them that its server is to know: the others are its usual ones."""
    changes = {**_differing(request.settings), **request.changes}
    settings = load(ConsumerSettings, changes)
    return settings, {name: value for name, value in changes.items() if name not in _OURS}


def _differing(settings: ConsumerSettings | None) -> dict[str, Any]:
    if settings is None:
        return {}
    usual = ConsumerSettings()
    given = msgspec.structs.asdict(settings)
    return {name: value for name, value in given.items() if value != getattr(usual, name)}


def messages_told(
    client: Client, bodies: Bodies, partitions: Mapping[TopicPartition, ConsumedPartition], told: Iterable[Said]
) -> list[StreamMessage[Any]]:
    """Messages of a stream, as the server told them: those of one partition come together, as a rule."""
    found: list[StreamMessage[Any]] = []
    place: TopicPartition | None = None
    home = StreamHome("", 0)
    for each in told:
        if place is None or each.partition != place[1] or each.topic != place[0]:
            place = each.topic, each.partition
            home = partitions[place].home if place in partitions else StreamHome(*place)
        record = record_told(each, _payload(client, each) if each.omitted else None)
        if each.id[each.id.rfind("-") + 1] == "d":  # it was delayed, and keeps its id
            number = parse_message_id(each.id, each.topic).delayed_id
            record = msgspec.structs.replace(record, headers=(*record.headers, (DELAYED_ID, b"%d" % (number or 0))))
        found.append(StreamMessage(home, bodies, record))
    return found


def _payload(client: Client, told: Said) -> RemoteBody:
    path = path_of("topics", told.topic, "partitions", told.partition, "payload", offset=told.offset)
    return RemoteBody(client.beside, path, told.size)
