"""Which shard a call is for, and who answers it: this node, another one, or all of them.

Every request of a node comes here first. What it names says where it belongs: a topic, a lock, a producer. If this node
owns the shard, its app answers as a server of its own would. If another node does, the call is passed on. If nobody
does for the moment, because the shard is moving or its owner has just died, the call waits a little, and is then
refused in a way that clients repeat.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import parse_qsl, quote, unquote

import msgspec

from holdfast.broker.folder.layout import SCHEMAS_TOPIC, parse_lease
from holdfast.broker.producers import ProducerId
from holdfast.cluster.placement import shard_of_key
from holdfast.errors import Forbidden, HoldfastError, InvalidRequest, NotInCluster, Unauthenticated, Unavailable
from holdfast.protocol.media import JSON, MSGPACK, OWNER, ErrorAnswer, Fault, decode, encode, error_of, fault_of
from holdfast.protocol.schemas import REGISTRY
from holdfast.protocol.topics import Joined, ProducerBegun
from holdfast.server.callers import challenges_for, check_fetch
from holdfast.server.cluster.across import AcrossShards
from holdfast.server.cluster.console import ClusterConsole
from holdfast.server.cluster.merging import MERGED, MergedCall, ShardAnswer
from holdfast.server.cluster.passing import (
    NODE,
    SHARD,
    TOPIC,
    Broken,
    Moved,
    NotPassed,
    PassedHead,
    Unread,
    break_off,
    copied,
    read_caller,
    target_of,
)
from holdfast.server.cluster.shards import ServedShard, is_failed
from holdfast.server.http.heads import HOP, KnownHead
from holdfast.server.http.messages import (
    DeferredAnswer,
    Refused,
    RenderedAnswer,
    Request,
    Response,
    StreamResponse,
    no_room,
)
from holdfast.server.routing import Route, RouteTable, retry_after_of, status_of
from holdfast.server.service import check_right

if TYPE_CHECKING:
    from holdfast.cluster.registry import NodeRecord
    from holdfast.server.cluster.node import ClusterNode
    from holdfast.server.http.connection import Answer

logger = logging.getLogger(__name__)

WAIT_S: Final = 5.0  # how long a call waits for a shard to have an owner that can be reached
_AGAIN_S: Final = 0.1
_SAFE: Final = frozenset({"GET", "HEAD"})
_INSIDE: Final = "/v1/cluster/"
_MOST_BODY: Final = 1024 * 1024  # of a call whose body says where it belongs
_BY_KEY: Final = ("/v1/locks/{name}", "/v1/state/{name}")
_MOVE: Final = "/v1/topics/{topic}/move"
_REDRIVE: Final = "/v1/queues/{queue}/dead/redrive"
_MEMBER: Final = "/v1/groups/{group}/members/{member}"
_FOR_SPARK: Final = ("/v1/spark/", "/v1/staged")  # each call names its topic in the query

Way: TypeAlias = "Callable[[Request, Route, dict[str, str]], Awaitable[Answer]]"
# What a single server can do, and a cluster cannot yet.
_NOT_YET: Final = (("/v1/transactions", "use single calls with dedup ids, or a folder of its own"),)


class Dispatcher:
    """Answers the requests of a node."""

    def __init__(self, node: ClusterNode, routes: RouteTable) -> None:
        self.node = node
        self._routes = routes
        self._shards = node.description.shards
        self._places = node.places
        self._secret = node.description.secret.encode()
        self._meter = node.shared.meter
        self._heads = node.shared.heads
        self._mono_ns = node.world.clock.monotonic_ns
        self.across = across = AcrossShards(self, self._shards)
        self._console = ClusterConsole(node, self) if node.settings.console else None
        self._ways: dict[tuple[str, str], Way] = {
            ("POST", "/v1/topics"): self._create,
            ("POST", "/v1/groups/{group}/reset"): partial(self._by_body, "topic"),
            ("POST", "/v1/groups/{group}/members"): self._join,
            ("POST", "/v1/producers"): self._begin_producer,
            ("POST", _MOVE): self._move,
            ("POST", _REDRIVE): self._redrive,
            ("GET", "/v1/search"): across.search,
            ("GET", "/v1/traces"): across.traces,
            ("GET", "/v1/traces/stats"): across.traces,
            ("GET", "/v1/traces/{message_id}"): across.traces,
        }
        self._starts: tuple[tuple[str | tuple[str, ...], Way], ...] = (
            (REGISTRY, self._to_registry),
            (_BY_KEY, self._to_key),
            (_FOR_SPARK, self._for_spark),
            (_MEMBER, self._to_member),
        )

    async def handle(self, request: Request) -> Answer:
        """Answer a request, like `ServerApp.handle`."""
        try:
            return await self._answer(request)
        except HoldfastError as error:
            return self.fault(request, error)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:
            logger.exception("call failed", extra={"path": request.path})
            fault = Fault(
                code="internal", message="this node failed to handle the call; its log says why", retryable=False
            )
            return Response(500, encode(ErrorAnswer(error=fault), JSON), JSON)

    def answer_known(
        self, head: KnownHead, sequence: int | None, content: bytes, peer: str, certificate: Any
    ) -> RenderedAnswer | DeferredAnswer | Exception | None:
        """Answer a request with a known head in one step, if this node still owns the shard that it is for."""
        shard = self._places.shard_of(head.topic)
        served = self.node.serving(shard)
        if head.service is not (served and served.service) or (isinstance(head, PassedHead) and head.shard != shard):
            self._heads.drop(head)  # the topic is elsewhere by now
            return None
        if served is None:
            return self._pass_known(head, shard, sequence, content, peer, certificate)
        if served.mover.moves.is_refused(head.topic):
            return None
        answer = served.app.answer_known(head, sequence, content, peer, certificate)
        if isinstance(answer, DeferredAnswer):
            served.began()
            answer.at_end = served.ended
        return answer

    def _pass_known(
        self, head: KnownHead, shard: int, sequence: int | None, content: bytes, peer: str, certificate: Any
    ) -> DeferredAnswer | Exception | None:
        """Pass on a request with a known head, and its answer back as it comes."""
        owner = self.node.owner_of(shard)
        if owner is None or certificate or not isinstance(head, PassedHead):
            return None
        try:
            principal = self.node.shared.access.caller(head.headers, peer, certificate)
            if head.route.action not in principal.everywhere:
                check_right(principal, head.route, head.variables)
        except HoldfastError as error:
            return error
        passing = self.node.passing
        connection = passing.rested(owner, shard, head.headers.get("authorization") or peer)
        if connection is None:
            return None
        answer = passing.pass_known(connection, owner, head.content(owner, peer, sequence, content))
        answer.render = partial(self._passed_back, head, owner, self._mono_ns(), len(content))
        return answer

    def _passed_back(
        self, head: KnownHead, owner: NodeRecord, began_ns: int, received: int, answer: bytes
    ) -> RenderedAnswer:
        took_ns = self._mono_ns() - began_ns
        self._meter.request_done(head.route.pattern, head.method, int(answer[9:12]), took_ns, received, len(answer))
        line, _, rest = answer.partition(b"\r\n")
        return b"%b\r\n%b: %b\r\n%b" % (line, OWNER.encode(), owner.url.encode("latin-1"), rest), None, None

    async def _read(self, request: Request, failure: Unread | NotPassed) -> Answer | None:
        """The answer to a call with a known head that could not be passed back as it came; None if nothing was done."""
        request.failure = None
        if isinstance(failure, NotPassed):
            return None
        try:
            answer = await self.node.passing.received(request, failure.connection, failure.node)
        except NotPassed as error:
            await self._not_taken(failure.node, error)
            return None
        except Broken as error:
            self._cut_off(request, failure.node, error)
            raise ConnectionResetError(str(error)) from error
        answer.headers.append((OWNER, failure.node.url))
        return answer

    def _cut_off(self, request: Request, node: NodeRecord, error: Broken) -> None:
        self.node.not_reached(node, None)
        logger.warning("a call was cut off", extra={"path": request.path, "node": node.node, "why": str(error)})
        break_off(request)

    def refuse(self, refused: Refused) -> Response:
        """The answer to something that is not a valid request."""
        answer = _faulty(refused, JSON)
        answer.headers += refused.headers
        return answer

    # Which way

    async def _answer(self, request: Request) -> Answer:
        if isinstance(request.failure, (Unread, NotPassed)):
            answer = await self._read(request, request.failure)
            if answer is not None:
                return answer
        is_passed = NODE in request.headers
        if is_passed:
            if not hmac.compare_digest(request.headers[NODE].encode("utf-8", "replace"), self._secret):
                raise Forbidden(f"the header {NODE} is for the nodes of this cluster: leave it out")
            shard, topic = _number_in(request.headers.get(SHARD, "-1")), unquote(request.headers.get(TOPIC, ""))
            read_caller(request)
            if request.path.startswith(_INSIDE):
                return await self.node.answer(request, shard)
            return await self._owned(request, shard, topic)
        if request.path == "/v1/cluster" or request.path in self.node.pages:
            return await self.node.page(request)
        for start, instead in _NOT_YET:
            if request.path == start or request.path.startswith(f"{start}/"):
                raise NotInCluster(f"a cluster cannot answer {request.path} yet; {instead}")
        route, path = self._routes.find(request.method, request.path)
        return await self._routed(request, route, path)

    async def _routed(self, request: Request, route: Route, path: dict[str, str]) -> Answer:
        way = self._way(route, path)
        if way is not None:
            return await way(request, route, path)
        merged = MERGED.get((route.method, route.pattern))
        if merged is None:
            raise NotInCluster(f"a cluster cannot answer {request.method} {request.path} yet")
        query = dict(parse_qsl(request.query))
        if merged.by_topic and "topic" in query:
            return await self.by_topic(request, query["topic"], route, path)
        return await self._merged(request, route, path, merged, query)

    def _way(self, route: Route, path: dict[str, str]) -> Way | None:
        """What finds out where a call belongs; None if that is in all shards."""
        pattern = route.pattern
        way = self._ways.get((route.method, pattern))
        if way is None and ("queue" in path or "topic" in path):
            way = self._to_named
        if way is None:
            way = next((each for start, each in self._starts if pattern.startswith(start)), None)
        if way is None and self._console is not None and (pattern == "/" or pattern.startswith("/ui")):
            way = self._console.answer
        if way is None and "schedule" in path:
            way = self.across.schedule
        return way

    async def _to_named(self, request: Request, route: Route, path: dict[str, str]) -> Answer:
        return await self.by_topic(request, path.get("queue") or path["topic"], route, path)

    async def _to_key(self, request: Request, route: Route, path: dict[str, str]) -> Answer:
        shard = shard_of_key(path["name"], self._shards)
        self._check_lease(request, shard)
        return await self.to_shard(request, shard, route, path)

    async def _to_registry(self, request: Request, route: Route, path: dict[str, str]) -> Answer:
        """Schemas are in the shard of the topic that keeps them, which cannot move."""
        return await self.by_topic(request, SCHEMAS_TOPIC, route, path)

    async def _for_spark(self, request: Request, route: Route, path: dict[str, str]) -> Answer:
        return await self.by_topic(request, self._topic_asked(request), route, path)

    async def by_topic(self, request: Request, topic: object, route: Route, path: dict[str, str]) -> Answer:
        """By a topic that the query or the body names; if it is no name at all, any shard can say so."""
        name = topic if isinstance(topic, str) else ""
        return await self.to_shard(request, self._places.shard_of(name), route, path, topic=name)

    async def _create(self, request: Request, route: Route, path: dict[str, str]) -> Answer:
        """Where the body says, or else by its name."""
        body = await self.body(request)
        if body.get("shard") is None:
            return await self.by_topic(request, body.get("name"), route, path)
        return await self.to_shard(request, self._shard_in(body["shard"]), route, path)

    async def _move(self, request: Request, route: Route, path: dict[str, str]) -> Answer:
        """The owner of the shard to which a topic is to go sees to that."""
        return await self.to_shard(request, self._shard_in((await self.body(request)).get("to")), route, path)

    def _shard_in(self, given: object) -> int:
        """A shard that a body names; what is none of ours is refused, and what is no number by whoever decodes it."""
        if type(given) is int and not 0 <= given < self._shards:
            raise InvalidRequest(f"there is no shard {given}: this cluster has {self._shards}, from 0")
        return given if type(given) is int else self.node.some_shard()

    async def _by_body(self, field: str, request: Request, route: Route, path: dict[str, str]) -> Answer:
        return await self.by_topic(request, (await self.body(request)).get(field), route, path)

    def _topic_asked(self, request: Request) -> str:
        topic = dict(parse_qsl(request.query)).get("topic")
        if not topic:
            raise NotInCluster(
                f"a cluster answers {request.path} for one topic at a time: name it with topic=, as the source and "
                "sink of this release do; upgrade holdfast where Spark runs"
            )
        return topic

    def _check_lease(self, request: Request, shard: int) -> None:
        """A document can be guarded by a lock only if one shard has both."""
        lease_id = dict(parse_qsl(request.query)).get("lease_id")
        if lease_id is not None and shard_of_key(parse_lease(lease_id).name, self._shards) != shard:
            raise NotInCluster(
                "a cluster cannot guard a document by a lock of another name, because they may be in two shards: "
                "acquire the lock that has the document's name"
            )

    async def _redrive(self, request: Request, route: Route, path: dict[str, str]) -> Answer:
        """Dead letters can be redriven into another topic only if one shard has both."""
        to = (await self.body(request)).get("to")
        if isinstance(to, str) and self._places.shard_of(to) != self._places.shard_of(path["queue"]):
            raise NotInCluster(
                f"a cluster cannot redrive into {to!r} yet, because that topic is in another shard: redrive into the "
                "topic itself, or receive the dead letters and publish them there"
            )
        return await self._to_named(request, route, path)

    async def body(self, request: Request) -> dict[str, Any]:
        """The body of a small call, which stays to be read. If it is not valid, whoever answers the call says so."""
        if not request.complete or "content-encoding" in request.headers:
            content = await request.read(_MOST_BODY, 100)
            request.feed(content)
            request.complete = True
            request.headers = {
                name: value
                for name, value in request.headers.items()
                if name not in ("content-encoding", "transfer-encoding", "content-length")
            }
        content = request.content if request.buffered else b""
        try:
            found = msgspec.msgpack.decode(content) if request.media == MSGPACK else json.loads(content or b"{}")
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    # One shard

    async def to_shard(
        self,
        request: Request,
        shard: int,
        route: Route,
        path: Mapping[str, str],
        target: bytes = b"",
        *,
        topic: str = "",
    ) -> Answer:
        """The answer of the shard's owner. Waits a little if there is none, or while the topic is moving."""
        answer = await self._at_once(request, shard, topic)
        if answer is not None:
            return answer
        if HOP in request.headers:
            return self.node.moved()
        self.check_caller(request, route, path)
        loop = asyncio.get_running_loop()
        until = loop.time() + WAIT_S
        while True:
            if topic:
                shard = self._places.shard_of(topic)
            answer = await self._at_once(request, shard, topic)
            if answer is not None:
                return answer
            owner = self.node.owner_of(shard)
            if owner is not None and self.node.serving(shard) is None:
                answer = await self._passed(request, owner, shard, route, path, target, topic)
                if answer is not None:
                    return answer
            if loop.time() >= until:
                raise self._not_answered(shard, topic)
            await self.node.wait_for_change(_AGAIN_S)

    async def _at_once(self, request: Request, shard: int, topic: str) -> Answer | None:
        """The answer of this node, if it owns the shard and the topic is there."""
        served = self.node.serving(shard)
        if served is None or (topic and not served.has(topic)):
            return None
        return await self._here(request, served)

    async def _passed(
        self, request: Request, owner: NodeRecord, shard: int, route: Route, path: Mapping[str, str], target: bytes,
        topic: str,
    ) -> Answer | None:  # fmt: skip
        """The answer of another node, which it names: our clients go straight there the next time.

        None if the call can be made again. The head is kept for those who do not go straight.
        """
        began_ns = self._mono_ns()
        try:
            answer = await self.node.passing.pass_on(request, owner, shard, target or target_of(request), topic)
        except NotPassed as error:
            await self._not_taken(owner, error)
            return None
        except Broken as error:
            if request.method not in _SAFE:
                self._cut_off(request, owner, error)
                raise ConnectionResetError(str(error)) from error
            self.node.not_reached(owner, None)
            return None
        answer.headers.append((OWNER, owner.url))
        if not target and answer.status < 300 and self._heads.is_to_keep(request, route):
            self._heads.learn(request, self.node.passing.known(request, route, dict(path), shard))
        sent = len(answer.body) if isinstance(answer, Response) else 0
        took_ns = self._mono_ns() - began_ns
        self._meter.request_done(route.pattern, request.method, answer.status, took_ns, request.received, sent)
        return answer

    async def _not_taken(self, node: NodeRecord, error: NotPassed) -> None:
        """Take note that a node did not take a call, and find out where the topic is if it is elsewhere."""
        self.node.not_reached(node, error)
        if isinstance(error, Moved):
            await self._places.refresh(error.version)

    def _not_answered(self, shard: int, topic: str) -> HoldfastError:
        served = self.node.serving(shard)
        refusal = None if served is None or not topic else served.mover.moves.refusal(topic)
        return refusal or Unavailable(
            f"shard {shard} of the cluster, where this belongs, has no owner that this node can reach; nothing "
            "was done. Try again: another node takes over within seconds"
        )

    async def _owned(self, request: Request, shard: int, topic: str) -> Answer:
        """The answer to a call that another node has passed on."""
        return await self._at_once(request, shard, topic) or self.node.moved()

    async def _here(self, request: Request, served: ServedShard) -> Answer | None:
        """The answer of a shard of this node; None if it was lost, and the call can be made again."""
        answer = await served.handle(request)
        if not served.is_lost or not is_failed(answer):
            return answer
        if request.method in _SAFE:
            return None
        break_off(request)  # whether it was done, only the next owner knows
        raise ConnectionResetError("the shard has another owner")

    def check_caller(self, request: Request, route: Route, path: Mapping[str, str]) -> None:
        """Refuse a call that would be refused anyway, before it is passed on; and what only this node can see."""
        if "sec-fetch-site" in request.headers:
            check_fetch(request, page=False)
        if route.action != "open":
            try:
                principal = self.node.shared.access.principal(request)
                if request.in_reserve and (not principal.may("admin") or "too_many_waiters" in route.errors):
                    raise no_room()  # those connections are for health checks and admins
                if route.named is not None or route.scope == "any":
                    check_right(principal, route, path)
            except (Forbidden, Unauthenticated):
                if not route.act or request.in_reserve:
                    raise
                # The owner refuses it, too, and writes that to the audit log.

    # All shards

    async def _merged(
        self, request: Request, route: Route, path: Mapping[str, str], merged: MergedCall, query: dict[str, str]
    ) -> Answer:
        self.check_caller(request, route, path)
        answers = await self.ask_all(request, route, path, merged)
        value = merged.merge(answers, query)
        if value is None:
            return Response(204)
        media = MSGPACK if MSGPACK in request.headers.get("accept", "") else JSON
        return Response(route.status, encode(value, media), media)

    async def ask_all(
        self, request: Request, route: Route, path: Mapping[str, str], merged: MergedCall
    ) -> list[ShardAnswer]:
        """What each shard answers; raises the first error that is not about something missing there."""
        await self.body(request)
        asking = [self.ask_one(request, shard, route, path, merged.kind) for shard in range(self._shards)]
        found = await asyncio.gather(*asking, return_exceptions=True)
        errors = [each for each in found if isinstance(each, BaseException)]
        answers = [each for each in found if isinstance(each, ShardAnswer)]
        for error in errors:
            is_missing = isinstance(error, HoldfastError) and error.code == merged.missing
            if not is_missing or not answers:
                raise error
        return answers

    async def ask_one(
        self, request: Request, shard: int, route: Route, path: Mapping[str, str], kind: Any
    ) -> ShardAnswer:
        """What one shard answers, as a value; raises its error."""
        headers = {**request.headers, "accept": MSGPACK}
        asked = copied(request, peer=request.peer, certificate=request.certificate, path=request.path, headers=headers)
        answer = await self.to_shard(asked, shard, route, path)
        value = await _value_of(answer, kind)
        owner = self.node.owner_of(shard)
        here = self.node.serving(shard) is not None or owner is None
        return ShardAnswer(shard, self.node.me if here or owner is None else owner.node, value)

    # Members of stream groups: the number of the shard goes before the member's id.

    async def _join(self, request: Request, route: Route, path: dict[str, str]) -> Answer:
        topics = (await self.body(request)).get("topics")
        names = [name for name in topics if isinstance(name, str)] if isinstance(topics, list) else []
        shards = {self._places.shard_of(name) for name in names} or {0}
        if len(shards) > 1:
            raise NotInCluster(
                f"a cluster cannot have one member read {', '.join(sorted(names))} yet, because these topics are in "
                "different shards: join with one member for each topic; they may use the same group"
            )
        (shard,) = shards
        answer = await self.to_shard(request, shard, route, path, topic=names[0] if len(names) == 1 else "")
        if not isinstance(answer, Response) or answer.status != route.status:
            return answer
        media = MSGPACK if answer.media == MSGPACK else JSON
        joined: Joined = decode(answer.body, media, Joined)
        joined.member = f"{shard}-{joined.member}"
        answer.body = encode(joined, media)
        return answer

    async def _to_member(self, request: Request, route: Route, path: dict[str, str]) -> Answer:
        digits, _, member = path["member"].partition("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 4 and member):
            raise InvalidRequest(f"{path['member']!r} is not a member of this cluster: join the group first")
        shard = int(digits)
        if shard >= self._shards:
            raise InvalidRequest(f"{path['member']!r} is not a member of this cluster: join the group first")
        parts = request.path.split("/")
        parts[5] = member
        request.path = "/".join(parts)
        target = quote(request.path, safe="/%") + (f"?{request.query}" if request.query else "")
        return await self.to_shard(request, shard, route, path, target.encode("latin-1"))

    # Producers: one shard gives a name its number and its epoch, and all others learn of it before the producer does.

    async def _begin_producer(self, request: Request, route: Route, path: dict[str, str]) -> Answer:
        body = await self.body(request)
        name = body.get("name")
        shard = shard_of_key(name, self._shards) if isinstance(name, str) else self.node.some_shard()
        accept = request.headers.get("accept", "")
        request.headers = {**request.headers, "accept": MSGPACK}
        answer = await self.to_shard(request, shard, route, path)
        begun: ProducerBegun = await _value_of(answer, ProducerBegun)
        if isinstance(name, str):
            known = ProducerId(int(begun.id), begun.epoch, begun.since)
            others = [each for each in range(self._shards) if each != shard]
            await asyncio.gather(*(self._tell_producer(each, name, known) for each in others))
        media = MSGPACK if MSGPACK in accept else JSON
        return Response(route.status, encode(begun, media), media)

    async def _tell_producer(self, shard: int, name: str, producer: ProducerId) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + WAIT_S
        body = msgspec.msgpack.encode((name, producer))
        while True:
            served, owner = self.node.serving(shard), self.node.owner_of(shard)
            try:
                if served is not None:
                    await adopt(served, body)
                    return
                if owner is not None:
                    path = f"{_INSIDE}producers"
                    answer = await self.node.passing.call(owner, "POST", path, body, timeout_s=WAIT_S, shard=shard)
                    if answer.status < 300:
                        return
            except (NotPassed, Broken, TimeoutError, HoldfastError) as error:
                logger.info("a shard was not told of a producer", extra={"shard": shard, "why": str(error)})
            if loop.time() >= until:
                raise Unavailable(
                    f"shard {shard} of the cluster could not be told of the producer {name}; try again: until all "
                    "shards know it, an older producer of this name could still write there"
                )
            await self.node.wait_for_change(_AGAIN_S)

    # Answers

    def fault(self, request: Request, error: HoldfastError) -> Response:
        """An error as an answer."""
        media = MSGPACK if MSGPACK in request.headers.get("accept", "") else JSON
        answer = None if self._console is None else self._console.error_page(request, error)
        answer = answer or _faulty(error, media)
        if isinstance(error, Unauthenticated):
            answer.headers += [("www-authenticate", challenge) for challenge in challenges_for(request)]
        if isinstance(error, Refused):
            answer.headers += error.headers
        return answer


async def adopt(served: ServedShard, body: bytes) -> None:
    """Make a producer known in a shard."""
    name, producer = msgspec.msgpack.decode(body, type=tuple[str, ProducerId])
    await asyncio.to_thread(lambda: served.engine.producers().adopt(name, producer))


def _number_in(text: str) -> int:
    """The number of a shard as another node sent it."""
    if not re.fullmatch(r"-1|[0-9]{1,4}", text):
        raise InvalidRequest(f"{text!r:.80} is not the number of a shard")
    return int(text)


def _faulty(error: HoldfastError, media: str) -> Response:
    status = status_of(error)
    retry_after = retry_after_of(status)
    answer = Response(status, encode(ErrorAnswer(error=fault_of(error, retry_after=retry_after)), media), media)
    if retry_after is not None:
        answer.headers.append(("retry-after", f"{retry_after:.0f}"))
    return answer


async def _value_of(answer: Answer, kind: Any) -> Any:
    """The value of an answer in MessagePack; raises the error that it is."""
    if isinstance(answer, StreamResponse):
        answer = Response(answer.status, b"".join([part async for part in answer.chunks]), answer.media)
    if answer.status < 300:
        return None if kind is None else decode(answer.body, MSGPACK, kind)
    media = MSGPACK if answer.media == MSGPACK else JSON
    failed: ErrorAnswer = decode(answer.body, media, ErrorAnswer)
    raise error_of(failed.error)
