r"""Regular expressions that cannot be made to run for ever: RE2, whose time grows with the text and no faster.

Python's `re` tries one way after another, and a pattern such as `(a+)+$` has twice as many for each letter more. RE2
follows all ways at once. It has no look-arounds and no back-references, which need the other kind of engine; `\d`,
`\w`, `\s` and `\b` mean ASCII (`\pL` is any letter, `\pN` any digit), and `$` is the very end of the text.

Each letter of the text costs at most one step for each instruction of the program that a pattern is made into. Both
are limited, so that one search ends within a second whatever it is given; and so are those in one message together.
"""

from __future__ import annotations

import re
from typing import Any, Final

from holdfast.errors import InvalidRequest

MAX_PATTERN_CHARACTERS: Final = 1_000
MAX_INSTRUCTIONS: Final = 2_000
# Instructions times bytes of the text, for all that is looked for in one message.
MAX_STEPS: Final = 25_000_000

_MEMORY_BYTES: Final = 1 << 20
_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
# RE2 reads UTF-8, which has no surrogates; they stand for bytes that are not UTF-8. So they are moved, in text and
# pattern alike, to where nothing else is: the end of the last private plane.
_SURROGATES: Final = {0xD800 + number: 0x10F800 + number for number in range(0x800)}
# What RE2 says of a part, and what that is called.
_LACKING: Final = (
    (r"\(\?<?[=!]", "look-arounds"),
    (r"\\[1-9]|\(\?P=", "back-references"),
    (r"\(\?\(", "conditions"),
    (r"\(\?>", "atomic groups"),
    (r"\(\?#", "comments"),
    (r"\(\?[a-zA-Z]", "flags other than i, m, s and U"),
)


class Expression:
    """A regular expression, ready for use."""

    def __init__(self, pattern: str) -> None:
        self.pattern: Final = pattern
        self._compiled = _compiled(pattern)
        self._most_bytes = MAX_STEPS // self._compiled.programsize

    def steps(self, text: str) -> int:
        """How many steps a search in the text may take."""
        return int(self._compiled.programsize) * len(_encoded(text))

    def found_in(self, text: str) -> bool:
        """Whether it matches anywhere in the text."""
        return self._compiled.search(self._read(text)) is not None

    def matches(self, text: str) -> bool:
        """Whether it matches the whole text."""
        return self._compiled.fullmatch(self._read(text)) is not None

    def _read(self, text: str) -> bytes:
        content = _encoded(text)
        if len(content) > self._most_bytes:
            raise InvalidRequest(
                f"the regular expression {_shown(self.pattern)} is too large for a text of {len(content)} bytes: it "
                f"may be used on {self._most_bytes}. Use a shorter one, or smaller repetitions such as {{9}}"
            )
        return content


def _compiled(pattern: str) -> Any:
    import re2  # takes a while, and few need it

    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise InvalidRequest(f"it has {len(pattern)} characters, at most {MAX_PATTERN_CHARACTERS} are allowed")
    if number := re.search(r"\{[0-9]{10,}", pattern):  # RE2 takes it for plain text
        raise InvalidRequest(f"no repetition can be as large as {_shown(number[0])}")
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.max_mem = _MEMORY_BYTES
    try:
        compiled = re2.compile(_encoded(_ESCAPE.sub(_escape, pattern)), options)
    except re2.error as error:
        raise InvalidRequest(_reason(pattern, error)) from None
    if compiled.programsize > MAX_INSTRUCTIONS:
        raise InvalidRequest(
            f"it makes a program of {compiled.programsize} instructions, at most {MAX_INSTRUCTIONS} are allowed; use "
            "fewer and smaller repetitions such as {9}"
        )
    return compiled


def _escape(found: re.Match[str]) -> str:
    """What Python's `re` writes otherwise than RE2: characters by number, and the end of the text."""
    text = found[1]
    if text[0] in "uU" and len(text) > 1:
        code = int(text[1:], 16)
        return rf"\x{{{_SURROGATES.get(code, code):x}}}"
    return r"\z" if text == "Z" else found[0]


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.translate(_SURROGATES).encode()


def _reason(pattern: str, error: Exception) -> str:
    said = error.args[0].decode(errors="replace") if error.args and isinstance(error.args[0], bytes) else str(error)
    said = said.translate({new: old for old, new in _SURROGATES.items()})
    what, _, part = said.partition(": ")
    if what in ("invalid perl operator", "invalid escape sequence"):
        there = [pattern[found.start() :] for found in re.finditer(re.escape(part), pattern)]
        for start, name in _LACKING:
            found = next(filter(None, (re.match(start, text) for text in there)), None)
            if found is not None:
                return f"{name} such as {found[0]} are not supported by RE2, whose time is bounded"
    if "too large" in said:
        return "it is too large; use fewer and smaller repetitions such as {9}"
    return said


def _shown(pattern: str) -> str:
    return pattern if len(pattern) <= 50 else f"{pattern[:50]}…"
