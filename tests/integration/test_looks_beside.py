"""Dead letters, delayed messages, groups and damage, seen again and again beside an owner that changes all of them."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.broker.inspect.messages import damage_in, letters_of, waiting_beside
from holdfast.broker.inspect.status import FolderStatus
from holdfast.env import real_world

pytestmark = [pytest.mark.slow, pytest.mark.serial]

OWNER = """
import itertools, sys
import holdfast

with holdfast.open_broker(sys.argv[1], durability="os") as broker:
    broker.create_topic("orders", segment_bytes=4096, frame_bytes=1024, snapshot_events=100)
    group = broker.group("orders", "billing")
    for number in range(10):
        broker.publish("orders", b"far %d" % number, delay=3600)
    store = broker._port.engine.open_topic("orders").partitions[0].delayed
    print("ready", flush=True)
    for number in itertools.count():
        body = b"%d " % number * 20
        broker.publish("orders", body)
        broker.publish("orders", b"soon " + body, delay=0.02)
        for message in group.receive_many(10, timeout=0):
            if message.body.startswith(b"soon") or number % 3:
                message.ack()
            else:
                message.reject("no")
        if number % 20 == 0:
            group.dead.purge(limit=5)
            group.dead.redrive([letter.id for letter in group.dead.list(limit=2)])
            store.spill(0)
            group.compact()
"""


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[str]:
    """A folder with an owner at work, which nothing here may disturb."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        yield str(tmp_path)
        assert owner.poll() is None, "the owner has ended"
    finally:
        owner.kill()
        owner.wait()
        if owner.stdout is not None:
            owner.stdout.close()


def whole(body: bytes) -> bool:
    words = body.removeprefix(b"soon ").split()
    return len(words) == 20 and len(set(words)) == 1


def test_everything_that_is_seen_is_whole_and_nothing_is_seen_twice(owned, scale):
    world, until = real_world(), time.monotonic() + scale(3, 30)
    for looks in itertools.count(1):
        letters = list(letters_of(world, owned, "orders", 0))
        offsets = [letter.record.offset for letter in letters]
        assert offsets == sorted(set(offsets))
        assert all(whole(letter.record.value) for letter in letters)
        waiting = list(waiting_beside(world, f"{owned}/topics/orders/0"))
        assert len({message.id for message in waiting}) == len(waiting)
        assert {message.id for message in waiting} >= set(range(10))
        assert all(whole(message.record.value) for message in waiting if message.id >= 10)
        (group,) = FolderStatus(world, owned).groups()
        assert group.wrong == ()
        assert group.lag <= 200
        assert list(damage_in(world, f"{owned}/topics/orders/0/log")) == []
        if time.monotonic() > until and looks > 5:
            return
