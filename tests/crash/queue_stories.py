"""Operations of a queue that touch more than one file, and what comes before each."""

from __future__ import annotations

from collections.abc import Callable

from tests.crash.queue_histories import QueueHistory


def some_messages(history: QueueHistory) -> None:
    """Of every kind, some of them handed out, not all of it synced."""
    for options in ({"key": "a"}, {"priority": 5}, {"delay": 5}, {"dedup_id": "x"}, {"key": "a"}, {"ttl": 1_000}):
        history.put(**options)
    history.get(3)


def dead_letters(history: QueueHistory) -> None:
    some_messages(history)
    history.reject()
    history.sync()
    history.reject()


def released_and_held(history: QueueHistory) -> None:
    """A message that was delayed is in hand."""
    history.put(delay=0.5)
    history.sync()
    history.clock.advance(seconds=1)
    history.q._port.engine.tick()
    history.get(1)


def last_attempt(history: QueueHistory) -> None:
    history.put(key="a")
    for _ in range(2):
        history.get(1)
        history.q.nack_many([history.held.pop(n) for n in list(history.held)], delay=0)
    history.get(1)


def nothing(history: QueueHistory) -> None:
    history.sync()


def nack_now(history: QueueHistory) -> None:
    history.q.nack_many([history.held.pop(n) for n in list(history.held)], delay=0)


def release(history: QueueHistory) -> None:
    history.clock.advance(seconds=6)
    history.q._port.engine.tick()


def lease_end(history: QueueHistory) -> None:
    history.clock.advance(seconds=40)
    history.q._port.engine.tick()


def release_and_ack(history: QueueHistory) -> None:
    released_and_held(history)
    history._ack(list(history.held))


OPERATIONS: dict[str, tuple[Callable[[QueueHistory], None], Callable[[QueueHistory], object]]] = {
    "an ack": (some_messages, QueueHistory.ack),
    "acks": (some_messages, QueueHistory.ack_many),
    "a nack": (some_messages, QueueHistory.nack),
    "a get": (some_messages, QueueHistory.get),
    "a snapshot": (some_messages, QueueHistory.snapshot),
    "the first dead letter": (some_messages, QueueHistory.reject),
    "another dead letter": (dead_letters, QueueHistory.reject),
    "the last nack": (last_attempt, nack_now),
    "the end of a lease": (last_attempt, lease_end),
    "a reject of what was delayed": (released_and_held, QueueHistory.reject),
    "an ack of what was delayed": (nothing, release_and_ack),
    "a release": (some_messages, release),
    "a redrive": (dead_letters, QueueHistory.redrive),
    "a purge": (dead_letters, QueueHistory.purge),
    "compacting": (dead_letters, QueueHistory.compact),
    "the first delayed put": (nothing, lambda history: history.put(delay=5)),
    "the first put with a dedup id": (nothing, lambda history: history.put(dedup_id="x")),
    "a seek": (some_messages, QueueHistory.seek),
    "closing": (dead_letters, QueueHistory.reopen),
}
