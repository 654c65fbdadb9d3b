"""Two owners of one folder in a store, of which one sleeps past its lease: the mistakes that this would show are found.

Each story is told twice: as it is, when no check finds anything, and with a mistake planted, when one must.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import locking
from holdfast.env.chain import ownership
from holdfast.env.chain.chain import Chain
from holdfast.env.chain.engines import MemoryStore
from holdfast.errors import HoldfastError
from holdfast.settings import BrokerSettings
from tests.nemesis.checks import Left, check_all
from tests.nemesis.history import Recorder, Result, read_history

pytestmark = pytest.mark.slow

LOCK, DOCUMENT = "nemesis-lock-0", "nemesis-document-0"


ASLEEP: list[Chain] = []


@pytest.fixture(autouse=True)
def _sleepers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tick = Chain.tick
    monkeypatch.setattr(Chain, "tick", lambda self: None if self in ASLEEP else tick(self))
    yield
    ASLEEP.clear()


class Machine:
    """A machine that may own the folder, and a client of it that records what it was told."""

    def __init__(self, folder: Path, name: str, closing: ExitStack) -> None:
        settings = BrokerSettings(
            store_cache_dir=str(folder / name), store_lease_ms=1_000, store_wait_ms=60_000, store_send_ms=50
        )
        self.broker = holdfast.open_broker(f"memory://{folder.name}/jobs", settings=settings, share=False)
        closing.callback(self._close)
        self.record = Recorder(folder / "history", name)
        closing.callback(self.record.close)

    def _close(self) -> None:
        with suppress(HoldfastError):  # it is not the owner any more
            self.broker.close()

    def sleep(self) -> None:
        """Do no more to show that it lives."""
        ASLEEP.append(self.broker._port.engine.store)

    def get(self, name: str = DOCUMENT) -> None:
        with self.record.call("get", name) as call:
            found = self.broker.documents.get(name)
            call.out = {"value": found and found.value, "version": found.version if found else 0}

    def update(self, value: str, name: str = DOCUMENT, **more: Any) -> Any:
        lock = more.pop("lock", None)
        given = {"value": value, **more, **({} if lock is None else {"fence": lock.fence})}
        with self.record.call("update", name, **given) as call:
            made = self.broker.documents.update(name, value, lock=lock, **more)
            call.out = {"version": made.version}
            return made

    def acquire(self, lease: float) -> Any:
        with self.record.call("acquire", LOCK, lease=lease) as call:
            lock = self.broker.locks.acquire(LOCK, lease=lease, wait=20)
            call.out = {"fence": lock.fence}
            return lock


@contextmanager
def machines(folder: Path) -> Iterator[Callable[[str], Machine]]:
    with ExitStack() as closing:
        yield lambda name: Machine(folder, name, closing)


def read_from_a_sleeper(folder: Path) -> None:
    with machines(folder) as machine:
        first = machine("first")
        first.update("old", version=0)
        first.sleep()
        machine("second").update("new")
        first.get()


def write_by_a_sleeper(folder: Path) -> None:
    with machines(folder) as machine:
        first = machine("first")
        made = first.update("old", version=0)
        first.sleep()
        second = machine("second")
        second.update("new", version=made.version)
        first.update("other", version=made.version)
        second.get()


def write_without_the_lock(folder: Path) -> None:
    with machines(folder) as machine:
        first = machine("first")
        lock = first.acquire(lease=1)
        first.update("mine", LOCK, lock=lock)
        first.acquire(lease=30)  # it waits until the other one is over
        first.update("late", LOCK, lock=lock)


def found_in(folder: Path) -> dict[str, list[str]]:
    events = read_history(folder / "history")
    assert any(event.result is Result.OK for event in events)
    return check_all([event for event in events if event.error != "disk_failed"], Left())


def skip_lease_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chain, "is_current", lambda self: True)


def ignore_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    create = MemoryStore.create

    def overwrite(self: MemoryStore, key: str, content: bytes) -> bool:
        self.remove(key)
        return create(self, key, content)

    monkeypatch.setattr(MemoryStore, "create", overwrite)
    monkeypatch.setattr(ownership, "probe", lambda *_: None)


def skip_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    allow = locking._allow
    monkeypatch.setattr(
        locking, "_allow", lambda table, name, expected, _, now: allow(table, name, expected, None, now)
    )


STORIES = [
    (read_from_a_sleeper, skip_lease_check),
    (write_by_a_sleeper, ignore_condition),
    (write_without_the_lock, skip_fence),
]


@pytest.mark.parametrize(("story", "plant"), STORIES)
def test_as_it_is_nothing_is_found(tmp_path: Path, story: Callable[[Path], None], plant: object):
    story(tmp_path)
    assert found_in(tmp_path) == {}


@pytest.mark.parametrize(("story", "plant"), STORIES)
def test_a_planted_mistake_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, story: Callable[[Path], None], plant: Callable[..., None]
):
    plant(monkeypatch)
    story(tmp_path)
    assert "linearizable" in found_in(tmp_path)
