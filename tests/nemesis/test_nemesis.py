"""A cluster in bad times, on each store; and mistakes planted in its nodes, which the checks must find."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import Any

import pytest

from tests.integration.process_gear import plain_environment, say
from tests.integration.store_servers import postgres_program
from tests.nemesis.network import can_have_namespaces
from tests.nemesis.node import PLANTED

pytestmark = [pytest.mark.slow, pytest.mark.serial]

needs_postgres = pytest.mark.skipif(postgres_program("initdb") is None, reason="there is no PostgreSQL here")
TRIES = 4  # chance decides whether a mistake does harm


def nemesis(folder: Any, *options: str, timeout_s: float = 280) -> dict[str, Any]:
    """One run; its folder stays if it found something, with the history and what the nodes logged."""
    command = [sys.executable, "-m", "tests.nemesis.run", "--folder", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=plain_environment(), timeout=timeout_s)
    assert done.stdout, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    say(done.stdout)
    return told


@pytest.mark.parametrize(
    ("store", "network"),
    [("seaweedfs", "auto"), pytest.param("postgres", "auto", marks=needs_postgres)],
)
def test_nothing_is_broken_that_clients_can_see(tmp_path, store: str, network: str, scale):
    seconds = scale(12, 1_800)
    # The usual run always has the same faults; a long one, others each time.
    seed = int(os.environ.get("NEMESIS_SEED", scale(7, random.randrange(2**32))))
    told = nemesis(
        tmp_path, "--store", store, "--network", network, "--seconds", str(seconds), "--seed", str(seed),
        "--nodes", str(scale(3, 5)), timeout_s=280 + 3 * seconds,
    )  # fmt: skip
    assert "failed" not in told, told
    assert told["found"] == {}, told
    assert told["network"] == ("namespaces" if can_have_namespaces() else "proxies")
    assert told["faults"], told
    for op in ("put", "get", "ack", "publish", "poll", "commit", "send", "acquire", "update"):
        assert int(told["calls"][op].partition("/")[0]) > 0, told


@needs_postgres
def test_a_machine_without_namespaces_is_tormented_through_proxies(tmp_path):
    told = nemesis(
        tmp_path, "--store", "postgres", "--network", "proxies", "--seconds", "8", "--seed", "1",
        "--faults", "store_answers_lost,clients_apart,nodes_apart",
    )  # fmt: skip
    assert (told.get("failed"), told.get("found"), told["network"]) == (None, {}, "proxies"), told


# What each mistake breaks, and the harm that shows it.
HARM = {
    "condition": ("stop,alone,store_unreachable", "put,put,take,take,swap,swap,stream,look"),
    "lease": ("clock", "look,look,look,look,swap,swap,swap,put,take,take,take"),
    "fence": ("clock", "lock,lock,lock,look"),
}


@needs_postgres
@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_found(tmp_path, mistake: str, long: bool):
    if not long:
        pytest.skip("takes minutes and luck: --long. test_planted.py tells the same with two owners in one process")
    faults, clients = HARM[mistake]
    for _ in range(TRIES):
        told = nemesis(
            tmp_path, "--store", "postgres", "--seconds", "30", "--planted", mistake, "--faults", faults,
            "--clients", clients,
        )  # fmt: skip
        if told.get("found"):
            return
    pytest.fail("nothing was found")
