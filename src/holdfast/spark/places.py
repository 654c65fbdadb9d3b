"""Where Spark reads and writes: a data folder that driver and tasks share, a server that both call, or a store.

A place answers the driver's questions about topics and offsets, keeps retention from what a query has not read, gives
tasks the frames of a range as they are stored, and the rows of tables. Readers know no more of it than `SparkPlace`. A
third kind need only be a folder on another disk: `FolderPlace` takes the world that it is read through.

Secrets never become options, which Spark shows in plans and logs. The driver finds them where the client does, and
they go to the tasks inside the reader or writer, whose text does not show them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import quote
from zlib import crc32

import msgspec

from holdfast.api.topics import TopicInfo
from holdfast.broker.folder.layout import TOPICS, check_name, is_store
from holdfast.broker.folder.stored import ChainSnapshot, is_chain, shown_place, snapshot
from holdfast.broker.streams.queries import QueryLease, QueryNote
from holdfast.broker.streams.stored_queries import StoredNote
from holdfast.client.calling import Ask, Caller, packed, path_of
from holdfast.client.network import CA, CERTIFICATE, KEY, ThreadNetwork, context_of, run
from holdfast.client.opening import TOKEN, is_address, parse_address
from holdfast.codec.encode import Body
from holdfast.codec.frame import MOST_RAW_BYTES, Frame, frames_in
from holdfast.delivery.where import Expression
from holdfast.env import World, real_world
from holdfast.env.chain.engines import open_store, parse_place
from holdfast.env.disk import BytesLike
from holdfast.env.process import environment
from holdfast.errors import Forbidden, InvalidRequest, NotAQueue, NotFound, Unavailable, UnknownTopic
from holdfast.local.opening import store_settings
from holdfast.protocol.media import JSON, RAW
from holdfast.protocol.topics import Topics
from holdfast.spark.commits import CommitRequest, FrameFiles, SinkLane, StagedFile
from holdfast.spark.options import ReadOptions, Subscription, required_path, table_options
from holdfast.spark.ranges import (
    DataFolder,
    PlanRequest,
    Positions,
    Range,
    ReadPlan,
    from_json,
    options_of,
    plan,
    to_json,
)
from holdfast.spark.rows import Piece, Row, opened, rows_of, table_named

_PAGE_BYTES: Final = 8 << 20  # of frames in one answer
_UPLOAD_BYTES: Final = 4 << 20
_FRESH_NS: Final = 1_000_000_000
_PLANNING_S: Final = 60.0
_COMMITTING_S: Final = 24 * 3600.0
_OURS: Final = frozenset({"path", "server", "tokenfile"})  # they say where the server is, which it knows


class SparkPlace(Protocol):
    """Where messages are."""

    path: str

    def plan(self, asked: PlanRequest) -> ReadPlan:
        """One step of planning."""

    def frames(self, wanted: Range, at: int) -> Iterator[Frame]:
        """The frames from the one that holds offset `at` on, at least to the end of the range."""

    def lease(self, group: str, ttl_ms: int) -> QueryLease:
        """Begin a query, which keeps retention from what it has not read. Spark does not say when it ends."""

    def pieces(self, table: str, options: Mapping[str, str]) -> list[Piece]:
        """What the tasks read of a table."""

    def rows(self, table: str, options: Mapping[str, str], piece: Piece) -> Iterator[Row]:
        """The rows of a piece of a table."""


class ServerAccess(msgspec.Struct, frozen=True):
    """How a server is reached. `tls` are names of files, by variable: every machine has them where the driver does."""

    url: str
    token: str | None = None
    tls: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        return f"ServerAccess({self.url!r})"


def access_of(given: Mapping[str, str]) -> ServerAccess | None:
    """How to reach the server that the options name, as the driver's environment says; None for a folder."""
    url = required_path(given)
    file = given.get("tokenFile")
    if not is_address(url):
        if file:
            raise InvalidRequest('option "tokenFile" is for a server: name one with the option "path", or leave it out')
        return None
    address, variables = parse_address(url), environment()
    if address.queue is not None:
        raise InvalidRequest(f'{url} names a queue: give http://host:port, and the option "topic"')
    token = variables.get(TOKEN) or None
    if file:
        try:
            token = Path(file).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f'option "tokenFile" is {file}, which cannot be read: {error}') from None
    if not (token or "").isascii() or not (token or "").isprintable():
        raise InvalidRequest("the token cannot be used: give the text that `holdfast token new` printed")
    tls = tuple((name, variables[name]) for name in (CA, CERTIFICATE, KEY) if variables.get(name))
    return ServerAccess(address.text, token, tls if address.secure else ())


def place_at(path: str, access: ServerAccess | None) -> SparkPlace:
    """The place that the options name; a task is told by the driver how to reach a server."""
    if access is not None:
        return server_place(access)
    url = stored_at(path)
    return FolderPlace(path) if url is None else StoredPlace(url)


def stored_at(path: str) -> str | None:
    """The URL of the store that the path names; None if it is a folder in its own right."""
    if is_store(path):
        return path
    disk = real_world().disk
    chained = any(disk.exists(f"{path}/{part}") for part in ("chain", "checkpoint"))
    return f"file://{quote(path)}" if chained and not disk.exists(f"{path}/{TOPICS}") else None


class FolderPlace:
    """A data folder."""

    def __init__(self, path: str, world: World | None = None) -> None:
        self._folder = DataFolder(path, world)
        self.path = self._folder.path

    def plan(self, asked: PlanRequest) -> ReadPlan:
        return plan(self._folder, asked, options_of(asked, _now_ms(self._folder.world)))

    def frames(self, wanted: Range, at: int) -> Iterator[Frame]:
        return self._folder.frames(wanted, at)

    def lease(self, group: str, ttl_ms: int) -> QueryLease:
        return QueryLease.start(self._folder.world, self.path, group, ttl_ms=ttl_ms, lasting=True)

    def pieces(self, table: str, options: Mapping[str, str]) -> list[Piece]:
        spec = table_named(table)
        asked = table_options(options, _now_ms(self._folder.world), timed=spec.timed)
        return list(spec.pieces(self._folder, asked.subscription, opened(self._folder, asked)))

    def rows(self, table: str, options: Mapping[str, str], piece: Piece) -> Iterator[Row]:
        asked = table_options(options, _now_ms(self._folder.world), timed=table_named(table).timed)
        for _, row in rows_of(table, self._folder, opened(self._folder, asked), piece):
            yield row


def check_place(path: str) -> None:
    """Raise if there is no data folder at the path: an error of load(), not of the first action."""
    url = stored_at(path)
    if url is None:
        DataFolder(path)
    elif not is_chain(parse_place(url)):
        raise NotAQueue(f'{shown_place(url)} holds no queue: option "path" names what open_broker was given')


class StoredRange(Range, frozen=True):
    """A range of a folder in a store as of a number of its chain, and the stream that reads it."""

    number: int
    stream: str | None = None


class StoredPiece(Piece, frozen=True):
    """A piece of a table of a folder in a store as of a number of its chain."""

    number: int = 0


class StoredPlace:
    """A folder in a store, read without its owner: the driver takes a snapshot, and the tasks read the same one.

    A snapshot has the names and the small files. Segments are fetched by those who read them. A stream takes one for
    each batch, and tells the owner by a note in the store what it has not read yet.
    """

    def __init__(self, url: str) -> None:
        self.path = url
        self._world, self._settings = real_world(), store_settings(None)
        self._stream: str | None = None
        self._taken: tuple[int, ChainSnapshot] | None = None

    def plan(self, asked: PlanRequest) -> ReadPlan:
        taken = self._snapshot(again=asked.step in ("batch", "unread", "initial"))
        found = FolderPlace(taken.folder, self._world).plan(asked)
        ranges: list[Range] = [
            StoredRange(each.topic, each.partition, each.start, each.stop, taken.number, self._stream)
            for each in found.ranges
        ]
        return msgspec.structs.replace(found, ranges=ranges)

    def frames(self, wanted: Range, at: int) -> Iterator[Frame]:
        assert isinstance(wanted, StoredRange)  # as planned above
        taken = snapshot(self.path, self._settings, self._world, wanted.number, wanted.stream)
        return FolderPlace(taken.folder, self._world).frames(wanted, at)

    def lease(self, group: str, ttl_ms: int) -> QueryLease:
        lease = StoredLease(self.path, group, ttl_ms)
        self._stream = lease.file.rpartition("@")[2].removesuffix(".json")
        return lease

    def pieces(self, table: str, options: Mapping[str, str]) -> list[Piece]:
        taken = self._snapshot(again=True)
        found = FolderPlace(taken.folder, self._world).pieces(table, options)
        return [StoredPiece(each.topic, each.partition, each.start, each.stop, taken.number) for each in found]

    def rows(self, table: str, options: Mapping[str, str], piece: Piece) -> Iterator[Row]:
        assert isinstance(piece, StoredPiece)  # as planned above
        taken = snapshot(self.path, self._settings, self._world, piece.number)
        return FolderPlace(taken.folder, self._world).rows(table, options, piece)

    def _snapshot(self, *, again: bool) -> ChainSnapshot:
        """The folder as it is now, or was a moment ago: a batch takes several steps, and an idle stream asks often."""
        now_ns = self._world.clock.monotonic_ns()
        if self._taken is None or again or now_ns - self._taken[0] > _FRESH_NS:
            self._taken = now_ns, snapshot(self.path, self._settings, self._world, stream=self._stream)
        return self._taken[1]


class StoredLease(QueryLease):
    """A query whose notes are in the store, where the owner of the folder looks for them."""

    def __init__(self, url: str, group: str, ttl_ms: int) -> None:
        super().__init__(real_world(), url, check_name(group, "group"), ttl_ms=ttl_ms, kind="spark", lasting=True)
        self._noted = StoredNote(*open_store(parse_place(url)), self.file)

    def put(self, content: bytes) -> None:
        self._noted.put(content)

    def take_away(self) -> None:
        self._noted.remove()


class TableRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a table: its pieces, or the rows of one of them."""

    table: str
    options: dict[str, str] = {}
    piece: Piece | None = None


class TablePage(msgspec.Struct, frozen=True, kw_only=True):
    """Pieces; or rows, each with its columns in order, and the piece to continue with if there are more."""

    pieces: list[Piece] = []
    rows: list[Any] = []
    following: Piece | None = None


class RowsCommitted(msgspec.Struct):
    """Whether this call stored the rows in the log; if not, they were there already."""

    fresh: bool


class ServerPlace:
    """A server. Connections are kept for the next task of the process."""

    def __init__(self, access: ServerAccess, caller: Caller | None = None) -> None:
        self.path = access.url
        self.caller = caller or _caller(access)

    def plan(self, asked: PlanRequest) -> ReadPlan:
        return self.plan_of(None, asked)

    def plan_of(self, topic: str | None, asked: PlanRequest) -> ReadPlan:
        """A step of planning, for a cluster in the shard of the topic that it is about."""
        asked = msgspec.structs.replace(asked, options=_sent(asked.options))
        path = path_of("spark", "plan", topic=topic)
        found: ReadPlan = self._call("POST", path, asked, ReadPlan, wait_s=_PLANNING_S)
        return found

    def frames(self, wanted: Range, at: int) -> Iterator[Frame]:
        where = ("topics", wanted.topic, "partitions", wanted.partition, "frames")
        while at < wanted.stop:
            path = path_of(*where, offset=at, stop=wanted.stop, bytes=_PAGE_BYTES)
            content: bytes = self._call("GET", path, None, bytes, wait_s=_PLANNING_S)
            if not content:
                return
            for frame in frames_in(memoryview(content), max_raw_bytes=MOST_RAW_BYTES):
                yield frame
                at = frame.next_offset

    def lease(self, group: str, ttl_ms: int) -> QueryLease:
        return ServerLease(self, group, ttl_ms)

    def pieces(self, table: str, options: Mapping[str, str]) -> list[Piece]:
        return self._table(None, TableRequest(table=table, options=_sent(options))).pieces

    def rows(self, table: str, options: Mapping[str, str], piece: Piece) -> Iterator[Row]:
        return self.rows_of(None, table, options, piece)

    def rows_of(self, topic: str | None, table: str, options: Mapping[str, str], piece: Piece) -> Iterator[Row]:
        """The rows of a piece of a table, page by page."""
        following: Piece | None = piece
        while following is not None:
            page = self._table(topic, TableRequest(table=table, options=_sent(options), piece=following))
            yield from page.rows
            following = page.following

    def describe(self, topic: str) -> TopicInfo | None:
        """What a topic is; None if it does not exist."""
        try:
            found: TopicInfo = self._call("GET", path_of("topics", topic), None, TopicInfo)
        except UnknownTopic:
            return None
        return found

    def files(self, world: World, write_id: str, batch: int, prefix: str) -> RowFiles:
        """Where a task puts its rows."""
        return FrameFiles(world, f"{write_id}/{batch}", prefix, UploadDisk(self))

    def commit(self, write: CommitRequest) -> bool:
        """Bring staged rows into the log. A write that is remembered may be repeated; any other is sent once."""
        return self.commit_of(None, write)

    def commit_of(self, topic: str | None, write: CommitRequest) -> bool:
        """Bring staged rows into the log, in a cluster those of one topic."""
        path = path_of("staged", topic=topic)
        done: RowsCommitted = self._call("POST", path, write, RowsCommitted, again=write.kept, wait_s=_COMMITTING_S)
        return done.fresh

    def remove(self, write_id: str, batch: int, files: Sequence[StagedFile], topic: str | None = None) -> None:
        """Remove staged files, unless their batch is committed."""
        for file in files:
            self._call("DELETE", path_of("staged", write_id, batch, file.name, topic=topic), None, None)

    def put_query(self, file: str, content: bytes, topic: str | None = None) -> None:
        """Put the file of a query in place."""
        ask = Ask(method="PUT", path=path_of("spark", "queries", file, topic=topic), body=content, media=JSON)
        run(self.caller.call(ask))

    def remove_query(self, file: str, topic: str | None = None) -> None:
        """Remove the file of a query."""
        self._call("DELETE", path_of("spark", "queries", file, topic=topic), None, None)

    def upload(self, path: str, position: int, content: bytes, *, sync: bool = False, topic: str | None = None) -> None:
        """Write bytes of a staged file, `WRITE/BATCH/NAME`, at their position."""
        where = path_of("staged", *path.split("/"), position=position, sync=sync or None, topic=topic)
        run(self.caller.call(Ask(method="POST", path=where, body=content, media=RAW, wait_s=_PLANNING_S)))

    def _table(self, topic: str | None, asked: TableRequest) -> TablePage:
        path = path_of("spark", "tables", topic=topic)
        found: TablePage = self._call("POST", path, asked, TablePage, wait_s=_PLANNING_S)
        return found

    def _call(self, method: str, path: str, body: Any, answers: Any, *, again: bool = True, wait_s: float = 0) -> Any:
        content = b"" if body is None else packed(body)
        return run(
            self.caller.call(Ask(method=method, path=path, body=content, answers=answers, again=again, wait_s=wait_s))
        )


class ServerLease(QueryLease):
    """A query whose file the server keeps."""

    def __init__(self, place: ServerPlace, group: str, ttl_ms: int) -> None:
        self._place = place
        super().__init__(
            real_world(), place.path, check_name(group, "group"), ttl_ms=ttl_ms, kind="spark", lasting=True
        )

    def put(self, content: bytes) -> None:
        try:
            self._place.put_query(self.file, content)
        except Unavailable as error:  # the query goes on, and tries again when the lease is renewed
            raise OSError(str(error)) from error

    def take_away(self) -> None:
        self._place.remove_query(self.file)


class UploadDisk:
    """Staged files on a server, for `FrameFiles`. A path is `WRITE/BATCH/NAME`.

    In a cluster they are of one `topic`, and each part is synced: another node may become the owner after any of them.
    """

    def __init__(self, place: ServerPlace, topic: str | None = None) -> None:
        self._place = place
        self._topic = topic

    def make_folder(self, path: str) -> None:
        """Nothing: the server makes it with the first bytes."""

    def sync_folder(self, path: str) -> None:
        """Nothing: the server does it when a file is synced."""

    def open(self, path: str, *, write: bool, create: bool) -> _Upload:
        return _Upload(self._place, path, self._topic)

    def remove(self, path: str) -> None:
        with suppress(Unavailable):  # it expires anyway
            self._place.remove(*_parts(path), topic=self._topic)


class _Upload:
    def __init__(self, place: ServerPlace, path: str, topic: str | None) -> None:
        self._place = place
        self._path = path
        self._topic = topic
        self._end = 0

    def write(self, position: int, parts: Sequence[BytesLike]) -> int:
        content = memoryview(b"".join(parts))
        for at in range(0, len(content), _UPLOAD_BYTES):
            part = bytes(content[at : at + _UPLOAD_BYTES])
            self._place.upload(self._path, position + at, part, sync=self._topic is not None, topic=self._topic)
        self._end = position + len(content)
        return len(content)

    def sync(self) -> None:
        if self._topic is None:
            self._place.upload(self._path, self._end, b"", sync=True)

    def close(self) -> None:
        """Nothing: it is open only while bytes are written."""


def _parts(path: str) -> tuple[str, int, list[StagedFile]]:
    write_id, batch, name = path.split("/")
    return write_id, int(batch), [StagedFile(name, 0, 0, ())]


# A cluster. Each topic is in one shard, which some node owns, so each call is about one topic: a plan for several is
# put together here, and what a task stages is a file for each topic, under a write of its own.

_SUBSCRIPTIONS: Final = frozenset({"topic", "subscribe", "subscribePattern", "assign"})
_BY_TOPIC: Final = (
    "startingOffsets", "endingOffsets", "startingOffsetsByTimestamp", "endingOffsetsByTimestamp"
)  # fmt: skip
_PAGE_TOPICS: Final = 1_000


class TopicPiece(Piece, frozen=True):
    """A piece of a table of a cluster, in the shard of the topic `of`."""

    of: str = ""


class ClusterPlace(ServerPlace):
    """The nodes of a cluster, any of which passes a call on to the one that owns the topic."""

    def plan(self, asked: PlanRequest) -> ReadPlan:
        asked = msgspec.structs.replace(asked, options={**asked.options, "path": self.path})
        options = options_of(asked, _now_ms(real_world()))
        topics = self._topics(options.subscription)
        for known in from_json(asked.start).topics if asked.start else ():
            if known not in topics:
                raise InvalidRequest(
                    f"the checkpoint is of topic {known}, and this query reads {', '.join(topics[:10]) or 'none'}: "
                    "give it a checkpoint of its own, or read what the checkpoint is of"
                )
        for name in _BY_TOPIC:
            unknown = sorted(_by_topic(asked.options.get(name, "")).keys() - set(topics))
            if unknown:
                raise UnknownTopic(f'option "{name}" names {", ".join(unknown)}, not among what is read')
        parts = {topic: _about(asked, options, topic, len(topics)) for topic in topics}
        found = {topic: self.plan_of(topic, part) for topic, part in parts.items()}
        if asked.step == "latest":
            found |= {topic: self.plan_of(topic, part) for topic, part in _shares(asked, options, parts, found).items()}
        return _together(found)

    def lease(self, group: str, ttl_ms: int) -> QueryLease:
        return ClusterLease(self, group, ttl_ms)

    def pieces(self, table: str, options: Mapping[str, str]) -> list[Piece]:
        asked = table_options(options, _now_ms(real_world()), timed=table_named(table).timed)
        found: list[Piece] = []
        for topic in self._topics(asked.subscription):
            about = _sent(_subscribed(options, topic))
            for each in self._table(topic, TableRequest(table=table, options=about)).pieces:
                found.append(TopicPiece(each.topic, each.partition, each.start, each.stop, topic))
        return found

    def rows(self, table: str, options: Mapping[str, str], piece: Piece) -> Iterator[Row]:
        assert isinstance(piece, TopicPiece)  # as planned above
        wanted = Piece(piece.topic, piece.partition, piece.start, piece.stop)
        return self.rows_of(piece.of, table, _subscribed(options, piece.of), wanted)

    def files(self, world: World, write_id: str, batch: int, prefix: str) -> RowFiles:
        return TopicFiles(
            lambda topic: FrameFiles(world, f"{_write_of(write_id, topic)}/{batch}", prefix, UploadDisk(self, topic))
        )

    def commit(self, write: CommitRequest) -> bool:
        fresh = False
        for topic, files in _files_by_topic(write.files):
            part = msgspec.structs.replace(write, write_id=_write_of(write.write_id, topic), files=files)
            fresh |= self.commit_of(topic, part)
        return fresh

    def remove(self, write_id: str, batch: int, files: Sequence[StagedFile], topic: str | None = None) -> None:
        if topic is not None:
            super().remove(write_id, batch, files, topic)
            return
        for each, some in _files_by_topic(files):
            super().remove(_write_of(write_id, each), batch, some, each)

    def _topics(self, subscription: Subscription) -> list[str]:
        """The topics of a subscription; those that are named are looked for by the calls about them."""
        if subscription.pattern is None:
            return list(subscription.names)
        pattern, found, after = Expression(subscription.pattern), list[str](), None
        while True:
            path = path_of("topics", limit=_PAGE_TOPICS, after=after)
            page: Topics = self._call("GET", path, None, Topics)
            found += [info.name for info in page.topics if pattern.matches(info.name)]
            if not page.more or not page.topics:
                return found
            after = page.topics[-1].name


class ClusterLease(ServerLease):
    """A query with a file for each of its topics, in the shard of the topic."""

    _noted: frozenset[str] = frozenset()

    def put(self, content: bytes) -> None:
        note = msgspec.json.decode(content, type=QueryNote)
        self._noted |= note.topics.keys()
        for topic, pins in note.topics.items():
            part = msgspec.structs.replace(note, topics={topic: pins})
            try:
                self._place.put_query(self._file_of(topic), msgspec.json.encode(part), topic)
            except Unavailable as error:
                raise OSError(str(error)) from error

    def take_away(self) -> None:
        for topic in self._noted:
            self._place.remove_query(self._file_of(topic), topic)

    def _file_of(self, topic: str) -> str:
        """Topics may be in the same shard, so each has a number of its own."""
        return f"{self.group}@{crc32(f'{self.file}/{topic}'.encode()):08x}.json"


class RowFiles(Protocol):
    """Where a task puts its rows: one file, or one for each topic."""

    def add(self, lane: SinkLane, body: Body) -> None: ...

    def finish(self) -> tuple[StagedFile, ...]: ...

    def discard(self) -> None: ...


class TopicFiles:
    """Files of the rows of a task, each with the rows of one topic."""

    def __init__(self, begin: Callable[[str], FrameFiles]) -> None:
        self._begin = begin
        self._files: dict[str, FrameFiles] = {}

    def add(self, lane: SinkLane, body: Body) -> None:
        if lane.topic not in self._files:
            self._files[lane.topic] = self._begin(lane.topic)
        self._files[lane.topic].add(lane, body)

    def finish(self) -> tuple[StagedFile, ...]:
        return tuple(staged for files in self._files.values() for staged in files.finish())

    def discard(self) -> None:
        for files in self._files.values():
            files.discard()


def _write_of(write_id: str, topic: str) -> str:
    """The write of one topic: topics of a shard must not take each other's batches for their own."""
    return f"{write_id}.{crc32(topic.encode()):08x}"


def _files_by_topic(files: Sequence[StagedFile]) -> Iterator[tuple[str, tuple[StagedFile, ...]]]:
    found: dict[str, list[StagedFile]] = {}
    for file in files:
        found.setdefault(file.lanes[0][0].topic, []).append(file)
    for topic, some in sorted(found.items()):
        yield topic, tuple(some)


def _subscribed(options: Mapping[str, str], topic: str) -> dict[str, str]:
    return {**{name: text for name, text in options.items() if name not in _SUBSCRIPTIONS}, "subscribe": topic}


def _by_topic(text: str) -> dict[str, Any]:
    """What an option says of each topic; nothing if it is a word for all of them."""
    with suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    return {}


def _about(asked: PlanRequest, options: ReadOptions, topic: str, count: int) -> PlanRequest:
    """The part of a request that is about one of so many topics."""
    part = _subscribed(asked.options, topic)
    partitions = options.subscription.partitions
    if partitions is not None:
        del part["subscribe"]
        part["assign"] = json.dumps({topic: list(partitions[topic])})
    for name in _BY_TOPIC:
        if _by_topic(part.get(name, "")):
            part[name] = json.dumps({topic: _by_topic(part[name]).get(topic, {})})
    if options.min_partitions:
        part["minPartitions"] = str(-(-options.min_partitions // count))
    ends = {name: _only(getattr(asked, name), topic) for name in ("start", "end", "until")}
    return msgspec.structs.replace(asked, options=part, **ends)


def _only(positions: dict[str, Any] | None, topic: str) -> dict[str, Any] | None:
    if not positions:
        return positions
    return {**positions, "topics": {name: at for name, at in positions.get("topics", {}).items() if name == topic}}


def _shares(
    asked: PlanRequest, options: ReadOptions, parts: Mapping[str, PlanRequest], found: Mapping[str, ReadPlan]
) -> dict[str, PlanRequest]:
    """What to ask again, so that all topics together keep to the limits of a batch: each gets its share."""
    start = from_json(asked.start) if asked.start else Positions()
    sizes = {topic: sum(_beyond(start, plan)) for topic, plan in found.items() if topic in start.topics}
    busy = {topic: size for topic, size in sizes.items() if size}
    total = sum(busy.values())
    most, most_bytes = asked.most, options.max_bytes
    if len(busy) < 2 or (most_bytes is None and (most is None or total <= most)):
        return {}
    again = {}
    for topic, size in busy.items():
        part = parts[topic]
        given = dict(part.options)
        if most_bytes is not None:
            given["maxBytesPerTrigger"] = str(max(1, most_bytes // len(busy)))
        share = part.most if most is None or total <= most else max(1, size * most // total)
        again[topic] = msgspec.structs.replace(part, options=given, most=share)
    return again


def _beyond(start: Positions, plan: ReadPlan) -> Iterator[int]:
    for topic, number, position in from_json(plan.positions or {}).places():
        known = start.at(topic, number)
        yield position.offset - (0 if known is None else known.offset)


def _together(found: Mapping[str, ReadPlan]) -> ReadPlan:
    positions = [from_json(plan.positions) for plan in found.values() if plan.positions is not None]
    topics = {topic: known for each in positions for topic, known in each.topics.items()}
    return ReadPlan(
        positions=to_json(Positions(topics)) if positions or not found else None,
        ranges=[wanted for plan in found.values() for wanted in plan.ranges],
        pins={topic: pins for plan in found.values() for topic, pins in plan.pins.items()},
        lost=[each for plan in found.values() for each in plan.lost],
    )


@lru_cache(maxsize=16)
def server_place(access: ServerAccess) -> ServerPlace:
    """The server, or the cluster, that answers there."""
    place = ServerPlace(access)
    try:
        run(place.caller.call(Ask(method="GET", path=path_of("cluster"), answers=Any)))
    except NotFound:
        return place
    except Forbidden:  # it is there
        pass
    return ClusterPlace(access)


def _sent(options: Mapping[str, str]) -> dict[str, str]:
    """The options for the server, which knows where it is."""
    return {name: value for name, value in options.items() if name.lower() not in _OURS}


def _now_ms(world: World) -> int:
    return world.clock.now_ns() // 1_000_000


@lru_cache(maxsize=16)
def _caller(access: ServerAccess) -> Caller:
    world, address = real_world(), parse_address(access.url)
    tls = context_of(None, dict(access.tls)) if address.secure else None
    return Caller(world, ThreadNetwork(world.clock), address, token=access.token, tls=tls)
