"""A group that reads a topic behind a server, or by way of the process that owns the folder."""

from __future__ import annotations

import math
import time
from typing import Any, Final

from holdfast.broker.positions import To
from holdfast.cli.tail import Showing
from holdfast.embedded.times import to_datetime
from holdfast.errors import InvalidRequest

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
