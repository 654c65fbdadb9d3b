"""What takes long to load or to make and is not always used: made on first use.

`from holdfast.later import difflib` gives what `import difflib` gives, and loads it when something of it is used for
the first time. `pattern` does the same for regular expressions. A command that puts one message into a folder runs no
event loop and corrects no misspelt name; without this, it would spend most of its time on getting ready for both.

`get_logger` is `logging.getLogger`, except in a process that runs one quick command: there, logging is loaded for the
first thing that is logged. Other processes load it at once: a warning must not need a file when none can be opened.

Modules that are not pure, such as asyncio, are in `holdfast.env.process`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any


class Later:
    """Stands for an object. What was used of it is kept here, so that later uses are as fast as with itself."""

    def __init__(self, make: Any, *arguments: Any) -> None:
        self.__dict__["_make"] = make
        self.__dict__["_arguments"] = arguments

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__[name] = getattr(self._make(*self._arguments), name)
        return found


def module(name: str) -> Later:
    """Return what stands for a module until it is used."""
    return Later(importlib.import_module, name)


def names(package: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package whose names are in these modules of it."""

    def load(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(where[name]), name)

    return load


_quick = False


def run_one_command() -> None:
    """Make this a process that runs one command and ends: it loads logging only if it logs."""
    global _quick  # noqa: PLW0603
    _quick = True


def load_logging() -> None:
    """Load logging, unless this process runs one command."""
    if not _quick:
        importlib.import_module("logging")


def _make_logger(name: str) -> Any:
    return importlib.import_module("logging").getLogger(name)


if TYPE_CHECKING:
    import difflib
    import hashlib
    import hmac
    import json
    import logging
    import shlex
    import tomllib
    import traceback
    import urllib.parse as urllib_parse
    from logging import getLogger as get_logger  # noqa: N813
    from re import compile as pattern
else:

    def pattern(expression: str | bytes, flags: int = 0) -> Later:
        """Return a regular expression that is compiled on first use."""
        return Later(re.compile, expression, flags)

    def get_logger(name: str) -> Any:
        """Return the logger of this name, or what stands for it in a process that runs one command."""
        return Later(_make_logger, name) if _quick else _make_logger(name)

    difflib = module("difflib")
    hashlib = module("hashlib")
    hmac = module("hmac")
    json = module("json")
    logging = module("logging")
    shlex = module("shlex")
    tomllib = module("tomllib")
    traceback = module("traceback")
    urllib_parse = module("urllib.parse")

__all__ = [
    "Later",
    "difflib",
    "get_logger",
    "hashlib",
    "hmac",
    "json",
    "load_logging",
    "logging",
    "module",
    "names",
    "pattern",
    "run_one_command",
    "shlex",
    "tomllib",
    "traceback",
    "urllib_parse",
]
