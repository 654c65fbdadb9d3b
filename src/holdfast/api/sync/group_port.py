# Generated from aio/group_port.py by tools/sync.py: do not edit it, edit that one and run "make sync".
"""What stands behind a group: an engine in this process, the owner's socket, or a server.

A face checks what it is given and translates it; a port acts. Durations come as milliseconds, errors as text, and a
message that was taken stays what the port made of it, a `Taken`, until it is settled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Protocol

from holdfast.api.arguments import Wanted
from holdfast.api.bodies import Bodies
from holdfast.api.contents import Contents, Taken
from holdfast.api.drafts import NewMessage, Stored
from holdfast.api.letters import DeadGroup, Redriven
from holdfast.api.listed import DeadLetter, Listed, Where
from holdfast.api.streams import Stream
from holdfast.broker.group import Compacted, QueueStats
from holdfast.broker.metrics import Observer
from holdfast.broker.tracing.log import TraceStep
from holdfast.model import BodyKind, CodecName, Durability, Retained
from holdfast.settings import TopicSettings


class GroupPort(Protocol):
    """One group of one topic, wherever it is."""

    topic: str
    group: str
    bodies: Bodies

    @property
    def place(self) -> str:
        """The data folder, or the address of the server."""

    @property
    def where(self) -> str:
        """The same, as a part of a sentence."""

    @property
    def settings(self) -> TopicSettings:
        """The group's settings."""

    @property
    def kept_bodies(self) -> BodyKind | None:
        """What the bodies of the topic are, if whoever opened it said so."""

    @property
    def closed(self) -> bool:
        """Whether it can be used no more."""

    def check_open(self) -> None:
        """Closed, where it can be used no more."""

    def after_fork(self) -> Any:
        """The port that a face uses in a child after a fork."""

    # Receiving

    def take_next(self) -> Taken | None:
        """The next message, if it is at hand and nothing has to be waited for."""

    def take(self, wanted: Wanted) -> Sequence[Taken]:
        """What is ready, up to so many; waits for the first one."""

    def resume(self, receipt: str) -> Taken:
        """The message that a receipt stands for; LeaseLost if it is no longer held."""

    # Messages in flight

    def ack_now(self, taken: Any) -> bool:
        """Ack one message, if nothing has to be waited for; False where it has."""

    def ack(self, taken: Sequence[Any], durability: Durability | None) -> None:
        """Ack messages in one go. LeaseLost names those that were lost; the others are acked."""

    def nack(self, taken: Sequence[Any], delay_ms: int | None, error: str) -> None:
        """Give messages back after a failure."""

    def defer(self, taken: Any, delay_ms: int) -> None:
        """Give a message back untouched."""

    def release(self, taken: Any) -> None:
        """Give back, untouched if that can be, a message whose handler was interrupted."""

    def reject(self, taken: Any, reason: str) -> None:
        """To the dead letters."""

    def extend(self, taken: Any, lease_ms: int | None) -> None:
        """Let the lease begin anew; without a length, the group's own."""

    def receipt(self, taken: Any) -> str:
        """The proof of a delivery as text."""

    def lost(self, taken: Any) -> bool:
        """Whether the lease has ended meanwhile."""

    def ends_ns(self, taken: Any) -> int:
        """When the lease ends by the clock on the wall, in nanoseconds since 1970; 0 where it has ended."""

    def drop(self, taken: Any) -> None:
        """A message was dropped unhandled; called by its finalizer."""

    def state_version(self, taken: Any) -> int:
        """The version of the message's state; 0 where it has none."""

    def load_state(self, taken: Any) -> tuple[Any, int]:
        """The state of a message and its version."""

    def save_state(self, taken: Any, version: int, content: bytes | None, durability: Durability | None) -> int:
        """Replace the state, if the version is still this one; answers with the new version."""

    # Looking around, and moving

    def peek(self, count: int) -> list[Contents[Any]]:
        """The messages that would come next."""

    def cancel(self, message_id: str) -> bool:
        """Take back a message that nobody works on; False where it is too late."""

    def history(self, message_id: str) -> list[TraceStep]:
        """Every step of a message that is still kept."""

    def committed(self) -> dict[int, int]:
        """For each partition the end of the contiguous run of messages that are settled."""

    def seek(self, to: str | None, offset: int | None, time: datetime | None, partition: int | None) -> int:
        """Go on from there."""

    def messages(self, phase: str, where: Where, limit: int | None) -> Iterator[Listed[Any]]:
        """The messages in a phase that the condition chooses."""

    def letter(self, letter_id: str) -> DeadLetter[Any]:
        """One dead letter."""

    def letter_groups(self, where: Where) -> list[DeadGroup]:
        """Dead letters by reason and kind of error."""

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

    def purge_letters(self, ids: list[str] | None, where: Where, limit: int | None, *, dry_run: bool) -> Redriven:
        """Drop dead letters for good."""

    def qsize(self) -> int:
        """How many messages are ready."""

    def stats(self) -> QueueStats:
        """How many messages stand where."""

    def purge(self) -> int:
        """Drop every message that nobody has in flight; answers how many."""

    def compact(self) -> Compacted:
        """Let go of what is done."""

    def apply_retention(self) -> Retained:
        """Drop what the topic's retention settings let go."""

    def observe(self, observer: Observer | None) -> None:
        """From now on tell this one of every count and every time; None: nobody."""

    # Publishing

    def put_plain(self, body: bytes, durability: Durability | None) -> Stored | None:
        """Store a message that is nothing but its bytes; None where it has to go the long way."""

    def put(self, messages: Iterable[Any], durability: Durability | None, codec: CodecName | None) -> list[Stored]:
        """Store bodies or NewMessages: all that go to one partition, or none of them."""

    def upload(
        self, stream: Stream, options: NewMessage, size_hint: int | None, durability: Durability | None
    ) -> Stored:
        """Store all that the stream gives as one message."""

    def sync(self) -> None:
        """Return when everything said so far, acks included, is on disk."""

    def close(self) -> None:
        """Let go of this view; and of what was opened for it alone."""
