"""Calls that were refused: a file of their own, in which no caller can write much.

A refused act has changed nothing, so its line is not synced, and it stands apart from the acts that were done: however
many calls are refused, those stay. Each caller has so many lines a minute. What goes beyond is counted, and told in
one line when the minute is over.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Final

import msgspec

from holdfast.env import World
from holdfast.server.acts import Act, act_of, line_of
from holdfast.server.audit_file import AuditFile

_log = logging.getLogger(__name__)

LINES: Final = 30  # of one caller,
WINDOW_S: Final = 60.0  # in this time
MOST_LINE_BYTES: Final = 2_048
FILES: Final = 1  # put aside, besides the one that is written

# All whose token is not known are one caller: they could take a new name, or address, for each call.
UNKNOWN: Final = "(unknown)"
_OTHERS: Final = "(others)"
_MOST_CALLERS: Final = 10_000

_MOST_NAME: Final = 100
_MOST_PARAMETERS: Final = 512


class _Window(msgspec.Struct):
    """What one caller was refused since a moment, by the clock that nobody sets."""

    began_ns: int
    written: int = 0
    left_out: int = 0

    def is_over(self, now_ns: int) -> bool:
        return now_ns - self.began_ns >= WINDOW_S * 1e9


class Refusals:
    """Notes refused calls, some of each caller. Safe to use from any thread."""

    def __init__(self, world: World, path: str, *, most_bytes: int) -> None:
        self._world = world
        self._file = AuditFile(world, path, most_bytes=most_bytes, files=FILES)
        self._lock = threading.Lock()
        self._windows: dict[str, _Window] = {}
        self._untold: dict[str, int] = {}  # of windows that are over

    @property
    def path(self) -> str:
        return self._file.path

    def admit(self, caller: str) -> bool:
        """Whether one more refusal of this caller is to be written down; otherwise it is counted."""
        now_ns = self._world.clock.monotonic_ns()
        with self._lock:
            window = self._window(caller, now_ns)
            if window.written < LINES:
                window.written += 1
                return True
            window.left_out += 1
            return False

    def write(self, *, outcome: str, **facts: Any) -> None:
        """Write down a refusal that was admitted."""
        self.tell_rest()
        parameters = facts.pop("parameters", None) or {}
        act = act_of(self._world, parameters=parameters, **facts)
        self._append(msgspec.structs.replace(act, outcome=outcome))

    def tell_rest(self, *, ended: bool = True) -> bool:
        """Write down how many more there were, of the windows that have `ended` or of all; are there any left?"""
        now_ns = self._world.clock.monotonic_ns()
        with self._lock:
            for caller, window in list(self._windows.items()):
                if not ended or window.is_over(now_ns):
                    self._end(caller, window)
            untold, self._untold = self._untold, {}
            left = any(window.left_out for window in self._windows.values())
        for caller, count in untold.items():
            self._append(_rest(self._world, caller, count))
        return left

    def last(self, count: int) -> list[Act]:
        """The newest refusals, the newest first."""
        self.tell_rest()
        found: list[Act] = []
        for line in self._file.backwards():
            if len(found) >= count:
                break
            try:
                found.append(msgspec.json.decode(line, type=Act))
            except msgspec.DecodeError:  # cut short by a crash
                continue
        return found

    def close(self) -> None:
        self.tell_rest(ended=False)
        self._file.close()

    def _window(self, caller: str, now_ns: int) -> _Window:
        if caller not in self._windows and len(self._windows) >= _MOST_CALLERS:
            caller = _OTHERS
        window = self._windows.get(caller)
        if window is not None and window.is_over(now_ns):
            self._end(caller, window)
            window = None
        if window is None:
            window = self._windows[caller] = _Window(now_ns)
        return window

    def _end(self, caller: str, window: _Window) -> None:
        del self._windows[caller]
        if window.left_out:
            self._untold[caller] = self._untold.get(caller, 0) + window.left_out

    def _append(self, act: Act) -> None:
        try:
            self._file.append(_short(act), sync=False)
        except OSError as error:  # refused it is, whether or not that can be written down
            _log.error(
                "a refusal cannot be written to %s: %s",
                self.path,
                error.strerror or error,
                extra={"principal": act.principal, "route": act.route},
            )


def _short(act: Act) -> bytes:
    """A line of a bounded size, whatever the caller put into names and values."""
    act = msgspec.structs.replace(
        act,
        principal=act.principal[:_MOST_NAME],
        peer=act.peer[:_MOST_NAME],
        target=act.target[:_MOST_NAME],
        correlation_id=act.correlation_id[:_MOST_NAME],
    )
    size = len(msgspec.json.encode(act.parameters))
    if size > _MOST_PARAMETERS:
        act = msgspec.structs.replace(act, parameters={"left_out_bytes": size})
    line = line_of(act)
    if len(line) > MOST_LINE_BYTES:  # signs that are written as six each
        plain = act.principal.encode("ascii", "replace").decode()
        line = line_of(
            msgspec.structs.replace(
                act, principal=plain, target="", correlation_id="", parameters={"left_out_bytes": size}
            )
        )
    return line


def _rest(world: World, caller: str, count: int) -> Act:
    act = act_of(world, principal=caller, peer="", action="", route=f"and {count:,} more refused calls")
    return msgspec.structs.replace(act, outcome="forbidden", count=count)
