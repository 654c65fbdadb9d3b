"""Dedup ids from when each partition had an index of its own: they hold for the whole topic after the upgrade.

`dedup-v1.tar.gz` is a data folder of the last such version: the topic `orders` with three partitions and ids that were
saved in runs (`saved-*`, and `later-*` with delayed messages) or stood in the logs alone when the process was killed
(`killed-*`). `expected.json` has the id and the partition of each message.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest

import holdfast

ARCHIVE = Path(__file__).parent / "dedup-v1.tar.gz"
OLD = [f"topics/orders/{number}/dedup" for number in range(3)]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def check(old: Path) -> None:
    """Every id is known, with a key that leads to another partition for most."""
    told = json.loads((old / "expected.json").read_text())
    with holdfast.open_broker(old / "data") as broker:
        for dedup_id, (message_id, partition) in told.items():
            again = broker.publish("orders", b"again", key="another", dedup_id=dedup_id)
            assert (again.duplicate, again.id, again.partition) == (True, message_id, partition)
        assert not broker.publish("orders", b"new", dedup_id=f"new {os.urandom(8).hex()}").duplicate


def test_the_windows_of_all_partitions_become_one(old: Path):
    check(old)
    assert not [folder for folder in OLD if (old / "data" / folder).exists()]
    check(old)


def test_a_crash_before_the_merged_run_is_in_place_changes_nothing(old: Path):
    (old / "data/topics/orders/dedup").mkdir(mode=0o700)
    (old / "data/topics/orders/dedup/run.tmp").write_bytes(b"cut short")
    check(old)


def test_a_crash_before_the_old_ones_are_removed_is_finished(old: Path, tmp_path: Path):
    shutil.copytree(old / "data", tmp_path / "before")
    check(old)
    shutil.copytree(tmp_path / "before" / OLD[1], old / "data" / OLD[1])
    check(old)
    assert not (old / "data" / OLD[1]).exists()
