"""A group's state as one value for snapshots, and the invariants that the state must satisfy."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
from pyroaring import BitMap64

from holdfast.delivery.events import SESSION_BITS, Phase, Runs, each, runs_of
from holdfast.delivery.group import Burial, Group, History, HolderState, Lease


class GroupImage(msgspec.Struct, frozen=True, array_like=True):
    """Everything that `apply` builds up. Timers and deadlines are derived from it."""

    floor: int
    cursor: int
    session: int
    boot_id: int
    fence: int
    leases: list[tuple[Lease, Runs]]
    waiting: dict[int, int]
    burials: dict[int, Burial]
    histories: dict[int, History]
    documents: dict[int, HolderState]
    done: bytes
    ahead: bytes
    levels: list[bytes]
    ready: list[bytes]
    scanned: int


def image_of(group: Group) -> GroupImage:
    """Return a copy of the group's state."""
    held: defaultdict[Lease, list[int]] = defaultdict(list)
    for offset, lease in group.leases.items():
        held[lease].append(offset)
    return GroupImage(
        group.floor,
        group.cursor,
        group.session,
        group.boot_id,
        group.fence,
        [(lease, runs_of(offsets)) for lease, offsets in held.items()],
        dict(group.waiting),
        dict(group.burials),
        dict(group.histories),
        dict(group.documents),
        group.done.serialize(),
        group.ahead.serialize(),
        [bitmap.serialize() for bitmap in group.lanes.levels],
        [bitmap.serialize() for bitmap in group.lanes.ready],
        group.lanes.scanned,
    )


def group_of(image: GroupImage) -> Group:
    """Rebuild the group that the image was made from."""
    group = Group()
    group.floor, group.cursor = image.floor, image.cursor
    group.session, group.boot_id, group.fence = image.session, image.boot_id, image.fence
    group.leases = {offset: lease for lease, runs in image.leases for offset in each(runs)}
    group.waiting = image.waiting
    for offset, due_ms in image.waiting.items():
        group.timers.add(due_ms, offset)
    group.burials = image.burials
    group.histories = image.histories
    group.documents = image.documents
    group.done = BitMap64.deserialize(image.done)
    group.ahead = BitMap64.deserialize(image.ahead)
    group.lanes.levels = [BitMap64.deserialize(level) for level in image.levels]
    group.lanes.ready = [BitMap64.deserialize(lane) for lane in image.ready]
    group.lanes.scanned = image.scanned
    group.lanes.update_flags()
    group.deadlines.renew([(lease.until_ms, offset, offset + 1) for offset, lease in group.leases.items()])
    return group


encode_image = msgspec.msgpack.Encoder().encode
decode_image = msgspec.msgpack.Decoder(GroupImage).decode


def check(group: Group) -> list[str]:
    """Return what is wrong with the state; empty if nothing is. Tests and `holdfast check` call it."""
    return [*_bounds(group), *_phases(group), *_clocks(group), *_lanes(group), *_priorities(group)]


def _bounds(group: Group) -> list[str]:
    wrong: list[str] = []
    if group.floor > group.cursor:
        wrong.append(f"the floor {group.floor} is above the cursor {group.cursor}")
    if group.floor in group.done:
        wrong.append(f"the floor {group.floor} is done, and should have risen")
    if group.done and group.done.min() < group.floor:
        wrong.append("something below the floor is kept as done")
    if group.fence >> SESSION_BITS > group.session:
        wrong.append(f"the fence {group.fence:#x} is of a later session than {group.session}")
    return wrong


def _phases(group: Group) -> list[str]:
    wrong: list[str] = []
    tables: dict[str, dict[int, Any]] = {"leased": group.leases, "delayed": group.waiting, "dead": group.burials}
    seen: dict[int, str] = {}
    for name, table in tables.items():
        for offset in table:
            if offset in seen or offset in group.done:
                wrong.append(f"{offset} is {name} and also {seen.get(offset, 'done')}")
            if offset < group.floor:
                wrong.append(f"{offset} is {name} below the floor {group.floor}")
            seen[offset] = name
    extras: dict[str, dict[int, Any]] = {"history": group.histories, "document": group.documents}
    for name, kept in extras.items():
        for offset in kept:
            if group.phase(offset) is Phase.DONE:
                wrong.append(f"{offset} is done and still has a {name}")
    return wrong


def _clocks(group: Group) -> list[str]:
    """No message may be forgotten: each lease has a deadline that is not later, and each delay a timer."""
    wrong: list[str] = []
    earliest: dict[int, int] = {}
    for until_ms, start, stop in group.deadlines.entries():
        for offset in range(start, stop):
            if offset in group.leases:
                earliest[offset] = min(until_ms, earliest.get(offset, until_ms))
    for offset, lease in group.leases.items():
        if earliest.get(offset, lease.until_ms + 1) > lease.until_ms:
            wrong.append(f"the lease of {offset} has no deadline")
    timers = set(group.timers.entries())
    wrong += [
        f"the delay of {offset} has no timer"
        for offset, due_ms in group.waiting.items()
        if (due_ms, offset) not in timers
    ]
    return wrong


def _lanes(group: Group) -> list[str]:
    """Every ready message is in exactly one lane, or at the cursor."""
    wrong: list[str] = []
    lanes = group.lanes
    for level, lane in enumerate(lanes.ready):
        known = BitMap64() if level == 0 else lanes.levels[level]
        for offset in lane:
            if group.phase(offset) is not Phase.READY:
                wrong.append(f"{offset} is {group.phase(offset).value} and stands in lane {level}")
            if (level == 0 and lanes.level(offset)) or (level and offset not in known):
                wrong.append(f"{offset} stands in lane {level}, its priority is {lanes.level(offset)}")
    for offset in range(group.floor, group.cursor):
        if group.phase(offset) is Phase.READY and offset not in lanes.ready[lanes.level(offset)]:
            wrong.append(f"{offset} is ready, the cursor has passed it, and no lane has it")
    if group.ahead != group.not_at_cursor():
        wrong.append(f"ahead of the cursor {group.cursor}: {group.ahead}, should be {group.not_at_cursor()}")
    return wrong


def _priorities(group: Group) -> list[str]:
    """Every message known to have a priority is not done, and is in its lane if it is ready."""
    wrong: list[str] = []
    lanes = group.lanes
    if lanes.filled != any(lanes.ready):
        wrong.append(f"the lanes count as {'filled' if lanes.filled else 'empty'}, and are not")
    if not lanes.used and any((*lanes.levels, *lanes.ready)):
        wrong.append("the lanes count as unused, and hold something")
    for level in range(1, len(lanes.levels)):
        for offset in lanes.levels[level]:
            if lanes.level(offset) != level:
                wrong.append(f"{offset} has the priorities {lanes.level(offset)} and {level}")
            if group.phase(offset) is Phase.DONE:
                wrong.append(f"{offset} is done and still has a priority")
            if group.phase(offset) is Phase.READY and offset not in lanes.ready[level]:
                wrong.append(f"{offset} is ready and not in its lane {level}")
    return wrong
