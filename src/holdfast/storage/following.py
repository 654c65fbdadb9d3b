"""Waiting for a log to grow that somebody else owns: told by the kernel where that works, looking where it does not.

The owner gives a sign when it is asked for one (see `state`), and the kernel tells of it. Nobody can be asked where
the files may not be written, where there is no owner, or where other machines write. Then a look every few seconds,
with jitter, so that many readers do not look at once. In both cases a look from time to time takes nothing for
granted, and opens everything anew.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import msgspec

from holdfast.env import FolderWatch, WatchRefused, World, is_remote
from holdfast.errors import InvalidRequest

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
