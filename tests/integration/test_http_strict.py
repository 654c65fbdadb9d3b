"""What browsers and go-betweens could misread: hosts, origins, transfer codings, and headers of every answer."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from holdfast.server.tokens import digest_of
from tests.integration.http_gear import Serving, serving
from tests.unit.commands import Run, runner


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def status_of(server: Serving, request: bytes) -> int:
    """How a request that is written by hand is answered."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as caller:
        caller.sendall(request)
        answer = b""
        while b"\r\n" not in answer:
            more = caller.recv(4096)
            if not more:
                break
            answer += more
    return int(answer.split()[1])


CHUNKED = b"3\r\nabc\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"POST /v1/queues/x/enqueue HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n", 201),
        (b"POST /v1/queues/x/enqueue HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip, chunked\r\n\r\n", 501),
        (b"POST /v1/queues/x/enqueue HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked, chunked\r\n\r\n", 400),
        (b"POST /v1/queues/x/enqueue HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked, gzip\r\n\r\n", 400),
        (b"POST /v1/queues/x/enqueue HTTP/1.0\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST /v1/queues/x/enqueue HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.0\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nHost: evil.example\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nhost: x@localhost\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nhost: localhost:7700@evil.example\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nhost: localhost/evil\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nhost: localhost, evil.example\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nhost: local host\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nhost: localhost:77000\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nhost: localhost:x\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nhost: [::1\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nhost: [1.2.3.4]\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nhost: \r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nhost: [::1]:7700\r\n\r\n", 200),
        (b"GET /v1/topics HTTP/1.1\r\nhost: localhost\r\norigin: null\r\n\r\n", 403),
        (b"GET /v1/topics HTTP/1.0\r\norigin: null\r\n\r\n", 403),
        (b"GET /v1/topics HTTP/1.1\r\nhost: localhost\r\norigin: http://x@localhost\r\n\r\n", 403),
        (b"GET /v1/topics HTTP/1.1\r\nhost: localhost\r\norigin: ftp://localhost\r\n\r\n", 403),
        (b"GET /v1/topics HTTP/1.1\r\nhost: localhost\r\norigin: localhost\r\n\r\n", 403),
        (b"GET /v1/topics HTTP/1.1\r\nhost: localhost\r\norigin: http://localhost\r\n\r\n", 200),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(shared: Serving, head: bytes, expected: int):
    body = CHUNKED if b"transfer-encoding" in head else b""
    assert status_of(shared, head + body) == expected


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with serving(tmp_path_factory.mktemp("strict") / "data", whole=True) as server:
        assert server.request("PUT", "/v1/queues/x", {}).status == 200
        yield server


@pytest.mark.parametrize(
    ("path", "caching"),
    [
        ("/v1/topics", "no-store"),
        ("/v1/queues/x/stats", "no-store"),
        ("/v1/queues/none/stats", "no-store"),
        ("/nowhere", "no-store"),
        ("/healthz", "no-store"),
        ("/metrics", "no-store"),
        ("/ui", "no-store"),
        ("/ui/static/console.css", "no-cache"),
        ("/openapi.json", "no-cache"),
    ],
)
def test_every_answer_tells_browsers_to_keep_it_from_others(shared: Serving, path: str, caching: str):
    connection = shared.connection()
    connection.request("GET", path)
    answer = connection.getresponse()
    answer.read()
    assert answer.msg.get_all("x-content-type-options") == ["nosniff"]
    assert answer.msg.get_all("cross-origin-resource-policy") == ["same-origin"]
    assert answer.msg.get_all("cache-control") == [caching]
    connection.close()


NAVIGATES = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        ("/v1/topics", {}, 200),
        ("/v1/topics", {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 200),
        ("/v1/topics", {"sec-fetch-site": "none", **NAVIGATES}, 200),
        ("/v1/topics", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ("/v1/topics", {"sec-fetch-site": "cross-site", **NAVIGATES}, 403),
        ("/v1/topics", {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}, 403),
        ("/v1/topics", {"sec-fetch-site": "whatever"}, 403),
        ("/healthz", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ("/metrics", {"sec-fetch-site": "cross-site", **NAVIGATES}, 403),
        ("/ui", {"sec-fetch-site": "cross-site", **NAVIGATES}, 200),
        ("/ui", {"sec-fetch-site": "same-site", **NAVIGATES}, 200),
        ("/ui", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}, 403),
        ("/ui", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}, 403),
        ("/ui/static/console.css", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ("/docs", {"sec-fetch-site": "cross-site", **NAVIGATES}, 200),
    ],
)
def test_pages_of_other_sites_may_not_even_look(shared: Serving, path: str, headers: dict[str, str], expected: int):
    assert shared.get(path, headers=headers).status == expected


def test_a_link_of_another_site_changes_nothing(shared: Serving):
    headers = {"sec-fetch-site": "cross-site", **NAVIGATES}
    assert shared.post("/v1/queues/x/enqueue", b"1", headers=headers).status == 403


def test_a_server_for_everybody_answers_only_under_the_names_that_it_was_told(tmp_path: Path):
    with serving(tmp_path / "data", allow_anonymous_network=True, allowed_hosts=("queue.internal",)) as server:
        for host, expected in (
            ("queue.internal", 200),
            ("QUEUE.internal.:7700", 200),
            ("localhost:7700", 200),
            ("evil.example", 403),
            ("x.queue.internal", 403),
        ):
            assert server.get("/v1/topics", headers={"host": host}).status == expected, host
        assert server.get("/healthz", headers={"host": "10.0.0.7"}).status == 200  # probes


def test_allowed_hosts_hold_with_tokens_too(tmp_path: Path):
    tokens = tmp_path / "tokens.json"
    tokens.touch(mode=0o600)
    tokens.write_text(json.dumps({"tokens": [{"name": "a", "sha256": digest_of("t"), "role": "admin"}]}))
    with serving(tmp_path / "data", tokens_file=str(tokens), allowed_hosts=("queue.example",)) as server:
        for host, expected in (("queue.example", 200), ("127.0.0.1", 200), ("evil.example", 403)):
            assert server.get("/v1/topics", headers={"host": host}, token="t").status == expected
    with serving(tmp_path / "other", tokens_file=str(tokens)) as server:
        assert server.get("/v1/topics", headers={"host": "any.example"}, token="t").status == 200


def test_a_tokens_file_that_cannot_be_used_any_more_is_told_everywhere(run: Run, tmp_path: Path, monkeypatch: Any):
    tokens = tmp_path / "tokens.json"
    good = json.dumps({"tokens": [{"name": "a", "sha256": digest_of("t"), "role": "admin"}]})
    tokens.touch(mode=0o600)
    tokens.write_text(good)
    monkeypatch.setenv("HOLDFAST_TOKEN", "t")
    with serving(tmp_path / "data", whole=True, tokens_file=str(tokens)) as server:
        assert shown_problem(server) == ("", 0.0, False)
        assert "cannot be used" not in run("status", server.url).out
        tokens.write_text(good[:-5])
        until = time.monotonic() + 60
        while not shown_problem(server)[0]:
            assert time.monotonic() < until
        problem, metric, banner = shown_problem(server)
        assert "cannot be read" in problem
        assert (metric, banner) == (1.0, True)
        assert "cannot be read" in " ".join(run("status", server.url).out.split())  # it may be wrapped anywhere
        assert run("status", server.url, "--json").document["tokens_problem"] == problem
        checked = run("token", "check", "--file", tokens)
        assert checked.code == 2
        assert "cannot be read" in checked.err
        tokens.write_text(good)
        while shown_problem(server)[0]:
            assert time.monotonic() < until
        assert shown_problem(server) == ("", 0.0, False)


def shown_problem(server: Serving) -> tuple[str, float, bool]:
    """What the status, the metric and the console say of the tokens file."""
    status = server.get("/v1/admin/status", token="t").body
    page = server.get("/metrics", token="t").body.decode()
    line = next(each for each in page.splitlines() if each.startswith("holdfast_tokens_file_unusable "))
    console = server.get("/ui", token="t").body.decode()
    return status.get("tokens_problem", ""), float(line.split()[1]), "The tokens file cannot be used" in console
