"""Errors without their details, so that a thousand failures of one kind count as one.

The rules are one table that Python and Spark read alike: `fingerprint` is the plain form, `fingerprint_column`
the same for a column without a Python worker. They keep to what both dialects of regular expressions share.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import Column

MOST_CHARACTERS: Final = 300

_TRACEBACK: Final = "Traceback (most recent call last)"
_BLANKS: Final = " \t\r\n"

# `\b` means other things in other Java versions; these mean the same everywhere.
_BEGIN: Final = r"(?<![A-Za-z0-9_])"
_END: Final = r"(?![A-Za-z0-9_])"
_HEX: Final = r"[0-9a-fA-F]"
_OCTET: Final = r"[0-9]{1,3}"

# In this order: what looks like several things is taken for the most telling one.
RULES: Final = (
    (rf"{_BEGIN}{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}{_END}", "<uuid>"),
    (
        rf"{_BEGIN}[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}"
        r"(?:[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]+)?)?(?:Z|[+-][0-9]{2}:?[0-9]{2})?)?" + _END,
        "<time>",
    ),
    (rf"{_BEGIN}[a-zA-Z][a-zA-Z0-9+.-]*://[^ \t'\"<>()]*[^ \t'\"<>(),.;:!?]", "<url>"),
    (rf"{_BEGIN}[A-Za-z0-9_.+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+", "<email>"),
    # An apostrophe inside a word opens no quotation.
    (rf"{_BEGIN}[bBrRuUfF]?'(?:[^'\\]|\\.)*'{_END}", "<text>"),
    (rf"{_BEGIN}[bBrRuUfF]?\"(?:[^\"\\]|\\.)*\"{_END}", "<text>"),
    (r"`[^`]*`", "<text>"),
    (rf"{_BEGIN}{_OCTET}(?:\.{_OCTET}){{3}}(?::[0-9]+)?{_END}", "<address>"),
    (rf"\[{_HEX}*:[0-9a-fA-F:]+\](?::[0-9]+)?", "<address>"),
    (rf"{_BEGIN}{_HEX}{{1,4}}(?::{_HEX}{{1,4}}){{7}}{_END}", "<address>"),
    (rf"{_BEGIN}localhost:[0-9]+{_END}", "<address>"),
    (rf"{_BEGIN}[A-Za-z]:\\[^ \t'\":*?<>|]+", "<path>"),
    (r"(?<![A-Za-z0-9_.<>/~])(?:~|\.{1,2})?(?:/[A-Za-z0-9_.@+%=-]*[A-Za-z0-9_@+%=-])+/?", "<path>"),
    (rf"{_BEGIN}0[xX]{_HEX}+{_END}", "<hex>"),
    (rf"{_BEGIN}(?=[0-9]*[a-fA-F])(?=[a-fA-F]*[0-9]){_HEX}{{8,}}{_END}", "<hex>"),
    (rf"{_BEGIN}[+-]?[0-9]+(?:[.,][0-9]+)*(?:[eE][+-]?[0-9]+)?", "<number>"),
    (r"[0-9]+(?:[.,][0-9]+)*", "<number>"),
    # A list is a list, however long.
    (r"<number>(?:, ?<number>)+", "<number>, ..."),
    (r"<text>(?:, ?<text>)+", "<text>, ..."),
    (r"[ \t\r]+", " "),
)

_COMPILED: Final = tuple((re.compile(pattern), replacement) for pattern, replacement in RULES)


def fingerprint(error: str) -> str:
    """The kind of an error: its first line (of a bare traceback the last), without what differs each time."""
    lines = error.strip(_BLANKS).split("\n")
    text = lines[-1] if lines[0].startswith(_TRACEBACK) else lines[0]
    for pattern, replacement in _COMPILED:
        text = pattern.sub(replacement, text)
    return text.strip(" ")[:MOST_CHARACTERS]


def fingerprint_column(error: Column) -> Column:
    """The same of a column; null is taken for no error."""
    from pyspark.sql import functions as f

    lines = f.split(f.btrim(f.coalesce(error, f.lit("")), f.lit(_BLANKS)), "\n")
    first = f.element_at(lines, 1)
    text = f.when(first.startswith(_TRACEBACK), f.element_at(lines, -1)).otherwise(first)
    for pattern, replacement in RULES:
        text = f.regexp_replace(text, pattern, replacement)
    return f.btrim(text, f.lit(" ")).substr(1, MOST_CHARACTERS)
