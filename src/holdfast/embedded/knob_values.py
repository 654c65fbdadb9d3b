"""What stands in a settings file or a variable, to the value that a setting takes."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import Any, Final

import msgspec
from msgspec import inspect

from holdfast.delivery.facts import seconds_of
from holdfast.embedded.knobs import Knob, Named
from holdfast.errors import BadSettings

_HOUR_MS: Final = 3_600_000
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt]?)(i?)b", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_GROUPED: Final = re.compile(r"-?[0-9]+(?:_[0-9]+)+")
_SAMPLES: Final = {"_ms": 'a time such as "30s" or "7d"', "_bytes": 'a size such as "64MiB" or "100kB"'}
_MOST_SHOWN: Final = 80


class _NoValue(Exception):
    """This text is no such value."""


def value_of(named: Named, given: Any, *, from_text: bool = False) -> tuple[Knob, Any]:
    """The setting that is meant and its value. A variable has only texts (`from_text`), a file has types."""
    for knob in named.knobs:
        with suppress(_NoValue):
            return knob, _read(knob, named, given, from_text=from_text)
    raise BadSettings(f"{shown(given)} cannot be used: {_wanted(named)}")


def shown(value: Any) -> str:
    """A value from outside, short and without anything that acts on a screen."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "this"
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def shown_name(name: str) -> str:
    """A name from outside, as it is where it is plain."""
    return name if re.fullmatch(r"[\w ./-]{1,200}", name) else shown(name)


def _read(knob: Knob, named: Named, given: Any, *, from_text: bool) -> Any:
    if named.reading == "unit":
        if len(named.knobs) == 1 and _is_no_limit(given):
            return _converted(knob, None)
        return _converted(knob, _with_unit(knob, given))
    if named.reading == "hours" and not _is_no_limit(given):
        return _converted(knob, _hours(given))
    # What the type itself takes goes first: -1 is a level of a codec, and "none" is a codec.
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
    """Milliseconds or bytes of a text such as "1h30m" or "64MiB", whichever the setting counts in."""
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
    """Nothing is ever early: a part of a millisecond counts as a whole one."""
    if seconds is None or not math.isfinite(seconds):
        raise _NoValue
    return -(-round(seconds * 1e9) // 1_000_000)


def _bare(knob: Knob) -> Any:
    """What the type is, besides none."""
    kind = inspect.type_info(knob.kind)
    if isinstance(kind, inspect.UnionType):
        return next(each for each in kind.types if not isinstance(each, inspect.NoneType))
    return kind


def _wanted(named: Named) -> str:
    """What to write instead."""
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
    kind = _bare(knob)
    none = ", or -1 for none" if isinstance(inspect.type_info(knob.kind), inspect.UnionType) else ""
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.LiteralType):
        return f"one of {', '.join(map(str, kind.values))}"
    if isinstance(kind, inspect.VarTupleType):
        each = "a text" if isinstance(kind.item_type, inspect.StrType) else _numbers(kind.item_type)
        return f"a list, each of it {each}"
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        return f"{_numbers(kind)}{none}"
    most = f" of at most {kind.max_length} characters" if getattr(kind, "max_length", None) else ""
    return f"a text{most}"


def _numbers(kind: Any) -> str:
    what = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
    if kind.gt is not None:
        return f"{what} above {kind.gt:g} and up to {kind.le:g}"
    if kind.ge is not None and kind.le is not None:
        return f"{what} from {kind.ge} to {kind.le}"
    return f"{what} from {kind.ge} on" if kind.ge is not None else what
