"""Everything that is known of one message, wherever it is by now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.api.contents import home_of, record_of
from holdfast.api.listed import DeadLetter, Listed, Waiting, due_ms_of, note_of
from holdfast.broker.dead_letters import DeadLetter as StoredLetter
from holdfast.broker.delivery import Delivery
from holdfast.broker.folder.layout import DEAD_SUFFIX, parse_message_id
from holdfast.broker.history import history, history_of_letter
from holdfast.broker.tracing.log import DELAYED, LEASED, PUBLISHED, TraceStep
from holdfast.delivery.group import Failure
from holdfast.errors import NotFound
from holdfast.local.listing import seen, until_ms

if TYPE_CHECKING:
    from holdfast.local.group import LocalGroup


class Found(NamedTuple):
    """One message, with its steps where they were looked up; times are milliseconds since 1970, 0 for none."""

    message: Listed[Any]
    phase: str
    leased_at_ms: int = 0
    lease_until_ms: int = 0
    first_delivery_ms: int = 0
    last_delivery_ms: int = 0
    failures: tuple[Failure, ...] = ()
    state: Any = None
    history: Sequence[TraceStep] = ()


def message_history(group: LocalGroup, message_id: str) -> list[TraceStep]:
    """Every step of a message that is kept, living, done or dead; NotFound where there is none (any more)."""
    found = find_message(group, message_id)
    if found is None:
        raise no_message(message_id, group.topic)
    return history_of(found.message)


def look_up(group: LocalGroup, message_id: str) -> Found | None:
    """The message with all its steps, for which a whole journal may have to be read; None where there is none."""
    found = find_message(group, message_id)
    return None if found is None else _with_history(found)


def no_message(message_id: str, topic: str) -> NotFound:
    """The error for an id that leads to nothing."""
    return NotFound(f"there is no message {message_id} in {topic}: it never was, or it is done and was dropped since")


def history_of(found: Listed[Any]) -> list[TraceStep]:
    """Every step of a message that was found, with those of the messages that it was redriven into or out of."""
    delivery = home_of(found)
    if isinstance(found, DeadLetter):
        return history_of_letter(delivery, StoredLetter(record_of(found), note_of(found)))
    if isinstance(found, Waiting):
        published = TraceStep(found.timestamp_ns, PUBLISHED, found.id, delivery.topic, delivery.number)
        return [published, msgspec.structs.replace(published, step=DELAYED, due_ms=due_ms_of(found))]
    return history(delivery, found.offset)


def find_message(group: LocalGroup, message_id: str) -> Found | None:
    """The message, living or done, or the dead letter that it became; None where there is none (any more).

    The id of a letter that was redriven or purged leads to the message that died.
    """
    if message_id.startswith(f"{group.topic}{DEAD_SUFFIX}-"):
        return _dead(group, message_id)
    delivery, place = group.queue_group.place(message_id)
    offset, log = place.offset, delivery.partition.log
    if place.delayed_id is not None:
        store = delivery.partition.delayed
        waiting = None if store is None else store.get(place.delayed_id)
        if waiting is not None:
            return Found(Waiting(delivery, group.bodies, waiting.record, waiting.due_at_ms), "delayed")
        offset = delivery.partition.find_released(place.delayed_id, log.start)
        if offset is None:
            delivery.partition.check_delayed()
    if offset is None or offset >= log.end:
        return None
    if delivery.group.phase(offset).value == "done":  # or somebody brought it back meanwhile
        letter = delivery.dead.letter_of(offset)
        if letter is not None:
            return Found(DeadLetter(delivery, group.bodies, letter.record, letter.note), "dead")
    return _in_log(group, delivery, offset)


def _dead(group: LocalGroup, letter_id: str) -> Found | None:
    place = parse_message_id(letter_id, f"{group.topic}{DEAD_SUFFIX}")
    delivery = group.queue_group.delivery(place.partition)
    if place.offset is None:
        return None
    letter = delivery.dead.letter(place.offset)
    if letter is not None:
        return Found(DeadLetter(delivery, group.bodies, letter.record, letter.note), "dead")
    gone = delivery.dead.letter(place.offset, gone=True)  # redriven or purged: the message that it was can tell of it
    return None if gone is None else _in_log(group, delivery, gone.note.offset)


def _in_log(group: LocalGroup, delivery: Delivery, offset: int) -> Found | None:
    if offset < delivery.partition.log.start:
        return None
    records = delivery.fetch([offset])
    if not records:
        return None
    state = delivery.group
    phase = state.phase(offset).value
    listed: Any = phase  # `done` is no phase that can be listed, and is shown here nevertheless
    message = seen(group, delivery, records[0], listed, due_ms=state.waiting.get(offset, 0))
    lease, history, document = state.leases.get(offset), state.histories.get(offset), state.documents.get(offset)
    return Found(
        message,
        phase,
        leased_at_ms=0 if lease is None else lease.at_ms,
        lease_until_ms=0 if lease is None else until_ms(delivery, lease),
        first_delivery_ms=0 if history is None else history.first_ms,
        last_delivery_ms=0 if history is None else history.last_ms,
        failures=() if history is None else history.failures,
        state=None if document is None else msgspec.json.decode(document.content),
    )


def _with_history(found: Found) -> Found:
    """The same with all its steps; of a message that is done they are all that is left to tell of its deliveries."""
    steps = history_of(found.message)
    if found.phase != "done":
        return found._replace(history=steps)
    taken = [step for step in steps if step.step == LEASED and step.id == found.message.id]
    if taken:
        found.message.attempts, found.message.holder = taken[-1].attempt, taken[-1].holder
    return found._replace(
        history=steps,
        first_delivery_ms=taken[0].at_ns // 1_000_000 if taken else 0,
        last_delivery_ms=taken[-1].at_ns // 1_000_000 if taken else 0,
    )
