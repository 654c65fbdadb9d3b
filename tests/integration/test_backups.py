"""Backups of folders under load, from other processes, that are killed; and in real stores."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress

import pytest

import holdfast
from holdfast.broker.check import check_folder
from tests.integration.store_servers import seaweedfs

pytestmark = pytest.mark.slow


class Load:
    """Producers and consumers in threads, and what they were promised."""

    def __init__(self, broker: holdfast.Broker, seed: int) -> None:
        self._broker = broker
        self._over = threading.Event()
        self._random = random.Random(seed)
        self.put: set[bytes] = set()
        self.acked: set[bytes] = set()
        self.failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(work, i)) for i, work in enumerate(
            [self._produce, self._produce, self._consume, self._consume, self._redrive]
        )]  # fmt: skip

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc):
        self._over.set()
        for thread in self._threads:
            thread.join()
        assert not self.failures

    def _run(self, work, number: int) -> None:
        try:
            queue = self._broker.queue("jobs")
            while not self._over.is_set():
                work(queue, number)
        except BaseException as error:
            self.failures.append(error)

    def _produce(self, queue, number: int) -> None:
        body = f"{number}-{len(self.put)}-{time.monotonic_ns()}".encode()
        options = {"delay": 0.05} if self._random.random() < 0.1 else {}
        if self._random.random() < 0.01:
            body += os.urandom(200_000)
        queue.put(body, durability=self._random.choice(["os", "interval", "fsync"]), **options)
        self.put.add(body)

    def _consume(self, queue, number: int) -> None:
        with suppress(holdfast.Empty, holdfast.LeaseLost):
            message = queue.get(timeout=0.1)
            if self._random.random() < 0.1:
                message.reject("no")
            else:
                message.ack()
                self.acked.add(message.body)

    def _redrive(self, queue, number: int) -> None:
        self._over.wait(0.05)
        queue.dead.redrive()


def restored(place, folder) -> tuple[set[bytes], list[bytes]]:
    """Return all bodies in the restored folder, and those that consumers get."""
    with holdfast.open_broker(folder) as broker:
        queue = broker.queue("jobs")
        broker.describe_topic("jobs")
        stored, offset = set(), None
        while messages := broker.read("jobs", offset=offset, limit=1000):
            stored |= {message.body for message in messages}
            offset = messages[-1].offset + 1
        got = []
        until = time.monotonic() + 30
        queue.dead.redrive()
        while time.monotonic() < until:
            delayed = queue.stats().delayed  # before the get: they may be released right after it
            try:
                message = queue.get(timeout=0.5)
            except holdfast.Empty:
                if delayed:
                    continue  # they are due, and about to be released
                break
            got.append(message.body)
            message.ack()
    return stored, got


@pytest.mark.parametrize("seed", range(2))
def test_backups_under_load_have_all_that_was_promised_and_nothing_twice(tmp_path, seed):
    folder, place = tmp_path / "jobs", tmp_path / "backups"
    taken = []
    with (
        holdfast.open_broker(folder) as broker,
        broker.queue("jobs", segment_bytes=1 << 20) as queue,
    ):
        assert queue is not None
        with Load(broker, seed) as load:
            for i in range(5):
                while len(load.put) < 300 * (i + 1) and not load.failures:
                    time.sleep(0.01)
                before = set(load.put), set(load.acked)
                taken.append((*before, holdfast.backup(folder, place).number))
    for put, acked, number in taken:
        target = tmp_path / f"restored-{number}"
        holdfast.restore(place, target, at=number)
        report = check_folder(target)
        assert report.ok, report
        stored, got = restored(place, target)
        assert len(got) == len(set(got)), "each once"
        assert put - stored - set(got) == set(), "nothing promised is missing"
        assert acked & set(got) == set(), "nothing acked comes again"
        assert put - acked <= set(got) | load.acked
        assert len(put) >= 300 * number
    assert holdfast.verify(place).ok


def test_a_backup_by_another_process_that_is_killed(tmp_path):
    folder, place = tmp_path / "jobs", tmp_path / "backups"
    code = f"""
        import holdfast, sys
        sys.stdout.write("begun\\n"); sys.stdout.flush()
        holdfast.backup({str(folder)!r}, {str(place)!r})
    """
    listed = 0
    with holdfast.open(folder, segment_bytes=1 << 20) as queue:
        for _ in range(60):
            queue.put(os.urandom(500_000), durability="os")
        for i in range(8):
            child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
            assert child.stdout.readline() == "begun\n"
            time.sleep(0.15 + 0.1 * i)
            child.send_signal(signal.SIGKILL)
            child.wait()
            child.stdout.close()
            listed = len(holdfast.backups(place)) if place.exists() else 0
            assert all(not each.problem for each in holdfast.backups(place))
            queue.put(b"the owner goes on")
        made = holdfast.backup(folder, place, keep=1)
    assert made.number == listed + 1
    found = holdfast.verify(place)
    assert found.ok
    assert found.messages == 68


def test_the_owner_forgets_a_backup_that_was_killed(tmp_path):
    from holdfast.api import port_of

    folder = tmp_path / "jobs"
    with holdfast.open(folder) as queue:
        queue.put(b"1")
        code = f"""
            import os
            from holdfast.client.backups import OwnedSource
            from holdfast.env import real_world
            OwnedSource(real_world(), {str(folder)!r})
            os.kill(os.getpid(), 9)
        """
        assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False).returncode == -9
        still = port_of(queue).engine.world.still
        [left] = still.captures
        holdfast.backup(folder, tmp_path / "backups")
        assert still.captures == [left]
        left.used_ns -= 3600 * 10**9
        holdfast.backup(folder, tmp_path / "backups")
        assert still.captures == []


@pytest.fixture(params=["seaweedfs", "moto"], scope="module")
def bucket(request, tmp_path_factory):
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        if request.param == "seaweedfs":
            with seaweedfs(tmp_path_factory.mktemp("weed")) as (_, environ):
                for name, value in environ.items():
                    patched.setenv(name, value)
                yield "s3://holdfast"
            return
        server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
        server.start()
        host, port = server.get_host_and_port()
        try:
            environ = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_REGION": "us-east-1"}
            environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test-secret"}
            for name, value in environ.items():
                patched.setenv(name, value)
            import urllib.request

            asked = urllib.request.Request(f"http://{host}:{port}/holdfast", method="PUT")
            urllib.request.urlopen(asked).close()
            yield "s3://holdfast"
        finally:
            server.stop()


def test_in_a_real_store(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(tmp_path / "cache"))
    folder, place = tmp_path / "jobs", f"{bucket}/backups/jobs"
    with holdfast.open(folder, segment_bytes=1 << 20) as queue:
        for i in range(50):
            queue.put(f"{i}".encode() + os.urandom(100_000), durability="os")
        first = holdfast.backup(folder, place)
        queue.put(b"more")
        second = holdfast.backup(folder, place, keep=1)
    assert (second.number, second.removed) == (2, 1)
    assert second.new_bytes < first.new_bytes / 2
    assert holdfast.verify(place).messages == 51
    holdfast.restore(place, tmp_path / "restored")
    elsewhere = f"{bucket}/restored/jobs"
    holdfast.restore(place, elsewhere)
    for where in (tmp_path / "restored", elsewhere):
        with holdfast.open(where, create=False, topic="jobs") as queue:
            assert queue.stats().ready == 51
    again = holdfast.backup(elsewhere, place)
    assert again.source == elsewhere
    assert holdfast.verify(place, at=3).ok


def test_a_store_that_is_not_there(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.broker.backup.archive._PAUSE_S", 0.01)
    with holdfast.open(tmp_path / "jobs") as queue:
        queue.put(b"1")
    with pytest.raises((holdfast.InvalidRequest, holdfast.Unavailable), match="no-such-bucket"):
        holdfast.backup(tmp_path / "jobs", "s3://no-such-bucket-here/jobs")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(holdfast.Unavailable, match="cannot be reached"):
        holdfast.backup(tmp_path / "jobs", f"{bucket}/other")
