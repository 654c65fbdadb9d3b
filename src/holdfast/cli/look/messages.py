"""Messages as tables for people and as JSON for scripts, and the commands `peek`, `ls`, `show` and `search`."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import to_builtins

import holdfast
from holdfast.api import port_of
from holdfast.api.arguments import MOST_FOUND
from holdfast.api.contents import Contents, MessageFields, PartitionHome, record_of
from holdfast.api.drafts import Bodies, moment_at, to_datetime
from holdfast.api.listing import DeadLetter, Found, Listed, PhaseName, SearchHit, SearchPage, no_letter, until_ms_of
from holdfast.api.sync.message import taken_of
from holdfast.broker.messages import TOMBSTONE
from holdfast.broker.tracing import TraceStep
from holdfast.cli import output
from holdfast.cli.opening import WAIT, AsJson, DataFolder, Limit, QueueAt, Wait, Where, opened_broker, some_of
from holdfast.cli.parsing import argument, option
from holdfast.delivery.where import headline
from holdfast.env import real_world
from holdfast.errors import InvalidRequest
from holdfast.model import Failure, Record, count_of

AnyMessage: TypeAlias = MessageFields[Any]

PAGE_ROWS: Final = 100
_SPACE: Final = 2
_BODY: Final = "body"
_MOST_BODY_CELLS: Final = 200
_MOST_ERROR_CELLS: Final = 200
# If there is too little room: the columns to shrink, in order, and down to how many cells. Ids are never shrunk.
_GIVE_WAY: Final = (
    (_BODY, 16), ("error", 60), (_BODY, 8), ("headers", 8), ("holder", 8), ("error", 0), ("key", 4), (_BODY, 4),
    ("reason", 8),
)  # fmt: skip
# An error that would get fewer cells than this, and needs more than it gets, is on a line of its own.
_LEAST_ERROR_CELLS: Final = 60
_BELOW: Final = "  "
_MOST_SHOWN_BYTES: Final = 4_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class MessageColumn(NamedTuple):
    """A column of a table; it is left out if it is empty in a whole page."""

    title: str
    cells: int
    read: Callable[[AnyMessage], str]
    justify: Literal["left", "right"] = "left"


def reader_of(topic: str, partition: int = 0) -> Callable[[Record], AnyMessage]:
    """Return a function that makes messages of the records in a partition's log, without owning the folder."""
    home, bodies = PartitionHome(topic, partition), Bodies(None)
    return lambda record: Contents(home, bodies, record)


def offset_of(message: AnyMessage) -> int | None:
    """Return the message's offset in the log; None if it has none yet."""
    original: int | None = getattr(message, "original_offset", None)
    return message.offset if original is None else original


def document(message: AnyMessage, **more: Any) -> dict[str, Any]:
    """Return a message as a JSON document."""
    found: dict[str, Any] = {
        "id": message.id,
        "topic": message.topic,
        "partition": message.partition,
        "offset": offset_of(message),
        "timestamp_ns": message.timestamp_ns,
        "time": output.iso_time(message.timestamp_ns),
        **output.as_json("key", bytes_of(message.key)),
        "headers": [
            {"name": name, **output.as_json("value", bytes_of(value))} for name, value in message.headers.pairs
        ],
        "priority": message.priority,
        "correlation_id": message.correlation_id,
        **output.moment("due_at", message.due_at),
        **output.moment("expires_at", message.expires_at),
    }
    # By attribute, not by type: messages from a server have other types with the same attributes.
    for names in (("attempt", "holder", "receipt"), ("phase", "attempts", "holder", "reason", "error")):
        if hasattr(message, names[0]):
            found |= {name: getattr(message, name) for name in names}
    body = None if is_tombstone(message) else message.raw
    return {**found, **more, "bytes": message.size, **output.as_json("body", body)}


def bytes_of(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def header_text(message: AnyMessage) -> str:
    """Format the headers on one line."""
    return ", ".join(
        f"{output.safe(name)}={output.preview(bytes_of(value) or b'', 40)}" for name, value in message.headers.pairs
    )


ID: Final = MessageColumn("id", 8, lambda message: output.safe(message.id))
TIME: Final = MessageColumn("time (UTC)", 19, lambda message: output.short_time(message.timestamp_ns))
DUE: Final = MessageColumn("due (UTC)", 19, lambda message: output.seconds_text(message.due_at))
KEY: Final = MessageColumn("key", 10, lambda message: output.preview(bytes_of(message.key) or b"", 10))
HEADERS: Final = MessageColumn("headers", 16, header_text)
PRIORITY: Final = MessageColumn("pri", 3, lambda message: str(message.priority or ""), "right")
ATTEMPTS: Final = MessageColumn("tries", 5, lambda message: str(getattr(message, "attempts", "") or ""), "right")
HOLDER: Final = MessageColumn("holder", 16, lambda message: output.safe(getattr(message, "holder", "")))
REASON: Final = MessageColumn("reason", 12, lambda message: output.safe(getattr(message, "reason", "")))
ERROR: Final = MessageColumn(
    "error", _MOST_ERROR_CELLS, lambda message: output.safe(headline(getattr(message, "error", "")))
)
SIZE: Final = MessageColumn("bytes", 6, lambda message: f"{message.size:,}", "right")
USUAL: Final = (ID, TIME, KEY, HEADERS, PRIORITY, ATTEMPTS, SIZE)


def body_text(body: bytes) -> str:
    """Format a body: keeps its lines, escapes terminal controls, and cuts it if it is long."""
    lines = body[:_MOST_SHOWN_BYTES].decode("utf-8", "backslashreplace").split("\n")
    text = "\n".join(output.safe(line.replace("\t", "    ")) for line in lines)
    return text if len(body) <= _MOST_SHOWN_BYTES else f"{text}…"


def lease_end(queue: holdfast.Group[Any], message: AnyMessage) -> datetime | None:
    """Return the wall-clock time at which a lease ends; None if the message is not leased."""
    until_ns = 0
    if isinstance(message, holdfast.Message):
        until_ns = port_of(queue).ends_ns(taken_of(message))
    elif isinstance(message, Listed):
        until_ns = until_ms_of(message) * 1_000_000
    return to_datetime(until_ns) if until_ns else None


def is_tombstone(message: AnyMessage) -> bool:
    """Whether it is a tombstone, which deletes earlier messages with its key."""
    return bool(record_of(message).flags & TOMBSTONE)


def _fitting(cells: dict[str, int], room: int) -> dict[str, int]:
    """Return the widths of the columns by title, shrunk until they fit if possible."""
    cells = dict(cells)
    for title, least in _GIVE_WAY:
        over = sum(cells.values()) + _SPACE * (len(cells) - 1) - room
        if over > 0 and cells.get(title, 0) > least:
            cells[title] = max(least, cells[title] - over)
    return cells


class Pages:
    """A table of any length, printed page by page; columns keep their position on all pages."""

    def __init__(self, console: output.Console, columns: Sequence[MessageColumn] = USUAL) -> None:
        self._console = console
        self._room = console.width
        self._columns = columns
        self._shown: list[MessageColumn] = []
        self._below = False  # whether errors are on lines of their own
        self._page: list[AnyMessage] = []

    def show(self, messages: Iterable[AnyMessage]) -> int:
        """Print all messages; return their number."""
        count = 0
        for message in messages:
            count += 1
            self._page.append(message)
            if len(self._page) == PAGE_ROWS:
                self.show_page()
        self.show_page()
        return count

    def show_page(self) -> None:
        if not self._page:
            return
        rows = [[column.read(message) for column in self._columns] for message in self._page]
        used = [
            column._replace(cells=self._width(column, [row[i] for row in rows]))
            for i, column in enumerate(self._columns)
            if column in (ID, TIME, SIZE) or any(row[i] for row in rows)
        ]
        before, below = [column.title for column in self._shown], self._below
        places = [i for i, column in enumerate(self._columns) if any(column.title == each.title for each in used)]
        self._shown = used
        bodies = [output.preview(message.raw, _MOST_BODY_CELLS) for message in self._page]
        shown = [*used, MessageColumn(_BODY, max(len(_BODY), *map(output.cell_len, bodies)), lambda _: "")]
        cells = self._cells(shown)
        titles = below != self._below or before != [column.title for column in used]
        columns = [output.Column(each.title, each.justify == "right", cells=cells.get(each.title, 0)) for each in shown]
        kept = [i for i, column in enumerate(shown) if column.title in cells]
        table = output.Table(*(columns[i] for i in kept), titles=titles)
        for row, body in zip(rows, bodies, strict=True):
            texts = [*(row[i] for i in places), body]
            table.add_row(*(texts[i] for i in kept))
        if self._below:
            errors = [row[self._columns.index(ERROR)] for row in rows]
            self._print_below(table, [ERROR.title, *errors] if titles else errors)
        else:
            self._console.print(table)
        self._page.clear()

    def _cells(self, shown: Sequence[MessageColumn]) -> dict[str, int]:
        """Return the width of each column; if there is too little room for the errors, they have none."""
        wanted = {column.title: column.cells for column in shown}
        cells = _fitting(wanted, self._room)
        needed = min(wanted.get(ERROR.title, 0), _LEAST_ERROR_CELLS)
        self._below = self._below or cells.get(ERROR.title, 0) < needed
        if self._below:
            wanted.pop(ERROR.title, None)
            cells = _fitting(wanted, self._room)
        return cells

    def _print_below(self, table: output.Table, errors: Sequence[str]) -> None:
        for line, error in zip(table.lines(self._room), errors, strict=True):
            self._console.print(line)
            if error:
                self._console.print(f"{_BELOW}{output.cut(error, self._room - len(_BELOW))}")

    def _width(self, column: MessageColumn, texts: Sequence[str]) -> int:
        """Return the width needed, up to the column's own limit; ids are never cut, so that they can be copied."""
        before = next((each.cells for each in self._shown if each.title == column.title), 0)
        longest = max(map(output.cell_len, texts))
        most = longest if column.title == ID.title else column.cells
        return max(len(column.title), before, min(longest, most))


def text_value(value: bytes) -> str | None:
    """Return the value as text if it is UTF-8 that a shell variable can hold."""
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def base64_text(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


# Everything that is known about one message.


class Everything(NamedTuple):
    """One message with its history."""

    message: AnyMessage
    phase: str
    facts: dict[str, Any]
    failures: tuple[Failure, ...]
    history: Sequence[TraceStep]

    @property
    def document(self) -> dict[str, Any]:
        failures = [
            {**output.moment("at", moment_at(each.at_ms)), "holder": each.holder, "why": each.why, "error": each.error}
            for each in self.failures
        ]
        facts = {**self.facts, "phase": self.phase, "failures": failures}
        if self.history:
            facts["history"] = to_builtins(self.history)
        return document(self.message, **facts)


def everything_about(group: holdfast.Group[bytes], message_id: str) -> Everything:
    """Return what is known about the message or dead letter with this id; raises InvalidRequest if there is none."""
    found: Found | None = port_of(group).look_up(message_id)
    if found is None:
        raise InvalidRequest(
            f"there is no message {message_id} in {group.folder}: check the id; if it is right, the message is done "
            "and was removed by retention"
        )
    if found.phase == "dead":
        return everything_about_letter(group.dead.show(found.message.id), found.history)
    facts: dict[str, Any] = {}
    if found.leased_at_ms:
        facts |= output.moment("leased_at", moment_at(found.leased_at_ms))
        facts |= output.moment("lease_until", moment_at(found.lease_until_ms))
    if found.first_delivery_ms:
        facts |= output.moment("first_delivery", moment_at(found.first_delivery_ms))
        facts |= output.moment("last_delivery", moment_at(found.last_delivery_ms))
    if found.state is not None:
        facts["state"] = found.state
    return Everything(found.message, found.phase, facts, found.failures, found.history)


def dead_id(group: holdfast.Group[bytes], message_id: str) -> str:
    """Return the id of a dead letter, given that id or the id that the message had before it died."""
    if not message_id.startswith(f"{group.name}-"):
        return group.dead.show(message_id).id
    found: str | None = port_of(group).letter_id_of(message_id)
    if found is None:
        raise no_letter(f"of {message_id}")
    return found


def everything_about_letter(letter: DeadLetter[bytes], history: Sequence[TraceStep] = ()) -> Everything:
    """Return what is known about a dead letter."""
    facts = {
        "original_id": letter.original_id,
        **output.moment("original_time", letter.original_timestamp),
        **output.moment("dead_at", letter.dead_at),
        **output.moment("first_delivery", letter.first_delivery),
        **output.moment("last_delivery", letter.last_delivery),
    }
    if letter.state is not None:
        facts["state"] = letter.state
    return Everything(letter, "dead", facts, letter.failures, history)


def show_everything(found: Everything, *, as_json: bool) -> None:
    """Print all of it, as text or as JSON."""
    if as_json:
        output.print_json(found.document)
    else:
        _show(output.stdout(), found)


def _show(console: output.Console, found: Everything) -> None:
    message, known = found.message, found.document
    facts = output.facts_table()
    facts.add_row("id", output.safe(message.id))
    for title, text in _rows(message, known):
        if text:
            facts.add_row(title, text)
    for number, failure in enumerate(found.failures, 1):
        holder, why = output.safe(failure.holder), output.safe(failure.why)
        summary = f"{output.seconds_text(moment_at(failure.at_ms))} UTC, {holder}: {why}"
        facts.add_row(f"failure {number}", f"{summary}\n{_lines(failure.error)}" if failure.error else summary)
    facts.add_row("body", count_of(message.size, "byte"))
    console.print(facts)
    from holdfast.cli.look.trace import life_line  # for `show` only

    for line in life_line(found.history, width=console.width, now_ns=real_world().clock.now_ns()):
        console.print(line)
    console.print(body_text(message.raw))


def _rows(message: AnyMessage, known: dict[str, Any]) -> list[tuple[str, str]]:
    def time(name: str) -> str:
        ms = known.get(f"{name}_ms")
        return f"{output.seconds_text(moment_at(ms))} UTC" if ms else ""

    reason = output.safe(known.get("reason", ""))
    return [
        ("phase", known["phase"] + (f" ({reason})" if reason else "")),
        ("was", output.safe(known.get("original_id", ""))),
        ("published", time("original_time") or f"{output.seconds_text(message.timestamp)} UTC"),
        ("due", time("due_at")),
        ("expires", time("expires_at")),
        ("died", time("dead_at")),
        ("key", output.preview(bytes_of(message.key) or b"", 200)),
        ("headers", header_text(message)),
        ("priority", str(message.priority or "")),
        ("correlation", output.safe(message.correlation_id) if message.correlation_id != message.id else ""),
        ("holder", output.safe(known.get("holder", ""))),
        ("leased until", time("lease_until")),
        ("attempts", str(known.get("attempts") or "")),
        ("first taken", time("first_delivery")),
        ("last taken", time("last_delivery")),
        ("state", output.safe(str(msgspec.json.encode(known["state"]), "utf-8")) if "state" in known else ""),
    ]


def _lines(text: str) -> str:
    return "\n".join(output.safe(line) for line in text.splitlines())


# `holdfast peek`, `list`, `show`: look at messages without taking them.


DEAD: Final = (ID, TIME, KEY, ATTEMPTS, REASON, ERROR)


def peek_command(
    at: QueueAt,
    count: Annotated[int, option("--count", "How many messages.", least=1, most=100_000)] = 10,
) -> int:
    """Show the next messages without taking them. They are in the order in which `get` would return them.

    Examples:
        holdfast peek jobs
        holdfast peek jobs --count 100 --json
    """
    with at.opened() as queue:
        show_messages(queue.peek(count), USUAL, "no message is ready", as_json=at.as_json)
    return output.OK


def ls_command(
    at: QueueAt,
    phase: Annotated[PhaseName, argument("PHASE", "ready, leased, delayed, dead or done.")] = "ready",
    where: Where = None,
    limit: Limit = None,
) -> int:
    """List messages: ready, leased, delayed, dead or done.

    Done messages are listed newest first, as long as the log still holds them.

    Examples:
        holdfast ls jobs
        holdfast ls jobs leased
        holdfast ls jobs done --limit 20
        holdfast ls jobs dead --where 'attempts > 2' --json
    """
    with at.opened() as queue:
        messages = queue.messages(phase, where=where, limit=limit)
        nothing = f"no message is {phase}" if where is None else f"no {phase} message matches --where"
        columns: dict[str, tuple[MessageColumn, ...]] = {
            "ready": USUAL,
            "leased": (ID, _until(queue), HOLDER, KEY, ATTEMPTS, SIZE),
            "delayed": (ID, DUE, KEY, HEADERS, PRIORITY, ATTEMPTS, SIZE),
            "dead": DEAD,
            "done": USUAL,
        }
        show_messages(messages, columns[phase], nothing, as_json=at.as_json, leases_of=queue)
    return output.OK


def show_command(
    at: QueueAt,
    message_id: Annotated[str, argument("ID", "The id of a message or a dead letter.")],
) -> int:
    """Show everything about one message. Includes its phase, content, history and errors.

    Examples:
        holdfast show jobs jobs-0-17
    """
    with at.of(message_id).opened() as queue:
        show_everything(everything_about(queue, message_id), as_json=at.as_json)
    return output.OK


def show_messages(
    messages: Iterable[AnyMessage],
    columns: tuple[MessageColumn, ...],
    nothing: str,
    *,
    as_json: bool,
    leases_of: holdfast.Group[Any] | None = None,
) -> None:
    """Print messages as a table, or as one JSON object per line."""
    if as_json:
        for message in messages:
            output.print_json(document(message, **_lease(leases_of, message)))
    elif not Pages(output.stdout(), columns).show(messages):
        output.note(output.safe(nothing))


def _lease(queue: holdfast.Group[Any] | None, message: AnyMessage) -> dict[str, Any]:
    if queue is None or getattr(message, "phase", "") != "leased":
        return {}
    until = lease_end(queue, message)
    return {} if until is None else output.moment("lease_until", until)


def _until(queue: holdfast.Group[Any]) -> MessageColumn:
    return MessageColumn("until (UTC)", 19, lambda message: output.seconds_text(lease_end(queue, message)))


# `holdfast search`: messages in all queues and phases.

_PHASE: Final = MessageColumn("state", 7, lambda message: getattr(message, "phase", ""))
_SEARCH_COLUMNS: Final = (ID, _PHASE, TIME, KEY, ERROR, SIZE)


def search_command(
    folder: DataFolder,
    terms: Annotated[list[str], argument("TERM", "What to search for; all terms must match.")],
    limit: Annotated[int, option("--limit", "At most this many messages.", least=1)] = 50,
    after: Annotated[
        str, option("--after PLACE", "Continue an earlier search from the position that it printed.")
    ] = "",
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Find messages in all queues, whatever their phase. Does not take them. The console's search works the same.

    A term is an id, key=VALUE, a header as NAME=VALUE, a field of a JSON body such as $.order.id=7, a time such as
    time=2026-11-17, time>2026-11-17T10:30 or age<1h, queue=TEXT, or any text. A term that begins with `where ` is a
    condition as `ls --where` takes it.

    Exit code: 3 if nothing was found.

    Examples:
        holdfast search ./data key=customer-7 'age<1h'
        holdfast search ./data '"card declined"' tenant=acme
        holdfast search http://host:7700 '$.order.id=7' --json
        holdfast search ./data 'where attempts > 3 and error ~ "timeout"'
    """
    text = " ".join(terms)
    if not text.strip():
        raise InvalidRequest("there is nothing to search for: give a term, such as an id, key=VALUE or a text")
    found: list[SearchHit] = []
    scanned = 0
    with opened_broker(folder, wait=wait) as broker:
        while True:
            page = broker.search(text, limit=min(limit - len(found), MOST_FOUND), after=after)
            found += page.messages
            scanned += page.scanned
            after = page.next
            if not after or len(found) >= limit:
                break
        if as_json:
            for message, group in found:
                output.print_json(document(message, group=group))
        elif found:
            messages: list[AnyMessage] = [each.message for each in found]
            Pages(output.stdout(), _SEARCH_COLUMNS).show(messages)
    _report_search(page, len(found), scanned)
    return output.OK if found else output.NOTHING_THERE


def _report_search(page: SearchPage, found: int, scanned: int) -> None:
    """Say what was searched, and what was not."""
    output.note(f"{count_of(found, 'message')} found; {count_of(scanned, 'message')} searched")
    for each in page.queues:
        if each.problem:
            output.note(f"{output.safe(each.queue)} could not be searched: {output.safe(each.problem)}")
    if page.not_queues:
        output.note(f"not searched, since no queue group reads them: {output.safe(some_of(page.not_queues))}")
    if page.next:
        output.note(f"there may be more; continue with --after {page.next}")
