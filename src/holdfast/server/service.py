"""What handlers share: the service they belong to, and what each knows of the call it answers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from urllib.parse import parse_qsl

import msgspec

from holdfast.broker.engine import BrokerEngine
from holdfast.broker.folder.layout import DEFAULT_GROUP
from holdfast.broker.topic import Topic
from holdfast.config.settings_file import Effective
from holdfast.env import World
from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.local.aio.broker import AsyncLocalBrokerPort, AsyncLocalLocksPort
from holdfast.protocol.media import JSON, MSGPACK, SMALL_BYTES, UNSAID, check_values, decode, encode
from holdfast.server.access.tokens import Principal
from holdfast.server.http.messages import ANSWER_BYTES, Refused, Request, Response
from holdfast.server.limits import ANSWERS_EACH, BODIES_EACH, Room, check_new_group
from holdfast.server.members import ServedMembers
from holdfast.server.routing import Route
from holdfast.server.served import ServedGroup, ServedPublishing
from holdfast.server.turns import Job, Pool, Scans
from holdfast.server.waiting import Attempts, WaitLimit, Windows
from holdfast.settings import ServerSettings

if TYPE_CHECKING:
    from holdfast.codec.tracecontext import TraceContext
    from holdfast.server.audit import Act


_Found = TypeVar("_Found")


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
        self.members = ServedMembers(self.engine)
        self.pool = Pool()
        self.room = Room(BODIES_EACH * settings.max_request_bytes)
        self.answers = Room(ANSWERS_EACH * 2 * ANSWER_BYTES)
        self.publishing = ServedPublishing(self.port, self.pool)
        self.leaving = False
        self.began_ns = world.clock.now_ns()
        self.began_monotonic_ns = world.clock.monotonic_ns()
        self.connections: Callable[[], int] = int  # how many there are; whoever listens knows
        self.tokens_problem: Callable[[], str] = str  # why the tokens file cannot be used; whoever reads it knows
        self.effective: Effective | None = None  # where the settings come from, if whoever starts it says so
        self._waiting: set[asyncio.Task[Any]] = set()
        self._groups: OrderedDict[tuple[str, str], ServedGroup] = OrderedDict()

    @property
    def folder(self) -> str:
        return self.port.place

    def known_group(self, topic: str, name: str) -> ServedGroup | None:
        """The group if it is open, else None."""
        group = self._groups.get((topic, name))
        if group is not None and group.closed:
            del self._groups[topic, name]
            return None
        if group is not None:
            self._groups.move_to_end((topic, name))
        return group

    def groups(self) -> list[ServedGroup]:
        """All open groups."""
        return [group for group in self._groups.values() if not group.closed]

    async def group(self, topic: str, name: str | None = None) -> ServedGroup:
        """The group in queue mode, made where there is none."""
        name = name or DEFAULT_GROUP
        group = self.known_group(topic, name)
        if group is None:
            group = await self.port.served_group(ServedGroup, topic, name, check=self.check_group)
            raced = self.known_group(topic, name)
            if raced is not None:
                await group.close()
                return raced
            self._groups[topic, name] = group
            await self._let_go()
        return group

    def check_group(self, engine: BrokerEngine, topic: Topic, name: str) -> None:
        """Refuse a group beyond the limit. Runs on the topic's own thread, where groups are created one by one."""
        check_new_group(engine, topic, name, self.settings.max_groups)

    async def _let_go(self) -> None:
        """Close the least recently used groups that nobody waits for, so that their topics can be closed."""
        parts = {place: len(group.deliveries) for place, group in self._groups.items()}
        extra = sum(parts.values()) - self.port.settings.open_partitions
        for place, group in list(self._groups.items())[:-1]:  # the last one is about to be used
            if extra <= 0:
                return
            if not group.queue_group.waiters.standing and not self.windows.of(group) and place in self._groups:
                extra -= parts[place]
                del self._groups[place]
                await group.close()

    async def wait(self, call: Call, waiting: Awaitable[_Found], nothing: _Found) -> _Found:
        """What a call waits for; nothing, as soon as the server goes; an error, when the caller may not go on.

        Whoever hands out what was found confirms the caller before, and gives it back where that fails.
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
                raise  # the client went away
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


# One call: the request, its caller, and its decoded query and body.


_Value = TypeVar("_Value")

_VALUES: Final = frozenset({JSON, MSGPACK, *UNSAID})
# A client asks the same of call after call: what follows the '?' is read once. Nobody changes what it was read as.
_KEPT_QUERIES: Final = 256
_KEPT_QUERY_CHARS: Final = 200


class Call:
    """What a handler gets."""

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
        self.principal: Principal = None  # type: ignore[assignment]  # known before any handler runs
        self.trace: TraceContext | None = None
        self.write_down: Callable[[Call], Awaitable[None]] | None = None  # who does that with acts
        self.confirm: Callable[[], None] = _nobody  # that the caller may still do this, for answers that go on
        self.query: Any = None
        self.body: Any = None
        self.target = ""  # what an act was about, for the audit log, where the path does not say it
        self.count: int | None = None  # and how many messages, or other things, it concerned
        self.error: HoldfastError | None = None  # what went wrong when the answer had begun
        self.act: Act | None = None  # as it was noted before it was done
        self.room = 0  # how many bytes of its body may be in memory
        self.task: asyncio.Task[Any] | None = None  # what answers it, if the server may want to end it
        self.ended: HoldfastError | None = None  # why the server did

    def end(self, why: HoldfastError) -> None:
        """End the call: the caller may not go on with it."""
        if self.ended is None and self.task is not None:
            self.ended = why
            self.task.cancel()

    def why_ended(self) -> HoldfastError | None:
        """What a cancelled call is told; None where its client went away, or the server goes."""
        if self.ended is not None and self.task is not None and self.task.cancelling():
            self.task.uncancel()
        return self.ended

    async def begin_act(self) -> None:
        """Write down an act before it is done. Called by handlers that find out only on the way that there is one."""
        if self.write_down is not None:
            await self.write_down(self)

    async def ask_room(self, size: int) -> None:
        """Wait until so much of the body may be in memory, once: it is given back when the call is over."""
        if not self.room:
            self.room = await self.service.room.take(self.principal.name, size)

    @contextmanager
    def large_answer(self) -> Iterator[bool]:
        """Whether there is room in memory to make a large answer; where there is none, a small one must do."""
        answers, caller = self.service.answers, self.principal.name
        known = self.principal.entry is not None
        taken = answers.try_take(caller, 2 * ANSWER_BYTES, always=not known)
        try:
            yield taken is not None
        finally:
            if taken is not None:
                answers.give_back(caller, taken)

    async def scan(self, work: Callable[..., _Found], *arguments: Any) -> _Found:
        """Work that looks through many messages: `work(scan, ...)`, on a thread for that, in the caller's turn."""
        return await self.service.scans.run(self.principal.name, work, *arguments)

    @property
    def media(self) -> str:
        """How the caller wants to be answered."""
        return MSGPACK if MSGPACK in self.request.headers.get("accept", "") else JSON

    def answer(self, value: object, *, status: int | None = None, **more: Any) -> Response:
        """A value as an answer."""
        media = MSGPACK if MSGPACK in self.request.headers.get("accept", "") else JSON
        return Response(status or self.route.status, encode(value, media), media, **more)

    def encoded(self, value: _Value) -> _Value:
        """A part of a long answer, encoded by itself; it stands in the answer as the value would.

        One call of the encoder holds the interpreter until it is done: what is long goes part by part, on a thread.
        """
        return cast(_Value, msgspec.Raw(encode(value, self.media)))

    async def decode(self) -> None:
        """Hold query and body to what the route says of them."""
        route, request = self.route, self.request
        if route.query is not None:
            read = _query if len(request.query) > _KEPT_QUERY_CHARS else _known_query
            self.query = read(request.query, route.query)
        elif request.query:
            raise InvalidRequest(f"{route.pattern} takes nothing behind the '?'")
        if route.body is not None:
            settings = self.service.settings
            content = await request.read(settings.max_request_bytes, settings.max_unpack_ratio)
            if len(content) <= SMALL_BYTES:
                self.body = _body(content, request.media, route.body)
            else:
                self.body = await self.service.pool.run(_large_body, content, request.media, route.body)


def partition_of(call: Call) -> int:
    """The partition that the path names."""
    text = call.path["partition"]
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise InvalidRequest(f"{text!r} is no number of a partition")
    return int(text)


def _nobody() -> None:
    """Nobody has to be asked."""


def not_understood(media: str, *known: str) -> Refused:
    """What to say of a body that is called what no body is here."""
    return Refused(
        f"the content-type {media} is not understood here; send {', '.join(known[:-1])} or {known[-1]}, "
        f"such as with curl -H 'content-type: {known[0]}'",
        status=415,
    )


def _large_body(_: Job, content: bytes, media: str, kind: Any) -> Any:
    try:
        check_values(content, media)
    except InvalidRequest as error:
        raise InvalidRequest(f"the request's body does not fit: {error}") from None
    return _body(content, media, kind)


def _body(content: bytes, media: str, kind: Any) -> Any:
    if media not in _VALUES and content:
        raise not_understood(media, JSON, MSGPACK)
    try:
        return decode(content, media, kind) if content else msgspec.convert({}, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = "the request's body" if content else "the request has no body; it"
        raise InvalidRequest(f"{what} does not fit: {error}") from None


def _pairs(text: str) -> list[tuple[str, str]]:
    if not text:
        return []
    if "%" not in text and "+" not in text:  # nothing to undo: a third of the time
        parts = [part.partition("=") for part in text.split("&")]
        if all(equals for _, equals, _ in parts):
            return [(name, value) for name, _, value in parts]
    try:
        return parse_qsl(text, keep_blank_values=True, strict_parsing=True, errors="strict")
    except ValueError as error:
        raise InvalidRequest(f"what follows the '?' cannot be read: {error}") from None


def _query(text: str, kind: Any) -> Any:
    found: dict[str, Any] = {}
    for name, value in _pairs(text):
        if name == "header":  # the only one that may be there more than once
            found.setdefault(name, []).append(value)
        elif name in found:
            raise InvalidRequest(f"{name} is given twice behind the '?'")
        else:
            found[name] = value
    try:
        given = msgspec.convert(found, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"what follows the '?' does not fit: {error}") from None
    for name in found:
        if getattr(given, name, ...) is None:  # the word "null" was taken for nothing
            raise InvalidRequest(f"{name} cannot be null behind the '?'; leave it out instead")
    return given


_known_query: Final = lru_cache(maxsize=_KEPT_QUERIES)(_query)
