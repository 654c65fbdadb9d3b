"""As much of Markdown as the docs tests need: headings, code blocks, code spans, links."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

_FENCE = re.compile(r"^(?P<indent> *)(?P<mark>`{3,}|~{3,})(?P<info>[^`]*)$")
_HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*$")
_SPAN = re.compile(r"(`+)(.+?)\1")
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+[\"'(][^)]*)?\)")
_DEFINITION = re.compile(r"^ {0,3}\[[^\]]+\]:\s+<?(\S+?)>?(?:\s|$)")
_HTML_LINK = re.compile(r"<(?:a|img)\b[^>]*?\b(?:href|src)=\"([^\"]+)\"")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_NOT_RUN = re.compile(r"^\s*<!--\s*not run:\s*\S.*-->\s*$")


class Block(NamedTuple):
    """A fenced block: its language, the line of its first code line, its code."""

    language: str
    line: int
    code: str
    skipped: bool


class Heading(NamedTuple):
    """A heading, its depth (1 for #) and its line."""

    depth: int
    text: str
    line: int


def blocks(text: str) -> list[Block]:
    """The fenced blocks. `<!-- not run: why -->` on the line above marks one that is not executed."""
    found: list[Block] = []
    lines = text.splitlines()
    before = ""
    at = 0
    while at < len(lines):
        opening = _FENCE.match(lines[at])
        if opening is None:
            before = lines[at] if lines[at].strip() else before
            at += 1
            continue
        first = at + 1
        at = first
        while at < len(lines) and not _closes(lines[at], opening["mark"]):
            at += 1
        code = textwrap.dedent("\n".join(lines[first:at])) + "\n"
        language = (opening["info"].split() or [""])[0].lower()
        found.append(Block(language, first + 1, code, bool(_NOT_RUN.match(before))))
        before = ""
        at += 1
    return found


def _closes(line: str, mark: str) -> bool:
    stripped = line.strip()
    return len(stripped) >= len(mark) and set(stripped) == {mark[0]}


def _prose(text: str) -> list[str]:
    """The lines, with those of fenced blocks emptied, so that numbers stay right."""
    lines = text.splitlines()
    for block in blocks(text):
        size = block.code.count("\n")
        for number in range(block.line - 1, min(block.line + size, len(lines) + 1)):
            lines[number - 1] = ""
    return lines


def headings(text: str) -> list[Heading]:
    """The headings that begin with #."""
    return [
        Heading(len(match[1]), match[2], number)
        for number, line in enumerate(_prose(text), start=1)
        if (match := _HEADING.match(line))
    ]


def anchors(text: str) -> set[str]:
    """What a link may name behind a #, as code hosting sites derive it from headings."""
    found: set[str] = set(re.findall(r"<a\s+(?:id|name)=\"([^\"]+)\"", text))
    for heading in headings(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.text)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        again = 0
        while (name := f"{slug}-{again}" if again else slug) in found:
            again += 1
        found.add(name)
    return found


def section(text: str, *, titled: str) -> str | None:
    """The part below the heading that holds `titled` as a code span, up to the next such heading.

    A deeper heading belongs to the section unless it begins one of its own with a code span."""
    lines = text.splitlines()
    start: Heading | None = None
    for heading in headings(text):
        if start is None:
            if titled in spans(heading.text):
                start = heading
        elif heading.depth <= start.depth or spans(heading.text):
            return "\n".join(lines[start.line - 1 : heading.line - 1])
    return None if start is None else "\n".join(lines[start.line - 1 :])


def spans(text: str) -> list[str]:
    """The code spans of some lines, without their backticks."""
    return [match[2].strip() for line in _prose(text) for match in _SPAN.finditer(line)]


def code(text: str) -> str:
    """Everything written as code: spans and blocks."""
    return "\n".join([*spans(text), *(block.code for block in blocks(text))])


def links(text: str) -> Iterator[tuple[int, str]]:
    """The targets of all links and images, with their lines."""
    bare = _COMMENT.sub(lambda match: "\n" * match[0].count("\n"), "\n".join(_prose(text)))
    for number, line in enumerate(bare.splitlines(), start=1):
        plain = _SPAN.sub(lambda match: "x" * len(match[0]), line)
        for pattern in (_LINK, _DEFINITION, _HTML_LINK):
            for match in pattern.finditer(plain):
                yield number, match[1]
