"""Heads of requests that came before: what parsing them has found, by their exact bytes.

Clients repeat themselves. A request of a connection that sends many differs from the last in its body, and in its head
by a length at most. So the table here maps the bytes of a head to what the parser made of it, and to the route that was
found; a request whose head is known, and that arrived whole and alone, needs no parser.

Only what is a function of these bytes is kept, never a decision: who the caller is and what it may do is found out for
each call, with its connection's certificate and the tokens of that moment.

Two numbers may differ: the content length, whose digits must be exactly those of the body's length, and the sequence
number of a producer's batch, if it ends the query. They are cut out of the bytes; what is left is the key. Nothing else
is taken for equal: a head in another spelling or order is another head. Those with a header that is not in `_PLAIN` are
never kept.

The table is bounded, in heads and in their size. A head is kept when it comes for the second time, so that callers who
never repeat one do not push out those who do. A head that is not in the table costs nobody more than the parser.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.server.http.messages import BodySource, Request

if TYPE_CHECKING:
    from holdfast.server.routing import Route

_END: Final = b"\r\n\r\n"
_LENGTHS: Final = (b"\r\ncontent-length: ", b"\r\nContent-Length: ")
_LENGTH_BYTES: Final = 18
_SEQUENCE: Final = b"&sequence="
_SEQUENCE_BYTES: Final = 10
_MOST_DIGITS: Final = 10
_CUT: Final = b"\0"  # stands for the sequence number; no head has this byte
_MOST_HEADS: Final = 512
_MOST_HEAD_BYTES: Final = 4096
_MOST_SEEN: Final = 4096

assert {_LENGTH_BYTES} == set(map(len, _LENGTHS))
assert len(_SEQUENCE) == _SEQUENCE_BYTES

# The headers that a kept head may have. All others are rare, or differ from call to call, or change how a body is read.
_PLAIN: Final = frozenset(
    {"accept", "accept-encoding", "authorization", "connection", "content-length", "content-type", "host", "user-agent"}
)


class CutRequest(msgspec.Struct, frozen=True, gc=False):
    """A request as its two halves: the key of its head, the sequence number in its query, and its body."""

    key: bytes
    sequence: int | None
    body: bytes


class KnownHead:
    """What was found in a head: the request's parts, its route, and the query as the route's handler gets it."""

    __slots__ = ("headers", "method", "path", "query", "route", "text", "variables")

    def __init__(self, request: Request, route: Route, variables: dict[str, str], query: Any) -> None:
        self.method = request.method
        self.path = request.path
        self.text = request.query
        self.headers = request.headers
        self.route = route
        self.variables = variables
        self.query = query

    def request(self, source: BodySource, peer: str, certificate: Any, body: bytes) -> Request:
        """A request with this head. Its query and its content length are those of the head that was kept."""
        request = Request(source, peer, certificate)
        request.method = self.method
        request.path = self.path
        request.headers = self.headers
        request.complete = True
        request.feed(body)
        return request

    def restore(self, request: Request, sequence: int | None) -> None:
        """Give a request its own query and content length, as the parser would have found them."""
        request.query = self.text
        if sequence is not None:
            request.query = f"{self.text.rpartition('&')[0]}&sequence={sequence}"
        request.headers = {**self.headers, "content-length": str(request.received)}


def cut(data: bytes) -> CutRequest | None:
    """Cut a request whose head and body are whole and alone in `data`; None for anything else."""
    end = data.find(_END)
    if end < 0 or end > _MOST_HEAD_BYTES:
        return None
    at = data.find(_LENGTHS[0], 0, end)
    if at < 0:
        at = data.find(_LENGTHS[1], 0, end)
        if at < 0:
            return None
    stop = data.find(b"\r\n", at + _LENGTH_BYTES, end + 2)
    size = len(data) - end - 4
    if data[at + _LENGTH_BYTES : stop] != b"%d" % size:
        return None
    line = data.find(b"\r\n", 0, at + 2)
    mark = data.find(_SEQUENCE, 0, line)
    if mark < 0:
        return CutRequest(data[:at] + data[stop:end], None, data[end + 4 :])
    behind = data.find(b" ", mark, line)
    digits = data[mark + _SEQUENCE_BYTES : behind]
    if not digits.isdigit() or len(digits) > _MOST_DIGITS or (digits[0] == 48 and len(digits) > 1):
        return None
    key = data[:mark] + _CUT + data[behind:at] + data[stop:end]
    return CutRequest(key, int(digits), data[end + 4 :])


class KnownHeads:
    """The heads that came before, by their keys."""

    def __init__(self, most: int = _MOST_HEADS) -> None:
        self._most = most
        self._known: dict[bytes, KnownHead] = {}
        self._seen: set[int] = set()
        self.get = self._known.get

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, key: bytes, request: Request, route: Route, variables: dict[str, str], query: Any) -> None:
        """Keep the head of a request that was answered, if this is at least the second one with it."""
        if not (request.keep_alive and request.headers.keys() <= _PLAIN):
            return
        mark = hash(key)
        if mark not in self._seen:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen.add(mark)
            return
        if len(self._known) >= self._most:
            del self._known[next(iter(self._known))]
        self._known[key] = KnownHead(request, route, variables, query)
