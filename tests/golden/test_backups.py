"""Backups as earlier releases stored them, plain and encrypted, are restored.

`backups.tar.gz` holds two places, `plain` (lists of version 1) and `encrypted` (version 2), each with a backup of the
queue `jobs`: b"second", acked, 70,000 bytes of "x", and b"third"; its segment is a piece. The key is in `key`.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

import holdfast

ARCHIVE = Path(__file__).parent / "backups.tar.gz"


@pytest.mark.parametrize("kind", ["plain", "encrypted"])
def test_a_backup_of_each_version_is_restored(kind: str, tmp_path: Path):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    key = tmp_path / "key" if kind == "encrypted" else None
    [version] = {path.read_bytes()[4] for path in (tmp_path / kind / "backup").iterdir()}
    assert version == {"plain": 1, "encrypted": 2}[kind]
    verified = holdfast.verify(tmp_path / kind, key_file=key)
    assert (verified.ok, verified.messages) == (True, 3)
    holdfast.restore(tmp_path / kind, tmp_path / "jobs", key_file=key)
    with holdfast.open(tmp_path / "jobs") as queue:
        found = queue.receive_many(9, timeout=0)
        assert [message.body for message in found] == [b"x" * 70_000, b"third"]
        for message in found:
            message.ack()
    made = holdfast.backup(tmp_path / "jobs", tmp_path / kind, key_file=key)  # and it goes on from there
    assert made.number == 2
    assert holdfast.verify(tmp_path / kind, at=2, key_file=key).ok
