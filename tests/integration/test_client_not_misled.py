"""Where a client could mislead: answers of strangers, answers that were lost, owners that cannot be followed."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import HoldfastError, Unavailable
from holdfast.client.shared_folder import Successor
from tests.integration.http_gear import serving
from tests.integration.proxies import proxied


@contextmanager
def answering(status: int, media: str, body: bytes) -> Iterator[str]:
    """Something that is no server of ours."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-type", media)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Not here."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("media", "body"),
    [("text/html", b"<html>hello</html>"), ("application/json", b'{"other": 1}'), ("application/msgpack", b"\xc1")],
)
def test_an_answer_that_is_none_of_ours_is_told_as_such(media: str, body: bytes):
    with answering(200, media, body) as url, holdfast.connect(url, timeout=5) as broker:
        with pytest.raises(HoldfastError, match=r"but not as Holdfast would.*address") as error:
            broker.topics()
        assert url in str(error.value)


def test_a_cancel_whose_answer_was_lost_does_not_answer_that_it_was_too_late(tmp_path: Path):
    with serving(tmp_path / "data") as server, proxied(server.url) as proxy:
        with holdfast.connect(server.url) as broker:
            broker.create_topic("jobs")
        with holdfast.connect(proxy.url, timeout=5) as broker:
            queue = broker.queue("jobs")
            stored = queue.put(b"x")
            proxy.cut_all()
            proxy.cut_answer_at = 10
            with pytest.raises(Unavailable, match="may or may not"):
                queue.cancel(stored.id)
            assert queue.stats().ready == 0


def test_a_folder_that_cannot_be_taken_over_is_unavailable_and_no_bare_error(tmp_path: Path, monkeypatch: Any):
    from holdfast.broker.engine import BrokerEngine

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    owner = holdfast.open_broker(tmp_path / "data")
    client: Any = holdfast.open_broker(tmp_path / "data")
    client.topics()
    owner.close()
    monkeypatch.setattr(BrokerEngine, "open", refuse)
    patience_s, client._port.client.caller.timeout_s = client._port.client.caller.timeout_s, 0.3
    with pytest.raises(Unavailable):
        client.topics()
    monkeypatch.undo()
    client._port.client.caller.timeout_s = patience_s  # to own a folder takes its time where the machine is busy
    assert client.topics() == []
    client.close()


def test_of_many_who_could_follow_an_owner_one_does(tmp_path: Path):
    folder = str(tmp_path / "data")
    holdfast.open_broker(folder).close()
    successors = [Successor(folder, None) for _ in range(8)]
    start = threading.Barrier(len(successors))

    def follow(successor: Successor) -> None:
        successor.users = 1
        start.wait()
        successor.take_over()

    threads = [threading.Thread(target=follow, args=(each,)) for each in successors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(each._engine is not None for each in successors) == 1
    with holdfast.open_broker(folder) as broker:
        assert broker.topics() == []
    for each in successors:
        each.release()


def test_an_owner_that_hangs_makes_others_wait_no_longer_than_their_time_out(tmp_path: Path):
    program = "import sys, holdfast; b = holdfast.open_broker(sys.argv[1]); print('up', flush=True); sys.stdin.read()"
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "data")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        broker: Any = holdfast.open_broker(tmp_path / "data")
        assert broker.topics() == []
        os.kill(owner.pid, signal.SIGSTOP)
        os.waitpid(owner.pid, os.WUNTRACED)  # not all of its threads stop at once
        broker._port.client.caller.timeout_s = 0.5
        with pytest.raises(Unavailable, match="did not respond"):
            broker.topics()
        os.kill(owner.pid, signal.SIGCONT)
        broker._port.client.caller.timeout_s = 30
        assert broker.topics() == []
        owner.kill()  # and its socket stays behind
        owner.wait(30)
        broker.create_topic("jobs")  # by now it is ours
        assert broker.topics() == ["jobs"]
        broker.close()
    finally:
        owner.kill()
        owner.communicate()


def test_what_is_done_beside_a_server_is_in_its_audit_log(tmp_path: Path):
    folder = tmp_path / "data"
    command = [sys.executable, "-m", "holdfast", "serve", str(folder), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline()
        with holdfast.open_broker(folder) as broker:
            broker.create_topic("jobs")
        acts = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
        assert [(act["principal"], act["outcome"]) for act in acts] == [("local", "begun"), ("local", "done")]
        assert [act["target"] for act in acts] == ["jobs", "jobs"]
    finally:
        server.terminate()
        server.wait(30)
        server.stdout.close()
