"""Moving topics between shards: what the node that owns the target does, and what it asks of the source's owner.

    target                                              source
    note that the topic is coming
    fetch sealed segments, a few times        ──►       in use
                                              ──►       note that it is leaving: nobody can use it from here on
    fetch the rest, sync all
    the table of placements: it is here now             (the one decision)
    take it, serve it
    say so                                    ──►       delete it

The pause is from the second note to the table. If either node dies before the table is written, the next owner of its
shard, or the other one, writes there that the move was undone, and nothing has happened; after that, whoever finds its
note finishes the move. Both learn of it from the table alone: no call between them needs to arrive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import msgspec

from holdfast.broker.moving import PIECE_BYTES, MovedFile, MoveNote, TopicMoves
from holdfast.cluster.table import Placed, PlacedOtherwise, PlacementTable
from holdfast.errors import HoldfastError, InvalidRequest, Unavailable
from holdfast.protocol.cluster import TopicMoved
from holdfast.protocol.media import JSON, MSGPACK, ErrorAnswer, decode, error_of
from holdfast.server.cluster.passing import Broken, NotPassed
from holdfast.server.cluster.places import settle_coming, settle_leaving
from holdfast.server.http.messages import Response

if TYPE_CHECKING:
    from holdfast.server.cluster.node import ClusterNode
    from holdfast.server.cluster.shards import ServedShard

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")

_ASK_S: Final = 30.0  # one answer of the source's owner
_PATIENCE_S: Final = 10.0  # for the source to have an owner that answers
_AGAIN_S: Final = 0.2
_REMEMBERED_S: Final = 60.0  # the outcome of a move that nobody has asked for yet
_LOOK_S: Final = 0.5  # how often the source reads the table while a topic is leaving
_MOST_PAUSE_S: Final = 60.0  # then the source undoes the move
_ROUNDS: Final = 5  # of copying while the topic is in use
_FEW_BYTES: Final = 16 * 1024 * 1024  # what is left for the pause


class Sealed(msgspec.Struct, frozen=True, array_like=True):
    """Asks which files can be copied already; the first time, the traces are packed, too."""

    topic: str
    first: bool


class Depart(msgspec.Struct, frozen=True, array_like=True):
    """Asks to stop the use of a topic."""

    note: MoveNote
    only_new: bool


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Asks for a part of a file."""

    at: str
    position: int
    length: int


class Asked(Protocol):
    """Asks the owner of the source."""

    async def __call__(self, what: str, body: Any, kind: Any = None) -> Any: ...


class ShardMover:
    """The moves to and from one shard that this node owns. What is begun ends with the ownership."""

    def __init__(self, node: ClusterNode, served: ServedShard, moves: TopicMoves) -> None:
        self._node = node
        self._served = served
        self._places = node.places
        self.moves = moves
        self.shard = served.number
        self._coming: dict[str, tuple[asyncio.Task[None], TopicMoved]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._decided = asyncio.Event()

    # The target

    async def move(self, topic: str, wait_s: float, *, only_new: bool = False) -> TopicMoved:
        """Bring a topic here, or go on doing so; returns how far that is, at the latest after `wait_s`.

        With `only_new`, put a name here that no topic has yet; raises TopicExists if there is one elsewhere.
        """
        if topic not in self._coming:
            await asyncio.to_thread(self._places.read)
            if self._places.shard_of(topic) == self.shard and topic not in self.moves.coming:
                return TopicMoved(topic=topic, shard=self.shard, moved=True)
            told = TopicMoved(topic=topic, shard=self.shard)
            begun = self._background(self._bring(told, only_new=only_new)), told
            self._coming[topic] = begun
            begun[0].add_done_callback(lambda _: self._forget_later(topic, begun))
        task, told = self._coming[topic]
        done, _ = await asyncio.wait([task], timeout=wait_s)
        if done:
            self._coming.pop(topic, None)
            if task.cancelled():
                raise Unavailable(f"the move of {topic} was interrupted; try again")
            task.result()
        return told

    def _forget_later(self, topic: str, begun: tuple[asyncio.Task[None], TopicMoved]) -> None:
        """Keep the outcome for whoever asks next."""

        def forget() -> None:
            if self._coming.get(topic) is begun:
                del self._coming[topic]

        asyncio.get_running_loop().call_later(_REMEMBERED_S, forget)

    async def close(self) -> None:
        """Stop: the next owner of the shard finishes what was begun, or undoes it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _background(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # seen, if nobody waits for it
        return task

    async def _bring(self, told: TopicMoved, *, only_new: bool) -> None:
        topic, began_ns = told.topic, self._node.world.clock.monotonic_ns()
        while topic in self.moves.coming:  # of an attempt that failed here, and is being undone
            await asyncio.sleep(_AGAIN_S)
        table = self._places.table
        source = table.shard_of(topic, self._node.description.shards)
        note = MoveNote(
            move=self._places.new_move(), topic=topic, source=source, target=self.shard, before=table.move_of(topic)
        )
        if note.source == self.shard:
            told.moved = True
            return
        await asyncio.to_thread(self.moves.expect, note)
        try:
            await self._fetch_all(note, told, only_new=only_new)
            table = await self._surely(lambda: self._places.put(topic, note.before, Placed(self.shard, note.move)))
        except asyncio.CancelledError:
            raise
        except (HoldfastError, PlacedOtherwise, Broken, NotPassed, OSError, TimeoutError) as error:
            # A refusal of the source leaves nothing to be decided. In all other cases it may be waiting for that.
            self._background(self._give_up(note) if isinstance(error, InvalidRequest) else self._undo(note))
            logger.warning("a topic was not moved", extra={"topic": topic, "to": self.shard, "why": str(error)})
            if isinstance(error, HoldfastError):
                raise
            raise Unavailable(f"the move of {topic} was undone: {error}; try again") from error
        await self._settle(note, table)
        told.moved = True
        self._node.moved_topics += 1
        took_ms = (self._node.world.clock.monotonic_ns() - began_ns) // 1_000_000
        logger.info(
            "topic moved",
            extra={"topic": topic, "from": note.source, "to": self.shard, "bytes": told.total, "took_ms": took_ms},
        )
        with suppress(HoldfastError):  # it reads the table soon
            await self._ask(note.source, "decided", topic)

    async def _fetch_all(self, note: MoveNote, told: TopicMoved, *, only_new: bool) -> None:
        async def ask(what: str, body: Any, kind: Any = None) -> Any:
            return await self._ask(note.source, what, body, kind)

        have: dict[str, tuple[int, ...]] = {}
        for number in range(_ROUNDS):
            files = await ask("sealed", Sealed(note.topic, not number), list[MovedFile])
            missing = [file for file in files if file.stamp and have.get(file.path) != file.stamp]
            if number and sum(file.size for file in missing) < _FEW_BYTES:
                break
            await self._fetch(note.topic, missing, told, ask)
            have.update((file.path, file.stamp) for file in missing)
        files = await ask("depart", Depart(note, only_new), list[MovedFile])
        rest = [file for file in files if not file.stamp or have.get(file.path) != file.stamp]
        await self._fetch(note.topic, rest, told, ask)
        await asyncio.to_thread(self.moves.complete, note.topic, files)

    async def _fetch(self, topic: str, files: Sequence[MovedFile], told: TopicMoved, ask: Asked) -> None:
        """Copy files: while one piece is written, the next one is on its way."""
        told.total += sum(file.size for file in files)
        writing: asyncio.Future[None] | None = None
        try:
            for file in files:
                for position in range(0, max(file.size, 1), PIECE_BYTES):
                    length = min(PIECE_BYTES, file.size - position)
                    content = await ask("read", Piece(file.at, position, length), bytes) if length else b""
                    if len(content) < length:
                        raise Unavailable(f"{file.at} has become shorter while it was copied; try again")
                    if writing is not None:
                        await writing
                    told.copied += length
                    writing = asyncio.ensure_future(
                        asyncio.to_thread(self.moves.write, topic, file.path, position, content, file.size)
                    )
        finally:
            if writing is not None:
                await writing

    async def _give_up(self, note: MoveNote) -> None:
        """End a move that the source has not begun, and that nobody else can finish."""
        await asyncio.to_thread(self.moves.give_up, note.topic)

    async def _undo(self, note: MoveNote) -> None:
        """Find out what became of a move that failed here; most probably, that it was undone by this very call."""
        table = await self._surely(lambda: self._places.decide(note))
        await self._settle(note, table)
        with suppress(HoldfastError):
            await self._ask(note.source, "decided", note.topic)

    async def _settle(self, note: MoveNote, table: PlacementTable) -> None:
        await asyncio.to_thread(settle_coming, self.moves, note, table)
        self._node.placement_changed()

    async def _surely(self, work: Callable[[], _Value]) -> _Value:
        """Do something in the store that has to be done, however often that does not respond."""
        while True:
            try:
                return await asyncio.to_thread(work)
            except Unavailable as error:
                if self._served.is_lost:
                    raise
                logger.warning("the store does not respond", extra={"why": str(error)})
                await asyncio.sleep(_LOOK_S)

    async def _ask(self, shard: int, what: str, body: Any, kind: Any = None) -> Any:
        """The answer of the owner of another shard, which may be this node, too."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _PATIENCE_S
        content = msgspec.msgpack.encode(body)
        while True:
            served, owner = self._node.serving(shard), self._node.owner_of(shard)
            try:
                if served is not None:
                    return await served.mover.answer(what, content)
                if owner is not None:
                    path = f"/v1/cluster/moves/{what}"
                    answer = await self._node.passing.call(owner, "POST", path, content, timeout_s=_ASK_S, shard=shard)
                    return _value_of(answer, kind)
            except (NotPassed, Broken, TimeoutError) as error:
                logger.info("a shard did not answer", extra={"shard": shard, "why": str(error)})
            if loop.time() >= until:
                raise Unavailable(f"shard {shard} of the cluster has no owner that responds; try again")
            await self._node.wait_for_change(_AGAIN_S)

    # The source

    async def answer(self, what: str, content: bytes) -> Any:
        """Answer the owner of a target. Each call may be repeated."""
        match what:
            case "sealed":
                sealed = msgspec.msgpack.decode(content, type=Sealed)
                if sealed.first:
                    await asyncio.to_thread(self.moves.packed_early, sealed.topic)
                return await asyncio.to_thread(self.moves.sealed_files, sealed.topic)
            case "depart":
                return await self._depart(msgspec.msgpack.decode(content, type=Depart))
            case "read":
                piece = msgspec.msgpack.decode(content, type=Piece)
                return await asyncio.to_thread(self.moves.read, piece.at, piece.position, piece.length)
            case "decided":
                self._decided.set()
                return None
            case _:
                raise InvalidRequest(f"there is no step {what!r} of a move")

    async def _depart(self, asked: Depart) -> list[MovedFile]:
        note = asked.note
        table = await asyncio.to_thread(self._places.read)
        if note.source != self.shard or table.move_of(note.topic) != note.before:
            raise Unavailable(f"the topic {note.topic} was moved meanwhile; try again")
        known = self.moves.leaving.get(note.topic)
        try:
            files = await asyncio.to_thread(self.moves.depart, note, only_new=asked.only_new)
        finally:
            if known is None and note.topic in self.moves.leaving:
                self._background(self._see_off(note))
        await self._served.service.members.put_out(note.topic)
        return files

    async def _see_off(self, note: MoveNote) -> None:
        """Wait until the move is decided, then delete the topic, or let it be used again."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _MOST_PAUSE_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._decided.wait()
            self._decided.clear()
            try:
                work = self._places.read if loop.time() < until else lambda: self._places.decide(note)
                table = await asyncio.to_thread(work)
                if table.move_of(note.topic) != note.before:
                    await asyncio.to_thread(settle_leaving, self.moves, note, table)
                    self._node.placement_changed()
                    return
            except HoldfastError as error:
                if self._served.is_lost:
                    return
                logger.warning("a move is not finished", extra={"topic": note.topic, "why": str(error)})


def _value_of(answer: Response, kind: Any) -> Any:
    if answer.status < 300:
        return None if kind is None else msgspec.msgpack.decode(answer.body, type=kind)
    failed: ErrorAnswer = decode(answer.body, MSGPACK if answer.media == MSGPACK else JSON, ErrorAnswer)
    raise error_of(failed.error)


async def answered(work: Awaitable[Any]) -> Response:
    """The answer to another node."""
    return Response(200, msgspec.msgpack.encode(await work), MSGPACK)
