"""`holdfast tail`: read along without consuming, beside whoever owns the queue."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Final

import typer

from holdfast.cli.messages import HEADERS, ID, KEY, PRIORITY, SIZE, TIME, Pages, document, reader_of
from holdfast.cli.opened import log_of, topic_of
from holdfast.cli.options import AsJson, Limit, QueueFolder
from holdfast.cli.output import OK, command, print_json_line, stderr, stdout, write_bytes
from holdfast.embedded.times import instant_ns, parse_instant
from holdfast.env import real_world
from holdfast.errors import DamagedRange, InvalidRequest, OffsetOutOfRange
from holdfast.model import Record
from holdfast.storage import LogReader
from holdfast.storage.finding import count_of

_COLUMNS: Final = (ID, TIME, KEY, HEADERS, PRIORITY, SIZE)
_LAST: Final = 10
_LOOK_EVERY_S: Final = 0.05


@command
def tail_command(
    folder: QueueFolder,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    begin: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="WHERE", help="start, end, an offset, or a time such as -10m; else the last 10."
        ),
    ] = None,
    limit: Limit = None,
    raw: Annotated[bool, typer.Option("--raw", help="Print bodies only, each with a newline behind it.")] = False,
    as_json: AsJson = False,
) -> int:
    """Print messages as they stand in the log, whether they are handled or not; nothing is taken.

    Delayed messages show up when they are due. Needs no lock: works beside a process that owns the queue.
    """
    if raw and as_json:
        raise InvalidRequest("--raw and --json both say what is printed; give one of them")
    message_of = reader_of(topic_of(folder))
    reader = LogReader(log_of(folder))
    start = _start(reader, begin)
    pages = Pages(stdout(), _COLUMNS)
    for records in _pieces(reader, start, limit, follow=follow):
        messages = map(message_of, records)
        if as_json:
            for message in messages:
                print_json_line(document(message))
        elif raw:
            write_bytes(b"".join(message.raw + b"\n" for message in messages))
        else:
            pages.show(messages)
        sys.stdout.flush()
    return OK


def _start(reader: LogReader, begin: str | None) -> int:
    if begin is None:
        return max(reader.start, reader.end - _LAST)
    if begin in ("start", "end"):
        return reader.start if begin == "start" else reader.end
    if begin.isascii() and begin.isdigit():
        offset, start, end = int(begin), reader.start, reader.end
        if not start <= offset <= end:
            raise OffsetOutOfRange(
                f"there is no offset {offset}: {start} to {end} are kept", offset=offset, start=start, end=end
            )
        return offset
    now_ms = real_world().clock.now_ns() // 1_000_000
    try:
        moment = parse_instant(begin, now_ms)
    except InvalidRequest:
        raise InvalidRequest(
            f"--from {begin!r} cannot be used: write start, end, an offset, or a time (2026-01-31T12:00:00Z, -10m)"
        ) from None
    return max(reader.find_time(instant_ns(moment, "--from")), reader.start)


def _pieces(reader: LogReader, offset: int, limit: int | None, *, follow: bool) -> Iterator[list[Record]]:
    """What there is, a page at a time; then, if it is to go on, what comes."""
    left = limit
    while left is None or left > 0:
        page = list(islice(_records(reader, offset), 100 if left is None else min(left, 100)))
        if page:
            offset = page[-1].offset + 1
            left = None if left is None else left - len(page)
            yield page
        elif offset < reader.end:
            offset = reader.end  # all of the rest is damaged, and was named
        elif follow:
            time.sleep(_LOOK_EVERY_S)
            offset = min(offset, reader.end)  # after a power cut the log may end before
        else:
            return


def _records(reader: LogReader, offset: int) -> Iterator[Record]:
    while True:
        try:
            for record in reader.records(offset):
                yield record
                offset = record.offset + 1
            return
        except DamagedRange as damage:
            lost = damage.next_offset - damage.first_offset
            stderr().print(f"damaged: {count_of(lost, 'message')} passed over", soft_wrap=True)
            offset = damage.next_offset
        except OffsetOutOfRange as gone:
            if offset >= gone.start:
                raise
            stderr().print(f"dropped before it was read: {count_of(gone.start - offset, 'message')}", soft_wrap=True)
            offset = gone.start
