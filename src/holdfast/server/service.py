"""What handlers share: the service they belong to, and what each knows of the call it answers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast
from urllib.parse import parse_qsl

import msgspec

from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.layout import DEFAULT_GROUP
from holdfast.broker.topic import Topic
from holdfast.config.settings_file import Effective
from holdfast.env import World
from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.local.aio.broker import (
    AsyncLocalBrokerPort,
    AsyncLocalLocksPort,
    AsyncLocalSchedulesPort,
    AsyncLocalSchemasPort,
    AsyncLocalTransactionsPort,
)
from holdfast.protocol.media import JSON, MSGPACK, SMALL_BYTES, UNSAID, check_values, decoder, encode
from holdfast.protocol.schemas import REGISTRY, REGISTRY_JSON
from holdfast.server.http.messages import ANSWER_BYTES, Refused, Request, Response
from holdfast.server.limits import ANSWERS_EACH, BODIES_EACH, Room, check_new_group
from holdfast.server.members import ServedMembers
from holdfast.server.routing import Route
from holdfast.server.served import ServedGroup, ServedPublishing
from holdfast.server.tokens import Principal
from holdfast.server.turns import Job, Pool, Scans
from holdfast.server.waiting import Attempts, WaitLimit, Windows
from holdfast.settings import ServerSettings

if TYPE_CHECKING:
    from holdfast.broker.tracing import TraceContext
    from holdfast.env.chain.chain import Chain
    from holdfast.protocol.cluster import TopicMoved
    from holdfast.server.audit import Act


_Found = TypeVar("_Found")


class TopicMover(Protocol):
    """Moves topics to a shard of a cluster."""

    shard: int

    async def move(self, topic: str, wait_s: float, *, only_new: bool = False) -> TopicMoved:
        """Bring a topic here, or go on doing so; with `only_new`, put a name here that no topic has yet."""


class Service:
    """State of one served data folder."""

    def __init__(self, world: World, port: AsyncLocalBrokerPort, settings: ServerSettings) -> None:
        self.world = world
        self.port = port
        self.engine: BrokerEngine = port.engine
        self.settings = settings
        self.waits = WaitLimit(settings.max_waiters, settings.max_waiters_per_principal)
        self.windows = Windows()
        self.attempts = Attempts()
        self.scans = Scans(settings.scan_workers, settings.scan_messages)
        self.locks: AsyncLocalLocksPort = self.port.locks()
        self.schedules: AsyncLocalSchedulesPort = self.port.schedules()
        self.schemas: AsyncLocalSchemasPort = self.port.schemas()
        self.transactions: AsyncLocalTransactionsPort = self.port.transactions()
        self.members = ServedMembers(self.engine)
        self.pool = Pool()
        self.room = Room(BODIES_EACH * settings.max_request_bytes)
        self.answers = Room(ANSWERS_EACH * 2 * ANSWER_BYTES)
        self.publishing = ServedPublishing(self.port, self.pool)
        self.leaving = False
        self.mover: TopicMover | None = None  # moves topics here from other shards, if there are any
        self.is_shard = False  # whether others have the rest: then what is not here may be there
        self.began_ns = world.clock.now_ns()
        self.began_monotonic_ns = world.clock.monotonic_ns()
        self.connections: Callable[[], int] = int  # their number; set by the server
        self.tokens_problem: Callable[[], str] = str  # why the tokens file cannot be used; set by the server
        self.effective: Effective | None = None  # the settings with their origins, if known
        self._waiting: set[asyncio.Task[Any]] = set()
        self._groups: OrderedDict[tuple[str, str], ServedGroup] = OrderedDict()

    @property
    def folder(self) -> str:
        return self.port.place

    def known_group(self, topic: str, name: str) -> ServedGroup | None:
        """The group if it is open, else None."""
        group = self._groups.get((topic, name))
        if group is not None:
            if group.port.closed:
                del self._groups[topic, name]
                return None
            self._groups.move_to_end((topic, name))
        return group

    def groups(self) -> list[ServedGroup]:
        """All open groups."""
        return [group for group in self._groups.values() if not group.closed]

    async def group(self, topic: str, name: str | None = None) -> ServedGroup:
        """The queue group; created if there is none."""
        name = name or DEFAULT_GROUP
        group = self.known_group(topic, name)
        if group is None:
            group = await self.port.served_group(ServedGroup, topic, name, check=self.check_group)
            raced = self.known_group(topic, name)
            if raced is not None:
                await group.close()
                return raced
            self._groups[topic, name] = group
            await self._close_idle_groups()
        return group

    def check_group(self, engine: BrokerEngine, topic: Topic, name: str) -> None:
        """Refuse a group beyond the limit. Runs on the topic's own thread, where groups are created one by one."""
        check_new_group(engine, topic, name, self.settings.max_groups)

    async def _close_idle_groups(self) -> None:
        """Close the least recently used groups that nobody waits for, so that their topics can be closed."""
        parts = {place: len(group.deliveries) for place, group in self._groups.items()}
        extra = sum(parts.values()) - self.port.settings.open_partitions
        for place, group in list(self._groups.items())[:-1]:  # the last group is about to be used
            if extra <= 0:
                return
            if not group.queue_group.waiters.standing and not self.windows.of(group) and place in self._groups:
                extra -= parts[place]
                del self._groups[place]
                await group.close()

    async def wait(self, call: Call, waiting: Awaitable[_Found], nothing: _Found) -> _Found:
        """Wait for `waiting`. Returns `nothing` when the server stops; raises when the caller's token is revoked.

        The caller of this method must confirm the principal before it hands out the result, and give back messages if
        that fails.
        """
        if self.leaving:  # since the call began
            if isinstance(waiting, Coroutine):
                waiting.close()
            return nothing
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            return await waiting
        except asyncio.CancelledError:
            ended = call.why_ended()
            if ended is not None:
                raise ended from None
            if task in self._waiting:
                raise  # the client disconnected
            task.uncancel()
            return nothing
        finally:
            self._waiting.discard(task)

    def leave(self) -> None:
        """The server is stopping: end all calls that wait for messages."""
        self.leaving = True
        waiting = list(self._waiting)
        self._waiting.clear()
        for task in waiting:
            task.cancel()


_Value = TypeVar("_Value")

_VALUES: Final = frozenset({JSON, MSGPACK, *UNSAID})
# Clients repeat the same query string in call after call, so decoded ones are cached. They are never changed.
_KEPT_QUERIES: Final = 256
_KEPT_QUERY_CHARS: Final = 200


class Call:
    """One call, as handlers get it: the request, its caller, and its decoded query and body."""

    __slots__ = (
        "act",
        "body",
        "confirm",
        "correlation_id",
        "count",
        "ended",
        "error",
        "path",
        "principal",
        "query",
        "request",
        "room",
        "route",
        "service",
        "target",
        "task",
        "trace",
        "write_down",
    )

    def __init__(
        self, service: Service, request: Request, route: Route, path: dict[str, str], correlation_id: str
    ) -> None:
        self.service = service
        self.request = request
        self.route = route
        self.path = path
        self.correlation_id = correlation_id
        self.principal: Principal = None  # type: ignore[assignment]  # set before any handler runs
        self.trace: TraceContext | None = None
        self.write_down: Callable[[Call], Awaitable[None]] | None = None  # writes an act to the audit log
        self.confirm: Callable[[], None] = _nobody  # raises if the token was revoked
        self.query: Any = None
        self.body: Any = None
        self.target = ""  # the name of what an act affected, for the audit log, if the path does not say it
        self.count: int | None = None  # the number of messages, or other things, that an act affected
        self.error: HoldfastError | None = None  # an error after the answer had begun
        self.act: Act | None = None  # the act as it was written to the audit log before it started
        self.room = 0  # bytes of memory taken for its body
        self.task: asyncio.Task[Any] | None = None  # the task that answers the call, if it may be ended early
        self.ended: HoldfastError | None = None  # why it was ended early

    def end(self, why: HoldfastError) -> None:
        """End the call early, because its caller is no longer allowed to make it."""
        if self.ended is None and self.task is not None:
            self.ended = why
            self.task.cancel()

    def why_ended(self) -> HoldfastError | None:
        """The error for a call that was ended early; None if its client disconnected, or the server is stopping."""
        if self.ended is not None and self.task is not None and self.task.cancelling():
            self.task.uncancel()
        return self.ended

    async def begin_act(self) -> None:
        """Write an act to the audit log before it starts. Handlers of routes with `looks_first` call this."""
        if self.write_down is not None:
            await self.write_down(self)

    async def ask_room(self, size: int) -> None:
        """Wait, once for each call, until `size` bytes may be in memory. They are given back when the call ends."""
        if not self.room:
            self.room = await self.service.room.take(self.principal.name, size)

    @contextmanager
    def large_answer(self) -> Iterator[bool]:
        """Reserve memory for a large answer. Yields whether there is enough; if not, the answer must be small."""
        answers, caller = self.service.answers, self.principal.name
        known = self.principal.entry is not None
        taken = answers.try_take(caller, 2 * ANSWER_BYTES, always=not known)
        try:
            yield taken is not None
        finally:
            if taken is not None:
                answers.give_back(caller, taken)

    async def scan(self, work: Callable[..., _Found], *arguments: Any) -> _Found:
        """Call `work(scan, ...)`, which searches many messages, on a thread when it is the caller's turn."""
        return await self.service.scans.run(self.principal.name, work, *arguments)

    @property
    def media(self) -> str:
        """The media type that the caller accepts."""
        return MSGPACK if MSGPACK in self.request.headers.get("accept", "") else JSON

    def answer(self, value: object, *, status: int | None = None, **more: Any) -> Response:
        """An answer with an encoded value."""
        media = media_for(self.request)
        return Response(status or self.route.status, encode(value, media), media, **more)

    def encoded(self, value: _Value) -> _Value:
        """A part of a long answer, encoded in advance, to be used in the answer in place of the value.

        The encoder holds the interpreter lock during one call, so long answers are encoded in parts, on a thread.
        """
        return cast(_Value, msgspec.Raw(encode(value, self.media)))

    async def decode(self) -> None:
        """Decode the query and the body. Raises InvalidRequest if they do not match the route's structs."""
        route, request = self.route, self.request
        if route.query is not None:
            read = _query if len(request.query) > _KEPT_QUERY_CHARS else _known_query
            self.query = read(request.query, route.query)
        elif request.query:
            raise InvalidRequest(f"{route.pattern} takes no query parameters: remove everything after the '?'")
        if route.body is not None:
            settings = self.service.settings
            content = await request.read(settings.max_request_bytes, settings.max_unpack_ratio)
            media = JSON if request.media.startswith("application/vnd.schemaregistry") else request.media
            if len(content) <= SMALL_BYTES:
                self.body = decode_body(content, media, route.body)
            else:
                self.body = await self.service.pool.run(_large_body, content, media, route.body)


def media_for(request: Request) -> str:
    """The media type of an answer: clients of schema registries have one of their own for JSON."""
    accept = request.headers.get("accept", "")
    if MSGPACK in accept:
        return MSGPACK
    return REGISTRY_JSON if request.path.startswith(REGISTRY) and "vnd.schemaregistry" in accept else JSON


def check_right(principal: Principal, route: Route, path: Mapping[str, str]) -> None:
    """Raise Forbidden unless the caller may do this to what the path names."""
    if route.named is not None:
        principal.check(route.action, path[route.named])
    elif route.scope == "any":
        if not (route.instead and (principal.may_any("consume") or principal.may_any("publish"))):
            principal.check_any(route.action)
    else:
        principal.check(route.action)
    if route.also is not None:
        principal.check_any(route.also)


def check_group(principal: Principal, *given: Any) -> None:
    """Check that the token allows the queue group that the query or the body of a call names."""
    for each in given:
        principal.check_queue_group(getattr(each, "group", None))


def partition_of(path: Mapping[str, str]) -> int:
    """The partition number in a path."""
    text = path["partition"]
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise InvalidRequest(f"{text!r} is not a partition number: give 0 or more")
    return int(text)


def _nobody() -> None:
    """There is no token to check."""


def not_understood(media: str, *known: str) -> Refused:
    """The error for a body with an unknown content type."""
    return Refused(
        f"the content-type {media} is not supported here; send {', '.join(known[:-1])} or {known[-1]}, "
        f"such as with curl -H 'content-type: {known[0]}'",
        status=415,
    )


def _large_body(_: Job, content: bytes, media: str, kind: Any) -> Any:
    try:
        check_values(content, media)
    except InvalidRequest as error:
        raise InvalidRequest(f"the request's body is not valid: {error}") from None
    return decode_body(content, media, kind)


def decode_body(content: bytes, media: str, kind: Any) -> Any:
    """Decode the body of a request. Raises InvalidRequest if it does not match the struct."""
    return body_decoder(media, kind)(content)


def body_decoder(media: str, kind: Any) -> Callable[[bytes], Any]:
    """What decodes bodies of this media type, as `decode_body` does."""
    found = decoder(media, kind) if media in _VALUES else None

    def decoded(content: bytes) -> Any:
        if found is None and content:
            raise not_understood(media, JSON, MSGPACK)
        try:
            return found(content) if found is not None and content else msgspec.convert({}, kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            what = "the request's body" if content else "the request has no body; it"
            raise InvalidRequest(f"{what} does not fit: {error}") from None

    return decoded


def _pairs(text: str) -> list[tuple[str, str]]:
    if not text:
        return []
    if "%" not in text and "+" not in text:  # no escapes: takes a third of the time
        parts = [part.partition("=") for part in text.split("&")]
        if all(equals for _, equals, _ in parts):
            return [(name, value) for name, _, value in parts]
    try:
        return parse_qsl(text, keep_blank_values=True, strict_parsing=True, errors="strict")
    except ValueError as error:
        raise InvalidRequest(f"the query parameters (after the '?') cannot be read: {error}") from None


def _query(text: str, kind: Any) -> Any:
    found: dict[str, Any] = {}
    for name, value in _pairs(text):
        if name == "header":  # the only parameter that may be repeated
            found.setdefault(name, []).append(value)
        elif name in found:
            raise InvalidRequest(f"{name} is given twice in the query: give it once")
        else:
            found[name] = value
    try:
        given = msgspec.convert(found, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the query parameters (after the '?') are not valid: {error}") from None
    for name in found:
        if getattr(given, name, ...) is None:  # msgspec has converted the text "null" to None
            raise InvalidRequest(f"{name} cannot be null as a query parameter; leave it out instead")
    return given


_known_query: Final = lru_cache(maxsize=_KEPT_QUERIES)(_query)


def lost_folder(store: Chain | None) -> asyncio.Future[str]:
    """Return a future of why another process has taken over the folder in a store; otherwise it is never done.

    A server that went on would refuse every call, and keep others of this machine from standing by in its place.
    """
    loop = asyncio.get_running_loop()
    lost: asyncio.Future[str] = loop.create_future()

    def told() -> None:
        loop.call_soon_threadsafe(tell)

    def tell() -> None:
        if store is not None and store.failure is not None and not lost.done():
            lost.set_result(str(store.failure.strerror))

    if store is not None:
        store.on_failure = told
        tell()  # it may have come before
    return lost
