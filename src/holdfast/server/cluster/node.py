"""A node of a cluster: how it starts and stops, what it knows of the others, and which shards it takes.

Nothing here decides who owns a shard: a shard's chain does. A node only decides what to try. It counts the nodes that
seem to live, ranks them for each shard (`placement`), follows the shards for which it is the first or the second, and
becomes the owner when the chain lets it. A shard that should be here and is elsewhere is asked for once this node has
followed it to its end, so that it changes hands in the time that opening it takes.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

import holdfast
from holdfast.broker.folder.stored import cache_above, has_ended, process_facts, shown_place
from holdfast.cluster.description import ClusterDescription, shard_url
from holdfast.cluster.placement import Assignment, NodeTraits, Role, assignments
from holdfast.cluster.registry import NodeRecord, NodeTable, Registry
from holdfast.config.settings_file import Effective
from holdfast.env import World
from holdfast.env.chain.engines import Store, StoreRefused, StoreUnreachable, open_store, parse_place
from holdfast.env.chain.ownership import process_text
from holdfast.errors import BadSettings, HoldfastError, InvalidRequest
from holdfast.protocol.media import JSON
from holdfast.server.callers import Access, check_listening, tls_context
from holdfast.server.cluster.across import topic_of
from holdfast.server.cluster.dispatch import Dispatcher, adopt
from holdfast.server.cluster.moving import answered
from holdfast.server.cluster.pages import NodePages
from holdfast.server.cluster.passing import MOVED, MOVED_STATUS, Broken, Moved, NotPassed, Passing
from holdfast.server.cluster.places import Places
from holdfast.server.cluster.shards import RELEASE_S, NodeCommons, ServedShard, ShardSlot
from holdfast.server.http.connection import Answer
from holdfast.server.http.heads import KnownHeads
from holdfast.server.http.listening import HttpServer, not_there, socket_at
from holdfast.server.http.messages import Request, Response
from holdfast.server.limits import limits_of
from holdfast.server.routing import Routes
from holdfast.server.turns import FairThreads, Pool, Scans
from holdfast.settings import BrokerSettings, ServerSettings

logger = logging.getLogger(__name__)

_NS: Final = 1_000_000_000
_RECONCILE_S: Final = 0.1
_ASK_AGAIN_S: Final = 0.5
_CALL_S: Final = 5.0
_PUSH_S: Final = 1.0
_REFUSED_NS: Final = 300_000_000  # so long a node that could not be reached is not tried again
_ABANDON_S: Final = 0.5  # after a shard has another owner, an answer of the last one may still be on its way
_ADVERTISED_S: Final = 10.0
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_CLOSE_S: Final = 5.0  # for the calls in progress when a node ends, after its shards are gone


class ClusterNode:
    """This process as a node. Everything but the threads that wait for shards runs on one event loop."""

    def __init__(
        self, world: World, url: str, description: ClusterDescription, broker: BrokerSettings,
        settings: ServerSettings, node_id: str, effective: Effective | None = None, more: Sequence[Routes] = (),
        traits: NodeTraits | None = None,
    ) -> None:  # fmt: skip
        self.world = world
        self.more = more  # routes that only programs bring, beside those of every server
        self.me = node_id
        self.traits = traits or NodeTraits()
        self.description = description
        self.settings = settings
        self.shown = shown_place(url)
        self.instance = world.ids.random_bytes(8).hex()
        self.advertised = ""
        self.leaving = False
        lease_s = description.lease_ms / 1000
        self._renew_s, self._look_s = lease_s / 3, lease_s / 4
        broker = msgspec.structs.replace(
            broker,
            store_lease_ms=description.lease_ms,
            store_cache_dir=f"{cache_above(broker)}/node-{node_id}",  # several nodes may run on one machine
        )
        self.pages = NodePages(self, effective)
        self.shared = NodeCommons(
            world, broker, settings, Access(settings, world), self.pages.metrics, Pool(),
            Scans(settings.scan_workers, settings.scan_messages), KnownHeads(), more,
        )  # fmt: skip
        self.shared.node = self
        store, root = open_store(parse_place(url))
        self._store: Store = store
        self._registry = Registry(store, root, world.clock)
        self.places = Places(store, root, description.shards, world.ids)
        self.slots = [
            ShardSlot(number, shard_url(url, number), self.shared, 2 * lease_s, self._own_changed)
            for number in range(description.shards)
        ]
        self.table = NodeTable(node_id, stale_s=lease_s, has_ended=lambda process: has_ended(world, process))
        self.passing = Passing(description.secret, max(limits_of(settings).per_address // 2, 1))
        self.dispatcher = Dispatcher(self, self.pages.routes)
        self.http = HttpServer(
            self.dispatcher.handle, self.dispatcher.refuse, limits_of(settings), self.pages.metrics,
            self.dispatcher.answer_known, self.shared.heads,
        )  # fmt: skip
        self._number = 0
        self._process = process_facts(world)
        self._changes: asyncio.Event = asyncio.Event()
        self._to_tell = asyncio.Event()
        self._refused: dict[str, int] = {}
        self._asked: dict[int, float] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._view: tuple[dict[str, NodeTraits], frozenset[str]] | None = None
        self._assigned: list[Assignment] = []
        self._clash: BadSettings | None = None
        self.moves = 0  # shards that this node has given to another one
        self.moved_topics = 0  # that were moved to shards of this node

    # What the dispatcher asks

    def serving(self, shard: int) -> ServedShard | None:
        """What answers for the shard here; None if this node does not own it."""
        return self.slots[shard].serving if 0 <= shard < len(self.slots) else None

    def owner_of(self, shard: int) -> NodeRecord | None:
        """The other node that owns the shard, as far as this one knows, and if it can be reached."""
        record = self.table.owner_of(shard)
        if record is None or self._mono_ns() - self._refused.get(record.instance, -_REFUSED_NS) < _REFUSED_NS:
            return None
        return record

    def has_room(self) -> bool:
        """Whether this node may own one more shard than it does."""
        return (
            not self.traits.max_shards or sum(slot.served is not None for slot in self.slots) < self.traits.max_shards
        )

    def processes(self) -> dict[str, str]:
        """The nodes by what the chains of shards call their processes."""
        records = [self._record(), *(known.record for known in self.table.known.values())]
        return {process_text(record.process): record.node for record in records}

    def some_shard(self) -> int:
        """A shard for a call that any of them can answer: one of this node, if it has any."""
        return next((slot.number for slot in self.slots if slot.serving is not None), 0)

    def not_reached(self, node: NodeRecord, error: NotPassed | None) -> None:
        """Take note that a node did not answer, or does not own the shard any more."""
        if isinstance(error, Moved):
            return
        self._refused[node.instance] = self._mono_ns()
        self.passing.forget(node.url)

    async def wait_for_change(self, seconds: float) -> None:
        """Return when something about shards or nodes has changed, or after a while."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changes.wait()

    def free_bytes(self) -> int:
        """Free disk space for the local copies of the shards."""
        folder = self.shared.broker.store_cache_dir or "."
        while not self.world.disk.exists(folder) and folder not in ("/", ""):
            folder = folder.rpartition("/")[0] or "/"
        return self.world.disk.free_bytes(folder)

    async def page(self, request: Request) -> Answer:
        """What this node answers itself."""
        return await self.pages.answer(request)

    async def answer(self, request: Request, shard: int) -> Response:
        """What other nodes ask this one. They have proved that they belong to the cluster."""
        body = await request.read(self.settings.max_request_bytes, 1)
        try:
            return await self._answer(request, shard, body)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"the body cannot be read: {error}") from None

    async def _answer(self, request: Request, shard: int, body: bytes) -> Response:
        match step := request.path.removeprefix("/v1/cluster/"):
            case "node":
                return Response(200, msgspec.json.encode(self._record()), JSON)
            case "records":
                self._hear(msgspec.json.decode(body, type=NodeRecord))
                return Response(204)
            case "release":
                self._hear(msgspec.json.decode(body, type=NodeRecord))
                return Response(202 if self._gives(shard, msgspec.json.decode(body, type=NodeRecord).node) else 409)
            case _:
                served = self.serving(shard)
                return self.moved() if served is None else await self._answer_of(served, step, body)

    async def _answer_of(self, served: ServedShard, step: str, body: bytes) -> Response:
        """What a shard of this node answers."""
        if step == "producers":
            await adopt(served, body)
            return Response(204)
        if step == "schedule":
            schedule = await served.service.schedules.get(body.decode("utf-8", "replace"))
            return Response(200, msgspec.json.encode(topic_of(schedule)), JSON)
        if step.startswith("moves/"):
            return await answered(served.mover.answer(step.removeprefix("moves/"), body))
        return Response(404)

    def moved(self) -> Response:
        """The answer that something is not here."""
        return Response(MOVED_STATUS, headers=[(MOVED, str(self.places.table.version))])

    def placement_changed(self) -> None:
        """A topic is elsewhere now: tell everybody."""
        self._changed()
        self._to_tell.set()

    # Starting and stopping

    async def listen(self, advertised: str | None) -> list[str]:
        """Listen on the addresses in the settings. Returns them as URLs."""
        tls = tls_context(self.settings, self.world.clock)
        scheme = "http" if tls is None else "https"
        try:
            addresses = await self.http.listen(self.settings.host, self.settings.port, tls)
        except OSError as error:
            raise not_there(self.settings, error) from None
        found = [f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}" for host, port in addresses]
        if self.settings.socket is not None:
            await self.http.listen_on(socket_at(self.settings.socket))
            found.append(f"unix:{self.settings.socket}")
        self.advertised = (advertised or found[0]).rstrip("/")
        return found

    async def start(self) -> None:
        """Join the cluster. Raises BadSettings if others could not reach this node, or another one has its name."""
        await self._check_advertised()
        await asyncio.to_thread(self.places.read)
        self._number = await asyncio.to_thread(self._adopt)
        await self._look()
        self._background(self._keep_telling())
        self._background(self._keep_looking())
        self._to_tell.set()
        # Nodes that start at the same time learn of each other, so that no shard moves at once.
        await asyncio.sleep(min(self._look_s * 1.5, 1.0))
        await self._look()
        self._background(self._keep_reconciling())

    async def run(self, stop_asked: Awaitable[object]) -> None:
        """Return when the node is asked to stop. Raises BadSettings if another process has its name."""
        stopped: asyncio.Future[Any] = asyncio.ensure_future(stop_asked)
        while not stopped.done():
            await asyncio.wait([stopped], timeout=self._look_s)
            if self._clash is not None:
                raise self._clash

    async def drain(self) -> bool:
        """Hand all shards over, then end. Returns whether all calls in progress were finished."""
        self.leaving = True
        self._to_tell.set()
        until = self._mono_ns() + self.settings.drain_ms * 1_000_000
        while any(slot.served for slot in self.slots) and self._heirs() and self._mono_ns() < until:
            await asyncio.sleep(0.02)
        await asyncio.gather(*(slot.end(RELEASE_S if self.settings.drain_ms else 0) for slot in self.slots))
        await self._tell()
        return await self.http.close(min(_CLOSE_S, self.settings.drain_ms / 1000))

    async def close(self) -> None:
        """End what runs in the background, and take this node off the list."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(slot.end(0) for slot in self.slots))
        await self.http.close(0)
        self.passing.close()
        self.shared.pool.close()
        await self.shared.scans.close()
        await asyncio.to_thread(self._registry.remove)
        self._store.close()

    # Within

    def _mono_ns(self) -> int:
        return self.world.clock.monotonic_ns()

    def _background(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _record(self) -> NodeRecord:
        return NodeRecord(
            node=self.me, url=self.advertised, instance=self.instance, number=self._number, leaving=self.leaving,
            shards={slot.number: slot.served.epoch for slot in self.slots if slot.serving and slot.served},
            version=holdfast.__version__, process=self._process,
            written_at_ms=self.world.clock.now_ns() // 1_000_000, placement=self.places.table.version,
            traits=self.traits,
        )  # fmt: skip

    def _own_changed(self) -> None:
        """The shards of this node are others: tell everybody."""
        self._changed()
        self._to_tell.set()
        for slot in self.slots:
            if slot.serving is not None:
                self._abandon(slot.number, self.instance)

    def _changed(self) -> None:
        self._changes.set()  # wakes all who wait,
        self._changes = asyncio.Event()  # and nobody who begins to wait now

    def _hear(self, record: NodeRecord) -> None:
        before = self.table.known.get(record.node)
        if not self.table.hear(record, self._mono_ns()):
            return
        self._refused.pop(record.instance, None)
        if record.placement > self.places.table.version:
            self._background(self._surely(self.places.refresh(record.placement)))
        shards = {} if before is None else before.record.shards
        for shard in record.shards.keys() - shards.keys():
            owner = self.table.owner_of(shard)
            if owner is not None:
                self._abandon(shard, owner.instance)
        if before is None or before.record.shards != record.shards:
            self._changed()

    def _abandon(self, shard: int, owner: str) -> None:
        asyncio.get_running_loop().call_later(_ABANDON_S, self.passing.abandon, shard, owner)

    def _heirs(self) -> bool:
        """Whether there is a node that could take over from this one."""
        return any(not record.leaving for record in self.table.live(self._mono_ns()).values())

    def _gives(self, shard: int, node: str) -> bool:
        """Give a shard to a node that asks for it, if that should have it."""
        if not 0 <= shard < len(self.slots):
            return False
        nodes, leaving = self._nodes()
        slot = self.slots[shard]
        if node in leaving or self._assignments(nodes, leaving)[shard].owner != node or slot.serving is None:
            return False
        self.moves += 1
        self._background(slot.release())
        return True

    def _adopt(self) -> int:
        """Go on from what an earlier process of this node has left."""
        for record in self._registry.read().values():
            if record.node == self.me:
                self._require_ended(record)
        return self._registry.adopt(self.me) + 1

    def _require_ended(self, record: NodeRecord) -> None:
        """Wait until the process that last had this node's name is known to have ended, or is silent."""
        if has_ended(self.world, record.process):
            return
        until = self._mono_ns() + self.description.lease_ms * 1_500_000
        while self._mono_ns() < until:
            self.world.clock.wait(threading.Event(), self._look_s)
            found = self._registry.read().get(self.me)
            if found is None:
                return
            if found.number > record.number:
                raise self._named_twice(found)

    def _named_twice(self, record: NodeRecord) -> BadSettings:
        process = f"process {record.process.get('pid')} on {record.process.get('host')}"
        return BadSettings(
            f"the name {self.me} is in use by another node of the cluster, {record.url} ({process}): give each node a "
            "name of its own, with --node-id"
        )

    async def _check_advertised(self) -> None:
        """Call this node as the others would."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _ADVERTISED_S
        while True:
            why = "it does not lead to this node"
            try:
                answer = await self.passing.call(self._record(), "GET", "/v1/cluster/node", timeout_s=2.0)
                if answer.status == 200:
                    found = msgspec.json.decode(answer.body, type=NodeRecord)
                    if found.instance == self.instance:
                        return
            except (NotPassed, Broken, TimeoutError) as error:
                why = str(error) or "no answer came in time"
            except msgspec.MsgspecError:
                pass
            if loop.time() >= until or why.startswith("it does"):
                raise BadSettings(
                    f"other nodes cannot reach this one at {self.advertised}: {why}. Give the address of this node, as "
                    "the others see it, with --advertise"
                )
            await asyncio.sleep(0.2)

    async def _keep_telling(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._renew_s):
                    await self._to_tell.wait()
            self._to_tell.clear()
            await self._surely(self._tell())

    async def _tell(self) -> None:
        self._number += 1
        record = self._record()
        content = msgspec.json.encode(record)
        live = self.table.live(self._mono_ns()).values()
        pushes = [self._push(each, content) for each in live]
        await asyncio.gather(self._write(record), *pushes)

    async def _write(self, record: NodeRecord) -> None:
        try:
            await asyncio.to_thread(self._registry.write, record)
        except (StoreUnreachable, StoreRefused) as error:
            logger.warning("the record of this node was not written", extra={"why": str(error)})

    async def _push(self, node: NodeRecord, content: bytes) -> None:
        with suppress(NotPassed, Broken, TimeoutError):  # it reads the store soon
            await self.passing.call(node, "POST", "/v1/cluster/records", content, timeout_s=_PUSH_S)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            await self._surely(self._look())

    async def _look(self) -> None:
        found = await asyncio.to_thread(self._registry.read)
        own = found.pop(self.me, None)
        if own is not None and own.instance != self.instance and own.number > self._number:
            self._clash = self._named_twice(own)
        for record in found.values():
            self._hear(record)
        for record in self.table.long_gone(self._mono_ns()).values():
            await asyncio.to_thread(self._registry.remove_of, record)
        if self.table.keep_only(found.keys(), self._mono_ns()):
            self._changed()

    async def _keep_reconciling(self) -> None:
        while True:
            await self._surely(self._reconcile())
            await asyncio.sleep(_RECONCILE_S)

    @staticmethod
    async def _surely(work: Coroutine[Any, Any, None]) -> None:
        """Do something that is done again and again, and must go on whatever happens."""
        try:
            await work
        except (StoreUnreachable, StoreRefused, HoldfastError) as error:
            logger.warning("the cluster was not looked after", extra={"why": str(error)})
        except Exception:
            logger.exception("the cluster was not looked after")

    def _nodes(self) -> tuple[dict[str, NodeTraits], frozenset[str]]:
        """The nodes that seem to live, with this one, and those of them that are about to end."""
        live = self.table.live(self._mono_ns())
        nodes = {self.me: self.traits, **{name: record.traits for name, record in live.items()}}
        leaving = {name for name, record in live.items() if record.leaving} | ({self.me} if self.leaving else set())
        return nodes, frozenset(leaving)

    def _assignments(self, nodes: dict[str, NodeTraits], leaving: frozenset[str]) -> list[Assignment]:
        if (nodes, leaving) != self._view:
            if self._view is not None:
                logger.info("nodes changed", extra={"nodes": sorted(nodes), "leaving": sorted(leaving)})
            self._view = (nodes, leaving)
            self._assigned = assignments(len(self.slots), nodes, leaving)
        return self._assigned

    async def _reconcile(self) -> None:
        """Do about each shard what this node should, given the nodes that live."""
        live = self.table.live(self._mono_ns())
        nodes, leaving = self._nodes()
        wanted = self._assignments(nodes, leaving)
        for slot in self.slots:
            slot.take_role(wanted[slot.number].role_of(self.me))
            if slot.role is Role.OWN and slot.is_waiting and slot.is_warm:
                owner = self.table.owner_of(slot.number)
                if owner is not None and owner.node in live:
                    self._ask_for(slot, owner)

    def _ask_for(self, slot: ShardSlot, owner: NodeRecord) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._asked.get(slot.number, -_ASK_AGAIN_S) >= _ASK_AGAIN_S:
            self._asked[slot.number] = now
            self._background(self._ask(slot.number, owner))

    async def _ask(self, shard: int, owner: NodeRecord) -> None:
        with suppress(NotPassed, Broken, TimeoutError):  # it is asked again
            content = msgspec.json.encode(self._record())
            await self.passing.call(owner, "POST", "/v1/cluster/release", content, timeout_s=_CALL_S, shard=shard)


def node_id_of(advertised: str) -> str:
    """The name of a node that was given none: the address at which others call it, which stays over restarts."""
    parts = urlsplit(advertised)
    host = (parts.hostname or "node").replace(":", "-")
    return f"{host}-{parts.port or (443 if parts.scheme == 'https' else 80)}"


def checked_name(node_id: str | None, advertised: str | None, settings: ServerSettings) -> str:
    """The name of this node, if it can be used, and if others can know where it is. Raises BadSettings."""
    if advertised is None and settings.host in ("0.0.0.0", "::"):
        raise BadSettings(
            f"a node that listens on all addresses ({settings.host}) must say at which one the others reach it: give "
            "--advertise http://HOST:PORT"
        )
    if advertised is not None:
        _check_url(advertised)
    if node_id is None and advertised is None and settings.port == 0:
        raise BadSettings("a node on a free port (--port 0) needs a name that stays: give --node-id")
    name = node_id or node_id_of(advertised or f"http://{settings.host}:{settings.port}")
    if not _NAME.fullmatch(name):
        raise BadSettings(
            f"a node cannot have the name {name!r}: use letters, digits, '.', '_' and '-', beginning with a letter or "
            "a digit, at most 100 of them"
        )
    return name


def _check_url(advertised: str) -> None:
    try:
        parts = urlsplit(advertised)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        good = good and parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username)
    except ValueError:
        good = False
    if not good:
        raise BadSettings(f"{advertised!r} is not the address of a node: give --advertise http://HOST:PORT")


async def serve_node(
    world: World,
    url: str,
    description: ClusterDescription,
    broker: BrokerSettings,
    settings: ServerSettings,
    *,
    node_id: str | None,
    advertised: str | None,
    traits: NodeTraits | None = None,
    more: Sequence[Routes] = (),
    ready: Callable[[Sequence[str]], None],
    stop_asked: Awaitable[object],
    effective: Effective | None = None,
) -> bool:
    """Be a node of the cluster until `stop_asked` is done. Returns whether all calls in progress were finished."""
    for warning in check_listening(settings):
        logger.warning(warning)
    asyncio.get_running_loop().set_default_executor(FairThreads())
    name = checked_name(node_id, advertised, settings)
    node = ClusterNode(world, url, description, broker, settings, name, effective, more, traits)
    try:
        addresses = await node.listen(advertised)
        await node.start()
        ready(addresses)
        await node.run(stop_asked)
        logger.info("shutting down", extra={"connections": len(node.http.connections)})
        finished = await node.drain()
    finally:
        await node.close()
    if not finished:
        logger.warning("calls were cut off", extra={"drain_ms": settings.drain_ms})
    return finished
