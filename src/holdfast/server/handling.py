"""What surrounds a handler: its topic is opened, its store is asked, and errors say no more than callers may know."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

from holdfast.broker.engine import BrokerEngine
from holdfast.errors import Closed, HoldfastError, Unavailable, UnknownGroup, UnknownTopic
from holdfast.local.group import require_current_async
from holdfast.server.http.messages import no_room
from holdfast.server.routing import Route
from holdfast.server.service import Call
from holdfast.storage.files import ran_out, shortage

HEALTH: Final = frozenset({"/healthz", "/readyz"})

_ABOUT_THE_SERVER: Final = ("/v1/admin/", "/ui/health", "/ui/audit")
_READS: Final = frozenset({"open", "read"})


async def ready_for(route: Route, engine: BrokerEngine) -> None:
    """Wait for a store. An owner that may have been replaced says nothing but what is about the server itself."""
    page = route.pattern.startswith("/ui") and route.action != "open"
    if route.action not in _READS and not page:
        if engine.store is not None:
            await engine.store.ready()
    elif (page or route.pattern.startswith("/v1/")) and not route.pattern.startswith(_ABOUT_THE_SERVER):
        await require_current_async(engine)


async def handled(call: Call) -> Any:
    path = call.path
    name = path.get("queue") or path.get("topic")
    try:
        if name is not None and not call.service.engine.is_open(name):
            await _open_topic(call, name)
        failure, call.request.failure = call.request.failure, None
        if failure is not None:
            raise failure
        return await call.route.handler(call)
    except Closed as error:
        raise await _why_closed(call, error) from error
    except (UnknownTopic, UnknownGroup) as error:
        raise _shown(call, error) from None
    except OSError as error:
        if ran_out(error):  # disk or descriptors: the server recovers as soon as there is enough again
            raise shortage("the call could not be finished", error, "Nothing else is changed by that") from error
        raise


def _shown(call: Call, error: UnknownTopic | UnknownGroup) -> HoldfastError:
    """The error, without names of topics and groups if the caller may not see all of them, and without our folder."""
    principal = call.principal
    sees_all = principal.topics.everything and principal.groups.everything and not call.service.is_shard
    if error.brief and not sees_all:
        return type(error)(error.brief)
    error.args = (str(error).replace(f" in {call.service.engine.folder}", "", 1),)  # its notes stay
    return error


async def _open_topic(call: Call, name: str) -> None:
    """Open the topic of the path on its own thread, so that handlers need not wait for that."""
    if call.request.method == "DELETE":
        return
    port = call.service.port
    with suppress(HoldfastError):  # the handler will report it
        await port.at(name).aside(_open_if_there, port.engine, name)


def _open_if_there(engine: BrokerEngine, name: str) -> None:
    if name in engine.catalog:
        engine.topic(name)


def check_reserve(call: Call) -> None:
    """The reserved connections are for health checks and admins, and not for calls that wait."""
    route = call.route
    if route.action == "open":
        allowed = route.pattern in HEALTH
    else:
        allowed = call.principal.may("admin") and "too_many_waiters" not in route.errors
    if not allowed:
        raise no_room()


async def _why_closed(call: Call, error: Closed) -> HoldfastError:
    """The error for a topic that was closed during a call: unknown if deleted, retryable if it is there again."""
    name = call.path.get("queue") or call.path.get("topic")
    if type(error) is not Closed or name is None or call.service.port.closed or call.service.leaving:
        return error
    try:
        await call.service.port.at(name).aside(call.service.engine.topic, name)  # after a deletion in progress
    except UnknownTopic as gone:
        return _shown(call, gone)
    return Unavailable(f"{error}. Try again")
