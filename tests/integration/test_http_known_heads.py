"""A head that came before saves the parser's work, and nothing else: every check is made for each call anew."""

from __future__ import annotations

import base64
import socket
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from holdfast.env import real_world
from holdfast.errors import DiskFull
from holdfast.server.callers import tls_context
from holdfast.server.http.heads import cut
from holdfast.server.tokens import TokenEntry, digest_of, with_entry
from holdfast.settings import ServerSettings
from tests.integration.faults_gear import request_of, vanish
from tests.integration.http_gear import Serving, serving
from tests.integration.process_gear import until
from tests.unit.certificates import Issuer

QUEUE = "/v1/queues/orders"
_TIMES = 4  # the first two are parsed, the third is cut; the others are found by their whole heads


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data", whole=True) as found:
        assert found.request("PUT", QUEUE, {}).status == 200
        yield found


class Line:
    """A connection whose requests arrive whole, each alone."""

    def __init__(self, server: Serving, context: ssl.SSLContext | None = None) -> None:
        place = urlsplit(server.url)
        self.server = server
        self.socket = socket.create_connection((place.hostname, place.port), 30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_hostname="localhost")

    def call(self, request: bytes) -> tuple[int, bytes]:
        """The status and the body of the answer."""
        self.socket.sendall(request)
        content = b""
        while b"\r\n\r\n" not in content:
            content += self._more()
        head, _, body = content.partition(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0)
        while len(body) < length:
            body += self._more()
        return int(head[9:12]), body

    def _more(self) -> bytes:
        content = self.socket.recv(1 << 20)
        assert content, "the server closed the connection"
        return content

    def learn(self, request: bytes, status: int = 201) -> None:
        """Send it until its head is known."""
        for _ in range(_TIMES):
            assert self.call(request)[0] == status
        assert is_known(self.server, request)

    def close(self) -> None:
        self.socket.close()


def is_known(server: Serving, request: bytes) -> bool:
    """Whether its head is, and whether it is with its length, unless it has a sequence number."""
    found, heads = cut(request), server.server.app.heads
    if found is None or heads.get(found.key) is None:
        return False
    return found.sequence is not None or heads.get_whole(request[: len(request) - len(found.body)]) is not None


def enqueue(body: bytes = b"abc", token: str | None = None, host: str = "127.0.0.1") -> bytes:
    head = f"POST {QUEUE}/enqueue?durability=os HTTP/1.1\r\nhost: {host}\r\n"
    if token is not None:
        head += f"authorization: Bearer {token}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def write_tokens(path: Path, *entries: dict[str, Any]) -> None:
    fresh = path.with_suffix(".new.json")
    fresh.touch(mode=0o600)
    fresh.write_bytes(
        msgspec.json.encode({"tokens": [{"sha256": digest_of(each["name"]), **each} for each in entries]})
    )
    fresh.rename(path)


@pytest.mark.parametrize(
    ("then", "status"),
    [
        ((), 401),
        (({"name": "shop", "role": "admin", "sha256": digest_of("another")},), 401),
        (({"name": "shop", "role": "consumer"},), 403),
        (({"name": "shop", "role": "producer", "topics": ["other"]},), 403),
    ],
)
def test_a_token_that_is_gone_or_changed_is_refused_though_its_head_is_known(tmp_path: Path, then: Any, status: int):
    tokens = tmp_path / "tokens.json"
    admin = {"name": "ops", "role": "admin"}
    write_tokens(tokens, admin, {"name": "shop", "role": "producer"})
    with serving(tmp_path / "data", tokens_file=str(tokens)) as server:
        assert server.request("PUT", QUEUE, {}, token="ops").status == 200
        line = Line(server)
        line.learn(enqueue(token="shop"))
        write_tokens(tokens, admin, *then)
        until(lambda: line.call(enqueue(token="shop"))[0] == status, "the token is refused")
        before = server.get(f"{QUEUE}/stats", token="ops").body["ready"]
        assert is_known(server, enqueue(token="shop"))
        assert line.call(enqueue(token="shop"))[0] == status
        assert line.call(enqueue(token="nobody"))[0] == 401
        assert server.get(f"{QUEUE}/stats", token="ops").body["ready"] == before
        line.close()


def test_a_token_that_expires_is_refused_though_its_head_is_known(tmp_path: Path):
    tokens = tmp_path / "tokens.json"
    soon = (datetime.now(UTC) + timedelta(seconds=8)).isoformat()
    write_tokens(tokens, {"name": "ops", "role": "admin"}, {"name": "shop", "role": "producer", "expires": soon})
    with serving(tmp_path / "data", tokens_file=str(tokens)) as server:
        assert server.request("PUT", QUEUE, {}, token="ops").status == 200
        line = Line(server)
        line.learn(enqueue(token="shop"))
        until(lambda: line.call(enqueue(token="shop"))[0] == 401, "the token has expired")
        line.close()


def test_a_head_that_one_certificate_sent_lets_no_other_in(tmp_path: Path):
    issuer = Issuer()
    (tmp_path / "tls").mkdir()
    certificate, key = issuer.issue(tmp_path / "tls", "localhost", "127.0.0.1")
    names = ("shop", "reader", "stranger")
    clients = {name: issuer.issue(tmp_path / "tls", name) for name in names}
    ca = issuer.write(tmp_path / "tls" / "ca.pem")
    tokens = tmp_path / "tokens.toml"
    tokens.touch(mode=0o600)
    text = with_entry("", TokenEntry(name="the-shop", certificate="shop", role="admin"), "t")
    tokens.write_text(with_entry(text, TokenEntry(name="a-reader", certificate="reader", role="consumer"), "u"))
    files = {
        "tls_cert_file": str(certificate),
        "tls_key_file": str(key),
        "tls_client_ca_file": str(ca),
        "tokens_file": str(tokens),
    }
    tls = tls_context(ServerSettings(**files), real_world().clock)
    with serving(tmp_path / "data", tls=tls, **files) as server:
        lines = {}
        for name in names:
            context = ssl.create_default_context(cafile=ca)
            context.load_cert_chain(*clients[name])
            lines[name] = Line(server, context)
        create = f"PUT {QUEUE} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{{}}".encode()
        assert lines["shop"].call(create)[0] == 200
        request = enqueue(host="localhost")
        lines["shop"].learn(request)
        assert lines["reader"].call(request)[0] == 403
        assert lines["stranger"].call(request)[0] == 401
        assert lines["shop"].call(request)[0] == 201
        for line in lines.values():
            line.close()


def test_a_known_head_is_not_taken_for_one_with_another_host(server: Serving):
    line = Line(server)
    line.learn(enqueue())
    assert line.call(enqueue(host="elsewhere.example"))[0] == 403
    assert line.call(enqueue(host="127.0.0.1:1"))[0] == 201
    line.close()


def test_settings_that_change_hold_for_known_heads(server: Serving):
    line = Line(server)
    large = enqueue(bytes(5_000))
    line.learn(large)
    assert server.request("PUT", QUEUE, {"settings": {"max_message_bytes": 4_096}}).status == 200
    assert line.call(large)[0] == 413
    assert line.call(enqueue())[0] == 201
    assert server.request("PUT", QUEUE, {"settings": {"max_message_bytes": 8_192}}).status == 200
    assert line.call(large)[0] == 201
    line.close()


def test_a_queue_that_is_gone_is_unknown_and_one_that_is_made_anew_is_empty(server: Serving):
    line = Line(server)
    line.learn(enqueue())
    assert server.request("DELETE", "/v1/topics/orders").status in (200, 204)
    assert line.call(enqueue())[0] == 404
    assert server.request("PUT", QUEUE, {}).status == 200
    assert msgspec.json.decode(line.call(enqueue())[1])["offset"] == 0
    line.close()


def test_a_server_that_goes_lets_nobody_wait_also_with_a_known_head(server: Serving):
    line = Line(server)
    take = request_of("POST", f"{QUEUE}/dequeue", b'{"wait": 60}')
    for _ in range(_TIMES):
        line.call(enqueue())
    line.learn(take, 200)

    async def leave() -> None:
        server.server.service.leave()

    server.run(leave())
    assert line.call(take) == (200, b'{"messages":[]}')
    line.close()


def test_calls_of_one_caller_wait_for_their_turn_also_with_known_heads(tmp_path: Path):
    tokens = tmp_path / "tokens.json"
    write_tokens(tokens, {"name": "ops", "role": "admin"})
    with serving(tmp_path / "data", tokens_file=str(tokens)) as server:
        assert server.request("PUT", QUEUE, {}, token="ops").status == 200
        line = Line(server)
        line.learn(enqueue(token="ops"))
        turns = server.server.app._turns
        begun: list[bool] = []
        try_begin = turns.try_begin

        def refuse_first(caller: str) -> bool:
            begun.append(len(begun) > 0 and try_begin(caller))
            return begun[-1]

        turns.try_begin = refuse_first  # type: ignore[method-assign]
        assert line.call(enqueue(token="ops"))[0] == 201
        assert begun == [False, True]  # refused at once, and begun by a task
        line.close()


def test_a_message_that_a_known_head_took_comes_back_if_its_caller_vanishes(server: Serving):
    line = Line(server)
    take = request_of("POST", f"{QUEUE}/dequeue", b'{"lease": 600}')
    for _ in range(_TIMES):
        line.call(enqueue())
    line.learn(take, 200)
    server.post(f"{QUEUE}/enqueue", bytes(500_000), query={"durability": "os"})
    before = server.get(f"{QUEUE}/stats").body
    line.socket.sendall(take)
    until(lambda: server.get(f"{QUEUE}/stats").body["leased"] == before["leased"] + 1, "the message is taken")
    vanish(line.socket)
    until(lambda: server.get(f"{QUEUE}/stats").body["leased"] == before["leased"], "the message is back")


def test_a_retried_take_gets_the_same_message_also_with_a_known_head(server: Serving):
    line = Line(server)
    for _ in range(_TIMES + 2):
        line.call(enqueue())
    for number in range(_TIMES):
        assert line.call(request_of("POST", f"{QUEUE}/dequeue", b'{"attempt_id": "%d"}' % number))[0] == 200
    take = request_of("POST", f"{QUEUE}/dequeue", b'{"attempt_id": "x"}')
    assert is_known(server, take)
    first, again = (msgspec.json.decode(line.call(take)[1])["messages"] for _ in range(2))
    assert first[0]["receipt"] == again[0]["receipt"]
    assert again[0]["attempt"] == 1
    line.close()


def test_calls_with_known_heads_are_counted_and_named(server: Serving):
    line = Line(server)
    line.learn(enqueue())
    for _ in range(10):
        line.call(enqueue(b"1234567"))
    said = server.get("/metrics").body
    text = said.decode() if isinstance(said, bytes) else str(said)
    route = 'method="POST",route="/v1/queues/{queue}/enqueue"'
    assert f'holdfast_http_requests_total{{{route},status="201"}} {_TIMES + 10}.0' in text
    line.socket.sendall(enqueue())
    assert b"\r\nx-correlation-id: " in line.socket.recv(4096)
    line.close()


def test_a_put_that_is_synced_is_answered_in_its_turn(server: Serving):
    line = Line(server)
    put = enqueue().replace(b"=os", b"=fsync")
    line.learn(put)
    assert msgspec.json.decode(line.call(put)[1])["durability"] == "fsync"
    line.socket.sendall(put)
    line.socket.sendall(request_of("POST", f"{QUEUE}/dequeue", b"{}"))
    content = b""
    while content.count(b"HTTP/1.1 ") < 2 or not content.endswith(b"]}"):
        content += line._more()
    assert content.index(b"HTTP/1.1 201") < content.index(b"HTTP/1.1 200")
    line.close()


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_partitions_take_turns_for_messages_whose_head_is_known(server: Serving, durability: str):
    line = Line(server)
    change = request_of("PUT", QUEUE, b'{"partitions": 2}')
    assert line.call(change)[0] == 200
    put = enqueue().replace(b"=os", f"={durability}".encode())
    line.learn(put)
    found = [msgspec.json.decode(line.call(put)[1]).get("partition", 0) for _ in range(6)]
    assert sorted(found) == [0, 0, 0, 1, 1, 1]
    line.close()


def test_a_caller_that_goes_before_the_sync_has_stored_its_message_all_the_same(server: Serving):
    line = Line(server)
    put = enqueue().replace(b"=os", b"=fsync")
    line.learn(put)
    line.socket.sendall(put)
    vanish(line.socket)
    until(lambda: server.get(f"{QUEUE}/stats").body["ready"] == _TIMES + 1, "the message is there")
    until(lambda: not server.server.http.connections, "its connection is gone")


def test_a_put_that_fails_while_it_is_synced_says_so(server: Serving, monkeypatch: pytest.MonkeyPatch):
    line = Line(server)
    put = enqueue().replace(b"=os", b"=fsync")
    line.learn(put)

    async def full(*_: Any) -> None:
        raise DiskFull("there is no room")

    monkeypatch.setattr(server.server.port, "publish_plain", full)
    status, body = line.call(put)
    assert (status, msgspec.json.decode(body)["error"]["code"]) == (507, "disk_full")
    monkeypatch.undo()
    assert line.call(put)[0] == 201
    line.close()


def test_a_large_answer_to_a_known_head_leaves_its_callers_room_when_it_is_sent(tmp_path: Path):
    tokens = tmp_path / "tokens.json"
    write_tokens(tokens, {"name": "ops", "role": "admin"})
    with serving(tmp_path / "data", tokens_file=str(tokens)) as server:
        assert server.request("PUT", QUEUE, {}, token="ops").status == 200
        line = Line(server)
        take = request_of("POST", f"{QUEUE}/dequeue", b"{}", "authorization: Bearer ops")
        line.learn(take, 200)
        server.post(f"{QUEUE}/enqueue", bytes(500_000), query={"durability": "os"}, token="ops")
        assert len(line.call(take)[1]) > 500_000
        until(lambda: server.server.service.answers.used("ops") == 0, "the room is given back")
        line.close()


def test_a_known_head_with_its_length_is_not_taken_for_one_with_more_or_less_behind_it(server: Serving):
    line = Line(server)
    line.learn(enqueue(b"abc"))
    for sent in (
        (enqueue(b"one") + enqueue(b"two"),),
        (enqueue(b"thr")[:-1], b"r"),
        (enqueue(b"four"), b""),
        (enqueue(b"fiv") + enqueue(b"six")[:20], enqueue(b"six")[20:]),
    ):
        for part in sent:
            line.socket.sendall(part)
            time.sleep(0.05)  # so that the parts arrive apart, as a rule
    content = b""
    while content.count(b"HTTP/1.1 201") < 6 or not content.endswith(b"}"):
        content += line._more()
    assert content.count(b"HTTP/1.1 ") == 6
    taken = server.post(f"{QUEUE}/dequeue", {"count": 100}).body["messages"]
    bodies = [base64.b64decode(each["body"]) for each in taken]
    assert bodies == [b"abc"] * _TIMES + [b"one", b"two", b"thr", b"four", b"fiv", b"six"]
    line.close()


def test_whole_heads_are_few_however_many_lengths_there_are(server: Serving):
    line, heads = Line(server), server.server.app.heads
    line.learn(enqueue())
    for size in range(2 * heads._most):
        assert line.call(enqueue(bytes(size)))[0] == 201
    assert len(heads._whole) <= heads._most
    assert is_known(server, enqueue(bytes(2 * heads._most - 1)))
    line.close()
