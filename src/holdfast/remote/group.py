"""One group of a topic on a server: requests and answers, as tasks and threads share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from holdfast.api.arguments import MessageOutcome, ReceiveRequest
from holdfast.api.drafts import Bodies
from holdfast.api.listing import Listed, Where, warn_of_damage
from holdfast.client.calling import Ask, packed, path_of
from holdfast.delivery.where import compile_where
from holdfast.errors import Closed, InvalidRequest, LeaseLost
from holdfast.model import BodyKind, Durability, Record
from holdfast.protocol import messages as wire
from holdfast.protocol.messages import (
    Ack,
    Deliveries,
    Delivery,
    DeliveryRun,
    Extend,
    Letters,
    Nack,
    Reject,
    RunReceipts,
    Take,
)
from holdfast.remote.client import Client, HeldLease, HeldRun, ask_of, lease_times
from holdfast.remote.records import NamedPlace, RemoteBody, listed_from, path_by_id, record_from
from holdfast.settings import TopicSettings

if TYPE_CHECKING:
    from holdfast.broker.metrics import Observer

_Part = TypeVar("_Part")

MOST_AT_ONCE: Final = 10_000
UNLIMITED_S: Final = 24 * 3600.0
_MOST_PEEKED: Final = 10_000
_MOST_UNANSWERED: Final = 100
_PAGE: Final = 1_000
_DONE: Final = "it is done"
_PLACE: Final = attrgetter("held.topic", "held.group")
_RUN: Final = attrgetter("run")
_USUAL: Final = frozenset({"dequeue", "ack", "nack", "extend"})  # verbs whose heads are made once


class RemoteTaken(msgspec.Struct, frozen=True, gc=False):
    """A message in flight from a server, and its lease as the client's thread knows it."""

    home: NamedPlace | HeldRun
    record: Record
    attempt: int
    holder: str
    fence: int
    held: HeldLease
    state_version: int = 0


class RemoteGroup:
    """One group of a topic on a server."""

    def __init__(
        self,
        client: Client,
        topic: str,
        group: str,
        bodies: Bodies,
        settings: TopicSettings,
        *,
        durability: Durability | None = None,
        ack_durability: Durability | None = None,
        alone: bool = False,
        closed: bool = False,
    ) -> None:
        self.client = client
        self.topic = topic
        self.group = group
        self.bodies = bodies
        self.settings = settings  # as they were when it was opened
        self.durability = durability  # default for put calls
        self.ack_durability = ack_durability  # default for acks
        self._alone = alone  # whether the client is closed with it
        self._view_closed = closed
        self._heads: dict[str, tuple[str, bytes]] = {}  # by verb, of the calls that are made often

    @property
    def place(self) -> str:
        """The address of the server."""
        return self.client.caller.address.text

    @property
    def where(self) -> str:
        """The place as part of a sentence, for error messages."""
        return f"at {self.place}"

    @property
    def kept_bodies(self) -> BodyKind | None:
        """The kind of bodies stored with the topic, if it was opened with one."""
        return self.settings.bodies

    @property
    def closed(self) -> bool:
        return self._view_closed or self.client.caller.closed

    def check_open(self) -> None:
        caller = self.client.caller
        if caller.closed:
            caller.check_open()
        if self._view_closed:
            raise Closed(f"this view of the group {self.group} is closed: get it again from the broker")

    def promise(self, durability: Durability | None, ack_durability: Durability | None) -> None:
        """Apply the durability that this program asked for; the client is closed with this group."""
        self._alone = True
        self.durability = durability
        self.ack_durability = ack_durability

    def after_fork(self) -> Any:
        """Return this port: the client opens connections of its own in a child."""
        return self

    def take_next(self) -> None:
        """Return None: there is no fast path to a server."""

    def ack_now(self, taken: RemoteTaken) -> bool:
        """Return False: an ack is a call to the server."""
        return False

    def put_now(self, *_: object) -> None:
        """Return None: a put is a call to the server."""

    def observe(self, observer: Observer | None) -> None:
        """Refuse: the server has /metrics."""
        raise InvalidRequest(
            f"observer={observer!r} cannot be used here: the server collects the metrics; use its /metrics, or stats()"
        )

    def _request(
        self,
        method: str,
        verb: str,
        answers: Any,
        body: Any = None,
        *,
        wait_s: float = 0.0,
        again: bool = True,
        **query: Any,
    ) -> Ask:
        """Return a request about this queue."""
        self.check_open()
        if verb not in _USUAL:
            path = path_of("queues", self.topic, *verb.split("/"), **query)
            return ask_of(method, path, answers, body, wait_s=wait_s, again=again)
        path, head = self._heads.get(verb) or self._head_of(verb)
        return Ask(method=method, path=path, body=packed(body), answers=answers, wait_s=wait_s, again=again, head=head)

    def _head_of(self, verb: str) -> tuple[str, bytes]:
        path = path_of("queues", self.topic, verb)
        self._heads[verb] = path, self.client.caller.post_head(path)
        return self._heads[verb]

    # Receiving

    def _take(self, wanted: ReceiveRequest) -> Take:
        holder = self.client.holder if wanted.holder is None else wanted.holder
        if not holder.isprintable():
            raise InvalidRequest(f"holder={holder!r} cannot be used: give a short text")
        lease_s = None if wanted.lease_ms is None else wanted.lease_ms / 1000
        return Take(count=min(wanted.count, MOST_AT_ONCE), owner=holder, lease=lease_s, group=self.group, state=True)

    def _begin(self, take: Take) -> tuple[Any, ...]:
        """Name a take. It reuses the name of an equal one that was not answered, and then gets its messages."""
        like = self.topic, self.group, take.count, take.owner, take.lease
        take.attempt_id = self.client.unanswered.pop(like, None) or self.client.attempt_id()
        return like

    def _unanswered(self, like: tuple[Any, ...], take: Take) -> None:
        """Note that a take was not answered: the next equal one reuses its name."""
        if len(self.client.unanswered) < _MOST_UNANSWERED and take.attempt_id is not None:
            self.client.unanswered[like] = take.attempt_id

    def _all_in_flight(self, answer: Deliveries, *, renew: bool, detached: bool) -> list[RemoteTaken]:
        if len(answer.messages) == 1 and not answer.runs:
            return [self._in_flight(answer.messages[0], renew=renew, detached=detached)]
        taken = [self._in_flight(each, renew=renew, detached=detached) for each in answer.messages]
        for run in answer.runs:
            taken += self._run_in_flight(run, renew=renew, detached=detached)
        return taken

    def _run_in_flight(self, run: DeliveryRun, *, renew: bool, detached: bool) -> list[RemoteTaken]:
        topic, group, fence, holder, lease_ms = self.topic, self.group, run.fence, run.holder, run.lease_ms
        until_ns, due_ns = lease_times(lease_ms, self.client.world.clock.monotonic_ns())
        home = HeldRun(run.topic, run.partition, f"{run.topic}-{run.partition}-", run.token)
        taken = [
            RemoteTaken(
                home,
                Record(offset, timestamp_ns, body),
                1,
                holder,
                fence,
                HeldLease(topic, group, "", lease_ms, until_ns, due_ns, detached, False, False, False, home, offset),
            )
            for offset, timestamp_ns, body in zip(run.offsets, run.timestamps_ns, run.bodies, strict=True)
        ]
        if renew:
            for each in taken:
                self.client.upkeep.renew(each.held)
        else:
            self.client.upkeep.begin()
        return taken

    def _in_flight(self, delivery: Delivery, *, renew: bool, detached: bool) -> RemoteTaken:
        until_ns, due_ns = lease_times(delivery.lease_ms, self.client.world.clock.monotonic_ns())
        held = HeldLease(self.topic, self.group, delivery.receipt, delivery.lease_ms, until_ns, due_ns, detached)
        if renew:
            self.client.upkeep.renew(held)
        else:
            self.client.upkeep.begin()
        payload = (
            RemoteBody(self.client.beside, self._body_path(held, delivery.id), delivery.size)
            if delivery.omitted
            else None
        )
        version = 0 if delivery.state is None else delivery.state.version
        home = NamedPlace(delivery.topic, delivery.partition, delivery.id)
        return RemoteTaken(
            home, record_from(delivery, payload), delivery.attempt, delivery.holder, delivery.fence, held, version
        )

    def _body_path(self, held: HeldLease, message_id: str) -> Callable[[], str]:
        topic, group = self.topic, self.group

        def path() -> str:
            if held.ended:  # its receipt is of no use any more
                return path_by_id(topic, group, message_id)
            return path_of("queues", topic, "payload", receipt=held.receipt, group=group)

        return path

    # Messages in flight

    def _settling(
        self, receipts: list[str], runs: list[RunReceipts], outcome: MessageOutcome, durability: Durability | None
    ) -> tuple[str, Any]:
        """Return the request that settles messages by their receipts."""
        verb, why = outcome.verb, outcome.why or None
        facts: dict[str, Any] = {"receipts": receipts, "runs": runs, "group": self.group, "durability": durability}
        delay_s = None if outcome.delay_ms is None else outcome.delay_ms / 1000
        match verb:
            case "ack":
                return "ack", Ack(**facts)
            case "reject":
                return "reject", Reject(**facts, reason=why)
            case "extend":
                lease_s = None if outcome.lease_ms is None else outcome.lease_ms / 1000
                return "extend", Extend(**facts, lease=lease_s)
            case "nack":
                return "nack", Nack(**facts, delay=delay_s, error=why)
            case _:
                return "nack", Nack(**facts, intent=verb, delay=delay_s)

    def receipt(self, taken: RemoteTaken) -> str:
        """Return the receipt of a delivery."""
        return taken.held.receipt

    def lost(self, taken: RemoteTaken) -> bool:
        """Return whether the lease has ended, as far as this client knows."""
        return taken.held.is_lost(self.client.world.clock.monotonic_ns())

    def ends_ns(self, taken: RemoteTaken) -> int:
        """Return when the lease ends, in nanoseconds since 1970, as far as this client knows."""
        clock = self.client.world.clock
        return clock.now_ns() + taken.held.until_ns - clock.monotonic_ns()

    def drop(self, taken: RemoteTaken) -> None:
        """Return a message to the queue that was dropped without being settled; called by its finalizer."""
        if taken.held.detached:
            taken.held.ended = True  # it ends by itself, in its own time
        elif not self.client.caller.closed:
            self.client.upkeep.drop(taken.held)

    def state_version(self, taken: RemoteTaken) -> int:
        """Return the version of the message's state when it was leased."""
        return taken.state_version

    def _check_own(self, taken: Sequence[Any]) -> None:
        own = {(self.topic, self.group)}
        if not set(map(type, taken)) <= {RemoteTaken} or not set(map(_PLACE, taken)) <= own:
            raise InvalidRequest(
                "a message belongs to another queue; nothing was changed. Settle it with the queue that it came from"
            )

    def _extended(self, taken: RemoteTaken, lease_ms: int | None, since_ns: int) -> None:
        held = taken.held
        held.begin(self.settings.lease_ms if lease_ms is None else lease_ms, since_ns)
        if held.renew:
            self.client.upkeep.renew(held)

    # Inspecting

    def _check_peek(self, count: int) -> None:
        if count > _MOST_PEEKED:
            raise InvalidRequest(f"count={count!r} cannot be used: give a whole number from 1 to {_MOST_PEEKED}")

    def _paging(self, phase: str, where: Where, limit: int | None) -> Paging:
        self.check_open()
        return Paging(self, phase, where, limit)


class Paging:
    """Messages that are listed page by page."""

    def __init__(self, group: RemoteGroup, phase: str, where: Where, limit: int | None) -> None:
        now_ms = group.client.world.clock.now_ns() // 1_000_000
        self._group = group
        self._phase = phase
        self._left = limit
        self._wanted = compile_where(where, now_ms=now_ms) if callable(where) else None
        self._query: dict[str, Any] = {"where": None if callable(where) else where, "group": group.group, "after": None}
        self._verb = "dead" if phase == "dead" else "messages"
        self.answers: Any = Letters if phase == "dead" else wire.ListedMessages
        self._ended = limit == 0
        self._damaged = 0

    @property
    def ended(self) -> bool:
        """Whether there are no more pages; if so, damaged messages have been reported."""
        if self._ended and self._damaged:
            warn_of_damage(self._group.topic, self._group.group, self._phase, self._damaged)
            self._damaged = 0
        return self._ended

    def query(self) -> tuple[str, dict[str, Any]]:
        """Return the request for the next page."""
        left = self._left
        query = dict(self._query, limit=_PAGE if left is None or self._wanted is not None else min(left, _PAGE))
        if self._phase != "dead":
            query["phase"] = self._phase
        return self._verb, query

    def page(self, answer: Any) -> list[Listed[Any]]:
        """Return the messages of a page that match."""
        group = self._group
        delivery = answer.letters if self._phase == "dead" else answer.messages
        found = [listed_from(group.client, group.bodies, group.topic, group.group, each) for each in delivery]
        if self._wanted is not None:
            found = [each for each in found if self._wanted(each)]
        found = found[: self._left]
        self._left = None if self._left is None else self._left - len(found)
        self._damaged += answer.damaged
        self._query["after"] = answer.next
        self._ended = not answer.next or self._left == 0
        return found


def end(taken: Sequence[RemoteTaken]) -> None:
    """Stop renewing the leases of these messages."""
    for each in taken:
        each.held.ended = True


def named(taken: Sequence[RemoteTaken]) -> tuple[list[str], list[RunReceipts]]:
    """Return the receipts of these messages, each once; those of messages that came in runs as such."""
    if len(taken) == 1 and taken[0].held.run is None:
        return [taken[0].held.given], []
    receipts: dict[str, None] = {}
    runs: dict[HeldRun, dict[int, None]] = {}
    for run, some in groupby([each.held for each in taken], _RUN):
        if run is None:
            receipts.update(dict.fromkeys([held.given for held in some]))
        else:
            runs.setdefault(run, {}).update(dict.fromkeys([held.offset for held in some]))
    return list(receipts), [
        RunReceipts(partition=run.number, token=run.token, offsets=list(offsets)) for run, offsets in runs.items()
    ]


def both(one: LeaseLost | None, other: LeaseLost | None) -> LeaseLost | None:
    """Return one error for all messages whose lease was lost."""
    if one is None or other is None:
        return one or other
    other.offsets = (*one.offsets, *other.offsets)
    other.receipts = (*one.receipts, *other.receipts)
    return other


def is_done(error: LeaseLost) -> bool:
    """Return whether the lease was lost because the message is done."""
    return error.why.startswith(_DONE)


def is_repeated(error: Exception) -> bool:
    """Return whether an earlier attempt, whose answer was lost, may have done what was then refused."""
    return bool(getattr(error, "repeated", False))


def parts(all_: Sequence[_Part]) -> Sequence[Sequence[_Part]]:
    """Split receipts into batches of the size that one call may have."""
    if len(all_) <= MOST_AT_ONCE:
        return (all_,) if all_ else ()
    return [all_[i : i + MOST_AT_ONCE] for i in range(0, len(all_), MOST_AT_ONCE)]
