"""Queues in real stores: what was promised is there after the owner was killed, on another machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import holdfast
from holdfast.env.chain import services
from holdfast.env.chain.engines import StoreRefused, StoreUnreachable, open_store, parse_place, probe
from tests.integration.process_gear import until
from tests.integration.store_servers import azurite, azurite_program, moto, postgres, postgres_program, seaweedfs

pytestmark = [pytest.mark.slow, pytest.mark.serial]

ENGINES = {"seaweedfs": seaweedfs, "postgres": postgres, "azurite": azurite, "moto": moto}


@pytest.fixture(params=ENGINES, scope="module")
def store(request, tmp_path_factory):
    if request.param == "postgres" and postgres_program("initdb") is None:
        pytest.skip("there is no PostgreSQL here")
    if request.param == "azurite" and azurite_program() is None:
        pytest.skip("there is no Azurite here: npm install -g azurite")
    folder = tmp_path_factory.mktemp(request.param)
    patch = pytest.MonkeyPatch()
    with ENGINES[request.param](folder) as (url, environ), patch.context() as patched:
        for name, value in {**environ, "HOLDFAST_BROKER_STORE_LEASE_MS": "5000"}.items():
            patched.setenv(name, value)
        yield url


@pytest.fixture
def url(store, request, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(tmp_path / "cache"))
    return f"{store}-{abs(hash(request.node.name)) % 10**6}"


def test_it_keeps_its_promise(url):
    store, root = open_store(parse_place(url))
    probe(store, f"{root}x/", "one")
    assert store.create(f"{root}a", b"1")
    assert not store.create(f"{root}a", b"2")
    assert store.read(f"{root}a") == b"1"
    assert store.read(f"{root}b") is None
    for name in ("c", "b", "d"):
        assert store.create(f"{root}{name}", b"")
    assert list(store.keys(root)) == [f"{root}{name}" for name in "abcd"]
    assert list(store.keys(root, after=f"{root}b")) == [f"{root}c", f"{root}d"]
    store.remove(f"{root}c")
    store.remove(f"{root}c")
    assert store.read(f"{root}c") is None
    store.close()


def test_what_was_promised_is_there_after_the_owner_was_killed(url, tmp_path):
    code = f"""
        import holdfast
        queue = holdfast.open({url!r})
        for i in range(1_000_000):
            queue.put(b"%d" % i, durability="fsync")
            if i % 3 == 0:
                queue.get().ack(durability="fsync")
            print(i, flush=True)
    """
    env = os.environ | {"HOLDFAST_BROKER_STORE_CACHE_DIR": str(tmp_path / "elsewhere")}
    program = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=env) as owner:
        assert owner.stdout is not None
        promised = [int(owner.stdout.readline()) for _ in range(60)]
        owner.kill()
        promised += [int(line) for line in owner.stdout]
    acked = len(promised[::3])
    with holdfast.open(url) as queue:
        found = []
        while True:
            try:
                message = queue.get(timeout=0)
            except holdfast.Empty:
                break
            found.append(int(message.body))
            message.ack()
    assert set(promised[acked + 1 :]) <= set(found), "what was promised is lost"
    assert not set(promised[: acked - 1]) & set(found), "what was done came back"


def test_a_checkpoint_takes_the_place_of_the_chain(url, tmp_path, monkeypatch):
    with holdfast.open(url) as queue:
        for i in range(200):
            queue.put(b"%d" % i + bytes(1000), durability="os")
        queue.sync()
        owner = queue._port.engine.world.disk
        from holdfast.env.chain.checkpoints import write_checkpoint

        found = write_checkpoint(owner, 0)
        assert any(file.digest for file in found.files)
        queue.put(b"after", durability="fsync")
        store, root = open_store(parse_place(url))
        for key in list(store.keys(f"{root}chain/")):
            if key < f"{root}chain/{found.at.number:020}":
                store.remove(key)
        store.close()
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(tmp_path / "another"))
    with holdfast.open(url) as queue:
        assert queue.qsize() == 201


def test_a_place_without_permission_or_bucket_is_explained(store, tmp_path, monkeypatch):
    if not store.startswith("s3:"):
        pytest.skip("only for object stores")
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises((holdfast.HoldfastError, StoreRefused), match="s3://no-such-bucket"):
        holdfast.open("s3://no-such-bucket-here/jobs")


@pytest.fixture
def database(request, tmp_path, monkeypatch):
    if postgres_program("initdb") is None:
        pytest.skip("there is no PostgreSQL here")
    monkeypatch.setattr(services, "_TIMEOUT_S", 1)
    with postgres(tmp_path) as (url, _):
        yield url


def test_a_database_that_hangs_is_not_waited_for_without_end(database):
    store, root = open_store(parse_place(database))
    [connection] = store._shared._idle  # type: ignore[attr-defined]
    hung = connection.info.backend_pid
    os.kill(hung, signal.SIGSTOP)
    try:
        with pytest.raises(StoreUnreachable, match="did not answer in time"):
            store.create(f"{root}a", b"1")
    finally:
        os.kill(hung, signal.SIGCONT)
    store.close()


def test_a_commit_that_waits_for_a_standby_is_unknown_until_the_standby_has_it(database):
    """The row is there, and may be lost with its server: nobody is told that it is stored."""
    import psycopg

    store, root = open_store(parse_place(database))
    admin = psycopg.connect(database.rpartition("/")[0], autocommit=True)
    admin.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    admin.execute("SELECT pg_reload_conf()")
    for _ in range(2):
        with pytest.raises(StoreUnreachable):
            while store.create(f"{root}{os.urandom(4).hex()}", b"1"):
                pass  # until the setting is seen
    for _ in range(2):
        with pytest.raises(StoreUnreachable):
            store.create(f"{root}a", b"1")
    admin.execute("ALTER SYSTEM SET synchronous_standby_names = ''")
    admin.execute("SELECT pg_reload_conf()")
    chain_says = None
    while chain_says is None:
        try:
            chain_says = store.create(f"{root}a", b"1")
        except StoreUnreachable:
            continue
    assert store.read(f"{root}a") == b"1"
    admin.close()
    store.close()


def test_a_list_does_not_read_what_others_keep_in_the_same_table(database):
    store, root = open_store(parse_place(database))
    for key in (f"{root}a", f"{root}b", "zzz/a", "a/a"):
        store.create(key, b"")
    assert list(store.keys(root)) == [f"{root}a", f"{root}b"]
    assert list(store.keys(root, after=f"{root}a")) == [f"{root}b"]
    store.close()


def test_what_is_large_may_take_longer_than_what_the_lease_depends_on(database):
    store, root = open_store(parse_place(database))
    seen = {}
    for key in (f"{root}chain/1", f"{root}content/1", f"{root}large/1", f"{root}chain/2"):
        with store._connection(key) as connection:  # type: ignore[attr-defined]
            seen[key.split("/")[-2] + key[-1]] = connection.execute("SHOW statement_timeout").fetchone()[0]
    assert seen == {"chain1": "1s", "content1": "10min", "large1": "10min", "chain2": "1s"}
    store.close()


@pytest.mark.skipif(postgres_program("initdb") is None, reason="there is no PostgreSQL here")
def test_all_stores_in_one_database_share_its_connections(tmp_path):
    """The shards of a cluster, for one: a database has a hundred connections for everyone."""
    import psycopg

    with postgres(tmp_path) as (url, _):
        stores = [open_store(parse_place(f"{url}/shards/{number}")) for number in range(20)]
        with psycopg.connect(url.rpartition("/")[0], autocommit=True) as looking:

            def connections() -> int:
                (count,) = looking.execute(
                    "SELECT count(*) - 1 FROM pg_stat_activity WHERE backend_type = 'client backend'"
                ).fetchone()
                return count

            with ThreadPoolExecutor(40) as pool:
                made = [pool.submit(store.create, f"{root}{n}", b"x") for store, root in stores for n in range(10)]
                assert all(each.result() for each in made)
                assert 1 <= connections() <= services._CONNECTIONS
                # Files that take long leave room for the others.
                locking = looking.transaction()
                with locking:
                    looking.execute("LOCK TABLE holdfast_objects IN SHARE MODE")
                    bulk = [pool.submit(store.create, f"{root}content/1", b"x") for store, root in stores]
                    store, root = stores[0]
                    until(lambda: blocked(looking) >= services._BULK_CONNECTIONS, "all bulk calls that may wait do")
                    assert store.read(f"{root}1") == b"x"
                    assert blocked(looking) == services._BULK_CONNECTIONS
                assert all(each.result() for each in bulk)
            for store, _ in stores[1:]:
                store.close()
            store, root = stores[0]
            assert store.read(f"{root}1") == b"x"
            store.close()
            store.close()
            until(lambda: not connections(), "all connections are closed")


def blocked(looking: Any) -> int:
    (count,) = looking.execute("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'").fetchone()
    return count
