"""Which names a token is good for: `*` stands for any characters, `?` for one, everything else for itself."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from typing import Final

EVERYTHING: Final = "*"


class Patterns:
    """Names are compared whole, letter by letter, as the call names them: nothing in them is a path or an escape."""

    __slots__ = ("_compiled", "everything", "texts")

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts: Final = tuple(texts)
        # Only the two signs: what fnmatch makes of brackets would be one more thing to get wrong.
        self._compiled = [re.compile(fnmatch.translate(text.replace("[", "[[]"))) for text in self.texts]

        self.everything: Final = EVERYTHING in self.texts

    def match(self, name: str) -> bool:
        return self.everything or any(pattern.match(name) for pattern in self._compiled)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Patterns) and self.texts == other.texts

    def __hash__(self) -> int:
        return hash(self.texts)
