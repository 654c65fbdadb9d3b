"""The console that commands print on. Rich is slow to import, so only commands that print for people load this."""

from __future__ import annotations

import errno
import os
from typing import Final, NoReturn

from rich.console import Console

# The width for pipes, which need no line breaks.
_PIPE_CELLS: Final = 1_000


class OurConsole(Console):
    """A console that treats no text as markup, and raises if its reader is gone."""

    def __init__(self, *, stderr: bool) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, stderr=stderr)
        if not stderr and not self.is_terminal and not os.environ.get("COLUMNS"):
            self.width = _PIPE_CELLS

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
