"""What a consumer of a stream group hands out, and how far it came in each of its partitions."""

from __future__ import annotations

from typing import Generic

import msgspec

from holdfast.api.bodies import Bodies
from holdfast.api.contents import Body, Home, MessageFields, Place
from holdfast.membership.assignment import TopicPartition
from holdfast.model import Record


class StreamHome(Place):
    """One partition, as long as one consumer has it without a break: commits of what came before do not count."""


# A struct: made more than a million times a second, and in C four times as fast as other objects.
class StreamMessage(
    MessageFields[Body], msgspec.Struct, Generic[Body], frozen=True, gc=False, eq=False, repr_omit_defaults=True
):
    """A message of a stream: what it says, and where it stands."""

    _home: Home
    _bodies: Bodies
    _record: Record

    __repr__ = MessageFields.__repr__


class ConsumedPartition:
    """One partition in the hands of a consumer, and how far it came there.

    Everything below `given` was handed to the user, below `handled` it is dealt with, and below `kept` committed.
    """

    def __init__(self, place: TopicPartition, position: int) -> None:
        self.place = place
        self.home = StreamHome(*place)
        self.given = self.handled = self.kept = position
        self.paused = False

    @property
    def start(self) -> int:
        """The offset below which everything is gone, as far as this process knows."""
        return 0

    def move(self, position: int) -> None:
        """Read on there; what was handed out before counts as before, but the next commit is for this place."""
        self.given = self.handled = position
