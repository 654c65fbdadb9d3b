"""The owner's side of running queries: what they still need is not removed, and those that died are forgotten.

Whether a query lives is told by its file alone: it does, until the file has not changed for the query's time-out, by
the monotonic clock. So a clock that is set neither ends a query nor keeps a dead one. Where query and owner share that
clock, the file says itself when it was written, and an owner that has just come need not wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from holdfast.broker.folder.layout import QUERIES, STAGING, names_in
from holdfast.broker.streams.positions import PartitionLag, lag_of
from holdfast.broker.streams.queries import QUERY_FILE, UNFINISHED, Query, parse_query, remove_queries, unknown_query
from holdfast.env import World
from holdfast.storage.files import join, read_file

if TYPE_CHECKING:
    from holdfast.broker.topic import Topic


# Bulk writes whose commit was cut short, as their manifests tell of them: see `holdfast.spark.commits`.
#
# Whoever goes on with one looks in the log for what it had written. So that stays, until the commit is finished or
# nobody has come for a week.


HELD_MS: Final = 7 * 24 * 3_600_000
MANIFEST: Final = "manifest.json"
DONE: Final = "done.json"


class _Lane(msgspec.Struct, frozen=True):
    topic: str
    partition: int


class _Start(msgspec.Struct, frozen=True):
    lane: _Lane
    topic_id: int
    log_end: int


class _Manifest(msgspec.Struct, frozen=True):
    """The part of it that counts here."""

    lanes: tuple[_Start, ...]
    noted_at_ms: int = 0


class _Done(msgspec.Struct, frozen=True):
    batch: int = -1


Found = TypeVar("Found", _Manifest, _Done)

_decode_manifest = msgspec.json.Decoder(_Manifest).decode
_decode_done = msgspec.json.Decoder(_Done).decode


def staged_floor(world: World, root: str, topic: str, topic_id: int, partition: int) -> int | None:
    """From which offset of a partition on a commit that was cut short may have written; None where there is none."""
    wanted = (topic, topic_id, partition)
    try:
        found = [
            start.log_end
            for manifest in _unfinished(world, join(root, STAGING))
            for start in manifest.lanes
            if (start.lane.topic, start.topic_id, start.lane.partition) == wanted
        ]
    except OSError:
        return 0  # there may be one
    return min(found, default=None)


def _unfinished(world: World, root: str) -> Iterator[_Manifest]:
    since_ms = world.clock.now_ns() // 1_000_000 - HELD_MS
    for write in staged_names(world, root):
        folder = join(root, write)
        batches = [int(name) for name in staged_names(world, folder) if name.isdigit()]
        done = _read(world, join(folder, DONE), _decode_done) if batches else None
        for batch in batches:
            if done is None or batch > done.batch:
                manifest = _read(world, f"{folder}/{batch}/{MANIFEST}", _decode_manifest)
                if manifest is not None and manifest.noted_at_ms > since_ms:
                    yield manifest


def staged_names(world: World, folder: str) -> list[str]:
    """What a folder of the staging area holds; others may take it away at any time, or put a file there."""
    try:
        return names_in(world, folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read(world: World, path: str, decode: Callable[[bytes], Found]) -> Found | None:
    try:
        content = read_file(world.disk, path)
        return None if content is None else decode(content)
    except (FileNotFoundError, msgspec.MsgspecError):  # finished just now, or never to be finished by anybody
        return None


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
