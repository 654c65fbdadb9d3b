"""Pages of groups, with their lag; of workers, with their leases; of locks and documents; of schedules."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from holdfast.api.locks import Document, LockInfo
from holdfast.api.schedules import Schedule
from holdfast.api.topics import GroupInfo
from holdfast.broker.folder.layout import check_name
from holdfast.broker.streams import GroupFacts, MemberFacts, PartitionLag
from holdfast.broker.workers import WorkerInfo
from holdfast.local.group import until_ms
from holdfast.protocol.messages import Wire
from holdfast.protocol.topics import WaitersAt
from holdfast.server.api.admin import waiters_by_group, workers_shown
from holdfast.server.api.groups import _facts, _offsets, is_shown
from holdfast.server.api.schedules import may_change, sees
from holdfast.server.console.overview import OLD_S
from holdfast.server.console.rendering import SHOWN_BYTES, base_of, payload, render, spanning_page
from holdfast.server.http.messages import Response
from holdfast.server.service import Call

_MOST: Final = 500


class GroupsPageQuery(Wire, kw_only=True):
    """The groups to show: those with this text in their name or their topic's."""

    name: Annotated[str, Meta(max_length=200)] = ""


class GroupsFacts(msgspec.Struct, kw_only=True):
    """Groups, those of one topic together."""

    rows: list[GroupInfo]


def show_groups(call: Call, facts: GroupsFacts) -> Response:
    """The page of all groups."""
    found = facts.rows
    return render(
        call,
        "groups.html",
        rows=found[:_MOST],
        left_out=max(len(found) - _MOST, 0),
        query=call.query,
        old_s=OLD_S,
        may_seek={info.topic: call.principal.may("admin", info.topic) for info in found},
    )


@spanning_page("/ui/groups", GroupsFacts, show_groups, scope="any", query=GroupsPageQuery)
async def groups(call: Call) -> GroupsFacts:
    """All groups and their lag."""
    query: GroupsPageQuery = call.query
    wanted = query.name.lower()
    found = [
        info
        for info in await call.service.port.groups(None)
        if is_shown(call, info) and (wanted in info.name.lower() or wanted in info.topic.lower())
    ]
    found.sort(key=lambda info: (info.topic, info.name))
    return GroupsFacts(rows=found)


class GroupPageFacts(msgspec.Struct, kw_only=True):
    """One group: on which topics, its positions, and what it is as a stream group."""

    infos: list[GroupInfo]
    facts: GroupFacts | None
    offsets: list[PartitionLag]


def show_group(call: Call, facts: GroupPageFacts) -> Response:
    """The page of one group."""
    return render(
        call,
        "group.html",
        name=call.path["group"],
        infos=facts.infos,
        facts=facts.facts,
        offsets=facts.offsets,
        old_s=OLD_S,
        may_seek={info.topic: call.principal.may("admin", info.topic) for info in facts.infos},
    )


@spanning_page("/ui/groups/{group}", GroupPageFacts, show_group, scope="any")
async def group(call: Call) -> GroupPageFacts:
    """One group: its position in each partition and, for a stream group, its members."""
    name = call.path["group"]
    infos: list[GroupInfo] = [
        info for info in await call.service.port.groups(None) if info.name == name and is_shown(call, info)
    ]
    facts: GroupFacts | None = await asyncio.to_thread(_facts, call)
    offsets = [lag for lag in await asyncio.to_thread(_offsets, call, None) if call.principal.sees(lag.topic)]
    return GroupPageFacts(infos=infos, facts=facts, offsets=offsets)


# Workers: leases by holder, members of stream groups, waiting calls.

_SOME: Final = 5


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer that holds leases on messages of one group: how many, the first few, since when, until when."""

    name: str
    topic: str
    group: str
    count: int
    places: list[str]
    since_ms: int
    until_ms: int


class MemberRow(msgspec.Struct, frozen=True, kw_only=True):
    """A member of a stream group."""

    group: str
    facts: MemberFacts


class WorkersQuery(Wire, kw_only=True):
    """The queue whose workers to show; those of all queues, where none is named."""

    queue: Annotated[str, Meta(max_length=200)] = ""


class WorkersFacts(msgspec.Struct, kw_only=True):
    """Who works, who holds leases, who reads streams, and who waits."""

    workers: list[WorkerInfo]
    holders: list[Holder]
    members: list[MemberRow]
    lines: list[WaitersAt]
    waiting: int
    most: int


def show_workers(call: Call, facts: WorkersFacts) -> Response:
    """The page of workers."""
    return render(
        call,
        "workers.html",
        only=call.query.queue,
        base=base_of(call),
        workers=facts.workers[:_MOST],
        workers_left_out=max(len(facts.workers) - _MOST, 0),
        may_order=orderable(call, facts.workers),
        holders=facts.holders[:_MOST],
        left_out=max(len(facts.holders) - _MOST, 0),
        members=facts.members[:_MOST],
        lines=facts.lines,
        waiting=facts.waiting,
        most=facts.most,
    )


@spanning_page("/ui/workers", WorkersFacts, show_workers, scope="any", query=WorkersQuery)
async def workers(call: Call) -> WorkersFacts:
    """Lease holders, members of stream groups, and waiting calls."""
    service, only = call.service, call.query.queue
    holders, members = await asyncio.to_thread(_at_work, call)
    reported, lines = workers_shown(call), waiters_by_group(call)
    if only:
        reported = [worker for worker in reported if any(queue.topic == only for queue in worker.queues)]
        holders = [holder for holder in holders if holder.topic == only]
        members = [member for member in members if only in member.facts.topics]
        lines = [line for line in lines if line.topic == only]
    waiting, most = service.waits.waiting, service.waits.most
    return WorkersFacts(workers=reported, holders=holders, members=members, lines=lines, waiting=waiting, most=most)


def orderable(call: Call, workers: list[WorkerInfo]) -> dict[str, bool]:
    """The workers by id that the caller may drain and stop."""
    may = call.principal.may
    return {
        worker.id: worker.state not in ("lost", "stopped") and all(may("admin", queue.topic) for queue in worker.queues)
        for worker in workers
    }


def _at_work(call: Call) -> tuple[list[Holder], list[MemberRow]]:
    engine, principal = call.service.engine, call.principal
    sees = principal.sees
    holders = [
        holder for holder in _holders(call) if sees(holder.topic) and principal.may_use_queue_group(holder.group)
    ]
    holders.sort(key=lambda holder: holder.since_ms)
    members = [
        MemberRow(group=group.name, facts=facts)
        for group in engine.streams.all()
        if principal.may_use_group(group.name)
        for facts in group.describe().members
        if all(map(sees, facts.topics))
    ]
    return holders, members


def _holders(call: Call) -> Iterator[Holder]:
    for topic in call.service.engine.open_topics():
        for group in list(topic.groups.values()):
            found: dict[str, list[tuple[int, int, str]]] = {}
            for delivery in list(group.deliveries):
                with delivery.lock:
                    leases = list(delivery.group.leases.items())
                for offset, lease in leases:
                    place = f"{topic.name}-{delivery.number}-{offset}"
                    found.setdefault(lease.holder, []).append((lease.at_ms, until_ms(delivery, lease), place))
            for name, held in found.items():
                held.sort()
                yield Holder(
                    name=name,
                    topic=topic.name,
                    group=group.name,
                    count=len(held),
                    places=[place for _, _, place in held[:_SOME]],
                    since_ms=held[0][0],
                    until_ms=min(until for _, until, _ in held),
                )


class LocksQuery(Wire, kw_only=True):
    """The locks and documents to list, and the document to show in full."""

    name: Annotated[str, Meta(max_length=200)] = ""
    document: Annotated[str, Meta(max_length=200)] = ""


class LocksFacts(msgspec.Struct, kw_only=True):
    """Held locks, the names of documents, and one document if there is one of that name."""

    held: list[LockInfo]
    names: list[str]
    document: Document | None = None


def show_locks(call: Call, facts: LocksFacts) -> Response:
    """The page of locks and documents."""
    document = facts.document
    text = "" if document is None else json.dumps(document.value, indent=2, ensure_ascii=False)[:SHOWN_BYTES]
    return render(
        call,
        "locks.html",
        query=call.query,
        held=facts.held[:_MOST],
        may_release=call.principal.may_any("admin"),
        names=facts.names[:_MOST],
        left_out=max(len(facts.held) - _MOST, 0) + max(len(facts.names) - _MOST, 0),
        document=document,
        text=text,
    )


@spanning_page("/ui/locks", LocksFacts, show_locks, action="lock", scope="any", query=LocksQuery)
async def locks(call: Call) -> LocksFacts:
    """Held locks with their holders, and state documents."""
    query: LocksQuery = call.query
    port, may = call.service.locks, call.principal.may
    held = [info for info in await port.held_locks() if may("lock", info.name) and query.name in info.name]
    names = [name for name in await port.document_names() if may("lock", name) and query.name in name]
    document = None
    if query.document:
        call.principal.check("lock", query.document)
        document = await port.document(check_name(query.document, "document"))
    return LocksFacts(held=held, names=names, document=document)


class SchedulesQuery(Wire, kw_only=True):
    """The schedules to list, and the one to show in full."""

    name: Annotated[str, Meta(max_length=200)] = ""
    schedule: Annotated[str, Meta(max_length=200)] = ""


class SchedulesFacts(msgspec.Struct, kw_only=True):
    """Schedules, and when the one that is shown in full is due next."""

    schedules: list[Schedule]
    next_dues: list[datetime] = []


def show_schedules(call: Call, facts: SchedulesFacts) -> Response:
    """The page of schedules."""
    query: SchedulesQuery = call.query
    shown = next((each for each in facts.schedules if each.name == query.schedule), None)
    rows = [each for each in facts.schedules if query.name in each.name]
    return render(
        call,
        "schedules.html",
        query=query,
        rows=rows[:_MOST],
        left_out=max(len(rows) - _MOST, 0),
        may_change={each.name: may_change(call, each) for each in rows},
        shown=shown,
        text="" if shown is None else payload(shown.body).text,
        next_dues=facts.next_dues,
    )


@spanning_page("/ui/schedules", SchedulesFacts, show_schedules, scope="any", query=SchedulesQuery)
async def schedules(call: Call) -> SchedulesFacts:
    """Schedules: when each is due next, its last firings, and those that were missed."""
    query: SchedulesQuery = call.query
    port = call.service.schedules
    seen = [each for each in await port.all() if sees(call, each)]
    shown = next((each for each in seen if each.name == query.schedule), None)
    return SchedulesFacts(schedules=seen, next_dues=[] if shown is None else await port.next_dues(shown.name, _SOME))
