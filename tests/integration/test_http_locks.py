"""Locks and state documents over HTTP: every route, real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.protocol.media import MSGPACK
from holdfast.server.tokens import digest_of
from tests.integration.http_gear import Answer, Serving, serving

LOCK = "/v1/locks/report"
STATE = "/v1/state/plan"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path, max_wait_ms=20_000) as found:
        yield found


def acquire(server: Serving, path: str = LOCK, **wanted: Any) -> Answer:
    return server.post(f"{path}/acquire", wanted)


def taken(server: Serving, **wanted: Any) -> dict[str, Any]:
    answer = acquire(server, **wanted)
    assert answer.status == 200, answer
    return dict(answer.body)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)


def waiting(server: Serving) -> int:
    return int(server.get(LOCK).body["waiting"])


def test_a_lock_is_taken_kept_alive_described_and_released(server: Serving):
    lock = taken(server, owner="ann", lease=60)
    assert (lock["name"], lock["owner"], lock["lease"]) == ("report", "ann", 60)
    info = server.get(LOCK).body
    assert (info["held"], info["owner"], info["fence"]) == (True, "ann", lock["fence"])
    assert (info["acquired_at"], info["fence"]) == (lock["acquired_at"], lock["fence"])
    longer = server.post(f"{LOCK}/keepalive", {"lease_id": lock["lease_id"], "lease": 90})
    assert (longer.status, longer.body["lease"], longer.body["fence"]) == (200, 90, lock["fence"])
    assert [each["name"] for each in server.get("/v1/locks").body["locks"]] == ["report"]
    assert server.post(f"{LOCK}/release", {"lease_id": lock["lease_id"]}).status == 204
    assert server.get(LOCK).body["held"] is False
    assert server.get("/v1/locks").body["locks"] == []
    assert taken(server)["fence"] > lock["fence"]


def test_a_lock_that_is_held_is_answered_with_who_has_it(server: Serving):
    taken(server, owner="ann")
    answer = acquire(server, owner="bob")
    assert (answer.status, answer.code) == (409, "lock_held")
    assert answer.body["error"]["retryable"] is True
    assert answer.body["error"]["facts"]["holder"] == "ann"
    assert answer.body["error"]["facts"]["until_ms"] > answer.body["error"]["facts"]["since_ms"]
    answer = acquire(server, owner="bob", if_not_exists=True, wait=-1)
    assert (answer.status, answer.code) == (409, "conflict")


def test_a_lost_lease_is_answered_with_who_has_the_lock_now(server: Serving):
    lock = taken(server, owner="ann", lease=0.05)
    assert taken(server, owner="bob", wait=10)["owner"] == "bob"
    for verb in ("keepalive", "release"):
        answer = server.post(f"{LOCK}/{verb}", {"lease_id": lock["lease_id"]})
        assert (answer.status, answer.code) == (409, "lease_lost")
        assert answer.body["error"]["facts"]["holder"] == "bob"


def test_calls_that_wait_have_the_lock_in_the_order_in_which_they_came(server: Serving):
    first = taken(server)
    order: list[str] = []

    def work(owner: str) -> None:
        lock = taken(server, owner=owner, wait=-1)
        order.append(owner)
        assert server.post(f"{LOCK}/release", {"lease_id": lock["lease_id"]}).status == 204

    with ThreadPoolExecutor(5) as pool:
        done = []
        for number in range(5):
            done.append(pool.submit(work, f"w{number}"))
            until(lambda number=number: waiting(server) == number + 1)
        server.post(f"{LOCK}/release", {"lease_id": first["lease_id"]})
        for each in done:
            each.result(60)
    assert order == [f"w{number}" for number in range(5)]


def test_a_client_that_goes_away_while_it_waits_leaves_the_line(server: Serving):
    first = taken(server)
    gone = server.connection()
    gone.request("POST", f"{LOCK}/acquire", b'{"wait": -1, "owner": "gone"}', {"content-type": "application/json"})
    until(lambda: waiting(server) == 1)
    gone.close()
    until(lambda: waiting(server) == 0)
    server.post(f"{LOCK}/release", {"lease_id": first["lease_id"]})
    assert taken(server, owner="bob")["owner"] == "bob"


def test_a_server_that_stops_sends_away_whoever_waits(tmp_path: Path):
    answers: list[Answer] = []
    with serving(tmp_path, max_wait_ms=20_000) as server:
        taken(server)
        thread = threading.Thread(target=lambda: answers.append(acquire(server, wait=-1)))
        thread.start()
        until(lambda: waiting(server) == 1)
    thread.join()
    assert [(answer.status, answer.code) for answer in answers] == [(409, "lock_held")]


def test_there_is_room_for_so_many_that_wait(tmp_path: Path):
    with serving(tmp_path, max_wait_ms=20_000, max_waiters=1) as server, ThreadPoolExecutor(1) as pool:
        first = taken(server)
        second = pool.submit(acquire, server, wait=-1)
        until(lambda: waiting(server) == 1)
        answer = acquire(server, wait=-1)
        assert (answer.status, answer.code) == (429, "too_many_waiters")
        server.post(f"{LOCK}/release", {"lease_id": first["lease_id"]})
        assert second.result(60).status == 200


def test_a_lock_and_a_document_outlive_the_server(tmp_path: Path):
    with serving(tmp_path) as server:
        lock = taken(server, lease=600)
        document = server.request("PUT", STATE, {"value": [1]}).body
    with serving(tmp_path) as server:
        assert server.get(LOCK).body["fence"] == lock["fence"]
        assert server.post(f"{LOCK}/keepalive", {"lease_id": lock["lease_id"]}).status == 200
        assert server.get(STATE).body == document


@pytest.mark.parametrize("value", [None, 1, "ü", [1, {"a": None}], {"b": 1.5}, False, ""])
def test_a_document_is_any_json_value(server: Serving, value: object):
    written = server.request("PUT", STATE, {"value": value})
    assert written.status == 200
    found = server.get(STATE)
    assert found.body == written.body
    assert (found.body["value"], found.headers["etag"]) == (value, f'"{found.body["version"]}"')


def test_a_document_is_replaced_only_by_somebody_who_knows_its_version(server: Serving):
    missing = server.get(STATE)
    assert (missing.status, missing.code) == (404, "not_found")
    first = server.request("PUT", STATE, {"value": 1}, query={"version": 0}).body["version"]
    second = server.request("PUT", STATE, {"value": 2}, headers={"If-Match": f'"{first}"'}).body["version"]
    for conditions in (
        {"query": {"version": first}},
        {"headers": {"If-Match": f'"{first}"'}},
        {"headers": {"If-None-Match": "*"}},
    ):
        for method, body in (("PUT", {"value": 3}), ("DELETE", None)):
            answer = server.request(method, STATE, body, **conditions)
            assert (answer.status, answer.code) == (409, "conflict")
            assert answer.body["error"]["facts"]["version"] == second
    assert server.get(STATE).body["value"] == 2
    assert server.get("/v1/state").body["names"] == ["plan"]
    assert server.request("DELETE", STATE, query={"version": second}).body == {"removed": True}
    assert server.request("DELETE", STATE).body == {"removed": False}


def test_a_document_can_be_guarded_by_a_lock(server: Serving):
    lease_id = taken(server)["lease_id"]
    assert server.request("PUT", STATE, {"value": 1}, query={"lease_id": lease_id}).status == 200
    server.post(f"{LOCK}/release", {"lease_id": lease_id})
    for method, body in (("PUT", {"value": 3}), ("DELETE", None)):
        answer = server.request(method, STATE, body, query={"lease_id": lease_id})
        assert (answer.status, answer.code) == (409, "lease_lost")


def test_messagepack_says_the_same(server: Serving):
    body = msgspec.msgpack.encode({"value": {"a": 1}})
    server.request("PUT", STATE, body, headers={"content-type": MSGPACK})
    found = server.get(STATE, headers={"accept": MSGPACK})
    assert msgspec.msgpack.decode(found.body)["value"] == {"a": 1}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/locks/..%2Fetc/acquire", {}),
        ("POST", "/v1/locks/.hidden/acquire", {}),
        ("GET", "/v1/locks/a%20b", None),
        ("PUT", "/v1/state/..%2F..%2Flock", {"value": 1}),
        ("GET", "/v1/state/%00", None),
        ("POST", f"{LOCK}/acquire", {"lease": 0}),
        ("POST", f"{LOCK}/acquire", {"wait": -2}),
        ("POST", f"{LOCK}/acquire", {"owner": "a\nb"}),
        ("POST", f"{LOCK}/acquire", {"unknown": 1}),
        ("POST", f"{LOCK}/release", {}),
        ("POST", f"{LOCK}/release", {"lease_id": "nonsense"}),
        ("POST", f"{LOCK}/release", {"lease_id": "other@1000001"}),
        ("PUT", STATE, {}),
        ("PUT", STATE, b"\xff"),
        ("PUT", f"{STATE}?version=-1", {"value": 1}),
        ("PUT", f"{STATE}?lease_id=x", {"value": 1}),
    ],
)
def test_mistakes_are_answered_as_such_and_change_nothing(server: Serving, method: str, path: str, body: Any):
    answer = server.request(method, path, body)
    assert (answer.status, answer.code) in {(400, "invalid_request"), (404, "not_found")}
    assert server.get("/v1/locks").body["locks"] == []
    assert server.get("/v1/state").body["names"] == []


@pytest.mark.parametrize("headers", [{"If-Match": "7"}, {"If-Match": "*"}, {"If-None-Match": '"7"'}])
def test_conditions_that_cannot_be_kept_are_refused(server: Serving, headers: dict[str, str]):
    assert server.request("PUT", STATE, {"value": 1}, headers=headers).status == 400
    assert (
        server.request("PUT", STATE, {"value": 1}, headers={"If-None-Match": "*"}, query={"version": 3}).status == 400
    )


def test_a_document_that_is_too_large_is_refused(server: Serving):
    answer = server.request("PUT", STATE, {"value": "x" * 1_048_576})
    assert (answer.status, answer.code) == (413, "message_too_large")


TOKENS = """
[[tokens]]
name = "all"
sha256 = "{all}"
role = ["lock"]

[[tokens]]
name = "some"
sha256 = "{some}"
role = ["lock"]
locks = ["ours.*"]
"""


def test_a_token_for_some_locks_sees_and_uses_no_others(tmp_path: Path):
    file = tmp_path / "tokens.toml"
    file.write_text(TOKENS.format(all=digest_of("a" * 40), some=digest_of("b" * 40)), encoding="ascii")
    file.chmod(0o600)
    with serving(tmp_path / "data", tokens_file=str(file)) as server:
        leases = {}
        for name in ("ours.a", "theirs"):
            path = f"/v1/locks/{name}/acquire"
            leases[name] = server.post(path, {}, token="a" * 40).body["lease_id"]
            assert server.request("PUT", f"/v1/state/{name}", {"value": 1}, token="a" * 40).status == 200
        some = {"token": "b" * 40}
        assert [lock["name"] for lock in server.get("/v1/locks", **some).body["locks"]] == ["ours.a"]
        assert server.get("/v1/state", **some).body["names"] == ["ours.a"]
        assert server.get("/v1/state/theirs", **some).status == 403
        assert server.post("/v1/locks/theirs/release", {"lease_id": leases["theirs"]}, **some).status == 403
        # Not by way of another name in the path, nor as the guard of a document.
        assert server.post("/v1/locks/ours.a/release", {"lease_id": leases["theirs"]}, **some).status == 400
        query = {"lease_id": leases["theirs"]}
        assert server.request("PUT", "/v1/state/ours.b", {"value": 1}, query=query, **some).status == 403
        assert server.get("/v1/locks/theirs", token="a" * 40).body["held"] is True
