"""Running queries: which other processes read a data folder, and from which offsets they need its messages.

A query keeps one small file, queries/GROUP@TOKEN.json, and rewrites it three times per time-out. It takes no lock:
the file is replaced by a rename. The file is not synced: after a power cut its query does not run any more.

    query   hold ──► file ──► renewed, renewed, ... ──► end: removed
    owner   before it removes a segment, reads which offsets the files need; ignores files not renewed in time
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec

from holdfast.broker.folder.layout import QUERIES, STAGING, TOPICS, check_name, names_in
from holdfast.broker.streams import PartitionLag, lag_of
from holdfast.env import World, close_in_children, end_at_exit
from holdfast.env.disk import Disk, write_fully
from holdfast.env.process import get_logger
from holdfast.errors import Closed, InvalidRequest
from holdfast.later import pattern
from holdfast.storage.files import join, read_file, translated
from holdfast.storage.keeper import Keeper

if TYPE_CHECKING:
    from holdfast.broker.streams.stored_queries import StoredQueries
    from holdfast.broker.topic import Topic


logger = get_logger(__name__)

VERSION: Final = 1
TTL_MS: Final = 300_000
LEAST_TTL_MS: Final = 1_000
MOST_TTL_MS: Final = 7 * 24 * 3_600_000
# The floor of a partition that a query does not name: new partitions are read from their start.
FROM_THE_START: Final = 0
# The floor of a partition that a query does not read.
NOT_READ: Final = 2**63 - 1

QUERY_FILE: Final = pattern(r"(.+)@[0-9a-f]{8}\.json")
UNFINISHED: Final = pattern(r".+@[0-9a-f]{8}\.json\.tmp")

Count = Annotated[int, msgspec.Meta(ge=0)]


class TopicPins(msgspec.Struct, frozen=True):
    """The offsets from which a query needs one topic, by partition."""

    id: int
    partitions: dict[Count, Count]


class QueryNote(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a query's file. `renewed` rises with each write; the times are those of the last write."""

    version: int = VERSION
    group: str
    kind: str
    ttl_ms: Annotated[int, msgspec.Meta(ge=LEAST_TTL_MS, le=MOST_TTL_MS)]
    renewed: Count
    renewed_at_ms: int
    renewed_mono_ms: int
    boot_id: int
    pid: int
    host: str
    topics: dict[str, TopicPins]


class _Head(msgspec.Struct, frozen=True):
    """The fields that all versions share."""

    version: int = 0
    ttl_ms: Annotated[int, msgspec.Meta(ge=LEAST_TTL_MS, le=MOST_TTL_MS)] = TTL_MS


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """A query as described by its file. If the file is damaged, `wrong` says how, and the query pins everything."""

    file: str
    group: str
    kind: str = ""
    holder: str = ""
    ttl_ms: int = TTL_MS
    renewed_ms_ago: int | None = None
    renewed_mono_ms: int | None = None  # on this machine's clock, if written since it booted
    topics: dict[str, TopicPins] = {}
    wrong: str = ""

    @property
    def stale(self) -> bool:
        """Whether it was not renewed in time, as far as its file alone can tell."""
        return self.renewed_ms_ago is not None and self.renewed_ms_ago >= self.ttl_ms

    def floor(self, topic: str, topic_id: int, partition: int) -> int | None:
        """Return the first offset of a partition that the query needs; None if it needs none."""
        if self.wrong:
            return FROM_THE_START
        pins = self.topics.get(topic)
        if pins is None or pins.id != topic_id:  # a topic of that name was deleted and created again
            return None
        offset = pins.partitions.get(partition, FROM_THE_START)
        return None if offset == NOT_READ else offset


def parse_query(world: World, file: str, content: bytes) -> Query:
    """Parse a file; one that cannot be parsed becomes a query with `wrong` set."""
    found = QUERY_FILE.fullmatch(file)
    group = file if found is None else found[1]
    try:
        head = msgspec.json.decode(content, type=_Head)
        if head.version != VERSION:
            wrong = f"it has version {head.version}, and this release reads version {VERSION}"
            return Query(file=file, group=group, ttl_ms=head.ttl_ms, wrong=wrong)
        note = msgspec.json.decode(content, type=QueryNote)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return Query(file=file, group=group, wrong=str(error))
    ids, clock = world.ids, world.clock
    here = note.boot_id == ids.boot_id() != 0
    ago_ms = clock.monotonic_ns() // 1_000_000 - note.renewed_mono_ms
    if not here or ago_ms < 0:
        here, ago_ms = False, max(clock.now_ns() // 1_000_000 - note.renewed_at_ms, 0)
    return Query(
        file=file,
        group=group,
        kind=note.kind,
        holder=f"{note.host}:{note.pid}",
        ttl_ms=note.ttl_ms,
        renewed_ms_ago=ago_ms,
        renewed_mono_ms=note.renewed_mono_ms if here else None,
        topics=note.topics,
    )


def list_queries(world: World, root: str) -> list[Query]:
    """Return the queries of a data folder, without owning it; including those that died without ending."""
    folder, found = join(root, QUERIES), []
    try:
        files = names_in(world, folder)
    except OSError as error:
        return [unknown_query("", error)]
    for file in filter(QUERY_FILE.fullmatch, files):
        try:
            content = read_file(world.disk, join(folder, file))
        except FileNotFoundError:
            continue  # ended in the meantime
        except OSError as error:
            found.append(unknown_query(file, error))
            continue
        if content is not None:
            found.append(parse_query(world, file, content))
    return found


def unknown_query(file: str, error: OSError) -> Query:
    """Return the query for a file that cannot be read."""
    return Query(file=file, group=file.rpartition("@")[0], wrong=error.strerror or str(error))


def remove_queries(world: World, root: str, group: str) -> int:
    """Remove the files of a group's queries and return their number. A running query writes its file again."""
    removed = 0
    with translated(join(root, QUERIES)):
        for query in list_queries(world, root):
            if query.group == group:
                with suppress(FileNotFoundError):
                    world.disk.remove(join(root, f"{QUERIES}/{query.file}"))
                    removed += 1
    return removed


class QueryLease:
    """The query's side: keeps retention from removing what the query has not read, if the folder is writable.

    Safe to use from any thread. It ends with `end`, with the process, or when the object is garbage collected; in a
    child after a fork it has ended. `renewing` adds a thread that keeps it from expiring. If
    `lasting`, the file stays unless `end` is called: another process will take the query over within the time-out.
    """

    def __init__(self, world: World, root: str, group: str, *, ttl_ms: int, kind: str, lasting: bool = False) -> None:
        self._world = world
        self._root = root
        self.group = group
        self.ttl_ms = ttl_ms
        self.folder = join(root, QUERIES)
        self.file = f"{group}@{world.ids.random_u32():08x}.json"
        self.on_attention: Callable[[], None] = lambda: None
        self.before_close: Callable[[], None] = lambda: None
        self._kind = kind
        self._topics: dict[str, TopicPins] = {}
        self._renewed = 0
        self._written_ns: int | None = None  # None after a failed write
        self._warned = False
        self._ended = False
        self._lasting = lasting
        self._lock = threading.Lock()
        close_in_children(self)
        if not lasting:
            end_at_exit(self)

    @staticmethod
    def start(
        world: World, root: str, group: str, *, ttl_ms: int = TTL_MS, kind: str = "spark", lasting: bool = False
    ) -> QueryLease:
        """Start a query of this name, which needs nothing until `hold` is called."""
        check_name(group, "group")
        if type(ttl_ms) is not int or not LEAST_TTL_MS <= ttl_ms <= MOST_TTL_MS:
            raise InvalidRequest(
                f"a query cannot have a timeout of {ttl_ms!r} ms: give {LEAST_TTL_MS} (a second) to {MOST_TTL_MS} "
                "(a week)"
            )
        return QueryLease(world, root.rstrip("/") or "/", group, ttl_ms=ttl_ms, kind=kind, lasting=lasting)

    def hold(self, positions: Mapping[str, tuple[int, Mapping[int, int]]]) -> bool:
        """Need these topics, {name: (id, {partition: offset})}, from the offsets on, and nothing else any more.

        In effect once this returns: a query that begins must check afterwards that the log still has its offsets.
        Returns False if it could not be written, which is logged once; the query goes on without protection.
        """
        topics = {name: TopicPins(topic_id, dict(offsets)) for name, (topic_id, offsets) in positions.items()}
        with self._lock:
            if self._ended:
                return False
            if self._written_ns is not None and topics == self._topics:
                return True
            self._topics = topics
            return self._write()

    def renew(self) -> bool:
        """Record that the query still runs; return False if that could not be written."""
        with self._lock:
            return not self._ended and self._renewed > 0 and self._write()

    def tick(self) -> int:
        """Renew if it is time; return the ms until the next renewal."""
        with self._lock:
            if self._ended:
                raise Closed(f"the query {self.group} has ended: start a new one")
            every_ms = self.ttl_ms // 3
            if self._written_ns is not None:
                waited_ms = (self._world.clock.monotonic_ns() - self._written_ns) // 1_000_000
                if waited_ms < every_ms:
                    return every_ms - waited_ms
            if self._renewed:
                self._write()
            return every_ms

    def end(self) -> None:
        """Need nothing any more. Ending twice is fine."""
        with self._lock:
            ended, self._ended = self._ended, True
            if not ended and self._renewed:
                with suppress(OSError):  # the file expires anyway
                    self.take_away()
        if not ended:
            self.before_close()

    def disown(self) -> None:
        """Give the query up in a child after a fork; the parent keeps it."""
        self._ended = True
        self._lock = threading.Lock()  # the old one may be held by a thread that does not exist here

    def __del__(self) -> None:
        # No thread can hold the lock: it would hold a reference to the object.
        if not self._ended and not self._lasting:
            self.end()

    def _write(self) -> bool:
        self._renewed += 1
        try:
            self.put(msgspec.json.encode(self._note()))
        except OSError as error:
            self._written_ns = None
            if not self._warned:
                self._warned = True
                facts = {"folder": self.folder, "group": self.group, "error": error.strerror or str(error)}
                logger.warning("a query cannot keep what it has not read from retention", extra=facts)
            return False
        self._written_ns = self._world.clock.monotonic_ns()
        return True

    def put(self, content: bytes) -> None:
        """Put the query's file in place; raises OSError."""
        put_query(self._world.disk, self._root, self.file, content)

    def take_away(self) -> None:
        """Remove the query's file; raises OSError."""
        self._world.disk.remove(join(self.folder, self.file))

    def _note(self) -> QueryNote:
        ids, clock = self._world.ids, self._world.clock
        process = ids.process_note()
        return QueryNote(
            group=self.group,
            kind=self._kind,
            ttl_ms=self.ttl_ms,
            renewed=self._renewed,
            renewed_at_ms=clock.now_ns() // 1_000_000,
            renewed_mono_ms=clock.monotonic_ns() // 1_000_000,
            boot_id=ids.boot_id(),
            pid=int(process["pid"]),
            host=str(process["host"]),
            topics=self._topics,
        )


def renewing(lease: QueryLease) -> QueryLease:
    """Start a thread that renews the lease as long as the object is referenced: a batch may take hours."""
    Keeper(lease).start()
    return lease


def put_query(disk: Disk, root: str, file: str, content: bytes) -> None:
    """Put a query's file in place in a data folder."""
    folder = join(root, QUERIES)
    if not disk.exists(join(root, TOPICS)):  # do not recreate a folder that was removed
        raise FileNotFoundError(errno.ENOENT, f"{root} is no longer a data folder")
    if not disk.exists(folder):
        disk.make_folder(folder)
    _replace(disk, folder, file, content)


def _replace(disk: Disk, folder: str, name: str, content: bytes) -> None:
    """Replace a file atomically. Readers see the old content or the new; a power cut may lose both."""
    temporary = join(folder, name + ".tmp")
    file = disk.open(temporary, write=True, create=True)
    try:
        file.truncate(0)
        write_fully(file, 0, [content])
    finally:
        file.close()
    disk.rename(temporary, join(folder, name))


# The owner's side of running queries: keep what they still need, and forget those that died.
#
# A query is alive until its file has not changed for the query's time-out, by the monotonic clock. So setting the
# clock neither ends a query nor keeps a dead one. If query and owner share that clock, the file says when it was
# written, and an owner that has just started need not wait.


# Bulk writes whose commit was cut short, according to their manifests: see `holdfast.spark.commits`.
#
# Resuming one means looking in the log for what it had written. So that part of the log is kept until the commit is
# finished, or nobody has resumed it for a week.


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
    """The fields of a commit's manifest that matter here."""

    lanes: tuple[_Start, ...]
    noted_at_ms: int = 0


class _Done(msgspec.Struct, frozen=True):
    batch: int = -1


Found = TypeVar("Found", _Manifest, _Done)


def staged_floor(world: World, root: str, topic: str, topic_id: int, partition: int) -> int | None:
    """Return the first offset of a partition that an unfinished commit may have written; None if there is none."""
    wanted = (topic, topic_id, partition)
    try:
        found = [
            start.log_end
            for manifest in _unfinished(world, join(root, STAGING))
            for start in manifest.lanes
            if (start.lane.topic, start.topic_id, start.lane.partition) == wanted
        ]
    except OSError:
        return 0  # an unreadable area may hold an unfinished commit
    return min(found, default=None)


def _unfinished(world: World, root: str) -> Iterator[_Manifest]:
    since_ms = world.clock.now_ns() // 1_000_000 - HELD_MS
    for write in staged_names(world, root):
        folder = join(root, write)
        batches = [int(name) for name in staged_names(world, folder) if name.isdigit()]
        done = _read(world, join(folder, DONE), _Done) if batches else None
        for batch in batches:
            if done is None or batch > done.batch:
                manifest = _read(world, f"{folder}/{batch}/{MANIFEST}", _Manifest)
                if manifest is not None and manifest.noted_at_ms > since_ms:
                    yield manifest


def staged_names(world: World, folder: str) -> list[str]:
    """Return the names in a folder of the staging area. Other processes may add and remove files at any time."""
    try:
        return names_in(world, folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read(world: World, path: str, kind: type[Found]) -> Found | None:
    try:
        content = read_file(world.disk, path)
        return None if content is None else msgspec.json.decode(content, type=kind)
    except (FileNotFoundError, msgspec.MsgspecError):  # finished just now, or impossible to finish
        return None


class _Seen(msgspec.Struct, frozen=True):
    """The content of a file, and since when it has been unchanged."""

    content: bytes
    since_ns: int


class Queries:
    """All running queries of a data folder. Safe to use from any thread."""

    def __init__(self, world: World, root: str) -> None:
        self._world = world
        self._root = root
        self._folder = join(root, QUERIES)
        self._seen: dict[str, _Seen] = {}
        self._removed: set[str] = set()  # a file that comes back is alive, whatever time it states
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self.stored: StoredQueries | None = None  # those that read the store in which the folder lives

    def floor(self, topic: str, topic_id: int, partition: int) -> int | None:
        """Return the first offset of a partition that is needed now; None if none is.

        It may be needed by a query, or by a bulk write whose commit was cut short.
        """
        with self._lock:
            floors = [query.floor(topic, topic_id, partition) for query in self._look()]
        floors.append(staged_floor(self._world, self._root, topic, topic_id, partition))
        return min((floor for floor in floors if floor is not None), default=None)

    def running(self) -> list[Query]:
        """Return the queries that are alive and whose needs are known."""
        with self._lock:
            return [query for query in self._look() if not query.wrong]

    def on(self, topic: Topic) -> list[tuple[Query, list[PartitionLag]]]:
        """Return the queries that read a topic, and each one's lag in its partitions."""
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
        """Remove the files of a group's queries and return their number. A running query writes its file again."""
        removed = remove_queries(self._world, self._root, group)
        for file in [] if self.stored is None else self.stored.notes():
            if self.stored is not None and file.rpartition("@")[0] == group:
                self.stored.remove(file)
                removed += 1
        return removed

    def tidy(self) -> None:
        """Remove the files of dead queries."""
        with self._lock:
            self._look()

    def _look(self) -> list[Query]:
        stored = {} if self.stored is None else self.stored.notes()
        try:
            files = names_in(self._world, self._folder)
        except FileNotFoundError:
            files = []
        except OSError as error:
            self._tell("", error.strerror or str(error))
            return [unknown_query("", error)]
        found = [query for file in files if (query := self._look_at(file)) is not None]
        found += [query for file, note in stored.items() if (query := self._look_at_stored(file, note)) is not None]
        self._seen = {file: seen for file, seen in self._seen.items() if file in files or file in stored}
        return found

    def _look_at_stored(self, file: str, content: bytes) -> Query | None:
        """Return a query that reads the store, or None if it has ended."""
        assert self.stored is not None
        if QUERY_FILE.fullmatch(file) is None:
            return None
        query = parse_query(self._world, file, content)
        if not self._is_dead(file, content, query):
            return query
        self.stored.remove(file)
        self._removed.add(file)
        logger.info("a query stopped renewing its hold", extra={"file": file})
        return None

    def _look_at(self, file: str) -> Query | None:
        """Return the query, or None if it has ended; other files are left alone."""
        ours = QUERY_FILE.fullmatch(file)
        if not ours and not UNFINISHED.fullmatch(file):
            return None
        try:
            content = read_file(self._world.disk, join(self._folder, file))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tell(file, error.strerror or str(error))
            return unknown_query(file, error)  # it may be alive
        if content is None:
            return None
        query = parse_query(self._world, file, content)
        if self._is_dead(file, content, query):
            return None if self._forget(file, content) else self._look_at(file)
        if not ours:
            return None  # a temporary file, left by a killed query or about to be renamed
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
        with suppress(OSError):  # the file stays, but no longer counts
            if read_file(self._world.disk, path) not in (content, None):
                return False
            self._world.disk.remove(path)
            self._removed.add(file)
            logger.info("a query stopped renewing its hold", extra={"file": path})
        return True

    def _tell(self, file: str, what: str) -> None:
        if file not in self._warned:  # log it once, not at every look
            self._warned.add(file)
            facts = {"file": join(self._folder, file).rstrip("/"), "error": what}
            logger.warning("a query's file cannot be read: until it can, no old message is removed", extra=facts)


def query_gauges(queries: Queries, topic: Topic) -> dict[str, float]:
    """Return the number of queries that read the topic, and the largest lag among them."""
    found = [lags for _, lags in queries.on(topic)]
    return {
        "queries": len(found),
        "query_lag": max((sum(lag.messages for lag in lags) for lags in found), default=0),
        "query_lag_seconds": max((lag.seconds for lags in found for lag in lags), default=0.0),
    }
