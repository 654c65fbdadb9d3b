"""Values as text that a terminal can be trusted with: what a message holds must never act on the screen."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # it takes a while to load: only what prints for people does
    from rich.console import Console
    from rich.table import Table

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def safe(text: str) -> str:
    """The text with everything that is not plainly visible written as an escape: `\\x1b`, `\\n`, `\\u202e`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def safe_lines(text: str) -> str:
    """Make a text safe that may point at a place with a caret: its lines stay, and so does the caret's column."""
    lines = text.split("\n")
    if not any(line.strip(" ") == "^" for line in lines):
        return safe(text)  # line breaks in any other text come from user data
    from rich.cells import cell_len

    shown: list[str] = []
    for i, line in enumerate(lines):
        if i and line.strip(" ") == "^":
            shown.append(" " * cell_len(safe(lines[i - 1][: len(line) - 1])) + "^")
        else:
            shown.append(safe(line))
    return "\n".join(shown)


def preview(value: bytes, most: int) -> str:
    """The beginning of a value on one line of at most `most` characters; bytes that are not text as escapes."""
    # A character has at most four bytes, so a character that is cut here is not shown.
    text = safe(value[: most * 4 + 4].decode("utf-8", "backslashreplace"))
    return text if len(text) <= most else text[: most - 1] + "…"


def as_json(name: str, value: bytes | None) -> dict[str, Any]:
    """A value for a JSON object: as text under its name, or in base64 where it is not UTF-8."""
    if value is None:
        return {name: None}
    try:
        return {name: value.decode("utf-8")}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode("ascii")}


def iso_time(time_ns: int | None) -> str | None:
    """UTC in ISO 8601 with all nine digits; None where there is no time or no such date."""
    if time_ns is None:
        return None
    seconds, rest_ns = divmod(time_ns, 1_000_000_000)
    try:
        return f"{_EPOCH + timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%S}.{rest_ns:09d}Z"
    except OverflowError:
        return None


def short_time(time_ns: int | None) -> str:
    """UTC to the second, for tables."""
    text = iso_time(time_ns)
    return "-" if text is None else text[:19].replace("T", " ")


def time_ns_of(text: str) -> int:
    """Nanoseconds since 1970 of an ISO 8601 time; UTC where it names no zone. Raises ValueError."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // timedelta(microseconds=1) * 1000


def size(number: int) -> str:
    """Bytes for people."""
    value, unit = float(number), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{number:,} B" if unit == 0 else f"{value:,.1f} {_UNITS[unit]}"


def duration(microseconds: float) -> str:
    """A latency for people."""
    if microseconds < 1000:
        return f"{microseconds:,.0f} µs"
    return f"{microseconds / 1000:,.1f} ms" if microseconds < 1_000_000 else f"{microseconds / 1e6:,.1f} s"


# Plain tables: numbers to the right, names never cut.


def table(*titles: str, wide: str = "") -> Table:
    """A table with these titles; one that ends in `>` is of numbers, and the `wide` one may take several lines."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for title in titles:
        name = title.removesuffix(">")
        if name == wide:
            made.add_column(name, overflow="fold", min_width=len(name))
        else:
            made.add_column(name, justify="right" if title.endswith(">") else "left", no_wrap=True)
    return made


def facts_table() -> Table:
    """Two columns without titles: what a fact is called, and the fact, which may take several lines."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2))
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    return made


def ruled_table(*titles: str) -> Table:
    """A table with a line below its titles, whose cells may take several lines."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False)
    for title in titles:
        made.add_column(title, overflow="fold")
    return made


def show_table(console: Console, shown: Table) -> None:
    """Print it; where a terminal is too narrow for the names, they go over its edge and are not cut."""
    from rich.cells import cell_len
    from rich.measure import Measurement

    for column in shown.columns:
        if column.no_wrap:  # otherwise rich thinks that it may be broken at a space
            column.min_width = max(cell_len(str(text)) for text in (column.header, *column.cells))
    needed = Measurement.get(console, console.options.update(max_width=10_000), shown).minimum
    width = console.width
    console.width = max(width, needed)
    console.print(shown)
    console.width = width
