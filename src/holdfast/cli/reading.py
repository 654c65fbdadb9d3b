"""The partitions of a topic, and the state of topics and groups, read without owning a folder."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from heapq import merge
from itertools import islice
from typing import Final

from holdfast.api.drafts import instant_ns, parse_instant
from holdfast.api.topics import PartitionInfo
from holdfast.broker.folder.contents import Catalog
from holdfast.broker.folder.layout import partition_folder, topic_folder
from holdfast.broker.inspect import GroupStanding, TopicStanding
from holdfast.broker.inspect.messages import count_beside
from holdfast.broker.inspect.status import FolderStatus
from holdfast.broker.messages import check_partition
from holdfast.cli.look.messages import AnyMessage, reader_of
from holdfast.cli.opening import asked, opened_broker
from holdfast.cli.output import note
from holdfast.client.opening import is_address
from holdfast.config.settings_file import DEFAULT, read_settings
from holdfast.delivery.where import compile_where
from holdfast.env import World, real_world
from holdfast.env.process import environment
from holdfast.errors import DamagedRange, InvalidRequest, NotALog, OffsetOutOfRange
from holdfast.model import count_of
from holdfast.storage import LogReader
from holdfast.storage.files import is_log, join
from holdfast.storage.reader import Arrivals, FollowSettings

PAGE_MESSAGES: Final = 100
_FURTHER: Final = 8  # look this many times further back if too few of the newest match
# Polling intervals for commands that people watch.
_AT_A_TERMINAL: Final = {"poll_interval_ms": 250, "poll_jitter_ms": 50}
STARTS: Final = ("start", "earliest")
ENDS: Final = ("end", "latest")
_AT_ONCE: Final = 1_000
_WAIT_S: Final = 10.0
_BETWEEN_S: Final = 0.25


class TopicReading:
    """Messages of a topic as stored in its logs; those of several partitions in the order of their times."""

    def __init__(self, place: str, topic: str, partition: int | None = None, where: str | None = None) -> None:
        self._where = where
        self._wanted()  # report an error in it before anything is read
        self._logs = (ServerLogs if is_address(place) else FolderLogs)(place, topic, partition)
        self._at = self._logs.starts()

    def begin(self, where: str, name: str = "--from") -> None:
        """Continue at the start, at the end, at an offset or at a time."""
        if where in STARTS or where in ENDS:
            self._at = self._logs.starts() if where in STARTS else self._logs.ends()
        elif where.isascii() and where.isdigit():
            starts, ends = self._logs.starts(), self._logs.ends()
            self._at = {
                number: _offset(int(where), start, ends[number], len(starts)) for number, start in starts.items()
            }
        else:
            since_ns = time_of(where, name)
            self._at = {number: self._logs.find_time(number, since_ns) for number in self._logs.starts()}

    def last(self, count: int) -> list[AnyMessage]:
        """Return the newest messages that match; reading continues after them."""
        ends, back = self._logs.ends(), count
        while True:
            starts = self._logs.starts()
            self._at = {number: max(start, ends.get(number, start) - back) for number, start in starts.items()}
            from_start = self._at == starts
            found = deque(self._there(), maxlen=count)
            if len(found) == count or from_start:
                return list(found)
            back *= _FURTHER

    def pages(self, limit: int | None, wait_s: float) -> Iterator[list[AnyMessage]]:
        """Yield what there is, a page at a time, then what arrives, until nothing has arrived for `wait_s`."""
        left = math.inf if limit is None else limit
        idle_from, there = time.monotonic(), self._there()
        while left > 0:
            page = list(islice(there, int(min(left, PAGE_MESSAGES))))
            if page:
                left -= len(page)
                yield page
                idle_from = time.monotonic()
            elif (left_s := wait_s - (time.monotonic() - idle_from)) > 0:
                self._logs.wait(dict(self._at), left_s)
                there = self._there()
            else:
                return

    def _there(self) -> Iterator[AnyMessage]:
        """Yield everything up to the current ends; a message counts as read when it is yielded."""
        starts, ends = self._logs.starts(), self._logs.ends()
        for number, end in ends.items():  # after a power cut the log may end earlier
            self._at[number] = min(self._at.get(number, starts.get(number, 0)), end)
        streams = [self._of_partition(number, end) for number, end in ends.items()]
        wanted = self._wanted()
        for message in streams[0] if len(streams) == 1 else merge(*streams, key=lambda each: each.timestamp_ns):
            self._at[message.partition] = message.offset + 1
            if wanted(message):
                yield message

    def _wanted(self) -> Callable[[AnyMessage], bool]:
        """Return the condition on messages, compiled each time since it may depend on their age."""
        return compile_where(self._where, now_ms=real_world().clock.now_ns() // 1_000_000)

    def _of_partition(self, number: int, end: int) -> Iterator[AnyMessage]:
        at = self._at[number]
        while at < end:
            try:
                for message in self._logs.messages(number, at):
                    if message.offset >= end:
                        break
                    at = message.offset + 1
                    yield message
                break
            except DamagedRange as damage:
                lost = damage.next_offset - damage.first_offset
                note(f"damaged: {count_of(lost, 'message')} skipped")
                at = damage.next_offset
            except OffsetOutOfRange as gone:
                if at >= gone.start:
                    raise
                note(f"dropped before it was read: {count_of(gone.start - at, 'message')}")
                at = gone.start
        self._at[number] = max(self._at[number], end)  # even if the last ones were removed or are damaged


def _offset(offset: int, start: int, end: int, partitions: int) -> int:
    if start <= offset <= end or partitions > 1:
        return max(start, min(offset, end))  # clamped, since each partition has its own offsets
    raise OffsetOutOfRange(
        f"there is no offset {offset}: {start} to {end} are kept; choose one of these",
        offset=offset,
        start=start,
        end=end,
    )


class FolderLogs:
    """The logs of a topic's partitions, read while another process may own the folder."""

    def __init__(self, folder: str, topic: str, partition: int | None = None) -> None:
        self._world = real_world()
        self._folder = folder
        self._topic = topic
        count = Catalog(self._world, folder).facts(topic).partitions
        self._only = None if partition is None else check_partition(partition, topic, count)
        self._count = count
        self._readers: dict[int, LogReader] = {}
        self._arrivals = Arrivals(self._world, follow_settings(self._world))
        self._find()

    def starts(self) -> dict[int, int]:
        """Return the first offset of each partition."""
        return {number: reader.start for number, reader in self._readers.items()}

    def ends(self) -> dict[int, int]:
        """Return the next offset of each partition."""
        return {number: reader.end for number, reader in self._readers.items()}

    def find_time(self, number: int, since_ns: int) -> int:
        """Return the offset of the first message of that time or later."""
        reader = self._readers[number]
        return max(reader.find_time(since_ns), reader.start)

    def messages(self, number: int, at: int) -> Iterator[AnyMessage]:
        """Yield the messages of a partition from an offset on."""
        return map(reader_of(self._topic, number), self._readers[number].records(at))

    def wait(self, ends: Mapping[int, int], most_s: float) -> None:
        """Return when a partition no longer ends there, when one was added, or when the time is over."""
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
        """Whether there is something to read, or something else to watch."""
        self._find()
        return self.ends() != ends or self._unused() != unused

    def _unused(self) -> list[str]:
        """Return the existing folders in which the logs of unused partitions will be created."""
        numbers = range(self._count + 1) if self._only is None else [self._only]
        return [
            next(filter(self._world.disk.exists, (self._log(number), self._part(number))))
            for number in numbers
            if number not in self._readers and self._world.disk.exists(self._part(number))
        ]

    def _find(self) -> None:
        """Look for new partitions: a partition has no log before its first use."""
        number = self._count
        while self._only is None and is_log(self._world, self._log(number)):
            number = self._count = number + 1
        for number in range(self._count) if self._only is None else [self._only]:
            if number not in self._readers and is_log(self._world, self._log(number)):
                self._readers[number] = LogReader(self._log(number), world=self._world)

    def _log(self, number: int) -> str:
        return join(self._part(number), "log")

    def _part(self, number: int) -> str:
        return partition_folder(self._folder, self._topic, number)


class ServerLogs:
    """The logs of a topic's partitions at a server."""

    def __init__(self, place: str, topic: str, partition: int | None = None) -> None:
        self._topic = topic
        self._closing = ExitStack()
        self._broker = self._closing.enter_context(opened_broker(place))
        kept = self._broker.describe_topic(topic).partitions
        self._only = None if partition is None else check_partition(partition, topic, len(kept))

    def _partitions(self) -> list[PartitionInfo]:
        kept = self._broker.describe_topic(self._topic).partitions
        return kept if self._only is None else [kept[self._only]]

    def starts(self) -> dict[int, int]:
        """Return the first offset of each partition."""
        return {each.number: each.start for each in self._partitions()}

    def ends(self) -> dict[int, int]:
        """Return the next offset of each partition."""
        return {each.number: each.end for each in self._partitions()}

    def find_time(self, number: int, since_ns: int) -> int:
        """Return the offset of the first message of that time or later, by binary search: times grow with offsets."""
        low, high = self.starts()[number], self.ends()[number]
        while low < high:
            middle = (low + high) // 2
            some = self._broker.read(self._topic, partition=number, offset=middle, limit=1)
            if some and some[0].timestamp_ns < since_ns:
                low = some[0].offset + 1
            else:
                high = middle
        return low

    def messages(self, number: int, at: int) -> Iterator[AnyMessage]:
        """Yield the messages of a partition from an offset on."""
        while some := self._broker.read(self._topic, partition=number, offset=at, limit=_AT_ONCE):
            yield from some
            at = some[-1].offset + 1

    def wait(self, ends: Mapping[int, int], most_s: float) -> None:
        """Wait until there is more. A server can wait on one partition; several are polled."""
        if len(ends) > 1:
            time.sleep(min(most_s, _BETWEEN_S))
            return
        from holdfast.protocol.topics import ReadMessages

        for number, end in ends.items():
            path = ("topics", self._topic, "partitions", number, "messages")
            with suppress(OffsetOutOfRange):  # reading will report what was dropped
                asked(self._broker, ReadMessages, *path, offset=end, limit=1, wait=min(most_s, _WAIT_S))


def follow_settings(world: World) -> FollowSettings:
    """Return how to wait next to an owner: as the settings say, or else as suits a terminal."""
    effective = read_settings(world, environment())
    said = {
        name: getattr(effective.server, name)
        for name in FollowSettings.__struct_fields__
        if effective.origins.get(f"server.{name}", DEFAULT) != DEFAULT
    }
    return FollowSettings(**{**_AT_A_TERMINAL, **said})


def time_of(text: str, name: str) -> int:
    """Parse a time to nanoseconds since 1970, for an option that also takes words and offsets."""
    now_ms = real_world().clock.now_ns() // 1_000_000
    try:
        return instant_ns(parse_instant(text, now_ms), name)
    except InvalidRequest:
        raise InvalidRequest(
            f"{name} {text!r} cannot be used: write earliest (or start), latest (or end), an offset, or a time "
            "(2026-01-31T12:00:00Z, -10m)"
        ) from None


def check_has_log(folder: str, topic: str, log: str) -> None:
    """Raise NotALog for a topic that has no log yet."""
    if not is_log(real_world(), log):
        raise NotALog(f"{topic} in {folder} has never been opened, so it has no log yet: put a message first")


class ServerStanding:
    """The state of a server at one moment, with the methods of `FolderStatus`."""

    def __init__(self, place: str) -> None:
        self._place = place

    def topics(self) -> Iterator[TopicStanding]:
        """Yield all topics that the caller may see."""
        return iter(self.look()[0])

    def topic(self, name: str) -> TopicStanding:
        """Return one topic; raises UnknownTopic if there is none of this name."""
        return self.look(name)[0][0]

    def groups(self, topic: str | None = None) -> list[GroupStanding]:
        """Return the groups of one topic, or of all topics."""
        found = self.look(topic)[0]
        return sorted((group for each in found for group in each.groups), key=lambda group: (group.name, group.topic))

    def look(self, topic: str | None = None) -> tuple[list[TopicStanding], dict[str, int]]:
        """Return the topics, and the number of delayed messages in each."""
        from holdfast.protocol.topics import Standings

        topics: list[TopicStanding] = []
        delayed: dict[str, int] = {}
        query: dict[str, str | None] = {"topic": topic}
        with opened_broker(self._place) as broker:
            while query:
                answer = asked(broker, Standings, "standing", **query)
                topics, delayed = topics + answer.topics, delayed | answer.delayed
                query = {"after": answer.next} if answer.next else {}
        return topics, delayed


def standing_of(place: str) -> FolderStatus | ServerStanding:
    """Return the current state of topics and groups."""
    return ServerStanding(place) if is_address(place) else FolderStatus(real_world(), place)


def standing_with_delayed(place: str, topic: str | None) -> tuple[list[TopicStanding], dict[str, int]]:
    """Return the current state of topics, and the number of delayed messages in each."""
    standing, world = standing_of(place), real_world()
    if isinstance(standing, ServerStanding):
        return standing.look(topic)
    found = list(standing.topics()) if topic is None else [standing.topic(topic)]
    parts = {each.name: [partition_folder(place, each.name, one.number) for one in each.partitions] for each in found}
    return found, {name: sum(count_beside(world, part) for part in each) for name, each in parts.items()}
