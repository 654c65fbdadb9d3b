"""Spark's sink on a folder in a store: whoever owns the folder brings the staged rows in."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import holdfast
from holdfast import Busy
from holdfast.env import real_world
from holdfast.errors import DiskFailed, Unavailable
from holdfast.settings import BrokerSettings
from holdfast.spark import commits, stored_sink
from holdfast.spark.source import HoldfastSink, StagedRows, Task, WriteOptions
from holdfast.spark.stored_sink import stored_topics
from tests.unit.sinks import batch_of


class Machine:
    """A machine with a cache of its own, and what Spark does there."""

    def __init__(self, home: Path, name: str) -> None:
        self.url = f"file://{home}/store/shop"
        self.store = home / "store/shop"
        self.settings = BrokerSettings(store_cache_dir=str(home / name), store_lease_ms=1_000, store_wait_ms=20_000)

    def broker(self) -> holdfast.Broker:
        return holdfast.open_broker(self.url, settings=self.settings)

    def sink(self, topic: str | None = "orders", **more: int) -> HoldfastSink:
        options = {"new_partitions": None, "owner_wait_ms": 20_000, **more}
        stored = stored_topics(self.url, self.settings, topic)
        return HoldfastSink(WriteOptions(path=self.url, topic=topic, settings=self.settings, stored=stored, **options))

    def stage(self, *values: bytes, task: int = 0, batch: int = 0) -> StagedRows:
        return self.sink().stage(iter([batch_of(list(values))]), "query", batch, Task(task, 0))

    def commit(self, *staged: StagedRows) -> None:
        self.sink().commit(list(staged), kept=True, streaming=True)

    def staged(self) -> list[str]:
        return [str(path) for path in self.store.glob("staged/**/*") if path.is_file()]

    def bodies(self) -> list[bytes]:
        with self.broker() as broker:
            return [each.body for each in broker.read("orders")]


@pytest.fixture
def here(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path, "here")
    with machine.broker() as broker:
        broker.create_topic("orders")
    return machine


def test_rows_are_committed_while_nobody_owns_the_folder_and_are_there_once(here: Machine, tmp_path: Path) -> None:
    elsewhere = Machine(tmp_path, "elsewhere")  # where tasks run
    staged = [elsewhere.stage(b"a", b"b"), elsewhere.stage(b"c", task=1)]
    assert len(here.staged()) == 2
    for _ in range(2):  # the driver may ask again
        here.commit(*staged)
    assert here.staged() == []
    assert elsewhere.bodies() == [b"a", b"b", b"c"]


def test_an_owner_of_this_machine_brings_rows_in(here: Machine) -> None:
    with here.broker() as broker:
        broker.publish("orders", b"before")
        staged = here.stage(b"a", b"b")
        for _ in range(2):
            here.commit(staged)
        broker.publish("orders", b"after")
        assert [each.body for each in broker.read("orders")] == [b"before", b"a", b"b", b"after"]
    assert here.staged() == []


def test_an_owner_elsewhere_is_named_and_nothing_is_written(here: Machine, tmp_path: Path) -> None:
    staged = here.stage(b"a")
    with Machine(tmp_path, "elsewhere").broker() as broker:
        with pytest.raises(Busy, match=r'is owned by process .*"path" the address of its server'):
            here.sink(owner_wait_ms=200).commit([staged], kept=True, streaming=True)
        assert list(broker.read("orders")) == []
    here.commit(staged)
    assert here.bodies() == [b"a"]


@pytest.mark.parametrize("shared", [False, True], ids=["own", "through the owner"])
def test_a_commit_that_is_interrupted_is_finished_on_another_machine(
    here: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    def fail(*given: object, **more: object) -> None:
        raise DiskFailed("the machine stops here")

    staged = here.stage(b"a", b"b")
    with monkeypatch.context() as patch:
        patch.setattr(commits, "_carry_out", fail)
        if shared:
            with here.broker(), pytest.raises(DiskFailed):
                here.commit(staged)
        else:
            with pytest.raises(DiskFailed):
                here.commit(staged)
    here.sink().abort([staged])
    assert here.staged() == []
    elsewhere = Machine(tmp_path, "elsewhere")
    again = elsewhere.stage(b"b", b"a")  # Spark runs the batch again, in another order
    elsewhere.commit(again)
    assert here.bodies() == [b"a", b"b"]


def test_what_was_given_up_is_removed_at_once_or_after_a_week(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    here.sink().abort([here.stage(b"a")])
    assert here.staged() == []
    left = here.stage(b"left by a driver that died", batch=5)
    here.commit(here.stage(b"b", batch=1))
    assert len(here.staged()) == 1
    [path] = here.staged()
    name = left.files[0].name
    week_ago = real_world().clock.now_ns() // 1_000_000 - 8 * 24 * 3_600_000
    old = name.replace(f"-{commits.staged_since_ms(name)}-", f"-{week_ago}-")
    Path(path).parent.rename(Path(path).parent.with_name(old))
    here.commit(here.stage(b"c", batch=2))
    assert here.staged() == []
    assert here.bodies() == [b"b", b"c"]


def test_a_large_file_is_put_in_pieces_and_a_missing_one_stops_the_commit(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_sink, "_PIECE_BYTES", 1 << 20)
    values = [b"%06d" % number * 8_000 for number in range(90)]
    staged = here.stage(*values)
    pieces = sorted(here.staged())
    assert len(pieces) >= 4
    content = Path(pieces[-1]).read_bytes()
    Path(pieces[-1]).unlink()
    with pytest.raises(Unavailable, match=r"they were removed, .* Nothing was written"):
        here.commit(staged)
    assert here.bodies() == []
    Path(pieces[-1]).write_bytes(content)
    here.commit(staged)
    assert here.bodies() == values


def test_topics_are_made_and_missing_ones_are_named(here: Machine) -> None:
    writer = here.sink("new", new_partitions=2)
    staged = writer.stage(iter([batch_of([b"a"])]), "query", 0, Task(0, 0))
    writer.commit([staged], kept=True)
    with here.broker() as broker:
        assert broker.describe_topic("new").messages == 1
    with pytest.raises(holdfast.UnknownTopic, match=r"there is no topic nothing in file://.*createTopics"):
        here.sink("nothing").stage(iter([batch_of([b"a"])]), "query", 1, Task(0, 0))


def test_what_tasks_are_told_has_no_password(here: Machine) -> None:
    stored = msgspec.structs.replace(here.sink()._options.stored, url="postgresql://user:sesame@host/db/shop")
    assert "sesame" not in repr(stored)
