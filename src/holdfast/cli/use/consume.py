"""`holdfast consume` and `holdfast tail`: read a topic, without a group or as one that remembers its position."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Annotated, Any, Final, Literal, TypeAlias

import holdfast
from holdfast.api.times import parse_duration, to_datetime
from holdfast.api.topics import to_of
from holdfast.broker.folder.layout import check_name
from holdfast.broker.streams.offsets import To
from holdfast.cli.look.messages import HEADERS, ID, KEY, PRIORITY, SIZE, TIME, AnyMessage, Pages, bytes_of, document
from holdfast.cli.opening import chosen_topic
from holdfast.cli.options import (
    WAIT,
    AsJson,
    DataFolder,
    Limit,
    PartitionNumber,
    QueueFolder,
    Topic,
    Wait,
    Where,
    topic_names,
)
from holdfast.cli.output import NOTHING_THERE, OK, command, note, print_json_line, stdout, write_bytes
from holdfast.cli.places import argument, option
from holdfast.cli.reading import OpeningTurns, TopicReading, time_of
from holdfast.cli.text import safe
from holdfast.cli.use.put import separator_of
from holdfast.errors import InvalidRequest

# `holdfast tail`: read without consuming and without a lock.


_COLUMNS: Final = (ID, TIME, KEY, HEADERS, PRIORITY, SIZE)
_LAST: Final = 10


@command
def tail_command(
    folder: QueueFolder,
    follow: Annotated[bool, option("--follow", "-f", "Go on with what comes, until Ctrl-C.")] = False,
    begin: Annotated[
        str | None,
        option("--from WHERE", "start, end, an offset, or a time such as -10m; else the last 10."),
    ] = None,
    where: Where = None,
    limit: Limit = None,
    raw: Annotated[bool, option("--raw", "Print bodies only, each with a newline behind it.")] = False,
    topic: Topic = None,
    partition: PartitionNumber = None,
    as_json: AsJson = False,
) -> int:
    """Print messages as they stand in the log, whether they are handled or not; nothing is taken.

    Delayed messages show up when they are due. Needs no lock: works beside a process that owns the queue.
    """
    if raw and as_json:
        raise InvalidRequest("--raw and --json both say what is printed; give one of them")
    reading = TopicReading(folder, chosen_topic(folder, topic), partition, where)
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


Mode: TypeAlias = Literal["queue", "stream"]


_AT_ONCE: Final = 100
_WAIT_S: Final = 10.0


@command
def consume_command(
    folder: DataFolder,
    topic: Annotated[str, argument("TOPIC", "What to read.", autocompletion=topic_names)],
    group: Annotated[str | None, option("--group NAME", "Read as this group: what is printed is handled.")] = None,
    mode: Annotated[
        Mode | None, option("--mode", "How the group reads; as it does, or `stream` for a new one.")
    ] = None,
    begin: Annotated[
        str | None,
        option("--from WHERE", "earliest (by default), latest, an offset, or a time as -10m."),
    ] = None,
    partition: PartitionNumber = None,
    count: Annotated[int | None, option("-n", "--count N", "Stop after so many messages.", min=1)] = None,
    follow: Annotated[bool, option("--follow", "-f", "Go on with what comes, until Ctrl-C.")] = False,
    timeout: Annotated[str | None, option("--timeout TIME", "Wait so long for the next message.")] = None,
    raw: Annotated[bool, option("--raw", "Print bodies only, each with a newline behind it.")] = False,
    key_separator: Annotated[
        str | None, option("--key-separator TEXT", "With --raw: print the key and this before.")
    ] = None,
    wait: Wait = WAIT,
    as_json: AsJson = False,
) -> int:
    """Print the messages of a topic. Without a group nothing changes and no lock is needed.

    With a group they count as handled once they are printed, and the next call goes on behind them.
    Exit code: 3 where a group has no message.
    """
    showing = _showing(raw, key_separator, as_json=as_json)
    if follow and timeout is not None:
        raise InvalidRequest("--follow goes on for ever, --timeout does not; give one of them")
    wait_s = math.inf if follow else parse_duration(timeout or "0", "--timeout")
    name = chosen_topic(folder, topic)
    if group is None:
        if mode is not None:
            raise InvalidRequest("--mode says how a group reads; give --group NAME, too")
        reading = TopicReading(folder, name, partition)
        reading.begin(begin or "earliest")
        for page in reading.pages(count, wait_s):
            showing.show(page)
        return OK
    if partition is not None:
        raise InvalidRequest("a group reads all partitions; --partition is for reading without one")
    check_name(group, "group")
    if begin is not None:
        _place(begin)  # a mistake, before anything is made
    taken = _GroupTaking(folder, name, group, mode, begin, showing).run(count, wait_s, wait)
    if not taken:
        note(f"no message for {safe(group)} in {safe(name)}")
    return OK if taken else NOTHING_THERE


def _showing(raw: bool, key_separator: str | None, *, as_json: bool) -> Showing:
    if raw and as_json:
        raise InvalidRequest("--raw and --json both say what is printed; give one of them")
    if key_separator is not None and not raw:
        raise InvalidRequest("--key-separator stands between key and body in what --raw prints; give --raw, too")
    return Showing(raw=raw, as_json=as_json, separator=None if key_separator is None else separator_of(key_separator))


def _place(begin: str) -> To:
    words = {"start": "earliest", "earliest": "earliest", "end": "latest", "latest": "latest"}
    if begin in words:
        return to_of(words[begin])
    if begin.isascii() and begin.isdigit():
        return To(offset=int(begin))
    return To(time_ns=time_of(begin, "--from"))


class _GroupTaking:
    """Prints what a group has not handled yet; what is printed is handled."""

    def __init__(
        self, folder: str, topic: str, name: str, mode: Mode | None, begin: str | None, showing: Showing
    ) -> None:
        self._folder = folder
        self._topic = topic
        self._name = name
        self._mode = mode
        self._begin = begin
        self._showing = showing

    def run(self, count: int | None, timeout_s: float, wait: str) -> int:
        """Print what there is and what comes, until nothing has come for that long; answers how many."""
        turns = OpeningTurns(self._folder, self._topic, timeout_s, wait)
        left: float = math.inf if count is None else count
        taken = 0
        with closing(turns.each(patient=True)) as brokers:
            for broker, wait_s in brokers:
                found = self._take(broker, left - taken, wait_s)
                taken += found
                if found:
                    turns.begin()
                if taken >= left:
                    break
        return taken

    def _take(self, broker: holdfast.Broker, left: float, timeout_s: float) -> int:
        mode = self._known_mode(broker) or self._make(broker)
        taken, idle_from = 0, time.monotonic()
        some = self._from_stream if mode == "stream" else self._from_queue
        with self._opened(broker, mode) as source:
            while taken < left:
                wait_s = min(max(timeout_s - (time.monotonic() - idle_from), 0), _WAIT_S)
                found = some(source, int(min(left - taken, _AT_ONCE)), wait_s)
                if found:
                    taken, idle_from = taken + found, time.monotonic()
                elif time.monotonic() - idle_from >= timeout_s:
                    break
        return taken

    def _known_mode(self, broker: holdfast.Broker) -> str | None:
        """How the group reads the topic; None where it does not yet."""
        info = broker.describe_topic(self._topic)
        known = "queue" if self._name in info.groups else "stream" if self._name in info.stream_groups else None
        if known is not None and self._mode not in (None, known):
            raise InvalidRequest(
                f"the group {self._name} reads {self._topic} in {known} mode; choose another name, or delete that "
                "group first"
            )
        if known is not None and self._begin is not None:
            raise InvalidRequest(
                f"the group {self._name} has its place in {self._topic} already; --from is for a new one. Move it with "
                f"`holdfast group reset {self._folder} {self._name} --to {self._begin}`"
            )
        return known

    def _make(self, broker: holdfast.Broker) -> str:
        """Make the group at the place where it is to begin; answers with its mode."""
        place, mode = _place(self._begin or "earliest"), self._mode or "stream"
        self._begin = None
        start, since = place.end or "earliest", None if place.time_ns is None else to_datetime(place.time_ns)
        if mode == "queue":
            group = broker.group(self._topic, self._name, start=start)
            for number, offset in self._offsets(broker, place.offset):
                group.seek(offset=offset, partition=number)
            if since is not None:
                group.seek(time=since)
            return mode
        with self._opened(broker, mode, start=start) as consumer:
            for number, offset in self._offsets(broker, place.offset):
                consumer.seek(self._topic, number, offset)
            if since is not None:
                consumer.seek_to_time(since)
            consumer.commit()  # from now on it has its place, though it has read nothing yet
        return mode

    def _offsets(self, broker: holdfast.Broker, offset: int | None) -> Iterator[tuple[int, int]]:
        """The offset in each partition, or the nearest that is kept there."""
        for each in () if offset is None else broker.describe_topic(self._topic).partitions:
            yield each.number, max(each.start, min(offset or 0, each.end))

    def _opened(self, broker: holdfast.Broker, mode: str, **options: Any) -> Any:
        if mode == "queue":
            return broker.group(self._topic, self._name)
        return broker.consumer(self._topic, group=self._name, auto_commit=False, **options)

    def _from_stream(self, consumer: Any, most: int, wait_s: float) -> int:
        messages = consumer.poll(timeout=wait_s, max_records=most)
        if messages:
            self._showing.show(messages)
            consumer.commit()
        return len(messages)

    def _from_queue(self, group: Any, most: int, wait_s: float) -> int:
        messages = group.receive_many(most, timeout=wait_s)
        try:
            self._showing.show(messages)
        except BaseException:
            for message in messages:
                message.defer()  # it was not printed
            raise
        if messages:
            group.ack_many(messages)
        return len(messages)
