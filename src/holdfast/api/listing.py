"""Messages that were listed without being taken, and dead letters: what each says, where it is, which were wanted."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import islice
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import msgspec

from holdfast.api.bodies import Bodies
from holdfast.api.contents import Body, Contents, Home
from holdfast.api.drafts import to_datetime
from holdfast.broker.folder.layout import DEAD_SUFFIX, message_id
from holdfast.broker.messages import CORRELATION_ID, DeadNote, mark
from holdfast.broker.tracing.log import TraceStep
from holdfast.delivery.group import Failure
from holdfast.delivery.where import compile_where
from holdfast.errors import InvalidRequest
from holdfast.model import Record

# Errors that differ in numbers, addresses and quoted values only are one kind of error.
_DETAILS: Final = re.compile(r"0x[0-9a-fA-F]+|'[^']*'|\"[^\"]*\"|\d+")


class DeadGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters with the same reason and the same kind of error."""

    reason: str
    error: str
    count: int
    first: datetime
    last: datetime
    example: str


class DeadLettersRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters to put back or drop: those with the ids, or those that the condition chooses."""

    ids: list[str] | None
    where: Where
    limit: int | None
    rate: float | None = None
    to: str | None = None
    dry_run: bool


class Redriven(msgspec.Struct, frozen=True, kw_only=True):
    """What a redrive or a purge found and did."""

    matched: int
    done: int
    ids: list[str]


def grouped(letters: Iterable[DeadLetter[Any]]) -> list[DeadGroup]:
    """Letters by reason and kind of error, the most frequent first."""
    kinds = DeadKinds()
    for letter in letters:
        kinds.add(letter)
    return kinds.groups()


class DeadKinds:
    """Groups of letters, in the making."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], DeadGroup] = {}

    def add(self, letter: DeadLetter[Any]) -> None:
        kind, dead_at = (letter.reason, fingerprint(letter.error)), letter.dead_at
        before = self._found.get(kind)
        self._found[kind] = DeadGroup(
            reason=kind[0],
            error=kind[1],
            count=1 if before is None else before.count + 1,
            first=dead_at if before is None else min(before.first, dead_at),
            last=dead_at if before is None else max(before.last, dead_at),
            example=letter.id,
        )

    def groups(self) -> list[DeadGroup]:
        """The most frequent first."""
        return sorted(self._found.values(), key=lambda group: (-group.count, group.error))


def fingerprint(error: str) -> str:
    """An error's first line without its details."""
    return _DETAILS.sub("…", error.partition("\n")[0])[:200]


def no_letter(letter_id: str) -> InvalidRequest:
    """The error for an id that leads to nothing."""
    return InvalidRequest(f"there is no dead letter {letter_id}; it may have been redriven or purged")


# Messages that were looked at without being taken: what each says, where it stands, and which ones were wanted.


logger = logging.getLogger(__name__)

PhaseName: TypeAlias = Literal["ready", "leased", "delayed", "dead"]
Where: TypeAlias = str | Callable[[Any], object] | None


class Listed(Contents[Body]):
    """A message in the log."""

    __slots__ = ("_due_ms", "_error", "_until_ms", "attempts", "holder", "phase")

    def __init__(
        self,
        home: Home,
        bodies: Bodies,
        record: Record,
        phase: PhaseName,
        *,
        due_ms: int = 0,
        attempts: int = 0,
        holder: str = "",
        error: str = "",
        until_ms: int = 0,
    ) -> None:
        super().__init__(home, bodies, record)
        self.phase = phase
        self._due_ms = due_ms
        self.attempts = attempts
        self.holder = holder
        self._error = error
        self._until_ms = until_ms

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
        return self._error


class Waiting(Listed[Body]):
    """A message that is not in the log yet: it waits for its time. Its record has its number instead of an offset."""

    __slots__ = ()

    def __init__(self, home: Home, bodies: Bodies, record: Record, due_ms: int) -> None:
        super().__init__(home, bodies, record, "delayed", due_ms=due_ms)

    @property
    def id(self) -> str:
        return message_id(self._home.topic, self._home.number, None, self._record.offset)

    @property
    def offset(self) -> None:  # type: ignore[override]  # what is in no log has no place there
        """None, as `put` said: it gets one when it comes due."""
        return


class DeadLetter(Listed[Body]):
    """A message that died: as it was, with every error, the reason and its original place."""

    __slots__ = ("_note",)

    def __init__(self, home: Home, bodies: Bodies, record: Record, note: DeadNote) -> None:
        super().__init__(home, bodies, record, "dead", attempts=note.attempts, holder=note.holder, error=note.error)
        self._note = note

    @property
    def id(self) -> str:
        return message_id(self._home.topic + DEAD_SUFFIX, self._home.number, self._record.offset, None)

    @property
    def reason(self) -> str:
        return self._note.reason

    @property
    def original_id(self) -> str:
        """The id of the message as it was published first, however often it has died and come back since."""
        return self._note.first.id

    @property
    def original_offset(self) -> int:
        return self._note.first.offset

    @property
    def original_timestamp(self) -> datetime:
        return to_datetime(self._note.first.timestamp_ns)

    @property
    def expires_at(self) -> datetime | None:
        """When the message would have expired. The letter does not."""
        ms = self._note.expires_at_ms
        return to_datetime(ms * 1_000_000) if ms else None

    @property
    def due_at(self) -> datetime | None:
        """The time that the message was delayed to, if it was."""
        ms = self._note.due_at_ms
        return to_datetime(ms * 1_000_000) if ms else None

    @property
    def correlation_id(self) -> str:
        given = mark(self._record, CORRELATION_ID)
        return self.original_id if given is None else given.decode()

    @property
    def priority(self) -> int:
        return self._note.priority

    @property
    def failures(self) -> tuple[Failure, ...]:
        """How each delivery ended: when, with whom, why, and the error."""
        return self._note.failures

    @property
    def first_delivery(self) -> datetime | None:
        ms = self._note.first_ms
        return to_datetime(ms * 1_000_000) if ms else None

    @property
    def last_delivery(self) -> datetime | None:
        ms = self._note.last_ms
        return to_datetime(ms * 1_000_000) if ms else None

    @property
    def dead_at(self) -> datetime:
        return to_datetime(self._note.dead_at_ms * 1_000_000)

    @property
    def state(self) -> Any:
        """The document that went with it, or None."""
        content = self._note.state
        return None if content is None else msgspec.json.decode(content)


class Found(NamedTuple):
    """Everything known about one message; times are milliseconds since 1970, 0 for none."""

    message: Listed[Any]
    phase: str
    leased_at_ms: int = 0
    lease_until_ms: int = 0
    first_delivery_ms: int = 0
    last_delivery_ms: int = 0
    failures: tuple[Failure, ...] = ()
    state: Any = None
    history: Sequence[TraceStep] = ()


# For the rest of the package: what is kept of a dead letter beside the message itself; when the lease of a message ends
# by the clock on the wall, and when one that waits will be ready, in milliseconds since 1970, 0 for others.
note_of: Callable[[DeadLetter[Any]], DeadNote] = attrgetter("_note")
until_ms_of: Callable[[Listed[Any]], int] = attrgetter("_until_ms")
due_ms_of: Callable[[Listed[Any]], int] = attrgetter("_due_ms")

_Message = TypeVar("_Message", bound=Listed[Any])


def check_phase(phase: object) -> None:
    """Refuse what is no phase that can be listed."""
    if phase not in get_args(PhaseName):
        raise InvalidRequest(f"phase={phase!r} is not known; choose from {', '.join(get_args(PhaseName))}")


def check_limit(limit: object) -> None:
    """Refuse what is no number of messages."""
    if limit is not None and (type(limit) is not int or limit < 0):
        raise InvalidRequest(f"limit={limit!r} cannot be used: give a whole number, 0 or more")


def chosen(messages: Iterator[_Message], where: Where, limit: int | None, *, now_ms: int) -> Iterator[_Message]:
    """Those of the messages that the condition chooses."""
    check_limit(limit)
    wanted = compile_where(where, now_ms=now_ms)
    # A function sees what the caller will get; an expression sees the bytes of the body, whatever its type.
    as_seen = _Raw if isinstance(where, str) else _as_it_is
    return islice((message for message in messages if wanted(as_seen(message))), limit)


def _as_it_is(message: Listed[Any]) -> Any:
    return message


class _Raw:
    """A message as conditions see it: with the bytes of its body, whatever its type."""

    def __init__(self, message: Listed[Any]) -> None:
        self._message = message

    @property
    def body(self) -> bytes:
        return self._message.raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)


def warn_of_damage(topic: str, group: str, phase: str, messages: int) -> None:
    """Say once for a list that it is not all there should be."""
    logger.warning(
        "%d damaged messages of %s were left out of a list; run `holdfast check` on the folder",
        messages,
        topic,
        extra={"topic": topic, "group": group, "phase": phase, "messages": messages},
    )
