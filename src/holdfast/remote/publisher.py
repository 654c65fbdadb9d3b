"""Publishing through a server: partitions chosen as an embedded broker does, in calls that may be repeated.

Each publish that is numbered goes by a producer identity, one request at a time. If the answer is lost, the same
messages go again with the same numbers, and the server knows them: whatever was stored is not stored a second time,
also when the server was killed in between.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, get_args

import msgspec

from holdfast.api.drafts import Bodies, Drafter, NewMessage, PublishRequest, Stored, has_only_a_body
from holdfast.api.topics import TopicInfo
from holdfast.broker.messages import Draft, RoundRobin, check_partition, partition_for
from holdfast.client.calling import Ask, Caller, packed, path_of
from holdfast.errors import Fenced, Forbidden, HoldfastError, InvalidRequest, OutOfSequence, UnknownTopic
from holdfast.model import CodecName, Durability
from holdfast.protocol import messages as wire
from holdfast.protocol.messages import Batch
from holdfast.protocol.topics import BeginProducer, ProducerBegun, Written
from holdfast.settings import TopicSettings

_NUMBERS: Final = 2**32


class ProducerIdentity:
    """One producer identity, and the number of its next message for each partition."""

    def __init__(self, begun: ProducerBegun) -> None:
        self.id = begun.id
        self.epoch = begun.epoch
        self.sequences: dict[tuple[str, int], int] = {}
        self.paths: dict[tuple[str, int, Durability | None, CodecName | None], str] = {}  # up to the sequence


class ProducerIdentities:
    """One lane for each concurrent request. Safe to use from any thread or task."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._free: deque[ProducerIdentity] = deque()

    def disown(self) -> None:
        """Start without lanes in a child after a fork: they are the parent's."""
        self._free = deque()

    async def append(
        self,
        topic: str,
        number: int,
        batch: Batch,
        durability: Durability | None,
        codec: CodecName | None,
    ) -> Written:
        """Store the messages in the partition, exactly once."""
        count, body, place = len(batch.messages) or len(batch.bodies), packed(batch), (topic, number)
        lane = self._free.pop() if self._free else await self._begin()
        for attempt in (1, 2):
            path = lane.paths.get((topic, number, durability, codec)) or _path(lane, topic, number, durability, codec)
            head = self._caller.post_head(path, lane.sequences.get(place, 0))
            try:
                written: Written = await self._caller.call(
                    Ask(method="POST", path=path, body=body, answers=Written, head=head)
                )
            except (OutOfSequence, Fenced):
                # Nothing of this was stored, or the server would know it. It has forgotten the lane,
                # or lost earlier messages of the lane in a power cut. The lane is abandoned.
                if attempt == 2:
                    raise
                lane = await self._begin()
                continue
            except InvalidRequest as error:
                if not getattr(error, "repeated", False):
                    self._free.append(lane)  # refused and not stored: the numbers are free
                raise
            lane.sequences[place] = (lane.sequences.get(place, 0) + count) % _NUMBERS
            self._free.append(lane)
            return written
        raise AssertionError

    async def _begin(self) -> ProducerIdentity:
        begun: ProducerBegun = await self._caller.call(
            Ask(method="POST", path=path_of("producers"), body=packed(BeginProducer()), answers=ProducerBegun)
        )
        return ProducerIdentity(begun)


def _path(
    lane: ProducerIdentity, topic: str, number: int, durability: Durability | None, codec: CodecName | None
) -> str:
    """Return where a lane's messages go, up to their sequence number, and keep it for the next ones."""
    query = {"producer": lane.id, "epoch": lane.epoch, "durability": durability, "codec": codec}
    path = f"{path_of('topics', topic, 'partitions', number, 'append', **query)}&sequence="
    lane.paths[topic, number, durability, codec] = path
    return path


# Publishing through a server: encodes messages, and chooses partitions as an embedded broker does.


_DURABILITIES: Final = frozenset(get_args(Durability))
_USUAL: Final = TopicSettings()
_COMPACTED: Final = TopicSettings(cleanup="compact")
_LOOK_AGAIN_NS: Final = 5_000_000_000  # partitions may have been added


class KnownTopic:
    """What a client knows about a topic: its id, its number of partitions, and which one is next in turn."""

    def __init__(self) -> None:
        self.id = 0
        self.count: int | None = None  # None: this client may not ask
        self.lost: frozenset[int] = frozenset()  # partitions that accept nothing
        self.looked_ns = 0
        self.turns = RoundRobin()


class RemotePublisher:
    """Publishes to the topics of one server. Safe to use from any thread or task."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self._identities = ProducerIdentities(caller)
        self._clock = caller.world.clock
        self._known: dict[str, KnownTopic] = {}
        self.disown()

    def disown(self) -> None:
        """Become another publisher in a child after a fork."""
        random = self.caller.world.ids.random_u32
        self._name = f"client-{random():08x}{random():08x}"
        self._numbers = itertools.count()
        self._identities.disown()

    def new_id(self) -> str:
        """Return a unique dedup id."""
        return f"{self._name}-{next(self._numbers)}"

    async def publish(
        self, topic: str, request: PublishRequest, bodies: Bodies, verb: str = "publish_many"
    ) -> list[Stored]:
        """Store messages, those of one partition all or none, and each once no matter how often it is sent.

        More than 100,000 for one partition go in several calls, each of which is stored wholly or not at all.
        """
        self.caller.check_open()
        given: Any = request.messages
        if type(given) is list and bodies.plain and request.partition is None and set(map(type, given)) == {bytes}:
            check_options(request.durability, request.codec)
            if len(given) <= wire.MOST_MESSAGES:
                known = await self.look(topic)
                written = await self._append_bodies(topic, known, given, request.durability, request.codec)
                if written is not None:
                    number, done = written
                    offsets: Sequence[int | None] = done.offsets or [None] * len(given)
                    return [Stored(topic, offset, None, False, done.durability, number) for offset in offsets]
        messages, drafts = self.messages(given, bodies, verb)
        check_options(request.durability, request.codec)
        if not messages:
            return []
        known = await self.look(topic)
        if any(map(is_loose, messages)) or known.count is None:
            return await self.publish_loose(topic, msgspec.structs.replace(request, messages=messages))
        for again in (False, True):
            try:
                return await self._publish_numbered(topic, known, messages, drafts, request)
            except UnknownTopic:
                self._known.pop(topic, None)
                if again or request.partition is not None:
                    raise
                known = await self.look(topic)
                if known.count is None:
                    raise
        raise AssertionError

    async def publish_plain(self, topic: str, body: bytes, durability: Durability | None) -> Stored | None:
        """Store one message that has nothing but a body. None if nothing was done, and `publish` has to do it."""
        known = self.known(topic)
        if known is None or (durability is not None and durability not in _DURABILITIES):
            return None
        written = await self._append_bodies(topic, known, [body], durability, None)
        if written is None:
            return None
        number, done = written
        return Stored(topic, done.offsets[0] if done.offsets else None, None, False, done.durability, number)

    async def _append_bodies(
        self,
        topic: str,
        known: KnownTopic,
        bodies: list[bytes],
        durability: Durability | None,
        codec: CodecName | None,
    ) -> tuple[int, Written] | None:
        """Store messages that have nothing but bodies. Returns their partition, too; None if nothing was done."""
        if known.count is None:
            return None
        number = 0 if known.count == 1 and not known.lost else known.turns.take(known.count, known.lost)
        try:
            return number, await self._identities.append(topic, number, Batch(bodies=bodies), durability, codec)
        except UnknownTopic:
            self._known.pop(topic, None)
            return None

    def forget(self, topic: str) -> None:
        """Ask for the topic again before the next message."""
        self._known.pop(topic, None)

    def known(self, topic: str) -> KnownTopic | None:
        """Return what is known about the topic; None if it is time to ask again."""
        known = self._known.get(topic)
        if known is None or self._clock.monotonic_ns() - known.looked_ns > _LOOK_AGAIN_NS:
            return None
        return known

    async def look(self, topic: str, caller: Caller | None = None) -> KnownTopic:
        """Return what is known about the topic, asking the server again now and then."""
        known = self.known(topic)
        if known is None:
            topic_id, count, now_ns = 0, None, self._clock.monotonic_ns()
            lost: frozenset[int] = frozenset()
            try:
                info: TopicInfo = await (caller or self.caller).call(
                    Ask(method="GET", path=path_of("topics", topic), answers=TopicInfo)
                )
            except Forbidden:  # a client that may only publish cannot describe a topic
                pass
            else:
                topic_id, count = info.id, len(info.partitions)
                lost = frozenset(each.number for each in info.partitions if each.problem)
            known = self._known.setdefault(topic, KnownTopic())
            known.id, known.count, known.lost, known.looked_ns = topic_id, count, lost, now_ns
        return known

    def messages(self, given: object, bodies: Bodies, verb: str) -> tuple[list[wire.NewMessage], list[Draft]]:
        """Return messages as they are sent and as they will be stored. Raises InvalidRequest if one is wrong."""
        if isinstance(given, (bytes, bytearray, str, Mapping)) or not isinstance(given, Iterable):
            raise InvalidRequest(f"{verb} takes a list of bodies or NewMessages, not {type(given).__name__}")
        now_ns = self._clock.now_ns()
        drafter = WireDrafter(bodies)
        messages, drafts = [], []
        for each in given:
            message, draft = drafter.draft(each if isinstance(each, NewMessage) else NewMessage(body=each), now_ns)
            messages.append(message)
            drafts.append(draft)
        return messages, drafts

    async def _publish_numbered(
        self,
        topic: str,
        known: KnownTopic,
        messages: Sequence[wire.NewMessage],
        drafts: Sequence[Draft],
        request: PublishRequest,
    ) -> list[Stored]:
        routed, durability, codec = _routed(topic, known, drafts, request.partition), request.durability, request.codec
        found: dict[int, Stored] = {}
        for number, indexes in _calls(routed):
            batch = messages if len(indexes) == len(messages) else [messages[i] for i in indexes]
            with _noting(found, messages):
                written = await self._identities.append(topic, number, wire.batch_of(batch), durability, codec)
            offsets: Sequence[int | None] = written.offsets or [None] * len(indexes)
            for i, offset in zip(indexes, offsets, strict=True):
                found[i] = Stored(topic, offset, None, False, written.durability, number)
        return [found[i] for i in range(len(messages))]

    async def publish_loose(self, topic: str, request: PublishRequest) -> list[Stored]:
        """Delayed messages and those with a dedup id have no sequence number: a dedup id of ours identifies them."""
        partition, durability, codec = request.partition, request.durability, request.codec
        path = path_of("topics", topic, "messages", partition=partition, durability=durability, codec=codec)
        messages: Sequence[wire.NewMessage] = list(request.messages)
        found: list[Stored] = []
        for start in range(0, len(messages), wire.MOST_MESSAGES):  # more than one call may bring go in several
            with _noting(found, messages):
                found += await self._send(path, messages[start : start + wire.MOST_MESSAGES])
        return found

    async def _send(self, path: str, messages: Sequence[wire.NewMessage]) -> list[Stored]:
        ours = set()
        for i, message in enumerate(messages):
            if message.dedup_id is None and message.dedup_data is None:
                message.dedup_id = self.new_id()
                ours.add(i)
        answer: wire.StoredBatch = await self.caller.call(
            Ask(method="POST", path=path, body=packed(wire.batch_of(messages)), answers=wire.StoredBatch)
        )
        return [
            Stored(
                each.topic,
                each.offset,
                each.delayed_id,
                each.duplicate and i not in ours,  # one of ours was stored by an earlier attempt
                each.durability,
                each.partition,
            )
            for i, each in enumerate(answer.stored)
        ]


class WireDrafter:
    """Checks messages as far as a client can, and encodes them."""

    def __init__(self, bodies: Bodies) -> None:
        self._encode = bodies.encode
        self._plain = Drafter(bodies, _USUAL)
        self._keyed = Drafter(bodies, _COMPACTED)

    def draft(self, new: NewMessage, now_ns: int) -> tuple[wire.NewMessage, Draft]:
        """Return the message as it is sent and as it will be stored. Raises InvalidRequest if it is wrong."""
        if has_only_a_body(new):
            value = self._encode(new.body)
            return wire.NewMessage(body=value), Draft(value)
        # The server decides whether the topic accepts tombstones.
        draft = (self._keyed if new.body is None else self._plain).draft(new, now_ns)
        return _message(new, draft), draft


@contextmanager
def _noting(stored: Sized, messages: Sized) -> Iterator[None]:
    """Add a note to an error on how many messages earlier calls of the same publish have stored."""
    try:
        yield
    except HoldfastError as error:
        if stored:
            error.add_note(f"{len(stored)} of {len(messages)} messages were stored by earlier requests of this call")
        raise


def _calls(routed: Mapping[int, list[int]]) -> Iterator[tuple[int, list[int]]]:
    """Split the messages by partition and into calls."""
    for number, indexes in routed.items():
        for start in range(0, len(indexes), wire.MOST_MESSAGES):
            yield number, indexes[start : start + wire.MOST_MESSAGES]


def _routed(topic: str, known: KnownTopic, drafts: Sequence[Draft], partition: int | None) -> dict[int, list[int]]:
    """Assign messages to partitions: by key, in turn, or as the caller says."""
    count = known.count or 1
    if partition is not None:
        return {check_partition(partition, topic, count): list(range(len(drafts)))}
    routed: dict[int, list[int]] = {}
    in_turn: int | None = None
    for i, draft in enumerate(drafts):
        if draft.key is not None:
            number = partition_for(draft.key, count)
        else:  # those of one call stay together: they are stored as one
            in_turn = known.turns.take(count, known.lost) if in_turn is None else in_turn
            number = in_turn
        routed.setdefault(number, []).append(i)
    return routed


def is_loose(message: wire.NewMessage) -> bool:
    """Whether it has no place in a producer's sequence. A time always counts: the server says whether it has passed."""
    return (
        message.dedup_id is not None
        or message.dedup_data is not None
        or message.delay is not None
        or message.at is not None
    )


def _message(new: NewMessage, draft: Draft) -> wire.NewMessage:
    """Encode a message that is checked already."""
    message = wire.NewMessage(priority=new.priority, at=new.at, correlation_id=new.correlation_id)
    if new.body is None:
        message.tombstone = True
    else:
        message.body = bytes(draft.value)
    if isinstance(new.key, str):
        message.key = new.key
    else:
        message.key_data = new.key
    if isinstance(new.dedup_id, str):
        message.dedup_id = new.dedup_id
    else:
        message.dedup_data = new.dedup_id
    message.delay, message.ttl = _seconds(new.delay) or None, _seconds(new.ttl)  # a delay of nothing is none
    if new.headers is not None:
        pairs = new.headers.items() if isinstance(new.headers, Mapping) else new.headers
        message.headers = [
            wire.Header(name=name, value=value) if isinstance(value, str) else wire.Header(name=name, data=value)
            for name, value in pairs
        ]
    return message


def _seconds(value: float | timedelta | None) -> float | None:
    return value.total_seconds() if isinstance(value, timedelta) else value


def check_options(durability: object, codec: object) -> None:
    """Refuse what no server would accept, before anything is sent."""
    if durability is not None and durability not in get_args(Durability):
        raise InvalidRequest(f"durability={durability!r} is not known; use one of {', '.join(get_args(Durability))}")
    if codec is not None and codec not in get_args(CodecName):
        raise InvalidRequest(f"codec={codec!r} is not known; use one of {', '.join(get_args(CodecName))}")
