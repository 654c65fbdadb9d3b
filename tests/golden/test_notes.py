"""A folder whose owner was killed while leases and acks were only noted in the scratch file: they still count.

`notes-v1.tar.gz` is a queue of twelve messages. The first eight were got and acked, the ninth was leased, the tenth was
acked, all by the holder `golden`. The last of these steps are words in `scratch`, the others events in the journal.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

import holdfast
from holdfast.broker.check import check_folder
from holdfast.broker.inspect.status import replayed_group
from holdfast.broker.scratch import scratch_words
from holdfast.cli.main import main
from holdfast.env import real_world

ARCHIVE = Path(__file__).parent / "notes-v1.tar.gz"
EVENTS = 13  # in the journal: the end that its owner published counts only until the machine is started again


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "data"


def journal(data: Path) -> str:
    return str(data / "topics/data/0/groups/default")


def test_a_reader_sees_the_notes(data: Path):
    group = replayed_group(real_world(), journal(data), end=EVENTS).group
    assert (group.floor, list(group.leases), list(group.done)) == (8, [8], [9])
    assert group.leases[8].holder == "golden"
    assert check_folder(data).ok


def test_the_notes_count_when_the_folder_is_opened_and_are_erased(data: Path):
    with holdfast.open(data) as queue:
        assert (queue.stats().floor, queue.stats().ready + queue.stats().delayed) == (8, 3)
        assert not any(scratch_words(real_world(), journal(data)))
        assert [step.step for step in queue.history("data-0-9")] == ["published", "leased", "acked"]
    with holdfast.open(data) as queue:
        assert queue.stats().floor == 8


def test_a_repair_leaves_the_notes_alone(data: Path):
    (data / "topics/data/0/log" / "index.tmp").write_bytes(b"left behind")
    before = scratch_words(real_world(), journal(data))
    with pytest.raises(SystemExit) as ended:
        main(["repair", str(data), "--yes"])
    assert ended.value.code == 0
    assert scratch_words(real_world(), journal(data)) == before
    with holdfast.open(data) as queue:
        assert queue.stats().floor == 8
        assert [step.step for step in queue.history("data-0-9")] == ["published", "leased", "acked"]
