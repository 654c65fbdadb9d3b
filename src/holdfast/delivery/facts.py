"""What an expression can know of a message, and how two values compare: never with an error.

Bytes are read as UTF-8, and a byte that is not UTF-8 becomes one of U+DC80 to U+DCFF (Python's
surrogateescape). What is missing is None. Unlike values do not compare: text with a number, true with 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

_UNITS_MS: Final = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_DURATION: Final = re.compile("".join(rf"(?:([0-9]+(?:\.[0-9]+)?){unit})?" for unit in _UNITS_MS))
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

# Made once: `int | float` in a function is built anew with each call.
_NUMBERS: Final = (int, float)
_PLAIN: Final = (str, int, float)
_BYTES: Final = (bytes, bytearray, memoryview)


class Facts:
    """One message while it is looked at: its body is parsed as JSON at most once."""

    __slots__ = ("_tree", "_tree_known", "message", "steps")

    def __init__(self, message: Any) -> None:
        self.message = message
        self._tree_known = False
        self.steps = 0  # of regular expressions, so far

    def plain(self, name: str) -> Any:
        return _plain(getattr(self.message, name, None))

    def header(self, name: str) -> Any:
        headers = getattr(self.message, "headers", None)
        if headers is None:
            return None
        if hasattr(headers, "get"):
            return _plain(headers.get(name))
        return next((_plain(value) for key, value in headers if key == name), None)

    def json(self, path: tuple[str | int, ...]) -> Any:
        if not self._tree_known:
            self._tree = _parsed(getattr(self.message, "body", None))
            self._tree_known = True
        tree = self._tree
        for step in path:
            if isinstance(step, str):
                tree = tree.get(step) if isinstance(tree, dict) else None
            else:
                tree = tree[step] if isinstance(tree, list) and -len(tree) <= step < len(tree) else None
        return tree

    def time(self) -> datetime | None:
        time_ns = getattr(self.message, "timestamp_ns", None)
        try:
            return None if time_ns is None else _EPOCH + timedelta(microseconds=time_ns // 1000)
        except OverflowError:
            return None

    def age(self, now_ms: int) -> float | None:
        time_ns = getattr(self.message, "timestamp_ns", None)
        return None if time_ns is None else (now_ms * 1_000_000 - time_ns) / 1e9


def seconds_of(text: str) -> float | None:
    """Seconds of a duration such as `1h30m`, `500ms` or `7d`, largest unit first; None if it is none."""
    found = _DURATION.fullmatch(text)
    if found is None or not text:
        return None
    return sum(float(part) * unit for part, unit in zip(found.groups(), _UNITS_MS.values(), strict=True) if part) / 1000


def compared(holds: Callable[[Any, Any], bool], left: Any, right: Any) -> bool:
    """Whether the relation holds; False for unlike values. A text beside a time is read as one."""
    if isinstance(left, datetime) and isinstance(right, str):
        right = moment_of(right)
    elif isinstance(right, datetime) and isinstance(left, str):
        left = moment_of(left)
    return _alike(left, right) and holds(left, right)


def _alike(left: Any, right: Any) -> bool:
    if isinstance(left, bool) or isinstance(right, bool):
        return isinstance(left, bool) and isinstance(right, bool)
    if isinstance(left, str):
        return isinstance(right, str)
    if isinstance(left, _NUMBERS):
        return isinstance(right, _NUMBERS)
    return isinstance(left, datetime) and isinstance(right, datetime)


def contains(container: Any, value: Any) -> bool | None:
    """Whether it holds the value; None where that cannot be asked."""
    if isinstance(container, list):
        if value is None:
            return True if None in container else None
        return any(_alike(item, value) and item == value for item in container)
    if isinstance(container, str | dict) and isinstance(value, str):
        return value in container
    return None


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, _BYTES):
        return bytes(value).decode("utf-8", "surrogateescape")
    return str(value)


def _parsed(body: Any) -> Any:
    if not isinstance(body, (str, *_BYTES)):
        return None
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def moment_of(text: str) -> datetime | None:
    """The moment of an ISO 8601 time, in UTC where it names no zone; None if it is none."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
