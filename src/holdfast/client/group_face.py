"""What the groups for threads and for tasks share: every verb as one call, written once."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, Final, Generic, NoReturn, TypeVar, get_args

from holdfast.broker.folder.layout import DEFAULT_GROUP
from holdfast.broker.group import Compacted, QueueStats
from holdfast.broker.tracing.steps import TraceStep
from holdfast.client.calling import packed
from holdfast.client.client import Client
from holdfast.client.http import Ask, path_of
from holdfast.client.messages import RemoteContents, RemoteDeadLetter, RemoteHandle, RemoteListed
from holdfast.client.upkeep import Held
from holdfast.delivery.where import compile_where
from holdfast.embedded.bodies import Bodies
from holdfast.embedded.drafts import Seconds
from holdfast.embedded.face import gives_back, switch
from holdfast.embedded.listed import PhaseName
from holdfast.embedded.listing import Where, check_limit, warn_of_damage
from holdfast.embedded.message import Body
from holdfast.embedded.publisher import Stored
from holdfast.embedded.times import duration_ms, instant_ns, lease_of
from holdfast.env import refuse_to_pickle
from holdfast.errors import Closed, Conflict, Empty, InvalidRequest, LeaseLost
from holdfast.model import BodyKind, CodecName, Durability, Retained
from holdfast.protocol import queues as wire
from holdfast.protocol.dead import Letters
from holdfast.protocol.messages import (
    Ack,
    Deliveries,
    Delivery,
    Extend,
    Nack,
    Reject,
    SaveState,
    Settled,
    State,
    Take,
)
from holdfast.settings import TopicSettings

_Handle = TypeVar("_Handle")

_MOST_AT_ONCE: Final = 10_000
_MOST_WAIT_S: Final = 20.0  # one call waits no longer than that; then it asks again
_MOST_LISTED: Final = 10_000
_PAGE: Final = 1_000
_MOST_UNANSWERED: Final = 100
_DONE: Final = "it is done"


class GroupFace(Generic[Body]):
    """One group of a topic behind a server."""

    _message: Callable[..., Any]

    def __init__(self, client: Client, topic: str, group: str, body_type: Any, settings: TopicSettings) -> None:
        self._client = client
        self._caller = client.caller
        self._topic = topic
        self._group = group
        self._bodies = Bodies(body_type)
        self._settings = settings
        self._closed = False
        self._alone = False  # whether the client is closed with it
        self._durability: Durability | None = None  # of what is put, where a call does not say
        self._ack_durability: Durability | None = None  # the same for what is said of messages in hand

    @property
    def _kept_bodies(self) -> BodyKind | None:
        return self._settings.bodies

    @property
    def name(self) -> str:
        """The name of the topic."""
        return self._topic

    @property
    def topic(self) -> str:
        """The name of the topic."""
        return self._topic

    @property
    def group(self) -> str:
        """The name of the group."""
        return self._group

    @property
    def folder(self) -> str:
        """Where it is: the address of the server."""
        return self._caller.address.text

    @property
    def settings(self) -> TopicSettings:
        """The topic's settings, as they were when it was opened."""
        return self._settings

    @property
    def closed(self) -> bool:
        return self._closed or self._caller.closed

    def __reduce__(self) -> NoReturn:
        refuse_to_pickle(self)

    def __repr__(self) -> str:
        of_group = "" if self._group == DEFAULT_GROUP else f" of {self._group}"
        return f"<{type(self).__name__}{of_group} {self._topic} at {self.folder}{' (closed)' if self.closed else ''}>"

    def _check_open(self) -> None:
        self._caller.check_open()
        if self._closed:
            raise Closed(f"this view of the group {self._group} is closed; take it anew")

    async def _ask(self, method: str, verb: str, answers: Any, body: Any = None, **query: Any) -> Any:
        self._check_open()
        wait_s, again = query.pop("wait_s", 0.0), query.pop("again", True)
        content = b"" if body is None else packed(body)
        path = path_of("queues", self._topic, *verb.split("/"), **query)
        return await self._caller.call(
            Ask(method=method, path=path, body=content, answers=answers, wait_s=wait_s, again=again)
        )

    def _wanted(
        self, count: object, timeout: Seconds | None, lease: Seconds | None, holder: object
    ) -> tuple[Take, float | None]:
        if type(count) is not int or not 1 <= count <= 100_000:
            raise InvalidRequest(f"count={count!r} cannot be used: give a whole number from 1 to 100000")
        timeout_s = None if timeout is None else duration_ms(timeout, "timeout") / 1000
        lease_s = None if lease is None else lease_of(lease) / 1000
        if holder is None:
            holder = self._client.holder
        if not isinstance(holder, str) or len(holder) > 200 or not holder.isprintable():
            raise InvalidRequest(f"holder={holder!r} cannot be used: give a short text")
        count = min(count, _MOST_AT_ONCE)
        return Take(count=count, owner=holder, lease=lease_s, group=self._group, state=True), timeout_s

    async def _receive(
        self,
        count: int,
        timeout: Seconds | None,
        lease: Seconds | None,
        holder: str | None,
        *,
        renew: bool,
        detached: bool,
    ) -> list[Any]:
        take, timeout_s = self._wanted(count, timeout, lease, holder)
        renew, detached = switch(renew, "renew"), switch(detached, "detached")
        mono_ns = self._caller.world.clock.monotonic_ns
        until_ns = None if timeout_s is None else mono_ns() + round(timeout_s * 1e9)
        while True:
            left_s = _MOST_WAIT_S if until_ns is None else max((until_ns - mono_ns()) / 1e9, 0)
            take.wait = min(left_s, _MOST_WAIT_S) if timeout_s != 0 else 0
            found = await self._dequeue(take)
            if found.messages:
                return [self._in_hand(each, renew=renew, detached=detached) for each in found.messages]
            if until_ns is not None and mono_ns() >= until_ns:
                return []

    async def _dequeue(self, take: Take) -> Deliveries:
        """One call by a name of its own, which all its tries have: what was taken by one whose answer was lost is
        answered to the next. After a call that came to no answer at all the next one like it goes by its name.
        """
        like = self._topic, self._group, take.count, take.owner, take.lease
        unanswered = self._client.unanswered
        take.attempt_id = unanswered.pop(like, None) or self._client.attempt_id()
        try:
            found: Deliveries = await self._ask("POST", "dequeue", Deliveries, take, wait_s=take.wait)
        except InvalidRequest:
            raise
        except BaseException:
            if len(unanswered) < _MOST_UNANSWERED:
                unanswered[like] = take.attempt_id
            raise
        return found

    async def _receive_one(
        self, timeout: Seconds | None, lease: Seconds | None, holder: str | None, *, renew: bool, detached: bool
    ) -> Any:
        found = await self._receive(1, timeout, lease, holder, renew=renew, detached=detached)
        if not found:
            within = "now" if not timeout else f"within {duration_ms(timeout, 'timeout') / 1000:g} s"
            raise Empty(f"no message is ready {within} in {self._topic} at {self.folder}")
        return found[0]

    def _in_hand(self, told: Delivery, *, renew: bool, detached: bool) -> Any:
        now_ns = self._caller.world.clock.monotonic_ns()
        held = Held(self._topic, self._group, told.receipt, told.lease_ms, now_ns)
        held.detached = detached
        if renew:
            self._client.upkeep.renew(held)
        else:
            self._client.upkeep.begin()
        return self._message(self, told, held)

    async def _resume(self, receipt: str) -> Any:
        if not isinstance(receipt, str):
            raise InvalidRequest(f"a receipt is text, not {type(receipt).__name__}")
        told: Delivery = await self._ask("GET", "inHand", Delivery, receipt=receipt, group=self._group)
        return self._in_hand(told, renew=False, detached=True)

    def _let_go(self, held: Held) -> None:
        """A message was dropped unhandled; called by its finalizer."""
        if held.detached:
            held.ended = True  # it ends by itself, in its own time
        elif not self._caller.closed:
            self._client.upkeep.drop(held)

    def _own(self, handles: object, verb: str) -> list[RemoteHandle[Body]]:
        """The messages, if they are messages of this group."""
        if isinstance(handles, (str, bytes)) or not isinstance(handles, Iterable):
            raise InvalidRequest(f"{verb}_many takes a list of messages, not {type(handles).__name__}")
        own = list(handles)
        for handle in own:
            if not isinstance(handle, RemoteHandle):
                raise InvalidRequest(f"{verb}_many takes messages, not {type(handle).__name__}")
            if (handle._held.topic, handle._held.group) != (self._topic, self._group):
                raise InvalidRequest("a message is of another queue; nothing was changed")
        return own

    async def _ack(self, handles: object, durability: Durability | None) -> None:
        """Ack in one go; each handle is through with its message, whatever comes of it."""
        own = self._own(handles, "ack")
        durability = durability or self._ack_durability
        lost: LeaseLost | None = None
        for some in _pieces(own):
            receipts = [handle.receipt for handle in some]
            body = Ack(receipts=receipts, group=self._group, durability=durability)
            try:
                await self._ask("POST", "ack", Settled, body)
            except LeaseLost as error:
                again = getattr(error, "repeated", False)
                lost = _both(lost, await self._ack_again(error, receipts, durability) if again else error)
            _end(some)
        if lost is not None:
            raise lost

    async def _ack_again(
        self, error: LeaseLost, receipts: list[str], durability: Durability | None
    ) -> LeaseLost | None:
        """The answer to an ack was lost, and the repeated one was refused.

        Where the message is done it stays so, by our own ack or another's: that is what an ack is for. Any other
        reason is answered with.
        """
        if len(receipts) == 1:
            return None if error.why.startswith(_DONE) else error
        lost: LeaseLost | None = None
        for receipt in error.receipts:
            try:
                body = Ack(receipts=[receipt], group=self._group, durability=durability)
                await self._ask("POST", "ack", Settled, body)
            except LeaseLost as each:
                if not each.why.startswith(_DONE):
                    lost = _both(lost, each)
        return lost

    async def _give_up(self, handles: Sequence[RemoteHandle[Body]], verb: str, body: Any) -> None:
        """The last thing done with messages; after a call that was refused they are still in hand."""
        try:
            await self._ask("POST", verb, Settled, body)
        except LeaseLost as error:
            _end(handles)
            # After an attempt whose answer was lost: given back is given back, whoever did it.
            if not getattr(error, "repeated", False) or (verb == "reject" and not error.why.startswith(_DONE)):
                raise
        else:
            _end(handles)

    async def _nack(self, handles: object, delay: Seconds | None, error: object) -> None:
        own = self._own(handles, "nack")
        delay_s = None if delay is None else duration_ms(delay, "delay") / 1000
        text = self._error_text(error)
        for some in _pieces(own):
            receipts = list(dict.fromkeys(handle.receipt for handle in some))
            await self._give_up(
                some,
                "nack",
                Nack(
                    receipts=receipts,
                    group=self._group,
                    delay=delay_s,
                    error=text or None,
                    durability=self._ack_durability,
                ),
            )

    async def _defer(self, handle: RemoteHandle[Body], delay: Seconds) -> None:
        delay_s = duration_ms(delay, "delay") / 1000
        body = Nack(
            receipts=[handle.receipt],
            group=self._group,
            intent="defer",
            delay=delay_s,
            durability=self._ack_durability,
        )
        await self._give_up([handle], "nack", body)

    async def _reject(self, handle: RemoteHandle[Body], reason: object) -> None:
        text = self._error_text(reason)
        body = Reject(
            receipts=[handle.receipt], group=self._group, reason=text or None, durability=self._ack_durability
        )
        await self._give_up([handle], "reject", body)

    async def _extend(self, handle: RemoteHandle[Body], lease: Seconds | None) -> None:
        if gives_back(lease):
            await self._defer(handle, 0)
            return
        lease_ms = None if lease is None else lease_of(lease)
        now_ns = self._caller.world.clock.monotonic_ns()
        body = Extend(
            receipts=[handle.receipt],
            group=self._group,
            lease=None if lease_ms is None else lease_ms / 1000,
            durability=self._ack_durability,
        )
        try:
            await self._ask("POST", "extend", Settled, body)
        except LeaseLost:
            handle._held.lost = True
            raise
        renew = handle._held.renew
        handle._held.begin(self._settings.lease_ms if lease_ms is None else lease_ms, now_ns)
        if renew:
            self._client.upkeep.renew(handle._held)

    def _error_text(self, error: object) -> str:
        """An error as it is kept: its own line first, then where it came from, as far as there is room."""
        if error is None:
            return ""
        if isinstance(error, BaseException):
            summary = "".join(traceback.format_exception_only(error)).strip()
            trace = "".join(traceback.format_exception(error)).strip()
            text = summary if trace == summary else f"{summary}\n\n{trace}"
        else:
            text = str(error)
        return text.encode(errors="backslashreplace").decode()[: self._settings.max_error_chars]

    async def _load_state(self, receipt: str) -> State:
        state: State = await self._ask("GET", "state", State, receipt=receipt, group=self._group)
        return state

    async def _save_state(self, receipt: str, version: int, value: Any, durability: Durability | None) -> State:
        durability = durability or self._ack_durability
        body = SaveState(receipt=receipt, version=version, group=self._group, durability=durability)
        if value is not None:
            body.value = value
        try:
            state: State = await self._ask("PUT", "state", State, body)
        except Conflict as error:
            if not getattr(error, "repeated", False):
                raise
            state = await self._load_state(receipt)  # the attempt before, whose answer was lost, may have done it
            if state.version != (0 if value is None else version + 1) or state.value != value:
                raise error from None
        return state

    async def _peek(self, count: int) -> list[RemoteContents[Body]]:
        if type(count) is not int or not 1 <= count <= _MOST_LISTED:
            raise InvalidRequest(f"count={count!r} cannot be used: give a whole number from 1 to {_MOST_LISTED}")
        found: wire.Messages = await self._ask("GET", "peek", wire.Messages, count=count, group=self._group)
        return [RemoteContents(self._client, self._bodies, each) for each in found.messages]

    async def _cancel(self, message_id: str) -> bool:
        if not isinstance(message_id, str):
            raise InvalidRequest(f"a message's id is text, not {type(message_id).__name__}")
        verb = f"messages/{message_id}"
        # Sent once: a second one would answer that it was too late, where the first has done it.
        answer: wire.Cancelled = await self._ask("DELETE", verb, wire.Cancelled, group=self._group, again=False)
        return answer.cancelled

    async def _history(self, message_id: str) -> list[TraceStep]:
        if not isinstance(message_id, str):
            raise InvalidRequest(f"a message's id is text, not {type(message_id).__name__}")
        found: wire.Whole = await self._ask("GET", "lookup", wire.Whole, id=message_id, group=self._group)
        return found.history

    async def _committed(self) -> dict[int, int]:
        answer: wire.Committed = await self._ask("GET", "committed", wire.Committed, group=self._group)
        return {int(number): offset for number, offset in answer.offsets.items()}

    async def _seek(self, to: str | None, offset: int | None, time: datetime | None, partition: int | None) -> int:
        if sum(argument is not None for argument in (to, offset, time)) != 1:
            raise InvalidRequest('seek takes one of "start", "end", offset=... or time=...')
        if to is not None and to not in ("start", "end"):
            raise InvalidRequest(f'seek cannot go to {to!r}; use "start", "end", offset=... or time=...')
        if offset is not None and type(offset) is not int:
            raise InvalidRequest(f"offset={offset!r} is no offset; give a whole number")
        if time is not None:
            instant_ns(time, "time")
        body = wire.Seek(to=to, offset=offset, time=time, partition=partition, group=self._group)  # type: ignore[arg-type]
        answer: wire.Sought = await self._ask("POST", "seek", wire.Sought, body)
        return answer.offset

    def _listing(self, phase: str, where: Where, limit: int | None) -> Listing[Body]:
        if phase not in get_args(PhaseName):
            raise InvalidRequest(f"phase={phase!r} is not known; choose from {', '.join(get_args(PhaseName))}")
        check_limit(limit)
        return Listing(self, phase, where, limit)

    async def _listed(self, phase: str, where: Where, limit: int | None) -> list[RemoteListed[Body]]:
        listing, found = self._listing(phase, where, limit), []
        while some := await listing.page():
            found += some
        return found

    async def _put(self, messages: Any, durability: Durability | None, codec: CodecName | None) -> list[Stored]:
        self._check_open()
        publish = self._client.publishing.publish
        durability = durability or self._durability
        return await publish(self._topic, messages, self._bodies, durability=durability, codec=codec, verb="put_many")

    async def _sync(self) -> None:
        self._check_open()
        await self._caller.call(Ask(method="POST", path=path_of("admin", "sync")))

    @staticmethod
    def _unobserved(observer: object) -> InvalidRequest:
        return InvalidRequest(
            f"observer={observer!r} cannot be used here: the server counts and measures; ask its /metrics, or stats()"
        )

    async def _qsize(self) -> int:
        return (await self._stats()).ready

    async def _stats(self) -> QueueStats:
        stats: QueueStats = await self._ask("GET", "stats", QueueStats, group=self._group)
        return stats

    async def _purge(self) -> int:
        # Sent once: what is put behind the first one would be dropped by a second.
        told: wire.Purged = await self._ask("POST", "purge", wire.Purged, group=self._group, again=False)
        return told.purged

    async def _compact(self) -> Compacted:
        freed: wire.Compacted = await self._ask("POST", "compact", wire.Compacted, group=self._group)
        return Compacted(segments=freed.segments, bytes=freed.bytes, journal_bytes=freed.journal_bytes)

    async def _apply_retention(self) -> Retained:
        self._check_open()
        path = path_of("topics", self._topic, "apply-retention")
        gone: Retained = await self._caller.call(Ask(method="POST", path=path, answers=Retained))
        return gone


class Listing(Generic[Body]):
    """Messages that are looked at, page by page."""

    def __init__(self, face: GroupFace[Body], phase: str, where: Where, limit: int | None) -> None:
        now_ms = face._caller.world.clock.now_ns() // 1_000_000
        self._face = face
        self._phase = phase
        self._left = limit
        self._wanted = compile_where(where, now_ms=now_ms) if callable(where) else None
        self._query: dict[str, Any] = {"where": None if callable(where) else where, "group": face.group, "after": None}
        self._ended = False
        self._damaged = 0

    async def page(self) -> list[RemoteListed[Body]]:
        """The next of them; [] behind the last."""
        found: list[RemoteListed[Body]] = []
        while not found and not self._ended and self._left != 0:
            found = await self._ask()
            if self._wanted is not None:
                found = [each for each in found if self._wanted(each)]
            found = found[: self._left]
            self._left = None if self._left is None else self._left - len(found)
        if self._damaged and (self._ended or self._left == 0):
            warn_of_damage(self._face._topic, self._face.group, self._phase, self._damaged)
            self._damaged = 0
        return found

    async def _ask(self) -> list[RemoteListed[Body]]:
        face, query = self._face, self._query
        query["limit"] = _PAGE if self._left is None or self._wanted is not None else min(self._left, _PAGE)
        found: list[RemoteListed[Body]]
        if self._phase == "dead":
            letters: Letters = await face._ask("GET", "dead", Letters, **query)
            found, query["after"] = [RemoteDeadLetter(face, each) for each in letters.letters], letters.next
            self._damaged += letters.damaged
        else:
            told: wire.ListedMessages = await face._ask(
                "GET", "messages", wire.ListedMessages, phase=self._phase, **query
            )
            found, query["after"] = [RemoteListed(face, each) for each in told.messages], told.next
            self._damaged += told.damaged
        self._ended = not query["after"]
        return found


class StateOf:
    """The document that goes with a message from one holder to the next, until it is acked."""

    def __init__(self, handle: RemoteHandle[Any]) -> None:
        self._face = handle._face
        self._receipt = handle.receipt
        told = handle._told.state
        self.version = 0 if told is None else told.version

    async def _load(self) -> Any:
        state: State = await self._face._load_state(self._receipt)
        self.version = state.version
        return state.value

    async def _save(self, value: Any, durability: Durability | None) -> None:
        try:
            state: State = await self._face._save_state(self._receipt, self.version, value, durability)
        except (TypeError, ValueError) as error:
            if isinstance(error, InvalidRequest):
                raise
            raise InvalidRequest(f"the state cannot be saved: {error}. It must be a value that JSON knows") from None
        self.version = state.version


def _end(handles: Iterable[RemoteHandle[Any]]) -> None:
    for handle in handles:
        handle._end()


def _both(one: LeaseLost | None, other: LeaseLost | None) -> LeaseLost | None:
    """One error for all that were lost."""
    if one is None or other is None:
        return one or other
    other.offsets = (*one.offsets, *other.offsets)
    other.receipts = (*one.receipts, *other.receipts)
    return other


def _pieces(handles: Sequence[_Handle]) -> Iterable[Sequence[_Handle]]:
    for i in range(0, len(handles), _MOST_AT_ONCE):
        yield handles[i : i + _MOST_AT_ONCE]
