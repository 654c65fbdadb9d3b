"""Spills, manifests and the removal of files, beside the rest: only results are taken over under the state's lock.

The order is the whole point. A spill: sync the intake, write the runs, name them in a manifest, trim the intake. A
manifest: note what is gone, sync the intake (so that it holds every id that the manifest speaks of), put the
manifest in place, and only then remove what nothing refers to any more.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from threading import Lock
from typing import Final, TypeVar

from holdfast.broker.delayed.manifest import save_manifest
from holdfast.broker.delayed.run import Run
from holdfast.broker.delayed.settings import DelaySettings
from holdfast.broker.delayed.spill import SpillPlan, in_due_order, write_runs
from holdfast.broker.delayed.state import State
from holdfast.codec.encode import Packing
from holdfast.env import World
from holdfast.errors import DiskFull, HoldfastError, Unavailable
from holdfast.storage.files import FULL_DISK
from holdfast.storage.keeper import soonest
from holdfast.storage.shortage import advice

logger = logging.getLogger(__name__)

_Item = TypeVar("_Item")

# Between two pauses of a spill: a few milliseconds.
_PAUSE_FRAMES: Final = 10
_PAUSE_MESSAGES: Final = 256


class Upkeep:
    """One at a time is at work here."""

    def __init__(self, world: World, folder: str, settings: DelaySettings, state: State) -> None:
        self._world = world
        self._folder = folder
        self._settings = settings
        self._state = state
        self._log = state.intake.log
        self._lock = Lock()
        self._saved_ns = world.clock.monotonic_ns()
        self._failed_ns: int | None = None
        self._garbage: list[Run] = []  # finished, and removed after the next manifest
        self.on_pause: Callable[[], object] = lambda: None
        log_settings = self._log.settings
        self._packing = Packing.named(
            log_settings.codec,
            level=log_settings.codec_level,
            min_bytes=log_settings.codec_min_bytes,
            min_saving_percent=log_settings.codec_min_saving_percent,
            max_bytes=log_settings.max_raw_bytes,
        )

    def tick(self, now_ms: int) -> int | None:
        """Do what is due by now; answers in how many ms more will be due. A full disk is no reason to stop."""
        state = self._state
        log_ms = self._log.tick()
        with state.lock:
            state.timers.advance(now_ms)
            state.timers.shed(state.done_here)
            full = self._is_full()
            # A position that moved on alone costs a longer look at the next opening, nothing else.
            waits = 1 if state.changed else 10 if state.settled_position > state.saved_position else None
        save_ms = None
        if full or waits is not None:
            save_ms = 0 if full and self._failed_ns is None else self._ms_until_save(waits or 1)
            if save_ms == 0:
                save_ms = self._try(now_ms, full=full)
        with state.lock:
            first_ms = state.look_ahead()
        due_ms = None if first_ms is None else max(0, first_ms - now_ms)
        return soonest(log_ms, save_ms, due_ms)

    def spill(self, now_ms: int) -> int:
        """Move what waits in the intake into runs; answers how many messages that were."""
        with self._lock, _naming_errors(self._folder):
            return self._spill(now_ms)

    def save(self) -> None:
        """Write the manifest, and remove the files that it makes needless."""
        with self._lock, _naming_errors(self._folder):
            self._save()

    def close(self) -> None:
        """Save and close the intake. Whatever fails, the folder is let go; nothing is lost that was acknowledged."""
        with self._lock:
            with self._state.lock:
                if self._state.closed:
                    return
                self._state.closed = True
            try:
                self._save()
            except (OSError, HoldfastError) as error:
                logger.warning("manifest not written", extra={"folder": self._folder, "error": str(error)})
            finally:
                self._log.close()

    def _try(self, now_ms: int, *, full: bool) -> int | None:
        try:
            if full:
                self.spill(now_ms)
            else:
                self.save()
        except Unavailable as error:
            logger.warning("upkeep put off", extra={"folder": self._folder, "error": str(error)})
            self._failed_ns = self._world.clock.monotonic_ns()
            return self._settings.save_ms
        self._failed_ns = None
        return None

    def _is_full(self) -> bool:
        """Many wait in memory, or many that are gone keep the intake long."""
        most = self._settings.spill_messages
        return self._state.live_here() >= most or len(self._state.intake.present) >= 4 * most

    def _ms_until_save(self, times: int) -> int:
        since_ns = max(self._saved_ns, self._failed_ns or self._saved_ns)
        waited_ms = (self._world.clock.monotonic_ns() - since_ns) // 1_000_000
        return max(0, self._settings.save_ms * times - waited_ms)

    def _spill(self, now_ms: int) -> int:
        state, log = self._state, self._log
        cut = log.written_end
        log.sync()
        with state.lock:
            state.check_open()
            floor, elsewhere = state.floor, state.settled() | state.twice
            plan = SpillPlan(
                folder=self._folder,
                number=state.next_number,
                now_ms=now_ms,
                least_messages=max(1, self._settings.spill_messages // 24),
                packing=self._packing,
            )
        records = in_due_order(
            lambda: self._with_pauses(state.intake.data_frames(floor, cut), _PAUSE_FRAMES),
            lambda message_id: message_id not in elsewhere,
            plan.memory_bytes,
        )
        runs = write_runs(self._world, self._with_pauses(records, _PAUSE_MESSAGES), plan)
        with state.lock:
            state.take_over(runs, cut)
        log.roll()
        self._save()
        return sum(run.messages for run in runs)

    def _with_pauses(self, items: Iterator[_Item], every: int) -> Iterator[_Item]:
        """A spill is work for a second, and messages come due meanwhile: they must not wait for its end."""
        for i, item in enumerate(items):
            if not i % every:
                self.on_pause()
            yield item

    def _save(self) -> None:
        state = self._state
        with state.lock:
            state.forget_trimmed()
            settled = state.settled()
            self._garbage += state.take_out_finished(settled)
            manifest = state.manifest(settled)
            needed = state.first_needed(settled)
            state.changed = False
        try:
            self._log.sync()
            save_manifest(self._world.disk, self._folder, manifest)
        except BaseException:
            state.changed = True
            raise
        self._saved_ns = self._world.clock.monotonic_ns()
        state.saved_position = manifest.accounted
        garbage, self._garbage = self._garbage, []
        for run in garbage:
            with contextlib.suppress(OSError):  # what stays is not in the manifest, and goes at the next opening
                if run.keep_file:
                    self._world.disk.rename(run.path, run.path + ".damaged")
                else:
                    self._world.disk.remove(run.path)
        self._log.trim(needed)


@contextlib.contextmanager
def _naming_errors(folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = DiskFull if error.errno in FULL_DISK else Unavailable
        raise kind(
            f"the delayed messages in {folder} could not be put in order: {advice(error)}. "
            "Nothing is lost, all of them stay where they were; it is tried again later"
        ) from error
