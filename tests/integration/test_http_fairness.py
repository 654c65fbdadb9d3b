"""One caller beside others: it can use up its own share of waiting calls and connections, and nobody else's."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from holdfast.errors import TooManyWaiters
from holdfast.server.tokens import LOCAL, Principal, TokenEntry, principal_of
from holdfast.server.waiting import ADMIN_RESERVE, WaitLimit
from holdfast.settings import ServerSettings
from tests.integration.faults_gear import WAIT_S, head_of, request_of, status_of
from tests.integration.http_gear import Serving, serving
from tests.integration.process_gear import until
from tests.integration.test_http_revoked import write_tokens

QUEUE = "/v1/queues/orders"
POLL = b'{"wait": 60}'
OPS, ONE, OTHER = (
    {"name": "ops"},
    *({"name": name, "role": "consumer", "create_groups": True} for name in ("one", "other")),
)


@contextmanager
def guarded(folder: Path, **settings: int) -> Iterator[Serving]:
    path = folder / "tokens.json"
    write_tokens(path, OPS, ONE, OTHER)
    with serving(folder / "data", tokens_file=str(path), **settings) as server:
        assert server.request("PUT", QUEUE, {}, token="ops").status == 200
        yield server


@contextmanager
def client(server: Serving, address: str = "127.0.0.1") -> Iterator[socket.socket]:
    """A connection that comes from an address of this machine."""
    at = urlsplit(server.url)
    with socket.create_connection((at.hostname, at.port), timeout=WAIT_S, source_address=(address, 0)) as made:
        yield made


def poll(token: str) -> bytes:
    return request_of("POST", f"{QUEUE}/dequeue", POLL, f"authorization: Bearer {token}")


def ask(connection: socket.socket, path: str, *headers: str) -> int:
    connection.sendall(head_of("GET", path, *headers))
    return status_of(connection)


def test_long_polls_of_one_token_leave_room_for_those_of_others(tmp_path: Path):
    with guarded(tmp_path, max_waiters=8) as server, ExitStack() as stack:
        polls = [stack.enter_context(client(server)) for _ in range(8)]
        for connection in polls[:4]:
            connection.sendall(poll("one"))
        until(lambda: server.server.service.waits.waiting == 4, "its share waits")
        for connection in polls[4:]:
            connection.sendall(poll("one"))
            assert status_of(connection) == 429
        for path in ("subscribe", "dequeueWithState"):
            answer = server.post(f"{QUEUE}/{path}", {"wait": 60} if path != "subscribe" else {}, token="one")
            assert (answer.status, answer.code) == (429, "too_many_waiters")
            assert "max_waiters_per_principal" in answer.body["error"]["message"]
        other = stack.enter_context(client(server))
        other.sendall(poll("other"))
        until(lambda: server.server.service.waits.waiting == 5, "the other one's waits, too")


def test_every_kind_of_waiting_counts_for_its_caller(tmp_path: Path):
    with guarded(tmp_path, max_waiters=100, max_waiters_per_principal=1) as server, ExitStack() as stack:
        assert server.post("/v1/locks/door/acquire", {"lease": 300, "owner": "x"}, token="ops").status == 200
        waiting = stack.enter_context(client(server))
        waiting.sendall(poll("one"))
        until(lambda: server.server.service.waits.waiting == 1, "it waits")
        assert server.get(f"{QUEUE}/watch", token="one").status == 429
        read = "/v1/topics/orders/partitions/0/messages"
        assert server.get(read, query={"offset": 0, "wait": 60}, token="one").status == 429
        member = server.post("/v1/groups/g/members", {"topics": ["orders"]}, token="one").body["member"]
        polled = server.post(f"/v1/groups/g/members/{member}/poll", {"poll": 1, "wait": 60}, token="one")
        assert polled.status == 429
        held = stack.enter_context(client(server))
        lock = b'{"wait": 60, "lease": 9, "owner": "y"}'
        held.sendall(request_of("POST", "/v1/locks/door/acquire", lock, "authorization: Bearer ops"))
        until(lambda: server.server.service.waits.waiting == 2, "an admin waits for the lock")
        answer = server.post("/v1/locks/door/acquire", {"wait": 60, "lease": 9, "owner": "z"}, token="ops")
        assert (answer.status, answer.code) == (429, "too_many_waiters")


def test_ten_thousand_may_wait_unless_it_is_said_otherwise():
    assert ServerSettings().max_waiters == 10_000


def test_a_share_is_half_and_who_needs_no_token_may_have_all_and_admins_have_a_reserve():
    one = principal_of(TokenEntry(name="one", sha256="0" * 64, role="consumer"))
    ops = principal_of(TokenEntry(name="ops", sha256="1" * 64, role="admin"))
    limit = WaitLimit(10)
    assert [limit.share(each) for each in (one, ops, Principal(name=LOCAL))] == [5, 5, 10]
    assert limit.share(principal_of(TokenEntry(name=LOCAL, sha256="2" * 64, role="admin"))) == 5
    with ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(limit.one_more(Principal(name=LOCAL)))
        with pytest.raises(TooManyWaiters, match="max_waiters"):
            limit.check(one)
        limit.check(ops)
    assert limit.waiting == limit.of(one) == limit.of(Principal(name=LOCAL)) == 0
    assert ADMIN_RESERVE > 0


def test_connections_that_rest_make_room_for_new_ones(tmp_path: Path):
    with guarded(tmp_path, max_connections=8) as server, ExitStack() as stack:
        idle = [stack.enter_context(client(server, "127.0.0.2")) for _ in range(6)]
        assert ask(idle[0], "/healthz") == 200  # it is kept, others have said nothing at all
        idle[1].sendall(b"GET /healthz HTTP/1.1\r\nhost: ")  # and one is slow
        until(lambda: len(server.server.http.connections) == 6, "all are there")
        for _ in range(20):
            fresh = stack.enter_context(client(server))
            assert ask(fresh, f"{QUEUE}/stats", "authorization: Bearer one") == 200
        assert len(server.server.http.connections) <= 8


def test_one_address_cannot_have_all_connections(tmp_path: Path):
    with guarded(tmp_path, max_connections=8) as server, ExitStack() as stack:
        busy = [stack.enter_context(client(server, "127.0.0.2")) for _ in range(6)]
        for i, connection in enumerate(busy):
            connection.sendall(poll("one" if i % 2 else "other"))
        until(lambda: server.server.service.waits.waiting == 6, "they wait")
        crowded = stack.enter_context(client(server, "127.0.0.2"))
        assert ask(crowded, f"{QUEUE}/stats", "authorization: Bearer one") == 503
        free = stack.enter_context(client(server, "127.0.0.3"))
        assert ask(free, f"{QUEUE}/stats", "authorization: Bearer one") == 200


def test_health_checks_and_admins_get_in_when_all_connections_are_at_work(tmp_path: Path):
    settings = {"max_connections": 4, "max_connections_per_address": 4}
    with guarded(tmp_path, **settings) as server, ExitStack() as stack:
        for i in range(4):
            connection = stack.enter_context(client(server))
            connection.sendall(poll("one" if i % 2 else "other"))
        until(lambda: server.server.service.waits.waiting == 4, "all connections are at work")
        for path in ("/healthz", "/readyz"):
            assert server.get(path).status == 200
        assert server.get("/v1/admin/status", token="ops").body["connections"] == 5
        refused = server.get(f"{QUEUE}/stats", token="one")
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert refused.headers["connection"] == "close"
        assert refused.body["error"]["retryable"] is True
        assert server.get("/docs").status == 503
        # Nobody may wait there, or a few admins' polls would keep all others out.
        assert server.post(f"{QUEUE}/dequeue", {"wait": 60}, token="ops").status == 503


def test_a_reserve_that_is_full_of_silent_clients_still_lets_an_admin_in(tmp_path: Path):
    settings = {"max_connections": 2, "max_connections_per_address": 2}
    with guarded(tmp_path, **settings) as server, ExitStack() as stack:
        for token in ("one", "other"):
            stack.enter_context(client(server)).sendall(poll(token))
        until(lambda: server.server.service.waits.waiting == 2, "all connections are at work")
        for _ in range(100):
            stack.enter_context(client(server))
        assert server.get("/v1/admin/status", token="ops").status == 200
        assert len(server.server.http.connections) <= 2 + server.server.http.limits.reserve + 1
