"""What the store knows in memory: where each message lies, which are gone, and which of those for certain.

known     ids that lie in a file: in the intake or in a run
gone      those of them that were released or cancelled
settled   those gone for certain: their releases are synced in the partition's log
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from threading import Lock

from pyroaring import BitMap64

from holdfast.broker.delayed.intake import Intake, Timers
from holdfast.broker.delayed.manifest import Loaded, Manifest, RunEntry
from holdfast.broker.delayed.run import NEVER_MS, Entry, Run
from holdfast.errors import Closed

_MOST = 2**64 - 1


class State:
    """Guarded by its lock, which whoever calls a method here holds."""

    def __init__(self, intake: Intake, loaded: Loaded) -> None:
        self.lock = Lock()
        self.intake = intake
        self.runs = loaded.runs
        self.damage = loaded.damage
        self.timers = Timers()
        self.floor = loaded.manifest.spilled_below  # the intake's messages below it are in runs, or gone
        self.next_number = loaded.manifest.next_number
        self.saved_position = self.settled_position = loaded.manifest.accounted
        self.unsettled: deque[tuple[int, BitMap64]] = deque()  # released, by the position below which they lie
        self.changed = bool(loaded.damage)  # since the last manifest
        self.closed = False
        # No message that waits is due before this: what whoever ticks was told last, or what came since.
        self.not_before_ms = 0
        spilled = self.in_runs()
        before = loaded.manifest.gone_ids()
        cancelled = intake.load(self.floor, self.timers, before | spilled)
        # Only where the manifest was lost: messages of an unfinished spill, which are in runs already.
        self.twice = intake.present & spilled
        intake.present -= spilled
        self.gone = (before | cancelled) & (intake.present | spilled)

    def check_open(self) -> None:
        if self.closed:
            raise Closed(f"the delayed messages of {self.intake.log.folder} are closed; open them again to use them")

    def in_runs(self) -> BitMap64:
        ids = BitMap64()
        for run in self.runs:
            ids |= run.ids
        return ids

    def known(self, ids: BitMap64) -> BitMap64:
        """Those of the ids that lie in a file."""
        known = ids & self.intake.present
        for run in self.runs:
            known |= ids & run.ids
        return known

    def live(self) -> int:
        return sum(run.messages for run in self.runs) + len(self.intake.present) - len(self.gone)

    def is_full(self, most: int, soon_ms: int) -> bool:
        """Whether it is time to spill: many wait in memory, or many that are gone keep the intake long.

        What is due by `soon_ms` does not count, up to a limit: it would be released before the spill is done.
        """
        present = self.intake.present
        waiting = present - self.gone
        if len(waiting) >= most and len(waiting) - self.timers.count_near(soon_ms) >= most:
            return True
        return bool(waiting) and len(present) - present.rank(waiting.min()) >= 4 * most

    def done_here(self, message_id: int) -> bool:
        """Whether a timer of the intake is done with."""
        intake = self.intake
        return message_id in self.gone or message_id not in intake.present or message_id in intake.unreadable

    def waiting_here(self, entries: Iterable[tuple[int, int]]) -> Iterator[Entry]:
        """Those entries that wait in the intake and may be shown: as durable as their policy promised."""
        end = self.intake.log.end
        for due_at_ms, message_id in entries:
            if message_id < end and not self.done_here(message_id):
                yield due_at_ms, message_id, None, 0, 0

    def _next_due_ms(self) -> int | None:
        first = self.timers.first(self.done_here)
        best_ms = first[0] if first is not None else NEVER_MS
        for run in sorted(self.runs, key=Run.not_before_ms):
            if run.not_before_ms() >= best_ms:
                break
            first = run.first(self.gone)
            if first is not None:
                best_ms = min(best_ms, first[0])
        return best_ms if best_ms < NEVER_MS else None

    def look_ahead(self) -> int | None:
        """When the first message is due that waits, learned anew; None where none does."""
        first_ms = self._next_due_ms()
        self.not_before_ms = NEVER_MS if first_ms is None else first_ms
        return first_ms

    def settled(self) -> BitMap64:
        """The ids that are gone for certain: a copy."""
        ids = self.gone.copy()
        for _, released in self.unsettled:
            ids -= released
        return ids

    def take_over(self, runs: list[Run], cut: int) -> Iterator[None]:
        """A spill is done: all that waited in the intake below `cut` is in these runs.

        The answer, step by step, lets go of timers that nobody needs any more; between two steps the lock may be free.
        """
        present = self.intake.present
        below = present.copy()
        below.remove_range(cut, _MOST)
        for run in runs:
            below -= run.ids
        self.gone -= below
        present.remove_range(0, cut)
        self.runs = self.runs + runs
        self.next_number += len(runs)
        self.floor = cut
        self.intake.let_go_of_all()
        self.changed = True
        return self.timers.dropping_below(cut)

    def take_out_finished(self, settled: BitMap64) -> list[Run]:
        """Runs of which nothing can come back are no longer part of the store, nor are their ids."""
        finished = [run for run in self.runs if run.ids.intersection_cardinality(settled) == run.messages]
        self.runs = [run for run in self.runs if run not in finished]
        for run in finished:
            self.gone -= run.ids
            settled -= run.ids
        return finished

    def raise_floor(self, settled: BitMap64) -> None:
        """Messages at the head of the intake that are gone for certain need no spill: what is kept begins behind them.

        They are no longer part of the store, nor of `settled`, which the next manifest holds.
        """
        needed = self.intake.present - settled
        end = self.intake.log.end
        floor = min(needed.min(), end) if needed else end
        if floor > self.floor:
            behind = self.intake.present.copy()
            behind.remove_range(0, floor)
            below = self.intake.present - behind
            self.intake.present = behind
            self.gone -= below
            settled -= below
            self.floor = floor

    def manifest(self, settled: BitMap64) -> Manifest:
        settled.run_optimize()
        return Manifest(
            accounted=self.settled_position,
            spilled_below=self.floor,
            next_number=self.next_number,
            runs=[RunEntry(run.name, run.run_id, run.messages) for run in self.runs],
            gone=settled.serialize(),
        )

    def check(self) -> None:
        """Assert what must always hold."""
        known = self.intake.present.copy()
        for run in self.runs:
            assert not known & run.ids, f"{run.name} holds messages that wait elsewhere, too"
            known |= run.ids
        assert self.gone <= known, "messages are gone that are in no file"
        assert all(ids <= self.gone for _, ids in self.unsettled), "released, but not gone"
        here = [message_id for _, message_id in self.timers.ordered()]
        assert len(here) == len(set(here)), "a timer is set twice"
        assert self.intake.present - self.gone - self.intake.unreadable <= BitMap64(here), "a message has no timer"
