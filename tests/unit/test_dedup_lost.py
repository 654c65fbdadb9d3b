"""A message that is damaged or missing does not keep its copy out, although its dedup id is known."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast

DAY_S = 86_400


def put_all(folder: Path, delay: float) -> list[bool]:
    """Put the same five messages; returns which of them are duplicates."""
    with holdfast.open(folder, min_free_bytes=0) as queue:
        return [queue.put(b"message %d" % i, dedup_id=f"id {i}", delay=delay).duplicate for i in range(5)]


def messages_file(folder: Path, delay: float) -> Path:
    (path,) = folder.glob(f"topics/*/0/{'delayed/intake' if delay else 'log'}/*.log")
    return path


@pytest.mark.parametrize("delay", [0, DAY_S])
def test_the_copy_of_a_message_that_is_missing_at_the_end_is_stored(tmp_path, delay, caplog):
    assert not any(put_all(tmp_path / "jobs", delay))
    file = messages_file(tmp_path / "jobs", delay)
    file.write_bytes(file.read_bytes().rstrip(b"\0")[:-20])
    assert put_all(tmp_path / "jobs", delay) == [True, True, True, True, False]
    assert "synced messages are missing from the end" in caplog.text
    assert all(put_all(tmp_path / "jobs", delay))
    with holdfast.open(tmp_path / "jobs") as queue:
        assert (queue.stats().delayed if delay else queue.stats().ready) >= 5


@pytest.mark.parametrize("delay", [0, DAY_S])
def test_the_copy_of_a_damaged_message_is_stored(tmp_path, delay, caplog):
    assert not any(put_all(tmp_path / "jobs", delay))
    file = messages_file(tmp_path / "jobs", delay)
    file.write_bytes(file.read_bytes().replace(b"message 2", b"massage 2"))
    assert put_all(tmp_path / "jobs", delay) == [True, True, False, True, True]
    assert all(put_all(tmp_path / "jobs", delay))


def test_the_copy_of_a_message_that_was_handled_and_removed_is_a_duplicate(tmp_path):
    assert not any(put_all(tmp_path / "jobs", 0))
    with holdfast.open(tmp_path / "jobs") as queue:
        queue.ack_many(queue.get_many(5))
        queue.compact()
        assert queue.stats().start == 5
    assert all(put_all(tmp_path / "jobs", 0))
