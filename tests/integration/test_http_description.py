"""The description of the API: it tells of every route, holds together, and can be read without a network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import validate

from holdfast.protocol.media import KINDS
from tests.integration.http_gear import Serving, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("description") / "data") as found:
        yield found


@pytest.fixture(scope="module")
def document(server: Serving) -> dict[str, Any]:
    answer = server.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    found: dict[str, Any] = answer.body
    return found


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        for name, value in node.items():
            if name == "$ref":
                yield value
            yield from references(value)
    elif isinstance(node, list):
        for each in node:
            yield from references(each)


def test_the_document_is_valid(document: dict[str, Any]) -> None:
    validate(document)
    assert document["openapi"] == "3.1.0"


def test_every_route_is_described(server: Serving, document: dict[str, Any]) -> None:
    shown = {(route.method, route.pattern) for route in server.server.app.router.routes if not route.hidden}
    assert {(method, path) for method, path, _ in operations(document)} == shown
    assert all(operation["summary"] for _, _, operation in operations(document))


def test_only_pages_for_people_are_hidden(server: Serving) -> None:
    hidden = {route.pattern for route in server.server.app.router.routes if route.hidden}
    assert all(not pattern.startswith("/v1") for pattern in hidden)


def test_every_part_that_is_referred_to_is_there_and_none_is_left_over(document: dict[str, Any]) -> None:
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) == known


def test_every_operation_has_a_name_of_its_own(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(names) == len(set(names))


def test_every_error_that_a_route_names_is_told_with_its_status(server: Serving, document: dict[str, Any]) -> None:
    for route in server.server.app.router.routes:
        if not route.hidden:
            responses = document["paths"][route.pattern][route.method.lower()]["responses"]
            descriptions = " ".join(each["description"] for each in responses.values())
            assert all(code in KINDS and f"`{code}`" in descriptions for code in route.errors), route.pattern


def test_the_page_shows_every_call_and_every_code_and_loads_nothing(server: Serving, document: dict[str, Any]) -> None:
    answer = server.get("/docs")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    page = answer.body.decode()
    for _, path, operation in operations(document):
        assert path in page
        assert f'id="{operation["operationId"]}"' in page
    assert all(code in page for code in KINDS)
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r"(src=|<script|<link|@import|url\()", page)
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_the_reference_lists_every_call(document: dict[str, Any]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text()
    missing = [f"{method} {path}" for method, path, _ in operations(document) if f"`{method} {path}`" not in text]
    assert missing == [], "add each of these, as code, to docs/reference/http.md"


def test_the_examples_of_the_page_work(server: Serving, document: dict[str, Any]) -> None:
    """Those that need nothing but a queue: they are sent as they are told."""
    server.request("PUT", "/v1/queues/orders", {})
    for method, path, operation in operations(document):
        if path in ("/v1/queues/{queue}/batch", "/v1/topics/{topic}/messages", "/v1/producers"):
            example = operation["requestBody"]["content"]["application/json"]["example"]
            answer = server.request(method, path.replace("{queue}", "orders").replace("{topic}", "orders"), example)
            assert answer.status == 201, (path, answer)
