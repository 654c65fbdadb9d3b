"""One client connection: its requests in order, its limits and its deadlines."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import httptools

from holdfast.env.sockets import is_own_peer, unacknowledged
from holdfast.errors import HoldfastError
from holdfast.server.http.heads import HEAD_END, KnownHead, cut
from holdfast.server.http.messages import (
    CONTINUE,
    HIGH_BYTES,
    LAST_CHUNK,
    NAMES,
    DeferredAnswer,
    NotTheSameUser,
    Refused,
    RenderedAnswer,
    Request,
    Response,
    StreamResponse,
    TooLarge,
    Undelivered,
    check_head,
    chunk,
    close_chunks,
    head,
    large_head,
    no_room,
    parse_host,
    unquoted,
)
from holdfast.server.limits import Admitted

if TYPE_CHECKING:
    from holdfast.server.http.listening import HttpServer

logger = logging.getLogger(__name__)

_WAIT_FOR_BYTES: Final = 64 * 1024  # a request with a body up to this size is handled when the body is complete
_MOST_WAITING: Final = 8  # pipelined requests that wait for their turn
_LINGER_S: Final = 2.0
_RESET_S: Final = 1.0  # a reset within this time after an answer means that the client did not read it
_AT_ONCE_BYTES: Final = 32 * 1024  # bytes that are parsed before checking whether reading is paused
_MOST_FIELDS: Final = 1_000  # headers of a request
_MOST_PIECES: Final = 10_000  # chunks of a body that may be of any size;
_PIECE_BYTES: Final = 16  # with more chunks, their average size must be at least this
_SMALL_ANSWER_BYTES: Final = 64 * 1024

Answer = Response | StreamResponse

_telling: Final[set[asyncio.Task[None]]] = set()  # the loop holds only weak references to tasks


class HttpConnection(asyncio.Protocol):
    """Speaks HTTP/1.1 with one client."""

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._limits = server.limits
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._parser = httptools.HttpRequestParser(self)
        self._peer = ""
        self._certificate: Any = None
        self._header_bytes = self._header_size = self._fields = self._pieces = 0
        self._in_headers = self._mixed = self._begun = False
        self._held = b""  # received while reading was paused, and not parsed yet
        self._incoming: Request | None = None
        self._waiting: deque[Request] = deque()
        self._current: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._paused = False
        self._expects = False
        self._body_began = self._paused_at = 0.0
        self._lost = False
        self._discarding = False
        self._writable: asyncio.Future[None] | None = None
        self._unread: Undelivered | None = None  # of an answer that is not in the kernel's buffer yet
        self._unheard: Undelivered | None = None  # of one that is, and that the client may not have read
        self._at_loss: Callable[[], None] | None = None  # of an answer that comes later
        self._answered_at = 0.0
        self.deadline: float | None = None
        self.why = ""
        self.admitted = Admitted.NOT

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The task that answers the current request."""
        return self._task

    @property
    def address(self) -> str:
        """The client's address; "local" for a Unix socket."""
        return self._peer

    @property
    def rests_since(self) -> float | None:
        """When the connection became idle, by the loop's clock; None while a request is being answered."""
        if self._current is not None or self.deadline is None:
            return None
        match self.why:
            case "idle":
                return self.deadline - self._limits.idle_s
            case "header":
                return self.deadline - self._limits.header_s
            case "body":
                return self._body_began
            case _:
                return self.deadline - _LINGER_S

    def socket(self) -> Any:
        """The connection's socket."""
        return self._transport.get_extra_info("socket")

    def shed(self) -> None:
        """Close the connection to make room for others."""
        self._server.cut_off("no room")
        self._transport.abort()

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self._current is not None

    @property
    def full(self) -> bool:
        """Whether reading is paused."""
        return self._paused

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        address = transport.get_extra_info("peername")
        self._peer = address[0] if isinstance(address, tuple) else "local"
        secure = transport.get_extra_info("ssl_object") is not None
        if secure:
            self._certificate = transport.get_extra_info("peercert") or {}
        # Limits of 0, so that `resume_writing` is called when the kernel has everything. With TLS the limit must be
        # 1, because an empty buffer would count as full.
        self._transport.set_write_buffer_limits(high=1 if secure else 0, low=0)
        self._expect("header", self._limits.header_s)
        self._server.opened(self)
        if self.admitted is Admitted.NOT:
            self._refuse(no_room())
        elif not isinstance(address, tuple) and not is_own_peer(transport.get_extra_info("socket")):
            # The file's mode keeps other users out. If someone has changed it, every user would be an administrator.
            self._refuse(NotTheSameUser("this socket is only for the user who created it, and root", status=403))

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._server.closed(self)
        if self._incoming is not None:
            self._incoming.lose()
        unread, self._unread = self._unread, None
        if unread is not None:
            self._tell(unread)
        # The kernel resets a connection that its client closed with unread data. A reset long after the answer has
        # another cause: the network, or a client that has worked since.
        if isinstance(error, ConnectionError) and self._loop.time() - self._answered_at < _RESET_S:
            self._not_heard()
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_exception(ConnectionResetError("the client is gone"))
        if self._task is not None:
            self._task.cancel()
        if self._at_loss is not None:
            self._at_loss()

    def data_received(self, data: bytes) -> None:
        if self._paused:  # this was already in transit
            self._held += data
            return
        if len(data) > _AT_ONCE_BYTES:
            self._look_at_parts(data)
            return
        if self._discarding:
            return
        key = None
        if self._current is None and self._incoming is None and self._writable is None:
            heads, end = self._server.heads, data.find(HEAD_END) + 4
            whole = heads.get_whole(data[:end])
            if whole is not None and whole[1] == len(data) - end:
                if self._answer_known(whole[0], None, data[end:]):
                    return
            elif (found := cut(data)) is not None:
                key, known = found.key, heads.get(found.key)
                if known is not None:
                    if found.sequence is None:
                        heads.learn_whole(data, len(found.body), known)
                    if self._answer_known(known, found.sequence, found.body):
                        return
        self._parse(data)
        if key is not None and self._current is not None and self._incoming is None and not self._waiting:
            self._current.key = key  # the data was this request and nothing else

    def _parse(self, data: bytes) -> None:
        self._mixed = self._incoming is not None and not self._in_headers  # the data holds more than the next head
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if self._current is not None:
                self._current.keep_alive = False  # what follows is not HTTP/1.1
            self._discarding = True
        except httptools.HttpParserError as error:
            # The parser wraps the errors that its callbacks below raise.
            inner = error.__context__
            refused = inner if isinstance(inner, Refused) else Refused(f"this is not HTTP/1.1: {error}", status=400)
            self._refuse(refused)
            return
        if self._in_headers and not self._mixed:  # an incomplete head; `on_header` counts complete headers
            self._header_bytes += len(data)
            if self._header_bytes > self._limits.header_bytes:
                self._refuse(large_head(self._limits))

    def _answer_known(self, known: KnownHead, sequence: int | None, body: bytes) -> bool:
        """Answer a request with a known head, at once or from a task. False if only the parser may see it."""
        if self.admitted is not Admitted.FULLY or self._transport.is_closing():
            return False
        self._unread = self._unheard = None  # a client that sends the next request has read the last answer
        answer = self._server.answer_known(known, sequence, body, self._peer, self._certificate)
        if isinstance(answer, tuple):
            if self._write(answer, None):
                self.why, self.deadline = "idle", self._loop.time() + self._limits.idle_s
            return True
        request = known.request(self, self._peer, self._certificate, body, sequence)
        if isinstance(answer, DeferredAnswer):
            self._current = request
            self._at_loss = answer.at_loss
            self.deadline = None
            answer.run(partial(self._answer_later, request))
        else:
            request.failure = answer
            self._begin(request)
        return True

    def _answer_later(self, request: Request, later: DeferredAnswer) -> None:
        self._current = self._at_loss = None
        if self._lost or self._transport.is_closing():
            return
        answer = later.rendered()
        if isinstance(answer, tuple):
            if self._write(answer, request):
                self._next(request)
        else:
            request.failure = answer
            self._begin(request)

    def _write(self, answer: RenderedAnswer, request: Request | None) -> bool:
        """Write an answer. False if the client does not read: then a task waits until it does."""
        content, undelivered, release = answer
        self._unread = undelivered
        self._transport.write(content)
        if self._writable is not None:
            waiting = Response(undelivered=undelivered)
            waiting.release = release
            if request is None:
                request = Request(self, self._peer, self._certificate)
                request.complete = True
            self._current = request
            self._task = self._loop.create_task(self._run(request, waiting))
            return False
        if undelivered is not None:
            self._sent(undelivered)
        if release is not None:
            release()
        return True

    def _look_at_parts(self, data: bytes) -> None:
        at = 0
        while at < len(data) and not self.full:
            self.data_received(data[at : at + _AT_ONCE_BYTES])
            at += _AT_ONCE_BYTES
        self._held = data[at:]

    def eof_received(self) -> None:
        if self._unheard is not None and unacknowledged(self.socket()):
            self._not_heard()  # the client closed the connection before the answer arrived

    def _not_heard(self) -> None:
        unheard, self._unheard = self._unheard, None
        if unheard is not None:
            self._tell(unheard)

    def _tell(self, undelivered: Undelivered) -> None:
        telling = self._loop.create_task(_tell(undelivered))
        _telling.add(telling)
        telling.add_done_callback(_telling.discard)

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()
        self._expect("write", self._limits.write_s)

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if self.why == "write":
            self.deadline = None
            self._expect_the_rest()
        if writable is not None and not writable.done():
            writable.set_result(None)

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        self._unread = self._unheard = None  # a client that sends the next request has read the last answer
        self._in_headers = True
        self._begun = False
        self._header_bytes = self._header_size = self._fields = self._pieces = 0
        self._incoming = Request(self, self._peer, self._certificate)
        self._incoming.in_reserve = self.admitted is Admitted.IN_RESERVE
        if self._current is None:
            if self._writable is None:  # `_expect` inlined: every request would call it three times
                self.why, self.deadline = "header", self._loop.time() + self._limits.header_s
            else:
                self._expect("header", self._limits.header_s)

    def on_url(self, url: bytes) -> None:
        assert self._incoming is not None
        self._incoming.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._incoming is not None
        key, text = NAMES.get(name) or name.decode("latin-1").lower(), value.decode("latin-1")
        self._header_size += len(name) + len(value) + 4
        self._fields += 1
        if self._header_size > self._limits.header_bytes:
            raise large_head(self._limits)
        if self._fields > _MOST_FIELDS:
            raise Refused(f"the request has more than {_MOST_FIELDS} headers, which is the limit", status=431)
        if not self._in_headers:
            return  # trailers must not change the request or its caller
        headers = self._incoming.headers
        if key in headers:
            if key == "host":
                raise Refused("the request has two Host headers, so it is not clear which one is meant", status=400)
            text = f"{headers[key]}, {text}"
        headers[key] = text

    def on_headers_complete(self) -> None:
        request = self._incoming
        assert request is not None
        self._in_headers = False
        if len(request.target) > self._limits.header_bytes:
            raise large_head(self._limits)
        request.method = self._parser.get_method().decode("latin-1")
        request.keep_alive = self._parser.should_keep_alive() and not request.in_reserve
        path, _, query = request.target.decode("latin-1").partition("?")
        request.path, request.query = path, query.partition("#")[0]
        if "%" in path:
            request.path = unquoted(path)
        headers = request.headers
        host = headers.get("host")
        if host is None or parse_host(host) is None or "transfer-encoding" in headers:
            check_head(headers, self._parser.get_http_version())
        length = headers.get("content-length")
        size = int(length) if length is not None and length.isdigit() else 0
        if size > self._limits.body_bytes:
            raise TooLarge(
                f"the request's body would have {size} bytes, the limit is {self._limits.body_bytes}; nothing was done",
                status=413,
            )
        self._expects = "expect" in headers and headers["expect"].lower() == "100-continue"
        self._body_began = began = self._loop.time()
        chunked = "transfer-encoding" in headers
        if size or chunked:
            if self._writable is None:
                self.why, self.deadline = "body", began + self._limits.body_grace_s
            else:
                self._expect("body", self._limits.body_grace_s)
        if size > _WAIT_FOR_BYTES or self._expects or chunked:
            self._begun = True
            self._begin(request)

    def on_body(self, content: bytes) -> None:
        request = self._incoming
        assert request is not None
        request.feed(content)
        if request.received > self._limits.body_bytes:
            most = self._limits.body_bytes
            raise TooLarge(f"the body has more than {most} bytes, which is the limit; nothing was done", status=413)
        self._pieces += 1
        if self._pieces > _MOST_PIECES and request.received < self._pieces * _PIECE_BYTES:
            raise Refused(
                f"the body comes in more than {_MOST_PIECES} chunks of less than {_PIECE_BYTES} bytes each, on "
                "average; nothing was done. Send larger ones",
                status=400,
            )
        if request.buffered >= HIGH_BYTES:
            self._pause()
        elif self.why == "body":
            # The deadline moves with the bytes received, so a steady client has all the time it needs.
            rate = self._limits.body_bytes_per_s
            more = request.received / rate if rate else self._loop.time() - self._body_began
            self.deadline = self._body_began + self._limits.body_grace_s + more

    def on_message_complete(self) -> None:
        request, self._incoming = self._incoming, None
        assert request is not None
        if self.why == "body":
            self.deadline = None
        self._mixed = True
        request.end()
        if not self._begun:
            self._begin(request)

    # Called by the request that is being read.

    def go_on(self) -> None:
        if not self._paused or self._lost or len(self._waiting) >= _MOST_WAITING:
            return
        self._paused = False
        self._body_began += self._loop.time() - self._paused_at  # the pause does not count against the client
        held, self._held = self._held, b""
        self.data_received(held)
        if not self._paused:
            self._transport.resume_reading()
            self._expect_the_rest()

    def expect(self) -> None:
        if self._expects and not self._lost:
            self._expects = False
            self._transport.write(CONTINUE)

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._paused_at = self._loop.time()
            self.deadline = None  # the delay is the server's, not the client's
            self._transport.pause_reading()

    def _expect(self, why: str, seconds: float) -> None:
        if self._writable is not None and why != "linger":
            # A client that does not read its answers gains no time by sending more.
            why, seconds = "write", self._limits.write_s
            if self.why == why and self.deadline is not None:
                return
        self.why = why
        self.deadline = self._loop.time() + seconds

    def _expect_the_rest(self) -> None:
        """Set the deadline for the rest of a request that is partly received."""
        if self._incoming is None or self._paused:
            return
        if self._in_headers:
            self._expect("header", self._limits.header_s)
        else:
            self._expect("body", self._limits.body_grace_s)

    def _begin(self, request: Request) -> None:
        if self._current is not None:
            self._waiting.append(request)
            if len(self._waiting) >= _MOST_WAITING:
                self._pause()
            return
        self._current = request
        if request.complete:
            self.deadline = None
        self._task = self._loop.create_task(self._run(request))

    async def _run(self, request: Request, written: Response | None = None) -> None:
        """Answer a request; or, if the answer is `written` already, wait until the client reads it."""
        try:
            answer = written or await self._server.handle(request)
            if isinstance(answer, Response):
                try:
                    await (self._answer(request, answer) if written is None else self._flushed(answer))
                finally:
                    if answer.release is not None:
                        answer.release()
            else:
                await self._stream(request, answer)
        except ConnectionError:
            return
        except asyncio.CancelledError:  # by the server: a partial answer must not look complete
            self._task = None  # the task keeps its error, and the error everything the call had in memory
            self._transport.abort()
            raise
        except Exception:
            logger.exception("a response could not be sent", extra={"path": request.path})
            self._transport.abort()
            return
        self._next(request)

    async def _answer(self, request: Request, answer: Response) -> None:
        if self._lost or self._transport.is_closing():
            if answer.undelivered is not None:
                await answer.undelivered()
            return
        body = b"" if request.method == "HEAD" else answer.body
        keep_alive = request.keep_alive and request.complete
        self._unread = answer.undelivered
        start = head(answer.status, answer.media, answer.headers, length=len(answer.body), keep_alive=keep_alive)
        if len(body) <= _SMALL_ANSWER_BYTES:
            self._transport.write(start + body)
        else:  # copying the body would take longer than a second write
            self._transport.write(start)
            self._transport.write(body)
        await self._flushed(answer)

    async def _flushed(self, answer: Response) -> None:
        if self._writable is not None:
            await self._writable
        self._sent(answer.undelivered)

    def _sent(self, undelivered: Undelivered | None) -> None:
        """Note that the kernel has all of an answer."""
        self._unread = None
        self._unheard = undelivered
        self._answered_at = self._loop.time()

    async def _stream(self, request: Request, answer: StreamResponse) -> None:
        chunked = answer.length is None
        keep_alive = request.keep_alive and request.complete
        try:
            if self._lost:
                return
            self._transport.write(
                head(answer.status, answer.media, answer.headers, length=answer.length, keep_alive=keep_alive)
            )
            if request.method != "HEAD":
                async for content in answer.chunks:
                    if self._transport.is_closing():
                        return
                    self._transport.write(chunk(content) if chunked else content)
                    if self._writable is not None:
                        await self._writable
                if chunked:
                    self._transport.write(LAST_CHUNK)
        finally:
            await close_chunks(answer.chunks)

    def _next(self, request: Request) -> None:
        """After an answer: close the connection, handle the next request, or wait for one."""
        self._current = self._task = None
        if self._lost:
            return
        if not request.complete:
            self._linger()
        elif not request.keep_alive:
            self._transport.close()
        else:
            if self._waiting:
                self._begin(self._waiting.popleft())
            if self._paused:
                self.go_on()  # reading may have been paused by the last part of a body
            if self._current is not None or self._incoming is not None:  # type: ignore[redundant-expr]  # by `_begin`
                self._expect_the_rest()
            elif self._writable is None:
                self.why, self.deadline = "idle", self._loop.time() + self._limits.idle_s
            else:
                self._expect("idle", self._limits.idle_s)

    def _refuse(self, refused: Refused) -> None:
        """Answer with an error, once, and close the connection."""
        if self._lost or self._discarding:
            return
        self._server.cut_off(str(refused.status))
        if self._current is not None:
            self._discarding = True
            if self._incoming is not None and self._incoming is self._current:
                self._incoming.fail(refused)  # the handler that reads the body gets the error
            else:  # another answer may be half written, so no error can be sent
                self._transport.abort()
            return
        answer = self._server.refuse(refused)
        self._transport.write(
            head(answer.status, answer.media, answer.headers, length=len(answer.body), keep_alive=False) + answer.body
        )
        self._linger()

    def _linger(self) -> None:
        """Close the connection, but leave the client time to read the answer: a reset would discard it."""
        self._discarding = True
        self._held = b""
        self._expect("linger", _LINGER_S)
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def overdue(self) -> None:
        """Close the connection because its deadline has passed. A client that may still read gets an error."""
        self.deadline = None
        if self.why == "linger":
            self._transport.abort()
        elif self.why == "idle":
            self._transport.close()
        elif self.why == "write":
            self._server.cut_off("slow reader")
            self._transport.abort()
        else:
            self._server.cut_off(f"slow {self.why}")
            if self.why == "header" and self._incoming is None:
                self._transport.close()  # the client has sent nothing
            else:
                self._refuse(Refused(f"the request's {self.why} took too long; the connection is closed", status=408))

    def leave(self) -> None:
        """Close the connection after the current request, because the server is stopping."""
        if self._current is None:
            self._transport.close()
        else:
            self._current.keep_alive = False
            self._waiting.clear()

    def abort(self) -> None:
        """Close the connection now."""
        self._transport.abort()


async def _tell(undelivered: Undelivered) -> None:
    try:
        await undelivered()
    except HoldfastError as error:  # the lease will expire by itself
        logger.debug("a lost response could not be reported", extra={"why": str(error)})
