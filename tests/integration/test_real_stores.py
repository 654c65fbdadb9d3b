"""Queues in real stores: what was promised is there after the owner was killed, on another machine."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

import holdfast
from holdfast.broker.folder.stored import open_store, parse_place
from holdfast.env.chain.engines import StoreRefused, probe
from tests.integration.store_servers import postgres, postgres_program, seaweedfs

pytestmark = [pytest.mark.slow, pytest.mark.serial]

ENGINES = {"seaweedfs": seaweedfs, "postgres": postgres}


@pytest.fixture(params=ENGINES, scope="module")
def store(request, tmp_path_factory):
    if request.param == "postgres" and postgres_program("initdb") is None:
        pytest.skip("there is no PostgreSQL here")
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
