"""The table of routes: methods, paths, rights, and types of queries, bodies and answers. OpenAPI is made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from holdfast import errors
from holdfast.errors import HoldfastError, NotFound
from holdfast.protocol.media import KINDS
from holdfast.server.http.messages import DeferredAnswer, Refused, Undelivered

if TYPE_CHECKING:
    from holdfast.server.http.heads import KnownHead
    from holdfast.server.service import Call, Service
    from holdfast.server.tokens import Principal


# The HTTP status of each error. Status numbers are defined only here.


_STATUSES: Final[dict[type[HoldfastError], int]] = {
    HoldfastError: 500,
    errors.InvalidRequest: 400,
    errors.MessageTooLarge: 413,
    errors.NotFound: 404,
    errors.InvalidSchema: 422,
    errors.IncompatibleSchema: 409,
    errors.UnknownTopic: 404,
    errors.UnknownGroup: 404,
    errors.NotAQueue: 404,
    errors.TopicExists: 409,
    errors.Conflict: 409,
    errors.OutOfSequence: 409,
    errors.OffsetOutOfRange: 416,
    errors.TailLost: 409,
    errors.Unauthenticated: 401,
    errors.Forbidden: 403,
    errors.NotInstalled: 501,
    errors.NotInCluster: 501,
    errors.LeaseLost: 409,
    errors.Empty: 404,
    errors.Unavailable: 503,
    errors.LockHeld: 409,
    errors.QueueFull: 429,
    errors.TooManyWaiters: 429,
    errors.DiskFull: 507,
    errors.Closed: 503,
    errors.Fenced: 409,
    errors.CorruptData: 500,
}
_RETRY_AFTER_S: Final[dict[int, float]] = {429: 1.0, 503: 1.0, 507: 5.0}


def status_of(error: HoldfastError) -> int:
    """The status for an error: its own, or that of the nearest kind above it."""
    if isinstance(error, Refused):
        return error.status
    return _nearest(type(error))


def retry_after_of(status: int) -> float | None:
    """Seconds until a retry makes sense; None if it never does."""
    return _RETRY_AFTER_S.get(status)


def status_of_code(code: str) -> int:
    """The status for an error's code, for the documentation."""
    return _nearest(KINDS[code])


def _nearest(kind: type[HoldfastError]) -> int:
    """The status of a kind of error, or that of the nearest kind above it."""
    return next(_STATUSES[known] for known in kind.__mro__ if known in _STATUSES)


Action: TypeAlias = Literal["open", "publish", "consume", "read", "admin", "lock"]
Handler: TypeAlias = Callable[["Call"], Awaitable[Any]]


class Prepared(NamedTuple):
    """Answers the calls with one known head, each in one step.

    `decode` turns the body of a request into what `answer` gets, beside the caller and the sequence number in the
    query. `answer` returns the body of the answer; for messages that were taken also their correlation id, and what
    gives them back. None if one step is not enough and nothing was done: the handler can do it.
    """

    decode: Callable[[bytes], Any]
    answer: Callable[[Principal, Any, int | None], PreparedAnswer | DeferredAnswer | None]


PreparedAnswer: TypeAlias = "bytes | tuple[bytes, str, Undelivered]"
# Prepares answers to requests with this head, if there are any that one step can answer.
Prepare: TypeAlias = "Callable[[Service, KnownHead], Prepared | None]"
Check: TypeAlias = Callable[["Call"], Awaitable[None]]

Scope: TypeAlias = Literal["any", "all"]

_NAMES: Final = ("queue", "topic", "name", "schedule")  # the variables of a path that name a topic or a lock


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One route of the API.

    `body` and `query` are the structs that the request is decoded to, `answers` is the struct of the answer; it is
    given only where the handler does not return it. `takes` and `gives` list media types other than JSON and
    MessagePack.

    An `act` is written to the audit log before the handler runs. With `looks_first` the handler writes it, once it
    knows that there is something to do.

    The caller must have the right to the action on what the path names. If the path names nothing, the right must be
    for `all` topics, or for `any`; then the handler filters its answer by topic. `allowed` checks rights to other
    names, such as a topic or a group in the body, before an act is written.
    """

    method: str
    pattern: str
    action: Action
    handler: Handler
    summary: str
    body: Any = None
    query: Any = None
    answers: Any = None
    status: int = 200
    takes: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    content: Any = None  # the type of the body, if the handler reads it itself
    plain: bool = True  # whether it can answer with JSON and MessagePack
    errors: tuple[str, ...] = ()
    act: bool = False
    looks_first: bool = False
    scope: Scope = "all"
    allowed: Check | None = None
    tag: str = ""
    hidden: bool = False  # not in the OpenAPI document: a page of the console
    instead: bool = False  # whether the right to consume or to publish will do as well; for scope "any"
    also: Action | None = None  # another action that the caller must have a right to, on any topic
    prepare: Prepare | None = None
    named: str | None = None  # the variable of the path whose value the caller must have rights to


class Routes:
    """A set of related routes."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.all: list[Route] = []

    def add(
        self, method: str, pattern: str, *, action: Action, summary: str = "", **facts: Any
    ) -> Callable[[Handler], Handler]:
        """Make the function the handler of a route: its docstring is the summary, and it answers what it returns."""

        def made(handler: Handler) -> Handler:
            named = next((name for name in _NAMES if f"{{{name}}}" in pattern), None)
            self.all.append(
                Route(
                    method=method,
                    pattern=pattern,
                    action=action,
                    handler=handler,
                    summary=summary or (handler.__doc__ or "").strip().partition("\n")[0],
                    tag=self.tag,
                    named=named,
                    **{"answers": _returned(handler)} | facts,
                )
            )
            return handler

        return made


def _returned(handler: Handler) -> Any:
    """The struct that a handler returns; None if it makes the response itself, or there is nothing to say."""
    hint: Any = handler.__annotations__.get("return")
    found = handler.__globals__.get(hint, hint)  # a name, where annotations are not evaluated
    return found if isinstance(found, type) and issubclass(found, msgspec.Struct) else None


class _Node:
    """A node of the tree of paths."""

    def __init__(self) -> None:
        self.named: dict[str, _Node] = {}
        self.any: _Node | None = None
        self.variable = ""
        self.methods: dict[str, Route] = {}


class RouteTable:
    """Finds the route for a path."""

    def __init__(self) -> None:
        self.routes: list[Route] = []
        self._root = _Node()

    def include(self, routes: Routes) -> None:
        for route in routes.all:
            self._add(route)

    def _add(self, route: Route) -> None:
        node = self._root
        for part in route.pattern.strip("/").split("/"):
            if part.startswith("{"):
                node.any = node.any or _Node()
                node = node.any
                assert node.variable in ("", part[1:-1]), f"two names for one part of {route.pattern}"
                node.variable = part[1:-1]
            else:
                node = node.named.setdefault(part, _Node())
        assert route.method not in node.methods, f"{route.method} {route.pattern} is there twice"
        node.methods[route.method] = route
        self.routes.append(route)

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        """The route and the variables of its path. Raises NotFound, or Refused if the method does not fit."""
        node, found = self._root, {}
        for part in path.strip("/").split("/"):
            following = node.named.get(part)
            if following is None:
                following = node.any
                if following is None or not part:
                    raise NotFound(f"there is nothing at {path}: see /docs for all paths")
                found[following.variable] = part
            node = following
        route = node.methods.get(method) or (node.methods.get("GET") if method == "HEAD" else None)
        if route is None:
            if not node.methods:
                raise NotFound(f"there is nothing at {path}: see /docs for all paths")
            allowed = ", ".join(sorted({*node.methods, *(["HEAD"] if "GET" in node.methods else [])}))
            raise Refused(
                f"{method} is not allowed at {path}; use {allowed}", status=405, headers=(("allow", allowed),)
            )
        return route, found
