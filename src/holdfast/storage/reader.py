"""Reading a log without owning it: from another process, a Spark executor, the command line.

A reader opens the files read-only, takes no lock and writes nothing. It sees what the owner has published; without an
owner, or after a reboot, only what is known to be on disk.

Waiting for new messages (`follow`) is the exception: it stores one word in the state file, to ask the owner for a
signal (see `state`), which the kernel reports through a watch. Nobody can be asked if the file is not writable, if
there is no owner, or if other machines write to the file system. Then the reader polls every few seconds, with jitter
so that many readers do not poll at once. In both cases it now and then opens everything again, relying on nothing it
knew.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from os import PathLike, fspath
from typing import Final, Protocol

import msgspec

from holdfast.codec.frame import Frame
from holdfast.env import FolderWatch, WatchRefused, World, is_remote, real_world
from holdfast.env.process import get_logger
from holdfast.errors import InvalidRequest
from holdfast.model import LogPosition, Record
from holdfast.settings import LogSettings
from holdfast.storage.examine import examine
from holdfast.storage.files import STATE, join, open_error, require_log, segment_bases, translated
from holdfast.storage.retention import SegmentFacts
from holdfast.storage.segment import Segment
from holdfast.storage.state import NO_EPOCHS, Epochs, Identity, LogState, load_epochs
from holdfast.storage.view import LogView, OnDamage

logger = get_logger(__name__)

_NEVER_NS: Final = 2**62


class FollowSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How readers wait: with a watch if possible; otherwise by polling at this interval plus up to the jitter."""

    watch: bool = True
    poll_interval_ms: int = 3_000
    poll_jitter_ms: int = 500
    safety_poll_ms: int = 300_000  # 0: never

    def __post_init__(self) -> None:
        if self.poll_interval_ms < 1 or self.poll_jitter_ms < 0 or self.safety_poll_ms < 0:
            raise InvalidRequest(
                f"cannot follow with {self}: poll_interval_ms is 1 or more, poll_jitter_ms and safety_poll_ms 0 or more"
            )


class Followed(Protocol):
    """A log that is read by someone other than its owner."""

    folder: str

    @property
    def state_path(self) -> str:
        """The file that changes when the owner gives a signal."""

    def ask_for_signal(self) -> bool:
        """Ask the owner for a signal at its next change; False if there will be none."""

    def reopen(self) -> None:
        """Open everything again; raises if the log is gone."""


class Arrivals:
    """Waits for changes to some logs. For one thread at a time."""

    def __init__(self, world: World, settings: FollowSettings | None = None) -> None:
        self._world = world
        self._settings = settings or FollowSettings()
        self._watch: FolderWatch | None = None
        self._refused = not self._settings.watch
        self._now_ns = world.clock.monotonic_ns
        self._safety_ns = self._settings.safety_poll_ms * 1_000_000 or _NEVER_NS
        self._checked_ns = self._now_ns()
        self.looks = 0

    @property
    def watching(self) -> bool:
        """Whether the kernel reports changes."""
        return self._watch is not None

    def wait(
        self,
        logs: Iterable[Followed],
        news: Callable[[], bool],
        *,
        folders: Iterable[str] = (),
        timeout_s: float | None = None,
    ) -> bool:
        """Wait until `news` returns true; returns False if the time is over first.

        A new name in one of `folders` also counts as a change that is worth a look.
        """
        logs, folders = list(logs), list(folders)
        stop_ns = None if timeout_s is None or timeout_s == math.inf else self._now_ns() + round(timeout_s * 1e9)
        while True:
            # Watch first, then look: any change after the look is reported.
            will_be_notified = self._expect(logs, folders)
            self.looks += 1
            if news():
                return True
            pause_ns = self._until_look_ns(will_be_notified=will_be_notified)
            if stop_ns is not None:
                left_ns = stop_ns - self._now_ns()
                if left_ns <= 0:
                    return False
                pause_ns = min(pause_ns, left_ns)
            woken = self._pause(pause_ns)
            self._check(logs, woken=woken, news=news)

    def close(self) -> None:
        """Close the watch. May be called twice."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def __enter__(self) -> Arrivals:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _expect(self, logs: list[Followed], folders: list[str]) -> bool:
        """Watch everything and ask for signals; returns whether every change will be reported."""
        watched = self._watch_all(logs, folders)
        asked = [log.ask_for_signal() for log in logs] if watched else []
        return watched and all(asked)

    def _watch_all(self, logs: list[Followed], folders: list[str]) -> bool:
        if self._refused:
            return False
        try:
            if self._watch is None:
                self._refuse_remote([*(log.folder for log in logs), *folders])
                self._watch = self._world.watch()
            for folder in folders:
                self._watch.add_folder(folder)
            for log in logs:
                self._watch.add_file(log.state_path)
        except FileNotFoundError:
            return False  # it has just gone: the next look will show
        except (WatchRefused, OSError) as error:
            self._fall_back(error)
            return False
        return True

    def _refuse_remote(self, folders: list[str]) -> None:
        for folder in folders:
            kind = self._world.disk.kind(folder)
            if is_remote(kind):
                raise WatchRefused(f"{folder} is on {kind}, where other machines may write")

    def _pause(self, most_ns: int) -> bool:
        """Sleep until a change is reported, for at most this long; returns whether one was."""
        if self._watch is not None:
            try:
                return self._watch.wait(most_ns / 1e9)
            except OSError as error:
                self._fall_back(error)
                return False
        stop_ns = self._now_ns() + most_ns
        while (left_ns := stop_ns - self._now_ns()) > 0:
            self._world.clock.wait(threading.Event(), left_ns / 1e9)
        return False

    def _until_look_ns(self, *, will_be_notified: bool) -> int:
        safety_ns = max(self._safety_ns - (self._now_ns() - self._checked_ns), 0)
        if will_be_notified:
            return safety_ns
        jitter_ns = self._settings.poll_jitter_ms * 1_000_000 * self._world.ids.random_u32() >> 32
        return min(safety_ns, self._settings.poll_interval_ms * 1_000_000 + jitter_ns)

    def _check(self, logs: list[Followed], *, woken: bool, news: Callable[[], bool]) -> None:
        """Open everything again if that is due, or if something changed that `news` does not explain."""
        overdue = self._now_ns() - self._checked_ns >= self._safety_ns
        if overdue:
            self._checked_ns = self._now_ns()
        if overdue or (woken and not news()):
            for log in logs:
                log.reopen()

    def _fall_back(self, error: Exception) -> None:
        self._refused = True
        self.close()
        logger.warning(
            "files cannot be watched: polling instead",
            extra={"error": str(error), "poll_interval_ms": self._settings.poll_interval_ms},
        )


class LogReader:
    """The read side of a log in a folder. Call `refresh` to see segments that were added or removed."""

    def __init__(
        self,
        folder: str | PathLike[str],
        settings: LogSettings | None = None,
        world: World | None = None,
        *,
        end: int | None = None,
    ) -> None:
        """`end` overrides the state file, for a log without an owner that the caller has examined."""
        self._world = world or real_world()
        self._settings = settings or LogSettings()
        folder = fspath(folder)
        self.folder = folder
        self.log_id = 0
        self._segments: tuple[Segment, ...] = ()
        self._state: LogState | None = None
        self._fixed_end = 0  # without a state file
        self._given_end = end
        self._restarted = False
        self._seen_end = 0
        self._seen_sequence = 0
        self._asks = False
        self._may_ask = False
        try:
            require_log(self._world, folder)
            self.refresh()
        except OSError as error:
            raise open_error(folder, error) from error
        self._view = LogView(
            lambda: self._segments,
            lambda: self.end,
            look_again=self._find_segments,
        )

    @property
    def start(self) -> int:
        """Offset of the first message still kept."""
        end = self.end
        self._find_segments()  # the first ones may have been removed since
        return self._segments[0].base_offset if self._segments else end

    @property
    def lasting_start(self) -> int:
        """Where a reader can start that has announced its need: after the messages that are being removed."""
        end = self.end
        # The word first, then the names: whatever is removed in between shows in one of the two.
        removing_end = 0 if self._state is None else self._state.removing_end
        return min(max(removing_end, self.start), end)

    @property
    def end(self) -> int:
        """Offset after the last message that readers may see."""
        if self._changed_hands():
            self.refresh()  # nothing known so far need be true any more
        if self._given_end is not None:
            return self._given_end
        if self._state is None:
            return self._fixed_end
        end = self._state.synced_end if self._restarted else self._state.readable_end
        if end > self._seen_end:
            # The owner may have started new segments for what it published since.
            self._find_segments()
            self._seen_end = end
        return end

    @property
    def identity(self) -> Identity | None:
        """What the owner says about itself; None if the state file is missing."""
        return None if self._state is None else self._state.identity

    @property
    def epochs(self) -> Epochs:
        table = load_epochs(self._world.disk, self.folder)
        return NO_EPOCHS if table is None else table[1]

    @property
    def state_path(self) -> str:
        """The file that changes when the owner gives a signal."""
        return join(self.folder, STATE)

    def ask_for_signal(self) -> bool:
        """Ask the owner for a signal at its next change; False if it cannot be asked or would not answer."""
        if not self._asks:
            self._asks = True
            self.refresh()
        state = self._state
        if state is None or not self._may_ask:
            return False
        return state.ask_for_signal()

    def reopen(self) -> None:
        """Open everything again; raises NotALog if the log is gone."""
        with translated(self.folder):
            require_log(self._world, self.folder)
            self.refresh()

    def _changed_hands(self) -> bool:
        """Whether there is another owner or epoch, or a state file where there was none."""
        if self._state is None:
            return LogState.open(self._world.disk, self.folder, write=False) is not None
        return self._state.sequence != self._seen_sequence

    def refresh(self) -> None:
        """Look again at which segments exist and who owns the log."""
        self._seen_end = 0  # the log may be shorter now
        self._state = self._open_state()
        # Another owner may have replaced any file under its old name, so nothing that is open may be reused.
        for segment in self._segments:
            segment.close_files()
        self._segments = ()
        identity = None if self._state is None else self._state.identity
        if identity is None or self._state is None:
            # Without a state file, what an opening would keep is what there is to read.
            findings = examine(self._world, self.folder, None, index_bytes=self._settings.index_bytes)
            self.log_id, self._fixed_end = findings.log_id or 0, findings.end
        else:
            self._seen_sequence = self._state.sequence
            self.log_id = identity.log_id
            self._restarted = identity.boot_id != self._world.ids.boot_id()
        self._find_segments()

    def _open_state(self) -> LogState | None:
        self._may_ask = False
        if self._asks:
            with suppress(OSError):  # it belongs to another user, or the mount is read-only
                state = LogState.open(self._world.disk, self.folder, write=True)
                self._may_ask = state is not None
                return state
        return LogState.open(self._world.disk, self.folder, write=False)

    def _find_segments(self) -> None:
        known = {segment.base_offset: segment for segment in self._segments}
        bases = segment_bases(self._world.disk.names(self.folder))
        self._segments = tuple(known.pop(base) if base in known else self._segment(base) for base in bases)
        for gone in known.values():
            gone.close_files()

    def _segment(self, base: int) -> Segment:
        return Segment(self._world.disk, self.folder, base, log_id=self.log_id, index_bytes=self._settings.index_bytes)

    def segments(self) -> list[SegmentFacts]:
        return self._view.facts()

    def read(self, offset: int, *, on_damage: OnDamage = "raise") -> Iterator[Frame]:
        """Yield frames from the one that holds `offset` to the readable end."""
        return self._view.read(offset, on_damage=on_damage)

    def records(self, offset: int, *, on_damage: OnDamage = "raise", whole: bool = True) -> Iterator[Record]:
        """Yield messages from `offset` to the readable end; large values stay in the file unless `whole`."""
        return self._view.records(offset, on_damage=on_damage, whole=whole)

    def follow(
        self,
        offset: int | None = None,
        *,
        timeout: float | None = None,
        on_damage: OnDamage = "raise",
        settings: FollowSettings | None = None,
    ) -> Iterator[Record]:
        """Yield messages from `offset` on (by default, from now on), and wait for new ones.

        Ends when none has come for `timeout` seconds; without a timeout, never.
        """
        return self._follow(self.end if offset is None else offset, timeout, on_damage, settings)

    def _follow(
        self, at: int, timeout_s: float | None, on_damage: OnDamage, settings: FollowSettings | None
    ) -> Iterator[Record]:
        with Arrivals(self._world, settings) as arrivals:
            while True:
                end = self.end
                if end != at:  # an end below `at` means that the log was truncated: `records` raises
                    for record in self.records(at, on_damage=on_damage):
                        at = record.offset + 1
                        yield record
                    at = max(at, end)
                if not arrivals.wait([self], lambda: self.end != at, timeout_s=timeout_s):  # noqa: B023
                    return

    def find_time(self, time_ns: int) -> int:
        """Return the offset of the first message of this time or later; the end if there is none."""
        return self._view.find_time(time_ns)

    def weigh(self, start: int, stop: int) -> int:
        """Return roughly how many bytes the messages [start, stop) take on disk."""
        return self._view.weigh(start, stop)

    def stretches(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Split [start, stop) by segment: where each part begins and roughly how many bytes it takes."""
        return self._view.stretches(start, stop)

    def reach(self, offset: int, max_bytes: int) -> int:
        """Return the offset reached from `offset` within about `max_bytes`: at least one step, if any is left."""
        return self._view.reach(offset, max_bytes)

    def position(self, offset: int) -> LogPosition:
        """Return the offset with its epoch, to be stored outside the log."""
        return LogPosition(self.epochs.at(offset), offset)

    def check_position(self, position: LogPosition) -> None:
        """Raise TailLost if the position points into a tail that the log no longer has."""
        self.epochs.check(position)
