"""Files that are read again when they change, while the server runs: a broken one never replaces one that works."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from holdfast.env.clock import Clock
from holdfast.env.file_facts import file_facts
from holdfast.errors import HoldfastError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

LOOK_EVERY_MS: Final = 1_000


class Reloaded(Generic[_T]):
    """What some files say, looked at again at most once a second, when somebody asks."""

    def __init__(self, files: Sequence[str], load: Callable[[], _T], clock: Clock, *, what: str) -> None:
        self._files = files
        self._load = load
        self._clock = clock
        self._what = what
        # The facts go first: a change while the files are read is seen at the next look.
        self._facts = self._look()
        self._looked_ns = clock.monotonic_ns()
        self._value = load()
        self.problem = ""  # why the files, as they are now, cannot be used

    def current(self) -> _T:
        """What holds now. Where the files have changed into something that cannot be used, what held before."""
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._looked_ns >= LOOK_EVERY_MS * 1_000_000:
            self._looked_ns = now_ns
            facts = self._look()
            if facts != self._facts or self.problem:  # what failed may have been of the moment: too many open files
                self._facts = facts
                self._reload()
        return self._value

    def _look(self) -> list[object]:
        return [file_facts(path) for path in self._files]

    def _reload(self) -> None:
        facts = {"what": self._what, "files": list(self._files)}
        try:
            self._value = self._load()
        except HoldfastError as error:
            if str(error) != self.problem:  # told once
                _log.error("a changed file cannot be used; what it said before still holds: %s", error, extra=facts)
            self.problem = str(error)
        else:
            self.problem = ""
            _log.info("%s were read again", self._what, extra=facts)
