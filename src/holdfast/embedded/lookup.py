"""Everything that is known of one message, wherever it is by now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.broker.folder.layout import DEAD_SUFFIX, parse_message_id
from holdfast.broker.history import history, history_of_letter
from holdfast.broker.station import Station
from holdfast.broker.tracing.steps import DELAYED, LEASED, PUBLISHED, TraceStep
from holdfast.delivery.group import Failure, Lease
from holdfast.embedded.listed import DeadLetter, Listed, Waiting
from holdfast.errors import NotFound

if TYPE_CHECKING:
    from holdfast.embedded.face import Face


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


def message_history(face: Face[Any], message_id: str) -> list[TraceStep]:
    """Every step of a message that is kept, living, done or dead; NotFound where there is none (any more)."""
    found = find_message(face, message_id)
    if found is None:
        raise no_message(message_id, face.name)
    return history_of(found.message)


def look_up(face: Face[Any], message_id: str) -> Found | None:
    """The message with all its steps, for which a whole journal may have to be read; None where there is none."""
    found = find_message(face, message_id)
    return None if found is None else _with_history(found)


def no_message(message_id: str, topic: str) -> NotFound:
    """The error for an id that leads to nothing."""
    return NotFound(f"there is no message {message_id} in {topic}: it never was, or it is done and was dropped since")


def history_of(found: Listed[Any]) -> list[TraceStep]:
    """Every step of a message that was found, with those of the messages that it was redriven into or out of."""
    station = found._home
    if isinstance(found, DeadLetter):
        return history_of_letter(station, found._stored)
    if isinstance(found, Waiting):
        published = TraceStep(found.timestamp_ns, PUBLISHED, found.id, station.topic, station.number)
        return [published, msgspec.structs.replace(published, step=DELAYED, due_ms=found._due_ms)]
    return history(station, found.offset)


def find_message(face: Face[Any], message_id: str) -> Found | None:
    """The message, living or done, or the dead letter that it became; None where there is none (any more).

    The id of a letter that was redriven or purged leads to the message that died.
    """
    if message_id.startswith(f"{face.name}{DEAD_SUFFIX}-"):
        return _dead(face, message_id)
    station, place = face._group.place(message_id)
    offset, log = place.offset, station.partition.log
    if place.delayed_id is not None:
        store = station.partition.delayed
        waiting = None if store is None else store.get(place.delayed_id)
        if waiting is not None:
            return Found(Waiting(face, station, waiting), "delayed")
        offset = station.partition.find_released(place.delayed_id, log.start)
    if offset is None or offset >= log.end:
        return None
    if station.delivery.group.phase(offset).value == "done":  # or somebody brought it back meanwhile
        letter = station.letter_of(offset)
        if letter is not None:
            return Found(DeadLetter(face, station, letter), "dead")
    return _in_log(face, station, offset)


def _dead(face: Face[Any], letter_id: str) -> Found | None:
    place = parse_message_id(letter_id, f"{face.name}{DEAD_SUFFIX}")
    station = face._group.station(place.partition)
    if place.offset is None:
        return None
    letter = station.letter(place.offset)
    if letter is not None:
        return Found(DeadLetter(face, station, letter), "dead")
    gone = station.letter(place.offset, gone=True)  # redriven or purged: the message that it was can tell of it
    return None if gone is None else _in_log(face, station, gone.note.offset)


def _in_log(face: Face[Any], station: Station, offset: int) -> Found | None:
    if offset < station.partition.log.start:
        return None
    records = station.delivery.fetch([offset])
    if not records:
        return None
    group = station.delivery.group
    phase = group.phase(offset).value
    listed: Any = phase  # `done` is no phase that can be listed, and is shown here nevertheless
    message = Listed(face, station, records[0], listed, due_ms=group.waiting.get(offset, 0))
    lease, history, state = group.leases.get(offset), group.histories.get(offset), group.documents.get(offset)
    return Found(
        message,
        phase,
        leased_at_ms=0 if lease is None else lease.at_ms,
        lease_until_ms=0 if lease is None else until_ms(station, lease),
        first_delivery_ms=0 if history is None else history.first_ms,
        last_delivery_ms=0 if history is None else history.last_ms,
        failures=() if history is None else history.failures,
        state=None if state is None else msgspec.json.decode(state.content),
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


def until_ms(station: Station, lease: Lease) -> int:
    """When a lease ends, by the clock on the wall."""
    clock = station.delivery._clock
    return clock.now_ns() // 1_000_000 + lease.until_ms - clock.monotonic_ns() // 1_000_000
