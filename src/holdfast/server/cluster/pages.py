"""What a node answers about itself: its health, its metrics and settings, and the cluster as it sees it."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

import holdfast
from holdfast.cluster.placement import Role
from holdfast.config.settings_file import Effective
from holdfast.env.process import descriptor_limit, open_descriptors
from holdfast.errors import Unavailable
from holdfast.protocol.media import JSON, MSGPACK, encode
from holdfast.protocol.messages import ServerValue
from holdfast.protocol.topics import SettingsTold, SettingTold, Status, Topics
from holdfast.server.api import admin
from holdfast.server.cluster.console import cluster_routes
from holdfast.server.cluster.merging import MergedCall
from holdfast.server.console import console_routes
from holdfast.server.http.messages import Refused, Request, Response
from holdfast.server.metrics import EngineMetrics, HttpMetrics, ServerMetrics, counter, gauge
from holdfast.server.routing import RouteTable
from holdfast.server.server import API

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from holdfast.server.cluster.node import ClusterNode
    from holdfast.server.http.connection import Answer


class ShardTold(ServerValue, kw_only=True):
    """A shard: the node that owns it, as far as this one knows, its address, and how many owners there have been."""

    shard: int
    node: str = ""
    url: str = ""
    epoch: int = 0
    problem: str = ""


class NodeTold(ServerValue, kw_only=True):
    """A node, and how many shards it owns."""

    node: str
    url: str
    shards: int
    leaving: bool = False
    live: bool = True
    version: str = ""
    zone: str = ""
    weight: float = 1.0
    max_shards: int = 0


class ClusterTold(ServerValue, kw_only=True):
    """The cluster as the node that answers sees it."""

    id: str
    place: str
    node: str
    lease_seconds: float
    shards: list[ShardTold]
    nodes: list[NodeTold]


class NodePages:
    """Answers the calls that are about the node, not about a topic."""

    def __init__(self, node: ClusterNode, effective: Effective | None) -> None:
        self._node = node
        self._effective = effective
        self.metrics = ClusterMetrics(node, node.settings.metrics_groups)
        self.routes = RouteTable()
        described = admin.description_routes(lambda: self.routes.routes)
        for each in (*API, *node.more, described):
            self.routes.include(each)
        self.routes.include(_AUDIT)
        if node.settings.console:
            for each in (*console_routes(None), cluster_routes):
                self.routes.include(each)
        self.began_ns = node.world.clock.now_ns()
        self._began_monotonic_ns = node.world.clock.monotonic_ns()
        self._pages: dict[str, Callable[[Request], Awaitable[Any]]] = {
            "/healthz": self._health,
            "/readyz": self._ready,
            "/metrics": self._metrics,
            "/v1/cluster": self._cluster,
            "/v1/settings": self._settings,
            "/v1/admin/status": self._status,
            "/openapi.json": self._described,
            "/docs": self._described,
        }

    def __contains__(self, path: str) -> bool:
        return path in self._pages

    async def answer(self, request: Request) -> Answer:
        """Answer a call for one of these pages."""
        if request.method not in ("GET", "HEAD"):
            raise Refused(
                f"{request.method} is not allowed at {request.path}; use GET, HEAD", status=405,
                headers=(("allow", "GET, HEAD"),),
            )  # fmt: skip
        began_ns = self._node.world.clock.monotonic_ns()
        found = await self._pages[request.path](request)
        if not isinstance(found, Response):
            media = MSGPACK if MSGPACK in request.headers.get("accept", "") else JSON
            found = Response(200, encode(found, media), media)
        took_ns = self._node.world.clock.monotonic_ns() - began_ns
        self.metrics.request_done(request.path, request.method, found.status, took_ns, 0, len(found.body))
        return found

    def _check_read(self, request: Request) -> None:
        self._node.shared.access.principal(request).check("read")

    async def _health(self, _: Request) -> admin.Health:
        return admin.Health(status="alive")

    async def _ready(self, _: Request) -> admin.Health:
        node = self._node
        if node.leaving:
            raise Unavailable("the node is shutting down; call another one, or try again when it is back")
        live = node.table.live(node.world.clock.monotonic_ns())
        orphans = []
        for slot in node.slots:
            owner = node.table.owner_of(slot.number)
            if slot.serving is None and (owner is None or owner.node not in live):
                orphans.append(slot.number)
        if orphans:
            raise Unavailable(
                f"no node is known to own {len(orphans)} of {len(node.slots)} shards, {orphans[0]} among them; another "
                "node takes over within seconds"
            )
        for slot in node.slots:
            stopped = None if slot.serving is None else admin.stopped_part(slot.serving.engine)
            if stopped is not None:
                raise Unavailable(
                    f"the disk failed under {stopped} of shard {slot.number}, which accepts nothing more; check the "
                    "disk, then restart the node"
                )
        return admin.Health(status="ready")

    async def _metrics(self, request: Request) -> Response:
        if self._node.settings.metrics_auth:
            self._check_read(request)
        body, media = await asyncio.to_thread(self.metrics.render, request.header("accept"))
        return Response(200, body, media, headers=[("cache-control", "no-store")])

    async def _cluster(self, request: Request) -> ClusterTold:
        self._check_read(request)
        return self.told()

    def told(self) -> ClusterTold:
        """The cluster as this node sees it."""
        node = self._node
        live = node.table.live(node.world.clock.monotonic_ns())
        shards = []
        for slot in node.slots:
            if slot.serving is not None:
                shards.append(ShardTold(shard=slot.number, node=node.me, url=node.advertised, epoch=slot.serving.epoch))
                continue
            owner = node.table.owner_of(slot.number)
            if owner is None:
                shards.append(ShardTold(shard=slot.number, problem=slot.problem))
            else:
                epoch = owner.shards[slot.number]
                shards.append(ShardTold(shard=slot.number, node=owner.node, url=owner.url, epoch=epoch))
        nodes = [
            NodeTold(
                node=node.me, url=node.advertised, shards=sum(slot.serving is not None for slot in node.slots),
                leaving=node.leaving, version=holdfast.__version__, **msgspec.structs.asdict(node.traits),
            ),
            *(
                NodeTold(
                    node=name, url=known.record.url, shards=len(known.record.shards), leaving=known.record.leaving,
                    live=name in live, version=known.record.version, **msgspec.structs.asdict(known.record.traits),
                )
                for name, known in node.table.known.items()
            ),
        ]  # fmt: skip
        return ClusterTold(
            id=node.description.id, place=node.shown, node=node.me, lease_seconds=node.description.lease_ms / 1000,
            shards=shards, nodes=sorted(nodes, key=lambda each: each.node),
        )  # fmt: skip

    @property
    def effective(self) -> Effective:
        """The settings in force, and where they come from."""
        node = self._node
        return self._effective or Effective(broker=node.shared.broker, server=node.settings, data_dir=node.shown)

    async def _settings(self, request: Request) -> SettingsTold:
        self._check_read(request)
        return SettingsTold(
            settings=[
                SettingTold(name=each.name, value=each.value, origin=str(each.origin), kind=each.origin.kind)
                for each in self.effective.settings()
            ]
        )

    async def _status(self, request: Request) -> Status:
        self._check_read(request)
        return await self.status(request)

    async def status(self, request: Request) -> Status:
        """This node's connections and limits, and the number of topics of the whole cluster."""
        node, clock = self._node, self._node.world.clock
        route, path = self.routes.find("GET", "/v1/topics")
        query, request.query, request.path, request.target = request.query, "limit=1000", "/v1/topics", b""
        topics = 0
        for each in await node.dispatcher.ask_all(request, route, path, MergedCall(Topics, _nothing)):
            topics += len(each.value.topics)
        request.query = query
        first, served = node.shared.first, [slot.serving for slot in node.slots if slot.serving is not None]
        return Status(
            version=holdfast.__version__,
            folder=node.shown,
            started_at=datetime.fromtimestamp(self.began_ns / 1e9, UTC),
            uptime_seconds=(clock.monotonic_ns() - self._began_monotonic_ns) / 1e9,
            disk_free_bytes=await asyncio.to_thread(node.free_bytes),
            connections=len(node.http.connections),
            max_connections=node.settings.max_connections,
            descriptors=open_descriptors(),
            max_descriptors=descriptor_limit(),
            waiters=0 if first is None else first.waits.waiting,
            max_waiters=node.settings.max_waiters,
            streams=sum(len(each.service.windows) for each in served),
            members=sum(len(each.service.members) for each in served),
            topics=topics,
            leaving=node.leaving,
            tokens_problem=node.shared.access.tokens_problem(),
        )

    async def _described(self, request: Request) -> Response:
        route, _ = self.routes.find("GET", request.path)
        found: Response = await route.handler(None)  # type: ignore[arg-type]  # it says the same to everybody
        return found


def _nothing(*_: object) -> None:
    return None


class ClusterMetrics(ServerMetrics):
    """The metrics of a node: of its listener, of the cluster as it sees it, and of its shards, by their number."""

    def __init__(self, node: ClusterNode, most_groups: int) -> None:
        HttpMetrics.__init__(self)
        self._node = node
        self._most_groups = most_groups
        self._of_shards: dict[int, tuple[Any, EngineMetrics]] = {}
        self._gauges = {}
        self.trace_export = None

    def collect(self) -> Iterator[Metric]:
        """All metrics except those of the process."""
        build = gauge("build_info", "Always 1; the labels say what runs.", "version", "python")
        build.add_metric([holdfast.__version__, platform.python_version()], 1)
        yield build
        yield from HttpMetrics.collect(self)
        yield from self._shards()
        node = self._node
        live = node.table.live(node.world.clock.monotonic_ns())
        for name, text, value in (
            ("cluster_nodes", "Nodes of the cluster that seem to live, with this one.", len(live) + 1),
            ("cluster_shards", "Shards of the cluster.", len(node.slots)),
            (
                "cluster_owned_shards",
                "Shards that this node owns.",
                sum(slot.serving is not None for slot in node.slots),
            ),
            (
                "cluster_followed_shards",
                "Shards that this node follows, to take them over.",
                sum(slot.is_waiting and slot.role is not Role.NOTHING for slot in node.slots),
            ),
        ):
            family = gauge(name, text)
            family.add_metric([], value)
            yield family
        for name, text, value in (
            ("cluster_passed_calls", "Calls passed on to other nodes.", node.passing.count),
            ("cluster_moved_topics", "Topics moved to shards of this node.", node.moved_topics),
            ("cluster_given_shards", "Shards that this node has handed over to another one.", node.moves),
        ):
            counted = counter(name, text)
            counted.add_metric([], value)
            yield counted

    def _shards(self) -> Iterator[Metric]:
        """The metrics of each shard's engine, put together by their names."""
        families: dict[str, Metric] = {}
        for slot in self._node.slots:
            served = slot.serving
            if served is None:
                self._of_shards.pop(slot.number, None)
                continue
            engine, metrics = self._of_shards.get(slot.number, (None, None))
            if metrics is None or engine is not served.engine:
                metrics = EngineMetrics(served.engine, self._most_groups)
                self._of_shards[slot.number] = (served.engine, metrics)
            for family in metrics.collect():
                known = families.setdefault(family.name, family)
                samples = [
                    sample._replace(labels={**sample.labels, "shard": str(slot.number)}) for sample in family.samples
                ]
                known.samples = samples if known is family else known.samples + samples
        yield from families.values()


_AUDIT: Final = admin.audit_routes(None)  # type: ignore[arg-type]  # only its path is asked for
