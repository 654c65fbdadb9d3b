"""The description of the API as one page that needs nothing else: no script, no file, no network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from holdfast.protocol.errors import KINDS
from holdfast.protocol.media import JSON, RAW
from holdfast.server.routing import status_of_code

_CODE: Final = re.compile(r"`([^`]+)`")
_STRONG: Final = re.compile(r"\*\*([^*]+)\*\*")
_MOST_SHOWN: Final = 12


class Field(msgspec.Struct, frozen=True):
    """One thing that can be said in a call, or is said in an answer."""

    name: str
    kind: str
    required: bool
    about: str


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One route, as the page shows it."""

    id: str
    method: str
    path: str
    summary: str
    description: str
    parameters: list[Field]
    body: list[Field]
    answer: list[Field]
    media: list[str]
    curl: str
    responses: dict[str, str]


def page(document: dict[str, Any]) -> str:
    """The page."""
    environment = Environment(loader=PackageLoader("holdfast.server", "templates"), autoescape=True)
    environment.filters["prose"] = _prose
    sections: dict[str, list[Operation]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            sections.setdefault(operation["tags"][0], []).append(_operation(document, method, path, operation))
    codes = sorted((code, status_of_code(code), _first_line(kind)) for code, kind in KINDS.items() if code != "error")
    return environment.get_template("docs.html").render(info=document["info"], sections=sections, codes=codes)


def _operation(document: dict[str, Any], method: str, path: str, operation: dict[str, Any]) -> Operation:
    success = next(iter(operation["responses"].values()))
    content = operation.get("requestBody", {}).get("content", {})
    return Operation(
        id=operation["operationId"],
        method=method.upper(),
        path=path,
        summary=operation["summary"],
        description=operation["description"],
        parameters=[
            Field(each["name"], f"{_kind(each['schema'])} ({each['in']})", each["required"], "")
            for each in operation["parameters"]
        ],
        body=list(_fields(document, content.get(JSON, {}).get("schema"))),
        answer=list(_fields(document, success.get("content", {}).get(JSON, {}).get("schema"))),
        media=[*content],
        curl=_curl(method.upper(), path, operation),
        responses={status: each["description"] for status, each in operation["responses"].items()},
    )


def _fields(document: dict[str, Any], schema: dict[str, Any] | None) -> Iterator[Field]:
    if schema is None or "$ref" not in schema:
        return
    told = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    for name, each in told.get("properties", {}).items():
        default = each.get("default")
        about = "" if default in (None, "", [], {}) else f"default {json.dumps(default)}"
        yield Field(name, _kind(each), name in told.get("required", ()), about)


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(each) for each in schema["anyOf"] if each.get("type") != "null"))
    if "enum" in schema:
        return " | ".join(json.dumps(each) for each in schema["enum"][:_MOST_SHOWN])
    kind = str(schema.get("type", "any value"))
    if kind == "array":
        items = schema.get("items") or {}
        return f"list of {_kind(items)}" if items else "list"
    if schema.get("contentEncoding") == "base64":
        return "bytes (base64)"
    limits = [f"{sign} {schema[name]}" for name, sign in (("minimum", "≥"), ("maximum", "≤")) if name in schema]
    return " ".join([str(schema.get("format", kind)), *limits])


def _curl(method: str, path: str, operation: dict[str, Any]) -> str:
    """A call that can be copied into a shell."""
    for each in operation["parameters"]:
        path = path.replace(f"{{{each['name']}}}", str(each.get("example", "")))
    asked = "&".join(f"{each['name']}=..." for each in operation["parameters"] if _is_asked(each))
    parts = ["curl", f'"$HOLDFAST_URL{path}{f"?{asked}" if asked else ""}"']
    if method not in ("GET", "POST"):
        parts.insert(1, f"-X {method}")
    content = operation.get("requestBody", {}).get("content", {})
    if JSON in content:
        parts += ["-H 'content-type: application/json'", f"-d '{json.dumps(content[JSON].get('example', {}))}'"]
    elif RAW in content:
        parts += ["--data-binary 'hello'"]
    elif method == "POST":
        parts.insert(1, "-X POST")
    return " ".join(parts)


def _is_asked(parameter: dict[str, Any]) -> bool:
    return parameter["in"] == "query" and bool(parameter["required"])


def _first_line(kind: type[Exception]) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def _prose(text: str) -> Markup:
    """A few words in Markdown as HTML; whatever else is in them stays text."""
    paragraphs = []
    for part in text.split("\n\n"):
        coded = _CODE.sub(r"<code>\1</code>", str(escape(part)))
        paragraphs.append("<p>" + _STRONG.sub(r"<strong>\1</strong>", coded) + "</p>")
    return Markup("".join(paragraphs))  # escaped above
