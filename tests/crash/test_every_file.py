"""Every kind of file in a data folder, damaged in every way: either nothing is lost, or a check names it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.broker.check import check_folder
from holdfast.broker.check.folder import FolderReport

Damage = Callable[[Path], None]


def flip(at: float) -> Damage:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[min(int(len(content) * at), len(content) - 1)] ^= 1
        path.write_bytes(content)

    return flip


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES: dict[str, Damage] = {
    "removed": Path.unlink,
    "emptied": lambda path: path.write_bytes(b"") and None,
    "halved": halve,
    "first byte": flip(0),
    "early": flip(0.2),
    "middle": flip(0.5),
    "late": flip(0.8),
    "last byte": flip(1),
}
# The owner's own, for as long as it lives.
PASSING = {"lock", "owner.sock"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has one of everything."""
    folder = tmp_path_factory.mktemp("whole") / "data"
    for _ in range(2):  # then there is a snapshot before, too
        with holdfast.open_broker(folder, durability="os") as broker:
            if "orders" not in broker.topics():
                broker.create_topic("orders", partitions=2, lease_ms=60_000, trace_sample=1.0, segment_messages=4)
            for n in range(8):
                broker.publish("orders", b"%d" % n, partition=n % 2, key="k")
            broker.publish("orders", b"later", partition=0, delay=3600)
            broker.publish("orders", b"once", partition=0, dedup_id="x")
            group = broker.group("orders", "billing", max_attempts=7)
            for message in group.receive_many(4):
                message.ack()
            group.receive().reject("no")
            assert group.resume(group.receive(detached=True).receipt)
            with broker.consumer("orders", group="analytics", auto_commit=False) as consumer:
                consumer.poll(timeout=5)
                consumer.commit()
            with broker.producer(name="loader") as producer:
                producer.send("orders", b"sent", partition=1)
            broker.locks.acquire(f"lock-{len(broker.locks.list())}", owner="a", lease=3600, wait=0)
            broker.documents.update("state", {"row": 7})
    return folder


def seen(folder: Path) -> dict[str, Any]:
    """All that users can see of a folder."""
    with holdfast.open_broker(folder) as broker:
        engine = broker._port.engine
        topic = engine.topic("orders")
        group = broker.group("orders", "billing")
        found = {
            "topics": broker.topics(),
            "facts": (topic.id, topic.created_ms, topic.settings),
            "messages": [[each.raw for each in broker.read("orders", partition=n)] for n in range(2)],
            "delayed": [partition.delayed and len(partition.delayed) for partition in topic.partitions],
            "billing": (group.committed(), group.stats().ready, group.settings if hasattr(group, "settings") else 0),
            "attempts": topic.groups["billing"].settings.max_attempts,
            "dead": [letter.raw for letter in group.dead.list()],
            "analytics": [(e.place, e.offset) for e in engine.streams.group("analytics").offsets.entries()],
            "locks": [lock.name for lock in broker.locks.list()],
            "document": broker.documents.get("state").value,
            "producers": engine.producers()._names,
            "key": engine.key.get(),
            "traces": len(broker.trace("orders-0-0")),
            "sequences": [sorted(partition.open_sequences()._entries) for partition in topic.partitions],
        }
        found["again"] = broker.publish("orders", b"once", partition=0, dedup_id="x").duplicate
        return found


def named(report: FolderReport) -> bool:
    return bool(not report.ok or report.notes or any(part.log.findings for part in report.parts))


def files_of(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in PASSING:
            yield str(path.relative_to(folder))


def test_a_whole_folder_is_whole_and_has_everything(whole):
    report = check_folder(whole)
    assert report.ok, report
    kinds = {Path(name).name for name in files_of(whole)}
    assert {"contents", "topic.json", "settings.json", "producers", "receipts.key", "manifest", "snapshot"} <= kinds
    assert {"snapshot.before", "state", "epochs", "billing.json"} <= kinds
    assert any(name.endswith(".ids") for name in kinds)


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_whatever_is_damaged_nothing_is_lost_or_a_check_names_it(whole, tmp_path, damage):
    before = seen(shutil.copytree(whole, tmp_path / "before"))
    silent = []
    for name in files_of(whole):
        copy = tmp_path / "copy"
        shutil.copytree(whole, copy)
        if (copy / name).stat().st_size:
            DAMAGES[damage](copy / name)
            if not named(check_folder(copy)):
                try:
                    after = seen(copy)
                except Exception as error:
                    after = {"error": repr(error)}
                if after != before:
                    silent.append((name, {key: value for key, value in after.items() if before.get(key) != value}))
        shutil.rmtree(copy)
    assert silent == []
