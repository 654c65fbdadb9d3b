"""Settings from a file and the environment: which there are, their sections, our names and GoQueue's, their values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import inspect

from holdfast.delivery.where import seconds_of
from holdfast.errors import BadSettings
from holdfast.later import difflib, pattern
from holdfast.settings import (
    HIDDEN,
    SECRETS,
    BrokerSettings,
    ConsumerSettings,
    LogSettings,
    ProducerSettings,
    ServerSettings,
    StoreSettings,
    TopicSettings,
    field_types,
    wanted,
)

_HOUR_MS: Final = 3_600_000
_SIZE: Final = pattern(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt]?)(i?)b", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_GROUPED: Final = pattern(r"-?[0-9]+(?:_[0-9]+)+")
_SAMPLES: Final = {"_ms": 'a time such as "30s" or "7d"', "_bytes": 'a size such as "64MiB" or "100kB"'}
_MOST_SHOWN: Final = 80


class _NoValue(Exception):
    """The text is not a value of this kind."""


def value_of(named: KnobName, given: Any, *, from_text: bool = False) -> tuple[Knob, Any]:
    """Return the setting that is meant, and its value. A variable has only text (`from_text`), a file has types."""
    for knob in named.knobs:
        with suppress(_NoValue):
            return knob, _read(knob, named, given, from_text=from_text)
    said = HIDDEN if any(knob.is_secret for knob in named.knobs) else shown(given)
    raise BadSettings(f"{said} cannot be used: {_wanted(named)}")


def shown(value: Any) -> str:
    """Return a value from outside for display: short, and without control characters."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "this"
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def shown_name(name: str) -> str:
    """Return a name from outside for display; plain names as they are."""
    return name if re.fullmatch(r"[\w ./-]{1,200}", name) else shown(name)


def _read(knob: Knob, named: KnobName, given: Any, *, from_text: bool) -> Any:
    if named.reading == "unit":
        if len(named.knobs) == 1 and _is_no_limit(given):
            return _converted(knob, None)
        return _converted(knob, _with_unit(knob, given))
    if named.reading == "hours" and not _is_no_limit(given):
        return _converted(knob, _hours(given))
    # What the type itself accepts comes first: -1 is a level of a codec, and "none" is a codec.
    with suppress(_NoValue):
        return _converted(knob, _parts(knob, given) if from_text else given, from_text=from_text)
    if _is_no_limit(given) or given == "":
        return _converted(knob, None)
    if from_text and _GROUPED.fullmatch(given):
        return _converted(knob, int(given.replace("_", "")))
    return _converted(knob, _with_unit(knob, given))


def _converted(knob: Knob, given: Any, *, from_text: bool = False) -> Any:
    try:
        return msgspec.convert(given, knob.kind, strict=not from_text)
    except (msgspec.ValidationError, ValueError):
        raise _NoValue from None


def _parts(knob: Knob, text: str) -> Any:
    if isinstance(_bare(knob), inspect.VarTupleType):
        return [part.strip() for part in text.strip("[]() ").split(",")]
    return text


def _is_no_limit(given: Any) -> bool:
    return (isinstance(given, int) and given == -1) or (isinstance(given, str) and given.lower() in ("none", "-1"))


def _with_unit(knob: Knob, given: Any) -> int:
    """Convert text such as "1h30m" or "64MiB" to milliseconds or bytes, whichever the setting uses."""
    if not isinstance(given, str):
        raise _NoValue
    if knob.field.endswith("_ms"):
        return _milliseconds(seconds_of(given))
    found = _SIZE.fullmatch(given) if knob.field.endswith("_bytes") else None
    if found is None or (found[3] and not found[2]):
        raise _NoValue
    number: float = float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2].lower()]
    if not math.isfinite(number):
        raise _NoValue
    return math.ceil(number)


def _hours(given: Any) -> int:
    try:
        number = float(given) if isinstance(given, str | int | float) and not isinstance(given, bool) else math.nan
    except (ValueError, OverflowError):
        raise _NoValue from None
    return _milliseconds(number * 3600)


def _milliseconds(seconds: float | None) -> int:
    """Convert to milliseconds, rounding up so that nothing is ever early."""
    if seconds is None or not math.isfinite(seconds):
        raise _NoValue
    return -(-round(seconds * 1e9) // 1_000_000)


def _bare(knob: Knob) -> Any:
    """Return the type without None."""
    kind = inspect.type_info(knob.kind)
    if isinstance(kind, inspect.UnionType):
        return next(each for each in kind.types if not isinstance(each, inspect.NoneType))
    return kind


def _wanted(named: KnobName) -> str:
    """Say what to write instead."""
    if named.reading == "unit":
        ways = [sample for end, sample in _SAMPLES.items() if any(knob.field.endswith(end) for knob in named.knobs)]
        limits = "; ".join(f"{knob.name} is {_range(knob)}" for knob in named.knobs)
        return f"give {', or '.join(ways)}; {limits}"
    knob = named.knobs[0]
    if named.reading == "hours":
        return f"give a number of hours; {knob.name} is {_range(knob)}"
    unit = next((f", or {sample}" for end, sample in _SAMPLES.items() if knob.field.endswith(end)), "")
    return f"give {_range(knob)}{unit}"


def _range(knob: Knob) -> str:
    return wanted("", knob.kind, "-1 for none")


SECTIONS: Final = ("broker", "server", "store", "storage", "queue", "producer", "consumer", "dead_letters", "traces")
TOPICS: Final = "topics"

# Where GoQueue and lockd use other names, their files and variables work here, too.
FOREIGN_SECTIONS: Final = {"dlq": "dead_letters"}
FOREIGN: Final = {
    ("broker", "host"): ("server", "host"),
    ("broker", "port"): ("server", "port"),
    ("queue", "max_consumers"): ("server", "max_waiters"),
    ("queue", "poll_interval_ms"): ("server", "poll_interval_ms"),
    ("queue", "poll_jitter_ms"): ("server", "poll_jitter_ms"),
    ("queue", "resilient_poll_interval_ms"): ("server", "safety_poll_ms"),
    ("storage", "segment_size_bytes"): ("storage", "segment_bytes"),
    ("storage", "index_interval_bytes"): ("storage", "index_bytes"),
    ("storage", "fsync_interval_ms"): ("storage", "sync_interval_ms"),
    ("producer", "batch_size"): ("producer", "batch_messages"),
    ("producer", "ack_mode"): ("producer", "acks"),
    ("consumer", "session_timeout_ms"): ("consumer", "session_ms"),
    ("consumer", "heartbeat_interval_ms"): ("consumer", "heartbeat_ms"),
    ("consumer", "max_poll_records"): ("consumer", "max_records"),
    ("consumer", "auto_commit_interval_ms"): ("consumer", "auto_commit_ms"),
    ("consumer", "visibility_timeout_ms"): ("queue", "lease_ms"),
    ("consumer", "max_retries"): ("queue", "max_attempts"),  # it counts the first delivery, as we do
    ("consumer", "backoff_multiplier"): ("queue", "backoff_factor"),
}

# Known, but not supported yet: a setting is never accepted and ignored.
ABSENT_SECTIONS: Final = {"cluster": "there is no cluster yet, one broker has all the partitions; remove the section"}
# Files and folders: in a settings file, such a path is relative to the folder of that file.
PATHS: Final = frozenset(
    {
        "broker.data_dir",
        "broker.backup_key_file",
        "server.socket",
        "server.tls_cert_file",
        "server.tls_key_file",
        "server.tls_client_ca_file",
        "server.tokens_file",
        "server.audit_file",
        "server.lake",
        *(f"store.{name}" for name in StoreSettings.__struct_fields__ if name.endswith("_file")),
    }
)
# Named by GoQueue but fixed here: this one value is accepted, any other cannot be followed.
FIXED: Final = {("dead_letters", "suffix"): ".dlq"}

Part: TypeAlias = Literal["place", "broker", "server", "store", "producer", "consumer", "topic"]

_PLACES: Final = {
    "dead_letters": ("dead_letters", "enabled"),
    "dead_retention_ms": ("dead_letters", "retention_ms"),
    "expired_to_dead": ("dead_letters", "expired"),
    "trace_sample": ("traces", "sample"),
    "trace_retention_ms": ("traces", "retention_ms"),
}
_STORED: Final = frozenset(
    {
        *LogSettings.__struct_fields__,
        "partitions",
        "cleanup",
        "tombstone_ms",
        "compact_min_saving_percent",
        "producer_idle_ms",
    }
)


class Knob(msgspec.Struct, frozen=True, kw_only=True):
    """One setting: its name in the file, and the field that it sets."""

    section: str
    name: str
    part: Part
    field: str
    kind: Any
    default: Any

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def is_secret(self) -> bool:
        """Whether its value must not be shown."""
        return self.field in SECRETS


class KnobName(msgspec.Struct, frozen=True):
    """What a name in a file may refer to, and how to read its value.

    plain   as it is
    unit    text with a unit, which tells a time from a size: `retention` is `retention_ms` or `retention_bytes`
    hours   a number of hours
    """

    knobs: tuple[Knob, ...]
    reading: Literal["plain", "unit", "hours"] = "plain"


def named(section: str, name: str) -> KnobName | None:
    """Return the setting of this name: ours, GoQueue's, or one without its unit; None if there is none."""
    known = names_of(section)
    if name in known:
        return KnobName((_in(section, known[name]),))
    without_unit = tuple(_in(section, known[name + unit]) for unit in ("_ms", "_bytes") if name + unit in known)
    if without_unit:
        return KnobName(without_unit, "unit")
    in_ms = name.removesuffix("_hours") + "_ms"
    return KnobName((_in(section, known[in_ms]),), "hours") if name.endswith("_hours") and in_ms in known else None


def names_of(section: str) -> Mapping[str, Knob]:
    """Return every full name that a section knows; `topics.orders` knows all settings of a topic."""
    return _TOPIC_NAMES if section.startswith(f"{TOPICS}.") else _NAMES[section]


def _in(section: str, knob: Knob) -> Knob:
    return msgspec.structs.replace(knob, section=section) if section.startswith(f"{TOPICS}.") else knob


def nearest(section: str, name: str) -> Knob | None:
    """Return what an unknown name may have been meant to be: a misspelling, or a name of another section."""
    own = {knob.name: knob for knob in names_of(section).values() if not _is_foreign(section, knob)}
    slips = difflib.get_close_matches(name, own, n=1, cutoff=0.85)
    if not slips:
        for other in SECTIONS:
            meant = named(other, name)
            if other != section and meant is not None:
                return meant.knobs[0]
    near = slips or difflib.get_close_matches(name, own, n=1)
    return _in(section, own[near[0]]) if near else None


def _is_foreign(section: str, knob: Knob) -> bool:
    return section in SECTIONS and knob.section != section


def variable(knob: Knob) -> str:
    """Return the environment variable of a setting."""
    return f"HOLDFAST_{knob.section}_{knob.name}".upper()


def _all() -> Iterator[Knob]:
    path = Annotated[str, msgspec.Meta(min_length=1)] | None
    yield Knob(section="broker", name="data_dir", part="place", field="data_dir", kind=path, default=None)
    whole: dict[Part, type[msgspec.Struct]] = {
        "broker": BrokerSettings,
        "server": ServerSettings,
        "store": StoreSettings,
        "topic": TopicSettings,
        "producer": ProducerSettings,
        "consumer": ConsumerSettings,
    }
    for part, struct in whole.items():
        kinds, defaults = field_types(struct), struct()
        for field in struct.__struct_fields__:
            if struct is BrokerSettings and field in ("producer", "consumer", "topic", "topics"):
                continue
            home = ("storage" if field in _STORED else "queue") if part == "topic" else part
            section, name = _PLACES.get(field, (home, field))
            yield Knob(
                section=section, name=name, part=part, field=field, kind=kinds[field], default=getattr(defaults, field)
            )


def _sorted() -> dict[str, Knob]:
    found = sorted(_all(), key=lambda knob: SECTIONS.index(knob.section))
    return {knob.path: knob for knob in found}


def _by_name() -> dict[str, dict[str, Knob]]:
    names: dict[str, dict[str, Knob]] = {section: {} for section in SECTIONS}
    for knob in KNOBS.values():
        names[knob.section][knob.name] = knob
    for (section, name), (home, ours) in FOREIGN.items():
        names[section][name] = names[home][ours]
    return names


KNOBS: Final = _sorted()
_NAMES: Final = _by_name()
_TOPIC_NAMES: Final = {
    knob.field: msgspec.structs.replace(knob, name=knob.field) for knob in KNOBS.values() if knob.part == "topic"
}
