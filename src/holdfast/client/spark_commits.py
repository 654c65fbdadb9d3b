"""What a server, or the owner of a shared folder, does for Spark: plans, queries, tables, and rows that were staged.

Driver and tasks have no disk in common with the server. They ask it what to read and fetch frames as they are stored
(`GET /v1/topics/{topic}/partitions/{partition}/frames`); they upload rows as files of frames, and one call commits
them. Files that are never committed are removed after a week, as in a folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import msgspec

from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.layout import QUERIES, check_name, names_in
from holdfast.broker.messages import CORRELATION_ID, DEDUP_ID, PREFIX, TEXT_HEADERS, TEXT_KEY, TOMBSTONE
from holdfast.broker.streams.queries import QUERY_FILE, QueryNote, put_query
from holdfast.client.calling import Ask, Caller, packed, path_of
from holdfast.client.network import ThreadNetwork, run
from holdfast.client.opening import Address
from holdfast.client.shared_folder import socket_of
from holdfast.codec.frame import Frame, Kind
from holdfast.env import World
from holdfast.env.disk import write_fully
from holdfast.env.sockets import absolute, answers_at
from holdfast.errors import Conflict, CorruptData, InvalidRequest, MessageTooLarge, TooManyWaiters
from holdfast.model import Record
from holdfast.protocol.media import RAW
from holdfast.protocol.messages import Number, Wire
from holdfast.server.limits import check_partitions
from holdfast.server.routing import Routes
from holdfast.server.service import Call, Service, not_understood
from holdfast.server.turns import Scan
from holdfast.settings import TopicSettings
from holdfast.spark.commits import STAGED_NAME, CommitManifest, CommitRequest, Staging, commit
from holdfast.spark.options import Subscription, table_options
from holdfast.spark.places import RowsCommitted, TablePage, TableRequest
from holdfast.spark.ranges import DataFolder, PlanRequest, ReadPlan, options_of, plan
from holdfast.spark.rows import opened, rows_of, table_named
from holdfast.storage.files import join, translated

_LONGEST_S: Final = 24 * 3600.0
_MOST_WRITE_CHARS: Final = 150  # leaves room for the caller's name
_MOST_BATCH: Final = 2**31 - 2
_PAGE_ROWS: Final = 4_096
_PAGE_BYTES: Final = 8 << 20
_FLAGS: Final = TOMBSTONE | TEXT_KEY | TEXT_HEADERS
_MARKS: Final = frozenset({CORRELATION_ID, DEDUP_ID})

routes = Routes("spark")


class OfTopic(Wire, kw_only=True):
    """The topic that the call is about, which tells a cluster where it belongs; a single server needs none."""

    topic: str = ""


_turns: Final[WeakKeyDictionary[BrokerEngine, asyncio.Lock]] = WeakKeyDictionary()
_committing: Final[set[tuple[str, int]]] = set()  # batches whose files must not change any more
_folders: Final[WeakKeyDictionary[Service, list[DataFolder]]] = WeakKeyDictionary()


# Reading: the driver's questions, answered from the files as beside any owner, and the tables.


@contextmanager
def _folder(call: Call) -> Iterator[DataFolder]:
    """The folder with the topics that the caller may read. One is kept for each scan that runs: it knows its logs."""
    resting = _folders.setdefault(call.service, [])
    engine = call.service.engine
    folder = resting.pop() if resting else DataFolder(engine.folder, engine.world)
    folder.sees = call.principal.sees
    try:
        yield folder
    finally:
        resting.append(folder)


def _check_named(call: Call, subscription: Subscription) -> None:
    for name in subscription.names:
        call.principal.check("read", name)


_scan: Final = partial(routes.add, "POST", action="read", scope="any", query=OfTopic)


@_scan("/v1/spark/plan", body=PlanRequest, errors=("offset_out_of_range", "tail_lost", "too_many_waiters"))
async def plan_read(call: Call) -> ReadPlan:
    """Plan a step of a read by Spark: what to read, how far a stream may go, and what it still needs."""
    return await call.scan(_plan, call)


def _plan(scan: Scan, call: Call) -> ReadPlan:
    asked: PlanRequest = call.body
    now_ms = call.service.world.clock.now_ns() // 1_000_000
    here = {**asked.options, "path": call.service.engine.folder}
    with _folder(call) as folder:
        options = options_of(msgspec.structs.replace(asked, options=here), now_ms)
        _check_named(call, options.subscription)
        return plan(folder, asked, options)


@_scan("/v1/spark/tables", body=TableRequest, errors=("too_many_waiters",))
async def read_table(call: Call) -> TablePage:
    """Return the pieces of a table, such as dead letters or groups; or rows of a piece, and where to continue."""
    return await call.scan(_table, call)


def _table(scan: Scan, call: Call) -> TablePage:
    asked: TableRequest = call.body
    spec, principal = table_named(asked.table), call.principal
    now_ms = call.service.world.clock.now_ns() // 1_000_000
    options = table_options({**asked.options, "path": call.service.engine.folder}, now_ms, timed=spec.timed)
    _check_named(call, options.subscription)
    with _folder(call) as folder:
        wanted = opened(folder, options)
        if not (principal.topics.everything and principal.groups.everything):
            topics = frozenset(folder.topics(options.subscription))
            wanted = msgspec.structs.replace(wanted, topics=topics, shows=principal.may_use)
        if asked.piece is None:
            return TablePage(pieces=list(spec.pieces(folder, options.subscription, wanted)))
        if asked.piece not in _begun(asked, spec.pieces(folder, options.subscription, wanted)):
            raise InvalidRequest(f"{asked.piece} is not a piece of table {spec.name}: ask for its pieces first")
        rows: list[Any] = []
        size = 0
        for at, row in rows_of(spec.name, folder, wanted, asked.piece):
            scan.step()
            rows.append(row)
            size += sum(len(item) for item in row if isinstance(item, bytes))
            if len(rows) >= _PAGE_ROWS or size >= _PAGE_BYTES:
                return TablePage(rows=rows, following=msgspec.structs.replace(asked.piece, start=at))
        return TablePage(rows=rows)


def _begun(asked: TableRequest, pieces: Iterator[Any]) -> Iterator[Any]:
    """The pieces that the caller may go on with: those that there are, whatever was read or trimmed of them."""
    piece = asked.piece
    for each in pieces:
        if piece is not None and (each.topic, each.partition) == (piece.topic, piece.partition):
            yield piece


async def _may_hold(call: Call) -> None:
    note: QueryNote = call.body
    call.principal.check_group(note.group)
    for topic in note.topics:
        call.principal.check("consume", topic)


_query: Final = partial(
    routes.add, pattern="/v1/spark/queries/{file}", action="consume", scope="any", status=204, query=OfTopic
)


@_query("PUT", allowed=_may_hold, body=QueryNote, errors=("too_many_waiters",))
async def hold_query(call: Call) -> None:
    """Protect what a query has not read from retention, for as long as this is renewed in time."""
    note: QueryNote = call.body
    file = _query_file(call, note.group)
    engine = call.service.engine

    def hold() -> None:
        with suppress(FileNotFoundError):
            names = names_in(engine.world, join(engine.folder, QUERIES))
            if file not in names and len(names) >= call.service.settings.max_groups:
                raise TooManyWaiters(
                    f"{len(names)} queries run, which is the limit (max_groups): end some, or raise it"
                )
        put_query(engine.world.disk, engine.folder, file, msgspec.json.encode(note))

    await asyncio.to_thread(hold)


@_query("DELETE")
async def end_query(call: Call) -> None:
    """Forget a query: retention no longer keeps anything for it."""
    file = _query_file(call, None)
    engine = call.service.engine

    def end() -> None:
        with suppress(FileNotFoundError):
            engine.world.disk.remove(join(join(engine.folder, QUERIES), file))

    await asyncio.to_thread(end)


def _query_file(call: Call, group: str | None) -> str:
    file = call.path["file"]
    found = QUERY_FILE.fullmatch(file)
    if found is None or found[1] != (group or found[1]):
        raise InvalidRequest(f"{file!r} is not a file of the query's group: name it GROUP@01234567.json")
    call.principal.check_group(check_name(found[1], "group"))
    return file


# Writing: files of frames, and the commit that brings them into the log.


class StagePart(OfTopic, kw_only=True):
    """Where the bytes go in the file, and whether to sync the file afterwards."""

    position: Number = 0
    sync: bool = False


def _write(call: Call, write_id: str) -> str:
    """The write's name in the folder. A caller's writes are its own: nobody else can change, end or number them.

    Whoever administers everything writes under the plain name, as Spark does in the folder itself.
    """
    if call.principal.may("admin"):
        return check_name(write_id, "write")
    return f"{check_name(write_id, 'write', _MOST_WRITE_CHARS)}+{call.principal.name}"  # no name has a "+"


def _stage(call: Call) -> tuple[str, int, str]:
    """The write, the batch and the file that the path names, checked."""
    write_id, batch, file = _write(call, call.path["write"]), call.path["batch"], call.path["file"]
    if not (batch.isascii() and batch.isdigit() and len(batch) <= 10 and int(batch) <= _MOST_BATCH):
        raise InvalidRequest(f"{batch!r} is not a batch number: give a whole number, 0 or more")
    if STAGED_NAME.fullmatch(file) is None:
        raise InvalidRequest(f"{file!r} is not the name of a staged file")
    return write_id, int(batch), file


_staged: Final = partial(
    routes.add, pattern="/v1/staged/{write}/{batch}/{file}", action="publish", scope="any", status=204
)


@_staged("POST", query=StagePart, takes=(RAW,), errors=("conflict", "disk_full"))
async def upload_stage(call: Call) -> None:
    """Store bytes of a staged file at their position; repeating it changes nothing. Readers do not see them yet."""
    write_id, batch, file = _stage(call)
    query: StagePart = call.query
    if call.request.media not in (RAW, ""):
        raise not_understood(call.request.media, RAW, RAW)
    settings = call.service.settings
    content = await call.request.read(settings.max_request_bytes, settings.max_unpack_ratio)
    await asyncio.to_thread(_store, call.service.engine, (write_id, batch), file, query, content)


def _store(engine: BrokerEngine, place: tuple[str, int], file: str, part: StagePart, content: bytes) -> None:
    staging, disk = Staging(engine.world, engine.folder), engine.world.disk
    manifest = staging.manifest(*place)
    # A batch whose commit was interrupted comes again in files of other names, and its commit finishes the first.
    if place in _committing or (manifest is not None and file in {each.name for each in manifest.files}):
        raise Conflict(f"batch {place[1]} of write {place[0]} is committed: its files can no longer change")
    folder = staging.batch_folder(*place)
    with translated(folder):
        disk.make_folder(folder)
        with closing(disk.open(join(folder, file), write=True, create=True)) as opened_file:
            size = opened_file.size()
            if part.position > size:
                raise Conflict(
                    f"{file} has {size} bytes, and these go to {part.position}: the bytes in between are missing"
                )
            if content:
                write_fully(opened_file, part.position, [content])
            if part.sync:
                opened_file.sync()
        if part.sync:
            disk.sync_folder(folder)


@_staged("DELETE", query=OfTopic)
async def remove_stage(call: Call) -> None:
    """Remove a staged file, unless its batch is committed."""
    write_id, batch, file = _stage(call)
    engine = call.service.engine
    if (write_id, batch) not in _committing:
        await asyncio.to_thread(Staging(engine.world, engine.folder).remove, write_id, batch, [file])


async def _may_commit(call: Call) -> None:
    write: CommitRequest = call.body
    if not 0 <= write.batch <= _MOST_BATCH or not all(STAGED_NAME.fullmatch(file.name) for file in write.files):
        raise InvalidRequest("the batch has no such number, or its files have no such names")
    catalog = call.service.engine.catalog
    for topic in sorted({lane.topic for file in write.files for lane, _ in file.lanes}):
        call.principal.check("publish", topic)
        if write.new_partitions is not None and topic not in catalog:
            call.principal.check("admin", topic)
            check_partitions(write.new_partitions, 0, call.service.settings.max_partitions)


_COMMIT: Final[dict[str, Any]] = {
    "query": OfTopic, "body": CommitRequest, "answers": RowsCommitted, "allowed": _may_commit
}  # fmt: skip


@routes.add("POST", "/v1/staged", action="publish", scope="any", **_COMMIT, errors=("message_too_large", "disk_full"))
async def commit_staged(call: Call) -> RowsCommitted:
    """Commit staged rows to the log, all or none. Committing the same batch again changes nothing."""
    engine = call.service.engine
    write = msgspec.structs.replace(call.body, write_id=_write(call, call.body.write_id))
    place = (write.write_id, write.batch)
    async with _turns.setdefault(engine, asyncio.Lock()):
        _committing.add(place)
        try:
            # Whoever administers everything could write the files themselves.
            if not call.principal.may("admin"):
                try:
                    await call.scan(_check_frames, engine, write)
                except CorruptData as error:  # not of ours
                    raise InvalidRequest(f"{error}. Nothing was written") from None
            return RowsCommitted(fresh=await asyncio.to_thread(commit, engine, write))
        finally:
            _committing.discard(place)


def _check_frames(scan: Scan, engine: BrokerEngine, write: CommitRequest) -> None:
    """Raise InvalidRequest, MessageTooLarge or CorruptData if rows are not what a producer could have sent."""
    staging = Staging(engine.world, engine.folder)
    manifest = CommitManifest(write_id=write.write_id, batch=write.batch, kept=write.kept, lanes=(), files=write.files)
    if staging.done(write.write_id).batch >= write.batch:
        return
    staging.check_there(write.write_id, write.batch, write.files)
    for staged in write.files:
        rows = dict.fromkeys((lane for lane, _ in staged.lanes), 0)
        for lane, frame, _ in staging.frames(manifest, staged):
            scan.step()
            settings = TopicSettings()
            if lane.topic in engine.catalog:
                with engine.using(lane.topic) as topic:
                    settings = topic.settings
            _check_frame(frame, lane.topic, settings)
            rows[lane] += frame.count
        if rows != dict(staged.lanes):
            raise CorruptData(
                f"{staged.name} does not have the rows that were announced; nothing was written. Run the batch again"
            )


def _check_frame(frame: Frame, topic: str, settings: TopicSettings) -> None:
    if frame.header.kind != Kind.DATA or frame.is_sparse or frame.header.raw_bytes > settings.max_raw_bytes:
        raise InvalidRequest(f"a staged frame for topic {topic} is not a frame of new messages; nothing was written")
    for record in frame.records():
        size = _size(record)
        if size > settings.max_message_bytes:
            raise MessageTooLarge(
                f"a row has {size} bytes with key and headers, the limit of topic {topic} is "
                f"{settings.max_message_bytes}; nothing was written"
            )
        ours = {name for name, _ in record.headers if name.startswith(PREFIX)} - _MARKS
        if ours or record.priority > 9 or record.flags & ~_FLAGS:
            raise InvalidRequest(f"a row for topic {topic} has reserved headers or flags; nothing was written")


def _size(record: Record) -> int:
    headers = sum(len(name) + len(value) for name, value in record.headers)
    return len(record.value) + len(record.key or b"") + headers


# The sink of a folder that another process owns and shares.


def is_shared(folder: str) -> bool:
    """Return whether a process owns the folder and shares it."""
    return answers_at(socket_of(absolute(folder)))


def commit_there(world: World, folder: str, write: CommitRequest) -> bool:
    """Have the owner do it. A write that is remembered may be repeated; any other is sent once."""
    address = Address(text=folder, socket=socket_of(absolute(folder)))
    caller = Caller(world, ThreadNetwork(world.clock), address)
    ask = Ask(
        method="POST",
        path=path_of("staged"),
        body=packed(write),
        answers=RowsCommitted,
        again=write.kept,
        wait_s=_LONGEST_S,
    )
    try:
        done: RowsCommitted = run(caller.call(ask))
    finally:
        caller.close()
    return done.fresh
