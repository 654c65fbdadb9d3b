"""What the tests of delivery share: a shell without disk, in which commands go in and events come out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pyroaring import BitMap64

from holdfast.delivery.choose import choose
from holdfast.delivery.decide import Moment, decide
from holdfast.delivery.events import (
    NO_SESSION,
    Command,
    Event,
    OpenGroup,
    Phase,
    Receipt,
    Receive,
    Tick,
    decode_event,
    each,
    encode_event,
    runs_of,
)
from holdfast.delivery.group import Group, IllegalMove
from holdfast.delivery.image import GroupImage, check, decode_image, encode_image, group_of, image_of
from holdfast.settings import QueueSettings

# Plain numbers, so that a story can say what it expects.
PLAIN = QueueSettings(backoff_ms=100, backoff_factor=2.0, backoff_max_ms=1_000, backoff_jitter_percent=0)
BOOT = 7


class Story:
    """A group, the log that it reads (as a list of priorities), its journal, and both clocks."""

    def __init__(self, messages: int = 0, *, start: int = 0, policy: QueueSettings = PLAIN) -> None:
        self.policy = policy
        self.start = start
        self.log = [0] * start  # the priority of each message
        self.readable = start
        self.wall_ms = 1_000_000
        self.mono_ms = 500
        self.dead_end = 40
        self.group = Group(start)
        self.journal: list[bytes] = []
        self.snapshot_bytes = b""
        self.snapshot_at = 0
        self.when(OpenGroup(BOOT, start))
        self.publish(*[0] * messages)

    def publish(self, *levels: int, readable: bool = True) -> None:
        first = len(self.log)
        self.log += levels
        self.group.arrive(first, list(levels))
        if readable:
            self.readable = len(self.log)

    def when(self, command: Command, *, after_ms: int = 0) -> list[Event]:
        """Time passes, a command comes; these events follow."""
        self.wall_ms += after_ms
        self.mono_ms += after_ms
        now = Moment(self.wall_ms, self.mono_ms, self.dead_end)
        events = decide(self.group, command, self.policy, now)
        self.happen(*events)
        if isinstance(command, Tick):
            self.group.deadlines.forget(self.mono_ms)
            self.group.timers.forget(self.wall_ms)
        return events

    def happen(self, *events: Event) -> None:
        """Journal the events, then apply them; priorities that were forgotten are read from the log again."""
        for event in events:
            self.journal.append(encode_event(event))
            assert decode_event(self.journal[-1]) == event
            self.group.apply(event)
        self.arrive_again(self.group)

    def receive(
        self, count: int = 1, *, lease_ms: int = 50, holder: str = "ann", session: int = NO_SESSION
    ) -> list[Receipt]:
        """Receipts of the next messages, in order of delivery."""
        chosen = choose(self.group, count, self.readable)
        self.when(Receive(chosen.offsets, chosen.cursor, lease_ms, holder, session))
        return [Receipt(offset, self.group.fence) for offset in chosen.offsets]

    def reopen(self, *, boot_id: int = BOOT, end: int | None = None) -> None:
        """The owner ends; another one replays the journal, and finds the log's end there."""
        end = len(self.log) if end is None else end
        self.group = self.replayed(arrive=False)
        del self.log[end:]
        self.readable = len(self.log)
        self.when(OpenGroup(boot_id, end))

    def snapshot(self) -> None:
        self.snapshot_bytes = encode_image(image_of(self.group))
        self.snapshot_at = len(self.journal)

    def replayed(self, *, arrive: bool = True, from_snapshot: bool = True) -> Group:
        """What a restart would make of the journal."""
        group, since = Group(self.start), 0
        if from_snapshot and self.snapshot_bytes:
            group, since = group_of(decode_image(self.snapshot_bytes)), self.snapshot_at
        for event in self.journal[since:]:
            group.apply(decode_event(event))
        if arrive:
            self.arrive_again(group)
        return group

    def replayed_without(self, first: int, stop: int) -> Group:
        """What a restart would make of a journal in which these events cannot be read any more."""
        group = Group(self.start)
        for at, event in enumerate(self.journal):
            if not first <= at < stop:
                with suppress(IllegalMove):
                    group.apply(decode_event(event))
        now = Moment(self.wall_ms, self.mono_ms)
        for opened in decide(group, OpenGroup(BOOT, len(self.log)), self.policy, now):
            group.apply(opened)
        self.arrive_again(group)
        return group

    def arrive_again(self, group: Group) -> None:
        scanned = group.lanes.scanned
        if scanned < len(self.log):
            group.arrive(scanned, self.log[scanned:])

    def phases(self) -> str:
        """One letter for each message: r(eady), l(eased), w(aiting: delayed), d(one), x (dead)."""
        letters = {Phase.READY: "r", Phase.LEASED: "l", Phase.DELAYED: "w", Phase.DONE: "d", Phase.DEAD: "x"}
        return "".join(letters[self.group.phase(offset)] for offset in range(self.start, len(self.log)))

    def hold(self) -> None:
        """Nothing is wrong, and a restart would find the same."""
        assert check(self.group) == []
        live = plain(image_of(self.group))
        assert plain(image_of(self.replayed())) == live
        if self.snapshot_bytes:
            assert plain(image_of(self.replayed(from_snapshot=False))) == live


def plain(image: GroupImage) -> dict[str, Any]:
    """An image without what two equal states may differ in: how bitmaps are packed, in which order leases stand."""
    return {
        "numbers": (image.floor, image.cursor, image.session, image.boot_id, image.fence, image.scanned),
        "leases": {offset: lease for lease, runs in image.leases for offset in each(runs)},
        "tables": (image.waiting, image.burials, image.histories, image.documents),
        "bitmaps": [runs_of(BitMap64.deserialize(part)) for part in (image.done, image.ahead, *image.levels)],
        "lanes": [runs_of(BitMap64.deserialize(part)) for part in image.ready],
    }


def offsets_of(receipts: Sequence[Receipt]) -> list[int]:
    return [receipt.offset for receipt in receipts]
