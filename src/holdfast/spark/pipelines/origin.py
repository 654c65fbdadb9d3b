"""Where the topics of a project are: in a data folder, in a store, or on a server.

What pipelines ask of topics before they read them. The messages themselves are read by the source, from any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.broker.folder.contents import settings_for
from holdfast.broker.folder.layout import topic_folder
from holdfast.broker.folder.stored import snapshot
from holdfast.client.opening import is_address
from holdfast.env import real_world
from holdfast.errors import UnknownTopic
from holdfast.local.opening import store_settings
from holdfast.spark.options import Subscription, required_path
from holdfast.spark.pipelines.spec import Context
from holdfast.spark.places import ServerPlace, access_of, server_place, stored_at
from holdfast.spark.ranges import DataFolder, PlanRequest, Range, from_json, sealed_ranges


class PartitionThere(msgspec.Struct, frozen=True, kw_only=True):
    """A partition of a topic: which offsets it has, and about how many bytes."""

    topic: str
    topic_id: int
    partition: int
    start: int
    end: int
    bytes: int
    compacted: bool


def folder_of(context: Context) -> DataFolder | None:
    """The data folder, which for a store is its state at this moment; None if the topics are on a server."""
    if is_address(context.folder):
        return None
    url = stored_at(context.folder)
    if url is None:
        return DataFolder(context.folder, context.world)
    world = real_world()
    return DataFolder(snapshot(url, store_settings(None), world).folder, world)


def partitions_there(context: Context, topics: Sequence[str]) -> list[PartitionThere]:
    """All partitions of these topics. Raises UnknownTopic if one does not exist."""
    folder = folder_of(context)
    if folder is None:
        return [each for topic in topics for each in _on_server(server_of(context), topic)]
    found = []
    for topic, number in folder.partitions(Subscription(names=tuple(topics))):
        reader = folder.reader(topic, number)
        settings = settings_for(folder.world, topic_folder(folder.path, topic), None, {})
        found.append(
            PartitionThere(
                topic=topic,
                topic_id=folder.topic_id(topic),
                partition=number,
                start=0 if reader is None else reader.start,
                end=0 if reader is None else reader.end,
                bytes=0 if reader is None else sum(segment.bytes for segment in reader.segments()),
                compacted="compact" in settings.cleanup,
            )
        )
    return found


def sealed_there(context: Context, topics: Sequence[str]) -> list[Range]:
    """What each partition of these topics has in front of the segment that is being written."""
    folder, subscription = folder_of(context), Subscription(names=tuple(topics))
    if folder is not None:
        return list(sealed_ranges(folder, subscription))
    options = {"subscribe": ",".join(topics)}
    return server_of(context).plan(PlanRequest(step="sealed", options=options)).ranges


def server_of(context: Context) -> ServerPlace:
    """The server that has the topics."""
    given = {"path": context.folder}
    access = access_of(given)
    assert access is not None, required_path(given)
    return server_place(access)


def _on_server(server: ServerPlace, topic: str) -> list[PartitionThere]:
    found = server.describe(topic)
    if found is None:
        raise UnknownTopic(
            f"there is no topic {topic} on {server.path}: `holdfast topic ls` lists those that there are"
        )
    return [
        PartitionThere(
            topic=topic,
            topic_id=found.id,
            partition=number,
            start=each.start,
            end=each.end,
            bytes=each.bytes,
            compacted="compact" in str(found.settings.get("cleanup", "")),
        )
        for number, each in enumerate(found.partitions)
    ]


def subscribed_on_server(context: Context, options: dict[str, str]) -> tuple[list[str], Any]:
    """The topics that these options of a stream mean, and the positions at which a new query would begin."""
    server = server_of(context)
    began = server.plan(PlanRequest(step="initial", options=options)).positions
    positions = from_json(began or {})
    return list(positions.topics), positions
