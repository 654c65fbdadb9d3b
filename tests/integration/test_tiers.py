"""Segments that move to real stores: SeaweedFS and PostgreSQL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.broker.engine import BrokerEngine
from holdfast.env.tier import open_url
from holdfast.settings import BrokerSettings, TopicSettings
from tests.integration.store_servers import postgres, seaweedfs

pytestmark = pytest.mark.slow

READ = """
import sys
from holdfast.storage import LogReader
print(sum(len(record.value) for record in LogReader(sys.argv[1]).records(0)))
"""


@pytest.fixture(params=[seaweedfs, postgres], ids=["seaweedfs", "postgresql"])
def place(request, tmp_path: Path, monkeypatch):
    with request.param(tmp_path) as (url, variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield url


def test_segments_move_to_a_real_store_are_read_by_another_process_and_go_with_their_topic(place: str, tmp_path: Path):
    topic = TopicSettings(segment_bytes=1 << 20, min_free_bytes=0, tier_after_bytes=0, durability="os")
    engine = BrokerEngine.open(tmp_path / "jobs", settings=BrokerSettings(tier=place, topic=topic))
    engine.create_topic("jobs")
    log = engine.open_topic("jobs").partitions[0].log
    size = 0
    while len(log.segments()) < 5:
        log.append([bytes(10_000)] * 10)
        size += 100_000
    engine.tiering.tick()
    assert len(list(Path(log.folder).glob("*.log"))) == 1
    assert sum(len(record.value) for record in log.records(0)) == size
    read = subprocess.run(
        [sys.executable, "-c", READ, log.folder], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(read.stdout) == size
    engine.delete_topic("jobs")
    engine.tiering.tick()
    engine.close()
    store, root = open_url(place)
    assert not list(store.keys(f"{root}tier/"))
    store.close()
