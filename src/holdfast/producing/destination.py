"""A topic as a producer sees it: which outbox a message goes to. It is held open while anything is on its way."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from holdfast.broker.messages import Draft, RoundRobin, murmur3
from holdfast.errors import MessageTooLarge
from holdfast.producing.parcels import Outbox
from holdfast.producing.port import OpenTopic, ProducerPort

if TYPE_CHECKING:
    from holdfast.api.bodies import Bodies

_KEEP_NS: Final = 1_000_000_000


class Destination:
    """The outboxes for the partitions of one topic."""

    def __init__(self, owner: Any, port: ProducerPort, topic: OpenTopic, bodies: Bodies, turns: RoundRobin) -> None:
        self._owner = owner
        self._port = port
        self._bodies = bodies
        self._turns = turns
        self.name = topic.name
        self.topic: Any = topic  # what the port has opened, which alone knows more of it
        self.held = True
        self.pending = 0  # outboxes with parcels
        self.used_ns = port.clock.monotonic_ns()
        self.outboxes: list[Outbox] = []
        self._topic_id = topic.id
        self._lock = threading.Lock()
        self.look()

    def look(self) -> None:
        """See the topic's settings and partitions anew."""
        with self._lock:
            self._look()

    def _look(self) -> None:
        settings = self.topic.settings
        if self.topic.id != self._topic_id:
            self._topic_id = self.topic.id
            for outbox in self.outboxes:
                outbox.begin_anew()
        self.drafting = self._port.drafting(self.topic, self._bodies)
        self.plain = self.drafting.plain
        self.most_bytes = self.drafting.most_bytes
        count = len(self.topic.partitions)
        for number in range(len(self.outboxes), count):
            self.outboxes.append(Outbox(self._owner, self, number))
        self.count = count  # there may be more outboxes: another topic of the same name may have fewer partitions
        self.settings = settings  # last: whoever sees these sees the others

    def hold(self, topic: OpenTopic) -> None:
        """The topic was opened again; under the accumulator's lock."""
        self._port.keep(topic)  # once more: it may have been let go just now
        self.topic, self.held = topic, True
        self.used_ns = self._port.clock.monotonic_ns()
        self.look()

    def let_go(self) -> None:
        """Let the topic be closed: nothing is on its way to it."""
        self.held = False
        self._port.let_go(self.topic)

    @property
    def usable(self) -> bool:
        """Whether the topic is held, and open."""
        return self.held and not self.topic.closed

    def refresh(self) -> None:
        """Look again where anything has changed; partitions that were added come with other settings."""
        if self.settings is not self.topic.settings:
            self.look()

    def keyed(self, key: bytes) -> Outbox:
        return self.outboxes[murmur3()(key, 0) % self.count]

    def next(self) -> Outbox:
        return self.outboxes[0 if self.count == 1 else self._turns.take(self.count)]

    def spread(self, count: int) -> Sequence[tuple[int, int, int]]:
        """The next messages in turn, as runs: (partition, first, behind the last)."""
        return [(0, 0, count)] if self.count == 1 else list(self._turns.spread(count, self.count))

    def give_back(self, turns: int) -> None:
        """The last messages, as many as these, were not taken in: the next ones get their turns."""
        if self.count > 1:
            self._turns.give_back(turns, self.count)

    def chosen(self, partition: object) -> Outbox:
        """By hand. Where the number of partitions is secret, an outbox is made when it is needed."""
        number = self._port.check_partition(self.topic, partition)
        if number >= len(self.outboxes):
            with self._lock:
                for missing in range(len(self.outboxes), number + 1):
                    self.outboxes.append(Outbox(self._owner, self, missing))
        return self.outboxes[number]

    def outbox_for(self, draft: Draft, partition: object) -> Outbox:
        """By hand, by key (or dedup id), or in turn."""
        if partition is not None:
            return self.chosen(partition)
        by = draft.key if draft.key is not None else draft.dedup_id
        return self.next() if by is None else self.keyed(by)

    def check_size(self, draft: Draft) -> None:
        size = len(draft.value) + len(draft.key or b"")
        for name, value in draft.headers:
            size += len(name.encode()) + len(value)
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
