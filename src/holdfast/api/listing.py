"""Messages that were listed or found without being leased, dead letters, and the conditions that select them.

People search over all queues with terms like these:

    orders-0-42                  the message with this id
    key=customer-7               its key
    tenant=acme                  a header
    $.order.id=7                 a part of a JSON body, as a number or as text
    time=2026-11-17              published (or dead) on this day; also time>..., time<..., age<1h, age>2d
    queue=orders                 only in queues with this in their names
    card declined                each word in body, key, error, id or correlation id, in upper or lower case
    "card declined"              these words in this order
    where attempts > 3           a condition as `holdfast ls --where` takes it

Several terms must all hold. They are translated to a condition in the language of `where`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import islice
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import msgspec

from holdfast.api.contents import Body, Contents, Home
from holdfast.api.drafts import Bodies, moment_at, to_datetime
from holdfast.broker.folder.layout import DEAD_SUFFIX, message_id
from holdfast.broker.messages import CORRELATION_ID, DeadNote, mark
from holdfast.broker.tracing import TraceStep
from holdfast.delivery.where import compile_where, headline, moment_of, seconds_of
from holdfast.env.process import get_logger
from holdfast.errors import InvalidRequest
from holdfast.later import pattern
from holdfast.model import Failure, Record

# Errors that differ only in numbers, addresses and quoted values are one kind of error.
_DETAILS: Final = pattern(r"0x[0-9a-fA-F]+|'[^']*'|\"[^\"]*\"|\d+")


class DeadGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters with the same reason and the same kind of error."""

    reason: str
    error: str
    count: int
    first: datetime
    last: datetime
    example: str


class DeadLettersRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters to redrive or delete: those with these ids, or those that match the condition."""

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
    """Group dead letters by reason and kind of error, the most frequent first."""
    kinds = DeadKinds()
    for letter in letters:
        kinds.add(letter)
    return kinds.groups()


class DeadKinds:
    """Groups dead letters by reason and kind of error."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], DeadGroup] = {}

    def add(self, letter: DeadLetter[Any]) -> None:
        """Count one dead letter."""
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
        """Return the groups, the most frequent first."""
        return sorted(self._found.values(), key=lambda group: (-group.count, group.error))


def fingerprint(error: str) -> str:
    """Return the headline of an error without its details."""
    return _DETAILS.sub("…", headline(error))[:200]


def no_letter(letter_id: str) -> InvalidRequest:
    """Return the error for an id of no dead letter."""
    return InvalidRequest(
        f"there is no dead letter {letter_id}; it may have been redriven or purged. `queue.dead.list()` or `holdfast "
        "dead ls` shows those that are left"
    )


# Messages that were listed without being leased.


logger = get_logger(__name__)

PhaseName: TypeAlias = Literal["ready", "leased", "delayed", "dead", "done"]
Where: TypeAlias = str | Callable[[Any], object] | None


class Listed(Contents[Body]):
    """A message as `messages` lists it, with its phase, attempts and last error."""

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
        """When it becomes ready, or the time it was delayed to; None if it was not delayed."""
        return moment_at(self._due_ms or self._record.due_at_ms)

    @property
    def reason(self) -> str:
        """Why it is a dead letter: MAX_ATTEMPTS, REJECTED or EXPIRED; otherwise empty."""
        return ""

    @property
    def error(self) -> str:
        """The error of the last failed attempt, or an empty text."""
        return self._error


class Waiting(Listed[Body]):
    """A delayed message that is not in the log yet. Its record has its delayed id instead of an offset."""

    __slots__ = ()

    def __init__(self, home: Home, bodies: Bodies, record: Record, due_ms: int) -> None:
        super().__init__(home, bodies, record, "delayed", due_ms=due_ms)

    @property
    def id(self) -> str:
        return message_id(self._home.topic, self._home.number, None, self._record.offset)

    @property
    def offset(self) -> None:  # type: ignore[override]  # it is not in the log yet
        """None: it gets an offset when it becomes due."""
        return


class DeadLetter(Listed[Body]):
    """A dead letter: the message as it was, the reason, the error of each delivery, and where it came from."""

    __slots__ = ("_note",)

    def __init__(self, home: Home, bodies: Bodies, record: Record, note: DeadNote) -> None:
        # The record of the dead letter has neither priority nor times, since it must not expire: the note kept them.
        record = msgspec.structs.replace(
            record, priority=note.priority, expires_at_ms=note.expires_at_ms, due_at_ms=note.due_at_ms
        )
        super().__init__(home, bodies, record, "dead", attempts=note.attempts, holder=note.holder, error=note.error)
        self._note = note

    @property
    def id(self) -> str:
        return message_id(self._home.topic + DEAD_SUFFIX, self._home.number, self._record.offset, None)

    @property
    def reason(self) -> str:
        """Why it is a dead letter: MAX_ATTEMPTS, REJECTED or EXPIRED."""
        return self._note.reason

    @property
    def original_id(self) -> str:
        """The id under which the message was first published, even if it was redriven since."""
        return self._note.first.id

    @property
    def original_offset(self) -> int:
        """The offset at which the message was first published."""
        return self._note.first.offset

    @property
    def original_timestamp(self) -> datetime:
        """When the message was first published."""
        return to_datetime(self._note.first.timestamp_ns)

    @property
    def correlation_id(self) -> str:
        given = mark(self._record, CORRELATION_ID)
        return self.original_id if given is None else given.decode()

    @property
    def failures(self) -> tuple[Failure, ...]:
        """How each delivery ended: the time, the holder, the reason and the error."""
        return self._note.failures

    @property
    def first_delivery(self) -> datetime | None:
        """When the message was first delivered, or None if it never was."""
        return moment_at(self._note.first_ms)

    @property
    def last_delivery(self) -> datetime | None:
        """When the message was last delivered, or None if it never was."""
        return moment_at(self._note.last_ms)

    @property
    def dead_at(self) -> datetime:
        """When it became a dead letter."""
        return to_datetime(self._note.dead_at_ms * 1_000_000)

    @property
    def state(self) -> Any:
        """The state document of the message, or None."""
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


# For the rest of the package: the note stored with a dead letter; when the lease of a message ends, and when a delayed
# one becomes ready, in milliseconds since 1970 (0 if neither applies).
note_of: Callable[[DeadLetter[Any]], DeadNote] = attrgetter("_note")
until_ms_of: Callable[[Listed[Any]], int] = attrgetter("_until_ms")
due_ms_of: Callable[[Listed[Any]], int] = attrgetter("_due_ms")

_Message = TypeVar("_Message", bound=Listed[Any])


def check_phase(phase: object) -> None:
    """Refuse anything that is not a phase."""
    if phase not in get_args(PhaseName):
        raise InvalidRequest(f"phase={phase!r} is not known; choose from {', '.join(get_args(PhaseName))}")


def check_limit(limit: object) -> None:
    """Refuse anything that is not a number of messages, or None."""
    if limit is not None and (type(limit) is not int or limit < 0):
        raise InvalidRequest(f"limit={limit!r} cannot be used: give a whole number, 0 or more")


def chosen(messages: Iterator[_Message], where: Where, limit: int | None, *, now_ms: int) -> Iterator[_Message]:
    """Iterate over the messages that match the condition, up to the limit."""
    check_limit(limit)
    wanted = compile_where(where, now_ms=now_ms)
    # A function sees what the caller will get; an expression always sees the bytes of the body.
    as_seen = as_expressions_see if isinstance(where, str) else _as_it_is
    return islice((message for message in messages if wanted(as_seen(message))), limit)


def _as_it_is(message: Listed[Any]) -> Any:
    return message


def as_expressions_see(message: Listed[Any]) -> Any:
    """Return a message as an expression sees it."""
    return _Raw(message)


class _Raw:
    """A message as expressions see it: its body is always the stored bytes."""

    def __init__(self, message: Listed[Any]) -> None:
        self._message = message

    @property
    def body(self) -> bytes:
        return self._message.raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)


def warn_of_damage(topic: str, group: str, phase: str, messages: int) -> None:
    """Log, once per list, how many damaged messages were left out."""
    logger.warning(
        "%d damaged messages of %s were left out of a list; run `holdfast check` on the folder",
        messages,
        topic,
        extra={"topic": topic, "group": group, "phase": phase, "messages": messages},
    )


class SearchHit(NamedTuple):
    """A message that a search found, with its phase, and the group that it has this phase in."""

    message: Listed[Any]
    group: str


class SearchedQueue(msgspec.Struct, kw_only=True):
    """How many messages of a queue a call looked at, of how many; `whole` if it reached the end."""

    queue: str
    searched: int = 0
    messages: int = 0
    whole: bool = False
    problem: str = ""


class SearchPage(msgspec.Struct, kw_only=True):
    """The messages that one call found, and what it looked at.

    One call looks at a limited number of messages. Pass `next` as `after` to search further; it is empty once
    everything was searched. `left` are queues that were not reached, and `left_out` is how many more there are. Topics
    without a group in queue mode (`not_queues`) are not searched. `where` is the condition that was searched for.
    """

    messages: list[SearchHit]
    next: str = ""
    scanned: int = 0
    scanned_in_all: int = 0
    queues: list[SearchedQueue] = []
    left: list[str] = []
    left_out: int = 0
    not_queues: list[str] = []
    where: str = ""


_TERM: Final = pattern(r'"((?:[^"\\]|\\.)*)"|((?:[^\s"]|"(?:[^"\\]|\\.)*")+)')
_PAIR: Final = pattern(r"(time|age)(>=|<=|>|<|=)(.+)|(\$[^=]*|[^=<>\s]+)=(.*)", re.DOTALL)
_PATH: Final = pattern(r"""\.([^.\[\]]+)|\[([0-9]+)\]|\[["']([^"'\]]+)["']\]""")
_NUMBER: Final = pattern(r"-?[0-9]+(?:\.[0-9]+)?")
_ID: Final = pattern(r"[^\s=\"$]+-[0-9]+-d?[0-9]+")
_WHERE: Final = "where "


class SearchTerms(NamedTuple):
    """A search: the condition on messages, the text in the names of queues, and the id if it may be one."""

    where: str
    queue: str = ""
    id: str = ""


def parse_search(text: str) -> SearchTerms:
    """Read what somebody typed. Raises InvalidRequest for what cannot be understood."""
    text = text.strip()
    if not text:
        raise InvalidRequest("type what to search for: an id, key=..., a header as name=value, $.path=..., or a text")
    if text.lower().startswith(_WHERE):
        return SearchTerms(text[len(_WHERE) :].strip())
    conditions, queue = [], ""
    for quoted, plain in _TERM.findall(text):
        if not plain:
            conditions.append(_contains(_unescaped(quoted)))
            continue
        pair = _PAIR.fullmatch(plain)
        if pair is None:
            conditions.append(_contains(plain.replace('"', "")))
        elif pair[1] is not None:
            conditions.append(_when(pair[1], pair[2], _unquoted(pair[3])))
        elif pair[4] == "queue":
            queue = _unquoted(pair[5])
        else:
            conditions.append(_equals(pair[4], _unquoted(pair[5])))
    return SearchTerms(" and ".join(conditions), queue, text if _ID.fullmatch(text) else "")


def _contains(word: str) -> str:
    text = literal(f"(?i){re.escape(word)}")
    named = literal(word)
    return f"(body ~ {text} or key ~ {text} or error ~ {text} or id == {named} or correlation_id == {named})"


def _equals(name: str, value: str) -> str:
    if name.startswith("$"):
        path = "json" + "".join(_parts(name))
        if value in ("true", "false", "null"):
            return f"({path} == {value} or {path} == {literal(value)})"
        if _NUMBER.fullmatch(value):
            return f"({path} == {value} or {path} == {literal(value)})"
        return f"{path} == {literal(value)}"
    if name in ("key", "id", "holder", "reason", "correlation_id"):
        return f"{name} == {literal(value)}"
    return f"header[{literal(name)}] == {literal(value)}"


def _parts(path: str) -> Iterator[str]:
    at = 1
    while at < len(path):
        found = _PATH.match(path, at)
        if found is None:
            raise InvalidRequest(f"the path {path} cannot be read at {path[at:]!r}; write it as $.order.items[0].id")
        at = found.end()
        name = found[1] or found[3]
        yield f"[{found[2]}]" if name is None else f"[{literal(name)}]"


def _when(name: str, relation: str, value: str) -> str:
    if name == "age":
        if seconds_of(value) is None:
            raise InvalidRequest(f"age{relation}{value} is not a duration; write it as 30s, 5m, 2h or 7d")
        return f"age {'==' if relation == '=' else relation} {value}"
    moment = moment_of(value)
    if moment is None:
        raise InvalidRequest(f"{value!r} is not a time; write 2026-11-17, 2026-11-17T10:30 or 2026-11-17T10:30:15Z")
    if relation != "=":
        return f"time {relation} {literal(moment.isoformat())}"
    since = f"time >= {literal(moment.isoformat())}"
    try:
        return f"{since} and time < {literal((moment + _precision(value)).isoformat())}"
    except OverflowError:  # the last day of the year 9999 has no day after it
        return since


def _precision(value: str) -> timedelta:
    """The length of the span that a time without its smaller parts stands for."""
    _, _, clock = value.replace(" ", "T").partition("T")
    parts = re.sub(r"(Z|[+-][0-9:]+)$", "", clock).count(":")
    if not clock:
        return timedelta(days=1)
    return (timedelta(hours=1), timedelta(minutes=1), timedelta(seconds=1))[min(parts, 2)]


def literal(text: str) -> str:
    """A text as a literal of the language."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] == '"':
        return _unescaped(value[1:-1])
    return value


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)
