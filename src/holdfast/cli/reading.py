"""The partitions of a topic, read side by side by somebody who owns nothing."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from heapq import merge
from itertools import islice
from typing import Any, Final

from holdfast.api.ports import port_of
from holdfast.api.times import instant_ns, parse_instant
from holdfast.broker.folder.contents import Catalog
from holdfast.broker.folder.layout import partition_folder, topic_folder
from holdfast.broker.messages import check_partition
from holdfast.broker.topic import Topic
from holdfast.cli.look.messages import AnyMessage, reader_of
from holdfast.cli.opening import opened_broker
from holdfast.cli.output import stderr
from holdfast.client.address import is_address
from holdfast.config.settings_file import DEFAULT, read_settings
from holdfast.delivery.where import compile_where
from holdfast.env import World, real_world
from holdfast.env.process import environment
from holdfast.errors import DamagedRange, InvalidRequest, NotALog, OffsetOutOfRange
from holdfast.storage import LogReader
from holdfast.storage.checks.finding import count_of
from holdfast.storage.files import join
from holdfast.storage.opening import is_log
from holdfast.storage.reader import Arrivals, FollowSettings

PAGE_MESSAGES: Final = 100
_FURTHER: Final = 8  # so many times as far back where too few of the newest are wanted
# Where nobody tells of news: people look on, and a look costs little.
_AT_A_TERMINAL: Final = {"poll_interval_ms": 250, "poll_jitter_ms": 50}
STARTS: Final = ("start", "earliest")
ENDS: Final = ("end", "latest")


class Reading:
    """Messages of a topic as they stand in its logs; those of several partitions in the order of their times."""

    def __init__(self, folder: str, topic: str, partition: int | None = None, where: str | None = None) -> None:
        self._world = real_world()
        self._where = where
        self._wanted()  # a mistake in it is told before anything is read
        self._folder = folder
        self._topic = topic
        count = Catalog(self._world, folder).facts(topic).partitions
        self._only = None if partition is None else check_partition(partition, topic, count)
        self._count = count
        self._readers: dict[int, LogReader] = {}
        self._at: dict[int, int] = {}
        self._arrivals = Arrivals(self._world, follow_settings(self._world))
        self._find()

    def begin(self, where: str, name: str = "--from") -> None:
        """Go on at the start, at the end, at an offset or at a time."""
        if where not in (*STARTS, *ENDS) and not (where.isascii() and where.isdigit()):
            time_of(where, name)  # a mistake is one also where there is no partition yet
        for number, reader in self._readers.items():
            self._at[number] = self._place(reader, where, name)

    def last(self, count: int) -> list[AnyMessage]:
        """The newest messages that are wanted; what follows goes on behind them."""
        ends, back = self.ends(), count
        while True:
            starts = {number: reader.start for number, reader in self._readers.items()}
            self._at = {number: max(start, ends[number] - back) for number, start in starts.items()}
            from_start = self._at == starts
            found = deque(self._there(), maxlen=count)
            if len(found) == count or from_start:
                return list(found)
            back *= _FURTHER

    def ends(self) -> dict[int, int]:
        """Where each partition ends by now."""
        return {number: reader.end for number, reader in self._readers.items()}

    def pages(self, limit: int | None, wait_s: float) -> Iterator[list[AnyMessage]]:
        """What there is, a page at a time; then what comes, as long as nothing is awaited longer than `wait_s`."""
        left = math.inf if limit is None else limit
        idle_from, there = time.monotonic(), self._there()
        while left > 0:
            page = list(islice(there, int(min(left, PAGE_MESSAGES))))
            if page:
                left -= len(page)
                yield page
                idle_from = time.monotonic()
            elif (left_s := wait_s - (time.monotonic() - idle_from)) > 0:
                self.wait(dict(self._at), left_s)
                there = self._there()
            else:
                return

    def wait(self, ends: Mapping[int, int], most_s: float) -> None:
        """Return when a partition does not end there, or came to be since, or when the time is over."""
        stop_s = time.monotonic() + most_s
        while self.ends() == ends and (left_s := stop_s - time.monotonic()) > 0:
            unused = self._unused()
            self._arrivals.wait(
                self._readers.values(),
                partial(self._changed, ends, unused),
                folders=[topic_folder(self._folder, self._topic), *unused],
                timeout_s=left_s,
            )

    def _changed(self, ends: Mapping[int, int], unused: list[str]) -> bool:
        """Whether there is something to read, or something else to be watched."""
        self._find()
        return self.ends() != ends or self._unused() != unused

    def _unused(self) -> list[str]:
        """The folders in which the logs of partitions without one will come to be, as far as they are there."""
        numbers = range(self._count + 1) if self._only is None else [self._only]
        return [
            next(filter(self._world.disk.exists, (self._log(number), self._part(number))))
            for number in numbers
            if number not in self._readers and self._world.disk.exists(self._part(number))
        ]

    def _find(self) -> None:
        """Look for partitions that came to be: one has no log before its first use."""
        number = self._count
        while self._only is None and is_log(self._world, self._log(number)):
            number = self._count = number + 1
        for number in range(self._count) if self._only is None else [self._only]:
            if number not in self._readers and is_log(self._world, self._log(number)):
                self._readers[number] = reader = LogReader(self._log(number), world=self._world)
                self._at[number] = reader.start

    def _log(self, number: int) -> str:
        return join(self._part(number), "log")

    def _part(self, number: int) -> str:
        return partition_folder(self._folder, self._topic, number)

    def _place(self, reader: LogReader, where: str, name: str) -> int:
        start, end = reader.start, reader.end
        if where in STARTS or where in ENDS:
            return start if where in STARTS else end
        if where.isascii() and where.isdigit():
            return self._offset(int(where), start, end)
        return max(reader.find_time(time_of(where, name)), start)

    def _offset(self, offset: int, start: int, end: int) -> int:
        if start <= offset <= end:
            return offset
        if len(self._readers) > 1:
            return max(start, min(offset, end))  # the nearest: each partition has offsets of its own
        raise OffsetOutOfRange(
            f"there is no offset {offset}: {start} to {end} are kept", offset=offset, start=start, end=end
        )

    def _there(self) -> Iterator[AnyMessage]:
        """All up to the ends of this moment; each counts as read when it is handed over."""
        for number, reader in self._readers.items():
            self._at[number] = min(self._at[number], reader.end)  # after a power cut the log may end before
        streams = [self._of_partition(number, end) for number, end in self.ends().items()]
        wanted = self._wanted()
        for message in streams[0] if len(streams) == 1 else merge(*streams, key=lambda each: each.timestamp_ns):
            self._at[message.partition] = message.offset + 1
            if wanted(message):
                yield message

    def _wanted(self) -> Callable[[AnyMessage], bool]:
        """Which messages are chosen by now: their age changes."""
        return compile_where(self._where, now_ms=self._world.clock.now_ns() // 1_000_000)

    def _of_partition(self, number: int, end: int) -> Iterator[AnyMessage]:
        message_of, at = reader_of(self._topic, number), self._at[number]
        while at < end:
            try:
                for record in self._readers[number].records(at):
                    if record.offset >= end:
                        break
                    at = record.offset + 1
                    yield message_of(record)
                break
            except DamagedRange as damage:
                lost = damage.next_offset - damage.first_offset
                stderr().print(f"damaged: {count_of(lost, 'message')} passed over", soft_wrap=True)
                at = damage.next_offset
            except OffsetOutOfRange as gone:
                if at >= gone.start:
                    raise
                stderr().print(f"dropped before it was read: {count_of(gone.start - at, 'message')}", soft_wrap=True)
                at = gone.start
        self._at[number] = max(self._at[number], end)  # also where the last ones were removed or are damaged


def reading_of(place: str, topic: str, partition: int | None = None, where: str | None = None) -> Any:
    """The messages of a topic, in a folder or behind a server."""
    if is_address(place):
        return ToldReading(place, topic, partition, where)
    return Reading(place, topic, partition, where)


def follow_settings(world: World) -> FollowSettings:
    """How to wait beside an owner: as the settings say; where they say nothing, as suits a terminal."""
    effective = read_settings(world, environment())
    said = {
        name: getattr(effective.server, name)
        for name in FollowSettings.__struct_fields__
        if effective.origins.get(f"server.{name}", DEFAULT) != DEFAULT
    }
    return FollowSettings(**{**_AT_A_TERMINAL, **said})


def time_of(text: str, name: str) -> int:
    """Nanoseconds since 1970 of a time that was written beside words and offsets."""
    now_ms = real_world().clock.now_ns() // 1_000_000
    try:
        return instant_ns(parse_instant(text, now_ms), name)
    except InvalidRequest:
        raise InvalidRequest(
            f"{name} {text!r} cannot be used: write earliest (or start), latest (or end), an offset, or a time "
            "(2026-01-31T12:00:00Z, -10m)"
        ) from None


def await_arrival(folder: str, topic: str, ends: Mapping[int, int], most_s: float) -> None:
    """Return when a partition has grown beyond these ends, or when the time is over; without owning anything."""
    Reading(folder, topic).wait(ends, most_s)


def ends_of(topic: Topic) -> dict[int, int]:
    """The same of a topic that we own, for `await_arrival`."""
    return {number: partition.log.end for number, partition in enumerate(topic.partitions)}


def check_has_log(folder: str, topic: str, log: str) -> None:
    """Say of a topic that nobody has used yet that it is empty."""
    if not is_log(real_world(), log):
        raise NotALog(f"{topic} in {folder} holds no messages yet: nobody has opened it since it was made")


# The partitions of a topic behind a server, read side by side, as `Reading` does in a folder.


_AT_ONCE: Final = 1_000

_WAIT_S: Final = 10.0
_BETWEEN_S: Final = 0.25


class ToldReading:
    """Messages of a topic as they stand in its logs; those of several partitions in the order of their times."""

    def __init__(self, place: str, topic: str, partition: int | None = None, where: str | None = None) -> None:
        self._where = where
        self._wanted()  # a mistake in it is told before anything is read
        self._topic = topic
        self._closing = ExitStack()
        self._broker: Any = self._closing.enter_context(opened_broker(place))
        kept = self._broker.describe_topic(topic).partitions
        if partition is not None:
            kept = [kept[check_partition(partition, topic, len(kept))]]
        self._starts = {each.number: each.start for each in kept}
        self._ends = {each.number: each.end for each in kept}
        self._at = dict(self._starts)

    def begin(self, where: str, name: str = "--from") -> None:
        """Go on at the start, at the end, at an offset or at a time."""
        if where in STARTS or where in ENDS:
            self._at = dict(self._starts if where in STARTS else self._ends)
        elif where.isascii() and where.isdigit():
            self._at = {number: self._offset(number, int(where)) for number in self._at}
        else:
            since_ns = time_of(where, name)
            self._at = {number: self._first_of(number, since_ns) for number in self._at}

    def _offset(self, number: int, offset: int) -> int:
        start, end = self._starts[number], self._ends[number]
        if start <= offset <= end or len(self._at) > 1:
            return max(start, min(offset, end))  # the nearest: each partition has offsets of its own
        raise OffsetOutOfRange(
            f"there is no offset {offset}: {start} to {end} are kept", offset=offset, start=start, end=end
        )

    def _first_of(self, number: int, since_ns: int) -> int:
        """The first message of that time or later: times grow with the offsets, and each look halves what is left."""
        low, high = self._starts[number], self._ends[number]
        while low < high:
            middle = (low + high) // 2
            some = self._page(number, middle, 1).messages
            if some and some[0].timestamp_ns < since_ns:
                low = some[0].offset + 1
            else:
                high = middle
        return low

    def last(self, count: int) -> list[AnyMessage]:
        """The newest messages that are wanted; what follows goes on behind them."""
        back = count
        while True:
            self._at = {number: max(start, self._ends[number] - back) for number, start in self._starts.items()}
            from_start = self._at == self._starts
            found = deque(self._there(), maxlen=count)
            if len(found) == count or from_start:
                return list(found)
            back *= _FURTHER

    def pages(self, limit: int | None, wait_s: float) -> Iterator[list[AnyMessage]]:
        """What there is, a page at a time; then what comes, as long as nothing is awaited longer than `wait_s`."""
        left = math.inf if limit is None else limit
        idle_from, there = time.monotonic(), self._there()
        while left > 0:
            page = list(islice(there, int(min(left, PAGE_MESSAGES))))
            if page:
                left -= len(page)
                yield page
                idle_from = time.monotonic()
            elif (left_s := wait_s - (time.monotonic() - idle_from)) > 0:
                self._wait(left_s)
                there = self._there()
            else:
                return

    def _wait(self, most_s: float) -> None:
        """Until a partition has grown; the server tells of one, several are looked at now and then."""
        if len(self._at) == 1:
            ((number, at),) = self._at.items()
            self._page(number, at, 1, wait=min(most_s, _WAIT_S))
        else:
            time.sleep(min(most_s, _BETWEEN_S))

    def _there(self) -> Iterator[AnyMessage]:
        """All up to the ends of this moment; each counts as read when it is handed over."""
        streams = [self._of_partition(number) for number in self._at]
        wanted = self._wanted()
        for message in streams[0] if len(streams) == 1 else merge(*streams, key=lambda each: each.timestamp_ns):
            self._at[message.partition] = message.offset + 1
            if wanted(message):
                yield message

    def _of_partition(self, number: int) -> Iterator[AnyMessage]:
        from holdfast.remote.records import contents_told

        at, end = self._at[number], None
        while end is None or at < end:
            some = self._page(number, at, _AT_ONCE)
            end = some.end if end is None else end
            self._ends[number] = some.end
            for told in some.messages:
                if told.offset >= end:
                    break
                yield contents_told(port_of(self._broker).client, port_of(self._broker).bodies, told)
            at = max(some.next_offset, at + 1)
        self._at[number] = max(self._at[number], end)

    def _page(self, number: int, offset: int, limit: int, wait: float = 0) -> Any:
        from holdfast.client.http import Ask, path_of
        from holdfast.client.ways import run
        from holdfast.protocol.topics import ReadMessages

        while True:
            query = {"offset": offset, "limit": limit, "wait": wait or None}
            path = path_of("topics", self._topic, "partitions", number, "messages", **query)
            try:
                return run(
                    port_of(self._broker).client.caller.call(
                        Ask(method="GET", path=path, answers=ReadMessages, wait_s=wait)
                    )
                )
            except OffsetOutOfRange as gone:
                if offset >= gone.start:
                    raise
                offset = gone.start  # dropped before it was read

    def _wanted(self) -> Callable[[AnyMessage], bool]:
        return compile_where(self._where, now_ms=real_world().clock.now_ns() // 1_000_000)
