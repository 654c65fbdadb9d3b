"""A client whose connections break: at any byte, for any time, while the server is restarted or killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import LeaseLost, Unavailable, aio
from holdfast.client.calling import MOST_PAUSE_MS, SOON_PAUSE_MS, SOON_S, Reconnecting
from holdfast.client.opening import Address
from holdfast.env import ManualClock, RealDisk, SeededIds, World
from tests.integration.http_gear import Serving, serving
from tests.integration.proxies import Proxy, proxied

SERVER = """
import asyncio, sys
from holdfast import aio
from holdfast.env import real_world
from holdfast.server.server import Server, event_loop
from holdfast.settings import ServerSettings

async def main():
    broker = await aio.open_broker(sys.argv[1], share=False)
    server = Server(real_world(), broker._port, ServerSettings(port=int(sys.argv[2])))
    print((await server.listen())[0], flush=True)
    await asyncio.Event().wait()

with asyncio.Runner(loop_factory=event_loop()) as runner:
    runner.run(main())
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving(tmp_path / "data") as server:
        yield server


@pytest.fixture
def proxy(server: Serving) -> Iterator[Proxy]:
    with proxied(server.url) as proxy:
        yield proxy


@pytest.fixture
def queue(proxy: Proxy) -> Iterator[Any]:
    with holdfast.open(proxy.url, topic="jobs", timeout=20, lease_ms=600_000) as queue:
        yield queue


def fresh(queue: Any) -> None:
    """Let the next call make a connection, which is the one with the fault."""
    queue._port.client.caller.drop_idle()


@pytest.mark.slow
def test_a_publish_is_stored_once_wherever_its_connection_is_cut(queue, proxy):
    queue.put(b"the lane is there")
    size = 500  # more than request and answer have
    sent = []
    for side in ("cut_request_at", "cut_answer_at"):
        for at in range(1, size, 23):
            fresh(queue)
            setattr(proxy, side, at)
            body = f"{side} {at}".encode()
            stored = queue.put(body)
            assert not stored.duplicate
            sent.append((stored.offset, body))
    found = queue._port.client  # by another way than the one that was cut
    with holdfast.connect(found.caller.address.text) as broker:
        kept = [(each.offset, each.body) for each in broker.read("jobs", limit=1000)]
    assert kept == [(0, b"the lane is there"), *sent]


@pytest.mark.slow
def test_a_delayed_publish_is_stored_once_wherever_its_connection_is_cut(queue, proxy):
    for at in range(1, 400, 37):
        fresh(queue)
        proxy.cut_answer_at = at
        assert not queue.put(b"%d" % at, delay=3600).duplicate
    assert sorted(int(each.body) for each in queue.messages("delayed")) == list(range(1, 400, 37))


@pytest.mark.slow
def test_an_ack_counts_wherever_its_answer_is_cut(queue, proxy):
    for at in range(1, 200, 17):
        queue.put(b"%d" % at)
        message = queue.get(timeout=5)
        fresh(queue)
        proxy.cut_answer_at = at
        message.ack()
    stats = queue.stats()
    assert (stats.ready, stats.leased) == (0, 0)


def test_a_nack_whose_answer_was_lost_is_not_an_error(queue, proxy):
    queue.put(b"x")
    message = queue.get(timeout=5)
    fresh(queue)
    proxy.cut_answer_at = 10
    message.nack(delay=0)
    assert queue.get(timeout=5).attempt == 2


@pytest.mark.parametrize("cut_at", [0, 30, 300])
def test_a_take_whose_answer_was_cut_gives_the_same_messages_and_costs_no_attempt(queue, proxy, cut_at):
    queue.put_many([b"x", b"y", b"z"])
    fresh(queue)
    proxy.cut_answer_at = cut_at
    messages = queue.get_many(2, timeout=20)
    assert [(message.body, message.attempt) for message in messages] == [(b"x", 1), (b"y", 1)]
    assert proxy.cut_answer_at is None
    queue.ack_many(messages)
    last = queue.get(timeout=20)
    assert (last.body, last.attempt) == (b"z", 1)
    last.ack()


def test_a_task_gets_the_messages_whose_answer_was_cut(proxy):
    async def story() -> None:
        async with await aio.open(proxy.url, topic="jobs", timeout=20, lease_ms=600_000) as queue:
            await queue.put(b"x")
            fresh(queue)
            proxy.cut_answer_at = 30
            message = await queue.get(timeout=20)
            assert (message.body, message.attempt) == (b"x", 1)
            await message.ack()

    asyncio.run(story())


def test_a_take_that_came_to_no_answer_at_all_is_gone_on_with_by_the_next_one(proxy):
    with holdfast.open(proxy.url, topic="jobs", timeout=0.5, lease_ms=600_000, max_attempts=1) as queue:
        queue.put(b"x")
        fresh(queue)
        proxy.swallow_answers = True
        with pytest.raises(Unavailable):
            queue.get(timeout=0)
        proxy.swallow_answers = False
        proxy.cut_all()
        queue._port.client.caller.timeout_s = 20
        message = queue.get(timeout=20)
        assert (message.body, message.attempt) == (b"x", 1)
        message.ack()


def test_a_state_that_was_saved_while_the_answer_was_lost_is_no_conflict(queue, proxy):
    queue.put(b"x")
    message = queue.get(timeout=5)
    fresh(queue)
    proxy.cut_answer_at = 20
    message.state.save({"step": 1})
    message.state.save({"step": 2})
    assert message.state.load() == {"step": 2}


def test_what_cannot_be_repeated_says_that_nobody_knows(proxy):
    with holdfast.connect(proxy.url, timeout=5) as broker:
        broker.topics()
        broker._port.client.caller.drop_idle()
        proxy.cut_answer_at = 10
        with pytest.raises(Unavailable, match="may or may not"):
            broker.create_topic("orders")
        assert broker.topics() == ["orders"]


def test_a_server_that_says_nothing_is_given_up_after_the_time_out(proxy):
    with holdfast.connect(proxy.url, timeout=0.5) as broker:
        broker.topics()
        proxy.swallow = True
        began = time.monotonic()
        with pytest.raises(Unavailable, match="did not respond"):
            broker.topics()
        assert time.monotonic() - began < 10
        proxy.swallow = False
        assert broker.topics() == []


def test_nobody_at_the_address_is_unavailable_and_not_a_trace_of_sockets():
    with (
        holdfast.connect("http://127.0.0.1:9", timeout=0.2) as broker,
        pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"),
    ):
        broker.topics()


def test_a_task_that_is_cancelled_loses_nothing(server):
    async def story() -> None:
        async with aio.open(server.url, topic="jobs") as queue:
            waiting = asyncio.create_task(queue.get(timeout=60))
            await asyncio.sleep(0)  # it is on its way
            while not queue._port.client.caller.state.is_open:
                await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await queue.put(b"x")
            message = await queue.get(timeout=10)
            assert message.body == b"x"
            await message.ack()

    asyncio.run(story())


def test_a_long_poll_goes_on_when_the_server_was_restarted(tmp_path):
    with serving(tmp_path / "data") as first:
        port = int(first.url.rpartition(":")[2])
        queue = holdfast.open(first.url, topic="jobs")
        got: list[bytes] = []
        waiting = threading.Thread(target=lambda: got.append(queue.get(timeout=60).body))
        waiting.start()
    with serving(tmp_path / "data", port=port) as second:
        second.post("/v1/queues/jobs/batch", {"messages": [{"text": "after"}]})
        waiting.join(30)
    assert got == [b"after"]
    queue.close()


def test_a_lease_is_renewed_across_a_restart(tmp_path):
    with serving(tmp_path / "data") as first:
        port = int(first.url.rpartition(":")[2])
        queue = holdfast.open(first.url, topic="jobs")
        queue.put(b"x")
        message = queue.get(timeout=5, lease=2, renew=True)
    with serving(tmp_path / "data", port=port):
        deadline = time.monotonic() + 3  # longer than the lease
        while time.monotonic() < deadline:
            assert queue.get_many(1, timeout=0.2) == []
        assert not message.lost
        message.ack()
        queue.close()


@pytest.mark.slow
@pytest.mark.serial
def test_nothing_is_lost_or_doubled_when_the_server_is_killed_again_and_again(tmp_path):
    program = tmp_path / "server.py"
    program.write_text(SERVER)

    def start(port: int) -> tuple[subprocess.Popen[str], int]:
        process = subprocess.Popen(
            [sys.executable, str(program), str(tmp_path / "data"), str(port)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        with process.stdout:
            return process, int(process.stdout.readline().strip().rpartition(":")[2])

    process, port = start(0)
    url = f"http://127.0.0.1:{port}"
    with holdfast.connect(url) as broker:
        broker.create_topic("orders", partitions=2)
    stop = threading.Event()
    sent: list[list[bytes]] = [[], [], []]

    def publish(number: int) -> None:
        with holdfast.connect(url, timeout=60) as broker:
            while not stop.is_set():
                body = b"%d-%d" % (number, len(sent[number]))
                broker.publish("orders", body, key=f"k{number}", durability="os")
                sent[number].append(body)

    threads = [threading.Thread(target=publish, args=(i,)) for i in range(3)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(3):
            stop.wait(1.0)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            process, port = start(port)
        stop.wait(1.0)
        stop.set()
        for thread in threads:
            thread.join(90)
        kept: list[bytes] = []
        with holdfast.connect(url) as broker:
            for partition in (0, 1):
                kept += [each.body for each in broker.read("orders", partition=partition, limit=100_000)]
    finally:
        stop.set()
        process.kill()
        process.wait()
    assert [body for body, count in Counter(kept).items() if count > 1] == []
    assert set(kept) == {body for some in sent for body in some}
    for number in range(3):  # each key in its order
        assert [body for body in kept if body.startswith(b"%d-" % number)] == sent[number]


def test_pauses_grow_and_are_never_the_same():
    clock = ManualClock()
    state = Reconnecting(World(clock=clock, disk=RealDisk(), ids=SeededIds(7)))
    assert state.pause_s() == 0
    pauses = []
    for _ in range(12):
        state.failed()
        pauses.append(state.pause_s())
        state.failed()  # another call found the same: that is no further failure
        assert state.failures == len(pauses)
        clock.advance(seconds=pauses[-1])
    assert pauses[0] < pauses[3] < pauses[5]
    assert max(pauses) <= MOST_PAUSE_MS / 1000
    assert len(set(pauses)) == len(pauses)
    state.opened()
    assert state.pause_s() == 0


def test_who_waits_for_a_server_that_starts_again_comes_soon_and_asks_less_often_if_it_stays_away():
    clock = ManualClock()
    state = Reconnecting(World(clock=clock, disk=RealDisk(), ids=SeededIds(7)))
    away_s = 0.0
    pauses: dict[str, list[float]] = {"at first": [], "later": []}
    while away_s < 60:
        state.failed()
        for pause_s in (state.pause_s(), state.backoff_ms(20) / 1000):  # to connect again, and to call again
            pauses["at first" if away_s < SOON_S else "later"].append(pause_s)
        clock.advance(seconds=state.pause_s())
        away_s += pauses["at first" if away_s < SOON_S else "later"][-2]
    assert max(pauses["at first"]) <= SOON_PAUSE_MS / 1000
    assert SOON_PAUSE_MS / 1000 < max(pauses["later"]) <= MOST_PAUSE_MS / 1000
    assert len(pauses["later"]) < 2 * 60 / (MOST_PAUSE_MS / 1000 / 2)
    state.opened()
    assert state.backoff_ms(20) > SOON_PAUSE_MS, "a server that is there and refuses is given more time"


def test_addresses_are_read_as_people_write_them():
    from holdfast.client.opening import parse_address

    assert parse_address("http://host:8080/").authority == "host:8080"
    assert parse_address("https://host/orders") == Address(
        text="https://host", host="host", port=443, secure=True, queue="orders"
    )
    assert parse_address("http://[::1]:7700").authority == "[::1]:7700"
    assert parse_address("unix:/run/holdfast.sock").socket == "/run/holdfast.sock"
    for wrong in ("ftp://x", "http://", "http://host:port", "unix:here", "http://u@host", "http://host/a/b", 7):
        with pytest.raises(holdfast.InvalidRequest):
            parse_address(wrong)


@pytest.mark.parametrize("almost", ["localhost:7700", "127.0.0.1:7700/jobs", "htp://host/jobs", "redis://host"])
def test_what_is_almost_an_address_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, almost: str):
    monkeypatch.chdir(tmp_path)
    for opens in (holdfast.open, holdfast.open_broker):
        with pytest.raises(holdfast.InvalidRequest, match="is not an address"):
            opens(almost)
    assert not list(tmp_path.iterdir())
    with holdfast.open(f"./{almost.replace('//', '')}"):
        pass  # said like this it is one


def test_a_document_whose_answer_was_lost_is_known_to_be_written_although_others_were_since(proxy: Proxy):
    with holdfast.connect(proxy.url, timeout=20) as broker, holdfast.connect(proxy.url, timeout=20) as other:
        first = broker.documents.update("mine", "old", version=0)
        other.documents.update("other", 0)  # its connection is there, so the next one is that of the call below
        ending = threading.Event()

        def write() -> None:
            while not ending.is_set():
                other.documents.update("other", 1)

        writing = threading.Thread(target=write)
        writing.start()
        try:
            proxy.cut_answers_once = b"PUT /v1/state/mine"
            second = broker.documents.update("mine", "new", version=first.version)
        finally:
            ending.set()
            writing.join()
        assert not proxy.cut_answers_once, "no answer was lost"
        assert broker.documents.get("mine") == second
        assert second.value == "new"


def test_a_document_that_another_has_changed_after_an_answer_was_lost_is_not_said_to_be_unwritten(proxy: Proxy):
    with holdfast.connect(proxy.url, timeout=20) as broker, holdfast.connect(proxy.url, timeout=20) as other:
        first = broker.documents.update("mine", "old", version=0)
        seen: list[Any] = []

        def follow() -> None:
            while not seen:
                found = other.documents.get("mine")
                if found is not None and found.value == "new":
                    seen.append(other.documents.update("mine", "theirs", version=found.version))

        following = threading.Thread(target=follow)
        following.start()
        proxy.hold_after_cut = lambda: following.join(20)
        proxy.cut_answers_once = b"PUT /v1/state/mine?version=%d" % first.version
        with pytest.raises(Unavailable, match="Get it again"):
            broker.documents.update("mine", "new", version=first.version)
        following.join()
        assert broker.documents.get("mine").value == "theirs"


def test_a_document_that_was_written_before_its_lock_was_lost_is_known_to_be(proxy: Proxy):
    with holdfast.connect(proxy.url, timeout=20) as broker, holdfast.connect(proxy.url, timeout=20) as other:
        lock = broker.locks.acquire("mine", lease=1)
        proxy.hold_after_cut = lambda: other.locks.acquire("mine", wait=20)
        proxy.cut_answers_once = b"PUT /v1/state/mine"
        done = broker.documents.update("mine", "new", lock=lock)
        assert broker.documents.get("mine") == done
        with pytest.raises(LeaseLost):
            broker.documents.update("mine", "newer", lock=lock)
