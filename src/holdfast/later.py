"""What takes long to load or to make and is not always used: made on first use.

`from holdfast.later import difflib` gives what `import difflib` gives, and loads it when something of it is used for
the first time. `pattern` does the same for regular expressions. A command that puts one message into a folder runs no
event loop and corrects no misspelt name; without this, it would spend most of its time on getting ready for both.

Modules that are not pure, such as asyncio and logging, are in `holdfast.env.process`.
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


def on_demand(name: str) -> Any:
    """Return a module of this package that most calls do not need.

    A process that runs one command loads it on first use. Others load it at once: later, they may have no descriptor
    left to read it with, or fork while it is being loaded.
    """
    return module(name) if _one_command else importlib.import_module(name)


_one_command = False


def run_one_command() -> None:
    """Make this a process that runs one command and ends; call it before anything else is loaded."""
    global _one_command  # noqa: PLW0603
    _one_command = True


def runs_one_command() -> bool:
    """Whether this process runs one command and ends."""
    return _one_command


if TYPE_CHECKING:
    import difflib
    import hashlib
    import hmac
    import json
    import shlex
    import tomllib
    import traceback
    import urllib.parse as urllib_parse
    from re import compile as pattern
else:

    def pattern(expression: str | bytes, flags: int = 0) -> Later:
        """Return a regular expression that is compiled on first use."""
        return Later(re.compile, expression, flags)

    difflib = module("difflib")
    hashlib = module("hashlib")
    hmac = module("hmac")
    json = module("json")
    shlex = module("shlex")
    tomllib = module("tomllib")
    traceback = module("traceback")
    urllib_parse = module("urllib.parse")

__all__ = [
    "Later",
    "difflib",
    "hashlib",
    "hmac",
    "json",
    "module",
    "names",
    "on_demand",
    "pattern",
    "run_one_command",
    "runs_one_command",
    "shlex",
    "tomllib",
    "traceback",
    "urllib_parse",
]
