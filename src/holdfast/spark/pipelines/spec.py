"""What a pipeline is told, as values: one object behind a YAML file and behind Python."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from holdfast.api.times import parse_duration
from holdfast.broker.folder.layout import check_name
from holdfast.errors import BadSettings, InvalidRequest

OnFail: TypeAlias = Literal["warn", "drop", "quarantine", "fail"]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
QUARANTINE_SUFFIX: Final = ".quarantine"

_UNITS: Final = {
    "millisecond": 1,
    "second": 1_000,
    "minute": 60_000,
    "hour": 3_600_000,
    "day": 86_400_000,
    "week": 604_800_000,
}
_WORDS: Final = re.compile(r"\s*([0-9]+)\s*([a-z]+?)s?\s*", re.IGNORECASE)


class Expectation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A condition that must be true of every row, and what becomes of a row for which it is not."""

    name: str
    check: str
    on_fail: OnFail = "warn"


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every kind of pipeline may be told; each kind adds its own.

    `source` is the pipeline whose table is read, for those that read one.
    """

    source: str | None = None
    expect: tuple[Expectation, ...] = ()


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """One named pipeline. `function` is what a pipeline of somebody's own does with the rows."""

    name: str
    kind: str
    options: Any
    function: Callable[..., Any] | None = None


class Project(msgspec.Struct, frozen=True, kw_only=True):
    """Pipelines that share a data folder and a lake; `where` is the file that they stand in."""

    folder: str
    lake: str
    pipelines: dict[str, Spec]
    where: str = "Python"

    def spec(self, name: str) -> Spec:
        """The pipeline by this name."""
        if name not in self.pipelines:
            raise InvalidRequest(f"there is no pipeline {name!r} in {self.where}{meant(name, self.pipelines)}")
        return self.pipelines[name]

    def checkpoint(self, name: str) -> str:
        """Where a pipeline keeps how far it is."""
        return f"{self.lake}/_checkpoints/{name}"

    def table(self, name: str) -> str:
        """The folder of the table that a pipeline writes."""
        return f"{self.lake}/{name}"

    def quarantine(self, name: str) -> str:
        """The folder of the rows that it put aside."""
        return f"{self.lake}/{name}{QUARANTINE_SUFFIX}"

    def in_order(self, names: Iterable[str]) -> list[Spec]:
        """These pipelines, each behind the one that it reads from."""
        wanted = {name: self.spec(name) for name in names}
        found: dict[str, Spec] = {}

        def add(spec: Spec) -> None:
            source = spec.options.source
            if source in wanted and source not in found:
                add(wanted[source])
            found.setdefault(spec.name, spec)

        for spec in wanted.values():
            add(spec)
        return list(found.values())


def read_options(kind: type[Options], given: Mapping[str, Any], where: str) -> Any:
    """The options of one pipeline, or an error that names the one that is wrong."""
    known = kind.__struct_encode_fields__
    for key in given:
        if key not in known:
            raise BadSettings(f"{where}: {key!r} is not known{meant(key, ('kind', *known))}")
    for number, expectation in enumerate(_list_of(given.get("expect"))):
        if isinstance(expectation, Mapping):
            for key in expectation:
                if key not in Expectation.__struct_encode_fields__:
                    near = meant(key, Expectation.__struct_encode_fields__)
                    raise BadSettings(f"{where}: expect[{number}]: {key!r} is not known{near}")
    try:
        options = msgspec.convert(dict(given), kind)
    except BadSettings as error:
        raise BadSettings(f"{where}: {error}") from None
    except msgspec.ValidationError as error:
        raise BadSettings(f"{where}: {_plain(str(error))}") from None
    _check_expectations(options.expect, where)
    return options


def check_project(project: Project) -> Project:
    """The same project, if its pipelines fit each other."""
    for spec in project.pipelines.values():
        check_name(spec.name, "pipeline")
        if spec.name.startswith("_") or spec.name.endswith(QUARANTINE_SUFFIX):
            raise BadSettings(f"{project.where}: a pipeline cannot be named {spec.name!r}: choose another name")
        source = spec.options.source
        if source is not None and source not in project.pipelines:
            near = meant(source, project.pipelines)
            raise BadSettings(f"{project.where}: {spec.name}: its source {source!r} is none of the pipelines{near}")
        seen = {spec.name}
        while source is not None:
            if source in seen:
                raise BadSettings(f"{project.where}: {spec.name} reads, by way of its source, from itself")
            seen.add(source)
            source = project.pipelines[source].options.source
    return project


def located(project: Project) -> Project:
    """The same project with paths that do not depend on where anybody is: the JVM need not be where we are."""
    return msgspec.structs.replace(project, folder=_absolute(project.folder), lake=_absolute(project.lake))


def interval_ms(text: str, what: str) -> int:
    """Milliseconds of "10 minutes" or "10m"."""
    found = _WORDS.fullmatch(text)
    if found is not None and (unit := _UNITS.get(found[2].lower())):
        return int(found[1]) * unit
    try:
        return max(round(parse_duration(text, what) * 1000), 0)
    except InvalidRequest:
        raise BadSettings(f"{what} is {text!r}: give a time such as '10 minutes' or '1h30m'") from None


def no_expectation_named(name: str, expectations: Iterable[Expectation]) -> None:
    """Refuse a name under which the kind itself counts."""
    if any(each.name == name for each in expectations):
        raise BadSettings(f"an expectation cannot be named {name!r} here: rows are counted under that name already")


def meant(given: str, known: Iterable[str]) -> str:
    """What to say behind a name that is not known: the nearest one, or all of them."""
    names = list(known)
    near = get_close_matches(given, names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; there are {', '.join(names)}" if names else ""


def _absolute(path: str) -> str:
    return posixpath.normpath(Path(path).absolute())


def _list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _check_expectations(expectations: Iterable[Expectation], where: str) -> None:
    seen: set[str] = set()
    for expectation in expectations:
        if not re.fullmatch(r"[\w .:-]{1,100}", expectation.name):
            raise BadSettings(f"{where}: an expectation cannot be named {expectation.name!r}: use letters and digits")
        if expectation.name in seen:
            raise BadSettings(f"{where}: two expectations are named {expectation.name!r}: rename one")
        if not expectation.check.strip():
            raise BadSettings(f"{where}: the expectation {expectation.name!r} has no check")
        seen.add(expectation.name)


def _plain(text: str) -> str:
    """msgspec's words with the place first: "window: expected `str`, got `int`"."""
    words, _, place = text.partition(" - at `$")
    words = words[:1].lower() + words[1:]
    place = place.rstrip("`").removeprefix(".")
    return f"{place}: {words}" if place else words.replace("object missing required field", "it needs")
