"""`holdfast consume`: read a topic, as a bystander or as a group that goes on where it was."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import typer

import holdfast
from holdfast.api.times import parse_duration, to_datetime
from holdfast.api.topics import to_of
from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.layout import check_name
from holdfast.broker.streams.offsets import To
from holdfast.broker.topic import Topic as TopicTopic
from holdfast.cli.completion import topic_names
from holdfast.cli.look.messages import HEADERS, ID, KEY, PRIORITY, SIZE, TIME, AnyMessage, Pages, bytes_of, document
from holdfast.cli.opening import chosen_topic, has_owner, opened_broker, owned
from holdfast.cli.options import WAIT, AsJson, DataFolder, Limit, PartitionNumber, QueueFolder, Topic, Wait, Where
from holdfast.cli.output import NOTHING_THERE, OK, command, print_json_line, stderr, stdout, write_bytes
from holdfast.cli.reading import await_arrival, ends_of, reading_of, time_of
from holdfast.cli.text import safe
from holdfast.cli.use.put import separator_of
from holdfast.client.address import is_address
from holdfast.errors import Busy, InvalidRequest
from holdfast.local.sync.broker import LocalBrokerPort

# `holdfast tail`: read along without consuming, beside whoever owns the queue.


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


# A group that reads a topic behind a server, or by way of the process that owns the folder.


_AT_ONCE: Final = 100
_WAIT_S: Final = 10.0


class ToldGroup:
    """What is printed is handled. While nothing comes, we wait there in line with all others."""

    def __init__(self, broker: Any, topic: str, name: str, showing: Showing) -> None:
        self._broker = broker
        self._topic = topic
        self._name = name
        self._showing = showing

    def mode(self) -> str | None:
        """How the group reads the topic; None where it does not yet."""
        info = self._broker.describe_topic(self._topic)
        if self._name in info.groups:
            return "queue"
        return "stream" if self._name in info.stream_groups else None

    def run(self, mode: str, begin: To | None, count: int | None, timeout_s: float) -> int:
        """Print what there is and what comes, until nothing did for so long; answers how many."""
        taking = self._queue(begin) if mode == "queue" else self._stream(begin)
        with taking as source:
            return self._take(source, mode, math.inf if count is None else count, timeout_s)

    def _queue(self, begin: To | None) -> Any:
        start = "latest" if begin is not None and begin.end == "latest" else "earliest"
        group = self._broker.group(self._topic, self._name, start=start)
        if begin is not None and begin.end is None:
            if begin.offset is not None and len(self._broker.describe_topic(self._topic).partitions) > 1:
                raise InvalidRequest(f"{self._topic} has several partitions, each with offsets: begin at a time")
            time_ns = begin.time_ns
            group.seek(offset=begin.offset, time=None if time_ns is None else to_datetime(time_ns))
        return group

    def _stream(self, begin: To | None) -> Any:
        options = {"start": begin.end} if begin is not None and begin.end is not None else {}
        consumer = self._broker.consumer(self._topic, group=self._name, auto_commit=False, **options)
        if begin is not None and begin.end is None:
            if begin.time_ns is not None:
                consumer.seek_to_time(to_datetime(begin.time_ns))
            else:
                for topic, partition in consumer.assignment():
                    consumer.seek(topic, partition, begin.offset)
        return consumer

    def _take(self, source: Any, mode: str, left: float, timeout_s: float) -> int:
        taken, idle_from = 0, time.monotonic()
        while left > 0:
            wait_s = max(timeout_s - (time.monotonic() - idle_from), 0)
            most, wait_s = int(min(left, _AT_ONCE)), min(wait_s, _WAIT_S)
            messages = self._some(source, mode, most, wait_s)
            if messages:
                idle_from = time.monotonic()
                taken, left = taken + len(messages), left - len(messages)
            elif time.monotonic() - idle_from >= timeout_s:
                break
        return taken

    def _some(self, source: Any, mode: str, most: int, wait_s: float) -> list[Any]:
        if mode == "stream":
            messages: list[Any] = source.poll(timeout=wait_s, max_records=most)
            if messages:
                self._showing.show(messages)
                source.commit()
            return messages
        messages = source.receive_many(most, timeout=wait_s)
        try:
            self._showing.show(messages)
        except BaseException:
            for message in messages:
                message.defer()  # nobody has seen it
            raise
        if messages:
            source.ack_many(messages)
        return messages


Mode: TypeAlias = Literal["queue", "stream"]


# In queue mode a message may come back without the log telling of it.
_OPEN_EVERY_S: Final = 2.0


@command
def consume_command(
    folder: DataFolder,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="What to read.", autocompletion=topic_names)],
    group: Annotated[
        str | None, typer.Option("--group", metavar="NAME", help="Read as this group: what is printed is handled.")
    ] = None,
    mode: Annotated[
        Mode | None, typer.Option("--mode", help="How the group reads; as it does, or `stream` for a new one.")
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option("--from", metavar="WHERE", help="earliest (by default), latest, an offset, or a time as -10m."),
    ] = None,
    partition: PartitionNumber = None,
    count: Annotated[
        int | None, typer.Option("-n", "--count", metavar="N", min=1, help="Stop after so many messages.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="TIME", help="Wait so long for the next message.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Print bodies only, each with a newline behind it.")] = False,
    key_separator: Annotated[
        str | None, typer.Option("--key-separator", metavar="TEXT", help="With --raw: print the key and this before.")
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
        reading = reading_of(folder, name, partition)
        reading.begin(begin or "earliest")
        for page in reading.pages(count, wait_s):
            showing.show(page)
        return OK
    if partition is not None:
        raise InvalidRequest("a group reads all partitions; --partition is for reading without one")
    check_name(group, "group")
    if begin is not None:
        _place(begin)  # a mistake, before anything is made
    taken = _taken(_Group(folder, name, group, mode, begin, showing), folder, count, wait_s, wait)
    if not taken:
        stderr().print(f"no message for {safe(group)} in {safe(name)}", soft_wrap=True)
    return OK if taken else NOTHING_THERE


def _taken(group: _Group, folder: str, count: int | None, timeout_s: float, wait: str) -> int:
    """How many were printed: as the owner of the folder, again and again, or by way of whoever has it."""
    if not is_address(folder) and not has_owner(folder):
        return group.run(count, timeout_s, parse_duration(wait, "--wait"))
    with opened_broker(folder, wait=wait) as broker:
        return group.told(broker, count, timeout_s)


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


class _Group:
    """A group that takes what is there, and lets go of the folder while nothing is: others may have it then."""

    def __init__(
        self, folder: str, topic: str, name: str, mode: Mode | None, begin: str | None, showing: Showing
    ) -> None:
        self._folder = folder
        self._topic = topic
        self._name = name
        self._mode = mode
        self._begin = begin
        self._showing = showing

    def run(self, count: int | None, timeout_s: float, wait_s: float) -> int:
        """Answers how many were printed."""
        left: float = math.inf if count is None else count
        taken, turns, told, idle_from = 0, 0, False, time.monotonic()
        while True:
            try:
                found, ends, due_s = self._turn(left, wait_s)
            except Busy as busy:
                if has_owner(self._folder):  # one that lets us in came between two turns
                    most = None if count is None else count - taken
                    with opened_broker(self._folder, wait=wait_s) as broker:
                        return taken + self.told(broker, most, timeout_s)
                if not turns:
                    raise
                if not told:
                    stderr().print(f"waiting: {safe(str(busy))}", soft_wrap=True)
                told = True
                continue
            turns, told = turns + 1, False
            taken, left = taken + found, left - found
            if found:
                idle_from = time.monotonic()
            left_s = timeout_s - (time.monotonic() - idle_from)
            if left <= 0 or left_s <= 0:
                return taken
            await_arrival(self._folder, self._topic, ends, min(left_s, due_s))

    def told(self, broker: holdfast.Broker, count: int | None, timeout_s: float) -> int:
        """The same by way of whoever has the messages."""
        told = ToldGroup(broker, self._topic, self._name, self._showing)
        known = told.mode()
        begin = _place(self._begin or "earliest") if known is None else None
        if known is None:
            return told.run(self._mode or "stream", begin, count, timeout_s)
        self._check_known(known)
        return told.run(known, None, count, timeout_s)

    def _turn(self, left: float, wait_s: float) -> tuple[int, dict[int, int], float]:
        """Own the folder and print what is there: how many, where the partitions end, when to look again."""
        with owned(self._folder, wait=wait_s) as engine, engine.using(self._topic) as topic:
            broker = holdfast.Broker(LocalBrokerPort(engine))
            if self._known_mode(engine, topic) == "stream":
                return self._stream(broker, left), ends_of(topic), math.inf
            found, due_ms = self._queue(broker, left), engine.tick()
            return found, ends_of(topic), min(_OPEN_EVERY_S, (due_ms or 60_000) / 1000)

    def _known_mode(self, engine: BrokerEngine, topic: TopicTopic) -> Mode:
        """How the group reads; a new one is made at the place where it is to begin."""
        known: Mode | None = None
        if self._name in topic.groups:
            known = "queue"
        elif any(group.name == self._name for group in engine.streams.on(topic)):
            known = "stream"
        if known is None:
            self._make(engine, topic, _place(self._begin or "earliest"))
            self._begin = None
            return self._mode or "stream"
        self._check_known(known)
        return known

    def _check_known(self, known: str) -> None:
        if self._mode not in (None, known):
            raise InvalidRequest(
                f"the group {self._name} reads {self._topic} in {known} mode; choose another name, or delete that "
                "group first"
            )
        if self._begin is not None:
            raise InvalidRequest(
                f"the group {self._name} has its place in {self._topic} already; --from is for a new one. Move it with "
                f"`holdfast group reset {self._folder} {self._name} --to {self._begin}`"
            )

    def _make(self, engine: BrokerEngine, topic: TopicTopic, place: To) -> None:
        if self._mode != "queue":
            engine.streams.group(self._name, create=True).reset(topic.name, place)
            return
        group = topic.group(self._name, start="latest" if place.end == "latest" else "earliest")
        for delivery in () if place.end is not None else group.deliveries:
            delivery.seek(place.find(delivery.partition.log))

    def _stream(self, broker: holdfast.Broker, left: float) -> int:
        taken = 0
        with broker.consumer(self._topic, group=self._name, auto_commit=False) as consumer:
            while taken < left:
                messages = consumer.poll(timeout=0, max_records=int(min(left - taken, _AT_ONCE)))
                if not messages:
                    break
                self._showing.show(messages)
                consumer.commit()
                taken += len(messages)
        return taken

    def _queue(self, broker: holdfast.Broker, left: float) -> int:
        taken, group = 0, broker.group(self._topic, self._name)
        while taken < left:
            messages = group.receive_many(int(min(left - taken, _AT_ONCE)), timeout=0)
            if not messages:
                break
            try:
                self._showing.show(messages)
            except BaseException:
                for message in messages:
                    message.defer()  # nobody has seen it
                raise
            group.ack_many(messages)
            taken += len(messages)
        return taken
