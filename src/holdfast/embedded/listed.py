"""Messages that were looked at without being taken: what each says, and where it stands."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import msgspec

from holdfast.broker.dead_letters import DeadLetter as StoredLetter
from holdfast.broker.delayed import Delayed
from holdfast.broker.folder.layout import DEAD_SUFFIX, message_id
from holdfast.broker.messages import CORRELATION_ID, mark
from holdfast.broker.station import Station
from holdfast.delivery.group import Failure
from holdfast.embedded.message import Body, Contents, Home
from holdfast.embedded.times import to_datetime
from holdfast.model import Record

if TYPE_CHECKING:
    from holdfast.embedded.bodies import Bodies
    from holdfast.embedded.face import Face

PhaseName: TypeAlias = Literal["ready", "leased", "delayed", "dead"]


class Listed(Contents[Body]):
    """A message in the log."""

    __slots__ = ("_due_ms", "attempts", "holder", "phase")

    _home: Station

    def __init__(
        self, face: Face[Body], station: Station, record: Record, phase: PhaseName, *, due_ms: int = 0
    ) -> None:
        super().__init__(station, face._bodies, record)
        group = station.delivery.group
        lease = group.leases.get(record.offset)
        self._stand(phase, due_ms, group.attempts(record.offset), "" if lease is None else lease.holder)

    def _stand(self, phase: PhaseName, due_ms: int, attempts: int, holder: str) -> None:
        self.phase = phase
        self._due_ms = due_ms
        self.attempts = attempts
        self.holder = holder

    @property
    def due_at(self) -> datetime | None:
        """When it will be ready, or was to be."""
        ms = self._due_ms or self._record.due_at_ms
        return to_datetime(ms * 1_000_000) if ms else None

    @property
    def reason(self) -> str:
        """Why it died: MAX_ATTEMPTS, REJECTED or EXPIRED; empty while it lives."""
        return ""

    @property
    def error(self) -> str:
        """What went wrong last."""
        history = self._home.delivery.group.histories.get(self._record.offset)
        return history.failures[-1].error if history is not None and history.failures else ""


class Waiting(Listed[Body]):
    """A message that is not in the log yet: it waits for its time."""

    __slots__ = ()

    def __init__(self, face: Face[Body], station: Station, message: Delayed) -> None:
        Contents.__init__(self, station, face._bodies, message.record)
        self._stand("delayed", message.due_at_ms, 0, "")

    @property
    def id(self) -> str:
        return message_id(self._home.topic, self._home.number, None, self._record.offset)

    @property
    def offset(self) -> None:  # type: ignore[override]  # what is in no log has no place there
        """None, as `put` said: it gets one when it comes due."""
        return

    @property
    def error(self) -> str:
        return ""


class HasBodies(Protocol):
    """What knows the type of bodies."""

    _bodies: Bodies


class DeadLetter(Listed[Body]):
    """A message that died: as it was, with every error, the reason and its original place."""

    __slots__ = ("_stored",)

    def __init__(self, face: HasBodies, home: Home, stored: StoredLetter) -> None:
        Contents.__init__(self, home, face._bodies, stored.record)
        self._stand("dead", 0, stored.note.attempts, stored.note.holder)
        self._stored = stored

    @property
    def id(self) -> str:
        return message_id(self._home.topic + DEAD_SUFFIX, self._home.number, self._record.offset, None)

    @property
    def reason(self) -> str:
        return self._stored.note.reason

    @property
    def error(self) -> str:
        return self._stored.note.error

    @property
    def original_id(self) -> str:
        """The id of the message as it was published first, however often it has died and come back since."""
        return self._stored.note.first.id

    @property
    def original_offset(self) -> int:
        return self._stored.note.first.offset

    @property
    def original_timestamp(self) -> datetime:
        return to_datetime(self._stored.note.first.timestamp_ns)

    @property
    def expires_at(self) -> datetime | None:
        """When the message would have expired. The letter does not."""
        ms = self._stored.note.expires_at_ms
        return to_datetime(ms * 1_000_000) if ms else None

    @property
    def due_at(self) -> datetime | None:
        """The time that the message was delayed to, if it was."""
        ms = self._stored.note.due_at_ms
        return to_datetime(ms * 1_000_000) if ms else None

    @property
    def correlation_id(self) -> str:
        given = mark(self._record, CORRELATION_ID)
        return self.original_id if given is None else given.decode()

    @property
    def priority(self) -> int:
        return self._stored.note.priority

    @property
    def failures(self) -> tuple[Failure, ...]:
        """How each delivery ended: when, with whom, why, and the error."""
        return self._stored.note.failures

    @property
    def first_delivery(self) -> datetime | None:
        ms = self._stored.note.first_ms
        return to_datetime(ms * 1_000_000) if ms else None

    @property
    def last_delivery(self) -> datetime | None:
        ms = self._stored.note.last_ms
        return to_datetime(ms * 1_000_000) if ms else None

    @property
    def dead_at(self) -> datetime:
        return to_datetime(self._stored.note.dead_at_ms * 1_000_000)

    @property
    def state(self) -> Any:
        """The document that went with it, or None."""
        content = self._stored.note.state
        return None if content is None else msgspec.json.decode(content)
