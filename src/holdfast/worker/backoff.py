"""How long to wait before something that failed is tried again."""

from __future__ import annotations

import math
from typing import Final

from holdfast.env import Ids

_FIRST_S: Final = 0.1
_MOST_S: Final = 30.0


class Backoff:
    """Twice as long each time, up to a limit; up to a half of it by chance, so that many do not come back at once."""

    def __init__(self, ids: Ids, most_s: float = _MOST_S) -> None:
        self._ids = ids
        self._most_s = most_s
        self._tries = 0

    def next_s(self) -> float:
        """How long to wait this time."""
        full_s = min(math.ldexp(_FIRST_S, min(self._tries, 20)), self._most_s)
        self._tries += 1
        return full_s * (1 - self._ids.random_u32() / 2**33)

    def reset(self) -> None:
        """It went well."""
        self._tries = 0
