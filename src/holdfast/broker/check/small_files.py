"""The small files of a data folder that are no logs: what cannot be read of them, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from holdfast.broker.catalog import Catalog
from holdfast.broker.contents import CONTENTS, DEDUP, load_contents, root_cost_of, root_list_error
from holdfast.broker.dedup_check import damaged_dedup
from holdfast.broker.folder_key import KEY_FILE, key_is_whole
from holdfast.broker.groups import GroupNotes
from holdfast.broker.layout import QUERIES, SETTINGS, TOPIC, partition_folder, topic_folder, topics
from holdfast.broker.policy import kept_settings
from holdfast.broker.producers import Producers
from holdfast.broker.queries import list_queries
from holdfast.broker.sequences_file import load_snapshot
from holdfast.env import World
from holdfast.errors import BadSettings, CorruptData, UnknownFormat, UnknownTopic
from holdfast.storage.files import join

Note: TypeAlias = tuple[Literal["damage", "note"], str]


def damaged_notes(world: World, folder: str) -> Iterator[Note]:
    """What is damaged in the catalog, the settings, the notes of groups, producers and queries."""
    try:
        Producers.open(world, folder)
    except CorruptData as error:
        yield "damage", str(error)
    catalog = Catalog(world, folder)
    wrong = root_list_error(world, folder)
    if wrong and any(map(catalog.is_listed, catalog.names())):
        yield "damage", f"{wrong}; opening the folder makes it anew, but parts that are gone are not missed"
    elif wrong and not wrong.endswith("is missing"):
        yield "damage", wrong
    if not key_is_whole(world, folder):
        yield "damage", f"{join(folder, KEY_FILE)} is damaged: opening makes another one; {root_cost_of(KEY_FILE)}"
    for topic in topics(world, folder):
        try:
            count = catalog.facts(topic).partitions
            yield from _of_topic(world, folder, topic, count)
            yield from _facts(world, folder, topic, catalog)
            places = [partition_folder(folder, topic, number) for number in range(count)]
            for place in places:
                yield from _sequences(world, place)
            for place in (topic_folder(folder, topic), *places):
                yield from (("damage", what) for what in damaged_dedup(world, join(place, DEDUP)))
        except CorruptData as error:
            yield "damage", str(error)
        except UnknownTopic:
            continue  # deleted meanwhile
    yield from _queries(world, folder)


def _queries(world: World, folder: str) -> Iterator[Note]:
    """A running query's file is renewed all the time, and goes with it: nothing in it can be lost."""
    for query in list_queries(world, folder):
        if query.wrong:
            place = f"{QUERIES}/{query.file}"
            yield "note", f"{place} cannot be read: {query.wrong}; while it is there, no old message is removed"


def _facts(world: World, folder: str, topic: str, catalog: Catalog) -> Iterator[Note]:
    """`topic.json` and the list of parts: each is made anew from the other, and neither may be gone unnoticed."""
    place = topic_folder(folder, topic)
    again = "opening the topic makes it anew, and nothing is lost"
    listed = None
    try:
        listed = load_contents(world, folder, topic)
        if listed is None and catalog.is_listed(topic):
            yield "damage", f"{join(place, CONTENTS)} is missing: {again}, but parts that are gone are not missed"
    except CorruptData as error:
        yield "damage", f"{error}; {again}, but parts that are gone are not missed"
    try:
        if catalog.noted(topic) is None and listed is not None:
            yield "damage", f"{join(place, TOPIC)} is missing: {again}"
    except CorruptData as error:
        if listed is None:
            raise
        yield "damage", f"{error}: {again}"


def _of_topic(world: World, folder: str, topic: str, count: int) -> Iterator[Note]:
    place = topic_folder(folder, topic)
    try:
        kept_settings(world, join(place, SETTINGS))
    except (CorruptData, BadSettings) as error:
        yield "damage", str(error)
    notes = GroupNotes(world, place)
    for group in notes.names(count):
        try:
            notes.read(group)
        except CorruptData as error:
            yield "damage", str(error)


def _sequences(world: World, place: str) -> Iterator[Note]:
    """What is known of producers is a cache: where it is damaged, the log is read instead."""
    try:
        load_snapshot(world.disk, place, 0)
    except UnknownFormat as error:
        yield "damage", str(error)
    except CorruptData as error:
        yield "note", f"{error}; opening reads the log instead, and loses nothing but time"
