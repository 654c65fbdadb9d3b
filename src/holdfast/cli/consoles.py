"""Rich's console as our commands use it. It takes a while to load: only what prints for people does."""

from __future__ import annotations

import errno
import os
from typing import Final, NoReturn

from rich.console import Console

# What reads from a pipe has no edge that text must end at.
_PIPE_CELLS: Final = 1_000


class OurConsole(Console):
    """Nothing in a message is markup, and a reader that went away is an error like any other."""

    def __init__(self, *, stderr: bool) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, stderr=stderr)
        if not stderr and not self.is_terminal and not os.environ.get("COLUMNS"):
            self.width = _PIPE_CELLS

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
