"""One folder, many processes: the first owns it, the others come by its socket, and one of them takes over."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import holdfast
from holdfast import Busy, Empty, LeaseLost, aio
from holdfast.api.sync.group import Queue
from holdfast.cli.opening import opened_broker
from holdfast.client.shared_folder import share
from holdfast.env import real_world
from holdfast.remote.sync.group import RemoteGroupPort
from tests.integration.http_gear import serving

# A process that uses the folder, and does what it is told: lines of Python, each answered with what it gives.
PROGRAM = """
import sys, holdfast
queue = holdfast.open(sys.argv[1], lease_ms=600_000)
kept = {}
print(type(queue).__name__, "there" if hasattr(queue._port, "client") else "here", flush=True)
for line in sys.stdin:
    try:
        print(repr(eval(line)), flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""


# What `pip install holdfast` without extras does not bring.
WITHOUT_EXTRAS = """
import sys
for name in ("jinja2", "prometheus_client", "python_multipart", "uvloop", "opentelemetry", "pyarrow", "yaml"):
    sys.modules[name] = None
"""


class Other:
    """Another process with the folder open."""

    def __init__(self, folder: Path, before: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", before + PROGRAM, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.kind = self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def do(self, line: str) -> str:
        self.tell(line)
        return self._line()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self.end()

    def end(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait(30)
        if self._process.stdout is not None:
            self._process.stdout.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


@contextmanager
def other(folder: Path, before: str = "") -> Iterator[Other]:
    process = Other(folder, before)
    try:
        yield process
    finally:
        process.kill()


@pytest.mark.slow
def test_a_second_process_uses_the_folder_through_its_owner(folder):
    with holdfast.open(folder) as queue, other(folder) as second:
        assert (type(queue), second.kind) == (Queue, "Queue there")
        assert second.do("queue.put(b'from there').offset") == "0"
        with queue.get(timeout=10) as message:
            assert message.body == b"from there"
        queue.put(b"from here")
        assert second.do("queue.get(timeout=10).body") == "b'from here'"


@pytest.mark.slow
def test_a_folder_is_shared_where_no_extra_is_installed(folder):
    with other(folder, WITHOUT_EXTRAS) as owner, other(folder, WITHOUT_EXTRAS) as second:
        assert (owner.kind, second.kind) == ("Queue here", "Queue there")
        assert second.do("queue.put(b'x').offset") == "0"
        assert owner.do("queue.get(timeout=10).body") == "b'x'"


@pytest.mark.slow
def test_when_the_owner_closes_another_takes_over(folder):
    first = holdfast.open(folder)
    with other(folder) as second:
        first.put(b"a")
        first.close()
        assert second.do("queue.put(b'b').offset") == "1"
        with holdfast.open(folder) as third:
            assert isinstance(third._port, RemoteGroupPort)
            assert [third.get(timeout=10).body for _ in range(2)] == [b"a", b"b"]


@pytest.mark.slow
def test_when_the_owner_is_killed_its_messages_come_back_and_those_of_others_stay_theirs(folder):
    with other(folder) as owner:
        assert owner.kind == "Queue here"
        with holdfast.open(folder) as queue:
            queue.put_many([b"mine", b"its"])
            message = queue.get(timeout=10, renew=True)
            assert owner.do("kept.setdefault(1, queue.get(timeout=10)).body") == "b'its'"
            owner.kill()
            again = queue.get(timeout=20)
            assert again.body == b"its"
            again.ack()
            assert not message.lost
            message.ack()
            with pytest.raises(Empty):
                queue.get(timeout=0)


@pytest.mark.slow
def test_whoever_waits_for_a_message_takes_over_without_noticing(folder):
    with other(folder) as owner, holdfast.open(folder) as queue:
        got: list[bytes] = []
        waiting = threading.Thread(target=lambda: got.append(queue.get(timeout=60).body))
        waiting.start()
        assert owner.do("queue.stats().waiters >= 0") == "True"
        owner.kill()
        with holdfast.open(folder) as third:
            third.put(b"x")
            waiting.join(30)
        assert got == [b"x"]


@pytest.mark.slow
@pytest.mark.serial
def test_each_message_is_stored_once_while_owners_are_killed_one_after_the_other(folder):
    everybody = [Other(folder) for _ in range(4)]
    try:
        for number, process in enumerate(everybody):
            process.tell(f"[queue.put(b'{number}-%d' % i, durability='os').offset for i in range(300)] and 'done'")
        for process in everybody[:2]:
            time.sleep(0.5)  # in the middle of its work: any moment will do
            process.kill()
        for process in everybody[2:]:
            assert process._line() == "'done'"
        with holdfast.open(folder) as queue:
            kept = Counter(message.body for message in queue.peek(10_000))
    finally:
        for process in everybody:
            process.kill()
    assert [body for body, count in kept.items() if count > 1] == []
    for number in (2, 3):
        assert {b"%d-%d" % (number, i) for i in range(300)} <= set(kept)


def test_in_one_process_the_second_opening_shares_too(folder):
    with holdfast.open(folder, body_type=str) as first, holdfast.open(folder, body_type=str) as second:
        assert isinstance(second._port, RemoteGroupPort)
        assert second.folder == str(folder)
        second.put("x")
        assert first.get(timeout=5).body == "x"
        first.close()
        second.put("y")
        assert second.get(timeout=5).body in ("x", "y")


def test_tasks_share_a_folder_too(folder):
    async def story() -> None:
        async with aio.open_broker(folder) as first, aio.open_broker(folder) as second:
            await second.create_topic("orders")
            await first.publish("orders", b"x")
            await first.close()
            await second.publish("orders", b"y")
            assert [each.body for each in await second.read("orders")] == [b"x", b"y"]

    asyncio.run(story())


def test_a_server_shares_its_folder_with_processes_beside_it(folder):
    with serving(folder) as server:
        server.request("PUT", "/v1/queues/jobs", {})
        share(server.server.port.engine)
        with holdfast.open(folder) as queue:
            assert isinstance(queue._port, RemoteGroupPort)
            assert queue.put(b"x").offset == 0


def test_who_does_not_share_is_told_who_has_it(folder):
    with holdfast.open(folder), pytest.raises(Busy):
        holdfast.open(folder, share=False)
    with holdfast.open(folder, share=False), pytest.raises(Busy) as caught:
        holdfast.open(folder)
    assert "share=False" in "".join(caught.value.__notes__)


def test_only_this_user_may_connect_and_nothing_is_left_behind(folder):
    with holdfast.open(folder):
        assert stat.S_IMODE((folder / "owner.sock").stat().st_mode) == 0o600
    assert not (folder / "owner.sock").exists()


def test_a_folder_in_a_world_of_its_own_is_not_shared(folder):
    with holdfast.open(folder, world=real_world()):
        assert not (folder / "owner.sock").exists()


def test_a_path_may_be_longer_than_the_name_of_a_socket(tmp_path):
    folder = tmp_path / ("long" * 40) / "jobs"
    folder.parent.mkdir()
    with holdfast.open(folder) as first, holdfast.open(folder) as second:
        assert isinstance(second._port, RemoteGroupPort)
        second.put(b"x")
        assert first.get(timeout=5).body == b"x"


@pytest.mark.slow
def test_a_lone_owner_loads_no_server(folder):
    program = (
        "import sys, holdfast; q = holdfast.open(sys.argv[1]); q.put(b'x'); q.close(); "
        "print([name for name in sys.modules if name.startswith(('holdfast.server', 'httptools', 'uvloop'))])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_child_of_the_owner_does_not_stand_in_for_it(folder):
    """It has copies of the owner's connections: were they open, nobody would notice that the owner is gone."""
    program = (
        "import os, sys, time, holdfast; queue = holdfast.open(sys.argv[1]); queue.put(b'x'); "
        "print('own', flush=True); "
        "sys.stdin.readline(); pid = os.fork(); pid or time.sleep(60); print(pid, flush=True); sys.stdin.readline()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    child = 0
    try:
        assert owner.stdout.readline() == "own\n"
        with holdfast.open(folder) as queue:
            assert queue.stats().ready == 1  # the connection is there before the fork
            owner.stdin.write("\n")
            owner.stdin.flush()
            child = int(owner.stdout.readline())
            owner.kill()
            owner.wait()
            began = time.monotonic()
            assert queue.put(b"y").offset == 1
            assert time.monotonic() - began < 15
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
        owner.kill()
        owner.wait()
        owner.stdin.close()
        owner.stdout.close()


def test_a_receipt_of_one_opening_is_good_in_another(folder):
    with holdfast.open(folder) as first, holdfast.open(folder) as second:
        first.put(b"x")
        message = second.get(timeout=5, detached=True)
        first.close()
        second.resume(message.receipt).ack()
        with pytest.raises(LeaseLost):
            message.ack()


@pytest.mark.parametrize(("chosen", "on_disk"), [("fsync", True), ("os", False), (None, False)])
@pytest.mark.parametrize("verb", ["ack", "nack", "defer", "extend"])  # a reject is always synced
def test_the_second_program_chooses_what_its_acks_survive(tmp_path, chosen, on_disk, verb):
    with holdfast.open(tmp_path / "jobs", sync_interval_ms=3_600_000) as owner:
        journal = owner._port.deliveries[0].journal.log
        changes = {} if chosen is None else {"ack_durability": chosen}
        with holdfast.open(tmp_path / "jobs", **changes) as second:
            assert isinstance(second._port, RemoteGroupPort)
            second.put(b"x")
            message = second.get(timeout=5)
            journal.sync()
            before = journal.written_end
            getattr(message, verb)()
            assert (journal.synced_end > before) is on_disk


# An owner that goes on in a thread after its main thread has returned, and exits when it is told to.
WITHOUT_MAIN = """
import sys, threading, holdfast
queue = holdfast.open(sys.argv[1])
def go_on():
    threading.main_thread().join()
    print("main has returned", flush=True)
    sys.stdin.readline()
threading.Thread(target=go_on).start()
"""


def test_an_owner_serves_others_after_its_main_thread_has_returned_and_lets_go_when_it_exits(folder):
    owner = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_MAIN, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    try:
        with pytest.raises(Busy):
            while True:  # until the other process has it
                holdfast.open(folder, share=False).close()
        with holdfast.open(folder) as queue:
            assert owner.stdout.readline() == "main has returned\n"
            queue.put(b"one", durability="fsync")
            assert queue.stats().ready == 1
            owner.stdin.close()  # from here on it exits, while calls come in
            queue.put_many([b"two"] * 50)
            for _ in range(200):
                queue.put(b"three", durability="fsync")
            assert owner.wait(timeout=60) == 0
            assert queue.stats().ready == 251
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
        owner.stdin.close()


def test_a_command_takes_over_when_the_owner_of_its_folder_ends(tmp_path: Path):
    owner = holdfast.open_broker(tmp_path / "data")
    owner.create_topic("jobs")
    with opened_broker(str(tmp_path / "data")) as broker:
        owner.close()
        assert broker.topics() == ["jobs"]
        broker.queue("jobs").put(b"one")
    with holdfast.open_broker(tmp_path / "data", share=False) as broker:
        assert broker.queue("jobs").qsize() == 1


def test_an_owner_that_others_have_used_exits_silently(tmp_path: Path):
    code = (
        "import holdfast, subprocess, sys\n"
        "queue = holdfast.open(sys.argv[1])\n"
        "queue.put(b'one')\n"
        "guest = 'import holdfast, sys; print(holdfast.open(sys.argv[1]).qsize())'\n"
        "subprocess.run([sys.executable, '-c', guest, sys.argv[1]], check=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "data")], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("1\n", "")
