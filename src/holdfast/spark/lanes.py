"""Which lane a row takes: its topic and partition, and whether it goes straight into the log or the general way.

Within a task the rows of one lane keep their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.broker.catalog import Catalog
from holdfast.broker.layout import check_topic_name, topic_folder
from holdfast.broker.policy import settings_for
from holdfast.broker.routing import check_partition, partitions_for
from holdfast.codec.arrow_rows import Bytes, binary, encode_rows
from holdfast.codec.encode import Body, Packing
from holdfast.codec.murmur import murmur3_of
from holdfast.env import World
from holdfast.errors import InvalidRequest, UnknownTopic
from holdfast.settings import BrokerSettings, TopicSettings
from holdfast.spark.incoming import Incoming
from holdfast.spark.staging import Lane


class Target(msgspec.Struct, frozen=True):
    """A topic that is written to; id 0 while it is still to be made."""

    name: str
    id: int
    partitions: int
    settings: TopicSettings


class Targets:
    """The topics of a data folder, looked up once each. With `new_partitions` those that are missing will be made."""

    def __init__(self, world: World, root: str, settings: BrokerSettings, new_partitions: int | None) -> None:
        self._world = world
        self._root = root
        self._settings = settings
        self._new_partitions = new_partitions
        self._catalog = Catalog(world, root)
        self._known: dict[str, Target] = {}

    def find(self, name: str) -> Target:
        """The topic; UnknownTopic where there is none and none is to be made."""
        if name not in self._known:
            self._known[name] = self._look(check_topic_name(name))
        return self._known[name]

    def _look(self, name: str) -> Target:
        filed = self._settings.topics.get(name, {})
        if name in self._catalog:
            facts = self._catalog.facts(name)
            settings = settings_for(self._world, topic_folder(self._root, name), None, filed, self._settings.topic)
            return Target(name, facts.id, facts.partitions, settings)
        if self._new_partitions is None:
            there = ", ".join(self._catalog.names()[:10]) or "none yet"
            raise UnknownTopic(
                f"there is no topic {name} in {self._root} (there are: {there}); make it first, or let the write make "
                'it: .option("createTopics", "true").option("partitions", "4")'
            )
        settings = settings_for(self._world, "", None, filed, self._settings.topic)
        return Target(name, 0, self._new_partitions, settings)


class Router:
    """Turns record batches into bodies, each for its lane. `turn` says where rows without a key begin."""

    def __init__(self, world: World, targets: Targets, topic: str | None, turn: int) -> None:
        self._world = world
        self._targets = targets
        self._topic = topic
        self._turn = turn
        self._packings: dict[str, Packing] = {}

    def bodies(self, batch: pa.RecordBatch) -> Iterator[tuple[Lane, Body]]:
        """All rows of the batch."""
        for name, rows in self._by_topic(batch):
            yield from self._of_topic(self._targets.find(name), rows)

    def _by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if self._topic is not None:
            yield self._topic, batch
            return
        topics = batch.column("topic").dictionary_encode()
        if topics.null_count:
            raise InvalidRequest(f'{topics.null_count} rows have no topic; fill the column, or give the option "topic"')
        if len(topics.dictionary) == 1:
            yield topics.dictionary[0].as_py(), batch
            return
        for number, name in enumerate(topics.dictionary.to_pylist()):
            yield name, batch.filter(pc.equal(topics.indices, number))

    def _of_topic(self, target: Target, batch: pa.RecordBatch) -> Iterator[tuple[Lane, Body]]:
        now_ns = self._world.clock.now_ns()
        incoming = Incoming(batch, target.name, target.settings, now_ns // 1_000_000)
        lanes, general = self._partitions(incoming, target) * 2, incoming.is_general()
        if general is not None:
            lanes = lanes + general
        order = None if (lanes[1:] >= lanes[:-1]).all() else np.argsort(lanes, kind="stable")
        placed = lanes if order is None else lanes[order]
        rows = incoming.rows(order)
        cuts = [0, *(np.flatnonzero(np.diff(placed)) + 1).tolist(), incoming.count]
        for start, stop in pairwise(cuts):
            number = int(placed[start])
            lane = Lane(target.name, target.id, number >> 1, bool(number & 1))
            for body in encode_rows(
                rows,
                start,
                stop,
                now_ns,
                cap_bytes=target.settings.frame_bytes,
                packing=self._packing(target),
            ):
                yield lane, body

    def _partitions(self, incoming: Incoming, target: Target) -> npt.NDArray[np.int64]:
        """The partition of each row: the one that it names, else that of its key, else one in turn."""
        count = target.partitions
        wanted = incoming.column("partition")
        if count == 1 and wanted is None:
            return np.zeros(incoming.count, np.int64)
        found = _by_key(incoming.column("key"), incoming.count, count)
        free = found < 0
        if free.any():
            found[free] = self._in_turn(int(free.sum()), count)
        if wanted is not None:
            given = pc.is_valid(wanted).to_numpy(zero_copy_only=False)
            numbers = pc.fill_null(wanted, 0).to_numpy(zero_copy_only=False)
            for end in (int(numbers.min()), int(numbers.max())):
                check_partition(end, target.name, count)
            found = np.where(given, numbers, found).astype(np.int64)
        return found

    def _in_turn(self, rows: int, partitions: int) -> npt.NDArray[np.int64]:
        """Rows without a key, in runs as long as can be: each partition gets its share of every batch."""
        first, self._turn = self._turn, self._turn + 1
        return (np.arange(rows, dtype=np.int64) * partitions // rows + first) % partitions

    def _packing(self, target: Target) -> Packing:
        settings = target.settings
        if target.name not in self._packings:
            self._packings[target.name] = Packing.named(
                settings.codec,
                level=settings.codec_level,
                min_bytes=settings.codec_min_bytes,
                min_saving_percent=settings.codec_min_saving_percent,
                max_bytes=settings.max_raw_bytes,
            )
        return self._packings[target.name]


def _by_key(keys: Any, rows: int, partitions: int) -> npt.NDArray[np.int64]:
    """The partition of each key, as the library chooses it; -1 where there is none."""
    if keys is None:
        return np.full(rows, -1, np.int64)
    if not keys.null_count:
        laid_out = Bytes.of(binary(keys))
        hashes = murmur3_of(laid_out.ends, np.frombuffer(laid_out.data, np.uint8))
        if hashes is not None:
            return (hashes % np.uint32(partitions)).astype(np.int64)
    coded = binary(keys).dictionary_encode()
    of_key = np.array([*partitions_for(coded.dictionary.to_pylist(), partitions), -1], np.int64)
    which: npt.NDArray[np.int32] = pc.fill_null(coded.indices, len(of_key) - 1).to_numpy(zero_copy_only=False)
    return of_key[which]
