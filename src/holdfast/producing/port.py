"""The port of a producer: what it needs from a data folder of this process or from a server."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Sized
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.broker.messages import Draft
from holdfast.broker.producers import ProducerId
from holdfast.env import Clock
from holdfast.model import Durability
from holdfast.settings import ProducerSettings, TopicSettings

if TYPE_CHECKING:
    from holdfast.api.bodies import Bodies
    from holdfast.api.drafts import NewMessage
    from holdfast.producing.parcels import Outbox, Parcel


class OpenTopic(Protocol):
    """A topic that messages can be sent to."""

    @property
    def name(self) -> str: ...

    @property
    def id(self) -> object:
        """Another one where the topic was deleted and made anew: it has nothing of the producer then."""

    @property
    def settings(self) -> TopicSettings:
        """Another object once anything has changed, the number of partitions included."""

    @property
    def partitions(self) -> Sized: ...

    @property
    def lost(self) -> Collection[int]:
        """The partitions that take nothing; there are others."""

    @property
    def closed(self) -> bool: ...


class Drafting(Protocol):
    """Encodes messages for sending."""

    @property
    def plain(self) -> bool:
        """Whether a message of bytes and a key needs nothing more."""

    @property
    def most_bytes(self) -> int:
        """Of a message with its key and headers; larger ones are not even sent."""

    def draft(self, message: NewMessage) -> tuple[Draft, Any, bool]:
        """The message as it will be stored, as the port wants it back in a parcel, and whether it has no sequence.

        Raises InvalidRequest, which names what is wrong with it.
        """


class Backing(Protocol):
    """What a port stands on. It is closed by others."""

    @property
    def closed(self) -> bool: ...


class ProducerPort(Protocol):
    """The way of one producer to the partitions. But for `wait_async` its calls may block."""

    @property
    def clock(self) -> Clock: ...

    @property
    def settings(self) -> ProducerSettings:
        """Those of producers there, where nothing else is asked for."""

    @property
    def blocks(self) -> bool:
        """Whether `append` and `publish` wait for a server: then they are no work for an event loop."""

    @property
    def most_parcel(self) -> int | None:
        """How many messages may go at once; None: a parcel that waits may grow beyond its batch."""

    @property
    def most_partitions(self) -> int | None:
        """How many partitions may be open at once; None: it opens none."""

    @property
    def place(self) -> str:
        """Where messages go, for people: "in /data" or "at http://..."."""

    @property
    def backing(self) -> Backing:
        """The engine or the connection behind it."""

    def check_open(self) -> None:
        """Raise Closed where nothing can be sent any more."""

    def begin(self, name: str | None, *, resume: bool) -> ProducerId:
        """Get a producer id; a producer with a name fences earlier ones of that name."""

    def open_topic(self, name: str) -> OpenTopic:
        """Open the topic, which stays open until it is released. Raises UnknownTopic."""

    def keep(self, topic: Any) -> None:
        """Hold the topic, which is open; needs no time."""

    def release(self, topic: Any) -> None:
        """The topic may be closed: nothing is on its way to it."""

    def is_stale(self, topic: Any) -> bool:
        """Whether to ask for the topic again before the next message; asked only where `blocks` is true."""

    def check_partition(self, topic: Any, partition: object) -> int:
        """A partition that was chosen by hand, if the topic has it; UnknownTopic where it has not."""

    def drafting(self, topic: Any, bodies: Bodies) -> Drafting:
        """Checks messages for the topic, by its settings of now."""

    def check(self, identity: ProducerId) -> None:
        """Raise Fenced where a newer producer of the name has begun."""

    def prepare(self, outbox: Outbox) -> None:
        """Load what the partition knows about producers, if that takes long."""

    def is_prepared(self, outbox: Outbox) -> bool: ...

    def next_sequence(self, outbox: Outbox, identity: ProducerId) -> int:
        """The number that the partition expects the producer's next message to have."""

    def offsets(self, outbox: Outbox, identity: ProducerId, first: int, count: int) -> Sequence[int | None]:
        """Where messages are that the producer has stored before, counted from `first`."""

    def append(self, parcel: Parcel, identity: ProducerId | None, durability: Durability) -> Any:
        """Store the parcel unless the partition has it; returns what to `wait` for, None if nothing is left to do.

        Notes in the parcel where its messages are.
        """

    def publish(self, parcel: Parcel, identity: ProducerId | None, durability: Durability) -> Any:
        """Store messages without a sequence number: delayed ones, and those with a dedup id."""

    def written(self, parcel: Parcel, durability: Durability) -> Any:
        """Return what to wait for if the resumed producer had stored all messages of a parcel."""

    def wait(self, waiting: Any) -> None:
        """Wait until what was appended or published is as durable as asked."""

    async def wait_async(self, waiting: Any) -> None:
        """Async version of `wait`; used only where `blocks` is false."""
