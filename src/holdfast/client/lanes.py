"""Lanes: publishing that may be repeated. Each has an identity and counts what it sends to each partition.

One request at a time goes by a lane. If its answer is lost, the same messages go again with the same numbers, and the
server knows them: whatever was stored is not stored a second time, also when the server was killed in between.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from holdfast.client.calling import Caller, packed
from holdfast.client.http import Ask, path_of
from holdfast.errors import Fenced, InvalidRequest, OutOfSequence
from holdfast.model import CodecName, Durability
from holdfast.protocol.messages import Batch
from holdfast.protocol.topics import BeginProducer, ProducerBegun, Written

_NUMBERS: Final = 2**32


class Lane:
    """One identity, and the number of its next message for each partition."""

    def __init__(self, begun: ProducerBegun) -> None:
        self.id = begun.id
        self.epoch = begun.epoch
        self.sequences: dict[tuple[str, int], int] = {}
        self.paths: dict[tuple[str, int, Durability | None, CodecName | None], str] = {}  # but for the sequence


class Lanes:
    """As many lanes as there are requests at a time. Safe to use from any thread, or any task."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._free: deque[Lane] = deque()

    def disown(self) -> None:
        """In a child after a fork: the lanes are the parent's."""
        self._free = deque()

    async def append(
        self,
        topic: str,
        number: int,
        batch: Batch,
        durability: Durability | None,
        codec: CodecName | None,
    ) -> Written:
        """Store the messages in the partition, once."""
        count, body = len(batch.messages) or len(batch.bodies), packed(batch)
        lane = await self._lane()
        for attempt in (1, 2):
            try:
                written = await self._append(lane, topic, number, body, durability, codec)
            except (OutOfSequence, Fenced):
                # Nothing of this was stored: had it been, the server would know it. It has forgotten the lane,
                # or lost what came before by it in a power cut. The lane is given up.
                if attempt == 2:
                    raise
                lane = await self._begin()
                continue
            except InvalidRequest as error:
                if not getattr(error, "repeated", False):
                    self._free.append(lane)  # refused, and not stored: the numbers are free
                raise
            place = topic, number
            lane.sequences[place] = (lane.sequences.get(place, 0) + count) % _NUMBERS
            self._free.append(lane)
            return written
        raise AssertionError

    async def _append(
        self,
        lane: Lane,
        topic: str,
        number: int,
        body: bytes,
        durability: Durability | None,
        codec: CodecName | None,
    ) -> Written:
        way = topic, number, durability, codec
        path = lane.paths.get(way)
        if path is None:
            path = lane.paths[way] = path_of(
                "topics",
                topic,
                "partitions",
                number,
                "append",
                producer=lane.id,
                epoch=lane.epoch,
                durability=durability,
                codec=codec,
            )
        path = f"{path}&sequence={lane.sequences.get((topic, number), 0)}"
        written: Written = await self._caller.call(Ask(method="POST", path=path, body=body, answers=Written))
        return written

    async def _lane(self) -> Lane:
        try:
            return self._free.pop()
        except IndexError:
            return await self._begin()

    async def _begin(self) -> Lane:
        begun: ProducerBegun = await self._caller.call(
            Ask(method="POST", path=path_of("producers"), body=packed(BeginProducer()), answers=ProducerBegun)
        )
        return Lane(begun)
