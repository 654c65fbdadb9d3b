"""A log read by somebody who does not own it: another process, a Spark executor, the command line.

Opens the files read-only, takes no lock and writes nothing. It sees what the owner has published; where
there is no owner, or the machine was restarted since, only what is known to be on disk. Only one that waits for
more (`follow`) stores a word: it asks the owner for a sign, where it may.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from os import PathLike, fspath
from typing import Final, Protocol

import msgspec

from holdfast.codec.frame import Frame
from holdfast.env import FolderWatch, WatchRefused, World, is_remote, real_world
from holdfast.errors import InvalidRequest
from holdfast.model import LogPosition, Record
from holdfast.settings import LogSettings
from holdfast.storage.examine import examine
from holdfast.storage.files import STATE, join, segment_bases
from holdfast.storage.opening import open_error, require_log, translated
from holdfast.storage.retention import SegmentFacts
from holdfast.storage.segment import Segment
from holdfast.storage.state import NO_EPOCHS, Epochs, Identity, LogState, load_epochs
from holdfast.storage.view import LogView, OnDamage

# Waiting for a log to grow that somebody else owns: told by the kernel where that works, looking where it does not.
#
# The owner gives a sign when it is asked for one (see `state`), and the kernel tells of it. Nobody can be asked where
# the files may not be written, where there is no owner, or where other machines write. Then a look every few seconds,
# with jitter, so that many readers do not look at once. In both cases a look from time to time takes nothing for
# granted, and opens everything anew.


logger = logging.getLogger(__name__)

_NEVER_NS: Final = 2**62


class FollowSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How readers wait: by a watch if that can be had; otherwise a look every interval plus up to the jitter."""

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
    """A log that is read beside its owner."""

    folder: str

    @property
    def state_path(self) -> str:
        """The file that an owner's sign is an event of."""

    def ask_for_sign(self) -> bool:
        """Ask the owner to make its next change an event; False where that is in vain."""

    def look_anew(self) -> None:
        """Take nothing for granted that was known; raises where it is gone."""


class Arrivals:
    """Waits for news of some logs. For one thread at a time."""

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
        """Whether the kernel tells of changes."""
        return self._watch is not None

    def wait(
        self,
        logs: Iterable[Followed],
        news: Callable[[], bool],
        *,
        folders: Iterable[str] = (),
        timeout_s: float | None = None,
    ) -> bool:
        """Return when there is news, or when the time is over; answers which.

        `folders` are those in which a new name would be news.
        """
        logs, folders = list(logs), list(folders)
        stop_ns = None if timeout_s is None or timeout_s == math.inf else self._now_ns() + round(timeout_s * 1e9)
        while True:
            # In this order: whatever changes after the look is told.
            will_be_told = self._expect(logs, folders)
            self.looks += 1
            if news():
                return True
            pause_ns = self._until_look_ns(will_be_told=will_be_told)
            if stop_ns is not None:
                left_ns = stop_ns - self._now_ns()
                if left_ns <= 0:
                    return False
                pause_ns = min(pause_ns, left_ns)
            woken = self._pause(pause_ns)
            self._check(logs, woken=woken, news=news)

    def close(self) -> None:
        """Let go of the watch. Closing twice is fine."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def __enter__(self) -> Arrivals:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _expect(self, logs: list[Followed], folders: list[str]) -> bool:
        """Watch all of it and ask for signs; answers whether every change will be told."""
        told = self._watch_all(logs, folders)
        asked = [log.ask_for_sign() for log in logs] if told else []
        return told and all(asked)

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
            return False  # gone just now: the next look will tell
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
        """Sleep until something is told, at most so long; answers whether something was."""
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

    def _until_look_ns(self, *, will_be_told: bool) -> int:
        safety_ns = max(self._safety_ns - (self._now_ns() - self._checked_ns), 0)
        if will_be_told:
            return safety_ns
        jitter_ns = self._settings.poll_jitter_ms * 1_000_000 * self._world.ids.random_u32() >> 32
        return min(safety_ns, self._settings.poll_interval_ms * 1_000_000 + jitter_ns)

    def _check(self, logs: list[Followed], *, woken: bool, news: Callable[[], bool]) -> None:
        """Open all anew where it is time for that, or where something changed that is no news."""
        overdue = self._now_ns() - self._checked_ns >= self._safety_ns
        if overdue:
            self._checked_ns = self._now_ns()
        if overdue or (woken and not news()):
            for log in logs:
                log.look_anew()

    def _fall_back(self, error: Exception) -> None:
        self._refused = True
        self.close()
        logger.warning(
            "watching refused: looking from time to time instead",
            extra={"error": str(error), "poll_interval_ms": self._settings.poll_interval_ms},
        )


class LogReader:
    """The read side of a log in a folder. Call `refresh` to see segments that came or went."""

    def __init__(
        self,
        folder: str | PathLike[str],
        settings: LogSettings | None = None,
        world: World | None = None,
        *,
        end: int | None = None,
    ) -> None:
        """`end` is for who knows better than the state file how far the log goes: nobody owns it, and it was judged."""
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
        """Offset of the first message that is kept."""
        end = self.end
        self._find_segments()  # the first ones may be gone since
        return self._segments[0].base_offset if self._segments else end

    @property
    def lasting_start(self) -> int:
        """Where somebody can begin who has said that the messages are needed: behind those that are being removed."""
        end = self.end
        # First: whatever is removed between the two looks, one of them tells of it.
        removing_end = 0 if self._state is None else self._state.removing_end
        return min(max(removing_end, self.start), end)

    @property
    def end(self) -> int:
        """The readable end."""
        if self._changed_hands():
            self.refresh()  # nothing that was known need be true any more
        if self._given_end is not None:
            return self._given_end
        if self._state is None:
            return self._fixed_end
        end = self._state.synced_end if self._restarted else self._state.readable_end
        if end > self._seen_end:
            # The owner may have begun new segments for what it published since.
            self._find_segments()
            self._seen_end = end
        return end

    @property
    def identity(self) -> Identity | None:
        """What the owner says of itself; None where the state file is gone."""
        return None if self._state is None else self._state.identity

    @property
    def epochs(self) -> Epochs:
        table = load_epochs(self._world.disk, self.folder)
        return NO_EPOCHS if table is None else table[1]

    @property
    def state_path(self) -> str:
        """The file that an owner's sign is an event of."""
        return join(self.folder, STATE)

    def ask_for_sign(self) -> bool:
        """Ask the owner to make its next change an event; False where it cannot be asked, or nobody would answer."""
        if not self._asks:
            self._asks = True
            self.refresh()
        state = self._state
        if state is None or not self._may_ask:
            return False
        return state.ask_for_sign()

    def look_anew(self) -> None:
        """Take nothing for granted that was known; NotALog where the log is gone."""
        with translated(self.folder):
            require_log(self._world, self.folder)
            self.refresh()

    def _changed_hands(self) -> bool:
        """Whether another owner or another epoch came, or the first owner that notes a state."""
        if self._state is None:
            return LogState.open(self._world.disk, self.folder, write=False) is not None
        return self._state.sequence != self._seen_sequence

    def refresh(self) -> None:
        """Look again which segments there are, and who owns the log."""
        self._seen_end = 0  # the log may be shorter now
        self._state = self._open_state()
        for segment in self._segments:
            segment.let_go()
        self._segments = ()
        identity = None if self._state is None else self._state.identity
        if identity is None or self._state is None:
            # Without the owner's word, what an opening would keep is what there is to read.
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
            with suppress(OSError):  # it is another user's, or lies on a read-only mount
                state = LogState.open(self._world.disk, self.folder, write=True)
                self._may_ask = state is not None
                return state
        return LogState.open(self._world.disk, self.folder, write=False)

    def _find_segments(self) -> None:
        known = {segment.base_offset: segment for segment in self._segments}
        bases = segment_bases(self._world.disk.names(self.folder))
        self._segments = tuple(known.pop(base) if base in known else self._segment(base) for base in bases)
        for gone in known.values():
            gone.let_go()

    def _segment(self, base: int) -> Segment:
        return Segment(self._world.disk, self.folder, base, log_id=self.log_id, index_bytes=self._settings.index_bytes)

    def segments(self) -> list[SegmentFacts]:
        return self._view.facts()

    def read(self, offset: int, *, on_damage: OnDamage = "raise") -> Iterator[Frame]:
        """Frames from the one that holds `offset` on, up to the readable end."""
        return self._view.read(offset, on_damage=on_damage)

    def records(self, offset: int, *, on_damage: OnDamage = "raise", whole: bool = True) -> Iterator[Record]:
        """Messages from `offset` on, up to the readable end; large values stay in the file unless `whole`."""
        return self._view.records(offset, on_damage=on_damage, whole=whole)

    def follow(
        self,
        offset: int | None = None,
        *,
        timeout: float | None = None,
        on_damage: OnDamage = "raise",
        settings: FollowSettings | None = None,
    ) -> Iterator[Record]:
        """Messages from `offset` on, or from now on, and then those that come: waits for them.

        Ends when nothing has come for `timeout` seconds; without one, never.
        """
        return self._follow(self.end if offset is None else offset, timeout, on_damage, settings)

    def _follow(
        self, at: int, timeout_s: float | None, on_damage: OnDamage, settings: FollowSettings | None
    ) -> Iterator[Record]:
        with Arrivals(self._world, settings) as arrivals:
            while True:
                end = self.end
                if end != at:  # below it lies a log that was cut: `records` says so
                    for record in self.records(at, on_damage=on_damage):
                        at = record.offset + 1
                        yield record
                    at = max(at, end)
                if not arrivals.wait([self], lambda: self.end != at, timeout_s=timeout_s):  # noqa: B023
                    return

    def find_time(self, time_ns: int) -> int:
        """Offset of the first message of this time or later; the end if there is none."""
        return self._view.find_time(time_ns)

    def weigh(self, start: int, stop: int) -> int:
        """About how many bytes the messages [start, stop) take on disk."""
        return self._view.weigh(start, stop)

    def stretches(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The messages [start, stop) by segment: where each part begins, and about how many bytes it takes."""
        return self._view.stretches(start, stop)

    def reach(self, offset: int, max_bytes: int) -> int:
        """How far one comes from `offset` with about so many bytes: at least one step, at most to the readable end."""
        return self._view.reach(offset, max_bytes)

    def position(self, offset: int) -> LogPosition:
        """The offset with its epoch, for keeping outside the log."""
        return LogPosition(self.epochs.at(offset), offset)

    def check_position(self, position: LogPosition) -> None:
        """Raise TailLost if the position points into a tail that the log no longer has."""
        self.epochs.check(position)
