"""A group's state as one value, for snapshots: replay goes on from there."""

from __future__ import annotations

from collections import defaultdict

import msgspec
from pyroaring import BitMap64

from holdfast.delivery.group import Burial, Document, Group, History, Lease
from holdfast.delivery.runs import Runs, each, runs_of


class Image(msgspec.Struct, frozen=True, array_like=True):
    """Everything that `apply` builds up. Timers and deadlines follow from it."""

    floor: int
    cursor: int
    session: int
    boot_id: int
    fence: int
    leases: list[tuple[Lease, Runs]]
    waiting: dict[int, int]
    burials: dict[int, Burial]
    histories: dict[int, History]
    documents: dict[int, Document]
    done: bytes
    ahead: bytes
    levels: list[bytes]
    ready: list[bytes]
    scanned: int


def image_of(group: Group) -> Image:
    """A copy of the group's state."""
    held: defaultdict[Lease, list[int]] = defaultdict(list)
    for offset, lease in group.leases.items():
        held[lease].append(offset)
    return Image(
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


def group_of(image: Image) -> Group:
    """The group that the image was made of."""
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
    group.lanes.look()
    group.deadlines.renew([(lease.until_ms, offset, offset + 1) for offset, lease in group.leases.items()])
    return group


encode_image = msgspec.msgpack.Encoder().encode
decode_image = msgspec.msgpack.Decoder(Image).decode
