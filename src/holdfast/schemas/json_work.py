"""How much work a JSON Schema makes of a value: how often its parts apply to one place, at each level of nesting.

A part of a schema leads to others in two ways. *In place* (references, allOf, if …) they apply to the same value; a
part's cost is one, plus that of all that it leads to in place. *Down* (properties, items …) they apply to the values
in it. To one child applies what all parts at its parent say about it, so the steps may grow with every level:

    steps(part, 0)         = cost(part)
    steps(part, level + 1) = the most, over the names of properties, of
                             the sum of steps(child, level) over the parts that apply to a child of that name

So a tree with left and right is not counted double, and one whose branches are tried by two alternatives is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin

from holdfast.errors import InvalidSchema
from holdfast.schemas.source import MOST_DEPTH

_MOST_COST: Final = 10_000  # parts that apply to one value
_MOST_PARTS: Final = 20_000
_MOST_STEPS: Final = 1_000_000  # at one level; a value that goes deeper is not checked
_FAR: Final = 1 << 60

_LISTS_IN_PLACE: Final = ("allOf", "anyOf", "oneOf")
_IN_PLACE: Final = ("not", "if", "then", "else")
_MAPS_IN_PLACE: Final = ("dependentSchemas", "dependencies")
_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
_OF_OBJECTS: Final = ("additionalProperties", "unevaluatedProperties", "propertyNames")
_OF_LISTS: Final = ("additionalItems", "unevaluatedItems", "contains")
_NOT_SCHEMAS: Final = frozenset({"enum", "const", "default", "examples"})


class Resources:
    """A schema and those it refers to: finds the part that a reference means, wherever it is."""

    def __init__(self, root: Any, named: Mapping[str, Any], base: str) -> None:
        self.root = root
        self.base = base
        self.named = {urljoin(base, name): each for name, each in named.items()}
        self._by_uri: dict[str, Any] = {}
        self._base_of: dict[int, str] = {}
        self._anchors: dict[str, list[Any]] = {}
        self.parts = 0
        for uri, each in ((base, root), *self.named.items()):
            self._by_uri.setdefault(uri, each)
            self._collect(each, uri)

    def _collect(self, root: Any, uri: str) -> None:
        waiting = [(root, uri)]
        while waiting:
            part, at = waiting.pop()
            if isinstance(part, dict):
                self.parts += 1
                if self.parts > _MOST_PARTS:
                    raise InvalidSchema(f"the schema has more than {_MOST_PARTS} parts: split it")
                own = part.get("$id", part.get("id"))
                if isinstance(own, str) and not own.startswith("#"):
                    at = urldefrag(urljoin(at, own))[0]
                    self._by_uri.setdefault(at, part)
                self._base_of[id(part)] = at
                for key in ("$anchor", "$dynamicAnchor"):
                    if isinstance(part.get(key), str):
                        self._by_uri.setdefault(f"{at}#{part[key]}", part)
                        if key == "$dynamicAnchor":
                            self._anchors.setdefault(part[key], []).append(part)
                waiting += [(each, at) for key, each in part.items() if key not in _NOT_SCHEMAS]
            elif isinstance(part, list):
                waiting += [(each, at) for each in part]

    def meant_by(self, part: Any, reference: str) -> Any:
        """Return the part that a reference in another part means. Raises InvalidSchema."""
        full = urljoin(self._base_of.get(id(part), self.base), reference)
        uri, fragment = urldefrag(full)
        if fragment and not fragment.startswith("/"):
            found = self._by_uri.get(full)
        else:
            found = self._pointed(self._by_uri.get(uri), fragment)
        if found is None:
            raise InvalidSchema(
                f"{reference!r} is neither in the schema nor among its references, and nothing is fetched: register it "
                "and name it there"
            )
        return found

    def dynamic(self, name: str) -> list[Any]:
        """Return the parts that a dynamic reference may mean, besides the one that it names."""
        return self._anchors.get(name, [])

    @staticmethod
    def _pointed(found: Any, pointer: str) -> Any:
        for step in pointer.split("/")[1:]:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(step)
            elif isinstance(found, list) and step.isdigit() and int(step) < len(found):
                found = found[int(step)]
            else:
                return None
        return found


class JsonWork:
    """The steps that it takes to check values against a schema, for each level of nesting."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self.patterns = 0
        self._parts: dict[int, Any] = {}
        self._costs: dict[int, int] = {}
        self._counting: set[int] = set()
        self._below: dict[int, list[Counter[int]]] = {}
        self.steps: list[int] = []
        try:
            self._count(resources.root)
        except RecursionError:
            raise InvalidSchema("the references of the schema lead too far: one leads to the next") from None

    @property
    def levels(self) -> int:
        """How deep a value may be."""
        return len(self.steps) - 1

    def most_to(self, level: int) -> int:
        """Return the most steps for one part of a value that is nested no deeper than this."""
        return max(self.steps[: level + 1]) if level < len(self.steps) else _MOST_STEPS * 1_000

    def steps_for(self, value: Any) -> int | None:
        """Return the steps for a value; None if it is nested too deeply."""
        total, parts = 0, [value]
        for steps in self.steps:
            total += steps * len(parts)
            below: list[Any] = []
            for each in parts:
                if isinstance(each, dict):
                    below.extend(each.values())
                elif isinstance(each, list):
                    below.extend(each)
            if not below:
                return total
            parts = below
        return None

    def _count(self, root: Any) -> None:
        start = self._known(root)
        waiting, edges = [start], self._below
        while waiting:
            part = waiting.pop()
            if part not in edges:
                self._cost(part)  # first: it refuses what multiplies
                edges[part] = self._children(part)
                waiting += [child for counts in edges[part] for child in counts]
        steps = {part: self._cost(part) for part in edges}
        for _ in range(MOST_DEPTH + 1):
            if steps[start] > _MOST_STEPS:
                break
            self.steps.append(max(steps[start], 1))
            steps = {
                part: min(
                    max((sum(steps[each] * times for each, times in of.items()) for of in below), default=0), _FAR
                )
                for part, below in edges.items()
            }
        self.patterns = sum(
            ("pattern" in part) + len(part.get("patternProperties") or ())
            for part in self._parts.values()
            if isinstance(part, dict)
        )

    def _known(self, part: Any) -> int:
        self._parts.setdefault(id(part), part)
        return id(part)

    def _cost(self, number: int) -> int:
        """Return how many parts apply to a value along with this one, itself included."""
        if number in self._costs:
            return self._costs[number]
        if number in self._counting:
            raise InvalidSchema(
                "a part of the schema refers to itself without going deeper into the value, so checking would never end"
            )
        self._counting.add(number)
        cost = 1
        part = self._parts[number]
        again = 2 if isinstance(part, dict) and any(key.startswith("unevaluated") for key in part) else 1
        for each in self._in_place(part):
            cost += again * self._cost(self._known(each))  # what is not evaluated is found by looking again
            if cost > _MOST_COST:
                raise InvalidSchema(
                    f"more than {_MOST_COST} parts of the schema apply to the same value: its references or choices "
                    "multiply. Simplify them"
                )
        self._counting.discard(number)
        self._costs[number] = cost
        return cost

    def _in_place(self, part: Any) -> Iterator[Any]:
        if not isinstance(part, dict):
            return
        for key in _REFERENCES:
            if isinstance(part.get(key), str):
                yield self._resources.meant_by(part, part[key])
                if key == "$dynamicRef":
                    yield from self._resources.dynamic(part[key].rpartition("#")[2])
        for key in _LISTS_IN_PLACE:
            yield from _listed(part.get(key))
        for key in _IN_PLACE:
            if key in part:
                yield part[key]
        for key in _MAPS_IN_PLACE:
            yield from (each for each in _mapped(part.get(key)).values() if not isinstance(each, list))

    def _children(self, number: int) -> list[Counter[int]]:
        """Return which parts apply to one child of a value, and how often: for each name that makes a difference."""
        named: dict[Any, Counter[int]] = {}
        of_objects: Counter[int] = Counter()
        of_lists: Counter[int] = Counter()
        for part_number, times in self._closure(number).items():
            self._add_children(self._parts[part_number], times, named, of_objects, of_lists)
        found = [counts + (of_lists if isinstance(key, int) else of_objects) for key, counts in named.items()]
        return [*found, of_objects, of_lists]

    def _add_children(
        self, part: Any, times: int, named: dict[Any, Counter[int]], of_objects: Counter[int], of_lists: Counter[int]
    ) -> None:
        if not isinstance(part, dict):
            return
        for name, each in _mapped(part.get("properties")).items():
            named.setdefault(name, Counter())[self._known(each)] += times
        for each in _mapped(part.get("patternProperties")).values():
            of_objects[self._known(each)] += times
        for key in _OF_OBJECTS:
            if key in part:
                of_objects[self._known(part[key])] += times
        for key in ("prefixItems", "items"):
            for index, each in enumerate(_listed(part.get(key))):
                named.setdefault(index, Counter())[self._known(each)] += times
        if not isinstance(part.get("items", []), list):
            of_lists[self._known(part["items"])] += times
        for key in _OF_LISTS:
            if key in part:
                of_lists[self._known(part[key])] += times

    def _closure(self, number: int) -> Counter[int]:
        """Return the parts that apply along with this one, and how often."""
        found = Counter({number: 1})
        waiting = [number]
        while waiting:
            for each in self._in_place(self._parts[waiting.pop()]):
                found[self._known(each)] += 1
                waiting.append(id(each))
        return found


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else ()


def _mapped(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
