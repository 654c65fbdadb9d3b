"""Everything that is known of one message, wherever it is by now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.broker.layout import DEAD_SUFFIX
from holdfast.broker.station import Station
from holdfast.delivery.group import Failure, Lease
from holdfast.embedded.listed import DeadLetter, Listed, Waiting

if TYPE_CHECKING:
    from holdfast.embedded.face import Face


class Found(NamedTuple):
    """One message with its history; times are milliseconds since 1970, 0 where there is none."""

    message: Listed[Any]
    phase: str
    leased_at_ms: int = 0
    lease_until_ms: int = 0
    first_delivery_ms: int = 0
    last_delivery_ms: int = 0
    failures: tuple[Failure, ...] = ()
    state: Any = None


def find_message(face: Face[Any], message_id: str) -> Found | None:
    """The message, living or done, or the dead letter that it became; None where there is none (any more)."""
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
        for letter in station.letters():
            if letter.note.offset == offset:
                return Found(DeadLetter(face, station, letter), "dead")
    return _in_log(face, station, offset)


def _dead(face: Face[Any], letter_id: str) -> Found | None:
    for station in face._stations:
        for letter in station.letters():
            found: DeadLetter[Any] = DeadLetter(face, station, letter)
            if found.id == letter_id:
                return Found(found, "dead")
    return None


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


def until_ms(station: Station, lease: Lease) -> int:
    """When a lease ends, by the clock on the wall."""
    clock = station.delivery._clock
    return clock.now_ns() // 1_000_000 + lease.until_ms - clock.monotonic_ns() // 1_000_000
