"""Which topics a folder has: made and deleted by a rename, described by two small files."""

from __future__ import annotations

import pytest

from holdfast.broker.folder.contents import Catalog, TopicFacts
from holdfast.env import ManualClock, SeededIds, World
from holdfast.env.sim.disk import SimulatedDisk
from holdfast.errors import CorruptData, TopicExists, UnknownTopic
from holdfast.settings import TopicSettings
from tests.unit.brokers import FOLDER, Place

ROOT = "/data"
BASE = TopicSettings()


@pytest.fixture
def world() -> World:
    disk = SimulatedDisk()
    disk.make_folder(f"{ROOT}/topics")
    return World(clock=ManualClock(), disk=disk, ids=SeededIds(1))


def put_file(world: World, path: str, content: bytes) -> None:
    world.disk.make_folder(path.rpartition("/")[0])
    file = world.disk.open(path, write=True, create=True)
    file.write(0, [content])
    file.close()


def test_a_topic_is_its_folder(world):
    catalog = Catalog(world, ROOT)
    facts = catalog.create("orders", TopicSettings(partitions=3, max_attempts=9), BASE)
    assert facts == TopicFacts(facts.id, world.clock.now_ns() // 1_000_000, 3)
    assert catalog.names() == ["orders"]
    assert "orders" in catalog
    assert world.disk.names(f"{ROOT}/topics/orders") == ["contents", "settings.json", "topic.json"]
    assert Catalog(world, ROOT).facts("orders") == facts


def test_two_topics_of_one_name_one_after_the_other_have_different_ids(world):
    catalog = Catalog(world, ROOT)
    first = catalog.create("orders", BASE, BASE)
    catalog.delete("orders")
    assert catalog.names() == world.disk.names(f"{ROOT}/topics") == []
    assert catalog.create("orders", BASE, BASE).id != first.id


def test_one_that_is_there_is_not_made_and_one_that_is_not_there_is_not_deleted(world):
    catalog = Catalog(world, ROOT)
    catalog.create("orders", BASE, BASE)
    with pytest.raises(TopicExists, match="orders"):
        catalog.create("orders", BASE, BASE)
    for call in (catalog.facts, catalog.delete, lambda name: catalog.grow(name, 3)):
        with pytest.raises(UnknownTopic, match=r"no topic mails in /data; known topics: orders"):
            call("mails")


def test_a_topic_that_grew_is_the_same_topic(world):
    catalog = Catalog(world, ROOT)
    facts = catalog.create("orders", BASE, BASE)
    assert catalog.grow("orders", 5) == TopicFacts(facts.id, facts.created_ms, 5)
    assert catalog.facts("orders").partitions == 5


def test_a_folder_from_before_facts_were_noted_is_a_topic_with_one_partition(world):
    world.disk.make_folder(f"{ROOT}/topics/old/0/log")
    assert Catalog(world, ROOT).facts("old") == TopicFacts(0, 0, 1)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"partitions": "x"}', b"\xff\xfe", b"null"])
def test_a_spoiled_note_is_named_and_nothing_is_guessed(world, content):
    catalog = Catalog(world, ROOT)
    facts = catalog.create("orders", BASE, BASE)
    put_file(world, f"{ROOT}/topics/orders/topic.json", content.ljust(120))
    assert catalog.facts("orders") == facts  # the list of its parts has a copy
    with pytest.raises(CorruptData, match=r"topics/orders/topic\.json"):
        catalog.noted("orders")
    world.disk.remove(f"{ROOT}/topics/orders/contents")
    with pytest.raises(CorruptData, match=r"topics/orders/topic\.json"):
        catalog.facts("orders")


def test_what_was_left_half_made_or_half_deleted_is_removed_with_its_dead_letters(world):
    catalog = Catalog(world, ROOT)
    catalog.create("orders", BASE, BASE)
    for name in ("orders.dlq", "gone.dlq", "half.dlq"):
        put_file(world, f"{ROOT}/topics/{name}/0/log/x", b"x")
    put_file(world, f"{ROOT}/topics/.new-half-0/topic.json", b"")
    put_file(world, f"{ROOT}/topics/.gone-gone-7/0/log/x", b"")
    put_file(world, f"{ROOT}/topics/.gone-orders-9/0/log/x", b"")  # an earlier one of that name
    put_file(world, f"{ROOT}/topics/.git/x", b"")
    catalog.tidy()
    # What is not ours is left alone, and so are the letters of a topic that is there.
    assert world.disk.names(f"{ROOT}/topics") == [".git", "half.dlq", "orders", "orders.dlq"]
    assert catalog.names() == ["orders"]


def test_files_of_others_are_no_topics(world):
    for name in ("orders.dlq", "__traces", ".hidden", "no such"):
        world.disk.make_folder(f"{ROOT}/topics/{name}")
    assert Catalog(world, ROOT).names() == []


@pytest.mark.parametrize("damaged", ["topic.json", "settings.json", "groups/billing.json"])
def test_a_topic_whose_files_are_spoiled_does_not_keep_the_others_from_working(damaged):
    place = Place()
    place.broker.create_topic("orders", max_attempts=9)
    place.broker.group("orders", "billing", max_attempts=2)
    place.broker.create_topic("mails")
    place.broker.close()
    path = f"{FOLDER}/topics/orders/{damaged}"
    place.disk.flip(path, 0)
    place.broker = place.open()
    assert place.broker.topics() == ["mails", "orders"]
    place.broker.publish("mails", b"x")
    if damaged == "settings.json":
        with pytest.raises(CorruptData, match=damaged):
            place.broker.publish("orders", b"x")
        place.disk.flip(path, 0)  # somebody has mended it
    assert place.broker.publish("orders", b"x").offset == 0
    if damaged == "groups/billing.json":
        with pytest.raises(CorruptData, match=damaged):
            place.broker.group("orders", "billing")
