# Generated from aio/group.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""A group on a server, for threads. Each method makes one call, which is repeated if its answer was lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

import msgspec

from holdfast.api.arguments import ACK, MessageOutcome, ReceiveRequest, check_durability
from holdfast.api.contents import Contents
from holdfast.api.drafts import Bodies, PublishRequest, Stored, StreamRequest
from holdfast.api.listing import DeadGroup, DeadLetter, DeadLettersRequest, Found, Listed, Redriven, Where, grouped
from holdfast.broker.metrics import Compacted, QueueStats
from holdfast.broker.samples import Samples
from holdfast.broker.tracing import TraceStep
from holdfast.broker.workers import Order, WorkerReport
from holdfast.client.calling import Ask, path_of
from holdfast.errors import Conflict, HoldfastError, InvalidRequest, LeaseLost, NotFound
from holdfast.model import CodecName, Durability, Retained
from holdfast.protocol import messages as queues
from holdfast.protocol import messages as wire
from holdfast.protocol.topics import WorkerOrder
from holdfast.remote.client import Calls, Client
from holdfast.remote.group import (
    UNLIMITED_S,
    Paging,
    RemoteGroup,
    RemoteTaken,
    both,
    end,
    is_done,
    is_repeated,
    named,
    parts,
)
from holdfast.remote.records import contents_from, listed_from, publish_stream
from holdfast.settings import TopicSettings


class RemoteGroupPort(RemoteGroup):
    """A group's port on a server."""

    def __init__(
        self, client: Client, topic: str, group: str, bodies: Bodies, settings: TopicSettings, **options: Any
    ) -> None:
        super().__init__(client, topic, group, bodies, settings, **options)
        self._calls = Calls(client)

    def _ask(self, method: str, verb: str, answers: Any, body: Any = None, **query: Any) -> Any:
        return self._calls.call(self._request(method, verb, answers, body, **query))

    def take(self, wanted: ReceiveRequest) -> list[RemoteTaken]:
        """Lease ready messages, up to `wanted.count`; the server waits for the first one."""
        take = self._take(wanted)
        mono_ns = self.client.world.clock.monotonic_ns
        until_ns = None if wanted.timeout_s is None else mono_ns() + round(wanted.timeout_s * 1e9)
        while True:
            most_s = self.client.caller.most_wait_s
            left_s = most_s if until_ns is None else max((until_ns - mono_ns()) / 1e9, 0)
            take.wait = min(left_s, most_s) if wanted.timeout_s != 0 else 0
            found = self._take_some(take)
            if found.messages or found.runs:
                return self._all_in_flight(found, renew=wanted.renew, detached=wanted.detached)
            if until_ns is not None and mono_ns() >= until_ns:
                return []

    def _take_some(self, take: wire.Take) -> wire.Deliveries:
        """One call by a name of its own, which all its tries have: what was taken by one whose answer was lost is
        answered to the next. After a call that came to no answer at all the next one like it goes by its name.
        """
        like = self._begin(take)
        try:
            found: wire.Deliveries = self._ask("POST", "dequeue", wire.Deliveries, take, wait_s=take.wait)
        except InvalidRequest:
            raise
        except BaseException:
            self._unanswered(like, take)
            raise
        return found

    def resume(self, receipt: str) -> RemoteTaken:
        """Return the message of a receipt. Raises LeaseLost if its lease has ended."""
        answer: wire.Delivery = self._ask("GET", "inHand", wire.Delivery, receipt=receipt, group=self.group)
        return self._in_flight(answer, renew=False, detached=True)

    def holds(self, receipt: str) -> bool:
        """Return whether the receipt is of a delivery of this group whose lease has not ended."""
        try:
            self._ask("GET", "inHand", wire.Delivery, receipt=receipt, group=self.group)
        except HoldfastError:
            return False
        return True

    def phase(self, taken: RemoteTaken) -> tuple[str, int]:
        """Return the phase of a message, and when its lease or its delay ends."""
        now: queues.Whole = self._look_up(taken.home.id_of(taken.record))
        return now.phase, {"leased": now.lease_until_ms, "delayed": now.due_ms}.get(now.phase, 0)

    def ack(self, taken: Sequence[RemoteTaken], durability: Durability | None) -> None:
        """Ack messages in one call. LeaseLost names those whose lease has ended; the others are acked."""
        self._settle_taken(taken, ACK, durability)

    def nack(self, taken: Sequence[RemoteTaken], delay_ms: int | None, error: str) -> None:
        """Return messages to the queue after a failure."""
        self._settle_taken(taken, MessageOutcome("nack", delay_ms, error))

    def defer(self, taken: RemoteTaken, delay_ms: int) -> None:
        """Return a message to the queue without counting an attempt."""
        self._settle_taken([taken], MessageOutcome("defer", delay_ms))

    def release(self, taken: RemoteTaken) -> None:
        """Return a message whose handler was interrupted to the queue."""
        self.defer(taken, 0)

    def reject(self, taken: RemoteTaken, reason: str) -> None:
        """Make a message a dead letter."""
        self._settle_taken([taken], MessageOutcome("reject", why=reason))

    def _settle_taken(
        self, taken: Sequence[RemoteTaken], outcome: MessageOutcome, durability: Durability | None = None
    ) -> None:
        """Settle messages. After any error but LeaseLost they are still in flight."""
        self._check_own(taken)
        check_durability(durability)
        lost: LeaseLost | None = None
        for some in parts(taken):
            lost = both(lost, self._settle_once(*named(some), outcome, durability))
            end(some)
        if lost is not None:
            raise lost

    def settle(self, receipts: Sequence[str], outcome: MessageOutcome, durability: Durability | None) -> None:
        """Say what became of messages, by their receipts. LeaseLost names those that were lost; the others are settled.

        Where the answer to a call was lost, and the repeated one was refused, the first one may have done it.
        """
        check_durability(durability)
        lost: LeaseLost | None = None
        for some in parts(receipts):
            lost = both(lost, self._settle_once(list(some), [], outcome, durability))
        if lost is not None:
            raise lost

    def _settle_once(
        self,
        receipts: list[str],
        runs: list[wire.RunReceipts],
        outcome: MessageOutcome,
        durability: Durability | None,
    ) -> LeaseLost | None:
        verb, body = self._settling(receipts, runs, outcome, durability or self.ack_durability)
        try:
            self._ask("POST", verb, wire.Settled, body)
        except LeaseLost as error:
            alone = len(receipts) + sum(len(run.offsets) for run in runs) == 1
            return self._settle_again(error, outcome, durability, alone=alone)
        return None

    def _settle_again(
        self, error: LeaseLost, outcome: MessageOutcome, durability: Durability | None, *, alone: bool
    ) -> LeaseLost | None:
        """What of a refusal is told; `alone` says that it is about one message.

        An ack or a reject of a message that is done has come to its end, by this call or another's. A message that was
        given back is given back, whoever did it. Any other reason is answered with.
        """
        if not is_repeated(error) or outcome.verb == "extend":
            return error
        if outcome.verb not in ("ack", "reject"):
            return None
        if alone:
            return None if is_done(error) else error
        lost: LeaseLost | None = None
        for receipt in error.receipts:
            try:
                self.settle([receipt], outcome, durability)
            except LeaseLost as each:
                if not is_done(each):
                    lost = both(lost, each)
        return lost

    def extend(self, taken: RemoteTaken, lease_ms: int | None) -> None:
        """Restart the lease, counted from before the call."""
        now_ns = self.client.world.clock.monotonic_ns()
        try:
            self.settle([taken.held.receipt], MessageOutcome("extend", lease_ms=lease_ms), None)
        except LeaseLost:
            taken.held.lost = True
            raise
        self._extended(taken, lease_ms, now_ns)

    def load_state(self, taken: RemoteTaken) -> tuple[Any, int]:
        """Return the state of a message and its version."""
        receipt = taken.held.receipt
        state: wire.State = self._ask("GET", "state", wire.State, receipt=receipt, group=self.group)
        return state.value, state.version

    def save_state(self, taken: RemoteTaken, version: int, content: bytes | None, durability: Durability | None) -> int:
        """Replace the state if it still has this version. Returns the new version."""
        check_durability(durability)
        durability = durability or self.ack_durability
        body = wire.SaveState(receipt=taken.held.receipt, version=version, group=self.group, durability=durability)
        value = None if content is None else msgspec.json.decode(content)
        if content is not None:
            body.value = value
        try:
            state: wire.State = self._ask("PUT", "state", wire.State, body)
        except OverflowError as error:
            raise InvalidRequest(f"the state cannot be saved: {error}. Use only values that JSON can hold") from None
        except Conflict as error:
            if not is_repeated(error):
                raise
            # An earlier attempt, whose answer was lost, may have done it.
            found, new = self.load_state(taken)
            if new != (0 if content is None else version + 1) or found != value:
                raise error from None
            return new
        return state.version

    def peek(self, count: int) -> list[Contents[Any]]:
        """Return the next messages without leasing them."""
        self._check_peek(count)
        found: queues.Messages = self._ask("GET", "peek", queues.Messages, count=count, group=self.group)
        return [contents_from(self.client, self.bodies, each) for each in found.messages]

    def cancel(self, message_id: str) -> bool:
        """Cancel a ready or delayed message. Returns False if it is too late."""
        # Sent once: if the first call succeeded, a second one would return that it is too late.
        verb = f"messages/{message_id}"
        answer: queues.Cancelled = self._ask("DELETE", verb, queues.Cancelled, group=self.group, again=False)
        return answer.cancelled

    def take_back(self, message_id: str) -> bool:
        """End the lease of a message. Returns False if nobody holds it."""
        return self._change(message_id, "takeBack")

    def run_now(self, message_id: str) -> bool:
        """End the delay of a message, or its wait for a retry. Returns False if it has none."""
        return self._change(message_id, "runNow")

    def _change(self, message_id: str, verb: str) -> bool:
        # Sent once: if the first call succeeded, a second one would return that there was nothing to do.
        path = f"messages/{message_id}/{verb}"
        answer: queues.MessageChanged = self._ask("POST", path, queues.MessageChanged, group=self.group, again=False)
        return answer.changed

    def history(self, message_id: str) -> list[TraceStep]:
        """Return every step of a message that is still stored."""
        found: queues.Whole = self._ask("GET", "lookup", queues.Whole, id=message_id, group=self.group)
        return found.history

    def committed(self) -> dict[int, int]:
        """Return, for each partition, the offset below which every message is settled."""
        answer: queues.Committed = self._ask("GET", "committed", queues.Committed, group=self.group)
        return {int(number): offset for number, offset in answer.offsets.items()}

    def seek(self, to: str | None, offset: int | None, time: datetime | None, partition: int | None) -> int:
        """Move the group's position."""
        body = queues.Seek(to=to, offset=offset, time=time, partition=partition, group=self.group)  # type: ignore[arg-type]
        answer: queues.Sought = self._ask("POST", "seek", queues.Sought, body)
        return answer.offset

    def messages(self, phase: str, where: Where, limit: int | None) -> Iterator[Listed[Any]]:
        """Iterate over the messages in one phase that match the condition."""
        return self._pages(self._paging(phase, where, limit))

    def _pages(self, paging: Paging) -> Iterator[Listed[Any]]:
        while not paging.ended:
            verb, query = paging.query()
            answer = self._ask("GET", verb, paging.answers, **query)
            yield from paging.page(answer)

    def _look_up(self, message_id: str) -> Any:
        return self._ask("GET", "lookup", queues.Whole, id=message_id, group=self.group)

    def look_up(self, message_id: str) -> Found | None:
        """Return everything known about a message; None if it does not exist (any more)."""
        try:
            answer: queues.Whole = self._look_up(message_id)
        except NotFound:
            return None
        return Found(
            listed_from(self.client, self.bodies, self.topic, self.group, answer),
            answer.phase,
            answer.leased_at_ms,
            answer.lease_until_ms,
            answer.first_delivery_ms,
            answer.last_delivery_ms,
            tuple(answer.failures),
            answer.state,
            answer.history,
        )

    def oldest_ready_ns(self) -> int | None:
        """Return when the next message was published: for the oldest, all of them would have to be listed."""
        found: Any = self.messages("ready", None, 1)
        return min([each.timestamp_ns for each in found], default=None)

    def letter_id_of(self, message_id: str) -> str | None:
        """Return the id of the dead letter that a message became."""
        found = self.look_up(message_id)
        return found.message.id if found is not None and found.phase == "dead" else None

    def letter(self, letter_id: str) -> DeadLetter[Any]:
        """Return one dead letter."""
        answer: queues.Letter = self._ask("GET", f"dead/{letter_id}", queues.Letter, group=self.group)
        letter: DeadLetter[Any] = listed_from(self.client, self.bodies, self.topic, self.group, answer)  # type: ignore[assignment]
        return letter

    def letter_groups(self, where: Where) -> list[DeadGroup]:
        """Group dead letters by reason and kind of error. A function is evaluated here."""
        if callable(where):
            found: Any = self.messages("dead", where, None)
            return grouped(found)
        answer: queues.DeadGroups = self._ask("GET", "dead/groups", queues.DeadGroups, where=where, group=self.group)
        return answer.groups

    def redrive(self, request: DeadLettersRequest) -> Redriven:
        """Redrive dead letters."""
        rate, chosen = request.rate, self._chosen(request)
        body = queues.Redrive(**chosen, rate=rate, to=request.to, dry_run=request.dry_run, group=self.group)
        return self._act("dead/redrive", body, 0.0 if rate is None else UNLIMITED_S)

    def purge_letters(self, request: DeadLettersRequest) -> Redriven:
        """Delete dead letters."""
        chosen = self._chosen(request)
        return self._act("dead/purge", queues.Purge(**chosen, dry_run=request.dry_run, group=self.group), 0.0)

    def _chosen(self, request: DeadLettersRequest) -> dict[str, Any]:
        """Return what to act on. A function is evaluated here, and its choice is sent as ids."""
        where, limit = request.where, request.limit
        if request.ids is not None:
            return {"ids": request.ids, "limit": limit}
        if callable(where):
            return {"ids": [letter.id for letter in self.messages("dead", where, limit)]}
        return {"where": where, "limit": limit}

    def _act(self, verb: str, body: Any, wait_s: float) -> Redriven:
        answer: queues.RedriveTold = self._ask("POST", verb, queues.RedriveTold, body, again=False, wait_s=wait_s)
        return Redriven(matched=answer.matched, done=answer.done, ids=answer.ids)

    def qsize(self) -> int:
        """Return the number of ready messages."""
        return self.stats().ready

    def stats(self) -> QueueStats:
        """Return the number of messages in each phase, and more."""
        stats: QueueStats = self._ask("GET", "stats", QueueStats, group=self.group)
        return stats

    def samples(self, span_ms: int) -> Samples:
        """Return the samples of this group up to now."""
        samples: Samples = self._ask("GET", "samples", Samples, group=self.group, last=span_ms / 1000)
        return samples

    def pause_group(self, reason: str) -> bool:
        """Pause the group. Returns False if it was paused already."""
        body = queues.PauseGroup(reason=reason, group=self.group)
        answer: queues.PauseTold = self._ask("POST", "pause", queues.PauseTold, body)
        return answer.changed

    def resume_group(self) -> bool:
        """Resume the group. Returns False if it was not paused."""
        answer: queues.PauseTold = self._ask("POST", "resume", queues.PauseTold, group=self.group)
        return answer.changed

    def report_worker(self, report: WorkerReport) -> Order | None:
        """List a worker of this group, and return what it was told to do. Sent once: the next report says it all."""
        told: WorkerOrder = self._ask("POST", "workers", WorkerOrder, report, group=self.group, again=False)
        return told.order

    def purge(self) -> int:
        """Drop every message that is not in flight, and return how many."""
        # Sent once: a second call would drop messages that were put after the first.
        answer: queues.Purged = self._ask("POST", "purge", queues.Purged, group=self.group, again=False)
        return answer.purged

    def compact(self) -> Compacted:
        """Delete messages that are done."""
        freed: queues.Compacted = self._ask("POST", "compact", queues.Compacted, group=self.group)
        return Compacted(segments=freed.segments, bytes=freed.bytes, journal_bytes=freed.journal_bytes)

    def apply_retention(self) -> Retained:
        """Delete what the topic's retention settings no longer keep."""
        self.check_open()
        path = path_of("topics", self.topic, "apply-retention")
        gone: Retained = self._calls.call(Ask(method="POST", path=path, answers=Retained))
        return gone

    def put_plain(self, body: bytes, durability: Durability | None) -> Stored | None:
        """Store a message without options in one call; returns None if more has to be known of the topic first."""
        if not self.bodies.plain:
            return None
        self.check_open()
        return self._calls.run(self.client.publishing.publish_plain(self.topic, body, durability or self.durability))

    def put(self, messages: Iterable[Any], durability: Durability | None, codec: CodecName | None) -> list[Stored]:
        """Store bodies or NewMessages. Of those that go to one partition, all are stored or none."""
        self.check_open()
        request = PublishRequest(messages, None, durability or self.durability, codec)
        return self._calls.run(self.client.publishing.publish(self.topic, request, self.bodies, verb="put_many"))

    def upload(self, request: StreamRequest) -> Stored:
        """Store one message whose body is read from the stream."""
        self.check_open()
        return self._calls.run(publish_stream(self.client.publishing, self.topic, request, self.durability))

    def sync(self) -> None:
        """Wait until everything done so far, including acks, is on disk."""
        self.check_open()
        self._calls.call(Ask(method="POST", path=path_of("admin", "sync")))

    def close(self) -> None:
        """Close this view, and the connection if it was opened only for it."""
        self._view_closed = True
        if self._alone:
            self.client.close()
