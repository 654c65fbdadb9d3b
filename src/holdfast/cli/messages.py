"""Messages as tables for people and as JSON for scripts, wherever they stand."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

import holdfast
from holdfast.broker.marks import TOMBSTONE
from holdfast.cli.remote import is_remote
from holdfast.cli.text import as_json, iso_time, preview, safe, short_time
from holdfast.embedded.bodies import Bodies
from holdfast.embedded.lookup import until_ms
from holdfast.embedded.message import Contents, Place, Said
from holdfast.embedded.times import to_datetime
from holdfast.env import real_world
from holdfast.model import Record

AnyMessage: TypeAlias = Said[Any]

PAGE_ROWS: Final = 100
_SPACE: Final = 2
_BODY: Final = "body"
_MOST_BODY_CELLS: Final = 200
_MOST_ERROR_CELLS: Final = 200
# Where there is too little room: which column gives way, and down to how many cells. An id never does.
_GIVE_WAY: Final = (
    (_BODY, 16), ("error", 24), (_BODY, 8), ("headers", 8), ("error", 16), ("holder", 8), ("key", 4), ("reason", 8),
    (_BODY, 4), ("error", 10),
)  # fmt: skip
_MOST_SHOWN_BYTES: Final = 4_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Column(NamedTuple):
    """A column of a table; one that says nothing in a whole page is left out."""

    title: str
    cells: int
    read: Callable[[AnyMessage], str]
    justify: Literal["left", "right"] = "left"


def reader_of(topic: str, partition: int = 0) -> Callable[[Record], AnyMessage]:
    """From the records of a partition's log to messages, without owning the folder."""
    home, bodies = Place(topic, partition), Bodies(None)
    return lambda record: Contents(home, bodies, record)


def offset_of(message: AnyMessage) -> int | None:
    """Its place in the queue's log; None while it has none."""
    original: int | None = getattr(message, "original_offset", None)
    return message.offset if original is None else original


def document(message: AnyMessage, **more: Any) -> dict[str, Any]:
    """A message for scripts."""
    found: dict[str, Any] = {
        "id": message.id,
        "topic": message.topic,
        "partition": message.partition,
        "offset": offset_of(message),
        "timestamp_ns": message.timestamp_ns,
        "time": iso_time(message.timestamp_ns),
        **as_json("key", bytes_of(message.key)),
        "headers": [{"name": name, **as_json("value", bytes_of(value))} for name, value in message.headers.pairs],
        "priority": message.priority,
        "correlation_id": message.correlation_id,
        **moment("due_at", message.due_at),
        **moment("expires_at", message.expires_at),
    }
    # By what it has and not by its type: what came over a wire is of other types, with the same names.
    for names in (("attempt", "holder", "receipt"), ("phase", "attempts", "holder", "reason", "error")):
        if hasattr(message, names[0]):
            found |= {name: getattr(message, name) for name in names}
    body = None if is_tombstone(message) else message.raw
    return {**found, **more, "bytes": message.size, **as_json("body", body)}


def moment(name: str, when: datetime | None) -> dict[str, Any]:
    """A time for a JSON object, twice: ISO 8601, and milliseconds since 1970."""
    if when is None:
        return {name: None, f"{name}_ms": None}
    text = when.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return {name: text, f"{name}_ms": (when - _EPOCH) // timedelta(milliseconds=1)}


def bytes_of(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def seconds_text(when: datetime | None) -> str:
    """UTC to the second."""
    return "" if when is None else f"{when.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def header_text(message: AnyMessage) -> str:
    """The headers on one line."""
    return ", ".join(f"{safe(name)}={preview(bytes_of(value) or b'', 40)}" for name, value in message.headers.pairs)


ID: Final = Column("id", 8, lambda message: safe(message.id))
TIME: Final = Column("time (UTC)", 19, lambda message: short_time(message.timestamp_ns))
DUE: Final = Column("due (UTC)", 19, lambda message: seconds_text(message.due_at))
KEY: Final = Column("key", 10, lambda message: preview(bytes_of(message.key) or b"", 10))
HEADERS: Final = Column("headers", 16, header_text)
PRIORITY: Final = Column("pri", 3, lambda message: str(message.priority or ""), "right")
ATTEMPTS: Final = Column("tries", 5, lambda message: str(getattr(message, "attempts", "") or ""), "right")
HOLDER: Final = Column("holder", 16, lambda message: safe(getattr(message, "holder", "")))
REASON: Final = Column("reason", 12, lambda message: safe(getattr(message, "reason", "")))
ERROR: Final = Column(
    "error", _MOST_ERROR_CELLS, lambda message: safe(getattr(message, "error", "").partition("\n")[0])
)
SIZE: Final = Column("bytes", 6, lambda message: f"{message.size:,}", "right")
USUAL: Final = (ID, TIME, KEY, HEADERS, PRIORITY, ATTEMPTS, SIZE)


def body_text(body: bytes) -> str:
    """A body for people: its lines as they are, nothing that acts on the terminal, and not too much of it."""
    lines = body[:_MOST_SHOWN_BYTES].decode("utf-8", "backslashreplace").split("\n")
    text = "\n".join(safe(line.replace("\t", "    ")) for line in lines)
    return text if len(body) <= _MOST_SHOWN_BYTES else f"{text}…"


def lease_end(queue: holdfast.Queue[Any], message: AnyMessage) -> datetime | None:
    """When a lease ends, by the clock on the wall; None where nobody has the message."""
    if is_remote(queue):
        return _told_lease_end(message)
    station = queue._group.station(message.partition)
    lease = station.delivery.group.leases.get(message.offset)
    return None if lease is None else to_datetime(until_ms(station, lease) * 1_000_000)


def _told_lease_end(message: Any) -> datetime | None:
    held = getattr(message, "_held", None)
    if held is None:
        until = getattr(message._told, "lease_until_ms", 0)
        return to_datetime(until * 1_000_000) if until else None
    clock = real_world().clock
    return to_datetime(clock.now_ns() + held.until_ns - clock.monotonic_ns())


def is_tombstone(message: AnyMessage) -> bool:
    """Whether it only says that whatever had its key is gone."""
    told = getattr(message, "_told", None)
    return bool(message._record.flags & TOMBSTONE) if told is None else told.tombstone


def _fitting(cells: dict[str, int], room: int) -> dict[str, int]:
    """The widths of the columns by their titles, made smaller until they fit, if they can."""
    cells = dict(cells)
    for title, least in _GIVE_WAY:
        over = sum(cells.values()) + _SPACE * (len(cells) - 1) - room
        if over > 0 and cells.get(title, 0) > least:
            cells[title] = max(least, cells[title] - over)
    return cells


class Pages:
    """A table of any length, page by page; columns keep their place from one page to the next."""

    def __init__(self, console: Console, columns: Sequence[Column] = USUAL) -> None:
        self._console = console
        self._room = console.width
        self._columns = columns
        self._shown: list[Column] = []
        self._page: list[AnyMessage] = []

    def show(self, messages: Iterable[AnyMessage]) -> int:
        """Print them all; answers how many."""
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
        titles = [column.title for column in used] != [column.title for column in self._shown]
        places = [i for i, column in enumerate(self._columns) if any(column.title == each.title for each in used)]
        self._shown = used
        bodies = [preview(message.raw, _MOST_BODY_CELLS) for message in self._page]
        shown = [*used, Column(_BODY, max(len(_BODY), *map(cell_len, bodies)), lambda _: "")]
        cells = _fitting({column.title: column.cells for column in shown}, self._room)
        # Rich would cut every column alike, ids as well: what still does not fit goes over the edge instead.
        self._console.width = max(self._room, sum(cells.values()) + _SPACE * len(cells))
        table = Table(box=None, show_header=titles, pad_edge=False, padding=(0, _SPACE, 0, 0), collapse_padding=True)
        for column in shown:
            width = cells[column.title]
            table.add_column(column.title, justify=column.justify, width=width, no_wrap=True, overflow="ellipsis")
        for row, body in zip(rows, bodies, strict=True):
            table.add_row(*(Text(row[i]) for i in places), Text(body))
        self._console.print(table)
        self._page.clear()

    def _width(self, column: Column, texts: Sequence[str]) -> int:
        """As wide as needed up to the column's own width; an id is never cut, for it is there to be copied."""
        before = next((each.cells for each in self._shown if each.title == column.title), 0)
        longest = max(map(cell_len, texts))
        most = longest if column.title == ID.title else column.cells
        return max(len(column.title), before, min(longest, most))


def text_value(value: bytes) -> str | None:
    """The value as text, where it is UTF-8 that a shell variable can hold."""
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def base64_text(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")
