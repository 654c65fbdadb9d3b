"""The life of a server process: it starts or says in a sentence why not, and it ends as it promises."""

from __future__ import annotations

import json
import signal
import socket
import threading
from pathlib import Path

import pytest

import holdfast
from tests.integration.faults_gear import head_of, raw, status_of
from tests.integration.http_gear import Answer
from tests.integration.process_gear import ServerProcess, refused_start, server_process, until

pytestmark = pytest.mark.slow

QUEUE = "/v1/queues/orders"
BODY = b"x" * 100_000


def test_a_folder_that_somebody_owns_is_refused_with_a_sentence(tmp_path: Path):
    with holdfast.open_broker(tmp_path / "data"):
        code, said = refused_start(str(tmp_path / "data"), "--port", "0")
    assert code == 2
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert "Traceback" not in said


def test_a_port_that_is_taken_is_refused_with_a_sentence(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, said = refused_start(str(tmp_path / "data"), "--port", port)
    assert code == 2
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert f"127.0.0.1:{port}: another program" in said
    with holdfast.open_broker(tmp_path / "data"):
        pass  # and nobody holds the folder


@pytest.mark.parametrize("host", ["203.0.113.1", "no-such-host.invalid"])
def test_a_host_that_is_not_this_machine_is_refused_with_a_sentence(tmp_path: Path, host: str):
    anybody = ("--allow-anonymous-network", "--allowed-host", "queue.example")
    code, said = refused_start(str(tmp_path / "data"), "--host", host, "--port", "0", *anybody)
    assert code == 2
    assert f"error: the server cannot listen at {host}:0: " in said
    assert "Traceback" not in said


def test_tls_is_set_by_options_which_go_before_the_settings_file(tmp_path: Path):
    data = str(tmp_path / "data")
    code, said = refused_start(data, "--tls-cert", "no.pem", "--tls-key", "no.key", "--tls-client-ca", "no-ca.pem")
    assert (code, "TLS cannot be set up from no.pem, no.key, no-ca.pem: " in said) == (2, True)
    file = tmp_path / "holdfast.toml"
    file.write_text("[server]\ntls_cert_file = 'server.pem'\ntls_key_file = 'server.key'\n")
    code, said = refused_start(data, "--config", str(file), "--tls-key", "no.key")
    assert (code, f"TLS cannot be set up from {tmp_path}/server.pem, no.key: " in said) == (2, True)
    assert not Path(data).exists()


def test_a_server_for_others_says_which_options_it_wants(tmp_path: Path):
    code, said = refused_start(str(tmp_path / "data"), "--host", "0.0.0.0")
    assert code == 2
    assert all(option in said for option in ("--tokens", "--tls-client-ca", "--allow-anonymous-network"))
    code, said = refused_start(str(tmp_path / "data"), "--host", "0.0.0.0", "--allow-anonymous-network")
    assert (code, "allow_anonymous_network needs allowed_hosts (--allowed-host)" in said) == (2, True)
    code, said = refused_start(str(tmp_path / "data"), "--tls-key", "server.key")
    assert (code, "--tls-cert" in said) == (2, True)


@pytest.mark.parametrize(("host", "local"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]")])
def test_a_server_on_all_addresses_prints_one_that_works(tmp_path: Path, host: str, local: str):
    if not socket.has_dualstack_ipv6() and ":" in host:
        pytest.skip("this machine has no IPv6")
    anybody = ("--allow-anonymous-network", "--allowed-host", "queue.example")
    with server_process(tmp_path / "data", "--host", host, *anybody) as server:
        assert server.said.startswith(f"Holdfast serves {tmp_path}/data at http://{local}:")
        assert server.get("/healthz").status == 200


def test_an_empty_folder_stays_empty(tmp_path: Path):
    with server_process(tmp_path / "data") as server:
        assert server.get("/v1/topics").body["topics"] == []
        assert server.get("/v1/groups").body["groups"] == []
        server.tell_to_go()
        assert server.exit_code() == 0
    assert not list((tmp_path / "data").rglob("*.log"))
    assert not (tmp_path / "data" / "topics").exists() or not list((tmp_path / "data" / "topics").iterdir())


def test_sigterm_lets_what_is_under_way_end_and_whoever_waits_is_answered(tmp_path: Path):
    with server_process(tmp_path / "data") as server:
        server.request("PUT", QUEUE)
        waited: list[Answer] = []
        waiting = threading.Thread(target=lambda: waited.append(server.post(f"{QUEUE}/dequeue", {"wait": 60})))
        waiting.start()
        until(lambda: server.get("/v1/admin/status").body["waiters"] == 1, "it waits")
        with raw(server.url) as upload, raw(server.url) as idle:
            upload.sendall(head_of("POST", f"{QUEUE}/enqueue", f"content-length: {len(BODY)}") + BODY[:70_000])
            idle.sendall(head_of("GET", "/healthz"))
            assert status_of(idle) == 200
            server.tell_to_go()
            waiting.join(30)
            assert (waited[0].status, waited[0].body) == (200, {"messages": []})
            assert idle.recv(100) == b"", "a connection that rests is closed"
            assert refuses_connections(server)
            upload.sendall(BODY[70_000:])
            assert status_of(upload) == 201
        assert server.exit_code() == 0
        server.start()
        (message,) = server.post(f"{QUEUE}/dequeue", {}).body["messages"]
        assert message["size"] == len(BODY)


def test_sigterm_ends_streams_as_answers_end_and_leases_go_on(tmp_path: Path):
    with server_process(tmp_path / "data") as server:
        server.request("PUT", QUEUE)
        server.post(f"{QUEUE}/enqueue", b"x")
        streams = []
        for method, path, body in (
            ("POST", f"{QUEUE}/subscribe", b'{"lease": 600, "heartbeat": 60}'),
            ("GET", f"{QUEUE}/watch", None),
        ):
            stream = server.connection()
            stream.request(method, path, body)
            streams.append((stream, stream.getresponse()))
        message: dict[str, object] = {}
        while not message:
            message = json.loads(streams[0][1].readline())
        until(lambda: server.get("/v1/admin/status").body["waiters"] == 2, "both go on")
        server.tell_to_go()
        for stream, answer in streams:
            answer.read()  # to its end, which is no broken connection
            stream.close()
        assert server.exit_code() == 0
        server.start()
        assert server.get(f"{QUEUE}/stats").body["leased"] == 1
        assert server.post(f"{QUEUE}/ack", {"receipts": [message["receipt"]]}).body == {"settled": 1}


def refuses_connections(server: ServerProcess) -> bool:
    try:
        with raw(server.url):
            return False
    except ConnectionRefusedError:
        return True


def test_calls_that_do_not_end_in_time_are_cut_off_and_the_exit_code_says_so(tmp_path: Path):
    with server_process(tmp_path / "data", "--drain", "500ms") as server:
        server.request("PUT", QUEUE)
        with raw(server.url) as upload:
            upload.sendall(head_of("POST", f"{QUEUE}/enqueue", f"content-length: {len(BODY)}") + BODY[:70_000])
            until(lambda: server.get("/v1/admin/status").body["connections"] == 2, "the upload has begun")
            server.tell_to_go()
            assert server.exit_code() == 1
            assert status_of(upload) == 0
        assert "cut off" in server.log.read_text()
        server.start()
        assert server.get(f"{QUEUE}/stats").body["ready"] == 0


def test_a_second_sigterm_ends_it_at_once(tmp_path: Path):
    with server_process(tmp_path / "data", "--drain", "10m") as server:
        server.request("PUT", QUEUE)
        server.post(f"{QUEUE}/enqueue", b"safe")
        with raw(server.url) as upload:
            upload.sendall(head_of("POST", f"{QUEUE}/enqueue", f"content-length: {len(BODY)}") + BODY[:70_000])
            until(lambda: server.get("/v1/admin/status").body["connections"] == 2, "the upload has begun")
            server.tell_to_go()
            until(lambda: refuses_connections(server), "it listens no more")
            server.tell_to_go()
            assert server.exit_code() == -signal.SIGTERM
        server.start()
        assert server.get(f"{QUEUE}/stats").body["ready"] == 1
