"""`holdfast consume`: read a topic, as a bystander or as a group that goes on where it was."""

from __future__ import annotations

import math
import time
from typing import Annotated, Final, Literal, TypeAlias

import typer

import holdfast
from holdfast.broker.broker import BrokerEngine
from holdfast.broker.layout import check_name
from holdfast.broker.positions import To
from holdfast.broker.topic import Topic
from holdfast.cli.completion import topic_names
from holdfast.cli.intake import separator_of
from holdfast.cli.opened import chosen_topic, opened_broker, owned
from holdfast.cli.options import WAIT, AsJson, DataFolder, PartitionNumber, Wait
from holdfast.cli.output import NOTHING_THERE, OK, command, stderr
from holdfast.cli.reading import await_arrival, ends_of, reading_of, time_of
from holdfast.cli.remote import has_owner
from holdfast.cli.tail import Showing
from holdfast.cli.text import safe
from holdfast.cli.told_consuming import ToldGroup
from holdfast.client.address import is_address
from holdfast.embedded.times import parse_duration
from holdfast.embedded.topics import to_of
from holdfast.errors import Busy, InvalidRequest

Mode: TypeAlias = Literal["queue", "stream"]

_AT_ONCE: Final = 100
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
            broker = holdfast.Broker(engine, None)
            if self._known_mode(engine, topic) == "stream":
                return self._stream(broker, left), ends_of(topic), math.inf
            found, due_ms = self._queue(broker, left), engine.tick()
            return found, ends_of(topic), min(_OPEN_EVERY_S, (due_ms or 60_000) / 1000)

    def _known_mode(self, engine: BrokerEngine, topic: Topic) -> Mode:
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

    def _make(self, engine: BrokerEngine, topic: Topic, place: To) -> None:
        if self._mode != "queue":
            engine.streams.group(self._name, create=True).reset(topic.name, place)
            return
        group = topic.group(self._name, start="latest" if place.end == "latest" else "earliest")
        for station in () if place.end is not None else group.stations:
            station.delivery.seek(place.find(station.partition.log))

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
