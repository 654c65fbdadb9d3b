"""The server: how it starts and stops, the process that runs it, and what every call goes through.

That is routing, authentication, decoding, the handler, the answer, audit and metrics.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from holdfast.broker.engine import BrokerEngine
from holdfast.broker.tracing import TraceContext, parse_traceparent
from holdfast.config.settings_file import Effective
from holdfast.env import World
from holdfast.env.process import environment
from holdfast.errors import DiskFailed, HoldfastError, NotInstalled, TooManyWaiters, Unauthenticated, Unavailable
from holdfast.local.aio.broker import AsyncLocalBrokerPort, open_broker_port_async
from holdfast.protocol.media import JSON, MSGPACK, SMALL_BYTES, ErrorAnswer, Fault, encode, fault_of
from holdfast.protocol.schemas import REGISTRY, RegistryFault, registry_error
from holdfast.server.api import (
    admin,
    dead,
    enqueue,
    groups,
    locks,
    queues,
    schedules,
    schemas,
    takes,
    topics,
    transactions,
)
from holdfast.server.api.admin import audit_routes, description_routes, metrics_routes
from holdfast.server.audit import Audit, CallAuditor, open_audit
from holdfast.server.callers import Access, Revocation, challenges_for, check_fetch, check_listening, tls_context
from holdfast.server.console import console_routes
from holdfast.server.console.rendering import error_page
from holdfast.server.handling import check_reserve, handled, ready_for
from holdfast.server.http.connection import Answer
from holdfast.server.http.heads import KnownHead, KnownHeads
from holdfast.server.http.listening import HttpServer, not_there, socket_at
from holdfast.server.http.messages import (
    DeferredAnswer,
    Meter,
    Refused,
    RenderedAnswer,
    Request,
    Response,
    StreamResponse,
    Undelivered,
    close_chunks,
    header_text,
    whole_answer,
)
from holdfast.server.limits import limits_of
from holdfast.server.metrics import ServerMetrics, start_export
from holdfast.server.routing import PreparedAnswer, Route, Routes, RouteTable, retry_after_of, status_of
from holdfast.server.service import Call, Service, check_group, check_right, lost_folder, media_for
from holdfast.server.tokens import Principal
from holdfast.server.turns import CALLER, CallTurns, FairThreads
from holdfast.settings import BrokerSettings, ServerSettings

if TYPE_CHECKING:
    from holdfast.server.grpc.face import GrpcServer

# The routes of every server. Metrics, console and audit log are added where they are enabled.
API: Final[Sequence[Routes]] = (
    enqueue.routes,
    queues.routes,
    queues.payload_routes,
    takes.routes,
    dead.routes,
    queues.search_routes,
    topics.routes,
    dead.delayed_routes,
    enqueue.producer_routes,
    groups.routes,
    groups.pause_routes,
    locks.routes,
    schedules.routes,
    schemas.routes,
    transactions.routes,
    admin.sample_routes,
    admin.trace_routes,
    admin.settings_routes,
    admin.routes,
    admin.workers_routes,
    admin.health_routes,
)


logger = logging.getLogger(__name__)


class Server:
    """Serves one data folder. `start` and `close` it from the loop that it runs on."""

    def __init__(
        self,
        world: World,
        port: AsyncLocalBrokerPort,
        settings: ServerSettings,
        *,
        meter: Meter | None = None,
        auditor: Auditor | None = None,
        more: Sequence[Routes] = (),
    ) -> None:
        self.settings = settings
        self.port = port
        self.service = Service(world, port, settings)
        self.access = Access(settings, world)
        self.service.tokens_problem = self.access.tokens_problem
        self._meter = meter or Meter()
        described = description_routes(lambda: self.app.router.routes)
        self.app = ServerApp(self.service, self.access, [*API, *more, described], self._meter, auditor)
        self.http = HttpServer(
            self.app.handle, self.app.refuse, limits_of(settings), self._meter, self.app.answer_known, self.app.heads
        )
        self.service.connections = lambda: len(self.http.connections)
        self.grpc: GrpcServer | None = None

    async def listen(self, tls: ssl.SSLContext | None = None) -> list[str]:
        """Listen on the addresses in the settings. Returns them as URLs."""
        scheme = "http" if tls is None else "https"
        found = []
        try:
            addresses = await self.http.listen(self.settings.host, self.settings.port, tls)
        except OSError as error:
            raise not_there(self.settings, error) from None
        for host, port in addresses:
            found.append(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")
        if self.settings.socket is not None:
            await self.http.listen_on(socket_at(self.settings.socket))
            found.append(f"unix:{self.settings.socket}")
        if self.settings.grpc_port is not None:
            found.append(await self._listen_for_grpc(self.settings))
        return found

    async def _listen_for_grpc(self, settings: ServerSettings) -> str:
        try:
            from holdfast.server.grpc.face import GrpcServer, credentials_of
        except ImportError as error:
            raise NotInstalled(
                f"gRPC needs a package that is not installed ({error.name}); run: pip install 'holdfast[grpc]'"
            ) from None
        self.grpc = GrpcServer(self.app, settings)
        try:
            return await self.grpc.listen(credentials_of(settings, self.service.world))
        except BaseException:
            await self.http.close(0)
            raise

    async def drain(self) -> bool:
        """Take no more calls, end those that wait, finish the others. Returns whether all were finished."""
        self.service.leave()
        grace_s = self.settings.drain_ms / 1000
        if self.grpc is not None:
            finished, _ = await asyncio.gather(self.http.close(grace_s), self.grpc.close(grace_s))
        else:
            finished = await self.http.close(grace_s)
        await self.service.publishing.settle()
        self.service.pool.close()
        return finished

    async def close(self) -> bool:
        """Drain, then sync and close the folder."""
        finished = await self.drain()
        await self.service.scans.close()
        await self.port.close()
        return finished


def event_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    """The factory of the fastest event loop available: uvloop's if it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


async def serve(
    world: World,
    folder: str,
    broker_settings: BrokerSettings,
    settings: ServerSettings,
    *,
    ready: Callable[[Sequence[str]], None],
    stop_asked: Awaitable[object],
    opened: Callable[[BrokerEngine, Audit, Callable[[], str]], None] | None = None,
    effective: Effective | None = None,
    more: Sequence[Routes] = (),
) -> bool:
    """Open a folder and serve it until `stop_asked` is done, then drain and close it.

    Returns whether all calls in progress were finished.
    """
    for warning in check_listening(settings):
        logger.warning(warning)
    asyncio.get_running_loop().set_default_executor(FairThreads())
    tls = tls_context(settings, world.clock)
    port = await open_broker_port_async(folder, settings=broker_settings)
    try:
        audit = open_audit(port.engine.world, port.place, settings)  # on its disk: the folder may live in a store
        port.engine.at_close(audit.close)
        server = make_server(world, port, settings, audit=audit, more=more)
        server.service.effective = effective
        addresses = await server.listen(tls)
        if opened is not None:
            opened(server.service.engine, audit, server.access.tokens_problem)
    except BaseException:
        await port.close()
        raise
    ready(addresses)
    stopped: asyncio.Future[Any] = asyncio.ensure_future(stop_asked)
    lost = lost_folder(port.engine.store)
    try:
        await asyncio.wait([stopped, lost], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        logger.info(
            "shutting down",
            extra={"connections": len(server.http.connections), "waiting": server.service.waits.waiting},
        )
        finished = await server.drain()
    finally:
        if lost.done():
            with suppress(HoldfastError):  # the same once more: why the folder was lost is said below
                await port.close()
        else:
            lost.cancel()
            await port.close()
    if lost.done() and not lost.cancelled():
        raise DiskFailed(
            f"this server no longer owns its folder: {lost.result()}. Start it again: it waits until the owner ends"
        )
    if not finished:
        logger.warning("calls were cut off", extra={"drain_ms": settings.drain_ms})
    return finished


def make_server(
    world: World,
    port: AsyncLocalBrokerPort,
    settings: ServerSettings,
    *,
    audit: Audit | None = None,
    more: Sequence[Routes] = (),
) -> Server:
    """A server with the API, metrics, audit log and, if enabled, the console; and `more` routes."""
    engine = port.engine
    metrics = ServerMetrics(engine, most_groups=settings.metrics_groups)
    metrics.trace_export = start_export(engine, settings.otlp_endpoint, environment())
    audit = audit or open_audit(engine.world, port.place, settings)
    more = [*more, metrics_routes(metrics.render, asks=settings.metrics_auth), audit_routes(audit)]
    if settings.console:
        more += console_routes(audit)
    server = Server(
        world,
        port,
        settings,
        meter=metrics,
        auditor=CallAuditor(audit),
        more=more,
    )
    if settings.console:
        server.app.error_page = error_page
    service = server.service
    metrics.gauge("http_waiting", "Calls that wait for messages.", lambda: service.waits.waiting)
    metrics.gauge(
        "http_windows_unsettled",
        "Messages that streams have sent and nobody has settled.",
        lambda: len(service.windows),
    )
    metrics.gauge(
        "tokens_file_unusable",
        "1 while the tokens file cannot be used; its previous content stays in effect.",
        lambda: float(bool(server.access.tokens_problem())),
    )
    return server


# Every call goes through here: routing, authentication, decoding, the handler, the answer, audit and metrics.


_ID: Final = re.compile(r"[!-~]{1,128}")  # correlation ids that can be sent back in a header
_INTERNAL: Final = "the server failed to handle this call; its log says why, under this correlation id"


# Returns an error as a page if the request was for one, otherwise None.
ErrorPage: TypeAlias = Callable[..., Response | None]


class Auditor(Protocol):
    """Writes administrative acts to the audit log."""

    async def begin(self, call: Call) -> None:
        """Write that an act is about to start. If this raises, the act must not be carried out."""

    async def end(self, call: Call, error: HoldfastError | None, *, failed: bool = False) -> None:
        """Write the outcome of an act."""


class ServerApp:
    """Answers requests."""

    def __init__(
        self, service: Service, access: Access, routes: Iterable[Routes], meter: Meter, auditor: Auditor | None = None
    ) -> None:
        self.service = service
        self.access = access
        self.router = RouteTable()
        for each in routes:
            self.router.include(each)
        self._meter = meter
        self._auditor = auditor
        self.error_page: ErrorPage | None = None
        self._prefix = b"%08x" % service.world.ids.random_u32()
        self._numbers = count(1)
        self._mono_ns = service.world.clock.monotonic_ns
        self.revocation = Revocation(access.confirm)
        self._turns = CallTurns()
        self.heads = KnownHeads()
        self._withdrawing: set[asyncio.Task[None]] = set()  # the loop holds only weak references to tasks

    async def handle(self, request: Request) -> Answer:
        """Answer a request. Never raises."""
        began_ns = self._mono_ns()
        given = request.headers.get("x-correlation-id")
        correlation_id = given if given is not None and _ID.fullmatch(given) else self._new_id().decode()
        route: Route | None = None
        call: Call | None = None
        error: HoldfastError | None = None
        failed = False
        answer: Answer
        try:
            route, path = self.router.find(request.method, request.path)
            call = Call(self.service, request, route, path, correlation_id)
            answer = await self._while_allowed(call)
        except HoldfastError as caught:
            error = caught
            answer = self._fault(request, caught, correlation_id)
        except Exception:
            logger.exception("call failed", extra={"path": request.path, "correlation_id": correlation_id})
            fault = Fault(code="internal", message=_INTERNAL, retryable=False, correlation_id=correlation_id)
            answer = self._answer(request, 500, fault)
            failed = True
        if call is not None and self._auditor is not None and (call.route.act or call.act is not None):
            if isinstance(answer, StreamResponse):
                answer.chunks = _noted(self._auditor, call, answer.chunks)
            else:
                await self._auditor.end(call, error, failed=failed)
        if call is not None and isinstance(answer, Response) and len(answer.body) > SMALL_BYTES:
            answer = await self._in_room(call, answer)
        self._tell(answer, call, correlation_id)
        if isinstance(answer, StreamResponse) and call is not None:
            if call.task is not None:
                answer.chunks = self._while_listed(call, answer.chunks)
            answer.chunks = self._meter.counted(call.route.pattern, answer.chunks)
        self._meter.request_done(
            "" if route is None else route.pattern,
            request.method,
            answer.status,
            self._mono_ns() - began_ns,
            request.received,
            len(answer.body) if isinstance(answer, Response) else 0,
        )
        error = None  # its traceback keeps this frame alive, and with it the request's body
        if call is not None and answer.status < 300 and self.heads.is_to_keep(request, call.route):
            self.heads.learn(request, KnownHead(self.service, request, call.route, call.path, call.query, call.media))
        return answer

    def answer_known(
        self, head: KnownHead, sequence: int | None, content: bytes, peer: str, certificate: Any
    ) -> RenderedAnswer | DeferredAnswer | Exception | None:
        """Answer a request with a known head in one step. None if it takes more than that: `handle` answers it.

        So it does with an error: one that is found here is passed on to it. A message that must be synced first is
        answered later.

        The checks are those that `handle` makes, in the same order.
        """
        service, route, prepared = self.service, head.route, head.prepared
        if prepared is None or service.leaving:
            return None
        if service.engine.store is not None and not service.engine.store.is_ready():
            return None
        began_ns = self._mono_ns()
        try:
            principal = self.access.caller(head.headers, peer, certificate)
            if principal.entry is not None and not self._turns.try_begin(principal.name):
                return None
            if route.action not in principal.everywhere:
                check_right(principal, route, head.variables)
            given = prepared.decode(content)
            if principal.queue_groups is not None:
                check_group(principal, head.query, given)
            found = prepared.answer(principal, given, sequence)
        except Exception as caught:
            return caught
        if found is None:
            return None
        if isinstance(found, DeferredAnswer):
            found.render = partial(self._render_known, head, principal, len(content), began_ns)
            return found
        return self._render_known(head, principal, len(content), began_ns, found)

    def _render_known(
        self, head: KnownHead, principal: Principal, received: int, began_ns: int, found: PreparedAnswer
    ) -> RenderedAnswer | Exception:
        """The answer to a call with a known head: what `handle` does when a handler has returned."""
        undelivered: Undelivered | None = None
        release: Callable[[], None] | None = None
        if isinstance(found, bytes):
            body, name = found, b"%b-%x" % (self._prefix, next(self._numbers))  # as `_new_id` makes it
        else:
            body, correlation_id, undelivered = found
            name = header_text(correlation_id).encode("latin-1", "replace")
            if len(body) > SMALL_BYTES and principal.entry is not None:
                room = self._room_for(principal.name, len(body), always=False)
                if isinstance(room, TooManyWaiters):
                    self._withdraw(undelivered)
                    return room
                release = room
        took_ns = self._mono_ns() - began_ns
        self._meter.request_done(head.route.pattern, head.method, head.route.status, took_ns, received, len(body))
        return whole_answer(head.start, body, name), undelivered, release

    def _new_id(self) -> bytes:
        return b"%b-%x" % (self._prefix, next(self._numbers))

    def _withdraw(self, undelivered: Undelivered) -> None:
        withdrawing = asyncio.get_running_loop().create_task(_withdrawn(Response(undelivered=undelivered)))
        self._withdrawing.add(withdrawing)
        withdrawing.add_done_callback(self._withdrawing.discard)

    async def _while_allowed(self, call: Call) -> Answer:
        """Run the call; ends with an error as soon as the caller's token is revoked."""
        if call.route.action != "open":
            call.principal = principal = self.access.principal(call.request)
            if principal.entry is not None:
                call.confirm = partial(self.access.confirm, principal)
                call.task = asyncio.current_task()
                if not call.request.complete:  # if the token is revoked before the body ends, the call has no effect
                    call.request.on_end = call.confirm
                    call.request.ask_room = call.ask_room
                self.revocation.add(call)
        try:
            if call.request.in_reserve:
                check_reserve(call)
            if call.task is not None:
                CALLER.set(call.principal.name)
                turn = self._turns.begin(call.principal.name)
                if turn is not None:
                    await turn
            answer = await self._called(call)
        except asyncio.CancelledError:
            ended = call.why_ended()
            if ended is None:
                call.task = None  # the task keeps the error alive, and the error the call
                raise
            raise ended from None
        finally:
            if call.task is not None:
                self.revocation.remove(call)
            call.request.ask_room = None  # a bound method, which keeps the call alive
            if call.room:
                self.service.room.give_back(call.principal.name, call.room)
        if call.ended is not None:  # the handler finished despite the cancellation
            call.why_ended()
            await _withdrawn(answer)
            raise call.ended
        return answer

    async def _in_room(self, call: Call, answer: Response) -> Response:
        """The answer; or an error if the caller has too many unread answers already."""
        if call.task is None:  # callers without a token share one name, so there is no limit for each of them
            return answer
        # The caller must learn of a change that cannot be undone.
        must_send = call.request.method != "GET" and answer.undelivered is None
        room = self._room_for(call.principal.name, len(answer.body), always=must_send)
        if not isinstance(room, TooManyWaiters):
            answer.release = room
            return answer
        await _withdrawn(answer)
        return self._fault(call.request, room, call.correlation_id)

    def _room_for(self, caller: str, size: int, *, always: bool) -> Callable[[], None] | TooManyWaiters:
        """Reserve memory for an answer; returns what gives it back. If its caller has none left, the error."""
        answers = self.service.answers
        taken = answers.try_take(caller, size, always=always)
        if taken is None:
            return TooManyWaiters(
                f"responses that {caller} has not read yet fill {answers.used(caller)} bytes of memory, of "
                f"{answers.each_bytes} for one caller; nothing was taken. Read them, then try again, with fewer calls "
                "at a time"
            )
        return partial(answers.give_back, caller, taken)

    async def _while_listed(self, call: Call, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the chunks of an answer. Ends it when the caller's token is revoked."""
        self.revocation.add(call)
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            self.revocation.remove(call)
            await close_chunks(chunks)

    async def _called(self, call: Call) -> Answer:
        route, request = call.route, call.request
        if "sec-fetch-site" in request.headers:
            check_fetch(request, page=route.hidden)
        if route.action != "open" and (route.also is not None or route.action not in call.principal.everywhere):
            check_right(call.principal, route, call.path)
        if "traceparent" in request.headers:
            call.trace = parse_traceparent(request.headers["traceparent"])
        await call.decode()
        if route.action != "open":
            if call.principal.queue_groups is not None:
                check_group(call.principal, call.query, call.body)
            if route.allowed is not None:
                await route.allowed(call)
        if self._auditor is not None:
            call.write_down = self._auditor.begin
            if route.act and not route.looks_first:
                await call.begin_act()
        if self.service.engine.store is not None:
            await ready_for(route, self.service.engine)
        found = await handled(call)
        if isinstance(found, Response | StreamResponse):
            return found
        if found is None:
            return Response(204)
        return call.answer(found)

    def _tell(self, answer: Answer, call: Call | None, correlation_id: str) -> None:
        """Add the headers that every answer has."""
        if call is not None:
            if call.correlation_id is not correlation_id:  # a message's id, which may contain any characters
                correlation_id = header_text(call.correlation_id)
            if call.trace is not None:
                answer.headers.append(("traceparent", self._child(call.trace).traceparent))
        answer.headers.append(("x-correlation-id", correlation_id))

    def _child(self, trace: TraceContext) -> TraceContext:
        random = self.service.world.ids.random_u32
        return trace.child(f"{random():08x}{random():08x}")

    def _fault(self, request: Request, error: HoldfastError, correlation_id: str) -> Response:
        status = status_of(error)
        if status >= 500:
            logger.error(
                "call answered with an error",
                extra={"path": request.path, "error": str(error), "code": error.code, "correlation_id": correlation_id},
            )
        retry_after = retry_after_of(status)
        fault = fault_of(error, retry_after=retry_after, correlation_id=correlation_id)
        if request.path.startswith(REGISTRY):
            status, code = registry_error(error, status)
            media = media_for(request)
            answer = Response(
                status, encode(RegistryFault(error_code=code, message=str(error), error=fault), media), media
            )
        else:
            answer = self._answer(request, status, fault)
        if retry_after is not None:
            answer.headers.append(("retry-after", f"{retry_after:.0f}"))
        if isinstance(error, Unauthenticated):
            answer.headers += [("www-authenticate", challenge) for challenge in challenges_for(request)]
        if isinstance(error, Refused):
            answer.headers += error.headers
        return answer

    def _answer(self, request: Request, status: int, fault: Fault) -> Response:
        page = None
        if self.error_page is not None:
            page = self.error_page(
                request, status, fault, self._known, self.service.settings, is_cluster=self.service.is_shard
            )
        if page is not None:
            return page
        media = MSGPACK if MSGPACK in request.headers.get("accept", "") else JSON
        body: Any = ErrorAnswer(error=fault)
        return Response(status, encode(body, media), media)

    def _known(self, request: Request) -> Principal | None:
        """The caller, for a page that only shows an error; None if the caller is not known."""
        try:
            return self.access.principal(request)
        except HoldfastError:
            return None

    def refuse(self, refused: Refused) -> Response:
        """The answer to something that is not a valid request."""
        fault = fault_of(refused, retry_after=retry_after_of(refused.status))
        answer = Response(refused.status, encode(ErrorAnswer(error=fault), JSON), JSON)
        answer.headers += refused.headers
        return answer


async def _noted(auditor: Auditor, call: Call, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the chunks of an answer, and write the outcome of the act when they end."""
    whole = False
    try:
        async for chunk in chunks:
            yield chunk
        whole = True
    finally:
        await close_chunks(chunks)
        gone = None if whole else Unavailable("the caller went away before the end")
        await auditor.end(call, call.error or call.ended or gone)


async def _withdrawn(answer: Answer) -> None:
    """Discard an answer and give back the messages in it."""
    if isinstance(answer, StreamResponse):
        await close_chunks(answer.chunks)
    elif answer.undelivered is not None:
        await answer.undelivered()
