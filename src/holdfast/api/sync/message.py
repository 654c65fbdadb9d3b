# Generated from aio/message.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""What users hold beside a queue, for threads: messages in flight with their state, dead letters, locks, documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias

import msgspec

from holdfast.api.arguments import (
    check_rate,
    chosen_ids,
    error_text,
    gives_back,
    is_interruption,
    state_content,
    switch,
)
from holdfast.api.contents import Body, Home, MessageFields, Taken
from holdfast.api.drafts import Bodies, Seconds, duration_ms, lease_of
from holdfast.api.locks import (
    LEASE_S,
    Document,
    KeptLock,
    Lock,
    LockInfo,
    LockRequest,
    check_version,
    document_content,
    lease_id_of,
    lock_request,
)
from holdfast.broker.folder.layout import check_name, check_topic_name
from holdfast.errors import Closed, InvalidRequest, LeaseLost, Unavailable, UnknownTopic
from holdfast.later import on_demand
from holdfast.model import Durability, Record

if TYPE_CHECKING:
    from holdfast.api import listing
    from holdfast.api.listing import DeadGroup, DeadLetter, Redriven, Where
    from holdfast.api.sync.ports import GroupPort, LocksPort
else:
    listing = on_demand("holdfast.api.listing")


class State:
    """The state document of a message: it is passed from one holder to the next until the message is acked."""

    def __init__(self, port: GroupPort, taken: Taken) -> None:
        self._port = port
        self._taken = taken
        self.version = port.state_version(taken)

    def load(self) -> Any:
        """Load the document.

        Returns:
            Its value, or None if there is none.

        Raises:
            LeaseLost: The lease of the message has ended.
        """
        value, self.version = self._port.load_state(self._taken)
        return value

    def save(self, value: Any, *, durability: Durability | None = None) -> None:
        """Replace the document.

        Args:
            value: Any value that JSON can represent, up to 1 MiB; None removes the document.
            durability: "fsync", "interval" or "os", for this call.

        Raises:
            Conflict: It has changed since you loaded it.
            LeaseLost: The lease of the message has ended.
            MessageTooLarge: The value is larger than 1 MiB.
        """
        content = state_content(value)
        self.version = self._port.save_state(self._taken, self.version, content, durability)


# A struct is created in C, in half the time of an ordinary object. It needs no garbage collection (gc=False), because
# nothing it refers to refers back to it.
class Message(MessageFields[Body], msgspec.Struct, Generic[Body], eq=False, gc=False):
    """A message that you have leased. Settle it with `ack`, `nack`, `defer` or `reject`.

    As a context manager it is acked if the block succeeds and nacked with the error if the block raises. If you drop
    a message without settling it, it returns to the queue.

        with queue.get() as message:
            handle(message.body)
    """

    _port: Any  # an GroupPort
    _taken: Any  # the port's own object for this delivery
    _settled: bool = False
    _state: Any = None

    __repr__ = MessageFields.__repr__

    @property
    def _record(self) -> Record:  # type: ignore[override]
        record: Record = self._taken.record
        return record

    @property
    def _home(self) -> Home:  # type: ignore[override]
        home: Home = self._taken.home
        return home

    @property
    def _bodies(self) -> Bodies:  # type: ignore[override]
        bodies: Bodies = self._port.bodies
        return bodies

    def __del__(self) -> None:
        if not self._settled:
            self._port.drop(self._taken)

    @property
    def attempt(self) -> int:
        """The number of this delivery, 1 for the first. Deliveries that ended in `defer` do not count."""
        attempt: int = self._taken.attempt
        return attempt

    @property
    def holder(self) -> str:
        """The name of the consumer that holds the lease."""
        holder: str = self._taken.holder
        return holder

    @property
    def fence(self) -> int:
        """The fencing number of this delivery. Every later delivery, of any message, has a higher one."""
        fence: int = self._taken.fence
        return fence

    @property
    def receipt(self) -> str:
        """The proof of this delivery as text. A later process can pass it to `resume`."""
        receipt: str = self._port.receipt(self._taken)
        return receipt

    @property
    def lost(self) -> bool:
        """Whether the lease has ended, as far as this process knows. If so, stop: another consumer may have it."""
        return not self._settled and self._port.lost(self._taken)

    @property
    def settled(self) -> bool:
        """Whether you have settled it through this object: acked, nacked, deferred or rejected it."""
        return self._settled

    @property
    def state(self) -> State:
        """The state document of this message."""
        if self._state is None:
            self._state = State(self._port, self._taken)
        state: State = self._state
        return state

    # LeaseLost settles the message for this object, as success does. After any other error it is still in flight: the
    # caller may try again, and otherwise the finalizer returns it to the queue.

    def ack(self, *, durability: Durability | None = None) -> None:
        """Acknowledge the message: it is done and is not delivered again.

        Args:
            durability: "fsync" returns when the ack is on disk; by default it is within a second.

        Raises:
            LeaseLost: The lease has ended; the message may be delivered again.
        """
        try:
            if durability is not None or not self._port.ack_now(self._taken):
                self._port.ack([self._taken], durability)
        except LeaseLost:
            self._settled = True
            raise
        self._settled = True

    def nack(self, *, delay: Seconds | None = None, error: object = None) -> None:
        """Report a failure: the message is retried, and after the last attempt it becomes a dead letter.

        Args:
            delay: When to retry it; by default the queue's backoff decides.
            error: An exception or a text that says why, stored with the message.

        Raises:
            LeaseLost: The lease has ended.
        """
        delay_ms = None if delay is None else duration_ms(delay, "delay")
        text = error_text(error, self._port.settings.max_error_chars)
        try:
            self._port.nack([self._taken], delay_ms, text)
        except LeaseLost:
            self._settled = True
            raise
        self._settled = True

    def defer(self, *, delay: Seconds = 0) -> None:
        """Return the message to the queue without counting this delivery as an attempt.

        Args:
            delay: When to deliver it again; now by default.

        Raises:
            LeaseLost: The lease has ended.
        """
        delay_ms = duration_ms(delay, "delay")
        try:
            self._port.defer(self._taken, delay_ms)
        except LeaseLost:
            self._settled = True
            raise
        self._settled = True

    def reject(self, reason: object = "") -> None:
        """Make the message a dead letter now.

        Args:
            reason: A text or an exception, stored with the dead letter.

        Raises:
            LeaseLost: The lease has ended.
        """
        text = error_text(reason, self._port.settings.max_error_chars)
        try:
            self._port.reject(self._taken, text)
        except LeaseLost:
            self._settled = True
            raise
        self._settled = True

    def extend(self, lease: Seconds | None = None) -> None:
        """Extend the lease.

        Args:
            lease: The time from now; by default the queue's. With 0 the message returns to the queue, as with `defer`.

        Raises:
            LeaseLost: The lease has ended.
        """
        if gives_back(lease):
            self.defer()
            return
        self._port.extend(self._taken, None if lease is None else lease_of(lease))

    def __enter__(self) -> Message[Body]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._settled:
            return
        if error is None:
            self.ack()
            return
        try:
            if is_interruption(error):
                self._port.release(self._taken)
                self._settled = True
            else:
                self.nack(error=error)
        except (LeaseLost, Closed, Unavailable, UnknownTopic) as late:
            error.add_note(f"the message could not be returned to the queue: {late}")


# For the rest of the package: the port's own object for a message.
taken_of: Callable[[Message[Any]], Any] = attrgetter("_taken")


def settle(messages: list[Message[Any]]) -> None:
    """Mark the messages as settled."""
    for message in messages:
        message._settled = True  # noqa: SLF001  users are not to set it


# Dead letters of a group, for threads.


class DeadLetters(Generic[Body]):
    """The dead letters of a group, as `queue.dead`.

    Look at them, fix the cause, then redrive them:

        for letter in queue.dead.list(where="attempts > 3"):
            print(letter.id, letter.reason, letter.error)
        queue.dead.redrive()
    """

    def __init__(self, port: GroupPort) -> None:
        self._port = port

    def list(self, *, where: Where = None, limit: int | None = None) -> Sequence[DeadLetter[Body]]:
        """Return dead letters, oldest first.

        Args:
            where: An expression such as "attempts > 3", or a function that takes a dead letter; all of them by default.
            limit: The maximum number.

        Returns:
            The dead letters with their errors and attempts.

        Raises:
            InvalidRequest: The expression or the limit cannot be used.
        """
        found: Any = self._port.messages("dead", where, limit)
        return list(found)

    def show(self, letter_id: str) -> DeadLetter[Body]:
        """Return one dead letter.

        Args:
            letter_id: Its id, as `list` returns it.

        Returns:
            The dead letter, with every error of its attempts.

        Raises:
            NotFound: There is no such dead letter (any more).
        """
        if not isinstance(letter_id, str):
            raise InvalidRequest(f"a dead letter's id must be a str, not {type(letter_id).__name__}: pass `letter.id`")
        return self._port.letter(letter_id)

    def groups(self, *, where: Where = None) -> Sequence[DeadGroup]:
        """Count the dead letters by reason and kind of error.

        Args:
            where: Which to count, as in `list`; all of them by default.

        Returns:
            The groups, the largest first, each with an example.

        Raises:
            InvalidRequest: The expression cannot be used.
        """
        return self._port.letter_groups(where)

    def redrive(
        self,
        ids: str | Iterable[str] | None = None,
        *,
        where: Where = None,
        limit: int | None = None,
        rate: float | None = None,
        dry_run: bool = False,
        to: str | None = None,
    ) -> Redriven:
        """Put dead letters back into the queue, in their original order, each once.

        Args:
            ids: Which ones, by id. Without `ids` and `where`, all of them.
            where: Which ones, as in `list`.
            limit: The maximum number.
            rate: The maximum per second.
            dry_run: Only say which ones match; nothing changes.
            to: Publish them as new messages of this topic instead, for all its groups.

        Returns:
            How many matched, how many were redriven, and their ids.

        Raises:
            InvalidRequest: Both `ids` and `where` are given, or one of the arguments cannot be used.
            UnknownTopic: There is no topic `to`.
        """
        check_rate(rate)
        listing.check_limit(limit)
        if to is not None:
            check_topic_name(to)
        ids, dry_run = chosen_ids(ids, where), switch(dry_run, "dry_run")
        return self._port.redrive(
            listing.DeadLettersRequest(ids=ids, where=where, limit=limit, rate=rate, to=to, dry_run=dry_run)
        )

    def purge(
        self,
        ids: str | Iterable[str] | None = None,
        *,
        where: Where = None,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> Redriven:
        """Delete dead letters. This cannot be undone.

        Args:
            ids: Which ones, by id. Without `ids` and `where`, all of them.
            where: Which ones, as in `list`.
            limit: The maximum number.
            dry_run: Only say which ones match; nothing changes.

        Returns:
            How many matched, how many were deleted, and their ids.

        Raises:
            InvalidRequest: Both `ids` and `where` are given, or one of the arguments cannot be used.
        """
        listing.check_limit(limit)
        ids, dry_run = chosen_ids(ids, where), switch(dry_run, "dry_run")
        return self._port.purge_letters(listing.DeadLettersRequest(ids=ids, where=where, limit=limit, dry_run=dry_run))


# Locks and state documents, for threads.


list_ = list  # inside the classes the name means their method


class HeldLock:
    """A lock whose lease is renewed while a `with` block runs. Check `lost` to see if the lease has ended."""

    def __init__(self, port: LocksPort, wanted: LockRequest) -> None:
        self._port = port
        self._wanted = wanted
        self._kept: KeptLock | None = None
        self._released = False

    @property
    def lock(self) -> Lock:
        """The lock as it was acquired. Renewals since then are not reflected in its `expires_at`."""
        return self._taken().lock

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self._wanted.name

    @property
    def owner(self) -> str:
        """The name of the owner, shown to people."""
        return self._wanted.owner

    @property
    def fence(self) -> int:
        """The fencing number, higher than that of every earlier holder."""
        return self.lock.fence

    @property
    def lease_id(self) -> str:
        """The proof of the lease as text, for other processes."""
        return self.lock.lease_id

    @property
    def lost(self) -> bool:
        """Whether the lease has ended, as far as this process knows. If so, stop: another may hold the lock."""
        return self._taken().lost and not self._released

    def _taken(self) -> KeptLock:
        if self._kept is None:
            raise InvalidRequest(f"lock {self.name} has not been acquired: use `with` to acquire it")
        return self._kept

    def __enter__(self) -> Self:
        if self._kept is None:
            self._kept = self._port.keep(self._port.acquire(self._wanted))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kept = self._taken()
        kept.end()
        try:
            self._port.release(kept.lock.lease_id)
            self._released = True
        except (LeaseLost, Closed, Unavailable) as late:
            if error is None:
                raise
            error.add_note(f"the lock was no longer held: {late}")  # the block's own error matters more

    def __del__(self) -> None:
        kept = getattr(self, "_kept", None)  # __init__ may have failed
        if kept is not None:
            kept.end()


LockLike: TypeAlias = Lock | HeldLock | str


class Locks:
    """The locks of a data folder. Safe to use from any thread."""

    def __init__(self, port: LocksPort) -> None:
        self._port = port

    def acquire(
        self,
        name: str,
        *,
        owner: str | None = None,
        lease: Seconds = LEASE_S,
        wait: Seconds | None = None,
        if_not_exists: bool = False,
    ) -> Lock:
        """Acquire the lock. Renew its lease with `keepalive`, or use `hold`, which does that for you.

        Args:
            name: The name of the lock.
            owner: A text shown to people; host and process id by default.
            lease: How long the lock is yours unless you renew it.
            wait: How long to wait in line for it; without a limit by default.
            if_not_exists: Do not wait, and require that no document has this name.

        Returns:
            The lock, with its fencing number and its lease id.

        Raises:
            LockHeld: The lock is not free in time.
            Conflict: With `if_not_exists`: the lock is held, or a document with that name exists.
        """
        owner = self._port.holder if owner is None else owner
        return self._port.acquire(lock_request(name, owner, lease, wait, if_not_exists=if_not_exists))

    def keepalive(self, lock: LockLike, lease: Seconds | None = None) -> Lock:
        """Renew the lease of a lock.

        Args:
            lock: The lock, or its lease id.
            lease: The time from now; by default as long as before.

        Returns:
            The lock with its new `expires_at`.

        Raises:
            LeaseLost: The lease has ended. Stop: another may hold the lock.
        """
        return self._port.keepalive(lease_id_of(lock), None if lease is None else lease_of(lease))

    def release(self, lock: LockLike) -> None:
        """Release the lock; the next in line gets it at once.

        Args:
            lock: The lock, or its lease id.

        Raises:
            LeaseLost: The lease had ended before.
        """
        self._port.release(lease_id_of(lock))

    def force_release(self, name: str) -> bool:
        """Take the lock away from its holder, whose next keepalive fails.

        Args:
            name: The name of the lock.

        Returns:
            False if nobody held it.

        Raises:
            InvalidRequest: The name cannot be used.
        """
        return self._port.force_release(check_name(name, "lock"))

    def describe(self, name: str) -> LockInfo:
        """Say who holds the lock.

        Args:
            name: The name of the lock.

        Returns:
            Its holder, until when it is held, how many wait, and the version of the document of that name.

        Raises:
            InvalidRequest: The name cannot be used.
        """
        return self._port.describe(check_name(name, "lock"))

    def list(self) -> list_[LockInfo]:
        """List the locks that are held.

        Returns:
            One entry for each, with its holder.
        """
        return self._port.held_locks()

    def hold(
        self, name: str, *, owner: str | None = None, lease: Seconds = LEASE_S, wait: Seconds | None = None
    ) -> HeldLock:
        """Hold the lock during a `with` block: it is acquired, renewed meanwhile, and released at the end.

            with broker.locks.hold("nightly-report") as held:
                write_report(fence=held.fence)

        Args:
            name: The name of the lock.
            owner: A text shown to people; host and process id by default.
            lease: How long the lock stays held if this process dies.
            wait: How long to wait in line for it; without a limit by default.

        Returns:
            What to enter with `with`; then it has the fencing number.

        Raises:
            LockHeld: On entering: the lock is not free in time.
            LeaseLost: At the end of a block that lost it.
        """
        owner = self._port.holder if owner is None else owner
        return HeldLock(self._port, lock_request(name, owner, lease, wait))


class Documents:
    """The state documents of a data folder. Safe to use from any thread."""

    def __init__(self, port: LocksPort) -> None:
        self._port = port

    def get(self, name: str) -> Document | None:
        """Return a document.

        Args:
            name: The name of the document.

        Returns:
            The document with its version, or None if it does not exist.

        Raises:
            InvalidRequest: The name cannot be used.
        """
        return self._port.document(check_name(name, "document"))

    def update(self, name: str, value: Any, *, version: int | None = None, lock: LockLike | None = None) -> Document:
        """Create or replace a document. Returns when it is on disk.

        Args:
            name: The name of the document.
            value: Any value that JSON can represent, up to 1 MiB.
            version: The version that you expect it to have; 0 means that it must not exist.
            lock: A lock that must be held for the update to happen.

        Returns:
            The document with its new version.

        Raises:
            Conflict: It has another version.
            LeaseLost: The lock is not held any more.
            MessageTooLarge: The value is larger than 1 MiB.
        """
        lease_id = None if lock is None else lease_id_of(lock)
        content = document_content(check_name(name, "document"), value)
        return self._port.update_document(name, content, check_version(version), lease_id)

    def remove(self, name: str, *, version: int | None = None, lock: LockLike | None = None) -> bool:
        """Remove a document.

        Args:
            name: The name of the document.
            version: The version that you expect it to have.
            lock: A lock that must be held for the removal to happen.

        Returns:
            False if it did not exist.

        Raises:
            Conflict: It has another version.
            LeaseLost: The lock is not held any more.
        """
        lease_id = None if lock is None else lease_id_of(lock)
        return self._port.remove_document(check_name(name, "document"), check_version(version), lease_id)

    def list(self) -> list_[str]:
        """List the documents.

        Returns:
            The names of all documents.
        """
        return self._port.document_names()
