"""A topic as a producer sees it: which lane a message takes, held open while anything is on its way."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from holdfast.api.bodies import Bodies
from holdfast.api.drafts import Drafter
from holdfast.broker.partition import Draft
from holdfast.broker.routing import RoundRobin, check_partition, murmur3
from holdfast.embedded.parcels import Lane, Owner
from holdfast.errors import MessageTooLarge

if TYPE_CHECKING:
    from holdfast.broker.topic import Topic

_KEEP_NS: Final = 1_000_000_000


class Route:
    """The lanes to the partitions of one topic."""

    def __init__(self, owner: Owner, topic: Topic, bodies: Bodies, turns: RoundRobin) -> None:
        self._owner = owner
        self._bodies = bodies
        self._turns = turns
        self.name = topic.name
        self.topic = topic
        self.held = True
        self.pending = 0  # lanes with parcels
        self.used_ns = topic.used_ns
        self.lanes: list[Lane] = []
        self._topic_id = topic.id
        self._lock = threading.Lock()
        self.look()

    def look(self) -> None:
        """See the topic's settings and partitions anew."""
        with self._lock:
            self._look()

    def _look(self) -> None:
        settings = self.topic.settings
        if self.topic.id != self._topic_id:  # another topic of the same name: it has nothing of this producer
            self._topic_id = self.topic.id
            for lane in self.lanes:
                lane.sequence, lane.known, lane.counted = None, 0, 0
        self.drafter = Drafter(self._bodies, settings)
        self.plain = self.drafter.plain  # whether a message of bytes and a key needs nothing more
        self.most_bytes = settings.max_message_bytes
        count = len(self.topic.partitions)
        for number in range(len(self.lanes), count):
            self.lanes.append(Lane(self._owner, self, number))
        self.count = count  # there may be more lanes: another topic of the same name may have fewer partitions
        self.settings = settings  # last: whoever sees these sees the others

    @property
    def usable(self) -> bool:
        """Whether the topic is held, and open."""
        return self.held and not self.topic.closed

    def refresh(self) -> None:
        """Look again where anything has changed; partitions that were added come with other settings."""
        if self.settings is not self.topic.settings:
            self.look()

    def keyed(self, key: bytes) -> Lane:
        return self.lanes[murmur3()(key, 0) % self.count]

    def next(self) -> Lane:
        return self.lanes[0 if self.count == 1 else self._turns.take(self.count)]

    def spread(self, count: int) -> Sequence[tuple[int, int, int]]:
        """The next messages in turn, as runs: (lane, first, behind the last)."""
        return [(0, 0, count)] if self.count == 1 else list(self._turns.spread(count, self.count))

    def give_back(self, turns: int) -> None:
        """The last so many messages were not taken in: the next ones get their turns."""
        if self.count > 1:
            self._turns.give_back(turns, self.count)

    def lane_for(self, draft: Draft, partition: object) -> Lane:
        """By hand, by key (or dedup id), or in turn."""
        if partition is not None:
            return self.lanes[check_partition(partition, self.name, self.count)]
        by = draft.key if draft.key is not None else draft.dedup_id
        return self.next() if by is None else self.keyed(by)

    def check_size(self, draft: Draft) -> None:
        size = len(draft.value) + len(draft.key or b"")
        size += sum(len(name.encode()) + len(value) for name, value in draft.headers)
        if size > self.most_bytes:
            raise self.too_large(size)

    def too_large(self, size: int) -> MessageTooLarge:
        return MessageTooLarge(
            f"the message has {size} bytes with key and headers, the limit of {self.name} is {self.most_bytes}; it was "
            "not sent. Send it in parts, or raise max_message_bytes"
        )

    def is_idle(self, now_ns: int) -> bool:
        """Whether its topic may be let go: nothing is on its way, nor was just now."""
        return self.held and not self.pending and now_ns - self.used_ns > _KEEP_NS
