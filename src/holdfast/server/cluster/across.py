"""Calls about all shards that take several questions: pages that go on from shard to shard, and who has a schedule.

A page's `next` says where each shard, or the next shard, goes on; callers only hand it back. Steps of traces come in
order of time: those of a shard are shown only up to the time that all the others have told of, and a shard that has
told more than is shown is asked again for as much as is, so that its next page begins right behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlencode

import msgspec

from holdfast.broker.folder.layout import topic_of_id
from holdfast.broker.tracing import TraceStep
from holdfast.broker.tracing.log import Tallied
from holdfast.errors import HoldfastError, InvalidRequest, NotInCluster, Unavailable
from holdfast.protocol.media import JSON, MSGPACK, encode
from holdfast.protocol.messages import SearchAnswer
from holdfast.protocol.topics import Steps, Topics
from holdfast.server.cluster.merging import ShardAnswer
from holdfast.server.cluster.passing import Broken, NotPassed, copied
from holdfast.server.http.messages import Request, Response
from holdfast.server.routing import Route

if TYPE_CHECKING:
    from holdfast.api.schedules import Schedule
    from holdfast.server.cluster.dispatch import Dispatcher
    from holdfast.server.http.connection import Answer

_DONE: Final = "-"
_START: Final = "."
_MOST_STEPS: Final = 10_000
_MOST_NAMED: Final = 100
_CALL_S: Final = 5.0
_AGAIN_S: Final = 0.1


class AcrossShards:
    """Answers these calls, with what the dispatcher asks the shards."""

    def __init__(self, dispatcher: Dispatcher, shards: int) -> None:
        self._dispatcher = dispatcher
        self._node = dispatcher.node
        self._shards = shards

    # Search: shard by shard.

    async def search(self, request: Request, route: Route, path: dict[str, str]) -> Answer:
        """Search the shards one after the other, until there is a page."""
        self._dispatcher.check_caller(request, route, path)
        found = SearchAnswer(messages=[])

        async def ask(shard: int, query: dict[str, str]) -> tuple[SearchAnswer, int]:
            page: SearchAnswer = await self.ask(request, shard, route, path, SearchAnswer, query)
            found.messages.extend(page.messages)
            return page, len(page.messages)

        await self.search_on(request, found, ask)
        return self._answer(request, route, found)

    async def search_on(
        self, request: Request, found: Any, ask: Callable[[int, dict[str, str]], Awaitable[tuple[Any, int]]]
    ) -> None:
        """Search shard by shard until enough is found, or one of them has done enough for one call."""
        query = dict(parse_qsl(request.query, keep_blank_values=True))
        shard, inner = self._search_place(query.pop("after", ""))
        limit = query.get("limit", "50")
        left = int(limit) if limit.isdigit() else 1  # a shard says what is wrong with it
        while shard < self._shards and left > 0:
            wanted = str(left) if limit.isdigit() else limit
            page, count = await ask(shard, {**query, "limit": wanted, "after": inner})
            found.queues = [*found.queues, *page.queues]
            found.not_queues = [*found.not_queues, *page.not_queues]
            found.left = [*found.left, *page.left]
            found.scanned += page.scanned
            found.scanned_in_all += page.scanned_in_all
            found.left_out += page.left_out
            found.where = page.where or found.where
            left -= count
            inner = page.next
            if inner:
                break
            shard += 1
        if shard < self._shards:
            found.next = f"{shard}{_START}{inner}"
            await self._name_left(request, found, shard + 1 if inner else shard)

    def _search_place(self, after: str) -> tuple[int, str]:
        if not after:
            return 0, ""
        digits, start, inner = after.partition(_START)
        if not (start and digits.isascii() and digits.isdigit() and len(digits) <= 4 and int(digits) < self._shards):
            raise InvalidRequest(f"after={after!r} cannot be used here: give what the page before named as `next`")
        return int(digits), inner

    async def _name_left(self, request: Request, found: Any, shard: int) -> None:
        """Name the queues of shards that were not reached."""
        route, path = self._node.pages.routes.find("GET", "/v1/topics")
        for each in range(shard, self._shards):
            topics: Topics = await self.ask(request, each, route, path, Topics, {"limit": "1000"}, "/v1/topics")
            names = [topic.name for topic in topics.topics]
            room = max(_MOST_NAMED - len(found.left), 0)
            found.left += names[:room]
            found.left_out += len(names[room:])

    # Traces: all shards at once, in order of time.

    async def traces(self, request: Request, route: Route, path: dict[str, str]) -> Answer:
        """Steps of one message, of one topic, or of all shards."""
        query = dict(parse_qsl(request.query, keep_blank_values=True))
        if "message_id" in path:
            return await self._dispatcher.by_topic(request, topic_of_id(path["message_id"]), route, path)
        if "topic" in query:
            return await self._dispatcher.by_topic(request, query["topic"], route, path)
        self._dispatcher.check_caller(request, route, path)
        if route.pattern.endswith("/stats"):
            return self._answer(request, route, await self._stats(request, route, path, query))
        return self._answer(request, route, await self._steps(request, route, path, query))

    async def _steps(self, request: Request, route: Route, path: dict[str, str], query: dict[str, str]) -> Steps:
        places = self._trace_places(query.pop("after", ""))
        limit = query.get("limit", "100")
        is_last = query.get("last", "") in ("true", "1")

        async def ask(shard: int, most: str) -> Steps:
            place = places[shard]
            if place == _DONE:
                return Steps(steps=[])
            more = {"after": place} if place else {}
            found: Steps = await self.ask(request, shard, route, path, Steps, {**query, "limit": most, **more})
            return found

        pages = list(await asyncio.gather(*(ask(shard, limit) for shard in range(self._shards))))
        shown = shown_steps(pages, int(limit), is_last=is_last)
        kept: list[tuple[TraceStep, ...]] = []
        for shard, page in enumerate(pages):
            mine = [step for number, step in shown if number == shard]
            kept.append(tuple(mine))
            if len(mine) == len(page.steps):
                places[shard] = page.next or _DONE
            elif mine:
                again = await ask(shard, str(len(mine)))
                places[shard] = again.next or _DONE
        next_page = "" if all(place == _DONE for place in places) else ",".join(places)
        return Steps(steps=[step for _, step in shown], next=next_page)

    def _trace_places(self, after: str) -> list[str]:
        if not after:
            return [""] * self._shards
        places = after.split(",")
        good = all(place in ("", _DONE) or (place.isascii() and place.isdigit()) for place in places)
        if len(places) != self._shards or not good:
            raise InvalidRequest(f"after={after!r} cannot be used here: give what the page before named as `next`")
        return places

    async def _stats(self, request: Request, route: Route, path: dict[str, str], query: dict[str, str]) -> Any:
        """All steps are counted here, because quantiles of shards cannot be put together."""
        steps_route, _ = self._node.pages.routes.find("GET", "/v1/traces")
        tallied = Tallied()
        for shard in range(self._shards):
            place = ""
            while True:
                asked = {**query, "limit": str(_MOST_STEPS)} | ({"after": place} if place else {})
                page: Steps = await self.ask(request, shard, steps_route, {}, Steps, asked, "/v1/traces")
                for step in page.steps:
                    tallied.add(step)
                place = page.next
                if not place:
                    break
        return tallied.stats()

    # Schedules: each lives with its topic, so somebody has to find it by its name.

    async def schedule(self, request: Request, route: Route, path: dict[str, str]) -> Answer:
        """A call about one schedule, for the shard of its topic."""
        name, shard_of = path["schedule"], self._node.places.shard_of
        self._dispatcher.check_caller(request, route, path)
        asking = (self._topic_of_schedule(shard, name) for shard in range(self._shards))
        known = next(filter(None, await asyncio.gather(*asking)), "")
        topic: object = known
        if request.method == "PUT":
            topic = (await self._dispatcher.body(request)).get("topic")
            if known and isinstance(topic, str) and shard_of(topic) != shard_of(known):
                raise NotInCluster(
                    f"a cluster cannot change the topic of the schedule {name} to one in another shard: delete the "
                    "schedule, then create it again"
                )
        return await self._dispatcher.by_topic(request, topic, route, path)

    async def _topic_of_schedule(self, shard: int, name: str) -> str:
        """The topic of a schedule that a shard has; empty if it has none of this name."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _CALL_S
        while True:
            served, owner = self._node.serving(shard), self._node.owner_of(shard)
            try:
                if served is not None:
                    return topic_of(await served.service.schedules.get(name))
                if owner is not None:
                    answer = await self._node.passing.call(
                        owner, "POST", "/v1/cluster/schedule", name.encode(), timeout_s=_CALL_S, shard=shard
                    )
                    if answer.status == 200:
                        return msgspec.json.decode(answer.body, type=str)
            except (NotPassed, Broken, TimeoutError, HoldfastError):
                pass  # its owner may be another one by now
            if loop.time() >= until:
                raise Unavailable(f"shard {shard} of the cluster does not say whether it has the schedule; try again")
            await self._node.wait_for_change(_AGAIN_S)

    # Within

    async def ask(
        self, request: Request, shard: int, route: Route, path: dict[str, str], kind: Any, query: dict[str, str],
        at: str = "",
    ) -> Any:  # fmt: skip
        """What one shard answers to another query, or at another path."""
        headers = {name: value for name, value in request.headers.items() if name != "if-none-match"}
        headers["accept"] = MSGPACK
        asked = copied(
            request, peer=request.peer, certificate=request.certificate, path=at or request.path, headers=headers
        )
        asked.query, asked.target = urlencode({name: value for name, value in query.items() if value}), b""
        answer: ShardAnswer = await self._dispatcher.ask_one(asked, shard, route, path, kind)
        return answer.value

    @staticmethod
    def _answer(request: Request, route: Route, value: object) -> Response:
        media = MSGPACK if MSGPACK in request.headers.get("accept", "") else JSON
        return Response(route.status, encode(value, media), media)


def shown_steps(pages: Sequence[Steps], limit: int, *, is_last: bool) -> list[tuple[int, TraceStep]]:
    """The steps of one page, oldest first, each with its shard: none that a shard with more could still precede."""
    found = [(shard, step) for shard, page in enumerate(pages) for step in page.steps]
    found.sort(key=lambda each: each[1].at_ns)
    open_pages = [page for page in pages if page.next]
    if any(not page.steps for page in open_pages):
        return []  # such a page only moves on
    if is_last:
        first_ns = max((page.steps[0].at_ns for page in open_pages), default=0)
        return [each for each in found if each[1].at_ns >= first_ns][-limit:]
    last_ns = min((page.steps[-1].at_ns for page in open_pages), default=None)
    return [each for each in found if last_ns is None or each[1].at_ns <= last_ns][:limit]


def topic_of(schedule: Schedule | None) -> str:
    """The topic of a schedule; empty if there is none."""
    return "" if schedule is None else schedule.topic
