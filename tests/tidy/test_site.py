"""`make docs` builds a site of every page, with the API from its docstrings, that needs no network."""

from __future__ import annotations

import importlib
import inspect
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.tidy.repo import ROOT, assert_none, name_of
from tests.tidy.site import built
from tests.tidy.test_docs import INTERNAL

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory)


def test_every_page_of_the_docs_is_in_the_site(site: Path):
    pages = sorted((ROOT / "docs").rglob("*.md"))
    places = {page: site / page.relative_to(ROOT / "docs").with_suffix(".html") for page in pages}
    missing = [
        name_of(page)
        for page, place in places.items()
        if not (place.with_name("index.html") if page.name == "README.md" else place).is_file()
    ]
    assert_none(missing, "These pages are not in the site.")


def test_no_page_loads_anything_from_elsewhere(site: Path):
    faults = [
        f"{page.relative_to(site)}: {url}"
        for page in site.rglob("*.html")
        for url in loaded(page.read_text("utf-8"))
        if re.match(r"(https?:)?//", url)
    ]
    assert_none(faults, "The site is read without a network: put these files into docs/.")


def test_the_list_of_versions_names_what_is_built(site: Path):
    assert '<a href="0.0/index.html">Holdfast 0.0</a>' in (site.parent / "index.html").read_text("utf-8")


def test_every_public_class_is_in_the_api_reference_with_its_methods(site: Path):
    faults = []
    for package, page in (("holdfast", "python-api"), ("holdfast.aio", "python-api-asyncio")):
        module = importlib.import_module(package)
        ids = set(anchors((site / "reference" / f"{page}.html").read_text("utf-8")))
        for name in module.__all__:
            wanted = [f"{package}.{found}" for found in documented(name, getattr(module, name))]
            faults += [member for member in wanted if member not in ids]
    assert_none(faults, "Add a line `::: holdfast.Name` for each of these to docs/reference/python-api.md.")


def test_every_error_code_is_an_anchor_of_the_errors_page(site: Path):
    codes = importlib.import_module("holdfast.protocol.media").KINDS
    there = set(anchors((site / "reference" / "errors.html").read_text("utf-8")))
    assert [code for code in codes if code not in there] == []


def documented(name: str, value: object) -> list[str]:
    """The names that the reference has for an exported one; settings and errors have pages of their own."""
    if inspect.isfunction(value):
        return [name]
    if not inspect.isclass(value) or issubclass(value, Exception) or name.endswith("Settings"):
        return []
    methods = [method for method, _ in inspect.getmembers(value, inspect.isfunction)]
    return [name, *(f"{name}.{method}" for method in methods if not method.startswith("_") and method not in INTERNAL)]


class _Loaded(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids.append(found.get("id", ""))
        if tag in {"img", "script", "iframe", "source"}:
            self.urls.append(found.get("src", ""))
        if tag == "link" and found.get("rel") not in {"canonical", "next", "prev"}:
            self.urls.append(found.get("href", ""))


def loaded(html: str) -> list[str]:
    """What a browser fetches by itself to show a page."""
    parser = _Loaded()
    parser.feed(html)
    return parser.urls


def anchors(html: str) -> list[str]:
    parser = _Loaded()
    parser.feed(html)
    return parser.ids
