"""Search through all queues and phases, a bounded piece at a time: see `holdfast.local.search`.

One call looks at no more than `scan_messages` messages. The pieces run as scans, so callers take turns.
"""

from __future__ import annotations

import asyncio

import msgspec

from holdfast.api.search import SearchedQueue, SearchHit, SearchPage
from holdfast.errors import HoldfastError
from holdfast.local.search import MessageSearch, SearchPlace, found_by_id, search_queue, size_of, topic_of_wanted
from holdfast.protocol import messages as wire
from holdfast.protocol.messages import SearchAnswer, SearchQuery
from holdfast.server.api.queues import as_listed
from holdfast.server.api.topics import described
from holdfast.server.routing import Routes
from holdfast.server.service import Call


async def search(call: Call, text: str, limit: int, after: str) -> SearchPage:
    """Search one piece for what somebody typed."""
    clock, most = call.service.world.clock, call.service.settings.scan_messages
    asked = MessageSearch(text, limit, after, most, now_ms=clock.now_ns() // 1_000_000, mono_ns=clock.monotonic_ns)
    if asked.wanted_id:
        asked.page.messages = await _by_id(call, asked.wanted_id)
        if asked.page.messages:
            return asked.page
    principal = call.principal
    seen = [name for name in await call.service.port.topics() if principal.sees(name) and principal.may("read", name)]
    names = asked.queues(seen)
    for i, name in enumerate(names):
        stopped = await _search_queue(call, asked, asked.begin(name))
        if stopped is not None:
            asked.stop(stopped, names[i + 1 :])
            break
    return asked.page


async def _by_id(call: Call, wanted: str) -> list[SearchHit]:
    """The message with this id, in each group that the caller may use."""
    try:
        topic = topic_of_wanted(wanted)
        if not (call.principal.sees(topic) and call.principal.may("read", topic)):
            return []
        groups = (await described(call, topic)).groups
    except HoldfastError:
        return []
    found = []
    for name in groups:
        group = await call.service.group(topic, name)
        one = await call.scan(lambda _scan, group=group: found_by_id(group.port, wanted))
        if one is not None:
            found.append(one)
    return found


async def _search_queue(call: Call, asked: MessageSearch, begin: SearchPlace) -> SearchPlace | None:
    """Search one queue from a place on; the place where it stopped, None if it was searched to its end."""
    report = SearchedQueue(queue=begin.topic)
    try:
        groups = (await described(call, begin.topic)).groups
        if not groups:
            asked.page.not_queues.append(begin.topic)
            return None
        asked.page.queues.append(report)
        ports = {name: (await call.service.group(begin.topic, name)).port for name in groups}
        report.messages = await asyncio.to_thread(size_of, ports)
        work = search_queue(asked, begin, ports, report)
        piece = next(work)
        while True:
            piece = work.send(await call.scan(piece.run))
    except StopIteration as end:
        stopped: SearchPlace | None = end.value
        return stopped
    except HoldfastError as error:
        asked.skip(report, error)
        return None


routes = Routes("search")


@routes.add("GET", "/v1/search", action="read", scope="any", query=SearchQuery)
async def find_messages(call: Call) -> SearchAnswer:
    """Find messages in all queues and phases that you may read, and say what was searched; `after` continues."""
    query: SearchQuery = call.query
    found = await search(call, query.q, query.limit, query.after)
    return SearchAnswer(
        messages=await asyncio.to_thread(lambda: list(map(_as_found, found.messages))),
        next=found.next,
        scanned=found.scanned,
        scanned_in_all=found.scanned_in_all,
        queues=[wire.QueueSearched(**msgspec.structs.asdict(each)) for each in found.queues],
        left=found.left,
        left_out=found.left_out,
        not_queues=found.not_queues,
        where=found.where,
    )


def _as_found(hit: SearchHit) -> wire.FoundMessage:
    facts = msgspec.structs.asdict(as_listed(hit.message, bodies=False)) | {"phase": hit.message.phase}
    return wire.FoundMessage(**facts, group=hit.group)
