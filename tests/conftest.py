"""What every test may use: the option --long, the fixtures `long` and `scale`, Hypothesis profiles."""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import TypeVar
from unittest.mock import patch
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

from holdfast.broker import scratch

T = TypeVar("T")

_LOADED_IN_THREADS = ("holdfast.server", "holdfast.remote", "holdfast.local", "holdfast.worker", "holdfast.cli")

LONG_TIMEOUT_S = 6 * 3600
_finished = count(1)

# No deadline: a busy machine is not a bug. A failure prints the blob that reproduces it. At a desk the stories are
# new ones each time; where CI judges a change, they are the same as for the change before.
_COMMON = settings(
    deadline=None,
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("quick", _COMMON, max_examples=25, stateful_step_count=25)
settings.register_profile("default", _COMMON, max_examples=100, stateful_step_count=50)
settings.register_profile("long", _COMMON, max_examples=5_000, stateful_step_count=200)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="run the long soaks: thousands of kills, millions of cut states (hours, not minutes)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts what runs in its background with SIGINT ignored, and children inherit that: no test of an
    # interrupted command could pass there.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # pytest parses each module of a package that has a plugin when it is first imported, and CPython 3.11 sometimes
    # fails to do so in two threads at once: an owner's thread would load its server while a test loads something else.
    importlib.import_module("holdfast.client.spark_commits")
    for package in map(importlib.import_module, _LOADED_IN_THREADS):
        for _, name, _ in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            with suppress(ImportError):  # of an extra that is not installed
                importlib.import_module(name)
    chosen = config.getoption("--hypothesis-profile")
    settings.load_profile(chosen or ("long" if config.getoption("--long") else "default"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))


def pytest_collection_finish() -> None:
    skip_what_lives_in_collections()


def pytest_runtest_logfinish() -> None:
    if next(_finished) % 50 == 0:
        skip_what_lives_in_collections()


def skip_what_lives_in_collections() -> None:
    """Take tests, reports and what modules keep out of later garbage collections.

    They are millions of objects in a whole run, and looking through them took a third of its CPU time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _notes_from_the_first_lease(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let every second test of crashes and properties note leases and acks at once; most are too short otherwise."""
    name = request.node.nodeid
    if name.startswith(("tests/crash/", "tests/property/")) and crc32(name.encode()) % 2:
        with patch.object(scratch, "_STEADY", 0):
            yield
    else:
        yield


@pytest.fixture(scope="session")
def long(request: pytest.FixtureRequest) -> bool:
    """Whether this is a long run (`--long`)."""
    return bool(request.config.getoption("--long"))


@pytest.fixture(scope="session")
def scale(long: bool) -> Callable[[T, T], T]:
    """`scale(200, 10_000)` is 200 in a usual run and 10,000 in a long one."""
    return lambda usual, in_a_long_run: in_a_long_run if long else usual
