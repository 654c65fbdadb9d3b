"""Passing a call on to the node that owns its shard, and its answer back, as both arrive.

A call goes to one other node at most: it carries the cluster's secret, and a node that gets such a call answers it or
says that it cannot. What the first node has found out about the caller goes along: the address, the names in its
certificate, and its token as it was sent. The owner checks the token again, with its own tokens file.

If the connection breaks, what became of the call is unknown. The first node may repeat it only if it changes nothing;
otherwise it breaks its own connection to the caller, who is then as wise as if it had called the owner itself.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote, unquote, urlsplit

import httptools
import msgspec

from holdfast.cluster.registry import NodeRecord
from holdfast.env.process import environment
from holdfast.errors import BadSettings, TooManyWaiters
from holdfast.protocol.media import OWNER
from holdfast.server.callers import names_in
from holdfast.server.http.heads import HEAD_END, HOP, KnownHead
from holdfast.server.http.messages import (
    ALWAYS_SAID,
    LAST_CHUNK,
    NOWHERE,
    DeferredAnswer,
    Refused,
    Request,
    Response,
    StreamResponse,
    chunk,
)

if TYPE_CHECKING:
    from holdfast.server.routing import Route

NODE: Final = "x-holdfast-node"  # the cluster's secret
SHARD: Final = "x-holdfast-shard"
TOPIC: Final = "x-holdfast-topic"  # which topic a call is for
PEER: Final = "x-holdfast-peer"
NAMES: Final = "x-holdfast-names"
MOVED: Final = "x-holdfast-moved"  # in an answer: it is not here; and the version of the table of placements
OWN_HEADERS: Final = frozenset({NODE, SHARD, TOPIC, PEER, NAMES, MOVED, HOP})
MOVED_STATUS: Final = 421

# What belongs to one connection, or was checked by the first node.
_NOT_PASSED: Final = OWN_HEADERS | {
    "connection", "content-length", "expect", "host", "keep-alive", "origin", "proxy-connection", "referer",
    "sec-fetch-dest", "sec-fetch-mode", "sec-fetch-site", "sec-fetch-user", "te", "trailer", "transfer-encoding",
    "upgrade",
}  # fmt: skip
_NOT_PASSED_BACK: Final = ALWAYS_SAID | {
    "connection", "content-length", "content-type", "keep-alive", "transfer-encoding", MOVED, OWNER
}  # fmt: skip
_CONNECT_S: Final = 2.0
_IDLE_S: Final = 30.0  # shorter than a node keeps an idle connection
_MOST_IDLE: Final = 64
_WHOLE_BYTES: Final = 256 * 1024  # an answer up to this size is passed back as a whole
_HIGH_BYTES: Final = 256 * 1024
_MOST_STARTS: Final = 64
_SUCCESS: Final = b"HTTP/1.1 2"
_LENGTH: Final = b"\r\ncontent-length: "
_CONNECTION: Final = b"\r\nconnection:"
_CA: Final = "HOLDFAST_TLS_CA"
_CERTIFICATE: Final = "HOLDFAST_TLS_CERT"
_KEY: Final = "HOLDFAST_TLS_KEY"


class NotPassed(Exception):
    """The other node did not get the call, or did not take it: nothing was done."""


class Moved(NotPassed):
    """The other node does not own the shard, or the topic is not there; the version is that of its placements."""

    def __init__(self, node: str, version: int = 0) -> None:
        super().__init__(node)
        self.version = version


class Broken(Exception):
    """The connection broke, or the shard has another owner by now: what became of the call is not known."""


class Unread(Exception):
    """The answer to a call with a known head is not one that can be passed back as it is: it has to be read."""

    def __init__(self, connection: NodeConnection, node: NodeRecord) -> None:
        super().__init__()
        self.connection = connection
        self.node = node


class NodeConnection(asyncio.Protocol):
    """A connection to another node, for one call at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._parts: deque[bytes] = deque()
        self._size = 0
        self.tell: Callable[[bytes | None], None] | None = None  # waits for an answer as it is, or None for any other
        self._paused = False
        self._is_interim = self._keeps = False
        self.idle_since = 0.0
        self.lost = False
        self.status = 0  # of the answer that comes in, once its head is there
        self.headers: list[tuple[str, str]] = []
        self.media = ""
        self.length: int | None = None
        self.continued = False  # whether the node asks for the body
        self.done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        tell, self.tell = self.tell, None
        if tell is not None:
            if is_plain(data):
                tell(data)
                return
            tell(None)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
        if self._size > _HIGH_BYTES and not self._paused and not self.done:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        tell, self.tell = self.tell, None
        if tell is not None:
            tell(None)
        self._wake()
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        self.headers, self.media, self.length = [], "", None

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        if key == "content-type":
            self.media = text
        elif key == "content-length" and text.isdigit():
            self.length = int(text)
        if key == MOVED or key not in _NOT_PASSED_BACK:
            self.headers.append((key, text))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._is_interim = status < 200
        if self._is_interim:
            self.continued = True
        else:
            self.status = status

    def on_body(self, content: bytes) -> None:
        self._parts.append(content)
        self._size += len(content)

    def on_message_complete(self) -> None:
        if not self._is_interim:
            self.done = True
            self._keeps = self._parser.should_keep_alive()  # the parser knows only now

    # A call.

    @property
    def is_usable(self) -> bool:
        """Whether another call can be made."""
        return not (self.lost or self._transport.is_closing() or self.done or self.status)

    def begin(self, content: bytes) -> None:
        """Send the beginning of a call; raises NotPassed if the connection is of no use any more."""
        if not self.is_usable:
            raise NotPassed("the connection was closed")
        self._transport.write(content)

    async def send(self, content: bytes) -> None:
        """Send more of the body, as fast as the node takes it."""
        if self.lost:
            raise Broken("the connection was closed")
        self._transport.write(content)
        if self._writable is not None:
            await self._writable

    async def head(self) -> int:
        """Wait for the head of the answer, or until the node asks for the body; returns the status, 0 for that."""
        while not self.status and not self.continued:
            await self._more()
        return self.status

    async def whole(self) -> bytes:
        """The body of the answer."""
        while not self.done:
            if self._paused:
                self._go_on()
            await self._more()
        parts = list(self._parts)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body of the answer as it arrives."""
        while True:
            while self._parts:
                part = self._parts.popleft()
                self._size -= len(part)
                yield part
            if self.done:
                return
            if self._paused:
                self._go_on()
            await self._more()

    def reset(self) -> bool:
        """Make ready for the next call; returns whether there can be one."""
        usable = self.done and self._keeps and not self.lost and not self._transport.is_closing()
        self.status, self.done, self.continued = 0, False, False
        self._parts.clear()
        self._size = 0
        if self._paused:
            self._go_on()
        return usable

    def close(self) -> None:
        """Close the connection at once."""
        self.lost = True
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def _go_on(self) -> None:
        self._paused = False
        if not self.lost:
            self._transport.resume_reading()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _more(self) -> None:
        if self.lost:
            raise Broken("the connection was closed before the answer was complete")
        self._waiter = self._loop.create_future()
        await self._waiter


class Passing:
    """Calls other nodes."""

    def __init__(self, secret: str, most_each: int) -> None:
        self._secret = secret
        self._most_each = most_each  # calls of one caller that are passed on at a time
        self._by_caller: Counter[str] = Counter()
        self._idle: dict[str, deque[NodeConnection]] = {}
        # The instance that is called, for which shard, and who calls.
        self._active: dict[NodeConnection, tuple[str, int, str]] = {}
        self._tls: ssl.SSLContext | None = None
        self.count = 0

    async def pass_on(
        self, request: Request, node: NodeRecord, shard: int, target: bytes, topic: str = ""
    ) -> Response | StreamResponse:
        """The other node's answer. Raises NotPassed if nothing was done, and Broken if that is not known.

        To the other node all connections of this one come from one address, which has a share of its connections. So
        that one caller cannot use that up, for instance by waiting for messages, each has a share of it.
        """
        content, is_whole = self._head(request, node, shard, target, topic)
        connection = await self._connection_for(request, node, shard)
        is_kept = False
        try:
            connection.begin(content)
            if not is_whole and not await connection.head():
                await self._send_body(connection, request)
            is_kept = True  # by what reads the answer
        finally:
            if not is_kept:
                self.over(connection)
                connection.close()
        return await self.received(request, connection, node)

    async def received(
        self, request: Request, connection: NodeConnection, node: NodeRecord
    ) -> Response | StreamResponse:
        """The answer to a call that was sent."""
        is_kept = False
        try:
            status = await connection.head() or await self._answered(connection)
            self.count += 1
            version = dict(connection.headers).get(MOVED) if status == MOVED_STATUS else None
            if version is not None:
                await connection.whole()
                is_kept = connection.reset()
                raise Moved(node.node, int(version) if version.isdecimal() else 0)
            if connection.done or (connection.length is not None and connection.length <= _WHOLE_BYTES):
                content = await connection.whole()
                answer = Response(status, content, connection.media, headers=connection.headers)
                is_kept = connection.reset()
                return answer
            is_kept = True  # by the stream
            body = _PassedBody(self, connection, node.url, request)
            return StreamResponse(
                body, connection.media, status=status, headers=connection.headers, length=connection.length
            )
        finally:
            if not is_kept:
                self.over(connection)
                connection.close()
            elif not connection.status and not connection.done:
                self.over(connection)
                self.give_back(connection, node.url)

    async def _connection_for(self, request: Request, node: NodeRecord, shard: int) -> NodeConnection:
        """A connection that counts as its caller's until the call is over. Raises TooManyWaiters, and NotPassed."""
        caller = "" if request.source is NOWHERE else request.headers.get("authorization") or request.peer
        if caller and self._by_caller[caller] >= self._most_each:
            raise TooManyWaiters(
                f"{self._most_each} calls of this caller are being passed on to other nodes, which is the limit for "
                "one caller; nothing was done. Try again in a second, or call the node that owns the topic"
            )
        self._by_caller[caller] += 1  # from here on, also while it connects
        try:
            connection = await self._connection(node.url)
        except BaseException:
            self._forget_caller(caller)
            raise
        self._active[connection] = node.instance, shard, caller
        return connection

    def rested(self, node: NodeRecord, shard: int, caller: str) -> NodeConnection | None:
        """An idle connection to the node, for a call with a known head; None also if its caller has too many."""
        idle = self._idle.get(node.url)
        if not idle or self._by_caller[caller] >= self._most_each:
            return None
        if asyncio.get_running_loop().time() - idle[-1].idle_since >= _IDLE_S:
            return None
        connection = idle.pop()
        if not connection.is_usable:
            connection.close()
            return None
        self._by_caller[caller] += 1
        self._active[connection] = node.instance, shard, caller
        return connection

    def pass_known(self, connection: NodeConnection, node: NodeRecord, content: bytes) -> PassedAnswer:
        """Pass on a call with a known head, when its answer is run."""
        return PassedAnswer(self, connection, node, content)

    def at_end(self, connection: NodeConnection, node: NodeRecord, answer: bytes | None) -> None:
        """Count a call with a known head. Its connection is free, unless the answer still has to be read."""
        self.count += 1
        if answer is not None or connection.lost:
            self.over(connection)
        if answer is not None:
            self.give_back(connection, node.url)

    def known(self, request: Request, route: Route, path: dict[str, str], shard: int) -> PassedHead:
        """The head of a request, for others like it."""
        return PassedHead(request, route, path, self._secret, shard)

    async def call(
        self, node: NodeRecord, method: str, path: str, body: bytes = b"", *, timeout_s: float, shard: int = -1
    ) -> Response:
        """A call of this node's own, to another one as such."""
        request = Request(NOWHERE, "local", None)
        request.method, request.target = method, path.encode("latin-1")
        request.headers = {"accept": "application/msgpack", "content-type": "application/msgpack"}
        request.feed(body)
        request.complete = True
        async with asyncio.timeout(timeout_s):
            answer = await self.pass_on(request, node, shard, request.target)
            if isinstance(answer, StreamResponse):
                return Response(answer.status, b"".join([part async for part in answer.chunks]), answer.media)
        return answer

    def abandon(self, shard: int, but: str) -> None:
        """End the calls for a shard that another node than `but` is still working on: it is not the owner any more."""
        for connection, (instance, number, _) in list(self._active.items()):
            if number == shard and instance != but:
                connection.close()

    def is_active(self, connection: NodeConnection) -> bool:
        """Whether a call is still using the connection."""
        return connection in self._active

    def over(self, connection: NodeConnection) -> None:
        """A call has come to its end."""
        active = self._active.pop(connection, None)
        if active is not None:
            self._forget_caller(active[2])

    def _forget_caller(self, caller: str) -> None:
        self._by_caller[caller] -= 1
        if not self._by_caller[caller]:
            del self._by_caller[caller]

    def forget(self, url: str) -> None:
        """Close the idle connections to a node."""
        for connection in self._idle.pop(url, ()):
            connection.close()

    def close(self) -> None:
        for url in list(self._idle):
            self.forget(url)
        for connection in list(self._active):
            connection.close()

    async def _answered(self, connection: NodeConnection) -> int:
        while not connection.status:
            connection.continued = False
            await connection.head()
        return connection.status

    async def _send_body(self, connection: NodeConnection, request: Request) -> None:
        """Send the body as it arrives, until the node answers."""
        connection.continued = False
        chunked = request.length is None
        async for part in request.raw_chunks():
            if connection.status:
                return  # it has refused the rest
            await connection.send(chunk(part) if chunked else part)
        if chunked:
            await connection.send(LAST_CHUNK)

    def _head(self, request: Request, node: NodeRecord, shard: int, target: bytes, topic: str) -> tuple[bytes, bool]:
        """The head of the call, with its body if that has arrived; and whether it has."""
        method = "GET" if request.method == "HEAD" else request.method
        lines = [
            f"{method} {target.decode('latin-1')} HTTP/1.1\r\nhost: {urlsplit(node.url).netloc}\r\n",
            f"{NODE}: {self._secret}\r\n{SHARD}: {shard}\r\n{PEER}: {request.peer}\r\n",
        ]
        if topic:
            lines.append(f"{TOPIC}: {quote(topic)}\r\n")
        names = names_in(request.certificate)
        if names:
            lines.append(f"{NAMES}: {quote(msgspec.json.encode(names))}\r\n")
        lines += [f"{name}: {value}\r\n" for name, value in request.headers.items() if name not in _NOT_PASSED]
        body, is_whole = b"", request.complete
        if is_whole:
            body = request.content if request.buffered else b""
            if body or method not in ("GET", "DELETE"):
                lines.append(f"content-length: {len(body)}\r\n")
        else:
            length = request.length
            lines.append("transfer-encoding: chunked\r\n" if length is None else f"content-length: {length}\r\n")
            lines.append("expect: 100-continue\r\n")
        lines.append("\r\n")
        return "".join(lines).encode("latin-1", "replace") + body, is_whole

    async def _connection(self, url: str) -> NodeConnection:
        idle, loop = self._idle.get(url), asyncio.get_running_loop()
        while idle:
            connection = idle.pop()
            if not connection.lost and loop.time() - connection.idle_since < _IDLE_S:
                return connection
            connection.close()
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        if secure and self._tls is None:
            self._tls = _context(environment())
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, connection = await loop.create_connection(
                    NodeConnection, parts.hostname or "", parts.port or (443 if secure else 80),
                    ssl=self._tls if secure else None,
                )  # fmt: skip
        except (OSError, TimeoutError) as error:
            raise NotPassed(str(error) or "no connection could be made in time") from error
        return connection

    def give_back(self, connection: NodeConnection, url: str) -> None:
        idle = self._idle.setdefault(url, deque())
        if connection.lost or len(idle) >= _MOST_IDLE:
            connection.close()
            return
        connection.idle_since = asyncio.get_running_loop().time()
        idle.append(connection)


class _PassedBody:
    """The body of an answer, passed on as it arrives. It may be closed without having been read."""

    def __init__(self, passing: Passing, connection: NodeConnection, url: str, request: Request) -> None:
        self._passing, self._connection, self._url, self._request = passing, connection, url, request
        self._parts = connection.chunks()

    def __aiter__(self) -> _PassedBody:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._parts)
        except Broken as error:  # the caller must not take it for the end
            await self.aclose()
            break_off(self._request)
            raise ConnectionResetError(str(error)) from error
        except StopAsyncIteration:
            self._passing.over(self._connection)
            if self._connection.reset():
                self._passing.give_back(self._connection, self._url)
            else:
                self._connection.close()
            raise
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Give the answer up, unless all of it was read."""
        if self._passing.is_active(self._connection):
            self._passing.over(self._connection)
            self._connection.close()


class PassedAnswer(DeferredAnswer):
    """The answer to a call with a known head, passed back as it comes. It needs neither a task nor a parser."""

    __slots__ = ("_connection", "_content", "_node", "_passing")

    def __init__(self, passing: Passing, connection: NodeConnection, node: NodeRecord, content: bytes) -> None:
        super().__init__(None)
        self._passing = passing
        self._connection = connection
        self._node = node
        self._content = content
        self.at_loss = connection.close

    def run(self, then: Callable[[DeferredAnswer], None]) -> None:
        self._then = then
        try:
            self._connection.begin(self._content)
        except NotPassed as error:
            self.failure = error
            self._connection.close()
            self._came(None)
        else:
            self._connection.tell = self._came

    def _came(self, answer: bytes | None) -> None:
        self._passing.at_end(self._connection, self._node, answer)
        self.value = answer
        if answer is None and self.failure is None:
            self.failure = Unread(self._connection, self._node)
        self._end()


class PassedHead(KnownHead):
    """A head of requests that are passed on, and what is sent in its place."""

    def __init__(self, request: Request, route: Route, variables: dict[str, str], secret: str, shard: int) -> None:
        super().__init__(None, request, route, variables, None, "")
        self.shard = shard
        target = target_of(request)
        self._target = target.rpartition(b"&sequence=")[0] if b"&sequence=" in target else target
        lines = [f"{NODE}: {secret}\r\n{SHARD}: {shard}\r\n{TOPIC}: {quote(self.topic)}\r\n"]
        lines += [f"{name}: {value}\r\n" for name, value in request.headers.items() if name not in _NOT_PASSED]
        self._lines = "".join(lines).encode("latin-1", "replace")
        self._starts: dict[tuple[str, str], bytes] = {}

    def content(self, node: NodeRecord, peer: str, sequence: int | None, body: bytes) -> bytes:
        """A request with this head, as it is sent to the node."""
        start = self._starts.get((node.url, peer))
        if start is None:
            if len(self._starts) >= _MOST_STARTS:
                self._starts.clear()
            host = urlsplit(node.url).netloc
            start = b" HTTP/1.1\r\nhost: %b\r\n%b: %b\r\n%bcontent-length: " % (
                host.encode("latin-1"), PEER.encode(), peer.encode("latin-1"), self._lines
            )  # fmt: skip
            self._starts[node.url, peer] = start
        query = b"" if sequence is None else b"&sequence=%d" % sequence
        return b"POST %b%b%b%d\r\n\r\n%b" % (self._target, query, start, len(body), body)


def is_plain(data: bytes) -> bool:
    """Whether this is one whole answer of success, after which the connection goes on."""
    end = data.find(HEAD_END)
    at = data.find(_LENGTH, 0, end) if end > 0 and data.startswith(_SUCCESS) else -1
    if at < 0 or data.find(_CONNECTION, 0, end) >= 0:
        return False
    return data[at + len(_LENGTH) : data.find(b"\r\n", at + 2, end + 2)] == b"%d" % (len(data) - end - 4)


def copied(request: Request, *, peer: str, certificate: Any, path: str, headers: dict[str, str]) -> Request:
    """A request like another one, with its body, for one of several shards."""
    made = Request(NOWHERE, peer, certificate)
    made.method, made.path, made.query, made.headers = request.method, path, request.query, headers
    made.target = request.target or target_of(request)
    content = request.content if request.buffered else b""
    if content:
        made.feed(content)
    made.complete = True
    return made


def target_of(request: Request) -> bytes:
    """The target of a request, as a client would write it."""
    if request.target:
        return bytes(request.target)
    path = quote(request.path, safe="/%")
    return (f"{path}?{request.query}" if request.query else path).encode("latin-1")


def read_caller(request: Request) -> None:
    """Make a request that a node has passed on look like the caller's own. The secret must have been checked."""
    headers = request.headers
    peer, names = headers.get(PEER, ""), headers.get(NAMES)
    request.headers = {name: value for name, value in headers.items() if name not in OWN_HEADERS and name != "host"}
    request.headers[HOP] = "1"
    if names is not None:
        try:
            first, *more = msgspec.json.decode(unquote(names), type=list[str])
        except (msgspec.MsgspecError, ValueError):
            raise Refused(f"the header {NAMES} cannot be read", status=400) from None
        request.certificate = {
            "subject": ((("commonName", first),),),
            "subjectAltName": tuple(("DNS", name) for name in more),
        }
    else:
        request.certificate = None
    if peer == "local" or names is not None:
        request.key = None  # who calls is not in the bytes that the key is made of
    request.peer = peer


def _context(environ: Mapping[str, str]) -> ssl.SSLContext:
    """What nodes trust, and show of themselves, when they call each other: the same variables as for clients."""
    try:
        context = ssl.create_default_context(cafile=environ.get(_CA) or None)
        if environ.get(_CERTIFICATE):
            context.load_cert_chain(environ[_CERTIFICATE], environ.get(_KEY) or None, password=lambda: "")
    except (OSError, ValueError) as error:
        raise BadSettings(
            f"the nodes of the cluster cannot call each other by TLS: {error}. Check {_CA}, {_CERTIFICATE} and {_KEY}"
        ) from None
    return context


def break_off(request: Request) -> None:
    """Break the connection to a caller: what became of its call is not known."""
    source: Any = request.source
    source.abort()
