"""Who may do what over HTTP: every route of the table, for every role, over real sockets."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import pytest

from holdfast.env import real_world
from holdfast.server.audit import Audit, CallAuditor
from holdfast.server.callers import tls_context
from holdfast.server.routing import Route
from holdfast.server.tokens import TokenEntry, digest_of, with_entry
from holdfast.settings import ServerSettings
from tests.integration.http_gear import Serving, serving
from tests.unit.certificates import Issuer

TOPIC = "orders"
MESSAGE = f"{TOPIC}-0-0"
EXPIRED = "2020-01-01T00:00:00Z"

# What each caller may do, once more and by hand: the test is not to learn it from what it tests.
ALL = {"publish", "consume", "read", "admin", "lock"}
MAY = {
    "admin": ALL,
    "producer": {"publish"},
    "consumer": {"consume", "read"},
    "reader": {"read"},
    "only-publish": {"publish"},
    "only-consume": {"consume"},
    "only-read": {"read"},
    "only-admin": {"admin"},
    "only-lock": {"lock"},
    "of-these": ALL,  # for the topic that the calls name, and what is named like it: groups, producers, locks
    "of-others": ALL,  # for other topics only, and what is named like them
    "of-other-names": ALL,  # for this topic, but for other groups, producers and locks
}

# What the calls of each route must be allowed to touch, by hand: a route without a row is one that nobody thought of.
# "any" is a list of what the caller may see; "all" concerns everything there is.
GUARDS: dict[str, str] = {
    "GET /": "any",
    "GET /docs": "open",
    "GET /healthz": "open",
    "GET /metrics": "all",
    "GET /openapi.json": "open",
    "GET /readyz": "open",
    "POST /schema-registry/compatibility/subjects/{subject}/versions": "topic",
    "POST /schema-registry/compatibility/subjects/{subject}/versions/{version}": "topic",
    "DELETE /schema-registry/config": "all",
    "GET /schema-registry/config": "any",
    "PUT /schema-registry/config": "all",
    "DELETE /schema-registry/config/{subject}": "topic",
    "GET /schema-registry/config/{subject}": "topic",
    "PUT /schema-registry/config/{subject}": "topic",
    "GET /schema-registry/mode": "any",
    "GET /schema-registry/schemas/ids/{id}": "any",
    "GET /schema-registry/schemas/ids/{id}/schema": "any",
    "GET /schema-registry/schemas/ids/{id}/subjects": "any",
    "GET /schema-registry/schemas/ids/{id}/versions": "any",
    "GET /schema-registry/schemas/types": "any",
    "GET /schema-registry/subjects": "any",
    "DELETE /schema-registry/subjects/{subject}": "topic",
    "POST /schema-registry/subjects/{subject}": "topic",
    "GET /schema-registry/subjects/{subject}/versions": "topic",
    "POST /schema-registry/subjects/{subject}/versions": "topic",
    "DELETE /schema-registry/subjects/{subject}/versions/{version}": "topic",
    "GET /schema-registry/subjects/{subject}/versions/{version}": "topic",
    "GET /schema-registry/subjects/{subject}/versions/{version}/referencedby": "topic",
    "GET /schema-registry/subjects/{subject}/versions/{version}/schema": "topic",
    "GET /ui": "any",
    "GET /ui/audit": "all",
    "GET /ui/groups": "any",
    "GET /ui/groups/{group}": "stream",
    "GET /ui/health": "all",
    "GET /ui/pipelines": "all",
    "GET /ui/pipelines/{pipeline}": "all",
    "GET /ui/locks": "any",
    "GET /ui/queues/{queue}": "topic group",
    "GET /ui/queues/{queue}/charts": "topic group",
    "GET /ui/queues/{queue}/dead": "topic group",
    "GET /ui/queues/{queue}/log": "topic group",
    "GET /ui/queues/{queue}/messages/{id}": "topic group",
    "GET /ui/queues/{queue}/messages/{id}/body": "topic group",
    "GET /ui/queues/{queue}/redriven": "topic group",
    "GET /ui/queues/{queue}/send": "topic group",
    "GET /ui/queues/{queue}/settings": "topic group",
    "GET /ui/queues/{queue}/tail": "topic group",
    "GET /ui/schedules": "any",
    "GET /ui/static/{file}": "open",
    "GET /ui/workers": "any",
    "GET /v1/admin/audit": "all",
    "GET /v1/admin/status": "all",
    "POST /v1/admin/sync": "all",
    "GET /v1/admin/waiters": "all",
    "GET /v1/groups": "topic",
    "GET /v1/groups/{group}": "stream",
    "DELETE /v1/groups/{group}": "topic group",
    "POST /v1/groups/{group}/members": "topic stream",
    "DELETE /v1/groups/{group}/members/{member}": "stream",
    "POST /v1/groups/{group}/members/{member}/commit": "stream",
    "POST /v1/groups/{group}/members/{member}/heartbeat": "stream",
    "POST /v1/groups/{group}/members/{member}/poll": "stream",
    "POST /v1/groups/{group}/members/{member}/seek": "stream",
    "GET /v1/groups/{group}/offsets": "topic stream",
    "POST /v1/groups/{group}/reset": "topic stream",
    "DELETE /v1/locks/{name}": "lock",
    "GET /v1/locks": "any",
    "GET /v1/locks/{name}": "lock",
    "POST /v1/locks/{name}/acquire": "lock",
    "POST /v1/locks/{name}/keepalive": "lock",
    "POST /v1/locks/{name}/release": "lock",
    "POST /v1/producers": "producer",
    "PUT /v1/queues/{queue}": "topic",
    "POST /v1/queues/{queue}/ack": "topic group",
    "POST /v1/queues/{queue}/batch": "topic",
    "GET /v1/queues/{queue}/committed": "topic group",
    "POST /v1/queues/{queue}/compact": "topic group",
    "GET /v1/queues/{queue}/dead": "topic group",
    "GET /v1/queues/{queue}/dead/groups": "topic group",
    "POST /v1/queues/{queue}/dead/purge": "topic group",
    "POST /v1/queues/{queue}/dead/redrive": "topic group",
    "GET /v1/queues/{queue}/dead/{id}": "topic group",
    "POST /v1/queues/{queue}/dequeue": "topic group",
    "POST /v1/queues/{queue}/dequeueWithState": "topic group",
    "POST /v1/queues/{queue}/enqueue": "topic",
    "POST /v1/queues/{queue}/extend": "topic group",
    "GET /v1/queues/{queue}/inHand": "topic group",
    "GET /v1/queues/{queue}/lookup": "topic group",
    "GET /v1/queues/{queue}/messages": "topic group",
    "DELETE /v1/queues/{queue}/messages/{id}": "topic group",
    "GET /v1/queues/{queue}/messages/{id}": "topic group",
    "POST /v1/queues/{queue}/messages/{id}/takeBack": "topic group",
    "POST /v1/queues/{queue}/messages/{id}/runNow": "topic group",
    "GET /v1/transactions": "any",
    "POST /v1/transactions": "producer",
    "POST /v1/transactions/commit": "producer",
    "DELETE /v1/transactions/{transaction}": "producer",
    "GET /v1/schedules": "any",
    "DELETE /v1/schedules/{schedule}": "topic",
    "GET /v1/schedules/{schedule}": "topic",
    "PUT /v1/schedules/{schedule}": "topic",
    "GET /v1/schedules/{schedule}/next": "topic",
    "POST /v1/schedules/{schedule}/pause": "topic",
    "POST /v1/schedules/{schedule}/resume": "topic",
    "POST /v1/schedules/{schedule}/run": "topic",
    "GET /v1/search": "any",
    "GET /ui/search": "any",
    "GET /v1/queues/{queue}/messages/{id}/payload": "topic group",
    "POST /v1/queues/{queue}/nack": "topic group",
    "POST /v1/queues/{queue}/pause": "topic group",
    "GET /v1/queues/{queue}/payload": "topic group",
    "GET /v1/queues/{queue}/peek": "topic group",
    "POST /v1/queues/{queue}/purge": "topic group",
    "POST /v1/queues/{queue}/reject": "topic group",
    "GET /v1/queues/{queue}/samples": "topic group",
    "POST /v1/queues/{queue}/resume": "topic group",
    "POST /v1/queues/{queue}/seek": "topic group",
    "GET /v1/queues/{queue}/state": "topic group",
    "PUT /v1/queues/{queue}/state": "topic group",
    "GET /v1/queues/{queue}/stats": "topic group",
    "POST /v1/queues/{queue}/subscribe": "topic group",
    "POST /v1/queues/{queue}/subscribeWithState": "topic group",
    "GET /v1/queues/{queue}/watch": "topic group",
    "GET /v1/samples": "all",
    "POST /v1/queues/{queue}/workers": "topic group",
    "GET /v1/settings": "all",
    "GET /v1/standing": "topic",
    "GET /v1/state": "any",
    "DELETE /v1/state/{name}": "lock",
    "GET /v1/state/{name}": "lock",
    "PUT /v1/state/{name}": "lock",
    "GET /v1/topics": "any",
    "POST /v1/topics": "topic",
    "DELETE /v1/topics/{topic}": "topic",
    "GET /v1/topics/{topic}": "topic",
    "PATCH /v1/topics/{topic}": "topic",
    "POST /v1/topics/{topic}/apply-retention": "topic",
    "POST /v1/topics/{topic}/compact": "topic",
    "GET /v1/topics/{topic}/delayed": "topic",
    "DELETE /v1/topics/{topic}/delayed/{id}": "topic",
    "PUT /v1/topics/{topic}/groups/{group}": "topic group",
    "POST /v1/topics/{topic}/messages": "topic",
    "POST /v1/topics/{topic}/move": "topic",
    "POST /v1/topics/{topic}/partitions": "topic",
    "POST /v1/topics/{topic}/partitions/{partition}/append": "topic",
    "GET /v1/topics/{topic}/partitions/{partition}/frames": "topic",
    "GET /v1/topics/{topic}/partitions/{partition}/messages": "topic",
    "GET /v1/topics/{topic}/partitions/{partition}/payload": "topic",
    "GET /v1/topics/{topic}/partitions/{partition}/sequence": "topic producer",
    "GET /v1/topics/{topic}/settings": "topic",
    "PATCH /v1/topics/{topic}/settings": "topic",
    "GET /v1/traces": "topic group",
    "GET /v1/traces/stats": "topic",
    "GET /v1/traces/{message_id}": "topic",
    "GET /v1/workers": "any",
    "POST /v1/workers/{worker}/drain": "topic group",
    "POST /v1/workers/{worker}/resume": "topic group",
    "POST /v1/workers/{worker}/stop": "topic group",
}

# Calls that change nothing, and have a body for what they ask about.
LOOKING = [
    "POST /schema-registry/compatibility/subjects/{subject}/versions",
    "POST /schema-registry/compatibility/subjects/{subject}/versions/{version}",
    "POST /schema-registry/subjects/{subject}",
]

# What the tokens that are good for some names only may touch; all others may touch everything.
TOUCHES: dict[str, set[str]] = {
    "of-these": {"topic", "group", "stream", "producer", "lock"},
    "of-others": set(),
    "of-other-names": {"topic"},
}

# Open to everybody: whether the server lives, and how it is used.
OPEN = re.compile(r"/healthz|/readyz|/openapi\.json|/docs(/.*)?|/ui/static/.*|/favicon\.ico")


ODD_PATHS = [
    "/v1/queues/other.x%2F..%2Forders/stats",
    "/v1/queues/other.x/../orders/stats",
    "/v1/queues/%6frders/stats",
    "/v1/queues/./orders/stats",
    "//v1/queues/orders/stats",
    "/v1/queues//orders/stats",
    "/v1/queues/orders/stats/",
    "/v1/queues/orders%00/stats",
    "/v1/queues/other.x%0aorders/stats",
    "/v1/queues/other.x?/../orders/stats",
    "/v1/queues/other.x%23/../orders/stats",
    "/v1/queues/..%2f..%2fetc%2fpasswd/stats",
    "/v1/queues/ORDERS/stats",
    "http://127.0.0.1/v1/queues/orders/stats",
    "*",
]


GROUP = "workers"  # one in queue mode on the topic
STREAM = TOPIC  # one in stream mode, which is named like the topic
WORKER = "mailer"
SCHEMA = {"schema": '"string"'}
RECEIPTS = {"receipts": ["x"], "group": GROUP}

# What calls say besides their path, so that they name what they are about, or are understood at all.
NAMING: dict[str, dict[str, Any]] = {
    "GET /ui/workers": {"query": f"?queue={TOPIC}"},  # only narrows down what the caller may see
    "POST /v1/queues/{queue}/ack": {"body": RECEIPTS},
    "POST /v1/queues/{queue}/nack": {"body": RECEIPTS},
    "POST /v1/queues/{queue}/reject": {"body": RECEIPTS},
    "POST /v1/queues/{queue}/extend": {"body": RECEIPTS},
    "POST /v1/queues/{queue}/seek": {"body": {"to": "start", "group": GROUP}},
    "POST /v1/queues/{queue}/pause": {"body": {"group": GROUP}},
    "POST /v1/queues/{queue}/workers": {"body": {"id": "w1", "name": WORKER}},
    "POST /v1/queues/{queue}/dead/purge": {"body": {"ids": [], "group": GROUP}},
    "POST /v1/queues/{queue}/dead/redrive": {"body": {"group": GROUP}},
    "PUT /v1/queues/{queue}/state": {"body": {"receipt": "x", "version": 0, "value": 1, "group": GROUP}},
    "GET /v1/queues/{queue}/state": {"query": f"?receipt=x&group={GROUP}"},
    "GET /v1/queues/{queue}/inHand": {"query": f"?receipt=x&group={GROUP}"},
    "GET /v1/queues/{queue}/payload": {"query": f"?receipt=x&group={GROUP}"},
    "GET /v1/queues/{queue}/lookup": {"query": f"?id={MESSAGE}&group={GROUP}"},
    "GET /ui/queues/{queue}/redriven": {"query": f"?ids={MESSAGE}&group={GROUP}"},
    "GET /v1/search": {"query": "?q=x"},
    "PUT /v1/schedules/{schedule}": {"body": {"topic": TOPIC, "text": "x", "every": 3600}},
    "POST /schema-registry/subjects/{subject}/versions": {"body": SCHEMA},
    "POST /schema-registry/subjects/{subject}": {"body": SCHEMA},
    "POST /schema-registry/compatibility/subjects/{subject}/versions": {"body": SCHEMA},
    "POST /schema-registry/compatibility/subjects/{subject}/versions/{version}": {"body": SCHEMA},
    "PUT /schema-registry/config": {"body": {"compatibility": "FULL"}},
    "PUT /schema-registry/config/{subject}": {"body": {"compatibility": "FULL"}},
    "POST /v1/producers": {"body": {"name": TOPIC}},
    "POST /v1/transactions": {"body": {"name": TOPIC}},
    "POST /v1/transactions/commit": {"body": {"name": TOPIC, "messages": [{"topic": TOPIC, "text": "x"}]}},
    "POST /v1/groups/{group}/members/{member}/poll": {"body": {"poll": 1}},
    "POST /v1/groups/{group}/members/{member}/seek": {"body": {"to": "start"}},
    "POST /v1/groups/{group}/members/{member}/commit": {
        "body": {"offsets": [{"topic": TOPIC, "partition": 0, "offset": 0}]}
    },
    "GET /v1/traces": {"query": f"?topic={TOPIC}&group={GROUP}"},
    "GET /v1/traces/stats": {"query": f"?topic={TOPIC}"},
    "GET /v1/traces/{message_id}": {},
    "POST /v1/topics": {"body": {"name": TOPIC, "exist_ok": True}},
    "GET /v1/groups": {"query": f"?topic={TOPIC}"},
    "GET /v1/standing": {"query": f"?topic={TOPIC}"},
    "GET /v1/groups/{group}/offsets": {"query": f"?topic={TOPIC}"},
    "DELETE /v1/groups/{group}": {"query": f"?topic={TOPIC}"},
    "POST /v1/groups/{group}/reset": {"body": {"topic": TOPIC, "to": "earliest"}},
    "POST /v1/groups/{group}/members": {"body": {"topics": [TOPIC]}},
}


class Caller(NamedTuple):
    """Somebody with a token, or without one that holds."""

    name: str
    token: str | None
    known: bool = True


CALLERS = [
    *(Caller(name, f"token-of-{name}") for name in MAY),
    Caller("nobody", None, known=False),
    Caller("stranger", "token-of-nobody", known=False),
    Caller("too-late", "token-of-too-late", known=False),
]


def entries() -> Iterator[dict[str, Any]]:
    for name in MAY:
        role: Any = [name.removeprefix("only-")] if name.startswith("only-") else name
        others = ["other.*"]
        more: dict[str, Any] = {
            "of-these": {"role": "admin", "topics": [TOPIC]},
            "of-others": {"role": "admin", "topics": others},
            "of-other-names": {
                "role": "admin",
                "topics": [TOPIC],
                "groups": others,
                "producers": others,
                "locks": others,
            },
        }.get(name, {"role": role})
        yield {"name": name, "sha256": digest_of(f"token-of-{name}"), **more}
    yield {"name": "too-late", "sha256": digest_of("token-of-too-late"), "role": "admin", "expires": EXPIRED}


def tokens_file(folder: Path) -> str:
    path = folder / "tokens.json"
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode({"tokens": list(entries())}))
    return str(path)


@contextmanager
def guarded(folder: Path, **settings: Any) -> Iterator[Serving]:
    """A server with a tokens file, an audit log, and everything that can be asked."""
    chosen = {"tokens_file": tokens_file(folder), "max_wait_ms": 1, **settings}
    with serving(folder / "data", whole=True, **chosen) as server:
        yield server


def routes_of(server: Serving) -> list[Route]:
    return server.server.app.router.routes


def path_of(route: Route) -> str:
    """The route's path, about our topic."""
    values = {
        "queue": TOPIC,
        "topic": TOPIC,
        "name": TOPIC,
        "schedule": TOPIC,
        "transaction": TOPIC,
        "subject": f"{TOPIC}-value",
        "version": "latest",
        "id": MESSAGE,
        "message_id": MESSAGE,
        "partition": "0",
        "offset": "0",
        "worker": WORKER,
        "group": GROUP if route.named is not None else STREAM,
    }
    path = re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], "x"), route.pattern)
    return path + NAMING.get(name_of(route), {}).get("query", _in_group(route.query, f"?group={GROUP}", ""))


def body_of(route: Route) -> Any:
    return NAMING.get(name_of(route), {}).get("body", _in_group(route.body, {"group": GROUP}, None))


def _in_group(given: Any, group: Any, nothing: Any) -> Any:
    return group if "group" in getattr(given, "__struct_fields__", ()) else nothing


def name_of(route: Route) -> str:
    return f"{route.method} {route.pattern}"


def status_of(server: Serving, method: str, path: str, token: str | None = None, body: Any = None) -> int:
    """How a call is answered; a stream is left as soon as it begins."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    content = json.dumps(body or {}) if method in ("POST", "PUT", "PATCH") else None
    connection = server.connection(timeout_s=20)
    try:
        connection.request(method, path, content, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def wanted(caller: Caller, route: Route) -> set[int] | None:
    """Which refusal the caller must get; None where the call must reach its handler."""
    if route.action == "open":
        return None
    if not caller.known:
        return {401}
    instead = route.instead and MAY[caller.name] & {"consume", "publish"}
    if not instead and not {route.action, route.also or route.action} <= MAY[caller.name]:
        return {403}
    touched = set(GUARDS[name_of(route)].split()) - {"any"}
    return None if touched <= TOUCHES.get(caller.name, touched) else {403}


def prepared(server: Serving) -> str:
    """Make what calls name: a topic, a group in each mode, a worker, a schedule, and a producer, whose id this is."""
    token = "token-of-admin"
    assert server.request("PUT", f"/v1/queues/{TOPIC}", {}, token=token).status == 200
    assert server.request("PUT", f"/v1/topics/{TOPIC}/groups/{GROUP}", {}, token=token).status == 200
    assert server.post(f"/v1/groups/{STREAM}/members", {"topics": [TOPIC]}, token=token).status == 201
    reported = {"id": "w1", "name": WORKER}
    assert server.post(f"/v1/queues/{TOPIC}/workers?group={GROUP}", reported, token=token).status == 200
    schedule = {"topic": TOPIC, "text": "x", "every": 3600}
    assert server.request("PUT", f"/v1/schedules/{TOPIC}", schedule, token=token).status == 200
    begun = server.post("/v1/producers", {"name": TOPIC}, token=token)
    assert begun.status == 201
    return str(begun.body["id"])


@pytest.mark.slow
def test_every_route_lets_in_whom_it_may_and_nobody_else(tmp_path: Path):
    wrong = []
    asked = 0
    with guarded(tmp_path) as server:
        for route in routes_of(server):
            producer = prepared(server)  # anew: calls before may have taken something away
            methods = [route.method, *(["HEAD"] if route.method == "GET" else [])]
            for caller in CALLERS:
                for method in methods:
                    asked += 1
                    path = path_of(route) + (f"?producer={producer}" if "/sequence" in route.pattern else "")
                    status = status_of(server, method, path, caller.token, body_of(route))
                    refusal = wanted(caller, route)
                    fits = status in refusal if refusal else status not in (401, 403) and status < 500
                    if not fits:
                        expected = refusal or "to be let in"
                        wrong.append(f"{caller.name}: {method} {route.pattern}: {status}, not {expected}")
    assert wrong == []
    assert asked > 300


@pytest.mark.slow
def test_a_read_only_server_lets_nobody_change_anything(tmp_path: Path):
    with guarded(tmp_path, read_only=True) as server:
        for route in routes_of(server):
            status = status_of(server, route.method, path_of(route), "token-of-admin")
            if route.action in ("open", "read"):
                assert status not in (401, 403), route.pattern
            else:
                assert status == 403, route.pattern


def test_the_table_has_no_route_that_somebody_forgot_to_guard(tmp_path: Path):
    with guarded(tmp_path) as server:
        routes = routes_of(server)
    assert [route.pattern for route in routes if route.action == "open" and not OPEN.fullmatch(route.pattern)] == []
    assert [route.pattern for route in routes if route.action not in {*ALL, "open"}] == []
    changing = [route for route in routes if route.method != "GET"]
    assert sorted(name_of(route) for route in changing if route.action in ("read", "open")) == LOOKING
    unaudited = [name_of(route) for route in changing if route.action == "admin" and not route.act]
    assert unaudited == [], "administrative acts must be audited"


def test_every_route_has_a_row_that_says_what_guards_it(tmp_path: Path):
    with guarded(tmp_path) as server:
        routes = routes_of(server)
    assert sorted(map(name_of, routes)) == sorted(GUARDS)
    for route in routes:
        words = set(GUARDS[name_of(route)].split())
        fields = {*getattr(route.body, "__struct_fields__", ()), *getattr(route.query, "__struct_fields__", ())}
        assert ("open" in words) == (route.action == "open"), route.pattern
        assert ("lock" in words) == (route.named == "name"), route.pattern
        assert route.named not in ("queue", "topic") or "topic" in words, route.pattern
        assert "group" not in fields or "group" in words, route.pattern
        assert "{group}" not in route.pattern or words & {"group", "stream"}, route.pattern
        assert ("all" in words) == (route.named is None and route.scope == "all" and "open" not in words), route.pattern


def test_every_call_that_names_its_topic_elsewhere_than_in_the_path_is_looked_at(tmp_path: Path):
    with guarded(tmp_path) as server:
        routes = [route for route in routes_of(server) if route.scope == "any" and route.named is None]
    fields = {
        name_of(route): {*getattr(route.body, "__struct_fields__", ()), *getattr(route.query, "__struct_fields__", ())}
        for route in routes
    }
    naming = {"topic", "topics", "queue", "queues", "message_id"}
    forgotten = [name for name, found in fields.items() if found & naming and name not in NAMING]
    assert [name for name in forgotten if "{member}" not in name] == []  # a member reads what it was let join


def test_dead_letters_are_put_only_where_the_caller_may_publish(tmp_path: Path):
    with guarded(tmp_path) as server:
        prepared(server)
        admin = "token-of-admin"
        assert server.request("PUT", "/v1/queues/elsewhere", {}, token=admin).status == 200
        path = f"/v1/queues/{TOPIC}/dead/redrive"
        refused = server.post(path, {"to": "elsewhere", "group": GROUP}, token="token-of-of-these")
        assert (refused.status, refused.code) == (403, "forbidden")
        assert server.post(path, {"to": "elsewhere", "group": GROUP}, token=admin).status == 200
        unknown = server.post(path, {"to": "nowhere", "group": GROUP}, token=admin)
        assert (unknown.status, unknown.code) == (404, "unknown_topic")


def test_a_redrive_into_a_topic_of_dead_letters_is_refused_by_its_dry_run_too(tmp_path: Path):
    with guarded(tmp_path) as server:
        prepared(server)
        for dry_run in (True, False):
            wanted = {"to": f"{TOPIC}.dlq", "group": GROUP, "dry_run": dry_run}
            refused = server.post(f"/v1/queues/{TOPIC}/dead/redrive", wanted, token="token-of-admin")
            assert (refused.status, refused.code) == (400, "invalid_request")


@pytest.mark.parametrize("path", ["/v1/topics/other.one", "/v1/queues/other.one/stats", "/v1/groups/other.one"])
def test_an_error_names_nothing_that_the_caller_may_not_see(tmp_path: Path, path: str):
    with guarded(tmp_path) as server:
        prepared(server)
        seen = server.get(path, token="token-of-admin")
        hidden = server.get(path, token="token-of-of-others")
        assert (seen.status, hidden.status) == (404, 404)
        assert seen.code == hidden.code
        answer: str = hidden.body["error"]["message"]
        assert "other.one" in answer
        assert TOPIC not in answer.replace("other.one", "")
        assert str(tmp_path) not in answer


def test_a_member_is_reached_only_by_those_who_may_read_all_that_it_reads(tmp_path: Path):
    with guarded(tmp_path) as server:
        server.request("PUT", f"/v1/queues/{TOPIC}", {}, token="token-of-admin")
        joined = server.post(f"/v1/groups/{STREAM}/members", {"topics": [TOPIC]}, token="token-of-of-these")
        assert joined.status == 201
        member = f"/v1/groups/{STREAM}/members/{joined.body['member']}"
        routes = [route for route in routes_of(server) if "{member}" in route.pattern]
        bodies: dict[str, Any] = {
            "poll": {"poll": 1},
            "commit": {"offsets": [{"topic": TOPIC, "partition": 0, "offset": 0}]},
            "seek": {"to": "start"},
        }
        for route in routes:
            path = route.pattern.replace("{group}", STREAM).replace("{member}", joined.body["member"])
            body = bodies.get(path.rpartition("/")[2])
            assert status_of(server, route.method, path, "token-of-of-others", body) == 403, route.pattern
        assert len(routes) > 4
        assert status_of(server, "DELETE", f"/v1/groups/{STREAM}", "token-of-of-others") == 403
        assert server.post(f"{member}/heartbeat", token="token-of-of-these").status == 200


def test_a_unix_socket_is_for_its_owner_who_may_do_everything(tmp_path: Path):
    path = tmp_path / "socket"
    with guarded(tmp_path, socket=str(path)), socket.socket(socket.AF_UNIX) as caller:
        assert path.stat().st_mode & 0o777 == 0o600
        caller.connect(str(path))
        caller.sendall(b"GET /v1/admin/audit HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert caller.recv(12) == b"HTTP/1.1 200"


def test_a_refusal_says_what_to_do(tmp_path: Path):
    with guarded(tmp_path) as server:
        nobody = server.post(f"/v1/queues/{TOPIC}/ack")
        assert (nobody.status, nobody.code) == (401, "unauthenticated")
        connection = server.connection()
        connection.request("GET", "/metrics")
        challenges = connection.getresponse().msg.get_all("www-authenticate")
        connection.close()
        assert challenges == ['Basic realm="holdfast", charset="UTF-8"', 'Bearer realm="holdfast"']
        producer = server.post(f"/v1/queues/{TOPIC}/ack", token="token-of-producer")
        assert (producer.status, producer.code) == (403, "forbidden")
        assert producer.body["error"]["message"] == (
            "producer does not have the right 'consume' on the topic 'orders'; the token allows publish on topics *"
        )


def test_a_browser_logs_in_with_the_token_as_its_password(tmp_path: Path):
    with guarded(tmp_path) as server:
        headers = {"authorization": "Basic " + "YW55Ym9keTp0b2tlbi1vZi1hZG1pbg=="}  # anybody:token-of-admin
        assert server.get("/v1/admin/audit", headers=headers).status == 200
        headers["origin"] = "http://evil.example"
        assert server.get("/v1/admin/audit", headers=headers).status == 403
        headers["origin"] = server.url
        assert server.get("/v1/admin/audit", headers=headers).status == 200


def test_no_way_of_writing_a_path_gets_around_the_check(tmp_path: Path):
    with guarded(tmp_path) as server:
        server.request("PUT", f"/v1/queues/{TOPIC}", {}, token="token-of-admin")
        assert server.get(f"/v1/queues/{TOPIC}/stats", token="token-of-of-these").status == 200
        for path in ODD_PATHS:
            assert status_of(server, "GET", path, "token-of-of-others") in (400, 403, 404, 405), path


def test_a_token_that_is_taken_back_ends_the_next_call(tmp_path: Path):
    with guarded(tmp_path) as server:
        connection = server.connection()
        headers = {"authorization": "Bearer token-of-reader"}
        connection.request("GET", "/metrics", headers=headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
        file = Path(server.server.settings.tokens_file)
        file.write_text('{"tokens": []}')
        until = time.monotonic() + 30
        while answer.status == 200:  # on one connection: it is not dropped
            assert time.monotonic() < until
            connection.request("GET", "/metrics", headers=headers)
            answer = connection.getresponse()
            answer.read()
        assert answer.status == 401
        connection.close()


def test_limits_hold_before_anybody_is_asked_who_they_are(tmp_path: Path):
    with guarded(tmp_path, max_request_bytes=1_000, max_header_bytes=2_000, header_timeout_ms=200) as server:
        assert server.post(f"/v1/queues/{TOPIC}/enqueue", b"x" * 1_001).status == 413
        assert server.get("/metrics", headers={"x": "y" * 3_000}).status == 431
        address = urlsplit(server.url)
        with socket.create_connection((address.hostname, address.port), timeout=30) as slow:
            slow.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n")
            assert slow.recv(12) in (b"HTTP/1.1 408", b"")


def test_acts_are_written_down_with_who_did_them(tmp_path: Path):
    with guarded(tmp_path) as server:
        made = server.request(
            "PUT",
            f"/v1/queues/{TOPIC}",
            {"settings": {"max_attempts": 3}},
            token="token-of-admin",
            headers={"x-correlation-id": "c-17"},
        )
        assert made.status == 200
        server.request("PUT", f"/v1/queues/{TOPIC}", {}, token="token-of-producer")
        server.request("PUT", f"/v1/queues/{TOPIC}", {}, token="token-of-nobody")
        answer = server.get("/v1/admin/audit", token="token-of-admin").body
        (done,) = answer["acts"]
        assert server.get("/v1/admin/audit", token="token-of-admin", query={"limit": 1}).body == {
            "acts": [done],
            "refused": answer["refused"][:1],
        }
        page = server.get("/ui/audit", token="token-of-admin").body.decode()
        assert "Refused" in page
        assert "(unknown)" in page
    assert [(each["principal"], each["outcome"]) for each in answer["refused"]] == [
        ("(unknown)", "unauthenticated"),
        ("producer", "forbidden"),
    ]
    assert {name: done[name] for name in done if name not in ("time", "id", "count")} == {
        "principal": "admin",
        "peer": "127.0.0.1",
        "action": "admin",
        "route": "PUT /v1/queues/{queue}",
        "target": TOPIC,
        "parameters": {"queue": TOPIC, "settings": {"max_attempts": 3}},
        "correlation_id": "c-17",
        "outcome": "done",
    }


def test_no_number_of_refused_calls_washes_the_audit_log_away(tmp_path: Path):
    with guarded(tmp_path, audit_bytes=4_096, audit_files=1) as server:
        server.request("PUT", f"/v1/queues/{TOPIC}", {}, token="token-of-admin")
        before = (tmp_path / "data" / "audit.jsonl").read_bytes()
        long = "x" * 8_000
        for _ in range(10):
            for token, method, path, body in (
                ("token-of-reader", "DELETE", f"/v1/topics/{long}", None),
                ("token-of-of-others", "POST", "/v1/topics", {"name": TOPIC, "settings": {"description": long}}),
                ("token-of-of-others", "DELETE", f"/v1/groups/{STREAM}", None),
                ("token-of-of-others", "POST", f"/v1/groups/{STREAM}/reset", {"topic": TOPIC, "to": "earliest"}),
                ("token-of-of-other-names", "POST", f"/v1/queues/{TOPIC}/seek", {"to": "start", "group": GROUP}),
                ("token-of-of-other-names", "PUT", f"/v1/topics/{TOPIC}/groups/{GROUP}", {}),
                (None, "DELETE", f"/v1/topics/{TOPIC}", None),
            ):
                assert server.request(method, path, body, token=token).status in (401, 403), path
            # Neither does one who may consume, by taking back what is not there.
            for path in (f"/v1/queues/{TOPIC}/messages/{MESSAGE}", f"/v1/topics/{TOPIC}/delayed/{TOPIC}-0-d7"):
                missing = server.request("DELETE", path, token="token-of-consumer")
                assert missing.status in (200, 400), missing
        assert (tmp_path / "data" / "audit.jsonl").read_bytes() == before
        assert len((tmp_path / "data" / "audit-refused.jsonl").read_bytes()) <= 4_096
        answer = server.get("/v1/admin/audit", token="token-of-admin").body
        assert [act["outcome"] for act in answer["acts"]] == ["done"]
        assert {each["principal"] for each in answer["refused"]} >= {"of-other-names", "(unknown)"}


def test_what_was_taken_back_is_written_down(tmp_path: Path):
    with guarded(tmp_path) as server:
        server.request("PUT", f"/v1/queues/{TOPIC}", {}, token="token-of-admin")
        path = f"/v1/queues/{TOPIC}"
        ready = server.post(f"{path}/enqueue", b"1", token="token-of-admin").body["id"]
        late = server.post(f"{path}/enqueue", b"1", query={"delay": 60}, token="token-of-admin").body["id"]
        taken = server.request("DELETE", f"{path}/messages/{ready}", token="token-of-consumer")
        assert taken.body == {"cancelled": True}
        taken = server.request("DELETE", f"/v1/topics/{TOPIC}/delayed/{late}", token="token-of-consumer")
        assert taken.body == {"cancelled": True}
        acts = server.get("/v1/admin/audit", token="token-of-admin", query={"limit": 2}).body["acts"]
        assert [(act["principal"], act["route"], act["outcome"]) for act in acts] == [
            ("consumer", "DELETE /v1/topics/{topic}/delayed/{id}", "done"),
            ("consumer", "DELETE /v1/queues/{queue}/messages/{id}", "done"),
        ]


def test_an_act_that_cannot_be_written_down_is_not_done(tmp_path: Path):
    audit = Audit(real_world(), f"{tmp_path}/nowhere/audit.jsonl")
    with serving(tmp_path / "data", auditor=CallAuditor(audit)) as server:
        answer = server.request("PUT", f"/v1/queues/{TOPIC}", {})
        assert (answer.status, answer.code) == (503, "unavailable")
        assert "nothing was done" in answer.body["error"]["message"]
        assert server.get(f"/v1/queues/{TOPIC}/stats").status == 404


def test_an_open_server_is_not_reached_by_pages_or_names_of_others(tmp_path: Path):
    with serving(tmp_path / "data") as server:
        path = f"/v1/queues/{TOPIC}"
        assert server.request("PUT", path, {}, headers={"origin": "https://evil.example"}).status == 403
        assert server.request("PUT", path, {}, headers={"host": "evil.example"}).status == 403
        assert server.request("PUT", path, {}, headers={"origin": server.url}).status == 200


def test_a_client_certificate_says_who_is_calling(tmp_path: Path):
    issuer = Issuer()
    (tmp_path / "tls").mkdir()
    certificate, key = issuer.issue(tmp_path / "tls", "localhost", "127.0.0.1")
    shop, stranger = issuer.issue(tmp_path / "tls", "shop"), issuer.issue(tmp_path / "tls", "stranger")
    ca = issuer.write(tmp_path / "tls" / "ca.pem")
    tokens = tmp_path / "tokens.toml"
    tokens.touch(mode=0o600)
    tokens.write_text(with_entry("", TokenEntry(name="the-shop", certificate="shop", role="producer"), "t"))
    files = {
        "tls_cert_file": str(certificate),
        "tls_key_file": str(key),
        "tls_client_ca_file": str(ca),
        "tokens_file": str(tokens),
    }
    tls = tls_context(ServerSettings(**files), real_world().clock)
    with serving(tmp_path / "data", tls=tls, **files) as server:
        assert server.url.startswith("https://")
        assert secure_status(server, ca, shop, "POST", "/v1/queues/x/enqueue") == 404  # let in; there is no such queue
        assert secure_status(server, ca, shop, "GET", "/v1/queues/x/stats") == 403
        assert secure_status(server, ca, stranger, "GET", "/v1/queues/x/stats") == 401
        assert secure_status(server, ca, shop, "GET", "/healthz") == 200
        with pytest.raises((ssl.SSLError, ConnectionError)):
            secure_status(server, ca, None, "GET", "/healthz")


def secure_status(server: Serving, ca: Path, client: tuple[Path, Path] | None, method: str, path: str) -> int:
    context = ssl.create_default_context(cafile=ca)
    if client is not None:
        context.load_cert_chain(*client)
    connection = http.client.HTTPSConnection(urlsplit(server.url).netloc, context=context, timeout=20)
    try:
        connection.request(method, path, b"{}" if method == "POST" else None)
        return connection.getresponse().status
    finally:
        connection.close()


def test_whoever_may_read_may_search_with_a_regular_expression_and_nobody_else(tmp_path: Path):
    with guarded(tmp_path) as server:
        path = f"/v1/queues/{TOPIC}/messages"
        server.request("PUT", f"/v1/queues/{TOPIC}", token="token-of-admin")
        for where in ('key == "~"', 'key ~ "(a+)+$"', 'not (key !~ "a")'):
            for token, expected in (("token-of-reader", 200), ("token-of-admin", 200), ("no-token", 401)):
                answer = server.get(path, query={"where": where}, token=token)
                assert answer.status == expected, (where, answer)
