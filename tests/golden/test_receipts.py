"""Receipts and lease ids from before they were signed: whoever was at work during the upgrade settles as before.

`receipts-v1.tar.gz` is a data folder of the last version that made a receipt of numbers alone: the topic `orders`
with two partitions, messages leased by the groups `default` and `audit`, and the lock `nightly`, held by ann. All of
it was left detached. `expected.json` has what the holders were told.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import LeaseLost
from tests.integration.http_gear import serving

ARCHIVE = Path(__file__).parent / "receipts-v1.tar.gz"


class Old:
    """The folder, and what its holders know."""

    def __init__(self, folder: Path) -> None:
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
        self.data = folder / "data"
        self.expected: dict[str, Any] = json.loads((folder / "expected.json").read_text())


@pytest.fixture
def old(tmp_path: Path) -> Old:
    return Old(tmp_path)


def test_old_receipts_settle_the_messages_that_were_leased_before_the_upgrade(old: Old):
    with holdfast.open_broker(old.data) as broker:
        for name in ("default", "audit"):
            group = broker.group("orders", name)
            held = len(old.expected[name])
            assert group.stats().leased == held
            first, *others = old.expected[name]
            group.resume(first).extend(60)
            assert group.resume(first).receipt != first  # from now on it has one that cannot be made up
            for receipt in (first, *others):
                group.resume(receipt).ack()
                with pytest.raises(LeaseLost, match="it is done"):
                    group.resume(receipt)
            assert (group.stats().leased, group.stats().ready) == (0, 6 - held)


def test_old_receipts_are_good_over_http_one_by_one_or_together(old: Old):
    *others, first = old.expected["default"]
    short = first.removeprefix("orders-0-")  # receipts of partition 0 could be given without their place
    assert short != first
    with serving(old.data) as server:
        assert server.post("/v1/queues/orders/ack", {"receipts": [first, short]}).status == 200
        assert server.post("/v1/queues/orders/nack", {"receipts": others, "delay": 3600}).status == 200
        assert server.post("/v1/queues/orders/ack", {"receipts": [first]}).code == "lease_lost"
        stats = server.get("/v1/queues/orders/stats").body
        assert (stats["leased"], stats["delayed"], stats["ready"]) == (0, 3, 2)


def test_the_old_form_is_good_for_no_lease_of_today(old: Old):
    with holdfast.open_broker(old.data) as broker:
        group = broker.group("orders", "default")
        receipt = old.expected["default"][0]
        group.resume(receipt).defer()
        message = group.receive(timeout=0, detached=True)
        assert message.id == receipt.partition("@")[0]
        for text in (receipt, f"{message.id}@{message.fence:x}"):
            with pytest.raises(LeaseLost):
                group.resume(text)
        assert not message.lost
    with holdfast.open_broker(old.data) as broker:  # nor after a restart, when it is a lease of before
        with pytest.raises(LeaseLost):
            broker.group("orders", "default").resume(f"{message.id}@{message.fence:x}")
        broker.group("orders", "default").resume(message.receipt).ack()


def test_an_old_lease_id_keeps_its_lock_and_one_of_today_cannot_be_made_up(old: Old):
    with holdfast.open_broker(old.data) as broker:
        broker.documents.update("plan", 1, lock=old.expected["lease_id"])
        lock = broker.locks.keepalive(old.expected["lease_id"])
        assert (lock.owner, lock.fence) == ("ann", old.expected["fence"])
        broker.locks.keepalive(lock.lease_id)
        broker.locks.release(old.expected["lease_id"])
        lock = broker.locks.acquire("nightly")
        for text in (old.expected["lease_id"], f"nightly@{lock.fence:x}"):
            with pytest.raises(LeaseLost):
                broker.locks.release(text)
        assert broker.locks.describe("nightly").held
