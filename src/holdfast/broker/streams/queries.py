"""Running queries: who reads a data folder from another process, and from which offsets on it needs the messages.

A query keeps one small file, queries/GROUP@TOKEN.json, and writes it anew every third of its time-out. No lock is
taken: the file comes and goes with a rename. It is not synced: after a power cut its query does not run any more.

    query   hold ──► file ──► renewed, renewed, ... ──► end: removed
    owner   before it removes a segment: what do the files need? One that is not renewed in time counts no more
"""

from __future__ import annotations

import errno
import logging
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Final

import msgspec

from holdfast.broker.folder.layout import QUERIES, TOPICS, check_name, names_in
from holdfast.env import World, close_in_children, end_at_exit
from holdfast.env.disk import Disk
from holdfast.errors import Closed, InvalidRequest
from holdfast.storage.files import join, read_file, write_fully
from holdfast.storage.keeper import Keeper
from holdfast.storage.opening import translated

logger = logging.getLogger(__name__)

VERSION: Final = 1
TTL_MS: Final = 300_000
LEAST_TTL_MS: Final = 1_000
MOST_TTL_MS: Final = 7 * 24 * 3_600_000
# A partition that a query does not name is needed from here on: new ones are read from their beginning.
FROM_THE_START: Final = 0
# What stands for a partition of a topic that the query leaves alone.
NOT_READ: Final = 2**63 - 1

QUERY_FILE: Final = re.compile(r"(.+)@[0-9a-f]{8}\.json")
UNFINISHED: Final = re.compile(r".+@[0-9a-f]{8}\.json\.tmp")

Count = Annotated[int, msgspec.Meta(ge=0)]


class TopicPins(msgspec.Struct, frozen=True):
    """What a query needs of one topic: from these offsets on, by partition."""

    id: int
    partitions: dict[Count, Count]


class QueryNote(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in a query's file. `renewed` rises with each write; the times say when the last one was."""

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
    """What every version has in common."""

    version: int = 0
    ttl_ms: Annotated[int, msgspec.Meta(ge=LEAST_TTL_MS, le=MOST_TTL_MS)] = TTL_MS


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """A query as its file tells of it. What is `wrong` with the file, in words: then it is taken to need everything."""

    file: str
    group: str
    kind: str = ""
    holder: str = ""
    ttl_ms: int = TTL_MS
    renewed_ms_ago: int | None = None
    renewed_mono_ms: int | None = None  # on this machine's clock, if it was written since the machine was started
    topics: dict[str, TopicPins] = {}
    wrong: str = ""

    @property
    def stale(self) -> bool:
        """Whether it was not renewed in time, as far as somebody can tell who has just come."""
        return self.renewed_ms_ago is not None and self.renewed_ms_ago >= self.ttl_ms

    def floor(self, topic: str, topic_id: int, partition: int) -> int | None:
        """From which offset on it needs a partition; None where it does not."""
        if self.wrong:
            return FROM_THE_START
        pins = self.topics.get(topic)
        if pins is None or pins.id != topic_id:  # another topic of that name: it was deleted and made again
            return None
        offset = pins.partitions.get(partition, FROM_THE_START)
        return None if offset == NOT_READ else offset


_decode_note = msgspec.json.Decoder(QueryNote).decode
_decode_head = msgspec.json.Decoder(_Head).decode


def parse_query(world: World, file: str, content: bytes) -> Query:
    """What a file says; one that cannot be understood is a query of which nothing is known."""
    found = QUERY_FILE.fullmatch(file)
    group = file if found is None else found[1]
    try:
        head = _decode_head(content)
        if head.version != VERSION:
            wrong = f"it is of version {head.version}, and this program knows version {VERSION}"
            return Query(file=file, group=group, ttl_ms=head.ttl_ms, wrong=wrong)
        note = _decode_note(content)
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
    """The queries of a data folder, seen without owning it; also those that have ended without a word."""
    folder, found = join(root, QUERIES), []
    try:
        files = names_in(world, folder)
    except OSError as error:
        return [unknown_query("", error)]
    for file in filter(QUERY_FILE.fullmatch, files):
        try:
            content = read_file(world.disk, join(folder, file))
        except FileNotFoundError:
            continue  # ended meanwhile
        except OSError as error:
            found.append(unknown_query(file, error))
            continue
        if content is not None:
            found.append(parse_query(world, file, content))
    return found


def unknown_query(file: str, error: OSError) -> Query:
    """One whose file cannot be read."""
    return Query(file=file, group=file.rpartition("@")[0], wrong=error.strerror or str(error))


def remove_queries(world: World, root: str, group: str) -> int:
    """Take away the files of a group's queries; one that runs writes its own again. Answers how many there were."""
    removed = 0
    with translated(join(root, QUERIES)):
        for query in list_queries(world, root):
            if query.group == group:
                with suppress(FileNotFoundError):
                    world.disk.remove(join(root, f"{QUERIES}/{query.file}"))
                    removed += 1
    return removed


class QueryLease:
    """The query's side: keeps what it has not read from going, as far as the folder can be written.

    Safe to use from any thread. Ends by `end`, with the process, or when nobody has the object any more; a child after
    a fork finds it ended. `renewing` gives it a thread, without which it lasts no longer than its time-out. A `lasting`
    one leaves its file behind unless it is ended: somebody else will take the query up within the time-out.
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
        self._written_ns: int | None = None  # None: what is to be written could not be
        self._told = False
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
        """A query of this name, which needs nothing until it says so by `hold`."""
        check_name(group, "group")
        if type(ttl_ms) is not int or not LEAST_TTL_MS <= ttl_ms <= MOST_TTL_MS:
            raise InvalidRequest(
                f"a query cannot have a time-out of {ttl_ms!r} ms: give {LEAST_TTL_MS} (a second) to {MOST_TTL_MS} "
                "(a week)"
            )
        return QueryLease(world, root.rstrip("/") or "/", group, ttl_ms=ttl_ms, kind=kind, lasting=lasting)

    def hold(self, positions: Mapping[str, tuple[int, Mapping[int, int]]]) -> bool:
        """Need these topics, {name: (id, {partition: offset})}, from the offsets on, and nothing else any more.

        It counts from the return on: whoever just begins looks afterwards whether the log still has the offset.
        False where it could not be written down, which is logged once: the query goes on without.
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
        """Say that the query still runs; False where that could not be written down."""
        with self._lock:
            return not self._ended and self._renewed > 0 and self._write()

    def tick(self) -> int:
        """Renew if it is time; answers in how many ms it will be."""
        with self._lock:
            if self._ended:
                raise Closed(f"the query {self.group} has ended")
            every_ms = self.ttl_ms // 3
            if self._written_ns is not None:
                waited_ms = (self._world.clock.monotonic_ns() - self._written_ns) // 1_000_000
                if waited_ms < every_ms:
                    return every_ms - waited_ms
            if self._renewed:
                self._write()
            return every_ms

    def end(self) -> None:
        """Need nothing any more. Twice is fine."""
        with self._lock:
            ended, self._ended = self._ended, True
            if not ended and self._renewed:
                with suppress(OSError):  # it is not renewed any more, which ends it, too
                    self._world.disk.remove(join(self.folder, self.file))
        if not ended:
            self.before_close()

    def disown(self) -> None:
        """In a child after a fork: the parent goes on with it."""
        self._ended = True
        self._lock = threading.Lock()  # whoever had the other one does not exist here

    def __del__(self) -> None:
        # Nobody can be inside the lock: whoever is has the object.
        if not self._ended and not self._lasting:
            self.end()

    def _write(self) -> bool:
        self._renewed += 1
        try:
            self._put_in_place(msgspec.json.encode(self._note()))
        except OSError as error:
            self._written_ns = None
            if not self._told:
                self._told = True
                told = {"folder": self.folder, "group": self.group, "error": error.strerror or str(error)}
                logger.warning("a query cannot keep what it has not read from retention", extra=told)
            return False
        self._written_ns = self._world.clock.monotonic_ns()
        return True

    def _put_in_place(self, content: bytes) -> None:
        disk = self._world.disk
        if not disk.exists(join(self._root, TOPICS)):  # or a folder that was taken away would come back
            raise FileNotFoundError(errno.ENOENT, f"{self._root} is no data folder any more")
        if not disk.exists(self.folder):
            disk.make_folder(self.folder)
        _replace(disk, self.folder, self.file, content)

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
    """Give it a thread that renews it for as long as somebody has the object: a batch may take hours."""
    Keeper(lease).start()
    return lease


def _replace(disk: Disk, folder: str, name: str, content: bytes) -> None:
    """Whoever looks finds the old content or the new one, whole; a power cut may take either."""
    temporary = join(folder, name + ".tmp")
    file = disk.open(temporary, write=True, create=True)
    try:
        file.truncate(0)
        write_fully(file, 0, [content])
    finally:
        file.close()
    disk.rename(temporary, join(folder, name))
