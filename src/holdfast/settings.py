"""What an operator may set: plain values with units in their names and limits in their types."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from holdfast.errors import BadSettings
from holdfast.model import CodecName, Durability

_KIB = 1024
_MIB = 1024 * 1024

# The levels that each codec knows.
_LEVELS = {"none": (-7, 22), "zstd": (-7, 22), "lz4": (-7, 12), "gzip": (0, 9)}

_Count = Annotated[int, Meta(ge=1, le=2**53)]
_Millis = Annotated[int, Meta(ge=1, le=100 * 365 * 24 * 3600 * 1000)]


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one log. None means "no such limit"."""

    durability: Durability = "fsync"
    sync_interval_ms: Annotated[int, Meta(ge=1, le=3_600_000)] = 1_000

    segment_bytes: Annotated[int, Meta(ge=4 * _KIB, le=2048 * _MIB)] = 64 * _MIB
    segment_messages: _Count | None = None
    segment_ms: _Millis | None = None
    frame_bytes: Annotated[int, Meta(ge=1 * _KIB, le=16 * _MIB)] = 256 * _KIB
    index_bytes: Annotated[int, Meta(ge=512, le=1 * _MIB)] = 4 * _KIB

    max_message_bytes: Annotated[int, Meta(ge=1, le=64 * _MIB)] = 10 * _MIB
    max_batch_bytes: Annotated[int, Meta(ge=1, le=1024 * _MIB)] = 256 * _MIB
    min_free_bytes: Annotated[int, Meta(ge=0)] = 100 * _MIB

    codec: CodecName = "none"
    codec_level: Annotated[int, Meta(ge=-7, le=22)] | None = None
    codec_min_bytes: Annotated[int, Meta(ge=0)] = 1 * _KIB
    codec_min_saving_percent: Annotated[int, Meta(ge=0, le=99)] = 5
    max_raw_bytes: Annotated[int, Meta(ge=64 * _KIB, le=1024 * _MIB)] = 100_000_000

    retention_ms: _Millis | None = None
    retention_bytes: Annotated[int, Meta(ge=0)] | None = None
    retention_segments: _Count | None = None
    retention_min_segments: _Count = 1
    retention_ignores_pins: bool = False
    retention_check_ms: _Millis = 60_000

    def __post_init__(self) -> None:
        check_fields(self)
        low, high = _LEVELS[self.codec]
        if self.codec_level is not None and not low <= self.codec_level <= high:
            raise BadSettings(f"codec_level={self.codec_level} is outside {low} to {high}, the levels of {self.codec}")
        if self.max_message_bytes > self.max_raw_bytes:
            raise BadSettings(
                f"max_message_bytes ({self.max_message_bytes}) is above max_raw_bytes ({self.max_raw_bytes}): "
                "such a message could be written compressed and never read; raise max_raw_bytes"
            )


def check_fields(settings: msgspec.Struct) -> None:
    """Hold every field to its type and limits, whichever way the struct was made."""
    for name, kind in _field_types(type(settings)).items():
        try:
            msgspec.convert(getattr(settings, name), kind)
        except msgspec.ValidationError as error:
            choices = f"; choose from {', '.join(get_args(kind))}" if get_origin(kind) is Literal else ""
            raise BadSettings(f"{name}={getattr(settings, name)!r} cannot be used: {error}{choices}") from None


def load(kind: type[LogSettings], values: dict[str, Any]) -> LogSettings:
    """Settings from a plain mapping, such as a table of a TOML file; unknown names are refused."""
    unknown = sorted(set(values) - set(kind.__struct_fields__))
    if unknown:
        known = ", ".join(kind.__struct_fields__)
        raise BadSettings(f"unknown setting {', '.join(unknown)}; known ones: {known}")
    return kind(**values)


_types: dict[type, dict[str, Any]] = {}


def _field_types(kind: type[msgspec.Struct]) -> dict[str, Any]:
    if kind not in _types:
        _types[kind] = get_type_hints(kind, include_extras=True)
    return _types[kind]
