"""Which settings a settings file may name: sections, our own names, the names that GoQueue has for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from holdfast.settings import (
    BrokerSettings,
    ConsumerSettings,
    LogSettings,
    ProducerSettings,
    ServerSettings,
    TopicSettings,
    field_types,
)

SECTIONS: Final = ("broker", "server", "storage", "queue", "producer", "consumer", "dead_letters", "traces")
TOPICS: Final = "topics"

# Foreign words: where GoQueue and lockd say it differently, their files and variables may go on doing so.
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

# Known, but there is nothing yet that could follow them: a setting is never accepted and ignored.
ABSENT_SECTIONS: Final = {"cluster": "there is no cluster yet, one broker has all the partitions; take the section out"}
# Files and folders: such a name in a settings file is meant from where that file is.
PATHS: Final = frozenset(
    {
        "broker.data_dir",
        "server.socket",
        "server.tls_cert_file",
        "server.tls_key_file",
        "server.tls_client_ca_file",
        "server.tokens_file",
        "server.audit_file",
    }
)
# Named by GoQueue, and the same for everybody here: this one value is right, any other cannot be followed.
FIXED: Final = {("dead_letters", "suffix"): ".dlq"}

Part: TypeAlias = Literal["place", "broker", "server", "producer", "consumer", "topic"]

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
    """One setting: what it is called in the file, and which field it becomes."""

    section: str
    name: str
    part: Part
    field: str
    kind: Any
    default: Any

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"


class Named(msgspec.Struct, frozen=True):
    """What a name in a file may stand for, and how its value is to be read.

    plain   as it is
    unit    a text with a unit, which tells a time from a size: `retention` is `retention_ms` or `retention_bytes`
    hours   a number of hours
    """

    knobs: tuple[Knob, ...]
    reading: Literal["plain", "unit", "hours"] = "plain"


def named(section: str, name: str) -> Named | None:
    """The setting of this name, be it ours, GoQueue's or one without its unit; None where there is none."""
    known = names_of(section)
    if name in known:
        return Named((_in(section, known[name]),))
    without_unit = tuple(_in(section, known[name + unit]) for unit in ("_ms", "_bytes") if name + unit in known)
    if without_unit:
        return Named(without_unit, "unit")
    in_ms = name.removesuffix("_hours") + "_ms"
    return Named((_in(section, known[in_ms]),), "hours") if name.endswith("_hours") and in_ms in known else None


def names_of(section: str) -> Mapping[str, Knob]:
    """Every full name that a section knows; `topics.orders` knows all settings of a topic."""
    return _TOPIC_NAMES if section.startswith(f"{TOPICS}.") else _NAMES[section]


def _in(section: str, knob: Knob) -> Knob:
    return msgspec.structs.replace(knob, section=section) if section.startswith(f"{TOPICS}.") else knob


def nearest(section: str, name: str) -> Knob | None:
    """What somebody who wrote a name that is not known there may have meant: a slip, or another section."""
    own = {knob.name: knob for knob in names_of(section).values() if not _is_foreign(section, knob)}
    slips = get_close_matches(name, own, n=1, cutoff=0.85)
    if not slips:
        for other in SECTIONS:
            meant = named(other, name)
            if other != section and meant is not None:
                return meant.knobs[0]
    near = slips or get_close_matches(name, own, n=1)
    return _in(section, own[near[0]]) if near else None


def _is_foreign(section: str, knob: Knob) -> bool:
    return section in SECTIONS and knob.section != section


def variable(knob: Knob) -> str:
    """The environment variable of a setting."""
    return f"HOLDFAST_{knob.section}_{knob.name}".upper()


def _all() -> Iterator[Knob]:
    path = Annotated[str, msgspec.Meta(min_length=1)] | None
    yield Knob(section="broker", name="data_dir", part="place", field="data_dir", kind=path, default=None)
    whole: dict[Part, type[msgspec.Struct]] = {
        "broker": BrokerSettings,
        "server": ServerSettings,
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
