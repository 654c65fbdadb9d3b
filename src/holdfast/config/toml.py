"""On which line of a TOML file each of its names stands; the standard library's parser does not tell."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, TypeAlias

Path: TypeAlias = tuple[str, ...]

_PLACE: Final = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def parsed(text: str) -> tuple[dict[str, Any], dict[Path, int]]:
    """What the text says, and the line of each name in it; ValueError that says where, if it is no TOML."""
    text = text.replace("\r\n", "\n")
    try:
        document, lines = tomllib.loads(text), list(_lines(text))
    except RecursionError:
        raise ValueError(f"line {_unfinished(text)}: this is nested too deeply") from None
    except ValueError as error:
        found = _PLACE.search(str(error))
        if found is None:  # a number that is too long to be read
            raise ValueError(f"line {_unfinished(text)}: this is no TOML: {error}") from None
        line, column = found.groups()
        if line is None:
            last = text.split("\n")
            line, column = str(len(last)), str(len(last[-1]) + 1)
        raise ValueError(f"line {line}, column {column}: this is no TOML: {str(error)[: found.start()]}") from None
    return document, dict(reversed(lines))  # a table may be gone on with: the first line of it counts


def _lines(text: str) -> Iterator[tuple[Path, int]]:
    """A statement ends with its line, so the first lines that are TOML by themselves are one."""
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
    """The line on which that statement begins that is no TOML, however much of the rest is added to it."""
    lines = text.split("\n")
    first = 0
    for number in range(1, len(lines) + 1):
        with suppress(ValueError, RecursionError):
            tomllib.loads("\n".join(lines[first:number]))
            first = number
    return first + 1


def _paths(found: Any, above: Path = ()) -> Iterator[Path]:
    """Every name, with those of the tables it is in."""
    if isinstance(found, list):
        found = found[0] if len(found) == 1 else None  # [[name]]
    if not isinstance(found, dict):
        return
    for name, value in found.items():
        yield (*above, name)
        yield from _paths(value, (*above, name))
