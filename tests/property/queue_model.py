"""A queue in the plainest way, without files: what each call must lead to, message by message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from holdfast import NewMessage
from holdfast.api.drafts import Stored
from holdfast.delivery.decide import backoff_ms
from holdfast.delivery.events import Phase
from holdfast.env import ManualClock
from holdfast.settings import QueueSettings

READY, LEASED, DELAYED, DONE = Phase.READY, Phase.LEASED, Phase.DELAYED, Phase.DONE


@dataclass
class Entry:
    """One offset of the log, as the group sees it."""

    body: bytes
    priority: int = 0
    expires_ms: int = 0
    delayed_id: int | None = None
    phase: Phase = READY
    attempts: int = 0  # that were counted
    fence: int = 0
    until_ms: int = 0
    detached: bool = False
    due_ms: int = 0
    document: Any = None
    first_offset: int | None = None  # of its first life, where it was redriven

    def forget(self) -> None:
        """As if it had never been handed out."""
        self.attempts, self.document = 0, None


@dataclass
class Waiting:
    """A message that is not in the log yet."""

    body: bytes
    due_ms: int
    priority: int
    expires_ms: int
    attempts: int = 0


@dataclass
class Letter:
    """A dead letter."""

    body: bytes
    priority: int
    original_offset: int
    attempts: int
    document: Any


HELP_FROM_MS = 25  # when a delayed message is so late, whoever puts another one releases it


@dataclass
class Model:
    """All of them."""

    clock: ManualClock
    policy: QueueSettings
    entries: dict[int, Entry] = field(default_factory=dict)
    store: dict[int, Waiting] = field(default_factory=dict)
    letters: dict[int, Letter] = field(default_factory=dict)
    known: dict[str, tuple[int | None, int | None]] = field(default_factory=dict)  # dedup id -> its first message
    next_offset: int = 0
    next_delayed_id: int = 0
    next_letter: int = 0

    @property
    def now_ms(self) -> int:
        return self.clock.now_ns() // 1_000_000

    @property
    def mono_ms(self) -> int:
        return self.clock.monotonic_ns() // 1_000_000

    def in_phase(self, phase: Phase, *, end: int | None = None) -> dict[int, Entry]:
        return {
            offset: entry
            for offset, entry in self.entries.items()
            if entry.phase is phase and (end is None or offset < end)
        }

    def is_expired(self, entry: Entry) -> bool:
        return 0 < entry.expires_ms <= self.now_ms

    # Publishing

    def put(self, messages: list[NewMessage], answers: list[Stored]) -> None:
        """Take messages in, and hold the answers to it."""
        fresh = self._fresh(messages)
        late = any(message.delay for message in fresh)
        for message, stored in zip(messages, answers, strict=True):
            assert stored.duplicate == (message not in fresh)
            if stored.duplicate:
                assert self.known[message.dedup_id] == (stored.offset, stored.delayed_id)
                continue
            if late:
                self._store(message, stored.delayed_id)
            else:
                assert stored.offset == self._append(*self._fields(message))
            if message.dedup_id is not None:
                self.known[message.dedup_id] = (stored.offset, stored.delayed_id)
        behind = any(waiting.due_ms <= self.now_ms - HELP_FROM_MS for waiting in self.store.values())
        if late and (behind or not all(message.delay for message in fresh)):
            self.release()

    def _fresh(self, messages: list[NewMessage]) -> list[NewMessage]:
        """Those that are no duplicates, of an earlier message or of one in the same call."""
        seen, fresh = set(self.known), []
        for message in messages:
            if message.dedup_id is None or message.dedup_id not in seen:
                fresh.append(message)
                seen.add(message.dedup_id)
        return fresh

    def _fields(self, message: NewMessage) -> tuple[bytes, int, int]:
        due_ms = self.now_ms + round((message.delay or 0) * 1000)
        return message.body, message.priority, due_ms + round(message.ttl * 1000) if message.ttl else 0

    def _store(self, message: NewMessage, delayed_id: int | None) -> None:
        assert delayed_id is not None
        assert delayed_id >= self.next_delayed_id, "an id of a delayed message came again"
        body, priority, expires_ms = self._fields(message)
        due_ms = self.now_ms + round((message.delay or 0) * 1000)
        self.store[delayed_id] = Waiting(body, due_ms, priority, expires_ms)
        self.next_delayed_id = delayed_id + 1

    def _append(self, body: bytes, priority: int, expires_ms: int, delayed_id: int | None = None) -> int:
        self.entries[self.next_offset] = Entry(body, priority, expires_ms, delayed_id)
        self.next_offset += 1
        return self.next_offset - 1

    def release(self) -> None:
        """What is due enters the log."""
        due = sorted((waiting.due_ms, key) for key, waiting in self.store.items() if waiting.due_ms <= self.now_ms)
        for _, delayed_id in due:
            waiting = self.store.pop(delayed_id)
            self._append(waiting.body, waiting.priority, waiting.expires_ms, delayed_id)

    # Consuming

    def get(self, count: int, end: int) -> list[int]:
        """The offsets that must be handed out, in this order: the most urgent first, the oldest of them first."""
        ready = self.in_phase(READY, end=end)
        order = sorted((-entry.priority, offset) for offset, entry in ready.items() if not self.is_expired(entry))
        return [offset for _, offset in order[:count]]

    def lease(self, offset: int, fence: int, lease_ms: int, *, detached: bool) -> None:
        entry = self.entries[offset]
        entry.phase, entry.fence, entry.detached = LEASED, fence, detached
        entry.until_ms = self.mono_ms + lease_ms

    def holds(self, offset: int, fence: int) -> bool:
        entry = self.entries.get(offset)
        return entry is not None and entry.phase is LEASED and entry.fence == fence

    def end(self, offset: int) -> None:
        entry = self.entries[offset]
        entry.phase = DONE
        entry.forget()

    def give_back(self, offset: int, delay_ms: int | None, *, counted: bool) -> None:
        """After a delay, or the backoff where none is given; to the dead letters after the last attempt."""
        entry = self.entries[offset]
        if counted and entry.attempts + 1 >= self.policy.max_attempts:
            self.bury(offset)
            return
        entry.attempts += counted
        if delay_ms is None:
            delay_ms = backoff_ms(self.policy, offset, entry.attempts)
        entry.phase, entry.due_ms = (DELAYED, self.now_ms + delay_ms) if delay_ms else (READY, 0)

    def bury(self, offset: int) -> None:
        entry = self.entries[offset]
        first = offset if entry.first_offset is None else entry.first_offset
        letter = Letter(entry.body, entry.priority, first, entry.attempts + 1, entry.document)
        self.letters[self.next_letter] = letter
        self.next_letter += 1
        self.end(offset)

    # Operating

    def cancel(self, offset: int | None, delayed_id: int | None) -> bool:
        if delayed_id is not None and self.store.pop(delayed_id, None) is not None:
            return True
        if delayed_id is not None:
            offset = next((at for at, entry in self.entries.items() if entry.delayed_id == delayed_id), None)
        entry = None if offset is None else self.entries.get(offset)
        if entry is None or entry.phase not in (READY, DELAYED):
            return False
        self.end(offset)
        return True

    def seek(self, to: int) -> None:
        for offset, entry in self.entries.items():
            if entry.phase is LEASED:
                continue
            if offset < to:
                self.end(offset)
            else:
                entry.phase = READY
                entry.forget()

    def redrive(self, chosen: Iterable[int]) -> None:
        for letter_id in sorted(chosen, key=lambda key: (self.letters[key].original_offset, key)):
            letter = self.letters.pop(letter_id)
            offset = self._append(letter.body, letter.priority, 0)
            self.entries[offset].first_offset = letter.original_offset

    def tick(self) -> None:
        self.release()
        due = [offset for offset, entry in self.in_phase(DELAYED).items() if entry.due_ms <= self.now_ms]
        for offset, entry in sorted(self.in_phase(LEASED).items()):
            if entry.until_ms <= self.mono_ms:
                self.give_back(offset, None, counted=True)
        for offset in due:
            self.entries[offset].phase = READY

    def restart(self, *, killed: bool) -> None:
        """What was in hand comes back: after a kill as an attempt, after closing as if nobody had touched it."""
        for offset, entry in sorted(self.in_phase(LEASED).items()):
            if not entry.detached:
                self.give_back(offset, 0, counted=killed)

    def trim(self, start: int) -> None:
        for offset in [offset for offset in self.entries if offset < start]:
            entry = self.entries.pop(offset)
            gone = entry.phase is DONE or (entry.phase is READY and self.is_expired(entry))
            assert gone, f"{offset} is {entry.phase.value}, and was trimmed away"
