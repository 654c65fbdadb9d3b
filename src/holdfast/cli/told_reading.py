"""The partitions of a topic behind a server, read side by side, as `Reading` does in a folder."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from heapq import merge
from itertools import islice
from typing import Any, Final

from holdfast.broker.routing import check_partition
from holdfast.cli.messages import AnyMessage
from holdfast.cli.opened import opened_broker
from holdfast.cli.reading import ENDS, PAGE_MESSAGES, STARTS, time_of
from holdfast.delivery.where import compile_where
from holdfast.env import real_world
from holdfast.errors import OffsetOutOfRange

_AT_ONCE: Final = 1_000
_FURTHER: Final = 8
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
        from holdfast.client.messages import RemoteContents

        at, end = self._at[number], None
        while end is None or at < end:
            some = self._page(number, at, _AT_ONCE)
            end = some.end if end is None else end
            self._ends[number] = some.end
            for told in some.messages:
                if told.offset >= end:
                    break
                message: Any = RemoteContents(self._broker._client, self._broker._bodies, told)
                yield message
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
                return run(self._broker._caller.call(Ask(method="GET", path=path, answers=ReadMessages, wait_s=wait)))
            except OffsetOutOfRange as gone:
                if offset >= gone.start:
                    raise
                offset = gone.start  # dropped before it was read

    def _wanted(self) -> Callable[[AnyMessage], bool]:
        return compile_where(self._where, now_ms=real_world().clock.now_ns() // 1_000_000)
