"""The gRPC server of a server: it listens, finds the call, passes it on as the HTTP request that it stands for.

So callers, rights, limits, the audit log and metrics are those of HTTP, and nothing is decided here. What gRPC adds is
bounded here: a request is read only when its caller is known and has room for it in memory, whether it is one message
or a stream of them; that is why every call is registered as a stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote, unquote, urlencode

import grpc
import msgspec
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from holdfast.env import World
from holdfast.errors import BadSettings, HoldfastError, InvalidRequest, TooManyWaiters
from holdfast.protocol.media import FRAMES, MSGPACK, SMALL_BYTES, ErrorAnswer, Fault, Unframer, decode, encode, fault_of
from holdfast.server.callers import Reloaded
from holdfast.server.grpc.values import filled, given
from holdfast.server.http.messages import NOWHERE, Request, Response, StreamResponse, close_chunks
from holdfast.server.limits import grpc_connections
from holdfast.server.routing import retry_after_of, status_of, status_of_code
from holdfast.server.tokens import LOCAL, Principal
from holdfast.settings import ServerSettings
from holdfast.storage.files import read_file
from holdfast.v1 import holdfast_pb2 as pb

if TYPE_CHECKING:
    from holdfast.server.server import ServerApp

logger = logging.getLogger(__name__)

MOST_BYTES: Final = 4 * 1024 * 1024  # of one request: gRPC's own limit
_STREAMS: Final = 1_000  # calls of one connection at a time
_OPEN_CALLS: Final = 100  # of health and reflection, which need no token, at a time
_OPEN_S: Final = 60.0  # how long one of these may take
_PACKAGE: Final = "holdfast.v1"
_SERVICES: Final = tuple(pb.DESCRIPTOR.services_by_name)
_HEALTH: Final = "grpc.health.v1.Health"
_REFLECTION: Final = reflection.SERVICE_NAME
_PASSED_ON: Final = ("authorization", "x-correlation-id", "traceparent", "tracestate")
_NO_FAULT: Final = Fault(code="internal", message="the server failed to handle this call", retryable=False)
_CODES: Final = {
    "topic_exists": grpc.StatusCode.ALREADY_EXISTS,
    "conflict": grpc.StatusCode.ABORTED,
    "out_of_sequence": grpc.StatusCode.ABORTED,
    "disk_full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "corrupt_data": grpc.StatusCode.DATA_LOSS,
    "checksum_mismatch": grpc.StatusCode.DATA_LOSS,
}
_STATUSES: Final = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    416: grpc.StatusCode.OUT_OF_RANGE,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def code_of(code: str, status: int) -> grpc.StatusCode:
    """The gRPC status for an error, by its code and its HTTP status."""
    return _CODES.get(code) or _STATUSES.get(status, grpc.StatusCode.UNKNOWN)


class GrpcCall(NamedTuple):
    """A call of the proto file that stands for an HTTP request."""

    method: str
    path: str
    variables: tuple[str, ...]
    parameters: frozenset[str]  # of the query
    request: Any
    response: Any
    is_raw: bool  # answers the bytes of a body


class GrpcServer:
    """Listens for gRPC beside HTTP, on the same loop."""

    def __init__(self, app: ServerApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._service = app.service
        self._answered: set[asyncio.Task[Any]] = set()
        self._open_calls = 0
        self.address = ""
        self.calls = _calls_of(app)
        self._reflected = reflection.aio.ReflectionServicer([*_full_names(), _HEALTH, _REFLECTION])
        self._server = grpc.aio.server(options=_options(settings), handlers=[Handlers(self._handler)])

    async def listen(self, credentials: grpc.ServerCredentials | None) -> str:
        """Listen on the port in the settings. Returns the address."""
        host, port = self._settings.host, self._settings.grpc_port
        shown = f"[{host}]" if ":" in host else host
        try:
            if credentials is None:
                found = self._server.add_insecure_port(f"{shown}:{port}")
            else:
                found = self._server.add_secure_port(f"{shown}:{port}", credentials)
        except RuntimeError as error:
            await self._server.stop(None)
            raise BadSettings(
                f"cannot listen for gRPC on {shown}:{port}: {error}. Set another grpc_port (--grpc-port), "
                "or end the program that uses it"
            ) from None
        await self._server.start()
        self.address = f"{shown}:{found}"
        return f"grpc{'' if credentials is None else 's'}://{self.address}"

    async def close(self, grace_s: float) -> None:
        """Take no more calls, and end those that are not finished in time."""
        await self._server.stop(grace_s)

    def _handler(self, name: str) -> Any:
        """What answers the call with this name; None if there is no such call."""
        call = self.calls.get(name)
        answer: Callable[..., Awaitable[None]]
        if call is not None:
            answer = partial(self._unary, call)
        elif name == f"/{_PACKAGE}.QueueService/PublishStream":
            answer = self._publish
        elif name == f"/{_PACKAGE}.QueueService/Subscribe":
            answer = self._subscribe
        elif name.startswith(f"/{_HEALTH}/"):
            answer = partial(self._without_token, partial(self._health, name.endswith("/Watch")))
        elif name == f"/{_REFLECTION}/ServerReflectionInfo":
            answer = partial(self._without_token, self._reflect)
        else:
            return None

        async def answered(_: Any, context: Any) -> None:
            try:
                await answer(context)
            except HoldfastError as error:
                await _abort(context, fault_of(error), status_of(error))
            except (grpc.aio.AbortError, grpc.aio.BaseError, grpc.aio.UsageError):
                raise
            except Exception:
                logger.exception("call failed", extra={"path": name})
                await _abort(context, _NO_FAULT, 500)

        return grpc.stream_stream_rpc_method_handler(answered)

    # One request, one answer

    async def _unary(self, call: GrpcCall, context: Any) -> None:
        caller = _Caller(self._app, context)
        async with self._room(caller.principal()):
            content = await self._one(context)
            request = await self._in_steps(content, partial(_request_of, call, caller, content))
        answer = await self._app.handle(request)
        undelivered = answer.undelivered if isinstance(answer, Response) else None
        try:
            await self._check(context, answer)
            if call.is_raw:
                async for piece in _pieces(answer):
                    await self._write(context, pb.PayloadChunk(data=piece).SerializeToString())
                return
            assert isinstance(answer, Response)
            made = await self._in_steps(answer.body, partial(_answer_of, call, answer.body))
            await self._write(context, made)
            undelivered = None
        finally:
            if isinstance(answer, StreamResponse):
                await close_chunks(answer.chunks)
            elif answer.release is not None:
                answer.release()
            if undelivered is not None:  # the caller has gone, or does not read
                await asyncio.shield(undelivered())

    @asynccontextmanager
    async def _room(self, principal: Principal) -> AsyncIterator[None]:
        """Reserve memory for a request of any size, before it is read."""
        room = self._service.room
        taken = await room.take(principal.name, MOST_BYTES)
        try:
            yield
        finally:
            room.give_back(principal.name, taken)

    async def _one(self, context: Any) -> bytes:
        """The only request of a call."""
        most_ms = self._settings.header_timeout_ms + self._settings.body_timeout_ms
        try:
            async with asyncio.timeout(most_ms / 1000):
                content = await context.read()
        except TimeoutError:
            raise InvalidRequest(f"no request arrived within {most_ms / 1000:g} seconds; nothing was done") from None
        if content is grpc.aio.EOF:
            raise InvalidRequest("the call ended before its request; nothing was done")
        return bytes(content)

    async def _in_steps(self, content: bytes, work: Callable[[], Any]) -> Any:
        """Do work on the content; on a thread if it is large."""
        if len(content) <= SMALL_BYTES:
            return work()
        return await self._service.pool.run(lambda _: work())

    async def _check(self, context: Any, answer: Response | StreamResponse) -> None:
        """End the call with the error, if the answer is one."""
        if answer.status >= 400:
            body = answer.body if isinstance(answer, Response) else b""
            fault = decode(body, MSGPACK, ErrorAnswer).error if body else _NO_FAULT
            await _abort(context, fault, answer.status)

    async def _write(self, context: Any, content: bytes) -> None:
        """Send a message. A caller that does not read ends its own call."""
        try:
            async with asyncio.timeout(self._settings.write_timeout_ms / 1000):
                await context.write(content)
        except TimeoutError:
            raise TooManyWaiters(
                f"the answer was not read for {self._settings.write_timeout_ms / 1000:g} seconds (write_timeout_ms), "
                "so the call was ended; its messages return to their queue. Read faster, or ask for fewer at a time"
            ) from None

    # Streams

    async def _publish(self, context: Any) -> None:
        caller = _Caller(self._app, context)
        principal = caller.principal()
        call = self.calls[f"/{_PACKAGE}.QueueService/Publish"]
        with self._service.waits.one_more(principal):
            while (content := await context.read()) is not grpc.aio.EOF:
                async with self._room(caller.principal()):
                    request_of = partial(_batch_of, call, caller, content)
                    number, request = await self._in_steps(content, request_of)
                    answer = await self._app.handle(request)
                assert isinstance(answer, Response)
                made = await self._in_steps(answer.body, partial(_stored_of, number, answer))
                try:
                    await self._write(context, made)
                finally:
                    if answer.release is not None:
                        answer.release()
                del content, request, answer, made  # nothing of it stays while the stream waits

    async def _subscribe(self, context: Any) -> None:
        caller = _Caller(self._app, context)
        async with self._room(caller.principal()):
            first = _parsed(pb.SubscribeRequest, await self._one(context))
        if first.WhichOneof("kind") != "start":
            raise InvalidRequest("the first request of a subscription is `start`, which names the queue")
        wanted = given(first.start)
        queue = _named("queue", wanted.pop("queue"))
        request = caller.request("POST", f"/v1/queues/{queue}/subscribe", wanted, accept=f"{FRAMES}, {MSGPACK}")
        answer = await self._app.handle(request)
        await self._check(context, answer)
        assert isinstance(answer, StreamResponse)
        writing = asyncio.Lock()  # gRPC sends one message at a time

        async def send(message: Any) -> None:
            async with writing:
                await self._write(context, message.SerializeToString())

        settling = asyncio.create_task(self._settle_all(context, caller, queue, wanted.get("group"), send))
        unframer = Unframer(FRAMES)
        try:
            async for chunk in answer.chunks:
                if settling.done():  # the caller has nothing more to settle, or this raises why it cannot
                    settling.result()
                messages = []
                for frame in unframer.feed(chunk):
                    value = msgspec.msgpack.decode(frame)
                    if "error" in value:
                        fault: Fault = decode(frame, FRAMES, ErrorAnswer).error
                        await _abort(context, fault, status_of_code(fault.code))
                    if value:
                        messages.append(value)
                await send(filled(pb.SubscribeResponse, {"messages": messages}))
        finally:
            settling.cancel()
            await close_chunks(answer.chunks)
            await asyncio.wait([settling])

    async def _settle_all(
        self, context: Any, caller: _Caller, queue: str, group: str | None, send: Callable[[Any], Awaitable[None]]
    ) -> None:
        """Settle what the requests of a subscription say, until there are no more."""
        while (content := await context.read()) is not grpc.aio.EOF:
            await send(pb.SubscribeResponse(settled=await self._settled(caller, content, queue, group)))

    async def _settled(self, caller: _Caller, content: bytes, queue: str, group: str | None) -> pb.SubscribeSettled:
        number = 0
        try:
            async with self._room(caller.principal()):
                wanted = await self._in_steps(content, partial(_parsed, pb.SubscribeRequest, content))
                number, kind = wanted.number, wanted.WhichOneof("kind")
                if kind in (None, "start"):
                    raise InvalidRequest("after `start`, a request is ack, nack, reject or extend")
                values = await self._in_steps(content, lambda: given(getattr(wanted, kind)))
                values.pop("queue")
                if group is not None:
                    values.setdefault("group", group)
                request = caller.request("POST", f"/v1/queues/{queue}/{kind}", values)
                answer = await self._app.handle(request)
        except HoldfastError as error:
            return pb.SubscribeSettled(number=number, error=_stream_error(fault_of(error)))
        assert isinstance(answer, Response)
        if answer.status >= 400:
            return pb.SubscribeSettled(number=number, error=_stream_error(_fault_in(answer)))
        return pb.SubscribeSettled(number=number, settled=msgspec.msgpack.decode(answer.body)["settled"])

    # Health and reflection: for everybody, as the health checks and the description are over HTTP

    async def _without_token(self, answer: Callable[[Any], Awaitable[None]], context: Any) -> None:
        if self._open_calls >= _OPEN_CALLS:
            raise TooManyWaiters(f"{_OPEN_CALLS} calls of health and reflection are open: try again in a second")
        self._open_calls += 1
        try:
            async with asyncio.timeout(_OPEN_S):
                await answer(context)
        except TimeoutError:
            raise TooManyWaiters(f"this call was open for {_OPEN_S:g} seconds, which is the limit") from None
        finally:
            self._open_calls -= 1

    async def _health(self, watches: bool, context: Any) -> None:  # noqa: FBT001  bound in advance
        wanted = _parsed(health_pb2.HealthCheckRequest, await self._one(context)).service
        if wanted not in ("", *_full_names()) and not watches:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {wanted}")
        said = None
        while True:
            known = wanted in ("", *_full_names())
            status = await self._is_ready() if known else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != said:
                said = status
                await self._write(context, health_pb2.HealthCheckResponse(status=status).SerializeToString())
            if not watches:
                return
            await asyncio.sleep(1)

    async def _is_ready(self) -> int:
        request = Request(NOWHERE, LOCAL, None)
        request.method, request.path, request.complete = "GET", "/readyz", True
        ready = (await self._app.handle(request)).status == 200
        kinds = health_pb2.HealthCheckResponse
        return int(kinds.SERVING if ready else kinds.NOT_SERVING)

    async def _reflect(self, context: Any) -> None:
        while (content := await context.read()) is not grpc.aio.EOF:
            asked = _parsed(reflection_pb2.ServerReflectionRequest, content)

            async def only(asked: Any = asked) -> AsyncIterator[Any]:
                yield asked

            async for told in self._reflected.ServerReflectionInfo(only(), context):
                await self._write(context, told.SerializeToString())


class Handlers(grpc.GenericRpcHandler):
    """Finds what answers a call."""

    def __init__(self, find: Callable[[str], Any]) -> None:
        self._find = find

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return self._find(details.method)


class _Caller:
    """Who calls, as HTTP knows it: headers, address and certificate."""

    def __init__(self, app: ServerApp, context: Any) -> None:
        self._app = app
        self._headers = {name: value for name, value in context.invocation_metadata() or () if name in _PASSED_ON}
        self._peer = _address(context.peer())
        self._certificate = _certificate(context.auth_context())

    def principal(self) -> Principal:
        """The caller. Raises Unauthenticated or Forbidden."""
        return self._app.access.caller(self._headers, self._peer, self._certificate)

    def request(self, method: str, path: str, body: Any, query: str = "", *, accept: str = MSGPACK) -> Request:
        """A request of this caller."""
        made = Request(NOWHERE, self._peer, self._certificate)
        made.method, made.path, made.query = method, path, query
        made.headers = self._headers | {"accept": accept, "content-type": MSGPACK}
        if body is not None:
            made.feed(encode(body, MSGPACK))
        made.complete = True
        return made


def _address(peer: str) -> str:
    """The address in `ipv4:127.0.0.1:50051`, or `ipv6:[::1]:50051`."""
    return unquote(peer.partition(":")[2].rpartition(":")[0]).strip("[]") or "unknown"


def _certificate(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """The names in a client's certificate, as the ssl module tells them; None without TLS."""
    if not facts:
        return None
    names = [name.decode("utf-8", "replace") for name in facts.get("x509_common_name", ())]
    others = [name.decode("utf-8", "replace") for name in facts.get("x509_subject_alternative_name", ())]
    return {
        "subject": tuple((("commonName", name),) for name in names),
        "subjectAltName": tuple(("DNS", name) for name in others),
    }


def _full_names() -> tuple[str, ...]:
    return tuple(f"{_PACKAGE}.{name}" for name in _SERVICES)


def _calls_of(app: ServerApp) -> dict[str, GrpcCall]:
    """The calls of the proto file that stand for a request, by their full names."""
    routes = {(route.method, route.pattern): route for route in app.router.routes}
    found = {}
    for service in pb.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            named = method.GetOptions().Extensions[pb.route]
            if not named.path:
                continue
            route = routes[named.method, named.path]
            variables = tuple(part[1:-1] for part in named.path.split("/") if part.startswith("{"))
            in_body = route.body or route.content
            names = set() if in_body is None else {each.encode_name for each in msgspec.structs.fields(in_body)}
            query = [] if route.query is None else msgspec.structs.fields(route.query)
            found[f"/{service.full_name}/{method.name}"] = GrpcCall(
                named.method,
                named.path,
                variables,
                frozenset(each.encode_name for each in query) - names,
                getattr(pb, method.input_type.name),
                getattr(pb, method.output_type.name),
                is_raw=method.output_type.name == "PayloadChunk",
            )
    return found


def _parsed(kind: Any, content: bytes) -> Any:
    try:
        return kind.FromString(content)
    except DecodeError as error:
        raise InvalidRequest(f"the request is not a {kind.DESCRIPTOR.full_name}: {error}. Nothing was done") from None


def _request_of(call: GrpcCall, caller: _Caller, content: bytes) -> Request:
    return _as_request(call, caller, given(_parsed(call.request, content)))


def _as_request(call: GrpcCall, caller: _Caller, values: dict[str, Any]) -> Request:
    """The HTTP request that a call stands for."""
    path = call.path
    for name in call.variables:
        path = path.replace(f"{{{name}}}", _named(name, values.pop(name)))
    query = {name: values.pop(name) for name in call.parameters & values.keys()}
    has_body = call.method in ("POST", "PUT", "PATCH") and bool(values)
    return caller.request(call.method, path, values if has_body else None, _query(query))


def _named(what: str, value: Any) -> str:
    """A part of a path. One with a slash would be another path."""
    name = str(value)
    if not name or "/" in name:
        raise InvalidRequest(f"{what} is {name!r}, which is not a name: give one without slashes")
    return name


def _query(values: dict[str, Any]) -> str:
    pairs = []
    for name, value in values.items():
        if isinstance(value, bool):
            pairs.append((name, "true" if value else "false"))
        elif isinstance(value, list):
            pairs += [(name, each) for each in value]
        elif value != "":
            pairs.append((name, value))
    return urlencode(pairs)


def _batch_of(call: GrpcCall, caller: _Caller, content: bytes) -> tuple[int, Request]:
    values = given(_parsed(pb.PublishStreamRequest, content))
    return values.pop("number"), _as_request(call, caller, values)


def _answer_of(call: GrpcCall, body: bytes) -> bytes:
    values = msgspec.msgpack.decode(body) if body else {}
    made: bytes = filled(call.response, values).SerializeToString()
    return made


def _stored_of(number: int, answer: Response) -> bytes:
    if answer.status >= 400:
        made = pb.PublishStreamResponse(number=number, error=_stream_error(_fault_in(answer)))
    else:
        made = filled(pb.PublishStreamResponse, {"number": number, **msgspec.msgpack.decode(answer.body)})
    content: bytes = made.SerializeToString()
    return content


async def _pieces(answer: Response | StreamResponse) -> AsyncIterator[bytes]:
    if isinstance(answer, Response):
        yield answer.body
        return
    async for piece in answer.chunks:
        yield piece


def _fault_in(answer: Response) -> Fault:
    return decode(answer.body, MSGPACK, ErrorAnswer).error


def _stream_error(fault: Fault) -> pb.StreamError:
    return pb.StreamError(code=fault.code, message=fault.message, retryable=fault.retryable)


async def _abort(context: Any, fault: Fault, status: int) -> None:
    """End a call with an error: its status and message, and the rest as trailing metadata."""
    told = [("holdfast-code", fault.code), ("holdfast-retryable", "true" if fault.retryable else "false")]
    if fault.correlation_id:
        told.append(("x-correlation-id", quote(fault.correlation_id, safe="!-~ ")))
    retry_after = retry_after_of(status)
    if retry_after is not None:
        told.append(("retry-after", f"{retry_after:.0f}"))
    await context.abort(code_of(fault.code, status), fault.message, tuple(told))


def _options(settings: ServerSettings) -> list[tuple[str, int]]:
    """The limits of connections, which gRPC keeps itself."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MOST_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", settings.max_header_bytes),
        ("grpc.absolute_max_metadata_size", settings.max_header_bytes),
        ("grpc.max_concurrent_streams", _STREAMS),
        ("grpc.max_allowed_incoming_connections", grpc_connections(settings)),
        ("grpc.server_handshake_timeout_ms", settings.header_timeout_ms),
        ("grpc.max_connection_idle_ms", settings.idle_timeout_ms),
        ("grpc.keepalive_time_ms", settings.idle_timeout_ms),  # a peer that is gone without a word is noticed
        ("grpc.keepalive_timeout_ms", settings.write_timeout_ms),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]


def credentials_of(settings: ServerSettings, world: World) -> grpc.ServerCredentials | None:
    """The TLS credentials for the files in the settings, read again when these change; None if no certificate is set.

    `tls_context` has checked the files.
    """
    cert, key, client_ca = settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file
    if cert is None:
        return None
    files = [path for path in (cert, key, client_ca) if path is not None]

    def load() -> grpc.ServerCertificateConfiguration:
        found = {path: read_file(world.disk, path) for path in files}
        pair = (found[key or cert], found[cert])
        return grpc.ssl_server_certificate_configuration([pair], found[client_ca] if client_ca else None)

    newest = Reloaded(files, load, world.clock, what="TLS files")
    first = newest.current()
    return grpc.dynamic_ssl_server_credentials(first, newest.current, require_client_authentication=bool(client_ca))
