"""The console of a cluster: pages of all shards together, and the page of the cluster itself.

A page of one queue is made by the owner of its shard. A page about all queues is made here: each shard tells the facts
that it would show, to the same caller, and the facts are put together before the page is made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.api.listing import SearchPage
from holdfast.errors import HoldfastError, InvalidRequest, NotFound
from holdfast.protocol.media import fault_of
from holdfast.protocol.topics import Status
from holdfast.server.cluster.merging import MergedCall, ShardAnswer, joined_stream, merged_samples
from holdfast.server.console.groups import GroupPageFacts, GroupsFacts, LocksFacts, SchedulesFacts, WorkersFacts
from holdfast.server.console.messages import SearchFacts
from holdfast.server.console.overview import (
    AuditFacts,
    AuditPageQuery,
    HealthFacts,
    OverviewFacts,
    OverviewQuery,
    settings_shown,
)
from holdfast.server.console.rendering import SPANNING, error_page, render
from holdfast.server.http.messages import Request, Response
from holdfast.server.routing import Route, Routes, status_of
from holdfast.server.service import Call, Service
from holdfast.server.tokens import Principal

if TYPE_CHECKING:
    from holdfast.server.cluster.dispatch import Dispatcher
    from holdfast.server.cluster.node import ClusterNode
    from holdfast.server.http.connection import Answer

_CLUSTER: Final = "/ui/cluster"
_HEALTH: Final = "/ui/health"
_SEARCH: Final = "/ui/search"

cluster_routes: Final = Routes("console")


class ShardRow(msgspec.Struct, frozen=True, kw_only=True):
    """A shard: its owner and epoch, what its owner has not sent to the store, and who stands by, how far behind."""

    shard: int
    node: str = ""
    epoch: int = 0
    problem: str = ""
    silent_s: float = 0.0
    unsent_bytes: int = 0
    topics: int = 0
    standbys: list[tuple[str, float]] = []


@cluster_routes.add("GET", _CLUSTER, action="read", hidden=True)
async def cluster(_: Call) -> Response:
    """Nodes, shards and their owners: `ClusterConsole` answers this, and no shard."""
    raise NotFound("a shard has no page of the cluster: ask a node")


class ClusterConsole:
    """Answers the pages of a node."""

    def __init__(self, node: ClusterNode, dispatcher: Dispatcher) -> None:
        self._node = node
        self._dispatcher = dispatcher
        # What a page asks of the server that shows it; a node may own no shard.
        service: Any = SimpleNamespace(
            world=node.world,
            settings=node.settings,
            folder=node.shown,
            is_shard=True,
            tokens_problem=node.shared.access.tokens_problem,
        )
        self._service: Service = service

    async def answer(self, request: Request, route: Route, path: dict[str, str]) -> Answer:
        """Answer a request for a page that names no queue."""
        if route.pattern == _CLUSTER:
            call = await self._call(request, route, path)
            return await self._cluster(call)
        spanning = SPANNING.get(route.pattern)
        if spanning is None:
            return await self._dispatcher.to_shard(request, self._node.some_shard(), route, path)
        call = await self._call(request, route, path)
        if route.pattern == _SEARCH:
            return spanning.show(call, await self._search(call, path))
        merged = MergedCall(spanning.kind, _nothing, missing="unknown_group")
        answers = await self._dispatcher.ask_all(request, route, path, merged)
        if route.pattern == _HEALTH:
            return spanning.show(call, await self._health(request, answers))
        return spanning.show(call, _JOINS[route.pattern](call, answers))

    def error_page(self, request: Request, error: HoldfastError) -> Response | None:
        """An error as a page, if the request was for one."""
        return error_page(request, status_of(error), fault_of(error), self._known, self._node.settings, is_cluster=True)

    def _known(self, request: Request) -> Principal | None:
        try:
            return self._node.shared.access.principal(request)
        except HoldfastError:
            return None

    async def _call(self, request: Request, route: Route, path: dict[str, str]) -> Call:
        self._dispatcher.check_caller(request, route, path)
        call = Call(self._service, request, route, path, "")
        call.principal = self._node.shared.access.principal(request)
        if route.scope != "any":
            call.principal.check(route.action)
        await call.decode()
        return call

    async def _search(self, call: Call, path: dict[str, str]) -> SearchFacts:
        request, across = call.request, self._dispatcher.across
        if not call.query.q.strip():
            return SearchFacts()
        found, rows = SearchPage(messages=[]), []

        async def ask(shard: int, query: dict[str, str]) -> tuple[SearchPage, int]:
            facts: SearchFacts = await across.ask(request, shard, call.route, path, SearchFacts, query)
            if facts.found is None:
                raise InvalidRequest(facts.problem)
            rows.extend(facts.rows)
            return facts.found, len(facts.rows)

        try:
            await across.search_on(request, found, ask)
        except InvalidRequest as error:
            return SearchFacts(problem=str(error))
        return SearchFacts(found=found, rows=rows)

    async def _health(self, request: Request, answers: Sequence[ShardAnswer]) -> HealthFacts:
        pages, values = self._node.pages, [answer.value for answer in answers]
        sums = {name: sum(getattr(each, name) for each in values) for name in _HEALTH_SUMS}
        slowest = max((each.syncs for each in values), key=lambda syncs: syncs.p99 or 0.0)
        return HealthFacts(
            began_ns=pages.began_ns,
            server=await pages.status(request),
            settings=settings_shown(pages.effective),
            syncs=msgspec.structs.replace(slowest, count=sum(each.syncs.count for each in values)),
            **sums,
        )

    async def _cluster(self, call: Call) -> Response:
        """The page of nodes and shards. A shard that does not answer is shown without its details."""
        told = self._node.pages.told()
        route, path = self._node.pages.routes.find("GET", "/v1/admin/status")
        rows = []
        for each in told.shards:
            row = ShardRow(shard=each.shard, node=each.node, epoch=each.epoch, problem=each.problem)
            if each.node:
                row = await self._looked_at(call, row, route, path)
            rows.append(row)
        lags = [lag for row in rows for _, lag in row.standbys]
        return render(
            call,
            "cluster.html",
            told=told,
            rows=rows,
            moves=sum(max(row.epoch - 1, 0) for row in rows),
            lag_s=max(lags, default=None),
            orphans=sum(not row.node for row in rows),
        )

    async def _looked_at(self, call: Call, row: ShardRow, route: Route, path: dict[str, str]) -> ShardRow:
        try:
            status: Status = await self._dispatcher.across.ask(
                call.request, row.shard, route, path, Status, {}, "/v1/admin/status"
            )
        except HoldfastError as error:
            return msgspec.structs.replace(row, problem=str(error))
        store, names = status.store, self._node.processes()
        if store is None:
            return row
        return msgspec.structs.replace(
            row,
            epoch=store.epoch,
            silent_s=store.silent_seconds,
            unsent_bytes=store.unsent_bytes,
            topics=status.topics,
            problem=store.problem,
            standbys=[(names.get(each.process, each.process), each.lag_seconds) for each in store.standbys],
        )


_HEALTH_SUMS: Final = ("open_topics", "partitions", "segments", "log_bytes", "tiered_bytes", "traces_lost")


def _each(answers: Sequence[ShardAnswer], field: str) -> list[Any]:
    return [entry for answer in answers for entry in getattr(answer.value, field)]


def _overview(call: Call, answers: Sequence[ShardAnswer]) -> OverviewFacts:
    query: OverviewQuery = call.query
    names = sorted(_each(answers, "names"))
    if query.sort == "name":
        names = names[query.start : query.start + query.limit]
    shown = set(names)
    groups = [info for info in _each(answers, "groups") if info.topic in shown]
    groups.sort(key=lambda info: (-info.lag_seconds, -info.lag, info.topic, info.name))
    samples = [answer.value.samples for answer in answers if answer.value.samples is not None]
    disks = {answer.node: answer.value.concerns for answer in answers}  # those of a node share its disk
    free = [answer.value.free_bytes for answer in answers if answer.value.free_bytes is not None]
    return OverviewFacts(
        names=names,
        known=sum(answer.value.known for answer in answers),
        wanted=sum(answer.value.wanted for answer in answers),
        rows=sorted((row for row in _each(answers, "rows") if row.topic in shown), key=lambda row: row.topic),
        groups=groups,
        samples=merged_samples(samples) if samples else None,
        free_bytes=min(free, default=None),
        concerns=[
            msgspec.structs.replace(each, what=f"{each.what} on {node}") for node in disks for each in disks[node]
        ],
    )


def _groups(_: Call, answers: Sequence[ShardAnswer]) -> GroupsFacts:
    return GroupsFacts(rows=sorted(_each(answers, "rows"), key=lambda info: (info.topic, info.name)))


def _group(_: Call, answers: Sequence[ShardAnswer]) -> GroupPageFacts:
    streams = [(answer.shard, answer.value.facts) for answer in answers if answer.value.facts is not None]
    return GroupPageFacts(
        infos=sorted(_each(answers, "infos"), key=lambda info: info.topic),
        facts=joined_stream(streams),
        offsets=_each(answers, "offsets"),
    )


def _workers(_: Call, answers: Sequence[ShardAnswer]) -> WorkersFacts:
    nodes = {answer.node: answer.value for answer in answers}  # the shards of a node share its limits
    return WorkersFacts(
        workers=_each(answers, "workers"),
        holders=sorted(_each(answers, "holders"), key=lambda holder: holder.since_ms),
        members=_each(answers, "members"),
        lines=_each(answers, "lines"),
        waiting=sum(each.waiting for each in nodes.values()),
        most=sum(each.most for each in nodes.values()),
    )


def _locks(_: Call, answers: Sequence[ShardAnswer]) -> LocksFacts:
    return LocksFacts(
        held=sorted(_each(answers, "held"), key=lambda lock: lock.name),
        names=sorted(_each(answers, "names")),
        document=next((answer.value.document for answer in answers if answer.value.document is not None), None),
    )


def _schedules(_: Call, answers: Sequence[ShardAnswer]) -> SchedulesFacts:
    return SchedulesFacts(
        schedules=sorted(_each(answers, "schedules"), key=lambda each: each.name),
        next_dues=_each(answers, "next_dues"),
    )


def _audit(call: Call, answers: Sequence[ShardAnswer]) -> AuditFacts:
    query: AuditPageQuery = call.query
    acts, refused = (
        sorted(_each(answers, field), key=lambda act: act.time, reverse=True)[: query.limit]
        for field in ("acts", "refused")
    )
    return AuditFacts(kept=all(answer.value.kept for answer in answers), acts=acts, refused=refused)


def _nothing(*_: object) -> None:
    return None


_JOINS: Final[dict[str, Callable[[Call, Sequence[ShardAnswer]], Any]]] = {
    "/ui": _overview,
    "/ui/groups": _groups,
    "/ui/groups/{group}": _group,
    "/ui/workers": _workers,
    "/ui/locks": _locks,
    "/ui/schedules": _schedules,
    "/ui/audit": _audit,
}
