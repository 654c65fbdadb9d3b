"""The shards of a node: waiting for one, serving it, handing it over.

    idle ── a role ──► waiting ── it may take it ──► serving ── asked to ──► releasing ──► idle
      ▲                   │ no role any more                      │ lost its chain           ▲
      └───────────────────┴───────────────────────────────────────┴──────────────────────────┘

Waiting is following the shard's chain on a thread, so that taking over needs only what is not there yet. Each shard
that is served has an engine, a port and a `ServerApp` of its own, as if it were a server; only the listener is shared.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from holdfast.broker.engine import BrokerEngine
from holdfast.cluster.placement import Role
from holdfast.env.process import environment
from holdfast.errors import Busy, HoldfastError
from holdfast.local.aio.broker import AsyncLocalBrokerPort
from holdfast.server.audit import Audit, CallAuditor, open_audit
from holdfast.server.cluster.moving import ShardMover
from holdfast.server.cluster.places import settle_moves
from holdfast.server.console import console_routes
from holdfast.server.console.rendering import error_page
from holdfast.server.http.heads import KnownHeads
from holdfast.server.http.messages import Meter, Request, Response, StreamResponse, close_chunks
from holdfast.server.metrics import start_export
from holdfast.server.served import ServedPublishing
from holdfast.server.server import API, ServerApp
from holdfast.server.service import Service

if TYPE_CHECKING:
    from holdfast.env import World
    from holdfast.server.callers import Access
    from holdfast.server.cluster.node import ClusterNode
    from holdfast.server.http.connection import Answer
    from holdfast.server.routing import Routes
    from holdfast.server.turns import Pool, Scans
    from holdfast.settings import BrokerSettings, ServerSettings

logger = logging.getLogger(__name__)

RELEASE_S: Final = 5.0  # how long the calls in progress may take when a shard is handed over; then they are cut off
_AGAIN_S: Final = (1.0, 30.0)  # between two attempts to open a shard, at first and at most
_POLL_S: Final = 0.01
_NS: Final = 1_000_000_000


class NodeCommons:
    """What all shards of a node share: its callers, its limits, its threads."""

    def __init__(
        self, world: World, broker: BrokerSettings, settings: ServerSettings, access: Access, meter: Meter,
        pool: Pool, scans: Scans, heads: KnownHeads, more: Sequence[Routes] = (),
    ) -> None:  # fmt: skip
        self.world = world
        self.broker = broker
        self.settings = settings
        self.access = access
        self.meter = meter
        self.pool = pool
        self.scans = scans
        self.heads = heads
        self.more = more
        self.first: Service | None = None  # whose limits the others share
        self.node: ClusterNode = None  # type: ignore[assignment]  # set by itself


class ServedShard:
    """A shard that this node owns: its engine, and the app that answers for it."""

    def __init__(self, number: int, engine: BrokerEngine, audit: Audit, shared: NodeCommons) -> None:
        from holdfast.server.api.admin import audit_routes

        self.number = number
        self.engine = engine
        self.port = AsyncLocalBrokerPort(engine, None, with_threads=True)
        self.audit = audit
        self.service = Service(shared.world, self.port, shared.settings)
        self.service.is_shard = True
        self._share(shared)
        assert engine.moves is not None
        self.mover = self.service.mover = ShardMover(shared.node, self, engine.moves)
        routes = [*API, *shared.more, audit_routes(audit)]
        if shared.settings.console:
            routes += console_routes(audit)
        self.app = ServerApp(self.service, shared.access, routes, shared.meter, CallAuditor(audit))
        if shared.settings.console:
            self.app.error_page = error_page
        self.export = start_export(engine, shared.settings.otlp_endpoint, environment())
        self._heads = self.app.heads = shared.heads
        self.calls = 0  # in progress
        self._tasks: set[asyncio.Task[object]] = set()

    def _share(self, shared: NodeCommons) -> None:
        """The limits are those of the node, not of each of its shards."""
        if shared.first is None:
            shared.first = self.service
        first, service = shared.first, self.service
        service.waits, service.room, service.answers = first.waits, first.room, first.answers
        service.pool, service.scans = shared.pool, shared.scans
        service.publishing = ServedPublishing(self.port, shared.pool)
        service.tokens_problem = shared.access.tokens_problem

    @property
    def epoch(self) -> int:
        return 0 if self.engine.store is None else self.engine.store.epoch

    @property
    def is_lost(self) -> bool:
        """Whether another node has taken over, or the store does not respond. Final."""
        return self.engine.store is not None and self.engine.store.failure is not None

    @property
    def why_lost(self) -> str:
        failure = None if self.engine.store is None else self.engine.store.failure
        return "" if failure is None else str(failure.strerror)

    async def handle(self, request: Request) -> Answer:
        """Answer a request, and count it until all of the answer was sent."""
        task = asyncio.current_task()
        assert task is not None
        self.calls += 1
        self._tasks.add(task)
        try:
            answer = await self.app.handle(request)
        except BaseException:
            self._done(task)
            raise
        if isinstance(answer, StreamResponse):
            answer.chunks = self._counted(answer.chunks, task)
        else:
            self._done(task)
        return answer

    def _done(self, task: asyncio.Task[object]) -> None:
        self.calls -= 1
        self._tasks.discard(task)

    async def _counted(self, chunks: AsyncIterator[bytes], task: asyncio.Task[object]) -> AsyncIterator[bytes]:
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            self._done(task)
            await close_chunks(chunks)

    def has(self, topic: str) -> bool:
        """Whether a topic can be used here; False if it is elsewhere, or on its way."""
        moves = self.mover.moves
        return not moves.is_refused(topic) and not moves.is_elsewhere(topic)

    def began(self) -> None:
        """Count a call that is answered without a task."""
        self.calls += 1

    def ended(self) -> None:
        """The end of such a call."""
        self.calls -= 1

    async def close(self, wait_s: float) -> None:
        """End the calls that wait, finish the others, and close the folder, so that another node can have it."""
        loop = asyncio.get_running_loop()
        self._heads.forget(self.service)
        self.service.leave()
        until = loop.time() + wait_s
        while self.calls and loop.time() < until and not self.is_lost:
            await asyncio.sleep(_POLL_S)
        for task in list(self._tasks):
            task.cancel()
        await self.mover.close()
        await self.service.publishing.settle()
        with suppress(HoldfastError):  # a shard that was lost says so once more
            await self.port.close()


class ShardSlot:
    """One shard of the cluster, as this node has to do with it. It is the `Turn` of the thread that waits for it."""

    def __init__(self, number: int, url: str, shared: NodeCommons, grace_s: float, changed: Callable[[], None]) -> None:
        self.number = number
        self._url = url
        self._shared = shared
        self._changed = changed  # called on the loop, when the node's own shards are others
        self._grace_ns = round(grace_s * _NS)
        self._clock = shared.world.clock
        self.role = Role.NOTHING
        self.served: ServedShard | None = None
        self.is_waiting = False
        self.is_warm = False  # it has followed the chain to its end
        self.releasing = False
        self.problem = ""  # why it could not be opened
        self.task: asyncio.Task[None] | None = None
        self._ending = False
        self._again_s = _AGAIN_S[0]
        self._closed_since_ns: int | None = None

    @property
    def serving(self) -> ServedShard | None:
        """What answers calls now; None if this node does not own the shard, or is about to let it go."""
        served = self.served
        return None if served is None or self.releasing or served.is_lost else served

    def take_role(self, role: Role) -> None:
        """Do what the role asks for. A shard that is served stays here until somebody asks for it."""
        self.role = role
        if role is not Role.NOTHING and self.task is None and not self._ending:
            self.task = asyncio.get_running_loop().create_task(self._run())

    async def release(self, wait_s: float = RELEASE_S) -> bool:
        """Hand the shard over to whoever waits for it; returns whether this node had it."""
        served = self.serving
        if served is None:
            return False
        self.releasing = True
        began_ns = self._clock.monotonic_ns()
        try:
            await served.close(wait_s)
        finally:
            self.served, self.releasing = None, False
            self._changed()
        took_ms = (self._clock.monotonic_ns() - began_ns) // 1_000_000
        logger.info("shard handed over", extra={"shard": self.number, "took_ms": took_ms})
        return True

    async def end(self, wait_s: float) -> None:
        """Stop waiting for the shard, or close it."""
        self._ending = True
        await self.release(wait_s)
        if self.task is not None:
            with suppress(asyncio.CancelledError):
                await self.task

    # The `Turn` of the thread that waits.

    def is_over(self) -> bool:
        return self._ending or self.role is Role.NOTHING

    def may_take(self, *, closed: bool, free: bool) -> bool:
        """The wanted owner takes it whenever it can; the one that stands by, if nobody else does."""
        self.is_warm = True
        if not free:
            return False
        if not closed:
            self._closed_since_ns = None
            return not self.is_over() and (self.role is Role.OWN or self._shared.node.has_room())
        now_ns = self._clock.monotonic_ns()
        if self._closed_since_ns is None:
            self._closed_since_ns = now_ns
        if self.role is Role.OWN:
            return not self._ending
        is_late = now_ns - self._closed_since_ns >= self._grace_ns
        return self.role is Role.STAND_BY and is_late and self._shared.node.has_room()

    # Within

    async def _run(self) -> None:
        """Wait for the shard, serve it until it is released or lost, and begin again."""
        try:
            while not self.is_over():
                engine = await self._opened()
                if engine is None:
                    continue
                try:
                    audit = await asyncio.to_thread(open_audit, engine.world, engine.folder, self._shared.settings)
                    engine.at_close(audit.close)
                    served = ServedShard(self.number, engine, audit, self._shared)
                except BaseException as error:
                    await asyncio.to_thread(engine.close)
                    if not isinstance(error, HoldfastError):
                        raise
                    await self._failed(error)
                    continue
                self.served, self.problem, self._again_s = served, "", _AGAIN_S[0]
                self._changed()
                logger.info("shard owned", extra={"shard": self.number, "epoch": served.epoch})
                await self._served(served)
        finally:
            self.task = None

    async def _served(self, served: ServedShard) -> None:
        """Return when the shard is not served here any more."""
        while self.served is served:
            if served.is_lost and not self.releasing:
                logger.warning("shard lost", extra={"shard": self.number, "why": served.why_lost})
                self.releasing = True
                self._changed()
                try:
                    await served.close(0)
                finally:
                    self.served, self.releasing = None, False
                return
            await asyncio.sleep(0.05)

    async def _failed(self, error: HoldfastError) -> None:
        if str(error) != self.problem:
            self.problem = str(error)
            logger.warning("shard not opened", extra={"shard": self.number, "why": self.problem})
        await asyncio.sleep(self._again_s)
        self._again_s = min(self._again_s * 2, _AGAIN_S[1])

    async def _opened(self) -> BrokerEngine | None:
        """Wait on a thread of its own, which may take as long as the shard has another owner."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[BrokerEngine | Exception] = loop.create_future()

        def tell(result: BrokerEngine | Exception) -> None:
            if not found.done():
                found.set_result(result)

        def wait() -> None:
            try:
                engine = BrokerEngine.open(self._url, settings=self._shared.broker, turn=self)
                try:
                    settle_moves(engine, self.number, self._shared.node.places)
                    engine.keep()
                except BaseException:
                    engine.close()
                    raise
                result: BrokerEngine | Exception = engine
            except Exception as error:
                result = error
            loop.call_soon_threadsafe(tell, result)

        self.is_warm, self._closed_since_ns, self.is_waiting = False, None, True
        threading.Thread(target=wait, name=f"holdfast-shard-{self.number}", daemon=True).start()
        try:
            result = await found
        finally:
            self.is_waiting = self.is_warm = False
        if isinstance(result, BrokerEngine):
            return result
        if isinstance(result, Busy) and (result.is_elsewhere or self.is_over()):
            return None
        if not isinstance(result, HoldfastError):
            raise result
        await self._failed(result)
        return None


def is_failed(answer: Answer) -> bool:
    """Whether an answer may be that of a shard that was lost meanwhile."""
    return isinstance(answer, Response) and answer.status >= 500
