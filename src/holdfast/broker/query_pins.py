"""The owner's side of running queries: what they still need is not removed, and those that died are forgotten.

Whether a query lives is told by its file alone: it does, until the file has not changed for the query's time-out, by
the monotonic clock. So a clock that is set neither ends a query nor keeps a dead one. Where query and owner share that
clock, the file says itself when it was written, and an owner that has just come need not wait.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from holdfast.broker.layout import QUERIES, names_in
from holdfast.broker.positions import PartitionLag, lag_of
from holdfast.broker.queries import QUERY_FILE, UNFINISHED, Query, parse_query, remove_queries, unknown_query
from holdfast.broker.staged import staged_floor
from holdfast.env import World
from holdfast.storage.files import join, read_file

if TYPE_CHECKING:
    from holdfast.broker.topic import Topic

logger = logging.getLogger(__name__)


class _Seen(msgspec.Struct, frozen=True):
    """What a file held, and since when we know it so."""

    content: bytes
    since_ns: int


class Queries:
    """All running queries of a data folder. Safe to use from any thread."""

    def __init__(self, world: World, root: str) -> None:
        self._world = world
        self._root = root
        self._folder = join(root, QUERIES)
        self._seen: dict[str, _Seen] = {}
        self._removed: set[str] = set()  # one that comes back lives, whatever its file says of the time
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def floor(self, topic: str, topic_id: int, partition: int) -> int | None:
        """The first offset of a partition that is needed, as of now; None where nobody needs any.

        By a query, or by a bulk write whose commit was cut short.
        """
        with self._lock:
            floors = [query.floor(topic, topic_id, partition) for query in self._look()]
        floors.append(staged_floor(self._world, self._root, topic, topic_id, partition))
        return min((floor for floor in floors if floor is not None), default=None)

    def running(self) -> list[Query]:
        """Those that live, and of which it is known what they need."""
        with self._lock:
            return [query for query in self._look() if not query.wrong]

    def on(self, topic: Topic) -> list[tuple[Query, list[PartitionLag]]]:
        """The queries that read a topic, and how far behind each is in its partitions."""
        now_ns, found = self._world.clock.now_ns(), []
        for query in self.running():
            lags = []
            for number, partition in enumerate(topic.partitions):
                floor = query.floor(topic.name, topic.id, number)
                if floor is not None:
                    lags.append(lag_of(partition.log, (topic.name, number), floor, now_ns))
            if lags:
                found.append((query, lags))
        return found

    def remove(self, group: str) -> int:
        """Take away the files of a group's queries; one that runs writes its own again. Answers how many there were."""
        return remove_queries(self._world, self._root, group)

    def tidy(self) -> None:
        """Remove the files of those that died."""
        with self._lock:
            self._look()

    def _look(self) -> list[Query]:
        try:
            files = names_in(self._world, self._folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            self._tell("", error.strerror or str(error))
            return [unknown_query("", error)]
        found = [query for file in files if (query := self._look_at(file)) is not None]
        self._seen = {file: seen for file, seen in self._seen.items() if file in files}
        return found

    def _look_at(self, file: str) -> Query | None:
        """The query, or None where it has ended; what is no file of a query is left alone."""
        ours = QUERY_FILE.fullmatch(file)
        if not ours and not UNFINISHED.fullmatch(file):
            return None
        try:
            content = read_file(self._world.disk, join(self._folder, file))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tell(file, error.strerror or str(error))
            return unknown_query(file, error)  # whatever becomes of it: it may be alive
        if content is None:
            return None
        query = parse_query(self._world, file, content)
        if self._is_dead(file, content, query):
            return None if self._forget(file, content) else self._look_at(file)
        if not ours:
            return None  # what a query that was killed left behind, or is about to rename
        if query.wrong:
            self._tell(file, query.wrong)
        return query

    def _is_dead(self, file: str, content: bytes, query: Query) -> bool:
        now_ns = self._world.clock.monotonic_ns()
        seen = self._seen.get(file)
        if seen is None or seen.content != content:
            seen = self._seen[file] = _Seen(content, now_ns)
        since_ns = seen.since_ns
        if query.renewed_mono_ms is not None and file not in self._removed:
            since_ns = min(since_ns, query.renewed_mono_ms * 1_000_000)
        return now_ns - since_ns >= query.ttl_ms * 1_000_000

    def _forget(self, file: str, content: bytes) -> bool:
        """Remove the file, unless it was renewed just now."""
        path = join(self._folder, file)
        with suppress(OSError):  # then it stays, and counts no more all the same
            if read_file(self._world.disk, path) not in (content, None):
                return False
            self._world.disk.remove(path)
            self._removed.add(file)
            logger.info("a query has ended without a word", extra={"file": path})
        return True

    def _tell(self, file: str, what: str) -> None:
        if file not in self._told:  # once, not at every look
            self._told.add(file)
            told = {"file": join(self._folder, file).rstrip("/"), "error": what}
            logger.warning("a query's file cannot be read: no old message is removed meanwhile", extra=told)


def query_gauges(queries: Queries, topic: Topic) -> dict[str, float]:
    """How many queries read the topic, and how far behind the last of them is."""
    found = [lags for _, lags in queries.on(topic)]
    return {
        "queries": len(found),
        "query_lag": max((sum(lag.messages for lag in lags) for lags in found), default=0),
        "query_lag_seconds": max((lag.seconds for lags in found for lag in lags), default=0.0),
    }
