"""The settings that are in force, each with where it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import msgspec

from holdfast.embedded.knob_values import shown_name
from holdfast.embedded.knobs import KNOBS, TOPICS
from holdfast.settings import BrokerSettings, ServerSettings, TopicSettings


class Origin(msgspec.Struct, frozen=True):
    """Where a value comes from: for a file its path and line, for a variable its name, for a limit what it fits."""

    kind: Literal["default", "file", "environment", "folder", "limit"]
    where: str = ""
    line: int | None = None

    def __str__(self) -> str:
        if self.kind == "default":
            return "default"
        if self.kind == "limit":
            return f"default, lowered to fit {self.where}"
        where = shown_name(self.where) if self.where else "the settings file"
        return where if self.line is None else f"{where}, line {self.line}"


DEFAULT: Final = Origin("default")


class Setting(msgspec.Struct, frozen=True):
    """One value in force."""

    name: str
    value: Any
    origin: Origin


class Effective(msgspec.Struct, frozen=True, kw_only=True):
    """What is in force, and where it comes from; `data_dir` is a path or None, `path` that of the file."""

    broker: BrokerSettings
    server: ServerSettings = msgspec.field(default_factory=ServerSettings)
    data_dir: str | None = None
    path: str | None = None
    origins: Mapping[str, Origin] = msgspec.field(default_factory=dict)

    def topic(self, name: str, kept: Mapping[str, Any] | None = None) -> TopicSettings:
        """What a topic of this name follows, whose folder keeps these settings."""
        return self.broker.of_topic(name, kept)

    def settings(self) -> Iterator[Setting]:
        """Every setting but those of single topics, in the order of the sections."""
        parts = {
            "place": self,
            "broker": self.broker,
            "server": self.server,
            "topic": self.broker.topic,
            "producer": self.broker.producer,
            "consumer": self.broker.consumer,
        }
        for path, knob in KNOBS.items():
            yield Setting(path, getattr(parts[knob.part], knob.field), self.origins.get(path, DEFAULT))

    def topic_settings(self, name: str, kept: Mapping[str, Any] | None = None, place: str = "") -> Iterator[Setting]:
        """Those of a topic that are said of it alone, here or by what its folder keeps in `place`."""
        own = self.broker.topics.get(name, {})
        for field, value in msgspec.structs.asdict(self.topic(name, kept)).items():
            if field in own:
                yield Setting(field, value, self.origins.get(f"{TOPICS}.{name}.{field}", DEFAULT))
            elif field in (kept or {}):
                yield Setting(field, value, Origin("folder", place))
