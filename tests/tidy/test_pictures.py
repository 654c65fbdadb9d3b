"""The pictures of the docs can be read in light and dark, by people who cannot see them too, and are shown."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.tidy import markdown
from tests.tidy.repo import ROOT, assert_none, files, name_of

IMAGES = ROOT / "docs" / "images"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("picture", sorted(IMAGES.glob("*.svg")), ids=name_of)
def test_a_drawing_is_described_has_a_dark_form_and_loads_nothing(picture: Path):
    text = picture.read_text("utf-8")
    root = ET.fromstring(text)
    assert all(root.findtext(f"{SVG}{tag}") for tag in ("title", "desc"))
    assert "prefers-color-scheme: dark" in text
    assert root.find(f"{SVG}rect[@class='back']") is not None  # its own ground: readable on any page
    assert re.findall(r"(?:href|src)=|url\((?!#)|@import|<script", text) == []


def test_every_drawing_is_shown_somewhere_and_every_picture_is_described():
    shown: set[Path] = set()
    faults = []
    for page in files():
        if page.suffix == ".md":
            text = page.read_text("utf-8")
            shown |= {(page.parent / target).resolve() for _, target in markdown.links(text)}
            faults += [f"{name_of(page)}: a picture without a description" for _ in re.findall(r"!\[\]\(", text)]
    unused = [name_of(path) for path in sorted(IMAGES.glob("*.svg")) if path not in shown]
    assert_none(faults + unused, "Show these pictures on a page, with a text for those who cannot see them.")
