"""`holdfast tail`: read along without consuming, beside whoever owns the queue."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Annotated, Final

import typer

from holdfast.cli.messages import HEADERS, ID, KEY, PRIORITY, SIZE, TIME, AnyMessage, Pages, bytes_of, document
from holdfast.cli.opened import chosen_topic
from holdfast.cli.options import AsJson, Limit, PartitionNumber, QueueFolder, Topic, Where
from holdfast.cli.output import OK, command, print_json_line, stdout, write_bytes
from holdfast.cli.reading import reading_of
from holdfast.errors import InvalidRequest

_COLUMNS: Final = (ID, TIME, KEY, HEADERS, PRIORITY, SIZE)
_LAST: Final = 10


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
    where: Where = None,
    limit: Limit = None,
    raw: Annotated[bool, typer.Option("--raw", help="Print bodies only, each with a newline behind it.")] = False,
    topic: Topic = None,
    partition: PartitionNumber = None,
    as_json: AsJson = False,
) -> int:
    """Print messages as they stand in the log, whether they are handled or not; nothing is taken.

    Delayed messages show up when they are due. Needs no lock: works beside a process that owns the queue.
    """
    if raw and as_json:
        raise InvalidRequest("--raw and --json both say what is printed; give one of them")
    reading = reading_of(folder, chosen_topic(folder, topic), partition, where)
    showing = Showing(raw=raw, as_json=as_json)
    if begin is None:
        last = reading.last(_LAST if limit is None else min(limit, _LAST))
        showing.show(last)
        limit = None if limit is None else limit - len(last)
    else:
        reading.begin(begin)
    for page in reading.pages(limit, math.inf if follow else 0):
        showing.show(page)
    return OK


class Showing:
    """Messages as a table, as JSON lines, or their bodies only, with their keys before them where that is asked."""

    def __init__(self, *, raw: bool, as_json: bool, separator: bytes | None = None) -> None:
        self._raw = raw
        self._as_json = as_json
        self._separator = separator
        self._pages = Pages(stdout(), _COLUMNS)

    def show(self, messages: Sequence[AnyMessage]) -> None:
        """Print some, and see to it that they have left us."""
        if self._as_json:
            for message in messages:
                print_json_line(document(message))
        elif self._raw:
            write_bytes(b"".join(map(self._line, messages)))
        else:
            self._pages.show(messages)
        sys.stdout.flush()

    def _line(self, message: AnyMessage) -> bytes:
        if self._separator is None:
            return message.raw + b"\n"
        return (bytes_of(message.key) or b"") + self._separator + message.raw + b"\n"
