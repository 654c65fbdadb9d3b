"""The table of routes for docs/reference/http.md, and their requests and responses for http-values.md.

`python -m tests.tidy.http_reference --write` renews both pages; without `--write` it prints the first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from inspect import getdoc
from typing import Any

import msgspec

from holdfast.client import spark_commits
from holdfast.protocol.media import JSON
from holdfast.server.api.admin import audit_routes, description_routes, metrics_routes
from holdfast.server.routing import Route
from holdfast.server.server import API
from tests.tidy.repo import ROOT, with_part

PAGE = ROOT / "docs" / "reference" / "http.md"
VALUES = ROOT / "docs" / "reference" / "http-values.md"
BEGIN = "<!-- {name}: made by `python -m tests.tidy.http_reference --write` from the table of routes -->"
END = "<!-- end of {name} -->"

# Every call on a queue or a topic may answer with these; the page says so once.
EVERYWHERE = ("unknown_topic", "unknown_group")

Schema = dict[str, Any]


def all_routes() -> list[Route]:
    """What `holdfast serve` answers to, but for the pages for people."""
    more = (
        metrics_routes(lambda accept: (b"", accept), asks=True),
        audit_routes(None),  # type: ignore[arg-type]  nothing is called here
        description_routes(list),
        spark_commits.routes,
    )
    return [route for routes in (*API, *more) for route in routes.all if not route.hidden]


def tags() -> list[str]:
    return list(dict.fromkeys(route.tag for route in all_routes()))


def with_routes(page: str) -> str:
    """The page, with every part between two marks made anew."""
    for tag in tags():
        page = _renewed(page, tag, table(tag))
    return page


def with_values(page: str) -> str:
    """The same for the page of values."""
    return _renewed(page, "values", values())


def _renewed(page: str, name: str, made: str) -> str:
    return with_part(page, BEGIN.format(name=name), END.format(name=name), made)


def table(tag: str) -> str:
    """A row for each route: the call, who may, what goes in, what comes out, how it may fail."""
    lines = ["| call | right | request | response | errors | |", "|---|---|---|---|---|---|"]
    for route in all_routes():
        if route.tag == tag:
            codes = dict.fromkeys(code for code in route.errors if code not in EVERYWHERE)
            errors = ", ".join(f"[`{code}`](errors.md#{code})" for code in codes)
            cells = (
                f"`{route.method} {route.pattern}`",
                ", ".join(filter(None, (route.action, route.also))),
                _takes(route),
                _answers(route),
                errors,
            )
            lines.append(f"| {' | '.join(cells)} | {route.summary} |")
    return "\n".join(lines)


def _takes(route: Route) -> str:
    parts = [_link(kind) for kind in (route.body, route.content) if kind is not None]
    parts += [f"`{media}`" for media in route.takes if media != JSON]
    if route.query is not None and route.query.__struct_fields__:
        parts.append(f"?{_link(route.query)}")
    return ", ".join(parts)


def _answers(route: Route) -> str:
    parts = [_link(route.answers)] if route.answers is not None else []
    parts += [f"`{media}`" for media in route.gives]
    return f"{route.status if parts else 204} {', '.join(parts)}".strip()


def _link(kind: type) -> str:
    return f"[{kind.__name__}](http-values.md#{kind.__name__.lower()})"


def values() -> str:
    """Every struct that goes over the wire, with its fields."""
    asked: dict[str, type] = {}
    for route in all_routes():
        for kind in (route.body, route.content, route.query, route.answers):
            if kind is not None and getattr(kind, "__struct_fields__", ()):
                asked[kind.__name__] = kind
    _, components = msgspec.json.schema_components(list(asked.values()), ref_template="{name}")
    parts = [_value(name, components[name], asked.get(name)) for name in sorted(components)]
    return "\n\n".join(part for part in parts if part)


def _value(name: str, schema: Schema, kind: type | None) -> str:
    fields = schema.get("properties", {})
    if not fields:
        return ""
    said = schema.get("description") or (getdoc(kind) if kind is not None else "") or ""
    lines = [f"## {_short(name)}", "", " ".join(said.split()), "", "| field | type | default |", "|---|---|---|"]
    if not said:
        del lines[2:4]
    for field, its in fields.items():
        default = "required" if field in schema.get("required", ()) else _default(its)
        lines.append(f"| `{field}` | {_type(its)} | {default} |")
    return "\n".join(lines)


def _short(name: str) -> str:
    """A name with its whole module is one that two structs have."""
    return ".".join(name.split(".")[-2:])


def _default(schema: Schema) -> str:
    value = schema.get("default")
    return "" if value is None or value in ("", [], {}) else f"`{msgspec.json.encode(value).decode()}`"


def _type(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"] if each.get("type") != "null")
    if "$ref" in schema:
        return f"[{_short(schema['$ref'])}](#{_short(schema['$ref']).replace('.', '').lower()})"
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        counts = [f"({each})" for each in _range(schema, "minItems", "maxItems")]
        return " ".join(["list", *counts, "of", _type(schema.get("items") or {})])
    if kind == "object":
        inner = schema.get("additionalProperties")
        return f"map to {_type(inner)}" if isinstance(inner, dict) and inner else "map"
    if schema.get("contentEncoding") == "base64":
        return "bytes"
    if schema.get("format") == "date-time":
        return "time"
    named = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false"}
    limits = [*_range(schema, "minimum", "maximum"), *_range(schema, "minLength", "maxLength", of=" characters")]
    return " ".join([named.get(str(kind), "any value"), *limits])


def _range(schema: Schema, least: str, most: str, of: str = "") -> Iterable[str]:
    low, above, high = schema.get(least), schema.get("exclusiveMinimum"), schema.get(most)
    if above is not None and least == "minimum":
        yield f"over {above:,}" if high is None else f"over {above:,}, at most {high:,}"
    elif low is not None and high is not None:
        yield f"{low:,} to {high:,}{of}"
    elif high is not None:
        yield f"up to {high:,}{of}"
    elif low is not None:
        yield f"at least {low:,}{of}"


if __name__ == "__main__":
    renewed = with_routes(PAGE.read_text("utf-8"))
    if "--write" in sys.argv[1:]:
        PAGE.write_text(renewed, "utf-8")
        VALUES.write_text(with_values(VALUES.read_text("utf-8")), "utf-8")
    else:
        sys.stdout.write(renewed)
