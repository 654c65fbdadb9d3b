# Generated from aio/group.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""A group behind a server, for threads: every verb is a call, and one that was not answered is made again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

import msgspec

from holdfast.api.arguments import Wanted, check_durability
from holdfast.api.bodies import Bodies
from holdfast.api.contents import Contents
from holdfast.api.drafts import NewMessage, Stored
from holdfast.api.letters import DeadGroup, Redriven, grouped
from holdfast.api.listed import DeadLetter, Listed, Where
from holdfast.api.streams import Stream
from holdfast.broker.group import Compacted, QueueStats
from holdfast.broker.tracing.log import TraceStep
from holdfast.client.client import Client
from holdfast.client.http import Ask, path_of
from holdfast.errors import Conflict, InvalidRequest, LeaseLost
from holdfast.model import CodecName, Durability, Retained
from holdfast.protocol import dead, queues
from holdfast.protocol import messages as wire
from holdfast.remote.calls import Calls
from holdfast.remote.group import (
    MOST_WAIT_S,
    UNLIMITED_S,
    Paging,
    RemoteGroup,
    RemoteTaken,
    both,
    end,
    is_done,
    is_repeated,
    parts,
    receipts_of,
)
from holdfast.remote.records import contents_told, listed_told
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

    def take(self, wanted: Wanted) -> list[RemoteTaken]:
        """What is ready, up to so many; the server lets us wait for the first one."""
        take = self._take(wanted)
        mono_ns = self.client.world.clock.monotonic_ns
        until_ns = None if wanted.timeout_s is None else mono_ns() + round(wanted.timeout_s * 1e9)
        while True:
            left_s = MOST_WAIT_S if until_ns is None else max((until_ns - mono_ns()) / 1e9, 0)
            take.wait = min(left_s, MOST_WAIT_S) if wanted.timeout_s != 0 else 0
            found = self._take_some(take)
            if found.messages:
                renew, detached = wanted.renew, wanted.detached
                return [self._in_flight(each, renew=renew, detached=detached) for each in found.messages]
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
        """The message that a receipt stands for; LeaseLost if it is no longer held."""
        told: wire.Delivery = self._ask("GET", "inHand", wire.Delivery, receipt=receipt, group=self.group)
        return self._in_flight(told, renew=False, detached=True)

    def ack(self, taken: Sequence[RemoteTaken], durability: Durability | None) -> None:
        """Ack messages in one go. LeaseLost names those that were lost; the others are acked."""
        self._check_own(taken)
        check_durability(durability)
        lost: LeaseLost | None = None
        for some in parts(taken):
            receipts = [each.held.receipt for each in some]
            try:
                self._ack(receipts, durability)
            except LeaseLost as error:
                lost = both(lost, self._ack_again(error, receipts, durability) if is_repeated(error) else error)
            end(some)
        if lost is not None:
            raise lost

    def _ack(self, receipts: list[str], durability: Durability | None) -> None:
        body = wire.Ack(receipts=receipts, group=self.group, durability=durability or self.ack_durability)
        self._ask("POST", "ack", wire.Settled, body)

    def _ack_again(self, error: LeaseLost, receipts: list[str], durability: Durability | None) -> LeaseLost | None:
        """The answer to an ack was lost, and the repeated one was refused.

        Where the message is done it stays so, by our own ack or another's: that is what an ack is for. Any other
        reason is answered with.
        """
        if len(receipts) == 1:
            return None if is_done(error) else error
        lost: LeaseLost | None = None
        for receipt in error.receipts:
            try:
                self._ack([receipt], durability)
            except LeaseLost as each:
                if not is_done(each):
                    lost = both(lost, each)
        return lost

    def nack(self, taken: Sequence[RemoteTaken], delay_ms: int | None, error: str) -> None:
        """Give messages back after a failure."""
        self._check_own(taken)
        delay_s = None if delay_ms is None else delay_ms / 1000
        for some in parts(taken):
            body = wire.Nack(
                receipts=receipts_of(some),
                group=self.group,
                delay=delay_s,
                error=error or None,
                durability=self.ack_durability,
            )
            self._give_up(some, "nack", body)

    def _give_up(self, taken: Sequence[RemoteTaken], verb: str, body: Any) -> None:
        """The last thing done with messages; after a call that was refused for another reason they are in flight."""
        try:
            self._ask("POST", verb, wire.Settled, body)
        except LeaseLost as error:
            end(taken)
            # After an attempt whose answer was lost: given back is given back, whoever did it.
            if not is_repeated(error) or (verb == "reject" and not is_done(error)):
                raise
        else:
            end(taken)

    def defer(self, taken: RemoteTaken, delay_ms: int) -> None:
        """Give a message back untouched."""
        body = wire.Nack(
            receipts=[taken.held.receipt],
            group=self.group,
            intent="defer",
            delay=delay_ms / 1000,
            durability=self.ack_durability,
        )
        self._give_up([taken], "nack", body)

    def release(self, taken: RemoteTaken) -> None:
        """Give back a message whose handler was interrupted: by the thread beside, for one that is being cancelled."""
        self.defer(taken, 0)

    def reject(self, taken: RemoteTaken, reason: str) -> None:
        """To the dead letters."""
        receipts = [taken.held.receipt]
        body = wire.Reject(receipts=receipts, group=self.group, reason=reason or None, durability=self.ack_durability)
        self._give_up([taken], "reject", body)

    def extend(self, taken: RemoteTaken, lease_ms: int | None) -> None:
        """Let the lease begin anew; it is counted from before the call."""
        now_ns = self.client.world.clock.monotonic_ns()
        body = wire.Extend(
            receipts=[taken.held.receipt],
            group=self.group,
            lease=None if lease_ms is None else lease_ms / 1000,
            durability=self.ack_durability,
        )
        try:
            self._ask("POST", "extend", wire.Settled, body)
        except LeaseLost:
            taken.held.lost = True
            raise
        self._extended(taken, lease_ms, now_ns)

    def load_state(self, taken: RemoteTaken) -> tuple[Any, int]:
        """The state of a message and its version."""
        receipt = taken.held.receipt
        state: wire.State = self._ask("GET", "state", wire.State, receipt=receipt, group=self.group)
        return state.value, state.version

    def save_state(self, taken: RemoteTaken, version: int, content: bytes | None, durability: Durability | None) -> int:
        """Replace the state, if the version is still this one; answers with the new version."""
        check_durability(durability)
        durability = durability or self.ack_durability
        body = wire.SaveState(receipt=taken.held.receipt, version=version, group=self.group, durability=durability)
        value = None if content is None else msgspec.json.decode(content)
        if content is not None:
            body.value = value
        try:
            state: wire.State = self._ask("PUT", "state", wire.State, body)
        except OverflowError as error:
            raise InvalidRequest(f"the state cannot be saved: {error}. It must be a value that JSON knows") from None
        except Conflict as error:
            if not is_repeated(error):
                raise
            # The attempt before, whose answer was lost, may have done it.
            found, new = self.load_state(taken)
            if new != (0 if content is None else version + 1) or found != value:
                raise error from None
            return new
        return state.version

    def peek(self, count: int) -> list[Contents[Any]]:
        """The messages that would come next."""
        self._check_peek(count)
        found: queues.Messages = self._ask("GET", "peek", queues.Messages, count=count, group=self.group)
        return [contents_told(self.client, self.bodies, each) for each in found.messages]

    def cancel(self, message_id: str) -> bool:
        """Take back a message that nobody works on; False where it is too late."""
        # Sent once: a second one would answer that it was too late, where the first has done it.
        verb = f"messages/{message_id}"
        answer: queues.Cancelled = self._ask("DELETE", verb, queues.Cancelled, group=self.group, again=False)
        return answer.cancelled

    def history(self, message_id: str) -> list[TraceStep]:
        """Every step of a message that is still kept."""
        found: queues.Whole = self._ask("GET", "lookup", queues.Whole, id=message_id, group=self.group)
        return found.history

    def committed(self) -> dict[int, int]:
        """For each partition the end of the contiguous run of messages that are settled."""
        answer: queues.Committed = self._ask("GET", "committed", queues.Committed, group=self.group)
        return {int(number): offset for number, offset in answer.offsets.items()}

    def seek(self, to: str | None, offset: int | None, time: datetime | None, partition: int | None) -> int:
        """Go on from there."""
        body = queues.Seek(to=to, offset=offset, time=time, partition=partition, group=self.group)  # type: ignore[arg-type]
        answer: queues.Sought = self._ask("POST", "seek", queues.Sought, body)
        return answer.offset

    def messages(self, phase: str, where: Where, limit: int | None) -> Iterator[Listed[Any]]:
        """The messages in a phase that the condition chooses."""
        return self._pages(self._paging(phase, where, limit))

    def _pages(self, paging: Paging) -> Iterator[Listed[Any]]:
        while not paging.ended:
            verb, query = paging.query()
            answer = self._ask("GET", verb, paging.answers, **query)
            yield from paging.page(answer)

    def letter(self, letter_id: str) -> DeadLetter[Any]:
        """One dead letter."""
        told: dead.Letter = self._ask("GET", f"dead/{letter_id}", dead.Letter, group=self.group)
        letter: DeadLetter[Any] = listed_told(self.client, self.bodies, self.topic, self.group, told)  # type: ignore[assignment]
        return letter

    def letter_groups(self, where: Where) -> list[DeadGroup]:
        """Dead letters by reason and kind of error. A function is asked here."""
        if callable(where):
            found: Any = self.messages("dead", where, None)
            return grouped(found)
        answer: dead.DeadGroups = self._ask("GET", "dead/groups", dead.DeadGroups, where=where, group=self.group)
        return answer.groups

    def redrive(
        self,
        ids: list[str] | None,
        where: Where,
        limit: int | None,
        rate: float | None,
        to: str | None,
        *,
        dry_run: bool,
    ) -> Redriven:
        """Put dead letters back."""
        chosen = self._chosen(ids, where, limit)
        body = dead.Redrive(**chosen, rate=rate, to=to, dry_run=dry_run, group=self.group)
        return self._act("dead/redrive", body, 0.0 if rate is None else UNLIMITED_S)

    def purge_letters(self, ids: list[str] | None, where: Where, limit: int | None, *, dry_run: bool) -> Redriven:
        """Drop dead letters for good."""
        chosen = self._chosen(ids, where, limit)
        return self._act("dead/purge", dead.Purge(**chosen, dry_run=dry_run, group=self.group), 0.0)

    def _chosen(self, ids: list[str] | None, where: Where, limit: int | None) -> dict[str, Any]:
        """What to act on. A function is asked here, and its choice told by ids."""
        if ids is not None:
            return {"ids": ids, "limit": limit}
        if callable(where):
            return {"ids": [letter.id for letter in self.messages("dead", where, limit)]}
        return {"where": where, "limit": limit}

    def _act(self, verb: str, body: Any, wait_s: float) -> Redriven:
        told: dead.RedriveTold = self._ask("POST", verb, dead.RedriveTold, body, again=False, wait_s=wait_s)
        return Redriven(matched=told.matched, done=told.done, ids=told.ids)

    def qsize(self) -> int:
        """How many messages are ready."""
        return self.stats().ready

    def stats(self) -> QueueStats:
        """How many messages stand where."""
        stats: QueueStats = self._ask("GET", "stats", QueueStats, group=self.group)
        return stats

    def purge(self) -> int:
        """Drop every message that nobody has in flight; answers how many."""
        # Sent once: what is put behind the first one would be dropped by a second.
        told: queues.Purged = self._ask("POST", "purge", queues.Purged, group=self.group, again=False)
        return told.purged

    def compact(self) -> Compacted:
        """Let go of what is done."""
        freed: queues.Compacted = self._ask("POST", "compact", queues.Compacted, group=self.group)
        return Compacted(segments=freed.segments, bytes=freed.bytes, journal_bytes=freed.journal_bytes)

    def apply_retention(self) -> Retained:
        """Drop what the topic's retention settings let go."""
        self.check_open()
        path = path_of("topics", self.topic, "apply-retention")
        gone: Retained = self._calls.call(Ask(method="POST", path=path, answers=Retained))
        return gone

    def put_plain(self, body: bytes, durability: Durability | None) -> Stored | None:
        """There is no shorter way to a server."""
        return None

    def put(self, messages: Iterable[Any], durability: Durability | None, codec: CodecName | None) -> list[Stored]:
        """Store bodies or NewMessages: all that go to one partition, or none of them."""
        self.check_open()
        return self._calls.publish(self.topic, messages, self.bodies, durability or self.durability, codec)

    def upload(
        self, stream: Stream, options: NewMessage, size_hint: int | None, durability: Durability | None
    ) -> Stored:
        """Store all that the stream gives as one message."""
        self.check_open()
        return self._calls.upload(self.topic, stream, options, size_hint, durability or self.durability)

    def sync(self) -> None:
        """Return when everything said so far, acks included, is on disk."""
        self.check_open()
        self._calls.call(Ask(method="POST", path=path_of("admin", "sync")))

    def close(self) -> None:
        """Let go of this view; and of the connection, where it was opened for it alone."""
        self._view_closed = True
        if self._alone:
            self._calls.close()
