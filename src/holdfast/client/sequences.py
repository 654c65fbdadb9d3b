"""The identity of a producer at a server, and the numbers of its messages in each partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.api.drafts import Stored
from holdfast.client.calling import Caller, packed
from holdfast.client.http import Ask, path_of
from holdfast.errors import OutOfSequence
from holdfast.membership.assignment import TopicPartition
from holdfast.model import Durability
from holdfast.protocol.messages import NewMessage, batch_of
from holdfast.protocol.topics import BeginProducer, NextSequence, ProducerBegun, Written

_NUMBERS: Final = 2**32


class Identity:
    """One producer. Its batches go one after the other, so that the same one can go again."""

    def __init__(self, caller: Caller, name: str | None, *, resume: bool) -> None:
        self._caller = caller
        self._name = name
        self._resume = resume
        self._begun: ProducerBegun | None = None
        self._next: dict[TopicPartition, int] = {}
        self._known: dict[TopicPartition, int] = {}  # so many were stored by the one that this one resumes
        self._skipped: dict[TopicPartition, int] = {}  # so many of these were given to this one

    async def begin(self) -> ProducerBegun:
        """Be somebody; one with a name fences those of that name before it."""
        if self._begun is None:
            body = BeginProducer(name=self._name, resume=self._resume)
            self._begun = await self._caller.call(
                Ask(method="POST", path=path_of("producers"), body=packed(body), answers=ProducerBegun)
            )
        assert self._begun is not None
        return self._begun

    async def append(
        self, place: TopicPartition, messages: Sequence[NewMessage], durability: Durability
    ) -> list[Stored | None]:
        """Store a batch, but for what the one before has stored already."""
        begun = await self.begin()
        if place not in self._next:
            await self._look(place, begun)
        skipped = min(self._known[place] - self._skipped[place], len(messages))
        answers: list[Stored | None] = []
        if skipped:
            before = await self._ask(place, begun, count=skipped)
            answers += [Stored(place[0], offset, None, True, durability, place[1]) for offset in before.offsets]
        left = messages[skipped:]
        if left:
            answers += await self._append(place, begun, left, durability)
        self._skipped[place] += skipped
        return answers

    async def _append(
        self, place: TopicPartition, begun: ProducerBegun, messages: Sequence[NewMessage], durability: Durability
    ) -> list[Stored | None]:
        body = packed(batch_of(messages))
        try:
            written = await self._send(place, begun, body, durability)
        except OutOfSequence as error:
            if error.known or self._name is not None or not self._next[place]:
                raise
            self._next[place] = 0  # idle for so long that the partition has forgotten it: nothing is missing
            written = await self._send(place, begun, body, durability)
        self._next[place] = (self._next[place] + len(messages)) % _NUMBERS
        # What was stored by an attempt of this call is no duplicate; without offsets it was stored long before.
        offsets: Sequence[int | None] = written.offsets or [None] * len(messages)
        duplicate = not written.offsets
        return [Stored(place[0], offset, None, duplicate, written.durability, place[1]) for offset in offsets]

    async def _send(self, place: TopicPartition, begun: ProducerBegun, body: bytes, durability: Durability) -> Written:
        path = path_of(
            "topics",
            place[0],
            "partitions",
            place[1],
            "append",
            producer=begun.id,
            epoch=begun.epoch,
            sequence=self._next[place],
            durability=durability,
        )
        written: Written = await self._caller.call(Ask(method="POST", path=path, body=body, answers=Written))
        return written

    async def _look(self, place: TopicPartition, begun: ProducerBegun) -> None:
        """Where to count on from."""
        self._skipped[place] = 0
        known = (await self._ask(place, begun, count=0)).sequence if self._resume else 0
        self._known[place] = self._next[place] = known

    async def _ask(self, place: TopicPartition, begun: ProducerBegun, *, count: int) -> NextSequence:
        """What the partition has of this producer, and where so many messages are that it is given next."""
        path = path_of(
            "topics",
            place[0],
            "partitions",
            place[1],
            "sequence",
            producer=begun.id,
            since=begun.since,
            first=self._skipped[place] % _NUMBERS,
            count=count,
        )
        answer: NextSequence = await self._caller.call(Ask(method="GET", path=path, answers=NextSequence))
        return answer
