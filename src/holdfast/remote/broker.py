"""The topics of a server, as far as nothing is waited for: what is asked, and what is made of answers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final
from weakref import WeakSet

import msgspec

from holdfast.api.arguments import Question, moment_ns
from holdfast.api.bodies import Bodies
from holdfast.api.times import instant_ns, to_datetime
from holdfast.broker.streams.offsets import Reset, To
from holdfast.model import Durability
from holdfast.protocol import groups as wire
from holdfast.remote.client import Client
from holdfast.settings import BrokerSettings

MOST_READ: Final = 10_000  # messages, steps or groups that one call answers


class RemoteBroker:
    """One server, or the owner of a folder."""

    def __init__(self, client: Client, body_type: Any = None, durability: Durability | None = None) -> None:
        self.client = client
        self.body_type = body_type
        self.bodies = Bodies(body_type)
        self.durability = durability  # of what is published, where a call does not say
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
        """Others ask the same server."""
        return True

    def after_fork(self) -> Any:
        """The client sees to it that a child has connections of its own."""
        return self

    def _searched(self, question: Question) -> dict[str, Any]:
        """A search as it is sent; a length of time is so long ago."""
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
    """Where a group goes, as it is sent."""
    return wire.ResetOffsets(
        topic=topic,
        to=to.end,
        offset=to.offset,
        time=None if to.time_ns is None else to_datetime(to.time_ns),
        partition=partition,
        dry_run=dry_run,
    )


def resets_told(done: wire.ResetDone) -> list[Reset]:
    """Where it went."""
    return [
        Reset(topic=each.topic, partition=each.partition, before=each.before, after=each.after)
        for each in done.partitions
    ]


def plain(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as plain values, which is how they are sent."""
    plain: dict[str, Any] = msgspec.to_builtins(dict(changes))
    return plain
