"""Connections to a server over TCP, TLS and Unix sockets, and which errors are permanent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from holdfast.client.opening import Address
from holdfast.env import Clock
from holdfast.env.process import asyncio
from holdfast.env.sockets import (
    check_listener,
    connect_tcp,
    connect_unix,
    has_ended,
    interrupt,
    limit_receives,
    sent_now,
    short_name,
)
from holdfast.errors import InvalidRequest, Unauthenticated

if TYPE_CHECKING:
    import ssl


_Result = TypeVar("_Result")

_RECEIVE_BYTES: Final = 256 * 1024
_SLICE_S: Final = 10.0
_USUAL_BYTES: Final = 16 * 1024  # a buffer that costs little to make, for answers that are mostly small


class Transport(Protocol):
    """One connection."""

    async def send(self, content: bytes, timeout_s: float) -> None:
        """Hand all of it to the system; OSError (TimeoutError among them) where that fails."""

    async def receive(self, timeout_s: float) -> bytes:
        """Return the bytes that arrived; empty at the end."""

    async def exchange(self, content: bytes, timeout_s: float) -> bytes:
        """The same as `send` and `receive`: mostly a whole request, and a whole answer."""

    def is_ours(self) -> bool:
        """Return whether the caller can use it: a connection belongs to one event loop."""

    def ended(self) -> bool:
        """Whether it is of no use any more, as far as one can know without asking."""

    def close(self) -> None:
        """Close it at once, without a goodbye."""

    def interrupt(self) -> None:
        """End the receive that another thread or task is waiting in."""

    def forget(self) -> None:
        """Drop it in a child after a fork; the parent keeps using it."""


class Network(Protocol):
    """How to connect and how to pause."""

    async def connect(self, address: Address, timeout_s: float, tls: ssl.SSLContext | None) -> Transport: ...

    async def pause(self, seconds: float) -> None: ...

    async def aside(self, work: Callable[[], _Result]) -> _Result:
        """Run something that may wait for the disk."""


def run(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine that never suspends, as threads do, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: _Result = end.value
        return result
    coroutine.close()
    raise AssertionError("a call for threads waited as a task does")


class ThreadTransport:
    """A connection whose calls block."""

    def __init__(self, connection: Any, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._size = _USUAL_BYTES

    async def send(self, content: bytes, timeout_s: float) -> None:
        self._send(content, timeout_s)

    async def receive(self, timeout_s: float) -> bytes:
        return self._receive(timeout_s)

    async def exchange(self, content: bytes, timeout_s: float) -> bytes:
        self._send(content, timeout_s)
        return self._receive(timeout_s)

    def _send(self, content: bytes, timeout_s: float) -> None:
        self._limit(timeout_s)
        self._connection.sendall(content)

    def _receive(self, timeout_s: float) -> bytes:
        self._limit(timeout_s)
        return self._received()

    def _received(self) -> bytes:
        content: bytes = self._connection.recv(self._size)
        self._size = _RECEIVE_BYTES if len(content) == self._size else _USUAL_BYTES
        return content

    def _limit(self, timeout_s: float) -> None:
        if timeout_s != self._timeout_s:  # a system call each time
            self._connection.settimeout(timeout_s)
            self._timeout_s = timeout_s

    def is_ours(self) -> bool:
        return True

    def ended(self) -> bool:
        return has_ended(self._connection)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.close()

    forget = close

    def interrupt(self) -> None:
        interrupt(self._connection)


class PlainThreadTransport(ThreadTransport):
    """A connection without TLS, whose calls block. One call to the system sends a request, one receives its answer.

    The system limits how long a receive blocks, in slices of the time that a caller has: that is the same for nearly
    all calls, so it need not be set for each of them.
    """

    def __init__(self, connection: Any, timeout_s: float) -> None:
        super().__init__(connection, timeout_s)
        self._slice_s = min(timeout_s, _SLICE_S)
        limit_receives(connection, self._slice_s)

    async def exchange(self, content: bytes, timeout_s: float) -> bytes:
        sent = sent_now(self._connection, content)
        if sent < len(content):
            self._send_rest(content, sent, timeout_s)
        if timeout_s >= _SLICE_S == self._slice_s:  # the usual case, without a loop
            try:
                return self._received()
            except BlockingIOError:
                timeout_s -= _SLICE_S
        return self._receive(timeout_s)

    def _send(self, content: bytes, timeout_s: float) -> None:
        sent = sent_now(self._connection, content)
        if sent < len(content):
            self._send_rest(content, sent, timeout_s)

    def _send_rest(self, content: bytes, sent: int, timeout_s: float) -> None:
        self._connection.settimeout(timeout_s)
        self._connection.sendall(memoryview(content)[sent:])
        self._connection.settimeout(None)

    def _receive(self, timeout_s: float) -> bytes:
        left_s = timeout_s
        while left_s > 0:
            slice_s = min(left_s, _SLICE_S)
            if slice_s != self._slice_s:
                limit_receives(self._connection, slice_s)
                self._slice_s = slice_s
            try:
                return self._received()
            except BlockingIOError:
                left_s -= slice_s
        raise TimeoutError("no response arrived in time")


class ThreadNetwork:
    """Connections and pauses for threads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def connect(self, address: Address, timeout_s: float, tls: ssl.SSLContext | None) -> Transport:
        if address.socket is not None:
            return PlainThreadTransport(connect_unix(address.socket, timeout_s), timeout_s)
        connection = connect_tcp(address.host, address.port, timeout_s, tls)
        return (PlainThreadTransport if tls is None else ThreadTransport)(connection, timeout_s)

    async def pause(self, seconds: float) -> None:
        self._clock.wait(threading.Event(), seconds)

    async def aside(self, work: Callable[[], _Result]) -> _Result:
        return work()


if TYPE_CHECKING:
    _Protocol = asyncio.Protocol
else:
    _Protocol = object  # an event loop asks for the methods only, and asyncio would be loaded for the name


class TaskTransport(_Protocol):
    """A connection for the tasks of one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._content: list[bytes] = []
        self._waiting: asyncio.Future[None] | None = None
        self._until = 0.0  # how long the one that waits does so
        self._alarm: asyncio.TimerHandle | None = None
        self._writable: asyncio.Future[None] | None = None
        self._over = False
        self._error: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, content: bytes) -> None:
        self._content.append(content)
        self._wake(self._waiting)

    def eof_received(self) -> None:
        """Let the loop close the connection."""

    def connection_lost(self, error: Exception | None) -> None:
        self._over = True
        self._error = error
        if self._alarm is not None:
            self._alarm.cancel()
        self._wake(self._waiting)
        self._wake(self._writable)

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        self._wake(self._writable)
        self._writable = None

    @staticmethod
    def _wake(waiting: asyncio.Future[None] | None) -> None:
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def send(self, content: bytes, timeout_s: float) -> None:
        self._write(content)
        if self._writable is not None:
            await self._written(timeout_s)

    def _write(self, content: bytes) -> None:
        if self._over or self._transport.is_closing():
            raise self._error or ConnectionResetError("the connection is closed")
        self._transport.write(content)

    async def _written(self, timeout_s: float) -> None:
        if self._writable is not None:
            async with asyncio.timeout(timeout_s):
                await self._writable

    async def receive(self, timeout_s: float) -> bytes:
        if not self._content and not self._over:
            self._waiting = waiting = self._loop.create_future()
            self._until = self._loop.time() + timeout_s
            if self._alarm is None or self._alarm.when() > self._until:
                self._set_alarm()
            try:
                await waiting
            finally:
                self._waiting = None
        if not self._content and not self._over:
            raise TimeoutError("no response arrived in time")
        if not self._content and self._error is not None:
            raise self._error
        content = self._content[0] if len(self._content) == 1 else b"".join(self._content)
        self._content.clear()
        return content

    async def exchange(self, content: bytes, timeout_s: float) -> bytes:
        self._write(content)
        if self._writable is not None:
            await self._written(timeout_s)
        return await self.receive(timeout_s)

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(self._until, self._ring)

    def _ring(self) -> None:
        """Wake one whose time is up. Most have long been answered: an alarm for each would cost more than that."""
        self._alarm = None
        if self._waiting is not None:
            if self._loop.time() >= self._until:
                self._wake(self._waiting)
            else:
                self._set_alarm()

    def is_ours(self) -> bool:
        return self._loop is _loop()

    def ended(self) -> bool:
        return self._over or bool(self._content)

    def close(self) -> None:
        if self._loop is _loop():
            self._abort()
        elif not self._loop.is_closed():  # called by a thread, or a finalizer in one
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._abort)

    interrupt = close

    def _abort(self) -> None:
        if not self._over:  # a transport that has said so is let go of by its loop, and cannot be aborted any more
            self._transport.abort()

    def forget(self) -> None:
        """Nothing: to take it from the loop would take it from the parent's, too."""


def _loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class TaskNetwork:
    """Connections and pauses for tasks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def connect(self, address: Address, timeout_s: float, tls: ssl.SSLContext | None) -> Transport:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            if address.socket is not None:
                with short_name(address.socket) as name:
                    transport, wire = await loop.create_unix_connection(TaskTransport, name)
                try:
                    check_listener(transport.get_extra_info("socket").fileno(), address.socket)
                except BaseException:
                    transport.abort()
                    raise
            else:
                _, wire = await loop.create_connection(TaskTransport, address.host, address.port, ssl=tls)
        return wire

    async def pause(self, seconds: float) -> None:
        await self._clock.wait_async(asyncio.Event(), seconds)

    async def aside(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.to_thread(work)


# TLS with a server: whom we trust, what we show of ourselves, and errors that would be the same the next time.


CA: Final = "HOLDFAST_TLS_CA"
CERTIFICATE: Final = "HOLDFAST_TLS_CERT"
KEY: Final = "HOLDFAST_TLS_KEY"


def context_of(tls: ssl.SSLContext | str | PathLike[str] | None, environ: Mapping[str, str]) -> ssl.SSLContext:
    """The context that was given; or one that trusts the file that was given, with what the variables say."""
    import ssl

    if isinstance(tls, ssl.SSLContext):
        return tls
    said = f"tls={tls!r}" if tls is not None else f"{CA}={environ.get(CA)}"
    context = _trusting(fspath(tls) if tls is not None else environ.get(CA) or None, said)
    certificate, key = environ.get(CERTIFICATE), environ.get(KEY) or None
    if certificate:
        _show(context, certificate, key, f"{CERTIFICATE}={certificate}" + (f" with {KEY}={key}" if key else ""))
    return context


def context_from(
    ca: str | None, certificate: str | None, key: str | None, environ: Mapping[str, str]
) -> ssl.SSLContext:
    """A context from files; where none is named, what the variables say."""
    more = {name: value for name, value in ((CERTIFICATE, certificate), (KEY, key)) if value is not None}
    return context_of(ca, {**environ, **({KEY: ""} if certificate else {}), **more})


def _trusting(ca: str | None, said: str) -> ssl.SSLContext:
    import ssl

    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(f"{said} cannot be used: {error}. Give a file of certificates to trust") from None


def _show(context: ssl.SSLContext, certificate: str, key: str | None, said: str) -> None:
    try:
        # Nobody is there to be asked for a passphrase; without this, OpenSSL would wait at the terminal.
        context.load_cert_chain(certificate, key, password=_refuse_passphrase)
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"{said} cannot be used: {error}. Give a file with your certificate and one with its key, both PEM; "
            "or one that has both"
        ) from None


def _refuse_passphrase() -> str:
    raise ValueError("the key has a passphrase, which cannot be asked for here: remove the passphrase")


# Ends of a TLS connection that do not trust each other: to try again would change nothing.


_UNTRUSTED: Final = "CERTIFICATE_VERIFY_FAILED"
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"})
_ALERT: Final = "ALERT"
_PASSING: Final = "INTERNAL_ERROR"
# What OpenSSL rejects only in strict mode (VERIFY_X509_STRICT), the default from Python 3.13 on.
_STRICT: Final = range(80, 94)
_SHOW_ONE: Final = f"set {CERTIFICATE}, or give tls= an ssl.SSLContext with one"


def failure_text(address: Address, error: BaseException, *, fresh: bool) -> str:
    """What an error says; and what it may mean where a server hangs up before it has said a word."""
    text = str(error) or type(error).__name__
    if address.secure and fresh and has_hung_up(error):
        text += f" (servers do this if they require a client certificate and get none that they trust: {_SHOW_ONE})"
    return text


def has_hung_up(error: BaseException) -> bool:
    """Whether the other end closed the connection, and did not say why."""
    return isinstance(error, (ConnectionResetError, BrokenPipeError, EOFError)) or "EOF" in str(_reason(error))


def distrust(error: BaseException) -> str:
    """What is wrong with the certificate that a server showed; nothing where that is not what the error tells."""
    return (getattr(error, "verify_message", "") or str(error)) if _reason(error) == _UNTRUSTED else ""


def strictness(error: BaseException) -> str:
    """What to do about a certificate that only strict checks refuse; nothing where another thing is wrong with it."""
    if getattr(error, "verify_code", 0) not in _STRICT:
        return ""
    return (
        "Python 3.13 and newer check certificates more strictly. Have its issuer reissue it with an authority key "
        "identifier, and with a key usage in the issuer's own; the guide `Secure the server` has commands for that"
    )


def _reason(error: BaseException) -> object:
    return getattr(error, "reason", None)


def tls_refusal(address: Address, error: BaseException) -> Unauthenticated | None:
    """What to tell of an error that will be the same the next time; None for one that may pass."""
    reason = _reason(error)
    if not address.secure or not isinstance(reason, str):
        return None
    why = distrust(error)
    if why:
        advice = strictness(error) or (
            "Use a name that is in its certificate, and give tls= the certificate of its issuer, unless this is not "
            "your server"
        )
        return Unauthenticated(
            f"the server at {address.text} has not proved its identity: {why}. Nothing was sent. {advice}"
        )
    if reason in _NO_TLS:
        return Unauthenticated(
            f"what listens at {address.text} does not speak TLS: {error}. Nothing was sent; use its right port, or "
            "http://"
        )
    if _ALERT in reason and _PASSING not in reason:
        return Unauthenticated(
            f"the server at {address.text} refused the connection: {error}. Nothing was done. If it requires a client "
            f"certificate, present one that its issuer has signed: {_SHOW_ONE}"
        )
    return None
