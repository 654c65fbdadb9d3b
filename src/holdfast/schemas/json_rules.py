"""When a JSON Schema accepts all that an earlier one accepted: the rules that Confluent's registry applies.

What matters most is the *content model* of an object, which says what other properties it may have:

    open            any             additionalProperties is absent, true or {}
    partially open  those that fit  additionalProperties is a schema, or there are patternProperties
    closed          none            additionalProperties is false

A property can be added to what was closed, since no earlier value has it, and not to what was open, since an earlier
value may have it with any content. It can be removed from what is open. Lists of items work in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from holdfast.schemas.json_schema import JsonSchema
    from holdfast.schemas.json_work import Resources

_MOST_FOUND: Final = 50
_MOST_PAIRS: Final = 20_000
_NOTES: Final = frozenset({"title", "description", "default", "examples", "$comment", "deprecated", "readOnly",
    "writeOnly", "$schema", "$id", "id", "$defs", "definitions", "$anchor", "$dynamicAnchor", "format"})  # fmt: skip

# Limits, and whether a value may be larger or smaller than before.
_MAY_GROW: Final = ("maxLength", "maximum", "exclusiveMaximum", "maxProperties", "maxItems", "maxContains")
_MAY_SHRINK: Final = ("minLength", "minimum", "exclusiveMinimum", "minProperties", "minItems", "minContains")
_SUMS: Final = ("oneOf", "anyOf")


def problems(new: JsonSchema, old: JsonSchema) -> list[str]:
    """Return why values of the old schema may not be values of the new one, each with its place; [] if they all are."""
    return _Comparison(new.resources, old.resources).compare(new.root, old.root, "")[:_MOST_FOUND]


class _Comparison:
    """Compares parts once; a pair that is met again, inside itself, counts as fine there."""

    def __init__(self, new: Resources, old: Resources) -> None:
        self._new, self._old = new, old
        self._known: dict[tuple[int, int], list[str]] = {}
        self._made: list[Any] = []  # keeps parts that were made here, so that none gets the id of another

    def compare(self, new: Any, old: Any, place: str) -> list[str]:
        new, old = self._resolved(self._new, new), self._resolved(self._old, old)
        pair = (id(new), id(old))
        if pair not in self._known:
            if len(self._known) >= _MOST_PAIRS:
                return [f"{_at(place)}: the schemas are too large to be compared any further"]
            self._known[pair] = []
            self._known[pair] = self._compared(new, old, place)
        return self._known[pair]

    def _resolved(self, resources: Resources, part: Any) -> Any:
        """Follow a reference that stands alone; one with other words beside it is both together."""
        seen = 0
        while isinstance(part, dict) and isinstance(part.get("$ref"), str) and seen < 100:
            target, rest = resources.meant_by(part, part["$ref"]), part.keys() - _NOTES - {"$ref"}
            if rest:
                both = {"allOf": [target, {key: part[key] for key in part if key != "$ref"}]}
                self._made.append(both)
                return both
            part, seen = target, seen + 1
        return part

    def _compared(self, new: Any, old: Any, place: str) -> list[str]:
        if _is_open(new) or old is False:
            return []
        if new is False:
            return [f"{_at(place)}: nothing is allowed any more"]
        if _is_open(old):
            old = {}
        combined = self._combined(new, old, place)
        if combined is not None:
            return combined
        found = _types(new, old, place)
        if found:
            return found
        found = [*_values(new, old, place), *_limits(new, old, place), *self._negated(new, old, place)]
        return [*found, *self._object(new, old, place), *self._items(new, old, place), *_conditions(new, old, place)]

    # Combinations

    def _combined(self, new: Any, old: Any, place: str) -> list[str] | None:
        """Compare what consists of other schemas, along with what stands beside; None if neither does."""
        sum_new, sum_old = _sum_of(new), _sum_of(old)
        if "allOf" in new or "allOf" in old:
            return self._product(new, old, place)
        if sum_new is None and sum_old is None:
            return None
        if sum_old is not None:
            rest_old = self._rest(old, _SUMS)
            if sum_new is not None and "oneOf" in new and "oneOf" not in old:
                return [f"{_at(place)}: anyOf became oneOf"]
            kept = self._rest(new, _SUMS)
            found = self.compare(kept, rest_old, place) if kept else []
            target = {key: new[key] for key in new if key in _SUMS} if sum_new is not None else new
            self._made.append(target)
            for index, branch in enumerate(sum_old):
                reasons = (
                    self._into_sum(target, branch, place)
                    if sum_new is not None
                    else self.compare(target, branch, place)
                )
                found = [*found, *(f"branch {index} of the earlier {_word(old)}: {reason}" for reason in reasons)]
            return found
        rest = self._rest(new, _SUMS)
        found = self.compare(rest, old, place) if rest else []
        return [*found, *self._into_sum(new, old, place)]

    def _into_sum(self, new: Any, branch: Any, place: str) -> list[str]:
        """Return why no branch of the new schema accepts what this one did."""
        choices = _sum_of(new) or []
        if any(not self.compare(choice, branch, place) for choice in choices):
            return []
        return [f"{_at(place)}: no branch of the {_word(new)} accepts what was accepted"]

    def _product(self, new: Any, old: Any, place: str) -> list[str]:
        """Every part of the new schema must accept what some part of the old one accepted, or all of it together."""
        parts_new, parts_old = self._factors(new), self._factors(old)
        found: list[str] = []
        for part in parts_new:
            each = [self.compare(part, earlier, place) for earlier in parts_old]
            if all(each):
                found += sorted(each, key=len)[0]
        return found

    def _factors(self, part: Any) -> list[Any]:
        rest = self._rest(part, ("allOf",))
        factors = list(part.get("allOf") or ())
        return [*factors, rest] if rest or not factors else factors

    def _rest(self, part: Any, without: Iterable[str]) -> dict[str, Any]:
        """Return what stands beside a combination, without notes; {} if nothing does."""
        rest = {key: value for key, value in part.items() if key not in without and key not in _NOTES}
        self._made.append(rest)
        return rest

    def _negated(self, new: Any, old: Any, place: str) -> list[str]:
        if "not" not in new:
            return []
        if "not" not in old:
            return [f"{_at(place)}: values are excluded by a new `not`"]
        reverse = _Comparison(self._old, self._new)
        return [f"{_at(place)}: `not` excludes more"] if reverse.compare(old["not"], new["not"], place) else []

    # Objects

    def _object(self, new: Any, old: Any, place: str) -> list[str]:
        properties, earlier = new.get("properties") or {}, old.get("properties") or {}
        found: list[str] = []
        for name in earlier:
            where = f"{place}.{name}".lstrip(".")
            if name in properties:
                found += self.compare(properties[name], earlier[name], where)
            else:
                found += self._removed(new, earlier[name], name, where)
        for name in properties:
            if name not in earlier:
                found += self._added(new, old, name, f"{place}.{name}".lstrip("."))
        required = set(_strings(new.get("required"))) - set(_strings(old.get("required")))
        for name in sorted(required):
            if (name in earlier or name not in properties) and not _has_default(properties.get(name)):
                found.append(f"field {f'{place}.{name}'.lstrip('.')} is required now, and has no default")
        found += self._others(new, old, place, "additionalProperties", "other properties")
        found += self._only_both(new, old, place, "propertyNames")
        for name, each in (new.get("patternProperties") or {}).items():
            before = (old.get("patternProperties") or {}).get(name)
            if before is None and not _is_open(each) and old.get("additionalProperties", True) is not False:
                found.append(f"{_at(place)}: properties like {name} are limited now")
            elif before is not None:
                found += self.compare(each, before, f"{place}.{name}".lstrip("."))
        return [*found, *self._dependencies(new, old, place)]

    def _removed(self, new: Any, before: Any, name: str, where: str) -> list[str]:
        fitting = _for_name(new, name)
        if fitting is False:
            if before is False:
                return []
            return [f"field {where} was removed, and other properties are not allowed: keep it, or allow others"]
        return [f"{reason} (of other properties)" for reason in self.compare(fitting, before, where)]

    def _added(self, new: Any, old: Any, name: str, where: str) -> list[str]:
        wanted, fitting = new["properties"][name], _for_name(old, name)
        if fitting is False:
            if name in _strings(new.get("required")) and not _has_default(wanted):
                return [f"field {where} was added as required, without a default: add a default, or make it optional"]
            return []
        if _is_open(fitting):
            if _is_open(wanted):
                return []
            reason = (
                f"field {where} was added where any property was allowed, so an earlier value may have it with another "
                'content: add "additionalProperties": false first, or do not limit it'
            )
            return [reason]
        return self.compare(wanted, fitting, where)

    def _others(self, new: Any, old: Any, place: str, key: str, what: str) -> list[str]:
        now, before = new.get(key, True), old.get(key, True)
        if _is_open(now):
            return []
        if now is False:
            return [] if before is False else [f"{_at(place)}: {what} are not allowed any more"]
        if _is_open(before):
            return [f"{_at(place)}: {what} are limited now"]
        return self.compare(now, before, f"{place}.*".lstrip("."))

    def _dependencies(self, new: Any, old: Any, place: str) -> list[str]:
        found: list[str] = []
        for key in ("dependencies", "dependentRequired", "dependentSchemas"):
            earlier = old.get(key) or {}
            for name, each in (new.get(key) or {}).items():
                before = earlier.get(name)
                if before is None or isinstance(each, list) != isinstance(before, list):
                    found.append(f"{_at(place)}: {name} needs other properties now")
                elif isinstance(each, list):
                    if set(map(str, each)) - set(map(str, before)):
                        found.append(f"{_at(place)}: {name} needs more properties than before")
                else:
                    found += self.compare(each, before, place)
        return found

    def _only_both(self, new: Any, old: Any, place: str, key: str) -> list[str]:
        if key not in new or _is_open(new[key]):
            return []
        if key not in old:
            return [f"{_at(place)}: {key} was added"]
        return self.compare(new[key], old[key], place)

    # Lists

    def _items(self, new: Any, old: Any, place: str) -> list[str]:
        first, rest = _tuple_of(new)
        first_old, rest_old = _tuple_of(old)
        found: list[str] = []
        for index in range(max(len(first), len(first_old))):
            now = first[index] if index < len(first) else rest
            before = first_old[index] if index < len(first_old) else rest_old
            where = f"{place}[{index}]"
            if before is False or _is_open(now):
                continue
            if now is False:
                found.append(f"item {where} was removed, and other items are not allowed")
            elif _is_open(before):
                found.append(f"item {where} was added where any item was allowed")
            else:
                found += self.compare(now, before, where)
        if first or first_old or not _is_open(rest):
            found += (
                self._others({"items": rest}, {"items": rest_old}, place, "items", "other items")
                if (_is_open(rest) or _is_open(rest_old) or rest is False)
                else self.compare(rest, rest_old, f"{place}[]")
            )
        return [*found, *self._only_both(new, old, place, "contains")]


def _is_open(part: Any) -> bool:
    """Whether a schema accepts everything."""
    return part is True or (isinstance(part, dict) and not part.keys() - _NOTES)


def _has_default(part: Any) -> bool:
    return isinstance(part, dict) and "default" in part


def _at(place: str) -> str:
    return f"field {place}" if place else "the schema"


def _word(part: Any) -> str:
    return next((key for key in _SUMS if key in part), "type")


def _strings(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _sum_of(part: Any) -> list[Any] | None:
    return next((part[key] for key in _SUMS if isinstance(part.get(key), list)), None)


def _tuple_of(part: Any) -> tuple[list[Any], Any]:
    """Return the schemas of the first items, and that of the others."""
    items = part.get("items", True)
    if isinstance(items, list):
        return items, part.get("additionalItems", True)
    return part.get("prefixItems") or [], items


def _for_name(part: Any, name: str) -> Any:
    """Return what an object requires of a property that it does not list."""
    for expression, each in (part.get("patternProperties") or {}).items():
        if _searches(expression, name):
            return each
    return part.get("additionalProperties", True)


def _searches(expression: str, name: str) -> bool:
    import re2  # linear, as the check of values

    try:
        return re2.search(expression, name) is not None
    except re2.error:
        return False


def _types(new: Any, old: Any, place: str) -> list[str]:
    now, before = _kinds(new), _kinds(old)
    if now is None:
        return []
    if before is None:
        return [f"{_at(place)}: was of any type, and is {' or '.join(sorted(now))} now"]
    gone = sorted(kind for kind in before - now if not (kind == "integer" and "number" in now))
    return [f"{_at(place)}: the type {' or '.join(gone)} is not allowed any more"] if gone else []


def _kinds(part: Any) -> set[str] | None:
    kind = part.get("type")
    if kind is None and ("enum" in part or "const" in part):
        return {_kind_of(each) for each in _allowed(part) or ()}
    return None if kind is None else {kind} if isinstance(kind, str) else set(_strings(kind))


def _kind_of(value: Any) -> str:
    names: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def _allowed(part: Any) -> list[Any] | None:
    if "const" in part:
        return [part["const"]]
    return part["enum"] if isinstance(part.get("enum"), list) else None


def _values(new: Any, old: Any, place: str) -> list[str]:
    now, before = _allowed(new), _allowed(old)
    if now is None:
        return []
    if before is None:
        return [f"{_at(place)}: its values were listed (enum) where any was allowed"]
    gone = [each for each in before if each not in now]
    return [f"{_at(place)}: {', '.join(map(repr, gone[:5]))} is not among its values any more"] if gone else []


def _limits(new: Any, old: Any, place: str) -> list[str]:
    found = [
        f"{_at(place)}: {key} is {new[key]} now{_was(old, key)}"
        for keys, is_stricter in ((_MAY_GROW, _is_less), (_MAY_SHRINK, _is_more))
        for key in keys
        if key in new and (key not in old or is_stricter(new[key], old[key]))
    ]
    multiple, before = new.get("multipleOf"), old.get("multipleOf")
    if multiple is not None and (before is None or _is_no_multiple(before, multiple)):
        found.append(f"{_at(place)}: multipleOf is {multiple} now{_was(old, 'multipleOf')}")
    if "pattern" in new and new["pattern"] != old.get("pattern"):
        found.append(f"{_at(place)}: pattern is {new['pattern']!r} now{_was(old, 'pattern')}")
    if new.get("uniqueItems") is True and old.get("uniqueItems") is not True:
        found.append(f"{_at(place)}: items must be unique now")
    return found


def _is_less(new: Any, old: Any) -> bool:
    return bool(new < old) if _are_numbers(new, old) else new is not old


def _is_more(new: Any, old: Any) -> bool:
    return bool(new > old) if _are_numbers(new, old) else new is not old


def _is_no_multiple(before: Any, multiple: Any) -> bool:
    return not _are_numbers(before, multiple) or not multiple or before % multiple != 0


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _was(old: Any, key: str) -> str:
    return f", and was {old[key]!r}" if key in old else ", and had no limit"


def _conditions(new: Any, old: Any, place: str) -> list[str]:
    if "if" not in new or all(new.get(key) == old.get(key) for key in ("if", "then", "else")):
        return []
    return [f"{_at(place)}: its conditions (if, then, else) changed"]
