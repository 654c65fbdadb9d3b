"""Printing messages, page by page for people and line by line for scripts, past whatever is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final, Literal, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.cli.output import print_json_line, stderr, stdout
from holdfast.cli.text import as_json as value_as_json
from holdfast.cli.text import iso_time, preview, safe, short_time
from holdfast.codec.frame import Frame, Kind
from holdfast.errors import CorruptData, DamagedRange, MessageTooLarge
from holdfast.model import Record
from holdfast.storage import LogReader
from holdfast.storage.finding import count_of, offsets

_PAGE_ROWS: Final = 100
_SPACE: Final = 2
_OFFSET_CELLS: Final = 6
_TIME_CELLS: Final = 19
_KEY_CELLS: Final = 9
_HEADER_CELLS: Final = 12
_SIZE_CELLS: Final = 6
_VALUE_CELLS: Final = 16


_Column: TypeAlias = tuple[str, int, Literal["left", "right"]]


class Dump:
    """One run over a log's messages."""

    def __init__(self, reader: LogReader, *, as_json: bool) -> None:
        self._reader = reader
        self._as_json = as_json
        self._console = stdout()
        self._page: list[tuple[Kind, Record]] = []
        self._shown: tuple[bool, bool] | None = None
        self._whole = True

    def run(self, start: int, limit: int | None) -> bool:
        """Print up to `limit` messages; answers whether none of them was damaged."""
        for kind, record in islice(self._records(start), limit):
            if self._as_json:
                print_json_line(_document(kind, record))
                continue
            self._page.append((kind, record))
            if len(self._page) == _PAGE_ROWS:
                self._show_page()
        self._show_page()
        return self._whole

    def _records(self, offset: int) -> Iterator[tuple[Kind, Record]]:
        # What is appended while we print is for the next time: a dump ends.
        end = self._reader.end
        while True:
            try:
                for frame in self._reader.read(offset):
                    if frame.base_offset >= end:
                        return
                    yield from self._of_frame(frame, offset)
                    offset = frame.next_offset
                return
            except DamagedRange as damage:
                self._say(damage.first_offset, damage.next_offset, str(damage.__context__ or damage))
                offset = damage.next_offset

    def _of_frame(self, frame: Frame, offset: int) -> Iterator[tuple[Kind, Record]]:
        try:
            records = list(frame.records())
        except (CorruptData, MessageTooLarge) as error:
            self._say(max(offset, frame.base_offset), frame.next_offset, str(error))
            return
        kind = Kind(frame.header.kind)
        for record in records:
            if record.offset >= offset:
                yield kind, record

    def _say(self, first: int, next_offset: int, reason: str) -> None:
        self._whole = False
        self._show_page()
        if self._as_json:
            document = {"first_offset": first, "next_offset": next_offset, "reason": reason}
            print_json_line({"damaged": {**document, "messages": next_offset - first}})
        lost = f"damaged: {count_of(next_offset - first, 'message')} ({offsets(first, next_offset)}): {safe(reason)}"
        stderr().print(lost, soft_wrap=True)

    def _show_page(self) -> None:
        if not self._page:
            return
        keys = any(record.key is not None for _, record in self._page)
        headers = any(record.headers for _, record in self._page)
        first = self._shown != (keys, headers)
        self._shown = (keys, headers)
        self._console.print(_table(self._console, self._page, keys=keys, headers=headers, titles=first))
        self._page.clear()


def _table(console: Console, page: list[tuple[Kind, Record]], *, keys: bool, headers: bool, titles: bool) -> Table:
    """Columns of fixed width, so that the pages of a long dump line up; the value gets what is left."""
    columns: list[_Column] = [
        ("offset", max(_OFFSET_CELLS, len(str(page[-1][1].offset))), "right"),
        ("time (UTC)", _TIME_CELLS, "left"),
    ]
    if keys:
        columns.append(("key", _KEY_CELLS, "left"))
    if headers:
        columns.append(("headers", _HEADER_CELLS, "left"))
    columns.append(("bytes", _SIZE_CELLS, "right"))
    taken = sum(cells + _SPACE for _, cells, _ in columns)
    value_cells = max(_VALUE_CELLS, console.width - taken)
    columns.append(("value", value_cells, "left"))
    table = Table(box=None, show_header=titles, pad_edge=False, padding=(0, _SPACE, 0, 0), collapse_padding=True)
    for title, cells, justify in columns:
        table.add_column(title, justify=justify, width=cells, no_wrap=True, overflow="ellipsis")
    for kind, record in page:
        row = [str(record.offset), short_time(record.timestamp_ns)]
        if keys:
            row.append("" if record.key is None else preview(record.key, _KEY_CELLS))
        if headers:
            row.append(_headers(record))
        value = preview(bytes(record.value), value_cells)
        row += [f"{len(record.value):,}", value if kind == Kind.DATA else f"({kind.name.lower()}) {value}"]
        table.add_row(*map(Text, row))
    return table


def _headers(record: Record) -> str:
    return ", ".join(f"{safe(name)}={preview(value, _HEADER_CELLS)}" for name, value in record.headers)


def _document(kind: Kind, record: Record) -> dict[str, Any]:
    return {
        "offset": record.offset,
        "timestamp_ns": record.timestamp_ns,
        "time": iso_time(record.timestamp_ns),
        "kind": kind.name.lower(),
        "epoch": record.epoch,
        **value_as_json("key", record.key),
        "headers": [{"name": name, **value_as_json("value", value)} for name, value in record.headers],
        "priority": record.priority,
        "expires_at_ms": record.expires_at_ms,
        "due_at_ms": record.due_at_ms,
        "flags": record.flags,
        "bytes": len(record.value),
        **value_as_json("value", bytes(record.value)),
    }
