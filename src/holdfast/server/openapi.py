"""The OpenAPI document, generated from the table of routes, and a page for people made from it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from inspect import getdoc
from typing import Any, Final, TypeAlias

import msgspec

import holdfast
from holdfast.errors import NotInstalled
from holdfast.protocol.media import EVENTS, FRAMES, JSON, KINDS, LINES, MSGPACK, MULTIPART, RAW, ErrorAnswer
from holdfast.protocol.messages import Name, Options
from holdfast.protocol.schemas import REGISTRY
from holdfast.server.routing import Route, status_of_code

# Values for the examples in the API description, by field or parameter.
EXAMPLES: Final[dict[str, Any]] = {
    "queue": "orders",
    "topic": "orders",
    "name": "orders",
    "group": "billing",
    "member": "billing-5f3a91c2",
    "worker": "mailer-1",
    "partition": 0,
    "id": "orders-0-17",
    "message_id": "orders-0-17",
    "topics": ["orders"],
    "messages": [{"json": {"order": 17}, "key": "customer-9"}],
    "receipt": "orders-0-17@AQAAAYAAAAAB6LtztPWVZjgOR8bOslIm",
    "receipts": ["orders-0-17@AQAAAYAAAAAB6LtztPWVZjgOR8bOslIm"],
    "offsets": [{"topic": "orders", "partition": 0, "offset": 18}],
    "settings": {"max_attempts": 5},
    "producer": "5577006791947779410",
    "fence": 1649267441665,
    "value": {"step": 2},
}
_TYPES: Final[dict[str, Any]] = {
    "string": "text",
    "integer": 1,
    "number": 1.0,
    "boolean": True,
    "array": [],
    "object": {},
}
_ALWAYS_SHOWN: Final = ("messages", "settings", "value")


def example(schema: dict[str, Any]) -> dict[str, Any]:
    """An example of a body, with all required fields."""
    properties, required = schema["properties"], schema["required"]
    return {
        name: EXAMPLES[name] if name in EXAMPLES else _of(each)
        for name, each in properties.items()
        if name in required or name in _ALWAYS_SHOWN
    }


def _of(schema: dict[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    return schema.get("minimum", _TYPES.get(schema.get("type", ""), "text"))


Node: TypeAlias = dict[str, Any]

_REFERENCE: Final = "#/components/schemas/{name}"
_BINARY: Final[Node] = {"type": "string", "format": "binary"}
_TEXT: Final[Node] = {"type": "string"}
_OBJECT: Final[Node] = {"type": "object"}
_VARIABLE: Final = re.compile(r"{(\w+)}")
_NAME: Final[Node] = msgspec.json.schema(Name)
_PATH: Final[dict[str, Node]] = {
    "queue": _NAME,
    "topic": _NAME,
    "group": _NAME,
    "partition": {"type": "integer", "minimum": 0, "maximum": 10_000},
}
_REFUSED: Final[dict[int, str]] = {
    400: "The request cannot work as it is: change it.",
    401: "`unauthenticated`: the server does not know who is calling; send `Authorization: Bearer ...`.",
    403: "`forbidden`: the caller may not do this.",
    408: "The request arrived too slowly.",
    413: "The request's body is too large.",
    415: "The content type or encoding is not supported.",
    422: "The subject, the version or the level cannot be used, in the way of the registry.",
    429: "Too much at once: try again after a while.",
    431: "The request's headers are too large.",
    500: "The server failed, or found damaged data; see its log.",
    503: "The server is shutting down, or has too many connections: try again after a while.",
    507: "`disk_full`: the disk is full; nothing of this call was stored.",
}
_ABOUT: Final = """
The API of a Holdfast server.

Request and response bodies are JSON or MessagePack, chosen by `Content-Type` and `Accept`; bytes are base64 in JSON
and raw in MessagePack. Every response has an `x-correlation-id`: that of the request, if it has one. A `traceparent`
(W3C trace context) is accepted and kept with messages, and the response has a child of it.

The body of every error response is `{"error": {"code": ..., "message": ..., "retryable": ..., "facts": {...}}}`.
Codes are stable.
"""


def document(routes: Iterable[Route]) -> Node:
    """The description of all routes that are not hidden."""
    shown = [route for route in routes if not route.hidden]
    kinds = _kinds(shown)
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    writer = _Writer({id(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}, components)
    paths: dict[str, Node] = {}
    for route in shown:
        paths.setdefault(route.pattern, {})[route.method.lower()] = writer.operation(route)
    bodies = [route.body for route in shown]
    for route in shown:  # query structs are described parameter by parameter
        if route.query is not None and route.query not in bodies:
            components.pop(route.query.__name__, None)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Holdfast", "version": holdfast.__version__, "description": _ABOUT.strip()},
        "servers": [{"url": "/"}],
        "tags": [{"name": tag} for tag in dict.fromkeys(route.tag for route in shown)],
        "security": [{"token": []}, {}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _kinds(routes: Sequence[Route]) -> list[Any]:
    found: list[Any] = [ErrorAnswer, Options]
    for route in routes:
        found += [kind for kind in (route.body, route.content, route.query, route.answers) if kind is not None]
    return list({id(kind): kind for kind in found}.values())


class _Writer:
    """Writes down one route after the other."""

    def __init__(self, schemas: dict[int, Node], components: dict[str, Node]) -> None:
        self._schemas = schemas
        self._components = components

    def operation(self, route: Route) -> Node:
        found: Node = {
            "operationId": _operation_id(route),
            "tags": [route.tag],
            "summary": route.summary,
            "description": _description(route),
            "parameters": [*map(_variable, _VARIABLE.findall(route.pattern)), *self._query(route)],
            "responses": self._responses(route),
            "x-action": route.action,
        }
        if route.action == "open":
            found["security"] = []
        body = self._body(route)
        if body is not None:
            found["requestBody"] = body
        return found

    def _query(self, route: Route) -> Iterable[Node]:
        if route.query is None:
            return
        described = self._components[route.query.__name__]
        for name, schema in described["properties"].items():
            yield {
                "name": name,
                "in": "query",
                "required": name in described["required"],
                "schema": _without_null(schema),
            }

    def _body(self, route: Route) -> Node | None:
        kind = route.body if route.body is not None else route.content
        content: dict[str, Node] = {}
        if kind is not None:
            schema = self._schemas[id(kind)]
            content = {media: {"schema": schema} for media in (JSON, MSGPACK)}
            content[JSON]["example"] = example(self._components[kind.__name__])
            if LINES in route.takes:
                content[LINES] = {"schema": _TEXT}
        if RAW in route.takes:
            content[RAW] = {"schema": _BINARY}
        if MULTIPART in route.takes:
            content[MULTIPART] = {"schema": self._form(), "encoding": {"options": {"contentType": JSON}}}
        if not content:
            return None
        needed = kind is not None and (route.content is not None or bool(self._required(kind)))
        return {"required": needed, "content": content}

    def _form(self) -> Node:
        return {
            "type": "object",
            "properties": {"options": self._schemas[id(Options)], "payload": _BINARY},
            "required": ["payload"],
        }

    def _required(self, kind: Any) -> list[str]:
        found: list[str] = self._components[kind.__name__]["required"]
        return found

    def _responses(self, route: Route) -> Node:
        found: Node = {str(route.status): {"description": _success(route), **self._answers(route)}}
        if RAW in route.gives:
            found["204"] = {"description": "No message was ready in time (if the response is the message itself)."}
        statuses = {400, 408, 431, 500, 503}
        if route.action != "open":
            statuses |= {401, 403}
        if route.body is not None or route.content is not None or route.takes:
            statuses |= {413, 415}
        if route.act:
            statuses.add(507)
        codes = {code: status_of_code(code) for code in _codes(route)}
        if route.pattern.startswith(REGISTRY):
            statuses.add(422)
        for status in sorted(statuses | set(codes.values())):
            texts = [f"`{code}`: {_meaning(code)}" for code, its in codes.items() if its == status]
            found[str(status)] = self._refusal([_REFUSED[status], *texts] if status in _REFUSED else texts)
        return found

    def _answers(self, route: Route) -> Node:
        content: dict[str, Node] = {}
        if route.answers is not None and route.plain:
            schema = self._schemas[id(route.answers)]
            content = {media: {"schema": schema} for media in (JSON, MSGPACK)}
        for media in route.gives:
            content[media] = {"schema": _BINARY if media in (RAW, FRAMES) else _OBJECT if media == JSON else _TEXT}
        return {"content": content} if content else {}

    def _refusal(self, texts: list[str]) -> Node:
        schema = self._schemas[id(ErrorAnswer)]
        return {
            "description": "\n\n".join(texts),
            "content": {media: {"schema": schema} for media in (JSON, MSGPACK)},
        }


def _codes(route: Route) -> list[str]:
    """The error codes of a route, without those that every route has."""
    found = [*route.errors]
    if route.named in ("queue", "topic"):
        found += ["unknown_topic", "unknown_group"] if route.named == "queue" else ["unknown_topic"]
    return list(dict.fromkeys(found))


def _meaning(code: str) -> str:
    text = getdoc(KINDS[code]) or ""
    return " ".join(text.split("\n\n")[0].split())


def _variable(name: str) -> Node:
    schema = _PATH.get(name, {"type": "string", "minLength": 1, "maxLength": 300})
    return {"name": name, "in": "path", "required": True, "schema": schema, "example": EXAMPLES.get(name, name)}


def _without_null(schema: Node) -> Node:
    """The schema of a query parameter: never null, and a time may also be given in seconds since 1970."""
    found = {name: value for name, value in schema.items() if name != "default" or value is not None}
    choices = [each for each in found.pop("anyOf", ()) if each.get("type") != "null"]
    if any(each.get("format") == "date-time" for each in choices):
        choices.append({"type": "number"})
    if not choices:
        return found
    return {**found, **choices[0]} if len(choices) == 1 else {**found, "anyOf": choices}


def _operation_id(route: Route) -> str:
    return f"{route.tag}.{route.handler.__name__}".replace(" ", "_")


def _rights(route: Route) -> str:
    return route.action if route.also is None else f"{route.action}** and **{route.also}"


def _description(route: Route) -> str:
    needs = "open to all" if route.action == "open" else f"needs the right to **{_rights(route)}**"
    written = "; written to the audit log" if route.act else ""
    more = (getdoc(route.handler) or "").partition("\n")[2].strip()
    said = f"{more}\n\n" if more else ""
    events = "\n\nThe response continues until the caller ends it." if EVENTS in route.gives or not route.plain else ""
    return f"{said}{needs[:1].upper()}{needs[1:]}{written}.{events}"


def _success(route: Route) -> str:
    if route.answers is None:
        return "Done." if not route.gives else route.summary
    return " ".join((getdoc(route.answers) or "Done.").split("\n\n")[0].split())


# The API description as a self-contained page: no scripts, no other files.

_CODE: Final = re.compile(r"`([^`]+)`")
_STRONG: Final = re.compile(r"\*\*([^*]+)\*\*")
_MOST_SHOWN: Final = 12


class Field(msgspec.Struct, frozen=True):
    """A parameter, or a field of a body or an answer."""

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
    """The API description as an HTML page. Raises NotInstalled without jinja2."""
    try:
        from jinja2 import Environment, PackageLoader
    except ImportError:  # a process that only shares its folder may run without the server's packages
        raise NotInstalled("this page needs jinja2; run: pip install 'holdfast[server]'") from None
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
    named = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    for name, each in named.get("properties", {}).items():
        default = each.get("default")
        about = "" if default in (None, "", [], {}) else f"default {json.dumps(default)}"
        yield Field(name, _kind(each), name in named.get("required", ()), about)


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
    """An example call as a curl command."""
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


def _prose(text: str) -> Any:
    """Text with a little Markdown as HTML. Everything else in it is escaped."""
    from markupsafe import Markup, escape

    paragraphs = []
    for part in text.split("\n\n"):
        coded = _CODE.sub(r"<code>\1</code>", str(escape(part)))
        paragraphs.append("<p>" + _STRONG.sub(r"<strong>\1</strong>", coded) + "</p>")
    return Markup("".join(paragraphs))  # escaped above
