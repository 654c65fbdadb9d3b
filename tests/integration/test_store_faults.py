"""Owners of a queue in a store are killed, stopped and cut off from it: nothing is lost, doubled, or in two hands."""

from __future__ import annotations

import random
import sys
from contextlib import ExitStack

import pytest

import holdfast
from tests.integration.proxies import Proxy
from tests.integration.store_machines import HERE, IN_BETWEEN, LEASE_S, Machines, Note, check, torment
from tests.integration.store_servers import postgres, postgres_program, seaweedfs

pytestmark = [pytest.mark.slow, pytest.mark.serial]

MACHINES = 3


def drained(url):
    """What is left, whoever held it: leases of the dead end, too."""
    left = set()
    with holdfast.open(url) as queue:
        while True:
            try:
                message = queue.get(timeout=LEASE_S + 1)
            except holdfast.Empty:
                return left
            left.add(message.body.decode())
            message.ack()


def outcome(folder, urls, environs, seconds, *, last, kinds=HERE, proxies=(), careless=False):
    seed = random.randrange(2**32)
    machines = Machines(folder, urls, environs, careless=careless)
    try:
        faults = torment(machines, kinds, seconds, random.Random(seed), proxies)
    finally:
        machines.end()
    notes = machines.ends + [note for i in range(len(urls)) for note in machines.notes(i)]
    try:
        left = drained(last)
    except holdfast.CorruptData:
        left = set()
        notes.append(Note("corrupt", 0, "-", 0, 0))
    found = check(notes, left)
    sys.stdout.write(f"{last} seed {seed}: {faults}; {str(found)[:1000]}\n")
    return found


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(tmp_path / "last"))
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_LEASE_MS", "2000")
    monkeypatch.setenv("HOLDFAST_BROKER_STORE_WAIT_MS", "60000")


def expect_no_faults(found, seconds):
    assert found.owners > 1
    assert found.put > seconds
    assert found.acked > seconds
    assert (found.lost, found.doubled, found.in_two_hands, found.corrupt) == ([], [], [], 0)


def test_nothing_is_lost_or_doubled_in_a_folder_store(here, tmp_path, scale):
    url, seconds = f"file://{tmp_path}/store/jobs", scale(15, 180)
    expect_no_faults(outcome(tmp_path, [url] * MACHINES, [{}] * MACHINES, seconds, last=url), seconds)


@pytest.mark.parametrize("kind", ["seaweedfs", "postgres"])
def test_nothing_is_lost_or_doubled_in_a_store_behind_a_bad_network(here, kind, tmp_path, scale, monkeypatch):
    if kind == "postgres" and postgres_program("initdb") is None:
        pytest.skip("there is no PostgreSQL here")
    seconds = scale(20, 180)
    with ExitStack() as closing:
        url, environ = closing.enter_context((seaweedfs if kind == "seaweedfs" else postgres)(tmp_path))
        address = environ.get("AWS_ENDPOINT_URL", url)
        host = address.partition("://")[2].rpartition("@")[2].partition("/")[0]
        proxies = [Proxy((host.partition(":")[0], int(host.partition(":")[2]))) for _ in range(MACHINES)]
        for proxy in proxies:
            closing.callback(proxy.close)
        places = [f"127.0.0.1:{proxy.port}" for proxy in proxies]
        urls = [url.replace(host, place) for place in places]
        environs = [{name: value.replace(host, place) for name, value in environ.items()} for place in places]
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        kinds = [*HERE, *IN_BETWEEN]
        found = outcome(tmp_path, urls, environs, seconds, last=url, kinds=kinds, proxies=proxies)
        expect_no_faults(found, seconds)


def test_a_store_that_ignores_the_condition_is_found_out(here, tmp_path, monkeypatch):
    """So that we know that the checks above can fail; the probe, which would refuse it, is switched off."""
    for attempt in range(8):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        url = f"file://{folder}/store/jobs"
        monkeypatch.setenv("HOLDFAST_BROKER_STORE_CACHE_DIR", str(folder / "last"))
        if outcome(folder, [url] * 2, [{}] * 2, 8, last=url, kinds=["outlast"], careless=True).faults:
            return
    pytest.fail("nothing was found")


@pytest.mark.parametrize(
    ("story", "left", "fault"),
    [
        ([("put", 1, 0, 1)], set(), "lost"),
        ([("put", 1, 0, 1), ("acked", 1, 2, 3)], {"m"}, "doubled"),
        ([("put", 1, 0, 1), ("got", 1, 1, 2), ("acked", 1, 2, 3), ("got", 2, 4, 5)], set(), "doubled"),
        ([("got", 2, 1, 2), ("got", 1, 3, 4)], {"m"}, "in_two_hands"),
        ([("got", 1, 1, 2), ("put", 1, 2.1, 2.2), ("got", 2, 3, 4), ("over", 1, 0, 5)], {"m"}, "in_two_hands"),
    ],
    ids=["lost", "acked and left", "acked and got", "handed out after the successor", "leased and got"],
)
def test_the_checker_finds(story, left, fault):
    found = check([Note(what, epoch, "m", began, ended) for what, epoch, began, ended in story], left)
    assert getattr(found, fault) == ["m"]
