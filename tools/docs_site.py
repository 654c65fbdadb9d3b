"""What MkDocs cannot do by settings alone: the navigation, files outside docs/, the versions beside each other.

The navigation is read from docs/README.md, which lists every page for those who read in the repository: one list for
both. A page links to programs, tests and results outside docs/ by their paths in the repository; each of those becomes
a page of the site, so that it can be read without the repository and without a network.
"""

from __future__ import annotations

import html
import os.path
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs"
INTERNALS = ROOT / DOCS / "internals" / "README.md"
OUTSIDE = "repository"  # the folder of the site for what lies outside docs/
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".service": "ini"}

VERSIONS = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<title>Holdfast documentation</title>
<h1>Holdfast documentation</h1>
<ul>
{rows}
</ul>
</html>
"""

_FENCE = re.compile(r"^ *(`{3,}|~{3,})")
_LINK = re.compile(r"(?P<open>!?\[)(?P<text>(?:[^\[\]]|!?\[[^\]]*\])*)\]\((?P<target>[^)\s]+)(?P<after>[^)]*\))")
_FOREIGN = re.compile(r"[a-z][a-z0-9+.-]*:|//|#", re.IGNORECASE)
_VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name the version, and take the navigation from the index."""
    config.site_name = f"Holdfast {version()}"
    config.nav = navigation((ROOT / DOCS / "README.md").read_text("utf-8"))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to outside docs/, and what that links to."""
    waiting = [f"{DOCS}/{file.src_uri}" for file in files.documentation_pages()]
    seen: set[str] = set()
    while waiting:
        page = waiting.pop()
        for _, target in links((ROOT / page).read_text("utf-8")):
            found = path_of(page, target)
            if found and (ROOT / found).is_file() and not inside(found) and found not in seen:
                seen.add(found)
                files.append(outside_file(found, config))
                if found.endswith(".md"):
                    waiting.append(found)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave docs/ to the pages made of those files."""
    here = source_of(page.file.src_uri)
    if page.file.src_uri.startswith(OUTSIDE) and not here.endswith(".md"):
        return markdown  # a program, shown as it is

    def pointed(match: re.Match[str]) -> str:
        path = path_of(here, match["target"])
        text = _LINK.sub(pointed, match["text"])  # an image that is a link
        if path is None or (inside(path) and inside(here)):
            return match[0].replace(match["text"], text, 1)
        if not (ROOT / path).is_file():
            return text  # a folder: it is named, and cannot be shown
        to = path.removeprefix(f"{DOCS}/") if inside(path) else place_of(path)
        anchor = match["target"].partition("#")[2]
        target = os.path.relpath(to, os.path.dirname(page.file.src_uri)) + (f"#{anchor}" if anchor else "")
        return f"{match['open']}{text}]({target}{match['after']}"

    return "\n".join(_LINK.sub(pointed, line) if prose else line for line, prose in lines(markdown))


def on_post_build(*, config: MkDocsConfig) -> None:
    """List the versions that lie beside this one; the list, like the pages, is read from disk as well."""
    folder = Path(config.site_dir).parent
    names = sorted((page.parent.name for page in folder.glob("*/index.html")), key=number, reverse=True)
    rows = "\n".join(
        f'<li><a href="{html.escape(name)}/index.html">Holdfast {html.escape(name)}</a></li>' for name in names
    )
    (folder / "index.html").write_text(VERSIONS.format(rows=rows), "utf-8")


def version() -> str:
    """The version of the package."""
    found = _VERSION.search((ROOT / "src" / "holdfast" / "__init__.py").read_text("utf-8"))
    assert found is not None
    return found[1]


def number(name: str) -> list[tuple[int, str]]:
    """A version for sorting: 0.10 comes after 0.9."""
    return [(int(part) if part.isdigit() else -1, part) for part in name.split(".")]


def navigation(index: str) -> list[Any]:
    """The sections of an index with the pages that they link to; a paragraph that begins in bold is a section, too."""
    nav: list[Any] = ["README.md"]
    pages: list[Any] = []
    seen: set[str] = set()
    for line in index.splitlines():
        heading, group = re.match(r"## (.+)", line), re.match(r"\*\*(.+?)\*\*", line)
        if heading:
            section: list[Any] = []
            nav.append({heading[1]: section})
            pages = section
        elif group:
            pages = []
            section.append({group[1]: pages})
        for _, target in links(line) if len(nav) > 1 else ():
            path = target.partition("#")[0]
            if path.endswith(".md") and not path.startswith("..") and path not in seen:
                seen.add(path)
                pages.append(path)
        if heading and heading[1] == "Internals":  # these have an index of their own, which lists them all
            beside = (path_of("internals/README.md", target) for _, target in links(INTERNALS.read_text("utf-8")))
            more = [path for path in beside if path and path.startswith("internals/") and path.endswith(".md")]
            later = [path for path in dict.fromkeys(more) if f"]({path})" not in index]
            pages += later
            seen.update(later)
    nav = [entry for entry in nav if isinstance(entry, str) or next(iter(entry.values()))]
    decisions = sorted(f"decisions/{page.name}" for page in (ROOT / DOCS / "decisions").glob("0*.md"))
    return [*nav, {"Decisions": ["decisions/README.md", *decisions]}]


def lines(markdown: str) -> Iterator[tuple[str, bool]]:
    """The lines, and whether each is prose: outside of fenced blocks."""
    mark = ""
    for line in markdown.split("\n"):
        found = _FENCE.match(line)
        if not mark:
            mark = found[1] if found else ""
            yield line, not found
        else:
            if found and found[1].startswith(mark) and line.strip() == found[1]:
                mark = ""
            yield line, False


def links(markdown: str) -> Iterator[tuple[str, str]]:
    """The links of a page: what they say, and where they lead."""
    for line, prose in lines(markdown):
        if prose:
            for match in _LINK.finditer(line):
                yield from links(match["text"])
                yield match["text"], match["target"]


def path_of(page: str, target: str) -> str | None:
    """The path in the repository that a link on a page leads to; none if it leads elsewhere."""
    if _FOREIGN.match(target):
        return None
    return os.path.normpath(os.path.join(os.path.dirname(page), target.partition("#")[0]))


def inside(path: str) -> bool:
    return path.startswith(f"{DOCS}/")


def place_of(path: str) -> str:
    """The page of the site that shows a file outside docs/."""
    if path.endswith((".md", ".png", ".svg")):
        return f"{OUTSIDE}/{path}"
    return f"{OUTSIDE}/{path}.md"


def source_of(src_uri: str) -> str:
    """The file of the repository that a page of the site shows."""
    if not src_uri.startswith(f"{OUTSIDE}/"):
        return f"{DOCS}/{src_uri}"
    path = src_uri.removeprefix(f"{OUTSIDE}/")
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def outside_file(path: str, config: MkDocsConfig) -> File:
    content = (ROOT / path).read_bytes()
    if place_of(path) != f"{OUTSIDE}/{path}":
        language = LANGUAGES.get(Path(path).suffix, "text")
        content = f"# {Path(path).name}\n\n`{path}`\n\n````{language}\n{content.decode()}\n````\n".encode()
    made = File.generated(config, place_of(path), content=content)
    made.inclusion = made.inclusion.NOT_IN_NAV
    return made
