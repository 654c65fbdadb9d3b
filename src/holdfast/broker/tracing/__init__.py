"""Tracing: the steps of a message's life, the log that holds them, and the observers that record them.

Which trace a message belongs to is its W3C trace context, text in two headers:

    traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
                 |  |                                |                |
                 |  trace id                         span id          flags: bit 0 says that it is recorded
                 version
    tracestate:  vendor=value,other=value

Anything that does not match exactly is not a trace context: the message is handled without one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

import msgspec

from holdfast.later import pattern

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

SAMPLED: Final = 1

TraceState: TypeAlias = tuple[tuple[str, str], ...]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MOST_MEMBERS: Final = 32
_MOST_STATE_CHARS: Final = 8_192  # 16 times what everyone must support; more is an attack or a mistake
_PARENT: Final = pattern(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII | re.DOTALL)
_KEY: Final = pattern(r"[a-z0-9][a-z0-9_\-*/@]{0,255}", re.ASCII)
_VALUE: Final = pattern(r"[ -+\--<>-~]{0,255}[!-+\--<>-~]", re.ASCII)


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """A position in a trace; ids are lower-case hex."""

    trace_id: str
    span_id: str
    flags: int = 0

    @property
    def sampled(self) -> bool:
        """Whether its creator records the trace."""
        return bool(self.flags & SAMPLED)

    @property
    def traceparent(self) -> str:
        """The text of the header, in the version that everyone reads."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags & SAMPLED:02x}"

    def child(self, span_id: str) -> TraceContext:
        """Return the context of the next step in the same trace."""
        return TraceContext(self.trace_id, span_id, self.flags)


def new_context(random_u32: Callable[[], int], *, sampled: bool = True) -> TraceContext:
    """Start a trace. The random numbers are at least 1, so no id is all zeros."""
    trace_id = "".join(f"{random_u32():08x}" for _ in range(4))
    return TraceContext(trace_id, new_span_id(random_u32), SAMPLED if sampled else 0)


def new_span_id(random_u32: Callable[[], int]) -> str:
    """Return an id for another step of a trace."""
    return f"{random_u32():08x}{random_u32():08x}"


def parse_traceparent(value: bytes | str) -> TraceContext | None:
    """Parse the header; None if it is not valid."""
    found = _PARENT.fullmatch(_text(value))
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more is not None):
        return None  # later versions may have more after the flags, version 00 may not
    if not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return TraceContext(trace_id, span_id, int(flags, 16))


def parse_tracestate(value: bytes | str) -> TraceState | None:
    """Return the members of the list in order; None if any of them is not valid."""
    text = _text(value)
    if len(text) > _MOST_STATE_CHARS:
        return None
    members: dict[str, str] = {}
    for part in text.split(","):
        member = part.strip(" \t")
        if not member:
            continue
        key, equals, content = member.partition("=")
        if not (equals and _KEY.fullmatch(key) and _VALUE.fullmatch(content)) or key in members:
            return None
        members[key] = content
    return None if len(members) > _MOST_MEMBERS else tuple(members.items())


def format_tracestate(state: TraceState) -> str:
    """Return the text of the header."""
    return ",".join(f"{key}={value}" for key, value in state)


def _text(value: bytes | str) -> str:
    """Return text; bytes that are not ASCII become characters that no valid header has."""
    return value if isinstance(value, str) else value.decode("latin-1")


class TraceStep(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One step of one message. `due_ms` is when the message is due next, `until_ms` when its lease ends."""

    at_ns: int
    step: str
    id: str
    topic: str
    partition: int = 0
    offset: int | None = None
    group: str = ""
    holder: str = ""
    attempt: int = 0
    why: str = ""
    error: str = ""
    due_ms: int = 0
    until_ms: int = 0
    trace_id: str = ""
    span_id: str = ""
    parent_id: str = ""
    state: str = ""
    related: str = ""  # the message that this one was redriven to or from

    @property
    def time(self) -> datetime:
        """When it happened, in UTC."""
        return _EPOCH + timedelta(microseconds=self.at_ns // 1000)
