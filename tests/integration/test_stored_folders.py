"""Queues that live in a store, used by several processes and machines; a machine is a cache folder of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress

import pytest

import holdfast
import holdfast.aio
from holdfast import Busy, DiskFailed, HoldfastError, InvalidRequest

LEASE_MS = "2000"
PATIENCE_S = 60

pytestmark = pytest.mark.slow


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """This process is on a machine of its own."""
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_LEASE_MS", LEASE_MS)
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_WAIT_MS", "30000")


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/store/jobs"


@pytest.fixture
def elsewhere(tmp_path):
    """Start a program on another machine; all are ended with the test."""
    started = []

    def start(program, **environ):
        env = os.environ | {"HOLDFAST_BROKER_STORE_CACHE_DIR": str(tmp_path / f"cache-{len(started)}"), **environ}
        code = "import sys, time, holdfast\n" + textwrap.dedent(program)
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.wait()
        child.stdout.close()


def drained(queue):
    found = []
    while (message := _next(queue)) is not None:
        found.append(message.body)
        message.ack()
    return found


def _next(queue):
    try:
        return queue.get(timeout=0)
    except holdfast.Empty:
        return None


def test_a_queue_in_a_folder_store_survives_the_loss_of_its_machine(machine, url, tmp_path, monkeypatch):
    with holdfast.open(url) as queue:
        assert "jobs" in repr(queue)
        for i in range(20):
            queue.put(b"%d" % i, durability="fsync")
        for _ in range(5):
            queue.get().ack(durability="fsync")
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(tmp_path / "another"))
    with holdfast.open(url) as queue:
        assert drained(queue) == [b"%d" % i for i in range(5, 20)]


def test_everything_that_a_queue_can_do_works_in_memory(machine):
    with holdfast.open_broker("memory://everything") as broker:
        broker.create_topic("orders", partitions=2)
        broker.publish("orders", b"one", key="k", priority=3, headers={"a": "b"})
        broker.publish("orders", b"later", delay=3600)
        assert broker.publish("orders", b"x", dedup_id="d").duplicate is False
        assert broker.publish("orders", b"x", dedup_id="d").duplicate is True
        group = broker.group("orders", "billing")
        message = group.receive(timeout=5)
        message.reject("never")
        assert len(group.dead.list()) == 1
        with broker.locks.hold("key"):
            pass
    with holdfast.open_broker("memory://everything") as broker:
        assert broker.topics() == ["orders"]
        assert len(broker.group("orders", "billing").dead.list()) == 1


def test_large_messages_have_objects_of_their_own(machine, url, tmp_path):
    body = os.urandom(9 * 1024 * 1024)
    with holdfast.open(url) as queue:
        queue.put(body, durability="fsync")
        assert list((tmp_path / "store/jobs/large").iterdir())
    with holdfast.open(url) as queue:
        assert queue.get().body == body


def test_tasks_use_it_as_well(machine, url):
    async def main():
        async with holdfast.aio.open(url) as queue:
            await queue.put(b"one")
            message = await queue.get(timeout=5)
            await message.ack()
            return message.body

    assert asyncio.run(main()) == b"one"


def test_a_second_process_of_the_machine_goes_through_the_owner(machine, url, elsewhere, tmp_path):
    with holdfast.open(url) as queue:
        queue.put(b"for the child")
        child = elsewhere(
            f"""
            with holdfast.open({url!r}) as queue:
                message = queue.get(timeout=30)
                message.ack()
                queue.put(b"from the child")
                print(message.body.decode())
            """,
            HOLDFAST_BROKER_STORE_CACHE_DIR=str(tmp_path / "cache"),
        )
        assert child.communicate(timeout=PATIENCE_S)[0].strip() == "for the child"
        assert queue.get(timeout=5).body == b"from the child"


def test_another_machine_is_told_who_owns_the_queue(machine, url, elsewhere, monkeypatch):
    owner = elsewhere(f"queue = holdfast.open({url!r}); print('open', flush=True); time.sleep(600)")
    assert owner.stdout.readline().strip() == "open"
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_WAIT_MS", "500")
    with pytest.raises(Busy, match=f"owned by process {owner.pid}"):
        holdfast.open(url)


def test_a_killed_owner_is_followed_at_once_and_nothing_is_lost(machine, url, elsewhere):
    owner = elsewhere(
        f"""
        queue = holdfast.open({url!r})
        for i in range(1_000_000):
            queue.put(b"%d" % i, durability="fsync")
            print(i, flush=True)
        """
    )
    promised = [int(owner.stdout.readline()) for _ in range(50)]
    owner.kill()
    promised += [int(line) for line in owner.stdout]
    with holdfast.open(url) as queue:
        found = [int(body) for body in drained(queue)]
    assert found[: len(promised)] == promised
    assert len(found) <= len(promised) + 1  # the last one may have arrived without an answer


def test_an_owner_that_was_stopped_and_woken_is_fenced(machine, url, elsewhere):
    owner = elsewhere(
        f"""
        queue = holdfast.open({url!r})
        queue.put(b"before", durability="fsync")
        print("open", flush=True)
        sys.stdin = None
        while True:
            try:
                queue.put(b"x", durability="fsync")
                time.sleep(0.01)
            except holdfast.DiskFailed as error:
                print("fenced", "taken over" in str(error), flush=True)
                break
        """
    )
    assert owner.stdout.readline().strip() == "open"
    owner.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        with holdfast.open(url) as queue:
            assert time.monotonic() - began >= float(LEASE_MS) / 1000 * 0.8  # never sooner than the lease
            assert queue.get(timeout=5).body == b"before"
            before = queue.stats().end
            owner.send_signal(signal.SIGCONT)
            assert owner.stdout.readline().strip() == "fenced True"
            assert queue.stats().end == before
    finally:
        owner.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("how", ["stopped", "killed", "stopped, and its successor killed"])
def test_a_message_stays_with_whoever_may_still_work_on_it(machine, url, elsewhere, how):
    """An owner that is only silent may go on working on what it has received; one that is dead cannot."""
    owner = elsewhere(
        f"""
        queue = holdfast.open({url!r})
        queue.put(b"one", durability="fsync")
        message = queue.get(lease=60)
        queue.put(b"two", durability="fsync")
        print("holds it", flush=True)
        time.sleep(600)
        """
    )
    assert owner.stdout.readline().strip() == "holds it"
    if how == "killed":
        owner.kill()
        owner.wait()
    else:
        owner.send_signal(signal.SIGSTOP)
    try:
        if how == "stopped, and its successor killed":
            successor = elsewhere(f"queue = holdfast.open({url!r}); print('open', flush=True); time.sleep(600)")
            assert successor.stdout.readline().strip() == "open"
            successor.kill()
            successor.wait()
        with holdfast.open(url) as queue:
            assert drained(queue) == ([b"one", b"two"] if how == "killed" else [b"two"])
    finally:
        owner.send_signal(signal.SIGCONT)


def test_one_that_waits_takes_over_when_the_owner_closes(machine, url, elsewhere):
    queue = holdfast.open(url)
    queue.put(b"handed over")
    standby = elsewhere(
        f"""
        print("waiting", flush=True)
        with holdfast.open({url!r}) as queue:
            print(queue.get(timeout=30).body.decode(), flush=True)
        """
    )
    assert standby.stdout.readline().strip() == "waiting"
    time.sleep(0.5)
    queue.close()
    assert standby.communicate(timeout=PATIENCE_S)[0].strip() == "handed over"


def test_an_owner_that_lost_the_folder_says_so(machine, url, tmp_path):
    queue = holdfast.open(url)
    queue.put(b"one", durability="fsync")
    chain = tmp_path / "store/jobs/chain"
    taken = max(chain.iterdir()).name
    (chain / f"{int(taken) + 1:020}").write_bytes(b"someone else's")
    with pytest.raises(DiskFailed, match="another process has taken over"):
        queue.put(b"two", durability="fsync")
    with pytest.raises(DiskFailed):
        queue.close()
    assert queue.closed


@pytest.mark.parametrize(
    "bad", ["s3://", "file://", "memory://", "postgresql://host/database", "s3:///name", "gs://[", "ftp://host/x"]
)
def test_a_place_that_is_none_is_refused_with_an_example(machine, bad):
    with pytest.raises(InvalidRequest):
        holdfast.open(bad)


def test_a_damaged_store_is_refused_and_not_mended_in_silence(machine, url, tmp_path):
    with holdfast.open(url) as queue:
        for i in range(5):
            queue.put(b"%d" % i, durability="fsync")
    objects = sorted((tmp_path / "store/jobs/chain").iterdir())
    damaged = objects[len(objects) // 2]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with pytest.raises(HoldfastError, match="damaged"):
        holdfast.open(url)


def test_commands_work_at_a_place_in_a_store(machine, url, capsys):
    from holdfast.cli.main import main

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert not ended.value.code
        return capsys.readouterr().out

    assert run("put", url, "hello", "world").split() == ["jobs-0-0", "jobs-0-1"]
    assert "hello" in run("get", url, "--ack")
    assert '"ready": 1' in run("stats", url, "--json")
    assert "world" in run("ls", url)


def test_some_commands_read_the_store_while_its_owner_is_on_another_machine(
    machine, url, elsewhere, capsys, monkeypatch, tmp_path
):
    from holdfast.cli.main import main

    owner = elsewhere(
        f"""
        queue = holdfast.open({url!r})
        queue.put(b"broken")
        queue.get().reject("no")
        queue.put(b"next", durability="fsync")
        print('open', flush=True)
        time.sleep(600)
        """
    )
    assert owner.stdout.readline().strip() == "open"
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_WAIT_MS", "0")

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main(words)
        told = capsys.readouterr()
        return ended.value.code, told.out + told.err

    for words, expected in [
        (("topic", "ls", url), "jobs"),
        (("topic", "show", url, "jobs"), "messages"),
        (("group", "ls", url), "default"),
        (("dead", "ls", url), "REJECTED"),
        (("top", url, "--once"), "default"),
        (("backup", url, str(tmp_path / "backups")), "backup 1"),
    ]:
        code, told = run(*words)
        assert (code, expected in told) == (0, True), told
    for words in [("stats", url), ("ls", url), ("put", url, "x"), ("search", url, "x")]:
        code, told = run(*words)
        assert code != 0
        assert f"owned by process {owner.pid}" in told
        assert "Connect to its server" in told


def test_the_local_copy_opened_as_a_folder_is_the_queue_in_the_store(machine, url, tmp_path, monkeypatch):
    with holdfast.open(url) as queue:
        queue.put(b"one")
        copy = queue.folder
    with holdfast.open(copy) as queue:  # as somebody might who finds it; what they do must not be lost
        queue.put(b"two", durability="fsync")
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(tmp_path / "another"))
    with holdfast.open(url) as queue:
        assert drained(queue) == [b"one", b"two"]


def test_a_second_process_of_a_machine_that_stands_by_waits_as_well(machine, url, elsewhere, tmp_path):
    queue = holdfast.open(url)
    queue.put(b"one")
    queue.put(b"two")
    program = f"""
        print("waiting", flush=True)
        with holdfast.open({url!r}) as queue:
            with queue.get(timeout=30) as message:
                body = message.body.decode()
            print(body, flush=True)
        """
    both = [elsewhere(program, HOLDFAST_BROKER_STORE_CACHE_DIR=str(tmp_path / "there")) for _ in range(2)]
    assert [child.stdout.readline().strip() for child in both] == ["waiting", "waiting"]
    time.sleep(5)  # for longer than a process waits for an owner that does not share
    queue.close()
    assert sorted(child.stdout.readline().strip() for child in both) == ["one", "two"]


def test_the_next_process_of_the_machine_takes_over_in_the_same_cache(machine, url, elsewhere, tmp_path):
    owner = elsewhere(
        f"""
        queue = holdfast.open({url!r})
        queue.put(b"kept", durability="fsync")
        print("open", flush=True)
        time.sleep(600)
        """,
        HOLDFAST_BROKER_STORE_CACHE_DIR=str(tmp_path / "cache"),
        HOME=str(tmp_path / "home"),
    )
    assert owner.stdout.readline().strip() == "open"
    with holdfast.open(url) as queue:
        queue.put(b"by the socket")
        owner.kill()
        owner.wait()
        queue.put(b"after", durability="fsync")
        assert {b"kept", b"after"} <= set(drained(queue))
    assert not (tmp_path / "home").exists()


def test_a_server_keeps_its_audit_log_in_the_store(machine, url, tmp_path):
    from holdfast.broker.folder.stored import refreshed_copy
    from holdfast.config.settings_file import read_settings
    from holdfast.env import real_world
    from holdfast.server.server import serve
    from holdfast.settings import BrokerSettings, ServerSettings

    there = BrokerSettings(store_cache_dir=str(tmp_path / "cache"))

    async def main():
        stop, addresses = asyncio.Event(), []
        serving = asyncio.create_task(
            serve(
                real_world(), url, there, ServerSettings(port=0), ready=addresses.extend, stop_asked=stop.wait(),
                effective=read_settings(real_world(), {}),
            )
        )  # fmt: skip
        while not addresses:
            await asyncio.sleep(0.01)
        async with holdfast.aio.connect(addresses[0]) as broker:
            await broker.create_topic("audited")
        told = await asyncio.to_thread(asked, addresses[0], "/v1/admin/status")
        assert told["store"].items() >= {"name": url, "epoch": 1}.items()
        assert "problem" not in told["store"]
        assert told["store"]["objects"] > 0
        stop.set()
        assert await serving

    asyncio.run(main())
    elsewhere = BrokerSettings(store_cache_dir=str(tmp_path / "another"))
    copy = refreshed_copy(url, elsewhere, real_world())
    with open(f"{copy}/audit.jsonl") as lines:
        assert "audited" in lines.read()


def test_what_a_server_says_it_serves_has_no_password():
    from holdfast.broker.folder.stored import shown_place

    assert shown_place("postgresql://u:sesame@host/db/jobs") == "postgresql://host/db/jobs"
    assert shown_place("./data") == "./data"


def test_a_server_that_lost_its_folder_is_not_ready_and_says_why(machine, url, tmp_path):
    from holdfast.env import real_world
    from holdfast.local.aio.broker import AsyncLocalBrokerPort
    from holdfast.local.opening import open_broker_port
    from holdfast.server.server import make_server
    from holdfast.settings import ServerSettings

    async def main():
        port = await asyncio.to_thread(open_broker_port, AsyncLocalBrokerPort, url)
        server = make_server(real_world(), port, ServerSettings(port=0))
        [address] = await server.listen(None)
        assert (await asyncio.to_thread(asked, address, "/readyz"))["status"] == "ready"
        chain = tmp_path / "store/jobs/chain"
        number = port.engine.store.next_number
        for beyond in range(8):  # its next objects, also those that it writes by itself
            (chain / f"{number + beyond:020}").write_bytes(b"someone else's")
        with pytest.raises(OSError, match="taken over"):
            await asyncio.to_thread(port.engine.store.confirm)
        assert "taken over" in str(await asyncio.to_thread(asked, address, "/readyz"))
        assert "taken over" in (await asyncio.to_thread(asked, address, "/v1/admin/status"))["store"]["problem"]
        with pytest.raises(urllib.error.HTTPError) as refused:  # the next owner may have changed what it would show
            await asyncio.to_thread(text_of, address, "/ui")
        assert "taken over" in refused.value.read().decode()
        assert "taken over" in await asyncio.to_thread(text_of, address, "/ui/health")
        await server.drain()
        with suppress(DiskFailed):
            await port.close()

    asyncio.run(main())


def test_a_server_that_slept_proves_that_it_is_the_owner_before_it_says_how_things_are(machine, url):
    from holdfast.env import real_world
    from holdfast.local.aio.broker import AsyncLocalBrokerPort
    from holdfast.local.opening import open_broker_port
    from holdfast.server.server import make_server
    from holdfast.settings import ServerSettings

    async def main():
        port = await asyncio.to_thread(open_broker_port, AsyncLocalBrokerPort, url)
        server = make_server(real_world(), port, ServerSettings(port=0))
        [address] = await server.listen(None)
        async with holdfast.aio.connect(address) as broker:
            await broker.create_topic("jobs")
            stored = await broker.publish("jobs", b"one", durability="fsync")
            await (await broker.group("jobs", "g")).peek()
        chain, unproven = port.engine.store, []
        api = (
            "/topics", "/topics/jobs", "/groups", "/standing", "/queues/jobs/stats?group=g",
            "/queues/jobs/peek?group=g", "/queues/jobs/messages?group=g&phase=ready", "/search?q=one",
            f"/queues/jobs/messages/{stored.id}?group=g", "/locks",
        )  # fmt: skip
        pages = (
            "", "/queues/jobs?group=g", f"/queues/jobs/messages/{stored.id}?group=g", "/queues/jobs/dead?group=g",
            "/queues/jobs/log", "/queues/jobs/charts?group=g", "/queues/jobs/settings", "/queues/jobs/send",
            "/search?q=one", "/groups", "/workers", "/locks",
        )  # fmt: skip
        for path in (*(f"/v1{path}" for path in api), *(f"/ui{path}" for path in pages)):
            chain._confirmed_ns -= 3600 * 10**9
            await asyncio.to_thread(text_of, address, path)
            if not chain.is_current():
                unproven.append(path)
        assert unproven == []
        await server.close()
        await port.close()

    asyncio.run(main())


def test_a_server_that_lost_its_folder_ends_and_leaves_the_cache_to_others(machine, url, tmp_path):
    from holdfast.env import real_world
    from holdfast.server.server import serve
    from holdfast.settings import BrokerSettings, ServerSettings

    there = BrokerSettings(store_cache_dir=str(tmp_path / "cache"), store_lease_ms=int(LEASE_MS))

    async def main():
        addresses = []
        serving = asyncio.create_task(
            serve(
                real_world(), url, there, ServerSettings(port=0), ready=addresses.extend,
                stop_asked=asyncio.Event().wait(),
            )
        )  # fmt: skip
        while not addresses:
            await asyncio.sleep(0.01)
        async with holdfast.aio.connect(addresses[0]) as broker:
            await broker.create_topic("jobs")
            await broker.publish("jobs", b"one", durability="fsync")
        await asyncio.to_thread(take_away, url)
        with pytest.raises(DiskFailed, match=r"no longer owns its folder.*taken over.*Start it again"):
            await asyncio.wait_for(serving, PATIENCE_S)

    asyncio.run(main())
    with holdfast.open_broker(url) as broker:  # in the same cache
        assert broker.group("jobs", "g").receive(timeout=5).body == b"one"


def take_away(url):
    """Become the next owner and let go: as a machine would that has not heard of the owner for too long."""
    from holdfast.broker.folder.stored import open_store, parse_place
    from holdfast.env import SystemClock
    from holdfast.env.chain.chain import Chain, Position, walk

    store, root = open_store(parse_place(url))
    chain = None
    while chain is None:
        at = Position()
        for header, _ in walk(store, root, at):
            at = at.after(header)
        chain = Chain.take_over(store, root, SystemClock(), at=at, writer=os.urandom(16))
    chain.close()
    store.close()


@pytest.fixture
def slow_store(machine):
    """A store in memory that answers nothing while `held` is set."""
    from holdfast.env.chain import engines

    store, held = engines._memory(engines.parse_place("memory://slow"))[0], threading.Event()
    create, go_on = store.create, threading.Event()

    def patient(key, content):
        if held.is_set():
            go_on.wait(PATIENCE_S)
        return create(key, content)

    store.create = patient
    yield held, go_on
    go_on.set()
    del engines._memories["memory://slow"]


async def turns_while(work, go_on):
    """How many turns the event loop has while a call waits for the store."""
    turns, waiting = 0, asyncio.create_task(work)
    while turns < 20 and not waiting.done():
        await asyncio.sleep(0.01)
        turns += 1
    go_on.set()
    await asyncio.wait_for(waiting, PATIENCE_S)
    return turns


def test_tasks_that_put_more_than_the_store_takes_do_not_hold_up_the_event_loop(slow_store):
    held, go_on = slow_store

    async def main():
        async with holdfast.aio.open("memory://slow") as queue:
            await queue.put(b"first")  # the first segment begins with a sync
            held.set()

            async def put():
                for _ in range(40):
                    await queue.put(os.urandom(2**20), durability="os")

            assert await turns_while(put(), go_on) == 20
            assert await queue.qsize() == 41

    asyncio.run(main())


def test_a_server_answers_others_while_the_store_takes_no_more(slow_store):
    from holdfast.env import real_world
    from holdfast.local.aio.broker import AsyncLocalBrokerPort
    from holdfast.local.opening import open_broker_port
    from holdfast.server.server import make_server
    from holdfast.settings import ServerSettings

    held, go_on = slow_store

    async def main():
        port = await asyncio.to_thread(open_broker_port, AsyncLocalBrokerPort, "memory://slow")
        server = make_server(real_world(), port, ServerSettings(port=0))
        [address] = await server.listen(None)
        async with holdfast.aio.connect(address) as broker:
            await broker.create_topic("jobs")
            await broker.publish("jobs", b"first")
            held.set()

            async def put():
                for _ in range(40):
                    await broker.publish("jobs", os.urandom(2**20), durability="os")

            assert await turns_while(put(), go_on) == 20
        await server.close()

    asyncio.run(main())


def test_what_a_lost_process_may_cost_is_bounded_also_while_objects_are_on_their_way(slow_store):
    held, go_on = slow_store
    with holdfast.open("memory://slow") as queue:
        queue.put(b"first")
        held.set()
        chain = queue._port.engine.store

        def put():
            for _ in range(40):
                queue.put(os.urandom(2**20), durability="os")

        threads = [threading.Thread(target=put) for _ in range(2)]
        for thread in threads:
            thread.start()
        seen, since = 0, time.monotonic()
        while time.monotonic() - since < 1:
            seen = max(seen, chain.unsent_bytes)
            time.sleep(0.01)
        go_on.set()
        for thread in threads:
            thread.join()
        assert 15 * 2**20 < seen < 20 * 2**20


def asked(address, path):
    try:
        with urllib.request.urlopen(address + path, timeout=PATIENCE_S) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return json.loads(error.read())


def test_status_shows_the_owner_and_a_standby_to_the_owner_and_to_others(
    machine, url, elsewhere, capsys, monkeypatch, tmp_path
):
    from holdfast.cli.main import main
    from holdfast.env import real_world
    from holdfast.local.aio.broker import AsyncLocalBrokerPort
    from holdfast.local.opening import open_broker_port
    from holdfast.server.server import make_server
    from holdfast.settings import ServerSettings

    def told(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["status", *arguments])
        assert ended.value.code == 0
        return capsys.readouterr().out

    async def serve():
        port = await asyncio.to_thread(open_broker_port, AsyncLocalBrokerPort, url)
        server = make_server(real_world(), port, ServerSettings(port=0))
        [address] = await server.listen(None)
        standby = elsewhere(f"holdfast.open({url!r})")
        until = time.monotonic() + PATIENCE_S
        while not (store := (await asyncio.to_thread(asked, address, "/v1/admin/status"))["store"]).get("standbys"):
            assert time.monotonic() < until
            await asyncio.sleep(0.1)
        assert str(os.getpid()) in store["owner"]
        assert str(standby.pid) in store["standbys"][0]["process"]
        metrics = await asyncio.to_thread(text_of, address, "/metrics")
        assert "holdfast_store_standbys 1.0" in metrics
        assert f"process {standby.pid} on" in await asyncio.to_thread(text_of, address, "/ui/health")
        assert f"process {standby.pid} on" in await asyncio.to_thread(told, address)
        monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(tmp_path / "third"))
        found = json.loads(await asyncio.to_thread(told, url, "--json"))
        assert str(os.getpid()) in found["owner"]
        assert str(standby.pid) in found["standbys"][0]["process"]
        assert found["epoch"] == 1
        assert f"process {standby.pid} on" in await asyncio.to_thread(told, url)
        standby.kill()
        await server.drain()
        await port.close()

    asyncio.run(serve())
    assert "none" in told(url)


def text_of(address, path):
    with urllib.request.urlopen(f"{address}{path}", timeout=PATIENCE_S) as answer:
        return answer.read().decode()
