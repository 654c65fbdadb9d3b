"""A topic and its groups in the plainest way, without files: what each call must lead to, message by message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.delivery.decide import backoff_ms
from holdfast.delivery.events import Phase
from holdfast.env import ManualClock
from holdfast.settings import TopicSettings

READY, LEASED, DELAYED, DONE = Phase.READY, Phase.LEASED, Phase.DELAYED, Phase.DONE
Place = tuple[str, int]


@dataclass
class Entry:
    """One offset of a partition; one that was redriven is for its group only."""

    body: bytes
    only_for: str | None = None


@dataclass
class Slot:
    """One offset, as one group in queue mode sees it."""

    phase: Phase = READY
    attempts: int = 0  # that were counted
    fence: int = 0
    until_ms: int = 0
    due_ms: int = 0


@dataclass
class QueueGroupModel:
    """A group in queue mode: a slot for each offset of each partition, and its dead letters."""

    name: str
    max_attempts: int | None = None  # its own
    slots: dict[Place, dict[int, Slot]] = field(default_factory=dict)
    letters: list[tuple[int, int]] = field(default_factory=list)  # partition, original offset
    fences: dict[int, int] = field(default_factory=dict)

    def all(self) -> Iterator[tuple[Place, int, Slot]]:
        for place, slots in self.slots.items():
            for offset, slot in slots.items():
                yield place, offset, slot

    def in_phase(self, phase: Phase) -> set[tuple[int, int]]:
        return {(place[1], offset) for place, offset, slot in self.all() if slot.phase is phase}


@dataclass
class StreamGroupModel:
    """A group in stream mode: where it goes on, and what was handed out since it may have come again."""

    name: str
    committed: dict[Place, int] = field(default_factory=dict)
    delivered: Counter[tuple[Place, int]] = field(default_factory=Counter)


@dataclass
class Model:
    """All of them, on topics whose partitions are lists of entries."""

    clock: ManualClock
    policy: TopicSettings
    logs: dict[Place, list[Entry]] = field(default_factory=dict)
    queues: dict[str, QueueGroupModel] = field(default_factory=dict)
    streams: dict[str, StreamGroupModel] = field(default_factory=dict)

    @property
    def now_ms(self) -> int:
        return self.clock.now_ns() // 1_000_000

    @property
    def mono_ms(self) -> int:
        return self.clock.monotonic_ns() // 1_000_000

    def append(self, place: Place, body: bytes, only_for: str | None = None) -> int:
        offset = len(self.logs[place])
        self.logs[place].append(Entry(body, only_for))
        for group in self.queues.values():
            if place in group.slots:
                group.slots[place][offset] = Slot() if only_for in (None, group.name) else Slot(DONE)
        return offset

    def add_group(self, name: str, topic: str, *, latest: bool, max_attempts: int | None) -> None:
        group = self.queues[name] = QueueGroupModel(name, max_attempts)
        for place, entries in self.logs.items():
            if place[0] == topic:
                group.slots[place] = {
                    offset: Slot(DONE) if latest or entry.only_for not in (None, name) else Slot()
                    for offset, entry in enumerate(entries)
                }

    def add_partition(self, place: Place) -> None:
        self.logs[place] = []
        for group in self.queues.values():
            if any(place[0] == known[0] for known in group.slots):
                group.slots[place] = {}

    # Queue mode

    def attempts_of(self, group: QueueGroupModel) -> int:
        return group.max_attempts or self.policy.max_attempts or 10**9

    def give_back(
        self, group: QueueGroupModel, place: Place, offset: int, delay_ms: int | None, *, counted: bool
    ) -> None:
        """After a delay, or the backoff where none is given; to the dead letters after the last attempt."""
        slot = group.slots[place][offset]
        if counted and slot.attempts + 1 >= self.attempts_of(group):
            self.bury(group, place, offset)
            return
        slot.attempts += counted
        if delay_ms is None:
            delay_ms = backoff_ms(self.policy, offset, slot.attempts)
        slot.phase, slot.due_ms = (DELAYED, self.now_ms + delay_ms) if delay_ms else (READY, 0)

    def end(self, group: QueueGroupModel, place: Place, offset: int) -> None:
        group.slots[place][offset] = Slot(DONE)

    def bury(self, group: QueueGroupModel, place: Place, offset: int) -> None:
        self.end(group, place, offset)
        group.letters.append((place[1], offset))

    def tick(self) -> None:
        for group in self.queues.values():
            due = [slot for _, _, slot in group.all() if slot.phase is DELAYED and slot.due_ms <= self.now_ms]
            for place, offset, slot in list(group.all()):
                if slot.phase is LEASED and slot.until_ms <= self.mono_ms:
                    self.give_back(group, place, offset, None, counted=True)
            for slot in due:
                slot.phase = READY

    def restart(self, *, killed: bool) -> None:
        """What was in hand comes back: after a kill as an attempt, after closing as if nobody had touched it."""
        for group in self.queues.values():
            for place, offset, slot in list(group.all()):
                if slot.phase is LEASED:
                    self.give_back(group, place, offset, 0, counted=killed)

    # Stream mode

    def visible(self, place: Place, start: int, group: str) -> Iterator[int]:
        """The offsets that a group in stream mode is to see."""
        for offset in range(start, len(self.logs[place])):
            if self.logs[place][offset].only_for in (None, group):
                yield offset
