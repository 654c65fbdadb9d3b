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

Where the length repeats, too, as it does for a client whose messages are alike, the whole head is the same, byte for
byte. A second table has these heads with their digits. What it leads to is the same; only the cutting is saved.

A route may prepare its answers when a head of it is kept: whatever follows from the head is then looked up once, not
for each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.server.http.messages import BodySource, Request, start_bytes

if TYPE_CHECKING:
    from holdfast.server.routing import Prepared, Route
    from holdfast.server.service import Service

HEAD_END: Final = b"\r\n\r\n"
_LENGTHS: Final = (b"\r\ncontent-length: ", b"\r\nContent-Length: ")
_LENGTH_BYTES: Final = 18
_SEQUENCE: Final = b"&sequence="
_SEQUENCE_BYTES: Final = 10
_MOST_DIGITS: Final = 10
_CUT: Final = b"\0"  # stands for the sequence number; no head has this byte
_MOST_HEADS: Final = 512
_MOST_HEAD_BYTES: Final = 4096
_MOST_SEEN: Final = 4096
HOP: Final = "x-holdfast-hop"  # of a request that another node of a cluster has passed on, once that is proved

assert {_LENGTH_BYTES} == set(map(len, _LENGTHS))
assert len(_SEQUENCE) == _SEQUENCE_BYTES

# The headers that a kept head may have. All others are rare, or differ from call to call, or change how a body is read.
_PLAIN: Final = frozenset(
    {"accept", "accept-encoding", "authorization", "connection", "content-length", "content-type", "host", "user-agent"}
    | {HOP}
)


class CutRequest(msgspec.Struct, frozen=True, gc=False):
    """A request as its two halves: the key of its head, the sequence number in its query, and its body."""

    key: bytes
    sequence: int | None
    body: bytes


class KnownHead:
    """What was found in a head: the request's parts, its route, and the query as the route's handler gets it."""

    def __init__(
        self, service: Service | None, request: Request, route: Route, variables: dict[str, str], query: Any, gives: str
    ) -> None:
        self.service = service  # None: of another node
        self._text = request.query
        self.method = request.method
        self.path = request.path
        self.headers = request.headers
        self.route = route
        self.variables = variables
        self.query = query
        self.topic = variables["queue"] if "queue" in variables else variables["topic"]
        self.takes = request.media  # of its bodies
        self.media = gives  # of its answers
        self.start = start_bytes(route.status, gives)
        # How its calls are answered in one step, if they can be.
        self.prepared: Prepared | None = None
        if service is not None and route.prepare is not None:
            self.prepared = route.prepare(service, self)

    def request(self, source: BodySource, peer: str, certificate: Any, body: bytes, sequence: int | None) -> Request:
        """A request with this head, as the parser would have found it."""
        request = Request(source, peer, certificate)
        request.method = self.method
        request.path = self.path
        request.query = self._text
        if sequence is not None:
            request.query = f"{self._text.rpartition('&')[0]}&sequence={sequence}"
        request.headers = {**self.headers, "content-length": str(len(body))}
        request.complete = True
        request.feed(body)
        return request


def cut(data: bytes) -> CutRequest | None:
    """Cut a request whose head and body are whole and alone in `data`; None for anything else."""
    end = data.find(HEAD_END)
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
        self._whole: dict[bytes, tuple[KnownHead, int]] = {}  # by the whole head, with the length that it states
        self.get = self._known.get
        self.get_whole = self._whole.get

    def __len__(self) -> int:
        return len(self._known)

    def is_to_keep(self, request: Request, route: Route) -> bool:
        """Whether to keep the head of a request that was answered. It is if this is at least the second one with it."""
        if request.key is None or route.prepare is None:
            return False
        if not (request.keep_alive and request.headers.keys() <= _PLAIN):
            return False
        mark = hash(request.key)
        if mark not in self._seen:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen.add(mark)
            return False
        return True

    def learn(self, request: Request, head: KnownHead) -> None:
        """Keep the head of a request."""
        assert request.key is not None
        if len(self._known) >= self._most:
            self._whole.clear()
            del self._known[next(iter(self._known))]
        self._known[request.key] = head

    def forget(self, service: Service) -> None:
        """Let go of the heads that were learned for a service, which is about to end."""
        self._let_go(lambda head: head.service is service)

    def drop(self, head: KnownHead) -> None:
        """Let go of a head that is of no use any more, so that another one can be learned in its place."""
        self._let_go(lambda each: each is head)

    def _let_go(self, is_over: Callable[[KnownHead], bool]) -> None:
        self._known = {key: head for key, head in self._known.items() if not is_over(head)}
        self._whole.clear()
        self.get = self._known.get

    def learn_whole(self, data: bytes, size: int, head: KnownHead) -> None:
        """Keep the whole head of a request with a body of this size, which has a known head."""
        if len(self._whole) >= self._most:
            self._whole.clear()
        self._whole[data[: len(data) - size]] = head, size
