"""Calls to a server: a connection from the pool, the request, the answer, and retries where that is safe."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import httptools
import msgspec

from holdfast.client.network import Network, Transport, failure_text, tls_refusal
from holdfast.client.opening import Address, is_address
from holdfast.client.owners import STRAIGHT_CONNECT_S, STRAIGHT_WAIT_S, Endpoint, Owners, straight_s
from holdfast.env import World
from holdfast.errors import Closed, HoldfastError, Unavailable, UnknownTopic
from holdfast.protocol.media import JSON, MSGPACK, OWNER, RUNS, ErrorAnswer, decode, encoder, error_of

if TYPE_CHECKING:
    import ssl


# One state machine for the way to a server, shared by every call of a client.
#
#     open ── a connection breaks, or none can be made ──► broken ── the pause is over ──► trying
#       ▲                                                    ▲                               │
#       └──────────── a connection is made ◄─────────────────┼───────────────────────────────┤
#                                                            └────── none can be made ◄──────┘
#
# While it is broken nobody tries but when the pause is over, however many wait; each pause is longer than the one
# before, up to a limit, and nobody's is quite as long as another's. The limit is low at first: a server that starts
# again is back within seconds, and its clients should be as soon. One that stays away is asked less often.


FIRST_PAUSE_MS: Final = 25
SOON_PAUSE_MS: Final = 250  # while the server may only be starting again
SOON_S: Final = 5
MOST_PAUSE_MS: Final = 1_000

_NS: Final = 1_000_000


class Reconnecting:
    """Tracks whether the server can be reached, and when to try again."""

    def __init__(self, world: World) -> None:
        self._clock = world.clock
        self._random = world.ids.random_u32
        self.failures = 0  # one after the other
        self._next_ns = 0
        self._since_ns = 0  # of the first of them

    @property
    def is_open(self) -> bool:
        return self.failures == 0

    def pause_s(self) -> float:
        """Return how long to wait before connecting; 0 if nothing is wrong."""
        if self.failures == 0:
            return 0.0
        return max(self._next_ns - self._clock.monotonic_ns(), 0) / 1e9

    def failed(self) -> None:
        """Note that no connection could be made."""
        now_ns = self._clock.monotonic_ns()
        if self.failures and now_ns < self._next_ns:
            return  # another caller has noted that just now
        if not self.failures:
            self._since_ns = now_ns
        self.failures += 1
        self._next_ns = now_ns + round(self.backoff_ms(self.failures - 1) * _NS)

    def opened(self) -> None:
        """Note that a connection was made."""
        self.failures = 0

    def backoff_ms(self, attempt: int) -> float:
        """Return the pause before the next attempt: it doubles each time, and half of it is random."""
        is_back_soon = self.failures and self._clock.monotonic_ns() - self._since_ns < SOON_S * 1_000 * _NS
        longest = min(FIRST_PAUSE_MS << min(attempt, 16), SOON_PAUSE_MS if is_back_soon else MOST_PAUSE_MS)
        return longest * (0.5 + self._random() / 2**33)


_IDLE_NS: Final = 500_000_000  # a connection that was idle this long is checked before use
_MOST_IDLE: Final = 64
_AGAIN: Final = frozenset({429, 502, 503, 504})
_TRIES: Final = 6  # of several nodes, each gets this part of the time
_CONNECT_S: Final = 3.0  # of several nodes, one that takes longer is left for the next
_MOST_WAIT_S: Final = 20.0  # one call waits no longer than that; then it asks again


class Unsent(Exception):
    """The server received nothing, or nothing that it could take for a call."""


class AnswerLost(Exception):
    """The request was sent, in part or whole, and no complete answer came back."""


class PooledConnection:
    """A connection, and the reader of its answers."""

    def __init__(self, wire: Transport, endpoint: Endpoint) -> None:
        self.wire = wire
        self.endpoint = endpoint
        self.reader = AnswerReader()
        self.used_ns = 0
        self.fresh = True


class Caller:
    """Calls one server. Safe to use from any thread, or from the tasks of any loop, as its ways are."""

    def __init__(
        self,
        world: World,
        ways: Network,
        address: Address,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self.world = world
        self.owners = Owners(world.clock, (address, *address.others))
        self._given = self.owners.given
        self._current = self._given[0]  # the one that is called for what has no known owner
        self.timeout_s = timeout_s
        self.closed = False
        self.on_broken: Callable[[], None] | None = None  # for one who can do something about it
        self.state = Reconnecting(world)
        self.ways = ways
        self._tls = tls
        self._mono_ns = world.clock.monotonic_ns
        self.common = common_headers(address.authority, token, {})
        self._behind_path = _behind_path(self.common, MSGPACK)
        self._waiting: set[PooledConnection] = set()  # of calls that wait for something to happen, such as a message

    @property
    def address(self) -> Address:
        """The given address that is called now."""
        return self._current.address

    @property
    def most_wait_s(self) -> float:
        """How long one call may let the server wait for something to happen. Whoever wants more asks again."""
        return STRAIGHT_WAIT_S if self.owners.places else _MOST_WAIT_S

    def check_open(self) -> None:
        if self.closed:
            raise Closed(f"the connection to {self.address.text} is closed; connect again")

    async def call(self, ask: Ask) -> Any:
        """The answer's value. What the server refuses is raised as the error that it is.

        An error that comes after an earlier attempt whose fate is unknown has `repeated` set.
        """
        waits = ask.again and ask.wait_s > 0
        attempt = partial(self._attempt, ask, request_bytes(ask, self.common), waits)
        return self.value_of(await self.answered(ask, attempt), ask.answers)

    def post_head(self, path: str, more: int | str = "") -> bytes:
        """Return the head of a POST to this path, up to the digits of its length: for calls that are made often."""
        return b"POST %b%b" % (f"{path}{more}".encode("latin-1"), self._behind_path)

    def value_of(self, answer: Answer, kind: Any) -> Any:
        """Decode an answer; reports one that is not from a Holdfast server."""
        try:
            if kind is not None and kind is not bytes and answer.headers.get("content-type") == MSGPACK:  # as most are
                return decode(answer.body, MSGPACK, kind)
            return _value(answer, kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise HoldfastError(
                f"the server at {self.address.text} responded with {answer.status}, but not as Holdfast would: "
                f"{error}. Check the address, and that client and server have the same version"
            ) from None

    async def answered(self, ask: Ask, attempt_one: Callable[[float], Awaitable[Answer]]) -> Answer:
        """Return the answer of one of several attempts, each with the seconds that are left."""
        timeout_s = self.timeout_s + ask.wait_s
        deadline_ns = self._mono_ns() + round(timeout_s * 1e9)
        attempt, repeated = 0, False
        problem: HoldfastError | None = None
        unreachable_ns: int | None = None  # since when nobody is there at all
        most_s = self._most_s(ask)
        while True:
            if self.closed:
                self.check_open()
            left_s = timeout_s if not attempt else max((deadline_ns - self._mono_ns()) / 1e9, 0.001)
            retry_after = 0.0
            try:
                answer = await attempt_one(min(left_s, most_s))
            except Unsent as failure:
                problem = self._after(problem, failure)
                unreachable_ns = unreachable_ns or self._mono_ns()
            except AnswerLost as failure:
                unreachable_ns = None
                if not ask.again:
                    raise self._unknown(ask, failure) from None
                repeated = True
                problem = self._after(problem, failure)
            else:
                unreachable_ns = None
                if answer.status < 300:
                    return answer
                problem = _error(answer, self.address)
                retry_after = _retry_after(answer)
                if answer.status not in _AGAIN or not (problem.retryable or type(problem) is Closed):
                    problem.repeated = repeated  # type: ignore[attr-defined]
                    raise problem
            pause_s = max(self.state.backoff_ms(attempt) / 1000 if attempt else 0.0, retry_after, self.state.pause_s())
            attempt += 1
            until_ns = deadline_ns
            if unreachable_ns is not None:  # however long an answer may take
                until_ns = min(deadline_ns, unreachable_ns + round(self.timeout_s * 1e9))
            if self._mono_ns() + pause_s * 1e9 > until_ns:
                raise problem from None
            if pause_s:
                await self.ways.pause(pause_s)

    def _most_s(self, ask: Ask) -> float:
        """How long one attempt may take: of several nodes, one may be stopped, and others not."""
        return ask.wait_s + (self.timeout_s / _TRIES if len(self._given) > 1 and ask.again else self.timeout_s)

    async def _attempt(
        self,
        ask: Ask,
        content: bytes,
        waits: bool,  # noqa: FBT001  a keyword costs time here
        timeout_s: float,
    ) -> Answer:
        path = ask.path if ask.again and ask.wait_s <= STRAIGHT_WAIT_S else ""
        connection = await self.connection(timeout_s, careful=not ask.again, path=path)
        endpoint = connection.endpoint
        if endpoint is not self._given[0]:
            content = self.addressed(content, connection)
        if endpoint is not self._current:
            timeout_s = min(timeout_s, straight_s(ask.wait_s, len(content)))
        done = False
        try:
            if waits:
                self._waiting.add(connection)
                self.check_open()  # only now: `close` interrupts those that it finds
            try:
                received = await connection.wire.exchange(content, timeout_s)
                answer = connection.reader.feed(received) if received else None
                if answer is None:
                    answer = await self.answer_of(connection, timeout_s)
            except (OSError, TimeoutError, EOFError, BROKEN) as error:
                raise self.cut_off(connection, error) from error
            done = True
        finally:
            if waits:
                self._waiting.discard(connection)
            if not done:  # the rest of the answer may still arrive: the next call would take it for its own
                connection.wire.close()
        self.give_back(connection, answer)
        if OWNER in answer.headers and ask.again:
            self.owners.learn(ask.path, answer.headers[OWNER])
        return answer

    def addressed(self, content: bytes, connection: PooledConnection) -> bytes:
        """A request whose head was made for the first address, for this connection."""
        return content.replace(self._given[0].host, connection.endpoint.host, 1)

    def cut_off(self, connection: PooledConnection, error: BaseException) -> Exception:
        """The error of a call whose connection broke, or that was not answered in time."""
        endpoint = connection.endpoint
        refusal = tls_refusal(endpoint.address, error)  # of our certificate: TLS 1.3 says so behind the greeting
        if endpoint is self._current:
            self.owners.forget(endpoint)
            self._turn_from(endpoint)
        elif refusal is not None or isinstance(error, TimeoutError):
            self.owners.failed(endpoint)  # the other nodes may still be reached
            refusal = None
        else:
            self.owners.forget(endpoint)
        return refusal or AnswerLost(failure_text(endpoint.address, error, fresh=connection.fresh))

    def give_back(self, connection: PooledConnection, answer: Answer) -> None:
        """The answer is complete: keep the connection for the next call, if the server agrees."""
        idle = connection.endpoint.idle
        if answer.keep and not self.closed and len(idle) < _MOST_IDLE:
            connection.used_ns = self._mono_ns()
            connection.fresh = False
            idle.append(connection)
        else:
            connection.wire.close()

    async def answer_of(self, connection: PooledConnection, timeout_s: float) -> Answer:
        wire, feed = connection.wire, connection.reader.feed
        until_ns = self._mono_ns() + round(timeout_s * 1e9)
        while True:
            content = await wire.receive(timeout_s)
            if not content:
                raise EOFError("the server closed the connection without responding")
            answer = feed(content)
            if answer is not None:
                return answer
            timeout_s = (until_ns - self._mono_ns()) / 1e9
            if timeout_s <= 0:
                raise TimeoutError("the response was not complete in time")

    async def connection(self, timeout_s: float, *, careful: bool, path: str = "") -> PooledConnection:
        """Return an idle connection if one is usable, otherwise a new one: to the owner of what the path names."""
        owner = self.owners.of(path) if path and self.owners.places else None
        if owner is not None and owner is not self._current:
            straight = self._rested(owner, careful=careful) or await self._straight(owner, timeout_s)
            if straight is not None:
                return straight
        rested = self._rested(self._current, careful=careful)
        if rested is not None:
            return rested
        for _ in self._given[1:]:
            endpoint = self._current
            try:
                wire = await self.ways.connect(endpoint.address, min(timeout_s, _CONNECT_S), self._tls)
            except (OSError, TimeoutError) as error:
                if tls_refusal(endpoint.address, error) is not None:
                    break
                self._turn_from(endpoint)
            else:
                self.state.opened()
                return PooledConnection(wire, endpoint)
        endpoint = self._current
        try:
            wire = await self.ways.connect(endpoint.address, timeout_s, self._tls)
        except (OSError, TimeoutError) as error:
            refusal = tls_refusal(endpoint.address, error)
            if refusal is not None:
                raise refusal from error
            self.state.failed()
            self.drop_idle()
            if self.on_broken is not None:
                await self.ways.aside(self.on_broken)
            raise Unsent(failure_text(endpoint.address, error, fresh=True)) from error
        self.state.opened()
        return PooledConnection(wire, endpoint)

    async def _straight(self, owner: Endpoint, timeout_s: float) -> PooledConnection | None:
        """A new connection to a node that only an answer has named; None if it cannot be reached from here."""
        try:
            wire = await self.ways.connect(owner.address, min(timeout_s, STRAIGHT_CONNECT_S), self._tls)
        except (OSError, TimeoutError):
            self.owners.failed(owner)
            return None
        owner.failures = 0
        return PooledConnection(wire, owner)

    def _turn_from(self, endpoint: Endpoint) -> None:
        """Call the node after this one from now on, unless another call has found that out already."""
        if self._current is endpoint and len(self._given) > 1:
            at = self._given.index(endpoint)
            endpoint.drop_idle()
            self._current = self._given[(at + 1) % len(self._given)]

    def _rested(self, endpoint: Endpoint, *, careful: bool) -> PooledConnection | None:
        while True:
            try:
                connection = endpoint.idle.pop()
            except IndexError:
                return None
            wire = connection.wire
            rested = careful or self._mono_ns() - connection.used_ns > _IDLE_NS
            if wire.is_ours() and not (rested and wire.ended()):
                return connection
            wire.close()

    def drop_idle(self) -> None:
        """Close the idle connections."""
        for endpoint in self.owners:
            endpoint.drop_idle()

    def forget_idle(self) -> None:
        """In a child after a fork: what rests is the parent's to use; here it is dropped silently."""
        self._waiting = set()
        for endpoint in self.owners:
            idle, endpoint.idle = endpoint.idle, deque()
            for connection in idle:
                connection.wire.forget()

    def close(self) -> None:
        """Close: calls that wait raise Closed at once, others are answered. Closing twice is fine."""
        self.closed = True
        self.drop_idle()
        for connection in tuple(self._waiting):
            connection.wire.interrupt()

    def __del__(self) -> None:
        self.drop_idle()

    def _after(self, before: HoldfastError | None, failure: Exception) -> HoldfastError:
        """What to say of a try that failed; one that only our own time cut short tells less than the one before it."""
        if before is not None and isinstance(failure.__cause__, TimeoutError):
            return before
        return self._unreachable(failure)

    def _unreachable(self, why: Exception) -> Unavailable:
        return Unavailable(
            f"the server at {self.address.text} did not respond: {why}. The call was retried until its timeout "
            f"of {self.timeout_s:g} s; check that the server is running, then call again"
        )

    def _unknown(self, ask: Ask, why: Exception) -> Unavailable:
        return Unavailable(
            f"{ask.method} {ask.path.partition('?')[0]} went to {self.address.text}, but no response came: {why}. It "
            "may or may not have been done, and was not retried; check before you send it again"
        )


def _value(answer: Answer, kind: Any) -> Any:
    if kind is None or answer.status == 204:
        return None
    if kind is bytes:
        return answer.body
    media = answer.headers.get("content-type", "")
    if media != MSGPACK:
        media = media.partition(";")[0].strip()
    return decode(answer.body, MSGPACK if media == MSGPACK else JSON, kind)


def _error(answer: Answer, address: Address) -> HoldfastError:
    try:
        answered: ErrorAnswer = _value(answer, ErrorAnswer)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        kind = Unavailable if answer.status in _AGAIN else HoldfastError
        media = answer.headers.get("content-type", "").partition(";")[0].strip() or "no content type"
        return kind(not_ours(address, f"{answer.status} with {media}"))
    error = error_of(answered.error)
    topic, ends, rest = str(error).partition("; ")
    # Servers of older releases name their own folder.
    if isinstance(error, UnknownTopic) and ends and topic.startswith("there is no topic ") and " in " not in topic:
        error.args = (f"{topic} {'at' if is_address(address.text) else 'in'} {address.text}; {rest}",)
    return error


def not_ours(address: Address, answer: str) -> str:
    """Say that something else answered at the address."""
    return (
        f"what responds at {address.text} is not a Holdfast server, or a proxy in front of it has a problem: it "
        f"responded with {answer}. Check the address and the port"
    )


def _retry_after(answer: Answer) -> float:
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isdigit() else 0.0


packed: Final = encoder(MSGPACK)  # encodes a value as the body of a request


# Requests as bytes, and answers out of bytes; nothing here sends or waits.


BROKEN: Final = httptools.HttpParserError

_MOST_HEAD: Final = 64 * 1024


class Ask(msgspec.Struct, kw_only=True):
    """One call. `again`: whether it may be sent once more when nobody knows what became of it."""

    method: str
    path: str
    body: bytes = b""
    media: str = MSGPACK
    answers: Any = None
    again: bool = True
    wait_s: float = 0.0  # how much longer than usual the server may take
    headers: tuple[tuple[str, str], ...] = ()
    head: bytes = b""  # its head, if it was made before: see `Caller.post_head`


class Answer(msgspec.Struct, eq=False, gc=False):
    """The answer to a request."""

    status: int = 0
    headers: dict[str, str] = {}
    body: bytes = b""
    keep: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is what a server of ours usually says, in a connection that goes on."""
        return self.keep and 200 <= self.status < 300 and self.headers.keys() <= _PLAIN


# Answers that come whole, and begin as an earlier one did: only their length, their id and their body are their own.
# The parser finds out what a beginning means, and is not asked again.

_MOST_STARTS: Final = 64
_LENGTH: Final = b"\r\ncontent-length: "
_ID: Final = b"\r\nx-correlation-id: "
_PLAIN: Final = frozenset(
    {
        "cache-control",
        "content-length",
        "content-type",
        "cross-origin-resource-policy",
        "x-content-type-options",
        "x-correlation-id",
        OWNER,
    }
)
_starts: Final[dict[bytes, Answer]] = {}


def whole_answer(content: bytes) -> tuple[bytes, bytes] | None:
    """The beginning of an answer, up to its length, and its body; None if that is not all there is, or more follows."""
    end = content.find(b"\r\n\r\n")
    at = content.find(_LENGTH, 0, end) if end > 0 else -1
    if at < 0:
        return None
    stop = content.find(b"\r\n", at + len(_LENGTH), end + 2)
    if content[at + len(_LENGTH) : stop] != b"%d" % (len(content) - end - 4):
        return None
    if not content.startswith(_ID, stop) or content.find(b"\r\n", stop + 2, end + 2) != end:
        return None
    return content[:at], content[end + 4 :]


class AnswerReader:
    """Assembles answers, one after the other, from the bytes of a connection."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._answer = Answer()
        self._parts: list[bytes] = []
        self._done = False
        self.begun = False
        self.continued = False  # whether the server has asked for the rest of a request

    @property
    def status(self) -> int:
        """Of the answer that comes in, once its head is there; else 0."""
        return self._answer.status

    def taken(self) -> list[bytes]:
        """What has come of the body so far, for those who do not want to hold all of it."""
        parts, self._parts = self._parts, []
        return parts

    def feed(self, content: bytes) -> Answer | None:
        """Return the answer once it is complete."""
        start = None
        if not self.begun:
            found = whole_answer(content)
            if found is not None:
                start, body = found
                known = _starts.get(start)
                if known is not None:
                    return Answer(known.status, known.headers, body, known.keep)
        self.begun = True
        self._parser.feed_data(content)
        if not self._done:
            return None
        answer, self._answer = self._answer, Answer()
        parts, self._parts = self._parts, []
        answer.body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._done = self.begun = self.continued = False
        if start is not None and answer.is_plain and len(_starts) < _MOST_STARTS:
            _starts[start] = Answer(answer.status, answer.headers, b"", answer.keep)
        return answer

    def on_header(self, name: bytes, value: bytes) -> None:
        self._answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, content: bytes) -> None:
        self._parts.append(content)

    def on_message_complete(self) -> None:
        if self._answer.status >= 200:  # not before: the server only says that it goes on
            self._answer.keep = self._parser.should_keep_alive()
            self._done = True
        else:
            self.continued = self.continued or self._answer.status == 100
            self._answer = Answer()


def path_of(*parts: str | int, **query: Any) -> str:
    """Return a path of these parts, escaped, and a query of the arguments that are not None."""
    path = "/v1/" + "/".join(map(_quoted, parts))
    given = "&".join([_asked(name, value) for name, value in query.items() if value is not None and value != []])
    return f"{path}?{given}" if given else path


def _asked(name: str, value: Any) -> str:
    if isinstance(value, list):
        return "&".join([_asked(name, each) for each in value])
    return f"{name}={_quoted(value)}"


def _quoted(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else _quote(str(value))


@lru_cache(maxsize=1024)
def _quote(text: str) -> str:
    return quote(text, safe="")


def common_headers(authority: str, token: str | None, more: Mapping[str, str]) -> bytes:
    """Return the headers of every request of a client."""
    lines = [("host", authority), ("accept", RUNS), ("user-agent", "holdfast-python"), *more.items()]
    if token is not None:
        lines.append(("authorization", f"Bearer {token}"))
    return "".join(f"{name}: {value}\r\n" for name, value in lines).encode("latin-1")


def request_bytes(ask: Ask, common: bytes) -> bytes:
    """Return the request as bytes."""
    if ask.head or (ask.method == "POST" and not ask.headers):
        head = ask.head or b"POST %b%b" % (ask.path.encode("latin-1"), _behind_path(common, ask.media))
        return b"%b%d\r\n\r\n%b" % (head, len(ask.body), ask.body)
    head = f"{ask.method} {ask.path} HTTP/1.1\r\n".encode("latin-1") + common
    for name, value in ask.headers:
        head += f"{name}: {value}\r\n".encode("latin-1")
    if ask.body or ask.method not in ("GET", "DELETE"):
        head += b"content-type: %b\r\ncontent-length: %d\r\n" % (ask.media.encode(), len(ask.body))
    return head + b"\r\n" + ask.body


def _behind_path(common: bytes, media: str) -> bytes:
    """What follows the path of a POST. The length comes last, so that the rest of a head is the same in each call."""
    return b" HTTP/1.1\r\n%bcontent-type: %b\r\ncontent-length: " % (common, media.encode())
