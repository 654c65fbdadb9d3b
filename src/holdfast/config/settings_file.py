"""The settings of a broker from one TOML file and the environment: defaults < file < environment < arguments.

All mistakes are collected before anything is refused, so that one run shows them all.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, Literal, TypeAlias

import msgspec

from holdfast.broker.folder.layout import check_topic_name, is_store
from holdfast.config import (
    ABSENT_SECTIONS,
    FIXED,
    FOREIGN_SECTIONS,
    KNOBS,
    PATHS,
    SECTIONS,
    TOPICS,
    Knob,
    named,
    names_of,
    nearest,
    shown,
    shown_name,
    value_of,
    variable,
)
from holdfast.env import World
from holdfast.env.chain.engines import parse_place
from holdfast.env.chain.keys import FILE_VARIABLE, use_file
from holdfast.errors import BadSettings, InvalidRequest
from holdfast.later import difflib, pattern, tomllib
from holdfast.settings import (
    HIDDEN,
    BrokerSettings,
    ConsumerSettings,
    ProducerSettings,
    ServerSettings,
    StoreSettings,
    TopicSettings,
)
from holdfast.storage.files import read_file

_PREFIX: Final = "HOLDFAST_"


def load_settings(text: str | None, environ: Mapping[str, str], *, path: str = "") -> Effective:
    """Return the settings from the text of a file and from variables; raises BadSettings with every mistake in them."""
    reading = _SettingsReading(path)
    if text is not None:
        reading.take_file(text)
    reading.take_environment(environ)
    return reading.result(has_file=text is not None)


def read_settings(world: World, environ: Mapping[str, str], path: str | None = None) -> Effective:
    """Return the settings from the file at `path`, or the one that HOLDFAST_CONFIG names, if any.

    What the file says of stores holds for the whole process from then on.
    """
    path = path or environ.get(FILE_VARIABLE) or None
    effective = load_settings(None if path is None else _text_of(world, path), environ, path=path or "")
    if path is not None:
        use_file(path, effective.store_of_file)
    return effective


def _text_of(world: World, path: str) -> str:
    try:
        content = read_file(world.disk, path)
    except (OSError, ValueError) as error:  # a folder, no permission, a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise BadSettings(
            f"the settings file {shown_name(path)} cannot be read: {reason}; check its path and permissions"
        ) from None
    if content is None:
        raise BadSettings(f"there is no settings file {shown_name(path)}; create it, or name another")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadSettings(
            f"{shown_name(path)}, line {line}: this is not UTF-8, as TOML must be: save the file as UTF-8"
        ) from None


class _SetValue(msgspec.Struct, frozen=True):
    """A value that was set, and where."""

    knob: Knob
    value: Any
    origin: Origin
    said: str


class _SettingsReading:
    """What was found so far, and what is wrong with it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._values: dict[str, _SetValue] = {}
        self._problems: list[str] = []
        self._topics: list[str] = []
        self._mistaken: set[str] = set()  # parts and topics with a mistake, which are not checked as a whole any more
        self._lines: Mapping[Path, int] = {}

    def take_file(self, text: str) -> None:
        try:
            document, self._lines = parsed(text)
        except ValueError as error:
            self._problems.append(f"{Origin('file', self._path)}, {error}")
            return
        for section, table in document.items():
            where = self._origin(section)
            if section in ABSENT_SECTIONS:
                self._problem(where, f"[{section}]: {ABSENT_SECTIONS[section]}")
            elif section == TOPICS:
                self._take_topics(table)
            elif section not in SECTIONS and section not in FOREIGN_SECTIONS:
                self._unknown_section(where, section, table)
            elif not isinstance(table, dict):
                self._problem(where, f"{section} is a section: write [{section}] and its settings below")
            else:
                for name, value in table.items():
                    ours = FOREIGN_SECTIONS.get(section, section)
                    self._take(ours, name, value, self._origin(section, name), said=f"[{section}] {shown_name(name)}")

    def take_environment(self, environ: Mapping[str, str]) -> None:
        """Read the variables of our sections, which must be known; others with our prefix are not settings."""
        sections = {section.upper(): section for section in (*SECTIONS, *FOREIGN_SECTIONS, *ABSENT_SECTIONS, TOPICS)}
        before = self._values
        self._values = {}
        for key in sorted(name for name in environ if name.startswith(_PREFIX)):
            where = Origin("environment", key)
            rest = key.removeprefix(_PREFIX)
            section = next((sections[each] for each in sections if rest.startswith(f"{each}_")), None)
            if section is None:
                self._near_miss(where, key)
            elif section in ABSENT_SECTIONS:
                self._problem(where, ABSENT_SECTIONS[section].replace("the section", "it"))
            elif section == TOPICS:
                self._problem(where, f"settings of single topics belong in the file, as [{TOPICS}.NAME]; remove it")
            else:
                name = rest[len(section) + 1 :].lower()
                ours = FOREIGN_SECTIONS.get(section, section)
                self._take(ours, name, environ[key], where, said="", from_text=True)
        self._values = {**before, **self._values}

    def _take_topics(self, topics: Any) -> None:
        for topic, table in topics.items() if isinstance(topics, dict) else [("NAME", None)]:
            where = self._origin(TOPICS, topic)
            if not isinstance(table, dict):
                self._problem(where, f"settings of a topic go in a section of their own: [{TOPICS}.{topic}]")
                continue
            try:
                check_topic_name(topic)
            except InvalidRequest as error:
                self._problem(where, f"[{TOPICS}.{shown_name(topic)}]: {error}")
                continue
            section = f"{TOPICS}.{topic}"
            self._topics.append(topic)
            for name, value in table.items():
                said = f"[{section}] {shown_name(name)}"
                self._take(section, name, value, self._origin(TOPICS, topic, name), said=said)

    def _take(self, section: str, name: str, value: Any, where: Origin, *, said: str, from_text: bool = False) -> None:
        try:
            self._set(
                section, name, value, where, said=f"{said} ({where})" if said else str(where), from_text=from_text
            )
        except BadSettings as error:
            self._problem(where, f"{said}: {error}" if said else str(error))

    def _set(self, section: str, name: str, value: Any, where: Origin, *, said: str, from_text: bool) -> None:
        if (section, name) in FIXED:
            if value != FIXED[section, name]:
                raise BadSettings(f"{shown(value)} cannot be used: it is {FIXED[section, name]} for every topic")
            return
        meant = named(section, name)
        if meant is None:
            raise BadSettings(_no_such(section, name, value, as_variable=from_text))
        try:
            knob, read = value_of(meant, value, from_text=from_text)
        except BadSettings:
            self._mistaken.add(_whole_of(meant.knobs[0]))
            raise
        earlier = self._values.get(knob.path)
        if earlier is not None:
            raise BadSettings(f"{knob.path} is set twice, also by {earlier.said}; remove one")
        self._values[knob.path] = _SetValue(knob, self._from_here(knob, read, where), where, said)

    def _from_here(self, knob: Knob, value: Any, where: Origin) -> Any:
        """Resolve a path in a file against the folder of that file; a URL, or one in a variable, stays as it is."""
        if knob.path not in PATHS or value is None or where.kind != "file" or is_store(value):
            return value
        return posixpath.normpath(posixpath.join(posixpath.dirname(self._path), value))

    def _unknown_section(self, where: Origin, section: str, table: Any) -> None:
        if not isinstance(table, dict):
            home = next((each for each in SECTIONS if section in names_of(each)), None)
            words = f"write it below [{home}]" if home else f"settings go in sections: {', '.join(SECTIONS)}"
            return self._problem(where, f"{shown_name(section)} is outside of any section; {words}")
        near = difflib.get_close_matches(section, (*SECTIONS, TOPICS), n=1)
        words = f"did you mean [{near[0]}]?" if near else f"known ones: {', '.join((*SECTIONS, f'{TOPICS}.NAME'))}"
        return self._problem(where, f"there is no section [{shown_name(section)}]; {words}")

    def _near_miss(self, where: Origin, key: str) -> None:
        """Report a variable that looks like a misspelled section; one that is unlike every setting is not ours."""
        near = difflib.get_close_matches(key, [*map(variable, KNOBS.values()), FILE_VARIABLE], n=1, cutoff=0.93)
        if near and key != FILE_VARIABLE:
            self._problem(where, f"there is no such setting; did you mean {near[0]}?")

    def _problem(self, where: Origin, words: str) -> None:
        self._problems.append(f"{where}: {words}")

    def _origin(self, *path: str) -> Origin:
        return Origin("file", self._path, self._lines.get(path))

    def result(self, *, has_file: bool) -> Effective:
        values: dict[str, dict[str, Any]] = {}
        for given in self._values.values():
            values.setdefault(_whole_of(given.knob), {})[given.knob.field] = given.value
        parts = {
            "producer": self._whole("producer", ProducerSettings, values),
            "consumer": self._whole("consumer", ConsumerSettings, values),
            "topic": self._whole("topic", TopicSettings, values),
        }
        server = self._whole("server", ServerSettings, values)
        store = self._whole("store", StoreSettings, values)
        topics = {topic: values.get(f"{TOPICS}.{topic}", {}) for topic in self._topics}
        broker = BrokerSettings(**values.get("broker", {}), **parts, topics=topics)
        if "topic" not in self._mistaken:
            general = msgspec.structs.asdict(broker.topic)
            for topic, own in topics.items():
                self._whole(f"{TOPICS}.{topic}", TopicSettings, {f"{TOPICS}.{topic}": {**general, **own}})
        if self._problems:
            raise BadSettings(_summary(self._problems))
        origins = dict.fromkeys(KNOBS, DEFAULT) | {path: given.origin for path, given in self._values.items()}
        return Effective(
            broker=broker,
            server=server,
            store=store,
            data_dir=values.get("place", {}).get("data_dir"),
            path=self._path if has_file else None,
            origins=origins,
        )

    def _whole(self, part: str, kind: Callable[..., Any], values: Mapping[str, Mapping[str, Any]]) -> Any:
        """Build settings whose fields must fit each other; each by itself is known to be valid."""
        if part in self._mistaken:
            return kind()
        try:
            return kind(**values.get(part, {}))
        except BadSettings as error:
            self._mistaken.add(part)
            words = set(re.findall(r"\w+", str(error)))
            causes = [given for given in self._values.values() if given.knob.field in words]
            own = [str(given.origin) for given in causes if _whole_of(given.knob) in (part, "topic")]
            self._problems.append(f"{' and '.join(own)}: {error}")
            return kind()


def _no_such(section: str, name: str, value: Any, *, as_variable: bool) -> str:
    if isinstance(value, dict) and section.startswith(TOPICS):
        return f'a topic has no sections of its own; where its name has a dot, quote it: [{TOPICS}."a.b"]'
    near = nearest(section, name)
    if near is None:
        return f"there is no such setting; [{section}] has {', '.join(_own_names(section))}"
    if as_variable:
        return f"there is no such setting; did you mean {variable(near)}?"
    if near.section != section:
        return f"there is no such setting; {near.name} belongs in [{near.section}]"
    return f"there is no such setting; did you mean {near.name}?"


def _own_names(section: str) -> list[str]:
    return [knob.name for knob in KNOBS.values() if knob.section == section] or list(names_of(section))


def _whole_of(knob: Knob) -> str:
    """Return what a setting must fit together with: a part of the broker's settings, or a topic."""
    return knob.section if knob.section.startswith(f"{TOPICS}.") else knob.part


def _summary(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return "\n- ".join([f"{len(problems)} settings cannot be used:", *problems])


class Origin(msgspec.Struct, frozen=True):
    """Where a value comes from: a file with path and line, a variable by name, or a limit that it was lowered to."""

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
    """The settings in force, and where each comes from; `path` is that of the file."""

    broker: BrokerSettings
    server: ServerSettings = msgspec.field(default_factory=ServerSettings)
    store: StoreSettings = msgspec.field(default_factory=StoreSettings)
    data_dir: str | None = None
    path: str | None = None
    origins: Mapping[str, Origin] = msgspec.field(default_factory=dict)

    def topic(self, name: str, kept: Mapping[str, Any] | None = None) -> TopicSettings:
        """Return the settings of a topic whose folder stores these (`kept`)."""
        return self.broker.of_topic(name, kept)

    @property
    def store_of_file(self) -> dict[str, str]:
        """The settings of stores that are in the file; those of the environment are there for whoever needs them."""
        return {
            name: getattr(self.store, name)
            for name in self.store.__struct_fields__
            if self.origins.get(f"store.{name}", DEFAULT).kind == "file"
        }

    def settings(self) -> Iterator[Setting]:
        """Yield every setting except those of single topics, in the order of the sections; secrets are hidden."""
        parts = {
            "place": self,
            "broker": self.broker,
            "server": self.server,
            "store": self.store,
            "topic": self.broker.topic,
            "producer": self.broker.producer,
            "consumer": self.broker.consumer,
        }
        for path, knob in KNOBS.items():
            value = getattr(parts[knob.part], knob.field)
            yield Setting(path, _without_secrets(knob, value), self.origins.get(path, DEFAULT))

    def topic_settings(self, name: str, kept: Mapping[str, Any] | None = None, place: str = "") -> Iterator[Setting]:
        """Yield the settings made for this topic alone, here or in its folder (`place`)."""
        own = self.broker.topics.get(name, {})
        for field, value in msgspec.structs.asdict(self.topic(name, kept)).items():
            if field in own:
                yield Setting(field, value, self.origins.get(f"{TOPICS}.{name}.{field}", DEFAULT))
            elif field in (kept or {}):
                yield Setting(field, value, Origin("folder", place))


def _without_secrets(knob: Knob, value: Any) -> Any:
    """Return a value for people: no keys, and no password of a place in a store."""
    if knob.is_secret and value is not None:
        return HIDDEN
    if isinstance(value, str) and is_store(value):
        with suppress(InvalidRequest):
            return parse_place(value).shown
    return value


Path: TypeAlias = tuple[str, ...]

_PLACE: Final = pattern(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def parsed(text: str) -> tuple[dict[str, Any], dict[Path, int]]:
    """Parse TOML; returns its content and the line of each name, which the standard library's parser does not tell.

    Raises ValueError that says where the text is not TOML.
    """
    text = text.replace("\r\n", "\n")
    try:
        document, lines = tomllib.loads(text), list(_lines(text))
    except RecursionError:
        raise ValueError(f"line {_unfinished(text)}: this is nested too deeply") from None
    except ValueError as error:
        found = _PLACE.search(str(error))
        if found is None:  # a number that is too long to parse
            raise ValueError(f"line {_unfinished(text)}: this is not TOML: {error}") from None
        line, column = found.groups()
        if line is None:
            last = text.split("\n")
            line, column = str(len(last)), str(len(last[-1]) + 1)
        raise ValueError(f"line {line}, column {column}: this is not TOML: {str(error)[: found.start()]}") from None
    return document, dict(reversed(lines))  # a table may be continued: its first line counts


def _lines(text: str) -> Iterator[tuple[Path, int]]:
    """Yield each name's path and line. Statements end with a line: the shortest run of lines that parses is one."""
    table: Path = ()
    statement: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        statement.append(line)
        try:
            found = tomllib.loads("\n".join(statement))
        except ValueError:
            continue
        first = number - len(statement) + 1
        if statement[0].lstrip().startswith("["):
            table = max(_paths(found), key=len)
            yield from ((table[:depth], first) for depth in range(1, len(table) + 1))
        else:
            yield from (((*table, *path), first) for path in _paths(found))
        statement = []


def _unfinished(text: str) -> int:
    """Return the line of the statement that does not parse, however much of the rest is added to it."""
    lines = text.split("\n")
    first = 0
    for number in range(1, len(lines) + 1):
        with suppress(ValueError, RecursionError):
            tomllib.loads("\n".join(lines[first:number]))
            first = number
    return first + 1


def _paths(found: Any, above: Path = ()) -> Iterator[Path]:
    """Yield every name, with those of the tables it is in."""
    if isinstance(found, list):
        found = found[0] if len(found) == 1 else None  # [[name]]
    if not isinstance(found, dict):
        return
    for name, value in found.items():
        yield (*above, name)
        yield from _paths(value, (*above, name))
