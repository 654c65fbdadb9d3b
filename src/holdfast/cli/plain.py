"""Arguments that are plainly right are taken as they are.

The library that typer holds arguments to takes longer to load than most commands take to run. It is left to those
that are wrong, or of a rarer kind: it has the words to say what is wrong with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

_MOST_DIGITS: Final = 18
_UNSURE: Final = object()

_Process: TypeAlias = Callable[[Any, Any], Any]


class TakesPlain:
    """For a command of typer's: its parameters take by themselves what is plainly right."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in found:
            described = getattr(parameter, "type_descriptor", None)  # an older typer has none, and no such library
            if described is not None and "process_value" not in vars(parameter):
                parameter.process_value = _quick(parameter, described, parameter.process_value)
        return found


def _quick(parameter: Any, described: Any, thorough: _Process) -> _Process:
    def process_value(ctx: Any, value: Any) -> Any:
        taken = _taken(parameter, described, value)
        if taken is _UNSURE:
            return thorough(ctx, value)
        return taken if parameter.callback is None else parameter.callback(ctx, parameter, taken)

    return process_value


def _taken(parameter: Any, described: Any, value: Any) -> Any:
    """The value as its kind, where there is no doubt about it."""
    kind, limits = described.annotation, described.parameter_info
    if limits.parser is not None:
        return _UNSURE
    if value is None and not parameter.required:
        return () if parameter.multiple or parameter.nargs == -1 else None
    if kind is str and isinstance(value, str):
        return value
    if kind == list[str] and isinstance(value, list | tuple) and value and all(isinstance(each, str) for each in value):
        return list(value)
    if kind is int and isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= _MOST_DIGITS:
        value = int(value)
    return value if kind is int and type(value) is int and _within(value, limits) else _UNSURE


def _within(value: int, limits: Any) -> bool:
    return (limits.min is None or value >= limits.min) and (limits.max is None or value <= limits.max)
